"""Recompute by policy: activations are dropped after forward and computed again before backward.

Twin of ``reference_torch/recompute``, which empties and refills storages where ``jax.checkpoint`` is given a policy
here. What is dropped is decided in ``diptych/plans/recompute.py``: every block of layers that drops something is one
``jax.checkpoint`` whose policy keeps each value named there but those dropped. Values without a name are
computed again where the names kept around them allow it; they cost no matrix product.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name, checkpoint_policies
from jax.extend.core import Literal, jaxprs_in_params

from diptych.plans.config import TransformerConfig
from diptych.plans.recompute import VALUES, RecomputeBlock, recompute_blocks
from jax_impl.handing import collecting


def name_value(x: Array, name: str) -> Array:
    """x itself, known to policies and to residual_report as ``name``.

    Raises:
        ValueError: the name is not in diptych.plans.recompute.VALUES.
    """
    if name not in VALUES:
        raise ValueError(f"name: expected one of {VALUES}, got {name!r}")
    x, listener = checkpoint_name(x, name), _LISTENER.get()
    return x if listener is None else listener(x, name)


def recompute_policy(config: TransformerConfig, block: RecomputeBlock | None = None) -> Callable[..., Any]:
    """A policy for jax.checkpoint: keep every named value but those that are dropped.

    Args:
        config: the model's.
        block: whose dropped values; None: the first block of the model that drops any.
    """
    if block is None:
        blocks = recompute_blocks(config)
        block = next((b for b in blocks if b.kind != "none"), blocks[0])
    return checkpoint_policies.save_only_these_names(*(name for name in VALUES if name not in block.dropped))


def checkpoint_blocks(
    layer_fn: Callable[[int, Array], Array],
    config: TransformerConfig,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> Callable[[Array], Array]:
    """All layers of a stage, recomputed as diptych.plans.recompute says.

    Args:
        layer_fn: runs the layer of a global number on hidden states [B, T, ...].
        config: the whole model's.
        vp_stage: index of the virtual stage within its rank; None: 0.
        pp_rank: pipeline rank; None: 0.
    """

    def run_block(block: RecomputeBlock, hidden_states: Array) -> Array:
        for number in block.layers:
            hidden_states = layer_fn(number, hidden_states)
        return hidden_states

    def run(hidden_states: Array) -> Array:
        for block in recompute_blocks(config, vp_stage, pp_rank):
            layers = partial(run_block, block)
            if block.kind != "none":
                again = partial(jax.checkpoint, policy=recompute_policy(config, block))  # pyright: ignore[reportPrivateImportUsage]
                layers = collecting(layers, again)
            hidden_states = name_value(layers(hidden_states), "residual_streams")
        return hidden_states

    return run


class KeptValue(NamedTuple):
    """A named value kept from forward to backward."""

    shape: tuple[int, ...]
    """Of the first one of the name."""
    dtype: str
    bytes: int
    """Of all of the name together."""


def residual_report(fn: Callable[..., Array], *args: Any) -> dict[str, KeptValue]:
    """The named values that are kept for backward once ``fn(*args)`` has returned.

    Read from the program that jax.vjp makes: its results, besides fn's own, are the residuals. Of a value named in the
    body of jax.lax.scan all iterations' are kept, stacked, and counted. XLA may still compute one again, or keep
    something more.

    Returns:
        Name, in order of diptych.plans.recompute.VALUES, to shape of its first value, dtype and bytes of all.
    """
    program = jax.make_jaxpr(lambda *inputs: jax.vjp(fn, *inputs)[1])(*args).jaxpr
    origins = _origins(program, {})
    kept = dict.fromkeys(origins[v] for v in program.outvars if not isinstance(v, Literal) and v in origins)
    report: dict[str, KeptValue] = {}
    for variable, name in kept:
        shape, dtype = variable.aval.shape, variable.aval.dtype
        earlier = report.get(name, KeptValue(shape, str(dtype), 0))
        report[name] = earlier._replace(bytes=earlier.bytes + int(np.prod(shape)) * dtype.itemsize)
    return {name: report[name] for name in VALUES if name in report}


_SAME_VALUE = frozenset(
    {"reduce_precision", "reshape", "broadcast_in_dim", "squeeze", "transpose", "slice", "split", "expand_dims", "copy"}
)
"""Operations whose result is a view of what they read: where it is kept, what they read is."""


def _origins(program: Any, known: Mapping[Any, tuple[Any, str]]) -> dict[Any, tuple[Any, str]]:
    """For every variable that is a named value or a view of one: that value's variable, and its name.

    Args:
        program: a jaxpr.
        known: origins of the program's inputs, where they have one.
    """
    origins = dict(known)
    for equation in program.eqns:
        kind, source = equation.primitive.name, equation.invars[0] if equation.invars else None
        if kind == "name":
            origins[source] = (source, equation.params["name"])
            origins[equation.outvars[0]] = origins[source]
        elif kind in _SAME_VALUE and not isinstance(source, Literal) and source in origins:
            origins |= dict.fromkeys(equation.outvars, origins[source])
        elif kind == "optimization_barrier":
            passed = zip(equation.invars, equation.outvars, strict=True)
            origins |= {o: origins[i] for i, o in passed if not isinstance(i, Literal) and i in origins}
        for inner in jaxprs_in_params(equation.params):  # a call: what it hands through, or names
            given = equation.invars[1:] if kind == "cond" else equation.invars  # a branch is not given the choice
            if len(inner.invars) == len(given) and len(inner.outvars) == len(equation.outvars):
                origins |= _origins_of_call(equation, inner, given, origins)
    return origins


def _origins_of_call(
    equation: Any, inner: Any, given: Sequence[Any], origins: Mapping[Any, tuple[Any, str]]
) -> dict[Any, tuple[Any, str]]:
    """Of the results of a call, a branch or a loop: where they are a named value, or hold it of every iteration.

    Args:
        equation: which calls.
        inner: the jaxpr that it calls.
        given: what the jaxpr's inputs are, of the equation's.
        origins: of variables outside.
    """
    kind, params, inputs = equation.primitive.name, equation.params, list(zip(inner.invars, given, strict=True))
    first, stacked = 0, len(equation.outvars)
    if kind == "scan":  # from there on inputs are slices, and results are stacked
        stacked, constants = params["num_carry"], params["num_consts"]
        first = constants + stacked
        inputs = inputs[:constants] + inputs[first:]  # a carry is what was given in the first iteration alone
    within = _origins(inner, {i: origins[o] for i, o in inputs if not isinstance(o, Literal) and o in origins})
    outside = {within[i][0] for i in inner.invars[first:] if i in within}
    found, own = {}, {}
    for place, (o, i) in enumerate(zip(equation.outvars, inner.outvars, strict=True)):
        if isinstance(i, Literal) or i not in within:
            continue
        variable, name = within[i]
        is_new = place >= stacked or kind == "cond"
        found[o] = own.setdefault(variable, (o, name)) if is_new and variable not in outside else within[i]
    return found


# For those who cut a backward open themselves: what is kept, by hand.

_LISTENER: ContextVar[Callable[[Array, str], Array] | None] = ContextVar("listener of named values", default=None)


@contextlib.contextmanager
def _listening(listener: Callable[[Array, str], Array]) -> Iterator[None]:
    before = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(before)


def run_keeping(function: Callable[..., Array], dropped: frozenset[str], *args: Any) -> tuple[Array, list[Array]]:
    """``function(*args)``, and its named values but the dropped ones, in the order in which they are named."""
    kept: list[Array] = []

    def keep(x: Array, name: str) -> Array:
        if name not in dropped:
            kept.append(x)
        return x

    with _listening(keep):
        return function(*args), kept


def run_given(
    function: Callable[..., Array], dropped: frozenset[str], values: Sequence[Array], *args: Any
) -> tuple[Array, Callable[[Array], Any]]:
    """``function(*args)`` again, and its pull-back, from named values that were kept.

    What only led to a kept value is not computed; its derivative is that of the value it stands for.

    Args:
        function: as given to run_keeping.
        dropped: names whose values are computed again.
        values: by run_keeping.
        args: of the function; the pull-back gives the gradient of each.
    """

    def run(*args: Any) -> Array:
        left = iter(values)
        with _listening(lambda x, name: x if name in dropped else _stand_in(x, next(left))):
            return function(*args)

    return jax.vjp(run, *args)


@jax.custom_jvp
def _stand_in(computed: Array, kept: Array) -> Array:
    """The value that was kept, in the place of one computed again."""
    return kept


@_stand_in.defjvp
def _stand_in_derivative(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    return primals[1], tangents[0]


class VaryingLeaf(NamedTuple):
    """A result that is made of what varies."""

    like: jax.ShapeDtypeStruct
    places: tuple[int, ...]
    """Of the results equal to it."""


def varying_leaves(function: Callable[..., Sequence[Any]], args: Any, varies: Any) -> list[VaryingLeaf]:
    """Those results of ``function(*args)`` that are made of what varies; the others follow from the rest of args.

    Of a pull-back's leaves these are what has to be kept where parameters are there anyway.

    Args:
        function: gives arrays.
        args: its arguments, or their shapes.
        varies: of the same structure, True or False for each array.
    """
    traced = jax.make_jaxpr(function)(*args).jaxpr
    varying = {v for v, moves in zip(traced.invars, jax.tree.leaves(varies), strict=True) if moves}
    for equation in traced.eqns:
        if any(not isinstance(v, Literal) and v in varying for v in equation.invars):
            varying.update(equation.outvars)
    places: dict[Any, list[int]] = {}
    for place, variable in enumerate(traced.outvars):
        if not isinstance(variable, Literal) and variable in varying:
            places.setdefault(variable, []).append(place)
    return [
        VaryingLeaf(jax.ShapeDtypeStruct(variable.aval.shape, variable.aval.dtype), tuple(equal))
        for variable, equal in places.items()
    ]


def with_leaves(pull_back: Any, leaves: Sequence[VaryingLeaf], values: Sequence[Array]) -> Any:
    """A pull-back with other leaves: those that vary, in the order of varying_leaves."""
    found, structure = jax.tree.flatten(pull_back)
    for leaf, value in zip(leaves, values, strict=True):
        for place in leaf.places:
            found[place] = value
    return jax.tree.unflatten(structure, found)


def places_read(function: Callable[..., Any], *args: Any) -> list[bool]:
    """For every array of args, whether a result of ``function(*args)`` is made of it."""
    program = jax.make_jaxpr(function)(*args).jaxpr
    read = {v for v in program.outvars if not isinstance(v, Literal)}
    for equation in reversed(program.eqns):
        if not read.isdisjoint(equation.outvars):
            read.update(v for v in equation.invars if not isinstance(v, Literal))
    return [v in read for v in program.invars]
