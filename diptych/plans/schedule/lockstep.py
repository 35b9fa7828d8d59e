"""A schedule in lock-step: what every rank does at every tick, and in which slot each value lies meanwhile.

A program that all ranks run alike cannot follow a list of its own on each; it reads what to do from a table, one row a
tick. A tick stores what arrived, runs at most one action of a kind, and sends the results on, so that they arrive at
the next tick. Values wait in slots of a buffer; two values share a slot where their lives do not meet, so a buffer is
as long as the most values alive at once, whatever the number of microbatches.

Ticks are canonical, one action each and every rank's actions in the schedule's own order, or fused: a forward and then
a backward in one tick. As every rank waits for the slowest, a canonical tick costs max(F, B) and 1F1B takes
2 m + 2 (p - 1) of them; fused ticks cost F + B and are m + 2 (p - 1), but hold up to 2 p - 1 microbatches, not p.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple, get_args

import numpy as np

from diptych.plans.schedule.actions import Action, Kind, Schedule
from diptych.plans.schedule.messages import needed_by
from diptych.plans.schedule.simulate import Costs
from diptych.plans.schedule.validate import validate_schedule

Keep = Literal["inputs", "residuals"]
KEEPS = ("inputs", "residuals")
FUSED = ("none", "1f1b", "interleaved")
"""Schedules whose forwards and backwards alternate, and therefore can share ticks."""


class Rows(NamedTuple):
    """Columns of the table, int32 [p, ticks]; of arrivals [p, ticks, shifts]. Stage and microbatch -1: nothing to do.

    A slot equal to the buffer's length is scratch: what is stored there is never read.
    """

    input_arrivals: np.ndarray
    """Slot for the activations that came over each of Ticks.shifts."""
    gradient_arrivals: np.ndarray
    """Slot for the gradient that came back over each of them."""
    forward_stage: np.ndarray
    forward_microbatch: np.ndarray
    forward_input: np.ndarray
    """Slot of the activations it reads."""
    forward_kept: np.ndarray
    """Slot for what it keeps for backward."""
    backward_stage: np.ndarray
    """Of B, or of I; where the schedule splits some backwards, a whole one's W is in the same tick."""
    backward_microbatch: np.ndarray
    backward_input: np.ndarray
    backward_gradient: np.ndarray
    """Slot of the gradient of the stage's output."""
    backward_kept: np.ndarray
    backward_weights: np.ndarray
    """Slot for what I keeps for W."""
    weights_stage: np.ndarray
    weights_microbatch: np.ndarray
    weights_kept: np.ndarray


class Slots(NamedTuple):
    """Length of each buffer, scratch not counted."""

    inputs: int
    gradients: int
    kept: int
    weights: int


@dataclass(frozen=True)
class Ticks:
    """A schedule in lock-step."""

    schedule: Schedule
    rows: Rows
    slots: Slots
    shifts: tuple[int, ...]
    """How many ranks further, modulo p, activations are sent at every tick; gradients go as far back."""
    fused: bool = False
    """A forward and a backward in one tick; else one action."""

    @property
    def count(self) -> int:
        """Number of ticks."""
        return self.rows.forward_stage.shape[1]

    def actions(self) -> tuple[tuple[Action, ...], ...]:
        """What each rank does, in order, read back from the table."""
        rows, schedule = self.rows, self.schedule
        columns: tuple[tuple[Kind, np.ndarray, np.ndarray], ...] = (
            ("F", rows.forward_stage, rows.forward_microbatch),
            ("B", rows.backward_stage, rows.backward_microbatch),
            ("W", rows.weights_stage, rows.weights_microbatch),
        )

        def read(kind: Kind, stage: int, microbatch: int) -> Iterator[Action]:
            if kind == "B":
                yield schedule.backward_of(stage, microbatch)
            elif kind == "F" or schedule.splits(stage, microbatch):
                yield Action(kind, stage, microbatch)

        return tuple(
            tuple(
                action
                for tick in range(self.count)
                for kind, stages, microbatches in columns
                if microbatches[rank, tick] >= 0
                for action in read(kind, int(stages[rank, tick]), int(microbatches[rank, tick]))
            )
            for rank in range(schedule.pp_size)
        )


