"""The least recomputation of one stage, from the costs of its blocks.

A stage is cut into blocks of layers, and each block saves everything, recomputes some modules, or recomputes whole
layers. In an action, the block that begins at a layer needs what all layers before it have saved, its own memory, and
what the action has left of the layers after it:

    saved before the block + peak of the block + left after the block <= limit of the action

The least seconds of recomputation up to a layer depend on the bytes saved so far only. From the first layer on, the
solver keeps for each layer the pairs (bytes, seconds) that no other pair beats in both, so its result is the best of
all layouts. If a layer has more than 2^14 pairs, which models of 64 layers do not reach, those within 2^-14 of the
limit of each other are joined: with their bytes rounded up for the result, and down for the bound that no layout beats.
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


class Solution(NamedTuple):
    """The blocks of a stage."""

    blocks: list[RecomputeBlock]
    """In the order of their layers."""
    saved: int
    """Bytes that they save for backward."""
    seconds: float
    """Seconds of recomputation, and of packing in 8 bits and reading again."""
    stored: list[int]
    """Numbers of the layers that save values in 8 bits."""


class _Front(NamedTuple):
    """Pairs of saved bytes and seconds up to a layer, none of which another beats, and how each was reached."""

    saved: np.ndarray
    seconds: np.ndarray
    step: np.ndarray
    """Number of the block in the list of blocks that end at the layer."""
    before: np.ndarray
    """Number of the pair at the beginning of the block."""


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
    fronts = [_Front(np.array([parts.first_end.saved]), np.zeros(1), np.zeros(1, int), np.zeros(1, int))]
    endings: list[list[tuple[int, BlockCost]]] = [[]]
    begin = parts.layers.start
    most = most_saved - parts.last_end.saved
    step = max(1, most) / STEPS
    for end in range(1, len(parts.layers) + 1):
        blocks = [
            (end - size, cost) for size in LENGTHS if size <= end for cost in parts.options(begin + end - size, size)
        ]
        largest = [
            min(most - cost.saved, *(a - b - c for a, b, c in zip(limits, cost.peaks, parts.after[end], strict=True)))
            for _, cost in blocks
        ]
        fronts.append(_joined(fronts, blocks, largest, step, upper))
        endings.append(blocks)
    last = fronts[-1]
    fits = last.saved <= min(most, *(a - b for a, b in zip(limits, parts.last_end.peaks, strict=True)))
    if not fits.any():
        return None
    place = int(np.flatnonzero(fits)[np.argmin(last.seconds[fits])])
    saved = int(last.saved[place]) + parts.last_end.saved
    seconds = float(last.seconds[place])
    chosen: list[RecomputeBlock] = []
    stored: list[int] = []
    end = len(parts.layers)
    while end:
        front = fronts[end]
        start, cost = endings[end][front.step[place]]
        layers = range(begin + start, begin + end)
        chosen.append(cost.block._replace(layers=tuple(layers)))
        stored += layers if cost.is_stored else ()
        place = int(front.before[place])
        end = start
    return Solution(chosen[::-1], saved, seconds, stored)


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
    fronts: list[_Front],
    blocks: Iterable[tuple[int, BlockCost]],
    largest: list[int],
    step: float,
    upper: bool,
) -> _Front:
    """Return the pairs that blocks reach from earlier layers.

    Args:
        fronts: pairs up to every earlier layer.
        blocks: first layer and costs of every block.
        largest: largest number of bytes saved before each block.
        step: bytes within which pairs are joined.
        upper: see solve.
    """
    found = []
    for number, ((begin, cost), limit) in enumerate(zip(blocks, largest, strict=True)):
        front = fronts[begin]
        (allowed,) = np.nonzero(front.saved <= limit)
        found.append(
            (
                front.saved[allowed] + cost.saved,
                front.seconds[allowed] + cost.seconds,
                np.full(len(allowed), number),
                allowed,
            )
        )
    saved, seconds, steps, before = (np.concatenate(each) for each in zip(*found, strict=True))
    left = _undominated(saved, seconds)
    if len(left) > STEPS:
        rounded = np.ceil(saved / step) if upper else np.floor(saved / step)
        saved = (rounded * step).astype(np.int64)
        left = _undominated(saved, seconds)
    return _Front(saved[left], seconds[left], steps[left], before[left])


def _undominated(saved: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Return the numbers of the pairs that no other pair beats, in order of their bytes."""
    order = np.lexsort((seconds, saved))
    best = np.minimum.accumulate(seconds[order])
    return order[np.concatenate([[True], best[1:] < best[:-1]])] if len(order) else order
