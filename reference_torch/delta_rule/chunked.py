"""The delta rule over whole sequences, chunk by chunk, and its backward by segments.

Forward keeps the arguments and one state a segment (plans.delta_rule.SAVED). Backward takes the segments from the last,
computes a segment's chunks and states again, and lets autograd have the part without states. So memory beside the
arguments is one segment's, whatever the length, and time grows with the length.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from plans.delta_rule import SEGMENT_SIZE, Chunking, DeltaRuleOptions, cut_into_chunks
from reference_torch.autograd import differentiable_once
from reference_torch.context_parallel import Crossing
from reference_torch.delta_rule.gates import gated
from reference_torch.delta_rule.intra import ChunkTerms, chunk_terms
from reference_torch.delta_rule.scan import Scanned, outputs, scan_chunks, scan_chunks_backward


@dataclass(frozen=True)
class Segment:
    """Chunks that are computed together.

    Args:
        tokens: of theirs, the first and the one after the last.
        owners: the sequence every chunk is of.
        chunk_size: tokens of a chunk.
        token: what lies in every slot, from the segment's first token; None where chunks hold the tokens as they come.
        filled: whether anything does.
        slot: where every token lies.
    """

    tokens: tuple[int, int]
    owners: list[int]
    chunk_size: int
    token: Tensor | None
    filled: Tensor | None
    slot: Tensor | None

    def own(self, x: Tensor) -> Tensor:
        """Its tokens [B, t, ...] of all [B, T, ...]."""
        return x[:, slice(*self.tokens)]

    def parts(self, arguments: Sequence[Any]) -> list[Any]:
        """Of q, k, v, g, beta its tokens, A_log and dt_bias whole; None of what is None."""
        return [None if x is None else self.own(x) if place < 5 else x for place, x in enumerate(arguments)]

    def to_chunks(self, x: Tensor) -> Tensor:
        """[B, t, H, D] as [n, B * H, chunk_size, D]; zeros where no token is."""
        if self.token is not None and self.filled is not None:
            x = torch.where(self.filled[:, None, None], x.index_select(1, self.token), 0)
        batch, _, heads, width = x.shape
        x = x.reshape(batch, -1, self.chunk_size, heads, width).permute(1, 0, 3, 2, 4)
        return x.reshape(len(x), batch * heads, self.chunk_size, width)

    def to_tokens(self, x: Tensor, batch: int) -> Tensor:
        """The inverse."""
        chunks, rows, size, width = x.shape
        x = x.view(chunks, batch, rows // batch, size, width).permute(1, 0, 3, 2, 4)
        x = x.reshape(batch, chunks * size, rows // batch, width)
        return x if self.slot is None else x.index_select(1, self.slot)

    def terms(self, arguments: Sequence[Any], options: DeltaRuleOptions, responses: int) -> ChunkTerms:
        """Of its chunks, from q, k, v, g, beta of its tokens, A_log and dt_bias; so many columns of values are 0."""
        q, k, v, g, beta, A_log, dt_bias = arguments
        v = F.pad(v, (0, responses)) if responses else v
        q, k, v, g, beta = (self.to_chunks(x) for x in gated(q, k, v, g, beta, A_log, dt_bias, options))
        return chunk_terms(q, k, v, g, beta)


def make_segments(cuts: Chunking, chunk_size: int, segment_size: int, device: torch.device) -> list[Segment]:
    """Segments of as many whole chunks as fit in segment_size, one at least."""
    segments, step = [], max(1, segment_size // chunk_size)
    for first in range(0, len(cuts.sequence), step):
        chunks = slice(first, first + step)
        slots = slice(first * chunk_size, (first + step) * chunk_size)
        start, stop = (int(x) for x in np.searchsorted(cuts.slot, [slots.start, slots.stop]))
        owners = cuts.sequence[chunks].tolist()
        filled = cuts.filled[slots]
        placed = [np.where(filled, cuts.token[slots] - start, 0), filled, cuts.slot[start:stop] - slots.start]
        tensors = [None if filled.all() else torch.from_numpy(x).to(device) for x in placed]
        segments.append(Segment((start, stop), owners, chunk_size, *tensors))
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
    responses: int = 0,
    crossing: Crossing | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs and final states; arguments as the public functions' (calls.py), checked.

    Args:
        initial_state: of the first sequences; those beyond begin with 0.
        responses: so many columns follow those of the values, in states and outputs, for values of 0: how the outputs
            change with what the initial state holds there. Outputs are then as wide as states are.
        crossing: told of final states before the last outputs are computed.
    """
    (batch, length, heads, width), key = v.shape, q.shape[-1]
    width += responses
    sequences = 1 if cu_seqlens is None else len(cu_seqlens) - 1
    offsets = np.array([0, length]) if cu_seqlens is None else cu_seqlens
    cuts = cut_into_chunks(offsets, length, options.chunk_size)
    size = SEGMENT_SIZE if recompute else len(cuts.token)
    segments = make_segments(cuts, options.chunk_size, size, q.device)
    shape = (sequences, batch * heads, key, width)
    initial = None if initial_state is None else initial_state.reshape(-1, *shape[1:])
    arguments = [q, k, v, g, beta, A_log, dt_bias]
    if recompute:
        o, finals = _Replayed.apply(segments, options, responses, shape, crossing, *arguments, initial)
    else:
        (segment,) = segments
        o, finals = _Kept.apply(segment.owners, shape, crossing, initial, *segment.terms(arguments, options, responses))
        o = segment.to_tokens(o, batch).to(o.dtype if responses else v.dtype)
    return o, finals.view(-1, heads, key, width)


