"""Gradients of q, k, g and beta with one decay per channel.

The formulas are those of gradients.py, with elementwise products in dg.

A program computes a slice of channels of a chunk; channels are independent. As in products.py, the sums are matrix
products of the whole chunk if inputs are bfloat16 and no channel of the slice decays too much, and otherwise consist of
tiles of 16 tokens. The sums over other tiles are then products of operands that decay up to the border between the
tiles.
"""

import triton
import triton.language as tl

from diptych_kernels.common import exp_of
from diptych_kernels.delta_rule.products import (
    TILE,
    chunk_of,
    hide,
    load_rows,
    load_scalars,
    log_decays_in_tile,
    log_decays_since,
    log_decays_to_tile_end,
    store_rows,
)


@triton.jit
def load_tile(a_ptr, p_a, row, column, C: tl.constexpr):
    """Load a tile [TILE, TILE] of a matrix [C, C]."""
    o_r = tl.arange(0, TILE)
    return tl.load(a_ptr + p_a + (o_r + row * TILE)[:, None] * C + (o_r + column * TILE)[None, :])


@triton.jit
def channel_gradients(
    q_ptr,
    k_ptr,
    g_ptr,
    beta_ptr,
    da_qk_ptr,
    da_kk_ptr,
    dq_from_start_ptr,
    dx_state_ptr,
    dk_to_end_ptr,
    dbeta_ptr,
    chunks_ptr,
    dq_ptr,
    dk_ptr,
    rise_ptr,
    fall_ptr,
    dbeta_slices_ptr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    SLICES: tl.constexpr,
):
    """Compute dq, dk, rise and fall [T, HV, K], and dbeta_slices [T, HV, SLICES], whose sum over slices is dbeta.

    A program computes a slice of channels of a chunk; grid (NC HV, SLICES).
    dbeta is that of product_gradients, which the first slice adds.
    """
    ACC: tl.constexpr = dbeta_slices_ptr.dtype.element_ty
    NARROW: tl.constexpr = k_ptr.dtype.element_ty
    chunk, head, first, length = chunk_of(chunks_ptr, HV)
    slice_index = tl.program_id(1)
    o_k = slice_index * BK + tl.arange(0, BK)
    key_head = head // (HV // H)
    p_a = (chunk * HV + head) * (C * C)
    b_since, can_factor = log_decays_since(g_ptr, first, length, head, HV, o_k, K, ACC, NARROW, C)
    if can_factor:
        o_t = tl.arange(0, C)
        m_t = o_t < length
        b_q = load_rows(q_ptr, first, o_t, m_t, key_head, H, o_k, K, ACC, K % BK == 0) * SCALE
        b_k = load_rows(k_ptr, first, o_t, m_t, key_head, H, o_k, K, ACC, K % BK == 0)
        b_decay = exp_of(b_since)
        b_growth = exp_of(-b_since)
        b_dq, b_dk_row, b_dk_column = _with_whole_chunk(
            da_qk_ptr + p_a, da_kk_ptr + p_a, b_q, b_k, b_decay, b_growth, NARROW, PRECISION
        )
        b_first = tl.load(g_ptr + (first * HV + head) * K + o_k, mask=(o_k < K) & (0 * o_k < length), other=0.0).to(ACC)
        b_rest = tl.sum(tl.where((o_t == C - 1)[:, None], b_since, 0.0), 0)
        b_from_start = b_decay * exp_of(b_first)[None, :]
        b_to_end = b_growth * exp_of(b_rest)[None, :]
        b_same = tl.load(da_qk_ptr + p_a + o_t * (C + 1)).to(ACC)
        _store_gradients(
            beta_ptr, dq_from_start_ptr, dx_state_ptr, dk_to_end_ptr, dbeta_ptr,
            dq_ptr, dk_ptr, rise_ptr, fall_ptr, dbeta_slices_ptr, first, o_t, m_t, head, slice_index, o_k,
            b_q, b_k, b_dq, b_dk_row, b_dk_column, b_same, b_from_start, b_to_end,
            HV, K, SCALE, SLICES, ACC,
        )  # fmt: skip
    else:
        for step in tl.range(0, C // TILE, disable_licm=True):
            tile = hide(step, length)
            zero = tile >> 31  # compilers do not know that, and compute addresses with it in every iteration
            first_token = first + zero
            p_tiles = p_a + zero
            o_t = tile * TILE + tl.arange(0, TILE)
            m_t = o_t < length
            b_dk_column, b_later = _with_later_tiles(
                q_ptr, k_ptr, g_ptr, da_qk_ptr, da_kk_ptr, p_tiles, first_token, length, tile, key_head, head, o_k,
                H, HV, K, SCALE, PRECISION, ACC, C,
            )  # fmt: skip
            b_dq, b_dk_row, b_earlier = _with_earlier_tiles(
                k_ptr, g_ptr, da_qk_ptr, da_kk_ptr, p_tiles, first_token, length, tile, key_head, head, o_k,
                H, HV, K, PRECISION, ACC, C,
            )  # fmt: skip
            b_q = load_rows(q_ptr, first_token, o_t, m_t, key_head, H, o_k, K, ACC) * SCALE
            b_k = load_rows(k_ptr, first_token, o_t, m_t, key_head, H, o_k, K, ACC)
            b_dq, b_dk_row, b_dk_column = _with_own_tile(
                k_ptr, g_ptr, da_qk_ptr, da_kk_ptr, p_tiles, first_token, length, tile, key_head, head, o_k,
                b_q, b_k, b_dq, b_dk_row, b_dk_column, H, HV, K, ACC, C,
            )  # fmt: skip
            b_from_start = log_decays_in_tile(g_ptr, first_token, length, tile, head, HV, o_k, K, ACC)
            b_from_start = exp_of(b_from_start + b_earlier)
            b_to_end = log_decays_to_tile_end(g_ptr, first_token, length, tile, head, HV, o_k, K, ACC)
            b_to_end = exp_of(b_to_end + b_later)
            b_same = tl.load(da_qk_ptr + p_tiles + o_t * (C + 1)).to(ACC)
            _store_gradients(
                beta_ptr, dq_from_start_ptr, dx_state_ptr, dk_to_end_ptr, dbeta_ptr,
                dq_ptr, dk_ptr, rise_ptr, fall_ptr, dbeta_slices_ptr, first_token, o_t, m_t, head, slice_index, o_k,
                b_q, b_k, b_dq, b_dk_row, b_dk_column, b_same, b_from_start, b_to_end,
                HV, K, SCALE, SLICES, ACC,
            )  # fmt: skip


@triton.jit
def _store_gradients(
    beta_ptr, dq_from_start_ptr, dx_state_ptr, dk_to_end_ptr, dbeta_ptr,
    dq_ptr, dk_ptr, rise_ptr, fall_ptr, dbeta_slices_ptr, first, o_t, m_t, head, slice_index, o_k,
    b_q, b_k, b_dq, b_dk_row, b_dk_column, b_same, b_from_start, b_to_end,
    HV: tl.constexpr, K: tl.constexpr, SCALE: tl.constexpr, SLICES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Add the terms of the states to the sums over tokens, and store the gradients of the tokens o_t."""
    b_beta = load_scalars(beta_ptr, first, o_t, m_t, head, HV, ACC)
    b_dx_state = load_rows(dx_state_ptr, first, o_t, m_t, head, HV, o_k, K, ACC) * b_from_start
    b_dq += load_rows(dq_from_start_ptr, first, o_t, m_t, head, HV, o_k, K, ACC) * b_from_start
    b_dk_row -= b_dx_state * b_beta[:, None]
    b_dk_end = load_rows(dk_to_end_ptr, first, o_t, m_t, head, HV, o_k, K, ACC) * b_to_end
    store_rows(rise_ptr, first, o_t, m_t, head, HV, o_k, K, b_q * b_dq + b_k * (b_dk_row - b_dk_column))
    store_rows(fall_ptr, first, o_t, m_t, head, HV, o_k, K, b_k * b_dk_end)
    store_rows(dq_ptr, first, o_t, m_t, head, HV, o_k, K, (b_dq + b_same[:, None] * b_k) * SCALE)
    store_rows(dk_ptr, first, o_t, m_t, head, HV, o_k, K, b_dk_row + b_dk_column + b_dk_end + b_same[:, None] * b_q)
    is_first = (slice_index + 0 * o_t) == 0
    b_dbeta = load_scalars(dbeta_ptr, first, o_t, m_t & is_first, head, HV, ACC) - tl.sum(b_k * b_dx_state, 1)
    tl.store(dbeta_slices_ptr + (first * HV + head) * SLICES + slice_index + o_t * (HV * SLICES), b_dbeta, mask=m_t)


@triton.jit
def _with_whole_chunk(p_qk, p_kk, b_q, b_k, b_decay, b_growth, NARROW: tl.constexpr, PRECISION: tl.constexpr):
    """Return the sums over all tokens of a chunk in dq / SCALE, dk_row and dk_column, without the state.

    b_decay holds the decays since the chunk's first token, and b_growth one over them.
    """
    C: tl.constexpr = b_q.shape[0]
    ACC: tl.constexpr = b_q.dtype
    o_i = tl.arange(0, C)[:, None]
    o_j = tl.arange(0, C)[None, :]
    b_qk = tl.load(p_qk + o_i * C + o_j)
    b_qk = tl.where(o_i > o_j, b_qk, 0.0).to(b_qk.dtype)
    b_kk = tl.load(p_kk + o_i * C + o_j)  # 0 on and above the diagonal
    b_keys = (b_k * b_growth).to(NARROW)
    b_dq = tl.dot(b_qk, b_keys, input_precision=PRECISION, out_dtype=ACC) * b_decay
    b_dk_row = tl.dot(b_kk, b_keys, input_precision=PRECISION, out_dtype=ACC) * b_decay
    b_rows = (b_q * b_decay).to(NARROW)
    b_dk_column = tl.dot(tl.trans(b_qk), b_rows, input_precision=PRECISION, out_dtype=ACC)
    b_rows = (b_k * b_decay).to(NARROW)
    b_dk_column = tl.dot(tl.trans(b_kk), b_rows, b_dk_column, input_precision=PRECISION, out_dtype=ACC)
    return b_dq, b_dk_row, b_dk_column * b_growth


@triton.jit
def _with_own_tile(
    k_ptr, g_ptr, da_qk_ptr, da_kk_ptr, p_a, first, length, tile, key_head, head, o_k,
    b_q, b_k, b_dq, b_dk_row, b_dk_column,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, ACC: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Add the sums over the tokens of a tile to dq / SCALE, dk_row and dk_column of the same tile."""
    BK: tl.constexpr = o_k.shape[0]
    o_r = tl.arange(0, TILE)
    b_since, can_factor = log_decays_since(
        g_ptr, first + tile * TILE, length - tile * TILE, head, HV, o_k, K, ACC, k_ptr.dtype.element_ty, TILE
    )
    if can_factor:
        below = o_r[:, None] > o_r[None, :]
        b_qk = tl.where(below, load_tile(da_qk_ptr, p_a, tile, tile, C).to(ACC), 0.0)
        b_kk = load_tile(da_kk_ptr, p_a, tile, tile, C).to(ACC)  # 0 on and above the diagonal
        b_decay = exp_of(b_since)
        b_growth = exp_of(-b_since)
        b_own = tl.dot(tl.trans(b_qk), b_q * b_decay, input_precision="tf32", out_dtype=ACC)
        b_own = tl.dot(tl.trans(b_kk), b_k * b_decay, b_own, input_precision="tf32", out_dtype=ACC)
        b_dk_column += b_own * b_growth
        b_keys = b_k * b_growth
        b_dq += tl.dot(b_qk, b_keys, input_precision="tf32", out_dtype=ACC) * b_decay
        b_dk_row += tl.dot(b_kk, b_keys, input_precision="tf32", out_dtype=ACC) * b_decay
    else:
        b_sums = tl.zeros([TILE, BK], ACC)
        for step in range(TILE):  # the order of _diagonal_tile in products.py
            column = hide(TILE - 1 - step, length)
            t = first + tile * TILE + column
            mask = (o_k < K) & ((tile * TILE + column + 0 * o_k) < length)
            b_key = tl.load(k_ptr + (t * H + key_head) * K + o_k, mask=mask, other=0.0).to(ACC)
            b_decay = exp_of(b_sums)
            p_column = p_a + (tile * TILE + o_r) * C + tile * TILE + column
            b_qk = tl.where(o_r > column, tl.load(da_qk_ptr + p_column).to(ACC), 0.0)[:, None]
            b_kk = tl.where(o_r > column, tl.load(da_kk_ptr + p_column).to(ACC), 0.0)[:, None]
            b_dq += b_qk * b_decay * b_key[None, :]
            b_dk_row += b_kk * b_decay * b_key[None, :]
            b_own = tl.sum((b_qk * b_q + b_kk * b_k) * b_decay, 0)
            b_dk_column += tl.where((o_r == column)[:, None], b_own[None, :], 0.0)
            b_g = tl.load(g_ptr + (t * HV + head) * K + o_k, mask=mask, other=0.0).to(ACC)
            b_sums = tl.where((o_r >= column)[:, None], b_sums + b_g[None, :], 0.0)
    return b_dq, b_dk_row, b_dk_column


@triton.jit
def _with_earlier_tiles(
    k_ptr, g_ptr, da_qk_ptr, da_kk_ptr, p_a, first, length, tile, key_head, head, o_k,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Return the sums over the tokens of earlier tiles in dq / SCALE and dk_row, and the log decay of these [1, BK]."""
    BK: tl.constexpr = o_k.shape[0]
    o_r = tl.arange(0, TILE)
    b_dq = tl.zeros([TILE, BK], ACC)
    b_dk_row = tl.zeros([TILE, BK], ACC)
    b_between = tl.zeros([1, BK], ACC)
    for step in range(0, tile):
        other = hide(tile - 1 - step, length)
        o_j = other * TILE + o_r
        b_decay = exp_of(log_decays_to_tile_end(g_ptr, first, length, other, head, HV, o_k, K, ACC) + b_between)
        b_keys = load_rows(k_ptr, first, o_j, o_j < length, key_head, H, o_k, K, ACC) * b_decay
        b_keys = b_keys.to(k_ptr.dtype.element_ty)
        b_a = load_tile(da_qk_ptr, p_a, tile, other, C)
        b_dq = tl.dot(b_a, b_keys, b_dq, input_precision=PRECISION, out_dtype=ACC)
        b_a = load_tile(da_kk_ptr, p_a, tile, other, C)
        b_dk_row = tl.dot(b_a, b_keys, b_dk_row, input_precision=PRECISION, out_dtype=ACC)
        b_between += tl.sum(load_rows(g_ptr, first, o_j, o_j < length, head, HV, o_k, K, ACC), 0)[None, :]
    b_decay = exp_of(log_decays_in_tile(g_ptr, first, length, tile, head, HV, o_k, K, ACC))
    return b_dq * b_decay, b_dk_row * b_decay, b_between


@triton.jit
def _with_later_tiles(
    q_ptr, k_ptr, g_ptr, da_qk_ptr, da_kk_ptr, p_a, first, length, tile, key_head, head, o_k,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr,
    SCALE: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Return the sums over the tokens of later tiles in dk_column, and the log decay of these tiles [1, BK]."""
    BK: tl.constexpr = o_k.shape[0]
    NARROW: tl.constexpr = k_ptr.dtype.element_ty
    b_dk_column = tl.zeros([TILE, BK], ACC)
    b_between = tl.zeros([1, BK], ACC)
    for step in range(tile + 1, C // TILE):
        other = hide(step, length)
        o_i = other * TILE + tl.arange(0, TILE)
        b_decay = exp_of(log_decays_in_tile(g_ptr, first, length, other, head, HV, o_k, K, ACC) + b_between)
        b_rows = (load_rows(q_ptr, first, o_i, o_i < length, key_head, H, o_k, K, ACC) * b_decay * SCALE).to(NARROW)
        b_a = tl.trans(load_tile(da_qk_ptr, p_a, other, tile, C))
        b_dk_column = tl.dot(b_a, b_rows, b_dk_column, input_precision=PRECISION, out_dtype=ACC)
        b_rows = (load_rows(k_ptr, first, o_i, o_i < length, key_head, H, o_k, K, ACC) * b_decay).to(NARROW)
        b_a = tl.trans(load_tile(da_kk_ptr, p_a, other, tile, C))
        b_dk_column = tl.dot(b_a, b_rows, b_dk_column, input_precision=PRECISION, out_dtype=ACC)
        b_between += tl.sum(load_rows(g_ptr, first, o_i, o_i < length, head, HV, o_k, K, ACC), 0)[None, :]
    b_decay = exp_of(log_decays_to_tile_end(g_ptr, first, length, tile, head, HV, o_k, K, ACC))
    return b_dk_column * b_decay, b_between


@triton.jit
def gate_gradients(
    rise_ptr,
    fall_ptr,
    decay_ptr,
    ddecay_ptr,
    dbeta_slices_ptr,
    chunks_ptr,
    dg_ptr,
    dbeta_ptr,
    HV: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    SLICES: tl.constexpr,
    SP: tl.constexpr,
):
    """Compute dg [T, HV, K], and dbeta [T, HV] as the sum over slices; grid (NC HV, K / BK)."""
    ACC: tl.constexpr = ddecay_ptr.dtype.element_ty
    chunk, head, first, length = chunk_of(chunks_ptr, HV)
    o_t = tl.arange(0, C)
    m_t = o_t < length
    o_k = tl.program_id(1) * BK + tl.arange(0, BK)
    b_rise = load_rows(rise_ptr, first, o_t, m_t, head, HV, o_k, K, ACC)
    b_fall = load_rows(fall_ptr, first - 1, o_t, m_t & (o_t > 0), head, HV, o_k, K, ACC)
    p_k = (chunk * HV + head) * K + o_k
    b_whole = tl.load(decay_ptr + p_k, mask=o_k < K, other=0.0) * tl.load(ddecay_ptr + p_k, mask=o_k < K, other=0.0)
    b_dg = tl.cumsum(b_rise, 0, reverse=True) + tl.cumsum(b_fall, 0) + b_whole[None, :]
    store_rows(dg_ptr, first, o_t, m_t, head, HV, o_k, K, b_dg)
    if tl.program_id(1) == 0:
        b_dbeta = tl.sum(load_rows(dbeta_slices_ptr, first, o_t, m_t, head, HV, tl.arange(0, SP), SLICES, ACC), 1)
        tl.store(dbeta_ptr + first * HV + head + o_t * HV, b_dbeta, mask=m_t)
