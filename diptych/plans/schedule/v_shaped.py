"""Schedules whose stages go there and back over the ranks (placement ``v``), in ticks of one F, I or W.

Every microbatch ends on the rank it began on, so its backward begins there at once. A rank of the first half holds a
long time what the other half of the same rank holds a short time: all ranks keep alike much.

``zb_v`` and ``dualpipe_v`` are written down phase by phase. ``v_half`` and ``v_min`` repeat one microbatch's passes
every six ticks, as far apart as keeps few microbatches alive. That building block wastes ticks before the first and
after the last microbatches; `_Course` then moves single actions into idle ticks, later and back, where the bound on
what is kept allows it. No move makes a step longer.

Reference: Qi et al., Pipeline parallelism with controllable memory, arXiv 2405.15362 (building blocks; V-Min, V-Half,
V-ZB); Qi et al., arXiv 2401.10241 (ZB-V); DeepSeek's DualPipe as cut in half (DualPipe-V), arXiv 2412.19437.
Moving actions later and back is forward-backward improvement: Tormos and Lova, Annals of OR 102, 2001.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import permutations
from typing import cast

import numpy as np

from diptych.plans.schedule.actions import Action, Kind

PERIOD = 6
"""Ticks a microbatch takes on a rank: F, I and W of two stages."""

Actions = list[list[Action]]
"""By rank, in order."""


def zb_v(p: int, m: int) -> Actions:
    """No rank idle between its first and its last action where F = I = W; 2 p stages' worth in flight."""
    return [_trimmed(_zb_v_rank(rank, p, max(m, 2 * p - 1)), m) for rank in range(p)]


def dualpipe_v(p: int, m: int) -> Actions:
    """Backwards whole where they stand beside a forward, which they may overlap, and split where ranks would wait."""
    return [_trimmed(_dualpipe_v_rank(rank, p, max(m, 2 * p)), m) for rank in range(p)]