def _states(given: Tensor | None, shape: tuple[int, ...], like: Tensor) -> dict[int, Tensor]:
    """N states [R, K, V], the first as given, the others zeros as wide as the state of such tokens."""
    states = [] if given is None else list(given)
    zeros = like.new_zeros(shape[1:], dtype=torch.promote_types(like.dtype, torch.float32))
    return dict(enumerate(states + [zeros] * (shape[0] - len(states))))


def _stacked(states: dict[int, Tensor], count: int) -> Tensor:
    """The first so many."""
    return torch.stack([states[number] for number in range(count)])


class _Kept(torch.autograd.Function):
    """The scan alone, which keeps its terms and states; autograd keeps what the terms were made of."""

    @staticmethod
    def forward(ctx, owners, shape, crossing, initial, *terms):
        terms = ChunkTerms(*terms)
        states = _states(initial, shape, terms.u)
        scanned = scan_chunks(terms, owners, states)
        if crossing is not None:
            crossing.begin(_stacked(states, shape[0]))
        ctx.save_for_backward(*terms, *scanned)
        ctx.owners, ctx.shape, ctx.given = owners, shape, 0 if initial is None else len(initial)
        ctx.set_materialize_grads(False)
        return outputs(terms, scanned), _stacked(states, shape[0])

    @staticmethod
    @differentiable_once
    def backward(ctx, d_output, d_finals):  # pyright: ignore[reportIncompatibleMethodOverride]
        *terms, states, errors = ctx.saved_tensors
        d_output = torch.zeros_like(errors) if d_output is None else d_output
        d_states = _states(d_finals, ctx.shape, errors)
        gradients = scan_chunks_backward(ChunkTerms(*terms), ctx.owners, Scanned(states, errors), d_output, d_states)
        return None, None, None, _stacked(d_states, ctx.given) if ctx.needs_input_grad[3] else None, *gradients


