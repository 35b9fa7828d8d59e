"""Scans of the state over the chunks of a sequence, forward and backward.

Forward, from the first chunk to the last:

    x = diag(beta) (v - k_from_start S)
    e = inverse x
    o = q_from_start S + A_qk e
    S <- diag(decay) S + k_to_end^T e

Backward, from the last chunk to the first:

    de = A_qk^T do + k_to_end dS
    dx = inverse^T de
    dS <- diag(decay) dS + q_from_start^T do - k_from_start^T diag(beta) dx

S [K, V] is the state of one head before the chunk, and dS the gradient of the state after it. v [C, V] are the values
of the C tokens, beta [C] their write strengths and o [C, V] the outputs. e [C, V] are the beta-weighted prediction
errors, e_i = beta_i (v_i - S_i^T k_i) with the decayed state S_i before token i; flash-linear-attention calls them
v_new. do, de and dx are the gradients of o, e and x. The other symbols are defined in products.py, with
decay [K] = exp(G_C).

A program computes one head of one sequence and a slice [KP, BV] of the state's columns, which it holds in registers.
Columns are independent. w and u of the reference, with which e = u - w S, are not computed. With one decay per head
(PER_CHANNEL is False), kernels multiply plain q and k and apply the decays to the rows of the products.

The file scan.py of both backends contains the reference implementation.
"""

import triton
import triton.language as tl

from diptych_kernels.delta_rule.products import load_lower, load_rows, load_token_decays, store_rows


@triton.jit
def sequence_of(sequences_ptr, HV: tl.constexpr, SLICES: tl.constexpr):
    """Return this program's sequence, head and slice, and the sequence's half-open token range and first chunk."""
    program = tl.program_id(0).to(tl.int64)
    sequence = program // (HV * SLICES)
    head = program // SLICES % HV
    p = sequences_ptr + 3 * sequence
    first = tl.load(p).to(tl.int64)
    last = tl.load(p + 1).to(tl.int64)
    chunk = tl.load(p + 2).to(tl.int64)
    return sequence, head, program % SLICES, first, last, chunk


@triton.jit
def load_chunk_decay(decay_ptr, chunk, head, HV: tl.constexpr, o_k, K: tl.constexpr):
    """Load the decay of the state over a chunk, [KP]."""
    return tl.load(decay_ptr + (chunk * HV + head) * K + o_k, mask=o_k < K, other=0.0)


