"""Callables of JAX in one form: a function of parameters and inputs, which also returns the state that it changes."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen, nnx

from parity.pytrees import DTYPES, is_array

Observe = Callable[[Any, Callable[[], Any]], Any]
"""Receives a module and a function that calls it; it returns what that returns."""


def unobserved(module: Any, call: Callable[[], Any]) -> Any:
    """Return what a call returns."""
    return call()


class JaxProgram(NamedTuple):
    """A JAX callable in one form: a function of parameters and inputs."""

    apply: Callable[..., tuple[Any, dict[str, Any]]]
    """Receives an observer, the floating parameters by name, then the arguments; returns outputs, and the floating
    parameters and variables that the call has changed."""
    parameters: dict[str, Any]
    """Floating parameters and other variables by name."""
    trainable: frozenset[str]
    constants: frozenset[str] = frozenset()
    """Names of parameters that are plain arrays among the attributes of an nnx module, and need no counterpart."""


def jax_program(function: Any, dtype: str | None) -> JaxProgram:
    """Return any supported JAX callable, as it runs in a dtype, as a function of parameters and inputs.

    Raises:
        ValueError: the callable is not of a supported kind.
    """
    if isinstance(function, type):
        name = function.__name__
        raise ValueError(f"jax side: expected a function or an instance of {name}, got the class; write {name}(...)")
    if isinstance(function, nnx.Module):
        return _nnx_program(_computing_in(function, dtype))
    if isinstance(function, linen.Module):
        raise ValueError("jax_module: expected a linen module with its variables, (module, variables), got the module")
    if isinstance(function, tuple) and len(function) == 2 and isinstance(function[0], linen.Module):
        return _linen_program(function[0], function[1], dtype)
    if isinstance(function, tuple) and len(function) == 2 and isinstance(function[1], nnx.Module):
        return _nnx_program(_computing_in(function[1], dtype), function[0])
    if isinstance(function, tuple) and len(function) == 2 and callable(function[0]):
        return _pytree_program(function[0], function[1])
    if not callable(function):
        raise ValueError(
            "jax side: expected a function, an nnx.Module, (linen module, variables), (function, parameters) or a "
            f"callable pytree, got {type(function).__name__}"
        )
    if jax.tree.structure(function) == jax.tree.structure(0):
        return JaxProgram(lambda observe, values, *args, **kwargs: (function(*args, **kwargs), {}), {}, frozenset())
    return _pytree_program(lambda module, *args, **kwargs: module(*args, **kwargs), function)


def _computing_in(module: nnx.Module, dtype: str | None) -> nnx.Module:
    """Return a copy of a module that computes in a dtype, as PyTorch's Module.to does; None: in its own.

    Flax's modules store the dtype in which they compute. It is replaced where it is that of the module's parameters. A
    narrower dtype is a decision of the module, and stays. The dtype of parameters is also that of a recurrent cell's
    first state.
    """
    copied = nnx.clone(module)
    if dtype is None:
        return copied
    for _, node in nnx.iter_graph(copied):
        if isinstance(node, nnx.Module) and getattr(node, "param_dtype", None) is jnp.float32:
            setattr(node, "param_dtype", jnp.dtype(DTYPES[dtype]))  # noqa: B010
        computes = getattr(node, "dtype", None) if isinstance(node, nnx.Module) else None
        if computes is None or isinstance(computes, property):
            continue
        own = {value[...].dtype for value in vars(node).values() if isinstance(value, nnx.Variable)}
        if jnp.dtype(computes) in own and jnp.issubdtype(computes, jnp.inexact):
            setattr(node, "dtype", jnp.dtype(DTYPES[dtype]))  # noqa: B010  # pyright knows no such attribute
    return copied


def _linen_program(module: linen.Module, variables: Any, dtype: str | None) -> JaxProgram:
    """Return a function of a linen module's variables; its collections of state may change."""
    if not isinstance(variables, Mapping) or not all(isinstance(tree, Mapping) for tree in variables.values()):
        raise ValueError(
            "jax_module: expected (linen module, variables) with variables as module.init returns them, "
            "{'params': {...}}, got other keys or values; pass {'params': parameters}"
        )
    states = [collection for collection in variables if collection != "params"]
    own = {jnp.dtype(leaf.dtype) for leaf in jax.tree.leaves(variables) if is_array(leaf)}
    changed = _linen_in(module, dtype, own)

    def apply(values: Any, *args: Any, **kwargs: Any) -> Any:
        if not states or "mutable" in kwargs:
            return changed.apply(values, *args, **kwargs), {}
        return changed.apply(values, *args, mutable=states, **kwargs)

    program = _pytree_program(apply, variables, "params")

    def with_updates(observe: Observe, values: Mapping[str, Any], *args: Any, **kwargs: Any) -> tuple[Any, dict]:
        (output, states), _ = program.apply(observe, values, *args, **kwargs)
        paths = jax.tree.leaves_with_path(states)
        found = {".".join(str(_key(entry)) for entry in path).removesuffix(".value"): leaf for path, leaf in paths}
        return output, {n: leaf for n, leaf in found.items() if n in values and leaf is not values[n]}

    return program._replace(apply=with_updates)