class _Replayed(torch.autograd.Function):
    """All of it; keeps the arguments and a state a segment."""

    @staticmethod
    def forward(ctx, segments, options, responses, shape, crossing, *inputs):
        *arguments, initial = inputs
        v, states, kept = arguments[2], _states(initial, shape, arguments[2]), []
        o = v.new_empty(*v.shape[:-1], shape[-1], dtype=states[0].dtype if responses else v.dtype)
        for segment in segments:
            kept.append(states[segment.owners[0]])
            terms = segment.terms(segment.parts(arguments), options, responses)
            scanned = scan_chunks(terms, segment.owners, states)
            if crossing is not None and segment is segments[-1]:
                crossing.begin(_stacked(states, shape[0]))
                crossing.meanwhile = partial(_prepare, ctx)
            segment.own(o).copy_(segment.to_tokens(outputs(terms, scanned), len(v)))
        ctx.save_for_backward(*inputs, torch.stack(kept[1:]) if kept[1:] else None)
        ctx.segments, ctx.options, ctx.responses, ctx.shape = segments, options, responses, shape
        ctx.prepared = None
        ctx.set_materialize_grads(False)
        return o, _stacked(states, shape[0])

    @staticmethod
    @differentiable_once
    def backward(ctx, d_output, d_finals):  # pyright: ignore[reportIncompatibleMethodOverride]
        (*arguments, initial, kept), last = ctx.prepared or (ctx.saved_tensors, None)
        ctx.prepared = None
        wanted, v = ctx.needs_input_grad[5:-1], arguments[2]
        gradients = [_sums_like(arguments, place) if want else None for place, want in enumerate(wanted)]
        d_states = _states(d_finals, ctx.shape, v)
        for number, segment in reversed(list(enumerate(ctx.segments))):
            again, last = last or _compute_again(ctx, arguments, initial, kept, number), None
            own = torch.zeros_like(again.scanned.errors)
            if d_output is not None:
                own = segment.to_chunks(segment.own(d_output).to(own.dtype))
            d_terms = scan_chunks_backward(again.terms, segment.owners, again.scanned, own, d_states)
            _add_gradients(again.connected, d_terms, again.leaves, segment.parts(gradients))
        d_initial = _stacked(d_states, len(initial)) if ctx.needs_input_grad[-1] else None
        gradients = [None if d is None else d.to(x.dtype) for x, d in zip(arguments, gradients, strict=True)]
        return None, None, None, None, None, *gradients, d_initial


class _Again(NamedTuple):
    """A segment computed once more."""

    leaves: list[Any]
    """Its part of the arguments."""
    connected: ChunkTerms
    """Of the leaves, for autograd."""
    terms: ChunkTerms
    scanned: Scanned


def _compute_again(ctx: Any, arguments: list, initial: Tensor | None, kept: Tensor | None, number: int) -> _Again:
    segment, begun = ctx.segments[number], _states(initial, ctx.shape, arguments[2])
    leaves = [
        None if x is None else x.detach().requires_grad_(want)
        for x, want in zip(segment.parts(arguments), ctx.needs_input_grad[5:-1], strict=True)
    ]
    with torch.enable_grad():
        connected = segment.terms(leaves, ctx.options, ctx.responses)
    terms, states = ChunkTerms(*(x.detach() for x in connected)), {own: begun[own] for own in segment.owners}
    if number and kept is not None:
        states[segment.owners[0]] = kept[number - 1]
    return _Again(leaves, connected, terms, scan_chunks(terms, segment.owners, states))


def _prepare(ctx: Any) -> None:
    """Compute the last segment again, with which backward begins."""
    *arguments, initial, kept = saved = ctx.saved_tensors
    ctx.prepared = saved, _compute_again(ctx, arguments, initial, kept, len(ctx.segments) - 1)


def _sums_like(arguments: Sequence[Any], place: int) -> Tensor:
    """Zeros to add an argument's gradient to: a token's gets one segment's, the gate's parameters get all of them."""
    x = arguments[place]
    return torch.zeros_like(x, dtype=x.dtype if place < 5 else torch.promote_types(x.dtype, torch.float32))


def _add_gradients(terms: ChunkTerms, d_terms: ChunkTerms, leaves: list, gradients: list) -> None:
    """Add to each gradient that is wanted what the terms of one segment give it."""
    pairs = [(x, into) for x, into in zip(leaves, gradients, strict=True) if into is not None]
    used = [(term, d) for term, d in zip(terms, d_terms, strict=True) if term.requires_grad]
    if pairs and used:
        found = torch.autograd.grad([x for x, _ in used], [x for x, _ in pairs], [d for _, d in used])
        for (_, into), gradient in zip(pairs, found, strict=True):
            into += gradient
