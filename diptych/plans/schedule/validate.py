"""Validation of a schedule: every action exactly once, on its rank, in an order that runs."""

from collections import Counter
from collections.abc import Sequence
from itertools import product

from diptych.plans.schedule.actions import Action, Kind, Schedule, ScheduleError
from diptych.plans.schedule.messages import lower
from diptych.plans.schedule.transport import Semantics, validate_program


def validate_schedule(schedule: Schedule, semantics: Semantics = "async") -> None:
    """Refuse a table that is wrong, naming rank, action and what is unmet.

    Every stage runs F, and B or else I and W, exactly once for every microbatch, on its own rank; everything an action
    needs comes before it; nothing waits for ever.

    Args:
        schedule: any table, built here or by hand.
        semantics: how messages go; see SEMANTICS. Messages made of a table (diptych.plans.schedule.messages.lower)
            go under all of them where they go under one; for messages of another order there is validate_program.

    Raises:
        ScheduleError: the first fault found.
    """
    _check_actions(schedule)
    try:
        program = lower(schedule)
    except ValueError as error:
        raise ScheduleError(str(error)) from None
    validate_program(schedule, program, semantics)


def _check_actions(schedule: Schedule) -> None:
    """Every action once, in range, on its rank."""
    lists = len(schedule.actions)
    if lists != schedule.pp_size:
        raise ScheduleError(f"actions: expected a list for each of {schedule.pp_size} ranks, got {lists}")
    kinds = _kinds(schedule)
    stages, microbatches = range(schedule.num_stages), range(schedule.num_microbatches)
    expected = {Action(kind, stage, i) for kind in kinds for stage in stages for i in microbatches}
    for rank, actions in enumerate(schedule.actions):
        for action, count in Counter(actions).items():
            if action not in expected:
                raise ScheduleError(
                    f"rank {rank}, {action}: expected {_listed(kinds)} of stages 0 to "
                    f"{schedule.num_stages - 1} and microbatches 0 to {schedule.num_microbatches - 1}"
                )
            home = schedule.rank_of(action.stage)
            if home != rank:
                raise ScheduleError(f"rank {rank}, {action}: stage {action.stage} lies on rank {home}")
            if count > 1:
                raise ScheduleError(f"rank {rank}, {action}: expected once, got {count} times")
            if action.kind in "IW" and not schedule.splits(action.stage, action.microbatch):
                whole = action._replace(kind="B")
                raise ScheduleError(f"rank {rank}, {action}: expected B, or else I and W, got {whole} beside it")
    done = {action for actions in schedule.actions for action in actions}
    for i, stage in product(microbatches, stages):
        if missing := _missing(schedule, kinds, done, stage, i):
            raise ScheduleError(f"rank {schedule.rank_of(stage)}, {missing}: expected once, got none")


def _missing(schedule: Schedule, kinds: Sequence[Kind], done: set[Action], stage: int, microbatch: int) -> str:
    """What a stage does not do of a microbatch, or the empty string."""
    backward: tuple[Kind, ...] = ("I", "W") if schedule.splits(stage, microbatch) else ("B",)
    needed: tuple[Kind, ...] = ("F", *(() if schedule.forward_only else backward))
    missing = [action for kind in needed if (action := Action(kind, stage, microbatch)) not in done]
    if [action.kind for action in missing] == ["I", "W"] and "B" in kinds:
        return f"{missing[0]._replace(kind='B')}, or else {missing[0]} and {missing[1]}"
    return str(missing[0]) if missing else ""


def _kinds(schedule: Schedule) -> tuple[Kind, ...]:
    """Those that a table may have: of backwards what it has anywhere."""
    if schedule.forward_only:
        return ("F",)
    has_whole = any(action.kind == "B" for actions in schedule.actions for action in actions)
    if not schedule.splits_backward:
        return ("F", "B")
    return ("F", "B", "I", "W") if has_whole else ("F", "I", "W")


def _listed(kinds: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(kinds[:-1]), kinds[-1])))