@triton.jit
def scan_forward(
    q_from_start_ptr,
    k_from_start_ptr,
    k_to_end_ptr,
    v_ptr,
    decay_ptr,
    beta_chunks_ptr,
    a_qk_ptr,
    inverse_ptr,
    initial_ptr,
    sequences_ptr,
    o_ptr,
    chunk_states_ptr,
    errors_ptr,
    final_ptr,
    PER_CHANNEL: tl.constexpr,
    FROM_ZERO: tl.constexpr,
    OUTPUT: tl.constexpr,
    SAVE: tl.constexpr,
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
    """Scan forward over the chunks of each sequence; grid (N HV SLICES,).

    Write o [T, HV, V] if OUTPUT. Write chunk_states [NC, HV, K, V], the states before the chunks, and errors
    [T, HV, V] if SAVE. Always write final [N, HV, K, W].

    With PER_CHANNEL, q_from_start, k_from_start and k_to_end have HV heads, and decay [NC, HV, K] is exp(G_C).
    Otherwise they are the plain q, k and k of H heads, and decay [NC, HV, 2, C] is that of terms_by_head. With
    FROM_ZERO, the initial states are 0 and ``initial`` [N, HV, K, V] is not read.

    final is the last state. If W is V + K, it is [S_local | M] with S_local the last state. The columns of M start as
    the identity and use values of 0. If S_local starts from 0, the map of states is S_last = M S_first + S_local.
    """
    ACC: tl.constexpr = final_ptr.dtype.element_ty
    sequence, head, slice_index, first, last, chunk = sequence_of(sequences_ptr, HV, SLICES)
    o_k = tl.arange(0, KP)
    o_v = slice_index.to(tl.int32) * BV + tl.arange(0, BV)
    p_state = o_k[:, None] * W + o_v[None, :]
    m_state = (o_k[:, None] < K) & (o_v[None, :] < W)
    # The identity in the columns of M; columns >= W are never stored.
    b_s = tl.where(o_v[None, :] - V == o_k[:, None], 1.0, 0.0).to(ACC)
    if not FROM_ZERO:
        p_initial = initial_ptr + (sequence * HV + head) * (K * V) + o_k[:, None] * V + o_v[None, :]
        b_s += tl.load(p_initial, mask=(o_k[:, None] < K) & (o_v[None, :] < V), other=0.0)
    whole = (last - first) // C
    for number in range(0, whole):
        b_s = _chunk_forward(
            q_from_start_ptr, k_from_start_ptr, k_to_end_ptr, v_ptr, decay_ptr, beta_chunks_ptr, a_qk_ptr, inverse_ptr,
            o_ptr, chunk_states_ptr, errors_ptr, b_s,
            first + number * C, C, chunk + number, head, o_k, o_v,
            PER_CHANNEL, OUTPUT, SAVE, H, HV, K, V, W, SCALE, PRECISION, C, KP, BV, True,
        )  # fmt: skip
    if first + whole * C < last:
        b_s = _chunk_forward(
            q_from_start_ptr, k_from_start_ptr, k_to_end_ptr, v_ptr, decay_ptr, beta_chunks_ptr, a_qk_ptr, inverse_ptr,
            o_ptr, chunk_states_ptr, errors_ptr, b_s,
            first + whole * C, (last - first - whole * C).to(tl.int32), chunk + whole, head, o_k, o_v,
            PER_CHANNEL, OUTPUT, SAVE, H, HV, K, V, W, SCALE, PRECISION, C, KP, BV, False,
        )  # fmt: skip
    tl.store(final_ptr + (sequence * HV + head) * (K * W) + p_state, b_s, mask=m_state)


@triton.jit
def _chunk_forward(
    q_from_start_ptr, k_from_start_ptr, k_to_end_ptr, v_ptr, decay_ptr, beta_chunks_ptr, a_qk_ptr, inverse_ptr,
    o_ptr, chunk_states_ptr, errors_ptr, b_s,
    first, length, chunk, head, o_k, o_v,
    PER_CHANNEL: tl.constexpr, OUTPUT: tl.constexpr, SAVE: tl.constexpr,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    SCALE: tl.constexpr, PRECISION: tl.constexpr,
    C: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """Scan a chunk of ``length`` tokens from ``first`` on, and return the state after it; IS_WHOLE if it has C."""
    ACC: tl.constexpr = b_s.dtype
    NARROW: tl.constexpr = v_ptr.dtype.element_ty
    HAS_KEYS: tl.constexpr = KP == K
    HAS_VALUES: tl.constexpr = (V % BV == 0) and (V == W)
    QH: tl.constexpr = HV if PER_CHANNEL else H
    key_head = head // (HV // QH)
    o_c = tl.arange(0, C)
    m_t = None if IS_WHOLE else o_c < length
    b_narrow = b_s.to(NARROW)
    if SAVE:
        p_state = chunk_states_ptr + (chunk * HV + head) * (K * V) + o_k[:, None] * V + o_v[None, :]
        tl.store(p_state, b_narrow, mask=(o_k[:, None] < K) & (o_v[None, :] < V))
    b_beta = tl.load(beta_chunks_ptr + (chunk * HV + head) * C + o_c)
    b_k = load_rows(k_from_start_ptr, first, o_c, m_t, key_head, QH, o_k, K, NARROW, HAS_KEYS)
    b_prediction = tl.dot(b_k, b_narrow, input_precision=PRECISION, out_dtype=ACC)
    if not PER_CHANNEL:
        b_from_start, b_to_end, decay = load_token_decays(decay_ptr, chunk, head, HV, C)
        b_prediction *= b_from_start[:, None]
    b_v = load_rows(v_ptr, first, o_c, m_t, head, HV, o_v, V, ACC, HAS_VALUES)
    b_x = (b_v - b_prediction) * b_beta[:, None]
    b_inverse = load_lower(inverse_ptr, chunk, head, HV, C, o_c[:, None], o_c[None, :])
    b_e = tl.dot(b_inverse, b_x.to(NARROW), input_precision=PRECISION, out_dtype=ACC)
    b_errors = b_e.to(NARROW)
    if SAVE:
        store_rows(errors_ptr, first, o_c, m_t, head, HV, o_v, V, b_errors, HAS_VALUES)
    if OUTPUT:
        b_q = load_rows(q_from_start_ptr, first, o_c, m_t, key_head, QH, o_k, K, NARROW, HAS_KEYS)
        b_o = tl.dot(b_q, b_narrow, input_precision=PRECISION, out_dtype=ACC)
        if not PER_CHANNEL:
            b_o *= (b_from_start * SCALE)[:, None]
        b_a = load_lower(a_qk_ptr, chunk, head, HV, C, o_c[:, None], o_c[None, :])
        b_o = tl.dot(b_a, b_errors, b_o, input_precision=PRECISION, out_dtype=ACC)
        store_rows(o_ptr, first, o_c, m_t, head, HV, o_v, V, b_o, HAS_VALUES)
    if PER_CHANNEL:
        b_s *= load_chunk_decay(decay_ptr, chunk, head, HV, o_k, K)[:, None]
        b_k = load_rows(k_to_end_ptr, first, o_c, m_t, key_head, QH, o_k, K, NARROW, HAS_KEYS)
    else:
        b_s *= decay
        b_errors = (b_e * b_to_end[:, None]).to(NARROW)
    return tl.dot(tl.trans(b_k), b_errors, b_s, input_precision=PRECISION, out_dtype=ACC)


@triton.jit
def scan_backward(
    q_from_start_ptr,
    k_from_start_ptr,
    k_to_end_ptr,
    decay_ptr,
    beta_chunks_ptr,
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
    SAVE: tl.constexpr,
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
    """Scan backward over the chunks of each sequence; grid (N HV SLICES,).

    Write dx [T, HV, V] and the gradients dends [NC, HV, K, V] of the chunks' final states if SAVE. Always write
    dinitial [N, HV, K, V]. Inputs are those of scan_forward. With FROM_ZERO, dfinal [N, HV, K, V] is 0 and not read.
    """
    ACC: tl.constexpr = dinitial_ptr.dtype.element_ty
    sequence, head, slice_index, first, last, chunk = sequence_of(sequences_ptr, HV, SLICES)
    o_k = tl.arange(0, KP)
    o_v = slice_index.to(tl.int32) * BV + tl.arange(0, BV)
    p_state = o_k[:, None] * V + o_v[None, :]
    m_state = (o_k[:, None] < K) & (o_v[None, :] < V)
    b_ds = tl.zeros([KP, BV], ACC)
    if not FROM_ZERO:
        b_ds += tl.load(dfinal_ptr + (sequence * HV + head) * (K * V) + p_state, mask=m_state, other=0.0)
    whole = (last - first) // C
    if first + whole * C < last:
        b_ds = _chunk_backward(
            q_from_start_ptr, k_from_start_ptr, k_to_end_ptr, decay_ptr, beta_chunks_ptr, a_qk_ptr, inverse_ptr,
            do_ptr, dx_ptr, dends_ptr, b_ds,
            first + whole * C, (last - first - whole * C).to(tl.int32), chunk + whole, head, o_k, o_v,
            PER_CHANNEL, SAVE, H, HV, K, V, SCALE, PRECISION, C, KP, BV, False,
        )  # fmt: skip
    for back in range(0, whole):
        number = whole - 1 - back
        b_ds = _chunk_backward(
            q_from_start_ptr, k_from_start_ptr, k_to_end_ptr, decay_ptr, beta_chunks_ptr, a_qk_ptr, inverse_ptr,
            do_ptr, dx_ptr, dends_ptr, b_ds,
            first + number * C, C, chunk + number, head, o_k, o_v,
            PER_CHANNEL, SAVE, H, HV, K, V, SCALE, PRECISION, C, KP, BV, True,
        )  # fmt: skip
    tl.store(dinitial_ptr + (sequence * HV + head) * (K * V) + p_state, b_ds, mask=m_state)


@triton.jit
def _chunk_backward(
    q_from_start_ptr, k_from_start_ptr, k_to_end_ptr, decay_ptr, beta_chunks_ptr, a_qk_ptr, inverse_ptr,
    do_ptr, dx_ptr, dends_ptr, b_ds,
    first, length, chunk, head, o_k, o_v,
    PER_CHANNEL: tl.constexpr, SAVE: tl.constexpr,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    SCALE: tl.constexpr, PRECISION: tl.constexpr,
    C: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """Scan a chunk backward, and return the gradient of the state before it; arguments as for _chunk_forward."""
    ACC: tl.constexpr = b_ds.dtype
    NARROW: tl.constexpr = do_ptr.dtype.element_ty
    HAS_KEYS: tl.constexpr = KP == K
    HAS_VALUES: tl.constexpr = V % BV == 0
    QH: tl.constexpr = HV if PER_CHANNEL else H
    key_head = head // (HV // QH)
    o_c = tl.arange(0, C)
    m_t = None if IS_WHOLE else o_c < length
    b_narrow = b_ds.to(NARROW)
    if SAVE:
        p_state = dends_ptr + (chunk * HV + head) * (K * V) + o_k[:, None] * V + o_v[None, :]
        tl.store(p_state, b_narrow, mask=(o_k[:, None] < K) & (o_v[None, :] < V))
    b_do = load_rows(do_ptr, first, o_c, m_t, head, HV, o_v, V, NARROW, HAS_VALUES)
    b_k = load_rows(k_to_end_ptr, first, o_c, m_t, key_head, QH, o_k, K, NARROW, HAS_KEYS)
    b_de = tl.dot(b_k, b_narrow, input_precision=PRECISION, out_dtype=ACC)
    if not PER_CHANNEL:
        b_from_start, b_to_end, decay = load_token_decays(decay_ptr, chunk, head, HV, C)
        b_de *= b_to_end[:, None]
    b_a = load_lower(a_qk_ptr, chunk, head, HV, C, o_c[None, :], o_c[:, None])
    b_de = tl.dot(b_a, b_do, b_de, input_precision=PRECISION, out_dtype=ACC)
    b_inverse = load_lower(inverse_ptr, chunk, head, HV, C, o_c[None, :], o_c[:, None])
    b_dx = tl.dot(b_inverse, b_de.to(NARROW), input_precision=PRECISION, out_dtype=ACC)
    if SAVE:
        store_rows(dx_ptr, first, o_c, m_t, head, HV, o_v, V, b_dx, HAS_VALUES)
    b_dx *= -tl.load(beta_chunks_ptr + (chunk * HV + head) * C + o_c)[:, None]
    b_q = load_rows(q_from_start_ptr, first, o_c, m_t, key_head, QH, o_k, K, NARROW, HAS_KEYS)
    if PER_CHANNEL:
        b_ds *= load_chunk_decay(decay_ptr, chunk, head, HV, o_k, K)[:, None]
        b_k = load_rows(k_from_start_ptr, first, o_c, m_t, key_head, QH, o_k, K, NARROW, HAS_KEYS)
    else:
        b_ds *= decay
        b_do = (b_do.to(ACC) * (b_from_start * SCALE)[:, None]).to(NARROW)
        b_dx *= b_from_start[:, None]
    b_ds = tl.dot(tl.trans(b_q), b_do, b_ds, input_precision=PRECISION, out_dtype=ACC)
    return tl.dot(tl.trans(b_k), b_dx.to(NARROW), b_ds, input_precision=PRECISION, out_dtype=ACC)


@triton.jit(do_not_specialize=["parts"])
def compose(
    local_ptr,
    maps_ptr,
    initial_ptr,
    parts,
    states_ptr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    LOCAL_COLUMNS: tl.constexpr,
    BACK: tl.constexpr,
    PRECISION: tl.constexpr,
    KP: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    SLICES: tl.constexpr,
):
    """Compute the state [P, HV, K, V] before each part of the sequences, S <- M S + S_local; grid (N HV SLICES,).

    Every sequence has ``parts`` parts, P = N parts. local [P, HV, K, LOCAL_COLUMNS] contains S_local in its first V
    columns. maps [P, HV, K, V + K] contains M in its last K columns. initial [N, HV, K, V] are the states before the
    first part.

    With BACK, compute the gradient of the state after each part instead, from the last part to the first,
    dS <- M^T dS + dS_local. initial are then the gradients of the states after the last part.
    """
    ACC: tl.constexpr = states_ptr.dtype.element_ty
    program = tl.program_id(0).to(tl.int64)
    sequence = program // (HV * SLICES)
    head = program // SLICES % HV
    slice_index = program % SLICES
    o_k = tl.arange(0, KP)
    o_v = slice_index.to(tl.int32) * BV + tl.arange(0, BV)
    p_state = o_k[:, None] * V + o_v[None, :]
    mask = (o_k[:, None] < K) & (o_v[None, :] < V)
    b_s = tl.load(initial_ptr + (sequence * HV + head) * (K * V) + p_state, mask=mask, other=0.0)
    for number in range(0, parts):
        part = ((parts - 1 - number if BACK else number) + sequence * parts) * HV + head
        p_s = states_ptr + part * (K * V)
        tl.store(p_s + p_state, b_s, mask=mask)
        tl.debug_barrier()  # other threads of the program read the stored rows below
        p_local = local_ptr + part * (K * LOCAL_COLUMNS) + o_k[:, None] * LOCAL_COLUMNS + o_v[None, :]
        b_s = tl.load(p_local, mask=mask, other=0.0)
        for start in range(0, K, BK):
            o_j = start + tl.arange(0, BK)
            b_states = tl.load(
                p_s + o_j[:, None] * V + o_v[None, :], mask=(o_j[:, None] < K) & (o_v[None, :] < V), other=0.0
            )
            p_m = o_j[None, :] * (V + K) + o_k[:, None] if BACK else o_k[:, None] * (V + K) + o_j[None, :]
            m_m = (o_k[:, None] < K) & (o_j[None, :] < K)
            b_m = tl.load(maps_ptr + part * (K * (V + K)) + V + p_m, mask=m_m, other=0.0)
            b_s = tl.dot(b_m, b_states, b_s, input_precision=PRECISION, out_dtype=ACC)
