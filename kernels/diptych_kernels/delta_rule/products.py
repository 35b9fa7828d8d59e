"""Terms of a chunk that do not depend on the state: decayed queries and keys, their products, and the inverse.

In a chunk of C tokens, with channels c:

    G_i        = sum_{t <= i} g_t
    q_in_i     = scale q_i exp(G_i)
    k_in_i     = k_i exp(G_i)
    k_out_j    = k_j exp(G_C - G_j)
    A_qk[i, j] = scale sum_c q_ic k_jc exp(G_ic - G_jc)      for i >= j, else 0
    A_kk[i, j] =       sum_c k_ic k_jc exp(G_ic - G_jc)      for i > j, else 0
    inverse    = (I + diag(beta) A_kk)^-1

q_i and k_i are the query and key of token i, g_i <= 0 its log decays and beta_i its step size. G_C is the sum over the
whole chunk. q_in and k_in multiply the state before the chunk, and k_out contributes to the state after it.

A program computes one chunk of one head. Where each channel has its own decay (KDA) and inputs have 16 bits, A_qk and
A_kk are matrix products of the whole chunk if no channel decays by more than exp(-60) after the chunk's first token:
queries decay from this token on, and keys grow back to it.

Otherwise they consist of tiles of 16 x 16 tokens. Below the diagonal, rows decay from the first token of their tile,
and keys decay up to that token. Exponents are sums of log decays, never differences of sums. They are therefore never
positive and stay accurate after a strong decay, and the row of a token does not depend on later tokens. A tile on the
diagonal is computed in the form of the whole chunk, from its own first token, if its decay allows that, and otherwise
column by column, with exponents that are never positive.

The inverse is computed by forward substitution, first over rows within a tile and then over tiles. Powers of the matrix
would overflow if keys are equal.

The file intra.py of both backends contains the reference implementation. Reference: arXiv 2412.06464, section 3.3;
arXiv 2510.26692, section 3.
"""

import triton
import triton.language as tl

from diptych_kernels.common import exp_of

TILE = tl.constexpr(16)
"""Tokens per tile, the smallest size of products on tensor cores."""

LIMIT = tl.constexpr(60.0)
"""Largest decay within a tile or chunk, in nats, whose inverse multiplies keys; float32 overflows at 88."""


@triton.jit
def chunk_of(chunks_ptr, HV: tl.constexpr):
    """Return this program's chunk, head and half-open token range, int64."""
    chunk = tl.program_id(0).to(tl.int64) // HV
    head = tl.program_id(0).to(tl.int64) % HV
    return chunk, head, tl.load(chunks_ptr + 2 * chunk).to(tl.int64), tl.load(chunks_ptr + 2 * chunk + 1).to(tl.int64)


@triton.jit
def load_rows(x_ptr, o_t, m_t, head, H: tl.constexpr, o_d, D: tl.constexpr, ACC: tl.constexpr):
    """Load the tile [tokens, columns] of one head of x [T, H, D], with 0 for missing tokens and columns."""
    mask = m_t[:, None] & (o_d[None, :] < D)
    return tl.load(x_ptr + (o_t * H + head)[:, None] * D + o_d[None, :], mask=mask, other=0.0).to(ACC)


@triton.jit
def store_rows(x_ptr, o_t, m_t, head, H: tl.constexpr, o_d, D: tl.constexpr, b_x):
    """Store the tile [tokens, columns] of one head of x [T, H, D]."""
    mask = m_t[:, None] & (o_d[None, :] < D)
    tl.store(x_ptr + (o_t * H + head)[:, None] * D + o_d[None, :], b_x, mask=mask)


@triton.jit
def decayed(
    q_ptr,
    k_ptr,
    g_ptr,
    chunks_ptr,
    q_in_ptr,
    k_in_ptr,
    k_out_ptr,
    decay_ptr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    SCALE: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
):
    """Compute q_in, k_in, k_out [T, HV, K] and the decays exp(G_C) [NC, HV, K] of chunks; grid (NC HV, K / BK)."""
    ACC: tl.constexpr = decay_ptr.dtype.element_ty
    chunk, head, first, last = chunk_of(chunks_ptr, HV)
    o_t = first + tl.arange(0, C)
    m_t = o_t < last
    o_k = tl.program_id(1) * BK + tl.arange(0, BK)
    b_g = load_rows(g_ptr, o_t, m_t, head, HV, o_k, K, ACC)
    b_next = load_rows(g_ptr, o_t + 1, o_t + 1 < last, head, HV, o_k, K, ACC)
    b_before = exp_of(tl.cumsum(b_g, 0))
    b_after = exp_of(tl.cumsum(b_next, 0, reverse=True))
    group = head // (HV // H)
    b_q = load_rows(q_ptr, o_t, m_t, group, H, o_k, K, ACC)
    store_rows(q_in_ptr, o_t, m_t, head, HV, o_k, K, b_q * b_before * SCALE)
    b_k = load_rows(k_ptr, o_t, m_t, group, H, o_k, K, ACC)
    store_rows(k_in_ptr, o_t, m_t, head, HV, o_k, K, b_k * b_before)
    store_rows(k_out_ptr, o_t, m_t, head, HV, o_k, K, b_k * b_after)
    tl.store(decay_ptr + (chunk * HV + head) * K + o_k, exp_of(tl.sum(b_g, 0)), mask=o_k < K)


