"""The delta rule over whole sequences, chunk by chunk, and its backward by segments.

Forward keeps the arguments and one state a segment (diptych.plans.model.delta_rule.SAVED). Backward takes the
segments from the last, computes a segment's chunks and states again, and leaves the part without states to jax.vjp.
So memory beside the arguments is one segment's, whatever the length, and time grows with the length.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from diptych.plans.model.delta_rule import SEGMENT_SIZE, Chunking, DeltaRuleOptions, cut_into_chunks, most_chunks
from diptych_kernels.mesh_axes import varying_alike
from jax_impl.delta_rule.gates import gated
from jax_impl.delta_rule.intra import ChunkTerms, chunk_terms
from jax_impl.delta_rule.scan import Sequences, States, outputs, scan_chunks, scan_chunks_backward, sequences_of


class Arguments(NamedTuple):
    """Of a call, or of a segment: its tokens and the gate's parameters whole."""

    q: Array
    k: Array
    v: Array
    g: Array
    beta: Array
    A_log: Array | None
    dt_bias: Array | None


class Layout(NamedTuple):
    """What a program is made for: sizes that no array holds.

    Args:
        options: of the call.
        segments: how many.
        is_dense: every slot holds the token of its number, so that nothing is moved.
        num_transition_columns: columns of values that are 0; see chunked.
        sequences: how many.
    """

    options: DeltaRuleOptions
    segments: int
    is_dense: bool
    num_transition_columns: int
    sequences: int


