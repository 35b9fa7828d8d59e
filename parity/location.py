"""Search for the first submodule in which two models differ.

Both models run once on equal inputs and parameters, and every call of a submodule is recorded. A difference at a point
may be inherited from an earlier one. Therefore the search goes down the tree of modules, in forward order and then in
backward order, and runs single submodules of JAX on the inputs and cotangents that their counterparts in PyTorch
received. What still differs is caused by that submodule. All runs are in float64, where rounding is far smaller than a
bug.
"""

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import linen, nnx
from rich.table import Table
from torch import nn

from parity.alignment import (
    ChannelsFirst,
    align_modules,
    channels_last,
    jax_names,
    jax_submodule,
    links_inside,
    moved_outputs,
    paired_outputs,
    shared_inputs,
    star_match,
    torch_names,
)
from parity.array_store import ArrayStore
from parity.functions import OUTPUT_ROW, PARAMETER_ROW, STATE_ROW, DifferenceError, Pair, Report
from parity.implementations import Run, TorchImplementation, Values
from parity.inspection import Narrowing, longest_reduction, narrowest_in_jaxpr
from parity.modules import pair_of_modules
from parity.names import Links
from parity.pytrees import Leaves, is_floating, widened
from parity.recording import JaxRecord, Point, Spreads, nnx_submodules, record_jax, record_torch, torch_spreads
from parity.rounding import DIFFERENT, DRAWS, EPSILON, UNITS, judge, perturbed
from parity.tables import table_text

FORWARD = "forward"
BACKWARD = "backward"
FORWARD_ROWS = (OUTPUT_ROW, STATE_ROW)
"""Kinds of rows whose difference arises in forward."""
MAX_NAMES = 8
"""Most submodules that a note lists."""


class PointDifference(NamedTuple):
    """The difference of both models at one call of a submodule, inherited or not."""

    point: Point
    jax_path: str
    forward: float
    """Largest relative difference of an output."""
    forward_differs: bool
    """True if it is more than rounding."""
    backward: float
    """Largest relative difference of an output's cotangent."""
    backward_differs: bool


@dataclass(frozen=True)
class Location:
    """The first submodule in which two models differ, and all measurements on the way."""

    point: Point | None
    """The call of PyTorch's submodule; None if the models agree up to rounding."""
    direction: str
    """FORWARD or BACKWARD; empty if the models agree."""
    local: Report | None
    """Comparison of that submodule alone, on the inputs and cotangents of PyTorch."""
    between: tuple[str, str] | None
    """If the submodule has submodules itself and none of them differs: the aligned points between which it arises."""
    points: tuple[PointDifference, ...]
    """All aligned calls in forward order."""
    whole: Report
    """Comparison of the whole models."""
    notes: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        """True if the models agree up to rounding."""
        return self.point is None and not self.whole.unjudged

    def check(self) -> None:
        """Raise an error that names the submodule if the models differ.

        Raises:
            DifferenceError: the models differ, or a result cannot be judged.
        """
        if not self.is_equal:
            raise DifferenceError(self.summary)

    @property
    def summary(self) -> str:
        """The result in one line."""
        if self.point is None and self.whole.unjudged:
            return self.whole.failure
        if self.point is None:
            results = f"in {len(self.whole.rows)} results and at {len(self.points)} points"
            return f"equal: no difference beyond rounding {results}"
        rows = [] if self.local is None else self.local.different
        if self.direction == FORWARD:
            rows = [row for row in rows if row.kind in FORWARD_ROWS]
        return f"first difference: {self.place}{f': {rows[0]}' if rows else ''}"

    @property
    def place(self) -> str:
        """The submodule, the direction, and the points between which the difference arises; empty if there is none."""
        if self.point is None:
            return ""
        between = "" if self.between is None else f", between {self.between[0]} and {self.between[1]}"
        return f"{self.point} ({self.direction}){between}"

    def to_json(self) -> str:
        """Return the result and all points as JSON."""
        return json.dumps(
            {
                "module": None if self.point is None else self.point.path,
                "call": None if self.point is None else self.point.number,
                "direction": self.direction,
                "between": self.between,
                "points": [{**p._asdict(), "point": str(p.point)} for p in self.points],
                "local": None if self.local is None else json.loads(self.local.to_json()),
                "whole": json.loads(self.whole.to_json()),
                "notes": self.notes,
                "summary": self.summary,
            },
            indent=1,
        )

    def __rich__(self) -> Table:
        table = Table(box=None, pad_edge=False)
        for column in ("PyTorch", "JAX", "forward", "backward", ""):
            table.add_column(column, no_wrap=True, justify="right" if column in (FORWARD, BACKWARD) else "left")
        for entry in self.points:
            marks = ["!" if entry.forward_differs else "", "!" if entry.backward_differs else ""]
            here = "<- first difference" if entry.point == self.point else ""
            table.add_row(
                str(entry.point),
                entry.jax_path or "the whole model",
                f"{entry.forward:.1e} {marks[0]:1}",
                f"{entry.backward:.1e} {marks[1]:1}",
                here,
            )
        return table

    def __str__(self) -> str:
        return "\n".join([table_text(self.__rich__(), 160), *self.notes, self.summary])


