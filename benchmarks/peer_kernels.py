"""Kernels of flash-linear-attention and Liger, compiled ahead of time and estimated like ours, without a GPU.

python -m benchmarks.peer_kernels            (make kernels-report: installs the libraries and prints the tables)

The operations of these libraries run on tensors without storage (PyTorch's meta device). Instead of being launched,
each kernel is recorded with its arguments. Then all configurations between which the library's autotuner chooses are
compiled for sm_90, and the one with the shortest estimate stands for the kernel. It takes about ten minutes.
"""

import inspect
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton
from rich.console import Console
from rich.progress import track
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from diptych_kernels import aot as ahead
from diptych_kernels.launch_times import CYCLES, CYCLES_WITH_BARRIERS, GPUS, Counted
from diptych_kernels.machine_code import MachineCode, machine_code

CAPABILITY = 90
TOKENS = 8192
STREAMS = 4
WIDTH = 4096
CHANNELS = 128
OVERWRITTEN = {"_swiglu_backward_kernel": ("a_ptr", "b_ptr")}
"""Arguments that a kernel reads and overwrites, by kernel."""
MOST_SPILLED = 1024
"""Bytes per thread; the estimate does not know what spilling more costs."""
_TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64", torch.bool: "i1"}


class PeerLaunch(NamedTuple):
    """A launch of another library's kernel.

    Args:
        kernel: the Triton function.
        arguments: value of each of its arguments, also of constants.
        grid: number of programs along each axis.
        options: num_warps and num_stages.
    """

    kernel: JITFunction
    arguments: dict[str, Any]
    grid: tuple[int, ...]
    options: dict[str, int]


@contextmanager
def recorded() -> Iterator[list[list[PeerLaunch]]]:
    """Record kernels instead of launching them; yields a list with the candidates of each launch."""
    found: list[list[PeerLaunch]] = []
    of_autotuner: list[PeerLaunch] | None = None

    def run(kernel: JITFunction, *args: Any, grid: Any, warmup: bool = False, **more: Any) -> None:
        options = {"num_warps": more.pop("num_warps", 4), "num_stages": more.pop("num_stages", 3)}
        more = {name: value for name, value in more.items() if name in kernel.arg_names}
        bound = inspect.signature(kernel.fn).bind(*args, **more)
        bound.apply_defaults()
        arguments = dict(bound.arguments)
        sizes = grid(arguments) if callable(grid) else grid
        launch = PeerLaunch(kernel, arguments, tuple(sizes), options)
        if of_autotuner is None:
            found.append([launch])
        else:
            of_autotuner.append(launch)

    def tune(tuner: Autotuner, *args: Any, **more: Any) -> None:
        nonlocal of_autotuner
        of_autotuner = []
        tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
        for config in tuner.prune_configs(more):
            tuner.fn.run(*args, **{**more, **config.all_kwargs()})
        found.append(of_autotuner)
        of_autotuner = None

    before = JITFunction.run, Autotuner.run
    JITFunction.run, Autotuner.run = run, tune  # type: ignore[method-assign]
    try:
        yield found
    finally:
        JITFunction.run, Autotuner.run = before  # type: ignore[method-assign]


def compile_launch(launch: PeerLaunch) -> Any:
    """Compile the kernel of a launch as its library would on an H100."""
    kernel = launch.kernel
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        value = launch.arguments[parameter.name]
        signature[parameter.name], constant, is_aligned = _argument(value, parameter)
        if constant:
            constants[(place,)] = value
        elif is_aligned:
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32), options=launch.options)


def _argument(value: Any, parameter: Any) -> tuple[str, bool, bool]:
    """Return the type of an argument, whether it is a constant, and whether it is a multiple of 16."""
    if parameter.is_constexpr or value is None or (value == 1 if isinstance(value, int) else False):
        return "constexpr", True, False
    if isinstance(value, torch.Tensor):
        return "*" + _TYPES[value.dtype], False, True
    if isinstance(value, bool):
        return "i1", False, False
    if isinstance(value, int):
        return "i32" if value < 2**31 else "i64", False, value % 16 == 0 and not parameter.do_not_specialize
    return "fp32", False, False


def moved_bytes(launch: PeerLaunch) -> int:
    """Return the bytes of all tensors of a launch; twice those of a tensor that it reads and overwrites."""
    again = [launch.arguments[name] for name in OVERWRITTEN.get(launch.kernel.fn.__name__, ())]
    tensors = {id(value): value for value in launch.arguments.values() if isinstance(value, torch.Tensor)}
    return sum(tensor.numel() * tensor.element_size() for tensor in (*tensors.values(), *again))


