"""Memory that PyTorch's FP8 linear layers need while they run; reference_torch/fp8.py runs them."""

import math

from diptych.plans.config import TransformerConfig
from diptych.plans.fp8 import BLOCK, ProductRecipe, Quantization, blocks_of, linear_recipe
from diptych.plans.optimizer_shards import stored_dtype

WIDE = 4
"""Bytes of a float32."""
DELAYED_BYTES = WIDE * (3 + 2)
"""Bytes that a layer with delayed scales saves for backward: three scales, and the exponents of input and weight."""


def has_rounded_weight(config: TransformerConfig, name: str) -> bool:
    """Return True if the weight of a linear layer is stored in the type of activations.

    Args:
        config: configuration of the model.
        name: canonical name of the layer.
    """
    return stored_dtype(config, f"{name}.weight", (1, 1)) == config.compute_dtype


def linear_scratch(
    config: TransformerConfig, name: str, tokens: int, input_bytes: int, output_bytes: int
) -> tuple[int, int] | None:
    """Return the bytes that forward allocates beside the output, and backward beside the gradients.

    Those of backward include the gradient of a weight that is stored in the type of activations.

    Args:
        config: configuration of the model.
        name: canonical name of the layer.
        tokens: rows of the input. N
        input_bytes: bytes of the input [N, I].
        output_bytes: bytes of the output [N, O].

    Returns:
        None if the layer has no FP8 matrix product.
    """
    recipe = linear_recipe(config, name)
    if recipe is None:
        return None
    item = 2 if config.bf16 else WIDE
    inputs = input_bytes // item // tokens
    outputs = output_bytes // item // tokens
    is_stored = has_rounded_weight(config, name)
    copy = 0 if is_stored else item * inputs * outputs
    forward, for_x, for_weight = _scratch(recipe, tokens, inputs, outputs, item, copy)
    gradient = 0 if is_stored and config.bf16 else WIDE * inputs * outputs
    return forward - output_bytes, max(for_x - input_bytes - gradient, for_weight - gradient, 0)


def grouped_scratch(
    config: TransformerConfig, name: str, rows: int, input_bytes: int, output_bytes: int
) -> tuple[int, int] | None:
    """Return the bytes that forward and backward of a layer of experts allocate, as linear_scratch.

    The rows are assumed to be as many for each expert.

    Args:
        config: configuration of the model.
        name: canonical name of the layer.
        rows: rows of all experts. M
        input_bytes: bytes of the input [M, I].
        output_bytes: bytes of the output [M, O].
    """
    recipe = linear_recipe(config, name)
    if recipe is None:
        return None
    item = 2 if config.bf16 else WIDE
    experts = config.num_moe_experts or 1
    inputs = input_bytes // item // rows
    outputs = output_bytes // item // rows
    weight = experts * inputs * outputs
    is_stored = has_rounded_weight(config, name)
    copy = 0 if is_stored else item * weight
    forward, for_x, for_weight = _scratch(recipe, -(-rows // experts), inputs, outputs, item)
    if is_stored and config.bf16:
        return forward, max(for_x, for_weight + item * weight)
    return forward + copy, max(for_x - WIDE * weight, for_weight) + copy


def pack_scratch(rows: int, width: int, item: int) -> tuple[int, int]:
    """Return the bytes that a matrix needs beside itself while it is packed for backward, and while it is read back.

    Args:
        rows: rows of the matrix.
        width: elements of a row.
        item: bytes of an element.
    """
    size = rows * width
    spread = WIDE * rows * -(-width // BLOCK) * BLOCK
    cast = WIDE * size if item < WIDE else 0
    return cast + WIDE * size + spread, WIDE * size + spread


def _scratch(
    recipe: ProductRecipe, tokens: int, inputs: int, outputs: int, item: int, copy: int = 0
) -> tuple[int, int, int]:
    """Return the bytes that the three matrix products of a layer allocate, with their results.

    Args:
        recipe: how the layer quantises.
        tokens: rows of the input.
        inputs: columns of the input.
        outputs: columns of the output.
        item: bytes of an element of input and output.
        copy: bytes of a copy of the weight in the type of input and output.
    """
    x = tokens * inputs
    y = tokens * outputs
    weight = inputs * outputs
    narrow = (WIDE + item) * (item < WIDE)  # a matrix product and its copy in the type of input and output
    forward = _product(((tokens, inputs), recipe.inputs), ((outputs, inputs), recipe.weights), item)
    for_x = _product(((tokens, outputs), recipe.gradients), ((inputs, outputs), recipe.weights), item)
    for_weight = _product(((outputs, tokens), recipe.gradients), ((inputs, tokens), recipe.inputs), item)
    return max(copy + forward, narrow * y), max(copy + for_x, narrow * x), max(for_weight, narrow * weight)


Operand = tuple[tuple[int, int], Quantization]
"""The shape of a matrix, and how it is quantised."""


def _product(first: Operand, second: Operand, item: int) -> int:
    """Return the bytes of a matrix product beside its operands, which are quantised and read back in float32."""
    a, b = (math.prod(shape) for shape, _ in (first, second))
    result = first[0][0] * second[0][0]
    scales_a, scales_b = (_expanded_scales(*operand) for operand in (first, second))
    cast = WIDE * (item < WIDE)  # by PyTorch on a CPU, before it is multiplied by the scales
    quantised_a, quantised_b = (
        max((cast + WIDE) * size + spread, (WIDE + 1) * size) for size, spread in ((a, scales_a), (b, scales_b))
    )
    read = max(WIDE * a + scales_a, WIDE * (a + b) + scales_b, WIDE * (a + b + result))
    return max(quantised_a, a + quantised_b, a + b + read)


def _expanded_scales(shape: tuple[int, int], quantization: Quantization) -> int:
    """Return the bytes of the scales of all elements of a matrix that is quantised in blocks."""
    if quantization.block is None:
        return 0
    blocks = blocks_of(shape, quantization)
    return WIDE * blocks[0] * quantization.block[0] * blocks[1] * quantization.block[1]
