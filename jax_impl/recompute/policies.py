"""Policies of jax.checkpoint for the blocks that diptych/plans/recompute.py defines, and the report of what they save.

Each block of layers that drops a value is one ``jax.checkpoint``, whose policy saves every named value except the
dropped ones. Values without a name are recomputed from the saved ones around them, which costs no matrix product.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name, checkpoint_policies
from jax.extend.core import Literal, jaxprs_in_params

from diptych.plans.activation_storage import dropped_values
from diptych.plans.config import TransformerConfig
from diptych.plans.model.values import VALUES
from diptych.plans.recompute import RecomputeBlock, recompute_blocks
from jax_impl.carry import carried_through
from jax_impl.traced_programs import trace_inlined


def name_value(x: Array, name: str) -> Array:
    """Return x, named for the policies of jax.checkpoint and for residual_report.

    Args:
        x: the value, of any shape.
        name: one of diptych.plans.model.values.VALUES.

    Raises:
        ValueError: the name is not in diptych.plans.model.values.VALUES.
    """
    if name not in VALUES:
        raise ValueError(f"name: expected one of {VALUES}, got {name!r}")
    x = checkpoint_name(x, name)
    listener = _LISTENER.get()
    return x if listener is None else listener(x, name)


def recompute_policy(config: TransformerConfig, block: RecomputeBlock | None = None) -> Callable[..., Any]:
    """Return a policy for jax.checkpoint that saves every named value except the dropped ones.

    Args:
        config: configuration of the model.
        block: block whose values are dropped; None: the first block of the model that drops any.
    """
    if block is None:
        blocks = recompute_blocks(config)
        block = next((b for b in blocks if b.kind != "none"), blocks[0])
    dropped = dropped_values(config, block)
    return checkpoint_policies.save_only_these_names(*(name for name in VALUES if name not in dropped))


def checkpoint_blocks(
    layer_fn: Callable[[int, Array], Array],
    config: TransformerConfig,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> Callable[[Array], Array]:
    """Return a function that runs all layers of a stage and recomputes the blocks of diptych.plans.recompute.

    Args:
        layer_fn: runs the layer with a global number on hidden states. [B, T, ...]
        config: configuration of the whole model.
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
                checkpoint = partial(jax.checkpoint, policy=recompute_policy(config, block))  # pyright: ignore[reportPrivateImportUsage]
                layers = carried_through(layers, checkpoint)
            hidden_states = name_value(layers(hidden_states), "residual_streams")
        return hidden_states

    return run


class SavedValue(NamedTuple):
    """All values of one name that are saved for backward."""

    shape: tuple[int, ...]
    """Shape of the first value."""
    dtype: str
    bytes: int
    """Bytes of all values of the name together."""


def residual_report(fn: Callable[..., Array], *args: Any) -> dict[str, SavedValue]:
    """Return the named values that are saved for backward once ``fn(*args)`` has returned.

    The report reads the program of jax.vjp, whose results besides those of fn are the residuals. For a value named in
    the body of jax.lax.scan, the stacked values of all iterations count. XLA may still recompute a value or save
    others.

    Args:
        fn: function to call.
        args: its arguments.

    Returns:
        A dict from name to SavedValue, in the order of diptych.plans.model.values.VALUES.
    """
    program = jax.make_jaxpr(lambda *inputs: jax.vjp(fn, *inputs)[1])(*args).jaxpr
    origins = _origins(program, {})
    saved = dict.fromkeys(origins[v] for v in program.outvars if not isinstance(v, Literal) and v in origins)
    report: dict[str, SavedValue] = {}
    for variable, name in saved:
        shape = variable.aval.shape
        dtype = variable.aval.dtype
        earlier = report.get(name, SavedValue(shape, str(dtype), 0))
        report[name] = earlier._replace(bytes=earlier.bytes + int(np.prod(shape)) * dtype.itemsize)
    return {name: report[name] for name in VALUES if name in report}


_SAME_VALUE = frozenset(
    {"reduce_precision", "reshape", "broadcast_in_dim", "squeeze", "transpose", "slice", "split", "expand_dims", "copy"}
)
"""Operations whose result has the same elements as their operand, so that saving one counts as saving the other."""


