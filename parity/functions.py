"""Comparison of a function of PyTorch with a function of JAX: outputs, gradients, and if a difference is rounding.

Both run on equal inputs, under equal random cotangents, first in float64. A difference there is a bug: rounding in
float64 is far smaller than any bug. Then both run in float32 and bfloat16, where the distance of each from its own
float64 result shows which of them loses more digits.
"""

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from rich.table import Table

from parity.implementations import CallInputs, JaxImplementation, Run, TorchImplementation, Values, make_inputs
from parity.inspection import Narrowing, NarrowingRecorder, longest_reduction, narrowest_in_jaxpr
from parity.operation_rounding import OperationRounding
from parity.pytrees import DTYPES, Leaves, is_floating, rounded, widened
from parity.rounding import (
    DIFFERENT,
    DRAWS,
    DRAWS_INSIDE,
    EPSILON,
    EQUAL,
    ROUNDING,
    Difference,
    distance,
    judge,
    perturbed,
)
from parity.tables import table_text

OUTPUT_ROW = "output"
INPUT_ROW = "input gradient"
PARAMETER_ROW = "parameter gradient"
ZERO = 10.0
"""Multiple of its own spread up to which a result in float64 is taken for the rounding error of a 0."""
UNJUDGED = 0.01
"""Relative difference in float64 that is reported although it is within the tolerance."""
Results = Mapping[tuple[str, str], np.ndarray]
"""Results of one implementation by kind of row and name."""


class DifferenceError(AssertionError):
    """Two implementations differ by more than rounding explains."""


class Row(NamedTuple):
    """The comparison of one output or gradient in one dtype."""

    kind: str
    """OUTPUT_ROW, INPUT_ROW or PARAMETER_ROW."""
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
        return (
            f"{self.kind} {self.name!r} in {self.dtype}: expected a relative difference of at most "
            f"{found.tolerance:.1e} ({found.rule}), got {found.norm:.1e}; largest at {list(found.place)}: PyTorch "
            f"{found.first:.9g}, JAX {found.second:.9g}"
        )


@dataclass(frozen=True)
class Report:
    """The comparison of two implementations."""

    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    """What else a reader should know, one sentence each."""
    title: str = ""
    named: ClassVar[str] = "the worst:"
    """Which of the different rows comes first."""

    @property
    def different(self) -> list[Row]:
        """The rows whose difference is more than rounding, the largest multiple of its tolerance first."""
        rows = [row for row in self.rows if row.difference.verdict == DIFFERENT]
        return sorted(rows, key=lambda row: -row.difference.excess)

    @property
    def is_equal(self) -> bool:
        """True if all differences are rounding."""
        return not self.different

    def check(self) -> None:
        """Raise an error that names the worst row if a difference is more than rounding.

        Raises:
            DifferenceError: the implementations differ.
        """
        if self.different:
            count = f"{len(self.different)} of {len(self.rows)} comparisons differ by more than rounding"
            raise DifferenceError("\n".join([f"{count}; {self.named} {self.different[0]}", *self.notes]))

    def to_json(self) -> str:
        """Return all rows as JSON."""
        rows = [row._asdict() | {"difference": row.difference._asdict()} for row in self.rows]
        return json.dumps({"title": self.title, "rows": rows, "notes": self.notes}, default=str, indent=1)

    def __str__(self) -> str:
        return "\n".join([table_text(self.__rich__()), *self.notes, self._summary])

    @cached_property
    def _summary(self) -> str:
        if self.different:
            return f"DIFFERENT: {self.different[0]}"
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
    return EQUAL if all(row.difference.verdict == EQUAL for row in rows.values()) else ROUNDING


