"""Coefficients of mHC, computed from residual streams, forward and backward.

For each token:

    projected = x @ phi
    r         = 1 / sqrt(mean(x**2) + epsilon)
    h         = r projected gain + bias
    h_pre     = sigmoid(h[:S])
    h_post    = 2 sigmoid(h[S:2S])
    h_res     = sinkhorn(h[2S:])

x [K] are the S residual streams of width D as one row, K = S D. phi [K, C] is the projection and bias [C] the bias of
the C = 2 S + S S coefficients. gain [C] is alpha[0] for the first S columns, alpha[1] for the next S, and alpha[2] for
the last S S. sinkhorn returns exp(h[2S:]), reshaped to [S, S], with rows and columns normalised alternately. With
TRANSPOSED, the columns give the transpose of these logits. MHC_EPSILON is added to h_pre, to the first normalisation
and to the sums of the others; it replaces FLOOR.

project_forward and project_backward read x once and compute the first two lines. mappings_forward and
mappings_backward compute the other lines from about 200 bytes per token. project_backward can add the other gradients
of x, so that no sum of gradients reads and writes the streams again.

Sinkhorn uses tiles [BN, SP, SP] in registers. SP is the smallest power of two >= S, and padding is 0. Its backward
replays forward from the start for every four pairs of normalisations, beginning with the last four, and holds these in
registers. With 20 iterations it replays 74 pairs of a few instructions each, instead of storing 40 matrices.

Reference: mHC, arXiv 2512.24880, eqs. 5-9. reference_torch/doubly_stochastic.py explains the lower bound FLOOR of the
softmax.
"""

import triton
import triton.language as tl

from diptych.plans.model.parameters import SINKHORN_FLOOR
from diptych_kernels.common import token_block

FLOOR = tl.constexpr(SINKHORN_FLOOR)


