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
2^14 pairs, which models of 64 layers do not reach, pairs whose bytes differ by less than 2^-14 of the limit are joined.
Their bytes are rounded up for the result, and down for the bound that no layout beats.

If values of layers may move, the many numbers of moving bytes multiply the pairs. So the stage is first solved from its
end, as if moving values needed no memory beside the next layer and the slowest layer came next. That gives the least
seconds from each layer on for the bytes saved before it. A pair is left out if its seconds and these together exceed
the best known solution, which begins at an estimate and grows to the solution in which nothing moves.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from diptych.planner.budget.blocks import LENGTHS, BlockCost, EndCost
from diptych.plans.model.layers import Offloaded
from diptych.plans.recompute import RecomputeBlock

STEPS = 2**14
"""Parts of the limit; joined pairs do not distinguish bytes within a part."""
ESTIMATES = (0.001, 0.03, 0.3)
"""Estimates of a solution that are tried first: seconds above the least, as a part of the known solution's."""
MOST_BYTES = 2**60
"""Bytes above which limits are the same."""
ROUNDING = 1e-12
"""Part of the seconds by which sums in another order may differ."""


class Parts(Protocol):
    """The costs that the solver reads; see diptych.planner.budget.blocks.StageParts."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of actions of the stage."""
        ...

    @property
    def layers(self) -> range:
        """The global numbers of the layers."""
        ...

    @property
    def after(self) -> list[tuple[int, ...]]:
        """The bytes that each kind of action has left of the layers from each one on, and of what comes after them."""
        ...

    @property
    def first_end(self) -> EndCost:
        """The memory of what comes before the layers."""
        ...

    @property
    def last_end(self) -> EndCost:
        """The memory of what comes after the layers."""
        ...

    def options(self, first: int, size: int) -> list[BlockCost]:
        """Return the costs of blocks of ``size`` layers from a layer on."""
        ...

    def copy_waits(self, moved: np.ndarray, place: int, begin_seconds: np.ndarray) -> np.ndarray:
        """Return the seconds for which blocks at a place wait for copies of values of the layer before them."""
        ...

    def least_wait(self, moved: np.ndarray) -> np.ndarray:
        """Return the least seconds for which any block waits for copies of values of the layer before it."""
        ...

    def copied_beside(self, moved: np.ndarray) -> np.ndarray:
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
    offloaded: dict[int, Offloaded]
    """Values that move to the host, by layer."""


class _Front(NamedTuple):
    """Pairs of saved bytes and seconds up to a layer, none of which another beats, and how each was reached."""

    saved: np.ndarray
    seconds: np.ndarray
    moved: np.ndarray
    """Moving bytes of the layer; a pair is beaten only by one with at most as many."""
    step: np.ndarray
    """Number of the block among those that end at the layer."""
    before: np.ndarray
    """Number of the pair at the beginning of the block."""


class Blocks(NamedTuple):
    """The n choices for a block of certain layers, as arrays [n] of their costs."""

    start: int
    """Place of the first layer in the stage."""
    costs: list[BlockCost]
    saved: np.ndarray
    seconds: np.ndarray
    moved: np.ndarray
    peaks: np.ndarray
    """[kinds, n]"""
    begin_peaks: np.ndarray
    """[kinds, n]"""
    begin_seconds: np.ndarray
    """[2, n]"""
    held: np.ndarray
    """BlockCost.held of blocks at the beginning of the stage."""


def solve(
    parts: Parts, endings: Sequence[Sequence[Blocks]], limits: Sequence[int], most_saved: int, upper: bool
) -> Solution | None:
    """Return the fastest blocks within limits, or None.

    Args:
        parts: costs of the stage's parts.
        endings: result of blocks_by_end.
        limits: bytes that each kind of action may need, with what the microbatch has saved.
        most_saved: bytes that the stage may save.
        upper: round joined bytes up, so that the blocks are within the limits; False: down, for a bound of the seconds.
    """
    choices = sorted({int(held) for ending in endings for b in ending if b.start == 0 for held in b.held}) or [0]
    solved = [_solve_holding(held, parts, endings, limits, most_saved, upper) for held in choices]
    return min((each for each in solved if each is not None), key=lambda each: each.seconds, default=None)


