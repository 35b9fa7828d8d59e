"""List scheduling: a rank that is free begins whatever its rule prefers of all that could begin.

A rule is made of three choices. Which of the forwards and input gradients that have arrived goes first; how many
microbatches a stage may have in flight beyond those it needs to be busy; and when a W, which nobody waits for, has its
turn: where nothing else could begin, if it delays nothing that is known to arrive by more than a share of W's time; or
at a planned time of its own, half a period after I. A rank that has no room for a forward runs W at once.

No rank waits for ever, whatever the limit of memory, as long as one microbatch fits. A forward begins only if, after
it, the microbatches in flight can still be finished one after the other, oldest first: what the rank has left, and
what older ones will give back, is enough for the forwards that each still has to run here. The oldest microbatch of all
is then stopped nowhere: its forwards have room as soon as waiting Ws are run, its backward needs none (where I would
need room that is not there, B takes its place).

Reference: the oldest-first rule is Dijkstra's banker's algorithm with one order for all ranks.
"""

import heapq
from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

from diptych.planner.generate.orders import ROUNDING, B, F, I, Orders, Pipeline, W

FOREVER = float("inf")
Priority = Callable[[int, int, int], tuple[float, ...]]
"""Kind, stage and microbatch of what could begin; the smallest goes first."""


class Rule(NamedTuple):
    """How a free rank chooses."""

    priority: Priority
    most: tuple[float, ...]
    """Microbatches in flight, by stage."""
    delay: float
    """Share of its time that a W may keep others waiting."""
    plans_weights: bool = False
    """Whether the priority has a time for W too."""


