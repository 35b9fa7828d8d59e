"""Products of quantised matrices in the 8-bit units of a GPU, by cuBLAS.

Layouts of scales: https://docs.nvidia.com/cuda/cublas, "Scaling factors layouts". Blocks need compute capability 9.0.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import ScalingType

from diptych.plans.fp8 import BLOCK, Quantization

ALIGNMENT = 16
"""Alignment of the rows of 8-bit matrices, in bytes."""


class Quantized(NamedTuple):
    """A quantised matrix."""

    values: Tensor
    """Elements in an 8-bit type. [N, K]"""
    scale_inv: Tensor
    """Inverse of the scale of every block. [blocks of N, blocks of K] float32"""
    quantization: Quantization
    """Type and blocks."""


def is_8_bit_product(a: Quantized, b: Quantized) -> bool:
    """Return True if the device of two matrices [M, K] and [N, K] multiplies them in 8 bits.

    With blocks, both matrices must be e4m3, and K must be a multiple of the block size.
    """
    rows, sums = a.values.shape
    columns = len(b.values)
    if a.values.device.type != "cuda" or not (rows and sums and columns) or columns % ALIGNMENT:
        return False
    capability = torch.cuda.get_device_capability(a.values.device)
    if a.quantization.block is None:
        return capability >= (8, 9) and sums % ALIGNMENT == 0
    narrow = a.values.dtype == b.values.dtype == torch.float8_e4m3fn
    return capability == (9, 0) and narrow and sums % BLOCK == 0 and rows % 4 == 0


def product_in_8_bits(a: Quantized, b: Quantized) -> Float[Tensor, "m n"]:
    """Return a @ b.T in float32 for two matrices of which ``is_8_bit_product`` is true.

    Hopper sums 128 products of 8-bit elements with about 14 bits, and these sums in float32.

    Args:
        a: the first matrix; its blocks have one row. [M, K]
        b: the second; its blocks have one or 128 rows. [N, K]

    Returns:
        [M, N] float32
    """
    scale_a, type_a = _scale(a)
    scale_b, type_b = _scale(b)
    return functional.scaled_mm(
        a.values.contiguous(), b.values.contiguous().T, scale_a, type_a, scale_b, type_b, output_dtype=torch.float32
    )


def _scale(x: Quantized) -> tuple[Tensor, ScalingType]:
    """Return the inverse scales in the layout that cuBLAS reads, and its name."""
    if x.quantization.block is None:
        return x.scale_inv, ScalingType.TensorWise
    if x.quantization.block[0] == 1:
        return x.scale_inv.T.contiguous().T, ScalingType.BlockWise1x128
    missing = -x.scale_inv.shape[1] % 4
    return functional.pad(x.scale_inv, (0, missing)).T, ScalingType.BlockWise128x128
