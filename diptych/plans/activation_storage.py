"""Values saved for backward in 8 bits, in NumPy; both backends read the same elements.

With ``activation_storage="fp8"``, a layer saves the inputs of its linear layers and of its activation function in 8
bits, and backward reads them: the gradient of a weight is g^T Q(x), and that of an activation function f is g f'(Q(x)),
where

    Q(x) = dequantize(quantize(x)),    e4m3, blocks of 1 x 128 channels, scales that are powers of two.

Forward is exact. A value takes a byte for each element and one for each block: the exponent of its scale. If recompute
drops x, nothing is saved, and backward reads Q(x) all the same.

Saved as they are: inputs of a layer that another operation of the same layer saves anyway (the output of softmax
attention without a gate, the input of a router), and those of the narrow layers of gates and decays.

Reference: DeepSeek-AI, arXiv 2412.19437, section 3.3.2, which saves inputs of linear layers and of SwiGLU in 8 bits.
"""

import math

import numpy as np

from diptych.plans.config import TransformerConfig
from diptych.plans.fp8 import BLOCK, Quantization, dequantize, quantize
from diptych.plans.recompute import RecomputeBlock

QUANTIZATION = Quantization("float8_e4m3fn", (1, BLOCK))
"""Quantisation of the saved values."""
ACTIVATION_INPUT = "fc1_fp8"
"""Name of the saved input of an activation function."""
_OF_MAP = {
    **dict.fromkeys(
        (
            *("linear_qkv", "linear_q_proj", "linear_kv_down_proj", "linear_gate", "linear_gate_down"),
            *("linear_decay", "linear_decay_down", "linear_beta"),
        ),
        "mixer_input_fp8",
    ),
    "linear_proj": "mixer_output_fp8",
    "linear_fc1": "mlp_input_fp8",
    "linear_fc2": "activation_fp8",
}
"""Name of the saved input of a linear layer, by the last part of its canonical name."""


def saved_input(config: TransformerConfig, name: str) -> str | None:
    """Return the name of the value that a linear layer saves in 8 bits in place of its input; None: it saves the input.

    Args:
        config: configuration of the model.
        name: canonical name of the layer, such as ``decoder.layers.0.mlp.linear_fc1``.
    """
    if config.activation_storage is None:
        return None
    parts = name.split(".")
    if parts[:2] != ["decoder", "layers"]:
        return None
    layer = config.layer(int(parts[2]))
    is_softmax = layer.mixer == "mla" or (layer.mixer == "attention" and not config.attention_output_gate)
    if parts[-1] == "linear_proj" and is_softmax:  # softmax attention saves its output, which the layer reads
        return None
    return None if layer.storage is None else _OF_MAP.get(parts[-1])


def dropped_values(config: TransformerConfig, block: RecomputeBlock) -> frozenset[str]:
    """Return the names of the values that a block does not save.

    Args:
        config: configuration of the model.
        block: the block, of one of the model's stages.
    """
    dropped = block.dropped
    if all(config.layer(number).storage is None for number in block.layers):
        return dropped
    replaced = {"input_layernorm", "pre_mlp_layernorm", "activation"}
    if "activation" in dropped and "fc1" not in dropped:  # is recomputed from the exact input
        return dropped | replaced | {ACTIVATION_INPUT}
    return dropped | replaced | {"fc1"}


def packed_width(width: int) -> int:
    """Return the bytes of a row of ``width`` elements in 8 bits, with the exponents of its scales."""
    return width + -(-width // BLOCK)


def pack(x: np.ndarray) -> np.ndarray:
    """Return an array in 8 bits: the elements of a row, then the exponents of its scales.

    Args:
        x: floating-point array. [..., K]

    Returns:
        [..., packed_width(K)] uint8
    """
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    values, scale_inv = quantize(rows.astype(np.float32), QUANTIZATION)
    exponents = ((1 / scale_inv).astype(np.float32).view(np.int32) >> 23 & 255).astype(np.uint8)
    joined = np.concatenate([values.view(np.uint8), exponents], axis=1)
    return joined.reshape(*x.shape[:-1], packed_width(x.shape[-1]))


def unpack(packed: np.ndarray, width: int) -> np.ndarray:
    """Return the array that a packed array stands for.

    Args:
        packed: array that pack has returned. [..., packed_width(width)] uint8
        width: elements of a row.

    Returns:
        [..., width] float32
    """
    rows = packed.reshape(-1, packed.shape[-1])
    values = np.ascontiguousarray(rows[:, :width]).view(QUANTIZATION.dtype)
    scale_inv = 1 / (rows[:, width:].astype(np.int32) << 23).view(np.float32)
    return dequantize(values, scale_inv, QUANTIZATION).reshape(*packed.shape[:-1], width)
