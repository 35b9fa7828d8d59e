"""States through chunks, forward and back: what goes chunk by chunk.

With a chunk's terms of products.py and S the state it begins with, one [K, V] a head of a sequence:

    e = inverse beta (v - k_in S)           the chunk's errors
    o = q_in S + A_qk e
    S <- diag(decay) S + k_out^T e

and backward, from the last chunk to the first, dS the gradient of the state a chunk ends with:

    de = A_qk^T do + k_out dS,  dx = inverse^T de
    dS <- diag(decay) dS + q_in^T do - k_in^T beta dx

A program has one head of one sequence and a slice [KP, BV] of the columns of its state, in registers: columns do not
need each other. Neither w nor u of the reference is made: an error needs the inverse once. Where a token has one decay
(PER_CHANNEL is False) rows of the products with plain q and k are decayed instead.

Twin of scan.py in both backends.
"""

import triton
import triton.language as tl

from diptych_kernels.delta_rule.products import decays_of_chunk, load_rows, store_rows


@triton.jit
def sequence_of(sequences_ptr, HV: tl.constexpr, SLICES: tl.constexpr):
    """Return this program's sequence, head and slice, and the sequence's half-open token range and first chunk."""
    program = tl.program_id(0).to(tl.int64)
    sequence, head = program // (HV * SLICES), program // SLICES % HV
    p = sequences_ptr + 3 * sequence
    first, last, chunk = tl.load(p).to(tl.int64), tl.load(p + 1).to(tl.int64), tl.load(p + 2).to(tl.int64)
    return sequence, head, program % SLICES, first, last, chunk


@triton.jit
def load_lower(a_ptr, chunk, head, HV: tl.constexpr, C: tl.constexpr, o_i, o_j):
    """Load the matrix [C, C] of a chunk and head, with its upper triangle 0."""
    p_a = (chunk * HV + head) * (C * C) + o_i * C + o_j
    return tl.load(a_ptr + p_a, mask=o_i >= o_j, other=0.0)


@triton.jit
def load_decay(decay_ptr, chunk, head, HV: tl.constexpr, o_k, K: tl.constexpr):
    """Load the decay of the state over a chunk, [KP]."""
    return tl.load(decay_ptr + (chunk * HV + head) * K + o_k, mask=o_k < K, other=0.0)


