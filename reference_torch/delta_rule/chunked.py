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
from reference_torch.context_parallel import Crossing
from reference_torch.delta_rule.gates import gated
from reference_torch.delta_rule.intra import ChunkTerms, chunk_terms
from reference_torch.delta_rule.scan import Scanned, outputs, scan_chunks, scan_chunks_backward


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

    def parts(self, arguments: Sequence[Any]) -> list[Any]:
        """Return the arguments of this segment: its tokens of q, k, v, g and beta, and all of A_log and dt_bias."""
        return [None if x is None else self.own(x) if place < 5 else x for place, x in enumerate(arguments)]

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

    def terms(self, arguments: Sequence[Any], options: DeltaRuleOptions) -> ChunkTerms:
        """Return the terms of the chunks from the arguments of this segment."""
        q, k, v, g, beta, A_log, dt_bias = arguments
        v = F.pad(v, (0, self.num_transition_columns)) if self.num_transition_columns else v
        q, k, v, g, beta = (self.to_chunks(x) for x in gated(q, k, v, g, beta, A_log, dt_bias, options))
        return chunk_terms(q, k, v, g, beta)


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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    options: DeltaRuleOptions,
    cu_seqlens: np.ndarray | None,
    recompute: bool,
    num_transition_columns: int = 0,
    crossing: Crossing | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return outputs, their transition columns (None if there are none), and final states.

    q, k, v, g, beta, A_log, dt_bias, options and cu_seqlens are the checked arguments of chunk_kda (api.py).
    initial_state holds the states of the first sequences; further sequences begin with 0. Only the first sequence has
    transition columns (see the docstring of this file); the states of other sequences are padded with zeros, and
    outputs then have the type of states. crossing begins its exchange before the last outputs are computed.
    """
    batch, length, heads, width = v.shape
    key = q.shape[-1]
    width += num_transition_columns
    sequences = 1 if cu_seqlens is None else len(cu_seqlens) - 1
    offsets = np.array([0, length]) if cu_seqlens is None else cu_seqlens
    cuts = cut_into_chunks(offsets, length, options.chunk_size)
    size = SEGMENT_SIZE if recompute else len(cuts.token)
    segments = make_segments(cuts, options.chunk_size, size, q.device, num_transition_columns)
    shape = (sequences, batch * heads, key, width)
    initial = None if initial_state is None else initial_state.reshape(-1, *shape[1:])
    arguments = [q, k, v, g, beta, A_log, dt_bias]
    if recompute:
        o, transition_output, finals = _Replayed.apply(
            segments, options, num_transition_columns, shape, crossing, *arguments, initial
        )
    else:
        terms = [term for part in segments for term in part.terms(part.parts(arguments), options)]
        *found, finals = _SavedScan.apply(segments, shape, num_transition_columns, crossing, initial, *terms)
        found = [part.to_tokens(x, batch) for part, x in zip(segments, found, strict=True)]
        o = torch.cat([x[..., : v.shape[-1]] for x in found], 1)
        transition_output = found[0][..., v.shape[-1] :] if num_transition_columns else None
        o = o if num_transition_columns else o.to(v.dtype)
    return o, transition_output, finals.view(-1, heads, key, width)


def _states(
    given: Tensor | None, shape: tuple[int, ...], like: Tensor, num_transition_columns: int
) -> dict[int, Tensor]:
    """Return N states [R, K, V] by number of the sequence: the given ones, and zeros for further sequences.

    Only the state of the first sequence has transition columns.
    """
    states = [] if given is None else list(given)
    zeros = like.new_zeros(shape[1:], dtype=torch.promote_types(like.dtype, torch.float32))
    states += [zeros] * (shape[0] - len(states))
    return {
        number: state[..., : shape[-1] - num_transition_columns] if number else state
        for number, state in enumerate(states)
    }


def _stacked(states: dict[int, Tensor], count: int) -> Tensor:
    """Stack the first states, padded with zeros to the width of the first state."""
    width = states[0].shape[-1]
    return torch.stack([F.pad(states[number], (0, width - states[number].shape[-1])) for number in range(count)])


_TERMS = len(ChunkTerms._fields)


class _SavedScan(torch.autograd.Function):
    """The scan without recomputation: it saves terms and states, and autograd saves the inputs of the terms."""

    @staticmethod
    def forward(ctx, segments, shape, num_transition_columns, crossing, initial, *terms):
        each = [ChunkTerms(*terms[place : place + _TERMS]) for place in range(0, len(terms), _TERMS)]
        states = _states(initial, shape, each[0].u, num_transition_columns)
        scans = [scan_chunks(own, part.owners, states) for own, part in zip(each, segments, strict=True)]
        if crossing is not None:
            crossing.begin(_stacked(states, shape[0]))
        ctx.save_for_backward(*terms, *(x for scanned in scans for x in scanned))
        ctx.segments = segments
        ctx.shape = shape
        ctx.num_transition_columns = num_transition_columns
        ctx.given = 0 if initial is None else len(initial)
        ctx.set_materialize_grads(False)
        found = [outputs(own, scanned) for own, scanned in zip(each, scans, strict=True)]
        return *found, _stacked(states, shape[0])

    @staticmethod
    @differentiable_once
    def backward(ctx, *d_results):  # pyright: ignore[reportIncompatibleMethodOverride]
        *d_outputs, d_finals = d_results
        count = _TERMS * len(ctx.segments)
        saved = ctx.saved_tensors  # read once, because hooks of torch.utils.checkpoint unpack once
        terms = saved[:count]
        scans = saved[count:]
        d_states = _states(d_finals, ctx.shape, terms[0], ctx.num_transition_columns)
        gradients = []
        for place, part in reversed(list(enumerate(ctx.segments))):
            own = ChunkTerms(*terms[_TERMS * place :][:_TERMS])
            scanned = Scanned(*scans[2 * place :][:2])
            d_output = torch.zeros_like(scanned.errors) if d_outputs[place] is None else d_outputs[place]
            gradients[:0] = scan_chunks_backward(own, part.owners, scanned, d_output, d_states)
        d_initial = _stacked(d_states, ctx.given) if ctx.needs_input_grad[4] else None
        return None, None, None, None, d_initial, *gradients


_ARGUMENTS = 7
"""Number of q, k, v, g, beta, A_log and dt_bias."""


class _Replayed(torch.autograd.Function):
    """The rule with recomputation: it saves the arguments and one state per segment."""

    @staticmethod
    def forward(ctx, segments, options, num_transition_columns, shape, crossing, *inputs):
        *arguments, initial = inputs
        v = arguments[2]
        states = _states(initial, shape, arguments[2], num_transition_columns)
        begins = []
        o = v.new_empty(v.shape, dtype=states[0].dtype if num_transition_columns else v.dtype)
        transition_output = None
        if num_transition_columns:
            tokens = max((segment.tokens[1] for segment in segments if segment.num_transition_columns), default=0)
            transition_output = o.new_empty(*v.shape[:1], tokens, v.shape[2], num_transition_columns)
        for segment in segments:
            begins.append(states[segment.owners[0]])
            terms = segment.terms(segment.parts(arguments), options)
            scanned = scan_chunks(terms, segment.owners, states)
            if crossing is not None and segment is segments[-1]:
                crossing.begin(_stacked(states, shape[0]))
                crossing.meanwhile = partial(_prepare, ctx)
            found = segment.to_tokens(outputs(terms, scanned), len(v))
            segment.own(o).copy_(found[..., : v.shape[-1]])
            if transition_output is not None and segment.num_transition_columns:
                segment.own(transition_output).copy_(found[..., v.shape[-1] :])
        widths = dict.fromkeys(state.shape[-1] for state in begins[1:])  # with and without transition columns
        stacks = [torch.stack([state for state in begins[1:] if state.shape[-1] == width]) for width in widths]
        ctx.save_for_backward(*inputs, *stacks)
        ctx.segments = segments
        ctx.options = options
        ctx.num_transition_columns = num_transition_columns
        ctx.shape = shape
        ctx.prepared = None
        ctx.set_materialize_grads(False)
        return o, transition_output, _stacked(states, shape[0])

    @staticmethod
    @differentiable_once
    def backward(ctx, d_output, d_transition_output, d_finals):  # pyright: ignore[reportIncompatibleMethodOverride]
        saved, last = ctx.prepared or (ctx.saved_tensors, None)
        ctx.prepared = None
        arguments, initial, begins = _unpack_saved(saved)
        wanted = ctx.needs_input_grad[5:-1]
        v = arguments[2]
        gradients = [_sums_like(arguments, place) if want else None for place, want in enumerate(wanted)]
        d_states = _states(d_finals, ctx.shape, v, ctx.num_transition_columns)
        for number, segment in reversed(list(enumerate(ctx.segments))):
            replay = last or _replay_segment(ctx, arguments, initial, begins, number)
            last = None
            own = torch.zeros_like(replay.scanned.errors)
            for d, columns in ((d_output, slice(v.shape[-1])), (d_transition_output, slice(v.shape[-1], None))):
                if d is not None and (d is d_output or segment.num_transition_columns):
                    own[..., columns] = segment.to_chunks(segment.own(d).to(own.dtype))
            d_terms = scan_chunks_backward(replay.terms, segment.owners, replay.scanned, own, d_states)
            _add_gradients(replay.connected, d_terms, replay.leaves, segment.parts(gradients))
        d_initial = _stacked(d_states, len(initial)) if ctx.needs_input_grad[-1] else None
        gradients = [None if d is None else d.to(x.dtype) for x, d in zip(arguments, gradients, strict=True)]
        return None, None, None, None, None, *gradients, d_initial


def _unpack_saved(saved: Sequence[Any]) -> tuple[Sequence[Any], Any, list[Tensor]]:
    """Return the arguments, the initial states, and the states before all segments but the first."""
    stacks = saved[_ARGUMENTS + 1 :]
    return saved[:_ARGUMENTS], saved[_ARGUMENTS], [state for stack in stacks for state in stack]


class _Replay(NamedTuple):
    """A segment that backward has recomputed."""

    leaves: list[Any]
    """Arguments of the segment."""
    connected: ChunkTerms
    """Terms, connected to the leaves in the autograd graph."""
    terms: ChunkTerms
    """Detached terms."""
    scanned: Scanned


def _replay_segment(
    ctx: Any, arguments: Sequence[Any], initial: Tensor | None, begins: Sequence[Tensor], number: int
) -> _Replay:
    """Recompute a segment; begins holds the states before all segments but the first."""
    segment = ctx.segments[number]
    initials = _states(initial, ctx.shape, arguments[2], ctx.num_transition_columns)
    leaves = [
        None if x is None else x.detach().requires_grad_(want)
        for x, want in zip(segment.parts(arguments), ctx.needs_input_grad[5:-1], strict=True)
    ]
    with torch.enable_grad():
        connected = segment.terms(leaves, ctx.options)
    terms = ChunkTerms(*(x.detach() for x in connected))
    states = {owner: initials[owner] for owner in segment.owners}
    if number:
        states[segment.owners[0]] = begins[number - 1]
    return _Replay(leaves, connected, terms, scan_chunks(terms, segment.owners, states))


def _prepare(ctx: Any) -> None:
    """Replay the last segment, which backward needs first."""
    saved = ctx.saved_tensors
    arguments, initial, begins = _unpack_saved(saved)
    ctx.prepared = saved, _replay_segment(ctx, arguments, initial, begins, len(ctx.segments) - 1)


def _sums_like(arguments: Sequence[Any], place: int) -> Tensor:
    """Return zeros to which segments add the gradient of an argument; gate parameters sum in at least float32."""
    x = arguments[place]
    return torch.zeros_like(x, dtype=x.dtype if place < 5 else torch.promote_types(x.dtype, torch.float32))


def _add_gradients(terms: ChunkTerms, d_terms: ChunkTerms, leaves: list, gradients: list) -> None:
    """Add the gradients of one segment, computed from those of its terms, to the required gradients."""
    pairs = [(x, into) for x, into in zip(leaves, gradients, strict=True) if into is not None]
    used = [(term, d) for term, d in zip(terms, d_terms, strict=True) if term.requires_grad]
    if pairs and used:
        found = torch.autograd.grad([x for x, _ in used], [x for x, _ in pairs], [d for _, d in used])
        for (_, into), gradient in zip(pairs, found, strict=True):
            into += gradient
