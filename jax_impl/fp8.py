"""Linear layers by matrix products of 8-bit floats in JAX; diptych/plans/fp8.py defines what they compute.

Mirrors ``reference_torch/fp8.py``.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
from jax import Array, lax
from jaxtyping import DTypeLike, Float

from diptych.plans.fp8 import EXPONENT_BITS, ProductRecipe, Quantization, blocks_of, check_scales
from diptych.plans.model import operations
from diptych_kernels.mesh_axes import match_varying_axes, vary
from jax_impl.autograd import differentiable_once
from jax_impl.linear_products import LinearProducts, as_matrix, multiply
from jax_impl.operands import operand

INPUTS, WEIGHTS, GRADIENTS = range(3)
"""Indices into a recipe and into scales."""
ScalePair = tuple[Array, Array] | None
"""Scales of two operands that come from earlier steps."""


@jax.tree_util.register_static
@dataclass(frozen=True)
class SharingRanks:
    """Ranks that have parts of the same arrays, and take one scale for all of them with the recipe ``current``."""

    axes: tuple[str, ...] = ()
    """Mesh axes of context- and tensor-parallel ranks."""

    def largest(self, x: Array) -> Array:
        """Return the maximum over the ranks, marked as varying over their mesh axes."""
        return vary(lax.pmax(x, self.axes), self.axes) if self.axes else x


ALONE = SharingRanks()
"""One rank, which has unsharded arrays."""
OperandRecipes = tuple[Quantization, Quantization, SharingRanks]
"""Quantisation of both operands of a matrix product, and the ranks that have other parts of them."""


def quantize(
    x: Float[Array, "n k"],
    quantization: Quantization,
    scale: Float[Array, ""] | None = None,
    ranks: SharingRanks = ALONE,
) -> tuple[Array, Float[Array, "a b"]]:
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
    wide = x.astype(jnp.float32)
    largest = quantization.largest
    if quantization.has_given_scale:
        assert scale is not None, "has_given_scale makes the scale an argument"
        scales = jnp.where(jnp.isfinite(amax(wide)), scale, jnp.nan).reshape(1, 1)
    else:
        maxima = _maxima(wide, quantization)
        scales = _scales(ranks.largest(maxima) if quantization.block is None else maxima, quantization)
    scaled = wide * _expand_scales(scales, wide.shape, quantization)
    clipped = jnp.where(jnp.isnan(scaled), scaled, jnp.clip(scaled, -largest, largest))
    return _rounded(clipped, quantization.dtype).astype(quantization.dtype), 1 / scales


def dequantize(values: Array, scale_inv: Float[Array, "a b"], quantization: Quantization) -> Float[Array, "n k"]:
    """Return the values [N, K] float32 of a quantised matrix; the arguments are the results of ``quantize``."""
    return values.astype(jnp.float32) * _expand_scales(scale_inv, values.shape, quantization)


def amax(x: Array) -> Array:
    """Return the largest absolute value of an array: infinity if it has a NaN (PyTorch: NaN), 0 without elements."""
    return _magnitudes(x).max(initial=0)


def rounded_to(x: Array, dtype: DTypeLike) -> Array:
    """Round an array to a type with a lower precision, in the type that it has; others are returned unchanged.

    Two conversions may not round, because XLA may remove them.
    """
    narrow = ml_dtypes.finfo(dtype)
    if narrow.bits >= ml_dtypes.finfo(x.dtype).bits:
        return x
    rounded = lax.reduce_precision(x, narrow.nexp, narrow.nmant)
    if narrow.nexp == ml_dtypes.finfo(x.dtype).nexp:
        return rounded
    step = float(narrow.smallest_subnormal)  # float16 has numbers that reduce_precision takes for 0
    return jnp.where(jnp.abs(x) < float(narrow.smallest_normal), jnp.round(x / step) * step, rounded)


def fp8_linear(
    x: Float[Array, "*b i"],
    weight: Float[Array, "o i"],
    recipe: ProductRecipe,
    scales: Float[Array, "3"] | None = None,
    ranks: SharingRanks = ALONE,
) -> Float[Array, "*b o"]:
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
        RuntimeError: the result is differentiated twice.
    """
    operations.check_linear(operand("x", x), operand("weight", weight), None)
    check_scales(recipe, None if scales is None else operand("scales", scales))
    return multiply(Fp8Products(recipe, ranks), x, weight, scales)


@dataclass(frozen=True)
class Fp8Products(LinearProducts):
    """The matrix products of fp8_linear and of its gradients."""

    recipe: ProductRecipe
    ranks: SharingRanks = ALONE
    """Ranks that have other parts of the arrays."""

    def __call__(self, x: Array, weight: Array, scales: Array | None = None, packed: Array | None = None) -> Array:
        """Return x @ weight.T in the type of x, differentiably."""
        del packed  # only PackedProducts of activation_storage saves x packed
        return _linear(self, *match_varying_axes((x, weight, scales)))

    def input_gradient(self, x: Array, weight: Array, gradient: Array, scales: Array | None = None) -> Array:
        """Return the gradient of x, in its shape and type, from that of the output."""
        rounded = rounded_to(weight, x.dtype)
        d_x = _matrix_product_once(as_matrix(gradient), rounded.T, *self.for_operands(GRADIENTS, WEIGHTS, scales))
        return d_x.astype(x.dtype).reshape(x.shape)

    def weight_gradient(self, x: Array, gradient: Array, scales: Array | None = None) -> Array:
        """Return the gradient [O, I] float32 of the weight, from the input and the gradient of the output."""
        d_weight = _matrix_product_once(
            as_matrix(gradient).T, as_matrix(x).T, *self.for_operands(GRADIENTS, INPUTS, scales)
        )
        return rounded_to(d_weight, x.dtype)

    def for_operands(self, a: int, b: int, scales: Array | None) -> tuple[ScalePair, OperandRecipes]:
        """Return the scales of operands that are inputs, weights or gradients, and how they are quantised."""
        return None if scales is None else (scales[a], scales[b]), (self.recipe[a], self.recipe[b], self.ranks)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear(products: Fp8Products, x: Array, weight: Array, scales: Array | None) -> Array:
    """Return the result of fp8_linear."""
    y = _matrix_product(as_matrix(x), rounded_to(weight, x.dtype), *products.for_operands(INPUTS, WEIGHTS, scales))
    return y.astype(x.dtype).reshape(*x.shape[:-1], len(weight))


