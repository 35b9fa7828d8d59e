"""Types of values in a program of several ranks: whether they may differ along a mesh axis."""

from typing import Any

import jax
from jax import Array, lax


def vary(tree: Any, axes: tuple[str, ...]) -> Any:
    """The same values, of a type that may differ along every axis given.

    Gradients of such values are the rank's own; of values known to be equal on all ranks JAX sums them where they are
    taken.
    """

    def varying(x: Array) -> Array:
        missing = tuple(axis for axis in axes if axis not in jax.typeof(x).manual_axis_type.varying)
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(varying, tree)
