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

from diptych_kernels import autodiff_rules, tuning
from diptych_kernels.autodiff_rules import MappingOptions, Operation
from diptych_kernels.delta_rule.autodiff_rules import DELTA_RULE, DeltaRule
from diptych_kernels.delta_rule.cost import flops
from diptych_kernels.launch_configs import Block, Launch, Write, wide

TARGETS = (80, 90)
"""Compute capabilities: A100, and H100 or H200."""

_SHARED_KIB = {80: 164, 90: 228, 100: 228}
"""Shared memory of a multiprocessor, in KiB."""

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
    """The shape and type of an array without elements.

    Args:
        shape: sizes of the axes.
        dtype: numpy name of the type.
    """

    shape: tuple[int, ...]
    dtype: str

    def reshape(self, *shape: Any) -> "Shape":
        """Return the array with another shape, given as a tuple or as separate sizes."""
        flat = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
        return Shape(tuple(flat), self.dtype)

    def __getitem__(self, index: slice) -> "Shape":
        return Shape((len(range(*index.indices(self.shape[0]))), *self.shape[1:]), self.dtype)


class Recorded(NamedTuple):
    """A launch, its inputs, and the function and sizes that built it.

    Args:
        launch: the launch.
        inputs: shapes and types of its inputs.
        build: the function of launch_configs that returned the launch.
        sizes: arguments of ``build`` besides the block.
    """

    launch: Launch
    inputs: tuple[Shape, ...]
    build: Callable[..., Launch]
    sizes: dict[str, Any]

    def ideal_bytes(self, tokens: int) -> int:
        """Return the bytes per token that the launch must move: every array with a row per token, once."""
        return sum(size // tokens for shape, size in self._arrays() if shape[:1] == (tokens,))

    def flops(self) -> int:
        """Return the operations in the matrix products of a delta rule launch; 0 for other launches."""
        call = self.sizes.get("call")
        if call is None:
            return 0
        constants = dict(self.launch.constants) | {"PARTS": self.sizes.get("parts")}
        return flops(self.launch.kernel.rsplit(".", 1)[1], call, constants)

    def all_bytes(self) -> int:
        """Return the bytes of all inputs and outputs."""
        return sum(size for _, size in self._arrays())

    def _arrays(self) -> list[tuple[tuple[int, ...], int]]:
        """Return shape and bytes of every input and output."""
        inputs = {id(x): x for x in self.inputs}.values()  # one array may replace several missing inputs
        arrays = [*((x.shape, x.dtype) for x in inputs), *self.launch.outputs]
        return [(shape, math.prod(shape) * _WIDTHS[dtype]) for shape, dtype in arrays]


class Recorder:
    """A backend that records launches instead of running them.

    Args:
        blocks: block by kernel; None, or a missing kernel: its default block.
    """

    def __init__(self, blocks: dict[str, Block] | None = None) -> None:
        self.blocks = blocks or {}
        self.launches = []

    def __call__(self, build: Callable[..., Launch], sizes: dict[str, Any], *inputs: Shape) -> tuple[Shape, ...]:
        """Record a launch and return the shapes of its outputs."""
        launch = build(self.blocks.get(build.__name__, tuning.first(build)), **sizes)
        self.launches.append(Recorded(launch, inputs, build, sizes))
        return tuple(Shape(*output) for output in launch.outputs)

    def cast(self, x: Shape, dtype: str) -> Shape:
        """Return the shape with another type."""
        return Shape(x.shape, dtype)


def launches_of(
    operation: Operation, static: Any, inputs: Sequence[Shape | None], blocks: dict[str, Block] | None = None
) -> list[Recorded]:
    """Return every launch of the forward and backward of an operation, in order.

    Args:
        operation: the operation.
        static: its static arguments.
        inputs: shapes and types of its inputs; None for missing ones.
        blocks: block by kernel; None, or a missing kernel: its default block.
    """
    forward, backward = launches_by_pass(operation, static, inputs, blocks)
    return [*forward, *backward]


def launches_by_pass(
    operation: Operation, static: Any, inputs: Sequence[Shape | None], blocks: dict[str, Block] | None = None
) -> tuple[list[Recorded], list[Recorded]]:
    """Return the launches of the forward of an operation, and those of its backward; arguments as for launches_of."""
    recorder = Recorder(blocks)
    outputs, saved = operation.forward(recorder, static, *inputs)
    after_forward = len(recorder.launches)
    operation.backward(recorder, static, saved, *(Shape(x.shape, x.dtype) for x in outputs))
    return recorder.launches[:after_forward], recorder.launches[after_forward:]


def everything(
    tokens: int = 8192,
    streams: int = 4,
    width: int = 4096,
    dtype: str = "bfloat16",
    rows: str = "int64",
    blocks: dict[str, Block] | None = None,
) -> list[Recorded]:
    """Return all launches of all operations but the delta rule, by default at the sizes of a large model.

    write_streams with dropout comes last.

    Args:
        tokens: number of tokens.
        streams: number of residual streams. S
        width: channels of a stream; activations have 4 * width. D
        dtype: type of streams and activations.
        rows: type of the rows and the step of dropout, int64 in PyTorch and uint32 in JAX.
        blocks: block by kernel; None, or a missing kernel: its default block.
    """
    lead = (tokens,)
    coefficients = wide(dtype)
    columns = streams * (streams + 2)
    x = Shape((*lead, streams, width), dtype)
    y = Shape((*lead, width), dtype)
    h_post = Shape((*lead, streams), coefficients)
    h_res = Shape((*lead, streams, streams), coefficients)
    phi = Shape((streams * width, columns), coefficients)
    alpha = Shape((3,), coefficients)
    row = Shape(lead, rows)
    step = Shape((1,), rows)
    dropout = Write("mix", post=True, bias=True, rate=0.1, seed=1234, site=2)
    write_inputs = [x, h_res, y, Shape((width,), coefficients), h_post]
    no_dropout = [None, None, None]
    options = MappingOptions(20, "row", rms_epsilon=1e-5)
    of_mappings = [x, phi, alpha, Shape((columns,), coefficients)]
    return [
        *launches_of(autodiff_rules.COMPUTE_MAPPINGS, options, of_mappings, blocks),
        *launches_of(autodiff_rules.SINKHORN, options, [h_res], blocks),
        *launches_of(autodiff_rules.AGGREGATE, None, [x, h_post], blocks),
        *launches_of(autodiff_rules.READ_WITH_RESIDUAL, options, of_mappings, blocks),
        *launches_of(autodiff_rules.WRITE, dropout._replace(rate=0.0), [*write_inputs, *no_dropout], blocks),
        *launches_of(autodiff_rules.SWIGLU, None, [Shape((*lead, 8 * width), dtype)], blocks),
        *launches_of(autodiff_rules.GELU, None, [Shape((*lead, 4 * width), dtype)], blocks),
        *launches_of(autodiff_rules.WRITE, dropout, [*write_inputs, row, row, step], blocks),
    ]


def delta_rule(per_channel: bool, *sizes: Any, **more: Any) -> list[Recorded]:
    """Return all launches of the delta rule on one sequence in parts; arguments as for delta_rule_by_pass."""
    forward, backward = delta_rule_by_pass(per_channel, *sizes, **more)
    return [*forward, *backward]


def delta_rule_by_pass(
    per_channel: bool,
    tokens: int = 8192,
    heads: int = 32,
    key: int = 128,
    value: int = 128,
    dtype: str = "bfloat16",
    parts: int = 4,
    blocks: dict[str, Block] | None = None,
    chunk_size: int = 64,
) -> tuple[list[Recorded], list[Recorded]]:
    """Return the launches of the delta rule's forward and of its backward, on one sequence in parts.

    With one decay per head (``per_channel`` is False), two value heads share one head of q and k.

    Args:
        per_channel: True for one decay per channel of the keys (KDA), False for one per head (Gated DeltaNet).
        tokens: number of tokens. T
        heads: number of heads of the values. HV
        key: channels of the keys. K
        value: channels of the values. V
        dtype: type of q, k, v and beta.
        parts: number of parts of the sequence that are scanned in parallel.
        blocks: block by kernel; None, or a missing kernel: its default block.
        chunk_size: tokens of a chunk; 16, 32 or 64. C
    """
    chunks = math.ceil(tokens / chunk_size)
    state_dtype = wide(dtype)
    queries, keys = (Shape((tokens, heads if per_channel else heads // 2, key), dtype) for _ in range(2))
    inputs = [
        queries,
        keys,
        Shape((tokens, heads, value), dtype),
        Shape((tokens, heads, key) if per_channel else (tokens, heads), state_dtype),
        Shape((tokens, heads), dtype),
        Shape((1, heads, key, value), state_dtype),
        *[Shape((count, width), "int32") for count, width in ((chunks, 2), (1, 3), (parts, 3))],
    ]
    return launches_by_pass(DELTA_RULE, DeltaRule(per_channel, key**-0.5, chunk_size, parts=parts), inputs, blocks)


def delta_rule_production(**sizes: Any) -> dict[str, Recorded]:
    """Return one launch per compiled kernel of the delta rule, by name; one decay per channel comes first.

    Args:
        **sizes: arguments of delta_rule besides per_channel.
    """
    named: dict[str, Recorded] = {}
    flags = {"W": "maps", "OUTPUT": "outputs", "SAVE": "states", "BACK": "back"}
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
    """Return the first launch of every kernel of ``everything``, by name.

    Args:
        *sizes: arguments of ``everything``.
        **more: keyword arguments of ``everything``.
    """
    named: dict[str, Recorded] = {}
    for entry in everything(*sizes, **more):
        constants = dict(entry.launch.constants)
        is_of_read = constants.get("AGGREGATE") or constants.get("DX") is False
        label = " (dropout)" if constants.get("THRESHOLD") else " (read)" if is_of_read else ""
        named.setdefault(entry.launch.kernel + label, entry)
    return named


@dataclass(frozen=True)
class Resources:
    """The resources of a compiled kernel.

    Args:
        registers: registers per thread.
        spilled: bytes that a thread stores in or loads from local memory for lack of registers.
        shared: bytes of shared memory per program.
        num_warps: warps per program.
    """

    registers: int
    spilled: int
    shared: int
    num_warps: int


def compile_ahead(recorded: Recorded, capability: int) -> Any:
    """Compile the kernel of a launch ahead of time, with 16-byte aligned pointers.

    Args:
        recorded: the launch and the types of its inputs.
        capability: compute capability, such as 90 for sm_90.

    Returns:
        Triton's compiled kernel; ``asm`` has its intermediate representations.
    """
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
    """Compile the kernel of a launch and return the resources that it uses.

    Args:
        recorded: the launch and the types of its inputs.
        capability: compute capability, such as 90 for sm_90.

    Raises:
        subprocess.CalledProcessError: ptxas rejects the kernel.
    """
    return resources_of(compile_ahead(recorded, capability), capability, recorded.launch.num_warps)


def resources_of(compiled: Any, capability: int, num_warps: int) -> Resources:
    """Return the resources that a kernel uses.

    Args:
        compiled: what triton.compile returned.
        capability: compute capability, such as 90 for sm_90.
        num_warps: warps per program.

    Raises:
        subprocess.CalledProcessError: ptxas rejects the kernel.
    """
    architecture = f"sm_{capability}" + ("a" if capability >= 90 else "")
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(compiled.asm["ptx"])
        file.flush()
        command = [get_ptxas(capability).path, "-v", f"--gpu-name={architecture}", file.name, "-o", "/dev/null"]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = int(re.findall(r"Used (\d+) registers", printed)[-1])
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", printed)))
    return Resources(registers, spilled, compiled.metadata.shared, num_warps)


def programs(used: Resources, capability: int) -> int:
    """Return how many programs of a kernel run on a multiprocessor at once.

    A multiprocessor has 65536 registers, which a warp gets in units of 256, shared memory, of which a program takes
    1 KiB more than it asks for, 64 warps, and room for 32 programs.

    Args:
        used: resources of the kernel.
        capability: compute capability: 80, 90 or 100.

    Raises:
        ValueError: the multiprocessor of this capability is not known.
    """
    if capability not in _SHARED_KIB:
        raise ValueError(f"capability: expected one of {', '.join(map(str, _SHARED_KIB))}, got {capability}")
    warps = 65536 // (math.ceil(used.registers * 32 / 256) * 256)
    by_shared = _SHARED_KIB[capability] * 1024 // (used.shared + 1024)
    return min(warps // used.num_warps, by_shared, 64 // used.num_warps, 32)


def occupancy(used: Resources, capability: int) -> float:
    """Return the fraction of a multiprocessor's 64 warps that can run at once.

    Args:
        used: resources of the kernel.
        capability: compute capability: 80, 90 or 100.
    """
    return programs(used, capability) * used.num_warps / 64
