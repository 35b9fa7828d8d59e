"""The delta rule over whole sequences in chunks, with a backward that recomputes segments of chunks.

Forward saves the arguments and one state per segment (diptych.plans.model.delta_rule.SAVED). Backward runs from the
last segment to the first, replays the chunks and states of each, and uses autograd for the part that does not depend on
states. So the memory in addition to the arguments is that of one segment, for every sequence length.

Transition columns: the final state of a sequence is a linear function of its initial state S, M S + H, and its outputs
are O + R S. Context parallelism needs M, H, O and R of a part before S is known. ``num_transition_columns`` = K appends
K columns to the values, which are 0, and to the initial state, where they are the identity and the others 0. One scan
then computes H and O in the first V columns, and M and R in the transition columns.
"""

from collections.abc import Sequence
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
from reference_torch.delta_rule.gates import gated
from reference_torch.delta_rule.intra import ChunkTerms, chunk_terms
from reference_torch.delta_rule.scan import Scanned, outputs, scan_chunks, scan_chunks_backward


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

    A slot is a place for a token in a chunk. token, filled and slot are None if all slots are filled in token order.

    Args:
        tokens: first and last token of the segment (half-open range).
        owners: number of the sequence of each chunk.
        chunk_size: slots of a chunk.
        token: token in each slot, counted from the first token of the segment.
        filled: true for each slot that holds a token.
        slot: slot of each token.
        num_transition_columns: see the docstring of this file.
    """

    tokens: tuple[int, int]
    owners: list[int]
    chunk_size: int
    token: Tensor | None
    filled: Tensor | None
    slot: Tensor | None
    num_transition_columns: int = 0

    def own(self, x: Tensor) -> Tensor:
        """Return the tokens of this segment [B, t, ...] from all tokens [B, T, ...]."""
        return x[:, slice(*self.tokens)]

    def own_arguments(self, arguments: Arguments) -> Arguments:
        """Return the arguments of this segment: its tokens of q, k, v, g and beta, and all of A_log and dt_bias."""
        *tokens, A_log, dt_bias = arguments
        q, k, v, g, beta = (self.own(x) for x in tokens)
        return Arguments(q, k, v, g, beta, A_log, dt_bias)

    def to_chunks(self, x: Tensor) -> Tensor:
        """Reshape tokens [B, t, H, D] to chunks [n, B * H, chunk_size, D], with zeros in empty slots."""
        if self.token is not None and self.filled is not None:
            x = torch.where(self.filled[:, None, None], x.index_select(1, self.token), 0)
        batch, _, heads, width = x.shape
        x = x.reshape(batch, -1, self.chunk_size, heads, width).permute(1, 0, 3, 2, 4)
        return x.reshape(len(x), batch * heads, self.chunk_size, width)

    def to_tokens(self, x: Tensor, batch: int) -> Tensor:
        """Reshape chunks to tokens, the inverse of to_chunks."""
        chunks, rows, size, width = x.shape
        x = x.view(chunks, batch, rows // batch, size, width).permute(1, 0, 3, 2, 4)
        x = x.reshape(batch, chunks * size, rows // batch, width)
        return x if self.slot is None else x.index_select(1, self.slot)

    def terms(self, arguments: Arguments, options: DeltaRuleOptions) -> ChunkTerms:
        """Return the terms of the chunks from the arguments of this segment."""
        if self.num_transition_columns:
            arguments = arguments._replace(v=F.pad(arguments.v, (0, self.num_transition_columns)))
        q, k, v, g, beta = (self.to_chunks(x) for x in gated(*arguments, options))
        return chunk_terms(q, k, v, g, beta)


class Layout(NamedTuple):
    """The static part of a call."""

    options: DeltaRuleOptions
    segments: list[Segment]
    num_transition_columns: int
    """See the docstring of this file."""
    states: tuple[int, int, int, int]
    """Shape of the final states: sequences, B * HV, K, and V with the transition columns."""

    def initial_states(self, given: Tensor | None, like: Tensor) -> dict[int, Tensor]:
        """Return the states [B * HV, K, V] by number of the sequence: the given ones, and zeros for further sequences.

        Only the state of the first sequence has transition columns.
        """
        sequences, *shape = self.states
        states = [] if given is None else list(given)
        zeros = like.new_zeros(shape, dtype=torch.promote_types(like.dtype, torch.float32))
        states += [zeros] * (sequences - len(states))
        width = shape[-1] - self.num_transition_columns
        return {number: state[..., :width] if number else state for number, state in enumerate(states)}


def make_segments(
    cuts: Chunking, chunk_size: int, segment_size: int, device: torch.device, num_transition_columns: int = 0
) -> list[Segment]:
    """Split chunks into segments of segment_size slots, or of one chunk if a chunk is larger.

    With transition columns the first sequence has segments of its own, and only these have transition columns.
    """
    segments = []
    step = max(1, segment_size // chunk_size)
    count = len(cuts.sequence)
    own = int(np.searchsorted(cuts.sequence, 0, side="right")) if num_transition_columns else 0
    for first in [*range(0, own, step), *range(own, count, step)]:
        end = min(first + step, own if first < own else count)
        chunks = slice(first, end)
        slots = slice(first * chunk_size, end * chunk_size)
        start, stop = (int(x) for x in np.searchsorted(cuts.slot, [slots.start, slots.stop]))
        owners = cuts.sequence[chunks].tolist()
        filled = cuts.filled[slots]
        placed = [np.where(filled, cuts.token[slots] - start, 0), filled, cuts.slot[start:stop] - slots.start]
        tensors = [None if filled.all() else torch.from_numpy(x).to(device) for x in placed]
        segments.append(
            Segment(
                (start, stop),
                owners,
                chunk_size,
                *tensors,
                num_transition_columns=num_transition_columns if first < own else 0,
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
    """Return outputs, their transition columns (None if there are none), and final states.

    arguments, options and cu_seqlens are the checked arguments of chunk_kda (api.py). initial_state holds the states of
    the first sequences; further sequences begin with 0. Only the first sequence has transition columns (see the
    docstring of this file); the states of other sequences are padded with zeros, and outputs then have the type of
    states. ``exchange`` begins before the last outputs are computed.
    """
    batch, length, heads, width = arguments.v.shape
    key = arguments.q.shape[-1]
    sequences = 1 if cu_seqlens is None else len(cu_seqlens) - 1
    cu_seqlens = np.array([0, length]) if cu_seqlens is None else cu_seqlens
    cuts = cut_into_chunks(cu_seqlens, length, options.chunk_size)
    size = SEGMENT_SIZE if recompute else len(cuts.token)
    segments = make_segments(cuts, options.chunk_size, size, arguments.q.device, num_transition_columns)
    shape = (sequences, batch * heads, key, width + num_transition_columns)
    layout = Layout(options, segments, num_transition_columns, shape)
    initial = None if initial_state is None else initial_state.reshape(-1, *shape[1:])
    if recompute:
        o, transition_output, finals = _Replayed.apply(layout, exchange, initial, *arguments)
    else:
        terms = [term for part in segments for term in part.terms(part.own_arguments(arguments), options)]
        *found, finals = _SavedScan.apply(layout, exchange, initial, *terms)
        found = [part.to_tokens(x, batch) for part, x in zip(segments, found, strict=True)]
        o = torch.cat([x[..., :width] for x in found], 1)
        transition_output = found[0][..., width:] if num_transition_columns else None
        o = o if num_transition_columns else o.to(arguments.v.dtype)
    return o, transition_output, finals.view(-1, heads, key, shape[-1])


def _stacked(states: dict[int, Tensor], count: int) -> Tensor:
    """Stack the first states, padded with zeros to the width of the first state."""
    width = states[0].shape[-1]
    return torch.stack([F.pad(states[number], (0, width - states[number].shape[-1])) for number in range(count)])


_TERMS = len(ChunkTerms._fields)


class _SavedScan(torch.autograd.Function):
    """The scan without recomputation: it saves terms and states, and autograd saves the inputs of the terms."""

    @staticmethod
    def forward(ctx, layout: Layout, exchange, initial, *terms):
        each = [ChunkTerms(*terms[place : place + _TERMS]) for place in range(0, len(terms), _TERMS)]
        states = layout.initial_states(initial, each[0].u)
        scans = [scan_chunks(own, part.owners, states) for own, part in zip(each, layout.segments, strict=True)]
        if exchange is not None:
            exchange.begin(_stacked(states, len(states)))
        ctx.save_for_backward(*terms, *(x for scanned in scans for x in scanned))
        ctx.layout = layout
        ctx.given = 0 if initial is None else len(initial)
        ctx.set_materialize_grads(False)
        found = [outputs(own, scanned) for own, scanned in zip(each, scans, strict=True)]
        return *found, _stacked(states, len(states))

    @staticmethod
    @differentiable_once
    def backward(ctx, *d_results):  # pyright: ignore[reportIncompatibleMethodOverride]
        *d_outputs, d_finals = d_results
        segments = ctx.layout.segments
        saved = ctx.saved_tensors  # read once, because hooks of torch.utils.checkpoint unpack once
        terms = saved[: _TERMS * len(segments)]
        scans = saved[_TERMS * len(segments) :]
        d_states = ctx.layout.initial_states(d_finals, terms[0])
        gradients = []
        for place, part in reversed(list(enumerate(segments))):
            own = ChunkTerms(*terms[_TERMS * place :][:_TERMS])
            scanned = Scanned(*scans[2 * place :][:2])
            d_output = torch.zeros_like(scanned.errors) if d_outputs[place] is None else d_outputs[place]
            gradients[:0] = scan_chunks_backward(own, part.owners, scanned, d_output, d_states)
        _, _, wants_initial, *_ = ctx.needs_input_grad
        return None, None, _stacked(d_states, ctx.given) if wants_initial else None, *gradients


class _Replayed(torch.autograd.Function):
    """The rule with recomputation: it saves the arguments and one state per segment."""

    @staticmethod
    def forward(ctx, layout: Layout, exchange, initial, *inputs):
        arguments = Arguments(*inputs)
        v = arguments.v
        states = layout.initial_states(initial, v)
        begins = []
        extra = layout.num_transition_columns
        o = v.new_empty(v.shape, dtype=states[0].dtype if extra else v.dtype)
        transition_output = None
        if extra:
            tokens = max(
                (segment.tokens[1] for segment in layout.segments if segment.num_transition_columns), default=0
            )
            transition_output = o.new_empty(*v.shape[:1], tokens, v.shape[2], extra)
        for segment in layout.segments:
            begins.append(states[segment.owners[0]])
            terms = segment.terms(segment.own_arguments(arguments), layout.options)
            scanned = scan_chunks(terms, segment.owners, states)
            if exchange is not None and segment is layout.segments[-1]:
                exchange.begin(_stacked(states, len(states)))
                exchange.overlapped_work = partial(_prepare, ctx)
            found = segment.to_tokens(outputs(terms, scanned), len(v))
            segment.own(o).copy_(found[..., : v.shape[-1]])
            if transition_output is not None and segment.num_transition_columns:
                segment.own(transition_output).copy_(found[..., v.shape[-1] :])
        widths = dict.fromkeys(state.shape[-1] for state in begins[1:])  # with and without transition columns
        stacks = [torch.stack([state for state in begins[1:] if state.shape[-1] == width]) for width in widths]
        ctx.save_for_backward(initial, *arguments, *stacks)
        ctx.layout = layout
        ctx.prepared = None
        ctx.set_materialize_grads(False)
        return o, transition_output, _stacked(states, len(states))

    @staticmethod
    @differentiable_once
    def backward(ctx, d_output, d_transition_output, d_finals):  # pyright: ignore[reportIncompatibleMethodOverride]
        saved, replay = ctx.prepared or (_unpack_saved(ctx), None)
        ctx.prepared = None
        layout = ctx.layout
        arguments = saved.arguments
        value = arguments.v.shape[-1]
        _, _, wants_initial, *wanted = ctx.needs_input_grad
        sums = _zero_gradients(arguments, wanted)
        d_states = layout.initial_states(d_finals, arguments.v)
        for number, segment in reversed(list(enumerate(layout.segments))):
            replay = replay or _replay_segment(layout, saved, wanted, number)
            own = torch.zeros_like(replay.scanned.errors)
            for d, columns in ((d_output, slice(value)), (d_transition_output, slice(value, None))):
                if d is not None and (d is d_output or segment.num_transition_columns):
                    own[..., columns] = segment.to_chunks(segment.own(d).to(own.dtype))
            d_terms = scan_chunks_backward(replay.terms, segment.owners, replay.scanned, own, d_states)
            _add_gradients(replay, d_terms, segment, sums)
            replay = None
        gradients = [sums[name].to(x.dtype) if name in sums else None for name, x in arguments._asdict().items()]
        d_initial = _stacked(d_states, len(saved.initial)) if wants_initial else None
        return None, None, d_initial, *gradients


class _SavedValues(NamedTuple):
    """The values saved for backward by _Replayed."""

    initial: Any
    """Initial states of the first sequences, or None."""
    arguments: Arguments
    begins: list[Tensor]
    """The states before all segments but the first."""


def _unpack_saved(ctx: Any) -> _SavedValues:
    """Return the values that _Replayed saved for backward."""
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
    scanned: Scanned


def _replay_segment(layout: Layout, saved: _SavedValues, wanted: Sequence[bool], number: int) -> _Replay:
    """Recompute a segment, with leaves that require the wanted gradients."""
    segment = layout.segments[number]
    initials = layout.initial_states(saved.initial, saved.arguments.v)
    own = segment.own_arguments(saved.arguments)
    leaves: Any = (None if x is None else x.detach().requires_grad_(want) for x, want in zip(own, wanted, strict=True))
    leaves = Arguments(*leaves)
    with torch.enable_grad():
        connected = segment.terms(leaves, layout.options)
    terms = ChunkTerms(*(x.detach() for x in connected))
    states = {owner: initials[owner] for owner in segment.owners}
    if number:
        states[segment.owners[0]] = saved.begins[number - 1]
    return _Replay(leaves, connected, terms, scan_chunks(terms, segment.owners, states))


def _prepare(ctx: Any) -> None:
    """Replay the last segment, which backward needs first."""
    saved = _unpack_saved(ctx)
    _, _, _, *wanted = ctx.needs_input_grad
    ctx.prepared = saved, _replay_segment(ctx.layout, saved, wanted, len(ctx.layout.segments) - 1)


def _zero_gradients(arguments: Arguments, wanted: Sequence[bool]) -> dict[str, Tensor]:
    """Return zeros to which segments add the wanted gradients; gate parameters sum in at least float32."""
    sums = {}
    for (name, x), want in zip(arguments._asdict().items(), wanted, strict=True):
        if want:
            is_gate = name in ("A_log", "dt_bias")
            sums[name] = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32) if is_gate else x.dtype)
    return sums


def _add_gradients(replay: _Replay, d_terms: ChunkTerms, segment: Segment, sums: dict[str, Tensor]) -> None:
    """Add the gradients of one segment, computed from those of its terms."""
    used = [(term, d) for term, d in zip(replay.connected, d_terms, strict=True) if term.requires_grad]
    if not sums or not used:
        return
    leaves = [getattr(replay.leaves, name) for name in sums]
    found = torch.autograd.grad([x for x, _ in used], leaves, [d for _, d in used])
    for (name, total), gradient in zip(sums.items(), found, strict=True):
        into = total if name in ("A_log", "dt_bias") else segment.own(total)
        into += gradient
