"""Recompute of values that a function names with jax.ad_checkpoint.checkpoint_name.

A policy that refuses a name does not free the value, because JAX saves the result of the operation before the name.
Here the function is traced, and the operations that make a dropped value become an opaque call, whose result is not
saved. These are the operation itself, and elementwise operations and reductions before it whose results nothing else
reads, such as a whole norm.
"""

import fnmatch
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from flax.errors import TraceContextError
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var, jaxpr_as_fun, jaxprs_in_params

from jax_impl.named_modules import call_through
from jax_impl.recompute.inner_checkpoints import keep_inner_checkpoints
from jax_impl.recompute.opaque_call import except_opaque_calls, without_residuals
from jax_impl.traced_programs import CALLS, value_of

_CALLS = frozenset({*CALLS, "custom_jvp_call"})
"""Primitives that call a function."""
_ELEMENTWISE = (
    "abs add and cbrt ceil clamp convert_element_type copy cos cosh div eq erf erf_inv exp exp2 expm1 floor ge gt "
    "integer_pow is_finite le log log1p logistic lt max min mul ne neg not or pow real reduce_precision rem round "
    "rsqrt select_n sign sin sinh sqrt square stop_gradient sub tan tanh xor"
)
_REDUCTIONS = "reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum"
_SHAPES = "broadcast_in_dim concatenate expand_dims iota pad reshape rev slice split squeeze transpose"
_CHEAP = frozenset(f"{_ELEMENTWISE} {_REDUCTIONS} {_SHAPES}".split())
"""Operations cheap enough to be recomputed in backward."""
_SAME_VALUE = frozenset({"reshape", "squeeze", "expand_dims", "transpose", "copy", "reduce_precision", "name"})
"""Operations whose result has the value of their operand, so that a dropped result drops the operand too."""


def drop_names(function: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """Return a function that drops the values whose checkpoint names match a pattern.

    Args:
        function: function of pytrees and nnx modules, whose state it may change. Leaves that are not JAX arrays, such
            as numbers, texts, functions and NumPy arrays, are not traced, neither in arguments nor in results.
        names: patterns, with ``*`` for any text.

    Raises:
        TypeError: names is no list of texts.
        ValueError: there is no pattern; or, when the function is called, one matches no name.
        NotImplementedError: a matching name is inside of a loop, a branch or another transformation.
    """
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"modules: expected a list of patterns of checkpoint names for a function, got {names!r}")
    if not names:
        raise ValueError("modules: expected at least one pattern, got none")

    def transform(run: Callable[..., Any]) -> Callable[..., Any]:
        def dropping(*args: Any) -> Any:
            program, shapes = jax.make_jaxpr(run, return_shape=True)(*args)
            _check_names(names, program.jaxpr)
            evaluate = keep_inner_checkpoints(partial(_evaluate, program.jaxpr, program.consts, names))
            results = jax.checkpoint(evaluate, policy=except_opaque_calls)(*jax.tree.leaves(args))  # pyright: ignore[reportPrivateImportUsage]
            return jax.tree.unflatten(jax.tree.structure(shapes), results)

        return dropping

    owner = getattr(function, "__name__", type(function).__name__)

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return call_through(transform, function, owner, args, kwargs)
        except TraceContextError as error:
            raise ValueError(
                f"{owner}: expected a function that changes nnx modules among its arguments only, got one that changes "
                "a module from outside; pass it as an argument"
            ) from error

    return call


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _check_names(patterns: Sequence[str], program: Jaxpr) -> None:
    """Reject patterns that match no name, and names where they cannot be dropped."""
    seen = _names_in(program)
    missing = next((pattern for pattern in patterns if not fnmatch.filter(seen, pattern)), None)
    if missing is not None:
        raise ValueError(
            f"modules: expected patterns of checkpoint names, got {missing!r}, which matches none of "
            f"{', '.join(sorted(seen)) or 'the names, since there are none: use jax.ad_checkpoint.checkpoint_name'}"
        )


def _names_in(program: Jaxpr) -> set[str]:
    """Return the checkpoint names of a jaxpr and of those inside it."""
    found = {equation.params["name"] for equation in program.eqns if equation.primitive.name == "name"}
    return found.union(*(_names_in(inner) for e in program.eqns for inner in jaxprs_in_params(e.params)))


