"""Estimated time of a kernel's launch, from its bytes and its machine code, without a GPU.

A launch takes at least as long as each of three things:

    bytes      reading and writing its tensors at the bandwidth of the memory
    issue      its instructions: a multiprocessor issues four warp instructions per cycle
    chain      the instructions of one warp, one after the other, for each wave of programs

The third term needs what no data sheet has: how many cycles pass from one instruction of a warp to the next. Warps that
wait for each other at barriers, for shared memory and for matrix products need CYCLES_WITH_BARRIERS, others CYCLES.
Both were chosen by measurements on an H100 (benchmarks/results), which docs/kernels.md compares with the estimates.
"""

import math
from typing import NamedTuple

from diptych_kernels import aot as ahead
from diptych_kernels.machine_code import MachineCode, machine_code

CYCLES = 2.2
"""Cycles per instruction of a warp in kernels without barriers."""

CYCLES_WITH_BARRIERS = 8.0
"""Cycles per instruction of a warp in kernels with barriers."""

ISSUED_PER_CYCLE = 4
"""Warp instructions that a multiprocessor issues in a cycle."""

STRONG_DECAYS = ("for step in range(0, C // TILE):", "for step in tl.range(0, C // TILE, disable_licm=True):")
"""Loops of KDA that run in 16 bits only if a channel decays by more than exp(-60) in a chunk; left out there."""


class Gpu(NamedTuple):
    """Rates of a GPU.

    Args:
        multiprocessors: number of multiprocessors.
        clock: cycles per second.
        bandwidth: bandwidth of the memory, bytes per second.
    """

    multiprocessors: int
    clock: float
    bandwidth: float


GPUS = {
    "H100": Gpu(132, 1.98e9, 3.0e12),
    "H200": Gpu(132, 1.98e9, 4.3e12),
    "B200": Gpu(148, 1.98e9, 7.2e12),
}
"""SXM modules, at their highest clock. Bandwidths are 0.9 of the data sheets' 3.35, 4.8 and 8 TB/s, as a copy reached
on an H100. Machine code of sm_90 stands for that of a B200."""


class LaunchTime(NamedTuple):
    """Estimated seconds of a launch, by what limits it."""

    bytes: float
    issue: float
    chain: float

    @property
    def seconds(self) -> float:
        """The longest of the three."""
        return max(self)

    @property
    def limit(self) -> str:
        """The name of the longest."""
        return max(self._fields, key=lambda name: getattr(self, name))


class Counted(NamedTuple):
    """What the estimate of a launch needs.

    Args:
        moved: bytes that the launch must move.
        executed: instructions that each warp executes.
        warps: warps of a program.
        programs: programs of the launch.
        resident: programs that run on a multiprocessor at once.
        cycles: cycles from one instruction of a warp to the next.
    """

    moved: int
    executed: int
    warps: int
    programs: int
    resident: int
    cycles: float

    @property
    def instructions(self) -> int:
        """Warp instructions of the launch."""
        return self.executed * self.warps * self.programs

    def on(self, gpu: Gpu) -> LaunchTime:
        """Return the estimated time on a GPU."""
        waves = math.ceil(self.programs / (gpu.multiprocessors * self.resident))
        return LaunchTime(
            self.moved / gpu.bandwidth,
            self.instructions / (gpu.multiprocessors * ISSUED_PER_CYCLE * gpu.clock),
            waves * self.executed * self.cycles / gpu.clock,
        )


def count(recorded: ahead.Recorded, capability: int = 90) -> Counted:
    """Compile a launch and count what it moves and executes.

    Args:
        recorded: the launch.
        capability: compute capability, such as 90 for sm_90.

    Raises:
        ValueError: a loop of the kernel has bounds that loop_values does not know.
    """
    code = machine_code(ahead.compile_ahead(recorded, capability))
    return Counted(
        moved_bytes(recorded),
        executed(recorded, code),
        recorded.launch.num_warps,
        math.prod(recorded.launch.grid),
        ahead.programs(ahead.resources(recorded, capability), capability),
        CYCLES_WITH_BARRIERS if code.barriers else CYCLES,
    )


def moved_bytes(recorded: ahead.Recorded) -> int:
    """Return the bytes that a launch must move: all of a delta rule's, and of others the arrays with rows of tokens."""
    if "call" in recorded.sizes:
        return recorded.all_bytes()
    tokens = math.prod(recorded.sizes["lead"]) if "lead" in recorded.sizes else 0
    return tokens * recorded.ideal_bytes(tokens) if tokens else recorded.all_bytes()


def executed(recorded: ahead.Recorded, code: MachineCode) -> int:
    """Return the instructions that each warp of a launch executes, in 16 bits without strong decays of KDA."""
    is_narrow = recorded.inputs[0].dtype == "bfloat16"
    return code.executed(loop_values(recorded), STRONG_DECAYS if is_narrow else ())


def loop_values(recorded: ahead.Recorded) -> dict[str, int]:
    """Return the values of the names in the bounds of a kernel's loops."""
    constants = dict(recorded.launch.constants)
    values = {name: value for name, value in constants.items() if isinstance(value, int)}
    values["TILE"] = 16
    if "ITERATIONS" in values:
        values |= {"PAIRS": values["ITERATIONS"] - 1, "PAIRS_IN_REGISTERS": 4}
    call = recorded.sizes.get("call")
    if call is not None:
        last = math.ceil(call.tokens / call.sequences)
        values |= {"whole": last // call.chunk_size, "parts": recorded.sizes.get("parts", 0)}
    elif recorded.launch.scalars:
        values |= {"first": 0, "last": recorded.launch.scalars[-1]}
    return values