def compile_ticks(schedule: Schedule, fused: bool = False, keep: Keep = "inputs") -> Ticks:
    """The lock-step table of a schedule.

    Args:
        schedule: any valid table.
        fused: a forward and a backward in one tick, which takes another order: more forwards come first.
        keep: what waits from F to B: the stage's ``"inputs"``, or what F stores in a slot of its own, ``"residuals"``.

    Raises:
        ValueError: the schedule is not valid, or cannot be fused; unknown keep.
    """
    if keep not in KEEPS:
        raise ValueError(f"keep: expected one of {KEEPS}, got {keep!r}")
    validate_schedule(schedule)
    fused = fused and not schedule.forward_only
    times = _times(schedule, fused)
    lives = _lives(schedule, times, keep)
    places = [{name: _colour(intervals) for name, intervals in rank.items()} for rank in lives]
    slots = Slots(*(max(len(set(rank[name].values())) for rank in places) for name in Slots._fields))
    return Ticks(schedule, _fill(schedule, times, places, slots), slots, _shifts(schedule), fused)


def lockstep_makespan(schedule: Schedule, costs: Costs | None = None, fused: bool = False) -> float:
    """Time of a step in lock-step: each tick as long as its busiest rank, and a message between two of them.

    Never less than diptych.plans.schedule.simulate.simulate's makespan of the same order, where ranks wait only for
    what they need.

    Args:
        schedule: a valid table.
        costs: of actions and messages; None: F = I = W = 1, communication free.
        fused: see compile_ticks.

    Raises:
        ValueError: the schedule cannot be fused.
    """
    costs = costs or Costs()
    stages = range(schedule.num_stages)
    home = [schedule.rank_of(stage) for stage in stages]
    lasts = {(kind, stage): costs.time(Action(kind, stage, 0)) for kind in get_args(Kind) for stage in stages}
    work: defaultdict[tuple[int, int], float] = defaultdict(float)
    for (kind, stage, _), tick in _times(schedule, fused and not schedule.forward_only).items():
        work[tick, home[stage]] += lasts[kind, stage]
    busiest: defaultdict[int, float] = defaultdict(float)
    for (tick, _), time in work.items():
        busiest[tick] = max(busiest[tick], time)
    messages = costs.communication * (len(busiest) - 1) if schedule.pp_size > 1 else 0.0
    return sum(busiest.values()) + messages


def _times(schedule: Schedule, fused: bool) -> dict[Action, int]:
    """The tick of every action: ranks in step, each going on with its own list as soon as it can."""
    waiting = [list(reversed(actions)) for actions in (_fused_order(schedule) if fused else schedule.actions)]
    home = [schedule.rank_of(stage) for stage in range(schedule.num_stages)]
    times: dict[Action, int] = {}
    tick = 0

    def can_run(action: Action, rank: int) -> bool:
        """All it needs is done: at an earlier tick, or on the same rank before in this one."""
        for needed in needed_by(schedule, action):
            when = times.get(needed)  # pyright: ignore[reportArgumentType, reportCallIssue]
            if when is None or (when >= tick and home[needed[1]] != rank):
                return False
        return True

    while any(waiting):
        before = len(times)
        for rank, left in enumerate(waiting):
            # Canonical: one action. Fused: also two, if they are a forward and then a backward.
            for expected in ("F", "B") if fused else ("FBIW",):
                action = left[-1] if left else None
                if action is not None and action.kind in expected and can_run(action, rank):
                    times[left.pop()] = tick
        assert len(times) > before, f"every rank of {schedule.name!r} waits at tick {tick}"
        tick += 1
    return times


def _fused_order(schedule: Schedule) -> list[list[Action]]:
    """Every rank's forwards and backwards in the schedule's order, paired after so many forwards that neither waits.

    The first backward of a rank comes once its microbatch has been through all later stages and back; until then a
    forward is run at every tick.
    """
    if schedule.name not in FUSED:
        raise ValueError(
            f"fused: expected False with schedule {schedule.name!r} (forwards and backwards alternate in {FUSED}), "
            "got True"
        )
    p, v = schedule.pp_size, schedule.stages_per_rank
    orders = []
    for rank, actions in enumerate(schedule.actions):
        forwards, backwards = ([a for a in actions if a.kind == kind] for kind in "FB")
        group = next((i for i, a in enumerate(forwards) if a.stage != rank), len(forwards))
        warmup = min(len(forwards), 2 * (p - 1 - rank) + (2 * (v - 1) * group if v > 1 else 0))
        order = forwards[:warmup]
        for forward, backward in zip(forwards[warmup:], backwards, strict=False):
            order += [forward, backward]
        orders.append(order + backwards[len(backwards) - warmup :])
    return orders


Interval = tuple[int, int, tuple[int, int]]
"""First and last tick of a value's life, and whose it is: stage and microbatch."""