def loop_values(launch: PeerLaunch) -> dict[str, int]:
    """Return the values of the names in the bounds of loops, for a program in the middle of a chunk.

    Other names than those of arguments are fla's: the number of chunks, and indices of a program's tile and token.
    """
    values = {name: value for name, value in launch.arguments.items() if isinstance(value, int)}
    values["NT"] = math.ceil(TOKENS / values.get("BT", 64))
    values |= {"i_i": 2, "i_ts": 0, "i_t": values.get("BC", 16) // 2} | {f"i_tc{tile}": 0 for tile in range(4)}
    return values


class Peer(NamedTuple):
    """A kernel of another library.

    Args:
        name: of its function.
        counted: what its estimate needs.
        code: its machine code.
        resources: what it uses.
    """

    name: str
    counted: Counted
    code: MachineCode
    resources: ahead.Resources


def estimated(candidates: list[PeerLaunch]) -> Peer:
    """Return the candidate of a launch with the shortest estimate on an H100."""
    peers = [peer for peer in map(_estimated, candidates) if peer is not None]
    return min(peers, key=lambda peer: peer.counted.on(GPUS["H100"]).seconds)


def _estimated(launch: PeerLaunch) -> Peer | None:
    """Return what a candidate uses and executes; None if it does not fit a multiprocessor or spills a lot."""
    compiled = compile_launch(launch)
    code = machine_code(compiled)
    used = ahead.resources_of(compiled, CAPABILITY, launch.options["num_warps"])
    resident = ahead.programs(used, CAPABILITY)
    if not resident or used.spilled > MOST_SPILLED:
        return None
    counted = Counted(
        moved_bytes(launch),
        code.executed(loop_values(launch)),
        used.num_warps,
        math.prod(launch.grid),
        resident,
        CYCLES_WITH_BARRIERS if code.barriers else CYCLES,
    )
    return Peer(launch.kernel.fn.__name__, counted, code, used)


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)


def kda(heads: int) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Return the call of fla's chunk_kda on one sequence."""
    from fla.ops.kda import chunk_kda

    q, k, v = (_meta(1, TOKENS, heads, CHANNELS) for _ in range(3))
    g = _meta(1, TOKENS, heads, CHANNELS, dtype=torch.float32)
    beta = _meta(1, TOKENS, heads)
    initial = _meta(1, heads, CHANNELS, CHANNELS, dtype=torch.float32)
    return lambda: chunk_kda(q, k, v, g, beta, initial_state=initial, output_final_state=True)


def gdn(heads: int) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Return the call of fla's chunk_gated_delta_rule on one sequence, with two value heads per key head."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    q, k = (_meta(1, TOKENS, heads // 2, CHANNELS) for _ in range(2))
    v = _meta(1, TOKENS, heads, CHANNELS)
    g = _meta(1, TOKENS, heads, dtype=torch.float32)
    beta = _meta(1, TOKENS, heads)
    initial = _meta(1, heads, CHANNELS, CHANNELS, dtype=torch.float32)
    return lambda: chunk_gated_delta_rule(q, k, v, g, beta, initial_state=initial, output_final_state=True)


def swiglu() -> Callable[[], tuple[torch.Tensor, ...]]:
    """Return the call of Liger's SwiGLU."""
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    gate, up = (_meta(TOKENS, 4 * WIDTH) for _ in range(2))
    return lambda: (LigerSiLUMulFunction.apply(gate, up),)


def hyper_connection() -> Callable[[], tuple[torch.Tensor, ...]]:
    """Return the call of Liger's hyper-connection around a sublayer whose output is given."""
    from liger_kernel.transformers import functional

    x = _meta(TOKENS, STREAMS, WIDTH)
    y = _meta(TOKENS, WIDTH)
    phi = _meta(STREAMS * WIDTH, STREAMS * (STREAMS + 2))
    bias = _meta(STREAMS * (STREAMS + 2), dtype=torch.float32)
    alpha = [_meta(dtype=torch.float32) for _ in range(3)]

    def call() -> tuple[torch.Tensor, ...]:
        h_pre, h_post, h_res = functional.liger_mhc_coeffs(x, phi, bias, *alpha)
        return functional.liger_mhc_pre(x, h_pre), functional.liger_mhc_post_res(x, y, h_post, h_res)

    return call


OPERATIONS: dict[str, Callable[[], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "KDA, 64 heads": lambda: kda(64),
    "KDA, 32 heads": lambda: kda(32),
    "GDN, 32 heads": lambda: gdn(32),
    "hyper-connection, 4 streams": hyper_connection,
    "SwiGLU": swiglu,
}


def launches(call: Callable[[], tuple[torch.Tensor, ...]]) -> tuple[list[list[PeerLaunch]], list[list[PeerLaunch]]]:
    """Return the launches of an operation's forward, and those of its backward."""
    with recorded() as found:
        outputs = [output for output in call() if output is not None]
        after_forward = len(found)
        torch.autograd.backward(outputs, [torch.empty_like(output) for output in outputs])
    return found[:after_forward], found[after_forward:]


def main() -> None:
    """Print the kernels of every operation, with their estimates."""
    warnings.simplefilter("ignore")
    console = Console(width=140)
    for name, make in OPERATIONS.items():
        for way, found in zip(("forward", "backward"), launches(make()), strict=True):
            peers = [estimated(candidates) for candidates in track(found, f"{name}, {way}", transient=True)]
            console.print(_table(f"{name}, {way}", peers))


def _table(title: str, peers: list[Peer]) -> Table:
    table = Table(title=title)
    for column in ("kernel", "registers / spilled / shared", "programs", "instructions (in loops)", "H100 µs", "limit"):
        table.add_column(column, no_wrap=True)
    total = 0.0
    for peer in peers:
        time = peer.counted.on(GPUS["H100"])
        total += time.seconds
        used = peer.resources
        table.add_row(
            peer.name,
            f"{used.registers} / {used.spilled} / {used.shared}",
            str(peer.counted.resident),
            f"{peer.code.instructions:,} ({peer.code.in_loops:,})",
            f"{time.seconds * 1e6:.0f}",
            time.limit,
        )
    table.add_row("sum", "", "", "", f"{total * 1e6:.0f}", "")
    return table


if __name__ == "__main__":
    main()
