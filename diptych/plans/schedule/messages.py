"""Lowering of a schedule to programs: the actions of each rank, with the messages between ranks.

Forwards send activations, and backwards send the gradient of the stage's input. A message is identified by the action
that produced it, so that every message of a step has a unique name.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from diptych.plans.schedule.actions import Action, Kind, Schedule


class PipelineError(RuntimeError):
    """An error in the communication: a message is missing, was not received, or is not the expected one."""


class Message(NamedTuple):
    """One end of a message."""

    direction: Literal["SEND", "RECV"]
    produced_by: Action
    """F: activations for the next stage; B or I: a gradient for the previous stage."""
    peer: int
    """The rank at the other end."""

    def __str__(self) -> str:
        return f"{self.direction} {self.produced_by} {'to' if self.direction == 'SEND' else 'from'} rank {self.peer}"


Program = tuple[tuple[Action | Message, ...], ...]
"""Actions and messages of each rank, in order."""


def dependencies(schedule: Schedule, action: Action) -> list[Action]:
    """Return the actions, on any rank, that must end before an action starts."""
    return [Action(*each) for each in needed_by(schedule, action)]


def needed_by(schedule: Schedule, action: Action) -> tuple[tuple[Kind, int, int], ...]:
    """Return the dependencies as plain tuples, which compare equal to actions and are faster to create."""
    kind, stage, microbatch = action
    if kind == "F":
        return (("F", stage - 1, microbatch),) if stage > 0 else ()
    if kind == "W":
        return (("I", stage, microbatch),)
    if stage + 1 == schedule.num_stages:
        return (("F", stage, microbatch),)
    return ("F", stage, microbatch), (schedule.backward_kind(stage + 1, microbatch), stage + 1, microbatch)


def receiver(schedule: Schedule, action: Action) -> int | None:
    """Return the rank that receives an action's result; None if the result stays on its rank or has no further use."""
    if action.kind == "W":
        return None
    stage = action.stage + (1 if action.kind == "F" else -1)
    if not 0 <= stage < schedule.num_stages:
        return None
    rank = schedule.rank_of(stage)
    return None if rank == schedule.rank_of(action.stage) else rank


def lower(schedule: Schedule) -> Program:
    """Insert the messages between the actions of a schedule.

    In each round, every rank whose next action is ready runs that action, and the message is appended to the programs
    of sender and receiver. All programs then agree with one global order of messages. They are deadlock-free even with
    blocking sends: the first unfinished message in the global order is always the next one on both of its ranks.

    Raises:
        ValueError: the schedule deadlocks; the message names the waiting actions.
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
                f"schedule {schedule.name!r}: expected a deadlock-free order, but every rank waits: "
                + _waiting(schedule, waiting, done)
            )
        for action in [_run(program, waiting, rank) for rank in ready]:
            done.add(action)
            peer = receiver(schedule, action)
            rank = schedule.rank_of(action.stage)
            if peer is not None:
                program[rank].append(Message("SEND", action, peer))
                program[peer].append(Message("RECV", action, rank))
    return tuple(tuple(steps) for steps in program)


def _run(program: list[list[Action | Message]], waiting: list[list[Action]], rank: int) -> Action:
    action = waiting[rank].pop()
    program[rank].append(action)
    return action


def _waiting(schedule: Schedule, waiting: Sequence[list[Action]], done: set[Action]) -> str:
    """Describe every blocked rank: its next action and the missing dependencies."""
    blocked = []
    for rank, left in enumerate(waiting):
        if left:
            needed = [str(action) for action in dependencies(schedule, left[-1]) if action not in done]
            blocked.append(f"rank {rank} cannot run {left[-1]} before {' and '.join(needed)}")
    return "; ".join(blocked)
