"""The delta rule over whole sequences in chunks, with a backward that recomputes segments of chunks.

Forward saves the arguments and one state per segment (SAVED_BY_REFERENCE of diptych.plans.model.delta_rule). Backward
runs from the last segment to the first, replays the chunks and states of each, and uses autograd for the part that does
not depend on states. So the memory in addition to the arguments and these states is that of one segment, for every
sequence length.

Transition columns: the final state of a sequence is a linear function of its initial state S, namely M S + S_local,
and its outputs are O + R S. Context parallelism needs M, S_local, O and R of a part before S is known. Columns of the
state evolve independently. So one scan of the state [0 | identity], with V + K columns, and of values with K further
columns of zeros computes S_local and O in the first V columns, and M and R in the last
K = ``num_transition_columns``.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from diptych.plans.model.delta_rule import SEGMENT_SIZE, Chunking, DeltaRuleOptions, cut_into_chunks
from reference_torch.autograd import differentiable_once
from reference_torch.context_parallel import StateExchange
from reference_torch.delta_rule.gates import recurrence_inputs
from reference_torch.delta_rule.intra import ChunkTerms, chunk_terms
from reference_torch.delta_rule.scan import ScanResult, outputs, scan_chunks, scan_chunks_backward


class Arguments(NamedTuple):
    """Arguments of a call, or of a segment: its tokens, and all parameters of the gate."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None


