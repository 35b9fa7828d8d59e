"""What a rank takes from the one before and hands on to the next, where microbatches follow one another over ranks.

A layer takes what it needs before it computes, and hands its own on without waiting for anyone; backward, gradients go
the other way. In which order a rank runs its microbatches is diptych/plans/schedule/wavefront.py's to say. Twin of
``jax_impl/context_parallel/wavefront.py``.
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
"""What is handed on."""


class Handing:
    """One microbatch on its way over the ranks, and what came to layers that backward computes again, for which nothing
    travels again; made by build_cp_context, as often on every rank.

    Args:
        group: the ranks; None: there is one.
    """

    keeps: tuple[str, ...] = WHAT
    """Those of WHAT that backward may ask for again."""

    def __init__(self, group: ProcessGroup | None) -> None:
        self.came: dict[tuple[int | None, str], list[Tensor]] = {}
        """By layer: of every pass whose backward is to come."""
        self.number = 0
        """Of the group's microbatches: messages of another are not taken for its own."""
        if group is not None:
            _channel(group, reverse=True)  # by all ranks at the same time
            shared = _shared(group)
            self.number, shared.microbatches = shared.microbatches, shared.microbatches + 1


class _Shared:
    """What all microbatches of a group share: what is on its way, and their number so far."""

    def __init__(self) -> None:
        self.departures = PendingSends(lingers=True)
        self.microbatches = 0


_SHARED: WeakKeyDictionary[ProcessGroup, _Shared] = WeakKeyDictionary()
"""Of every group, as long as it is: its name another may have after it."""


def _shared(group: ProcessGroup) -> _Shared:
    if group not in _SHARED:
        _SHARED[group] = shared = _Shared()
        finalize(group, shared.departures.dismiss).atexit = False
    return _SHARED[group]


def finish(group: ProcessGroup | None) -> None:
    """Wait until the other ranks have taken all that was handed on and back.

    Raises:
        PipelineError: something was not taken in time.
    """
    if group is not None:
        _shared(group).departures.wait()


def is_pipelined(context: FLACPContext) -> bool:
    """Whether ranks hand on what they have before the next compute."""
    return context.cp_exchange == PIPELINED


def taken(what: str, like: Tensor, beside: Tensor, context: FLACPContext) -> Tensor:
    """What the rank before hands on; waits for it. Its gradient goes back there.

    Args:
        what: one of WHAT.
        like: of its shape and type.
        beside: another argument of the operation, by way of which autograd gets here.
        context: of the ranks; its first sequence began on another.

    Raises:
        PipelineError: it did not come within context.timeout.
    """
    if in_replay():
        return _Taken.apply(beside, what, context, _came_before(what, context))
    found = _receive(what, context, tuple(like.shape), like.dtype, like.device, reverse=False)
    if what in context.handing.keeps:
        context.handing.came.setdefault((context.layer, what), []).append(found)
    return _Taken.apply(beside, what, context, found)


def handed_on(what: str, part: Float[Tensor, "..."], context: FLACPContext, *others: Tensor) -> tuple[Tensor, ...]:
    """Hand a part to the next rank, and return the others; backward through any of them takes the part's gradient.

    Args:
        what: one of WHAT.
        part: what the next rank takes.
        context: of the ranks; its last sequence goes on on another.
        others: what this rank goes on with.

    Raises:
        PipelineError: the next rank is gone, or did not take something before.
    """
    return _HandedOn.apply(what, context, part, *others)


class _Taken(torch.autograd.Function):
    """What came."""

    @staticmethod
    def forward(ctx, beside, what, context, found):
        ctx.what, ctx.context, ctx.found = what, context, found
        return found.detach()

    @staticmethod
    @differentiable_once
    def backward(ctx, d_found):  # pyright: ignore[reportIncompatibleMethodOverride]
        _send(ctx.what, d_found, ctx.context, reverse=True)
        came = ctx.context.handing.came
        key = ctx.context.layer, ctx.what
        came[key] = [other for other in came.get(key, []) if other is not ctx.found]
        return None, None, None, None


class _HandedOn(torch.autograd.Function):
    """The others; the part is on its way."""

    @staticmethod
    def forward(ctx, what, context, part, *others):
        ctx.what, ctx.context, ctx.like = what, context, (tuple(part.shape), part.dtype, part.device)
        if not in_replay():
            _send(what, part, context, reverse=False)
        return tuple(x.view_as(x) for x in others)

    @staticmethod
    @differentiable_once
    def backward(ctx, *d_others):  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, None, _receive(ctx.what, ctx.context, *ctx.like, reverse=True), *d_others


def _came_before(what: str, context: FLACPContext) -> Tensor:
    """What came to a layer when it was computed first.

    Raises:
        ValueError: it is not known of which pass this is.
    """
    came = context.handing.came.get((context.layer, what), [])
    if len(came) != 1:
        raise ValueError(
            "cp_context: expected one of its own for every microbatch, and for every layer that backward computes "
            f"again (context.of_layer), got {len(came)} passes whose backward is to come with "
            f"{_name(what, context, False)}"
        )
    return came[0]


def _send(what: str, part: Tensor, context: FLACPContext, reverse: bool) -> None:
    """To the next rank, or back to the one before; does not wait."""
    departures = _shared(context.group).departures
    departures.check()
    sent = part.detach().to(_wire_dtype(what, part.dtype, context)).contiguous()
    peer, name = _peer(context, 1, reverse), _name(what, context, reverse)
    told = f"context rank {context.rank}: expected context rank {peer} to receive {name}"
    with _named(told):
        work = dist.isend(sent, group=_channel(context.group, reverse), group_dst=peer, tag=_tag(what, context))
    departures.add(work, sent, told, context.timeout)


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
    """Say what was expected where a message cannot even set out."""
    try:
        yield
    except RuntimeError as error:
        raise PipelineError(
            f"{expected}, and it failed ({cause_of(error)}); look at what the other ranks say"
        ) from None


def _peer(context: FLACPContext, ahead: int, reverse: bool) -> int:
    """The rank so far ahead in the group, or backward, behind."""
    return context.rank + (-ahead if reverse else ahead)


def _tag(what: str, context: FLACPContext) -> int:
    """Of the microbatch, layer and thing, 31 bits: 16, 13 and 2."""
    layer = -1 if context.layer is None else context.layer
    return ((context.handing.number % 2**16) * 2**13 + (layer + 1) % 2**13) * 4 + WHAT.index(what)


def _name(what: str, context: FLACPContext, reverse: bool) -> str:
    layer = "" if context.layer is None else f" of layer {context.layer}"
    return f"the {'gradient of the ' * reverse}{what}{layer}"


def _wire_dtype(what: str, dtype: torch.dtype, context: FLACPContext) -> torch.dtype:
    """Of states as asked for."""
    asked = context.cp_wire_dtype if what == "state" else None
    return dtype if asked is None else getattr(torch, asked)


def _channel(group: ProcessGroup, reverse: bool) -> ProcessGroup:
    """What goes back has a group of its own with NCCL, which runs the messages of a group in one order."""
    return _group_back(group) if reverse and dist.get_backend(group) == "nccl" else group


@cache
def _group_back(group: ProcessGroup) -> ProcessGroup:
    ranks = dist.get_process_group_ranks(group)
    return cast("ProcessGroup", dist.new_group(ranks, use_local_synchronization=True))
