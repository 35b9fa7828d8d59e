"""Construction of the schedules with V-shaped placement, in time slots of one F, I or W.

With V-shaped placement, a microbatch's forward ends on the rank where it began, so that its backward starts there at
once. A rank's stage with a long activation lifetime is paired with a stage with a short one, which balances the memory
of the ranks.

``zb_v`` and ``dualpipe_v`` are written phase by phase. ``v_half`` and ``v_min`` repeat the building block of one
microbatch every six slots; the distances within the block bound the number of microbatches in flight. Repetition
leaves idle slots before the first and after the last microbatches. `_Timeline` then moves single actions into idle
slots, first later and then earlier, within the memory bound. No move makes a step longer.

Reference: Qi et al., Pipeline parallelism with controllable memory, arXiv 2405.15362 (building blocks; V-Min, V-Half,
V-ZB); Qi et al., arXiv 2401.10241 (ZB-V); DeepSeek's DualPipe as cut in half (DualPipe-V), arXiv 2412.19437.
The moves are forward-backward improvement: Tormos and Lova, Annals of OR 102, 2001.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import permutations
from typing import cast

import numpy as np

from diptych.plans.schedule.actions import Action, Kind

PERIOD = 6
"""Slots of a microbatch on a rank: F, I and W of two stages."""

Actions = list[list[Action]]
"""Actions of each rank, in order."""


def zb_v(p: int, m: int) -> Actions:
    """Return the schedule ZB-V.

    With F = I = W, no rank is idle between its first and last action. At most 2 p stage forwards are in flight.
    """
    return [_trimmed(_zb_v_rank(rank, p, max(m, 2 * p - 1)), m) for rank in range(p)]


def dualpipe_v(p: int, m: int) -> Actions:
    """Return the schedule DualPipe-V.

    Backwards are full if they are next to a forward, with which they may overlap, and split where ranks would wait.
    """
    return [_trimmed(_dualpipe_v_rank(rank, p, max(m, 2 * p)), m) for rank in range(p)]


def v_half(p: int, m: int) -> Actions:
    """Return the schedule V-Half.

    At most 2 floor((p + 2) / 2) stage forwards are in flight, about half the activation memory of 1F1B.
    """
    return _Timeline(p, m, _block(p, (1, 2, 1, 2), (2, 1, 1) if p % 2 else (2, 4, 1)), 2 * ((p + 2) // 2)).improved()


def v_min(p: int, m: int) -> Actions:
    """Return the schedule V-Min.

    At most 2 floor((p + 4) / 3) stage forwards are in flight, for large p a third of the activation memory of 1F1B.
    """
    return _Timeline(p, m, _block(p, (1, 1, 1, 1), (1, 1, 1) if p % 3 else (3, 1, 3)), 2 * ((p + 4) // 3)).improved()


class _Writer:
    """A builder of one rank's actions, which numbers the microbatches of each kind and stage in order."""

    def __init__(self, rank: int, p: int) -> None:
        self._stages = (rank, 2 * p - 1 - rank)
        self._counts: Counter[tuple[str, int]] = Counter()
        self._waiting: list[tuple[int, int]] = []
        self.actions: list[Action] = []

    def add(self, kinds: str, half: int) -> None:
        """Append one action of each kind, of the rank's first (0) or second (1) stage."""
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
        """Append the oldest pending W; return False if there is none."""
        if not self._waiting:
            return False
        half, microbatch = self._waiting.pop(0)
        self.actions.append(Action("W", self._stages[half], microbatch))
        self._counts["W", half] += 1
        return True

    def count(self, kind: str, half: int) -> int:
        return self._counts["B" if kind == "I" else kind, half]


def _trimmed(actions: Iterable[Action], m: int) -> list[Action]:
    """Remove the padding microbatches, whose numbers are m or more."""
    return [action for action in actions if action.microbatch < m]


