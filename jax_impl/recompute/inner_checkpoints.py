"""Calls of jax.checkpoint inside a function that runs in an outer jax.checkpoint with a policy.

JAX applies the outer policy to the operations of inner calls as well, and so saves values that their author wanted to
drop. Here each inner call becomes an opaque call, whose results are saved and whose intermediate values are not.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun, jaxprs_in_params

from jax_impl.recompute.opaque_call import without_residuals
from jax_impl.traced_programs import CALLS, part_of, value_of, variables


def keep_inner_checkpoints(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose inner calls of jax.checkpoint keep only their arguments and results for backward.

    A call with its own policy, or inside a while loop or a function with a custom derivative, is not changed.

    Args:
        function: function of pytrees of arrays.
    """

    def call(*args: Any) -> Any:
        program, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        return jax.tree.unflatten(jax.tree.structure(shapes), _evaluate(program, jax.tree.leaves(args)))

    return call


def _evaluate(program: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    """Evaluate a program with opaque calls in place of its inner checkpoints."""
    jaxpr = program.jaxpr
    if not _has_checkpoint(jaxpr):
        return jaxpr_as_fun(program)(*args)
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*program.consts, *args], strict=True))
    for equation in jaxpr.eqns:
        operands = [value_of(values, atom) for atom in equation.invars]
        called = _called(equation)
        if _is_checkpoint(equation) and equation.params["policy"] is None:
            inner = jaxpr_as_fun(ClosedJaxpr(equation.params["jaxpr"], []))
            results = without_residuals(inner, saves_results=True)(*operands)
        elif called is not None and equation.primitive.name in CALLS:
            results = _evaluate(called, operands)
        elif called is not None and equation.primitive.name == "scan":
            results = equation.primitive.bind(*operands, **equation.params | {"jaxpr": _replaced(called)})
        elif called is not None and "newly_manual_axes" in equation.params:  # shard_map
            results = _on_mesh(called, equation.params)(*operands)
        elif equation.primitive.name == "cond" and any(_has_checkpoint(each.jaxpr) for each in _branches(equation)):
            branches = tuple(map(_replaced, _branches(equation)))
            results = equation.primitive.bind(*operands, **equation.params | {"branches": branches})
        else:
            inputs = list(dict.fromkeys(variables(equation.invars)))
            run = part_of(jaxpr, [equation], inputs, equation.outvars)
            results = run(*[values[variable] for variable in inputs])
        values.update(zip(equation.outvars, results, strict=True))
    return [value_of(values, atom) for atom in jaxpr.outvars]


def _replaced(program: ClosedJaxpr) -> ClosedJaxpr:
    """Return the body of a loop or a branch with opaque calls in place of its inner checkpoints."""
    return jax.make_jaxpr(lambda *args: _evaluate(program, args))(*program.in_avals)


def _branches(equation: Any) -> tuple[ClosedJaxpr, ...]:
    return equation.params["branches"]


def _on_mesh(program: ClosedJaxpr, params: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the function of a call of shard_map, with opaque calls in place of its inner checkpoints."""
    return jax.shard_map(
        lambda *args: tuple(_evaluate(program, args)),
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        axis_names=params["newly_manual_axes"],
        check_vma=params["check_vma"],
    )


def _called(equation: Any) -> ClosedJaxpr | None:
    """Return the program that an equation calls if the program contains a checkpoint, else None."""
    called = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    if called is None or not any(map(_has_checkpoint, jaxprs_in_params(equation.params))):
        return None
    return called if isinstance(called, ClosedJaxpr) else ClosedJaxpr(called, [])


def _is_checkpoint(equation: Any) -> bool:
    """Return True for a call of jax.checkpoint, found by its parameters: its primitive's name differs by release."""
    return {"prevent_cse", "policy", "differentiated"} <= equation.params.keys()


def _has_checkpoint(program: Jaxpr) -> bool:
    return any(
        _is_checkpoint(equation) or any(map(_has_checkpoint, jaxprs_in_params(equation.params)))
        for equation in program.eqns
    )
