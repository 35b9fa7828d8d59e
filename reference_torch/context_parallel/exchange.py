"""How states go from rank to rank: the exchanges, their gradients, and waiting for them late."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from diptych.plans.context.exchange import check_together, scan_steps
from diptych.plans.context.sequences import FLACPContext
from reference_torch.autograd import differentiable_once
from reference_torch.context_parallel.approximate import (
    LowRank,
    gradients_of_nearest,
    low_rank,
    states_of_nearest,
)
from reference_torch.groups import wait_for


def exchange_states(
    transition: Float[Tensor, "h k k"] | LowRank,
    state: Float[Tensor, "h k v"],
    context: FLACPContext,
    reverse: bool = False,
) -> Float[Tensor, "h k v"]:
    """The state this rank begins with, of S -> M S + H over the ranks before it; all ranks have to call it.

    Args:
        transition: M; 0 where the state passed on does not depend on the one begun with. [HV, K, K]; gathered, it may
            be of low rank.
        state: H. [HV, K, V]
        context: of the ranks.
        reverse: over the ranks after it, from the last.

    Returns:
        S, 0 on the first rank.
    """
    check_together(context.cp_exchange)
    place = context.size - 1 - context.rank if reverse else context.rank
    if context.size == 1:
        return torch.zeros_like(state)
    if context.cp_exchange == "all_gather":
        return _gathered(transition, state, context, place, reverse)
    assert isinstance(transition, Tensor), "low ranks are gathered"
    own = (transition.contiguous(), state.contiguous())
    if context.cp_exchange == "ring":
        return _passed_on(*own, context, place, reverse)
    return _scanned(*own, context, place, reverse)


def _gathered(transition: Tensor | LowRank, state: Tensor, context: FLACPContext, place: int, reverse: bool) -> Tensor:
    is_narrow = isinstance(transition, LowRank)
    packed = _on_wire(torch.cat([state, transition.packed() if is_narrow else transition], dim=-1), context)
    all_ = [torch.empty_like(packed) for _ in range(context.size)]
    work = dist.all_gather(all_, packed, group=context.group, async_op=True)
    wait_for(work, "the states of all ranks", context.timeout)
    found, width, first = torch.zeros_like(state), state.shape[-1], place - context.reach(reverse)
    for number, before in enumerate(all_[: -place - 1 : -1] if reverse else all_[:place]):
        before = before.to(state.dtype)
        if number <= first:  # a sequence begins there: the state it passes on is its own
            found = before[..., :width] if number == first else found
        elif is_narrow:
            found = before[..., :width] + LowRank.unpacked(before[..., width:]).times(found)
        else:
            found = torch.baddbmm(before[..., :width], before[..., width:], found)
    return found


def _passed_on(transition: Tensor, state: Tensor, context: FLACPContext, place: int, reverse: bool) -> Tensor:
    came = _on_wire(torch.zeros_like(state), context)
    if place > 0:
        wait_for_part(receive_part(came, place - 1, context, reverse), context)
    found = came.to(state.dtype)
    if place < context.size - 1:
        after = torch.baddbmm(state, transition, found) if context.goes_through else state
        passed_on = _on_wire(after, context)
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
        elif receives and step.distance < context.reach(reverse):
            state = torch.baddbmm(state, transition, came[0])
            transition = transition if step.is_last else torch.bmm(transition, came[1])
    return state


def _handed_on(part: Tensor, context: FLACPContext, reverse: bool) -> Tensor:
    """What the rank before has, while the next gets this; 0 on the first."""
    place = context.size - 1 - context.rank if reverse else context.rank
    sent = _on_wire(part.contiguous(), context)
    came, works = torch.zeros_like(sent), []
    if place < context.size - 1:
        works.append(send_part(sent, place + 1, context, reverse))
    if place > 0:
        works.append(receive_part(came, place - 1, context, reverse))
    for work in works:
        wait_for_part(work, context)
    return came.to(part.dtype)


class Passed(NamedTuple):
    """What an exchange has brought, and what its backward needs."""

    found: Tensor
    """The state this rank begins with. [HV, K, V]"""
    sent: tuple[Tensor, ...]
    """This rank's map as it was sent: M, or the parts of a LowRank."""
    earlier: tuple[Tensor, ...]
    """With states of the nearest ranks alone: those of fewer. [HV, K, V] each"""