def _solve_holding(
    held: int,
    parts: Parts,
    endings: Sequence[Sequence[Blocks]],
    limits: Sequence[int],
    most_saved: int,
    upper: bool,
) -> Solution | None:
    """Return the fastest blocks of which the first holds so many bytes during later forwards; see BlockCost.held."""
    limits = [min(limit, MOST_BYTES) for limit in limits]
    most_saved = min(most_saved, MOST_BYTES)
    if not _all_fit(parts.first_end.peaks, parts.after[0], limits):
        return None
    solve_some = partial(_solve, parts, endings, limits, most_saved, upper, held)
    known = solve_some(moves=False)
    if not any(blocks.moved.any() for ending in endings for blocks in ending):
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
        found = solve_some(known=(rests, estimate))
        if found is not None and found.seconds <= estimate:
            return found
    found = solve_some(known=(rests, most))
    return known if found is None or (known is not None and known.seconds <= found.seconds) else found


def blocks_by_end(parts: Parts) -> list[list[Blocks]]:
    """Return the blocks that end before each layer of a stage, and before what comes after them."""
    return [_blocks_before(parts, end) for end in range(len(parts.layers) + 1)]


def _blocks_before(parts: Parts, end: int) -> list[Blocks]:
    """Return the blocks that end before a layer, by their first layer."""
    found = []
    for size in (size for size in LENGTHS if size <= end):
        costs = parts.options(parts.layers.start + end - size, size)
        if costs:
            rows = ([cost.peaks for cost in costs], [cost.begin_peaks or cost.peaks for cost in costs])
            peaks, begin_peaks = (np.array(each, dtype=np.int64).T for each in rows)
            saved, moved = (
                np.array(each, dtype=np.int64) for each in zip(*((c.saved, c.moved) for c in costs), strict=True)
            )
            seconds = np.array([cost.seconds for cost in costs])
            begin_seconds = np.array([cost.begin_seconds for cost in costs]).T
            held = np.array([cost.held for cost in costs], dtype=np.int64)
            found.append(Blocks(end - size, costs, saved, seconds, moved, peaks, begin_peaks, begin_seconds, held))
    return found


def _solve(
    parts: Parts,
    endings: Sequence[Sequence[Blocks]],
    limits: Sequence[int],
    most_saved: int,
    upper: bool,
    held: int = 0,
    moves: bool = True,
    known: "tuple[list[_Rest], float] | None" = None,
) -> Solution | None:
    """Return the fastest of some blocks within limits, or None.

    Args:
        parts: costs of the stage's parts.
        endings: result of blocks_by_end.
        limits: as in solve.
        most_saved: as in solve.
        upper: as in solve.
        held: bytes that the first block holds during the forward of later blocks.
        moves: values of layers may move.
        known: least rests of every layer, and seconds that a solution may take; None: any.
    """
    nothing = np.zeros(1, np.int64)
    fronts = [_Front(np.array([parts.first_end.saved]), np.zeros(1), nothing, nothing, nothing)]
    most = most_saved - parts.last_end.saved
    step = max(1, most) / STEPS
    for end in range(1, len(parts.layers) + 1):
        free = np.array(limits) - parts.after[end]
        reached = _reached(parts, fronts, endings[end], (most, free), held, moves)
        if known is not None:
            rests, largest = known
            reached = _some(reached, reached.seconds + _rest_of(rests[end], reached.saved) <= largest * (1 + ROUNDING))
        fronts.append(_unbeaten(reached, step, upper))
    last = fronts[-1]
    most = min(most, *(a - b for a, b in zip(limits, parts.last_end.peaks, strict=True)))
    fits = (last.moved == 0) & (last.saved <= most)
    if not fits.any():
        return None
    place = int(np.flatnonzero(fits)[np.argmin(last.seconds[fits])])
    saved = int(last.saved[place]) + parts.last_end.saved
    seconds = float(last.seconds[place])
    chosen = _chosen(parts, fronts, endings, place)
    blocks = [cost.block._replace(layers=layers) for layers, cost in chosen]
    stored = [number for layers, cost in chosen if cost.is_stored for number in layers]
    offloaded = {layers[0]: cost.offloaded for layers, cost in chosen if cost.offloaded is not None}
    return Solution(blocks, saved, seconds, stored, offloaded)


