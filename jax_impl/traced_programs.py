"""Programs that JAX has traced: calls inlined, and parts of them run alone."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

CALLS = ("jit", "pjit", "closed_call", "core_call")
"""Primitives that run a program as it is."""


def trace_inlined(function: Callable[..., Any], *args: Any) -> ClosedJaxpr:
    """Return the program of a function whose jitted functions are inlined, so that its operations can be seen.

    Args:
        function: function of arrays and pytrees.
        args: its arguments, or their shapes.
    """
    traced = jax.make_jaxpr(function)(*args)
    if not any(equation.primitive.name in CALLS for equation in traced.jaxpr.eqns):
        return traced
    return jax.make_jaxpr(lambda *leaves: _run_inlined(traced, leaves))(*jax.tree.leaves(args))


def part_of(program: Any, equations: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any]) -> Callable:
    """Return the function of some equations of a program.

    Args:
        program: a jaxpr.
        equations: equations of it, in its order.
        inputs: variables that the equations and the outputs read, besides results of the equations.
        outputs: variables or literals to return.

    Returns:
        A function from the values of the inputs to the list of the outputs' values.
    """
    part = program.replace(constvars=[], invars=[*inputs], outvars=[*outputs], eqns=[*equations])
    return jaxpr_as_fun(ClosedJaxpr(part, []))  # pyright: ignore[reportCallIssue]


def variables(atoms: Sequence[Any]) -> list[Any]:
    """Return the variables among the operands of an equation, without literals."""
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def value_of(values: Mapping[Any, Any], atom: Any) -> Any:
    """Return the value of an operand of an equation: a literal, or a variable with a value.

    Args:
        values: values of the variables.
        atom: the operand.
    """
    return atom.val if isinstance(atom, Literal) else values[atom]


def is_array(leaf: Any) -> bool:
    """Return True for what JAX traces, but not for a number of Python, a text or a function."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic) or hasattr(leaf, "__jax_array__")


def split_arrays(tree: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """Return the arrays of a tree, and a function that returns the tree with other arrays in their places.

    Args:
        tree: a pytree, which may have leaves that are no arrays.
    """
    leaves, structure = jax.tree.flatten(tree)
    places = [place for place, leaf in enumerate(leaves) if is_array(leaf)]
    arrays = [leaves[place] for place in places]
    for place in places:
        leaves[place] = None  # an array of a transformation must not outlive it

    def join(arrays: Sequence[Any]) -> Any:
        found = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            found[place] = array
        return jax.tree.unflatten(structure, found)

    return arrays, join


def _run_inlined(program: Any, args: Sequence[Any]) -> list[Any]:
    """Run a program, the programs that it calls in the same way, and all other equations as they are."""
    jaxpr = program.jaxpr
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*program.consts, *args], strict=True))
    pending: list[Any] = []

    def run_pending() -> None:
        inputs = list(dict.fromkeys(v for equation in pending for v in variables(equation.invars) if v in values))
        outputs = [v for equation in pending for v in equation.outvars]
        results = part_of(jaxpr, pending, inputs, outputs)(*[values[v] for v in inputs])
        values.update(zip(outputs, results, strict=True))
        pending.clear()

    for equation in jaxpr.eqns:
        if equation.primitive.name not in CALLS:
            pending.append(equation)
            continue
        run_pending()
        called = equation.params.get("jaxpr") or equation.params["call_jaxpr"]
        operands = [value_of(values, atom) for atom in equation.invars]
        closed = called if isinstance(called, ClosedJaxpr) else ClosedJaxpr(called, [])
        values.update(zip(equation.outvars, _run_inlined(closed, operands), strict=True))
    run_pending()
    return [value_of(values, atom) for atom in jaxpr.outvars]
