"""Inside jax.shard_map an array's type says over which mesh axes it varies; operations of our own must agree on it."""

from typing import Any

import jax
from jax import Array


def varying_alike(arrays: tuple) -> list[Any]:
    """Inside shard_map: arrays typed as varying over every mesh axis that one of them varies over.

    What was replicated, such as a parameter, gets its gradient summed over the axis by the transpose of this.
    """
    axes = [frozenset() if x is None else _varying_axes(x) for x in arrays]
    every = frozenset().union(*axes)
    return [
        x if x is None or own == every else jax.lax.pcast(x, tuple(sorted(every - own)), to="varying")
        for x, own in zip(arrays, axes, strict=True)
    ]


def vary(tree: Any, axes: tuple[str, ...]) -> Any:
    """Inside shard_map: the same values, of a type that may differ along every axis given.

    Gradients of such values are the rank's own; of values known to be equal on all ranks JAX sums them where they are
    taken.
    """

    def varying(x: Array) -> Array:
        missing = tuple(axis for axis in axes if axis not in _varying_axes(x))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(varying, tree)


def _varying_axes(x: Array) -> frozenset:
    kind = jax.typeof(x)
    manual = getattr(kind, "manual_axis_type", None)
    return frozenset(getattr(manual, "varying", None) or getattr(kind, "vma", ()) or ())
