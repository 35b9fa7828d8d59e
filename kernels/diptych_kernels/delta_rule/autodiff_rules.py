"""Forward and backward rules of the delta rule in terms of launches, shared by all backends.

See kernels/diptych_kernels/autodiff_rules.py. Forward computes the products of each chunk's tokens, solves the
triangular systems, and scans over the chunks; w and u of the reference are not stored. Backward repeats this but saves
the chunks' initial states and errors, scans in reverse, and then computes the gradients of all chunks in parallel.

With context parallelism, a rank's first and last sequence may continue on other ranks. Forward first scans the last
sequence from 0 and the identity, which gives the map of states [H | M] that the rank sends. Backward first scans the
first sequence in reverse, which gives the gradient of its initial state without the contribution of other ranks. The
messages of other ranks complete the initial states and the gradients of the final states.

On one GPU, the same maps divide long sequences into parts that are scanned in parallel, if the heads alone give too few
programs (static.parts).
"""

from typing import Any, NamedTuple, Protocol

from diptych_kernels.autodiff_rules import Array, Backend, Operation, dtype_name
from diptych_kernels.delta_rule import launch_configs as launches
from diptych_kernels.delta_rule.launch_configs import Call


class Ranks(Protocol):
    """Exchange between context-parallel ranks; hashable. ``roles`` is an array that only the backend interprets."""

    def pass_on(self, maps: Array, roles: Array) -> Array:
        """Return the first sequence's initial state [HV, K, V] from every rank's map [1, HV, K, V + K]."""
        ...

    def pass_back(self, maps: Array, d_found: Array, roles: Array) -> Array:
        """Return the sent state's gradient from all ranks' maps and received states' gradients [HV, K, V]."""
        ...

    def with_first(self, states: Array, first: Array | None, roles: Array) -> Array:
        """Replace the first of the states [N, HV, K, V] if its sequence starts on another rank; None: by 0."""
        ...

    def with_last(self, states: Array, last: Array | None, roles: Array) -> Array:
        """Replace the last of the states if its sequence continues on another rank; None: by 0."""
        ...


class DeltaRule(NamedTuple):
    """Static arguments of the operation."""

    per_channel: bool
    scale: float
    chunk_size: int
    recompute: bool = True
    parts: int = 1
    ranks: Ranks | None = None


class Terms(NamedTuple):
    """Inputs of the scans; with one decay per token, q_in, k_in, k_out and decay are q, k, k and g."""

    q_in: Array
    k_in: Array
    k_out: Array
    decay: Array
    a_qk: Array
    a_kk: Array
    inverse: Array