def _linen_in(module: linen.Module, dtype: str | None, own: set) -> linen.Module:
    """Return a linen module that computes in a dtype, and with it those in its fields; see _computing_in.

    Args:
        module: the module.
        dtype: the dtype; None: its own.
        own: dtypes of the module's parameters.
    """
    if dtype is None:
        return module
    values = {field.name: getattr(module, field.name, None) for field in dataclasses.fields(module)}
    changed: dict[str, Any] = {
        name: _linen_in(value, dtype, own)
        for name, value in values.items()
        if isinstance(value, linen.Module) and name != "parent"
    }
    for name in ("param_dtype", "dtype"):
        value = values.get(name)
        if value is None or isinstance(value, linen.Module) or not jnp.issubdtype(value, jnp.inexact):
            continue
        if jnp.dtype(value) in own or (name == "param_dtype" and jnp.dtype(value) == jnp.float32):
            changed[name] = jnp.dtype(DTYPES[dtype])
    return module.clone(**changed) if changed else module


def _nnx_program(
    module: nnx.Module, function: Callable = lambda module, *args, **kwargs: module(*args, **kwargs)
) -> JaxProgram:
    """Return a function of a module's variables.

    Args:
        module: the module.
        function: receives the module, then the arguments.
    """
    graph, state = nnx.split(module)
    flat = dict(nnx.to_flat_state(state))
    names = {".".join(map(str, path)): path for path in flat}
    values_of = {path: _raw(leaf) for path, leaf in flat.items()}
    floating = {
        name: path
        for name, path in names.items()
        if is_array(values_of[path]) and jnp.issubdtype(values_of[path].dtype, jnp.inexact)
    }

    def apply(observe: Observe, values: Mapping[str, Any], *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        filled = {path: leaf.copy() if isinstance(leaf, nnx.Variable) else leaf for path, leaf in flat.items()}
        for name, path in floating.items():
            leaf = flat[path]
            filled[path] = leaf.replace(values[name]) if isinstance(leaf, nnx.Variable) else values[name]
        merged = nnx.merge(graph, nnx.from_flat_state(filled))
        before = {name: _raw(leaf) for name, leaf in nnx_variables(merged).items()}
        output = observe(merged, lambda: function(merged, *args, **kwargs))
        after = {name: _raw(leaf) for name, leaf in nnx_variables(merged).items()}
        return output, {name: after[name] for name in floating if after.get(name) is not before.get(name)}

    parameters = {name: values_of[path] for name, path in floating.items()}
    trainable = frozenset(name for name, path in floating.items() if isinstance(flat[path], nnx.Param))
    constants = frozenset(name for name, path in floating.items() if not isinstance(flat[path], nnx.Variable))
    return JaxProgram(apply, parameters, trainable, constants)


def nnx_variables(module: nnx.Module) -> dict[str, nnx.Variable]:
    """Return the variables of a module by name."""
    nodes = nnx.iter_graph(module)
    return {".".join(map(str, path)): value for path, value in nodes if isinstance(value, nnx.Variable)}


def _raw(leaf: Any) -> Any:
    """Return the value that a variable holds, the same object each time, or a plain array."""
    return leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf


def _pytree_program(apply: Callable, tree: Any, trained: str | None = None) -> JaxProgram:
    """Return a function over a pytree of parameters.

    Args:
        apply: receives the pytree, then the arguments.
        tree: parameters; leaves that are no floating arrays stay as they are.
        trained: top-level key of the trainable ones, which is left out of their names; None: all are trainable.
    """
    paths, structure = jax.tree.flatten_with_path(tree)
    # A variable of nnx in a pytree has one leaf, its value.
    names = [".".join(str(_key(entry)) for entry in path).removesuffix(".value") for path, _ in paths]
    trainable = frozenset(
        n.removeprefix(f"{trained}.") for n in names if trained is None or n.startswith(f"{trained}.")
    )
    names = [name.removeprefix(f"{trained}.") for name in names]
    leaves = [leaf for _, leaf in paths]
    floating = [is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]

    def filled(observe: Observe, values: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        new = [values[n] if has else leaf for n, leaf, has in zip(names, leaves, floating, strict=True)]
        tree = jax.tree.unflatten(structure, new)
        return observe(tree, lambda: apply(tree, *args, **kwargs)), {}

    parameters = {name: leaf for name, leaf, has in zip(names, leaves, floating, strict=True) if has}
    return JaxProgram(filled, parameters, trainable & parameters.keys())


def _key(entry: Any) -> Any:
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return getattr(entry, attribute)
    return entry
