"""Deadlock check of a program of actions and messages under a transport ordering."""

from collections import Counter, defaultdict, deque
from typing import Literal

from diptych.plans.schedule.actions import Action, Schedule, ScheduleError
from diptych.plans.schedule.messages import Message, Program, dependencies

TransportOrdering = Literal["async", "pair", "rank", "blocking"]
ORDERINGS = ("async", "pair", "rank", "blocking")
"""Transport orderings, from the weakest to the strongest constraint. A program that is deadlock-free under one ordering
is deadlock-free under all orderings before it.

async: sends do not wait, and messages are received by name, in any order.
pair: the messages between two ranks, in both directions, are transferred in program order, each when it is next on both
ranks (NCCL with one communicator per pair). A rank continues to compute while its sends wait.
rank: as pair, for all messages of a rank (NCCL with one communicator for all ranks).
blocking: a rank waits in a send until the message is received.
"""


def validate_program(schedule: Schedule, program: Program, ordering: TransportOrdering = "async") -> None:
    """Reject a program that does not run to its end under a transport ordering.

    Args:
        schedule: the schedule that the program executes.
        program: actions and messages of each rank.
        ordering: transport ordering, one of ORDERINGS.

    Raises:
        ScheduleError: an action lacks inputs, a message lacks its other end, or the ranks deadlock.
        ValueError: ordering is unknown.
    """
    if ordering not in ORDERINGS:
        raise ValueError(f"ordering: expected one of {ORDERINGS}, got {ordering!r}")
    run = _Run(schedule, program, ordering)
    while not run.ended:
        moved = [run.advance(rank) for rank in range(len(program))]
        if not any(moved):
            raise ScheduleError(f"schedule {schedule.name!r} stops: {run.blocked()}")


class _Run:
    """An execution of a program: the position and results of every rank, and the messages in transit.

    With ordered transports, a send enters a queue of its pair of ranks, or of its rank, and the rank continues. A
    receive completes when nothing is queued in front of it and the matching send is first in the sender's queue.
    """

    def __init__(self, schedule: Schedule, program: Program, ordering: TransportOrdering) -> None:
        self._schedule = schedule
        self._program = program
        self._ordering = ordering
        self._position = [0] * len(program)
        self._have: list[set[Action]] = [set() for _ in program]
        self._sent: Counter[tuple[int, Message]] = Counter()
        self._queues: defaultdict[tuple[int, int | None], deque[Message]] = defaultdict(deque)

    @property
    def ended(self) -> bool:
        """True if every rank is at its end and every message was received."""
        done = all(at == len(steps) for at, steps in zip(self._position, self._program, strict=True))
        return done and not any(self._queues.values()) and not self._sent.total()

    def advance(self, rank: int) -> bool:
        """Run a rank until it waits, and return True if it completed at least one step."""
        start = self._position[rank]
        while (step := self._next(rank)) is not None and self._can_go(rank, step):
            self._position[rank] += 1
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
        return self._position[rank] > start

    def blocked(self) -> str:
        """Describe what every unfinished rank waits for."""
        waiting = []
        for rank, have in enumerate(self._have):
            step = self._next(rank)
            if isinstance(step, Action):
                needed = [str(action) for action in dependencies(self._schedule, step) if action not in have]
                waiting.append(f"rank {rank} cannot run {step} before {' and '.join(needed)}")
            elif step is not None and step.direction == "SEND" and step.produced_by not in have:
                waiting.append(f"rank {rank} cannot {step} before it has computed the content")
            elif step is not None:
                waiting.append(f"rank {rank} waits in {step}{self._in_front_of(rank, step)}")
        left = [f"no rank receives {queue[0]}" for queue in self._queues.values() if queue]
        left += [f"rank {rank} lacks {message}" for (rank, message), count in self._sent.items() if count]
        return "; ".join(waiting or left)

    @property
    def _in_order(self) -> bool:
        return self._ordering in ("pair", "rank")

    def _queue(self, rank: int, peer: int) -> "deque[Message]":
        """Return the queue of a rank's sends: to one peer, or to all."""
        return self._queues[rank, peer if self._ordering == "pair" else None]

    def _in_front_of(self, rank: int, step: Message) -> str:
        """Describe the queued messages in front of a receive."""
        if not self._in_order or step.direction == "SEND":
            return ""
        ahead = [*self._queue(rank, step.peer)][:1]
        at_peer = self._queue(step.peer, rank)
        ahead += [m for m in [*at_peer][:1] if m != _other_end(step, rank)]
        return f" behind {' and '.join(map(str, ahead))}" if ahead else ""

    def _next(self, rank: int) -> Action | Message | None:
        steps = self._program[rank]
        position = self._position[rank]
        return steps[position] if position < len(steps) else None

    def _can_go(self, rank: int, step: Action | Message) -> bool:
        """Return True if a rank can complete its next step."""
        if isinstance(step, Action):
            return self._have[rank].issuperset(dependencies(self._schedule, step))
        if step.direction == "RECV" and self._in_order:
            # Next on both ranks: this rank has no earlier send in the queue, and the matching send is the peer's first.
            at_peer = self._queue(step.peer, rank)
            return not self._queue(rank, step.peer) and bool(at_peer) and at_peer[0] == _other_end(step, rank)
        if step.direction == "RECV":
            return self._sent[rank, step] > 0
        if step.produced_by not in self._have[rank]:
            return False
        # A blocking send completes with its receive, which must be the peer's next step.
        return self._ordering != "blocking" or self._next(step.peer) == _other_end(step, rank)


def _other_end(message: Message, rank: int) -> Message:
    """Return the message as it appears in the program of the other rank."""
    return Message("RECV" if message.direction == "SEND" else "SEND", message.produced_by, rank)
