"""Search of the first submodule in which two models differ.

Both models run once on equal inputs and parameters, and every call of a submodule is recorded. A difference at a point
may be inherited from an earlier one. Therefore the search goes down the tree of modules, in forward order and then in
backward order, and runs single submodules of JAX on the inputs and cotangents that their counterparts in PyTorch
received. What still differs is caused by that submodule. All runs are in float64, where rounding is far smaller than a
bug.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import torch
from flax import linen, nnx
from rich.table import Table
from torch import nn

from parity.functions import OUTPUT_ROW, DifferenceError, Pair, Report
from parity.implementations import JaxImplementation, TorchImplementation, Values
from parity.inspection import longest_reduction
from parity.modules import pair_of_modules
from parity.names import Link, Links
from parity.pytrees import Leaves, map_arrays, widened
from parity.recording import Call, Calls, JaxRecord, Point, record_jax, record_torch
from parity.rounding import DIFFERENT, DRAWS, EPSILON, distance, judge, perturbed
from parity.tables import table_text

FORWARD = "forward"
BACKWARD = "backward"


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
        return self.point is None

    def check(self) -> None:
        """Raise an error that names the submodule if the models differ.

        Raises:
            DifferenceError: the models differ.
        """
        if not self.is_equal:
            raise DifferenceError(self.summary)

    @property
    def summary(self) -> str:
        """The result in one line."""
        if self.point is None:
            results = f"in {len(self.whole.rows)} results and at {len(self.points)} points"
            return f"equal: no difference beyond rounding {results}"
        worst = "" if self.local is None or self.local.is_equal else f": {self.local.different[0]}"
        return f"first difference: {self.place}{worst}"

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

    Returns:
        The submodule, its comparison, and the differences at all points.

    Raises:
        ValueError: as in compare_modules, or the submodules of a side cannot be recorded.
    """
    if hasattr(torch_module, "_orig_mod"):
        raise ValueError("torch_module: expected a module that is not compiled, got one; pass module._orig_mod")
    is_linen = isinstance(jax_module, tuple) and isinstance(jax_module[0], linen.Module)
    if not is_linen and not isinstance(jax_module, nnx.Module):
        raise ValueError(
            f"jax_module: expected an nnx.Module or (linen module, variables), got {type(jax_module).__name__}; the "
            "parts of a function cannot be recorded: compare them with compare_functions"
        )
    pair = pair_of_modules(torch_module, jax_module, inputs, names, ignore, static)
    return _Search(pair, dict(modules or {}), seed).run()


