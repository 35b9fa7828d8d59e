"""Transport ordering: whether a program of actions and messages runs to its end under the rules of a transport."""

from collections import Counter, defaultdict, deque
from typing import Literal

from diptych.plans.schedule.actions import Action, Schedule, ScheduleError
from diptych.plans.schedule.messages import Message, Program, dependencies

Semantics = Literal["async", "pair", "rank", "blocking"]
SEMANTICS = ("async", "pair", "rank", "blocking")
"""How ranks send, from the most to the least that a transport allows: what runs under one runs under all before it.

async: a message is sent without waiting, and received by its name, in any order. pair: the messages between two ranks,
of both directions, go one after the other, each when it is next at both its ends (NCCL, a communicator a pair). rank:
so do all messages of a rank (NCCL, one communicator for all). In both, a rank computes on while what it has sent waits
its turn. blocking: it does not; a send is over when it has been received.
"""


def validate_program(schedule: Schedule, program: Program, semantics: Semantics = "async") -> None:
    """Run a lowered table, messages and all, and refuse it if it stops before its end.

    Raises:
        ScheduleError: an action without its inputs, a message without its other end, or ranks that wait for each other.
        ValueError: unknown semantics.
    """
    if semantics not in SEMANTICS:
        raise ValueError(f"semantics: expected one of {SEMANTICS}, got {semantics!r}")
    run = _Run(schedule, program, semantics)
    while not run.ended:
        moved = [run.advance(rank) for rank in range(len(program))]
        if not any(moved):
            raise ScheduleError(f"schedule {schedule.name!r} stops: {run.blocked()}")


class _Run:
    """A program on its way: how far every rank is, what it has, and which messages are under way.

    A message that has to be next at both ends waits in a queue at each: of its pair of ranks, or of its rank. A send is
    put there and left; a receive ends when it has been next, and so has the send that it meets.
    """

    def __init__(self, schedule: Schedule, program: Program, semantics: Semantics) -> None:
        self._schedule, self._program, self._semantics = schedule, program, semantics
        self._place = [0] * len(program)
        self._have: list[set[Action]] = [set() for _ in program]
        self._sent: Counter[tuple[int, Message]] = Counter()
        self._queues: defaultdict[tuple[int, int | None], deque[Message]] = defaultdict(deque)

    @property
    def ended(self) -> bool:
        done = all(at == len(steps) for at, steps in zip(self._place, self._program, strict=True))
        return done and not any(self._queues.values()) and not self._sent.total()

    def advance(self, rank: int) -> bool:
        """Run a rank as far as it goes; whether it went at all."""
        start = self._place[rank]
        while (step := self._next(rank)) is not None and self._can_go(rank, step):
            self._place[rank] += 1
            if isinstance(step, Action):
                self._have[rank].add(step)
            elif step.direction == "RECV":
                self._have[rank].add(step.produced_by)
                if self._in_order:
                    self._queue(step.peer, rank).popleft()
                else:
                    self._sent[rank, step] -= 1
            elif self._in_order:
                self._queue(rank, step.peer).append(step)
            else:
                self._sent[step.peer, _other_end(step, rank)] += 1
        return self._place[rank] > start

    def blocked(self) -> str:
        """What every rank that is not done waits for."""
        told = []
        for rank, have in enumerate(self._have):
            step = self._next(rank)
            if isinstance(step, Action):
                needed = [str(action) for action in dependencies(self._schedule, step) if action not in have]
                told.append(f"rank {rank} cannot run {step} before {' and '.join(needed)}")
            elif step is not None and step.direction == "SEND" and step.produced_by not in have:
                told.append(f"rank {rank} cannot {step} before it has run it")
            elif step is not None:
                told.append(f"rank {rank} waits in {step}{self._in_front_of(rank, step)}")
        left = [f"nobody takes {queue[0]}" for queue in self._queues.values() if queue]
        left += [f"rank {rank} never gets to {message}" for (rank, message), count in self._sent.items() if count]
        return "; ".join(told or left)

    @property
    def _in_order(self) -> bool:
        return self._semantics in ("pair", "rank")

    def _queue(self, rank: int, peer: int) -> "deque[Message]":
        """The messages of a rank that wait to be next: with one peer, or with all."""
        return self._queues[rank, peer if self._semantics == "pair" else None]

    def _in_front_of(self, rank: int, step: Message) -> str:
        """The messages that have to go before a receive can, in words."""
        if not self._in_order or step.direction == "SEND":
            return ""
        ahead = [*self._queue(rank, step.peer)][:1]
        at_peer = self._queue(step.peer, rank)
        ahead += [m for m in [*at_peer][:1] if m != _other_end(step, rank)]
        return f" behind {' and '.join(map(str, ahead))}" if ahead else ""

    def _next(self, rank: int) -> Action | Message | None:
        steps, place = self._program[rank], self._place[rank]
        return steps[place] if place < len(steps) else None

    def _can_go(self, rank: int, step: Action | Message) -> bool:
        if isinstance(step, Action):
            return self._have[rank].issuperset(dependencies(self._schedule, step))
        if step.direction == "RECV" and self._in_order:
            # Next at both ends: of this rank's nothing it sent before is left, of the peer's it is the first.
            at_peer = self._queue(step.peer, rank)
            return not self._queue(rank, step.peer) and bool(at_peer) and at_peer[0] == _other_end(step, rank)
        if step.direction == "RECV":
            return self._sent[rank, step] > 0
        if step.produced_by not in self._have[rank]:
            return False
        # A blocking send ends with its receive, and that has to be where the other rank stands.
        return self._semantics != "blocking" or self._next(step.peer) == _other_end(step, rank)


def _other_end(message: Message, rank: int) -> Message:
    """The same message as its other end has it."""
    return Message("RECV" if message.direction == "SEND" else "SEND", message.produced_by, rank)