Saved = tuple[Array, Array, Array | None]
"""Operands and scales of a linear layer."""


def _forward(products: Fp8Products, x: Array, weight: Array, scales: Array | None) -> tuple[Array, Saved]:
    """Return the matrix product, and save its operands as they are."""
    return _linear(products, x, weight, scales), (x, weight, scales)


def _backward(products: Fp8Products, saved: Saved, gradient: Array) -> tuple[Array, Array, None]:
    """Return the gradients of both operands; each is one matrix product."""
    x, weight, scales = saved
    d_weight = products.weight_gradient(x, gradient, scales).astype(weight.dtype)
    return products.input_gradient(x, weight, gradient, scales), d_weight, None


_linear.defvjp(_forward, _backward)


def _matrix_product(a: Array, b: Array, scales: ScalePair, recipes: OperandRecipes) -> Array:
    """Return a @ b.T [N, O] float32 of matrices [N, K] and [O, K], quantised."""
    scale_a, scale_b = scales or (None, None)
    of_a, of_b, ranks = recipes
    a, scale_inv_a = quantize(a, of_a, scale_a, ranks)
    b, scale_inv_b = quantize(b, of_b, scale_b, ranks)
    if of_a.block is not None:  # scales are powers of two, so the values are exact in every type that a GPU multiplies
        return dequantize(a, scale_inv_a, of_a) @ dequantize(b, scale_inv_b, of_b).T
    along_last = (((1,), (1,)), ((), ()))
    summed = jax.lax.dot_general(a, b, along_last, jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    # If one inverse is huge and the other tiny, one multiplication after the other would give infinity or 0 in between.
    # If both exceed 1, their product may be infinite where summed is 0.
    both_large = (scale_inv_a > 1) & (scale_inv_b > 1)
    factor = scale_inv_a * scale_inv_b
    return jnp.where(both_large, summed * scale_inv_a * scale_inv_b, summed * factor)


@differentiable_once("fp8_linear", "fp8", static=(3,))
def _matrix_product_once(a: Array, b: Array, scales: ScalePair, recipes: OperandRecipes) -> Array:
    """Return _matrix_product of a gradient, whose derivative raises an error."""
    return _matrix_product(a, b, scales, recipes)


def _rounded(x: Array, dtype: str) -> Array:
    """Round values within the range of an 8-bit type to the precision of this type, in float32.

    A conversion to 8 bits and back does not round on a GPU, because XLA removes it.
    """
    digits = ml_dtypes.finfo(dtype).nmant
    least = float(ml_dtypes.finfo(dtype).smallest_normal)
    step = least / 2**digits
    return jnp.where(jnp.abs(x) < least, jnp.round(x / step) * step, jax.lax.reduce_precision(x, 8, digits))


def _maxima(x: Array, quantization: Quantization) -> Array:
    """Return the largest absolute value of every block, [blocks of N, blocks of K]; 0 if there are no elements."""
    magnitudes = _magnitudes(x)
    if quantization.block is None:
        return magnitudes.max(initial=0).reshape(1, 1)
    rows, columns = quantization.block
    blocks = blocks_of(x.shape, quantization)
    missing = ((0, blocks[0] * rows - x.shape[0]), (0, blocks[1] * columns - x.shape[1]))
    return jnp.pad(magnitudes, missing).reshape(blocks[0], rows, blocks[1], columns).max((1, 3), initial=0)


def _magnitudes(x: Array) -> Array:
    """Return absolute values, infinite for a NaN, because XLA's maximum of a NaN and a number may be the number."""
    return jnp.where(jnp.isfinite(x), jnp.abs(x), jnp.inf)


def _scales(maxima: Array, quantization: Quantization) -> Array:
    """Return the scale of each maximum; see diptych.plans.fp8.scales."""
    scale = jnp.float32(quantization.largest) / maxima
    if quantization.block is not None:
        bits = jax.lax.bitcast_convert_type(scale, jnp.int32) & EXPONENT_BITS
        scale = jax.lax.bitcast_convert_type(bits, jnp.float32)
    scale = jnp.where(jnp.isinf(scale), 1.0, scale)
    return jnp.where(jnp.isfinite(maxima), scale, jnp.nan)


def _expand_scales(scale: Array, shape: tuple[int, ...], quantization: Quantization) -> Array:
    """Repeat the scale of each block for its elements. [N, K], or [1, 1] for one scale."""
    if quantization.block is None:
        return scale
    rows, columns = quantization.block
    return jnp.repeat(jnp.repeat(scale, rows, 0), columns, 1)[: shape[0], : shape[1]]
