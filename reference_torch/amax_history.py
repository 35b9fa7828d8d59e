"""Delayed scaling of FP8 in PyTorch; diptych/plans/amax_history.py defines histories and scales.

Mirrors ``jax_impl/amax_history.py``.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from diptych.plans.amax_history import EXPONENTS, MANTISSA_BITS, SHAPE, observed, scale_exponents
from diptych.plans.fp8 import ProductRecipe
from reference_torch.autograd import differentiable_once
from reference_torch.fp8 import amax


@torch.no_grad()
def delayed_scales(history: Float[Tensor, "3 1 1 e"], recipe: ProductRecipe, shift: int) -> Float[Tensor, "3"]:
    """Return the scales of inputs, weights and gradients, float32.

    Args:
        history: history of a linear map. SHAPE
        recipe: how the map quantises.
        shift: see diptych.plans.amax_history.gradient_shift.
    """
    numbers = torch.arange(EXPONENTS, device=history.device, dtype=torch.int32)
    largest = torch.where(history.view(SHAPE[0], EXPONENTS) > 0, numbers, 0).amax(1)
    return (scale_exponents(largest, recipe, shift, torch) << MANTISSA_BITS).to(torch.int32).view(torch.float32)


def observe(
    y: Float[Tensor, "*b o"],
    x: Float[Tensor, "*b i"],
    weight: Float[Tensor, "o i"],
    history: Float[Tensor, "3 1 1 e"],
    shift: int,
) -> Float[Tensor, "*b o"]:
    """Return the output of a linear map, whose backward observes its arrays: the gradient of the history.

    Args:
        y: output of the map. [..., O]
        x: its input. [..., I]
        weight: its weight. [O, I]
        history: its history. SHAPE
        shift: see diptych.plans.amax_history.gradient_shift.
    """
    return _Observed.apply(y, x, weight, history, shift) if torch.is_grad_enabled() else y


class _Observed(torch.autograd.Function):
    """The identity of an output, of which the history has a gradient."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, weight: Tensor, history: Tensor, shift: int) -> Tensor:
        """Save the exponents of input and weight, and return a view of the output."""
        ctx.save_for_backward(torch.stack([_exponent(x), _exponent(weight)]))
        ctx.shift = shift
        return y.view_as(y)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradient of the output unchanged, and 1 at the exponents of the three arrays."""
        (exponents,) = ctx.saved_tensors
        exponents = torch.cat([exponents, _exponent(gradient)[None]])
        places = torch.arange(EXPONENTS, device=exponents.device)
        return gradient, None, None, observed(exponents, ctx.shift, places, torch), None


def _exponent(x: Tensor) -> Tensor:
    """Return the exponent bits of the largest entry, a number of int32; 0 for an array without entries."""
    return amax(x).float().view(torch.int32) >> MANTISSA_BITS