@triton.jit
def scan_forward(
    q_ptr,
    k_in_ptr,
    k_out_ptr,
    v_ptr,
    decay_ptr,
    beta_ptr,
    a_qk_ptr,
    inverse_ptr,
    initial_ptr,
    sequences_ptr,
    o_ptr,
    starts_ptr,
    errors_ptr,
    final_ptr,
    PER_CHANNEL: tl.constexpr,
    FROM_ZERO: tl.constexpr,
    OUTPUT: tl.constexpr,
    KEEP: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    C: tl.constexpr,
    KP: tl.constexpr,
    BV: tl.constexpr,
    SLICES: tl.constexpr,
):
    """Scan forward: o [T, HV, V] if OUTPUT; chunks' initial states [NC, HV, K, V] and errors [T, HV, V] if KEEP; final.

    PER_CHANNEL: q and k are q_in, k_in, k_out and decay is exp(G_C), [NC, HV, K]; else plain, of H heads, and decay
    is g [T, HV]. FROM_ZERO: initial [N, HV, K, V] is not read, but taken for 0. final [N, HV, K, W] is the last state H
    and, if W is V + K, beside it the M by which it changes with the first, S -> M S + H: columns that begin as the
    identity and have values of 0. grid (N HV SLICES,).
    """
    ACC: tl.constexpr = final_ptr.dtype.element_ty
    NARROW: tl.constexpr = v_ptr.dtype.element_ty
    sequence, head, piece, first, last, chunk = sequence_of(sequences_ptr, HV, SLICES)
    o_k, o_v = tl.arange(0, KP), piece * BV + tl.arange(0, BV)
    o_c = tl.arange(0, C)
    p_state = o_k[:, None] * W + o_v[None, :]
    m_state = (o_k[:, None] < K) & (o_v[None, :] < W)
    QH: tl.constexpr = HV if PER_CHANNEL else H
    group = head // (HV // QH)
    b_s = tl.where(o_v[None, :] - V == o_k[:, None], 1.0, 0.0).to(ACC)
    if not FROM_ZERO:
        p_initial = initial_ptr + (sequence * HV + head) * (K * V) + o_k[:, None] * V + o_v[None, :]
        b_s += tl.load(p_initial, mask=(o_k[:, None] < K) & (o_v[None, :] < V), other=0.0)
    for start in range(first, last, C):
        o_t, stop = start + o_c, tl.minimum(start + C, last)
        m_t = o_t < stop
        b_narrow = b_s.to(NARROW)
        if KEEP:
            tl.store(starts_ptr + (chunk * HV + head) * (K * W) + p_state, b_narrow, mask=m_state)
        b_beta = tl.load(beta_ptr + o_t * HV + head, mask=m_t, other=0.0).to(ACC)
        b_k = load_rows(k_in_ptr, o_t, m_t, group, QH, o_k, K, NARROW)
        b_seen = tl.dot(b_k, b_narrow, input_precision=PRECISION, out_dtype=ACC)
        if not PER_CHANNEL:
            b_before, b_after, decay = decays_of_chunk(decay_ptr, o_t, stop, head, HV, ACC)
            b_seen *= b_before[:, None]
        b_x = (load_rows(v_ptr, o_t, m_t, head, HV, o_v, V, ACC) - b_seen) * b_beta[:, None]
        b_inverse = load_lower(inverse_ptr, chunk, head, HV, C, o_c[:, None], o_c[None, :])
        b_e = tl.dot(b_inverse, b_x.to(NARROW), input_precision=PRECISION, out_dtype=ACC)
        b_errors = b_e.to(NARROW)
        if KEEP:
            store_rows(errors_ptr, o_t, m_t, head, HV, o_v, V, b_errors)
        if OUTPUT:
            b_q = load_rows(q_ptr, o_t, m_t, group, QH, o_k, K, NARROW)
            b_o = tl.dot(b_q, b_narrow, input_precision=PRECISION, out_dtype=ACC)
            if not PER_CHANNEL:
                b_o *= (b_before * SCALE)[:, None]
            b_a = load_lower(a_qk_ptr, chunk, head, HV, C, o_c[:, None], o_c[None, :])
            b_o = tl.dot(b_a, b_errors, b_o, input_precision=PRECISION, out_dtype=ACC)
            store_rows(o_ptr, o_t, m_t, head, HV, o_v, V, b_o)
        if PER_CHANNEL:
            b_s *= load_decay(decay_ptr, chunk, head, HV, o_k, K)[:, None]
            b_k = load_rows(k_out_ptr, o_t, m_t, group, QH, o_k, K, NARROW)
        else:
            b_s *= decay
            b_errors = (b_e * b_after[:, None]).to(NARROW)
        b_s = tl.dot(tl.trans(b_k), b_errors, b_s, input_precision=PRECISION, out_dtype=ACC)
        chunk += 1
    tl.store(final_ptr + (sequence * HV + head) * (K * W) + p_state, b_s, mask=m_state)


