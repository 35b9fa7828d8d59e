"""Whether a schedule runs, and what it costs: validity, time, bubble and memory of a table, without running it.

Reference: the closed forms for bubble and activations in flight are those of the papers plans/schedule.py names; the
property tests hold this simulation against them.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from plans.communication import Message, Program, dependencies, lower
from plans.schedule import Action, Schedule

Semantics = Literal["async", "blocking"]
SEMANTICS = ("async", "blocking")


class ScheduleError(ValueError):
    """A table that cannot be run, or does not do every piece of work exactly once."""


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


def validate_schedule(schedule: Schedule, semantics: Semantics = "async") -> None:
    """Refuse a table that is wrong, naming rank, action and what is unmet.

    Every stage runs F, and B or else I and W, exactly once for every microbatch, on its own rank; everything an action
    needs comes before it; nothing waits for ever.

    Args:
        schedule: any table, built here or by hand.
        semantics: ``"async"``: a message is sent without waiting; ``"blocking"``: a send waits for its receive.

    Raises:
        ScheduleError: the first fault found.
    """
    _check_actions(schedule)
    try:
        program = lower(schedule)
    except ValueError as error:
        raise ScheduleError(str(error)) from None
    validate_program(schedule, program, semantics)


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
    """A program on its way: how far every rank is, what it has, and which messages were sent."""

    def __init__(self, schedule: Schedule, program: Program, semantics: Semantics) -> None:
        self._schedule, self._program, self._semantics = schedule, program, semantics
        self._place = [0] * len(program)
        self._have: list[set[Action]] = [set() for _ in program]
        self._sent: set[tuple[int, Message]] = set()

    @property
    def ended(self) -> bool:
        return all(at == len(steps) for at, steps in zip(self._place, self._program, strict=True))

    def advance(self, rank: int) -> bool:
        """Run a rank as far as it goes; whether it went at all."""
        start = self._place[rank]
        while (step := self._next(rank)) is not None and self._can_go(rank, step):
            self._place[rank] += 1
            if isinstance(step, Action):
                self._have[rank].add(step)
            elif step.direction == "RECV":
                self._have[rank].add(step.produced_by)
            else:
                self._sent.add((step.peer, Message("RECV", step.produced_by, rank)))
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
                told.append(f"rank {rank} waits in {step}")
        return "; ".join(told)

    def _next(self, rank: int) -> Action | Message | None:
        steps, place = self._program[rank], self._place[rank]
        return steps[place] if place < len(steps) else None

    def _can_go(self, rank: int, step: Action | Message) -> bool:
        if isinstance(step, Action):
            return self._have[rank].issuperset(dependencies(self._schedule, step))
        if step.direction == "RECV":
            return (rank, step) in self._sent
        if step.produced_by not in self._have[rank]:
            return False
        # A blocking send ends with its receive, and that has to be where the other rank stands.
        return self._semantics == "async" or self._next(step.peer) == Message("RECV", step.produced_by, rank)


def _check_actions(schedule: Schedule) -> None:
    """Every action once, in range, on its rank."""
    lists = len(schedule.actions)
    if lists != schedule.pp_size:
        raise ScheduleError(f"actions: expected a list for each of {schedule.pp_size} ranks, got {lists}")
    kinds = ("F",) if schedule.forward_only else ("F", "I", "W") if schedule.splits_backward else ("F", "B")
    expected = {
        Action(kind, stage, microbatch)
        for kind in kinds
        for stage in range(schedule.num_stages)
        for microbatch in range(schedule.num_microbatches)
    }
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
    missing = expected.difference(*schedule.actions)
    if missing:
        action = min(missing, key=lambda a: (a.microbatch, a.stage, a.kind))
        raise ScheduleError(f"rank {schedule.rank_of(action.stage)}, {action}: expected once, got none")


def _listed(kinds: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(kinds[:-1]), kinds[-1])))


def simulate(schedule: Schedule, costs: Costs | None = None) -> Simulation:
    """Run a table on paper: every rank in its own order, each action as soon as what it needs has arrived.

    Args:
        schedule: a valid table.
        costs: times and bytes; None: F = I = W = 1, communication free.

    Raises:
        ScheduleError: the table does not run.
    """
    costs = costs or Costs()
    ends: dict[Action, float] = {}
    starts: dict[Action, float] = {}
    place, free = [0] * schedule.pp_size, [0.0] * schedule.pp_size
    for action in _order(schedule):
        rank = schedule.rank_of(action.stage)
        arrivals = [
            ends[needed] + (0.0 if schedule.rank_of(needed.stage) == rank else costs.communication)
            for needed in dependencies(schedule, action)
        ]
        starts[action] = max([free[rank], *arrivals])
        free[rank] = ends[action] = starts[action] + costs.time(action)
        place[rank] += 1
    makespan = max(ends.values()) - min(starts.values())
    busy = [sum(costs.time(action) for action in actions) for actions in schedule.actions]
    flights = [_flight(schedule, actions, costs) for actions in schedule.actions]
    return Simulation(
        makespan=makespan,
        bubble=tuple(makespan - time for time in busy),
        span=tuple(ends[actions[-1]] - starts[actions[0]] for actions in schedule.actions),
        peak_in_flight=tuple(count for count, _ in flights),
        peak_bytes=tuple(size for _, size in flights),
        starts=starts,
    )


def _order(schedule: Schedule) -> list[Action]:
    """All actions, each after what it needs and after its rank's earlier ones."""
    order: list[Action] = []
    done: set[Action] = set()
    place = [0] * schedule.pp_size
    total = sum(map(len, schedule.actions))
    while len(order) < total:
        before = len(order)
        for rank, actions in enumerate(schedule.actions):
            while place[rank] < len(actions) and done.issuperset(dependencies(schedule, actions[place[rank]])):
                order.append(actions[place[rank]])
                done.add(order[-1])
                place[rank] += 1
        if len(order) == before:
            validate_schedule(schedule)  # says who waits for whom
            raise AssertionError("a valid schedule runs")
    return order


def _flight(schedule: Schedule, actions: Sequence[Action], costs: Costs) -> tuple[int, float]:
    """Peaks of one rank, whose own order alone decides them: microbatches in flight, and bytes kept."""
    count = peak_count = 0
    size = peak_size = 0.0
    for action in actions:
        whole = costs.of("activation_bytes", action.stage)
        part = costs.of("weight_gradient_bytes", action.stage)
        if action.kind == "F":
            count, size = count + 1, size + whole
        peak_count, peak_size = max(peak_count, count), max(peak_size, size)
        if action.kind == "I":
            size -= whole - part
        elif action.kind in "BW":
            count, size = count - 1, size - (whole if action.kind == "B" else part)
    return peak_count, peak_size