def v_half(p: int, m: int) -> Actions:
    """At most 2 floor((p + 2) / 2) stages' worth in flight, about half of what 1F1B keeps."""
    return _Course(p, m, _block(p, (1, 2, 1, 2), (2, 1, 1) if p % 2 else (2, 4, 1)), 2 * ((p + 2) // 2)).improved()


def v_min(p: int, m: int) -> Actions:
    """At most 2 floor((p + 4) / 3) stages' worth in flight, for large p a third of what 1F1B keeps."""
    return _Course(p, m, _block(p, (1, 1, 1, 1), (1, 1, 1) if p % 3 else (3, 1, 3)), 2 * ((p + 4) // 3)).improved()


class _Writer:
    """Writes a rank's actions down; microbatches of each kind and stage are in order."""

    def __init__(self, rank: int, p: int) -> None:
        self._stages = rank, 2 * p - 1 - rank
        self._counts: Counter[tuple[str, int]] = Counter()
        self._waiting: list[tuple[int, int]] = []
        self.actions: list[Action] = []

    def add(self, kinds: str, half: int) -> None:
        """One action of each kind: of the rank's stage on the way there (0) or back (1)."""
        for kind in kinds:
            self.actions.append(Action(cast("Kind", kind), self._stages[half], self.count(kind, half)))
            if kind == "I":
                self._waiting.append((half, self.count(kind, half)))
            elif kind == "W":
                self._waiting.remove((half, self.count(kind, half)))
            self._counts["B" if kind == "I" else kind, half] += 1
            if kind == "B":
                self._counts["W", half] += 1

    def add_weights(self) -> bool:
        """The W that has waited longest; False: there is none."""
        if not self._waiting:
            return False
        half, microbatch = self._waiting.pop(0)
        self.actions.append(Action("W", self._stages[half], microbatch))
        self._counts["W", half] += 1
        return True

    def count(self, kind: str, half: int) -> int:
        return self._counts["B" if kind == "I" else kind, half]


def _trimmed(actions: Iterable[Action], m: int) -> list[Action]:
    """Without the microbatches a schedule needs to be whole, and that there are not."""
    return [action for action in actions if action.microbatch < m]


def _zb_v_rank(rank: int, p: int, m: int) -> list[Action]:
    there, back = 0, 1
    rows = _Writer(rank, p)
    for _ in range(2 * (p - rank) - 1):
        rows.add("F", there)
    for _ in range(rank):
        rows.add("F", back)
        rows.add("F", there)
    for _ in range(p - rank):
        rows.add("FIW", back)
    while rows.count("F", back) < m:
        if rows.count("F", there) < m:
            rows.add("F", there)
        rows.add("IW", there)
        rows.add("FIW", back)
    for _ in range(rank):
        rows.add("I", there)
        rows.add("I", back)
    for _ in range(p - rank):
        rows.add("IW", there)
    for half in (back, there):
        while rows.count("W", half) < m:
            rows.add("W", half)
    return rows.actions


def _dualpipe_v_rank(rank: int, p: int, m: int) -> list[Action]:
    there, back = 0, 1
    rows, rest = _Writer(rank, p), p - 1 - rank
    for _ in range(2 * rest):
        rows.add("F", there)
    for _ in range(rank + 1):
        rows.add("F", there)
        rows.add("F", back)
    for _ in range(rest):
        rows.add("IWF", back)
    for _ in range(m - 2 * p + rank + 1):
        for half in (there, back):
            rows.add("F", half)
            rows.add("B", 1 - half)
    for _ in range(rest):
        rows.add("BF", back)
        rows.add("B", there)
    for number in range(2 * (rank + 1)):
        rows.add("B" if number <= rank else "I", (back, there)[number % 2])
    for _ in range(rest):
        rows.add_weights()
        rows.add("I", there)
    while rows.add_weights():
        pass
    return rows.actions


Block = dict[tuple[Kind, int], int]
"""(kind, stage): the tick at which the first microbatch's action stands; the next follow every PERIOD ticks."""


def _block(p: int, steps: tuple[int, int, int, int], turns: tuple[int, int, int]) -> Block:
    """One microbatch's way.

    Args:
        p: ranks.
        steps: ticks from a stage's beginning to the next one's: F there, F back, I there, I back.
        turns: ticks between the four ways: after F there, after F back, after I there.

    Returns:
        No two actions of a rank at the same tick, also of different microbatches.
    """
    ways = [range(p), range(p, 2 * p), range(2 * p - 1, p - 1, -1), range(p - 1, -1, -1)]
    kinds: tuple[Kind, ...] = ("F", "F", "I", "I")
    found: Block = {}
    tick = 0
    for way, step, turn, kind in zip(ways, steps, (*turns, 0), kinds, strict=True):
        for place, stage in enumerate(way):
            found[kind, stage] = tick + step * place
        tick = found[kind, way[-1]] + turn
    for rank in range(p):
        _place_weights(found, (rank, 2 * p - 1 - rank))
    return found


def _place_weights(block: Block, stages: tuple[int, int]) -> None:
    """Put both W of a rank into the two ticks of a period that are left, as soon after their I as that goes."""
    taken = {tick % PERIOD for (_, stage), tick in block.items() if stage in stages}
    left = [tick for tick in range(PERIOD) if tick not in taken]
    assert len(left) == 2, "the four passes of a rank stand at different ticks of a period"
    begun = [block["I", stage] + 1 for stage in stages]
    waits = [
        [(tick - begin) % PERIOD for tick, begin in zip(order, begun, strict=True)] for order in permutations(left)
    ]
    for stage, begin, wait in zip(stages, begun, min(waits, key=sum), strict=True):
        block["W", stage] = begin + wait


class _Course:
    """All actions of a step at their ticks.

    Args:
        p: ranks.
        m: microbatches.
        block: where they stand at first.
        most: stages' worth that a rank may have in flight.
    """

    def __init__(self, p: int, m: int, block: Block, most: int) -> None:
        self._p, self._stages, self._most = p, 2 * p, most
        self._ticks: dict[Kind, list[list[int]]] = {
            kind: [[block[kind, stage] + PERIOD * i for i in range(m)] for stage in range(2 * p)] for kind in _KINDS
        }
        length = 1 + max(max(ticks) for by_stage in self._ticks.values() for ticks in by_stage)
        self._kept = np.zeros((p, length), np.int32)  # stages' worth in flight during each tick
        idle = [set(range(length)) for _ in range(p)]
        for stage in range(2 * p):
            rank = self._rank(stage)
            for kind in _KINDS:
                idle[rank].difference_update(self._ticks[kind][stage])
            for begin, end in zip(self._ticks["F"][stage], self._ticks["W"][stage], strict=True):
                self._add(rank, begin, end + 1)
        self._idle = [sorted(ticks) for ticks in idle]

    def improved(self) -> Actions:
        """Every rank's actions in order, once each has been moved as late as it can be, and then as early."""
        for later in (True, False):
            for old, kind, stage, i in sorted(self._actions(), reverse=later):
                self._move(kind, stage, i, old, later)
        ranks: Actions = [[] for _ in range(self._p)]
        for _, kind, stage, i in sorted(self._actions()):
            ranks[self._rank(stage)].append(Action(kind, stage, i))
        return ranks

    def _actions(self) -> Iterator[tuple[int, Kind, int, int]]:
        for kind, by_stage in self._ticks.items():
            for stage, ticks in enumerate(by_stage):
                for i, tick in enumerate(ticks):
                    yield tick, kind, stage, i

    def _move(self, kind: Kind, stage: int, i: int, old: int, later: bool) -> None:
        """To the idle tick farthest in one direction that what it needs, what needs it and the bound allow."""
        rank = self._rank(stage)
        idle, place = self._idle[rank], 0
        if later:
            place = bisect_left(idle, self._latest(kind, stage, i, old)) - 1
        else:
            place = bisect_left(idle, self._earliest(kind, stage, i, old))
        if not 0 <= place < len(idle) or (idle[place] < old) == later:
            return
        new = idle.pop(place)
        insort(idle, old)
        self._ticks[kind][stage][i] = new
        if kind == "F":
            self._add(rank, new, old)
        elif kind == "W":
            self._add(rank, old + 1, new + 1)

    def _latest(self, kind: Kind, stage: int, i: int, old: int) -> int:
        """The first tick that is too late for an action."""
        if kind == "W":  # until it has run, its stage's worth is in flight
            kept = self._kept[self._rank(stage), old + 1 :]
            full = np.flatnonzero(kept == self._most)
            return old + 1 + (int(full[0]) if full.size else kept.size)
        after, onward = ("I", stage + 1) if kind == "F" else ("W", stage - 1)
        own = self._ticks[after][stage][i]
        return min(own, self._ticks[kind][onward][i]) if 0 <= onward < self._stages else own

    def _earliest(self, kind: Kind, stage: int, i: int, old: int) -> int:
        """The first tick that is not too early for an action."""
        if kind == "W":
            return self._ticks["I"][stage][i] + 1
        before = stage - 1 if kind == "F" else stage + 1
        begin = self._ticks[kind][before][i] + 1 if 0 <= before < self._stages else 0
        if kind == "I":
            return max(begin, self._ticks["F"][stage][i] + 1)
        full = np.flatnonzero(self._kept[self._rank(stage), begin:old] == self._most)
        return begin + 1 + int(full[-1]) if full.size else begin

    def _add(self, rank: int, begin: int, end: int) -> None:
        """A stage's worth more is in flight from one tick to another, or less from the other to the one."""
        self._kept[rank, begin:end] += 1
        self._kept[rank, end:begin] -= 1

    def _rank(self, stage: int) -> int:
        return min(stage, self._stages - 1 - stage)


_KINDS: tuple[Kind, ...] = ("F", "I", "W")
