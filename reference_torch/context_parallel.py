"""The delta rule over sequences split over ranks: only states travel.

A rank runs its part of the sequences from a state of 0, and beside it what an initial state would add: to the outputs
R S, to the last state M S. Both come out of one scan, as further columns of values that are 0 and of a state that
begins as the identity. What a rank passes on is then M S + H; the ranks' maps compose, and once a rank knows the S it
begins with, one product completes its outputs. Backward, automatic differentiation asks for the gradient of S, which
is the same exchange from the other end, of M^T: see ``_Exchanged``.

Twin of ``jax_impl/context_parallel.py``. What a rank holds is decided in ``plans/context.py``.
"""

from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed import ProcessGroup

from plans.context import FLACPContext, check_sequences, halo_sizes, local_sequences, scan_steps
from reference_torch.autograd import differentiable_once
from reference_torch.groups import sum_over, wait_for
from reference_torch.ops import masked_attention, short_convolution

TIMEOUT = 600.0
"""Seconds a rank waits for another."""


def build_cp_context(
    cu_seqlens: Int[Tensor, " n"],
    group: ProcessGroup | None,
    conv1d_kernel_size: int | None = None,
    cu_seqlens_cpu: Int[Tensor, " n"] | None = None,
    *,
    cp_exchange: str = "all_gather",
    cp_wire_dtype: str | None = None,
) -> FLACPContext:
    """What this rank holds of sequences split over the ranks of a group.

    Args:
        cu_seqlens: where all sequences begin, and the end of the last; the same on every rank. [N + 1] int32
        group: the ranks, in the order of their parts; None: this process holds all.
        conv1d_kernel_size: taps of a short convolution that will run on the part.
        cu_seqlens_cpu: the same on the host; without it a device is waited for.
        cp_exchange: how states travel, one of plans.context.EXCHANGES.
        cp_wire_dtype: in which type; None: their own. One of plans.context.WIRE_DTYPES.

    Raises:
        ValueError: naming the argument, what was expected, what came. Nothing is sent.
    """
    known = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
    offsets, dtype = known.detach().cpu().numpy(), str(known.dtype).removeprefix("torch.")
    size, rank = (1, 0) if group is None else (group.size(), dist.get_rank(group))
    check_sequences(offsets, dtype, size, conv1d_kernel_size, cp_exchange, cp_wire_dtype)
    part = int(offsets[-1]) // size
    local = local_sequences(offsets, rank, part)
    count = int(local.num_sequences)
    own = local.cu_seqlens[: count + 1]
    return FLACPContext(
        group=group,
        cu_seqlens=torch.from_numpy(own).to(cu_seqlens.device, non_blocking=True),
        cu_seqlens_cpu=own,
        is_first_rank=int(local.pre_num_ranks) == 0,
        is_last_rank=int(local.post_num_ranks) == 0,
        pre_num_ranks=int(local.pre_num_ranks),
        post_num_ranks=int(local.post_num_ranks),
        num_sequences=count,
        first_sequence=int(local.first_sequence),
        rank=rank,
        size=size,
        part_length=part,
        pre_num_tokens=int(local.pre_num_tokens),
        conv1d_kernel_size=conv1d_kernel_size,
        pre_num_conv_tokens=conv1d_kernel_size and min(conv1d_kernel_size - 1, int(local.pre_num_tokens)),
        cp_exchange=cp_exchange,
        cp_wire_dtype=cp_wire_dtype,
    )


def exchange_states(
    transition: Float[Tensor, "h k k"], state: Float[Tensor, "h k v"], context: FLACPContext, reverse: bool = False
) -> Float[Tensor, "h k v"]:
    """The state this rank begins with, of S -> M S + H over the ranks before it; all ranks have to call it.

    Args:
        transition: M; 0 where the state passed on does not depend on the one begun with. [HV, K, K]
        state: H. [HV, K, V]
        context: of the ranks.
        reverse: over the ranks after it, from the last.

    Returns:
        S, 0 on the first rank.
    """
    place = context.size - 1 - context.rank if reverse else context.rank
    if context.size == 1:
        return torch.zeros_like(state)
    own = (transition.contiguous(), state.contiguous())
    if context.cp_exchange == "all_gather":
        return _gathered(*own, context, place, reverse)
    if context.cp_exchange == "ring":
        return _passed_on(*own, context, place, reverse)
    return _scanned(*own, context, place, reverse)


