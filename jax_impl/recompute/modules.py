"""Recompute of named submodules of any nnx model, and of named values of any function, without changes to their code.

``recompute_modules`` gives the chosen submodules, and the blocks that contain them, a subclass of their class. A block
runs in jax.checkpoint, which saves everything for backward except the results of opaque calls. A chosen submodule is
such a call, and its only residuals are its inputs. The mirror for PyTorch is ``reference_torch/recompute/modules.py``.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import Array
from jax.extend.core import Literal, jaxprs_in_params

from diptych.plans.module_patterns import matching, select_within
from diptych.plans.recompute import ModuleBytes
from jax_impl.named_modules import call_through, change_class, is_node, named_modules, restore_classes, subclass_with
from jax_impl.recompute.inner_checkpoints import keep_inner_checkpoints
from jax_impl.recompute.names import drop_names
from jax_impl.recompute.opaque_call import except_opaque_calls, without_residuals

PREFIX = "recompute_modules/"
"""Beginning of the names of scopes, by which report knows modules."""
_LABEL = "recompute_label"
"""Attribute of a module with recompute: the pattern of its name, equal for all modules of a pattern, so that modules
with equal structure can still be stacked."""
_OUTSIDE = "outside"
_INSIDE = "inside"
_OFF = "off"
_place_of_call = jax.make_user_context(_OUTSIDE)
"""The place of a call: outside of a block, inside, or with recompute switched off. It is part of the keys of JAX's
caches, so that a program that was traced in one place is not used in another."""


class RecomputedModules:
    """The recompute that recompute_modules has added to a model."""

    def __init__(self, model: nnx.Module, blocks: Mapping[str, tuple[str, ...]], labels: Mapping[str, str]) -> None:
        self._model = model
        self.blocks = dict(blocks)
        """Names of the recomputed submodules by the name of their block."""
        self._labels = dict(labels)
        found = dict(named_modules(model))
        self._changed: dict[str, nnx.Module] = {}
        for name in [*blocks, *(name for names in blocks.values() for name in names)]:
            module = found[name]
            if not any(module is changed for changed in self._changed.values()):
                self._changed[name] = module
                kind = _block_class if name in blocks else _recomputed_class
                change_class(module, kind(type(module)))
                setattr(module, _LABEL, labels[name])

    def remove(self) -> None:
        """Restore the classes of the modules. A second call does nothing.

        Raises:
            ValueError: a module got another class later; undo that first.
        """
        restore_classes(self._changed, (_block_class, _recomputed_class), "remove", "recompute_modules")
        for module in self._changed.values():
            delattr(module, _LABEL)
        self._changed = {}

    def report(self, *inputs: Any, **options: Any) -> dict[str, ModuleBytes]:
        """Return the bytes that modules hold for backward without and with recompute. Nothing is computed.

        Parameters and inputs do not count. XLA decides which values a compiled step really keeps.

        Args:
            inputs: positional arguments of the model.
            options: keyword arguments of the model.

        Returns:
            Bytes by pattern: for each chosen submodule, for each block without its chosen submodules, and under
            ``""`` for the rest of the model. The sums are the bytes of the whole model.

        Raises:
            ValueError: recompute was removed.
        """
        if not self._changed:
            raise ValueError(
                "report: expected recompute that was not removed, got removed recompute; call report before remove"
            )
        places = list(dict.fromkeys(self._labels.values()))
        runs = []
        for place in (_OFF, _OUTSIDE):
            with _place_of_call(place):
                runs.append(_saved_bytes(self._model, places, inputs, options))
        return {name: ModuleBytes(runs[0][name], runs[1][name]) for name in dict.fromkeys(["", *places])}


def recompute_modules(model: Any, modules: Any) -> Any:
    """Make submodules drop their outputs and the values saved for backward, and recompute both in backward.

    A function drops values that it names with jax.ad_checkpoint.checkpoint_name.

    Gradients, state and random numbers are those of the plain model. Names of parameters do not change, so checkpoints
    stay valid.

    Example::

        handle = recompute_modules(model, {"blocks.*": ["norm1", "norm2", "mlp.activation"]})  # an nnx model
        forward = recompute_modules(forward, ["gelu*"])  # a function that uses jax.ad_checkpoint.checkpoint_name

    Args:
        model: an nnx.Module, which is changed in place, or a function of arrays and pytrees.
        modules: for an nnx.Module, a dict from patterns of blocks to patterns of their submodules; ``*`` stands for any
            text without a dot, and ``""`` for the whole model. For a function, patterns of the checkpoint names whose
            values are dropped, with ``*`` for any text; other values are saved.

    Returns:
        For an nnx.Module, a handle: remove() undoes all changes, and report(inputs) returns bytes. For a function, the
        function with recompute.

    Raises:
        TypeError: model or modules is of another kind; linen modules are functions here: pass
            ``lambda variables, x: module.apply(variables, x)``.
        ValueError: a pattern matches nothing, matches overlap, or a module has recompute already.

    Reference:
        Chen et al. 2016, https://arxiv.org/abs/1604.06174; the output is dropped as well.
    """
    if not isinstance(model, nnx.Module):
        if not callable(model) or hasattr(model, "apply"):
            raise TypeError(
                f"model: expected an nnx.Module or a function, got {type(model).__name__}; pass a linen module as "
                "lambda variables, x: module.apply(variables, x)"
            )
        return drop_names(model, modules)
    found = dict(named_modules(model))
    blocks = select_within("modules", modules, [*found])
    labels = {}
    for block, names in blocks.items():
        pattern = next(pattern for pattern in modules if matching(pattern, [block]))
        labels[block] = pattern
        prefix = f"{block}." if block else ""
        labels |= {name: f"{pattern}.{name.removeprefix(prefix)}".lstrip(".") for name in names}
    for name in labels:
        if hasattr(found[name], _LABEL):
            raise ValueError(
                f"modules: expected modules without recompute, got {name}, which has it; remove() it first"
            )
    return RecomputedModules(model, blocks, labels)


@cache
def _block_class(kind: type) -> type:
    """Return the subclass of a class for blocks."""

    def call(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(_scope(self)):
            if _place_of_call.value == _OFF:
                return kind.__call__(self, *args, **kwargs)

            def inside(module: nnx.Module, *args: Any, **kwargs: Any) -> Any:
                with _place_of_call(_INSIDE):
                    return kind.__call__(module, *args, **kwargs)

            return call_through(_checkpoint, inside, kind.__name__, (self, *args), kwargs)

    return subclass_with(kind, call)


def _checkpoint(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that saves everything for backward except what opaque calls drop."""
    return jax.checkpoint(keep_inner_checkpoints(run), policy=except_opaque_calls)  # pyright: ignore[reportPrivateImportUsage]


