"""A schedule lowered to what each rank does: its actions, and the messages between them.

Ranks exchange what a forward gives (activations) and what a backward gives (the input's gradient). A message is named
after the action that made it, so a receiver knows what it waits for, and no two messages of a step are alike.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from diptych.plans.schedule.actions import Action, Kind, Schedule


class PipelineError(RuntimeError):
    """A message between ranks did not come, was not taken, or is not the one expected."""


class Message(NamedTuple):
    """One end of a message."""

    direction: Literal["SEND", "RECV"]
    produced_by: Action
    """F: activations go on to the next stage; B or I: a gradient goes back to the stage before."""
    peer: int
    """The rank at the other end."""

    def __str__(self) -> str:
        return f"{self.direction} {self.produced_by} {'to' if self.direction == 'SEND' else 'from'} rank {self.peer}"


Program = tuple[tuple[Action | Message, ...], ...]
"""By rank, in order."""


def dependencies(schedule: Schedule, action: Action) -> list[Action]:
    """What must be finished before an action, wherever it runs."""
    return [Action(*each) for each in needed_by(schedule, action)]


def needed_by(schedule: Schedule, action: Action) -> tuple[tuple[Kind, int, int], ...]:
    """The same as plain tuples, which equal actions and are made sooner: for whoever asks about every action."""
    kind, stage, microbatch = action
    if kind == "F":
        return (("F", stage - 1, microbatch),) if stage > 0 else ()
    if kind == "W":
        return (("I", stage, microbatch),)
    if stage + 1 == schedule.num_stages:
        return (("F", stage, microbatch),)
    return ("F", stage, microbatch), (schedule.backward_kind(stage + 1, microbatch), stage + 1, microbatch)


def receiver(schedule: Schedule, action: Action) -> int | None:
    """The rank an action's result is sent to; None if it stays, or if nothing is made of it."""
    if action.kind == "W":
        return None
    stage = action.stage + (1 if action.kind == "F" else -1)
    if not 0 <= stage < schedule.num_stages:
        return None
    rank = schedule.rank_of(stage)
    return None if rank == schedule.rank_of(action.stage) else rank


def lower(schedule: Schedule) -> Program:
    """Put every message between a rank's actions, both ends at once.

    Ranks take turns: each whose next action has all it needs runs it, and its message is appended to its own list and
    to the receiver's. All lists then agree with one global order of messages, so that they run to the end even where
    a send waits for its receive: of the messages not yet done, the first in that order is the next of both its ranks.

    Raises:
        ValueError: the schedule's own order cannot run; see validate_schedule for which action waits for what.
    """
    program: list[list[Action | Message]] = [[] for _ in schedule.actions]
    waiting = [list(reversed(actions)) for actions in schedule.actions]
    done: set[Action] = set()
    while any(waiting):
        ready = [
            rank
            for rank, left in enumerate(waiting)
            if left and all(needed in done for needed in dependencies(schedule, left[-1]))
        ]
        if not ready:
            raise ValueError(
                f"schedule {schedule.name!r}: expected an order that runs, but every rank waits: "
                + _waiting(schedule, waiting, done)
            )
        for action in [_run(program, waiting, rank) for rank in ready]:
            done.add(action)
            peer, rank = receiver(schedule, action), schedule.rank_of(action.stage)
            if peer is not None:
                program[rank].append(Message("SEND", action, peer))
                program[peer].append(Message("RECV", action, rank))
    return tuple(tuple(steps) for steps in program)


def _run(program: list[list[Action | Message]], waiting: list[list[Action]], rank: int) -> Action:
    action = waiting[rank].pop()
    program[rank].append(action)
    return action


def _waiting(schedule: Schedule, waiting: Sequence[list[Action]], done: set[Action]) -> str:
    """Every blocked rank, its next action, and what that still needs."""
    told = []
    for rank, left in enumerate(waiting):
        if left:
            needed = [str(action) for action in dependencies(schedule, left[-1]) if action not in done]
            told.append(f"rank {rank} cannot run {left[-1]} before {' and '.join(needed)}")
    return "; ".join(told)
