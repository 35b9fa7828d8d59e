"""Orders of actions as lists of integers, which the search for a schedule changes and simulates.

Microbatches are equal. The k-th F of a stage can therefore be numbered microbatch k, and so can its k-th backward: such
a renumbering of a schedule needs no more time and no more memory. An action is then identified by its kind and stage,
encoded as ``4 * stage + kind``. The k-th W of a stage belongs to the k-th I.

``run`` is diptych.plans.schedule.simulate's simulation for such lists; a test compares the two action by action.
"""

from collections.abc import Sequence
from typing import NamedTuple, cast, get_args

from diptych.plans.schedule.actions import Action, Kind, Schedule
from diptych.plans.schedule.placement import Placement, place_of
from diptych.plans.schedule.simulate import Costs

KINDS: tuple[Kind, ...] = get_args(Kind)
F, B, I, W = range(len(KINDS))  # noqa: E741
ROUNDING = 1e-9
"""Relative amount by which a sum of bytes may exceed a memory limit, for rounding."""

Orders = list[list[int]]
"""Encoded actions of every rank, in order."""


class Pipeline:
    """Sizes and costs of a pipeline, as plain lists.

    Args:
        pp_size: number of ranks p.
        num_microbatches: number of microbatches m.
        stages_per_rank: number of stages per rank v.
        costs: costs of all p v stages.
        memory_limits: bytes that each rank may save for backward.
        placement: placement of the stages on ranks.
    """

    def __init__(
        self,
        pp_size: int,
        num_microbatches: int,
        stages_per_rank: int,
        costs: Costs,
        memory_limits: Sequence[float],
        placement: Placement = "loop",
    ) -> None:
        self.p = pp_size
        self.m = num_microbatches
        self.v = stages_per_rank
        self.placement: Placement = placement
        self.memory_limits = memory_limits
        self.num_stages = pp_size * stages_per_rank
        stages = range(self.num_stages)
        self.home = [place_of(stage, pp_size, placement).pp_rank for stage in stages]
        self.own = [[stage for stage in stages if self.home[stage] == rank] for rank in range(pp_size)]
        self.forward, self.inputs, self.weights, self.saved, self.pending = (
            [float(costs.of(name, stage)) for stage in stages]
            for name in (
                "forward",
                "input_gradient",
                "weight_gradient",
                "activation_bytes",
                "weight_gradient_bytes",
            )
        )
        self.whole = [inputs + weights for inputs, weights in zip(self.inputs, self.weights, strict=True)]
        # Time from the end of an action on stage s to its result's arrival on s + 1, or from s + 1 to s.
        between = zip(self.home, [*self.home[1:], self.home[-1]], strict=True)
        self.link = [costs.communication if here != there else 0.0 for here, there in between]
        self.durations = [
            time for s in stages for time in (self.forward[s], self.whole[s], self.inputs[s], self.weights[s])
        ]
        """Durations, by encoded action."""

    def work(self, rank: int) -> float:
        """Return the time of all actions of a rank for one microbatch."""
        return sum(self.forward[stage] + self.whole[stage] for stage in self.own[rank])

    def single_microbatch_times(self) -> tuple[list[float], list[float], float]:
        """Return, for one microbatch alone, when each stage starts F, when it starts I, and when the last I ends."""
        heads = []
        backs = [0.0] * self.num_stages
        time = 0.0
        for stage in range(self.num_stages):
            heads.append(time)
            time += self.forward[stage] + self.link[stage]
        for stage in reversed(range(self.num_stages)):
            time += self.link[stage]
            backs[stage] = time
            time += self.inputs[stage]
        return heads, backs, time

    def sizes(self, order: Sequence[int]) -> list[float]:
        """Return the bytes that a rank has saved during each of its actions, given the order of its actions."""
        found = []
        size = 0.0
        for action in order:
            stage = action >> 2
            kind = action & 3
            if kind == F:
                size += self.saved[stage]
            found.append(size)
            if kind == B:
                size -= self.saved[stage]
            elif kind == I:
                size -= self.saved[stage] - self.pending[stage]
            elif kind == W:
                size -= self.pending[stage]
        return found

    def peak(self, order: Sequence[int]) -> float:
        """Return the largest of the sizes."""
        return max(self.sizes(order))

    def fits(self, rank: int, size: float) -> bool:
        """Return True if a rank may save so many bytes."""
        return size <= self.memory_limits[rank] * (1.0 + ROUNDING)

    def peaks(self, orders: Orders) -> list[float]:
        """Return the peak of each rank."""
        return [self.peak(order) for order in orders]

    def all_fit(self, orders: Orders) -> bool:
        """Return True if every rank stays within its memory limit."""
        return all(self.fits(rank, peak) for rank, peak in enumerate(self.peaks(orders)))

    def orders_of(self, schedule: Schedule) -> Orders:
        """Return a schedule's actions, encoded."""
        codes = {kind: code for code, kind in enumerate(KINDS)}
        return [[4 * action.stage + codes[action.kind] for action in actions] for actions in schedule.actions]

    def schedule_of(self, orders: Orders, name: str) -> Schedule:
        """Return the schedule of encoded orders."""
        forwards = [0] * self.num_stages
        backwards = [0] * self.num_stages
        split: list[list[int]] = [[] for _ in range(self.num_stages)]  # microbatches between I and W
        ranks = []
        for order in orders:
            actions = []
            for number in order:
                stage, kind = divmod(number, 4)
                if kind == W:
                    microbatch = split[stage].pop(0)
                else:
                    counts = forwards if kind == F else backwards
                    microbatch = counts[stage]
                    counts[stage] += 1
                    if kind == I:
                        split[stage].append(microbatch)
                actions.append(Action(cast("Kind", KINDS[kind]), stage, microbatch))
            ranks.append(tuple(actions))
        return Schedule(name, self.p, self.m, self.v, tuple(ranks), False, self.placement)


