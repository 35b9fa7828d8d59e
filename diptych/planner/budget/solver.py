"""The least recomputation of one stage, from the costs of its blocks.

A stage is cut into blocks of layers, and each block saves everything, recomputes some modules, or recomputes whole
layers. In an action, the block that begins at a layer needs what all layers before it have saved, its own memory, and
what the action has left of the layers after it:

    saved before the block + peak of the block + left after the block <= limit of the action

If the values of the layer before the block move to the host, they are beside the block's first layer. The copy to the
host has the time of its forward, and the copy back that of its backward; for the rest, the step waits.

The least seconds up to a layer depend on the bytes saved so far, and on the bytes of the last layer that move. From the
first layer on, the solver keeps for each layer and each number of moving bytes the pairs (bytes saved, seconds) that no
other pair with as few moving bytes beats in both, so its result is the best of all layouts. If a layer has more than
2^14 pairs, which models of 64 layers do not reach, those within 2^-14 of the limit of each other are joined: with their
bytes rounded up for the result, and down for the bound that no layout beats.

If values of layers may move, the many numbers of moving bytes multiply the pairs. So the stage is first solved from its
end, with moving values that need no memory beside the next layer and wait for the slowest one only. That gives the
least seconds from each layer on for the bytes saved before it, and pairs that exceed the best known solution with them
are left out. The best known solution begins at an estimate, and grows to the one in which nothing moves.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from diptych.planner.budget.blocks import LENGTHS, BlockCost, EndCost
from diptych.plans.recompute import RecomputeBlock

STEPS = 2**14
"""Parts of the limit within which bytes are not told apart."""
ESTIMATES = (0.001, 0.03, 0.3)
"""Seconds above the least, in parts of those of the best known solution, within which a solution is sought first."""
ROUNDING = 1e-12
"""Part of the seconds by which sums in another order may differ."""


class Parts(Protocol):
    """The costs that the solver reads; see diptych.planner.budget.blocks.StageParts."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of actions of the stage."""
        ...

    @property
    def layers(self) -> range:
        """Return the global numbers of the layers."""
        ...

    @property
    def after(self) -> list[tuple[int, ...]]:
        """Return the bytes that each kind of action has left of the layers from one on."""
        ...

    @property
    def first_end(self) -> EndCost:
        """Return the memory of what comes before the layers."""
        ...

    @property
    def last_end(self) -> EndCost:
        """Return the memory of what comes after the layers."""
        ...

    def options(self, first: int, size: int) -> list[BlockCost]:
        """Return the costs of blocks of ``size`` layers from a layer on."""
        ...

    def copy_waits(self, moved: int, place: int, following: BlockCost) -> float:
        """Return the seconds for which the block at a place waits for copies of values of the layer before it."""
        ...

    def least_wait(self, moved: int) -> float:
        """Return the least seconds for which any block waits for copies of values of the layer before it."""
        ...

    def copied_beside(self, moved: int) -> tuple[int, ...]:
        """Return the bytes of a layer's values on the device beside the next layer, in each kind of action."""
        ...


class Solution(NamedTuple):
    """The blocks of a stage."""

    blocks: list[RecomputeBlock]
    """In the order of their layers."""
    saved: int
    """Bytes that they save for backward."""
    seconds: float
    """Seconds of recomputation, of packing in 8 bits and reading again, and of waits for copies."""
    stored: list[int]
    """Numbers of the layers that save values in 8 bits."""
    moved: list[int]
    """Numbers of the layers whose saved values move to the host."""


class _Front(NamedTuple):
    """Pairs of saved bytes and seconds up to a layer, none of which another beats, and how each was reached."""

    saved: np.ndarray
    seconds: np.ndarray
    step: np.ndarray
    """Number of the block in the list of blocks that end at the layer."""
    before: np.ndarray
    """Number of the pair at the beginning of the block."""
    moved_before: np.ndarray
    """Moving bytes of the layer before the block."""


_Fronts = dict[int, _Front]
"""The pairs up to a layer, by the moving bytes of the layer."""


def solve(parts: Parts, limits: Sequence[int], most_saved: int, upper: bool) -> Solution | None:
    """Return the fastest blocks within limits, or None.

    Args:
        parts: costs of the stage's parts.
        limits: bytes that each kind of action may need, with what the microbatch has saved.
        most_saved: bytes that the stage may save.
        upper: round joined bytes up, so that the blocks are within the limits; False: down, for a bound of the seconds.
    """
    if not _all_fit(parts.first_end.peaks, parts.after[0], limits):
        return None
    endings = [_blocks_before(parts, end) for end in range(len(parts.layers) + 1)]
    still = [[(start, cost) for start, cost in blocks if not cost.moved] for blocks in endings]
    known = _solve(parts, still, limits, most_saved, upper)
    if still == endings:
        return known
    rests = _least_rests(parts, endings, limits, most_saved)
    least = _rest_of(rests[0], np.array([parts.first_end.saved]))[0]
    most = np.inf if known is None else known.seconds
    if np.isinf(least):
        return None
    for share in ESTIMATES:
        estimate = least + share * (most if np.isfinite(most) else least)
        if estimate >= most:
            break
        found = _solve(parts, endings, limits, most_saved, upper, (rests, estimate))
        if found is not None and found.seconds <= estimate:
            return found
    found = _solve(parts, endings, limits, most_saved, upper, (rests, most))
    return known if found is None or (known is not None and known.seconds <= found.seconds) else found


