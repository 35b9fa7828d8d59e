"""What a program moves between host and device, read from its jaxpr: not what was asked for, but what is compiled."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal, jaxprs_in_params

LAYERS = ("decoder", "layers")
"""Keys above a layer's number in a tree of parameters."""


class Move(NamedTuple):
    """A copy of a layer, or a use of it."""

    event: str
    """``+3`` copied to the device, ``F3`` used, ``-3`` copied to the host, as in a trace; ``+None`` of no layer."""
    arrays: int
    """Copied one after the other; 0 of a use."""
    waits_for: int
    """The longest chain of equations that lead to what the first copy reads; of a use, 0."""


def layer_numbers(tree: Any) -> list[int | None]:
    """For every leaf of a tree: the number of the layer whose it is, by its path, or None."""
    numbers = []
    for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]:
        keys = [str(entry.key) for entry in path if isinstance(entry, jax.tree_util.DictKey)]
        at = next((k for k in range(len(keys) - 2) if tuple(keys[k : k + 2]) == LAYERS), None)
        numbers.append(None if at is None else int(keys[at + 2]))
    return numbers


def moves_of(program: Any, arguments: Sequence[int | None], results: Sequence[int | None]) -> list[Move]:
    """Every copy between host and device, and every use, in the order of the program; loops are rolled out.

    What leaves the device without being copied leaves no mark in a program. What no result is made of is compiled
    away, and not noted.

    Args:
        program: by jax.make_jaxpr.
        arguments: of every argument's leaves, the layer whose it is; see layer_numbers.
        results: of the results'.
    """
    reader = _Reader()
    _read(reader, program, arguments, results)
    return reader.moves


def branch_moves(program: Any, arguments: Sequence[int | None]) -> list[list[Move]]:
    """What moves_of does not tell: the moves of every branch of every condition.

    Args: as moves_of's.
    """
    reader = _Reader()
    _read(reader, program, arguments, [None] * len(program.jaxpr.outvars))
    return reader.branches


def _read(reader: "_Reader", program: Any, arguments: Sequence[int | None], results: Sequence[int | None]) -> None:
    layers = dict(zip(program.jaxpr.invars, arguments, strict=True))
    targets = dict(_pairs(program.jaxpr.outvars, results))
    reader.read(program.jaxpr, layers, targets, {})


_USE = re.compile(r"\b[FRBS]\d+\b")
"""Name of a scope that is a use."""


_SAME_LAYER = frozenset({"squeeze", "slice", "reshape", "pvary", "pcast"})
"""Operations whose result is of the layer that their first input is of."""


def live_equations(program: Any) -> list[Any]:
    """Those equations of a jaxpr that a result is made of."""
    needed, live = {v for v in program.outvars if not isinstance(v, Literal)}, []
    for equation in reversed(program.eqns):
        if equation.primitive.name == "optimization_barrier":  # value by value
            read = [i for i, o in _pairs(equation.invars, equation.outvars) if o in needed]
        else:
            read = [] if needed.isdisjoint(equation.outvars) else equation.invars
        if read or equation.effects:
            live.append(equation)
            needed.update(v for v in read if not isinstance(v, Literal))
    return live[::-1]


class _Reader:
    """Walks a program and the programs inside it."""

    def __init__(self) -> None:
        self.moves: list[Move] = []
        self.branches: list[list[Move]] = []

    def read(self, program: Any, layers: dict, targets: dict, chains: dict) -> int:
        """Note a program's moves.

        Args:
            program: a jaxpr.
            layers: of inputs: the layer they are parameters of; gets those of other variables.
            targets: of results: the layer they are parameters of.
            chains: of inputs: the longest chain of equations that lead to them; gets those of other variables.

        Returns:
            The longest chain of all.
        """
        for equation in reversed(program.eqns):  # what becomes a result by a barrier
            if equation.primitive.name == "optimization_barrier":
                targets.update({i: targets[o] for i, o in _pairs(equation.invars, equation.outvars) if o in targets})
        for equation in live_equations(program):
            kind = equation.primitive.name
            used = _USE.search(str(equation.source_info.name_stack))
            if used and (not self.moves or self.moves[-1].event != used.group()):
                self.moves.append(Move(used.group(), 0, 0))
            chain = 1 + max((chains.get(v, 0) for v in equation.invars if not isinstance(v, Literal)), default=0)
            if kind == "optimization_barrier":
                layers.update({o: layers[i] for i, o in _pairs(equation.invars, equation.outvars) if i in layers})
            elif kind in _SAME_LAYER:
                layers.update({o: layers[i] for i, o in _pairs(equation.invars[:1], equation.outvars) if i in layers})
            elif kind == "device_put":
                self._note(equation, layers, targets, chains)
            chain = max(chain, self._inside(equation, layers, targets, chains))
            chains.update(dict.fromkeys(equation.outvars, chain))
        return max(chains.values(), default=0)

    def _inside(self, equation: Any, layers: Mapping, targets: Mapping, chains: Mapping) -> int:
        """Read the programs that an equation calls; their longest chain."""
        if equation.primitive.name == "cond":
            for branch in equation.params["branches"]:
                pairs = _pairs(equation.invars[1:], branch.jaxpr.invars)
                inside = _Reader()
                inside.read(branch.jaxpr, {b: layers[a] for a, b in pairs if a in layers}, {}, {})
                self.branches += [inside.moves, *inside.branches]
            return 0
        longest, before = 0, len(self.moves)
        for inner in jaxprs_in_params(equation.params):
            if len(inner.invars) == len(equation.invars):
                inputs = _pairs(equation.invars, inner.invars)
                outputs = _pairs(inner.outvars, equation.outvars)
                within, onto, known = (
                    {b: names[a] for a, b in pairs if a in names}
                    for pairs, names in ((inputs, layers), ([(o, i) for i, o in outputs], targets), (inputs, chains))
                )
                longest = max(longest, self.read(inner, within, onto, known))
        self.moves += self.moves[before:] * (equation.params.get("length", 1) - 1)
        return longest

    def _note(self, equation: Any, layers: Mapping, targets: Mapping, chains: Mapping) -> None:
        host, device = jax.memory.Space.Host, jax.memory.Space.Device
        for source, target in _pairs(equation.invars, equation.outvars):
            spaces = source.aval.memory_space, target.aval.memory_space
            if spaces == (host, device):
                event = f"+{layers.get(source)}"
            elif spaces == (device, host):
                event = f"-{targets.get(target)}"
            else:
                continue
            if self.moves and self.moves[-1].event == event:
                self.moves[-1] = self.moves[-1]._replace(arrays=self.moves[-1].arrays + 1)
            else:
                self.moves.append(Move(event, 1, chains.get(source, 0)))


def _pairs(first: Sequence, second: Sequence) -> list[tuple]:
    """Two lists side by side, without what is a constant in the first."""
    return [(a, b) for a, b in zip(first, second, strict=True) if not isinstance(a, Literal)]