@triton.jit
def scan_backward(
    q_ptr,
    k_in_ptr,
    k_out_ptr,
    decay_ptr,
    beta_ptr,
    a_qk_ptr,
    inverse_ptr,
    do_ptr,
    dfinal_ptr,
    sequences_ptr,
    dx_ptr,
    dends_ptr,
    dinitial_ptr,
    PER_CHANNEL: tl.constexpr,
    FROM_ZERO: tl.constexpr,
    KEEP: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    C: tl.constexpr,
    KP: tl.constexpr,
    BV: tl.constexpr,
    SLICES: tl.constexpr,
):
    """Scan back: dx [T, HV, V] and gradients of chunks' final states [NC, HV, K, V] if KEEP; dinitial [N, HV, K, V].

    Inputs as of scan_forward; FROM_ZERO: dfinal is not read, but taken for 0. grid (N HV SLICES,).
    """
    ACC: tl.constexpr = dinitial_ptr.dtype.element_ty
    NARROW: tl.constexpr = do_ptr.dtype.element_ty
    sequence, head, piece, first, last, chunk = sequence_of(sequences_ptr, HV, SLICES)
    o_k, o_v = tl.arange(0, KP), piece * BV + tl.arange(0, BV)
    o_c = tl.arange(0, C)
    p_state = o_k[:, None] * V + o_v[None, :]
    m_state = (o_k[:, None] < K) & (o_v[None, :] < V)
    QH: tl.constexpr = HV if PER_CHANNEL else H
    group = head // (HV // QH)
    chunks = tl.cdiv(last - first, C)
    b_ds = tl.zeros([KP, BV], ACC)
    if not FROM_ZERO:
        b_ds += tl.load(dfinal_ptr + (sequence * HV + head) * (K * V) + p_state, mask=m_state, other=0.0)
    for back in range(0, chunks):
        number = chunks - 1 - back
        start = first + number * C
        o_t, stop = start + o_c, tl.minimum(start + C, last)
        m_t = o_t < stop
        b_narrow = b_ds.to(NARROW)
        if KEEP:
            tl.store(dends_ptr + ((chunk + number) * HV + head) * (K * V) + p_state, b_narrow, mask=m_state)
        b_do = load_rows(do_ptr, o_t, m_t, head, HV, o_v, V, NARROW)
        b_k = load_rows(k_out_ptr, o_t, m_t, group, QH, o_k, K, NARROW)
        b_de = tl.dot(b_k, b_narrow, input_precision=PRECISION, out_dtype=ACC)
        if not PER_CHANNEL:
            b_before, b_after, decay = decays_of_chunk(decay_ptr, o_t, stop, head, HV, ACC)
            b_de *= b_after[:, None]
        b_a = load_lower(a_qk_ptr, chunk + number, head, HV, C, o_c[None, :], o_c[:, None])
        b_de = tl.dot(b_a, b_do, b_de, input_precision=PRECISION, out_dtype=ACC)
        b_inverse = load_lower(inverse_ptr, chunk + number, head, HV, C, o_c[None, :], o_c[:, None])
        b_dx = tl.dot(b_inverse, b_de.to(NARROW), input_precision=PRECISION, out_dtype=ACC)
        if KEEP:
            store_rows(dx_ptr, o_t, m_t, head, HV, o_v, V, b_dx)
        b_dx *= -tl.load(beta_ptr + o_t * HV + head, mask=m_t, other=0.0).to(ACC)[:, None]
        b_q = load_rows(q_ptr, o_t, m_t, group, QH, o_k, K, NARROW)
        if PER_CHANNEL:
            b_ds *= load_decay(decay_ptr, chunk + number, head, HV, o_k, K)[:, None]
            b_k = load_rows(k_in_ptr, o_t, m_t, group, QH, o_k, K, NARROW)
        else:
            b_ds *= decay
            b_do = (b_do.to(ACC) * (b_before * SCALE)[:, None]).to(NARROW)
            b_dx *= b_before[:, None]
        b_ds = tl.dot(tl.trans(b_q), b_do, b_ds, input_precision=PRECISION, out_dtype=ACC)
        b_ds = tl.dot(tl.trans(b_k), b_dx.to(NARROW), b_ds, input_precision=PRECISION, out_dtype=ACC)
    tl.store(dinitial_ptr + (sequence * HV + head) * (K * V) + p_state, b_ds, mask=m_state)


@triton.jit(do_not_specialize=["parts"])
def compose(
    h_ptr,
    maps_ptr,
    initial_ptr,
    parts,
    states_ptr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    HW: tl.constexpr,
    BACK: tl.constexpr,
    PRECISION: tl.constexpr,
    KP: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    SLICES: tl.constexpr,
):
    """States [P, HV, K, V] before each of the parts that sequences were cut into: S <- M S + H from one to the next.

    BACK: gradients of the states after each of them, from the last: dS <- M^T dS + H. h: H are the first V of the
    columns of [P, HV, K, HW]; maps: M are those from V on, [P, HV, K, V + K]; initial: before the first, or after the
    last, [N, HV, K, V]. parts: of every sequence; grid (N HV SLICES,).
    """
    ACC: tl.constexpr = states_ptr.dtype.element_ty
    program = tl.program_id(0).to(tl.int64)
    sequence, head, piece = program // (HV * SLICES), program // SLICES % HV, program % SLICES
    o_k, o_v = tl.arange(0, KP), piece * BV + tl.arange(0, BV)
    p_state = o_k[:, None] * V + o_v[None, :]
    mask = (o_k[:, None] < K) & (o_v[None, :] < V)
    b_s = tl.load(initial_ptr + (sequence * HV + head) * (K * V) + p_state, mask=mask, other=0.0)
    for number in range(0, parts):
        part = ((parts - 1 - number if BACK else number) + sequence * parts) * HV + head
        p_s = states_ptr + part * (K * V)
        tl.store(p_s + p_state, b_s, mask=mask)
        tl.debug_barrier()  # the state is read again, some rows at a time
        b_s = tl.load(h_ptr + part * (K * HW) + o_k[:, None] * HW + o_v[None, :], mask=mask, other=0.0)
        for start in range(0, K, BK):
            o_j = start + tl.arange(0, BK)
            b_some = tl.load(
                p_s + o_j[:, None] * V + o_v[None, :], mask=(o_j[:, None] < K) & (o_v[None, :] < V), other=0.0
            )
            p_m = o_j[None, :] * (V + K) + o_k[:, None] if BACK else o_k[:, None] * (V + K) + o_j[None, :]
            m_m = (o_k[:, None] < K) & (o_j[None, :] < K)
            b_m = tl.load(maps_ptr + part * (K * (V + K)) + V + p_m, mask=m_m, other=0.0)
            b_s = tl.dot(b_m, b_some, b_s, input_precision=PRECISION, out_dtype=ACC)
