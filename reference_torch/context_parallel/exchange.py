"""The exchange of states between ranks: its algorithms, gradients, and overlap with computation."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from diptych.plans.context.exchange import check_joint_exchange, scan_steps
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
    """Return the initial state S of this rank: the maps S -> M S + S_local of the ranks before it, composed.

    All ranks have to call this function.

    Args:
        transition: M; 0 if the final state does not depend on the initial state. [HV, K, K]; with all_gather it may be
            a LowRank.
        state: S_local. [HV, K, V]
        context: context of the rank.
        reverse: compose the maps of the ranks after this rank, from the last.

    Returns:
        S; 0 on the first rank, or with reverse on the last. [HV, K, V]

    Raises:
        ValueError: the context has cp_exchange "pipelined".
        PipelineError: another rank did not take part within context.timeout.
    """
    check_joint_exchange(context.cp_exchange)
    position = context.size - 1 - context.rank if reverse else context.rank
    if context.size == 1:
        return torch.zeros_like(state)
    if context.cp_exchange == "all_gather":
        return _all_gather(transition, state, context, position, reverse)
    assert isinstance(transition, Tensor), "only all_gather sends a LowRank"
    own = (transition.contiguous(), state.contiguous())
    if context.cp_exchange == "ring":
        return _ring(*own, context, position, reverse)
    return _prefix_scan(*own, context, position, reverse)


def context_for(context: FLACPContext, x: Tensor) -> FLACPContext:
    """Return the context of a call: for a fake tensor, which has no elements, one that sends and receives nothing."""
    if not isinstance(x, FakeTensor):
        return context
    alone: dict[str, Any] = {"group": None, "rank": 0, "size": 1, "messages": None, "cp_attention_layout": "contiguous"}
    return replace(context, **alone, cp_exchange="all_gather", cp_truncate_ranks=None, overlap=False)


def sum_over_ranks(x: Tensor, context: FLACPContext) -> Tensor:
    """Return the sum of an array over all ranks, without a gradient; all ranks have to call this function."""
    if context.size == 1:
        return x
    gathered = [torch.empty_like(x) for _ in range(context.size)]
    work = dist.all_gather(gathered, x.contiguous(), group=context.group, async_op=True)
    wait_for(work, "an array of all ranks", context.timeout)
    return torch.stack(gathered).sum(0)


def _all_gather(
    transition: Tensor | LowRank, state: Tensor, context: FLACPContext, position: int, reverse: bool
) -> Tensor:
    """Gather the maps of all ranks, and compose those before this rank."""
    is_narrow = isinstance(transition, LowRank)
    packed = _on_wire(torch.cat([state, transition.packed() if is_narrow else transition], dim=-1), context)
    gathered = [torch.empty_like(packed) for _ in range(context.size)]
    work = dist.all_gather(gathered, packed, group=context.group, async_op=True)
    wait_for(work, "the states of all ranks", context.timeout)
    initial = torch.zeros_like(state)
    width = state.shape[-1]
    first = position - context.reach(reverse)
    for index, before in enumerate(gathered[: -position - 1 : -1] if reverse else gathered[:position]):
        before = before.to(state.dtype)
        if index <= first:  # the sequence begins on this rank, so its final state does not depend on earlier ranks
            initial = before[..., :width] if index == first else initial
        elif is_narrow:
            initial = before[..., :width] + LowRank.unpacked(before[..., width:]).times(initial)
        else:
            initial = torch.baddbmm(before[..., :width], before[..., width:], initial)
    return initial


def _ring(transition: Tensor, state: Tensor, context: FLACPContext, position: int, reverse: bool) -> Tensor:
    """Receive the initial state from the previous rank, and send M S + S_local to the next rank."""
    received = _on_wire(torch.zeros_like(state), context)
    if position > 0:
        wait_for_part(receive_part(received, position - 1, context, reverse), context)
    initial = received.to(state.dtype)
    if position < context.size - 1:
        after = torch.baddbmm(state, transition, initial) if context.goes_through else state
        sent = _on_wire(after, context)
        wait_for_part(send_part(sent, position + 1, context, reverse), context)
    return initial


def _prefix_scan(transition: Tensor, state: Tensor, context: FLACPContext, position: int, reverse: bool) -> Tensor:
    """Compose the maps in about log2(size) steps; the distance between sender and receiver doubles (Hillis-Steele)."""
    for index, step in enumerate(scan_steps(context.size)):
        sends = step.first_sender <= position < context.size - step.distance
        receives = position >= step.distance + step.first_sender
        parts = [state] if step.is_last else [state, transition]
        parts = [_on_wire(part, context) for part in parts]
        received = [torch.zeros_like(part) for part in parts]
        works = [send_part(part, position + step.distance, context, reverse) for part in parts if sends]
        works += [receive_part(part, position - step.distance, context, reverse) for part in received if receives]
        for work in works:
            wait_for_part(work, context)
        received = [part.to(state.dtype) for part in received]
        if index == 0:  # each rank sends its own map to the next rank; the first rank receives zeros
            state = received[0]
            transition = received[0] if step.is_last else received[1]
        elif receives and step.distance < context.reach(reverse):
            state = torch.baddbmm(state, transition, received[0])
            transition = transition if step.is_last else torch.bmm(transition, received[1])
    return state


def _shift(part: Tensor, context: FLACPContext, reverse: bool) -> Tensor:
    """Send a part to the next rank, and return the part of the previous rank, or 0 on the first rank."""
    position = context.size - 1 - context.rank if reverse else context.rank
    sent = _on_wire(part.contiguous(), context)
    received = torch.zeros_like(sent)
    works = []
    if position < context.size - 1:
        works.append(send_part(sent, position + 1, context, reverse))
    if position > 0:
        works.append(receive_part(received, position - 1, context, reverse))
    for work in works:
        wait_for_part(work, context)
    return received.to(part.dtype)


class Exchanged(NamedTuple):
    """The result of an exchange, and the values saved for its backward."""

    initial: Tensor
    """Initial state of this rank. [HV, K, V]"""
    sent: tuple[Tensor, ...]
    """Transition that this rank sent: M, or the parts of a LowRank."""
    earlier_initials: tuple[Tensor, ...]
    """With cp_truncate_ranks: the initial states from 1, 2, ... previous ranks, except the last. [HV, K, V] each"""


def run_exchange(transition: Tensor, state: Tensor, log_decay: Tensor | None, context: FLACPContext) -> Exchanged:
    """Run exchange_states, or the approximation that the context selects.

    Args:
        transition: M. [HV, K, K]
        state: S_local. [HV, K, V]
        log_decay: sum of the log decays of the part, for cp_transition_rank. [HV, K] or [HV, 1]
        context: context of the rank.
    """
    if context.cp_truncate_ranks is not None and context.size > 1:
        rounds = min(context.cp_truncate_ranks, context.size - 1)
        transition_if_used = transition if context.goes_through else None
        initials = states_of_nearest(transition_if_used, state, rounds, lambda x: _shift(x, context, reverse=False))
        return Exchanged(initials[-1], (transition,), tuple(initials[:-1]))
    if context.cp_transition_rank is None:
        return Exchanged(exchange_states(transition, state, context), (transition,), ())
    assert log_decay is not None, "cp_transition_rank needs log_decay"
    narrow = low_rank(transition, log_decay, context.cp_transition_rank)
    return Exchanged(exchange_states(narrow, state, context), tuple(narrow), ())


def run_exchange_backward(
    exchanged: Exchanged, d_initial: Tensor, context: FLACPContext
) -> tuple[Tensor | None, Tensor]:
    """Return the gradients of M and S_local of run_exchange.

    The gradient of a rank's S_local is exchange_states in reverse, with M^T for M and the gradient of S for S_local.
    The gradient of its M is the gradient of S_local times S^T.

    Args:
        exchanged: result of run_exchange.
        d_initial: gradient of the initial state S of this rank. [HV, K, V]
        context: context of the rank.
    """
    first, *factors = exchanged.sent
    if context.cp_truncate_ranks is not None and context.size > 1:
        initials = [*exchanged.earlier_initials, exchanged.initial]
        transition_if_used = first if context.goes_through else None
        return gradients_of_nearest(transition_if_used, initials, d_initial, lambda x: _shift(x, context, reverse=True))
    sent = LowRank(first, *factors) if factors else first
    d_state = exchange_states(sent.mT, d_initial, context, reverse=True)
    return d_state @ exchanged.initial.mT, d_state


def _on_wire(part: Tensor, context: FLACPContext) -> Tensor:
    """Convert a part to the type in which it is sent."""
    return part if context.cp_wire_dtype is None else part.to(getattr(torch, context.cp_wire_dtype))


def _rank_at(position: int, context: FLACPContext, reverse: bool) -> int:
    """Return the global rank at a position, counted from the first rank, or from the last if reverse."""
    return dist.get_global_rank(context.group, context.size - 1 - position if reverse else position)


def send_part(part: Tensor, position: int, context: FLACPContext, reverse: bool) -> dist.Work:
    """Begin to send a part to the rank at a position, counted from the first rank, or from the last if reverse.

    Args:
        part: contiguous tensor.
        position: position of the receiver.
        context: context of the rank.
        reverse: count positions from the last rank.
    """
    return cast("dist.Work", dist.isend(part, _rank_at(position, context, reverse), group=context.group))


def receive_part(part: Tensor, position: int, context: FLACPContext, reverse: bool) -> dist.Work:
    """Begin to receive a part from the rank at a position, counted from the first rank, or from the last if reverse.

    Args:
        part: contiguous tensor to fill.
        position: position of the sender.
        context: context of the rank.
        reverse: count positions from the last rank.
    """
    return cast("dist.Work", dist.irecv(part, _rank_at(position, context, reverse), group=context.group))


def wait_for_part(work: dist.Work, context: FLACPContext) -> None:
    """Wait until a part has arrived.

    Args:
        work: from send_part or receive_part.
        context: context of the rank, with the timeout.

    Raises:
        PipelineError: the other rank did not answer within the timeout.
    """
    wait_for(work, "a state of another rank", context.timeout)


def map_to_send(finals: Tensor, value: int, context: FLACPContext) -> tuple[Tensor, Tensor]:
    """Return M and S_local that this rank sends.

    Args:
        finals: final states with transition columns, of all sequences or of the last. [n, HV, K, V + K]
        value: V.
        context: context of the rank.
    """
    state = finals[-1, ..., :value]
    heads, key_dim, _ = state.shape
    transition = finals[0, ..., value:] if context.goes_through else finals.new_zeros(heads, key_dim, key_dim)
    return transition, torch.zeros_like(state) if context.is_last_rank else state


class StateExchange:
    """The exchange of states of one call, which overlaps with computation.

    It begins when the states are known, on another thread, or on another stream of a GPU. The result is waited for
    where it is needed.

    Args:
        context: context of the rank.
        value: width V of values.
        log_decay: sum of the log decays of the part, for cp_transition_rank. [HV, K] or [HV, 1]
    """

    def __init__(self, context: FLACPContext, value: int, log_decay: Tensor | None = None) -> None:
        self.context = context
        self.value = value
        self.log_decay = log_decay
        self.overlapped_work: Callable[[], None] | None = None
        """Computation of backward that overlaps with the exchange of gradients."""
        self._finish: Callable[[], Exchanged] | None = None

    def begin(self, finals: Float[Tensor, "n h k w"]) -> None:
        """Begin the exchange, which autograd does not record; see complete.

        Args:
            finals: final states with transition columns. [n, HV, K, V + K]
        """
        if self.context.overlap:
            parts = map_to_send(finals, self.value, self.context)
            self._finish = _begin(lambda m, h: run_exchange(m, h, self.log_decay, self.context), *parts)

    def finish(self, transition: Tensor, state: Tensor) -> Exchanged:
        """Return the result of the exchange, or run it now if it was not begun.

        Args:
            transition: M. [HV, K, K]
            state: S_local. [HV, K, V]
        """
        finish = self._finish
        self._finish = None
        return run_exchange(transition, state, self.log_decay, self.context) if finish is None else finish()

    def exchange_gradients(self, exchanged: Exchanged, d_initial: Tensor) -> tuple[Tensor | None, Tensor]:
        """Exchange gradients, and return those of M and S_local.

        Args:
            exchanged: result of the exchange.
            d_initial: gradient of the initial state of this rank. [HV, K, V]
        """
        overlapped_work = self.overlapped_work
        self.overlapped_work = None
        if overlapped_work is None or not self.context.overlap:
            return run_exchange_backward(exchanged, d_initial, self.context)
        finish = _begin(lambda d: run_exchange_backward(exchanged, d, self.context), d_initial)
        overlapped_work()
        return finish()


def _begin(run: Callable[..., Any], *own: Tensor) -> Callable[[], Any]:
    """Start ``run(*own)`` on another thread or stream, and return a function that waits for its result.

    The result is a tensor, or a nested tuple of tensors.
    """
    device = own[0].device
    if device.type != "cuda":
        return _worker().submit(torch.no_grad()(run), *own).result
    side = _stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side), torch.no_grad():
        result = run(*own)
    for x in own:  # the allocator must not reuse their memory before the side stream has read it
        x.record_stream(side)

    def finish() -> Tensor:
        torch.cuda.current_stream(device).wait_stream(side)
        for x in _tensors(result):
            x.record_stream(torch.cuda.current_stream(device))
        return result

    return finish


def _tensors(result: Any) -> list[Tensor]:
    """Return the tensors of a nested tuple."""
    return [result] if isinstance(result, Tensor) else [x for part in result for x in _tensors(part)]


@cache
def _worker() -> ThreadPoolExecutor:
    """Return the thread on which exchanges run without a GPU."""
    return ThreadPoolExecutor(1, "diptych-exchange")


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of a device on which exchanges run."""
    return torch.cuda.Stream(device)


class ExchangedState(torch.autograd.Function):
    """run_exchange with run_exchange_backward as its backward.

    The argument anchor gets no gradient. It connects this function to the loss on ranks that send no state, because
    every rank has to take part in the exchange of gradients.
    """

    @staticmethod
    def forward(ctx, transition, state, anchor, exchange):
        """Finish the exchange, and return the initial state of this rank."""
        exchanged = exchange.finish(transition, state)
        ctx.save_for_backward(exchanged.initial, *exchanged.sent, *exchanged.earlier_initials)
        ctx.exchange = exchange
        ctx.num_sent = len(exchanged.sent)
        return exchanged.initial

    @staticmethod
    @differentiable_once
    def backward(ctx, d_initial):  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradients of M and S_local."""
        initial, *rest = ctx.saved_tensors
        exchanged = Exchanged(initial, tuple(rest[: ctx.num_sent]), tuple(rest[ctx.num_sent :]))
        return *ctx.exchange.exchange_gradients(exchanged, d_initial), None, None
