"""Linear maps by products of 8-bit floats in PyTorch; diptych/plans/fp8.py defines what they compute.

Mirrors ``jax_impl/fp8.py``.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from diptych.plans.fp8 import EXPONENT_BITS, ProductRecipe, Quantization, blocks_of
from reference_torch.autograd import differentiable_once, refuse_transformed


def quantize(x: Float[Tensor, "n k"], quantization: Quantization) -> tuple[Tensor, Float[Tensor, "a b"]]:
    """Quantise a matrix.

    Args:
        x: the matrix. [N, K]
        quantization: type and blocks.

    Returns:
        The matrix in the 8-bit type, [N, K], and the inverse of the scale of every block, [blocks of N, blocks of K]
        float32. An entry that is not finite is NaN, and so are all others with the same scale.
    """
    wide = x.float()
    scale = _scales(_maxima(wide, quantization), quantization)
    largest = quantization.largest
    clipped = (wide * _spread(scale, wide.shape, quantization)).clamp(-largest, largest)
    return clipped.to(getattr(torch, quantization.dtype)), 1 / scale


def dequantize(values: Tensor, inverse: Float[Tensor, "a b"], quantization: Quantization) -> Float[Tensor, "n k"]:
    """Return the numbers [N, K] float32 that a quantised matrix stands for; arguments as ``quantize`` returns them."""
    return values.float() * _spread(inverse, values.shape, quantization)


def fp8_linear(x: Float[Tensor, "*b i"], weight: Float[Tensor, "o i"], recipe: ProductRecipe) -> Float[Tensor, "*b o"]:
    """Return x @ weight.T by products of 8-bit floats, forward and backward.

    Backward quantises x again instead of saving it in 8 bits.

    Args:
        x: input. [..., I]
        weight: weight. [O, I]
        recipe: how the arrays are quantised.

    Returns:
        [..., O] in the type of x.
    """
    refuse_transformed("fp8_linear", "leave fp8 out", x, weight)
    return _Fp8Linear.apply(x, weight, recipe)


def _weight_gradient(x: Float[Tensor, "n i"], gradient: Float[Tensor, "n o"], recipe: ProductRecipe) -> Tensor:
    """Return the gradient [O, I] float32 of the weight, from the input and the gradient of the output."""
    return _product(gradient.T, x.T, recipe.gradients, recipe.inputs)


class _Fp8Linear(torch.autograd.Function):
    """The linear map of fp8_linear."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, recipe: ProductRecipe) -> Tensor:
        """Save the operands as they are, and multiply them quantised."""
        ctx.save_for_backward(x, weight)
        ctx.recipe = recipe
        y = _product(x.reshape(-1, x.shape[-1]), weight, recipe.inputs, recipe.weights)
        return y.to(x.dtype).view(*x.shape[:-1], -1)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradients that are needed; each is one product."""
        x, weight = ctx.saved_tensors
        recipe: ProductRecipe = ctx.recipe
        rows = gradient.reshape(-1, gradient.shape[-1])
        d_x = d_weight = None
        if ctx.needs_input_grad[0]:
            d_x = _product(rows, weight.T, recipe.gradients, recipe.weights).to(x.dtype).view(x.shape)
        if ctx.needs_input_grad[1]:
            d_weight = _weight_gradient(x.reshape(-1, x.shape[-1]), rows, recipe).to(weight.dtype)
        return d_x, d_weight, None


def _product(a: Tensor, b: Tensor, of_a: Quantization, of_b: Quantization) -> Tensor:
    """Return a @ b.T [N, O] float32 of matrices [N, K] and [O, K], quantised."""
    pairs = ((a, of_a), (b, of_b))
    a, b = (dequantize(*quantize(x, quantization), quantization) for x, quantization in pairs)
    return a @ b.T


def _maxima(x: Tensor, quantization: Quantization) -> Tensor:
    """Return the largest absolute value of every block, [blocks of N, blocks of K]; of a matrix without entries 0."""
    if not x.numel():
        return x.new_zeros(blocks_of(x.shape, quantization))
    if quantization.block is None:
        return x.abs().amax().view(1, 1)
    rows, columns = quantization.block
    blocks = blocks_of(x.shape, quantization)
    missing = (0, blocks[1] * columns - x.shape[1], 0, blocks[0] * rows - x.shape[0])
    return functional.pad(x.abs(), missing).view(blocks[0], rows, blocks[1], columns).amax((1, 3))


def _scales(amax: Tensor, quantization: Quantization) -> Tensor:
    """Return the scale of each maximum; see diptych.plans.fp8.scales."""
    scale = torch.full_like(amax, quantization.largest) / amax
    if quantization.block is not None:
        scale = (scale.view(torch.int32) & EXPONENT_BITS).view(torch.float32)
    scale = scale.masked_fill(scale.isinf(), 1.0)
    return scale.masked_fill(~amax.isfinite(), float("nan"))


def _spread(scale: Tensor, shape: torch.Size, quantization: Quantization) -> Tensor:
    """Repeat the scale of each block for its entries. [N, K], or [1, 1] for one scale."""
    if quantization.block is None:
        return scale
    rows, columns = quantization.block
    return scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: shape[0], : shape[1]]