class Timing(NamedTuple):
    """Times of all actions, and the place of each microbatch's passes in its rank's order."""

    makespan: float
    ends: list[float]
    """End of each rank."""
    starts: list[list[float]]
    """Start of each action, by rank, in its order."""
    forwards: list[list[int]]
    """By stage and microbatch: place of F in the rank's order."""
    backwards: list[list[int]]
    """By stage and microbatch: place of B or I in the rank's order."""


def run(pipeline: Pipeline, orders: Orders) -> Timing | None:
    """Simulate orders: each action starts as soon as its inputs have arrived; return None for a deadlock."""
    stages = range(pipeline.num_stages)
    last = pipeline.num_stages - 1
    link = pipeline.link
    durations = pipeline.durations
    forward_ends: list[list[float]] = [[] for _ in stages]
    backward_ends: list[list[float]] = [[] for _ in stages]
    forwards: list[list[int]] = [[] for _ in stages]
    backwards: list[list[int]] = [[] for _ in stages]
    split = [0] * len(stages)  # microbatches between I and W
    places = [0] * len(orders)
    ends = [0.0] * len(orders)
    starts: list[list[float]] = [[] for _ in orders]
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            place = places[rank]
            time = ends[rank]
            rank_starts = starts[rank]
            before = place
            while place < len(order):
                action = order[place]
                stage = action >> 2
                kind = action & 3
                if kind == W:
                    if not split[stage]:
                        break
                    split[stage] -= 1
                else:
                    if kind == F:
                        own = forward_ends[stage]
                        wire = link[stage - 1]
                        needed = forward_ends[stage - 1] if stage else None
                    else:
                        own = backward_ends[stage]
                        wire = link[stage]
                        needed = backward_ends[stage + 1] if stage < last else None
                        if len(own) >= len(forward_ends[stage]):
                            break
                    if needed is not None:
                        if len(own) >= len(needed):
                            break
                        time = max(time, needed[len(own)] + wire)
                    (forwards if kind == F else backwards)[stage].append(place)
                    own.append(time + durations[action])
                    if kind == I:
                        split[stage] += 1
                rank_starts.append(time)
                time += durations[action]
                place += 1
            if place > before:
                places[rank] = place
                ends[rank] = time
                moved = True
    if any(place < len(order) for place, order in zip(places, orders, strict=True)):
        return None
    return Timing(max(ends), ends, starts, forwards, backwards)