@triton.jit
def products_by_channel(
    q_ptr,
    k_ptr,
    g_ptr,
    chunks_ptr,
    a_qk_ptr,
    a_kk_ptr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
):
    """Compute A_qk and A_kk [NC, HV, C, C] with one decay per channel; grid (NC HV,).

    Tiles above the diagonal are not written.
    """
    ACC: tl.constexpr = a_kk_ptr.dtype.element_ty
    chunk, head, first, last = chunk_of(chunks_ptr, HV)
    p_a = (chunk * HV + head) * (C * C)
    if _is_mild_chunk(g_ptr, first, last, head, HV, K, ACC, k_ptr.dtype.element_ty, C, BK):
        b_qk, b_kk = _whole_chunk(q_ptr, k_ptr, g_ptr, first, last, head, H, HV, K, PRECISION, ACC, C, BK)
        o_i = tl.arange(0, C)[:, None]
        o_j = tl.arange(0, C)[None, :]
        m_a = o_i // TILE >= o_j // TILE
        tl.store(a_qk_ptr + p_a + o_i * C + o_j, tl.where(o_i >= o_j, b_qk * SCALE, 0.0), mask=m_a)
        tl.store(a_kk_ptr + p_a + o_i * C + o_j, tl.where(o_i > o_j, b_kk, 0.0), mask=m_a)
    else:
        for row in range(0, C // TILE):
            for column in range(0, row):
                b_qk, b_kk = _lower_tile(
                    q_ptr, k_ptr, g_ptr, first, last, row, column, head, H, HV, K, PRECISION, ACC, C, BK
                )
                _store_tile(a_qk_ptr + p_a, row, column, b_qk * SCALE, C)
                _store_tile(a_kk_ptr + p_a, row, column, b_kk, C)
            b_qk, b_kk = _diagonal_tile(q_ptr, k_ptr, g_ptr, first + row * TILE, last, head, H, HV, K, ACC, BK)
            _store_tile(a_qk_ptr + p_a, row, row, b_qk * SCALE, C)
            _store_tile(a_kk_ptr + p_a, row, row, b_kk, C)


@triton.jit
def _is_mild_chunk(
    g_ptr, first, last, head,
    HV: tl.constexpr, K: tl.constexpr, ACC: tl.constexpr, NARROW: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Return whether keys may be multiplied by the decays since the first token of a chunk, in all channels."""
    mildest = (last >= first) & (NARROW.primitive_bitwidth == 16)
    if NARROW.primitive_bitwidth == 16:
        for start in range(0, K, BK):
            _, is_mild = decays_since_start(g_ptr, first, last, head, HV, start + tl.arange(0, BK), K, ACC, NARROW, C)
            mildest = mildest & is_mild
    return mildest


@triton.jit
def _whole_chunk(
    q_ptr, k_ptr, g_ptr, first, last, head,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr,
    PRECISION: tl.constexpr, ACC: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute A_qk / SCALE and A_kk of a chunk, [C, C] with arbitrary elements above the diagonal."""
    NARROW: tl.constexpr = k_ptr.dtype.element_ty
    o_t = first + tl.arange(0, C)
    group = head // (HV // H)
    b_qk = tl.zeros([C, C], ACC)
    b_kk = tl.zeros([C, C], ACC)
    for start in range(0, K, BK):
        o_k = start + tl.arange(0, BK)
        b_since, _ = decays_since_start(g_ptr, first, last, head, HV, o_k, K, ACC, NARROW, C)
        b_decay = exp_of(b_since)
        b_k = load_rows(k_ptr, o_t, o_t < last, group, H, o_k, K, ACC)
        b_q = (load_rows(q_ptr, o_t, o_t < last, group, H, o_k, K, ACC) * b_decay).to(NARROW)
        b_keys = tl.trans((b_k * exp_of(-b_since)).to(NARROW))
        b_k = (b_k * b_decay).to(NARROW)
        b_qk = tl.dot(b_q, b_keys, b_qk, input_precision=PRECISION, out_dtype=ACC)
        b_kk = tl.dot(b_k, b_keys, b_kk, input_precision=PRECISION, out_dtype=ACC)
    return b_qk, b_kk


@triton.jit
def _diagonal_tile(
    q_ptr, k_ptr, g_ptr, first, last, head,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, ACC: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute A_qk / SCALE and A_kk of a diagonal tile, by products or column by column from the last.

    b_sums holds the sums of g from the token after the column to each row.
    """
    o_r = tl.arange(0, TILE)
    o_t = first + o_r
    group = head // (HV // H)
    b_qk = tl.zeros([TILE, TILE], ACC)
    b_kk = tl.zeros([TILE, TILE], ACC)
    for start in range(0, K, BK):
        o_k = start + tl.arange(0, BK)
        b_q = load_rows(q_ptr, o_t, o_t < last, group, H, o_k, K, ACC)
        b_k = load_rows(k_ptr, o_t, o_t < last, group, H, o_k, K, ACC)
        b_since, is_mild = decays_since_start(g_ptr, first, last, head, HV, o_k, K, ACC, k_ptr.dtype.element_ty, TILE)
        if is_mild:
            b_keys = tl.trans(b_k * exp_of(-b_since))
            b_decay = exp_of(b_since)
            b_qk = tl.dot(b_q * b_decay, b_keys, b_qk, input_precision="tf32", out_dtype=ACC)
            b_kk = tl.dot(b_k * b_decay, b_keys, b_kk, input_precision="tf32", out_dtype=ACC)
        else:
            b_sums = tl.zeros([TILE, BK], ACC)
            for step in range(TILE):
                column = TILE - 1 - step
                t = first + column
                mask = (o_k < K) & ((t + 0 * o_k) < last)
                b_key = tl.load(k_ptr + (t * H + group) * K + o_k, mask=mask, other=0.0).to(ACC)
                b_key = exp_of(b_sums) * b_key[None, :]
                here = (o_r == column)[None, :]
                b_qk += tl.where(here, tl.sum(b_q * b_key, 1)[:, None], 0.0)
                b_kk += tl.where(here, tl.sum(b_k * b_key, 1)[:, None], 0.0)
                b_g = tl.load(g_ptr + (t * HV + head) * K + o_k, mask=mask, other=0.0).to(ACC)
                b_sums = tl.where((o_r >= column)[:, None], b_sums + b_g[None, :], 0.0)
    below = o_r[:, None] > o_r[None, :]
    return tl.where(below | (o_r[:, None] == o_r[None, :]), b_qk, 0.0), tl.where(below, b_kk, 0.0)


@triton.jit
def decays_since_start(
    g_ptr, first, last, head,
    HV: tl.constexpr, o_k, K: tl.constexpr, ACC: tl.constexpr, NARROW: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Return the log decays of ROWS tokens since ``first``, [ROWS, BK], and whether keys may be multiplied by them.

    Types of more than 16 bits would lose digits: rounding of an exponent is relative to its size.
    """
    o_r = tl.arange(0, ROWS)
    o_t = first + o_r
    b_since = tl.cumsum(load_rows(g_ptr, o_t, (o_t < last) & (o_r > 0), head, HV, o_k, K, ACC), 0)
    return b_since, (NARROW.primitive_bitwidth == 16) & (tl.min(b_since) > -LIMIT)


@triton.jit
def decays_around(
    g_ptr, first, last, row, column, head, HV: tl.constexpr, o_k, K: tl.constexpr, ACC: tl.constexpr, C: tl.constexpr
):
    """Return the decays of two tiles around the first token of the later tile ``row``, [TILE, BK] each.

    The first result is the decay of each token of ``row`` since the start of its tile. The second is the decay from
    each token of the earlier tile ``column`` up to that start.
    """
    o_r = tl.arange(0, TILE)
    b_rows = load_rows(g_ptr, first + row * TILE + o_r, first + row * TILE + o_r < last, head, HV, o_k, K, ACC)
    o_j = o_r + column * TILE
    m_j = (first + o_j + 1 < last) & (o_r < TILE - 1)
    b_keys = load_rows(g_ptr, first + o_j + 1, m_j, head, HV, o_k, K, ACC)
    o_c = tl.arange(0, C)
    m_c = (o_c >= (column + 1) * TILE) & (o_c < row * TILE) & (first + o_c < last)
    b_between = tl.sum(load_rows(g_ptr, first + o_c, m_c, head, HV, o_k, K, ACC), 0)
    return exp_of(tl.cumsum(b_rows, 0)), exp_of(tl.cumsum(b_keys, 0, reverse=True) + b_between[None, :])


@triton.jit
def _lower_tile(
    q_ptr, k_ptr, g_ptr, first, last, row, column, head,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr,
    PRECISION: tl.constexpr, ACC: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute A_qk / SCALE and A_kk of a tile below the diagonal, from rows and keys that ``decays_around`` decays."""
    NARROW: tl.constexpr = k_ptr.dtype.element_ty
    o_r = tl.arange(0, TILE)
    o_i = first + row * TILE + o_r
    o_j = first + column * TILE + o_r
    group = head // (HV // H)
    b_qk = tl.zeros([TILE, TILE], ACC)
    b_kk = tl.zeros([TILE, TILE], ACC)
    for start in range(0, K, BK):
        o_k = start + tl.arange(0, BK)
        b_since, b_until = decays_around(g_ptr, first, last, row, column, head, HV, o_k, K, ACC, C)
        b_keys = tl.trans(load_rows(k_ptr, o_j, o_j < last, group, H, o_k, K, ACC) * b_until).to(NARROW)
        b_q = (load_rows(q_ptr, o_i, o_i < last, group, H, o_k, K, ACC) * b_since).to(NARROW)
        b_k = (load_rows(k_ptr, o_i, o_i < last, group, H, o_k, K, ACC) * b_since).to(NARROW)
        b_qk = tl.dot(b_q, b_keys, b_qk, input_precision=PRECISION, out_dtype=ACC)
        b_kk = tl.dot(b_k, b_keys, b_kk, input_precision=PRECISION, out_dtype=ACC)
    return b_qk, b_kk


@triton.jit
def decays_within(g_ptr, o_t, m_t, head, HV: tl.constexpr, ACC: tl.constexpr):
    """Return exp(G_i - G_j) for i >= j, else 0, [C, C], with one decay per token."""
    C: tl.constexpr = o_t.shape[0]
    o_c = tl.arange(0, C)
    b_g = tl.load(g_ptr + o_t * HV + head, mask=m_t, other=0.0).to(ACC)
    below = o_c[:, None] > o_c[None, :]
    b_sums = tl.cumsum(tl.where(below, b_g[:, None], 0.0), 0)
    return tl.where(o_c[:, None] >= o_c[None, :], exp_of(b_sums), 0.0)


@triton.jit
def decays_of_chunk(g_ptr, o_t, last, head, HV: tl.constexpr, ACC: tl.constexpr):
    """Return exp(G) [C], exp(G_C - G) [C] and the scalar exp(G_C), with one decay per token."""
    b_g = tl.load(g_ptr + o_t * HV + head, mask=o_t < last, other=0.0).to(ACC)
    b_next = tl.load(g_ptr + (o_t + 1) * HV + head, mask=o_t + 1 < last, other=0.0).to(ACC)
    return exp_of(tl.cumsum(b_g, 0)), exp_of(tl.cumsum(b_next, 0, reverse=True)), exp_of(tl.sum(b_g, 0))


@triton.jit
def products_by_head(
    q_ptr,
    k_ptr,
    g_ptr,
    chunks_ptr,
    a_qk_ptr,
    a_kk_ptr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
):
    """Compute A_qk and A_kk [NC, HV, C, C] with one decay per token and head; grid (NC HV,)."""
    ACC: tl.constexpr = a_kk_ptr.dtype.element_ty
    chunk, head, first, last = chunk_of(chunks_ptr, HV)
    o_c = tl.arange(0, C)
    o_t = first + o_c
    m_t = o_t < last
    group = head // (HV // H)
    b_qk = tl.zeros([C, C], ACC)
    b_kk = tl.zeros([C, C], ACC)
    for start in range(0, K, BK):
        o_k = start + tl.arange(0, BK)
        b_q = load_rows(q_ptr, o_t, m_t, group, H, o_k, K, q_ptr.dtype.element_ty)
        b_k = load_rows(k_ptr, o_t, m_t, group, H, o_k, K, k_ptr.dtype.element_ty)
        b_qk = tl.dot(b_q, tl.trans(b_k), b_qk, input_precision=PRECISION, out_dtype=ACC)
        b_kk = tl.dot(b_k, tl.trans(b_k), b_kk, input_precision=PRECISION, out_dtype=ACC)
    b_decay = decays_within(g_ptr, o_t, m_t, head, HV, ACC)
    p_a = (chunk * HV + head) * (C * C) + o_c[:, None] * C + o_c[None, :]
    tl.store(a_qk_ptr + p_a, b_qk * b_decay * SCALE)
    tl.store(a_kk_ptr + p_a, tl.where(o_c[:, None] > o_c[None, :], b_kk * b_decay, 0.0))


@triton.jit
def solve(
    a_kk_ptr,
    beta_ptr,
    chunks_ptr,
    inverse_ptr,
    HV: tl.constexpr,
    PRECISION: tl.constexpr,
    C: tl.constexpr,
):
    """Compute inverse [NC, HV, C, C] on and below the diagonal, C <= 64; grid (NC HV,).

    All loads precede the substitution, so that a program waits for memory once.
    """
    ACC: tl.constexpr = a_kk_ptr.dtype.element_ty
    chunk, head, first, last = chunk_of(chunks_ptr, HV)
    p_a = a_kk_ptr + (chunk * HV + head) * (C * C)
    p_out = inverse_ptr + (chunk * HV + head) * (C * C)
    p_beta = beta_ptr + first * HV + head
    ROWS: tl.constexpr = C // TILE
    scaled = ()
    for row in tl.static_range(ROWS):
        for column in tl.static_range(row):
            scaled = scaled + (_scaled_tile(p_a, p_beta, row, column, last - first, HV, ACC, C),)
    b_diagonal = _invert_diagonal(p_a, p_beta, last - first, HV, ACC, C)
    o_n = tl.arange(0, ROWS)[:, None, None]
    inverted = ()
    for row in tl.static_range(ROWS):
        b_own = tl.sum(tl.where(o_n == row, b_diagonal, 0.0), 0)
        inverted_row = ()
        for column in tl.static_range(row):
            b_sum = tl.zeros([TILE, TILE], ACC)
            for between in tl.static_range(column, row):
                b_a = scaled[row * (row - 1) // 2 + between]
                b_known = inverted[between * (between + 1) // 2 + column]
                b_sum = tl.dot(b_a, b_known, b_sum, input_precision=PRECISION, out_dtype=ACC)
            b_tile = -tl.dot(b_own, b_sum, input_precision=PRECISION, out_dtype=ACC)
            _store_tile(p_out, row, column, b_tile, C)
            inverted_row = inverted_row + (b_tile,)
        _store_tile(p_out, row, row, b_own, C)
        inverted = inverted + inverted_row + (b_own,)


@triton.jit
def _scaled_tile(p_a, p_beta, row, column, length, HV: tl.constexpr, ACC: tl.constexpr, C: tl.constexpr):
    """Load a tile of diag(beta) A_kk below the diagonal."""
    o_i = tl.arange(0, TILE) + row * TILE
    o_j = tl.arange(0, TILE) + column * TILE
    b_beta = tl.load(p_beta + o_i * HV, mask=o_i < length, other=0.0).to(ACC)
    return tl.load(p_a + o_i[:, None] * C + o_j[None, :]) * b_beta[:, None]


@triton.jit
def _invert_diagonal(p_a, p_beta, length, HV: tl.constexpr, ACC: tl.constexpr, C: tl.constexpr):
    """Invert the tiles I + diag(beta) A_kk on the diagonal, [C / TILE, TILE, TILE], all at once and row by row.

    A_kk is loaded transposed, so that the factors of a row are along the axis over which its products are summed.
    """
    o_n = tl.arange(0, C // TILE)[:, None, None]
    o_r = tl.arange(0, TILE)[None, :, None]
    o_c = tl.arange(0, TILE)[None, None, :]
    b_beta = tl.load(p_beta + (o_n * TILE + o_c) * HV, mask=o_n * TILE + o_c < length, other=0.0).to(ACC)
    b_a = tl.load(p_a + (o_n * TILE + o_c) * C + o_n * TILE + o_r) * b_beta
    b_inverse = tl.where((o_r == o_c) & (o_n >= 0), 1.0, 0.0).to(ACC)
    for row in range(1, TILE):
        b_factors = tl.sum(tl.where(o_c == row, b_a, 0.0), 2, keep_dims=True)
        b_row = tl.sum(b_factors * b_inverse, 1, keep_dims=True)
        b_inverse = tl.where(o_r == row, b_inverse - b_row, b_inverse)
    return b_inverse


@triton.jit
def _store_tile(p_out, row, column, b_x, C: tl.constexpr):
    """Store a tile of a matrix [C, C] at a row and column of tiles."""
    o_i = tl.arange(0, TILE) + row * TILE
    o_j = tl.arange(0, TILE) + column * TILE
    tl.store(p_out + o_i[:, None] * C + o_j[None, :], b_x)