def _zb_v_rank(rank: int, p: int, m: int) -> list[Action]:
    """Return a rank's actions of zb-v, phase by phase."""
    first = 0
    second = 1
    rows = _Writer(rank, p)
    for _ in range(2 * (p - rank) - 1):
        rows.add("F", first)
    for _ in range(rank):
        rows.add("F", second)
        rows.add("F", first)
    for _ in range(p - rank):
        rows.add("FIW", second)
    while rows.count("F", second) < m:
        if rows.count("F", first) < m:
            rows.add("F", first)
        rows.add("IW", first)
        rows.add("FIW", second)
    for _ in range(rank):
        rows.add("I", first)
        rows.add("I", second)
    for _ in range(p - rank):
        rows.add("IW", first)
    for half in (second, first):
        while rows.count("W", half) < m:
            rows.add("W", half)
    return rows.actions


def _dualpipe_v_rank(rank: int, p: int, m: int) -> list[Action]:
    """Return a rank's actions of dualpipe-v, phase by phase."""
    first = 0
    second = 1
    rows = _Writer(rank, p)
    rest = p - 1 - rank
    for _ in range(2 * rest):
        rows.add("F", first)
    for _ in range(rank + 1):
        rows.add("F", first)
        rows.add("F", second)
    for _ in range(rest):
        rows.add("IWF", second)
    for _ in range(m - 2 * p + rank + 1):
        for half in (first, second):
            rows.add("F", half)
            rows.add("B", 1 - half)
    for _ in range(rest):
        rows.add("BF", second)
        rows.add("B", first)
    for number in range(2 * (rank + 1)):
        rows.add("B" if number <= rank else "I", (second, first)[number % 2])
    for _ in range(rest):
        rows.add_weights()
        rows.add("I", first)
    while rows.add_weights():
        pass
    return rows.actions


Block = dict[tuple[Kind, int], int]
"""Slot of the first microbatch's action, by kind and stage; the following microbatches are PERIOD slots apart."""


def _block(p: int, steps: tuple[int, int, int, int], turns: tuple[int, int, int]) -> Block:
    """Return the building block of one microbatch.

    Args:
        p: number of pipeline ranks.
        steps: slots from one stage's start to the next stage's, for the four passes: F and I, each over the first and
            the second half of the stages, in the order F first, F second, I second, I first.
        turns: slots between consecutive passes.

    Returns:
        A block in which no two actions of a rank share a slot, also across microbatches.
    """
    passes = [range(p), range(p, 2 * p), range(2 * p - 1, p - 1, -1), range(p - 1, -1, -1)]
    kinds: tuple[Kind, ...] = ("F", "F", "I", "I")
    block: Block = {}
    slot = 0
    for stages, step, turn, kind in zip(passes, steps, (*turns, 0), kinds, strict=True):
        for place, stage in enumerate(stages):
            block[kind, stage] = slot + step * place
        slot = block[kind, stages[-1]] + turn
    for rank in range(p):
        _place_weights(block, (rank, 2 * p - 1 - rank))
    return block


def _place_weights(block: Block, stages: tuple[int, int]) -> None:
    """Place both W of a rank into the two free slots of a period, as soon as possible after their I."""
    taken = {slot % PERIOD for (_, stage), slot in block.items() if stage in stages}
    left = [slot for slot in range(PERIOD) if slot not in taken]
    assert len(left) == 2, "the four passes of a rank are in different slots of a period"
    free_from = [block["I", stage] + 1 for stage in stages]
    waits = [
        [(slot - begin) % PERIOD for slot, begin in zip(order, free_from, strict=True)] for order in permutations(left)
    ]
    for stage, begin, wait in zip(stages, free_from, min(waits, key=sum), strict=True):
        block["W", stage] = begin + wait


