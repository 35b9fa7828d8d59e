"""Simulation of a schedule's time, bubble and memory.

Reference: property tests compare this simulation with the closed forms for bubble and activations in flight from the
papers that diptych/plans/schedule/named.py cites.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import get_args

from diptych.plans.schedule.actions import Action, Kind, Schedule
from diptych.plans.schedule.messages import needed_by
from diptych.plans.schedule.validate import validate_schedule


@dataclass(frozen=True)
class Costs:
    """Costs of actions; each field is one number for all stages or a sequence with one number per stage."""

    forward: float | Sequence[float] = 1.0
    """Time of F, any unit."""
    input_gradient: float | Sequence[float] = 1.0
    """Time of I; the time of B is the sum of I and W."""
    weight_gradient: float | Sequence[float] = 1.0
    """Time of W."""
    communication: float = 0.0
    """Time from the end of an action to the arrival of its result on another rank; occupies neither rank."""
    activation_bytes: float | Sequence[float] = 1.0
    """Bytes saved for backward, from the start of F to the end of B, or of I and W."""
    weight_gradient_bytes: float | Sequence[float] = 0.0
    """Part of activation_bytes that W needs; it stays saved from the end of I to the end of W."""

    def of(self, name: str, stage: int) -> float:
        """Return one cost of a stage."""
        value = getattr(self, name)
        return value[stage] if isinstance(value, Sequence) else value

    def time(self, action: Action) -> float:
        """Return the duration of an action."""
        forward, inputs, weights = (
            self.of(name, action.stage) for name in ("forward", "input_gradient", "weight_gradient")
        )
        return {"F": forward, "B": inputs + weights, "I": inputs, "W": weights}[action.kind]


@dataclass(frozen=True)
class Simulation:
    """The timeline of a schedule."""

    makespan: float
    """Time from the first start to the last end."""
    bubble: tuple[float, ...]
    """Time within the makespan in which each rank does not compute."""
    span: tuple[float, ...]
    """Time of each rank from its first start to its last end."""
    peak_in_flight: tuple[int, ...]
    """Peak number of stage forwards in flight (F started, backward not finished), per rank."""
    peak_bytes: tuple[float, ...]
    """Peak number of bytes saved for backward, per rank."""
    starts: dict[Action, float] = field(repr=False)
    """Start time of each action."""


def simulate(schedule: Schedule, costs: Costs | None = None) -> Simulation:
    """Simulate a schedule: every rank starts each action, in order, as soon as its inputs have arrived.

    Args:
        schedule: a valid schedule.
        costs: times and bytes; None: F = I = W = 1 and free communication.

    Raises:
        ScheduleError: the schedule deadlocks.
    """
    costs = costs or Costs()
    ends: dict[tuple[Kind, int, int], float] = {}
    starts: dict[Action, float] = {}
    free = [0.0] * schedule.pp_size
    home = [schedule.rank_of(stage) for stage in range(schedule.num_stages)]
    durations = {
        (kind, stage): costs.time(Action(kind, stage, 0)) for kind in get_args(Kind) for stage in range(len(home))
    }
    position = [0] * schedule.pp_size
    left = sum(map(len, schedule.actions))

    def start_of(action: Action, rank: int) -> float | None:
        """Return the time when the rank is free and all inputs have arrived; None if a dependency has not run."""
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
            while position[rank] < len(actions):
                action = actions[position[rank]]
                start = start_of(action, rank)
                if start is None:
                    break
                starts[action] = start
                ends[action] = start + durations[action[:2]]
                free[rank] = ends[action]
                position[rank] += 1
                left -= 1
        if left == before:
            validate_schedule(schedule)  # its error names the ranks that wait for each other
            raise AssertionError("a valid schedule is deadlock-free")
    makespan = max(ends.values()) - min(starts.values())
    busy = [sum(durations[action[:2]] for action in actions) for actions in schedule.actions]
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
    """Return the peaks of one rank, which depend on its order only: microbatches in flight and saved bytes."""
    count = 0
    peak_count = 0
    size = 0.0
    peak_size = 0.0
    sizes = {
        stage: (costs.of("activation_bytes", stage), costs.of("weight_gradient_bytes", stage))
        for stage in {action.stage for action in actions}
    }
    for action in actions:
        total, part = sizes[action.stage]
        if action.kind == "F":
            count += 1
            size += total
        peak_count = max(peak_count, count)
        peak_size = max(peak_size, size)
        if action.kind == "I":
            size -= total - part
        elif action.kind in "BW":
            count -= 1
            size -= total if action.kind == "B" else part
    return peak_count, peak_size
