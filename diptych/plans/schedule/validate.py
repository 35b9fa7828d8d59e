"""Validation of a schedule: every action exactly once, on its rank, in a deadlock-free order."""

from collections import Counter
from collections.abc import Sequence
from itertools import product

from diptych.plans.schedule.actions import Action, Kind, Schedule, ScheduleError
from diptych.plans.schedule.messages import lower
from diptych.plans.schedule.transport import TransportOrdering, validate_program


def validate_schedule(schedule: Schedule, ordering: TransportOrdering = "async") -> None:
    """Reject an invalid schedule.

    A valid schedule runs F, and either B or I and W, exactly once for every stage and microbatch, on the stage's rank.
    Every action comes after the actions it depends on, and the schedule is deadlock-free.

    Args:
        schedule: any schedule, built here or by hand.
        ordering: transport ordering, one of diptych.plans.schedule.transport.ORDERINGS. The messages that
            diptych.plans.schedule.messages.lower adds are deadlock-free under all of them or under none;
            validate_program checks messages in another order.

    Raises:
        ScheduleError: the schedule is invalid; the message names rank, action and unmet condition of the first fault.
    """
    _check_actions(schedule)
    try:
        program = lower(schedule)
    except ValueError as error:
        raise ScheduleError(str(error)) from None
    validate_program(schedule, program, ordering)


def _check_actions(schedule: Schedule) -> None:
    """Reject actions that are missing, repeated, out of range or on another stage's rank."""
    lists = len(schedule.actions)
    if lists != schedule.pp_size:
        raise ScheduleError(f"actions: expected a list for each of {schedule.pp_size} ranks, got {lists}")
    kinds = _kinds(schedule)
    stages = range(schedule.num_stages)
    microbatches = range(schedule.num_microbatches)
    expected = {Action(kind, stage, i) for kind in kinds for stage in stages for i in microbatches}
    for rank, actions in enumerate(schedule.actions):
        for action, count in Counter(actions).items():
            if action not in expected:
                raise ScheduleError(
                    f"rank {rank}, {action}: expected {_listed(kinds)} of stages 0 to {schedule.num_stages - 1} and "
                    f"microbatches 0 to {schedule.num_microbatches - 1}, got another action; remove it"
                )
            home = schedule.rank_of(action.stage)
            if home != rank:
                raise ScheduleError(
                    f"rank {rank}, {action}: expected actions of this rank's stages, got stage {action.stage}, which "
                    f"is placed on rank {home}; move it to rank {home}"
                )
            if count > 1:
                raise ScheduleError(f"rank {rank}, {action}: expected once, got {count} times; list it once")
            if action.kind in "IW" and not schedule.splits(action.stage, action.microbatch):
                full = action._replace(kind="B")
                raise ScheduleError(
                    f"rank {rank}, {action}: expected B, or else I and W, got {full} beside it; remove one of them"
                )
    done = {action for actions in schedule.actions for action in actions}
    for i, stage in product(microbatches, stages):
        if missing := _missing(schedule, kinds, done, stage, i):
            raise ScheduleError(f"rank {schedule.rank_of(stage)}, {missing}: expected once, got none; add it")


def _missing(schedule: Schedule, kinds: Sequence[Kind], done: set[Action], stage: int, microbatch: int) -> str:
    """Return the actions that a stage misses for a microbatch, as text; the empty string if none."""
    backward: tuple[Kind, ...] = ("I", "W") if schedule.splits(stage, microbatch) else ("B",)
    needed: tuple[Kind, ...] = ("F", *(() if schedule.forward_only else backward))
    missing = [action for kind in needed if (action := Action(kind, stage, microbatch)) not in done]
    if [action.kind for action in missing] == ["I", "W"] and "B" in kinds:
        return f"{missing[0]._replace(kind='B')}, or else {missing[0]} and {missing[1]}"
    return str(missing[0]) if missing else ""


def _kinds(schedule: Schedule) -> tuple[Kind, ...]:
    """Return the kinds of actions that a schedule may contain: F, and the kinds of backward that it uses anywhere."""
    if schedule.forward_only:
        return ("F",)
    has_full = any(action.kind == "B" for actions in schedule.actions for action in actions)
    if not schedule.splits_backward:
        return ("F", "B")
    return ("F", "B", "I", "W") if has_full else ("F", "I", "W")


def _listed(kinds: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(kinds[:-1]), kinds[-1])))
