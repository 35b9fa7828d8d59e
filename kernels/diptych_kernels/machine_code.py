"""The machine code of a compiled kernel: its instructions, loops and memory accesses, read without a GPU.

Triton's package contains nvdisasm, which prints the instructions of a kernel and the source line of each. An
instruction of a loop is executed once per iteration, every other instruction at most once. A backward branch is a loop
if its source line is a for statement; other backward branches leave code that the compiler has moved to the end of the
kernel.
"""

import linecache
import re
import subprocess
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton import knobs

_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*?);")
_LABEL = re.compile(r"^(\.L_x_\d+):")
_TARGET = re.compile(r"\((\.L_x_\d+)\)")
_SOURCE = re.compile(r'^\s*//## File "(.*?)", line (\d+)')
_FOR = re.compile(r"for (\w+) in (?:tl\.)?range\((.*)\):")
_BYTES = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
"""Bytes of an access per thread, by the suffix of its instruction; without a suffix they are 4."""


class Access(NamedTuple):
    """An instruction that loads from global memory or stores to it.

    Args:
        nbytes: bytes per thread.
        in_loop: whether a loop contains it.
    """

    nbytes: int
    in_loop: bool


class Loop(NamedTuple):
    """A loop of a kernel.

    Args:
        statement: source line of the loop, such as ``for start in range(0, K, BK):``.
        own: number of instructions outside of inner loops.
        inner: loops that it contains.
    """

    statement: str
    own: int
    inner: tuple["Loop", ...]

    def executed(self, values: Mapping[str, int], skipped: Collection[str] = ()) -> int:
        """Return how many instructions a warp executes in the loop; arguments as for MachineCode.executed.

        Raises:
            ValueError: the bounds of the loop use a name without a value.
        """
        if self.statement in skipped:
            return 0
        match = _FOR.match(self.statement)
        if match is None:
            raise ValueError(f"statement: expected a for statement over a range, got {self.statement!r}")
        try:
            numbers = eval(
                f"span({match[2]})", {"span": lambda *bounds, **_: range(*bounds), "tl": triton}, dict(values)
            )
        except NameError as error:
            raise ValueError(f"values: expected all names of {self.statement!r}; {error}") from None
        if not self.inner:
            return self.own * len(numbers)
        return sum(
            self.own + sum(loop.executed({**values, match[1]: number}, skipped) for loop in self.inner)
            for number in numbers
        )


class MachineCode(NamedTuple):
    """The instructions of a kernel.

    Args:
        instructions: number of instructions.
        in_loops: number of instructions that loops contain.
        accesses: loads from and stores to global memory, also asynchronous copies to shared memory.
        loops: the outermost loops.
        barriers: number of instructions at which the warps of a program wait for each other.
    """

    instructions: int
    in_loops: int
    accesses: tuple[Access, ...]
    loops: tuple[Loop, ...]
    barriers: int

    @property
    def wide_share(self) -> float:
        """The share of bytes that accesses of 16 bytes per thread move, of those of accesses of at least 8 bytes.

        Narrower accesses read coefficients and offsets. Each access counts once.
        """
        total = sum(access.nbytes for access in self.accesses if access.nbytes >= 8)
        return sum(access.nbytes for access in self.accesses if access.nbytes == 16) / max(total, 1)

    @property
    def narrow_in_loops(self) -> int:
        """The number of accesses in loops that move at most 2 bytes per thread."""
        return sum(access.in_loop and access.nbytes <= 2 for access in self.accesses)

    def executed(self, values: Mapping[str, int], skipped: Collection[str] = ()) -> int:
        """Return how many instructions a warp executes, with both sides of every branch outside of loops.

        Args:
            values: value of every name in the bounds of the loops, other than variables of loops around them.
            skipped: statements of loops that are not executed.

        Raises:
            ValueError: a name has no value.
        """
        return self.instructions - self.in_loops + sum(loop.executed(values, skipped) for loop in self.loops)


def machine_code(compiled: Any) -> MachineCode:
    """Return the instructions of a kernel.

    Args:
        compiled: what triton.compile returned.

    Raises:
        subprocess.CalledProcessError: nvdisasm cannot read the kernel.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "-c", "-g", file.name]
        return read(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def read(listing: str) -> MachineCode:
    """Return the instructions of a kernel from a listing of nvdisasm with source lines."""
    labels: dict[str, int] = {}
    code: list[tuple[str, str]] = []
    lines: list[str] = []
    line = ""
    for text in listing.splitlines():
        if label := _LABEL.match(text):
            labels[label[1]] = len(code)
        elif source := _SOURCE.match(text):
            line = linecache.getline(_local(source[1]), int(source[2])).split("#")[0].strip()
        elif (instruction := _INSTRUCTION.match(text)) and instruction[1] != "NOP":
            code.append((instruction[1], instruction[2]))
            lines.append(line)
    spans = []
    for number, (name, operands) in enumerate(code):
        target = _TARGET.search(operands) if name.startswith("BRA") else None
        begin = labels.get(target[1], number) if target else number
        if begin < number and lines[number].startswith("for "):
            spans.append((begin, number + 1, lines[number]))
    inside = {number for begin, end, _ in spans for number in range(begin, end)}
    accesses = [
        Access(next((_BYTES[suffix] for suffix in name.split(".") if suffix in _BYTES), 4), number in inside)
        for number, (name, _) in enumerate(code)
        if re.match(r"(LDG|LDGSTS|STG)(\.|$)", name)
    ]
    barriers = sum(name.startswith("BAR") for name, _ in code)
    return MachineCode(len(code), len(inside), tuple(accesses), _nested(spans), barriers)


def _local(path: str) -> str:
    """Return the path of this package's file for the path that a kernel was compiled from.

    Triton's cache returns kernels that another copy of this package compiled, which may have been removed since.
    """
    _, package, inside = path.rpartition("/diptych_kernels/")
    return str(Path(__file__).parent / inside) if package else path


def _nested(spans: list[tuple[int, int, str]]) -> tuple[Loop, ...]:
    """Return the outermost of the loops with these first instructions, ends and statements."""
    found = []
    for span in spans:
        begin, end, statement = span
        if any(other != span and other[0] <= begin and end <= other[1] for other in spans):
            continue
        inner = _nested([other for other in spans if other != span and begin <= other[0] and other[1] <= end])
        found.append(Loop(statement, end - begin - sum(map(_size, inner)), inner))
    return tuple(found)


def _size(loop: Loop) -> int:
    """Return the number of instructions in a loop."""
    return loop.own + sum(map(_size, loop.inner))