@dataclass(frozen=True)
class Segment:
    """Consecutive chunks that are computed together.

    A slot is a place for a token in a chunk. token_of_slot, is_filled and slot_of_token are None if all slots are
    filled in token order.

    Args:
        token_range: half-open token range of the segment.
        sequence_ids: index of each chunk's sequence.
        chunk_size: slots of a chunk.
        token_of_slot: token in each slot, counted from the first token of the segment.
        is_filled: true for each slot that holds a token.
        slot_of_token: slot of each token.
        num_transition_columns: K in the segments of a sequence with transition columns, else 0.
    """

    token_range: tuple[int, int]
    sequence_ids: list[int]
    chunk_size: int
    token_of_slot: Tensor | None
    is_filled: Tensor | None
    slot_of_token: Tensor | None
    num_transition_columns: int = 0

    def slice_tokens(self, x: Tensor) -> Tensor:
        """Return the tokens of this segment [B, t, ...] from all tokens [B, T, ...]."""
        return x[:, slice(*self.token_range)]

    def slice_arguments(self, arguments: Arguments) -> Arguments:
        """Return the arguments of this segment: its tokens of q, k, v, g and beta, and all of A_log and dt_bias."""
        *tokens, A_log, dt_bias = arguments
        q, k, v, g, beta = (self.slice_tokens(x) for x in tokens)
        return Arguments(q, k, v, g, beta, A_log, dt_bias)

    def to_chunks(self, x: Tensor) -> Tensor:
        """Reshape tokens [B, t, H, D] to chunks [n, B * H, chunk_size, D], with zeros in empty slots."""
        if self.token_of_slot is not None and self.is_filled is not None:
            x = torch.where(self.is_filled[:, None, None], x.index_select(1, self.token_of_slot), 0)
        batch, _, heads, width = x.shape
        x = x.reshape(batch, -1, self.chunk_size, heads, width).permute(1, 0, 3, 2, 4)
        return x.reshape(len(x), batch * heads, self.chunk_size, width)

    def to_tokens(self, x: Tensor, batch: int) -> Tensor:
        """Reshape chunks to tokens, the inverse of to_chunks."""
        x = self._by_slot(x, batch).flatten(1, 2)
        return x if self.slot_of_token is None else x.index_select(1, self.slot_of_token)

    def write_tokens(self, target: Tensor, x: Tensor) -> None:
        """Write chunks into the tokens of this segment in ``target`` [B, T, H, D]."""
        own = self.slice_tokens(target)
        if self.slot_of_token is None:
            own.unflatten(1, (len(x), self.chunk_size)).copy_(self._by_slot(x, len(target)))
        else:
            own.copy_(self.to_tokens(x, len(target)))

    def _by_slot(self, x: Tensor, batch: int) -> Tensor:
        """Return a view [B, n, chunk_size, H, D] of chunks."""
        return x.unflatten(1, (batch, x.shape[1] // batch)).permute(1, 0, 3, 2, 4)

    def terms(self, arguments: Arguments, options: DeltaRuleOptions) -> ChunkTerms:
        """Return the terms of the chunks from the arguments of this segment."""
        if self.num_transition_columns:
            arguments = arguments._replace(v=F.pad(arguments.v, (0, self.num_transition_columns)))
        q, k, v, g, beta = (self.to_chunks(x) for x in recurrence_inputs(*arguments, options))
        return chunk_terms(q, k, v, g, beta)


class Layout(NamedTuple):
    """Static arguments and segments of one call."""

    options: DeltaRuleOptions
    segments: list[Segment]
    num_transition_columns: int
    """K if the first sequence has transition columns, else 0."""
    states_shape: tuple[int, int, int, int]
    """Shape of the final states: sequences, B * HV, K, and V with the transition columns."""

    def split_states(
        self, stacked: Tensor | None, like: Tensor, sequences: Collection[int] | None = None
    ) -> dict[int, Tensor]:
        """Return initial or final states, or their gradients, by index of the sequence.

        Only the state of the first sequence has transition columns.

        Args:
            stacked: states of the first sequences, [sequences, B * HV, K, V]; those of further sequences are zeros.
            like: tensor with the device and the type of these zeros; a narrower type than float32 becomes float32.
            sequences: indices of the wanted sequences; None: all. A replay wants those of its segment, so that its time
                does not grow with the number of sequences.
        """
        count, *shape = self.states_shape
        given: Any = [] if stacked is None else stacked
        if stacked is not None and sequences is None:
            given = stacked.unbind()  # one operation for all states, instead of one index for each
        zeros = like.new_zeros(shape, dtype=torch.promote_types(like.dtype, torch.float32))
        value_dim = shape[-1] - self.num_transition_columns
        states = {}
        for index in range(count) if sequences is None else sequences:
            state = given[index] if index < len(given) else zeros
            states[index] = state[..., :value_dim] if index else state
        return states


def make_segments(
    chunking: Chunking, chunk_size: int, segment_size: int, device: torch.device, num_transition_columns: int = 0
) -> list[Segment]:
    """Split chunks into segments of segment_size slots, or of one chunk if a chunk is larger.

    With transition columns the first sequence has segments of its own, and only these have transition columns.
    """
    segments = []
    chunks_per_segment = max(1, segment_size // chunk_size)
    num_chunks = len(chunking.sequence_ids)
    first_chunks = int(np.searchsorted(chunking.sequence_ids, 0, side="right")) if num_transition_columns else 0
    for first in [*range(0, first_chunks, chunks_per_segment), *range(first_chunks, num_chunks, chunks_per_segment)]:
        end = min(first + chunks_per_segment, first_chunks if first < first_chunks else num_chunks)
        chunks = slice(first, end)
        slots = slice(first * chunk_size, end * chunk_size)
        start, stop = (int(x) for x in np.searchsorted(chunking.slot_of_token, [slots.start, slots.stop]))
        is_filled = chunking.is_filled[slots]
        token_of_slot = np.where(is_filled, chunking.token_of_slot[slots] - start, 0)
        arrays = [token_of_slot, is_filled, chunking.slot_of_token[start:stop] - slots.start]
        tensors = [None if is_filled.all() else torch.from_numpy(x).to(device) for x in arrays]
        segments.append(
            Segment(
                (start, stop),
                chunking.sequence_ids[chunks].tolist(),
                chunk_size,
                *tensors,
                num_transition_columns=num_transition_columns if first < first_chunks else 0,
            )
        )
    return segments


def chunked(
    arguments: Arguments,
    initial_state: Tensor | None,
    options: DeltaRuleOptions,
    cu_seqlens: np.ndarray | None,
    recompute: bool,
    num_transition_columns: int = 0,
    exchange: StateExchange | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return outputs [B, T, HV, V], their transition columns [B, U, HV, K] or None, and final states [N, HV, K, V + K].

    arguments, options and cu_seqlens are the checked arguments of chunk_kda (api.py). initial_state holds the states of
    the first sequences; further sequences begin with 0. With transition columns (above), which only the first sequence,
    of U tokens, has, outputs have the type of states, and the states of other sequences are padded with zeros. Without
    them, final states have V columns. ``exchange`` begins before the last outputs are computed.
    """
    batch, length, heads, value_dim = arguments.v.shape
    key_dim = arguments.q.shape[-1]
    num_sequences = 1 if cu_seqlens is None else len(cu_seqlens) - 1
    cu_seqlens = np.array([0, length]) if cu_seqlens is None else cu_seqlens
    chunking = cut_into_chunks(cu_seqlens, length, options.chunk_size)
    segment_size = SEGMENT_SIZE if recompute else len(chunking.token_of_slot)
    segments = make_segments(chunking, options.chunk_size, segment_size, arguments.q.device, num_transition_columns)
    shape = (num_sequences, batch * heads, key_dim, value_dim + num_transition_columns)
    layout = Layout(options, segments, num_transition_columns, shape)
    initial = None if initial_state is None else initial_state.reshape(-1, *shape[1:])
    if recompute:
        o, transition_output, finals = _RuleWithRecompute.apply(layout, exchange, initial, *arguments)
    else:
        terms = [term for segment in segments for term in segment.terms(segment.slice_arguments(arguments), options)]
        *segment_outputs, finals = _ScanSavingStates.apply(layout, exchange, initial, *terms)
        token_outputs = [segment.to_tokens(x, batch) for segment, x in zip(segments, segment_outputs, strict=True)]
        o = torch.cat([x[..., :value_dim] for x in token_outputs], 1)
        transition_output = token_outputs[0][..., value_dim:] if num_transition_columns else None
        o = o if num_transition_columns else o.to(arguments.v.dtype)
    return o, transition_output, finals.view(-1, heads, key_dim, shape[-1])


def _stacked(states: dict[int, Tensor], count: int) -> Tensor:
    """Stack the first states, padded with zeros to the width of the first state."""
    width = states[0].shape[-1]
    return torch.stack([F.pad(states[index], (0, width - states[index].shape[-1])) for index in range(count)])


_NUM_TERMS = len(ChunkTerms._fields)


class _ScanSavingStates(torch.autograd.Function):
    """The scan without recompute: it saves terms and states, and autograd saves the inputs of the terms."""

    @staticmethod
    def forward(ctx, layout: Layout, exchange, initial, *terms):
        terms_by_segment = [
            ChunkTerms(*terms[index : index + _NUM_TERMS]) for index in range(0, len(terms), _NUM_TERMS)
        ]
        states = layout.split_states(initial, terms_by_segment[0].u)
        scans = [
            scan_chunks(segment_terms, segment.sequence_ids, states)
            for segment_terms, segment in zip(terms_by_segment, layout.segments, strict=True)
        ]
        if exchange is not None:
            exchange.begin(_stacked(states, len(states)))
        ctx.save_for_backward(*terms, *(x for scanned in scans for x in scanned))
        ctx.layout = layout
        ctx.num_initial = 0 if initial is None else len(initial)
        ctx.set_materialize_grads(False)
        segment_outputs = [outputs(own, scanned) for own, scanned in zip(terms_by_segment, scans, strict=True)]
        return *segment_outputs, _stacked(states, len(states))

    @staticmethod
    @differentiable_once
    def backward(ctx, *d_results):  # pyright: ignore[reportIncompatibleMethodOverride]
        *d_outputs, d_finals = d_results
        segments = ctx.layout.segments
        saved = ctx.saved_tensors  # read once, because hooks of torch.utils.checkpoint unpack once
        terms = saved[: _NUM_TERMS * len(segments)]
        scans = saved[_NUM_TERMS * len(segments) :]
        d_states = ctx.layout.split_states(d_finals, terms[0])
        gradients = []
        for index, segment in reversed(list(enumerate(segments))):
            segment_terms = ChunkTerms(*terms[_NUM_TERMS * index :][:_NUM_TERMS])
            scanned = ScanResult(*scans[2 * index :][:2])
            d_output = torch.zeros_like(scanned.errors) if d_outputs[index] is None else d_outputs[index]
            gradients[:0] = scan_chunks_backward(segment_terms, segment.sequence_ids, scanned, d_output, d_states)
        _, _, wants_initial, *_ = ctx.needs_input_grad
        return None, None, _stacked(d_states, ctx.num_initial) if wants_initial else None, *gradients


class _RuleWithRecompute(torch.autograd.Function):
    """The rule with recompute: it saves the arguments and one state per segment."""

    @staticmethod
    def forward(ctx, layout: Layout, exchange, initial, *inputs):
        arguments = Arguments(*inputs)
        v = arguments.v
        states = layout.split_states(initial, v)
        segment_starts = []
        extra = layout.num_transition_columns
        o = v.new_empty(v.shape, dtype=states[0].dtype if extra else v.dtype)
        transition_output = None
        if extra:
            tokens = max(
                (segment.token_range[1] for segment in layout.segments if segment.num_transition_columns), default=0
            )
            transition_output = o.new_empty(*v.shape[:1], tokens, v.shape[2], extra)
        for segment in layout.segments:
            segment_starts.append(states[segment.sequence_ids[0]])  # other sequences of the segment begin in it
            terms = segment.terms(segment.slice_arguments(arguments), layout.options)
            scanned = scan_chunks(terms, segment.sequence_ids, states)  # states become those after the segment
            if exchange is not None and segment is layout.segments[-1]:
                exchange.begin(_stacked(states, len(states)))
                exchange.overlapped_work = partial(_replay_last_segment, ctx)  # during the exchange of backward
            output = outputs(terms, scanned)
            segment.write_tokens(o, output[..., : v.shape[-1]])
            if transition_output is not None and segment.num_transition_columns:
                segment.write_tokens(transition_output, output[..., v.shape[-1] :])
        widths = dict.fromkeys(state.shape[-1] for state in segment_starts[1:])  # with and without transition columns
        stacks = [torch.stack([state for state in segment_starts[1:] if state.shape[-1] == width]) for width in widths]
        ctx.save_for_backward(initial, *arguments, *stacks)
        ctx.layout = layout
        ctx.replayed_last = None
        ctx.set_materialize_grads(False)
        return o, transition_output, _stacked(states, len(states))

    @staticmethod
    @differentiable_once
    def backward(ctx, d_output, d_transition_output, d_finals):  # pyright: ignore[reportIncompatibleMethodOverride]
        saved, replay = ctx.replayed_last or (_unpack_saved(ctx), None)
        ctx.replayed_last = None
        layout = ctx.layout
        arguments = saved.arguments
        value_dim = arguments.v.shape[-1]
        _, _, wants_initial, *needs_grad = ctx.needs_input_grad
        gradients = _new_gradients(arguments, needs_grad)
        d_states = layout.split_states(d_finals, arguments.v)
        for index, segment in reversed(list(enumerate(layout.segments))):
            replay = replay or _replay_segment(layout, saved, needs_grad, index)
            d_segment = torch.zeros_like(replay.scanned.errors)
            if d_output is not None:
                d_segment[..., :value_dim] = segment.to_chunks(segment.slice_tokens(d_output).to(d_segment.dtype))
            if d_transition_output is not None and segment.num_transition_columns:
                d_transition = segment.slice_tokens(d_transition_output).to(d_segment.dtype)
                d_segment[..., value_dim:] = segment.to_chunks(d_transition)
            d_terms = scan_chunks_backward(replay.terms, segment.sequence_ids, replay.scanned, d_segment, d_states)
            _write_gradients(replay, d_terms, segment, gradients)
            replay = None
        d_arguments = [
            gradients[name].to(x.dtype) if name in gradients else None for name, x in arguments._asdict().items()
        ]
        d_initial = _stacked(d_states, len(saved.initial)) if wants_initial else None
        return None, None, d_initial, *d_arguments


class _SavedValues(NamedTuple):
    """The values saved for backward by _RuleWithRecompute."""

    initial: Any
    """Initial states of the first sequences, or None."""
    arguments: Arguments
    segment_starts: list[Tensor]
    """The states before all segments but the first."""


def _unpack_saved(ctx: Any) -> _SavedValues:
    """Return the values that _RuleWithRecompute saved for backward."""
    initial, *saved = ctx.saved_tensors
    count = len(Arguments._fields)
    return _SavedValues(initial, Arguments(*saved[:count]), [state for stack in saved[count:] for state in stack])


class _Replay(NamedTuple):
    """A segment that backward has recomputed."""

    leaves: Arguments
    """Arguments of the segment."""
    connected: ChunkTerms
    """Terms, connected to the leaves in the autograd graph."""
    terms: ChunkTerms
    """Detached terms."""
    scanned: ScanResult


def _replay_segment(layout: Layout, saved: _SavedValues, needs_grad: Sequence[bool], index: int) -> _Replay:
    """Recompute a segment, with leaves that require the wanted gradients."""
    segment = layout.segments[index]
    states = layout.split_states(saved.initial, saved.arguments.v, {*segment.sequence_ids})
    arguments = segment.slice_arguments(saved.arguments)
    leaves: Any = (
        None if x is None else x.detach().requires_grad_(needs) for x, needs in zip(arguments, needs_grad, strict=True)
    )
    leaves = Arguments(*leaves)
    with torch.enable_grad():
        connected = segment.terms(leaves, layout.options)
    terms = ChunkTerms(*(x.detach() for x in connected))
    if index:
        states[segment.sequence_ids[0]] = saved.segment_starts[index - 1]
    return _Replay(leaves, connected, terms, scan_chunks(terms, segment.sequence_ids, states))


def _replay_last_segment(ctx: Any) -> None:
    """Replay the last segment, which backward needs first."""
    saved = _unpack_saved(ctx)
    _, _, _, *needs_grad = ctx.needs_input_grad
    ctx.replayed_last = saved, _replay_segment(ctx.layout, saved, needs_grad, len(ctx.layout.segments) - 1)


_GATE_PARAMETERS = ("A_log", "dt_bias")
"""Arguments of all tokens, whose gradients are sums over segments; the others have a gradient for each token."""


def _new_gradients(arguments: Arguments, needs_grad: Sequence[bool]) -> dict[str, Tensor]:
    """Return memory for the wanted gradients: zeros for gate parameters, in at least float32."""
    gradients = {}
    for (name, x), needs in zip(arguments._asdict().items(), needs_grad, strict=True):
        if needs and name in _GATE_PARAMETERS:
            gradients[name] = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
        elif needs:
            gradients[name] = torch.empty_like(x)
    return gradients


def _write_gradients(replay: _Replay, d_terms: ChunkTerms, segment: Segment, gradients: dict[str, Tensor]) -> None:
    """Write the gradients of a segment's tokens, computed from those of its terms, and add those of the gate."""
    if not gradients:
        return
    pairs = [(term, d) for term, d in zip(replay.connected, d_terms, strict=True) if term.requires_grad]
    leaves = [getattr(replay.leaves, name) for name in gradients]
    of_segment = torch.autograd.grad([x for x, _ in pairs], leaves, [d for _, d in pairs])
    for (name, total), gradient in zip(gradients.items(), of_segment, strict=True):
        if name in _GATE_PARAMETERS:
            total += gradient
        else:
            segment.slice_tokens(total).copy_(gradient)