def _chosen(
    parts: Parts, fronts: Sequence[_Front], endings: Sequence[Sequence[Blocks]], place: int
) -> list[tuple[tuple[int, ...], BlockCost]]:
    """Return the layers and the cost of each block of the pair at a place of the last front."""
    chosen = []
    begin = parts.layers.start
    end = len(parts.layers)
    while end:
        steps = [(blocks.start, cost) for blocks in endings[end] for cost in blocks.costs]
        start, cost = steps[fronts[end].step[place]]
        chosen.append((tuple(range(begin + start, begin + end)), cost))
        place = int(fronts[end].before[place])
        end = start
    return chosen[::-1]


class _Rest(NamedTuple):
    """The least seconds from a layer on: with at most so many bytes saved before it, in ascending order of both."""

    saved: np.ndarray
    seconds: np.ndarray


def _least_rests(
    parts: Parts, endings: Sequence[Sequence[Blocks]], limits: Sequence[int], most_saved: int
) -> list[_Rest]:
    """Return for every layer seconds that its blocks and those after it need at least; arguments as in _solve."""
    count = len(parts.layers)
    most = most_saved - parts.last_end.saved
    step = max(1, most) / STEPS
    ends = [limit - peak for limit, peak in zip(limits, parts.last_end.peaks, strict=True)]
    starting: list[list[tuple[int, Blocks]]] = [[] for _ in range(count)]
    for end, ending in enumerate(endings):
        for blocks in ending:
            starting[blocks.start].append((end, blocks))
    rests = [_Rest(np.array([min(most, *ends)]), np.zeros(1))] * (count + 1)
    for start in reversed(range(count)):
        saved = [np.zeros(0, np.int64)]
        seconds = [np.zeros(0)]
        for end, blocks in starting[start]:
            free = np.array(limits) - parts.after[end]
            own = np.minimum(most - blocks.saved, (free[:, None] - blocks.peaks).min(0))
            waits = np.where(blocks.moved > 0, parts.least_wait(blocks.moved), 0)
            saved.append(np.minimum(rests[end].saved - blocks.saved[:, None], own[:, None]).ravel())
            seconds.append((rests[end].seconds + (blocks.seconds + waits)[:, None]).ravel())
        rests[start] = _ascending(np.concatenate(saved), np.concatenate(seconds), step)
    return rests


