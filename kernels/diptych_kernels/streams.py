"""Aggregation of residual streams and writes to them, forward and backward.

For each token:

    aggregated[d] = sum_s h_pre[s] x[s, d]
    next[s, d]    = sum_j h_res[s, j] residual[j, d] + keep[s, d] / (1 - p) h_post[s] (output[d] + bias[d])

x [S, D] are the S residual streams of width D that a sublayer reads, and residual [S, D] those that its output is added
to, usually the same. h_pre [S], h_post [S] and h_res [S, S] are the coefficients. output [D] is the output of the
sublayer and bias [D] its bias. keep [S, D] is the dropout mask and p the dropout probability.

A program computes BN tokens with one tile [BN, BD] per stream, in the type of the coefficients: float32, or float64 for
float64 streams. It loads each element of x once. A backward program loops over all columns of its tokens and sums the
gradients of the coefficients in registers, which avoids atomic additions.

The dropout mask of stream s and column d comes from lane c mod 4 of Philox-4x32-10 with c = s D + d, key (seed, site)
and counter (c // 4, row_low, row_high, step); see diptych/plans/model/philox.py.

Reference: mHC, arXiv 2512.24880, eq. 3.
"""

import triton
import triton.language as tl

from diptych_kernels.common import token_block


@triton.jit
def load_streams(x_ptr, o_n, o_d, mask, S: tl.constexpr, D: tl.constexpr, ACC: tl.constexpr):
    """Load the S tiles [BN, BD] of x [N, S, D] as a tuple."""
    tiles = ()
    for s in tl.static_range(S):
        b_x = tl.load(x_ptr + (o_n * S + s)[:, None] * D + o_d[None, :], mask=mask, other=0.0)
        tiles = tiles + (b_x.to(ACC),)
    return tiles


