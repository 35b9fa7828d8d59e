"""Pipelined context parallelism: each rank receives from the previous rank and sends to the next rank.

A layer receives before it computes, and sends its own part without waiting. In backward, gradients are sent in the
opposite direction. diptych/plans/schedule/wavefront.py decides in which order a rank runs its microbatches. The JAX
counterpart is ``jax_impl/context_parallel/wavefront.py``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import cast
from weakref import WeakKeyDictionary, finalize, ref

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

MESSAGE_KINDS = ("state", "tokens of a convolution", "keys and values")
"""The kinds of messages."""


class MicrobatchMessages:
    """The messages of one microbatch.

    Received parts are saved for layers that backward replays, because a replay communicates nothing. build_cp_context
    creates one object for each pipelined context. Every rank has to build the same number of contexts.

    Args:
        group: group of the ranks; None: one rank.
    """

    replayed_kinds: tuple[str, ...] = MESSAGE_KINDS
    """Kinds of messages that a replay may read again."""

    def __init__(self, group: ProcessGroup | None) -> None:
        self.received: dict[tuple[int | None, str], list[Tensor]] = {}
        """Received parts of every forward whose backward has not run, by layer and kind."""
        self.number = 0
        """Number of the microbatch in its group, which distinguishes its messages from those of others."""
        if group is not None:
            _channel(group, reverse=True)  # created here, because all ranks have to create it at the same time
            shared = _shared(group)
            self.number = shared.microbatches
            shared.microbatches += 1


class _Shared:
    """The shared state of all microbatches of a group: messages in flight, and the number of microbatches so far."""

    def __init__(self) -> None:
        self.pending_sends = PendingSends(lingers=True)
        self.microbatches = 0


_SHARED: WeakKeyDictionary[ProcessGroup, _Shared] = WeakKeyDictionary()
"""Shared state by group, which lives as long as the group; names of groups are not unique over time."""


def _shared(group: ProcessGroup) -> _Shared:
    """Return the shared state of a group; create it on first use."""
    if group not in _SHARED:
        shared = _Shared()
        _SHARED[group] = shared
        finalize(group, shared.pending_sends.dismiss).atexit = False
    return _SHARED[group]


def finish(group: ProcessGroup | None) -> None:
    """Wait until the other ranks have received all messages of this rank.

    Args:
        group: group of the ranks; None: one rank.

    Raises:
        PipelineError: a message was not received in time.
    """
    if group is not None:
        _shared(group).pending_sends.wait()


def is_pipelined(context: FLACPContext) -> bool:
    """Return True if the exchange is "pipelined": a rank computes after it has received from the previous rank."""
    return context.cp_exchange == PIPELINED


def receive_from_previous(kind: str, like: Tensor, anchor: Tensor, context: FLACPContext) -> Tensor:
    """Receive a part from the previous rank; backward sends its gradient back.

    Args:
        kind: kind of message, one of MESSAGE_KINDS.
        like: tensor with the shape and type of the part.
        anchor: another argument of the operation that connects the part to the autograd graph.
        context: context of the rank, whose first sequence begins on an earlier rank.

    Raises:
        PipelineError: the part did not arrive within context.timeout.
    """
    if in_replay():
        return _Received.apply(anchor, kind, context, _received_in_forward(kind, context))
    part = _receive(kind, context, tuple(like.shape), like.dtype, like.device, reverse=False)
    if kind in context.messages.replayed_kinds:
        context.messages.received.setdefault((context.layer, kind), []).append(part)
    return _Received.apply(anchor, kind, context, part)


def send_to_next(kind: str, part: Float[Tensor, "..."], context: FLACPContext, *results: Tensor) -> tuple[Tensor, ...]:
    """Send a part to the next rank, and return the results; backward through any of them receives the part's gradient.

    Args:
        kind: kind of message, one of MESSAGE_KINDS.
        part: tensor for the next rank.
        context: context of the rank, whose last sequence continues on a later rank.
        *results: tensors with which this rank continues.

    Raises:
        PipelineError: the next rank has ended, or did not receive an earlier message.
    """
    return _Sent.apply(kind, context, part, *results)


class _Received(torch.autograd.Function):
    """A received part; backward sends its gradient to the previous rank."""

    @staticmethod
    def forward(ctx, anchor, kind, context, part):
        ctx.kind = kind
        ctx.context = context
        ctx.part = ref(part)  # backward does not read it
        return part.detach()

    @staticmethod
    @differentiable_once
    def backward(ctx, d_part):  # pyright: ignore[reportIncompatibleMethodOverride]
        _send(ctx.kind, d_part, ctx.context, reverse=True)
        received = ctx.context.messages.received
        key = ctx.context.layer, ctx.kind
        received[key] = [other for other in received.get(key, []) if other is not ctx.part()]
        return None, None, None, None


class _Sent(torch.autograd.Function):
    """The identity of the results, after a part was sent; backward receives the gradient of the part."""

    @staticmethod
    def forward(ctx, kind, context, part, *results):
        ctx.kind = kind
        ctx.context = context
        ctx.like = (tuple(part.shape), part.dtype, part.device)
        if not in_replay():
            _send(kind, part, context, reverse=False)
        return tuple(x.view_as(x) for x in results)

    @staticmethod
    @differentiable_once
    def backward(ctx, *d_results):  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, None, _receive(ctx.kind, ctx.context, *ctx.like, reverse=True), *d_results


def _received_in_forward(kind: str, context: FLACPContext) -> Tensor:
    """Return the part that a layer received in its first forward.

    Raises:
        ValueError: several passes share the context, or none has received the part.
    """
    received = context.messages.received.get((context.layer, kind), [])
    if len(received) != 1:
        raise ValueError(
            "cp_context: expected a separate context for every microbatch, and for every layer that backward "
            f"recomputes (context.of_layer), got {len(received)} passes without backward that received "
            f"{_name(kind, context, False)}"
        )
    return received[0]


def _send(kind: str, part: Tensor, context: FLACPContext, reverse: bool) -> None:
    """Send to the next rank, or to the previous rank if reverse, without waiting."""
    pending_sends = _shared(context.group).pending_sends
    pending_sends.check()
    sent = part.detach().to(_wire_dtype(kind, part.dtype, context)).contiguous()
    peer = _peer(context, 1, reverse)
    name = _name(kind, context, reverse)
    expected = f"context rank {context.rank}: expected context rank {peer} to receive {name}"
    with _named(expected):
        work = dist.isend(sent, group=_channel(context.group, reverse), group_dst=peer, tag=_tag(kind, context))
    pending_sends.add(work, sent, expected, context.timeout)


def _receive(
    kind: str, context: FLACPContext, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, reverse: bool
) -> Tensor:
    """Receive from the previous rank, or from the next rank if reverse, and return the tensor in its own type."""
    received = torch.empty(shape, dtype=_wire_dtype(kind, dtype, context), device=device)
    peer = _peer(context, -1, reverse)
    name = f"{_name(kind, context, reverse)}, {list(shape)}, from context rank {peer}"
    with _named(f"context rank {context.rank}: expected {name}"):
        work = dist.irecv(received, group=_channel(context.group, reverse), group_src=peer, tag=_tag(kind, context))
    wait_for(work, name, context.timeout)
    return received.to(dtype)


@contextmanager
def _named(expected: str) -> Iterator[None]:
    """Raise a PipelineError that names the expected message if it cannot be started."""
    try:
        yield
    except RuntimeError as error:
        raise PipelineError(
            f"{expected}, but it failed ({cause_of(error)}); see the output of the other ranks"
        ) from None


def _peer(context: FLACPContext, ahead: int, reverse: bool) -> int:
    """Return the rank ``ahead`` places ahead in the group, or behind if reverse."""
    return context.rank + (-ahead if reverse else ahead)


def _tag(kind: str, context: FLACPContext) -> int:
    """Return the tag of a message, 31 bits: 16 of the microbatch, 13 of the layer and 2 of the kind."""
    layer = -1 if context.layer is None else context.layer
    return ((context.messages.number % 2**16) * 2**13 + (layer + 1) % 2**13) * 4 + MESSAGE_KINDS.index(kind)


def _name(kind: str, context: FLACPContext, reverse: bool) -> str:
    """Return the name of a message, for error messages."""
    layer = "" if context.layer is None else f" of layer {context.layer}"
    return f"the {'gradient of the ' * reverse}{kind}{layer}"


def _wire_dtype(kind: str, dtype: torch.dtype, context: FLACPContext) -> torch.dtype:
    """Return the type in which a message is sent; cp_wire_dtype applies to states only."""
    wire_dtype = context.cp_wire_dtype if kind == "state" else None
    return dtype if wire_dtype is None else getattr(torch, wire_dtype)


def _channel(group: ProcessGroup, reverse: bool) -> ProcessGroup:
    """Return the group of a message; with NCCL gradients have their own group, because a group orders its messages."""
    return _group_back(group) if reverse and dist.get_backend(group) == "nccl" else group


@cache
def _group_back(group: ProcessGroup) -> ProcessGroup:
    """Create a second group of the same ranks, for gradients."""
    ranks = dist.get_process_group_ranks(group)
    return cast("ProcessGroup", dist.new_group(ranks, use_local_synchronization=True))
