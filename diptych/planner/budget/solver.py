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
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from diptych.planner.budget.blocks import LENGTHS, BlockCost, EndCost
from diptych.plans.recompute import RecomputeBlock

STEPS = 2**14
"""Parts of the limit within which bytes are not told apart."""


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
    nothing = np.zeros(1, int)
    fronts: list[_Fronts] = [
        {0: _Front(np.array([parts.first_end.saved]), np.zeros(1), nothing, nothing, nothing)},
    ]
    endings: list[list[tuple[int, BlockCost]]] = [[]]
    begin = parts.layers.start
    most = most_saved - parts.last_end.saved
    step = max(1, most) / STEPS
    for end in range(1, len(parts.layers) + 1):
        blocks = [
            (end - size, cost) for size in LENGTHS if size <= end for cost in parts.options(begin + end - size, size)
        ]
        free = [limit - left for limit, left in zip(limits, parts.after[end], strict=True)]
        fronts.append(_joined(parts, fronts, blocks, (most, free), step, upper))
        endings.append(blocks)
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


def least_saved(parts: Parts) -> int:
    """Return the bytes that a stage saves at least."""
    begin = parts.layers.start
    least = [parts.first_end.saved]
    for end in range(1, len(parts.layers) + 1):
        least.append(
            min(
                least[end - size] + cost.saved
                for size in LENGTHS
                if size <= end
                for cost in parts.options(begin + end - size, size)
            )
        )
    return least[-1] + parts.last_end.saved


def _all_fit(peaks: Sequence[int], left: Sequence[int], limits: Sequence[int]) -> bool:
    return all(a + b <= limit for a, b, limit in zip(peaks, left, limits, strict=True))


def _joined(
    parts: Parts,
    fronts: list[_Fronts],
    blocks: Iterable[tuple[int, BlockCost]],
    limits: tuple[int, list[int]],
    step: float,
    upper: bool,
) -> _Fronts:
    """Return the pairs that blocks reach from earlier layers.

    Args:
        parts: costs of the stage's parts.
        fronts: pairs up to every earlier layer.
        blocks: first layer and costs of every block.
        limits: bytes that may be saved up to here, and those that each kind of action may need before and in a block.
        step: bytes within which pairs are joined.
        upper: see solve.
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
            allowed = np.arange(np.searchsorted(front.saved, limit, side="right"))
            found.setdefault(cost.moved, []).append(
                _Front(
                    front.saved[allowed] + cost.saved,
                    front.seconds[allowed] + (cost.seconds + wait),
                    np.full(len(allowed), number),
                    allowed,
                    np.full(len(allowed), moved),
                )
            )
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
