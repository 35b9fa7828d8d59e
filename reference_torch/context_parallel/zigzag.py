"""Load-balanced softmax attention: queries are sent to the ranks that compute them, and outputs are sent back."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diptych.plans.context.sequences import FLACPContext
from diptych.plans.context.zigzag import computed_halves, half_begin, half_lengths, half_moves
from reference_torch.autograd import differentiable_once
from reference_torch.context_parallel.exchange import receive_part, send_part
from reference_torch.groups import wait_for
from reference_torch.ops import masked_attention


def zigzag_attention(
    q: Float[Tensor, "b t h d"],
    k: Float[Tensor, "b s g d"],
    v: Float[Tensor, "b s g e"],
    context: FLACPContext,
    fused: bool = False,
) -> Float[Tensor, "b t h e"]:
    """Return the causal attention of this rank's queries; see diptych.plans.context.zigzag for the ranks that compute.

    All ranks have to call this function.

    Args:
        q: queries of the part. [1, T, H, d]
        k: keys of all ranks. [1, R T, G, d]
        v: values of all ranks. [1, R T, G, e]
        context: context of the rank.
        fused: see ops.masked_attention.

    Returns:
        [1, T, H, e]
    """
    length = q.shape[1]
    halves = list(_MoveHalves.apply(*q.split(half_lengths(length), dim=1), context, False))
    for half in computed_halves(context.rank, context.size):
        end = half_begin(half + 1, length)
        allowed = _allowed(context.all_cu_seqlens.to(q.device), half_begin(half, length), end)
        halves[half % 2] = masked_attention(halves[half % 2], k[:, :end], v[:, :end], allowed, fused)
    return torch.cat(_MoveHalves.apply(*halves, context, True), dim=1)


def _allowed(cu_seqlens: Int[Tensor, " n"], begin: int, end: int) -> Tensor:
    """Return the mask of queries begin .. end - 1 over keys 0 .. end - 1: causal, and within each sequence."""
    keys = torch.arange(end, device=cu_seqlens.device)
    queries = keys[begin:, None]
    first = cu_seqlens[torch.searchsorted(cu_seqlens, queries, right=True) - 1]
    return (keys >= first) & (keys <= queries)


class _MoveHalves(torch.autograd.Function):
    """The halves of all parts, moved to the ranks that compute them, or back; backward moves gradients in reverse."""

    @staticmethod
    def forward(ctx, first, second, context, back):
        ctx.context = context
        ctx.back = back
        return _move((first, second), context, back)

    @staticmethod
    @differentiable_once
    def backward(ctx, *gradients):  # pyright: ignore[reportIncompatibleMethodOverride]
        return *_move(gradients, ctx.context, not ctx.back), None, None


def _move(halves: tuple[Tensor, ...], context: FLACPContext, back: bool) -> tuple[Tensor, ...]:
    """Return the halves that this rank receives; a half that stays is copied, so that q itself is not saved."""
    rank = context.rank
    received = []
    works = []
    sent = []
    for half, own in enumerate(halves):
        moves = half_moves(context.size, half, back)
        target = dict(moves)[rank]
        source = {receiver: sender for sender, receiver in moves}[rank]
        if target == rank or not own.numel():
            received.append(own.clone())
            continue
        sent.append(own.contiguous())
        received.append(torch.empty_like(sent[-1]))
        works.append(send_part(sent[-1], target, context, reverse=False))
        works.append(receive_part(received[-1], source, context, reverse=False))
    for work in works:
        wait_for(work, "the queries, outputs or gradients of another rank's half-part", context.timeout)
    return tuple(received)