class _Timeline:
    """The slots of all actions of a step.

    Args:
        p: number of pipeline ranks.
        m: number of microbatches.
        block: building block that gives the initial slots.
        most: maximum number of stage forwards in flight on a rank.
    """

    def __init__(self, p: int, m: int, block: Block, most: int) -> None:
        self._p = p
        self._stages = 2 * p
        self._most = most
        self._slots: dict[Kind, list[list[int]]] = {
            kind: [[block[kind, stage] + PERIOD * i for i in range(m)] for stage in range(2 * p)] for kind in _KINDS
        }
        length = 1 + max(max(slots) for by_stage in self._slots.values() for slots in by_stage)
        self._in_flight = np.zeros((p, length), np.int32)  # stage forwards in flight during each slot
        idle = [set(range(length)) for _ in range(p)]
        for stage in range(2 * p):
            rank = self._rank(stage)
            for kind in _KINDS:
                idle[rank].difference_update(self._slots[kind][stage])
            for begin, end in zip(self._slots["F"][stage], self._slots["W"][stage], strict=True):
                self._add(rank, begin, end + 1)
        self._idle = [sorted(slots) for slots in idle]

    def improved(self) -> Actions:
        """Move every action as late as possible, then as early as possible, and return the order of every rank."""
        for later in (True, False):
            for old, kind, stage, i in sorted(self._actions(), reverse=later):
                self._move(kind, stage, i, old, later)
        ranks: Actions = [[] for _ in range(self._p)]
        for _, kind, stage, i in sorted(self._actions()):
            ranks[self._rank(stage)].append(Action(kind, stage, i))
        return ranks

    def _actions(self) -> Iterator[tuple[int, Kind, int, int]]:
        for kind, by_stage in self._slots.items():
            for stage, slots in enumerate(by_stage):
                for i, slot in enumerate(slots):
                    yield slot, kind, stage, i

    def _move(self, kind: Kind, stage: int, i: int, old: int, later: bool) -> None:
        """Move an action to the farthest idle slot that its dependencies, its dependents and the memory bound allow."""
        rank = self._rank(stage)
        idle = self._idle[rank]
        if later:
            place = bisect_left(idle, self._latest(kind, stage, i, old)) - 1
        else:
            place = bisect_left(idle, self._earliest(kind, stage, i, old))
        if not 0 <= place < len(idle) or (idle[place] < old) == later:
            return
        new = idle.pop(place)
        insort(idle, old)
        self._slots[kind][stage][i] = new
        if kind == "F":
            self._add(rank, new, old)
        elif kind == "W":
            self._add(rank, old + 1, new + 1)

    def _latest(self, kind: Kind, stage: int, i: int, old: int) -> int:
        """Return the first slot that is too late for an action."""
        if kind == "W":  # its stage's activations stay in flight until it has run
            in_flight = self._in_flight[self._rank(stage), old + 1 :]
            full = np.flatnonzero(in_flight == self._most)
            return old + 1 + (int(full[0]) if full.size else in_flight.size)
        after, onward = ("I", stage + 1) if kind == "F" else ("W", stage - 1)
        own = self._slots[after][stage][i]
        return min(own, self._slots[kind][onward][i]) if 0 <= onward < self._stages else own

    def _earliest(self, kind: Kind, stage: int, i: int, old: int) -> int:
        """Return the first slot that is not too early for an action."""
        if kind == "W":
            return self._slots["I"][stage][i] + 1
        before = stage - 1 if kind == "F" else stage + 1
        begin = self._slots[kind][before][i] + 1 if 0 <= before < self._stages else 0
        if kind == "I":
            return max(begin, self._slots["F"][stage][i] + 1)
        full = np.flatnonzero(self._in_flight[self._rank(stage), begin:old] == self._most)
        return begin + 1 + int(full[-1]) if full.size else begin

    def _add(self, rank: int, begin: int, end: int) -> None:
        """Count one more stage forward in flight in [begin, end), or one less in [end, begin)."""
        self._in_flight[rank, begin:end] += 1
        self._in_flight[rank, end:begin] -= 1

    def _rank(self, stage: int) -> int:
        return min(stage, self._stages - 1 - stage)


_KINDS: tuple[Kind, ...] = ("F", "I", "W")
