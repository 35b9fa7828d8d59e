"""Every kernel on one GPU, from both backends, beside a copy of memory and beside its peers.

    python -m benchmarks.kernels                          (make bench-gpu; writes benchmarks/results/<gpu>-<date>.json)
    python -m benchmarks.kernels --tokens 16384 --width 8192
    python -m benchmarks.kernels --interpret --tokens 8 --width 16    (no GPU: tries the benchmark, times mean nothing)

All of it in one run: the bandwidth of a large copy, then each kernel at its fastest block, as time and as a share of
that bandwidth at the bytes it must move; then whole operations, forward and backward, beside the eager reference and
liger-kernel's of the same formula, where installed. Times are medians; inputs are random.
"""

import argparse
import importlib.util
import json
import subprocess
import time
from collections.abc import Callable
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
from diptych_kernels import jax_backend as jax_ops
from diptych_kernels import torch_backend as torch_ops
from diptych_kernels import tuning
from parity.report import environment
from reference_torch import hyper_connections, ops

RESULTS = Path("benchmarks/results")


def main() -> None:
    """Measure, show, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--width", type=int, default=4096, help="D, of one of 4 residual streams")
    parser.add_argument("--interpret", action="store_true", help="run on the CPU, in Triton's interpreter")
    given = parser.parse_args()
    if not given.interpret and not torch.cuda.is_available():
        raise SystemExit("benchmarks.kernels: expected a CUDA device, got none; --interpret tries it without")
    content = measure(given.tokens, given.width, "cpu" if given.interpret else "cuda")
    show(Console(), content)
    if not given.interpret:
        date = datetime.now(UTC).strftime("%Y-%m-%d")
        path = RESULTS / f"{content['device'].replace(' ', '-').lower()}-{date}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")
        print(f"written: {path}")


def measure(tokens: int, width: int, device: str) -> dict[str, Any]:
    """All rows, with where and when they were measured."""
    bandwidth = copy_bandwidth(device)
    rows = []
    for name, recorded in track(ahead.production(tokens, width=width).items(), "kernels"):
        rows += kernel_rows(name, recorded, tokens, device, bandwidth)
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "interpreter",
        "environment": environment() | {"triton": triton.__version__},
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "tokens": tokens,
        "streams": 4,
        "width": width,
        "dtype": "bfloat16",
        "copy_bytes_per_second": bandwidth,
        "kernels": rows,
        "operations": operation_rows(tokens, width, device),
        "jax": "measured"
        if any(row["backend"] == "jax" for row in rows)
        else "absent: no jax-triton, or JAX sees no GPU",
        "liger_kernel": "measured" if liger() else "absent",
    }


def commit() -> str:
    """Of the working tree; unknown outside a repository."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def seconds(function: Callable[[], Any], device: str) -> float:
    """Median time of a call: by events on a GPU, by the clock elsewhere."""
    if device == "cuda":
        from triton.testing import do_bench

        return do_bench(function, warmup=25, rep=100, return_mode="median") / 1e3
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def copy_bandwidth(device: str) -> float:
    """Bytes read and written a second by a copy many times the cache."""
    source = torch.empty(2**30 if device == "cuda" else 2**20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * len(source) / seconds(lambda: target.copy_(source), device)


def random_inputs(recorded: ahead.Recorded, device: str) -> tuple[torch.Tensor, ...]:
    """Arrays of a launch's input shapes; one array where one stands in for others."""
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
    """One kernel at its fastest block, from the backends that are there."""
    inputs = random_inputs(recorded, device)
    block = tuning.first(recorded.build)
    if device == "cuda":
        name_of_device = torch.cuda.get_device_name()
        measured = partial(torch_ops.measure, inputs=inputs)
        block = tuning.choose(recorded.build, recorded.sizes, name_of_device, measured)
    launch = recorded.build(block, **recorded.sizes)
    times = {"torch": seconds(lambda: torch_ops.run(launch, inputs), device)}
    if jax_is_there(device):
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


def jax_is_there(device: str) -> bool:
    """Whether JAX can run what PyTorch runs."""
    import jax

    return device == "cpu" or (jax_ops.jax_triton() is not None and jax.default_backend() != "cpu")


def liger() -> Any | None:
    """liger-kernel's functions, or None where it is not installed."""
    if importlib.util.find_spec("liger_kernel") is None or not torch.cuda.is_available():
        return None
    from liger_kernel.transformers import functional

    return functional


def operation_rows(tokens: int, width: int, device: str) -> list[dict[str, Any]]:
    """Whole operations, forward, and forward with backward: kernels, eager reference, liger-kernel."""
    random = partial(torch.randn, device=device)
    x = random(1, tokens, 4, width).bfloat16()
    y, both = random(1, tokens, width).bfloat16(), random(tokens, 8 * width).bfloat16()
    phi, alpha, bias = random(4 * width, 24) / (4 * width) ** 0.5, torch.full((3,), 0.1, device=device), random(24)
    h_pre, h_res = torch.rand(1, tokens, 4, device=device), torch.rand(1, tokens, 4, 4, device=device)
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
        "swiglu": (
            [both],
            torch_ops.swiglu,
            partial(ops.swiglu, impl="reference"),
            peer and (lambda x: peer.liger_swiglu(*x.chunk(2, -1))),
        ),
    }
    rows, names = [], ("kernels", "eager reference", "liger-kernel")
    for name, (arrays, *functions) in track(operations.items(), "operations"):
        contestants = {who: function for who, function in zip(names, functions, strict=True) if function}
        rows += compared(name, contestants, arrays, device)
    return rows


def compared(
    name: str, contestants: dict[str, Callable], arrays: list[torch.Tensor], device: str
) -> list[dict[str, Any]]:
    """Measure an operation, forward alone and with backward, for ``kernels`` and for the others."""
    timed = {who: directions(function, arrays, device) for who, function in contestants.items()}
    rows = []
    for direction in ("forward", "forward and backward"):
        taken = {who: times[direction] for who, times in timed.items()}
        rows.append(
            {
                "operation": name,
                "direction": direction,
                "microseconds": {who: t * 1e6 for who, t in taken.items()},
                "speed_relative_to": {who: t / taken["kernels"] for who, t in taken.items() if who != "kernels"},
            }
        )
    return rows


def directions(function: Callable, arrays: list[torch.Tensor], device: str) -> dict[str, float]:
    """Seconds of the function alone, and with all its gradients."""
    leaves = [x.detach().requires_grad_() for x in arrays]
    with torch.no_grad():
        outputs = function(*arrays)
        forward = seconds(lambda: function(*arrays), device)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    cotangents = [torch.randn_like(o) for o in outputs]

    def both() -> None:
        results = function(*leaves)
        torch.autograd.grad(results if isinstance(results, tuple) else (results,), leaves, cotangents)

    return {"forward": forward, "forward and backward": seconds(both, device)}


def show(console: Console, content: dict[str, Any]) -> None:
    """Two short tables."""
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
