"""Activation functions, forward and backward; what backward needs is computed again from the input alone.

    swiglu:  out = silu(gate) value,  silu(z) = z sigmoid(z)      x = [gate | value], [N, 2 F] -> [N, F]
    gelu:    out = x Phi(x),  Phi the normal distribution function                    [N, F] -> [N, F]

PyTorch's and XLA's own swiglu keep silu(gate) as well as x, and write it to memory in between. Arithmetic is in float32
(float64 for float64). Reference: arXiv 2002.05202, eq. 6; arXiv 1606.08415.
"""

import triton
import triton.language as tl

from diptych_kernels.common import token_block


@triton.jit
def row_block(tokens, W: tl.constexpr, BN: tl.constexpr, BF: tl.constexpr):
    """Rows, columns and the mask of this program's tile of W columns; grid (N / BN, W / BF)."""
    o_n, m_n = token_block(tokens, BN)
    o_f = tl.program_id(1) * BF + tl.arange(0, BF)
    return o_n[:, None], o_f[None, :], m_n[:, None] & (o_f[None, :] < W)


@triton.jit(do_not_specialize=["tokens"])
def swiglu_forward(x_ptr, tokens, out_ptr, F: tl.constexpr, BN: tl.constexpr, BF: tl.constexpr):
    """Compute out [N, F] from x [N, 2 F]."""
    ACC: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    o_n, o_f, mask = row_block(tokens, F, BN, BF)
    b_gate = tl.load(x_ptr + o_n * (2 * F) + o_f, mask=mask, other=0.0).to(ACC)
    b_value = tl.load(x_ptr + o_n * (2 * F) + F + o_f, mask=mask, other=0.0).to(ACC)
    tl.store(out_ptr + o_n * F + o_f, b_gate * tl.sigmoid(b_gate) * b_value, mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def swiglu_backward(x_ptr, grad_ptr, tokens, dx_ptr, F: tl.constexpr, BN: tl.constexpr, BF: tl.constexpr):
    """Compute dx [N, 2 F] from grad [N, F]."""
    ACC: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    o_n, o_f, mask = row_block(tokens, F, BN, BF)
    b_gate = tl.load(x_ptr + o_n * (2 * F) + o_f, mask=mask, other=0.0).to(ACC)
    b_value = tl.load(x_ptr + o_n * (2 * F) + F + o_f, mask=mask, other=0.0).to(ACC)
    b_grad = tl.load(grad_ptr + o_n * F + o_f, mask=mask, other=0.0).to(ACC)
    b_sigmoid = tl.sigmoid(b_gate)
    b_dgate = b_grad * b_value * b_sigmoid * (1.0 + b_gate * (1.0 - b_sigmoid))
    tl.store(dx_ptr + o_n * (2 * F) + o_f, b_dgate, mask=mask)
    tl.store(dx_ptr + o_n * (2 * F) + F + o_f, b_grad * b_gate * b_sigmoid, mask=mask)


@triton.jit
def normal_distribution(b_x):
    """Phi(x)."""
    return 0.5 * (1.0 + tl.erf(b_x * 0.7071067811865476))


@triton.jit(do_not_specialize=["tokens"])
def gelu_forward(x_ptr, tokens, out_ptr, F: tl.constexpr, BN: tl.constexpr, BF: tl.constexpr):
    """Compute out [N, F] from x [N, F]."""
    ACC: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    o_n, o_f, mask = row_block(tokens, F, BN, BF)
    b_x = tl.load(x_ptr + o_n * F + o_f, mask=mask, other=0.0).to(ACC)
    tl.store(out_ptr + o_n * F + o_f, b_x * normal_distribution(b_x), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def gelu_backward(x_ptr, grad_ptr, tokens, dx_ptr, F: tl.constexpr, BN: tl.constexpr, BF: tl.constexpr):
    """Compute dx [N, F] from grad [N, F]."""
    ACC: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    o_n, o_f, mask = row_block(tokens, F, BN, BF)
    b_x = tl.load(x_ptr + o_n * F + o_f, mask=mask, other=0.0).to(ACC)
    b_grad = tl.load(grad_ptr + o_n * F + o_f, mask=mask, other=0.0).to(ACC)
    b_density = 0.3989422804014327 * tl.exp(-0.5 * b_x * b_x)
    tl.store(dx_ptr + o_n * F + o_f, b_grad * (normal_distribution(b_x) + b_x * b_density), mask=mask)
