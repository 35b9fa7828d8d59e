"""Terms of a chunk that do not depend on the state: decayed queries and keys, their products, and the inverse.

In a chunk of C tokens, with channels c:

    G_i            = sum_{t <= i} g_t
    q_from_start_i = scale q_i exp(G_i)
    k_from_start_i = k_i exp(G_i)
    k_to_end_j     = k_j exp(G_C - G_j)
    A_qk[i, j]     = scale sum_c q_ic k_jc exp(G_ic - G_jc)      for i >= j, else 0
    A_kk[i, j]     =       sum_c k_ic k_jc exp(G_ic - G_jc)      for i > j, else 0
    inverse        = (I + diag(beta) A_kk)^-1

q_i and k_i are the query and key of token i, g_i <= 0 its log decays and beta_i its write strength. G_C is the sum over
the whole chunk. q_from_start and k_from_start multiply the state before the chunk, and k_to_end contributes to the
state after it. inverse diag(beta) is the UT transform of the chunk; with it, w = inverse diag(beta) k_from_start and
u = inverse diag(beta) v are the WY representation (Yang et al. 2024, arXiv 2406.06484). The kernels form neither.

A program computes one chunk of one head. With one decay per channel (KDA), A_qk and A_kk have two forms:

- Factored, for bfloat16: if every log decay since the chunk's first token is above -60, A_qk and A_kk are matrix
  products of the whole chunk, because exp(G_i - G_j) = exp(G_i - G_1) exp(G_1 - G_j).
- Tiled: otherwise they consist of tiles of 16 x 16 tokens. Below the diagonal, both factors are decays to the border
  before the row's tile, hence at most 1. A tile on the diagonal has the factored form from its own first token, if
  its decay allows that, and is computed column by column otherwise.

Exponents are sums of log decays, never differences of sums, except in the factored form. So they are never positive and
stay accurate after a strong decay.

The inverse is computed by forward substitution, first over rows within a tile and then over tiles. Powers of the matrix
would overflow if keys are equal.

In flash-linear-attention, q_from_start is called qg, k_to_end kg, and inverse diag(beta) A. common.py explains the
names of all kernels. T is the number of tokens, NC of chunks, N of sequences, H of key heads and HV of value heads.

The file intra.py of both backends contains the reference implementation. Reference: arXiv 2412.06464, section 3.3;
arXiv 2510.26692, section 3.
"""

import triton
import triton.language as tl

from diptych_kernels.common import exp_of
from diptych_kernels.delta_rule import launch_configs

TILE = tl.constexpr(launch_configs.TILE)
"""Tokens per tile, the smallest size of products on tensor cores."""

MAX_FACTORED_DECAY = tl.constexpr(60.0)
"""Largest decay within a tile or chunk, in nats, in the factored form, whose inverse multiplies keys; float32 and
bfloat16 overflow at 88."""