def _gathered(transition: Tensor, state: Tensor, context: FLACPContext, place: int, reverse: bool) -> Tensor:
    packed = _on_wire(torch.cat([state, transition], dim=-1), context)
    all_ = [torch.empty_like(packed) for _ in range(context.size)]
    wait_for(dist.all_gather(all_, packed, group=context.group, async_op=True), "the states of all ranks", TIMEOUT)
    found, width = torch.zeros_like(state), state.shape[-1]
    for before in all_[: -place - 1 : -1] if reverse else all_[:place]:
        before = before.to(state.dtype)
        found = torch.baddbmm(before[..., :width], before[..., width:], found)
    return found


def _passed_on(transition: Tensor, state: Tensor, context: FLACPContext, place: int, reverse: bool) -> Tensor:
    came = _on_wire(torch.zeros_like(state), context)
    if place > 0:
        _wait(_receive(came, place - 1, context, reverse))
    found = came.to(state.dtype)
    if place < context.size - 1:
        _wait(_send(_on_wire(torch.baddbmm(state, transition, found), context), place + 1, context, reverse))
    return found


def _scanned(transition: Tensor, state: Tensor, context: FLACPContext, place: int, reverse: bool) -> Tensor:
    for number, step in enumerate(scan_steps(context.size)):
        sends = step.first_sender <= place < context.size - step.distance
        receives = place >= step.distance + step.first_sender
        parts = [state] if step.is_last else [state, transition]
        parts = [_on_wire(part, context) for part in parts]
        came = [torch.zeros_like(part) for part in parts]
        works = [_send(part, place + step.distance, context, reverse) for part in parts if sends]
        works += [_receive(part, place - step.distance, context, reverse) for part in came if receives]
        for work in works:
            _wait(work)
        came = [part.to(state.dtype) for part in came]
        if number == 0:  # everyone's own map goes one rank on; the first has none
            state, transition = came[0], came[0] if step.is_last else came[1]
        elif receives:
            state = torch.baddbmm(state, transition, came[0])
            transition = transition if step.is_last else torch.bmm(transition, came[1])
    return state


def _on_wire(part: Tensor, context: FLACPContext) -> Tensor:
    """As it is sent."""
    return part if context.cp_wire_dtype is None else part.to(getattr(torch, context.cp_wire_dtype))


def _rank_at(place: int, context: FLACPContext, reverse: bool) -> int:
    """The global rank so far from the first, or from the last."""
    return dist.get_global_rank(context.group, context.size - 1 - place if reverse else place)


def _send(part: Tensor, place: int, context: FLACPContext, reverse: bool) -> dist.Work:
    return cast("dist.Work", dist.isend(part, _rank_at(place, context, reverse), group=context.group))


def _receive(part: Tensor, place: int, context: FLACPContext, reverse: bool) -> dist.Work:
    return cast("dist.Work", dist.irecv(part, _rank_at(place, context, reverse), group=context.group))


def _wait(work: dist.Work) -> None:
    wait_for(work, "a state of another rank", TIMEOUT)


class _Exchanged(torch.autograd.Function):
    """exchange_states. Of S_r = M S + H over the ranks before r, the gradient of rank r's H is the same of the M^T and
    of the gradients of S over the ranks after it, and that of its M is this times S^T. The anchor gets none: it has
    backward come here on ranks that pass nothing on, too."""

    @staticmethod
    def forward(ctx, transition, state, anchor, context):
        found = exchange_states(transition, state, context)
        ctx.save_for_backward(transition, found)
        ctx.context = context
        return found

    @staticmethod
    @differentiable_once
    def backward(ctx, d_found):  # pyright: ignore[reportIncompatibleMethodOverride]
        transition, found = ctx.saved_tensors
        passed_back = exchange_states(transition.mT, d_found, ctx.context, reverse=True)
        return passed_back @ found.mT, passed_back, None, None


