"""Recompute of values that a function names with jax.ad_checkpoint.checkpoint_name.

A policy that refuses a name does not free the value: the operation that made it is saved under no name. Here the
function is traced, and the operation that makes a dropped value becomes an opaque call, whose result is not saved.
"""

import fnmatch
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var, jaxpr_as_fun, jaxprs_in_params

from jax_impl.recompute.opaque_call import except_opaque_calls, without_residuals

_INLINED = frozenset({"jit", "pjit", "closed_call", "core_call"})
"""Primitives whose function is evaluated in place."""
_SAME_VALUE = frozenset({"reshape", "squeeze", "expand_dims", "transpose", "copy", "reduce_precision", "name"})
"""Operations whose result is not worth saving for itself."""


def drop_names(function: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """Return a function that drops the values whose checkpoint names match a pattern.

    Args:
        function: function of arrays and pytrees.
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

    def call(*args: Any, **kwargs: Any) -> Any:
        result: list[Any] = []
        leaves, structure = jax.tree.flatten(args)

        def flat(*leaves: Any) -> list[Any]:
            found, treedef = jax.tree.flatten(partial(function, **kwargs)(*jax.tree.unflatten(structure, leaves)))
            result[:] = [treedef]
            return found

        program = jax.make_jaxpr(flat)(*leaves)
        _check_names(names, program.jaxpr)
        run = partial(_evaluate, program.jaxpr, program.consts, names)
        return jax.tree.unflatten(result[0], jax.checkpoint(run, policy=except_opaque_calls)(*leaves))  # pyright: ignore[reportPrivateImportUsage]

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
    """Evaluate a jaxpr; operations that make a dropped value leave no residuals but their operands."""
    values: dict[Var, Any] = dict(zip((*program.constvars, *program.invars), (*constants, *args), strict=True))
    dropped = _dropped(program, patterns)
    for equation in program.eqns:
        operands = [x.val if isinstance(x, Literal) else values[x] for x in equation.invars]
        inner = next(iter(jaxprs_in_params(equation.params)), None)
        has_names = any(
            _matches(name, patterns) for each in jaxprs_in_params(equation.params) for name in _names_in(each)
        )
        if any(variable in dropped for variable in equation.outvars):
            results = without_residuals(_function_of(program, equation))(*operands)
        elif has_names and equation.primitive.name in _INLINED and inner is not None:
            closed = equation.params["jaxpr"]
            results = _evaluate(inner, closed.consts, patterns, *operands)
        elif has_names:
            raise NotImplementedError(
                f"modules: expected names outside of {equation.primitive.name}, got one inside it; apply "
                "recompute_modules to the function that it calls"
            )
        else:
            results = _function_of(program, equation)(*operands)
        values.update(zip(equation.outvars, results, strict=True))
    return [x.val if isinstance(x, Literal) else values[x] for x in program.outvars]


def _function_of(program: Jaxpr, equation: Any) -> Callable[..., list[Any]]:
    """Return the function from the operands of an equation to its results."""
    places = {x: place for place, x in enumerate(equation.invars) if not isinstance(x, Literal)}
    names = program.debug_info.with_unknown_names()
    alone = program.replace(
        constvars=[], invars=[*places], outvars=equation.outvars, eqns=[equation], effects=equation.effects
    )
    function = jaxpr_as_fun(ClosedJaxpr(alone.replace(debug_info=names), []))
    return lambda *operands: function(*(operands[place] for place in places.values()))


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