@cache
def _recomputed_class(kind: type) -> type:
    """Return the subclass of a class for chosen submodules."""

    def call(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(_scope(self)):
            if _place_of_call.value != _INSIDE:
                return kind.__call__(self, *args, **kwargs)
            return call_through(without_residuals, kind.__call__, kind.__name__, (self, *args), kwargs)

    return subclass_with(kind, call)


def _scope(module: nnx.Module) -> str:
    """Return the name of a module's scope, by which report attributes values to modules."""
    return PREFIX + (getattr(module, _LABEL) or "model")


def _saved_bytes(model: nnx.Module, places: Sequence[str], inputs: Any, options: Any) -> dict[str, int]:
    """Return the bytes of the residuals of a model, by the place that made them."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    leaves, structure = jax.tree.flatten((inputs, options), is_leaf=is_node)
    places_of_arrays = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Array | np.ndarray)]

    def forward(params: Any, arrays: list[Any]) -> Any:
        found = list(leaves)
        for place, leaf in zip(places_of_arrays, arrays, strict=True):
            found[place] = leaf
        args, kwargs = jax.tree.unflatten(structure, found)
        return nnx.merge(graph, params, rest, copy=True)(*args, **kwargs)

    arrays = [leaves[place] for place in places_of_arrays]
    program = jax.make_jaxpr(lambda params, arrays: jax.vjp(lambda p: forward(p, arrays), params)[1])(params, arrays)
    found = dict.fromkeys(dict.fromkeys(["", *places]), 0)
    inner = program.jaxpr
    outside = {*inner.invars, *inner.constvars}
    for variable in dict.fromkeys(v for v in inner.outvars if not isinstance(v, Literal)):
        if variable not in outside:
            found[_place(_origin(inner, variable), places)] += variable.aval.size * variable.aval.dtype.itemsize
    return found


def _origin(program: Any, variable: Any) -> str:
    """Return the scopes of the operation that made a variable of a jaxpr."""
    for equation in program.eqns:
        if variable in equation.outvars:
            scopes = str(equation.source_info.name_stack)
            place = equation.outvars.index(variable)
            for inner in jaxprs_in_params(equation.params):
                if len(inner.outvars) == len(equation.outvars) and not isinstance(inner.outvars[place], Literal):
                    return f"{scopes}/{_origin(inner, inner.outvars[place])}"
            return scopes
    return ""


def _place(scopes: str, places: Sequence[str]) -> str:
    """Return the innermost place that scopes name."""
    positions = {place: scopes.rfind(PREFIX + (place or "model")) for place in places}
    found = max(positions, key=lambda place: (positions[place], len(place)), default="")
    return found if positions.get(found, -1) >= 0 else ""