def _evaluate(program: Jaxpr, constants: Sequence[Any], patterns: Sequence[str], *args: Any) -> list[Any]:
    """Evaluate a jaxpr; the operations that make a dropped value save only their operands for backward."""
    values: dict[Var, Any] = dict(zip((*program.constvars, *program.invars), (*constants, *args), strict=True))
    regions = _regions(program, _dropped(program, patterns))
    inside = {id(equation) for region in regions.values() for equation in region[:-1]}

    read = partial(value_of, values)
    for equation in program.eqns:
        inner = next(iter(jaxprs_in_params(equation.params)), None)
        has_names = any(
            _matches(name, patterns) for each in jaxprs_in_params(equation.params) for name in _names_in(each)
        )
        if id(equation) in inside:
            continue
        if id(equation) in regions:
            operands, function = _function_of(program, regions[id(equation)])
            results = without_residuals(function)(*map(read, operands))
        elif has_names and equation.primitive.name in CALLS and inner is not None:
            closed = equation.params["jaxpr"]
            results = _evaluate(inner, closed.consts, patterns, *map(read, equation.invars))
        elif has_names:
            raise NotImplementedError(
                f"modules: expected names outside of {equation.primitive.name}, got one inside it; apply "
                "recompute_modules to the function that it calls"
            )
        else:
            operands, function = _function_of(program, [equation])
            results = function(*map(read, operands))
        values.update(zip(equation.outvars, results, strict=True))
    return [*map(read, program.outvars)]


def _function_of(program: Jaxpr, equations: Sequence[Any]) -> tuple[list[Var], Callable[..., list[Any]]]:
    """Return the variables that some equations read, and a function from them to the last equation's results."""
    made = {variable for equation in equations for variable in equation.outvars}
    reads = [x for equation in equations for x in equation.invars if not isinstance(x, Literal) and x not in made]
    operands = [*dict.fromkeys(reads)]
    alone = program.replace(
        constvars=[],
        invars=operands,
        outvars=equations[-1].outvars,
        eqns=[*equations],
        effects=set().union(*(equation.effects for equation in equations)),
        debug_info=program.debug_info.with_unknown_names(),
    )
    return operands, jaxpr_as_fun(ClosedJaxpr(alone, []))


def _regions(program: Jaxpr, dropped: set[Var]) -> dict[int, list[Any]]:
    """Return the equations that make each dropped value, in order, by the identity of the last one.

    An equation belongs to a region if it is cheap and only the region reads its results.
    """
    readers: dict[Var, list[Any]] = {}
    for equation in program.eqns:
        for x in equation.invars:
            if not isinstance(x, Literal):
                readers.setdefault(x, []).append(equation)
    results = {x for x in program.outvars if not isinstance(x, Literal)}
    region_of: dict[int, int] = {}
    regions: dict[int, list[Any]] = {}
    for equation in reversed(program.eqns):
        here = id(equation)
        if any(variable in dropped for variable in equation.outvars):
            region_of[here] = here
            regions[here] = [equation]
            continue
        reading = [region_of.get(id(each)) for variable in equation.outvars for each in readers.get(variable, ())]
        if len({*reading}) != 1 or reading[0] is None or results.intersection(equation.outvars):
            continue
        region = regions[reading[0]]
        if _is_cheap(equation) and _is_cheap(region[-1]):
            region_of[here] = reading[0]
            region.insert(0, equation)
    return regions


def _is_cheap(equation: Any) -> bool:
    """Return True if an equation has only elementwise operations, reductions and changes of shape, without names."""
    inner = [*jaxprs_in_params(equation.params)]
    if inner and equation.primitive.name in _CALLS:
        return all(_is_cheap(each) for program in inner for each in program.eqns)
    return not equation.effects and equation.primitive.name in _CHEAP


def _dropped(program: Jaxpr, patterns: Sequence[str]) -> set[Var]:
    """Return the variables that are a dropped value, or the same value before it got its name or shape."""
    found: set[Var] = set()
    for equation in reversed(program.eqns):
        is_named = equation.primitive.name == "name" and _matches(equation.params["name"], patterns)
        passes_on = equation.primitive.name in _SAME_VALUE and any(variable in found for variable in equation.outvars)
        if is_named or passes_on:
            found.update(equation.outvars)
            found.update(x for x in equation.invars[:1] if not isinstance(x, Literal))
    return found
