"""The copies of a program between host and device, read from its jaxpr.

They show the copies in the program, not the copies that the plan requests.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal, jaxprs_in_params


class Move(NamedTuple):
    """A copy of a layer, or a use of it."""

    event: str
    """``+3`` copied to the device, ``F3`` used, ``-3`` copied to the host, as in a trace; ``+None`` is not a layer."""
    arrays: int
    """Number of arrays copied in succession; 0 for a use."""
    waits_for: int
    """Length of the longest chain of equations before the operand of the first copy; 0 for a use."""


def moves_of(program: Any, arguments: Sequence[int | None], results: Sequence[int | None]) -> list[Move]:
    """Return every copy between host and device and every use, in the order of the program, with unrolled loops.

    Evictions without a copy are not visible in a program. Copies on which no result depends are compiled away and are
    not returned.

    Args:
        program: result of jax.make_jaxpr.
        arguments: layer of every leaf of the arguments; see jax_impl.offload.layer_numbers.
        results: layer of every leaf of the results.
    """
    reader = _Reader()
    _read(reader, program, arguments, results)
    return reader.moves


def branch_moves(program: Any, arguments: Sequence[int | None]) -> list[list[Move]]:
    """Return the moves of every branch of every condition, which moves_of does not contain.

    Args:
        program: see moves_of.
        arguments: see moves_of.
    """
    reader = _Reader()
    _read(reader, program, arguments, [None] * len(program.jaxpr.outvars))
    return reader.branches


def _read(reader: "_Reader", program: Any, arguments: Sequence[int | None], results: Sequence[int | None]) -> None:
    """Read a program with the given layers of its arguments and results."""
    layers = dict(zip(program.jaxpr.invars, arguments, strict=True))
    targets = dict(_pairs(program.jaxpr.outvars, results))
    reader.read(program.jaxpr, layers, targets, {})


_USE = re.compile(r"\b[FRBS]\d+\b")
"""Names of scopes that are uses."""


_SAME_LAYER = frozenset({"squeeze", "slice", "reshape", "pvary", "pcast"})
"""Operations whose result belongs to the layer of their first operand."""


def live_equations(program: Any) -> list[Any]:
    """Return the equations of a jaxpr on which a result depends."""
    return _needed(program)[0]


def _needed(program: Any) -> tuple[list[Any], set[Any]]:
    """Return the equations of a jaxpr on which a result depends, and the variables that they and the results read."""
    needed = {v for v in program.outvars if not isinstance(v, Literal)}
    live = []
    for equation in reversed(program.eqns):
        if equation.primitive.name == "optimization_barrier":  # value by value
            read = [i for i, o in _pairs(equation.invars, equation.outvars) if o in needed]
        elif needed.isdisjoint(equation.outvars):
            read = []
        elif equation.primitive.name in ("jit", "pjit"):  # a transposed function may not read what was saved for it
            inner = equation.params["jaxpr"].jaxpr
            inside = _needed(inner)[1]
            read = [i for i, v in _pairs(equation.invars, inner.invars) if v in inside]
        else:
            read = equation.invars
        if read or equation.effects or not needed.isdisjoint(equation.outvars):
            live.append(equation)
            needed.update(v for v in read if not isinstance(v, Literal))
    return live[::-1], needed


class _Reader:
    """A reader of a program and its inner programs."""

    def __init__(self) -> None:
        self.moves: list[Move] = []
        self.branches: list[list[Move]] = []

    def read(self, program: Any, layers: dict, targets: dict, chains: dict) -> int:
        """Record the moves of a program.

        Args:
            program: a jaxpr.
            layers: layer of each input that is a parameter; other variables are added.
            targets: layer of each result that is a parameter.
            chains: length of the longest chain of equations before each input; other variables are added.

        Returns:
            The length of the longest chain.
        """
        for equation in reversed(program.eqns):  # barriers may lead to results
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
        """Read the programs that an equation calls and return the length of their longest chain."""
        if equation.primitive.name == "cond":
            for branch in equation.params["branches"]:
                pairs = _pairs(equation.invars[1:], branch.jaxpr.invars)
                inside = _Reader()
                inside.read(branch.jaxpr, {b: layers[a] for a, b in pairs if a in layers}, {}, {})
                self.branches += [inside.moves, *inside.branches]
            return 0
        longest = 0
        before = len(self.moves)
        for inner in jaxprs_in_params(equation.params):
            if len(inner.invars) == len(equation.invars):
                inputs = _pairs(equation.invars, inner.invars)
                outputs = _pairs(inner.outvars, equation.outvars)
                inner_layers, target_layers, analysis = (
                    {b: names[a] for a, b in pairs if a in names}
                    for pairs, names in ((inputs, layers), ([(o, i) for i, o in outputs], targets), (inputs, chains))
                )
                longest = max(longest, self.read(inner, inner_layers, target_layers, analysis))
        self.moves += self.moves[before:] * (equation.params.get("length", 1) - 1)
        return longest

    def _note(self, equation: Any, layers: Mapping, targets: Mapping, chains: Mapping) -> None:
        """Record the copies of an equation between host and device."""
        host = jax.memory.Space.Host
        device = jax.memory.Space.Device
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
    """Return the pairs of two lists, without those whose first item is a constant."""
    return [(a, b) for a, b in zip(first, second, strict=True) if not isinstance(a, Literal)]
