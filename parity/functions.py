"""Comparison of a function of PyTorch with a function of JAX: outputs, gradients, and the cause of a difference.

Both run on equal inputs, under equal random cotangents, first in float64. A difference there is a bug: rounding in
float64 is far smaller than any bug. Then both run in float32 and bfloat16, where the distance of each from its own
float64 result shows which of them loses more digits.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from parity.call_errors import check_seed
from parity.implementations import CallInputs, JaxImplementation, Run, TorchImplementation, Values, make_inputs
from parity.inspection import Narrowing, NarrowingRecorder, constants_in, longest_reduction, narrowest_in_jaxpr
from parity.operation_rounding import OperationRounding
from parity.pytrees import DTYPES, Leaves, is_floating, rounded, widened
from parity.rounding import (
    DIFFERENT,
    DRAWS,
    DRAWS_INSIDE,
    EPSILON,
    UNITS,
    Spread,
    distance,
    judge,
    length_of,
    perturbed,
    spread_of,
)
from parity.rows import (
    INPUT_ROW,
    ORDER,
    OUTPUT_ROW,
    PARAMETER_ROW,
    STATE_ROW,
    DifferenceError,
    Report,
    Results,
    Row,
)
from parity.states import UpdatedStates
from parity.unstable import Measured, settle, wide_rows

__all__ = ["OUTPUT_ROW", "PARAMETER_ROW", "STATE_ROW", "DifferenceError", "Pair", "Report", "Row", "compare_functions"]

ZERO = 10.0
"""Multiple of its own spread up to which a result in float64 is taken for the rounding error of a 0."""


def compare_functions(
    torch_function: Callable,
    jax_function: Any,
    inputs: Any,
    *,
    static: Mapping[str, Any] | None = None,
    dtypes: Any = ("float64", "float32", "bfloat16"),
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
        dtypes: names of the floating dtypes to compare in, float64 first; dtypes of NumPy or PyTorch are accepted too.
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
    ignored: Sequence[str] = ()
    """Patterns of names of buffers and variables whose changes in forward are not compared."""
    stored_narrow: list[str] = field(default_factory=list)
    """Buffers and variables without counterpart whose values a narrower dtype has rounded."""

    def __post_init__(self) -> None:
        self.states = UpdatedStates(self.torch, self.translate, self.ignored)

    def values(self, parameters: Leaves, inputs: Leaves) -> tuple[Values, Values]:
        """Return equal starting values of PyTorch and of JAX."""
        theirs = self.jax.parameters if self.translate is None else self.jax.parameters | self.translate(parameters)
        return Values(inputs, parameters), Values(inputs, theirs)

    def compare(
        self,
        dtypes: Any,
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
        dtypes = dtype_names(dtypes)
        check_seed(seed)
        inputs = {name: widened(array) for name, array in self.call.arrays.items()}
        both = self.values(self.torch.parameters, inputs)
        program = self.jax.program(both[1])
        _check_frozen(program, self.jax.program(both[1]))
        length = longest_reduction(program)
        narrow = self._narrowing(both[0]), narrowest_in_jaxpr(program)
        drawn = self.cotangents(both, seed) if gradients else None
        cotangents = (
            drawn if drawn is None or cotangents is None else {n: cotangents.get(n, c) for n, c in drawn.items()}
        )
        rows = [row for dtype in dtypes for row in self._in_dtype(dtype, both, cotangents, seed, length, narrow)]
        notes = [*self.notes, *self.states.notes]
        is_wrong = any(row.dtype == "float64" and row.difference.verdict == DIFFERENT for row in rows)
        if is_wrong and self.stored_narrow:
            notes.append(
                f"Stored in a narrower dtype than float64, without a counterpart: {_listed(self.stored_narrow)}. A "
                "constant in float64 on the other side differs from it: store it in float64, or pass "
                "dtypes=['float32']."
            )
        return Report(tuple(sorted(rows, key=lambda row: ORDER[row.kind])), tuple(dict.fromkeys(notes)), title)

    def _narrowing(self, values: Values) -> Narrowing | None:
        """Return where PyTorch's forward in float64 goes on in a narrower dtype."""
        with NarrowingRecorder() as recorder:
            self.torch.run(values, "float64", None)
        return recorder.narrowest

    def cotangents(self, both: tuple[Values, Values], seed: int) -> Leaves:
        """Return random cotangents of all floating outputs, after comparing the outputs' names, shapes and kinds.

        Raises:
            ValueError: the names, shapes or kinds differ.
        """
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
        spreads = self._spreads(both, given, exact, UNITS[unit], seed)
        largest = {key: spreads[0][key].merged(spreads[1][key]) for key in exact[0]}
        rows = _judged(dtype, actual, exact, largest, unit, length)
        if dtype != "float64" and any(row.difference.verdict == DIFFERENT for row in rows):
            zeros = self._errors_of_zeros(both, given, exact, dtype, narrow, seed)
            largest |= {key: largest[key]._replace(size=size) for key, size in zeros.items()}
            for draw in range(DRAWS_INSIDE):
                inside = self.errors_inside(both[0], given, exact[0], EPSILON[dtype], [seed, draw])
                largest = {key: spread.merged(inside.get(key)) for key, spread in largest.items()}
                rows = _judged(dtype, actual, exact, largest, unit, length)
                if not any(row.difference.verdict == DIFFERENT for row in rows):
                    break
        self.notes.extend(_not_finite(dtype, exact))
        if dtype != "float64":
            self.notes.extend(wide_rows(rows, unit))
            return rows
        rows, notes = settle(self, Measured(both, given, exact, largest, unit, length, seed), rows)
        self.notes.extend(notes)
        return rows

    def _unit(self, dtype: str, narrow: tuple[Narrowing | None, Narrowing | None]) -> str:
        """Return the dtype whose ulps count as rounding: that in which both implementations really compute."""
        ours, theirs = (x if x is not None and UNITS[x.dtype] > UNITS[dtype] else None for x in narrow)
        if ours is not None and theirs is not None:
            unit = min(ours.dtype, theirs.dtype, key=lambda name: UNITS[name])
            self.notes.append(
                f"Both compute in a narrower dtype inside (PyTorch: {ours}; JAX: {theirs}), so that the {dtype} run is "
                f"judged in ulps of {unit}."
            )
            return unit
        place = ours or theirs
        if place is not None:
            side = "PyTorch" if theirs is None else "JAX"
            remedy = f"compare with dtypes=['{place.dtype}']" if place.dtype in DTYPES else "cast on both sides"
            self.notes.append(
                f"{side} computes in a narrower dtype inside ({place}), the other does not. If that is intended, "
                f"{remedy}."
            )
        return dtype

    def _results(self, dtype: str, both: tuple[Values, Values], cotangents: Leaves | None) -> list[Results]:
        """Run both; parameters of PyTorch get the names and layout of JAX."""
        ours, theirs = self._runs(dtype, both, cotangents)
        translated = {} if self.translate is None else self.translate(ours.parameter_gradients)
        names = [name for name in translated if name in theirs.parameter_gradients]
        if cotangents is not None:
            self._note_untrained(translated, theirs.parameter_gradients)
        states = self.states.of(both, ours, theirs)
        return [
            _rows_of(ours, {name: translated[name] for name in names}, states[0]),
            _rows_of(theirs, {name: theirs.parameter_gradients[name] for name in names}, states[1]),
        ]

    def _note_untrained(self, ours: Leaves, theirs: Leaves) -> None:
        """Note the parameters that only one side trains."""
        if self.translate is None:
            return
        linked = self.translate(self.torch.parameters).keys()
        for side, names in (
            ("PyTorch", [name for name in ours if name not in theirs]),
            ("JAX", [name for name in theirs if name in linked and name not in ours]),
        ):
            if names:
                self.notes.append(
                    f"Only {side} trains {_listed(names)}: its gradient is not compared. Trained are parameters of "
                    "PyTorch that require a gradient, and nnx.Param in JAX."
                )

    def _spreads(
        self,
        both: tuple[Values, Values],
        cotangents: Leaves | None,
        exact: Sequence[Results],
        epsilon: float,
        seed: int,
    ) -> list[dict[tuple[str, str], Spread]]:
        """Return how random perturbations change each result, for each implementation."""
        spreads: list[dict[tuple[str, str], Spread]] = [{} for _ in exact]
        for moved in self.perturbed_results(both, cotangents, epsilon, seed, range(DRAWS)):
            for spread, results, base in zip(spreads, moved, exact, strict=True):
                for key, array in results.items():
                    spread[key] = spread_of(array, base[key]).merged(spread.get(key))
        return spreads

    def perturbed_results(
        self,
        both: tuple[Values, Values],
        cotangents: Leaves | None,
        epsilon: float,
        seed: int,
        draws: Iterable[int],
    ) -> Iterator[list[Results]]:
        """Yield the results of both in float64 for inputs, parameters and cotangents changed by a relative epsilon."""
        for draw in draws:
            rng = np.random.default_rng([seed, draw])
            inputs = perturbed(both[0].inputs, epsilon, rng)
            moved = self.values(perturbed(both[0].parameters, epsilon, rng), inputs)
            given = None if cotangents is None else perturbed(cotangents, epsilon, rng)
            yield self._results("float64", moved, given)

    def errors_inside(
        self, values: Values, cotangents: Leaves | None, exact: Results, epsilon: float, seed: Sequence[int]
    ) -> dict[tuple[str, str], Spread]:
        """Return the change of each result of PyTorch if all its operations round to a machine epsilon."""
        rng = np.random.default_rng(seed)
        moved = Values(*(perturbed(group, epsilon, rng) for group in values))
        given = None if cotangents is None else perturbed(cotangents, epsilon, rng)
        with OperationRounding(epsilon, int(rng.integers(2**31))):
            run = self.torch.run(moved, "float64", given)
        gradients = {} if self.translate is None else self.translate(run.parameter_gradients)
        found = _rows_of(run, gradients, {})
        return {key: spread_of(array, exact[key]) for key, array in found.items() if key in exact}

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
        epsilons = [UNITS["float64" if place is None else place.dtype] for place in narrow]
        by_epsilon = {e: self._spreads(both, cotangents, exact, e, seed) for e in set(epsilons)}
        spreads = [by_epsilon[epsilon][side] for side, epsilon in enumerate(epsilons)]
        ratios = [max(1.0, EPSILON[dtype] / epsilon) for epsilon in epsilons]
        return {
            key: max(ratio * spread[key].size for ratio, spread in zip(ratios, spreads, strict=True))
            for key in exact[0]
            if is_floating(exact[0][key])
            and all(length_of(run[key]) <= ZERO * spread[key].size for run, spread in zip(exact, spreads, strict=True))
        }


