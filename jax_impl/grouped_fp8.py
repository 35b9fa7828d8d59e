"""Linear layers of groups of rows, such as the experts of a mixture, in FP8 in JAX.

Each group has a matrix of its own. diptych/plans/fp8.py defines scales and blocks of the arrays.

Mirrors ``reference_torch/grouped_fp8.py``.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from diptych.plans.fp8 import BLOCK, ProductRecipe, Quantization, check_scales
from diptych.plans.model import operations
from diptych_kernels.mesh_axes import match_varying_axes
from jax_impl.autograd import differentiable_once
from jax_impl.fp8 import ALONE, GRADIENTS, INPUTS, WEIGHTS, SharingRanks, dequantize, quantize, rounded_to
from jax_impl.operands import operand

OVER_ROWS = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
"""Matrix products [E, O, I] of [M, O] and [M, I] over the rows of each group."""
HIGHEST = jax.lax.Precision.HIGHEST
"""Matrix products in float32, on a GPU too, where XLA multiplies in TF32 by default."""


def fp8_grouped_linear(
    x: Float[Array, "m i"],
    weight: Float[Array, "e o i"],
    sizes: Int[Array, " e"],
    recipe: ProductRecipe,
    scales: Float[Array, "3"] | None = None,
    ranks: SharingRanks = ALONE,
) -> Float[Array, "m o"]:
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
        RuntimeError: the result is differentiated twice.
    """
    operations.check_grouped_linear(operand("x", x), operand("weight", weight), sizes.shape)
    check_scales(recipe, None if scales is None else operand("scales", scales))
    return _grouped(_GroupedRecipe(recipe, ranks), *match_varying_axes((x, weight, sizes.astype(jnp.int32), scales)))


class _GroupedRecipe(NamedTuple):
    """The quantisation of arrays, and the ranks that have other parts of them."""

    products: ProductRecipe
    ranks: SharingRanks


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(recipe: _GroupedRecipe, x: Array, weight: Array, sizes: Array, scales: Array | None) -> Array:
    """Return the rows of fp8_grouped_linear."""
    rows = _read(x, INPUTS, recipe, scales)
    matrices = _matrices(rounded_to(weight, x.dtype), recipe, scales)
    return jax.lax.ragged_dot(rows, matrices.swapaxes(1, 2), sizes, precision=HIGHEST).astype(x.dtype)


def _forward(
    recipe: _GroupedRecipe, x: Array, weight: Array, sizes: Array, scales: Array | None
) -> tuple[Array, tuple[Array, Array, Array, Array | None]]:
    """Return the rows, and save the operands as they are."""
    return _grouped(recipe, x, weight, sizes, scales), (x, weight, sizes, scales)


def _backward(recipe: _GroupedRecipe, saved: tuple, gradient: Array) -> tuple[Array, Array, None, None]:
    """Return the gradients of both operands; each is one matrix product for every group."""
    return *_gradients(gradient, saved, recipe), None, None


_grouped.defvjp(_forward, _backward)


@differentiable_once("fp8_grouped_linear", "fp8", static=(2,))
def _gradients(gradient: Array, saved: tuple[Any, ...], recipe: _GroupedRecipe) -> tuple[Array, Array]:
    """Return the gradients of x and weight, whose derivatives raise an error."""
    x, weight, sizes, scales = saved
    of_outputs = _read(gradient, GRADIENTS, recipe, scales)
    matrices = _matrices(rounded_to(weight, x.dtype), recipe, scales)
    d_x = jax.lax.ragged_dot(of_outputs, matrices, sizes, precision=HIGHEST)
    rows, of_outputs = (
        _read_along_rows(array, number, sizes, recipe, scales) for array, number in ((x, INPUTS), (gradient, GRADIENTS))
    )
    d_weight = jax.lax.ragged_dot_general(of_outputs, rows, sizes, OVER_ROWS, precision=HIGHEST)
    return d_x.astype(x.dtype), rounded_to(d_weight, x.dtype).astype(weight.dtype)


def _read(x: Array, number: int, recipe: _GroupedRecipe, scales: Array | None) -> Array:
    """Quantise a matrix, and return the quantised values in float32."""
    quantization: Quantization = recipe.products[number]
    scale = None if scales is None else scales[number]
    return dequantize(*quantize(x, quantization, scale, recipe.ranks), quantization)


def _matrices(weight: Array, recipe: _GroupedRecipe, scales: Array | None) -> Array:
    """Return the quantised values of weights, with one scale for all or with the blocks of each matrix."""
    if recipe.products.weights.block is None:
        return _read(weight.reshape(-1, weight.shape[-1]), WEIGHTS, recipe, scales).reshape(weight.shape)
    return jax.vmap(lambda matrix: _read(matrix, WEIGHTS, recipe, scales))(weight)


def _read_along_rows(x: Array, number: int, sizes: Array, recipe: _GroupedRecipe, scales: Array | None) -> Array:
    """Return the quantised values of rows; a block is one column of up to BLOCK consecutive rows of one group."""
    if recipe.products[number].block is None:
        return _read(x, number, recipe, scales)
    blocks = -(-sizes // BLOCK)
    shifts = (jnp.cumsum(blocks) - blocks) * BLOCK - (jnp.cumsum(sizes) - sizes)
    places = jnp.arange(len(x)) + jnp.repeat(shifts, sizes, total_repeat_length=len(x))
    whole_blocks = -(-len(x) // BLOCK) * BLOCK + len(sizes) * BLOCK
    apart = jnp.zeros((whole_blocks, x.shape[1]), x.dtype).at[places].set(x)
    return _read(apart.T, number, recipe, scales).T[places]