@triton.jit(do_not_specialize=["tokens"])
def project_forward(
    x_ptr,
    phi_ptr,
    tokens,
    projected_ptr,
    r_ptr,
    K: tl.constexpr,
    C: tl.constexpr,
    EPSILON: tl.constexpr,
    PRECISION: tl.constexpr,
    CP: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Compute projected [N, C] and r [N] from x [N, K] and phi [K, C], phi in the type of x; grid (N / BN,)."""
    ACC: tl.constexpr = r_ptr.dtype.element_ty
    o_n, m_n = token_block(tokens, BN)
    o_c = tl.arange(0, CP)
    b_projected = tl.zeros([BN, CP], ACC)
    b_squares = tl.zeros([BN], ACC)
    for start in range(0, K, BK):
        o_k = start + tl.arange(0, BK)
        b_x = tl.load(x_ptr + o_n[:, None] * K + o_k[None, :], mask=m_n[:, None] & (o_k[None, :] < K), other=0.0)
        m_phi = (o_k[:, None] < K) & (o_c[None, :] < C)
        b_phi = tl.load(phi_ptr + o_k[:, None] * C + o_c[None, :], mask=m_phi, other=0.0)
        b_projected = tl.dot(b_x, b_phi, b_projected, input_precision=PRECISION, out_dtype=ACC)
        b_wide = b_x.to(ACC)
        b_squares += tl.sum(b_wide * b_wide, 1)
    m_out = m_n[:, None] & (o_c[None, :] < C)
    tl.store(projected_ptr + o_n[:, None] * C + o_c[None, :], b_projected, mask=m_out)
    tl.store(r_ptr + o_n, 1.0 / tl.sqrt(b_squares / K + EPSILON), mask=m_n)


@triton.jit(do_not_specialize=["tokens", "tokens_per_group"])
def project_backward(
    x_ptr,
    phi_ptr,
    dprojected_ptr,
    shrink_ptr,
    h_pre_ptr,
    grad_ptr,
    residual_grad_ptr,
    tokens,
    tokens_per_group,
    dx_ptr,
    dphi_ptr,
    S: tl.constexpr,
    D: tl.constexpr,
    C: tl.constexpr,
    AGGREGATE: tl.constexpr,
    RESIDUAL_GRAD: tl.constexpr,
    PRECISION: tl.constexpr,
    CP: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Compute dx [N, K] = dprojected @ phi.T - shrink x, and dphi = x.T @ dprojected, [K, C] per group of tokens.

    AGGREGATE adds h_pre [N, S] grad [N, D] to dx, the gradient of the weighted sum of the streams, and RESIDUAL_GRAD
    adds residual_grad [N, K], the gradient of the streams as a residual. Inputs of excluded terms are not read. The
    tokens of a group are added to dphi in a fixed order, in float32 (float64 for float64). grid (K / BK, groups).
    """
    K: tl.constexpr = S * D
    ACC: tl.constexpr = shrink_ptr.dtype.element_ty
    o_k = tl.program_id(0) * BK + tl.arange(0, BK)
    o_c = tl.arange(0, CP)
    group = tl.program_id(1).to(tl.int64)
    m_phi = (o_k[:, None] < K) & (o_c[None, :] < C)
    b_phi = tl.trans(tl.load(phi_ptr + o_k[:, None] * C + o_c[None, :], mask=m_phi, other=0.0))
    b_dphi = tl.zeros([BK, CP], ACC)
    first = group * tokens_per_group
    last = tl.minimum(first + tokens_per_group, tokens)
    for start in range(first, last, BN):
        o_n = start + tl.arange(0, BN)
        m_n = o_n < last
        m_x = m_n[:, None] & (o_k[None, :] < K)
        b_x = tl.load(x_ptr + o_n[:, None] * K + o_k[None, :], mask=m_x, other=0.0)
        m_c = m_n[:, None] & (o_c[None, :] < C)
        b_grad = tl.load(dprojected_ptr + o_n[:, None] * C + o_c[None, :], mask=m_c, other=0.0).to(b_x.dtype)
        b_shrink = tl.load(shrink_ptr + o_n, mask=m_n, other=0.0)
        b_dx = tl.dot(b_grad, b_phi, input_precision=PRECISION, out_dtype=ACC) - b_shrink[:, None] * b_x.to(ACC)
        if AGGREGATE:
            if D % BK == 0:  # the columns belong to one stream
                stream = tl.program_id(0) * BK // D
                b_h = tl.load(h_pre_ptr + o_n * S + stream, mask=m_n, other=0.0)[:, None]
                o_d = o_k - stream * D
            else:
                b_h = tl.load(h_pre_ptr + o_n[:, None] * S + (o_k // D)[None, :], mask=m_x, other=0.0)
                o_d = o_k % D
            b_dx += b_h * tl.load(grad_ptr + o_n[:, None] * D + o_d[None, :], mask=m_x, other=0.0).to(ACC)
        if RESIDUAL_GRAD:  # rounded before, as if a framework added it
            b_dx = b_dx.to(b_x.dtype).to(ACC) + tl.load(
                residual_grad_ptr + o_n[:, None] * K + o_k[None, :], mask=m_x, other=0.0
            ).to(ACC)
        tl.store(dx_ptr + o_n[:, None] * K + o_k[None, :], b_dx, mask=m_x)
        b_dphi = tl.dot(tl.trans(b_x), b_grad, b_dphi, input_precision=PRECISION, out_dtype=ACC)
    tl.store(dphi_ptr + group * (K * C) + o_k[:, None] * C + o_c[None, :], b_dphi, mask=m_phi)


@triton.jit
def normalise(b_m, AXIS: tl.constexpr, MHC_EPSILON: tl.constexpr):
    """Divide the matrices by their sums over AXIS, and return the sums too (MHC_EPSILON or 1 for the padding)."""
    total = tl.sum(b_m, AXIS, keep_dims=True)
    if MHC_EPSILON > 0.0:  # then no sum is 0, not even that of padding
        total += MHC_EPSILON
    else:
        total = tl.where(total == 0.0, 1.0, total)
    return b_m / total, total


@triton.jit
def normalise_twice(b_m, FIRST: tl.constexpr, MHC_EPSILON: tl.constexpr):
    """Normalise along the axis other than FIRST, and then along FIRST."""
    b_m, _ = normalise(b_m, 3 - FIRST, MHC_EPSILON)
    b_m, _ = normalise(b_m, FIRST, MHC_EPSILON)
    return b_m


@triton.jit
def softmax(b_logits, m_s, FIRST: tl.constexpr):
    """Return the softmax of the logits along FIRST, and 0 outside the mask."""
    top = tl.max(tl.where(m_s, b_logits, float("-inf")), FIRST, keep_dims=True)
    exists = tl.max(m_s.to(tl.int32), FIRST, keep_dims=True) > 0
    top = tl.where(exists, top, 0.0)  # padding must not give NaN; logits that are all -inf do
    b_m, _ = normalise(tl.where(m_s, tl.exp(b_logits - top), 0.0), FIRST, 0.0)
    return b_m


@triton.jit
def first_matrix(b_softmax, m_s, MHC_EPSILON: tl.constexpr):
    """Return the softmax plus MHC_EPSILON, or with entries of at least FLOOR if it is 0; 0 outside the mask."""
    b_m = b_softmax + MHC_EPSILON if MHC_EPSILON > 0.0 else tl.where(b_softmax < FLOOR, FLOOR, b_softmax)
    return tl.where(m_s, b_m, 0.0)


@triton.jit
def sinkhorn(b_logits, m_s, ITERATIONS: tl.constexpr, FIRST: tl.constexpr, MHC_EPSILON: tl.constexpr):
    """Return doubly stochastic matrices [BN, SP, SP]; FIRST (1 or 2) is the axis that is normalised first."""
    b_m = first_matrix(softmax(b_logits, m_s, FIRST), m_s, MHC_EPSILON)
    for _ in range(ITERATIONS - 1):
        b_m = normalise_twice(b_m, FIRST, MHC_EPSILON)
    b_m, _ = normalise(b_m, 3 - FIRST, MHC_EPSILON)
    return b_m


@triton.jit
def normalise_gradient(b_grad, b_m, total, AXIS: tl.constexpr):
    """Return the gradient of the dividend of ``normalise``, from the gradient of its quotient b_m."""
    return (b_grad - tl.sum(b_grad * b_m, AXIS, keep_dims=True)) / total


@triton.jit
def pairs_gradient(b_m, b_grad, COUNT: tl.constexpr, FIRST: tl.constexpr, MHC_EPSILON: tl.constexpr):
    """Return the gradient of b_m through the next COUNT pairs of normalisations, held in registers."""
    normalised = ()
    for _ in tl.static_range(COUNT):
        b_m, total = normalise(b_m, 3 - FIRST, MHC_EPSILON)
        normalised = normalised + (b_m, total)
        b_m, total = normalise(b_m, FIRST, MHC_EPSILON)
        normalised = normalised + (b_m, total)
    for left in tl.static_range(COUNT, 0, -1):
        b_grad = normalise_gradient(b_grad, normalised[4 * left - 2], normalised[4 * left - 1], FIRST)
        b_grad = normalise_gradient(b_grad, normalised[4 * left - 4], normalised[4 * left - 3], 3 - FIRST)
    return b_grad


@triton.jit
def sinkhorn_gradient(b_logits, b_grad, m_s, ITERATIONS: tl.constexpr, FIRST: tl.constexpr, MHC_EPSILON: tl.constexpr):
    """Return the gradient of the logits, by differentiating each normalisation at its own input."""
    PAIRS: tl.constexpr = ITERATIONS - 1
    PAIRS_IN_REGISTERS: tl.constexpr = 4
    b_softmax = softmax(b_logits, m_s, FIRST)
    b_first = first_matrix(b_softmax, m_s, MHC_EPSILON)
    b_m = b_first
    for _ in range(PAIRS):
        b_m = normalise_twice(b_m, FIRST, MHC_EPSILON)
    b_m, total = normalise(b_m, 3 - FIRST, MHC_EPSILON)  # the last normalisation has no partner
    b_grad = normalise_gradient(b_grad, b_m, total, 3 - FIRST)
    for done in range(PAIRS // PAIRS_IN_REGISTERS):
        b_m = b_first
        for _ in range(PAIRS - (done + 1) * PAIRS_IN_REGISTERS):
            b_m = normalise_twice(b_m, FIRST, MHC_EPSILON)
        b_grad = pairs_gradient(b_m, b_grad, PAIRS_IN_REGISTERS, FIRST, MHC_EPSILON)
    b_grad = pairs_gradient(b_first, b_grad, PAIRS % PAIRS_IN_REGISTERS, FIRST, MHC_EPSILON)
    if MHC_EPSILON == 0.0:
        b_softmax = b_first
        b_grad = tl.where(b_softmax > FLOOR, b_grad, 0.0)
    return b_softmax * (b_grad - tl.sum(b_grad * b_softmax, FIRST, keep_dims=True))


@triton.jit
def logit_columns(S: tl.constexpr, SP: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Return the columns of the projection that give the logits of h_res. [SP, SP]."""
    o_i = tl.arange(0, SP)[:, None]
    o_j = tl.arange(0, SP)[None, :]
    return 2 * S + o_j * S + o_i if TRANSPOSED else 2 * S + o_i * S + o_j


@triton.jit
def matrix_block(o_n, m_n, S: tl.constexpr, SP: tl.constexpr):
    """Return offsets in [N, S, S], the mask of entries inside S x S, and that mask limited to existing tokens."""
    o_i = tl.arange(0, SP)[None, :, None]
    o_j = tl.arange(0, SP)[None, None, :]
    m_s = (o_i < S) & (o_j < S)
    return o_n[:, None, None] * (S * S) + o_i * S + o_j, m_s, m_s & m_n[:, None, None]


@triton.jit(do_not_specialize=["tokens"])
def sinkhorn_forward(
    logits_ptr,
    tokens,
    out_ptr,
    S: tl.constexpr,
    ITERATIONS: tl.constexpr,
    FIRST: tl.constexpr,
    MHC_EPSILON: tl.constexpr,
    SP: tl.constexpr,
    BN: tl.constexpr,
):
    """Compute doubly stochastic matrices [N, S, S] from logits [N, S, S]; grid (N / BN,)."""
    o_n, m_n = token_block(tokens, BN)
    offsets, m_s, mask = matrix_block(o_n, m_n, S, SP)
    b_logits = tl.load(logits_ptr + offsets, mask=mask, other=0.0)
    tl.store(out_ptr + offsets, sinkhorn(b_logits, m_s, ITERATIONS, FIRST, MHC_EPSILON), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def sinkhorn_backward(
    logits_ptr,
    grad_ptr,
    tokens,
    dlogits_ptr,
    S: tl.constexpr,
    ITERATIONS: tl.constexpr,
    FIRST: tl.constexpr,
    MHC_EPSILON: tl.constexpr,
    SP: tl.constexpr,
    BN: tl.constexpr,
):
    """Compute dlogits [N, S, S] from logits and grad [N, S, S]; grid (N / BN,)."""
    o_n, m_n = token_block(tokens, BN)
    offsets, m_s, mask = matrix_block(o_n, m_n, S, SP)
    b_logits = tl.load(logits_ptr + offsets, mask=mask, other=0.0)
    b_grad = tl.load(grad_ptr + offsets, mask=mask, other=0.0)
    b_dlogits = sinkhorn_gradient(b_logits, b_grad, m_s, ITERATIONS, FIRST, MHC_EPSILON)
    tl.store(dlogits_ptr + offsets, b_dlogits, mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def mappings_forward(
    projected_ptr,
    r_ptr,
    alpha_ptr,
    bias_ptr,
    tokens,
    h_pre_ptr,
    h_post_ptr,
    h_res_ptr,
    S: tl.constexpr,
    ITERATIONS: tl.constexpr,
    FIRST: tl.constexpr,
    MHC_EPSILON: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    SP: tl.constexpr,
    BN: tl.constexpr,
):
    """Compute h_pre [N, S], h_post [N, S] and h_res [N, S, S] from projected [N, C] and r [N]; grid (N / BN,)."""
    C: tl.constexpr = 2 * S + S * S
    o_n, m_n = token_block(tokens, BN)
    b_r = tl.load(r_ptr + o_n, mask=m_n, other=0.0)
    o_s = tl.arange(0, SP)[None, :]
    mask = m_n[:, None] & (o_s < S)
    for group in tl.static_range(2):
        b_p = tl.load(projected_ptr + o_n[:, None] * C + group * S + o_s, mask=mask, other=0.0)
        b_bias = tl.load(bias_ptr + group * S + o_s, mask=o_s < S, other=0.0)
        b_h = b_r[:, None] * b_p * tl.load(alpha_ptr + group) + b_bias
        if group == 0:
            tl.store(h_pre_ptr + o_n[:, None] * S + o_s, tl.sigmoid(b_h) + MHC_EPSILON, mask=mask)
        else:
            tl.store(h_post_ptr + o_n[:, None] * S + o_s, 2.0 * tl.sigmoid(b_h), mask=mask)
    offsets, m_s, mask = matrix_block(o_n, m_n, S, SP)
    o_c = logit_columns(S, SP, TRANSPOSED)[None, :, :]
    b_p = tl.load(projected_ptr + o_n[:, None, None] * C + o_c, mask=mask, other=0.0)
    b_logits = b_r[:, None, None] * b_p * tl.load(alpha_ptr + 2) + tl.load(bias_ptr + o_c, mask=m_s, other=0.0)
    tl.store(h_res_ptr + offsets, sinkhorn(b_logits, m_s, ITERATIONS, FIRST, MHC_EPSILON), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def mappings_backward(
    projected_ptr,
    r_ptr,
    alpha_ptr,
    bias_ptr,
    dh_pre_ptr,
    dh_post_ptr,
    dh_res_ptr,
    tokens,
    dprojected_ptr,
    shrink_ptr,
    sums_ptr,
    S: tl.constexpr,
    D: tl.constexpr,
    ITERATIONS: tl.constexpr,
    FIRST: tl.constexpr,
    MHC_EPSILON: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    SP: tl.constexpr,
    BN: tl.constexpr,
):
    """Compute dprojected [N, C], shrink [N], and a row [3 + C] of dalpha and dbias per program; grid (N / BN,).

    shrink is the factor of -x in dx that comes from r. With m = mean(x**2), dr/dm = -r**3 / 2 and dm/dx = 2 x / K,
    so shrink = r**3 / K sum_c dh[c] projected[c] gain[c].
    """
    C: tl.constexpr = 2 * S + S * S
    o_n, m_n = token_block(tokens, BN)
    b_r = tl.load(r_ptr + o_n, mask=m_n, other=0.0)
    row_ptr = sums_ptr + tl.program_id(0).to(tl.int64) * (3 + C)
    o_s = tl.arange(0, SP)[None, :]
    mask = m_n[:, None] & (o_s < S)
    b_dr = tl.zeros_like(b_r)
    for group in tl.static_range(2):
        b_p = tl.load(projected_ptr + o_n[:, None] * C + group * S + o_s, mask=mask, other=0.0)
        alpha = tl.load(alpha_ptr + group)
        b_bias = tl.load(bias_ptr + group * S + o_s, mask=o_s < S, other=0.0)
        b_sigmoid = tl.sigmoid(b_r[:, None] * b_p * alpha + b_bias)
        if group == 0:
            b_grad = tl.load(dh_pre_ptr + o_n[:, None] * S + o_s, mask=mask, other=0.0)
        else:
            b_grad = 2.0 * tl.load(dh_post_ptr + o_n[:, None] * S + o_s, mask=mask, other=0.0)
        b_dh = b_grad * b_sigmoid * (1.0 - b_sigmoid)
        tl.store(dprojected_ptr + o_n[:, None] * C + group * S + o_s, b_dh * b_r[:, None] * alpha, mask=mask)
        b_dr += tl.sum(b_dh * b_p * alpha, 1)
        tl.store(row_ptr + group, tl.sum(tl.sum(b_dh * b_p, 1) * b_r, 0))
        o_bias = 3 + group * S + tl.arange(0, SP)
        tl.store(row_ptr + o_bias, tl.sum(b_dh, 0), mask=tl.arange(0, SP) < S)
    offsets, m_s, mask = matrix_block(o_n, m_n, S, SP)
    o_c = logit_columns(S, SP, TRANSPOSED)[None, :, :]
    b_p = tl.load(projected_ptr + o_n[:, None, None] * C + o_c, mask=mask, other=0.0)
    alpha = tl.load(alpha_ptr + 2)
    b_logits = b_r[:, None, None] * b_p * alpha + tl.load(bias_ptr + o_c, mask=m_s, other=0.0)
    b_grad = tl.load(dh_res_ptr + offsets, mask=mask, other=0.0)
    b_dh = sinkhorn_gradient(b_logits, b_grad, m_s, ITERATIONS, FIRST, MHC_EPSILON)
    tl.store(dprojected_ptr + o_n[:, None, None] * C + o_c, b_dh * b_r[:, None, None] * alpha, mask=mask)
    b_dot = tl.sum(tl.sum(b_dh * b_p, 2), 1)
    tl.store(row_ptr + 2, tl.sum(b_dot * b_r, 0))
    o_bias = 3 + logit_columns(S, SP, TRANSPOSED)
    m_bias = (tl.arange(0, SP)[:, None] < S) & (tl.arange(0, SP)[None, :] < S)
    tl.store(row_ptr + o_bias, tl.sum(b_dh, 0), mask=m_bias)
    b_dr += b_dot * alpha
    tl.store(shrink_ptr + o_n, b_dr * b_r * b_r * b_r / (S * D), mask=m_n)
