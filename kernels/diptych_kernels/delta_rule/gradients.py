"""Gradients of the tokens of a chunk, from the states, the errors and their gradients; chunks are independent.

    dv            = diag(beta) dx
    dA_qk         = do e^T                 for i >= j, else 0
    dA_kk         = -diag(beta) dx e^T     for i > j, else 0
    dq_from_start = do S^T
    dx_state      = dx S^T                 -diag(beta) dx_state is the gradient of k_from_start
    dk_to_end     = e dS^T
    dbeta_i       = dx_i . v_i - dx_state_i . k_from_start_i - sum_j (dx e^T)_ij A_kk[i, j]

    dq_i        = scale (exp(G_i) dq_from_start_i + sum_{j <= i} dA_qk[i, j] exp(G_i - G_j) k_j)
    dk_row_i    = -beta_i exp(G_i) dx_state_i + sum_{j < i} dA_kk[i, j] exp(G_i - G_j) k_j
    dk_column_j = sum_{i > j} exp(G_i - G_j) (scale dA_qk[i, j] q_i + dA_kk[i, j] k_i)
    dk_end_j    = exp(G_C - G_j) dk_to_end_j
    dk_i        = dk_row_i + dk_column_i + dk_end_i + scale dA_qk[i, i] q_i

    rise_i = q_i dq'_i + k_i (dk_row_i - dk_column_i)
    fall_j = k_j dk_end_j
    dg_t   = sum_{i >= t} rise_i + sum_{j < t} fall_j + exp(G_C) sum_v S dS

S is the state before the chunk and dS the gradient of the state after it. e, dx and do are defined in scan.py, and the
other symbols in products.py. i, j and t number tokens and v channels of the values. dk_row_i are the terms in which k_i
is the row of A_kk or multiplies the state before the chunk, dk_column_j those in which k_j is the column of A_qk or
A_kk, and dk_end_j the term of the state after the chunk. dq' is dq without its term j = i, which has no decay and would
cancel only up to rounding. In dg, products are dot products with one decay per head, and elementwise with one decay per
channel.

head_gradients computes dq, dk, dg and dbeta with one decay per head, and channel_gradients.py with one decay per
channel. In the reference, intra.py and scan.py of both backends, automatic differentiation computes KDA's terms of a
chunk and GDN's in JAX; the scan, the inverse and GDN's terms in PyTorch have explicit backward rules. dg generalises
reverse_cumsum(q dq - k dk) of flash-linear-attention.
"""

import triton
import triton.language as tl

from diptych_kernels.delta_rule.products import (
    chunk_of,
    decays_within,
    load_lower,
    load_rows,
    load_scalars,
    load_token_decays,
    store_rows,
)