@triton.jit
def load_lower(a_ptr, chunk, head, HV: tl.constexpr, C: tl.constexpr, o_i, o_j):
    """Load the lower triangular matrix [C, C] of a chunk and head.

    Tiles above the diagonal are not read; within diagonal tiles, the matrix has zeros above the diagonal. A mask of
    whole tiles, unlike one of elements, leaves the loads wide.
    """
    p_a = (chunk * HV + head) * (C * C) + o_i * C + o_j
    return tl.load(a_ptr + p_a, mask=o_i // TILE >= o_j // TILE, other=0.0)


@triton.jit
def chunk_of(chunks_ptr, HV: tl.constexpr):
    """Return this program's chunk, head and first token, int64, and the number of tokens."""
    chunk = tl.program_id(0).to(tl.int64) // HV
    head = tl.program_id(0).to(tl.int64) % HV
    first = tl.load(chunks_ptr + 2 * chunk)
    return chunk, head, first.to(tl.int64), tl.load(chunks_ptr + 2 * chunk + 1) - first


@triton.jit
def hide(index, length):
    """Return ``index`` in a form in which compilers do not recognise it; length >= 0.

    Compilers keep addresses that the iterations of a loop share in registers. In a branch that hardly ever runs, this
    takes registers from the other branch, so that fewer programs share a multiprocessor.
    """
    return index ^ (length >> 31)


@triton.jit
def load_rows(
    x_ptr, first, o_t, m_t, head,
    H: tl.constexpr, o_d, D: tl.constexpr, ACC: tl.constexpr, HAS_COLUMNS: tl.constexpr = False,
):  # fmt: skip
    """Load the tile [tokens, columns] of one head of x [T, H, D], with 0 for missing tokens and columns.

    ``o_t`` counts from the token ``first``. Offsets from there are int32 and differ by constants within a thread, so
    that each thread computes one base address. A load without a mask has fewer instructions: m_t is None if no token is
    missing, and HAS_COLUMNS says that no column is.
    """
    p_x = x_ptr + (first * H + head) * D + (o_t * (H * D))[:, None] + o_d[None, :]
    if m_t is None and HAS_COLUMNS:
        return tl.load(p_x).to(ACC)
    mask = o_d[None, :] < D if m_t is None else m_t[:, None] & (o_d[None, :] < D)
    return tl.load(p_x, mask=mask, other=0.0).to(ACC)


@triton.jit
def store_rows(
    x_ptr, first, o_t, m_t, head, H: tl.constexpr, o_d, D: tl.constexpr, b_x, HAS_COLUMNS: tl.constexpr = False
):
    """Store the tile [tokens, columns] of one head of x [T, H, D]; arguments as for load_rows."""
    p_x = x_ptr + (first * H + head) * D + (o_t * (H * D))[:, None] + o_d[None, :]
    if m_t is None and HAS_COLUMNS:
        tl.store(p_x, b_x)
    else:
        mask = o_d[None, :] < D if m_t is None else m_t[:, None] & (o_d[None, :] < D)
        tl.store(p_x, b_x, mask=mask)


@triton.jit
def load_scalars(x_ptr, first, o_t, m_t, head, H: tl.constexpr, ACC: tl.constexpr):
    """Load one number per token of one head of x [T, H], with 0 for missing tokens; arguments as for load_rows."""
    p_x = x_ptr + first * H + head + o_t * H
    return tl.load(p_x).to(ACC) if m_t is None else tl.load(p_x, mask=m_t, other=0.0).to(ACC)


@triton.jit
def decay_queries_and_keys(
    q_ptr,
    k_ptr,
    g_ptr,
    chunks_ptr,
    q_from_start_ptr,
    k_from_start_ptr,
    k_to_end_ptr,
    decay_ptr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    SCALE: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
):
    """Compute q_from_start, k_from_start, k_to_end [T, HV, K], and the decays exp(G_C) [NC, HV, K] of chunks.

    grid (NC HV, K / BK)
    """
    chunk, head, first, length = chunk_of(chunks_ptr, HV)
    o_k = tl.program_id(1) * BK + tl.arange(0, BK)
    _store_decayed(
        q_ptr, k_ptr, g_ptr, q_from_start_ptr, k_from_start_ptr, k_to_end_ptr, decay_ptr,
        chunk, head, first, length, o_k, 0.0, 0.0, H, HV, K, SCALE, C, BK, None, False,
    )  # fmt: skip


@triton.jit
def terms_by_channel(
    q_ptr,
    k_ptr,
    g_ptr,
    chunks_ptr,
    q_from_start_ptr,
    k_from_start_ptr,
    k_to_end_ptr,
    decay_ptr,
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
    """Compute the results of decay_queries_and_keys, and A_qk and A_kk [NC, HV, C, C], with one decay per channel.

    Tiles above the diagonal are not written. grid (NC HV,)
    """
    ACC: tl.constexpr = a_kk_ptr.dtype.element_ty
    NARROW: tl.constexpr = k_ptr.dtype.element_ty
    chunk, head, first, length = chunk_of(chunks_ptr, HV)
    p_a = (chunk * HV + head) * (C * C)
    # length >= 0 is always true; it makes a tensor of the constant, because the loop assigns a tensor to it.
    can_factor = (length >= 0) & (NARROW.is_bf16())
    b_qk = tl.zeros([C, C], ACC)
    b_kk = tl.zeros([C, C], ACC)
    for start in range(0, K, BK):
        o_k = start + tl.arange(0, BK)
        b_qk, b_kk, min_log_decay = _store_decayed(
            q_ptr, k_ptr, g_ptr, q_from_start_ptr, k_from_start_ptr, k_to_end_ptr, decay_ptr,
            chunk, head, first, length, o_k, b_qk, b_kk,
            H, HV, K, SCALE, C, BK, PRECISION, NARROW.is_bf16(),
        )  # fmt: skip
        can_factor = can_factor & (min_log_decay > -MAX_FACTORED_DECAY)
    if can_factor:
        o_i = tl.arange(0, C)[:, None]
        o_j = tl.arange(0, C)[None, :]
        m_a = o_i // TILE >= o_j // TILE
        tl.store(a_qk_ptr + p_a + o_i * C + o_j, tl.where(o_i >= o_j, b_qk * SCALE, 0.0), mask=m_a)
        tl.store(a_kk_ptr + p_a + o_i * C + o_j, tl.where(o_i > o_j, b_kk, 0.0), mask=m_a)
    else:
        for step in range(0, C // TILE):
            row = hide(step, length)
            for column in range(0, row):
                b_qk_tile, b_kk_tile = _lower_tile(
                    q_ptr, k_ptr, g_ptr, first, length, row, column, head, H, HV, K, PRECISION, ACC, C, BK
                )
                _store_tile(a_qk_ptr + p_a, row, column, b_qk_tile * SCALE, C)
                _store_tile(a_kk_ptr + p_a, row, column, b_kk_tile, C)
            b_qk_tile, b_kk_tile = _diagonal_tile(
                q_ptr, k_ptr, g_ptr, first + row * TILE, length - row * TILE, head, H, HV, K, ACC, BK
            )
            _store_tile(a_qk_ptr + p_a, row, row, b_qk_tile * SCALE, C)
            _store_tile(a_kk_ptr + p_a, row, row, b_kk_tile, C)


@triton.jit
def _store_decayed(
    q_ptr, k_ptr, g_ptr, q_from_start_ptr, k_from_start_ptr, k_to_end_ptr, decay_ptr,
    chunk, head, first, length, o_k, b_qk, b_kk,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, SCALE: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, WITH_PRODUCTS: tl.constexpr,
):  # fmt: skip
    """Store q_from_start, k_from_start, k_to_end and the decays of some channels of a chunk, and add to its products.

    Returns:
        b_qk and b_kk with the products of these channels added, unchanged without WITH_PRODUCTS, and the smallest log
        decay since the first token.
    """
    ACC: tl.constexpr = decay_ptr.dtype.element_ty
    NARROW: tl.constexpr = k_ptr.dtype.element_ty
    o_c = tl.arange(0, C)
    m_t = o_c < length
    key_head = head // (HV // H)
    o_i = o_c[:, None]
    o_j = o_c[None, :]
    HAS_COLUMNS: tl.constexpr = K % BK == 0
    b_g = load_rows(g_ptr, first, o_c, m_t, head, HV, o_k, K, ACC, HAS_COLUMNS)
    if NARROW.is_bf16():
        b_high, b_low = _split_float16(b_g)
        b_since = _sums((o_j > 0) & (o_j <= o_i), b_high, b_low)
    else:
        b_since = tl.cumsum(tl.where(o_i > 0, b_g, 0.0), 0)
    m_first = (o_k < K) & (0 * o_k < length)
    b_first = exp_of(tl.load(g_ptr + (first * HV + head) * K + o_k, mask=m_first, other=0.0).to(ACC))[None, :]
    b_decay = exp_of(b_since)
    m_decay = (o_i == C - 1) & (o_k < K)[None, :]
    p_decay = decay_ptr + (chunk * HV + head) * K
    tl.store(p_decay + tl.broadcast_to(o_k[None, :], b_decay.shape), b_decay * b_first, mask=m_decay)
    b_q = load_rows(q_ptr, first, o_c, m_t, key_head, H, o_k, K, ACC, HAS_COLUMNS) * b_decay
    b_keys = load_rows(k_ptr, first, o_c, m_t, key_head, H, o_k, K, ACC, HAS_COLUMNS)
    b_k = b_keys * b_decay
    min_log_decay = tl.min(b_since)
    if WITH_PRODUCTS:  # infinite or NaN if the decay is strong
        b_grown = tl.trans((b_keys * exp_of(-b_since)).to(NARROW))
        b_qk = tl.dot(b_q.to(NARROW), b_grown, b_qk, input_precision=PRECISION, out_dtype=ACC)
        b_kk = tl.dot(b_k.to(NARROW), b_grown, b_kk, input_precision=PRECISION, out_dtype=ACC)
    store_rows(q_from_start_ptr, first, o_c, m_t, head, HV, o_k, K, b_q * (b_first * SCALE), HAS_COLUMNS)
    store_rows(k_from_start_ptr, first, o_c, m_t, head, HV, o_k, K, b_k * b_first, HAS_COLUMNS)
    if NARROW.is_bf16():
        b_until_end = _sums(o_j > o_i, b_high, b_low)
    else:
        b_next = load_rows(g_ptr, first + 1, o_c, o_c + 1 < length, head, HV, o_k, K, ACC)
        b_until_end = tl.cumsum(b_next, 0, reverse=True)
    store_rows(k_to_end_ptr, first, o_c, m_t, head, HV, o_k, K, b_keys * exp_of(b_until_end), HAS_COLUMNS)
    return b_qk, b_kk, min_log_decay


@triton.jit
def _split_float16(b_g):
    """Return (high, low), two float16 whose sum is g with an error of at most 2^-22 of its size or 2^-25.

    This is less than what rounding a decay to bfloat16 changes. g is raised to -6e4 first, because 0 times an infinite
    decay would be NaN.
    """
    b_g = tl.where(b_g < -6e4, -6e4, b_g)
    b_high = b_g.to(tl.float16)
    return b_high, (b_g - b_high.to(tl.float32)).to(tl.float16)


@triton.jit
def _sums(mask, b_high, b_low):
    """Return, for every token i, the sums of g over the tokens j with mask[i, j], float32.

    They are products, because tensor cores add faster than threads that exchange sums.
    """
    b_ones = mask.to(tl.float16)
    return tl.dot(b_ones, b_high, tl.dot(b_ones, b_low))


@triton.jit
def _diagonal_tile(
    q_ptr, k_ptr, g_ptr, first, length, head,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, ACC: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute A_qk / SCALE and A_kk of a diagonal tile, in factored form or column by column from the last.

    b_sums holds the sums of g from the token after the column to each row.
    """
    o_r = tl.arange(0, TILE)
    key_head = head // (HV // H)
    b_qk = tl.zeros([TILE, TILE], ACC)
    b_kk = tl.zeros([TILE, TILE], ACC)
    for start in range(0, K, BK):
        o_k = start + tl.arange(0, BK)
        b_q = load_rows(q_ptr, first, o_r, o_r < length, key_head, H, o_k, K, ACC)
        b_k = load_rows(k_ptr, first, o_r, o_r < length, key_head, H, o_k, K, ACC)
        b_since, can_factor = log_decays_since(
            g_ptr, first, length, head, HV, o_k, K, ACC, k_ptr.dtype.element_ty, TILE
        )
        if can_factor:
            b_keys = tl.trans(b_k * exp_of(-b_since))
            b_decay = exp_of(b_since)
            b_qk = tl.dot(b_q * b_decay, b_keys, b_qk, input_precision="tf32", out_dtype=ACC)
            b_kk = tl.dot(b_k * b_decay, b_keys, b_kk, input_precision="tf32", out_dtype=ACC)
        else:
            b_sums = tl.zeros([TILE, BK], ACC)
            for step in range(TILE):
                column = TILE - 1 - step
                t = first + column
                mask = (o_k < K) & ((column + 0 * o_k) < length)
                b_key = tl.load(k_ptr + (t * H + key_head) * K + o_k, mask=mask, other=0.0).to(ACC)
                b_key = exp_of(b_sums) * b_key[None, :]
                here = (o_r == column)[None, :]
                b_qk += tl.where(here, tl.sum(b_q * b_key, 1)[:, None], 0.0)
                b_kk += tl.where(here, tl.sum(b_k * b_key, 1)[:, None], 0.0)
                b_g = tl.load(g_ptr + (t * HV + head) * K + o_k, mask=mask, other=0.0).to(ACC)
                b_sums = tl.where((o_r >= column)[:, None], b_sums + b_g[None, :], 0.0)
    below = o_r[:, None] > o_r[None, :]
    return tl.where(below | (o_r[:, None] == o_r[None, :]), b_qk, 0.0), tl.where(below, b_kk, 0.0)


@triton.jit
def log_decays_since(
    g_ptr, first, length, head,
    HV: tl.constexpr, o_k, K: tl.constexpr, ACC: tl.constexpr, NARROW: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Return the log decays of ROWS tokens since ``first``, [ROWS, BK], and can_factor.

    can_factor is true if exp(G_i - G_j) may be the product of the decay of row i and one over the decay of key j.
    Wider types than bfloat16 would lose digits, because the rounding of an exponent is relative to its size, and
    float16 would overflow.
    """
    o_r = tl.arange(0, ROWS)
    b_g = load_rows(g_ptr, first, o_r, (o_r < length) & (o_r > 0), head, HV, o_k, K, ACC)
    b_since = tl.cumsum(b_g, 0)
    return b_since, (NARROW.is_bf16()) & (tl.min(b_since) > -MAX_FACTORED_DECAY)


@triton.jit
def log_decays_in_tile(g_ptr, first, length, tile, head, HV: tl.constexpr, o_k, K: tl.constexpr, ACC: tl.constexpr):
    """Return the log decay from the start of a tile to each of its tokens, including its own, [TILE, BK]."""
    o_t = tile * TILE + tl.arange(0, TILE)
    return tl.cumsum(load_rows(g_ptr, first, o_t, o_t < length, head, HV, o_k, K, ACC), 0)


@triton.jit
def log_decays_to_tile_end(g_ptr, first, length, tile, head, HV: tl.constexpr, o_k, K: tl.constexpr, ACC: tl.constexpr):
    """Return the log decay from each token of a tile, without its own, to the end of the tile, [TILE, BK]."""
    o_r = tl.arange(0, TILE)
    o_t = tile * TILE + o_r
    m_next = (o_t + 1 < length) & (o_r < TILE - 1)
    return tl.cumsum(load_rows(g_ptr, first + 1, o_t, m_next, head, HV, o_k, K, ACC), 0, reverse=True)


@triton.jit
def _log_decay_between(
    g_ptr, first, length, earlier, later, head, HV: tl.constexpr, o_k, K: tl.constexpr, ACC: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Return the log decay from the end of the tile ``earlier`` to the start of ``later``, [1, BK]."""
    o_c = tl.arange(0, C)
    m_c = (o_c >= (earlier + 1) * TILE) & (o_c < later * TILE) & (o_c < length)
    return tl.sum(load_rows(g_ptr, first, o_c, m_c, head, HV, o_k, K, ACC), 0)[None, :]


@triton.jit
def _lower_tile(
    q_ptr, k_ptr, g_ptr, first, length, row, column, head,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr,
    PRECISION: tl.constexpr, ACC: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute A_qk / SCALE and A_kk of a tile below the diagonal; rows and keys decay to the row tile's start."""
    NARROW: tl.constexpr = k_ptr.dtype.element_ty
    o_r = tl.arange(0, TILE)
    o_i = row * TILE + o_r
    o_j = column * TILE + o_r
    key_head = head // (HV // H)
    b_qk = tl.zeros([TILE, TILE], ACC)
    b_kk = tl.zeros([TILE, TILE], ACC)
    for start in range(0, K, BK):
        o_k = start + tl.arange(0, BK)
        b_since = exp_of(log_decays_in_tile(g_ptr, first, length, row, head, HV, o_k, K, ACC))
        b_between = _log_decay_between(g_ptr, first, length, column, row, head, HV, o_k, K, ACC, C)
        b_until = exp_of(log_decays_to_tile_end(g_ptr, first, length, column, head, HV, o_k, K, ACC) + b_between)
        b_keys = tl.trans(load_rows(k_ptr, first, o_j, o_j < length, key_head, H, o_k, K, ACC) * b_until).to(NARROW)
        b_q = (load_rows(q_ptr, first, o_i, o_i < length, key_head, H, o_k, K, ACC) * b_since).to(NARROW)
        b_k = (load_rows(k_ptr, first, o_i, o_i < length, key_head, H, o_k, K, ACC) * b_since).to(NARROW)
        b_qk = tl.dot(b_q, b_keys, b_qk, input_precision=PRECISION, out_dtype=ACC)
        b_kk = tl.dot(b_k, b_keys, b_kk, input_precision=PRECISION, out_dtype=ACC)
    return b_qk, b_kk


@triton.jit
def decays_within(g_ptr, first, length, head, HV: tl.constexpr, ACC: tl.constexpr, C: tl.constexpr):
    """Return exp(G_i - G_j) for i >= j, else 0, [C, C], with one decay per token."""
    o_c = tl.arange(0, C)
    b_g = load_scalars(g_ptr, first, o_c, o_c < length, head, HV, ACC)
    below = o_c[:, None] > o_c[None, :]
    b_sums = tl.cumsum(tl.where(below, b_g[:, None], 0.0), 0)
    return tl.where(o_c[:, None] >= o_c[None, :], exp_of(b_sums), 0.0)


@triton.jit
def load_token_decays(decays_ptr, chunk, head, HV: tl.constexpr, C: tl.constexpr):
    """Return exp(G) [C], exp(G_C - G) [C] and the scalar exp(G_C) from the decays of terms_by_head."""
    p_decays = decays_ptr + (chunk * HV + head) * (2 * C)
    o_c = tl.arange(0, C)
    return tl.load(p_decays + o_c), tl.load(p_decays + C + o_c), tl.load(p_decays + (C - 1))


@triton.jit
def terms_by_head(
    q_ptr,
    k_ptr,
    g_ptr,
    chunks_ptr,
    decays_ptr,
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
    """Compute A_qk and A_kk [NC, HV, C, C] with one decay per token and head; grid (NC HV,).

    Also compute the decays exp(G) and exp(G_C - G) of the tokens [NC, HV, 2, C]. Missing tokens have no decay, so that
    the last exp(G) is exp(G_C).
    """
    ACC: tl.constexpr = a_kk_ptr.dtype.element_ty
    NARROW: tl.constexpr = k_ptr.dtype.element_ty
    chunk, head, first, length = chunk_of(chunks_ptr, HV)
    o_c = tl.arange(0, C)
    m_t = o_c < length
    key_head = head // (HV // H)
    b_qk = tl.zeros([C, C], ACC)
    b_kk = tl.zeros([C, C], ACC)
    for start in range(0, K, BK):
        o_k = start + tl.arange(0, BK)
        b_q = load_rows(q_ptr, first, o_c, m_t, key_head, H, o_k, K, NARROW)
        b_k = load_rows(k_ptr, first, o_c, m_t, key_head, H, o_k, K, NARROW)
        b_qk = tl.dot(b_q, tl.trans(b_k), b_qk, input_precision=PRECISION, out_dtype=ACC)
        b_kk = tl.dot(b_k, tl.trans(b_k), b_kk, input_precision=PRECISION, out_dtype=ACC)
    p_decays = decays_ptr + (chunk * HV + head) * (2 * C) + o_c
    b_g = load_scalars(g_ptr, first, o_c, m_t, head, HV, ACC)
    tl.store(p_decays, exp_of(tl.cumsum(b_g, 0)))
    b_g = load_scalars(g_ptr, first + 1, o_c, o_c + 1 < length, head, HV, ACC)
    tl.store(p_decays + C, exp_of(tl.cumsum(b_g, 0, reverse=True)))
    b_decay = decays_within(g_ptr, first, length, head, HV, ACC, C)
    p_a = (chunk * HV + head) * (C * C) + o_c[:, None] * C + o_c[None, :]
    tl.store(a_qk_ptr + p_a, b_qk * b_decay * SCALE)
    tl.store(a_kk_ptr + p_a, tl.where(o_c[:, None] > o_c[None, :], b_kk * b_decay, 0.0))


@triton.jit
def invert(
    a_kk_ptr,
    beta_ptr,
    chunks_ptr,
    inverse_ptr,
    beta_chunks_ptr,
    HV: tl.constexpr,
    PRECISION: tl.constexpr,
    C: tl.constexpr,
):
    """Compute inverse [NC, HV, C, C] on and below the diagonal, C <= 64; grid (NC HV,).

    Also copy beta to beta_chunks [NC, HV, C], with 0 for missing tokens, so that the scans load it from one place.
    Tiles below the diagonal are loaded before the substitution, so that a program waits for them once.
    """
    ACC: tl.constexpr = a_kk_ptr.dtype.element_ty
    chunk, head, first, length = chunk_of(chunks_ptr, HV)
    p_a = a_kk_ptr + (chunk * HV + head) * (C * C)
    p_out = inverse_ptr + (chunk * HV + head) * (C * C)
    p_beta = beta_ptr + first * HV + head
    o_c = tl.arange(0, C)
    b_beta = load_scalars(beta_ptr, first, o_c, o_c < length, head, HV, ACC)
    tl.store(beta_chunks_ptr + (chunk * HV + head) * C + o_c, b_beta)
    ROWS: tl.constexpr = C // TILE
    scaled = ()
    for row in tl.static_range(ROWS):
        for column in tl.static_range(row):
            scaled = scaled + (_scaled_tile(p_a, p_beta, row, column, length, HV, ACC, C),)
    b_diagonal = _invert_diagonal(p_a, p_beta, length, HV, ACC, C)
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

    A thread has one column of one tile, so that the factors of a row are the same for 16 threads, which load them.
    """
    TILES: tl.constexpr = C // TILE
    o_n = tl.broadcast_to(tl.arange(0, TILES)[:, None], [TILES, TILE])
    o_c = tl.broadcast_to(tl.arange(0, TILE)[None, :], [TILES, TILE])
    rows = ()
    for row in tl.static_range(TILE):
        o_i = o_n * TILE + row
        b_row = tl.zeros([TILES, TILE], ACC)
        for column in tl.static_range(row):
            b_row += tl.load(p_a + o_i * C + o_n * TILE + column) * rows[column]
        b_beta = tl.load(p_beta + o_i * HV, mask=o_i < length, other=0.0).to(ACC)
        rows = rows + (tl.where(o_c == row, 1.0, -b_beta * b_row),)
    return tl.permute(_joined(rows), (0, 2, 1))


@triton.jit
def _joined(rows):
    """Return TILE arrays [N, M] as one array [N, M, TILE], without moving elements between threads."""
    pairs = rows
    for half in tl.static_range(4):
        joined = ()
        for i in tl.static_range(TILE >> (half + 1)):
            joined = joined + (tl.join(pairs[i], pairs[i + (TILE >> (half + 1))]),)
        pairs = joined
    return tl.reshape(pairs[0], [rows[0].shape[0], rows[0].shape[1], TILE])


@triton.jit
def _store_tile(p_out, row, column, b_x, C: tl.constexpr):
    """Store a tile of a matrix [C, C] at a row and column of tiles."""
    o_i = tl.arange(0, TILE) + row * TILE
    o_j = tl.arange(0, TILE) + column * TILE
    tl.store(p_out + o_i[:, None] * C + o_j[None, :], b_x)
