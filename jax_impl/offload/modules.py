"""Offload of named submodules of any nnx model, without changes to its code.

``offload_modules`` places the parameters of the chosen submodules in host memory, and gives the submodules a subclass
of their class. A submodule runs in jax.checkpoint: its copies on the device are results of an opaque call, which are
not saved, so backward copies the parameters again. XLA overlaps the copies with computation. The counterpart in PyTorch
is ``reference_torch/offload/modules.py``.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.extend.core import jaxprs_in_params
from jax.extend.core.primitives import dot_general_p

from diptych.plans.config import TransformerConfig
from diptych.plans.module_patterns import select
from jax_impl.named_modules import call_through, change_class, named_modules, restore_classes, subclass_with
from jax_impl.offload.residency import array_to_device, is_on_host
from jax_impl.recompute.inner_checkpoints import keep_inner_checkpoints
from jax_impl.recompute.opaque_call import except_opaque_calls, reject_ordered_callbacks, without_residuals
from jax_impl.traced_programs import is_array, part_of, trace_inlined, variables

_TO_HOST = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")(
    dot_general_p, dimension_numbers=(((), ()), ((), ()))
)
"""The value that a policy of jax.checkpoint returns for results that move to the host; it has no public name."""
_SETTINGS = "offload_min_bytes"
"""Attribute of a chosen module: results of operations with an operand of at least so many bytes move; None: none."""
_MOVES_OPTIMIZER_STATE = "offload_optimizer_state"
"""Attribute of a chosen module: True if the optimizer state of its parameters moves."""


class OffloadedModules:
    """The offload that offload_modules has added to a model."""

    def __init__(self, modules: Mapping[str, nnx.Module], min_bytes: int | None, optimizer_state: bool) -> None:
        self._modules = dict(modules)
        self._optimizer_state = optimizer_state
        for module in self._modules.values():
            nnx.update(module, jax.tree.map(_to_host, nnx.state(module, nnx.Param)))
            change_class(module, _offloaded_class(type(module)))
            setattr(module, _SETTINGS, min_bytes)
            setattr(module, _MOVES_OPTIMIZER_STATE, optimizer_state)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the chosen submodules."""
        return tuple(self._modules)

    @staticmethod
    def fetch(tree: Any) -> Any:
        """Return a tree with the arrays in host memory copied to the device, for computations with gradients.

        JAX does not compute with arrays in host memory, so clip or add gradients after this.
        """
        return jax.tree.map(array_to_device, tree)

    def update(self, optimizer: nnx.Optimizer, model: nnx.Module, gradients: Any, **kwargs: Any) -> None:
        """Run ``optimizer.update(model, gradients, **kwargs)`` on the device, and move parameters to the host again.

        Args:
            optimizer: any nnx.Optimizer of the model.
            model: the model, one that contains it, or a copy of either in a transformation such as nnx.jit.
            gradients: gradients of nnx.grad, in either memory.
            kwargs: further arguments of the optimizer, such as value=loss.
        """
        trained = nnx.state(model, optimizer.wrt)
        hosted = {tuple(map(str, path)) for path, x in nnx.to_flat_state(trained) if _is_value_on_host(x)}
        chosen = _chosen_parameters(model)
        moved = hosted | {*chosen}
        nnx.update(model, self.fetch(trained))
        nnx.update(optimizer, self.fetch(nnx.state(optimizer)))
        optimizer.update(model, self.fetch(gradients), **kwargs)
        after = nnx.to_flat_state(nnx.state(model, nnx.Param))
        paths = {tuple(map(str, path)) for path, _ in after}
        self._move({path: x for path, x in after if tuple(map(str, path)) in moved and not _is_value_on_host(x)}, model)
        with_moments = {path for path in moved if chosen.get(path, self._optimizer_state)}
        moments = nnx.to_flat_state(nnx.state(optimizer))
        self._move({path: x for path, x in moments if _longest_part(path, paths) in with_moments}, optimizer)

    @staticmethod
    def _move(values: Mapping[Any, Any], owner: nnx.Module | nnx.Optimizer) -> None:
        """Place values of a model or an optimizer, by path, in host memory."""
        nnx.update(owner, nnx.from_flat_state({path: jax.tree.map(_to_host, value) for path, value in values.items()}))

    def close(self) -> None:
        """Restore the classes of the modules, and move their parameters to the device. A second call does nothing.

        Optimizer state in host memory stays there; nnx.update(optimizer, handle.fetch(nnx.state(optimizer))) moves it.

        Raises:
            ValueError: a module got another class later; undo that first.
        """
        restore_classes(self._modules, (_offloaded_class,), "close", "offload_modules")
        for module in self._modules.values():
            delattr(module, _SETTINGS)
            delattr(module, _MOVES_OPTIMIZER_STATE)
            nnx.update(module, self.fetch(nnx.state(module, nnx.Param)))
        self._modules = {}
        self._optimizer_state = False