@dataclass
class _Search:
    """The search in one pair of models."""

    pair: Pair
    modules: dict[str, str]
    seed: int
    notes: list[str] = field(default_factory=list)

    def run(self) -> Location:
        """Compare the whole models, then search."""
        pair = self.pair
        inputs = {name: widened(array) for name, array in pair.call.arrays.items()}
        self.both = pair.values(pair.torch.parameters, inputs)
        self.given = pair.cotangents(self.both, self.seed)
        whole = pair.compare(["float64"], gradients=True, seed=self.seed)
        self.notes.extend(whole.notes)
        self.length = longest_reduction(pair.jax.program(self.both[1]))
        self.torch_calls = record_torch(pair.torch, self.both[0], self.given)
        self.record: JaxRecord = record_jax(pair.jax, self.both[1], self.given)
        if self.record.hidden:
            hidden = ", ".join(sorted(self.record.hidden))
            self.notes.append(f"Not recorded, because they run inside another transformation: {hidden}.")
        links = pair.translate
        assert isinstance(links, Links), "the parameters of modules are linked"
        self.paths = align_modules(self.torch_calls, self.record.calls, links, self.modules)
        spreads = self._spreads()
        self.points = {
            point: self._difference(point, spreads)
            for point in self.torch_calls
            if Point(self.paths.get(point.path, "?"), point.number) in self.record.calls
        }
        self.reports: dict[Point, Report | None] = {}
        point, direction, between = None, "", None
        if not whole.is_equal:
            self.reports[Point("", 0)] = whole
            forward_differs = any(row.kind == OUTPUT_ROW for row in whole.different)
            direction = FORWARD if forward_differs else BACKWARD
            point, between = self._descend(Point("", 0), direction)
        local = None if point is None else self.reports[point]
        return Location(
            point, direction, local, between, tuple(self.points.values()), whole, tuple(dict.fromkeys(self.notes))
        )

    def _spreads(self) -> list[Calls]:
        """Return recordings of PyTorch with perturbed inputs and parameters."""
        found = []
        for draw in range(DRAWS - 1):
            rng = np.random.default_rng([self.seed, draw])
            moved = Values(*(perturbed(group, EPSILON["float64"], rng) for group in self.both[0]))
            found.append(record_torch(self.pair.torch, moved, perturbed(self.given, EPSILON["float64"], rng)))
        return found

    def _difference(self, point: Point, spreads: Sequence[Calls]) -> PointDifference:
        """Return the inherited difference at a point."""
        ours = self.torch_calls[point]
        theirs = self.record.calls[Point(self.paths[point.path], point.number)]
        found = []
        for kind in ("outputs", "cotangents"):
            first, second = getattr(ours, kind), _renamed(getattr(theirs, kind), getattr(ours, kind))
            worst, differs = 0.0, not first.keys() <= second.keys()
            for name in first.keys() & second.keys():
                if first[name].shape != second[name].shape:
                    differs = True
                    continue
                moved = [getattr(calls[point], kind) for calls in spreads if point in calls]
                spread = max((distance(m[name], first[name]) for m in moved if name in m), default=0.0)
                result = judge(first[name], second[name], spread, "float64", self.length)
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
            if report is None or report.is_equal:
                continue
            forward_differs = any(row.kind == OUTPUT_ROW for row in report.different)
            if forward_differs == (direction == FORWARD):
                return self._descend(child, direction)
        return point, self._between(order, direction) if children else None

    def _suspects(self, point: Point, order: Sequence[Point], direction: str) -> list[Point]:
        """Return the submodules that may differ by themselves, the first one first."""
        if direction == FORWARD:
            return [child for child in order if self.points[child].forward_differs]
        # Going backward, what differs has an equal cotangent of its output, and comes before any unequal one.
        found = []
        for child in order:
            if self.points[child].backward_differs:
                break
            found.append(child)
        return found + [child for child in order if child not in found]

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
        prefix = f"{point.path}." if point.path else ""
        inside = [p for p in self.points if p.path != point.path and p.path.startswith(prefix)]
        return [p for p in inside if not any(o.path != p.path and p.path.startswith(f"{o.path}.") for o in inside)]

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
        ours, theirs = self.torch_calls[point], self.record.calls[Point(jax_path, point.number)]
        mapping = _paired_inputs(ours, theirs)
        shared = {name: ours.inputs[name] for name in mapping.values()}
        outputs = _paired_outputs(ours, theirs)
        first = RecordedInputs(ours, {name: name for name in shared}, shared, torch.from_numpy)
        second = RecordedInputs(theirs, mapping, shared, jnp.asarray)
        self.pair.torch.run(self.both[0], "float64", None)  # sets the parameters of the copy
        submodule = self.pair.torch.module("float64").get_submodule(point.path)
        torch_side = TorchImplementation(submodule, first, outputs={name: name for name in outputs.values()})
        jax_side = JaxImplementation(self._jax_submodule(jax_path), second, outputs=outputs)
        links = _inside(self.pair.translate, point.path, jax_path)
        pair = Pair(torch_side, jax_side, first, links)
        return pair.compare(["float64"], gradients=True, seed=self.seed, title=str(point), cotangents=ours.cotangents)

    def _jax_submodule(self, path: str) -> Any:
        model: Any = self.pair.jax.function
        if isinstance(model, nnx.Module):
            found: Any = model
            for part in filter(None, path.split(".")):
                found = found[int(part)] if part.isdigit() else getattr(found, part)
            return found
        variables = {}
        for collection, tree in model[1].items():
            for part in filter(None, path.split(".")):
                tree = tree.get(part, {}) if isinstance(tree, Mapping) else {}
            variables[collection] = tree
        return self.record.modules[path], variables


