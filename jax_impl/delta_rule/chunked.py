"""The delta rule over whole sequences in chunks, with a backward that recomputes segments of chunks.

Forward saves the arguments and one state per segment (SAVED_BY_REFERENCE of diptych.plans.model.delta_rule). Backward
runs from the last segment to the first, replays the chunks and states of each, and uses jax.vjp for the part that does
not depend on states. So the memory in addition to the arguments and these states is that of one segment, for every
sequence length.

Transition columns: the final state of a sequence is a linear function of its initial state S, namely M S + S_local,
and its outputs are O + R S. Context parallelism needs M, S_local, O and R of a part before S is known. Columns of the
state evolve independently. So one scan of the state [0 | identity], with V + K columns, and of values with K further
columns of zeros computes S_local and O in the first V columns, and M and R in the last
K = ``num_transition_columns``.
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
from diptych_kernels.mesh_axes import match_varying_axes
from jax_impl.delta_rule.gates import recurrence_inputs
from jax_impl.delta_rule.intra import ChunkTerms, chunk_terms
from jax_impl.delta_rule.scan import ChunkSequences, States, chunk_sequences, outputs, scan_chunks, scan_chunks_backward


class Arguments(NamedTuple):
    """Arguments of a call, or of a segment: its tokens, and all parameters of the gate."""

    q: Array
    k: Array
    v: Array
    g: Array
    beta: Array
    A_log: Array | None
    dt_bias: Array | None

    def split(self) -> tuple[tuple[Array, ...], tuple[Array | None, ...]]:
        """Return the arguments with one value per token, and the parameters of the gate."""
        *tokens, A_log, dt_bias = self
        return tuple(tokens), (A_log, dt_bias)


class Layout(NamedTuple):
    """Static arguments and segmentation of one call.

    Args:
        options: options of the call.
        num_segments: number of segments.
        is_dense: all slots are filled in token order, so tokens need no gather.
        num_transition_columns: K if the sequences have transition columns, else 0.
        num_sequences: number of sequences.
    """

    options: DeltaRuleOptions
    num_segments: int
    is_dense: bool
    num_transition_columns: int
    num_sequences: int


def chunked(
    arguments: Arguments,
    initial_state: Array | None,
    options: DeltaRuleOptions,
    cu_seqlens: Array | np.ndarray | None,
    recompute: bool,
    num_transition_columns: int = 0,
) -> tuple[Array, Array]:
    """Return outputs o [B, T, HV, V + K] and final states [N, HV, K, V + K], of V columns without transition columns.

    The arguments are the checked arguments of chunk_kda (api.py); N is B without cu_seqlens. With transition columns
    (above), outputs have the type of states. All sequences have them, although only the first needs them: cu_seqlens
    may be traced, and the tokens of the first sequence are then not known when the program is traced. PyTorch returns
    the columns separately, because there only the first sequence has them.
    """
    batch, length, heads, value_dim = arguments.v.shape
    key_dim = arguments.q.shape[-1]
    num_columns = value_dim + num_transition_columns
    num_sequences = 1 if cu_seqlens is None else len(cu_seqlens) - 1
    cu_seqlens = np.array([0, length]) if cu_seqlens is None else cu_seqlens
    is_traced = isinstance(cu_seqlens, Tracer)
    size = options.chunk_size
    chunks = most_chunks(length, num_sequences, size) if is_traced else int(np.sum(-(-np.diff(cu_seqlens) // size)))
    segments = -(-chunks // max(1, SEGMENT_SIZE // size)) if recompute else 1
    chunks = segments * -(-chunks // segments)  # lax.scan runs segments of equal size
    if not is_traced:
        cu_seqlens = np.asarray(cu_seqlens)
    chunking = cut_into_chunks(cu_seqlens, length, size, chunks, jnp if is_traced else np)
    is_dense = not is_traced and bool(np.all(chunking.is_filled))
    layout = Layout(options, segments, is_dense, num_transition_columns, num_sequences)
    shape = num_sequences, batch * heads, key_dim, num_columns
    initial = None if initial_state is None else initial_state.reshape(shape)
    chunking = jax.tree.map(jnp.asarray, chunking)
    initial, *arrays = match_varying_axes((initial, *arguments))
    rule: Any = _rule_with_recompute if recompute else _rule_saving_states
    o, finals = rule(layout, Arguments(*arrays), initial, chunking)
    return o if num_transition_columns else o.astype(arguments.v.dtype), finals.reshape(-1, heads, key_dim, num_columns)


def _with_gate(tokens: Sequence[Array], arguments: Arguments) -> Arguments:
    """Return the arguments of a segment from its tokens of q, k, v, g and beta."""
    q, k, v, g, beta = tokens
    return Arguments(q, k, v, g, beta, arguments.A_log, arguments.dt_bias)


def _split(layout: Layout, x: Array, chunking: Chunking) -> Array:
    """Reshape tokens [B, T, ...] to [segments, B, slots of a segment, ...], with zeros in empty slots."""
    if not layout.is_dense:
        x = jnp.where(chunking.is_filled.reshape(-1, *[1] * (x.ndim - 2)), x[:, chunking.token_of_slot], 0)
    return jnp.moveaxis(x.reshape(len(x), layout.num_segments, -1, *x.shape[2:]), 1, 0)


def _split_all(layout: Layout, arguments: Arguments, chunking: Chunking) -> list[Array]:
    """Split q, k, v, g and beta into segments; see _split."""
    tokens, _ = arguments.split()
    return [_split(layout, x, chunking) for x in tokens]


def _join(layout: Layout, x: Array, chunking: Chunking, batch: int) -> Array:
    """Reshape chunks [segments, n, B * H, C, D] to tokens [B, T, H, D]."""
    x = x.reshape(-1, batch, x.shape[2] // batch, *x.shape[3:])
    x = x.transpose(1, 0, 3, 2, 4)
    x = x.reshape(batch, -1, *x.shape[3:])
    return x if layout.is_dense else x[:, chunking.slot_of_token]


def _to_chunks(x: Array, size: int) -> Array:
    """Reshape [B, t, H, D] to chunks [n, B * H, C, D]."""
    batch, _, heads, width = x.shape
    return x.reshape(batch, -1, size, heads, width).transpose(1, 0, 3, 2, 4).reshape(-1, batch * heads, size, width)


def _terms(layout: Layout, arguments: Arguments, is_filled: Array) -> ChunkTerms:
    """Return the terms of a segment's chunks; is_filled [slots of a segment] is true where a slot holds a token."""
    v = jnp.pad(arguments.v, ((0, 0), (0, 0), (0, 0), (0, layout.num_transition_columns)))
    q, k, v, g, beta = recurrence_inputs(*arguments._replace(v=v), layout.options)
    if not layout.is_dense:  # a gate computes a decay from the 0 of an empty slot, which must not change the state
        g = jnp.where(is_filled[:, None, None], g, 0)
    q, k, v, g, beta = (_to_chunks(x, layout.options.chunk_size) for x in (q, k, v, g, beta))
    return chunk_terms(q, k, v, g, beta)


