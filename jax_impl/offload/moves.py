"""What a program moves between host and device, read from its jaxpr: not what was asked for, but what is compiled."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal, jaxprs_in_params

LAYERS = ("decoder", "layers")
"""Keys above a layer's number in a tree of parameters."""


class Move(NamedTuple):
    """A copy of an array of a layer."""

    direction: str
    """``+`` to the device, ``-`` to the host."""
    layer: int | None
    """None: of what is no layer's."""
    products: int
    """The longest chain of matrix products that the copy waits for."""

    def __str__(self) -> str:
        return f"{self.direction}{self.layer}"


def layer_numbers(tree: Any) -> list[int | None]:
    """For every leaf of a tree: the number of the layer whose it is, by its path, or None."""
    numbers = []
    for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]:
        keys = [str(entry.key) for entry in path if isinstance(entry, jax.tree_util.DictKey)]
        at = next((k for k in range(len(keys) - 2) if tuple(keys[k : k + 2]) == LAYERS), None)
        numbers.append(None if at is None else int(keys[at + 2]))
    return numbers


def moves_of(program: Any, arguments: Any, results: Any) -> list[Move]:
    """Every copy between host and device, in the order of the program; what a loop repeats, as often as it does.

    Args:
        program: by jax.make_jaxpr.
        arguments: of the function, as one tree; for their paths.
        results: the function's, or their shapes.
    """
    inner = program.jaxpr
    reader = _Reader()
    origins = dict(zip(inner.invars, layer_numbers(arguments), strict=True))
    targets = {v: n for v, n in zip(inner.outvars, layer_numbers(results), strict=True) if not isinstance(v, Literal)}
    reader.read(inner, origins, targets, {})
    return reader.moves


class _Reader:
    """Walks a program and the programs inside it."""

    def __init__(self) -> None:
        self.moves: list[Move] = []

    def read(self, program: Any, origins: dict, targets: dict, depths: dict) -> dict:
        """Note a program's moves.

        Args:
            program: a jaxpr.
            origins: of inputs: the layer they are parameters of.
            targets: of results: the layer they are parameters of.
            depths: of inputs: the longest chain of matrix products they are made by.

        Returns:
            The depths of all variables.
        """
        targets = _behind_barriers(program, targets)
        for equation in program.eqns:
            kind = equation.primitive.name
            ins = [v for v in equation.invars if not isinstance(v, Literal)]
            depth = max((depths.get(v, 0) for v in ins), default=0)
            if kind == "optimization_barrier":
                origins.update({o: origins.get(i) for i, o in _pairs(equation.invars, equation.outvars)})
            elif kind == "device_put":
                self._note(equation, origins, targets, depths)
            depth = max([depth + (kind == "dot_general"), *self._inside(equation, origins, targets, depths)])
            depths.update(dict.fromkeys(equation.outvars, depth))
        return depths

    def _inside(self, equation: Any, origins: dict, targets: dict, depths: dict) -> list[int]:
        """Read the programs an equation calls; their depths."""
        found, before = [], len(self.moves)
        for inner in jaxprs_in_params(equation.params):
            if len(inner.invars) != len(equation.invars):
                continue
            pairs = _pairs(equation.invars, inner.invars)
            within = {i: origins.get(o) for o, i in pairs}
            onto = {i: targets.get(o) for i, o in _pairs(inner.outvars, equation.outvars)}
            known = self.read(inner, within, onto, {i: depths.get(o, 0) for o, i in pairs})
            found += known.values()
        self.moves += self.moves[before:] * (equation.params.get("length", 1) - 1)
        return found

    def _note(self, equation: Any, origins: Mapping, targets: Mapping, depths: Mapping) -> None:
        for source, target in _pairs(equation.invars, equation.outvars):
            spaces = source.aval.memory_space, target.aval.memory_space
            if spaces == (jax.memory.Space.Host, jax.memory.Space.Device):
                self.moves.append(Move("+", origins.get(source), depths.get(source, 0)))
            elif spaces == (jax.memory.Space.Device, jax.memory.Space.Host):
                self.moves.append(Move("-", targets.get(target), depths.get(source, 0)))


def _behind_barriers(program: Any, targets: Mapping) -> dict:
    """Targets, and what becomes one by a barrier."""
    found = dict(targets)
    for equation in reversed(program.eqns):
        if equation.primitive.name == "optimization_barrier":
            found.update({i: found[o] for i, o in _pairs(equation.invars, equation.outvars) if o in found})
    return found


def _pairs(first: Sequence, second: Sequence) -> list[tuple]:
    """Two lists side by side, without what is no variable."""
    return [(a, b) for a, b in zip(first, second, strict=False) if not isinstance(a, Literal)]