class Inputs(NamedTuple):
    """Inputs of the operation, with the tokens of all sequences concatenated.

    Args:
        q: queries. [T, H, K]
        k: keys. [T, H, K]
        v: values. [T, HV, V]
        g: log decays. [T, HV, K], or [T, HV] for one decay per token and head
        beta: step sizes. [T, HV]
        initial: initial states. [N, HV, K, V]
        chunks: half-open token range of every chunk. [NC, 2] int32
        sequences: half-open token range and first chunk of every sequence. [N, 3] int32
        pieces: half-open token range and first chunk of every part of a sequence. [N * parts, 3] int32
    """

    q: Array
    k: Array
    v: Array
    g: Array
    beta: Array
    initial: Array
    chunks: Array
    sequences: Array
    pieces: Array

    def sizes(self, static: DeltaRule) -> dict[str, Any]:
        """Return the size arguments of the launches."""
        (tokens, heads, key), (_, value_heads, value) = self.q.shape, self.v.shape
        of = Call(
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
        return dict(lead=(tokens,), of=of)


class BoundarySequences(NamedTuple):
    """A context-parallel rank's first and last sequence.

    Args:
        initial: initial state of the last sequence; 0 if it starts on another rank. [1, HV, K, V]
        sequences: first and last sequence, in the form of Inputs.sequences. [2, 3] int32
        roles: see Ranks.
    """

    initial: Array
    sequences: Array
    roles: Array


def chunk_terms(backend: Backend, static: DeltaRule, given: Inputs) -> Terms:
    """Compute the terms of all chunks."""
    q, k, g, sizes = given.q, given.k, given.g, given.sizes(static)
    if static.per_channel:
        q_in, k_in, k_out, decay = backend(launches.decayed, sizes, q, k, g, given.chunks)
        a_qk, a_kk = backend(launches.products_by_channel, sizes, q, k, g, given.chunks)
    else:
        q_in, k_in, k_out, decay = q, k, k, g
        a_qk, a_kk = backend(launches.products_by_head, sizes, q, k, g, given.chunks)
    (inverse,) = backend(launches.solve, sizes, a_kk, given.beta, given.chunks)
    return Terms(q_in, k_in, k_out, decay, a_qk, a_kk, inverse)


def _scan(backend: Backend, static: DeltaRule, given: Inputs, terms: Terms, **flags: bool) -> tuple[Array, ...]:
    """Return o, starts, errors, final; flags: see launches.scan_forward."""
    arrays = (terms.q_in, terms.k_in, terms.k_out, given.v, terms.decay, given.beta, terms.a_qk, terms.inverse)
    return backend(launches.scan_forward, given.sizes(static) | flags, *arrays, given.initial, given.sequences)


def _scan_back(
    backend: Backend, static: DeltaRule, given: Inputs, terms: Terms, do: Array, dfinal: Array, **flags: bool
) -> tuple[Array, ...]:
    """Return dx, dends, dinitial; flags: see launches.scan_backward."""
    arrays = (terms.q_in, terms.k_in, terms.k_out, terms.decay, given.beta, terms.a_qk, terms.inverse)
    return backend(launches.scan_backward, given.sizes(static) | flags, *arrays, do, dfinal, given.sequences)


def _in_parts(backend: Backend, static: DeltaRule, given: Inputs, terms: Terms) -> tuple[Inputs, Array]:
    """Replace sequences by their parts with initial states, and return the parts' maps too."""
    parts = given._replace(sequences=given.pieces)
    *_, maps = _scan(backend, static, parts, terms, maps=True, from_zero=True)
    sizes = given.sizes(static) | dict(parts=static.parts, back=False)
    (begun,) = backend(launches.compose, sizes, maps, maps, given.initial)
    return parts._replace(initial=begun), maps


def _forward(backend: Backend, static: DeltaRule, *inputs: Array):
    given, ranks, parts = Inputs(*inputs[: len(Inputs._fields)]), static.ranks, static.parts
    terms, edges, maps = chunk_terms(backend, static, given), inputs[len(Inputs._fields) :], ()
    if ranks is not None:
        edges = BoundarySequences(*edges)
        last = given._replace(initial=edges.initial, sequences=edges.sequences[1:])
        maps = _scan(backend, static, last, terms, maps=True)[3:]
        begun = ranks.pass_on(*maps, edges.roles)
        given = given._replace(initial=ranks.with_first(given.initial, begun, edges.roles))
    scanned = given if parts == 1 else _in_parts(backend, static, given, terms)[0]
    o, starts, errors, final = _scan(backend, static, scanned, terms, output=True, keep=not static.recompute)
    final = final[parts - 1 :: parts]
    if ranks is not None:
        final = ranks.with_last(final, None, BoundarySequences(*edges).roles)
    return (o, final), (*given, *edges, *maps, *(() if static.recompute else (*terms, starts, errors)))


def _backward(backend: Backend, static: DeltaRule, saved: tuple, do: Array, dfinal: Array):
    given, kept, ranks = Inputs(*saved[: len(Inputs._fields)]), saved[len(Inputs._fields) :], static.ranks
    edges, passed_on, kept = (
        (BoundarySequences(*kept[:3]), kept[3], kept[4:]) if ranks is not None else (None, None, kept)
    )
    do = backend.cast(do, dtype_name(given.v))
    terms = Terms(*kept[:-2]) if kept else chunk_terms(backend, static, given)
    if ranks is not None and edges is not None:
        dfinal = ranks.with_last(dfinal, None, edges.roles)
        first = given._replace(sequences=edges.sequences[:1])
        *_, d_found = _scan_back(backend, static, first, terms, do, dfinal[:1])
        dfinal = ranks.with_last(dfinal, ranks.pass_back(passed_on, d_found[0], edges.roles), edges.roles)
    scanned = given
    if static.parts > 1:
        scanned, maps = _in_parts(backend, static, given, terms)
        *_, d_begun = _scan_back(backend, static, scanned, terms, do, dfinal, from_zero=True)
        sizes = given.sizes(static) | dict(parts=static.parts, back=True)
        (dfinal,) = backend(launches.compose, sizes, d_begun, maps, dfinal)
    if kept:
        starts, errors = kept[-2:]
    else:
        _, starts, errors, _ = _scan(backend, static, scanned, terms, keep=True)
    dx, dends, dinitial = _scan_back(backend, static, scanned, terms, do, dfinal, keep=True)
    dinitial = dinitial[:: static.parts]
    if ranks is not None and edges is not None:
        dinitial = ranks.with_first(dinitial, None, edges.roles)
    gradients = _token_gradients(backend, static, given, terms, do, dx, starts, errors, dends)
    return *gradients, dinitial, *([None] * (3 if ranks is None else 6))


def _token_gradients(
    backend: Backend,
    static: DeltaRule,
    given: Inputs,
    terms: Terms,
    do: Array,
    dx: Array,
    starts: Array,
    errors: Array,
    dends: Array,
) -> tuple[Array, ...]:
    """Return dq, dk, dv, dg, dbeta."""
    sizes = given.sizes(static)
    chunks = given.chunks
    *r, ddecay = backend(launches.state_gradients, sizes, starts, dends, errors, dx, do, chunks)
    of_values = (given.v, given.beta, errors, dx, do, terms.a_kk, chunks)
    da_qk, da_kk, dv, dbeta = backend(launches.product_gradients, sizes, *of_values)
    tokens = (given.q, given.k, given.g, given.beta)
    if static.per_channel:
        arrays = (*tokens, da_qk, da_kk, *r, dbeta, chunks)
        dq, dk, before, after, dbetas = backend(launches.channel_gradients, sizes, *arrays)
        arrays = (given.g, before, after, terms.decay, ddecay, dbetas, chunks)
        dg, dbeta = backend(launches.gate_gradients, sizes | {"slices": dbetas.shape[-1]}, *arrays)
    else:
        arrays = (*tokens, terms.a_qk, terms.a_kk, da_qk, da_kk, *r, ddecay, dbeta, chunks)
        dq, dk, dg, dbeta = backend(launches.head_gradients, sizes, *arrays)
    if given.v.shape[1] != given.q.shape[1]:
        (dq,), (dk,) = backend(launches.sum_heads, sizes, dq, chunks), backend(launches.sum_heads, sizes, dk, chunks)
    return dq, dk, dv, dg, dbeta


DELTA_RULE = Operation(_forward, _backward)