@dataclass(frozen=True)
class RecordedInputs:
    """The inputs of a recorded call, some of which both sides share."""

    call: Call
    names: Mapping[str, str]
    """Names of the call's shared arrays, and the names under which they are shared."""
    arrays: Leaves
    """The shared arrays by name."""
    convert: Callable[[np.ndarray], Any]
    """Create an array of the framework."""

    def with_arrays(self, arrays: Mapping[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Return the arguments with other shared arrays; all others are those of the recorded call."""

        def replaced(name: str, _: Any) -> Any:
            return arrays[self.names[name]] if name in self.names else self.convert(self.call.inputs[name])

        trees = {**{str(place): tree for place, tree in enumerate(self.call.args)}, **self.call.kwargs}
        filled = map_arrays(trees, replaced, "input")
        return tuple(filled[str(p)] for p in range(len(self.call.args))), {n: filled[n] for n in self.call.kwargs}


def _paired_inputs(ours: Call, theirs: Call) -> dict[str, str]:
    """Return which of JAX's inputs are which of PyTorch's: those of equal keyword, then by position and shape.

    Raises:
        ValueError: a floating input of either side has no counterpart.
    """
    found = {n: n for n in theirs.inputs if not n[0].isdigit() and _fit(ours.inputs.get(n), theirs.inputs[n])}
    left = [name for name in ours.inputs if name not in found.values()]
    for name, array in theirs.inputs.items():
        match = next((other for other in left if _fit(ours.inputs[other], array)), None)
        if name not in found and match is not None:
            found[name] = match
            left.remove(match)
    for side, names in (("JAX", theirs.inputs.keys() - found.keys()), ("PyTorch", set(left))):
        arrays = theirs.inputs if side == "JAX" else ours.inputs
        floating = [f"{name} {arrays[name].shape}" for name in sorted(names) if arrays[name].dtype.kind in "fc"]
        if floating:
            raise ValueError(f"expected inputs of equal shapes, got no counterpart for {', '.join(floating)} of {side}")
    return found


def _fit(one: np.ndarray | None, other: np.ndarray) -> bool:
    if one is None or one.shape != other.shape:
        return False
    kinds = one.dtype.kind, other.dtype.kind
    return kinds[0] == kinds[1] or set(kinds) <= set("iu")


def _paired_outputs(ours: Call, theirs: Call) -> dict[str, str]:
    """Return JAX's names of outputs and those of PyTorch.

    Raises:
        ValueError: the outputs have other shapes.
    """
    renamed = _renamed({name: name for name in theirs.outputs}, ours.outputs)
    shapes = {
        n: (theirs.outputs[renamed[n]].shape if n in renamed else None, ours.outputs[n].shape) for n in ours.outputs
    }
    for name, (got, expected) in shapes.items():
        if got != expected:
            raise ValueError(f"output {name!r}: expected the shape {expected} of PyTorch, got {got} in JAX")
    return {renamed[name]: name for name in ours.outputs}


def _renamed(values: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, Any]:
    """Return values under other names, in their order, if the names differ but their number does not."""
    if values.keys() == names.keys() or len(values) != len(names):
        return dict(values)
    return dict(zip(names, values.values(), strict=True))


def _inside(links: Any, torch_path: str, jax_path: str) -> Links:
    """Return the links between parameters of two submodules, with names relative to those."""
    ours, theirs = (f"{path}." if path else "" for path in (torch_path, jax_path))
    return Links(
        tuple(
            Link(
                tuple(name.removeprefix(ours) for name in link.torch_names),
                tuple(name.removeprefix(theirs) for name in link.jax_names),
                link.convert,
            )
            for link in links.links
            if all(n.startswith(ours) for n in link.torch_names) and all(n.startswith(theirs) for n in link.jax_names)
        )
    )


def align_modules(ours: Calls, theirs: Calls, links: Links, given: Mapping[str, str]) -> dict[str, str]:
    """Return which submodules of PyTorch and JAX belong together.

    Submodules belong together if they hold linked parameters and no others; those without parameters, if they have
    equal names inside submodules that belong together.

    Args:
        ours: calls of PyTorch's submodules.
        theirs: calls of JAX's submodules.
        links: linked parameters.
        given: pairs from the caller, which come first.
    """
    paths = [list(dict.fromkeys(point.path for point in calls)) for calls in (ours, theirs)]
    found = {"": ""}
    for path in paths[0]:
        for pattern, target in given.items():
            if _star_match(pattern, path) is not None:
                found[path] = _star_fill(target, _star_match(pattern, path) or ())
    held = [_parameters_by_module(paths[side], links, side) for side in (0, 1)]
    by_parameters: dict[frozenset, list[str]] = {}
    for path in paths[1]:
        if held[1][path]:
            by_parameters.setdefault(held[1][path], []).append(path)
    groups: dict[frozenset, list[str]] = {}
    for path in paths[0]:
        if held[0][path]:
            groups.setdefault(held[0][path], []).append(path)
    for parameters, members in groups.items():
        others = by_parameters.get(parameters, [])
        for mine, other in zip(sorted(members, key=len), sorted(others, key=len), strict=False):
            found.setdefault(mine, other)
    for path in paths[0]:
        parent, _, name = path.rpartition(".")
        if path not in found and parent in found:
            candidate = f"{found[parent]}.{name}" if found[parent] else name
            if candidate in paths[1]:
                found[path] = candidate
    return found


def _parameters_by_module(paths: Sequence[str], links: Links, side: int) -> dict[str, frozenset]:
    """Return the numbers of the links whose parameters a submodule holds; empty if it holds only a part of one."""
    found = {}
    for path in paths:
        prefix = f"{path}." if path else ""
        inside = set()
        for number, link in enumerate(links.links):
            names = link.torch_names if side == 0 else link.jax_names
            if all(name.startswith(prefix) for name in names):
                inside.add(number)
        found[path] = frozenset(inside)
    return found


def _star_match(pattern: str, path: str) -> tuple[str, ...] | None:
    match = re.fullmatch(re.escape(pattern).replace(r"\*", r"([^.]*)"), path)
    return None if match is None else match.groups()


def _star_fill(pattern: str, texts: tuple[str, ...]) -> str:
    for text in texts:
        pattern = pattern.replace("*", text, 1)
    return pattern