@triton.jit
def sums_of_runs(b_x, RUN: tl.constexpr):
    """Add every RUN neighbouring columns of the tile [BN, BD]; [BN, BD / RUN].

    A thread loads RUN neighbours in one access, and adds them without another thread.
    """
    BN: tl.constexpr = b_x.shape[0]
    BD: tl.constexpr = b_x.shape[1]
    return tl.sum(tl.reshape(b_x, [BN, BD // RUN, RUN]), 2)


@triton.jit
def dropout_counter(o_n, m_n, low_ptr, high_ptr, step_ptr):
    """Load what the dropout masks of all streams and columns share: row_low [BN, 1], row_high [BN, 1] and the step."""
    low = tl.load(low_ptr + o_n, mask=m_n, other=0).to(tl.uint32)[:, None]
    high = tl.load(high_ptr + o_n, mask=m_n, other=0).to(tl.uint32)[:, None]
    return low, high, tl.load(step_ptr).to(tl.uint32)


@triton.jit
def dropout_keep(
    start, s, counter, seed, site, D: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, THRESHOLD: tl.constexpr
):
    """Return the dropout mask [BN, BD] of stream s and the columns from ``start``; True keeps the element.

    start must be a multiple of 4. counter is what dropout_counter returns. THRESHOLD is floor(p 2**32).
    """
    low, high, step = counter
    key0 = tl.cast(seed, tl.uint32)
    key1 = tl.cast(site, tl.uint32)
    if D % 4 == 0:  # the tile contains all four words of each counter
        o_q = (s * D + start) // 4 + tl.arange(0, BD // 4)[None, :]
        w0, w1, w2, w3 = tl.philox_impl(tl.broadcast_to(o_q.to(tl.uint32), (BN, BD // 4)), low, high, step, key0, key1)
        word = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    else:
        column = s * D + start + tl.broadcast_to(tl.arange(0, BD)[None, :], (BN, BD))
        w0, w1, w2, w3 = tl.philox_impl((column // 4).to(tl.uint32), low, high, step, key0, key1)
        lane = column % 4
        word = tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3))
    return word >= THRESHOLD


@triton.jit(do_not_specialize=["tokens"])
def aggregate_forward(
    x_ptr, h_pre_ptr, tokens, out_ptr, S: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr
):
    """Compute aggregated [N, D] from x [N, S, D] and h_pre [N, S]; grid (N / BN, D / BD)."""
    ACC: tl.constexpr = h_pre_ptr.dtype.element_ty
    o_n, m_n = token_block(tokens, BN)
    o_d = tl.program_id(1) * BD + tl.arange(0, BD)
    mask = m_n[:, None] & (o_d[None, :] < D)
    b_x = load_streams(x_ptr, o_n, o_d, mask, S, D, ACC)
    b_out = tl.zeros([BN, BD], ACC)
    for s in tl.static_range(S):
        b_out += tl.load(h_pre_ptr + o_n * S + s, mask=m_n, other=0.0)[:, None] * b_x[s]
    tl.store(out_ptr + o_n[:, None] * D + o_d[None, :], b_out, mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def aggregate_backward(
    x_ptr,
    h_pre_ptr,
    grad_ptr,
    tokens,
    dx_ptr,
    dh_pre_ptr,
    S: tl.constexpr,
    D: tl.constexpr,
    DX: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    RUN: tl.constexpr,
):
    """Compute dh_pre [N, S] and, if DX, dx [N, S, D] from grad [N, D]; grid (N / BN,)."""
    ACC: tl.constexpr = h_pre_ptr.dtype.element_ty
    o_n, m_n = token_block(tokens, BN)
    b_h = ()
    sums = ()
    for s in tl.static_range(S):
        b_h = b_h + (tl.load(h_pre_ptr + o_n * S + s, mask=m_n, other=0.0)[:, None],)
        sums = sums + (tl.zeros([BN, BD // RUN], ACC),)
    for start in range(0, D, BD):
        o_d = start + tl.arange(0, BD)
        mask = m_n[:, None] & (o_d[None, :] < D)
        b_grad = tl.load(grad_ptr + o_n[:, None] * D + o_d[None, :], mask=mask, other=0.0).to(ACC)
        b_x = load_streams(x_ptr, o_n, o_d, mask, S, D, ACC)
        new = ()
        for s in tl.static_range(S):
            if DX:
                tl.store(dx_ptr + (o_n * S + s)[:, None] * D + o_d[None, :], b_h[s] * b_grad, mask=mask)
            new = new + (sums[s] + sums_of_runs(b_x[s] * b_grad, RUN),)
        sums = new
    for s in tl.static_range(S):
        tl.store(dh_pre_ptr + o_n * S + s, tl.sum(sums[s], 1), mask=m_n)


@triton.jit(do_not_specialize=["tokens", "seed", "site"])
def write_forward(
    residual_ptr,
    h_res_ptr,
    output_ptr,
    bias_ptr,
    h_post_ptr,
    low_ptr,
    high_ptr,
    step_ptr,
    tokens,
    seed,
    site,
    next_ptr,
    S: tl.constexpr,
    D: tl.constexpr,
    ADD: tl.constexpr,
    POST: tl.constexpr,
    BIAS: tl.constexpr,
    THRESHOLD: tl.constexpr,
    SCALE: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
):
    """Compute next [N, S, D]; grid (N / BN, D / BD).

    ADD selects the residual term: "mix" adds h_res residual, "plain" adds residual, "none" adds nothing. POST adds the
    term of output, and BIAS adds bias to output. Inputs of excluded terms are not read. THRESHOLD is floor(p 2**32), or
    0 without dropout. SCALE is 1 / (1 - p).
    """
    ACC: tl.constexpr = h_post_ptr.dtype.element_ty
    o_n, m_n = token_block(tokens, BN)
    start = tl.program_id(1) * BD
    o_d = start + tl.arange(0, BD)
    mask = m_n[:, None] & (o_d[None, :] < D)
    if THRESHOLD > 0:
        counter = dropout_counter(o_n, m_n, low_ptr, high_ptr, step_ptr)
    if ADD != "none":
        b_residual = load_streams(residual_ptr, o_n, o_d, mask, S, D, ACC)
    if POST:
        b_output = tl.load(output_ptr + o_n[:, None] * D + o_d[None, :], mask=mask, other=0.0).to(ACC)
        if BIAS:
            b_output += tl.load(bias_ptr + o_d[None, :], mask=o_d[None, :] < D, other=0.0).to(ACC)
    for s in tl.static_range(S):
        b_next = tl.zeros([BN, BD], ACC)
        if ADD == "mix":
            for j in tl.static_range(S):
                b_next += tl.load(h_res_ptr + (o_n * S + s) * S + j, mask=m_n, other=0.0)[:, None] * b_residual[j]
        elif ADD == "plain":
            b_next = b_residual[s]
        if POST:
            b_term = tl.load(h_post_ptr + o_n * S + s, mask=m_n, other=0.0)[:, None] * b_output
            if THRESHOLD > 0:
                keep = dropout_keep(start, s, counter, seed, site, D, BN, BD, THRESHOLD)
                b_term = tl.where(keep, b_term * SCALE, 0.0)
            b_next += b_term
        tl.store(next_ptr + (o_n * S + s)[:, None] * D + o_d[None, :], b_next, mask=mask)


@triton.jit(do_not_specialize=["tokens", "seed", "site"])
def write_backward(
    residual_ptr,
    h_res_ptr,
    output_ptr,
    bias_ptr,
    h_post_ptr,
    low_ptr,
    high_ptr,
    step_ptr,
    grad_ptr,
    tokens,
    seed,
    site,
    dresidual_ptr,
    dh_res_ptr,
    doutput_ptr,
    dh_post_ptr,
    S: tl.constexpr,
    D: tl.constexpr,
    ADD: tl.constexpr,
    POST: tl.constexpr,
    BIAS: tl.constexpr,
    THRESHOLD: tl.constexpr,
    SCALE: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    RUN: tl.constexpr,
):
    """Compute the gradients of write_forward from grad [N, S, D]; grid (N / BN,).

    Write dresidual [N, S, D] and dh_res [N, S, S] if ADD is "mix", and doutput [N, D] and dh_post [N, S] if POST. The
    flags are those of write_forward.
    """
    ACC: tl.constexpr = h_post_ptr.dtype.element_ty
    o_n, m_n = token_block(tokens, BN)
    if THRESHOLD > 0:
        counter = dropout_counter(o_n, m_n, low_ptr, high_ptr, step_ptr)
    b_res = ()
    res_sums = ()
    b_post = ()
    post_sums = ()
    for s in tl.static_range(S):
        if POST:
            b_post = b_post + (tl.load(h_post_ptr + o_n * S + s, mask=m_n, other=0.0)[:, None],)
            post_sums = post_sums + (tl.zeros([BN, BD // RUN], ACC),)
        if ADD == "mix":
            for j in tl.static_range(S):
                b_res = b_res + (tl.load(h_res_ptr + (o_n * S + s) * S + j, mask=m_n, other=0.0)[:, None],)
                res_sums = res_sums + (tl.zeros([BN, BD // RUN], ACC),)
    for start in range(0, D, BD):
        o_d = start + tl.arange(0, BD)
        mask = m_n[:, None] & (o_d[None, :] < D)
        b_grad = load_streams(grad_ptr, o_n, o_d, mask, S, D, ACC)
        if ADD == "mix":
            b_residual = load_streams(residual_ptr, o_n, o_d, mask, S, D, ACC)
            for j in tl.static_range(S):
                b_dresidual = tl.zeros([BN, BD], ACC)
                for s in tl.static_range(S):
                    b_dresidual += b_res[s * S + j] * b_grad[s]
                tl.store(dresidual_ptr + (o_n * S + j)[:, None] * D + o_d[None, :], b_dresidual, mask=mask)
            new = ()
            for s in tl.static_range(S):
                for j in tl.static_range(S):
                    new = new + (res_sums[s * S + j] + sums_of_runs(b_grad[s] * b_residual[j], RUN),)
            res_sums = new
        if POST:
            b_output = tl.load(output_ptr + o_n[:, None] * D + o_d[None, :], mask=mask, other=0.0).to(ACC)
            if BIAS:
                b_output += tl.load(bias_ptr + o_d[None, :], mask=o_d[None, :] < D, other=0.0).to(ACC)
            b_doutput = tl.zeros([BN, BD], ACC)
            new = ()
            for s in tl.static_range(S):
                b_term = b_grad[s]
                if THRESHOLD > 0:
                    keep = dropout_keep(start, s, counter, seed, site, D, BN, BD, THRESHOLD)
                    b_term = tl.where(keep, b_term * SCALE, 0.0)
                b_doutput += b_post[s] * b_term
                new = new + (post_sums[s] + sums_of_runs(b_term * b_output, RUN),)
            post_sums = new
            tl.store(doutput_ptr + o_n[:, None] * D + o_d[None, :], b_doutput, mask=mask)
    for s in tl.static_range(S):
        if POST:
            tl.store(dh_post_ptr + o_n * S + s, tl.sum(post_sums[s], 1), mask=m_n)
        if ADD == "mix":
            for j in tl.static_range(S):
                tl.store(dh_res_ptr + (o_n * S + s) * S + j, tl.sum(res_sums[s * S + j], 1), mask=m_n)