def _blocks_before(parts: Parts, end: int) -> list[tuple[int, BlockCost]]:
    """Return the blocks that end before a layer: the place of each one's first layer, and its cost."""
    begin = parts.layers.start
    return [(end - size, cost) for size in LENGTHS if size <= end for cost in parts.options(begin + end - size, size)]


def _solve(
    parts: Parts,
    endings: Sequence[Sequence[tuple[int, BlockCost]]],
    limits: Sequence[int],
    most_saved: int,
    upper: bool,
    known: "tuple[list[_Rest], float] | None" = None,
) -> Solution | None:
    """Return the fastest of some blocks within limits, or None.

    Args:
        parts: costs of the stage's parts.
        endings: blocks that end before each layer.
        limits: as in solve.
        most_saved: as in solve.
        upper: as in solve.
        known: least rests of every layer, and seconds that a solution may take; None: any.
    """
    nothing = np.zeros(1, int)
    fronts: list[_Fronts] = [
        {0: _Front(np.array([parts.first_end.saved]), np.zeros(1), nothing, nothing, nothing)},
    ]
    begin = parts.layers.start
    most = most_saved - parts.last_end.saved
    step = max(1, most) / STEPS
    for end in range(1, len(parts.layers) + 1):
        free = [limit - left for limit, left in zip(limits, parts.after[end], strict=True)]
        allowed = None if known is None else (known[0][end], known[1])
        fronts.append(_joined(parts, fronts, endings[end], (most, free), step, upper, allowed))
    last = fronts[-1].get(0)
    if last is None:
        return None
    fits = last.saved <= min(most, *(a - b for a, b in zip(limits, parts.last_end.peaks, strict=True)))
    if not fits.any():
        return None
    place = int(np.flatnonzero(fits)[np.argmin(last.seconds[fits])])
    saved = int(last.saved[place]) + parts.last_end.saved
    seconds = float(last.seconds[place])
    chosen: list[RecomputeBlock] = []
    stored: list[int] = []
    moved: list[int] = []
    end = len(parts.layers)
    moved_before = 0
    while end:
        front = fronts[end][moved_before]
        start, cost = endings[end][front.step[place]]
        layers = range(begin + start, begin + end)
        chosen.append(cost.block._replace(layers=tuple(layers)))
        stored += layers if cost.is_stored else ()
        moved += layers if cost.moved else ()
        moved_before = int(front.moved_before[place])
        place = int(front.before[place])
        end = start
    return Solution(chosen[::-1], saved, seconds, stored, moved)


class _Rest(NamedTuple):
    """The least seconds from a layer on: with at most so many bytes saved before it, in ascending order of both."""

    saved: np.ndarray
    seconds: np.ndarray


def _least_rests(
    parts: Parts, endings: Sequence[Sequence[tuple[int, BlockCost]]], limits: Sequence[int], most_saved: int
) -> list[_Rest]:
    """Return for every layer seconds that its blocks and those after it need at least; arguments as in _solve."""
    count = len(parts.layers)
    most = most_saved - parts.last_end.saved
    step = max(1, most) / STEPS
    ends = [limit - peak for limit, peak in zip(limits, parts.last_end.peaks, strict=True)]
    starting: list[list[tuple[int, BlockCost]]] = [[] for _ in range(count)]
    for end, blocks in enumerate(endings):
        for start, cost in blocks:
            starting[start].append((end, cost))
    rests = [_Rest(np.array([min(most, *ends)]), np.zeros(1))] * (count + 1)
    for start in reversed(range(count)):
        saved = [np.zeros(0, np.int64)]
        seconds = [np.zeros(0)]
        for end, cost in starting[start]:
            free = zip(limits, parts.after[end], cost.peaks, strict=True)
            own = min(most - cost.saved, *(limit - left - peak for limit, left, peak in free))
            saved.append(np.minimum(rests[end].saved - cost.saved, own))
            seconds.append(rests[end].seconds + (cost.seconds + (parts.least_wait(cost.moved) if cost.moved else 0.0)))
        rests[start] = _ascending(np.concatenate(saved), np.concatenate(seconds), step)
    return rests