def _by_segment(layout: Layout, chunking: Chunking) -> tuple[ChunkSequences, Array]:
    """Return the sequences of chunks and the filled slots, by segment."""
    return jax.tree.map(
        lambda x: x.reshape(layout.num_segments, -1), (chunk_sequences(chunking.sequence_ids), chunking.is_filled)
    )


def _initial_states(num_sequences: int, initial: Array | None, shape: tuple[int, ...], like: Sequence[Any]) -> States:
    """Return the carry before the first chunk; shape is that of one state, [R, K, V] with R = B * HV.

    ``like`` are arrays from which the states are computed: the carry has their type and varies over their mesh axes.
    """
    dtype = jnp.promote_types(like[0].dtype, jnp.float32)
    current = jnp.zeros(shape, dtype)
    # A sequence without tokens never writes its final state, which is then its initial state.
    finals = jnp.zeros((num_sequences, *shape), dtype) if initial is None else initial
    return States(*match_varying_axes((current, finals, *like))[:2])


def _state_shape(layout: Layout, arguments: Arguments) -> tuple[int, int, int]:
    """Return the shape of a state with its transition columns: [B * HV, K, V + transition columns]."""
    batch, _, heads, value_dim = arguments.v.shape
    return batch * heads, arguments.q.shape[-1], value_dim + layout.num_transition_columns


def _scan(layout: Layout, segment: Callable, carry: Any, inputs: Any, reverse: bool = False) -> tuple[Any, Any]:
    """Run jax.lax.scan over segments; with transition columns, run the last segment outside of the loop.

    The outputs of the last segment, and its terms in backward, do not depend on other ranks. Outside of the loop, XLA
    can compute them during the exchange of states.
    """
    if not layout.num_transition_columns:
        return jax.lax.scan(segment, carry, inputs, reverse=reverse)
    rest = jax.tree.map(lambda x: x[:-1], inputs)
    last = jax.tree.map(lambda x: x[-1], inputs)
    if layout.num_segments == 1:
        carry, last_output = segment(carry, last)
        return carry, jax.tree.map(lambda x: x[None], last_output)
    if reverse:
        carry, last_output = segment(carry, last)
        carry, earlier_outputs = jax.lax.scan(segment, carry, rest, reverse=True)
    else:
        carry, earlier_outputs = jax.lax.scan(segment, carry, rest)
        carry, last_output = segment(carry, last)
    return carry, jax.tree.map(lambda x, y: jnp.concatenate([x, y[None]]), earlier_outputs, last_output)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rule_with_recompute(
    layout: Layout, arguments: Arguments, initial: Array | None, chunking: Chunking
) -> tuple[Array, Array]:
    """Run the rule with recompute, which saves the arguments and one state per segment."""
    return _rule_with_recompute_forward(layout, arguments, initial, chunking)[0]


