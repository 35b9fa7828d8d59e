"""What a rank takes from the one before and hands on to the next, where microbatches follow one another over ranks.

A layer takes what it needs before it computes, and hands its own on without waiting for anyone; backward, gradients go
the other way. In which order a rank runs its microbatches is plans/wavefront.py's to say. Twin of
``jax_impl/context_parallel/wavefront.py``.
"""

from collections.abc import Sequence
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
    """Of one microbatch, what has been handed on; made by build_cp_context.

    What came to a layer stays here, and what it handed on is known: where backward computes a layer again, nothing
    travels again.

    Args:
        group: the ranks.
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        self.came: dict[tuple[int, str], Tensor] = {}
        self.gone: set[tuple[int, str]] = set()
        if group is not None:
            _channels(group)  # by all ranks at the same time


def is_pipelined(context: FLACPContext) -> bool:
    """Whether ranks hand on what they have before the next compute."""
    return context.cp_exchange == PIPELINED


def taken(what: str, shape: Sequence[int], beside: Tensor, context: FLACPContext, dtype: torch.dtype) -> Tensor:
    """What the rank before hands on; waits for it. Its gradient goes back there.

    Args:
        what: one of WHAT.
        shape: of it.
        beside: another argument of the operation, which has a gradient where this has.
        context: of the ranks; its first sequence began on another.
        dtype: of it.

    Raises:
        PipelineError: it did not come within context.timeout.
    """
    return _Taken.apply(beside, what, tuple(shape), context, dtype)


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
    @staticmethod
    def forward(ctx, beside, what, shape, context, dtype):
        ctx.what, ctx.context = what, context
        key, handing = (context.layer, what), context.handing
        if key in handing.came:
            return handing.came[key].clone()
        found = _receive(what, shape, context, dtype, beside.device, reverse=False)
        if context.layer is not None:
            handing.came[key] = found.clone()
        return found

    @staticmethod
    @differentiable_once
    def backward(ctx, d_found):  # pyright: ignore[reportIncompatibleMethodOverride]
        _send(ctx.what, d_found, ctx.context, reverse=True)
        return None, None, None, None, None


class _HandedOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, what, context, part, *others):
        ctx.what, ctx.context, ctx.like = what, context, (tuple(part.shape), part.dtype, part.device)
        key = context.layer, what
        if key not in context.handing.gone:
            _send(what, part, context, reverse=False)
            if context.layer is not None:
                context.handing.gone.add(key)
        return tuple(x.view_as(x) for x in others)

    @staticmethod
    @differentiable_once
    def backward(ctx, *d_others):  # pyright: ignore[reportIncompatibleMethodOverride]
        shape, dtype, device = ctx.like
        return None, None, _receive(ctx.what, shape, ctx.context, dtype, device, reverse=True), *d_others


def _send(what: str, part: Tensor, context: FLACPContext, reverse: bool) -> None:
    """To the next rank, or back to the one before; does not wait."""
    departures = _departures()
    departures.check()
    sent = part.detach().to(_wire_dtype(what, part.dtype, context)).contiguous()
    work = dist.isend(sent, **_route(what, context, 1, reverse))
    told = f"context rank {context.rank}: expected {_name(what, context, reverse)} to be received"
    departures.add(work, sent, told, context.timeout)


def _receive(
    what: str, shape: tuple[int, ...], context: FLACPContext, dtype: torch.dtype, device: torch.device, reverse: bool
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
