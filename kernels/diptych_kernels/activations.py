"""Activation functions SwiGLU and GELU, forward and backward.

SwiGLU maps x = [gate | value] of shape [N, 2 F] to out [N, F], and GELU maps x [N, F] to out [N, F]:

    swiglu:  out = silu(gate) value              silu(z) = z sigmoid(z)
             dgate = dout value s (1 + gate (1 - s)),  dvalue = dout gate s,  s = sigmoid(gate)
    gelu:    out = x Phi(x)                      Phi: distribution function of the standard normal distribution
             dx = dout (Phi(x) + x phi(x))       phi: its density, exp(-x**2 / 2) / sqrt(2 pi)

N is the number of tokens and F the output width. Only x is saved for backward, which computes the other terms from it.
PyTorch and XLA also save silu(gate) and write it to memory. Arithmetic is in float32 (float64 for float64).

Reference: SwiGLU, arXiv 2002.05202, eq. 6; GELU, arXiv 1606.08415.
"""

import triton
import triton.language as tl

from diptych_kernels.common import token_block


@triton.jit
def row_block(tokens, W: tl.constexpr, BN: tl.constexpr, BF: tl.constexpr):
    """Return rows [BN, 1], columns [1, BF] and mask of this program's tile of [N, W]; grid (N / BN, W / BF)."""
    o_n, m_n = token_block(tokens, BN)
    o_f = tl.program_id(1) * BF + tl.arange(0, BF)
    return o_n[:, None], o_f[None, :], m_n[:, None] & (o_f[None, :] < W)


@triton.jit(do_not_specialize=["tokens"])
def swiglu_forward(x_ptr, tokens, out_ptr, F: tl.constexpr, BN: tl.constexpr, BF: tl.constexpr):
    """Compute out [N, F] from x [N, 2 F]; grid (N / BN, F / BF)."""
    ACC: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    o_n, o_f, mask = row_block(tokens, F, BN, BF)
    b_gate = tl.load(x_ptr + o_n * (2 * F) + o_f, mask=mask, other=0.0).to(ACC)
    b_value = tl.load(x_ptr + o_n * (2 * F) + F + o_f, mask=mask, other=0.0).to(ACC)
    tl.store(out_ptr + o_n * F + o_f, b_gate * tl.sigmoid(b_gate) * b_value, mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def swiglu_backward(x_ptr, grad_ptr, tokens, dx_ptr, F: tl.constexpr, BN: tl.constexpr, BF: tl.constexpr):
    """Compute dx [N, 2 F] from x [N, 2 F] and grad [N, F]; grid (N / BN, F / BF)."""
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
    """Return Phi(x), the distribution function of the standard normal distribution."""
    return 0.5 * (1.0 + tl.erf(b_x * 0.7071067811865476))


@triton.jit(do_not_specialize=["tokens"])
def gelu_forward(x_ptr, tokens, out_ptr, F: tl.constexpr, BN: tl.constexpr, BF: tl.constexpr):
    """Compute out [N, F] from x [N, F]; grid (N / BN, F / BF)."""
    ACC: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    o_n, o_f, mask = row_block(tokens, F, BN, BF)
    b_x = tl.load(x_ptr + o_n * F + o_f, mask=mask, other=0.0).to(ACC)
    tl.store(out_ptr + o_n * F + o_f, b_x * normal_distribution(b_x), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def gelu_backward(x_ptr, grad_ptr, tokens, dx_ptr, F: tl.constexpr, BN: tl.constexpr, BF: tl.constexpr):
    """Compute dx [N, F] from x [N, F] and grad [N, F]; grid (N / BN, F / BF)."""
    ACC: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    o_n, o_f, mask = row_block(tokens, F, BN, BF)
    b_x = tl.load(x_ptr + o_n * F + o_f, mask=mask, other=0.0).to(ACC)
    b_grad = tl.load(grad_ptr + o_n * F + o_f, mask=mask, other=0.0).to(ACC)
    b_density = 0.3989422804014327 * tl.exp(-0.5 * b_x * b_x)
    tl.store(dx_ptr + o_n * F + o_f, b_grad * (normal_distribution(b_x) + b_x * b_density), mask=mask)