def compare_functions(
    torch_function: Callable,
    jax_function: Any,
    inputs: Any,
    *,
    static: Mapping[str, Any] | None = None,
    dtypes: Sequence[str] = ("float64", "float32", "bfloat16"),
    gradients: bool = True,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> Report:
    """Compare outputs and gradients of a function in both frameworks.

    Args:
        torch_function: a function of tensors, or an nn.Module; either may be compiled.
        jax_function: a function of arrays, an nnx.Module, (linen module, variables), (function, parameters) with the
            parameters as first argument, or a callable pytree. It is jitted.
        inputs: NumPy arrays or nested containers of them: a mapping is passed by name, a list or tuple by position.
            Integers get no gradient.
        static: further keyword arguments of both functions, passed as they are.
        dtypes: names of the floating dtypes to compare in, float64 first.
        gradients: False: compare outputs only.
        seed: seed of cotangents and perturbations.
        device: device of PyTorch's tensors.

    Returns:
        A report with one row for each output and input gradient in each dtype.

    Raises:
        ValueError: the functions do not accept the inputs, their outputs differ in name, shape or kind, or one of them
            is not deterministic.

    Example:
        >>> import jax, torch, numpy as np
        >>> x = np.random.default_rng(0).standard_normal((4, 8))
        >>> report = compare_functions(torch.nn.functional.silu, jax.nn.silu, [x])
        >>> report.check()
    """
    call = make_inputs(inputs, static)
    pair = Pair(TorchImplementation(torch_function, call, device), JaxImplementation(jax_function, call), call)
    return pair.compare(dtypes, gradients=gradients, seed=seed)


@dataclass
class Pair:
    """Two implementations of one computation, and how the parameters of one become those of the other."""

    torch: TorchImplementation
    jax: JaxImplementation
    call: CallInputs
    translate: Callable[[Leaves], Leaves] | None = None
    """Return JAX's parameters (or their gradients) for PyTorch's; None: each side has parameters of its own."""
    notes: list[str] = field(default_factory=list)

    def values(self, parameters: Leaves, inputs: Leaves) -> tuple[Values, Values]:
        """Return equal starting values of PyTorch and of JAX."""
        theirs = self.jax.parameters if self.translate is None else self.jax.parameters | self.translate(parameters)
        return Values(inputs, parameters), Values(inputs, theirs)

    def compare(
        self,
        dtypes: Sequence[str],
        *,
        gradients: bool,
        seed: int,
        title: str = "",
        cotangents: Leaves | None = None,
    ) -> Report:
        """Compare in each dtype.

        Args:
            dtypes: as in compare_functions.
            gradients: as in compare_functions.
            seed: as in compare_functions.
            title: title of the report.
            cotangents: cotangents of outputs by name, in place of random ones.
        """
        unknown = [dtype for dtype in dtypes if dtype not in DTYPES]
        if unknown or not dtypes:
            raise ValueError(f"dtypes: expected some of {', '.join(DTYPES)}, got {', '.join(unknown) or 'none'}")
        inputs = {name: widened(array) for name, array in self.call.arrays.items()}
        both = self.values(self.torch.parameters, inputs)
        program = self.jax.program(both[1])
        length = longest_reduction(program)
        narrow = self._narrowing(both[0]), narrowest_in_jaxpr(program)
        drawn = self.cotangents(both, seed) if gradients else None
        cotangents = (
            drawn if drawn is None or cotangents is None else {n: cotangents.get(n, c) for n, c in drawn.items()}
        )
        rows = [row for dtype in dtypes for row in self._in_dtype(dtype, both, cotangents, seed, length, narrow)]
        order = {OUTPUT_ROW: 0, INPUT_ROW: 1, PARAMETER_ROW: 2}
        return Report(tuple(sorted(rows, key=lambda row: order[row.kind])), tuple(self.notes), title)

    def _narrowing(self, values: Values) -> Narrowing | None:
        """Return where PyTorch's forward in float64 goes on in a narrower dtype."""
        with NarrowingRecorder() as recorder:
            self.torch.run(values, "float64", None)
        return recorder.narrowest

    def cotangents(self, both: tuple[Values, Values], seed: int) -> Leaves:
        """Return random cotangents of all floating outputs, after comparing the outputs' names, shapes and kinds."""
        ours, theirs = self._runs("float64", both, None)
        if ours.outputs.keys() != theirs.outputs.keys():
            raise ValueError(
                f"outputs: expected equal names, got {', '.join(ours.outputs)} in PyTorch and "
                f"{', '.join(theirs.outputs)} in JAX; return equal structures (tuples, dictionaries, dataclasses)"
            )
        for name in ours.outputs:
            shapes = [run.outputs[name].shape for run in (ours, theirs)]
            if shapes[0] != shapes[1]:
                raise ValueError(
                    f"output {name!r}: expected equal shapes, got {shapes[0]} in PyTorch and {shapes[1]} in JAX; "
                    "reshape or transpose one of them in a wrapper"
                )
            kinds = [run.outputs[name].dtype.kind for run in (ours, theirs)]
            if kinds[0] != kinds[1] and not set(kinds) <= set("iu"):
                words = [str(run.outputs[name].dtype) for run in (ours, theirs)]
                raise ValueError(f"output {name!r}: expected equal kinds of dtype, got {words[0]} and {words[1]}")
        return {name: _normal(array, seed, name) for name, array in ours.outputs.items() if ours.is_floating[name]}

    def _runs(self, dtype: str, both: tuple[Values, Values], cotangents: Leaves | None) -> tuple[Run, Run]:
        return self.torch.run(both[0], dtype, cotangents), self.jax.run(both[1], dtype, cotangents)

    def _in_dtype(
        self,
        dtype: str,
        both: tuple[Values, Values],
        cotangents: Leaves | None,
        seed: int,
        length: int,
        narrow: tuple[Narrowing | None, Narrowing | None],
    ) -> list[Row]:
        both = both[0].rounded(dtype), both[1].rounded(dtype)
        given = None if cotangents is None else {name: widened(rounded(c, dtype)) for name, c in cotangents.items()}
        exact = self._results("float64", both, given)
        _check_deterministic(exact, self._results("float64", both, given))
        actual = exact if dtype == "float64" else self._results(dtype, both, given)
        unit = self._unit(dtype, narrow)
        spreads = self._spreads(both, given, exact, EPSILON[unit], seed)
        largest = {key: max(side[key] for side in spreads) for key in exact[0]}
        rows = _judged(dtype, actual, exact, largest, unit, length)
        if dtype != "float64" and any(row.difference.verdict == DIFFERENT for row in rows):
            zeros = self._errors_of_zeros(both, given, exact, dtype, narrow, seed)
            largest |= zeros
            for draw in range(DRAWS_INSIDE):
                inside = self._errors_inside(both[0], given, exact[0], dtype, [seed, draw])
                largest = {key: max(spread, inside.get(key, 0.0)) for key, spread in largest.items()}
                rows = _judged(dtype, actual, exact, largest, unit, length)
                if not any(row.difference.verdict == DIFFERENT for row in rows):
                    break
        if dtype == "float64":
            self.notes.extend(_unjudged(rows))
        return rows

    def _unit(self, dtype: str, narrow: tuple[Narrowing | None, Narrowing | None]) -> str:
        """Return the dtype whose ulps count as rounding: that in which both implementations really compute."""
        if dtype != "float64" or narrow == (None, None):
            return dtype
        ours, theirs = narrow
        if ours is not None and theirs is not None:
            unit = max(ours.dtype, theirs.dtype, key=lambda name: -EPSILON.get(name, 1.0))
            self.notes.append(
                f"Both compute in a narrower dtype inside (PyTorch: {ours}; JAX: {theirs}), so that the float64 run is "
                f"judged in ulps of {unit}."
            )
            return unit if unit in EPSILON else dtype
        side, place = ("PyTorch", ours) if theirs is None else ("JAX", theirs)
        self.notes.append(
            f"{side} computes in a narrower dtype inside ({place}), the other does not. If that is intended, compare "
            f"with dtypes=['{place.dtype if place is not None else dtype}']."
        )
        return dtype

    def _results(self, dtype: str, both: tuple[Values, Values], cotangents: Leaves | None) -> list[Results]:
        """Run both; parameters of PyTorch get the names and layout of JAX."""
        ours, theirs = self._runs(dtype, both, cotangents)
        found = self._keyed(ours)
        names = [name for kind, name in found if kind == PARAMETER_ROW]
        return [found, _rows_of(theirs, {name: theirs.parameter_gradients[name] for name in names})]

    def _keyed(self, run: Run) -> Results:
        """Return the results of PyTorch by kind of row and name; parameters get the names and layout of JAX."""
        return _rows_of(run, {} if self.translate is None else self.translate(run.parameter_gradients))

    def _spreads(
        self,
        both: tuple[Values, Values],
        cotangents: Leaves | None,
        exact: Sequence[Results],
        epsilon: float,
        seed: int,
    ) -> list[dict[tuple[str, str], float]]:
        """Return the largest change of each result over random perturbations, for each implementation."""
        spreads = [dict.fromkeys(exact[0], 0.0) for _ in exact]
        for draw in range(DRAWS):
            rng = np.random.default_rng([seed, draw])
            inputs = perturbed(both[0].inputs, epsilon, rng)
            moved = self.values(perturbed(both[0].parameters, epsilon, rng), inputs)
            given = None if cotangents is None else perturbed(cotangents, epsilon, rng)
            for spread, results, base in zip(spreads, self._results("float64", moved, given), exact, strict=True):
                for key, array in results.items():
                    if is_floating(array):
                        spread[key] = max(spread[key], distance(array, base[key]))
        return spreads

    def _errors_inside(
        self, values: Values, cotangents: Leaves | None, exact: Results, dtype: str, seed: Sequence[int]
    ) -> dict[tuple[str, str], float]:
        """Return the change of each result of PyTorch if all its operations round to a dtype."""
        rng = np.random.default_rng(seed)
        moved = Values(*(perturbed(group, EPSILON[dtype], rng) for group in values))
        given = None if cotangents is None else perturbed(cotangents, EPSILON[dtype], rng)
        with OperationRounding(EPSILON[dtype], int(rng.integers(2**31))):
            found = self._keyed(self.torch.run(moved, "float64", given))
        return {key: distance(array, exact[key]) for key, array in found.items() if is_floating(array)}

    def _errors_of_zeros(
        self,
        both: tuple[Values, Values],
        cotangents: Leaves | None,
        exact: Sequence[Results],
        dtype: str,
        narrow: tuple[Narrowing | None, Narrowing | None],
        seed: int,
    ) -> dict[tuple[str, str], float]:
        """Return rounding errors in a dtype of results that are 0 in exact arithmetic.

        The gradient of a bias before a normalisation is such a result. Perturbed inputs leave it 0, so that its spread
        says nothing of rounding inside. In float64, it is as large as its own rounding error. In the dtype, that error
        is larger by the ratio of the machine epsilons.
        """
        epsilons = [EPSILON.get("float64" if place is None else place.dtype, EPSILON["float64"]) for place in narrow]
        by_epsilon = {e: self._spreads(both, cotangents, exact, e, seed) for e in set(epsilons)}
        spreads = [by_epsilon[epsilon][side] for side, epsilon in enumerate(epsilons)]
        ratios = [max(1.0, EPSILON[dtype] / epsilon) for epsilon in epsilons]
        return {
            key: max(ratio * spread[key] for ratio, spread in zip(ratios, spreads, strict=True))
            for key in exact[0]
            if all(_length(run[key]) <= ZERO * spread[key] for run, spread in zip(exact, spreads, strict=True))
        }


def _rows_of(run: Run, parameters: Leaves) -> Results:
    """Return the results of a run by kind of row and name."""
    return (
        {(OUTPUT_ROW, name): array for name, array in run.outputs.items()}
        | {(INPUT_ROW, name): array for name, array in run.input_gradients.items()}
        | {(PARAMETER_ROW, name): array for name, array in parameters.items()}
    )


def _unjudged(rows: Sequence[Row]) -> list[str]:
    """Return a note about results whose tolerance in float64 is so wide that their difference says nothing."""
    wide = [row for row in rows if row.difference.verdict == ROUNDING and row.difference.norm > UNJUDGED]
    if not wide:
        return []
    names = ", ".join(f"{row.kind} {row.name!r}" for row in wide[:8]) + (" and others" if len(wide) > 8 else "")
    return [
        f"Not judged: {names}. One ulp of the inputs changes it as much as the difference of both sides: it is 0 up to "
        "rounding, or the inputs are at a kink or a tie. Choose other inputs to judge it."
    ]


def _judged(
    dtype: str,
    actual: Sequence[Results],
    exact: Sequence[Results],
    spreads: Mapping[tuple[str, str], float],
    unit: str,
    length: int,
) -> list[Row]:
    """Return the rows of a dtype."""
    rows = []
    for kind, name in exact[0]:
        ours, theirs = (side[kind, name] for side in actual)
        found = judge(ours, theirs, spreads[kind, name], unit, length)
        errors = [_relative_error(a[kind, name], e[kind, name]) for a, e in zip(actual, exact, strict=True)]
        rows.append(Row(kind, name, ours.shape, dtype, found, *errors))
    return rows


def _normal(array: np.ndarray, seed: int, name: str) -> np.ndarray:
    """Return normally distributed values of the shape and kind of an array, which depend on its name."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    drawn = rng.standard_normal(array.shape)
    return drawn + 1j * rng.standard_normal(array.shape) if array.dtype.kind == "c" else drawn


def _check_deterministic(exact: Sequence[Results], again: Sequence[Results]) -> None:
    """Raise a ValueError if two runs on equal values differ."""
    for label, first, second in zip(("PyTorch", "JAX"), exact, again, strict=True):
        for (kind, name), array in first.items():
            if _relative_error(second[kind, name], array) > 1e-9 or array.shape != second[kind, name].shape:
                raise ValueError(
                    f"{label}: expected equal results of two runs on equal inputs, got another {kind} {name!r}; turn "
                    "off dropout (module.eval()), and pass what is random as an input"
                )


def _length(array: np.ndarray) -> float:
    return float(np.linalg.norm(np.where(np.isfinite(array), array, 0.0)))


def _relative_error(actual: np.ndarray, exact: np.ndarray) -> float:
    if not is_floating(exact):
        return float(not np.array_equal(actual, exact))
    scale = _length(exact)
    gap = distance(actual, exact)
    return gap / scale if scale > 0.0 else gap