def locate(
    torch_module: nn.Module,
    jax_module: Any,
    inputs: Any,
    *,
    names: Mapping[str, Any] | None = None,
    modules: Mapping[str, str] | None = None,
    ignore: Iterable[str] = (),
    static: Mapping[str, Any] | None = None,
    seed: int = 0,
    precision: str = "float64",
    memory_limit: int = 2**30,
) -> Location:
    """Find the first submodule in which two models differ, in forward or backward.

    Args:
        torch_module: a model of PyTorch; not compiled, because compiled calls of submodules cannot be recorded.
        jax_module: an nnx.Module or (linen module, variables).
        inputs: as in compare_modules.
        names: as in compare_modules.
        modules: names of submodules in PyTorch and in JAX that belong together, if neither the names of parameters nor
            equal paths tell; ``*`` stands for equal texts without a dot.
        ignore: as in compare_modules.
        static: as in compare_modules.
        seed: seed of cotangents and perturbations.
        precision: dtype in whose ulps differences are judged; "float32" if a side computes in float32 on purpose.
        memory_limit: bytes of recorded arrays that stay in memory; others are in a temporary folder until locate ends.

    Returns:
        The submodule, its comparison, and the differences at all points.

    Raises:
        ValueError: as in compare_modules, dropout is on, or the submodules of a side cannot be recorded.
    """
    if hasattr(torch_module, "_orig_mod"):
        raise ValueError("torch_module: expected a module that is not compiled, got one; pass module._orig_mod")
    is_linen = isinstance(jax_module, tuple) and isinstance(jax_module[0], linen.Module)
    if not is_linen and not isinstance(jax_module, nnx.Module):
        raise ValueError(
            f"jax_module: expected an nnx.Module or (linen module, variables), got {type(jax_module).__name__}; the "
            "parts of a function cannot be recorded: compare them with compare_functions"
        )
    _check_dropout(torch_module, jax_module)
    if isinstance(memory_limit, bool) or not isinstance(memory_limit, int) or memory_limit < 0:
        raise ValueError(f"memory_limit: expected a number of bytes of at least 0, got {memory_limit!r}")
    if modules is not None and not isinstance(modules, Mapping):
        raise ValueError(f"modules: expected a mapping of PyTorch's to JAX's submodules, got {type(modules).__name__}")
    if precision not in EPSILON:
        raise ValueError(f"precision: expected one of {', '.join(EPSILON)}, got {precision!r}")
    found = pair_of_modules(torch_module, jax_module, inputs, names, ignore, static)
    pair = _JudgedPair(found.torch, found.jax, found.call, found.translate, ignored=found.ignored, precision=precision)
    pair.stored_narrow = found.stored_narrow
    with ArrayStore(memory_limit) as store:
        return _Search(pair, dict(modules or {}), seed, store, memory_limit).run()


