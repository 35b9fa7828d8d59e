"""Simulation of a schedule: time, bubble and memory of a table, without running it.

Reference: the closed forms for bubble and activations in flight are those of the papers
diptych/plans/schedule/named.py names; the property tests hold this simulation against them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import get_args

from diptych.plans.schedule.actions import Action, Kind, Schedule
from diptych.plans.schedule.messages import needed_by
from diptych.plans.schedule.validate import validate_schedule


@dataclass(frozen=True)
class Costs:
    """What actions cost. A number holds for every stage, a sequence has one a stage."""

    forward: float | Sequence[float] = 1.0
    """Time of F, any unit."""
    input_gradient: float | Sequence[float] = 1.0
    """Time of I; B takes I and W together."""
    weight_gradient: float | Sequence[float] = 1.0
    """Time of W."""
    communication: float = 0.0
    """Time from the end of an action to its result's arrival on another rank; does not occupy either."""
    activation_bytes: float | Sequence[float] = 1.0
    """Kept from the start of F to the end of B, or of I and W."""
    weight_gradient_bytes: float | Sequence[float] = 0.0
    """The part of activation_bytes that W needs: kept from the end of I to the end of W."""

    def of(self, name: str, stage: int) -> float:
        """A cost of one stage."""
        value = getattr(self, name)
        return value[stage] if isinstance(value, Sequence) else value

    def time(self, action: Action) -> float:
        """Duration of an action."""
        forward, inputs, weights = (
            self.of(name, action.stage) for name in ("forward", "input_gradient", "weight_gradient")
        )
        return {"F": forward, "B": inputs + weights, "I": inputs, "W": weights}[action.kind]


@dataclass(frozen=True)
class Simulation:
    """A schedule's course in time."""

    makespan: float
    """From the first start to the last end."""
    bubble: tuple[float, ...]
    """Idle time of each rank within the makespan."""
    span: tuple[float, ...]
    """Of each rank, from its own first start to its own last end."""
    peak_in_flight: tuple[int, ...]
    """Most microbatches, times stages, whose forward has begun and whose backward is not over, by rank."""
    peak_bytes: tuple[float, ...]
    """Most bytes kept for backward at any time, by rank."""
    starts: dict[Action, float] = field(repr=False)
    """When each action begins."""


def simulate(schedule: Schedule, costs: Costs | None = None) -> Simulation:
    """Run a table on paper: every rank in its own order, each action as soon as what it needs has arrived.

    Args:
        schedule: a valid table.
        costs: times and bytes; None: F = I = W = 1, communication free.

    Raises:
        ScheduleError: the table does not run.
    """
    costs = costs or Costs()
    ends: dict[tuple[Kind, int, int], float] = {}
    starts: dict[Action, float] = {}
    free = [0.0] * schedule.pp_size
    home = [schedule.rank_of(stage) for stage in range(schedule.num_stages)]
    lasts = {(kind, stage): costs.time(Action(kind, stage, 0)) for kind in get_args(Kind) for stage in range(len(home))}
    place, left = [0] * schedule.pp_size, sum(map(len, schedule.actions))

    def start_of(action: Action, rank: int) -> float | None:
        """When its rank is free and all it needs has arrived; None: something has not been run."""
        start = free[rank]
        for other in needed_by(schedule, action):
            end = ends.get(other)
            if end is None:
                return None
            start = max(start, end if home[other[1]] == rank else end + costs.communication)
        return start

    while left:
        before = left
        for rank, actions in enumerate(schedule.actions):
            while place[rank] < len(actions) and (start := start_of(action := actions[place[rank]], rank)) is not None:
                starts[action] = start
                free[rank] = ends[action] = start + lasts[action[:2]]
                place[rank], left = place[rank] + 1, left - 1
        if left == before:
            validate_schedule(schedule)  # says who waits for whom
            raise AssertionError("a valid schedule runs")
    makespan = max(ends.values()) - min(starts.values())
    busy = [sum(lasts[action[:2]] for action in actions) for actions in schedule.actions]
    flights = [_flight(schedule, actions, costs) for actions in schedule.actions]
    return Simulation(
        makespan=makespan,
        bubble=tuple(makespan - time for time in busy),
        span=tuple(ends[actions[-1]] - starts[actions[0]] for actions in schedule.actions),
        peak_in_flight=tuple(count for count, _ in flights),
        peak_bytes=tuple(size for _, size in flights),
        starts=starts,
    )


def _flight(schedule: Schedule, actions: Sequence[Action], costs: Costs) -> tuple[int, float]:
    """Peaks of one rank, whose own order alone decides them: microbatches in flight, and bytes kept."""
    count = peak_count = 0
    size = peak_size = 0.0
    sizes = {
        stage: (costs.of("activation_bytes", stage), costs.of("weight_gradient_bytes", stage))
        for stage in {action.stage for action in actions}
    }
    for action in actions:
        whole, part = sizes[action.stage]
        if action.kind == "F":
            count, size = count + 1, size + whole
        peak_count, peak_size = max(peak_count, count), max(peak_size, size)
        if action.kind == "I":
            size -= whole - part
        elif action.kind in "BW":
            count, size = count - 1, size - (whole if action.kind == "B" else part)
    return peak_count, peak_size