def _lives(schedule: Schedule, times: dict[Action, int], keep: Keep) -> list[dict[str, list[Interval]]]:
    """By rank and buffer: from when to when each value is needed."""
    lives: list[dict[str, list[Interval]]] = [{name: [] for name in Slots._fields} for _ in schedule.actions]
    for action, tick in times.items():
        kind, stage, microbatch = action
        of_rank, whose = lives[schedule.rank_of(stage)], (stage, microbatch)
        backward = schedule.backward_of(stage, microbatch)
        ended = times.get(backward, tick)
        if kind == "F" and stage > 0:
            arrived = times[Action("F", stage - 1, microbatch)] + 1
            of_rank["inputs"].append((arrived, ended if keep == "inputs" else tick, whose))
        if kind == "F" and keep == "residuals" and not schedule.forward_only:
            of_rank["kept"].append((tick, ended, whose))
        if action == backward and stage + 1 < schedule.num_stages:
            of_rank["gradients"].append((times[schedule.backward_of(stage + 1, microbatch)] + 1, tick, whose))
        if action == backward and schedule.splits_backward:
            of_rank["weights"].append((tick, times.get(Action("W", stage, microbatch), tick), whose))
    return lives


def _colour(intervals: Iterable[Interval]) -> dict[tuple[int, int], int]:
    """A slot for each value, as few as the most that are alive at once."""
    slots: dict[tuple[int, int], int] = {}
    ends: list[int] = []  # by slot, of the value that was put there last
    for first, last, whose in sorted(intervals):
        free = next((slot for slot, end in enumerate(ends) if end < first), len(ends))
        ends[free : free + 1] = [last]
        slots[whose] = free
    return slots


def _shifts(schedule: Schedule) -> tuple[int, ...]:
    ranks = [schedule.rank_of(stage) for stage in range(schedule.num_stages)]
    return tuple(sorted({(b - a) % schedule.pp_size for a, b in pairwise(ranks)}))


def _fill(schedule: Schedule, times: dict[Action, int], places: list[dict[str, dict]], slots: Slots) -> Rows:
    """The table itself."""
    shape, shifts = (schedule.pp_size, 1 + max(times.values(), default=-1)), _shifts(schedule)
    scratch = dict(
        input_arrivals=slots.inputs,
        forward_input=slots.inputs,
        backward_input=slots.inputs,
        gradient_arrivals=slots.gradients,
        backward_gradient=slots.gradients,
        forward_kept=slots.kept,
        backward_kept=slots.kept,
        backward_weights=slots.weights,
        weights_kept=slots.weights,
    )
    rows = Rows(
        *(
            np.full((*shape, len(shifts)) if name.endswith("arrivals") else shape, scratch.get(name, -1), np.int32)
            for name in Rows._fields
        )
    )
    for action, tick in times.items():
        kind, stage, microbatch = action
        rank = schedule.rank_of(stage)
        roles = {"F": ["forward"], "I": ["backward"], "W": ["weights"], "B": ["backward"]}[kind]
        if kind == "B" and schedule.splits_backward:
            roles.append("weights")  # where others are split, a whole one is both halves in one tick
        for role in roles:
            found = dict(stage=stage, microbatch=microbatch)
            for buffer, column in _READS[role].items():
                slot = places[rank][buffer].get((stage, microbatch))
                if slot is not None:
                    found[column] = slot
            for column, value in found.items():
                getattr(rows, f"{role}_{column}")[rank, tick] = value
        if kind != "W":
            _send(schedule, rows, places, action, tick, shifts)
    return rows


_READS: dict[str, dict[str, str]] = {
    "forward": {"inputs": "input", "kept": "kept"},
    "backward": {"inputs": "input", "gradients": "gradient", "kept": "kept", "weights": "weights"},
    "weights": {"weights": "kept"},
}
"""By role: the buffers an action reads or fills, and the column that says where."""


def _send(
    schedule: Schedule, rows: Rows, places: list[dict[str, dict]], action: Action, tick: int, shifts: tuple[int, ...]
) -> None:
    """Note at the receiver, one tick later, where an action's result is to be stored."""
    forward = action.kind == "F"
    stage = action.stage + (1 if forward else -1)
    if not 0 <= stage < schedule.num_stages:
        return
    sender, rank = schedule.rank_of(action.stage), schedule.rank_of(stage)
    shift = shifts.index((rank - sender if forward else sender - rank) % schedule.pp_size)
    buffer, arrivals = ("inputs", rows.input_arrivals) if forward else ("gradients", rows.gradient_arrivals)
    arrivals[rank, tick + 1, shift] = places[rank][buffer][stage, action.microbatch]
