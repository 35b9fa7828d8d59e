"""Delayed scaling of FP8 in PyTorch; diptych/plans/amax_history.py defines histories and scales.

Mirrors ``jax_impl/amax_history.py``.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from diptych.plans.amax_history import EXPONENTS, MANTISSA_BITS, SHAPE, is_valid, observed, scale_exponents
from diptych.plans.fp8 import ProductRecipe
from reference_torch.autograd import differentiable_once
from reference_torch.fp8 import GRADIENTS, amax


@torch.no_grad()
def delayed_scales(history: Float[Tensor, "3 1 1 e"], recipe: ProductRecipe, factor: int) -> Float[Tensor, "3"]:
    """Return the scales of inputs, weights and gradients, [3] float32.

    Args:
        history: history of a linear layer. SHAPE
        recipe: how the layer quantises.
        factor: factor by which the gradients of backward exceed the gradients of the step's mean loss.

    Raises:
        ValueError: an optimizer has updated the history as a weight. On a GPU the scales are NaN instead.
    """
    valid = is_valid(history)
    if history.device.type == "cpu" and not valid:
        raise ValueError(
            "amax_history: expected numbers of steps >= 0, got a negative number, infinity or NaN, because an "
            "optimizer has updated it as a weight; give histories to HistoryAdamW, as docs/fp8.md shows"
        )
    numbers = torch.arange(EXPONENTS, device=history.device, dtype=torch.int32)
    largest = torch.where(history.view(SHAPE[0], EXPONENTS) > 0, numbers, 0).amax(1)
    scales = (scale_exponents(largest, recipe, torch) << MANTISSA_BITS).to(torch.int32).view(torch.float32)
    scales[GRADIENTS] /= factor
    return scales.where(valid, float("nan"))


def observe(
    y: Float[Tensor, "*b o"],
    x: Float[Tensor, "*b i"],
    weight: Float[Tensor, "*e o i"],
    history: Float[Tensor, "3 1 1 e"],
    factor: int,
) -> Float[Tensor, "*b o"]:
    """Return y; backward returns what it observes of the arrays of the linear layer as the gradient of the history.

    Args:
        y: output of the layer. [..., O]
        x: its input. [..., I]
        weight: its weight. [O, I], or [E, O, I] of experts
        history: its history. SHAPE
        factor: see delayed_scales.
    """
    return _Observed.apply(y, x, weight, history, factor) if torch.is_grad_enabled() else y


class _Observed(torch.autograd.Function):
    """The identity of an output, whose backward gives the history a gradient."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, weight: Tensor, history: Tensor, factor: int) -> Tensor:
        """Save the exponents of input and weight, and return the output, in the same memory."""
        weight_exponent = _exponent(amax(weight).to(x.dtype))  # as if its elements had been rounded
        ctx.save_for_backward(torch.stack([_exponent(x), weight_exponent]))
        ctx.factor = factor
        return y.data  # a new base tensor; CheckpointWithoutOutput cannot free a view

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradient of the output unchanged, and 1 at the exponents of the three arrays."""
        (exponents,) = ctx.saved_tensors
        exponents = torch.cat([exponents, _exponent(gradient, ctx.factor)[None]])
        places = torch.arange(EXPONENTS, device=exponents.device)
        return gradient, None, None, observed(exponents, places, torch), None


def _exponent(x: Tensor, factor: int = 1) -> Tensor:
    """Return the exponent bits of the largest absolute element / factor, int32; 0 for an array without elements."""
    return (amax(x).float() / factor).view(torch.int32) >> MANTISSA_BITS
