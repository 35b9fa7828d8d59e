"""Mesh axes over which arrays vary inside jax.shard_map; the operands of a custom operation must agree on them."""

from typing import Any

import jax
from jax import Array


def match_varying_axes(arrays: tuple) -> list[Any]:
    """Cast arrays inside shard_map to vary over every mesh axis that one of them varies over.

    The transpose of this cast sums the gradient of a replicated array, such as a parameter, over the added axes.

    Args:
        arrays: arrays, or None for missing ones.

    Returns:
        The cast arrays, with None where ``arrays`` has None.
    """
    axes = [frozenset() if x is None else varying_axes(jax.typeof(x)) for x in arrays]
    all_axes = frozenset().union(*axes)
    return [
        x if x is None or own == all_axes else jax.lax.pcast(x, tuple(sorted(all_axes - own)), to="varying")
        for x, own in zip(arrays, axes, strict=True)
    ]


def vary(tree: Any, axes: tuple[str, ...]) -> Any:
    """Cast the arrays of a pytree inside shard_map to vary over all given mesh axes.

    Each rank gets its own gradient of such values. JAX sums the gradients of replicated values over the ranks.

    Args:
        tree: pytree of arrays.
        axes: names of mesh axes.
    """

    def varying(x: Array) -> Array:
        missing = tuple(axis for axis in axes if axis not in varying_axes(jax.typeof(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(varying, tree)


def varying_axes(kind: Any) -> frozenset[str]:
    """Return the mesh axes over which the arrays of an abstract value vary, in any supported version of JAX.

    Args:
        kind: the abstract value, such as ``jax.typeof(x)`` or the ``aval`` of a variable of a jaxpr.
    """
    manual = getattr(kind, "manual_axis_type", None)
    return frozenset(getattr(manual, "varying", None) or getattr(kind, "vma", ()) or ())
