"""How states go from rank to rank: the exchanges, their gradients, and waiting for them late."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import cast

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from plans.context import FLACPContext, scan_steps
from reference_torch.autograd import differentiable_once
from reference_torch.groups import wait_for


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
    work = dist.all_gather(all_, packed, group=context.group, async_op=True)
    wait_for(work, "the states of all ranks", context.timeout)
    found, width = torch.zeros_like(state), state.shape[-1]
    for before in all_[: -place - 1 : -1] if reverse else all_[:place]:
        before = before.to(state.dtype)
        found = torch.baddbmm(before[..., :width], before[..., width:], found)
    return found


def _passed_on(transition: Tensor, state: Tensor, context: FLACPContext, place: int, reverse: bool) -> Tensor:
    came = _on_wire(torch.zeros_like(state), context)
    if place > 0:
        wait_for_part(receive_part(came, place - 1, context, reverse), context)
    found = came.to(state.dtype)
    if place < context.size - 1:
        passed_on = _on_wire(torch.baddbmm(state, transition, found), context)
        wait_for_part(send_part(passed_on, place + 1, context, reverse), context)
    return found


def _scanned(transition: Tensor, state: Tensor, context: FLACPContext, place: int, reverse: bool) -> Tensor:
    for number, step in enumerate(scan_steps(context.size)):
        sends = step.first_sender <= place < context.size - step.distance
        receives = place >= step.distance + step.first_sender
        parts = [state] if step.is_last else [state, transition]
        parts = [_on_wire(part, context) for part in parts]
        came = [torch.zeros_like(part) for part in parts]
        works = [send_part(part, place + step.distance, context, reverse) for part in parts if sends]
        works += [receive_part(part, place - step.distance, context, reverse) for part in came if receives]
        for work in works:
            wait_for_part(work, context)
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


def send_part(part: Tensor, place: int, context: FLACPContext, reverse: bool) -> dist.Work:
    """To the rank at a place, counted from the first, or from the last."""
    return cast("dist.Work", dist.isend(part, _rank_at(place, context, reverse), group=context.group))


def receive_part(part: Tensor, place: int, context: FLACPContext, reverse: bool) -> dist.Work:
    """From there, into this tensor."""
    return cast("dist.Work", dist.irecv(part, _rank_at(place, context, reverse), group=context.group))


def wait_for_part(work: dist.Work, context: FLACPContext) -> None:
    """Until it is there, or the other rank is overdue."""
    wait_for(work, "a state of another rank", context.timeout)


def map_passed_on(finals: Tensor, value: int, context: FLACPContext) -> tuple[Tensor, Tensor]:
    """M and H that this rank passes on, of its sequences' last states and transitions."""
    last, came, goes_on = context.num_sequences - 1, not context.is_first_rank, not context.is_last_rank
    states, transitions = finals[..., :value], finals[..., value:]
    nothing = finals.new_zeros(*states.shape[1:-1], states.shape[-2])
    transition = transitions[0] if came and goes_on and last == 0 else nothing
    return transition, states[last] if goes_on else torch.zeros_like(states[last])


class Crossing:
    """One exchange of a call, begun as soon as states are known, and waited for where they are needed.

    The worker is a thread of its own, or on a GPU a stream.
    """

    def __init__(self, context: FLACPContext, value: int) -> None:
        self.context, self.value = context, value
        self.meanwhile: Callable[[], None] | None = None
        """What backward can do while it waits for the gradients of states."""
        self._finish: Callable[[], Tensor] | None = None

    def begin(self, finals: Float[Tensor, "n h k w"]) -> None:
        """Pass on what follows from this rank's states, which autograd does not see; see complete."""
        if self.context.overlap:
            parts = map_passed_on(finals, self.value, self.context)
            self._finish = _begin(lambda m, h: exchange_states(m, h, self.context), *parts)

    def finish(self, transition: Tensor, state: Tensor) -> Tensor:
        """What came; where nothing was begun, of these."""
        finish, self._finish = self._finish, None
        return exchange_states(transition, state, self.context) if finish is None else finish()

    def passed_back(self, transition: Tensor, d_found: Tensor) -> Tensor:
        """The exchange of gradients."""
        meanwhile, self.meanwhile = self.meanwhile, None

        def exchange(transition: Tensor, state: Tensor) -> Tensor:
            return exchange_states(transition, state, self.context, reverse=True)

        if meanwhile is None or not self.context.overlap:
            return exchange(transition.mT, d_found)
        finish = _begin(exchange, transition.mT, d_found)
        meanwhile()
        return finish()


def _begin(run: Callable[..., Tensor], *own: Tensor) -> Callable[[], Tensor]:
    """Start it, of these, beside what this rank goes on to compute; returns what waits for its result."""
    device = own[0].device
    if device.type != "cuda":
        return _worker().submit(torch.no_grad()(run), *own).result
    here, aside = torch.cuda.current_stream(device), _stream(device)
    aside.wait_stream(here)
    with torch.cuda.stream(aside), torch.no_grad():
        result = run(*own)
    for x in own:  # their memory is not handed out again before this stream has read it
        x.record_stream(aside)

    def finish() -> Tensor:
        torch.cuda.current_stream(device).wait_stream(aside)
        result.record_stream(torch.cuda.current_stream(device))
        return result

    return finish


@cache
def _worker() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "diptych-exchange")


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class ExchangedState(torch.autograd.Function):
    """exchange_states. Of S_r = M S + H over the ranks before r, the gradient of rank r's H is the same of the M^T and
    of the gradients of S over the ranks after it, and that of its M is this times S^T. The anchor gets none: it has
    backward come here on ranks that pass nothing on, too."""

    @staticmethod
    def forward(ctx, transition, state, anchor, crossing):
        """What came; see Crossing."""
        found = crossing.finish(transition, state)
        ctx.save_for_backward(transition, found)
        ctx.crossing = crossing
        return found

    @staticmethod
    @differentiable_once
    def backward(ctx, d_found):  # pyright: ignore[reportIncompatibleMethodOverride]
        """Gradients of M and H."""
        transition, found = ctx.saved_tensors
        passed_back = ctx.crossing.passed_back(transition, d_found)
        return passed_back @ found.mT, passed_back, None, None