def chunked(
    arguments: Arguments,
    initial_state: Array | None,
    options: DeltaRuleOptions,
    cu_seqlens: Array | np.ndarray | None,
    recompute: bool,
    num_transition_columns: int = 0,
) -> tuple[Array, Array]:
    """Outputs and final states; arguments as the public functions' (calls.py), checked.

    Args:
        num_transition_columns: so many columns follow those of the values, in states and outputs, for values of 0:
            how the outputs change with what the initial state holds there. Outputs are then as wide as states are.
    """
    (batch, length, heads, width), key = arguments.v.shape, arguments.q.shape[-1]
    width += num_transition_columns
    sequences = 1 if cu_seqlens is None else len(cu_seqlens) - 1
    offsets = np.array([0, length]) if cu_seqlens is None else cu_seqlens
    is_traced = isinstance(offsets, Tracer)
    size, step = options.chunk_size, max(1, SEGMENT_SIZE // options.chunk_size)
    chunks = most_chunks(length, sequences, size) if is_traced else int(np.sum(-(-np.diff(offsets) // size)))
    segments = -(-chunks // step) if recompute else 1
    chunks = segments * -(-chunks // segments)
    if not is_traced:
        offsets = np.asarray(offsets)
    cuts = cut_into_chunks(offsets, length, size, chunks, jnp if is_traced else np)
    layout = Layout(options, segments, not is_traced and bool(np.all(cuts.filled)), num_transition_columns, sequences)
    initial = None if initial_state is None else initial_state.reshape(sequences, batch * heads, key, width)
    cuts = jax.tree.map(jnp.asarray, cuts)
    initial, *alike = varying_alike((initial, *arguments))
    compute: Any = _replayed if recompute else _kept
    o, finals = compute(layout, Arguments(*alike), initial, cuts)
    return o if num_transition_columns else o.astype(arguments.v.dtype), finals.reshape(-1, heads, key, width)


def _with_gate(tokens: Sequence[Array], whole: Arguments) -> Arguments:
    """A segment's arguments, of its tokens' q, k, v, g and beta."""
    q, k, v, g, beta = tokens
    return Arguments(q, k, v, g, beta, whole.A_log, whole.dt_bias)


def _split(layout: Layout, x: Array, cuts: Chunking) -> Array:
    """[B, T, ...] as [segments, B, slots of a segment, ...]; zeros where no token is."""
    if not layout.is_dense:
        x = jnp.where(cuts.filled.reshape(-1, *[1] * (x.ndim - 2)), x[:, cuts.token], 0)
    return jnp.moveaxis(x.reshape(len(x), layout.segments, -1, *x.shape[2:]), 1, 0)


def _split_all(layout: Layout, arguments: Arguments, cuts: Chunking) -> list[Array]:
    return [_split(layout, x, cuts) for x in arguments[:5]]


def _join(layout: Layout, x: Array, cuts: Chunking, batch: int) -> Array:
    """Chunks [segments, n, B * H, C, D] as tokens [B, T, H, D]."""
    x = x.reshape(-1, batch, x.shape[2] // batch, *x.shape[3:])
    x = x.transpose(1, 0, 3, 2, 4)
    x = x.reshape(batch, -1, *x.shape[3:])
    return x if layout.is_dense else x[:, cuts.slot]


def _to_chunks(x: Array, size: int) -> Array:
    """[B, t, H, D] as [n, B * H, C, D]."""
    batch, _, heads, width = x.shape
    return x.reshape(batch, -1, size, heads, width).transpose(1, 0, 3, 2, 4).reshape(-1, batch * heads, size, width)


def _terms(layout: Layout, arguments: Arguments, filled: Array) -> ChunkTerms:
    """Of a segment's chunks. filled: [slots of a segment]"""
    v = jnp.pad(arguments.v, ((0, 0), (0, 0), (0, 0), (0, layout.num_transition_columns)))
    q, k, v, g, beta = gated(*arguments._replace(v=v), layout.options)
    if not layout.is_dense:
        g = jnp.where(filled[:, None, None], g, 0)
    q, k, v, g, beta = (_to_chunks(x, layout.options.chunk_size) for x in (q, k, v, g, beta))
    return chunk_terms(q, k, v, g, beta)


def _by_segment(layout: Layout, cuts: Chunking) -> tuple[Sequences, Array]:
    """Of every segment: whose its chunks are, and which slots are filled."""
    return jax.tree.map(lambda x: x.reshape(layout.segments, -1), (sequences_of(cuts.sequence), cuts.filled))


def _before(sequences: int, initial: Array | None, shape: tuple[int, ...], like: Sequence[Any]) -> States:
    """Before the first chunk. shape: of one state, [R, K, V]"""
    dtype = jnp.promote_types(like[0].dtype, jnp.float32)
    one, ends = jnp.zeros(shape, dtype), jnp.zeros((sequences, *shape), dtype) if initial is None else initial
    return States(*varying_alike((one, ends, *like))[:2])


def _state_shape(layout: Layout, arguments: Arguments) -> tuple[int, int, int]:
    batch, _, heads, width = arguments.v.shape
    return batch * heads, arguments.q.shape[-1], width + layout.num_transition_columns


def _scan(layout: Layout, segment: Callable, carry: Any, inputs: Any, reverse: bool = False) -> tuple[Any, Any]:
    """jax.lax.scan over segments; where states go on to other ranks, with the last segment outside of the loop.

    Its outputs, and backward its terms, depend on no other rank: there they can be computed while states travel.
    """
    if not layout.num_transition_columns:
        return jax.lax.scan(segment, carry, inputs, reverse=reverse)
    rest, last = jax.tree.map(lambda x: x[:-1], inputs), jax.tree.map(lambda x: x[-1], inputs)
    if layout.segments == 1:
        carry, found = segment(carry, last)
        return carry, jax.tree.map(lambda x: x[None], found)
    if reverse:
        carry, found = segment(carry, last)
        carry, before = jax.lax.scan(segment, carry, rest, reverse=True)
    else:
        carry, before = jax.lax.scan(segment, carry, rest)
        carry, found = segment(carry, last)
    return carry, jax.tree.map(lambda x, y: jnp.concatenate([x, y[None]]), before, found)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _replayed(layout: Layout, arguments: Arguments, initial: Array | None, cuts: Chunking) -> tuple[Array, Array]:
    """All of it; keeps the arguments and a state a segment."""
    return _replayed_forward(layout, arguments, initial, cuts)[0]


def _replayed_forward(layout: Layout, arguments: Arguments, initial: Array | None, cuts: Chunking) -> tuple[Any, Any]:
    def segment(states: States, inputs: tuple) -> tuple[States, tuple[Array, Array]]:
        tokens, sequences, filled = inputs
        terms = _terms(layout, _with_gate(tokens, arguments), filled)
        scanned, after = scan_chunks(terms, sequences, initial, states)
        return after, (outputs(terms, scanned), states.one)

    states = _before(layout.sequences, initial, _state_shape(layout, arguments), arguments)
    inputs = (_split_all(layout, arguments, cuts), *_by_segment(layout, cuts))
    states, (o, kept) = _scan(layout, segment, states, inputs)
    o = _join(layout, o, cuts, len(arguments.q))
    return (o, states.ends), (arguments, initial, kept[1:], cuts)


def _replayed_backward(layout: Layout, residuals: Any, gradients: tuple[Array, Array]) -> tuple[Any, ...]:
    arguments, initial, kept, cuts = residuals
    d_output, d_finals = gradients

    def segment(carry: tuple, inputs: tuple) -> tuple[tuple, Any]:
        d_states, d_gate = carry
        tokens, d_output, start, sequences, filled = inputs
        terms, pull = jax.vjp(partial(_terms, layout, filled=filled), _with_gate(tokens, arguments))
        scanned, _ = scan_chunks(terms, sequences, initial, States(start, None))
        d_output = _to_chunks(d_output, layout.options.chunk_size)
        d_terms, d_states = scan_chunks_backward(terms, sequences, scanned, d_output, d_finals, d_states)
        (d_arguments,) = pull(d_terms)
        return (d_states, jax.tree.map(jnp.add, d_gate, d_arguments[5:])), d_arguments[:5]

    tokens, join = jax.vjp(lambda x: _split_all(layout, x, cuts), arguments)
    first = _before(layout.sequences, None, _state_shape(layout, arguments), arguments).one
    inputs = (tokens, _split(layout, d_output, cuts), jnp.concatenate([first[None], kept]), *_by_segment(layout, cuts))
    gate = arguments[5:]  # its gradients are sums over all tokens, whatever its own type
    zeros = [None if x is None else jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)) for x in gate]
    *zeros, _ = varying_alike((*zeros, arguments.q))
    carry = States(first, d_finals), tuple(zeros)
    (d_states, d_gate), d_tokens = _scan(layout, segment, carry, inputs, reverse=True)
    (d_arguments,) = join(list(d_tokens))
    d_gate = [None if d is None else d.astype(x.dtype) for x, d in zip(gate, d_gate, strict=True)]
    return Arguments(*d_arguments[:5], *d_gate), None if initial is None else d_states.ends, None


_replayed.defvjp(_replayed_forward, _replayed_backward)


def _kept(layout: Layout, arguments: Arguments, initial: Array | None, cuts: Chunking) -> tuple[Array, Array]:
    """The same in one segment, of which backward computes nothing again."""
    tokens = [x[0] for x in _split_all(layout, arguments, cuts)]
    terms = _terms(layout, _with_gate(tokens, arguments), cuts.filled)
    scan: Any = _kept_scan
    o, finals = scan(layout.sequences, terms, initial, sequences_of(cuts.sequence))
    return _join(layout, o[None], cuts, len(arguments.q)), finals


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kept_scan(count: int, terms: ChunkTerms, initial: Array | None, sequences: Sequences) -> tuple[Array, Array]:
    """The scan alone, which keeps its terms and states."""
    return _kept_scan_forward(count, terms, initial, sequences)[0]


def _kept_scan_forward(count: int, terms: ChunkTerms, initial: Array | None, sequences: Sequences) -> tuple[Any, Any]:
    shape = terms.w.shape[1], terms.w.shape[-1], terms.u.shape[-1]
    scanned, states = scan_chunks(terms, sequences, initial, _before(count, initial, shape, terms))
    return (outputs(terms, scanned), states.ends), (terms, initial, scanned, sequences)


def _kept_scan_backward(count: int, residuals: tuple, gradients: tuple[Array, Array]) -> tuple:
    terms, initial, scanned, sequences = residuals
    d_output, d_finals = gradients
    d_states = States(jnp.zeros_like(d_finals[0]), d_finals)
    d_terms, d_states = scan_chunks_backward(terms, sequences, scanned, d_output, d_finals, d_states)
    return d_terms, None if initial is None else d_states.ends, None


_kept_scan.defvjp(_kept_scan_forward, _kept_scan_backward)
