"""FP8: matrix products of 8-bit floats, in NumPy; the quantised arrays of both backends are bitwise equal to these.

An array is quantised with one scale (recipes ``current`` and ``delayed``), or with one scale for every block of it
(``blockwise``):

    q = round_to_even(clip(x * scale)),    scale = largest / max |x|,    x is read as q / scale

where ``largest`` is the largest number of the format. Blocks have scales that are powers of two. With ``delayed``, max
|x| is taken from the last optimizer steps, and diptych/plans/amax_history.py defines the scale.

The linear layer y = x w^T has three matrix products, each of two quantised arrays, added up in float32: y from x and w,
the gradient of x from that of y and w, and the gradient of w from that of y and x. Blocks are 1 x 128 along the axis
that is added up, and 128 x 128 for weights, so the recipe ``blockwise`` quantises x and the gradient of y once for each
of their matrix products.

The layers of experts, rows [M, I] by matrices [E, O, I], have one scale for the rows, one for the weights and one for
the gradients of all experts. Blocks belong to one expert: they begin at its first token and at its first weight.

Reference: Micikevicius et al., arXiv 2209.05433, for the formats; DeepSeek-AI, arXiv 2412.19437, section 3.3, for the
blocks.
"""

from typing import Literal, NamedTuple

import ml_dtypes
import numpy as np

from diptych.plans.config import TransformerConfig
from diptych.plans.config.precision import FP8_FORMATS
from diptych.plans.model.operations import Operand

Format = Literal["e4m3", "hybrid"]
Recipe = Literal["current", "delayed", "blockwise"]
EXPONENT_BITS = 0x7F800000
"""The bits of a float32 that hold its exponent."""
BLOCK = 128
"""Elements of a block along one axis."""
OF_RECIPE: dict[str, tuple[tuple[int, int] | None, tuple[int, int] | None]] = {
    "current": (None, None),
    "delayed": (None, None),
    "blockwise": ((1, BLOCK), (BLOCK, BLOCK)),
}
"""Blocks of inputs and gradients, along the axis that is added up last, and of weights; None: one scale for all."""
LINEAR_LAYERS = frozenset(
    {
        *("linear_qkv", "linear_q_proj", "linear_kv_down_proj", "linear_kv_up_proj", "linear_proj"),
        *("linear_gate", "linear_gate_down", "linear_gate_up", "linear_decay_down", "linear_decay_up"),
        *("linear_fc1", "linear_fc2"),
    }
)
"""Modules whose matrix products are FP8: the linear layers of attention, delta-rule layers and MLPs. Not those with one
output per head (linear_beta, and linear_decay of gdn layers), nor hyper-connections, routers, embedding and output
layer."""
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
"""The largest number of each 8-bit type."""


class Quantization(NamedTuple):
    """The quantisation of an array."""

    dtype: str
    """Name of the 8-bit type."""
    block: tuple[int, int] | None
    """Rows and columns of a block; None: one scale for all of it."""
    has_given_scale: bool = False
    """True if the scale is an argument, such as one of earlier steps, instead of that of the array."""

    @property
    def largest(self) -> float:
        """The largest number of the type."""
        return LARGEST[self.dtype]


class ProductRecipe(NamedTuple):
    """The quantisation of the arrays of a linear layer for its three matrix products."""

    inputs: Quantization
    weights: Quantization
    gradients: Quantization


def product_recipe(format: Format, recipe: Recipe) -> ProductRecipe:
    """Return how a linear layer quantises its arrays.

    Args:
        format: "e4m3" for all arrays, or "hybrid": e5m2, with more range and less precision, for gradients.
        recipe: "current" or "delayed" for one scale per array, or "blockwise".

    Raises:
        ValueError: the format or the recipe is unknown.
    """
    if format not in FP8_FORMATS or recipe not in OF_RECIPE:
        raise ValueError(
            f"format, recipe: expected one of {', '.join(FP8_FORMATS)} and one of {', '.join(OF_RECIPE)}, got "
            f"{format!r} and {recipe!r}"
        )
    rows, square = OF_RECIPE[recipe]
    forward = "float8_e4m3fn"
    backward = "float8_e5m2" if format == "hybrid" else forward
    return ProductRecipe(
        *(
            Quantization(dtype, block, recipe == "delayed")
            for dtype, block in ((forward, rows), (forward, square), (backward, rows))
        )
    )


def with_given_scales(recipe: ProductRecipe) -> ProductRecipe:
    """Return a recipe of the same types whose scales are given instead of taken from each array."""
    return ProductRecipe(*(quantization._replace(has_given_scale=True) for quantization in recipe))


