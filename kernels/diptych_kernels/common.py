"""Functions shared by several kernels: the tokens of a program, sums over rows, and the exponential function.

Triton's interpreter refuses a mask that combines a block with a comparison of scalars ("mask has unsupported dtype").
So kernels compare blocks in masks: ``t + 0 * o_k < last`` instead of ``t < last``.

Names of all kernels: b_ is a tile, o_ its offsets, m_ a mask, p_ an offset or a pointer. KP is K padded to a power of
two, and BK the size of a tile along it. ACC is the type of sums and NARROW that of the inputs.
"""

import triton
import triton.language as tl


@triton.jit
def token_block(tokens, BN: tl.constexpr):
    """Return the indices of this program's tokens [BN] and the mask of those below ``tokens``.

    Indices are int64, because their product with a width may exceed int32.
    """
    o_n = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    return o_n, o_n < tokens


@triton.jit
def exp_of(b_x):
    """Return exp(x) as 2**(x log2(e)), because GPUs have an instruction for powers of two."""
    return tl.exp2(b_x * 1.4426950408889634)


@triton.jit(do_not_specialize=["rows", "rows_per_group"])
def column_sum(x_ptr, rows, rows_per_group, out_ptr, W: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr):
    """Sum the rows of x [R, W] within each group of rows, to out [groups, W]; grid (W / BW, groups).

    Rows are added in a fixed order, in float32 (float64 for float64), so that results are deterministic.
    """
    ACC: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    group = tl.program_id(1)
    o_w = tl.program_id(0) * BW + tl.arange(0, BW)
    first = group.to(tl.int64) * rows_per_group
    last = tl.minimum(first + rows_per_group, rows)
    sums = tl.zeros([BR, BW], ACC)
    for start in range(first, last, BR):
        o_r = start + tl.arange(0, BR)
        mask = (o_r[:, None] < last) & (o_w[None, :] < W)
        sums += tl.load(x_ptr + o_r[:, None] * W + o_w[None, :], mask=mask, other=0.0).to(ACC)
    tl.store(out_ptr + group.to(tl.int64) * W + o_w, tl.sum(sums, 0), mask=o_w < W)