def _origins(program: Any, known: Mapping[Any, tuple[Any, str]]) -> dict[Any, tuple[Any, str]]:
    """Return the variable and the name of the named value from which each variable of a program comes.

    Variables that are neither a named value nor a view of one are left out. A value with two names has the first.

    Args:
        program: a jaxpr.
        known: origins of those inputs of the program that have one.
    """
    origins = dict(known)
    for equation in program.eqns:
        kind = equation.primitive.name
        source = equation.invars[0] if equation.invars else None
        if kind == "name":
            origins[equation.outvars[0]] = origins.setdefault(source, (source, equation.params["name"]))
        elif kind in _SAME_VALUE and not isinstance(source, Literal) and source in origins:
            origins |= dict.fromkeys(equation.outvars, origins[source])
        elif kind == "optimization_barrier":
            passed = zip(equation.invars, equation.outvars, strict=True)
            origins |= {o: origins[i] for i, o in passed if not isinstance(i, Literal) and i in origins}
        for inner in jaxprs_in_params(equation.params):  # a call may return or name a value
            operands = equation.invars[1:] if kind == "cond" else equation.invars  # a branch does not receive the index
            if len(inner.invars) == len(operands) and len(inner.outvars) == len(equation.outvars):
                origins |= _origins_of_call(equation, inner, operands, origins)
    return origins


def _origins_of_call(
    equation: Any, inner: Any, operands: Sequence[Any], origins: Mapping[Any, tuple[Any, str]]
) -> dict[Any, tuple[Any, str]]:
    """Return the origins of the results of a call, a branch or a loop.

    A result of a loop counts if it holds the named value of every iteration.

    Args:
        equation: the call.
        inner: the jaxpr that it calls.
        operands: operands of the equation that become the inputs of the jaxpr.
        origins: origins of the variables outside the call.
    """
    kind = equation.primitive.name
    params = equation.params
    inputs = list(zip(inner.invars, operands, strict=True))
    first = 0
    stacked = len(equation.outvars)
    if kind == "scan":  # from these indices on, inputs are slices and results are stacked
        constants, stacked = _scan_counts(params)
        first = constants + stacked
        inputs = inputs[:constants] + inputs[first:]  # a carry equals its operand only in the first iteration
    inner_origins = _origins(inner, {i: origins[o] for i, o in inputs if not isinstance(o, Literal) and o in origins})
    outside = {inner_origins[i][0] for i in inner.invars[first:] if i in inner_origins}
    result = {}
    own = {}
    for index, (o, i) in enumerate(zip(equation.outvars, inner.outvars, strict=True)):
        if isinstance(i, Literal) or i not in inner_origins:
            continue
        variable, name = inner_origins[i]
        is_new = index >= stacked or kind == "cond"
        result[o] = own.setdefault(variable, (o, name)) if is_new and variable not in outside else inner_origins[i]
    return result


