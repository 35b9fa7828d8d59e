"""Values saved for backward in 8 bits in PyTorch; diptych/plans/activation_storage.py defines them.

Mirrors ``jax_impl/activation_storage.py``.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

from diptych.plans.activation_storage import ACTIVATION_INPUT, QUANTIZATION, packed_width
from diptych.plans.fp8 import ProductRecipe
from reference_torch.autograd import differentiable_once, refuse_transformed, without_autocast
from reference_torch.fp8 import ALONE, SharingRanks, dequantize, quantize
from reference_torch.grouped_fp8 import GroupedLinear, Groups
from reference_torch.recompute import name_value
from reference_torch.recompute.region import slot_of


def pack(x: Float[Tensor, "*b k"]) -> UInt8[Tensor, "*b p"]:
    """Return a tensor in 8 bits, [..., packed_width(K)] uint8.

    Args:
        x: the tensor. [..., K]
    """
    values, scale_inv = quantize(x.detach().reshape(-1, x.shape[-1]), QUANTIZATION)
    exponents = ((1 / scale_inv).view(torch.int32) >> 23 & 255).to(torch.uint8)
    return torch.cat([values.view(torch.uint8), exponents], 1).view(*x.shape[:-1], packed_width(x.shape[-1]))


def unpack(packed: UInt8[Tensor, "*b p"], width: int, dtype: torch.dtype) -> Float[Tensor, "*b k"]:
    """Return the values [..., K] of a packed tensor.

    Args:
        packed: result of pack. [..., packed_width(K)] uint8
        width: elements of a row. K
        dtype: type of the result.
    """
    rows = packed.reshape(-1, packed.shape[-1])
    scale_inv = 1 / (rows[:, width:].to(torch.int32) << 23).view(torch.float32)
    values = rows[:, :width].view(torch.float8_e4m3fn)
    return dequantize(values, scale_inv, QUANTIZATION).to(dtype).view(*packed.shape[:-1], width)


def packed_for_backward(x: Float[Tensor, "*b k"], name: str | None) -> UInt8[Tensor, "*b p"] | None:
    """Pack a tensor for backward, or return None if it is not saved in 8 bits.

    Args:
        x: the tensor. [..., K]
        name: name of the value, one of diptych.plans.model.values.VALUES; None: it is not saved in 8 bits.

    Returns:
        [..., packed_width(K)] uint8; None also if autograd saves nothing now, or if recompute frees x.
    """
    is_saved = name is not None and torch.is_grad_enabled() and slot_of(x) is None
    return name_value(pack(x), name) if is_saved and name is not None else None


class PlainProducts:
    """The matrix products of a linear layer and of its gradients, in the type of its input."""

    def forward(self, x: Tensor, weight: Tensor, bias: None = None) -> Tensor:
        """Return x @ weight.T; there is no bias."""
        return functional.linear(x, weight, bias)

    def input_gradient(self, x: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
        """Return the gradient of x from that of the output."""
        return gradient @ weight

    def weight_gradient(self, x: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
        """Return the gradient of the weight from the input and the gradient of the output."""
        return gradient.flatten(0, -2).T @ x.flatten(0, -2)


class PackedProducts(NamedTuple):
    """Matrix products whose gradients read a saved input, which may be packed."""

    products: Any
    """PlainProducts or fp8.Fp8Products."""

    def forward(self, x: Tensor, weight: Tensor, bias: None = None) -> Tensor:
        """Return x @ weight.T; there is no bias."""
        return self.products.forward(x, weight, bias)

    def input_gradient(self, saved: Tensor | None, weight: Tensor, gradient: Tensor) -> Tensor:
        """Return the gradient of the input from that of the output."""
        like = gradient.new_empty(()).expand(*gradient.shape[:-1], weight.shape[1])
        return self.products.input_gradient(like, weight, gradient)

    def weight_gradient(self, saved: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
        """Return the gradient of the weight from the saved input and the gradient of the output."""
        x = _read(saved, weight.shape[1], gradient.dtype)
        return self.products.weight_gradient(x, weight, gradient)


def packed_linear(
    x: Float[Tensor, "*b i"], weight: Float[Tensor, "o i"], packed: UInt8[Tensor, "*b p"] | None, products: Any
) -> Float[Tensor, "*b o"]:
    """Return x @ weight.T, whose backward reads the input in 8 bits.

    Args:
        x: input. [..., I]
        weight: weight, in the type of x for PlainProducts. [O, I]
        packed: the input as packed_for_backward returns it. [..., packed_width(I)]
        products: PlainProducts or fp8.Fp8Products.

    Raises:
        NotImplementedError: torch.func transforms an argument.
    """
    if has_torch_function((x, weight)):  # such as the mode that defers gradients of weights
        return handle_torch_function(packed_linear, (x, weight), x, weight, packed, products)
    refuse_transformed("packed_linear", "leave activation_storage out", x, weight)
    with without_autocast(x.device.type):
        return _PackedLinear.apply(x, weight, packed, PackedProducts(products))


class _PackedLinear(torch.autograd.Function):
    """The linear layer of packed_linear."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, packed: Tensor | None, products: PackedProducts) -> Tensor:
        """Save the input for the gradient of the weight, packed unless recompute frees it, and multiply."""
        saved = x if packed is None else packed
        ctx.save_for_backward(saved if ctx.needs_input_grad[1] else None, weight)
        ctx.products = products
        return products.forward(x, weight).data  # a new base tensor; CheckpointWithoutOutput cannot free a view

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradients that are needed; each is one matrix product."""
        saved, weight = ctx.saved_tensors
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        d_x = ctx.products.input_gradient(saved, weight, gradient) if needs_x else None
        d_weight = ctx.products.weight_gradient(saved, weight, gradient) if needs_weight else None
        return d_x, d_weight, None, None


class PackedGroups(Groups):
    """Groups of rows whose gradients read saved rows, which may be packed."""

    def read(self, saved: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """Return the values [M, width] of saved rows, rounded to 8 bits."""
        return _read(saved, width, dtype)

    def products(self, x: Tensor, weight: Tensor, gradient: Tensor | None = None) -> Any:
        """Return the matrix products of one group, with the scales of the arrays of all groups."""
        return PlainProducts() if self.recipe is None else super().products(x, weight, gradient)


def packed_grouped_linear(
    x: Float[Tensor, "m i"],
    weight: Float[Tensor, "e o i"],
    sizes: Sequence[int],
    packed: UInt8[Tensor, "m p"] | None,
    recipe: ProductRecipe | None = None,
    scales: Float[Tensor, "3"] | None = None,
    ranks: SharingRanks = ALONE,
) -> Float[Tensor, "m o"]:
    """Multiply consecutive rows by the matrix of their group; backward reads the rows in 8 bits.

    Args:
        x: rows, those of the first group first. [M, I]
        weight: a matrix for each group, in the type of x without a recipe. [E, O, I]
        sizes: number of rows of each group; their sum is M. [E]
        packed: the rows as packed_for_backward returns them. [M, packed_width(I)]
        recipe: how the arrays are quantised for matrix products of 8-bit floats; None: not at all.
        scales: see fp8.fp8_linear.
        ranks: see fp8.fp8_linear.

    Returns:
        [M, O] in the type of x.
    """
    return GroupedLinear.apply(x, weight, packed, PackedGroups(tuple(sizes), recipe, scales, ranks))


def packed_activation(function: Callable[..., Tensor], x: Float[Tensor, "*b k"], impl: str) -> Tensor:
    """Return ``function(x, impl)``, whose backward reads x in 8 bits.

    Args:
        function: activation function.
        x: its input. [..., K]
        impl: implementation of the function.
    """
    if not (torch.is_grad_enabled() and x.requires_grad):
        return function(x, impl)
    refuse_transformed("packed_activation", "leave activation_storage out", x)
    return _PackedActivation.apply(x, packed_for_backward(x, ACTIVATION_INPUT), lambda x: function(x, impl))


class _PackedActivation(torch.autograd.Function):
    """The activation function of packed_activation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor | None, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Save the packed input, or the input if recompute frees it."""
        ctx.save_for_backward(x if packed is None else packed)
        ctx.function = function
        ctx.width = x.shape[-1]
        return function(x)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradient of the function at the saved values."""
        (saved,) = ctx.saved_tensors
        x = _read(saved, ctx.width, gradient.dtype).requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x)
        (d_x,) = torch.autograd.grad(y, x, gradient)
        return d_x, None, None


def _read(saved: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Return the values [..., width] of a saved input, packed or not, rounded to 8 bits."""
    return unpack(saved if saved.dtype == torch.uint8 else pack(saved), width, dtype)
