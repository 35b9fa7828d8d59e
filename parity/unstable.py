"""Results that one ulp of the inputs changes entirely: at a tie, at a kink, ill-conditioned, or 0 up to rounding.

Their tolerance is so wide that it accepts anything. Elements that jump are therefore left out, and the others are
judged by themselves. What cannot be judged is reported as such, unless it is 0 up to rounding: then both sides have
nothing but rounding errors, which grow with the machine epsilon. A jump does not.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from parity.implementations import Values
from parity.pytrees import Leaves, is_floating
from parity.rounding import (
    DIFFERENT,
    DRAWS,
    EQUAL,
    ROUNDING,
    UNITS,
    UNJUDGED,
    Difference,
    Spread,
    judge,
    length_of,
)
from parity.rows import Results, Row

DECIDES = 1e-3
"""Largest relative tolerance that decides anything; in narrow dtypes, ULPS machine epsilons if that is more."""
ULPS = 128.0
ZERO = 10.0
"""Multiple of its own spread up to which a result is taken for the rounding error of a 0."""
GROWTH = 100.0
"""Least growth of rounding errors if the square root of the machine epsilon takes its place."""
JUMP_DRAWS = (16, 64)
"""Perturbations that search elements that jump: at first, and before a difference of others counts."""


class Perturbable(Protocol):
    """Two implementations whose results can be computed with perturbations; parity.functions.Pair."""

    def perturbed_results(
        self,
        both: tuple[Values, Values],
        cotangents: Leaves | None,
        epsilon: float,
        seed: int,
        draws: Iterable[int],
    ) -> Iterator[list[Results]]:
        """Yield the results of both in float64 for values changed by a relative epsilon."""
        ...

    def errors_inside(
        self, values: Values, cotangents: Leaves | None, exact: Results, epsilon: float, seed: Sequence[int]
    ) -> dict[tuple[str, str], Spread]:
        """Return the change of each result of PyTorch if all its operations round to a machine epsilon."""
        ...


class Measured(NamedTuple):
    """The measurements of a comparison in float64."""

    both: tuple[Values, Values]
    cotangents: Leaves | None
    exact: Sequence[Results]
    """Results of PyTorch and of JAX."""
    spreads: dict[tuple[str, str], Spread]
    unit: str
    length: int
    seed: int


def _limit(unit: str) -> float:
    return max(DECIDES, ULPS * UNITS[unit])


def _is_open(row: Row, spread: Spread, unit: str) -> bool:
    """Return True if the verdict on a row is to be settled."""
    found = row.difference
    if found.verdict == EQUAL:
        return False
    if found.rule in ("exact", "flips"):
        return found.verdict == DIFFERENT and bool(spread.moved.any())
    return not found.tolerance <= _limit(unit)


def wide_rows(rows: Sequence[Row], unit: str) -> list[str]:
    """Return a note about rows of a narrow dtype whose tolerance decides nothing."""
    floating = [row for row in rows if row.difference.rule not in ("exact", "flips")]
    wide = [row for row in floating if row.difference.verdict == ROUNDING and row.difference.tolerance > _limit(unit)]
    return [f"In {rows[0].dtype}, rounding changes {_listed(wide)} too much to judge it."] if wide else []


def settle(pair: Perturbable, measured: Measured, rows: Sequence[Row]) -> tuple[list[Row], list[str]]:
    """Return the rows with a verdict on those whose tolerance decides nothing, and notes about them."""
    open_rows = [row for row in rows if _is_open(row, measured.spreads[row.kind, row.name], measured.unit)]
    if not open_rows:
        return list(rows), []
    zeros = _zeros(pair, measured, [row for row in open_rows if row.difference.rule not in ("exact", "flips")])
    left = [row for row in open_rows if row not in zeros]
    jumps = _Jumps(pair, measured, [(row.kind, row.name) for row in left])
    settled = {(row.kind, row.name): row._replace(difference=_settled(row, measured, jumps)) for row in left}
    notes = []
    wide = [row for row in zeros if row.difference.verdict == ROUNDING]
    if wide:
        notes.append(f"Not judged: {_listed(wide)}. Both sides are 0 up to rounding.")
    unknown = [row for row in settled.values() if row.difference.verdict == UNJUDGED]
    if unknown:
        notes.append(
            f"Not judged: {_listed(unknown)}. One ulp of the inputs changes it as much as the difference of both "
            "sides: the inputs are at a kink or a tie, or the result is ill-conditioned. Choose other inputs to judge "
            "it."
        )
    return [settled.get((row.kind, row.name), row) for row in rows], notes


def _listed(rows: Sequence[Row]) -> str:
    return ", ".join(f"{row.kind} {row.name!r}" for row in rows[:8]) + (" and others" if len(rows) > 8 else "")


def _zeros(pair: Perturbable, measured: Measured, rows: Sequence[Row]) -> list[Row]:
    """Return the rows whose results are 0 up to rounding on both sides."""

    def is_small(row: Row) -> bool:
        size = measured.spreads[row.kind, row.name].size
        return all(length_of(run[row.kind, row.name]) <= ZERO * size for run in measured.exact)

    small = [row for row in rows if is_small(row)]
    if not small:
        return []
    epsilon = float(np.sqrt(UNITS[measured.unit]))
    both = measured.both
    cotangents = measured.cotangents
    larger = pair.errors_inside(both[0], cotangents, measured.exact[0], epsilon, [measured.seed, 0])
    keys = {key for key, spread in larger.items() if spread.size > GROWTH * measured.spreads[key].size}
    return [row for row in small if (row.kind, row.name) in keys]


class _Jumps:
    """The elements of results that one ulp of the inputs changes entirely.

    Args:
        pair: both implementations.
        measured: their results.
        keys: the results.
    """

    def __init__(self, pair: Perturbable, measured: Measured, keys: Sequence[tuple[str, str]]) -> None:
        self._pair = pair
        self._measured = measured
        self._keys = keys
        self._drawn = 0
        self._largest: dict[tuple[str, str], np.ndarray] = {}
        self._first: dict[tuple[str, str], list[np.ndarray]] = {key: [] for key in keys}
        """Changes in the runs that measured the spread."""

    def draw(self, count: int) -> None:
        """Perturb the inputs until there are as many draws."""
        measured = self._measured
        draws = range(self._drawn, count)
        epsilon = UNITS[measured.unit]
        for draw, moved in zip(
            draws,
            self._pair.perturbed_results(measured.both, measured.cotangents, epsilon, measured.seed, draws),
            strict=True,
        ):
            for results, exact in zip(moved, measured.exact, strict=True):
                for key in self._keys:
                    change = _change(results[key], exact[key])
                    self._largest[key] = np.maximum(self._largest.get(key, 0.0), change)
                    if draw < DRAWS:
                        self._first[key].append(change)
        self._drawn = max(self._drawn, count)

    def at(self, key: tuple[str, str]) -> np.ndarray:
        """Return True for the elements that jump."""
        change = self._largest[key]
        sides = [np.abs(run[key]) for run in self._measured.exact]
        if not is_floating(sides[0]):
            return change > 0.0
        sizes = np.maximum(*(np.where(np.isfinite(side), side, 0.0) for side in sides))
        typical = length_of(sizes) / max(1.0, np.sqrt(sizes.size))
        return ~(change <= np.sqrt(UNITS[self._measured.unit]) * np.maximum(sizes, typical))

    def spread(self, key: tuple[str, str], where: np.ndarray) -> float:
        """Return the spread of some elements."""
        return max(length_of(change[where]) for change in self._first[key])


def _change(actual: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Return the size of the change of each element; infinite if only one of both is finite."""
    if not is_floating(exact):
        return (actual != exact).astype(np.float64)
    same = (actual == exact) | (np.isnan(actual) & np.isnan(exact))
    with np.errstate(over="ignore", invalid="ignore"):
        change = np.where(same, 0.0, np.abs(actual - exact))
    return np.where(np.isnan(change), np.inf, change)


def _settled(row: Row, measured: Measured, jumps: _Jumps) -> Difference:
    """Return the verdict on a row whose tolerance decides nothing."""
    key = row.kind, row.name
    first, second = (run[key] for run in measured.exact)
    found = different = row.difference
    for count in JUMP_DRAWS:
        jumps.draw(count)
        rest = ~jumps.at(key)
        spread = jumps.spread(key, rest) if is_floating(first) else 0.0
        moved = measured.spreads[key].moved
        whole = judge(first, second, spread, measured.unit, measured.length, moved)
        if whole.verdict != DIFFERENT and whole.tolerance <= _limit(measured.unit):
            return whole
        part = judge(first[rest], second[rest], spread, measured.unit, measured.length, moved[rest])
        decides = part.tolerance <= _limit(measured.unit)
        if not rest.any() or part.verdict != DIFFERENT or not decides:
            return found._replace(verdict=UNJUDGED)
        place = tuple(int(axis[part.place[0]]) for axis in np.nonzero(rest))
        different = part._replace(place=place)
    return different