def _rule_with_recompute_forward(
    layout: Layout, arguments: Arguments, initial: Array | None, chunking: Chunking
) -> tuple[Any, Any]:
    """Run all segments, and save the arguments and the state before each segment."""

    def segment(states: States, inputs: tuple) -> tuple[States, tuple[Array, Array]]:
        tokens, sequences, is_filled = inputs
        terms = _terms(layout, _with_gate(tokens, arguments), is_filled)
        scanned, after = scan_chunks(terms, sequences, initial, states)
        return after, (outputs(terms, scanned), states.current)

    states = _initial_states(layout.num_sequences, initial, _state_shape(layout, arguments), arguments)
    inputs = (_split_all(layout, arguments, chunking), *_by_segment(layout, chunking))
    states, (o, segment_starts) = _scan(layout, segment, states, inputs)
    o = _join(layout, o, chunking, len(arguments.q))
    return (o, states.finals), (arguments, initial, segment_starts[1:], chunking)


def _rule_with_recompute_backward(layout: Layout, residuals: Any, gradients: tuple[Array, Array]) -> tuple[Any, ...]:
    """Replay the segments from the last to the first, and return the gradients of the arguments."""
    arguments, initial, segment_starts, chunking = residuals
    d_output, d_finals = gradients

    def segment(carry: tuple, inputs: tuple) -> tuple[tuple, Any]:
        d_states, d_gate = carry
        tokens, d_output, start, sequences, is_filled = inputs
        terms, pull_back = jax.vjp(partial(_terms, layout, is_filled=is_filled), _with_gate(tokens, arguments))
        scanned, _ = scan_chunks(terms, sequences, initial, States(start, None))
        d_output = _to_chunks(d_output, layout.options.chunk_size)
        d_terms, d_states = scan_chunks_backward(terms, sequences, scanned, d_output, d_finals, d_states)
        (d_arguments,) = pull_back(d_terms)
        d_tokens, d_gate_of_segment = d_arguments.split()
        return (d_states, jax.tree.map(jnp.add, d_gate, d_gate_of_segment)), d_tokens

    tokens, pull_back_split = jax.vjp(lambda x: _split_all(layout, x, chunking), arguments)
    first = _initial_states(layout.num_sequences, None, _state_shape(layout, arguments), arguments).current
    # The first segment needs no state, because its first chunk begins a sequence and reads the initial state.
    segment_starts = jnp.concatenate([first[None], segment_starts])
    inputs = (tokens, _split(layout, d_output, chunking), segment_starts, *_by_segment(layout, chunking))
    _, gate = arguments.split()  # its gradients are sums over all tokens, in at least float32
    zeros = [None if x is None else jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)) for x in gate]
    *zeros, _ = match_varying_axes((*zeros, arguments.q))
    carry = States(first, d_finals), tuple(zeros)  # an empty sequence returns its initial state, with this gradient
    (d_states, d_gate), d_tokens = _scan(layout, segment, carry, inputs, reverse=True)
    (d_arguments,) = pull_back_split(list(d_tokens))
    d_A_log, d_dt_bias = (None if d is None else d.astype(x.dtype) for x, d in zip(gate, d_gate, strict=True))
    d_arguments = d_arguments._replace(A_log=d_A_log, dt_bias=d_dt_bias)
    return d_arguments, None if initial is None else d_states.finals, None


_rule_with_recompute.defvjp(_rule_with_recompute_forward, _rule_with_recompute_backward)


def _rule_saving_states(
    layout: Layout, arguments: Arguments, initial: Array | None, chunking: Chunking
) -> tuple[Array, Array]:
    """Run the rule in one segment without recompute."""
    tokens = [x[0] for x in _split_all(layout, arguments, chunking)]
    terms = _terms(layout, _with_gate(tokens, arguments), chunking.is_filled)
    scan: Any = _scan_saving_states
    o, finals = scan(layout.num_sequences, terms, initial, chunk_sequences(chunking.sequence_ids))
    return _join(layout, o[None], chunking, len(arguments.q)), finals


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan_saving_states(
    count: int, terms: ChunkTerms, initial: Array | None, sequences: ChunkSequences
) -> tuple[Array, Array]:
    """Run the scan, which saves its terms and states."""
    return _scan_saving_states_forward(count, terms, initial, sequences)[0]


def _scan_saving_states_forward(
    count: int, terms: ChunkTerms, initial: Array | None, sequences: ChunkSequences
) -> tuple[Any, Any]:
    """Run the scan, and save its terms, states and errors."""
    shape = terms.w.shape[1], terms.w.shape[-1], terms.u.shape[-1]
    scanned, states = scan_chunks(terms, sequences, initial, _initial_states(count, initial, shape, terms))
    return (outputs(terms, scanned), states.finals), (terms, initial, scanned, sequences)


def _scan_saving_states_backward(count: int, residuals: tuple, gradients: tuple[Array, Array]) -> tuple:
    """Return the gradients of the terms and of the initial states."""
    terms, initial, scanned, sequences = residuals
    d_output, d_finals = gradients
    d_states = States(jnp.zeros_like(d_finals[0]), d_finals)
    d_terms, d_states = scan_chunks_backward(terms, sequences, scanned, d_output, d_finals, d_states)
    return d_terms, None if initial is None else d_states.finals, None


_scan_saving_states.defvjp(_scan_saving_states_forward, _scan_saving_states_backward)