def dtype_names(dtypes: Any) -> list[str]:
    """Return the names of dtypes, which are given as names or as dtypes of NumPy, PyTorch or JAX.

    Raises:
        ValueError: there is none, or one that is not compared.
    """
    given = list(dtypes) if isinstance(dtypes, (list, tuple, set, frozenset)) else [dtypes]
    names = [str(d).removeprefix("torch.") if isinstance(d, (str, torch.dtype)) else _numpy_name(d) for d in given]
    unknown = [name for name in names if name not in DTYPES]
    if unknown or not names:
        raise ValueError(f"dtypes: expected some of {', '.join(DTYPES)}, got {', '.join(unknown) or 'none'}")
    return names


def _numpy_name(dtype: Any) -> str:
    try:
        return np.dtype(dtype).name if dtype is not None else "None"
    except TypeError:
        return repr(dtype)


def _rows_of(run: Run, parameters: Leaves, states: Leaves) -> Results:
    """Return the results of a run by kind of row and name."""
    return (
        {(OUTPUT_ROW, name): array for name, array in run.outputs.items()}
        | {(STATE_ROW, name): array for name, array in states.items()}
        | {(INPUT_ROW, name): array for name, array in run.input_gradients.items()}
        | {(PARAMETER_ROW, name): array for name, array in parameters.items()}
    )


