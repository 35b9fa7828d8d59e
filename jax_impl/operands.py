"""What the checks of operations ask of an array, and the type that sums are taken in."""

from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from diptych.plans.model import operations
from diptych.plans.model.operations import Operand


def operand(name: str, x: Any) -> Operand:
    """Return what diptych.plans.model.operations checks of an array.

    Args:
        name: of the argument.
        x: the argument.

    Raises:
        ValueError: x is no dense array of the framework.
    """
    if not isinstance(x, Array):
        raise operations.refuse_operand(name, type(x).__name__)
    return Operand(tuple(x.shape), str(x.dtype))


def given_operand(name: str, x: Any) -> Operand | None:
    """Return operand(name, x), or None where x was not given."""
    return None if x is None else operand(name, x)


def at_least_float32(x: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """x itself, or in float32 if it is narrower: see diptych.plans.config.KEPT_IN_FLOAT32."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