def offload_modules(
    model: Any,
    modules: Any,
    *,
    activations: bool = False,
    activation_min_bytes: int = TransformerConfig.activation_offload_min_bytes,
    optimizer_state: bool = False,
) -> OffloadedModules:
    """Move parameters of submodules to host memory, and copy each to the device for its use in forward and in backward.

    Their gradients arrive in host memory. Losses, gradients and parameters are those of the plain model.

    Example::

        handle = offload_modules(model, ["blocks.*"], activations=True)

        @nnx.jit
        def train_step(model, optimizer, x):
            loss, gradients = nnx.value_and_grad(loss_fn)(model, x)
            handle.update(optimizer, model, gradients)
            return loss

    Args:
        model: an nnx.Module on its device, which is changed in place.
        modules: patterns of the submodules that move as a whole; ``*`` stands for any text without a dot. Modules that
            no pattern matches stay on the device.
        activations: also move values that the submodules save for backward, except their inputs.
        activation_min_bytes: results of operations whose largest operand has fewer bytes stay on the device.
        optimizer_state: also store the optimizer state of the moved parameters in host memory between steps.

    Returns:
        A handle: update() runs the optimizer, and close() undoes all changes.

    Raises:
        TypeError: model is no nnx.Module, or modules is no list of texts.
        ValueError: a pattern matches nothing, a match is inside another, a module is offloaded already or has no
            parameters, modules that stay and modules that move share a parameter, or activation_min_bytes is invalid.
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(f"model: expected an nnx.Module, got {type(model).__name__}")
    if isinstance(activation_min_bytes, bool) or not isinstance(activation_min_bytes, int) or activation_min_bytes < 0:
        raise ValueError(f"activation_min_bytes: expected a number of bytes, got {activation_min_bytes!r}")
    found = dict(named_modules(model))
    chosen = {name: found[name] for name in select("modules", modules, [*found])}
    for name, module in chosen.items():
        if hasattr(module, _SETTINGS):
            raise ValueError(f"modules: expected modules without offload, got {name}, which has it; close() it first")
        if not jax.tree.leaves(nnx.state(module, nnx.Param)):
            raise ValueError(f"modules: expected modules with parameters, got {name}, which has none")
    _check_sharing(found, chosen)
    return OffloadedModules(chosen, activation_min_bytes if activations else None, optimizer_state)


def _check_sharing(modules: dict[str, nnx.Module], chosen: dict[str, nnx.Module]) -> None:
    """Reject parameters that chosen modules share with others, because those cannot read them from the host."""
    inside = {id(node): node for module in chosen.values() for _, node in nnx.iter_graph(module)}
    shareable = {id(module) for module in chosen.values()}
    shareable |= {key for key, node in inside.items() if not _has_parameters(node)}
    for name, module in modules.items():
        if id(module) in inside:
            continue
        for key, value in _references(vars(module)):
            if id(value) in inside and id(value) not in shareable:
                raise ValueError(
                    f"modules: expected parameters that no other module shares, got {key!r} of "
                    f"{name or 'the model'!r}, which belongs to a chosen module too; choose both modules or neither"
                )


def _chosen_parameters(model: nnx.Module) -> dict[tuple[str, ...], bool]:
    """Return True or False for each parameter of chosen modules, by path in the model: True if its moments move."""
    nodes = list(nnx.iter_graph(model))
    moves_moments = {
        id(node): getattr(module, _MOVES_OPTIMIZER_STATE)
        for _, module in nodes
        if hasattr(module, _MOVES_OPTIMIZER_STATE)
        for _, node in nnx.iter_graph(module)
        if isinstance(node, nnx.Param)
    }
    return {tuple(map(str, path)): moves_moments[id(node)] for path, node in nodes if id(node) in moves_moments}


def _has_parameters(node: Any) -> bool:
    is_module = isinstance(node, nnx.Module)
    return isinstance(node, nnx.Param) or (is_module and bool(jax.tree.leaves(nnx.state(node, nnx.Param))))


def _references(container: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values in a container, also in nested lists and dicts, with their dotted names."""
    items = container.items() if isinstance(container, Mapping) else enumerate(container)
    for key, value in items:
        name = f"{path}.{key}".lstrip(".")
        if isinstance(value, nnx.List | list | tuple | Mapping):
            yield from _references(value, name)
        elif isinstance(value, nnx.Dict):
            yield from _references(vars(value), name)
        else:
            yield name, value


