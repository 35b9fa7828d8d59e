"""Linear layers by matrix products of 8-bit floats in PyTorch; diptych/plans/fp8.py defines what they compute.

Mirrors ``jax_impl/fp8.py``.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

from diptych.plans.fp8 import EXPONENT_BITS, ProductRecipe, Quantization, blocks_of, check_scales
from diptych.plans.model import operations
from reference_torch.autograd import differentiable_once, refuse_transformed, without_autocast
from reference_torch.groups import wait_for
from reference_torch.operands import operand
from reference_torch.scaled_products import Quantized, is_8_bit_product, product_in_8_bits

INPUTS, WEIGHTS, GRADIENTS = range(3)
"""Indices into a recipe and into scales."""


class SharingRanks(NamedTuple):
    """Ranks that have parts of the same arrays, and take one scale for all of them with the recipe ``current``."""

    groups: tuple[ProcessGroup, ...] = ()
    """Context- and tensor-parallel ranks; every rank quantises the same arrays in the same order."""
    timeout: float = 600.0
    """Seconds to wait for the other ranks."""

    def largest(self, x: Tensor) -> Tensor:
        """Replace a tensor by its maximum over the ranks, infinity for a NaN, and return it.

        The maximum of a NaN and a number depends on the order in gloo, and is the number in NCCL.
        """
        if self.groups:
            x.masked_fill_(x.isnan(), float("inf"))
        for group in self.groups:
            work = dist.all_reduce(x, dist.ReduceOp.MAX, group=group, async_op=True)
            wait_for(work, "the largest element of an array in FP8", self.timeout)
        return x


ALONE = SharingRanks()
"""One rank, which has unsharded arrays."""


def quantize(
    x: Float[Tensor, "n k"],
    quantization: Quantization,
    scale: Float[Tensor, ""] | None = None,
    ranks: SharingRanks = ALONE,
) -> tuple[Tensor, Float[Tensor, "a b"]]:
    """Quantise a matrix.

    Args:
        x: the matrix. [N, K]
        quantization: type and blocks.
        scale: scale of the array, if quantization.has_given_scale. [] float32
        ranks: ranks that have other parts of an array with one scale.

    Returns:
        The matrix in the 8-bit type, [N, K], and the inverse of the scale of every block, [blocks of N, blocks of K]
        float32. An element that is not finite becomes NaN, and so do all other elements with the same scale.
    """
    x = x.float() if x.dtype == torch.float64 else x  # narrower types become float32 when they are multiplied by scales
    if quantization.has_given_scale:
        assert scale is not None, "has_given_scale makes the scale an argument"
        scales = scale.where(amax(x).isfinite(), float("nan")).view(1, 1)
    else:
        maxima = _maxima(x, quantization)
        scales = _scales(ranks.largest(maxima) if quantization.block is None else maxima, quantization)
    return _cast(x, scales, quantization), 1 / scales


def array_scale(x: Tensor, quantization: Quantization, ranks: SharingRanks = ALONE) -> Float[Tensor, ""]:
    """Return the scale of an array of any shape that has one scale."""
    return _scales(ranks.largest(amax(x).float().view(1, 1)), quantization).view(())


def dequantize(values: Tensor, scale_inv: Float[Tensor, "a b"], quantization: Quantization) -> Float[Tensor, "n k"]:
    """Return the values [N, K] float32 of a quantised matrix; the arguments are the results of ``quantize``."""
    return values.to(torch.float32, copy=True).mul_(_expand_scales(scale_inv, values.shape, quantization))


def amax(x: Tensor) -> Tensor:
    """Return the largest absolute value of an array: NaN if it has a NaN (JAX: infinity), 0 without elements."""
    if not x.numel():
        return x.new_zeros(())
    least, most = torch.aminmax(x.detach())
    return torch.maximum(-least, most)


def fp8_linear(
    x: Float[Tensor, "*b i"],
    weight: Float[Tensor, "o i"],
    recipe: ProductRecipe,
    scales: Float[Tensor, "3"] | None = None,
    ranks: SharingRanks = ALONE,
) -> Float[Tensor, "*b o"]:
    """Return x @ weight.T by matrix products of 8-bit floats, forward and backward.

    The weight is rounded to the type of x before it is quantised, and its gradient after it is computed, as in layers
    without FP8. Backward quantises x again instead of saving it in 8 bits.

    Args:
        x: input. [..., I]
        weight: weight. [O, I]
        recipe: how the arrays are quantised.
        scales: with a delayed recipe, the scales of x, weight and the gradient of the output; see
            amax_history.delayed_scales. [3] float32
        ranks: ranks that have other parts of x, weight and output.

    Returns:
        [..., O] in the type of x.

    Raises:
        ValueError: an argument has a wrong shape or type.
        NotImplementedError: torch.func transforms an argument.
    """
    if has_torch_function((x, weight)):  # such as the mode that defers gradients of weights
        return handle_torch_function(fp8_linear, (x, weight), x, weight, recipe, scales, ranks)
    operations.check_linear(operand("x", x), operand("weight", weight), None)
    check_scales(recipe, None if scales is None else operand("scales", scales))
    refuse_transformed("fp8_linear", "leave fp8 out", x, weight)
    return _Fp8Linear.apply(x, weight, Fp8Products(recipe, weight.dtype, scales, ranks))


class Fp8Products(NamedTuple):
    """The matrix products of fp8_linear and of its gradients, which autocast does not change."""

    recipe: ProductRecipe
    dtype: torch.dtype
    """Type of the weight and of its gradient."""
    scales: Tensor | None = None
    """Scales of inputs, weights and gradients with a delayed recipe. [3] float32"""
    ranks: SharingRanks = ALONE
    """Ranks that have other parts of the arrays."""

    def forward(self, x: Tensor, weight: Tensor, bias: None = None) -> Tensor:
        """Return x @ weight.T in the type of x; there is no bias."""
        y = self._matrix_product(_rows(x), weight.to(x.dtype), INPUTS, WEIGHTS)
        # .data is a new base tensor, because CheckpointWithoutOutput cannot free a view.
        return y.to(x.dtype).view(*x.shape[:-1], len(weight)).data

    def input_gradient(self, x: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
        """Return the gradient of x, in its shape and type, from that of the output."""
        d_x = self._matrix_product(_rows(gradient), weight.to(x.dtype).T, GRADIENTS, WEIGHTS)
        return d_x.to(x.dtype).view(x.shape)

    def weight_gradient(self, x: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
        """Return the gradient of the weight from the input and the gradient of the output."""
        d_weight = self._matrix_product(_rows(gradient).T, _rows(x).T, GRADIENTS, INPUTS).to(x.dtype)
        return d_weight.to(self.dtype)

    def _matrix_product(self, a: Tensor, b: Tensor, of_a: int, of_b: int) -> Tensor:
        """Return a @ b.T [N, O] float32 of matrices [N, K] and [O, K], quantised as inputs, weights or gradients."""
        first, second = (self._quantised(x, number) for x, number in ((a, of_a), (b, of_b)))
        if is_8_bit_product(first, second):
            return product_in_8_bits(first, second)
        wide, other = (dequantize(*x) for x in (first, second))
        with without_autocast(a.device.type):
            if wide.is_cuda and first.quantization.block is not None:  # bfloat16 is exact: scales are powers of two
                return torch.mm(wide.bfloat16(), other.T.bfloat16(), out_dtype=torch.float32)
            return wide @ other.T

    def _quantised(self, x: Tensor, number: int) -> Quantized:
        """Return a matrix quantised as inputs, weights or gradients."""
        scale = None if self.scales is None else self.scales[number]
        return Quantized(*quantize(x, self.recipe[number], scale, self.ranks), self.recipe[number])


def _rows(x: Tensor) -> Tensor:
    """Flatten all axes but the last: [..., K] to [N, K]."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