def pass_states(transition: Tensor, state: Tensor, log_decay: Tensor | None, context: FLACPContext) -> Passed:
    """exchange_states, or what the context approximates it by.

    Args:
        transition, state: M [HV, K, K] and H [HV, K, V].
        log_decay: sum of the log decays of M's tokens, for a low rank. [HV, K] or [HV, 1]
        context: of the ranks.
    """
    if context.cp_truncate_ranks is not None and context.size > 1:
        rounds = min(context.cp_truncate_ranks, context.size - 1)
        through = transition if context.goes_through else None
        found = states_of_nearest(through, state, rounds, lambda x: _handed_on(x, context, reverse=False))
        return Passed(found[-1], (transition,), tuple(found[:-1]))
    if context.cp_transition_rank is None:
        return Passed(exchange_states(transition, state, context), (transition,), ())
    assert log_decay is not None, "given where a rank is"
    narrow = low_rank(transition, log_decay, context.cp_transition_rank)
    return Passed(exchange_states(narrow, state, context), tuple(narrow), ())


def pass_gradients(passed: Passed, d_found: Tensor, context: FLACPContext) -> tuple[Tensor | None, Tensor]:
    """Gradients of M and H of pass_states, of that of what it found.

    Of S_r = M S + H over the ranks before r, the gradient of rank r's H is the same of the M^T and of the gradients of
    S over the ranks after it, and that of its M is this times S^T.
    """
    first, *others = passed.sent
    if context.cp_truncate_ranks is not None and context.size > 1:
        found = [*passed.earlier, passed.found]
        through = first if context.goes_through else None
        return gradients_of_nearest(through, found, d_found, lambda x: _handed_on(x, context, reverse=True))
    sent = LowRank(first, *others) if others else first
    d_state = exchange_states(sent.mT, d_found, context, reverse=True)
    return d_state @ passed.found.mT, d_state


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

    def __init__(self, context: FLACPContext, value: int, log_decay: Tensor | None = None) -> None:
        self.context, self.value, self.log_decay = context, value, log_decay
        self.meanwhile: Callable[[], None] | None = None
        """What backward can do while it waits for the gradients of states."""
        self._finish: Callable[[], Passed] | None = None

    def begin(self, finals: Float[Tensor, "n h k w"]) -> None:
        """Pass on what follows from this rank's states, which autograd does not see; see complete."""
        if self.context.overlap:
            parts = map_passed_on(finals, self.value, self.context)
            self._finish = _begin(lambda m, h: pass_states(m, h, self.log_decay, self.context), *parts)

    def finish(self, transition: Tensor, state: Tensor) -> Passed:
        """What came; where nothing was begun, of these."""
        finish, self._finish = self._finish, None
        return pass_states(transition, state, self.log_decay, self.context) if finish is None else finish()

    def passed_back(self, passed: Passed, d_found: Tensor) -> tuple[Tensor | None, Tensor]:
        """The exchange of gradients: those of M and H."""
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is None or not self.context.overlap:
            return pass_gradients(passed, d_found, self.context)
        finish = _begin(lambda d: pass_gradients(passed, d, self.context), d_found)
        meanwhile()
        return finish()


def _begin(run: Callable[..., Any], *own: Tensor) -> Callable[[], Any]:
    """Start it, of these, beside what this rank goes on to compute; returns what waits for its result.

    The result is a tensor, or a tuple of results.
    """
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
        for x in _tensors(result):
            x.record_stream(torch.cuda.current_stream(device))
        return result

    return finish


def _tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [x for part in result for x in _tensors(part)]


@cache
def _worker() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "diptych-exchange")


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class ExchangedState(torch.autograd.Function):
    """pass_states, and pass_gradients. The anchor gets no gradient: it has backward come here on ranks that pass
    nothing on, too."""

    @staticmethod
    def forward(ctx, transition, state, anchor, crossing):
        """What came; see Crossing."""
        passed = crossing.finish(transition, state)
        ctx.save_for_backward(passed.found, *passed.sent, *passed.earlier)
        ctx.crossing, ctx.num_sent = crossing, len(passed.sent)
        return passed.found

    @staticmethod
    @differentiable_once
    def backward(ctx, d_found):  # pyright: ignore[reportIncompatibleMethodOverride]
        """Gradients of M and H."""
        found, *rest = ctx.saved_tensors
        passed = Passed(found, tuple(rest[: ctx.num_sent]), tuple(rest[ctx.num_sent :]))
        return *ctx.crossing.passed_back(passed, d_found), None, None
