"""Compilation of every kernel ahead of time, without a GPU, and the resources that the kernels use.

The operations run on shapes instead of arrays. A Recorder stores every launch, which is then compiled for a target.
Registers and spills come from ptxas, the assembler in Triton's package. Shared memory comes from Triton.
"""

import math
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from diptych_kernels import autodiff_rules as operations
from diptych_kernels import tuning
from diptych_kernels.autodiff_rules import Operation, Sinkhorn
from diptych_kernels.delta_rule.autodiff_rules import DELTA_RULE, DeltaRule
from diptych_kernels.delta_rule.cost import flops
from diptych_kernels.launch_configs import Block, Launch, Write

TARGETS = (80, 90)
"""Compute capabilities: A100, and H100 or H200."""

_POINTERS = {
    "float16": "*fp16",
    "bfloat16": "*bf16",
    "float32": "*fp32",
    "float64": "*fp64",
    "int32": "*i32",
    "int64": "*i64",
    "uint32": "*u32",
}
_WIDTHS = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int32": 4, "int64": 8, "uint32": 4}


@dataclass(frozen=True)
class Shape:
    """The shape and type of an array without elements."""

    shape: tuple[int, ...]
    dtype: str

    def reshape(self, *shape: Any) -> "Shape":
        """Return the array with another shape."""
        flat = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
        return Shape(tuple(flat), self.dtype)

    def __getitem__(self, index: slice) -> "Shape":
        return Shape((len(range(*index.indices(self.shape[0]))), *self.shape[1:]), self.dtype)


