"""Every kernel on one GPU, from both backends, compared with a memory copy and with liger-kernel.

    python -m benchmarks.kernels                          (make bench-gpu; writes benchmarks/results/<gpu>-<date>.json)
    python -m benchmarks.kernels --tokens 16384 --width 8192
    python -m benchmarks.kernels --interpret --tokens 8 --width 16    (no GPU: times are meaningless)

One run measures everything. First it measures the bandwidth of a large copy. Then it measures each kernel at its
fastest block, and relates the bytes that the kernel must move to this bandwidth. Last it measures complete operations,
forward and backward, and compares them with the eager reference and, if installed, the same formula of liger-kernel.
Times are medians; inputs are random.
"""

import argparse
import importlib.util
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from rich.console import Console
from rich.progress import track
from rich.table import Table

from diptych_kernels import aot as ahead
from diptych_kernels import assembler, tuning
from diptych_kernels import jax_backend as jax_ops
from diptych_kernels import torch_backend as torch_ops
from parity.report import environment
from reference_torch import hyper_connections, ops

RESULTS = Path("benchmarks/results")


def main() -> None:
    """Measure, print the tables, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--width", type=int, default=4096, help="D, the width of each of the 4 residual streams")
    parser.add_argument("--interpret", action="store_true", help="run on the CPU, in Triton's interpreter")
    given = parser.parse_args()
    if not given.interpret and not torch.cuda.is_available():
        raise SystemExit("benchmarks.kernels: expected a CUDA device, got none; pass --interpret to run without one")
    if given.interpret:
        show(Console(), measure(given.tokens, given.width, "cpu"))
        return
    content = measure(given.tokens, given.width, "cuda", partial(save, ""))
    show(Console(), content)
    print(f"written: {save('', content)}")


def save(prefix: str, content: dict[str, Any]) -> Path:
    """Write results to the file of their device and of today, and return its path."""
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    path = RESULTS / f"{prefix}{content['device'].replace(' ', '-').lower()}-{date}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def description(device: str) -> dict[str, Any]:
    """Return device, versions, commit and date of a measurement that has begun."""
    ptxas = assembler.find_newest().version
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "interpreter",
        "environment": environment() | {"triton": triton.__version__, "ptxas": ".".join(map(str, ptxas))},
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "complete": False,
    }


def measure(
    tokens: int, width: int, device: str, saved: Callable[[dict[str, Any]], object] = lambda content: None
) -> dict[str, Any]:
    """Return all rows, with machine, versions and date; ``saved`` is called with the rows so far after each of them."""
    bandwidth = copy_bandwidth(device)
    content = description(device) | {
        "tokens": tokens,
        "streams": 4,
        "width": width,
        "dtype": "bfloat16",
        "copy_bytes_per_second": bandwidth,
        "kernels": [],
        "operations": [],
        "jax": "measured" if has_jax(device) else "absent: no jax-triton, or JAX sees no GPU",
        "liger_kernel": "measured" if liger() else "absent",
    }
    for name, recorded in track(ahead.production(tokens, width=width).items(), "kernels"):
        content["kernels"] += kernel_rows(name, recorded, tokens, device, bandwidth)
        saved(content)
    for row in operation_rows(tokens, width, device):
        content["operations"].append(row)
        saved(content)
    content["complete"] = True
    return content


def commit() -> str:
    """Return the commit of the working tree, or "unknown" outside a repository."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def seconds(function: Callable[[], Any], device: str) -> float:
    """Return the seconds of a call: the median by CUDA events, or one call by the clock on a CPU."""
    if device == "cuda":
        from triton.testing import do_bench

        return do_bench(function, warmup=25, rep=100, return_mode="median") / 1e3
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def copy_bandwidth(device: str) -> float:
    """Return the bytes read and written per second by a copy that exceeds the caches."""
    source = torch.empty(2**30 if device == "cuda" else 2**20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * len(source) / seconds(lambda: target.copy_(source), device)


def random_inputs(recorded: ahead.Recorded, device: str) -> tuple[torch.Tensor, ...]:
    """Return random arrays of the input shapes of a launch; inputs that are one object share one array."""
    made: dict[int, torch.Tensor] = {}
    for x in recorded.inputs:
        dtype = getattr(torch, x.dtype)
        if id(x) not in made and dtype.is_floating_point:
            made[id(x)] = torch.randn(x.shape, device=device).to(dtype)
        elif id(x) not in made:
            made[id(x)] = torch.randint(0, 2**31, x.shape, device=device, dtype=dtype)
    return tuple(made[id(x)] for x in recorded.inputs)


def kernel_rows(
    name: str, recorded: ahead.Recorded, tokens: int, device: str, bandwidth: float
) -> list[dict[str, Any]]:
    """Measure a kernel at its fastest block, with every available backend."""
    inputs = random_inputs(recorded, device)
    block = tuning.first(recorded.build)
    if device == "cuda":
        name_of_device = torch.cuda.get_device_name()
        measured = partial(torch_ops.measure, inputs=inputs)
        block = tuning.choose(recorded.build, recorded.sizes, name_of_device, measured)
    launch = recorded.build(block, **recorded.sizes)
    times = {"torch": seconds(lambda: torch_ops.run(launch, inputs), device)}
    if has_jax(device):
        short = {} if device == "cuda" else {"repeats": 1, "rounds": 3}
        times["jax"] = jax_ops.measure(launch, inputs, **short)
    moved = recorded.ideal_bytes(tokens) * tokens or recorded.all_bytes()  # a sum has no row per token
    return [
        {
            "kernel": name,
            "backend": backend,
            "block": list(block),
            "microseconds": time * 1e6,
            "ideal_bytes": moved,
            "share_of_copy": moved / time / bandwidth,
        }
        for backend, time in times.items()
    ]


def has_jax(device: str) -> bool:
    """Return True if JAX can run the kernels on this device."""
    import jax

    return device == "cpu" or (jax_ops.jax_triton() is not None and jax.default_backend() != "cpu")


def liger() -> Any | None:
    """Return the functions of liger-kernel, or None if it is not installed."""
    if importlib.util.find_spec("liger_kernel") is None or not torch.cuda.is_available():
        return None
    from liger_kernel.transformers import functional

    return functional


def operation_rows(tokens: int, width: int, device: str) -> Iterator[dict[str, Any]]:
    """Measure operations with kernels, with the eager reference and with liger-kernel."""
    random = partial(torch.randn, device=device)
    x = random(1, tokens, 4, width).bfloat16()
    y = random(1, tokens, width).bfloat16()
    both = random(tokens, 8 * width).bfloat16()
    phi = random(4 * width, 24) / (4 * width) ** 0.5
    alpha = torch.full((3,), 0.1, device=device)
    bias = random(24)
    h_pre = torch.rand(1, tokens, 4, device=device)
    h_res = torch.rand(1, tokens, 4, 4, device=device)
    peer = liger()
    operations: dict[str, tuple[list[torch.Tensor], Callable, Callable, Callable | None]] = {
        "compute_mappings": (
            [x, phi, alpha, bias],
            torch_ops.compute_mappings,
            partial(hyper_connections.compute_mappings, impl="reference"),
            peer and (lambda x, p, a, b: peer.liger_mhc_coeffs(x, p.to(x.dtype), b, a[0], a[1], a[2])),
        ),
        "aggregate": (
            [x, h_pre],
            torch_ops.aggregate,
            partial(hyper_connections.aggregate, impl="reference"),
            peer and peer.liger_mhc_pre,
        ),
        "write_streams": (
            [x, h_res, y, h_pre],
            lambda x, m, y, h: torch_ops.write_streams(x, m, y, None, h),
            lambda x, m, y, h: hyper_connections.write_streams(x, m, y, None, h, impl="reference"),
            peer and (lambda x, m, y, h: peer.liger_mhc_post_res(x, y, h, m)),
        ),
        "read_streams and write_streams": (
            [x, phi, alpha, bias, y],
            partial(_connection, torch_ops.read_streams, torch_ops.write_streams),
            partial(
                _connection,
                partial(hyper_connections.read_streams, impl="reference"),
                partial(hyper_connections.write_streams, impl="reference"),
            ),
            peer and partial(_liger_connection, peer),
        ),
        "swiglu": (
            [both],
            torch_ops.swiglu,
            partial(ops.swiglu, impl="reference"),
            peer and (lambda x: peer.liger_swiglu(*x.chunk(2, -1))),
        ),
    }
    names = ("kernels", "eager reference", "liger-kernel")
    for name, (arrays, *functions) in track(operations.items(), "operations"):
        implementations = {who: function for who, function in zip(names, functions, strict=True) if function}
        yield from compare_implementations(name, implementations, arrays, device)


def _connection(
    read: Callable[..., Any],
    write: Callable[..., Any],
    x: torch.Tensor,
    phi: torch.Tensor,
    alpha: torch.Tensor,
    bias: torch.Tensor,
    y: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the input of a sublayer and the streams after its output y: all of mHC around a sublayer."""
    aggregated, h_post, h_res, residual = read(x, phi, alpha, bias)
    return aggregated, write(residual, h_res, y, None, h_post)


def _liger_connection(
    peer: Any, x: torch.Tensor, phi: torch.Tensor, alpha: torch.Tensor, bias: torch.Tensor, y: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same as _connection, by liger-kernel."""
    h_pre, h_post, h_res = peer.liger_mhc_coeffs(x, phi.to(x.dtype), bias, alpha[0], alpha[1], alpha[2])
    return peer.liger_mhc_pre(x, h_pre), peer.liger_mhc_post_res(x, y, h_post, h_res)


def compare_implementations(
    name: str, implementations: dict[str, Callable], arrays: list[torch.Tensor], device: str
) -> list[dict[str, Any]]:
    """Measure the implementations of an operation, forward alone and with backward."""
    timed: dict[str, dict[str, float]] = {who: {} for who in implementations}
    failed = {}
    for who, function in implementations.items():
        try:
            for direction, time_taken in time_directions(function, arrays, device):
                timed[who][direction] = time_taken
        except Exception as error:  # another library may refuse this device; its kernels raise exceptions of any type
            if who == "kernels":
                raise
            failed[who] = f"{type(error).__name__}: {error}"[:300]
    rows = []
    for direction in ("forward", "forward and backward"):
        taken = {who: times[direction] for who, times in timed.items() if direction in times}
        rows.append(
            {
                "operation": name,
                "direction": direction,
                "microseconds": {who: t * 1e6 for who, t in taken.items()},
                "speed_relative_to": {who: t / taken["kernels"] for who, t in taken.items() if who != "kernels"},
                "failed": failed,
            }
        )
    return rows


def time_directions(function: Callable, arrays: list[torch.Tensor], device: str) -> Iterator[tuple[str, float]]:
    """Yield the direction and seconds of forward, and of forward with the gradients of all inputs."""
    leaves = [x.detach().requires_grad_() for x in arrays]
    with torch.no_grad():
        outputs = function(*arrays)
        forward = seconds(lambda: function(*arrays), device)
    yield "forward", forward
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    cotangents = [torch.randn_like(o) for o in outputs]

    def both() -> None:
        results = function(*leaves)
        torch.autograd.grad(results if isinstance(results, tuple) else (results,), leaves, cotangents)

    yield "forward and backward", seconds(both, device)


def show(console: Console, content: dict[str, Any]) -> None:
    """Print two tables."""
    size = f"{content['tokens']} tokens, S = 4, D = {content['width']}, {content['dtype']}"
    copied = f"a copy moves {content['copy_bytes_per_second'] / 1e9:,.0f} GB/s"
    table = Table("kernel", "backend", "µs", "of copy", title=f"{content['device']}: {size}; {copied}")
    for row in content["kernels"]:
        table.add_row(row["kernel"], row["backend"], f"{row['microseconds']:,.1f}", f"{row['share_of_copy']:.0%}")
    console.print(table)
    table = Table("operation", "direction", "µs", "× eager", "× liger-kernel")
    for row in content["operations"]:
        ratios = (row["speed_relative_to"].get(who) for who in ("eager reference", "liger-kernel"))
        cells = ("absent" if ratio is None else f"{ratio:.2f}" for ratio in ratios)
        table.add_row(row["operation"], row["direction"], f"{row['microseconds']['kernels']:,.1f}", *cells)
    console.print(table)
    console.print(f"jax: {content['jax']}; liger-kernel: {content['liger_kernel']}")


if __name__ == "__main__":
    main()