@triton.jit
def state_gradients(
    chunk_states_ptr,
    dends_ptr,
    errors_ptr,
    dx_ptr,
    do_ptr,
    chunks_ptr,
    dq_from_start_ptr,
    dx_state_ptr,
    dk_to_end_ptr,
    ddecay_ptr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    PRECISION: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """Compute dq_from_start, dx_state and dk_to_end [T, HV, K], and ddecay = sum_v S dS [NC, HV, K].

    grid (NC HV, K / BK)
    """
    ACC: tl.constexpr = ddecay_ptr.dtype.element_ty
    NARROW: tl.constexpr = do_ptr.dtype.element_ty
    chunk, head, first, length = chunk_of(chunks_ptr, HV)
    o_t = tl.arange(0, C)
    m_t = o_t < length
    o_k = tl.program_id(1) * BK + tl.arange(0, BK)
    b_dq = tl.zeros([C, BK], ACC)
    b_dx_state = tl.zeros([C, BK], ACC)
    b_dk = tl.zeros([C, BK], ACC)
    b_ddecay = tl.zeros([BK], ACC)
    for start in range(0, V, BV):
        o_v = start + tl.arange(0, BV)
        mask = (o_k[:, None] < K) & (o_v[None, :] < V)
        p_state = (chunk * HV + head) * (K * V) + o_k[:, None] * V + o_v[None, :]
        b_s = tl.load(chunk_states_ptr + p_state, mask=mask, other=0.0)
        b_ds = tl.load(dends_ptr + p_state, mask=mask, other=0.0)
        b_ddecay += tl.sum(b_s.to(ACC) * b_ds.to(ACC), 1)
        b_do = load_rows(do_ptr, first, o_t, m_t, head, HV, o_v, V, NARROW)
        b_dq = tl.dot(b_do, tl.trans(b_s), b_dq, input_precision=PRECISION, out_dtype=ACC)
        b_dx = load_rows(dx_ptr, first, o_t, m_t, head, HV, o_v, V, NARROW)
        b_dx_state = tl.dot(b_dx, tl.trans(b_s), b_dx_state, input_precision=PRECISION, out_dtype=ACC)
        b_e = load_rows(errors_ptr, first, o_t, m_t, head, HV, o_v, V, NARROW)
        b_dk = tl.dot(b_e, tl.trans(b_ds), b_dk, input_precision=PRECISION, out_dtype=ACC)
    store_rows(dq_from_start_ptr, first, o_t, m_t, head, HV, o_k, K, b_dq)
    store_rows(dx_state_ptr, first, o_t, m_t, head, HV, o_k, K, b_dx_state)
    store_rows(dk_to_end_ptr, first, o_t, m_t, head, HV, o_k, K, b_dk)
    tl.store(ddecay_ptr + (chunk * HV + head) * K + o_k, b_ddecay, mask=o_k < K)


@triton.jit
def product_gradients(
    v_ptr,
    beta_ptr,
    errors_ptr,
    dx_ptr,
    do_ptr,
    a_kk_ptr,
    chunks_ptr,
    da_qk_ptr,
    da_kk_ptr,
    dv_ptr,
    dbeta_ptr,
    HV: tl.constexpr,
    V: tl.constexpr,
    PRECISION: tl.constexpr,
    C: tl.constexpr,
    BV: tl.constexpr,
):
    """Compute dA_qk, dA_kk [NC, HV, C, C], dv [T, HV, V] and dbeta [T, HV] without its dx_state term; grid (NC HV,)."""
    ACC: tl.constexpr = dbeta_ptr.dtype.element_ty
    NARROW: tl.constexpr = do_ptr.dtype.element_ty
    chunk, head, first, length = chunk_of(chunks_ptr, HV)
    o_t = tl.arange(0, C)
    m_t = o_t < length
    b_beta = load_scalars(beta_ptr, first, o_t, m_t, head, HV, ACC)
    b_qk = tl.zeros([C, C], ACC)
    b_kk = tl.zeros([C, C], ACC)
    b_dbeta = tl.zeros([C], ACC)
    for start in range(0, V, BV):
        o_v = start + tl.arange(0, BV)
        b_e = tl.trans(load_rows(errors_ptr, first, o_t, m_t, head, HV, o_v, V, NARROW))
        b_do = load_rows(do_ptr, first, o_t, m_t, head, HV, o_v, V, NARROW)
        b_qk = tl.dot(b_do, b_e, b_qk, input_precision=PRECISION, out_dtype=ACC)
        b_dx = load_rows(dx_ptr, first, o_t, m_t, head, HV, o_v, V, NARROW)
        b_kk = tl.dot(b_dx, b_e, b_kk, input_precision=PRECISION, out_dtype=ACC)
        b_dbeta += tl.sum(b_dx.to(ACC) * load_rows(v_ptr, first, o_t, m_t, head, HV, o_v, V, ACC), 1)
        store_rows(dv_ptr, first, o_t, m_t, head, HV, o_v, V, b_dx.to(ACC) * b_beta[:, None])
    below = o_t[:, None] > o_t[None, :]
    b_kk = tl.where(below, b_kk, 0.0)
    b_a = load_lower(a_kk_ptr, chunk, head, HV, C, o_t[:, None], o_t[None, :])
    tl.store(dbeta_ptr + first * HV + head + o_t * HV, b_dbeta - tl.sum(b_kk * b_a, 1), mask=m_t)
    p_a = (chunk * HV + head) * (C * C) + o_t[:, None] * C + o_t[None, :]
    tl.store(da_kk_ptr + p_a, -b_kk * b_beta[:, None])
    tl.store(da_qk_ptr + p_a, tl.where(o_t[:, None] >= o_t[None, :], b_qk, 0.0))


@triton.jit
def head_gradients(
    q_ptr,
    k_ptr,
    g_ptr,
    beta_ptr,
    decays_ptr,
    a_qk_ptr,
    a_kk_ptr,
    da_qk_ptr,
    da_kk_ptr,
    dq_from_start_ptr,
    dx_state_ptr,
    dk_to_end_ptr,
    ddecay_ptr,
    dbeta_ptr,
    chunks_ptr,
    dq_ptr,
    dk_ptr,
    dg_ptr,
    dbeta_out_ptr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
):
    """Compute dq, dk [T, HV, K], dg and dbeta_out [T, HV] with one decay per token and head; grid (NC HV,).

    dbeta is that of product_gradients; dbeta_out also has the term of dx_state. b_rise_state holds the terms of the
    state in rise, and b_pairs the terms of pairs of tokens in dg:

        rise_state_i = scale exp(G_i) q_i . dq_from_start_i - beta_i exp(G_i) k_i . dx_state_i
        pairs_t      = sum_{i >= t > j} (dA_qk[i, j] A_qk[i, j] + dA_kk[i, j] A_kk[i, j])
        dg_t         = sum_{i >= t} rise_state_i + sum_{j < t} fall_j + pairs_t + exp(G_C) sum_kv S dS
    """
    ACC: tl.constexpr = ddecay_ptr.dtype.element_ty
    NARROW: tl.constexpr = k_ptr.dtype.element_ty
    chunk, head, first, length = chunk_of(chunks_ptr, HV)
    o_t = tl.arange(0, C)
    m_t = o_t < length
    key_head = head // (HV // H)
    p_a = (chunk * HV + head) * (C * C) + o_t[:, None] * C + o_t[None, :]
    below = o_t[:, None] > o_t[None, :]
    b_dqk = tl.load(da_qk_ptr + p_a).to(ACC)
    b_dkk = tl.load(da_kk_ptr + p_a).to(ACC)
    b_pairs = tl.where(below, b_dqk * tl.load(a_qk_ptr + p_a).to(ACC) + b_dkk * tl.load(a_kk_ptr + p_a), 0.0)
    b_pairs = tl.cumsum(b_pairs, 0, reverse=True)  # row t holds the sum of the rows from t on
    b_dg = tl.sum(tl.where(below, b_pairs, 0.0), 1)
    b_within = decays_within(g_ptr, first, length, head, HV, ACC, C)
    b_dqk = (b_dqk * b_within * SCALE).to(NARROW)
    b_dkk = (b_dkk * b_within).to(NARROW)
    b_from_start, b_to_end, decay = load_token_decays(decays_ptr, chunk, head, HV, C)
    b_beta = load_scalars(beta_ptr, first, o_t, m_t, head, HV, ACC)
    b_rise_state = tl.zeros([C], ACC)
    b_fall = tl.zeros([C], ACC)
    b_dbeta = load_scalars(dbeta_ptr, first, o_t, m_t, head, HV, ACC)
    b_ddecay = tl.zeros([BK], ACC)
    for start in range(0, K, BK):
        o_k = start + tl.arange(0, BK)
        b_q = load_rows(q_ptr, first, o_t, m_t, key_head, H, o_k, K, NARROW)
        b_k = load_rows(k_ptr, first, o_t, m_t, key_head, H, o_k, K, NARROW)
        b_dq = load_rows(dq_from_start_ptr, first, o_t, m_t, head, HV, o_k, K, ACC) * (b_from_start * SCALE)[:, None]
        b_dx_state = load_rows(dx_state_ptr, first, o_t, m_t, head, HV, o_k, K, ACC) * b_from_start[:, None]
        b_dk_end = load_rows(dk_to_end_ptr, first, o_t, m_t, head, HV, o_k, K, ACC) * b_to_end[:, None]
        b_dbeta -= tl.sum(b_k.to(ACC) * b_dx_state, 1)
        b_dk_row = b_dx_state * -b_beta[:, None]
        b_rise_state += tl.sum(b_q.to(ACC) * b_dq + b_k.to(ACC) * b_dk_row, 1)
        b_fall += tl.sum(b_k.to(ACC) * b_dk_end, 1)
        p_k = (chunk * HV + head) * K + o_k
        b_ddecay += tl.load(ddecay_ptr + p_k, mask=o_k < K, other=0.0)
        b_dq = tl.dot(b_dqk, b_k, b_dq, input_precision=PRECISION, out_dtype=ACC)
        store_rows(dq_ptr, first, o_t, m_t, head, HV, o_k, K, b_dq)
        b_dk = tl.dot(tl.trans(b_dqk), b_q, b_dk_row + b_dk_end, input_precision=PRECISION, out_dtype=ACC)
        b_dk = tl.dot(b_dkk, b_k, b_dk, input_precision=PRECISION, out_dtype=ACC)
        b_dk = tl.dot(tl.trans(b_dkk), b_k, b_dk, input_precision=PRECISION, out_dtype=ACC)
        store_rows(dk_ptr, first, o_t, m_t, head, HV, o_k, K, b_dk)
    b_dg += (
        tl.sum(tl.where(below, b_fall[None, :], 0.0), 1)
        + tl.cumsum(b_rise_state, 0, reverse=True)
        + decay * tl.sum(b_ddecay, 0)
    )
    tl.store(dg_ptr + first * HV + head + o_t * HV, b_dg, mask=m_t)
    tl.store(dbeta_out_ptr + first * HV + head + o_t * HV, b_dbeta, mask=m_t)


@triton.jit
def sum_heads(
    x_ptr, chunks_ptr, out_ptr, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr
):
    """Sum x [T, HV, K] over the value heads that share a key head, to out [T, H, K]; grid (NC H, K / BK)."""
    _, key_head, first, length = chunk_of(chunks_ptr, H)
    ACC: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    o_t = tl.arange(0, C)
    o_k = tl.program_id(1) * BK + tl.arange(0, BK)
    b_sum = tl.zeros([C, BK], ACC)
    for number in range(HV // H):
        b_sum += load_rows(x_ptr, first, o_t, o_t < length, key_head * (HV // H) + number, HV, o_k, K, ACC)
    store_rows(out_ptr, first, o_t, o_t < length, key_head, H, o_k, K, b_sum)