def _ascending(saved: np.ndarray, seconds: np.ndarray, step: float) -> _Rest:
    """Return the pairs of which no other allows as many bytes in fewer seconds.

    If there are many, they are joined, with bytes rounded up.
    """
    left = _undominated(-saved, seconds)[::-1]
    if len(left) > STEPS:
        saved = (np.ceil(saved / step) * step).astype(np.int64)
        left = _undominated(-saved, seconds)[::-1]
    return _Rest(saved[left], seconds[left])


def _rest_of(rest: _Rest, saved: np.ndarray) -> np.ndarray:
    """Return the least seconds after so many saved bytes; infinite if nothing fits."""
    place = np.searchsorted(rest.saved, saved, side="left")
    return np.append(rest.seconds, np.inf)[place]


def saved_range(parts: Parts) -> tuple[int, int]:
    """Return the bytes that a stage saves at least and at most."""
    ranges = [(parts.first_end.saved, parts.first_end.saved)]
    for end in range(1, len(parts.layers) + 1):
        blocks = _blocks_before(parts, end)
        ranges.append(
            (
                min(ranges[start][0] + cost.saved for start, cost in blocks),
                max(ranges[start][1] + cost.saved for start, cost in blocks),
            )
        )
    least, most = ranges[-1]
    return least + parts.last_end.saved, most + parts.last_end.saved


def _all_fit(peaks: Sequence[int], left: Sequence[int], limits: Sequence[int]) -> bool:
    return all(a + b <= limit for a, b, limit in zip(peaks, left, limits, strict=True))


def _joined(
    parts: Parts,
    fronts: list[_Fronts],
    blocks: Iterable[tuple[int, BlockCost]],
    limits: tuple[int, list[int]],
    step: float,
    upper: bool,
    allowed: tuple[_Rest, float] | None = None,
) -> _Fronts:
    """Return the pairs that blocks reach from earlier layers.

    Args:
        parts: costs of the stage's parts.
        fronts: pairs up to every earlier layer.
        blocks: first layer and costs of every block.
        limits: bytes that may be saved up to here, and those that each kind of action may need before and in a block.
        step: bytes within which pairs are joined.
        upper: see solve.
        allowed: least seconds after the blocks, and seconds that a solution may take; None: any.
    """
    most, free = limits
    found: dict[int, list[_Front]] = {}
    for number, (begin, cost) in enumerate(blocks):
        own = min(most - cost.saved, *(a - b for a, b in zip(free, cost.peaks, strict=True)))
        for moved, front in fronts[begin].items():
            limit = own
            wait = 0.0
            if moved:
                begins = zip(free, cost.begin_peaks or cost.peaks, parts.copied_beside(moved), strict=True)
                limit = min(own, *(a - b - c for a, b, c in begins))
                wait = parts.copy_waits(moved, begin, cost)
            before = np.arange(np.searchsorted(front.saved, limit, side="right"))
            saved = front.saved[before] + cost.saved
            seconds = front.seconds[before] + (cost.seconds + wait)
            if allowed is not None:
                rest, largest = allowed
                (left,) = np.nonzero(seconds + _rest_of(rest, saved) <= largest * (1 + ROUNDING))
                saved, seconds, before = saved[left], seconds[left], before[left]
            same = np.ones(len(before), int)
            found.setdefault(cost.moved, []).append(_Front(saved, seconds, number * same, before, moved * same))
    joined: _Fronts = {}
    for moved in sorted(found):
        all_ = _Front(*(np.concatenate(each) for each in zip(*found[moved], strict=True)))
        left = _undominated(all_.saved, all_.seconds)
        if len(left) > STEPS:
            rounded = np.ceil(all_.saved / step) if upper else np.floor(all_.saved / step)
            all_ = all_._replace(saved=(rounded * step).astype(np.int64))
            left = _undominated(all_.saved, all_.seconds)
        for other in joined.values():
            left = left[~_beaten(all_.saved[left], all_.seconds[left], other)]
        if len(left):
            joined[moved] = _Front(*(each[left] for each in all_))
    return joined


def _beaten(saved: np.ndarray, seconds: np.ndarray, other: _Front) -> np.ndarray:
    """Return for each pair True if a pair with fewer moving bytes is at least as good."""
    place = np.searchsorted(other.saved, saved, side="right") - 1  # seconds fall as bytes grow
    return (place >= 0) & (other.seconds[np.maximum(place, 0)] <= seconds)


def _undominated(saved: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Return the numbers of the pairs that no other pair beats, in order of their bytes."""
    order = np.lexsort((seconds, saved))
    best = np.minimum.accumulate(seconds[order])
    return order[np.concatenate([[True], best[1:] < best[:-1]])] if len(order) else order
