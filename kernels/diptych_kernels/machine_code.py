"""The machine code of a compiled kernel: its instructions, loops and memory accesses, read without a GPU.

Triton's package contains nvdisasm, which prints the instructions of a kernel. An instruction of a loop is executed once
per iteration, every other instruction at most once.
"""

import re
import subprocess
import tempfile
from typing import Any, NamedTuple

from triton import knobs

_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*?);")
_LABEL = re.compile(r"^(\.L_x_\d+):")
_TARGET = re.compile(r"\((\.L_x_\d+)\)")
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


class MachineCode(NamedTuple):
    """The instructions of a kernel.

    Args:
        instructions: number of instructions.
        in_loops: number of instructions that loops contain.
        accesses: loads from and stores to global memory, also asynchronous copies to shared memory.
    """

    instructions: int
    in_loops: int
    accesses: tuple[Access, ...]

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
        command = [knobs.nvidia.nvdisasm.path, "-c", file.name]
        return read(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def read(listing: str) -> MachineCode:
    """Return the instructions of a kernel from a listing of nvdisasm."""
    labels: dict[str, int] = {}
    code: list[tuple[str, str]] = []
    for line in listing.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif (instruction := _INSTRUCTION.match(line)) and instruction[1] != "NOP":
            code.append((instruction[1], instruction[2]))
    inside: set[int] = set()
    for number, (name, operands) in enumerate(code):
        target = _TARGET.search(operands) if name.startswith("BRA") else None
        begin = labels.get(target[1], number) if target else number
        if begin < number:  # the last instruction of a kernel branches to itself, and is never reached
            inside.update(range(begin, number + 1))
    accesses = [
        Access(next((_BYTES[suffix] for suffix in name.split(".") if suffix in _BYTES), 4), number in inside)
        for number, (name, _) in enumerate(code)
        if re.match(r"(LDG|LDGSTS|STG)(\.|$)", name)
    ]
    return MachineCode(len(code), len(inside), tuple(accesses))