def check_scales(recipe: ProductRecipe, scales: Operand | None) -> None:
    """Reject scales that do not belong to a recipe.

    Args:
        recipe: how a linear layer quantises.
        scales: scales of inputs, weights and gradients. [3] float32

    Raises:
        ValueError: a delayed recipe has no scales, or another has some; they have another shape or type.
    """
    if (scales is not None) != recipe.inputs.has_given_scale:
        expected, got = ("None", "some") if scales is not None else ("three", "None")
        raise ValueError(f"scales: expected {expected} with has_given_scale={recipe.inputs.has_given_scale}, got {got}")
    if scales is not None and (scales.shape, scales.dtype) != ((3,), "float32"):
        raise ValueError(f"scales: expected shape (3,) float32, got {scales.shape} {scales.dtype}")


def linear_recipe(config: TransformerConfig, name: str) -> ProductRecipe | None:
    """Return how a linear layer quantises its arrays; None: not at all.

    Args:
        config: configuration of the model.
        name: canonical name of the module.
    """
    if config.fp8 is None or name.rsplit(".", 1)[-1] not in LINEAR_LAYERS:
        return None
    return product_recipe(config.fp8, config.fp8_recipe)


def scales(amax: np.ndarray, quantization: Quantization) -> np.ndarray:
    """Return the scale of each maximum: 1 where the scale would be infinite, NaN where the maximum is not finite.

    Args:
        amax: largest absolute values. [...] float32
        quantization: type, and whether scales are powers of two.

    Returns:
        [...] float32
    """
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        scale = np.float32(quantization.largest) / amax
    if quantization.block is not None:
        scale = (scale.view(np.int32) & np.int32(EXPONENT_BITS)).view(np.float32)
    scale = np.where(np.isinf(scale), np.float32(1), scale)
    return np.where(np.isfinite(amax), scale, np.float32(np.nan))


def quantize(
    x: np.ndarray, quantization: Quantization, scale: np.float32 | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Quantise a matrix.

    Args:
        x: the matrix, of any floating-point type. [N, K]
        quantization: type and blocks.
        scale: scale of the array, if it comes from earlier steps.

    Returns:
        The matrix in the 8-bit type, [N, K], and the inverse of the scale of every block, [blocks of N, blocks of K]
        float32. An element that is not finite becomes NaN, and so do all other elements with the same scale.
    """
    wide = x.astype(np.float32)
    if quantization.has_given_scale:
        assert scale is not None, "has_given_scale makes the scale an argument"
        by_block = np.full((1, 1), scale if np.isfinite(wide).all() else np.nan, np.float32)
    else:
        rows, columns = quantization.block or (max(1, x.shape[0]), max(1, x.shape[1]))
        blocks = blocks_of(x.shape, quantization)
        padded = np.zeros((blocks[0] * rows, blocks[1] * columns), np.float32)
        padded[: x.shape[0], : x.shape[1]] = np.abs(wide)
        by_block = scales(padded.reshape(blocks[0], rows, blocks[1], columns).max(axis=(1, 3)), quantization)
    with np.errstate(over="ignore"):
        scaled = wide * expand_scales(by_block, x.shape, quantization)
    clipped = np.clip(scaled, -quantization.largest, quantization.largest)
    return clipped.astype(getattr(ml_dtypes, quantization.dtype)), np.float32(1) / by_block


def dequantize(values: np.ndarray, scale_inv: np.ndarray, quantization: Quantization) -> np.ndarray:
    """Return the elements [N, K] float32 that a quantised matrix stands for; arguments as ``quantize`` returns them.

    Near the largest float32, an element that was rounded up is infinite.
    """
    with np.errstate(over="ignore"):
        return values.astype(np.float32) * expand_scales(scale_inv, values.shape, quantization)


def blocks_of(shape: tuple[int, ...], quantization: Quantization) -> tuple[int, int]:
    """Return the numbers of blocks along both axes of a matrix."""
    if quantization.block is None:
        return 1, 1
    rows, columns = quantization.block
    return -(-shape[0] // rows), -(-shape[1] // columns)


def expand_scales(scale: np.ndarray, shape: tuple[int, ...], quantization: Quantization) -> np.ndarray:
    """Repeat the scale of each block for its elements. [N, K], or [1, 1] for one scale."""
    if quantization.block is None:
        return scale
    rows, columns = quantization.block
    return scale.repeat(rows, 0).repeat(columns, 1)[: shape[0], : shape[1]]


def matrix_product(
    a: np.ndarray,
    b: np.ndarray,
    of_a: Quantization,
    of_b: Quantization,
    scales: tuple[np.float32 | None, np.float32 | None] = (None, None),
) -> np.ndarray:
    """Return a @ b.T [N, O] float32 of matrices [N, K] and [O, K] that are quantised, but for the order of the sums.

    Args:
        a: first matrix. [N, K]
        b: second matrix. [O, K]
        of_a: how a is quantised.
        of_b: how b is quantised.
        scales: scales of a and b, if they come from earlier steps.
    """
    operands = ((a, of_a, scales[0]), (b, of_b, scales[1]))
    a, b = (dequantize(*quantize(x, quantization, scale), quantization) for x, quantization, scale in operands)
    return a @ b.T