class _Attached(torch.autograd.Function):
    """x itself, and in backward a gradient of 0 for y: every rank takes part in the exchange of gradients."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.shape, ctx.dtype = y.shape, y.dtype
        return x.view_as(x)

    @staticmethod
    @differentiable_once
    def backward(ctx, d_x):  # pyright: ignore[reportIncompatibleMethodOverride]
        return d_x, d_x.new_zeros(ctx.shape, dtype=ctx.dtype)


def compress_h0(h0: Float[Tensor, "n h k v"] | None, context: FLACPContext) -> Float[Tensor, "m h k v"] | None:
    """Of the states a rank's sequences begin with the first, the only one that can come from another rank. [1, ...]"""
    return h0 if h0 is None or context.num_sequences == 1 else h0[:1].clone()


def expand_h0(h0: Float[Tensor, "m h k v"] | None, context: FLACPContext) -> Float[Tensor, "n h k v"] | None:
    """The inverse of compress_h0, the other sequences beginning with 0. [n, ...]"""
    if h0 is None or context.num_sequences == 1:
        return h0
    return torch.cat([h0, h0.new_zeros(context.num_sequences - 1, *h0.shape[1:])])


def with_responses(initial_state: Tensor | None, context: FLACPContext, like: Tensor) -> Tensor | None:
    """What the rank's scan begins with: of a sequence that began on another rank 0 and the identity.

    Args:
        initial_state: of the rank's sequences; that of one which began on another rank is not looked at. [n, HV, K, V]
        context: of the ranks.
        like: a state's shape and type. [HV, K, V]

    Returns:
        As given where the first sequence begins here; else H and M side by side, [n, HV, K, V + K], or without initial
        states those of the first sequence alone, [1, HV, K, V + K].
    """
    if context.is_first_rank:
        return initial_state
    heads, key, _ = like.shape
    identity = torch.eye(key, dtype=like.dtype, device=like.device).expand(heads, -1, -1)
    first = torch.cat([torch.zeros_like(like), identity], dim=-1)[None]
    if initial_state is None or len(initial_state) == 1:
        return first
    return torch.cat([first, F.pad(initial_state[1:], (0, key))])


def complete(
    o: Float[Tensor, "b t h w"], finals: Float[Tensor, "n h k w"], value: int, context: FLACPContext
) -> tuple[Float[Tensor, "b t h v"], Float[Tensor, "n h k v"]]:
    """Outputs and final states, once it is known what the rank's first sequence began with.

    Args:
        o: outputs from a state of 0 and, where the first sequence began on another rank, responses. [1, T, HV, V + K]
        finals: H and M of every sequence, as wide. [n, HV, K, V + K]
        value: width V.
        context: of the ranks.

    Returns:
        [1, T, HV, V] and [n, HV, K, V]; a sequence that goes on on another rank has a final state of 0 here.
    """
    last, came, goes_on = context.num_sequences - 1, not context.is_first_rank, not context.is_last_rank
    o, response = o[..., :value], o[..., value:]
    states, transitions = finals[..., :value], finals[..., value:]
    nothing = finals.new_zeros(*states.shape[1:-1], states.shape[-2])
    transition = transitions[0] if came and goes_on and last == 0 else nothing
    begun = _Exchanged.apply(transition, states[last] if goes_on else torch.zeros_like(states[last]), o, context)
    if came:
        o = o + torch.einsum("bthk,hkv->bthv", response, begun)
        states = torch.cat([states[:1] + transitions[:1] @ begun, states[1:]])
    if goes_on:
        states = torch.cat([states[:last], torch.zeros_like(states[last:])])
    return _Attached.apply(o, begun), states


def cp_short_convolution(
    x: Float[Tensor, "b t c"], weight: Float[Tensor, "c w"], context: FLACPContext
) -> Float[Tensor, "b t c"]:
    """ops.short_convolution over this rank's part: what it reads before the part comes from the ranks there.

    Args:
        x: inputs of the part. [1, T, C]
        weight: taps. [C, W]
        context: of the ranks.
    """
    wanted = weight.shape[1] - 1
    _, begin = _sequences(context, x.device)
    before = torch.arange(x.shape[1], device=x.device) + context.rank * x.shape[1] - begin
    joined = torch.cat([_Halo.apply(x, context, weight.shape[1]), x], dim=1) if wanted else x
    return short_convolution(joined, weight, F.pad(before, (wanted, 0)))[:, wanted:]


