"""The description of an array for the checks of operations, and the type in which sums are computed."""

from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from diptych.plans.model import operations
from diptych.plans.model.operations import Operand


def operand(name: str, x: Any) -> Operand:
    """Return the shape and type of an array, for the checks of diptych.plans.model.operations.

    Args:
        name: name of the argument.
        x: value of the argument.

    Raises:
        ValueError: x is no dense array of the framework.
    """
    if not isinstance(x, Array):
        raise operations.operand_error(name, type(x).__name__)
    return Operand(tuple(x.shape), str(x.dtype))


def given_operand(name: str, x: Any) -> Operand | None:
    """Return operand(name, x), or None if x is None."""
    return None if x is None else operand(name, x)


def at_least_float32(x: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """Return x, converted to float32 if its type is narrower; see diptych.plans.config.KEPT_IN_FLOAT32."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