def _scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of constants and of carried values of a scan, from the parameters of its equation.

    JAX 0.10 stores both numbers. From JAX 0.11 on, the tree of the operands has them as its first two parts.
    """
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    constants, carry, _ = params["ft_in"].unpack()
    return len(constants), len(carry)


# Manual saving of named values, for callers that split forward and backward themselves.

_LISTENER: ContextVar[Callable[[Array, str], Array] | None] = ContextVar("listener of named values", default=None)


@contextlib.contextmanager
def _listening(listener: Callable[[Array, str], Array]) -> Iterator[None]:
    """Return a context in which name_value passes every value through ``listener``."""
    before = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(before)


def run_saving(
    function: Callable[..., Array], dropped: frozenset[str], *args: Any
) -> tuple[Array, list[Array], list[str]]:
    """Return ``function(*args)``, its named values except the dropped ones, in the order of forward, and their names.

    Args:
        function: function to run.
        dropped: names of the values that are not returned.
        args: arguments of the function.
    """
    saved: list[Array] = []
    names: list[str] = []

    def save(x: Array, name: str) -> Array:
        if name not in dropped:
            saved.append(x)
            names.append(name)
        return x

    with _listening(save):
        return function(*args), saved, names


def run_from_saved(
    function: Callable[..., Array], dropped: frozenset[str], values: Sequence[Array], *args: Any
) -> tuple[Array, Callable[[Array], Any]]:
    """Replay ``function(*args)`` from saved values, and return its result and its pull-back.

    Operations that lead only to a saved value are not computed. Derivatives are those of the recomputed values.

    Args:
        function: the function of run_saving.
        dropped: names of the values that are recomputed.
        values: saved values of run_saving.
        args: arguments of the function; the pull-back returns the gradient of each.
    """

    def run(*args: Any) -> Array:
        remaining = iter(values)
        with _listening(lambda x, name: x if name in dropped else _substitute(x, next(remaining))):
            return function(*args)

    return jax.vjp(run, *args)


@jax.custom_jvp
def _substitute(computed: Array, saved: Array) -> Array:
    """Return the saved value with the derivative of the recomputed one."""
    return saved


@_substitute.defjvp
def _substitute_derivative(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    """Return the saved value, and the tangent of the recomputed one."""
    return primals[1], tangents[0]


class VaryingLeaf(NamedTuple):
    """A result that depends on a varying argument."""

    like: jax.ShapeDtypeStruct
    indices: tuple[int, ...]
    """Indices of the results that are equal to it."""
    layer: int | None
    """The last layer whose forward computes or reads it, see layer_scope; None: no layer."""
    name: str | None
    """Name of the value, see name_value; None: it has none."""


_LAYER = "layer"


def layer_scope(number: int) -> contextlib.AbstractContextManager:
    """Return a context that names the operations of a layer, for varying_leaves and for profiles.

    Args:
        number: number of the layer.
    """
    return jax.named_scope(f"{_LAYER} {number}")


def varying_leaves(
    function: Callable[..., Sequence[Any]], args: Any, varies: Any, names: Mapping[int, str] = MappingProxyType({})
) -> list[VaryingLeaf]:
    """Return the results of ``function(*args)`` that depend on a varying argument.

    If the function returns the leaves of a pull-back, these are the leaves that must be saved when the other
    arguments, such as parameters, stay available.

    Args:
        function: function that returns arrays.
        args: its arguments, or their shapes.
        varies: the same structure as args, with True for each array that varies.
        names: names of values among the arrays of args, by index.
    """
    traced = trace_inlined(function, *args).jaxpr
    varying = {v for v, is_varying in zip(traced.invars, jax.tree.leaves(varies), strict=True) if is_varying}
    for equation in traced.eqns:
        if any(not isinstance(v, Literal) and v in varying for v in equation.invars):
            varying.update(equation.outvars)
    layers: dict[Any, int] = {}
    for equation in traced.eqns:
        numbers = [int(number) for number in re.findall(rf"{_LAYER} (\d+)", str(equation.source_info.name_stack))]
        for variable in [*equation.invars, *equation.outvars] if numbers else ():
            if not isinstance(variable, Literal):
                layers[variable] = max(numbers[-1], layers.get(variable, 0))
    origins = _origins(traced, {traced.invars[index]: (traced.invars[index], name) for index, name in names.items()})
    indices: dict[Any, list[int]] = {}
    for index, variable in enumerate(traced.outvars):
        if not isinstance(variable, Literal) and variable in varying:
            indices.setdefault(variable, []).append(index)
    return [
        VaryingLeaf(
            jax.ShapeDtypeStruct(variable.aval.shape, variable.aval.dtype),
            tuple(equal),
            layers.get(variable),
            origins[variable][1] if variable in origins else None,
        )
        for variable, equal in indices.items()
    ]


def with_leaves(pull_back: Any, leaves: Sequence[VaryingLeaf], values: Sequence[Array]) -> Any:
    """Replace the varying leaves of a pull-back.

    Args:
        pull_back: function of jax.vjp.
        leaves: its varying leaves, by varying_leaves.
        values: their new values, in the same order.
    """
    result, structure = jax.tree.flatten(pull_back)
    for leaf, value in zip(leaves, values, strict=True):
        for index in leaf.indices:
            result[index] = value
    return jax.tree.unflatten(structure, result)


def arguments_read(function: Callable[..., Any], *args: Any) -> list[bool]:
    """Return, for each array of args, True if a result of ``function(*args)`` depends on it."""
    program = jax.make_jaxpr(function)(*args).jaxpr
    read = {v for v in program.outvars if not isinstance(v, Literal)}
    for equation in reversed(program.eqns):
        if not read.isdisjoint(equation.outvars):
            read.update(v for v in equation.invars if not isinstance(v, Literal))
    return [v in read for v in program.invars]
