"""The report of a comparison: one row for each result and dtype, the verdicts, and the error that names the worst."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

import numpy as np
from rich.table import Table

from parity.rounding import DIFFERENT, EQUAL, ROUNDING, UNJUDGED, Difference
from parity.tables import table_text

OUTPUT_ROW = "output"
INPUT_ROW = "input gradient"
PARAMETER_ROW = "parameter gradient"
STATE_ROW = "updated state"
"""Kind of rows of buffers and variables that forward changes, such as running statistics."""
ORDER = {OUTPUT_ROW: 0, STATE_ROW: 1, INPUT_ROW: 2, PARAMETER_ROW: 3}
REMEDY = (
    "choose other inputs (without equal values, zeros or values at a kink), return a result that is better "
    "conditioned, or leave this one out of what both functions return"
)
"""Remedy for a result that cannot be judged."""
Results = Mapping[tuple[str, str], np.ndarray]
"""Results of one implementation by kind of row and name."""


class DifferenceError(AssertionError):
    """Two implementations differ by more than rounding explains."""


class Row(NamedTuple):
    """The comparison of one output or gradient in one dtype."""

    kind: str
    """OUTPUT_ROW, STATE_ROW, INPUT_ROW or PARAMETER_ROW."""
    name: str
    shape: tuple[int, ...]
    dtype: str
    difference: Difference
    """The difference of both implementations in this dtype."""
    torch_error: float
    """Distance of PyTorch's result from its own float64 result, relative to the norm of that; 0 in float64."""
    jax_error: float
    """The same in JAX."""

    def __str__(self) -> str:
        found = self.difference
        where = f"at {list(found.place)}: PyTorch {_number(found.first)}, JAX {_number(found.second)}"
        place = f"{self.kind} {self.name!r} in {self.dtype}"
        if found.verdict == UNJUDGED:
            return f"{place}: one ulp of the inputs changes it by {found.tolerance:.1e} of its size; {where}"
        if np.isinf(found.norm):
            return (
                f"{place}: expected a relative difference of at most {found.tolerance:.1e} ({found.rule}), got an "
                f"element that is finite on one side only, or infinite with another sign; {where}"
            )
        return (
            f"{place}: expected a relative difference of at most {found.tolerance:.1e} ({found.rule}), got "
            f"{found.norm:.1e}; largest {where}"
        )


def _number(value: complex) -> str:
    """Return a number with 9 digits, an integer with all of them."""
    return str(value) if isinstance(value, int) else f"{value:.9g}"


@dataclass(frozen=True)
class Report:
    """The comparison of two implementations."""

    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    """Further facts about the comparison, one or two sentences each."""
    title: str = ""
    named: ClassVar[str] = "the worst:"
    """Words before the row that a failure names: the first one of ``different``."""

    @property
    def different(self) -> list[Row]:
        """The rows whose difference is more than rounding, the largest multiple of its tolerance first."""
        rows = [row for row in self.rows if row.difference.verdict == DIFFERENT]
        return sorted(rows, key=lambda row: -row.difference.excess)

    @property
    def unjudged(self) -> list[Row]:
        """The rows of which nothing can be said, because one ulp of the inputs changes the result entirely."""
        return [row for row in self.rows if row.difference.verdict == UNJUDGED]

    @property
    def is_equal(self) -> bool:
        """True if all differences are rounding."""
        return not (self.different or self.unjudged)

    @property
    def failure(self) -> str:
        """A sentence about the worst row, or about what was not judged; empty if all differences are rounding."""
        if self.different:
            return str(self.different[0])
        return f"not judged: {self.unjudged[0]}; {REMEDY}" if self.unjudged else ""

    def check(self) -> None:
        """Raise an error that names the worst row if a difference is more than rounding, or cannot be judged.

        Raises:
            DifferenceError: the implementations differ, or a result cannot be judged.
        """
        if self.different:
            count = f"{len(self.different)} of {len(self.rows)} comparisons differ by more than rounding"
            raise DifferenceError("\n".join([f"{count}; {self.named} {self.failure}", *self.notes]))
        if self.unjudged:
            count = f"{len(self.unjudged)} of {len(self.rows)} comparisons"
            raise DifferenceError("\n".join([f"{count} are {self.failure}", *self.notes]))

    def to_json(self) -> str:
        """Return all rows as JSON."""
        rows = [row._asdict() | {"difference": row.difference._asdict()} for row in self.rows]
        return json.dumps({"title": self.title, "rows": rows, "notes": self.notes}, default=str, indent=1)

    def __str__(self) -> str:
        return "\n".join([table_text(self.__rich__()), *self.notes, self._summary])

    @cached_property
    def _summary(self) -> str:
        if self.different:
            return f"DIFFERENT: {self.failure}"
        if self.unjudged:
            count = f"{len(self.unjudged)} of {len(self.rows)} comparisons are not judged, the others are equal"
            return f"NOT JUDGED: {count}: {self.unjudged[0]}"
        return f"equal: all {len(self.rows)} comparisons are bitwise equal or differ by rounding only"

    def __rich__(self) -> Table:
        dtypes = list(dict.fromkeys(row.dtype for row in self.rows))
        table = Table(title=self.title or None, box=None, pad_edge=False)
        for column in ("", "name", "shape", "difference", "ulps", "tolerance", "rule", "verdict"):
            table.add_column(
                column, no_wrap=True, justify="right" if column in ("difference", "ulps", "tolerance") else "left"
            )
        for dtype in dtypes:
            if dtype != "float64":
                table.add_column(f"error in {dtype}\nPyTorch / JAX", no_wrap=True, justify="right")
        groups: dict[tuple[str, str], dict[str, Row]] = {}
        for row in self.rows:
            groups.setdefault((row.kind, row.name), {})[row.dtype] = row
        for (kind, name), group in groups.items():
            first = group[dtypes[0]]
            errors = [f"{group[d].torch_error:.1e} / {group[d].jax_error:.1e}" for d in dtypes if d != "float64"]
            found = first.difference
            table.add_row(
                kind,
                name,
                "x".join(map(str, first.shape)) or "scalar",
                f"{found.norm:.1e}",
                f"{found.ulps:.3g}",
                f"{found.tolerance:.1e}",
                found.rule,
                _verdict(group),
                *errors,
            )
        return table


def _verdict(rows: Mapping[str, Row]) -> str:
    """Return the verdict on a quantity over all dtypes."""
    wrong = [dtype for dtype, row in rows.items() if row.difference.verdict == DIFFERENT]
    if wrong:
        return "DIFFERENT" if len(wrong) == len(rows) else f"DIFFERENT in {', '.join(wrong)}"
    unknown = [dtype for dtype, row in rows.items() if row.difference.verdict == UNJUDGED]
    if unknown:
        return UNJUDGED if len(unknown) == len(rows) else f"{UNJUDGED} in {', '.join(unknown)}"
    return EQUAL if all(row.difference.verdict == EQUAL for row in rows.values()) else ROUNDING