def cp_attention(
    q: Float[Tensor, "b t h d"], k: Float[Tensor, "b t g d"], v: Float[Tensor, "b t g d"], context: FLACPContext
) -> Float[Tensor, "b t h d"]:
    """ops.causal_attention of this rank's queries, to the keys and values of all ranks, each sequence by itself.

    Args:
        q, k, v: of the part. [1, T, H, d], [1, T, G, d]
        context: of the ranks.
    """
    place, begin = _sequences(context, q.device)
    k, v = (_AllParts.apply(x, context) for x in (k, v))
    keys = torch.arange(k.shape[1], device=q.device)
    return masked_attention(q, k, v, (keys >= begin[:, None]) & (keys <= place[:, None]))


def _sequences(context: FLACPContext, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where each token of the part lies among all, and where its sequence begins. [T]"""
    cu_seqlens = context.cu_seqlens.to(device)
    assert context.part_length is not None, "known in PyTorch"
    tokens = torch.arange(context.part_length, device=device)
    own = torch.searchsorted(cu_seqlens[1:].contiguous(), tokens, right=True)
    begin = cu_seqlens[own] - torch.where(own == 0, context.pre_num_tokens, 0)
    return tokens + context.rank * len(tokens), begin + context.rank * len(tokens)


class _Halo(torch.autograd.Function):
    """The tokens before the part that a convolution reads, zeros before the first; their gradients go back."""

    @staticmethod
    def forward(ctx, x, context, kernel_size):
        ctx.context, ctx.shape, ctx.sizes = context, x.shape, halo_sizes(x.shape[1], kernel_size)
        came = [x.new_zeros(x.shape[0], size, *x.shape[2:]) for size in ctx.sizes]
        sent = [x[:, x.shape[1] - size :].contiguous() for size in ctx.sizes]
        _neighbours(sent, came, context, reverse=False)
        return torch.cat(came[::-1], dim=1)

    @staticmethod
    @differentiable_once
    def backward(ctx, d_halo):  # pyright: ignore[reportIncompatibleMethodOverride]
        parts = d_halo.split(ctx.sizes[::-1], dim=1)[::-1]
        came = [torch.zeros_like(part) for part in parts]
        _neighbours([part.contiguous() for part in parts], came, ctx.context, reverse=True)
        d_x = d_halo.new_zeros(ctx.shape)
        for part in came:
            d_x[:, d_x.shape[1] - part.shape[1] :] += part
        return d_x, None, None


def _neighbours(sent: list[Tensor], came: list[Tensor], context: FLACPContext, reverse: bool) -> None:
    """Hand parts to the next ranks, to each its own, and fill those that come from the ranks before."""
    place = context.size - 1 - context.rank if reverse else context.rank
    works = []
    for distance, (part, into) in enumerate(zip(sent, came, strict=True), 1):
        if place + distance < context.size:
            works.append(_send(part, place + distance, context, reverse))
        if place >= distance:
            works.append(_receive(into, place - distance, context, reverse))
    for work in works:
        _wait(work)


class _AllParts(torch.autograd.Function):
    """The parts of all ranks, end to end; each rank's gradient is the sum of what all ranks have for its part."""

    @staticmethod
    def forward(ctx, x, context):
        ctx.context = context
        if context.size == 1:
            return x.view_as(x)
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(context.size)]
        work = dist.all_gather(parts, x.contiguous(), group=context.group, async_op=True)
        wait_for(work, "the keys and values of all ranks", TIMEOUT)
        return torch.cat(parts, dim=1)

    @staticmethod
    @differentiable_once
    def backward(ctx, d_all):  # pyright: ignore[reportIncompatibleMethodOverride]
        context = ctx.context
        d_all = sum_over(d_all.contiguous(), context.group, "the gradients of keys and values", TIMEOUT)
        return d_all.chunk(context.size, dim=1)[context.rank], None
