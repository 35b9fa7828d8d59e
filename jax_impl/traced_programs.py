"""Programs traced by JAX: inlining of calls, functions of some equations, and checks for side effects."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cached_property
from types import FunctionType, MethodType, ModuleType
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun, jaxprs_in_params

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


def passed_through(program: Any, result: Any) -> Any:
    """Return the argument that a program passes through as a result, or None if the result is computed.

    Args:
        program: a jaxpr.
        result: one of its variables, or a literal.
    """
    makers = {variable: equation for equation in program.eqns for variable in equation.outvars}
    while not isinstance(result, Literal) and result in makers:
        equation = makers[result]
        place = equation.outvars.index(result)
        name = "body_jaxpr" if equation.primitive.name == "while" else None
        inner = [*jaxprs_in_params({name: equation.params[name]} if name else equation.params)]
        sources = {_argument_of(equation, each, place) for each in inner}
        source = sources.pop() if len(sources) == 1 else None
        if source is None:
            return None
        result = equation.invars[source]
    return None if isinstance(result, Literal) else result


def _argument_of(equation: Any, inner: Any, place: int) -> int | None:
    """Return the index of the argument that a call, branch or loop passes through as a result; None: there is none."""
    skipped = len(equation.invars) - len(inner.invars)  # the index of a branch, or what the condition of a loop reads
    if skipped < 0 or len(inner.outvars) != len(equation.outvars):
        return None
    source = passed_through(inner, inner.outvars[place])
    if source not in inner.invars:
        return None
    index = inner.invars.index(source)
    if equation.primitive.name == "scan":
        constants = equation.params["num_consts"]
        carried = equation.params["num_carry"]
        is_same = index == constants + place if place < carried else index >= constants + carried
        return index if is_same else None
    if equation.primitive.name == "while":
        return index + skipped if index == equation.params["body_nconsts"] + place else None
    return index + skipped if skipped in (0, 1) else None


def is_array(leaf: Any) -> bool:
    """Return True for an array of JAX. Numbers and arrays of NumPy have no gradient and may decide shapes."""
    return isinstance(leaf, jax.Array) or hasattr(leaf, "__jax_array__")


def check_same(owner: str, before: Any, after: Any, is_leaf: Callable[[Any], bool] | None = None) -> None:
    """Check that a traced function has not changed its arguments, because changes in a trace are lost.

    Args:
        owner: name of the function, for the error.
        before: leaves and structure of the arguments before the call, by jax.tree.flatten.
        after: the arguments after the call.
        is_leaf: as for jax.tree.flatten.

    Raises:
        ValueError: a leaf or the structure has changed.
    """
    leaves, structure = before
    found = jax.tree_util.tree_flatten_with_path(after, is_leaf=is_leaf)[0]
    if jax.tree.structure(after, is_leaf=is_leaf) == structure:
        changed = [path for (path, leaf), old in zip(found, leaves, strict=True) if leaf is not old]
        if not changed:
            return
        what = f"sets {jax.tree_util.keystr(changed[0][-1:])} of one"
    else:
        what = "adds to a list, a dict or an object among them, or removes from it"
    raise ValueError(
        f"{owner}: expected a call that does not change its arguments, got one that {what}; return the new value "
        "instead, or keep it in an nnx.Variable"
    )


def contents(objects: Iterable[Any], skip: Callable[[Any], bool]) -> dict[str, Any]:
    """Return the values that objects hold, directly and in nested objects and containers, by dotted name.

    Args:
        objects: any objects. The contents of functions, classes, JAX arrays, and objects of JAX, flax and NumPy are
            left out; a NumPy array is returned as its elements.
        skip: returns True for an object whose contents are left out.
    """
    found: dict[str, Any] = {}
    seen: set[int] = set()
    pending = [(f"{type(each).__name__} {number}", each) for number, each in enumerate(objects)]
    while pending:
        name, value = pending.pop()
        found[name] = value
        if skip(value):
            continue
        if isinstance(value, np.ndarray):
            found[name] = [*value.flat] if value.dtype.hasobject else value.tobytes()
        elif isinstance(value, AbstractSet):
            found[name] = {*value}
        elif id(value) not in seen:
            seen.add(id(value))
            if isinstance(value, list | tuple | deque):
                pending += [(f"{name}[{number}]", each) for number, each in enumerate(value)]
            elif isinstance(value, Mapping):
                pending += [(f"{name}[{key!r}]", each) for key, each in value.items()]
            pending += [(f"{name}.{key}", each) for key, each in _attributes(value).items()]
    return found


def check_same_contents(owner: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Check that a traced function has not changed objects, because JAX may trace it more than once per call.

    Args:
        owner: name of the function, for the error.
        before: contents of the objects before the call.
        after: their contents after the call.

    Raises:
        ValueError: the contents have changed.
    """
    changed = [name for name in {**before, **after} if not _is_same(before.get(name), after.get(name))]
    if changed or before.keys() != after.keys():
        name = min(changed or before.keys() ^ after.keys(), key=len)
        raise ValueError(
            f"{owner}: expected a call that does not change its arguments or other objects, got one that changes "
            f"{name}, which JAX would repeat as often as it traces the call; return the new value instead, or keep it "
            "in an nnx.Variable"
        )