def rules(pipeline: Pipeline) -> Iterator[Rule]:
    """All that are tried, those that keep least first."""
    p = pipeline
    period = max(p.work(rank) for rank in range(p.p))
    heads, backs, _ = p.way()
    planned = {F: heads, I: backs, W: [time + period / 2 for time in backs]}
    needed = [max(1.0, -((heads[s] - backs[s] - p.inputs[s]) // period)) for s in range(p.num_stages)]
    priorities: tuple[Priority, ...] = (
        lambda kind, stage, microbatch: (float(kind == F), microbatch, -stage),
        lambda kind, stage, microbatch: (float(kind != F), -stage if kind == F else microbatch),
        lambda kind, stage, microbatch: (planned[kind][stage] + microbatch * period,),
    )
    for more in (0, 1, 2, 3, p.p, FOREVER):
        most = tuple(count + more for count in needed)
        for priority, delay in product(priorities, (1.0, 0.5, 0.0)):
            yield Rule(priority, most, delay)
        yield Rule(priorities[-1], most, 1.0, plans_weights=True)


class Listed(NamedTuple):
    """What a rule makes."""

    orders: Orders
    starts: list[list[float]]
    """When each action was begun, by rank, in its order: run never begins one later."""


def list_orders(pipeline: Pipeline, rule: Rule) -> Listed:
    """Orders of all ranks by one rule; every rank keeps within its room."""
    return _Listing(pipeline, rule).listed()


class _Listing:
    """A step as it is being planned, event after event."""

    def __init__(self, pipeline: Pipeline, rule: Rule) -> None:
        self._p, self._rule = pipeline, rule
        stages, ranks = range(pipeline.num_stages), range(pipeline.p)
        # Of each stage, how many microbatches have begun F, I or B, I, and W.
        self._forwards, self._backwards = [0 for _ in stages], [0 for _ in stages]
        self._splits, self._weights = [0 for _ in stages], [0 for _ in stages]
        # Of each stage, when what F and the backward need is there, as far as that is known.
        self._entered: list[list[float]] = [[] for _ in stages]
        self._returned: list[list[float]] = [[] for _ in stages]
        self._entered[0], self._returned[-1] = [0.0] * pipeline.m, [0.0] * pipeline.m
        self._size, self._free = [0.0 for _ in ranks], [0.0 for _ in ranks]
        self._listed = Listed([[] for _ in ranks], [[] for _ in ranks])
        self._events = [(0.0, rank) for rank in ranks]

    def listed(self) -> Listed:
        """Runs until nothing is left."""
        while self._events:
            now, rank = heapq.heappop(self._events)
            if self._free[rank] <= now:
                self._choose(rank, now)
        assert self._weights == self._splits, "every I has its W"
        assert self._backwards == [self._p.m] * self._p.num_stages, "the oldest microbatch can always go on"
        return self._listed

    def _choose(self, rank: int, now: float) -> None:
        """Begin what the rule prefers, or come back when something arrives."""
        chosen: tuple[tuple[float, ...], int, int] | None = None
        arrives, lacks_room = FOREVER, False
        for stage in self._p.own[rank]:
            for kind, at in ((I, self._backward_at(stage)), (F, self._forward_at(stage))):
                if at > now:
                    arrives = min(arrives, at)
                elif kind == F and not self._has_room(rank, stage):
                    lacks_room = True
                else:
                    count = (self._forwards if kind == F else self._backwards)[stage]
                    found = self._rule.priority(kind, stage, count), kind, stage
                    chosen = found if chosen is None else min(chosen, found)
        waiting = [stage for stage in self._p.own[rank] if self._weights[stage] < self._splits[stage]]
        if waiting:
            stage = min(waiting, key=lambda s: (self._weights[s], s))
            found = self._rule.priority(W, stage, self._weights[stage]), W, stage
            on_time = now + self._p.weights[stage] * (1.0 - self._rule.delay) <= arrives
            if (chosen is None and (lacks_room or on_time)) or (self._rule.plans_weights and chosen and found < chosen):
                chosen = found
        if chosen is not None:
            self._begin(rank, now, chosen[1], chosen[2])
            return
        if arrives < FOREVER:
            heapq.heappush(self._events, (arrives, rank))

    def _forward_at(self, stage: int) -> float:
        """When the next forward could begin; never: it is not known, or enough are in flight."""
        count, arrivals = self._forwards[stage], self._entered[stage]
        if count >= len(arrivals) or count - self._backwards[stage] >= self._rule.most[stage]:
            return FOREVER
        return arrivals[count]

    def _backward_at(self, stage: int) -> float:
        count, arrivals = self._backwards[stage], self._returned[stage]
        return arrivals[count] if count < min(self._forwards[stage], len(arrivals)) else FOREVER

    def _has_room(self, rank: int, stage: int) -> bool:
        """Whether a forward has room, and all in flight can be finished after it, the oldest first."""
        p, own = self._p, self._p.own[rank]
        if not p.fits(rank, self._size[rank] + p.kept[stage]):
            return False
        if len(own) == 1:
            return True
        left = p.rooms[rank] * (1.0 + ROUNDING) - self._size[rank] - p.kept[stage]
        left += sum((self._splits[s] - self._weights[s]) * p.waiting[s] for s in own)
        begun = [self._forwards[s] + (s == stage) for s in own]
        for microbatch in range(min(self._backwards[s] for s in own), begun[0]):
            claimed = held = 0.0
            for s, count in zip(own, begun, strict=True):
                if microbatch >= count:
                    claimed += p.kept[s]
                elif microbatch >= self._backwards[s]:
                    held += p.kept[s]
            if claimed > left:
                return False
            left += held
        return True

    def _begin(self, rank: int, now: float, kind: int, stage: int) -> None:
        p = self._p
        if kind == I and not p.fits(rank, self._size[rank] + p.waiting[stage] - p.kept[stage]):
            kind = B  # what W would need has no room
        end = now + p.lasts[4 * stage + kind]
        if kind == F:
            self._forwards[stage] += 1
            self._size[rank] += p.kept[stage]
            if stage + 1 < p.num_stages:
                self._arrive(self._entered, stage + 1, end + p.link[stage])
        elif kind == W:
            self._weights[stage] += 1
            self._size[rank] -= p.waiting[stage]
        else:
            self._backwards[stage] += 1
            self._splits[stage] += kind == I
            self._size[rank] -= p.kept[stage] - (p.waiting[stage] if kind == I else 0.0)
            if stage:
                self._arrive(self._returned, stage - 1, end + p.link[stage - 1])
        self._listed.orders[rank].append(4 * stage + kind)
        self._listed.starts[rank].append(now)
        self._free[rank] = end
        heapq.heappush(self._events, (end, rank))

    def _arrive(self, arrivals: list[list[float]], stage: int, at: float) -> None:
        arrivals[stage].append(at)
        heapq.heappush(self._events, (at, self._p.home[stage]))