@cache
def _offloaded_class(kind: type) -> type:
    """Return the subclass of a class for offloaded modules."""

    def call(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        min_bytes = getattr(self, _SETTINGS)
        policy = except_opaque_calls if min_bytes is None else partial(_moving, min_bytes)

        def transform(run: Callable[..., Any]) -> Callable[..., Any]:
            return jax.checkpoint(partial(_run_with_copies, run), policy=policy)  # pyright: ignore[reportPrivateImportUsage]

        return call_through(transform, kind.__call__, kind.__name__, (self, *args), kwargs)

    return subclass_with(kind, call)


def _run_with_copies(run: Callable[..., Any], state: Any, *arrays: Any) -> Any:
    """Run a function with copies of the arrays in host memory.

    One opaque call makes the copies and all values that depend on them alone, such as a cast to bfloat16, so that none
    of these is saved for backward.

    Args:
        run: function of the state and the arrays.
        state: state of a module, some of whose arrays are in host memory.
        arrays: array arguments.
    """
    leaves, structure = jax.tree.flatten(state)
    places = [place for place, leaf in enumerate(leaves) if is_on_host(leaf)]
    hosted = [leaves[place] for place in places]
    others = [leaf for place, leaf in enumerate(leaves) if place not in places]
    result: list[Any] = []

    def flat(copies: list[Any], others: list[Any], arrays: Sequence[Any]) -> list[Any]:
        by_place = dict(zip(places, copies, strict=True))
        remaining = iter(others)
        state = [by_place[place] if place in by_place else next(remaining) for place in range(len(leaves))]
        found, treedef = jax.tree.flatten(run(jax.tree.unflatten(structure, state), *arrays))
        result[:] = [treedef]
        return found

    program = trace_inlined(flat, [array_to_device(array) for array in hosted], others, arrays)
    reject_ordered_callbacks(program)
    jaxpr = program.jaxpr
    inputs = jaxpr.invars[: len(hosted)]
    remaining_inputs = jaxpr.invars[len(hosted) :]
    made = dict.fromkeys(inputs)
    first = []
    rest = []
    for equation in jaxpr.eqns:
        read = variables(equation.invars)
        if read and not equation.effects and all(variable in made for variable in read):
            first.append(equation)
            made |= dict.fromkeys(equation.outvars)
        else:
            rest.append(equation)
    needed = {v for equation in rest for v in variables(equation.invars)} | {*variables(jaxpr.outvars)}
    crossing = [variable for variable in made if variable in needed]
    copy = part_of(jaxpr, first, inputs, crossing)
    copies = without_residuals(lambda *hosted: copy(*map(array_to_device, hosted)))(*hosted)
    body = part_of(jaxpr, rest, [*crossing, *remaining_inputs, *jaxpr.constvars], jaxpr.outvars)
    outputs = keep_inner_checkpoints(body)(*copies, *others, *arrays, *program.consts)
    return jax.tree.unflatten(result[0], outputs)


def _moving(min_bytes: int, primitive: Any, *operands: Any, **params: Any) -> Any:
    """Save results of large operands on the host and others on the device, if except_opaque_calls saves them."""
    if not except_opaque_calls(primitive, *operands, **params):
        return False
    results = [len(program.outvars) for program in jaxprs_in_params(params)]
    if primitive.multiple_results and results != [1]:
        return True  # JAX 0.10 raises an error if an operation whose several results move runs outside of jit
    floats = [x for x in operands if jnp.issubdtype(x.dtype, jnp.floating)]
    largest = max((x.size * x.dtype.itemsize for x in floats), default=-1)
    return _TO_HOST if largest >= min_bytes else True


def _is_value_on_host(value: Any) -> bool:
    return any(map(is_on_host, filter(is_array, jax.tree.leaves(value))))


def _longest_part(path: tuple[Any, ...], paths: Collection[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the longest part of a path that is in ``paths``; for a moment, this is the path of its parameter."""
    names = tuple(map(str, path))
    parts = (names[i:j] for i in range(len(names)) for j in range(i + 1, len(names) + 1))
    return max((part for part in parts if part in paths), key=len, default=())


def _to_host(array: Array) -> Array:
    return jax.device_put(array, jax.memory.Space.Host)
