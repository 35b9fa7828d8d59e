"""The delta rule over whole sequences, chunk by chunk, and its backward by segments.

Forward keeps the arguments and one state a segment (diptych.plans.model.delta_rule.SAVED). Backward takes the
segments from the last, computes a segment's chunks and states again, and lets autograd have the part without states.
So memory beside the arguments is one segment's, whatever the length, and time grows with the length.
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
    """Chunks that are computed together.

    Args:
        tokens: of theirs, the first and the one after the last.
        owners: the sequence every chunk is of.
        chunk_size: tokens of a chunk.
        token: what lies in every slot, from the segment's first token; None where chunks hold the tokens as they come.
        filled: whether anything does.
        slot: where every token lies.
        num_transition_columns: so many columns of values of 0 follow the values; see chunked.
    """

    tokens: tuple[int, int]
    owners: list[int]
    chunk_size: int
    token: Tensor | None
    filled: Tensor | None
    slot: Tensor | None
    num_transition_columns: int = 0

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

    def terms(self, arguments: Sequence[Any], options: DeltaRuleOptions) -> ChunkTerms:
        """Of its chunks, from q, k, v, g, beta of its tokens, A_log and dt_bias."""
        q, k, v, g, beta, A_log, dt_bias = arguments
        v = F.pad(v, (0, self.num_transition_columns)) if self.num_transition_columns else v
        q, k, v, g, beta = (self.to_chunks(x) for x in gated(q, k, v, g, beta, A_log, dt_bias, options))
        return chunk_terms(q, k, v, g, beta)


def make_segments(
    cuts: Chunking, chunk_size: int, segment_size: int, device: torch.device, num_transition_columns: int = 0
) -> list[Segment]:
    """Segments of as many whole chunks as fit in segment_size, one at least.

    With num_transition_columns the first sequence has segments of its own, which alone have those columns.
    """
    segments, step, count = [], max(1, segment_size // chunk_size), len(cuts.sequence)
    own = int(np.searchsorted(cuts.sequence, 0, side="right")) if num_transition_columns else 0
    for first in [*range(0, own, step), *range(own, count, step)]:
        end = min(first + step, own if first < own else count)
        chunks, slots = slice(first, end), slice(first * chunk_size, end * chunk_size)
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
    """Outputs, their num_transition_columns, and final states; arguments as the public functions' (calls.py), checked.

    Args:
        initial_state: of the first sequences; those beyond begin with 0.
        num_transition_columns: in the first sequence so many columns follow those of the values, for values of 0:
            how outputs change with what the initial state holds there. Initial and final states of all sequences are
            as wide, 0 beyond the first, and outputs are of their type. None come back for 0.
        crossing: told of final states before the last outputs are computed.
    """
    (batch, length, heads, width), key = v.shape, q.shape[-1]
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
        *found, finals = _Kept.apply(segments, shape, num_transition_columns, crossing, initial, *terms)
        found = [part.to_tokens(x, batch) for part, x in zip(segments, found, strict=True)]
        o = torch.cat([x[..., : v.shape[-1]] for x in found], 1)
        transition_output = found[0][..., v.shape[-1] :] if num_transition_columns else None
        o = o if num_transition_columns else o.to(v.dtype)
    return o, transition_output, finals.view(-1, heads, key, width)


def _states(
    given: Tensor | None, shape: tuple[int, ...], like: Tensor, num_transition_columns: int
) -> dict[int, Tensor]:
    """N states [R, K, V], the first as given, the others zeros as wide as the state of such tokens.

    Of those beyond the first sequence the columns of num_transition_columns are left out.
    """
    states = [] if given is None else list(given)
    zeros = like.new_zeros(shape[1:], dtype=torch.promote_types(like.dtype, torch.float32))
    states += [zeros] * (shape[0] - len(states))
    return {
        number: state[..., : shape[-1] - num_transition_columns] if number else state
        for number, state in enumerate(states)
    }


def _stacked(states: dict[int, Tensor], count: int) -> Tensor:
    """The first so many, all as wide as the first."""
    width = states[0].shape[-1]
    return torch.stack([F.pad(states[number], (0, width - states[number].shape[-1])) for number in range(count)])


_TERMS = len(ChunkTerms._fields)


class _Kept(torch.autograd.Function):
    """The scan alone, which keeps its terms and states; autograd keeps what the terms were made of."""

    @staticmethod
    def forward(ctx, segments, shape, num_transition_columns, crossing, initial, *terms):
        each = [ChunkTerms(*terms[place : place + _TERMS]) for place in range(0, len(terms), _TERMS)]
        states = _states(initial, shape, each[0].u, num_transition_columns)
        scans = [scan_chunks(own, part.owners, states) for own, part in zip(each, segments, strict=True)]
        if crossing is not None:
            crossing.begin(_stacked(states, shape[0]))
        ctx.save_for_backward(*terms, *(x for scanned in scans for x in scanned))
        ctx.segments, ctx.shape, ctx.num_transition_columns = segments, shape, num_transition_columns
        ctx.given = 0 if initial is None else len(initial)
        ctx.set_materialize_grads(False)
        found = [outputs(own, scanned) for own, scanned in zip(each, scans, strict=True)]
        return *found, _stacked(states, shape[0])

    @staticmethod
    @differentiable_once
    def backward(ctx, *d_results):  # pyright: ignore[reportIncompatibleMethodOverride]
        (*d_outputs, d_finals), count = d_results, _TERMS * len(ctx.segments)
        saved = ctx.saved_tensors  # asked for once: hooks of torch.utils.checkpoint give them once
        terms, scans = saved[:count], saved[count:]
        d_states, gradients = _states(d_finals, ctx.shape, terms[0], ctx.num_transition_columns), []
        for place, part in reversed(list(enumerate(ctx.segments))):
            own, scanned = ChunkTerms(*terms[_TERMS * place :][:_TERMS]), Scanned(*scans[2 * place :][:2])
            d_output = torch.zeros_like(scanned.errors) if d_outputs[place] is None else d_outputs[place]
            gradients[:0] = scan_chunks_backward(own, part.owners, scanned, d_output, d_states)
        d_initial = _stacked(d_states, ctx.given) if ctx.needs_input_grad[4] else None
        return None, None, None, None, d_initial, *gradients


_ARGUMENTS = 7
"""q, k, v, g, beta, A_log and dt_bias."""


class _Replayed(torch.autograd.Function):
    """All of it; keeps the arguments and a state a segment."""

    @staticmethod
    def forward(ctx, segments, options, num_transition_columns, shape, crossing, *inputs):
        *arguments, initial = inputs
        v, states, kept = arguments[2], _states(initial, shape, arguments[2], num_transition_columns), []
        o, transition_output = v.new_empty(v.shape, dtype=states[0].dtype if num_transition_columns else v.dtype), None
        if num_transition_columns:
            tokens = max((segment.tokens[1] for segment in segments if segment.num_transition_columns), default=0)
            transition_output = o.new_empty(*v.shape[:1], tokens, v.shape[2], num_transition_columns)
        for segment in segments:
            kept.append(states[segment.owners[0]])
            terms = segment.terms(segment.parts(arguments), options)
            scanned = scan_chunks(terms, segment.owners, states)
            if crossing is not None and segment is segments[-1]:
                crossing.begin(_stacked(states, shape[0]))
                crossing.meanwhile = partial(_prepare, ctx)
            found = segment.to_tokens(outputs(terms, scanned), len(v))
            segment.own(o).copy_(found[..., : v.shape[-1]])
            if transition_output is not None and segment.num_transition_columns:
                segment.own(transition_output).copy_(found[..., v.shape[-1] :])
        widths = dict.fromkeys(state.shape[-1] for state in kept[1:])  # of the first sequence, and of the others
        stacks = [torch.stack([state for state in kept[1:] if state.shape[-1] == width]) for width in widths]
        ctx.save_for_backward(*inputs, *stacks)
        ctx.segments, ctx.options, ctx.num_transition_columns, ctx.shape = (
            segments,
            options,
            num_transition_columns,
            shape,
        )
        ctx.prepared = None
        ctx.set_materialize_grads(False)
        return o, transition_output, _stacked(states, shape[0])

    @staticmethod
    @differentiable_once
    def backward(ctx, d_output, d_response, d_finals):  # pyright: ignore[reportIncompatibleMethodOverride]
        saved, last = ctx.prepared or (ctx.saved_tensors, None)
        ctx.prepared = None
        arguments, initial, kept = _taken_apart(saved)
        wanted, v = ctx.needs_input_grad[5:-1], arguments[2]
        gradients = [_sums_like(arguments, place) if want else None for place, want in enumerate(wanted)]
        d_states = _states(d_finals, ctx.shape, v, ctx.num_transition_columns)
        for number, segment in reversed(list(enumerate(ctx.segments))):
            again, last = last or _compute_again(ctx, arguments, initial, kept, number), None
            own = torch.zeros_like(again.scanned.errors)
            for d, columns in ((d_output, slice(v.shape[-1])), (d_response, slice(v.shape[-1], None))):
                if d is not None and (d is d_output or segment.num_transition_columns):
                    own[..., columns] = segment.to_chunks(segment.own(d).to(own.dtype))
            d_terms = scan_chunks_backward(again.terms, segment.owners, again.scanned, own, d_states)
            _add_gradients(again.connected, d_terms, again.leaves, segment.parts(gradients))
        d_initial = _stacked(d_states, len(initial)) if ctx.needs_input_grad[-1] else None
        gradients = [None if d is None else d.to(x.dtype) for x, d in zip(arguments, gradients, strict=True)]
        return None, None, None, None, None, *gradients, d_initial


def _taken_apart(saved: Sequence[Any]) -> tuple[Sequence[Any], Any, list[Tensor]]:
    """The arguments, the initial states, and the states that segments but the first begin with."""
    stacks = saved[_ARGUMENTS + 1 :]
    return saved[:_ARGUMENTS], saved[_ARGUMENTS], [state for stack in stacks for state in stack]


class _Again(NamedTuple):
    """A segment computed once more."""

    leaves: list[Any]
    """Its part of the arguments."""
    connected: ChunkTerms
    """Of the leaves, for autograd."""
    terms: ChunkTerms
    scanned: Scanned


def _compute_again(
    ctx: Any, arguments: Sequence[Any], initial: Tensor | None, kept: Sequence[Tensor], number: int
) -> _Again:
    segment, begun = ctx.segments[number], _states(initial, ctx.shape, arguments[2], ctx.num_transition_columns)
    leaves = [
        None if x is None else x.detach().requires_grad_(want)
        for x, want in zip(segment.parts(arguments), ctx.needs_input_grad[5:-1], strict=True)
    ]
    with torch.enable_grad():
        connected = segment.terms(leaves, ctx.options)
    terms, states = ChunkTerms(*(x.detach() for x in connected)), {own: begun[own] for own in segment.owners}
    if number:
        states[segment.owners[0]] = kept[number - 1]
    return _Again(leaves, connected, terms, scan_chunks(terms, segment.owners, states))


def _prepare(ctx: Any) -> None:
    """Compute the last segment again, with which backward begins."""
    saved = ctx.saved_tensors
    arguments, initial, kept = _taken_apart(saved)
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
