"""Forward and backward rules of the delta rule in terms of launches, shared by all backends.

The form of the rules is that of kernels/diptych_kernels/autodiff_rules.py. Symbols are defined in products.py, scan.py
and gradients.py.

- Forward computes the products of each chunk's tokens, inverts the triangular matrices, and scans over the chunks. w
  and u of the reference implementation are not stored.
- Backward repeats the scan and stores the initial states and errors of the chunks, unless forward has saved them. It
  then scans in reverse, and computes the gradients of all chunks in parallel. The matrices of chunks (Matrices) are
  always saved.

With context parallelism, a rank's first and last sequence may continue on other ranks. A sequence's part on one rank
maps the state before it to the state after it,

    S_last = M S_first + S_local            dS_first = M^T dS_last + dS_local

Forward first scans the last sequence from its initial state (0 if it starts on another rank) and the identity, which
gives the map [S_local | M] that the rank sends. Backward first scans the first sequence in reverse from the gradient of
its final state (0 if it continues on another rank), which gives dS_local. The messages of other ranks complete the
initial states and the gradients of the final states.

On one GPU, the same maps divide long sequences into parts that are scanned in parallel, if the heads alone give too few
programs (``DeltaRule.parts``).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from diptych_kernels.autodiff_rules import Array, Backend, Operation, dtype_name
from diptych_kernels.delta_rule import launch_configs
from diptych_kernels.delta_rule.launch_configs import Call


class KernelStateExchange(Protocol):
    """An exchange of states between context-parallel ranks; hashable.

    ``roles`` says where the rank's boundary sequences begin and end. Only the backend interprets it.
    """

    def exchange_forward(self, maps: Array, roles: Array) -> Array:
        """Return the initial state of this rank's first sequence.

        Args:
            maps: map [S_local | M] of this rank's last sequence. [1, HV, K, V + K]
            roles: see KernelStateExchange.

        Returns:
            The state that the earlier ranks compose of their maps. [HV, K, V]
        """
        ...

    def exchange_backward(self, maps: Array, d_received: Array, roles: Array) -> Array:
        """Return the gradient of the final state of this rank's last sequence.

        Args:
            maps: map [S_local | M] of this rank's last sequence. [1, HV, K, V + K]
            d_received: dS_local of this rank's first sequence, the part of the gradient of the received state that
                this rank's tokens contribute. [HV, K, V]
            roles: see KernelStateExchange.

        Returns:
            The gradient that the later ranks compose of their parts. [HV, K, V]
        """
        ...

    def with_first(self, states: Array, first: Array | None, roles: Array) -> Array:
        """Replace the first of the states [N, HV, K, V] if its sequence starts on another rank.

        ``first`` [HV, K, V] is the new state; None stands for 0.
        """
        ...

    def with_last(self, states: Array, last: Array | None, roles: Array) -> Array:
        """Replace the last of the states [N, HV, K, V] if its sequence continues on another rank.

        ``last`` [HV, K, V] is the new state; None stands for 0.
        """
        ...


class DeltaRule(NamedTuple):
    """Static arguments of the operation.

    Args:
        per_channel: True for one decay per channel of the keys, False for one per head.
        scale: factor of the queries.
        chunk_size: tokens of a chunk; 16, 32 or 64. C
        recompute: recompute decayed queries and keys, states and errors in backward instead of saving them.
        parts: number of parts per sequence that are scanned in parallel; 1 for none.
        exchange: exchange of states between context-parallel ranks; None if all sequences are complete.
    """

    per_channel: bool
    scale: float
    chunk_size: int
    recompute: bool = True
    parts: int = 1
    exchange: KernelStateExchange | None = None


class Matrices(NamedTuple):
    """Matrices [NC, HV, C, C], write strengths and decays of the chunks, which products.py defines.

    Args:
        a_qk: A_qk.
        a_kk: A_kk.
        inverse: inverse.
        beta_chunks: write strengths beta; 0 for missing tokens. [NC, HV, C]
        decay: exp(G_C) [NC, HV, K], or with one decay per head exp(G) and exp(G_C - G) [NC, HV, 2, C].
    """

    a_qk: Array
    a_kk: Array
    inverse: Array
    beta_chunks: Array
    decay: Array


class Terms(NamedTuple):
    """Terms of the chunks that the scans read; products.py defines them.

    With one decay per head, q_from_start, k_from_start and k_to_end are plain q, k and k, and the scans apply the
    decays.
    """

    q_from_start: Array
    k_from_start: Array
    k_to_end: Array
    matrices: Matrices


class Inputs(NamedTuple):
    """Inputs of the operation, with the tokens of all sequences concatenated.

    Args:
        q: queries. [T, H, K]
        k: keys. [T, H, K]
        v: values. [T, HV, V]
        g: log decays. [T, HV, K], or [T, HV] for one decay per head
        beta: write strengths. [T, HV]
        initial: initial states. [N, HV, K, V]
        chunks: half-open token range of every chunk. [NC, 2] int32
        sequences: half-open token range and first chunk of every sequence. [N, 3] int32
        part_sequences: half-open token range and first chunk of every part of a sequence. [N * parts, 3] int32
    """

    q: Array
    k: Array
    v: Array
    g: Array
    beta: Array
    initial: Array
    chunks: Array
    sequences: Array
    part_sequences: Array

    def sizes(self, static: DeltaRule) -> dict[str, Any]:
        """Return the size arguments of the launches."""
        tokens, heads, key = self.q.shape
        _, value_heads, value = self.v.shape
        call = Call(
            static.per_channel,
            static.scale,
            tokens,
            self.chunks.shape[0],
            self.sequences.shape[0],
            heads,
            value_heads,
            key,
            value,
            static.chunk_size,
            dtype_name(self.q),
            dtype_name(self.g),
            dtype_name(self.beta),
        )
        return dict(lead=(tokens,), call=call)


class BoundarySequences(NamedTuple):
    """The first and last sequence of a context-parallel rank, which may continue on other ranks.

    Args:
        initial: initial state of the last sequence; 0 if it starts on another rank. [1, HV, K, V]
        sequences: first and last sequence, in the form of Inputs.sequences. [2, 3] int32
        roles: see KernelStateExchange.
    """

    initial: Array
    sequences: Array
    roles: Array


NUM_INPUTS = len(Inputs._fields)
NUM_TABLES = 3
"""The last fields of Inputs, which have no gradient."""
NUM_BOUNDARY = len(BoundarySequences._fields)
NUM_MATRICES = len(Matrices._fields)


def chunk_terms(backend: Backend, static: DeltaRule, inputs: Inputs, matrices: Matrices | None = None) -> Terms:
    """Compute the terms of all chunks; ``matrices`` are those that forward has computed, None in forward."""
    sizes = inputs.sizes(static)
    arrays = (inputs.q, inputs.k, inputs.g, inputs.chunks)
    decayed: Sequence[Array] = (inputs.q, inputs.k, inputs.k)
    if matrices is None:
        if static.per_channel:
            *decayed, decay, a_qk, a_kk = backend(launch_configs.terms_by_channel, sizes, *arrays)
        else:
            decay, a_qk, a_kk = backend(launch_configs.terms_by_head, sizes, *arrays)
        inverse, beta_chunks = backend(launch_configs.invert, sizes, a_kk, inputs.beta, inputs.chunks)
        matrices = Matrices(a_qk, a_kk, inverse, beta_chunks, decay)
    elif static.per_channel:
        *decayed, _ = backend(launch_configs.decay_queries_and_keys, sizes, *arrays)
    q_from_start, k_from_start, k_to_end = decayed
    return Terms(q_from_start, k_from_start, k_to_end, matrices)


def _scan_forward(
    backend: Backend, static: DeltaRule, inputs: Inputs, terms: Terms, **flags: bool
) -> tuple[Array, ...]:
    """Scan all sequences from their first chunk; see scan.scan_forward.

    Returns:
        o, chunk_states, errors and final; those that the flags exclude have shape [0].
    """
    q_from_start, k_from_start, k_to_end, (a_qk, _, inverse, beta_chunks, decay) = terms
    if not flags.get("output"):  # placeholders, because the kernel has a pointer for every input
        q_from_start = a_qk = beta_chunks
    initial = beta_chunks if flags.get("from_zero") else inputs.initial
    arrays = (q_from_start, k_from_start, k_to_end, inputs.v, decay, beta_chunks, a_qk, inverse, initial)
    return backend(launch_configs.scan_forward, inputs.sizes(static) | flags, *arrays, inputs.sequences)


def _scan_backward(
    backend: Backend, static: DeltaRule, inputs: Inputs, terms: Terms, do: Array, dfinal: Array, **flags: bool
) -> tuple[Array, ...]:
    """Scan all sequences from their last chunk; see scan.scan_backward.

    Returns:
        dx, dends and dinitial; those that the flags exclude have shape [0].
    """
    *decayed, (a_qk, _, inverse, beta_chunks, decay) = terms
    arrays = (*decayed, decay, beta_chunks, a_qk, inverse, do, beta_chunks if flags.get("from_zero") else dfinal)
    return backend(launch_configs.scan_backward, inputs.sizes(static) | flags, *arrays, inputs.sequences)


def _split_into_parts(backend: Backend, static: DeltaRule, inputs: Inputs, terms: Terms) -> tuple[Inputs, Array]:
    """Divide the sequences into parts that can be scanned in parallel.

    A scan of all parts from zero gives their maps. S <- M S + S_local over the parts of a sequence then gives the
    state before each part.

    Returns:
        The inputs with the parts as sequences, and the maps [S_local | M] of the parts [N * parts, HV, K, V + K].
    """
    parts = inputs._replace(sequences=inputs.part_sequences)
    *_, maps = _scan_forward(backend, static, parts, terms, maps=True, from_zero=True)
    sizes = inputs.sizes(static) | dict(parts=static.parts, back=False)
    (initial,) = backend(launch_configs.compose, sizes, maps, maps, inputs.initial)
    return parts._replace(initial=initial), maps


def _forward(backend: Backend, static: DeltaRule, *arrays: Array):
    """Compute o and the final states from the fields of Inputs and, with an exchange, of BoundarySequences.

    Saves the inputs, with the initial states received from other ranks; with an exchange, the map of the last sequence;
    the matrices of the chunks; and without recompute, their other terms, chunk_states and errors.
    """
    inputs = Inputs(*arrays[:NUM_INPUTS])
    exchange = static.exchange
    boundary: Any = () if exchange is None else BoundarySequences(*arrays[NUM_INPUTS:])
    maps = ()
    terms = chunk_terms(backend, static, inputs)
    if exchange is not None:
        last = inputs._replace(initial=boundary.initial, sequences=boundary.sequences[1:])
        *_, last_map = _scan_forward(backend, static, last, terms, maps=True)
        maps = (last_map,)
        received = exchange.exchange_forward(last_map, boundary.roles)
        inputs = inputs._replace(initial=exchange.with_first(inputs.initial, received, boundary.roles))
    scanned = inputs
    if static.parts > 1:
        scanned, _ = _split_into_parts(backend, static, inputs, terms)
    flags = dict(output=True, save=not static.recompute)
    o, chunk_states, errors, final = _scan_forward(backend, static, scanned, terms, **flags)
    final = final[static.parts - 1 :: static.parts]
    if exchange is not None:
        final = exchange.with_last(final, None, boundary.roles)
    *decayed, matrices = terms
    more = () if static.recompute else (*decayed, chunk_states, errors)
    return (o, final), (*inputs, *boundary, *maps, *matrices, *more)


def _backward(backend: Backend, static: DeltaRule, saved: tuple, do: Array, dfinal: Array):
    """Compute the gradients of all arrays of _forward; None for tables, roles and the boundary's initial state.

    With an exchange, dS of the last sequence comes from other ranks before the reverse scan. With parts, a reverse scan
    from zero gives dS_local of every part, and dS <- M^T dS + dS_local gives the gradient of the state after each part.
    """
    inputs = Inputs(*saved[:NUM_INPUTS])
    exchange = static.exchange
    boundary: Any = None
    last_map = None
    saved_chunks = saved[NUM_INPUTS:]
    if exchange is not None:
        boundary = BoundarySequences(*saved_chunks[:NUM_BOUNDARY])
        last_map = saved_chunks[NUM_BOUNDARY]
        saved_chunks = saved_chunks[NUM_BOUNDARY + 1 :]
    matrices = Matrices(*saved_chunks[:NUM_MATRICES])
    do = backend.cast(do, dtype_name(inputs.v))
    if static.recompute:
        terms = chunk_terms(backend, static, inputs, matrices)
        chunk_states = errors = None
    else:
        q_from_start, k_from_start, k_to_end, chunk_states, errors = saved_chunks[NUM_MATRICES:]
        terms = Terms(q_from_start, k_from_start, k_to_end, matrices)
    if exchange is not None:
        dfinal = exchange.with_last(dfinal, None, boundary.roles)
        first = inputs._replace(sequences=boundary.sequences[:1])
        *_, d_received = _scan_backward(backend, static, first, terms, do, dfinal[:1])
        d_sent = exchange.exchange_backward(last_map, d_received[0], boundary.roles)
        dfinal = exchange.with_last(dfinal, d_sent, boundary.roles)
    scanned = inputs
    if static.parts > 1:
        scanned, maps = _split_into_parts(backend, static, inputs, terms)
        *_, d_parts = _scan_backward(backend, static, scanned, terms, do, dfinal, from_zero=True)
        sizes = inputs.sizes(static) | dict(parts=static.parts, back=True)
        (dfinal,) = backend(launch_configs.compose, sizes, d_parts, maps, dfinal)
    if static.recompute:
        _, chunk_states, errors, _ = _scan_forward(backend, static, scanned, terms, save=True)
    dx, dends, dinitial = _scan_backward(backend, static, scanned, terms, do, dfinal, save=True)
    dinitial = dinitial[:: static.parts]
    if exchange is not None:
        dinitial = exchange.with_first(dinitial, None, boundary.roles)
    gradients = _token_gradients(backend, static, inputs, terms, do, dx, chunk_states, errors, dends)
    return *gradients, dinitial, *([None] * (NUM_TABLES + (0 if exchange is None else NUM_BOUNDARY)))


def _token_gradients(
    backend: Backend,
    static: DeltaRule,
    inputs: Inputs,
    terms: Terms,
    do: Array,
    dx: Array,
    chunk_states: Array,
    errors: Array,
    dends: Array,
) -> tuple[Array, ...]:
    """Compute the gradients of the tokens from the results of both scans; gradients.py has the formulas.

    Args:
        backend: the kernel backend.
        static: static arguments of the operation.
        inputs: inputs of the operation.
        terms: terms of the chunks.
        do: gradient of the outputs. [T, HV, V]
        dx: gradient of x = diag(beta) (v - k_from_start S). [T, HV, V]
        chunk_states: states before the chunks. [NC, HV, K, V]
        errors: beta-weighted prediction errors e. [T, HV, V]
        dends: gradients of the states after the chunks. [NC, HV, K, V]

    Returns:
        dq, dk, dv, dg and dbeta.
    """
    sizes = inputs.sizes(static)
    chunks = inputs.chunks
    *state_terms, ddecay = backend(launch_configs.state_gradients, sizes, chunk_states, dends, errors, dx, do, chunks)
    a_qk, a_kk, *_, decay = terms.matrices
    value_terms = (inputs.v, inputs.beta, errors, dx, do, a_kk, chunks)
    da_qk, da_kk, dv, dbeta = backend(launch_configs.product_gradients, sizes, *value_terms)
    tokens = (inputs.q, inputs.k, inputs.g, inputs.beta)
    if static.per_channel:
        arrays = (*tokens, da_qk, da_kk, *state_terms, dbeta, chunks)
        dq, dk, rise, fall, dbeta_slices = backend(launch_configs.channel_gradients, sizes, *arrays)
        arrays = (rise, fall, decay, ddecay, dbeta_slices, chunks)
        dg, dbeta = backend(launch_configs.gate_gradients, sizes | {"slices": dbeta_slices.shape[-1]}, *arrays)
    else:
        arrays = (*tokens, decay, a_qk, a_kk, da_qk, da_kk, *state_terms, ddecay, dbeta, chunks)
        dq, dk, dg, dbeta = backend(launch_configs.head_gradients, sizes, *arrays)
    if inputs.v.shape[1] != inputs.q.shape[1]:
        (dq,) = backend(launch_configs.sum_heads, sizes, dq, chunks)
        (dk,) = backend(launch_configs.sum_heads, sizes, dk, chunks)
    return dq, dk, dv, dg, dbeta


DELTA_RULE = Operation("delta_rule", _forward, _backward, num_outputs=2)
