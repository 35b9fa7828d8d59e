"""The description of an array for the checks of operations, and the type in which sums are computed."""

import functools
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

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
    if not isinstance(x, Tensor):
        raise operations.operand_error(name, type(x).__name__)
    if x.layout is not torch.strided:
        raise operations.operand_error(name, str(x.layout).removeprefix("torch."))
    return Operand(tuple(x.shape), _type_name(x.dtype))


@functools.cache
def _type_name(dtype: torch.dtype) -> str:
    """Return the name of a type, as diptych.plans writes it."""
    return str(dtype).removeprefix("torch.")


def given_operand(name: str, x: Any) -> Operand | None:
    """Return operand(name, x), or None if x is None."""
    return None if x is None else operand(name, x)


def at_least_float32(x: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """Return x, converted to float32 if its type is narrower; see diptych.plans.config.KEPT_IN_FLOAT32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
