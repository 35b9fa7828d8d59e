"""What a rank takes from the one before and hands on to the next, where microbatches follow one another over ranks.

A layer takes what it needs before it computes, and hands its own on without waiting for anyone; backward, gradients go
the other way. In which order a rank runs its microbatches is plans/wavefront.py's to say. Twin of
``jax_impl/context_parallel/wavefront.py``.
"""

from functools import cache
from typing import Any, cast

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.distributed import ProcessGroup

from plans.context import FLACPContext
from plans.exchange import PIPELINED
from reference_torch.autograd import differentiable_once
from reference_torch.departures import Departures
from reference_torch.groups import wait_for

WHAT = ("state", "tokens of a convolution", "keys and values")
"""What is handed on."""


class Handing:
    """What came to layers, should backward compute them again, for which nothing travels again; of build_cp_context.

    Args:
        group: the ranks.
    """

    keeps = True
    """Off: backward computes nothing again."""

    def __init__(self, group: ProcessGroup | None) -> None:
        self.came: dict[tuple[int | None, str], list[Tensor]] = {}
        """By layer: of every pass whose backward is to come."""
        if group is not None:
            _channels(group)  # by all ranks at the same time


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
    if _is_backward():
        return _Taken.apply(beside, what, context, _came_before(what, context))
    found = _receive(what, context, tuple(like.shape), like.dtype, like.device, reverse=False)
    if context.handing.keeps:
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
        ctx.what, ctx.context = what, context
        return found.detach()

    @staticmethod
    @differentiable_once
    def backward(ctx, d_found):  # pyright: ignore[reportIncompatibleMethodOverride]
        _send(ctx.what, d_found, ctx.context, reverse=True)
        if came := ctx.context.handing.came.get((ctx.context.layer, ctx.what)):
            came.pop()
        return None, None, None, None


class _HandedOn(torch.autograd.Function):
    """The others; the part is on its way."""

    @staticmethod
    def forward(ctx, what, context, part, *others):
        ctx.what, ctx.context, ctx.like = what, context, (tuple(part.shape), part.dtype, part.device)
        if not _is_backward():
            _send(what, part, context, reverse=False)
        return tuple(x.view_as(x) for x in others)

    @staticmethod
    @differentiable_once
    def backward(ctx, *d_others):  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, None, _receive(ctx.what, ctx.context, *ctx.like, reverse=True), *d_others


def _is_backward() -> bool:
    """Whether autograd is on its way back, so that what is computed now was computed before."""
    return torch._C._current_graph_task_id() != -1


def _came_before(what: str, context: FLACPContext) -> Tensor:
    """What came to a layer when it was computed first.

    Raises:
        ValueError: it is not known of which pass this is.
    """
    came = context.handing.came.get((context.layer, what), [])
    if len(came) != 1:
        raise ValueError(
            "cp_context: expected one of its own for every microbatch, and for every layer that backward computes "
            f"again (context.of_layer), got {len(came)} passes with {_name(what, context, False)}"
        )
    return came[0]


def _send(what: str, part: Tensor, context: FLACPContext, reverse: bool) -> None:
    """To the next rank, or back to the one before; does not wait."""
    departures = _departures()
    departures.check()
    sent = part.detach().to(_wire_dtype(what, part.dtype, context)).contiguous()
    work = dist.isend(sent, **_route(what, context, 1, reverse))
    told = f"context rank {context.rank}: expected {_name(what, context, reverse)} to be received"
    departures.add(work, sent, told, context.timeout)


def _receive(
    what: str, context: FLACPContext, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, reverse: bool
) -> Tensor:
    came = torch.empty(shape, dtype=_wire_dtype(what, dtype, context), device=device)
    work = dist.irecv(came, **_route(what, context, -1, reverse))
    wait_for(work, f"{_name(what, context, reverse)}, {list(shape)}, from another context rank", context.timeout)
    return came.to(dtype)


def _route(what: str, context: FLACPContext, ahead: int, reverse: bool) -> dict[str, Any]:
    """Group, rank there and tag of a message."""
    peer = context.rank + (-ahead if reverse else ahead)
    layer = -1 if context.layer is None else context.layer
    tag = (layer + 1) * len(WHAT) + WHAT.index(what)
    group = _channels(context.group)[reverse]
    return {"group": group, "group_src" if ahead < 0 else "group_dst": peer, "tag": tag}


def _name(what: str, context: FLACPContext, reverse: bool) -> str:
    layer = "" if context.layer is None else f" of layer {context.layer}"
    return f"the {'gradient of the ' * reverse}{what}{layer}"


def _wire_dtype(what: str, dtype: torch.dtype, context: FLACPContext) -> torch.dtype:
    """Of states as asked for."""
    asked = context.cp_wire_dtype if what == "state" else None
    return dtype if asked is None else getattr(torch, asked)


@cache
def _channels(group: ProcessGroup) -> tuple[ProcessGroup, ProcessGroup]:
    """For what is handed on, and for what goes back: NCCL runs the messages of two ranks of a group in one order."""
    if dist.get_backend(group) != "nccl":
        return group, group
    back = dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=True)
    return group, cast("ProcessGroup", back)


@cache
def _departures() -> Departures:
    return Departures()