def _is_same(old: Any, new: Any) -> bool:
    if isinstance(old, bytes | set) and type(old) is type(new):
        return old == new
    if isinstance(old, list) and isinstance(new, list) and old is not new:  # elements of an array
        return len(old) == len(new) and all(a is b for a, b in zip(old, new, strict=True))
    return old is new


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an instance of a user's class, without cached ones."""
    kind = type(value)
    if isinstance(value, type | FunctionType | MethodType | ModuleType) or kind.__module__.partition(".")[0] in _OWN:
        return {}
    slots = [name for each in kind.__mro__ for name in _slots(each) if hasattr(value, name)]
    found = {name: getattr(value, name) for name in slots if name not in ("__dict__", "__weakref__")}
    found |= getattr(value, "__dict__", {})
    return {name: each for name, each in found.items() if not isinstance(getattr(kind, name, None), cached_property)}


def _slots(kind: type) -> Sequence[str]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


_OWN = ("jax", "jaxlib", "flax", "numpy", "logging")
"""Packages whose objects may change their own state, such as caches."""


def split_arrays(owner: str, tree: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """Return the arrays of a tree, and a function that returns the tree with other arrays in place of them.

    Args:
        owner: name of the function whose results the tree contains, for the error.
        tree: a pytree, which may have leaves that are no arrays.

    Raises:
        ValueError: an object that is no pytree contains arrays of a transformation.
    """
    leaves, structure = jax.tree.flatten(tree)
    places = [place for place, leaf in enumerate(leaves) if is_array(leaf)]
    arrays = [leaves[place] for place in places]
    hidden = next((leaf for leaf in leaves if not is_array(leaf) and _has_tracers(leaf)), None)
    if hidden is not None:
        raise ValueError(
            f"{owner}: expected results that are arrays or pytrees of arrays, got an object of {type(hidden).__name__} "
            "with arrays in it; register its class by jax.tree_util.register_dataclass"
        )
    for place in places:
        leaves[place] = None  # an array of a transformation must not outlive it

    def join(arrays: Sequence[Any]) -> Any:
        found = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            found[place] = array
        return jax.tree.unflatten(structure, found)

    return arrays, join


def _has_tracers(leaf: Any) -> bool:
    """Return True for an object that is no pytree, with arrays of a transformation among its attributes."""
    try:
        attributes = vars(leaf)
    except TypeError:
        return False
    return any(isinstance(each, jax.core.Tracer) for each in jax.tree.leaves({**attributes}))  # pyright: ignore[reportAttributeAccessIssue]


def _run_inlined(program: Any, args: Sequence[Any]) -> list[Any]:
    """Run a program with its calls inlined, also the calls inside them."""
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
        scope = str(equation.source_info.name_stack)
        with jax.named_scope(scope) if scope else contextlib.nullcontext():
            results = _run_inlined(closed, operands)
        values.update(zip(equation.outvars, results, strict=True))
    run_pending()
    return [value_of(values, atom) for atom in jaxpr.outvars]
