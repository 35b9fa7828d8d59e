"""Linear layers of groups of rows, such as the experts of a mixture, in FP8 in PyTorch.

Each group has a matrix of its own. diptych/plans/fp8.py defines scales and blocks of the arrays.

Mirrors ``jax_impl/grouped_fp8.py``.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from diptych.plans.fp8 import ProductRecipe, check_scales, with_given_scales
from diptych.plans.model import operations
from reference_torch.autograd import differentiable_once, refuse_transformed
from reference_torch.fp8 import (
    ALONE,
    GRADIENTS,
    INPUTS,
    WEIGHTS,
    Fp8Products,
    SharingRanks,
    amax,
    array_scale,
)
from reference_torch.operands import operand


def fp8_grouped_linear(
    x: Float[Tensor, "m i"],
    weight: Float[Tensor, "e o i"],
    sizes: Sequence[int],
    recipe: ProductRecipe,
    scales: Float[Tensor, "3"] | None = None,
    ranks: SharingRanks = ALONE,
) -> Float[Tensor, "m o"]:
    """Multiply consecutive rows by the matrix of their group, by matrix products of 8-bit floats, forward and backward.

    Args:
        x: rows, those of the first group first. [M, I]
        weight: a matrix for each group. [E, O, I]
        sizes: number of rows of each group; their sum is M. [E]
        recipe: how the arrays are quantised.
        scales: see fp8.fp8_linear.
        ranks: ranks that have other parts of x, weight and output.

    Returns:
        [M, O] in the type of x.

    Raises:
        ValueError: an argument has a wrong shape or type.
        NotImplementedError: torch.func transforms an argument.
    """
    operations.check_grouped_linear(operand("x", x), operand("weight", weight), (len(sizes),))
    operations.check_group_sizes(sizes, len(x))
    check_scales(recipe, None if scales is None else operand("scales", scales))
    refuse_transformed("fp8_grouped_linear", "leave fp8 out", x, weight)
    return GroupedLinear.apply(x, weight, None, Groups(tuple(sizes), recipe, scales, ranks))


class Groups:
    """The matrix products of the groups, and the scales of their arrays.

    Args:
        sizes: number of rows of each group.
        recipe: how the arrays are quantised; None: not at all, in a subclass.
        scales: scales of inputs, weights and gradients that come from earlier steps. [3] float32
        ranks: ranks that have other parts of the arrays.
    """

    def __init__(
        self, sizes: tuple[int, ...], recipe: ProductRecipe | None, scales: Tensor | None, ranks: SharingRanks
    ) -> None:
        self.sizes = sizes
        self.recipe = recipe
        self.scales = scales
        self.ranks = ranks

    def read(self, saved: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """Return the rows [M, width] from the tensor that was saved for backward in place of them."""
        del width, dtype
        return saved

    def products(self, x: Tensor, weight: Tensor, gradient: Tensor | None = None) -> Any:
        """Return the matrix products of one group, with the scales of the arrays of all groups."""
        assert self.recipe is not None, "a subclass has other products"
        if self.recipe.inputs.block is not None:
            return Fp8Products(self.recipe, weight.dtype)
        found = []
        for array, number in ((x, INPUTS), (weight, WEIGHTS), (gradient, GRADIENTS)):
            if array is None:
                found.append(weight.new_ones((), dtype=torch.float32))
            elif self.scales is None:
                found.append(array_scale(array, self.recipe[number], self.ranks))
            else:  # an element that is not finite makes all others NaN, also those of other groups
                found.append(self.scales[number].where(amax(array).isfinite(), float("nan")))
        return Fp8Products(with_given_scales(self.recipe), weight.dtype, torch.stack(found))


class GroupedLinear(torch.autograd.Function):
    """The linear layer of fp8_grouped_linear."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, packed: Tensor | None, groups: Groups) -> Tensor:
        """Save the weight and the rows, packed if ``packed`` is given, and multiply them."""
        ctx.save_for_backward(x if packed is None else packed, weight)
        ctx.groups = groups
        weight = weight.to(x.dtype)
        products = groups.products(x, weight)
        y = x.new_empty(len(x), weight.shape[1])
        for into, *operands in zip(y.split(groups.sizes), x.split(groups.sizes), weight, strict=True):
            into.copy_(products.forward(operands[0], operands[1]))
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradients that are needed; each is one matrix product for every group."""
        saved, weight = ctx.saved_tensors
        groups: Groups = ctx.groups
        x = groups.read(saved, weight.shape[2], gradient.dtype)
        rounded = weight.to(gradient.dtype)
        products = groups.products(x, rounded, gradient)
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        each = [*zip(x.split(groups.sizes), rounded, gradient.split(groups.sizes), strict=True)]
        d_x = torch.empty_like(x) if needs_x else None
        for into, operands in zip(() if d_x is None else d_x.split(groups.sizes), each, strict=False):
            into.copy_(products.input_gradient(*operands))
        d_weight = torch.empty_like(weight) if needs_weight else None
        for into, operands in zip(() if d_weight is None else d_weight, each, strict=False):
            into.copy_(products.weight_gradient(*operands))
        return d_x, d_weight, None, None