def _ascending(saved: np.ndarray, seconds: np.ndarray, step: float) -> _Rest:
    """Return the pairs without those for which another allows as many bytes in fewer seconds.

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


def saved_range(parts: Parts, endings: Sequence[Sequence[Blocks]]) -> tuple[int, int]:
    """Return the bytes that a stage saves at least and at most; arguments as in solve."""
    ranges = [(parts.first_end.saved, parts.first_end.saved)]
    for ending in endings[1:]:
        least = min(ranges[blocks.start][0] + int(blocks.saved.min()) for blocks in ending)
        ranges.append((least, max(ranges[blocks.start][1] + int(blocks.saved.max()) for blocks in ending)))
    least, most = ranges[-1]
    return least + parts.last_end.saved, most + parts.last_end.saved


def _all_fit(peaks: Sequence[int], left: Sequence[int], limits: Sequence[int]) -> bool:
    return all(a + b <= limit for a, b, limit in zip(peaks, left, limits, strict=True))


def _reached(
    parts: Parts,
    fronts: Sequence[_Front],
    ending: Sequence[Blocks],
    limits: tuple[int, np.ndarray],
    held: int,
    moves: bool,
) -> _Front:
    """Return the pairs that blocks reach from earlier layers.

    Args:
        parts: costs of the stage's parts.
        fronts: pairs up to every earlier layer.
        ending: blocks that end before the layer.
        limits: bytes that may be saved up to here, and those that each kind of action may need before and in a block.
        held: bytes that the first block holds during the forward of later blocks.
        moves: values of the blocks may move.
    """
    most, whole = limits
    beside = np.array([held if kind == "F" else 0 for kind in parts.kinds])
    found = [_Front(*[np.zeros(0, np.int64)] * len(_Front._fields))._replace(seconds=np.zeros(0))]
    first = 0
    for blocks in ending:
        front = fronts[blocks.start]
        free = whole - beside if blocks.start else whole
        limit = np.minimum(most - blocks.saved, (free[:, None] - blocks.peaks).min(0))[:, None]
        if not moves:
            limit = np.where(blocks.moved[:, None] > 0, -1, limit)
        if blocks.start == 0:
            limit = np.where(blocks.held[:, None] != held, -1, limit)
        waits = np.zeros((1, 1))
        if front.moved.any():
            is_moved = front.moved > 0
            free = whole if blocks.start == 1 else free  # what the first block holds is among its moving bytes
            begins = (free[:, None] - blocks.begin_peaks)[:, :, None] - parts.copied_beside(front.moved)[:, None]
            limit = np.where(is_moved, np.minimum(limit, begins.min(0)), limit)
            waits = np.where(is_moved, parts.copy_waits(front.moved, blocks.start, blocks.begin_seconds[..., None]), 0)
        number, before = np.nonzero(front.saved <= limit)
        seconds = blocks.seconds[:, None] + waits
        seconds = np.broadcast_to(seconds, (len(blocks.saved), len(front.saved)))[number, before]
        saved = front.saved[before] + blocks.saved[number]
        found.append(_Front(saved, front.seconds[before] + seconds, blocks.moved[number], first + number, before))
        first += len(blocks.costs)
    return _Front(*(np.concatenate(each) for each in zip(*found, strict=True)))


def _some(front: _Front, which: np.ndarray | slice) -> _Front:
    """Return some pairs, by their numbers or a mask."""
    return _Front(*(each[which] for each in front))


def _unbeaten(front: _Front, step: float, upper: bool) -> _Front:
    """Return the pairs that no other beats; if many have the same moving bytes, they are joined.

    Args:
        front: pairs.
        step: bytes within which pairs are joined.
        upper: see solve.
    """
    found = []
    least = _Rest(np.zeros(0, np.int64), np.zeros(0))  # of pairs with fewer moving bytes, by bytes saved
    front = _some(front, np.lexsort((front.seconds, front.saved, front.moved)))
    ends = [*(np.flatnonzero(np.diff(front.moved)) + 1).tolist(), len(front.moved)]
    for begin, end in zip([0, *ends[:-1]], ends, strict=True):
        group = _some(front, slice(begin, end))
        own = _some(group, _improves(group.seconds))
        if len(own.saved) > STEPS:
            rounded = np.ceil(group.saved / step) if upper else np.floor(group.saved / step)
            group = group._replace(saved=(rounded * step).astype(np.int64))
            own = _some(group, _undominated(group.saved, group.seconds))
        own = _some(own, ~_beaten(own, least))
        found.append(own)
        if end == len(front.moved):
            break
        both = np.concatenate([least.saved, own.saved]), np.concatenate([least.seconds, own.seconds])
        left = _undominated(*both)
        least = _Rest(both[0][left], both[1][left])
    return _Front(*(np.concatenate(each) for each in zip(*found, strict=True))) if found else front


def _beaten(front: _Front, least: "_Rest") -> np.ndarray:
    """Return for each pair True if one with fewer moving bytes is at least as good."""
    place = np.searchsorted(least.saved, front.saved, side="right")  # seconds fall as bytes grow
    return np.concatenate([[np.inf], least.seconds])[place] <= front.seconds


def _undominated(saved: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Return the numbers of the pairs that no other pair beats, in order of their bytes."""
    order = np.lexsort((seconds, saved))
    return order[_improves(seconds[order])]


def _improves(seconds: np.ndarray) -> np.ndarray:
    """Return for each number whether it is less than all before it."""
    best = np.minimum.accumulate(seconds)
    return np.concatenate([[True], best[1:] < best[:-1]]) if len(seconds) else np.zeros(0, bool)