def _check_dropout(torch_module: nn.Module, jax_module: Any) -> None:
    """Raise a ValueError that names the submodules that drop elements at random."""
    found = []
    for path, module in torch_module.named_modules():
        is_layer = isinstance(module, nn.modules.dropout._DropoutNd)
        is_inside = isinstance(module, (nn.MultiheadAttention, nn.RNNBase))
        rate = module.p if is_layer else module.dropout if is_inside else 0.0
        if module.training and rate > 0.0:
            found.append(f"{path or type(module).__name__} of PyTorch")
    submodules = nnx_submodules(jax_module) if isinstance(jax_module, nnx.Module) else {}
    for path, module in submodules.items():
        if isinstance(module, nnx.Dropout) and module.rate > 0.0 and not module.deterministic:
            found.append(f"{path or type(module).__name__} of JAX")
    if found:
        raise ValueError(
            f"dropout: expected it to be off, got it on in {', '.join(found)}; call eval() on both modules, or pass "
            "the masks as inputs"
        )


@dataclass
class _JudgedPair(Pair):
    """Two implementations whose precision the caller states."""

    precision: str = "float64"
    given: Leaves | None = None
    """Cotangents of the outputs; None: random ones."""

    def cotangents(self, both: tuple[Values, Values], seed: int) -> Leaves:
        """Return the given cotangents, or those of Pair."""
        return super().cotangents(both, seed) if self.given is None else self.given

    def _unit(self, dtype: str, narrow: tuple[Narrowing | None, Narrowing | None]) -> str:
        return super()._unit(dtype, narrow) if self.precision == "float64" else self.precision

    def _runs(self, dtype: str, both: tuple[Values, Values], cotangents: Leaves | None) -> tuple[Run, Run]:
        """Run both; without cotangents, JAX is not compiled and returns zeros of the right shapes."""
        if cotangents is not None:
            return super()._runs(dtype, both, cotangents)
        with jax.enable_x64(dtype == "float64"):
            shapes = jax.eval_shape(partial(self.jax.outputs, dtype), *self.jax.split(both[1], dtype))
        zeros = {name: np.zeros(shape.shape, shape.dtype) for name, shape in shapes.items()}
        floating = {name: is_floating(array) for name, array in zeros.items()}
        arrays = {name: widened(array) for name, array in zeros.items()}
        return self.torch.run(both[0], dtype, None), Run(arrays, {}, {}, floating)

    def unit_and_length(self, both: tuple[Values, Values]) -> tuple[str, int]:
        """Return the dtype in whose ulps the whole models are judged, and the length of the longest reduction."""
        program = self.jax.program(both[1])
        unit = self._unit("float64", (self._narrowing(both[0]), narrowest_in_jaxpr(program)))
        return unit, longest_reduction(program)