class _Fp8Linear(torch.autograd.Function):
    """The linear layer of fp8_linear."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, products: Fp8Products) -> Tensor:
        """Save the operands as they are, and multiply them quantised."""
        ctx.save_for_backward(x, weight)
        ctx.products = products
        return products.forward(x, weight)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradients that are needed; each is one matrix product."""
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        d_x = ctx.products.input_gradient(x, weight, gradient) if needs_x else None
        d_weight = ctx.products.weight_gradient(x, weight, gradient) if needs_weight else None
        return d_x, d_weight, None


def _cast(x: Tensor, scales: Tensor, quantization: Quantization) -> Tensor:
    """Return a matrix in the 8-bit type, contiguous in memory."""
    largest = quantization.largest
    clipped = (x * _expand_scales(scales, x.shape, quantization)).clamp_(-largest, largest)
    return clipped.to(getattr(torch, quantization.dtype), memory_format=torch.contiguous_format)


def _maxima(x: Tensor, quantization: Quantization) -> Tensor:
    """Return the largest absolute value of every block, [blocks of N, blocks of K]; 0 if there are no elements."""
    if quantization.block is None or not x.numel():
        return amax(x).float().repeat(blocks_of(x.shape, quantization))
    rows, columns = quantization.block
    blocks = blocks_of(x.shape, quantization)
    missing = (0, blocks[1] * columns - x.shape[1], 0, blocks[0] * rows - x.shape[0])
    padded = functional.pad(x.abs(), missing) if any(missing) else x.abs()
    return padded.reshape(blocks[0], rows, blocks[1], columns).amax((1, 3)).float()


def _scales(maxima: Tensor, quantization: Quantization) -> Tensor:
    """Return the scale of each maximum; see diptych.plans.fp8.scales."""
    scale = torch.full_like(maxima, quantization.largest) / maxima
    if quantization.block is not None:
        scale = (scale.view(torch.int32) & EXPONENT_BITS).view(torch.float32)
    scale = scale.masked_fill(scale.isinf(), 1.0)
    return scale.masked_fill(~maxima.isfinite(), float("nan"))


def _expand_scales(scale: Tensor, shape: torch.Size, quantization: Quantization) -> Tensor:
    """Repeat the scale of each block for its elements. [N, K], or [1, 1] for one scale."""
    if quantization.block is None:
        return scale
    rows, columns = quantization.block
    return scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: shape[0], : shape[1]]
