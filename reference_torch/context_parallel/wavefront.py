"""Pipelined context parallelism: each rank receives from the previous rank and sends to the next rank.

A layer receives before it computes, and sends its own part without waiting. In backward, gradients are sent in the
opposite direction. diptych/plans/schedule/wavefront.py decides in which order a rank runs its microbatches. The JAX
counterpart is ``jax_impl/context_parallel/wavefront.py``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import cast
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.distributed import ProcessGroup

from diptych.plans.context.exchange import PIPELINED
from diptych.plans.context.sequences import FLACPContext
from diptych.plans.schedule.messages import PipelineError
from reference_torch.autograd import differentiable_once
from reference_torch.groups import wait_for
from reference_torch.pending_sends import PendingSends, cause_of
from reference_torch.recompute.region import in_replay

WHAT = ("state", "tokens of a convolution", "keys and values")
"""The kinds of messages."""


class Handing:
    """The messages of one microbatch.

    It saves received parts for layers that backward replays, because a replay communicates nothing. build_cp_context
    creates it, equally often on every rank.

    Args:
        group: group of the ranks; None: one rank.
    """

    keeps: tuple[str, ...] = WHAT
    """Kinds of messages that a replay may read again."""

    def __init__(self, group: ProcessGroup | None) -> None:
        self.came: dict[tuple[int | None, str], list[Tensor]] = {}
        """Received parts of every pass whose backward has not run, by layer and kind."""
        self.number = 0
        """Number of the microbatch in its group, which distinguishes its messages from those of others."""
        if group is not None:
            _channel(group, reverse=True)  # created here, because all ranks have to create it at the same time
            shared = _shared(group)
            self.number = shared.microbatches
            shared.microbatches = shared.microbatches + 1


class _Shared:
    """The shared state of all microbatches of a group: messages in flight, and the number of microbatches so far."""

    def __init__(self) -> None:
        self.departures = PendingSends(lingers=True)
        self.microbatches = 0


_SHARED: WeakKeyDictionary[ProcessGroup, _Shared] = WeakKeyDictionary()
"""Shared state by group, which lives as long as the group; the name of a group can be used again."""


def _shared(group: ProcessGroup) -> _Shared:
    if group not in _SHARED:
        _SHARED[group] = shared = _Shared()
        finalize(group, shared.departures.dismiss).atexit = False
    return _SHARED[group]


def finish(group: ProcessGroup | None) -> None:
    """Wait until the other ranks have received all messages of this rank.

    Args:
        group: group of the ranks; None: one rank.

    Raises:
        PipelineError: a message was not received in time.
    """
    if group is not None:
        _shared(group).departures.wait()


def is_pipelined(context: FLACPContext) -> bool:
    """Return true if the exchange is "pipelined": a rank computes after it has received from the previous rank."""
    return context.cp_exchange == PIPELINED


def receive_from_previous(what: str, like: Tensor, beside: Tensor, context: FLACPContext) -> Tensor:
    """Receive a part from the previous rank; backward sends its gradient back.

    Args:
        what: kind of message, one of WHAT.
        like: tensor with the shape and type of the part.
        beside: another argument of the operation that connects the part to the autograd graph.
        context: context of the rank, whose first sequence begins on an earlier rank.

    Raises:
        PipelineError: the part did not arrive within context.timeout.
    """
    if in_replay():
        return _Received.apply(beside, what, context, _received_before(what, context))
    found = _receive(what, context, tuple(like.shape), like.dtype, like.device, reverse=False)
    if what in context.handing.keeps:
        context.handing.came.setdefault((context.layer, what), []).append(found)
    return _Received.apply(beside, what, context, found)


def send_to_next(what: str, part: Float[Tensor, "..."], context: FLACPContext, *others: Tensor) -> tuple[Tensor, ...]:
    """Send a part to the next rank, and return the others; backward through any of them receives the part's gradient.

    Args:
        what: kind of message, one of WHAT.
        part: tensor for the next rank.
        context: context of the rank, whose last sequence continues on a later rank.
        *others: tensors with which this rank continues.

    Raises:
        PipelineError: the next rank has ended, or did not receive an earlier message.
    """
    return _Sent.apply(what, context, part, *others)


class _Received(torch.autograd.Function):
    """A received part; backward sends its gradient to the previous rank."""

    @staticmethod
    def forward(ctx, beside, what, context, found):
        ctx.what = what
        ctx.context = context
        ctx.found = found
        return found.detach()

    @staticmethod
    @differentiable_once
    def backward(ctx, d_found):  # pyright: ignore[reportIncompatibleMethodOverride]
        _send(ctx.what, d_found, ctx.context, reverse=True)
        came = ctx.context.handing.came
        key = ctx.context.layer, ctx.what
        came[key] = [other for other in came.get(key, []) if other is not ctx.found]
        return None, None, None, None


class _Sent(torch.autograd.Function):
    """The other tensors, after a part was sent; backward receives the gradient of the part."""

    @staticmethod
    def forward(ctx, what, context, part, *others):
        ctx.what = what
        ctx.context = context
        ctx.like = (tuple(part.shape), part.dtype, part.device)
        if not in_replay():
            _send(what, part, context, reverse=False)
        return tuple(x.view_as(x) for x in others)

    @staticmethod
    @differentiable_once
    def backward(ctx, *d_others):  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, None, _receive(ctx.what, ctx.context, *ctx.like, reverse=True), *d_others


def _received_before(what: str, context: FLACPContext) -> Tensor:
    """Return the part that a layer received in its first forward.

    Raises:
        ValueError: several passes share the context, or none has received the part.
    """
    came = context.handing.came.get((context.layer, what), [])
    if len(came) != 1:
        raise ValueError(
            "cp_context: expected a separate context for every microbatch, and for every layer that backward "
            f"recomputes (context.of_layer), got {len(came)} passes without backward that received "
            f"{_name(what, context, False)}"
        )
    return came[0]


def _send(what: str, part: Tensor, context: FLACPContext, reverse: bool) -> None:
    """Send to the next rank, or to the previous rank if reverse, without waiting."""
    departures = _shared(context.group).departures
    departures.check()
    sent = part.detach().to(_wire_dtype(what, part.dtype, context)).contiguous()
    peer = _peer(context, 1, reverse)
    name = _name(what, context, reverse)
    expected = f"context rank {context.rank}: expected context rank {peer} to receive {name}"
    with _named(expected):
        work = dist.isend(sent, group=_channel(context.group, reverse), group_dst=peer, tag=_tag(what, context))
    departures.add(work, sent, expected, context.timeout)


def _receive(
    what: str, context: FLACPContext, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, reverse: bool
) -> Tensor:
    came = torch.empty(shape, dtype=_wire_dtype(what, dtype, context), device=device)
    peer = _peer(context, -1, reverse)
    name = f"{_name(what, context, reverse)}, {list(shape)}, from context rank {peer}"
    with _named(f"context rank {context.rank}: expected {name}"):
        work = dist.irecv(came, group=_channel(context.group, reverse), group_src=peer, tag=_tag(what, context))
    wait_for(work, name, context.timeout)
    return came.to(dtype)


@contextmanager
def _named(expected: str) -> Iterator[None]:
    """Raise a PipelineError with what was expected if a message cannot be started."""
    try:
        yield
    except RuntimeError as error:
        raise PipelineError(
            f"{expected}, and it failed ({cause_of(error)}); look at what the other ranks say"
        ) from None


def _peer(context: FLACPContext, ahead: int, reverse: bool) -> int:
    """Return the rank that is so many places ahead in the group, or behind if reverse."""
    return context.rank + (-ahead if reverse else ahead)


def _tag(what: str, context: FLACPContext) -> int:
    """Return the tag of a message, 31 bits: 16 of the microbatch, 13 of the layer and 2 of the kind."""
    layer = -1 if context.layer is None else context.layer
    return ((context.handing.number % 2**16) * 2**13 + (layer + 1) % 2**13) * 4 + WHAT.index(what)


def _name(what: str, context: FLACPContext, reverse: bool) -> str:
    layer = "" if context.layer is None else f" of layer {context.layer}"
    return f"the {'gradient of the ' * reverse}{what}{layer}"


def _wire_dtype(what: str, dtype: torch.dtype, context: FLACPContext) -> torch.dtype:
    """Return the type in which a message is sent; cp_wire_dtype applies to states only."""
    asked = context.cp_wire_dtype if what == "state" else None
    return dtype if asked is None else getattr(torch, asked)


def _channel(group: ProcessGroup, reverse: bool) -> ProcessGroup:
    """Return the group of a message; with NCCL gradients have their own group, because a group orders its messages."""
    return _group_back(group) if reverse and dist.get_backend(group) == "nccl" else group


@cache
def _group_back(group: ProcessGroup) -> ProcessGroup:
    ranks = dist.get_process_group_ranks(group)
    return cast("ProcessGroup", dist.new_group(ranks, use_local_synchronization=True))