class Recorded(NamedTuple):
    """A launch, its inputs, and the function and sizes that built it."""

    launch: Launch
    inputs: tuple[Shape, ...]
    build: Callable[..., Launch]
    sizes: dict[str, Any]

    def ideal_bytes(self, tokens: int) -> int:
        """Return the bytes per token of all arrays with a row per token, each read or written once."""
        return sum(size // tokens for shape, size in self._arrays() if shape[:1] == (tokens,))

    def flops(self) -> int:
        """Return the operations in the matrix products of a delta rule launch; 0 for other launches."""
        of = self.sizes.get("of")
        if of is None:
            return 0
        constants = dict(self.launch.constants) | {"PARTS": self.sizes.get("parts")}
        return flops(self.launch.kernel.rsplit(".", 1)[1], of, constants)

    def all_bytes(self) -> int:
        """Return the bytes of all inputs and outputs."""
        return sum(size for _, size in self._arrays())

    def _arrays(self) -> list[tuple[tuple[int, ...], int]]:
        inputs = {id(x): x for x in self.inputs}.values()  # one array may replace several missing inputs
        moved = [*((x.shape, x.dtype) for x in inputs), *self.launch.outputs]
        return [(shape, math.prod(shape) * _WIDTHS[dtype]) for shape, dtype in moved]


class Recorder:
    """A backend that records launches instead of running them."""

    def __init__(self, blocks: dict[str, Block] | None = None) -> None:
        self.blocks = blocks or {}
        self.launches = []

    def __call__(self, build: Callable[..., Launch], sizes: dict[str, Any], *inputs: Shape) -> tuple[Shape, ...]:
        """Record a launch and return the shapes of its outputs."""
        launch = build(self.blocks.get(build.__name__, tuning.first(build)), **sizes)
        self.launches.append(Recorded(launch, inputs, build, sizes))
        return tuple(Shape(*output) for output in launch.outputs)

    def cast(self, x: Shape, dtype: str) -> Shape:
        """See Backend.cast."""
        return Shape(x.shape, dtype)


def launches_of(
    operation: Operation, static: Any, inputs: Sequence[Shape | None], blocks: dict[str, Block] | None = None
) -> list[Recorded]:
    """Return every launch of the forward and backward of an operation, in order."""
    recorder = Recorder(blocks)
    outputs, saved = operation.forward(recorder, static, *inputs)
    operation.backward(recorder, static, saved, *outputs)
    return recorder.launches


def everything(
    tokens: int = 8192,
    streams: int = 4,
    width: int = 4096,
    dtype: str = "bfloat16",
    rows: str = "int64",
    blocks: dict[str, Block] | None = None,
) -> list[Recorded]:
    """Return all launches of all operations at the sizes of a large model; write_streams with dropout comes last."""
    lead = (tokens,)
    coefficients = "float64" if dtype == "float64" else "float32"
    x, y = Shape((*lead, streams, width), dtype), Shape((*lead, width), dtype)
    h_post, h_res = Shape((*lead, streams), coefficients), Shape((*lead, streams, streams), coefficients)
    columns = streams * (streams + 2)
    phi, alpha = Shape((streams * width, columns), coefficients), Shape((3,), coefficients)
    row, step = Shape(lead, rows), Shape((1,), rows)
    dropout = Write("mix", post=True, bias=True, rate=0.1, seed=1234, site=2)
    mixed, none = [x, h_res, y, Shape((width,), coefficients), h_post], [None, None, None]
    sinkhorn = Sinkhorn(20, "row", 1e-5)
    return [
        *launches_of(operations.COMPUTE_MAPPINGS, sinkhorn, [x, phi, alpha, Shape((columns,), coefficients)], blocks),
        *launches_of(operations.SINKHORN, sinkhorn, [h_res], blocks),
        *launches_of(operations.AGGREGATE, None, [x, h_post], blocks),
        *launches_of(operations.WRITE, dropout._replace(rate=0.0), [*mixed, *none], blocks),
        *launches_of(operations.SWIGLU, None, [Shape((*lead, 8 * width), dtype)], blocks),
        *launches_of(operations.GELU, None, [Shape((*lead, 4 * width), dtype)], blocks),
        *launches_of(operations.WRITE, dropout, [*mixed, row, row, step], blocks),
    ]


def delta_rule(
    per_channel: bool,
    tokens: int = 8192,
    heads: int = 32,
    key: int = 128,
    value: int = 128,
    dtype: str = "bfloat16",
    parts: int = 4,
    blocks: dict[str, Block] | None = None,
) -> list[Recorded]:
    """Return all launches of the delta rule on one sequence in parts.

    With one decay per token (``per_channel`` is False), two value heads share one head of q and k.
    """
    chunks = math.ceil(tokens / 64)
    wide = "float64" if dtype == "float64" else "float32"
    queries = Shape((tokens, heads if per_channel else heads // 2, key), dtype)
    inputs = [
        queries,
        queries,
        Shape((tokens, heads, value), dtype),
        Shape((tokens, heads, key) if per_channel else (tokens, heads), wide),
        Shape((tokens, heads), dtype),
        Shape((1, heads, key, value), wide),
        *[Shape((count, width), "int32") for count, width in ((chunks, 2), (1, 3), (parts, 3))],
    ]
    return launches_of(DELTA_RULE, DeltaRule(per_channel, key**-0.5, 64, parts=parts), inputs, blocks)


def delta_rule_production(**sizes: Any) -> dict[str, Recorded]:
    """Return one launch per compiled kernel of delta_rule(...), by name; one decay per channel comes first."""
    named: dict[str, Recorded] = {}
    flags = {"W": "maps", "OUTPUT": "outputs", "KEEP": "states", "BACK": "back"}
    for per_channel in (True, False):
        for entry in delta_rule(per_channel, **sizes):
            constants = dict(entry.launch.constants)
            labels = [
                word for flag, word in flags.items() if constants.get(flag) not in (None, False, constants.get("V"))
            ]
            if not per_channel and constants.get("PER_CHANNEL") is False:
                labels.insert(0, "one decay")
            name = entry.launch.kernel.removeprefix("delta_rule.") + (f" ({', '.join(labels)})" if labels else "")
            named.setdefault(name, entry)
    return named


def production(*sizes: Any, **more: Any) -> dict[str, Recorded]:
    """Return the first launch of every kernel in everything(...), by name."""
    named: dict[str, Recorded] = {}
    for entry in everything(*sizes, **more):
        drops = dict(entry.launch.constants).get("THRESHOLD", 0)
        named.setdefault(entry.launch.kernel + (" (dropout)" if drops else ""), entry)
    return named


@dataclass(frozen=True)
class Resources:
    """Resources of a compiled kernel: registers and spilled bytes per thread, bytes of shared memory per program."""

    registers: int
    spilled: int
    shared: int
    num_warps: int


def compile_ahead(recorded: Recorded, capability: int) -> Any:
    """Compile the kernel of a launch for ``sm_<capability>``."""
    launch = recorded.launch
    kernel = tuning.kernel_function(launch.kernel)
    constants = dict(launch.constants)
    types = [_POINTERS[x.dtype] for x in recorded.inputs]
    types += ["i32"] * len(launch.scalars)
    types += [_POINTERS[dtype] for _, dtype in launch.outputs]
    arguments = [name for name in kernel.arg_names if name not in constants]
    signature = dict(zip(arguments, types, strict=True)) | dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        kernel,
        {name: signature[name] for name in kernel.arg_names},
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs={
            (kernel.arg_names.index(name),): [["tt.divisibility", 16]]
            for name in arguments
            if signature[name].startswith("*")
        },
    )
    options = dict(num_warps=launch.num_warps, num_stages=launch.num_stages, enable_fp_fusion=True)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def resources(recorded: Recorded, capability: int) -> Resources:
    """Compile a launch and return the resources of its kernel."""
    compiled = compile_ahead(recorded, capability)
    architecture = f"sm_{capability}" + ("a" if capability >= 90 else "")
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(compiled.asm["ptx"])
        file.flush()
        command = [get_ptxas(capability).path, "-v", f"--gpu-name={architecture}", file.name, "-o", "/dev/null"]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = int(re.findall(r"Used (\d+) registers", printed)[-1])
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", printed)))
    return Resources(registers, spilled, compiled.metadata.shared, recorded.launch.num_warps)


def occupancy(used: Resources) -> float:
    """Return the fraction of a multiprocessor's 64 warps that fit into its 65536 registers.

    A warp gets registers in units of 256.
    """
    warps = 65536 // (math.ceil(used.registers * 32 / 256) * 256)
    return min(warps // used.num_warps * used.num_warps, 64) / 64