@dataclass
class _Search:
    """The search in one pair of models."""

    pair: _JudgedPair
    modules: dict[str, str]
    seed: int
    store: ArrayStore
    memory_limit: int
    notes: list[str] = field(default_factory=list)

    def run(self) -> Location:
        """Compare the whole models, then search."""
        pair = self.pair
        inputs = {name: widened(array) for name, array in pair.call.arrays.items()}
        self.both = pair.values(pair.torch.parameters, inputs)
        self.given = pair.cotangents(self.both, self.seed)
        whole = pair.compare(["float64"], gradients=True, seed=self.seed)
        advice = r"(?:compare with|pass) dtypes=\['(\w+)'\]", r"pass precision='\1'"
        self.wrong = {row.name for row in whole.different if row.kind in (PARAMETER_ROW, STATE_ROW)}
        self.notes.extend(re.sub(*advice, note) for note in whole.notes)
        self.unit, self.length = pair.unit_and_length(self.both)
        self.torch_calls = record_torch(pair.torch, self.both[0], self.given, self.store)
        most = max(1, self.memory_limit)
        self.record: JaxRecord = record_jax(pair.jax, self.both[1], self.given, self.store, most)
        links = pair.translate
        assert isinstance(links, Links), "the parameters of modules are linked"
        assert isinstance(pair.torch.function, nn.Module), "only modules are searched"
        jax_paths = list(dict.fromkeys(point.path for point in self.record.calls))
        self.names = torch_names(pair.torch.function), jax_names(pair.jax.function, jax_paths)
        self._check_given(jax_paths)
        self.paths = align_modules(self.torch_calls, self.record.calls, links, self.modules, self.names)
        self._note_unrecorded()
        spreads = self._spreads()
        pair.torch.run(
            self.both[0], "float64", None
        )  # sets the parameters of the copy, whose submodules then run alone
        self.points = {
            point: self._difference(point, spreads)
            for point in self.torch_calls
            if Point(self.paths.get(point.path, "?"), point.number) in self.record.calls
        }
        self.reports: dict[Point, Report | None] = {}
        point = None
        direction = ""
        between = None
        if whole.different:
            self.reports[Point("", 0)] = whole
            forward_differs = any(row.kind in FORWARD_ROWS for row in whole.different)
            direction = FORWARD if forward_differs else BACKWARD
            point, between = self._descend(Point("", 0), direction)
        local = None if point is None else self.reports[point]
        return Location(
            point, direction, local, between, tuple(self.points.values()), whole, tuple(dict.fromkeys(self.notes))
        )

    def _check_given(self, jax_paths: Sequence[str]) -> None:
        """Raise a ValueError if the caller's pairs name a submodule that does not exist."""
        model = self.pair.jax.function
        paths = {*jax_paths, *(nnx_submodules(model) if isinstance(model, nnx.Module) else self.record.modules)}
        known = [path for path in self.names[0] if path], [path for path in paths if path]
        for pair in self.modules.items():
            for side, pattern, names in zip(("PyTorch", "JAX"), pair, known, strict=True):
                if not any(star_match(pattern, name) is not None for name in names) and pattern != "":
                    near = ", ".join(difflib.get_close_matches(pattern, names, 3, 0.3)) or "none"
                    raise ValueError(
                        f"modules: expected a submodule of {side}, got {pattern!r}, which is none; similar names: "
                        f"{near}"
                    )

    def _note_unrecorded(self) -> None:
        """Note the submodules with parameters of their own that were not recorded."""
        modules = dict(self.pair.torch.module("float64").named_modules())
        found = {path for path, module in modules.items() if path and any(True for _ in module.parameters(False))}
        found = {path for path in found if not isinstance(modules[path], (nn.ParameterList, nn.ParameterDict))}
        missing = [f"{path} of PyTorch" for path in modules if path in found - {p.path for p in self.torch_calls}]
        hidden = set(self.record.hidden)
        if isinstance(self.pair.jax.function, nnx.Module):
            nodes = nnx_submodules(self.pair.jax.function)
            held = {path for path, node in nodes.items() if path and callable(node) and _has_variables(node)}
            hidden |= held - {point.path for point in self.record.calls}
        missing += [f"{path} of JAX" for path in sorted(hidden)]
        if missing:
            more = f" and {len(missing) - MAX_NAMES} more" if len(missing) > MAX_NAMES else ""
            self.notes.append(
                f"Not recorded: {', '.join(missing[:MAX_NAMES])}{more}. They are not called, or through another method "
                "than forward or __call__, or inside a transformation (jit, scan, remat)."
            )

    def _spreads(self) -> list[Spreads]:
        """Return changes of PyTorch's recording under perturbed inputs and parameters."""
        found = []
        for draw in range(DRAWS - 1):
            rng = np.random.default_rng([self.seed, draw])
            moved = Values(*(perturbed(group, UNITS[self.unit], rng) for group in self.both[0]))
            given = perturbed(self.given, UNITS[self.unit], rng)
            found.append(torch_spreads(self.pair.torch, moved, given, self.torch_calls))
        return found

    def _difference(self, point: Point, spreads: Sequence[Spreads]) -> PointDifference:
        """Return the inherited difference at a point."""
        ours = self.torch_calls[point]
        theirs = self.record.calls[Point(self.paths[point.path], point.number)]
        try:
            names = paired_outputs(ours, theirs)
        except ValueError:
            return PointDifference(point, self.paths[point.path], 0.0, True, 0.0, True)
        found = []
        for kind in ("outputs", "cotangents"):
            first = getattr(ours, kind)
            second = getattr(theirs, kind)
            worst = 0.0
            differs = False
            for other, name in names.items():
                if name not in first or other not in second:
                    continue
                expected = channels_last(first[name], second[other])
                if expected.shape != second[other].shape:
                    differs = True
                    continue
                spread = max(changes.get((point, kind, name), 0.0) for changes in spreads)
                result = judge(expected, second[other], spread, self.unit, self.length)
                worst = max(worst, result.norm)
                differs = differs or result.verdict == DIFFERENT
            found += [worst, differs]
        return PointDifference(point, self.paths[point.path], *found)

    def _descend(self, point: Point, direction: str) -> tuple[Point, tuple[str, str] | None]:
        """Return the deepest submodule inside a point that differs by itself, and where in it the difference arises."""
        children = self._children(point)
        order = children if direction == FORWARD else children[::-1]
        for child in self._suspects(point, order, direction):
            report = self._local(child)
            if report is None or not report.different:
                continue
            forward_differs = any(row.kind in FORWARD_ROWS for row in report.different)
            if forward_differs == (direction == FORWARD):
                return self._descend(child, direction)
        return point, self._between(order, direction) if children else None

    def _suspects(self, point: Point, order: Sequence[Point], direction: str) -> list[Point]:
        """Return the submodules that may differ by themselves, the most likely first."""
        held = {child: set(self.names[1].get(self.paths[child.path], {}).values()) for child in order}
        if direction == FORWARD:  # a wrong state of a submodule need not change its outputs
            return [child for child in order if self.points[child].forward_differs or self.wrong & held[child]]
        # Going backward, what differs has an equal cotangent of its output, and comes before any unequal one.
        found = []
        for child in order:
            if self.points[child].backward_differs:
                break
            found.append(child)
        holding = [child for child in found if self.wrong & held[child]]
        return list(dict.fromkeys([*holding, *found[::-1], *order]))

    def _between(self, order: Sequence[Point], direction: str) -> tuple[str, str]:
        """Return the last point that agrees and the first that does not."""
        ends = ("the inputs", "the outputs") if direction == FORWARD else ("the outputs", "the inputs")
        before = ends[0]
        for child in order:
            entry = self.points[child]
            if entry.forward_differs if direction == FORWARD else entry.backward_differs:
                return before, str(child)
            before = str(child)
        return before, ends[1]

    def _children(self, point: Point) -> list[Point]:
        """Return the aligned calls directly inside a point, in forward order."""
        return [child for child in self.points if child != point and self._aligned_parent(child) == point]

    def _aligned_parent(self, point: Point) -> Point | None:
        """Return the innermost aligned call around a point."""
        parent = self.torch_calls[point].parent
        while parent is not None and parent not in self.points:
            parent = self.torch_calls[parent].parent
        return parent

    def _local(self, point: Point) -> Report | None:
        """Compare a submodule alone, on PyTorch's inputs and cotangents; None if that is not possible."""
        if point not in self.reports:
            try:
                self.reports[point] = self._compare_alone(point)
            except ValueError as error:
                self.notes.append(f"{point} was not compared by itself: {error}")
                self.reports[point] = None
        return self.reports[point]

    def _compare_alone(self, point: Point) -> Report:
        jax_path = self.paths[point.path]
        ours = self.torch_calls[point]
        theirs = self.record.calls[Point(jax_path, point.number)]
        outputs = paired_outputs(ours, theirs)
        moved = moved_outputs(ours, theirs, outputs)
        first, second = shared_inputs(ours, theirs, bool(moved))
        submodule = self.pair.torch.module("float64").get_submodule(point.path)
        torch_side = TorchImplementation(submodule, first, outputs={name: name for name in outputs.values()})
        model = self.pair.jax.function
        jax_side = ChannelsFirst(jax_submodule(model, jax_path, self.record.modules), second, outputs, moved)
        own = self.names[0][point.path]
        other = self.names[1][jax_path]
        values = self.both[1].parameters
        jax_side.parameters |= {name: values[whole] for name, whole in other.items() if whole in values}
        links = self.pair.translate
        assert isinstance(links, Links), "the parameters of modules are linked"
        inside = links_inside(links, own, other)
        given = {name: ours.cotangents[name] for name in outputs.values() if name in ours.cotangents}
        pair = _JudgedPair(torch_side, jax_side, first, inside, precision=self.pair.precision, given=given)
        return pair.compare(["float64"], gradients=True, seed=self.seed, title=str(point))


def _has_variables(node: nnx.Module) -> bool:
    return any(isinstance(value, nnx.Variable) for value in vars(node).values())
