"""Whether a schedule runs, and what it costs: validity, time, bubble and memory of a table, without running it.

Reference: the closed forms for bubble and activations in flight are those of the papers
diptych/plans/schedule/named.py names; the property tests hold this simulation against them.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Literal, get_args

from diptych.plans.schedule.actions import Action, Kind, Schedule
from diptych.plans.schedule.messages import Message, Program, dependencies, lower, needed_by

Semantics = Literal["async", "pair", "rank", "blocking"]
SEMANTICS = ("async", "pair", "rank", "blocking")
"""How ranks send, from the most to the least that a transport allows: what runs under one runs under all before it.

async: a message is sent without waiting, and received by its name, in any order. pair: the messages between two ranks,
of both directions, go one after the other, each when it is next at both its ends (NCCL, a communicator a pair). rank:
so do all messages of a rank (NCCL, one communicator for all). In both, a rank computes on while what it has sent waits
its turn. blocking: it does not; a send is over when it has been received.
"""


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