def _not_finite(dtype: str, exact: Sequence[Results]) -> list[str]:
    """Return a note for each result with elements that are nan or infinite on both sides."""
    notes = []
    for (kind, name), array in exact[0].items():
        if is_floating(array) and array.size:
            count = int(np.sum(~np.isfinite(array) & ~np.isfinite(exact[1][kind, name])))
            if count:
                share = "all" if count == array.size else f"{count} of"
                place = f"{kind} {name!r}, run on values of {dtype}"
                notes.append(f"Of {place}, {share} {array.size} elements are nan or infinite on both sides.")
    return notes


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _judged(
    dtype: str,
    actual: Sequence[Results],
    exact: Sequence[Results],
    spreads: Mapping[tuple[str, str], Spread],
    unit: str,
    length: int,
) -> list[Row]:
    """Return the rows of a dtype."""
    rows = []
    for kind, name in exact[0]:
        ours, theirs = (side[kind, name] for side in actual)
        spread = spreads[kind, name]
        is_exact = unit == "float64" and not is_floating(ours)
        found = judge(ours, theirs, 0.0 if is_exact else spread.size, unit, length, spread.moved)
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


def _check_frozen(first: Any, second: Any) -> None:
    """Raise a ValueError if two traces of JAX's function hold other constants."""
    if list(constants_in(first)) != list(constants_in(second)):
        raise ValueError(
            "JAX: expected equal programs each time the function is traced, got other constants: random numbers of "
            "NumPy or a counter of Python are frozen by jit; pass them as inputs"
        )


def _relative_error(actual: np.ndarray, exact: np.ndarray) -> float:
    if not is_floating(exact):
        return float(not np.array_equal(actual, exact))
    scale = length_of(exact)
    gap = distance(actual, exact)
    return gap / scale if scale > 0.0 else gap
