"""The delta rule as launches, forward and backward; written once for all backends. See
kernels/diptych_kernels/autodiff_rules.py.

Forward writes what the products of a chunk's tokens are made of, solves, and scans: w and u of the reference never pass
through memory. Backward does the same again, but keeps the states chunks begin with and the errors instead of outputs,
scans back, and then takes all chunks at once.

Where a rank's first sequence began on another rank, and its last goes on on the next (context parallelism), forward
first scans the last alone, from 0 and the identity: the map of states [H | M] that the rank passes on. Backward first
scans back the first alone: the gradient of the state it began with, had the last ended here. What other ranks pass on
and back completes the initial states and the gradients of the final ones, and all else is as on one rank.

Within a card the same maps cut long sequences into parts that are scanned side by side, where heads alone are too few
programs for it (static.parts).
"""

from typing import Any, NamedTuple, Protocol

from diptych_kernels.autodiff_rules import Array, Backend, Operation, dtype_name
from diptych_kernels.delta_rule import launch_configs as launches
from diptych_kernels.delta_rule.launch_configs import Call


class Ranks(Protocol):
    """What a backend does between ranks; hashable. roles: an array of it, of which the operations know nothing."""

    def pass_on(self, maps: Array, roles: Array) -> Array:
        """The state the first sequence begins with, of every rank's [1, HV, K, V + K]; [HV, K, V]."""
        ...

    def pass_back(self, maps: Array, d_found: Array, roles: Array) -> Array:
        """The gradient of the state passed on, of every rank's maps and gradients of the state found [HV, K, V]."""
        ...

    def with_first(self, states: Array, first: Array | None, roles: Array) -> Array:
        """States [N, HV, K, V] with this one first, where that sequence began on another rank; None: 0."""
        ...

    def with_last(self, states: Array, last: Array | None, roles: Array) -> Array:
        """States with this one last, where that sequence goes on on another rank; None: 0."""
        ...


class DeltaRule(NamedTuple):
    """What the operation is told besides arrays."""

    per_channel: bool
    scale: float
    chunk_size: int
    recompute: bool = True
    parts: int = 1
    ranks: Ranks | None = None


class Terms(NamedTuple):
    """What the scans take of a chunk; where a token has one decay, q and k as they are, and g."""

    q_in: Array
    k_in: Array
    k_out: Array
    decay: Array
    a_qk: Array
    a_kk: Array
    inverse: Array


class Inputs(NamedTuple):
    """Of the operation, tokens of all sequences one after the other.

    Args:
        q, k: [T, H, K]
        v: [T, HV, V]
        g: [T, HV, K], or where a token has one decay [T, HV]
        beta: [T, HV]
        initial: states. [N, HV, K, V]
        chunks: the first token of every chunk and the one after its last. [NC, 2] int32
        sequences: of every sequence the first token, the one after its last, its first chunk. [N, 3] int32
        pieces: of every part of each, likewise; the same where there is one of each. [N * parts, 3] int32
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
        """Of their launches."""
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
    """Of a rank among others.

    Args:
        initial: what the last sequence begins with, 0 if on another rank. [1, HV, K, V]
        sequences: the first and the last, as Inputs.sequences. [2, 3] int32
        roles: see Ranks.
    """

    initial: Array
    sequences: Array
    roles: Array


def chunk_terms(backend: Backend, static: DeltaRule, given: Inputs) -> Terms:
    """Of all chunks."""
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
    """o, starts, errors, final; flags: see launches.scan_forward."""
    arrays = (terms.q_in, terms.k_in, terms.k_out, given.v, terms.decay, given.beta, terms.a_qk, terms.inverse)
    return backend(launches.scan_forward, given.sizes(static) | flags, *arrays, given.initial, given.sequences)


def _scan_back(
    backend: Backend, static: DeltaRule, given: Inputs, terms: Terms, do: Array, dfinal: Array, **flags: bool
) -> tuple[Array, ...]:
    """dx, dends, dinitial; flags: see launches.scan_backward."""
    arrays = (terms.q_in, terms.k_in, terms.k_out, terms.decay, given.beta, terms.a_qk, terms.inverse)
    return backend(launches.scan_backward, given.sizes(static) | flags, *arrays, do, dfinal, given.sequences)


def _in_parts(backend: Backend, static: DeltaRule, given: Inputs, terms: Terms) -> tuple[Inputs, Array]:
    """Parts of sequences in place of them, with the states they begin with, and their maps."""
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
    """dq, dk, dv, dg, dbeta."""
    sizes, chunks = given.sizes(static), given.chunks
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
