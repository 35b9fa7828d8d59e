"""List scheduling: a free rank starts the action that its rule prefers among those that can start.

A rule makes three choices: the order of the forwards and input gradients that have arrived; how many microbatches a
stage may have in flight beyond those that keep it busy; and the time of W, on which no other rank waits. W runs either
when no other action can start, if it delays no known arrival by more than a share of W's time, or at a planned time,
half a period after I. A rank without memory for a forward runs W at once.

The schedule is deadlock-free under any memory limit that fits one microbatch. A forward starts only if the microbatches
in flight can still be finished afterwards, one after the other, oldest first: the rank's free memory, and what older
microbatches will free, suffices for the forwards that each microbatch still has to run on the rank. The oldest
microbatch is then never blocked: its forwards fit once pending Ws have run, and its backward needs no memory (where I
does not fit, the full backward B replaces it).

Reference: the oldest-first rule is Dijkstra's banker's algorithm with one order for all ranks.
"""

import heapq
from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

from diptych.planner.generate.orders import ROUNDING, B, F, I, Orders, Pipeline, W

FOREVER = float("inf")
Priority = Callable[[int, int, int], tuple[float, ...]]
"""Function of kind, stage and microbatch of an action that can start; the smallest result starts first."""


class Rule(NamedTuple):
    """The rule by which a free rank chooses its next action."""

    priority: Priority
    most: tuple[float, ...]
    """Largest number of microbatches in flight, by stage."""
    delay: float
    """Share of a W's time by which it may delay other actions."""
    plans_weights: bool = False
    """True if the priority has a planned time for W too."""


def rules(pipeline: Pipeline) -> Iterator[Rule]:
    """Yield all rules, those that save least for backward first."""
    p = pipeline
    period = max(p.work(rank) for rank in range(p.p))
    heads, backs, _ = p.single_microbatch_times()
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
    """The schedule that a rule makes."""

    orders: Orders
    starts: list[list[float]]
    """Start of each action, by rank, in its order; ``run`` never starts an action later."""


def list_orders(pipeline: Pipeline, rule: Rule) -> Listed:
    """Return the orders of all ranks by one rule; every rank stays within its memory limit."""
    return _Listing(pipeline, rule).listed()


class _Listing:
    """The state of list scheduling, event by event."""

    def __init__(self, pipeline: Pipeline, rule: Rule) -> None:
        self._p = pipeline
        self._rule = rule
        stages = range(pipeline.num_stages)
        ranks = range(pipeline.p)
        # By stage: how many microbatches have started F; I or B; I; and W.
        self._forwards = [0 for _ in stages]
        self._backwards = [0 for _ in stages]
        self._splits = [0 for _ in stages]
        self._weights = [0 for _ in stages]
        # By stage: known arrival times of the inputs of F and of the backward.
        self._entered: list[list[float]] = [[] for _ in stages]
        self._returned: list[list[float]] = [[] for _ in stages]
        self._entered[0] = [0.0] * pipeline.m
        self._returned[-1] = [0.0] * pipeline.m
        self._size = [0.0 for _ in ranks]
        self._free = [0.0 for _ in ranks]
        self._listed = Listed([[] for _ in ranks], [[] for _ in ranks])
        self._events = [(0.0, rank) for rank in ranks]

    def listed(self) -> Listed:
        """Process events until none is left, and return the result."""
        while self._events:
            now, rank = heapq.heappop(self._events)
            if self._free[rank] <= now:
                self._choose(rank, now)
        assert self._weights == self._splits, "every I has its W"
        assert self._backwards == [self._p.m] * self._p.num_stages, "the oldest microbatch can always go on"
        return self._listed

    def _choose(self, rank: int, now: float) -> None:
        """Start the action that the rule prefers, or try again at the next arrival."""
        chosen: tuple[tuple[float, ...], int, int] | None = None
        arrives = FOREVER
        lacks_room = False
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
        """Return when the next forward can start; FOREVER if that is unknown or enough microbatches are in flight."""
        count = self._forwards[stage]
        arrivals = self._entered[stage]
        if count >= len(arrivals) or count - self._backwards[stage] >= self._rule.most[stage]:
            return FOREVER
        return arrivals[count]

    def _backward_at(self, stage: int) -> float:
        count = self._backwards[stage]
        arrivals = self._returned[stage]
        return arrivals[count] if count < min(self._forwards[stage], len(arrivals)) else FOREVER

    def _has_room(self, rank: int, stage: int) -> bool:
        """Return True if a forward fits and all microbatches in flight can be finished after it, oldest first."""
        p = self._p
        own = self._p.own[rank]
        if not p.fits(rank, self._size[rank] + p.saved[stage]):
            return False
        if len(own) == 1:
            return True
        left = p.memory_limits[rank] * (1.0 + ROUNDING) - self._size[rank] - p.saved[stage]
        left += sum((self._splits[s] - self._weights[s]) * p.pending[s] for s in own)
        forwards = [self._forwards[s] + (s == stage) for s in own]
        for microbatch in range(min(self._backwards[s] for s in own), forwards[0]):
            claimed = 0.0
            held = 0.0
            for s, count in zip(own, forwards, strict=True):
                if microbatch >= count:
                    claimed += p.saved[s]
                elif microbatch >= self._backwards[s]:
                    held += p.saved[s]
            if claimed > left:
                return False
            left += held
        return True

    def _begin(self, rank: int, now: float, kind: int, stage: int) -> None:
        """Start an action: count it, change the saved bytes, and announce the arrival of its result."""
        p = self._p
        if kind == I and not p.fits(rank, self._size[rank] + p.pending[stage] - p.saved[stage]):
            kind = B  # the values saved for W do not fit
        end = now + p.durations[4 * stage + kind]
        if kind == F:
            self._forwards[stage] += 1
            self._size[rank] += p.saved[stage]
            if stage + 1 < p.num_stages:
                self._arrive(self._entered, stage + 1, end + p.link[stage])
        elif kind == W:
            self._weights[stage] += 1
            self._size[rank] -= p.pending[stage]
        else:
            self._backwards[stage] += 1
            self._splits[stage] += kind == I
            self._size[rank] -= p.saved[stage] - (p.pending[stage] if kind == I else 0.0)
            if stage:
                self._arrive(self._returned, stage - 1, end + p.link[stage - 1])
        self._listed.orders[rank].append(4 * stage + kind)
        self._listed.starts[rank].append(now)
        self._free[rank] = end
        heapq.heappush(self._events, (end, rank))

    def _arrive(self, arrivals: list[list[float]], stage: int, at: float) -> None:
        arrivals[stage].append(at)
        heapq.heappush(self._events, (at, self._p.home[stage]))
