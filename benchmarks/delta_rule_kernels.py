"""Kernels of the delta rule on one GPU, compared with the roofline, the reference and flash-linear-attention.

    python -m benchmarks.delta_rule_kernels     (make bench-gpu; writes benchmarks/results/delta-rule-<gpu>-<date>.json)
    python -m benchmarks.delta_rule_kernels --tokens 65536 --heads 4
    python -m benchmarks.delta_rule_kernels --interpret --tokens 20 --heads 2 --width 16    (no GPU: times mean nothing)

One run measures everything. First it measures the bandwidth of a large copy and the rate of a large matrix product.
Then it measures each kernel at its fastest block. The roofline is the larger of two times, that of the kernel's bytes
at this bandwidth and that of its operations at this rate. Last it measures KDA and GDN, forward alone and with
backward, and compares them with the chunked reference and, if installed, fla-core. Times are medians; inputs are
random.
"""

import argparse
import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.kernels import (
    compare_implementations,
    copy_bandwidth,
    description,
    has_jax,
    random_inputs,
    save,
    seconds,
)
from diptych_kernels import aot as ahead
from diptych_kernels import jax_backend as jax_ops
from diptych_kernels import torch_backend as torch_ops
from diptych_kernels import tuning
from reference_torch.delta_rule import chunk_gated_delta_rule, chunk_kda


def main() -> None:
    """Measure, print the tables, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--width", type=int, default=128, help="K and V")
    parser.add_argument("--interpret", action="store_true", help="run on the CPU, in Triton's interpreter")
    given = parser.parse_args()
    if not given.interpret and not torch.cuda.is_available():
        raise SystemExit(
            "benchmarks.delta_rule_kernels: expected a CUDA device, got none; pass --interpret to run without one"
        )
    if given.interpret:
        show(Console(), measure(given.tokens, given.heads, given.width, "cpu"))
        return
    content = measure(given.tokens, given.heads, given.width, "cuda", partial(save, "delta-rule-"))
    show(Console(), content)
    print(f"written: {save('delta-rule-', content)}")


def measure(
    tokens: int, heads: int, width: int, device: str, saved: Callable[[dict[str, Any]], object] = lambda content: None
) -> dict[str, Any]:
    """Return all rows, with machine, versions and date; ``saved`` is called with the rows so far after each of them."""
    roofline = copy_bandwidth(device), product_rate(device)
    recorded = ahead.delta_rule_production(tokens=tokens, heads=heads, key=width, value=width)
    content = description(device) | {
        "tokens": tokens,
        "heads": heads,
        "key": width,
        "value": width,
        "dtype": "bfloat16",
        "copy_bytes_per_second": roofline[0],
        "product_flops_per_second": roofline[1],
        "kernels": [],
        "operations": [],
        "fla_core": "absent" if fla() is None else importlib.import_module("fla").__version__,
    }
    for name, entry in track(recorded.items(), "kernels"):
        content["kernels"] += kernel_rows(name, entry, device, roofline)
        saved(content)
    for row in operation_rows(tokens, heads, width, device):
        content["operations"].append(row)
        saved(content)
    content["maps_relative_to_forward"] = pre_process_shares(content["kernels"], content["operations"])
    content["complete"] = True
    return content


def product_rate(device: str) -> float:
    """Return the FLOPs per second of a large bfloat16 product."""
    size = 8192 if device == "cuda" else 128
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    return 2 * size**3 / seconds(lambda: a @ b, device)


def kernel_rows(
    name: str, recorded: ahead.Recorded, device: str, roofline: tuple[float, float]
) -> list[dict[str, Any]]:
    """Measure a kernel at its fastest block, with every available backend."""
    inputs = tables_in(random_inputs(recorded, device), recorded)
    block = tuning.first(recorded.build)
    if device == "cuda":
        choose = partial(tuning.choose, recorded.build, recorded.sizes, torch.cuda.get_device_name())
        block = choose(partial(torch_ops.measure, inputs=inputs))
    launch = recorded.build(block, **recorded.sizes)
    times = {"torch": seconds(lambda: torch_ops.run(launch, inputs), device)}
    if device == "cuda" and has_jax(device):
        times["jax"] = jax_ops.measure(launch, inputs)
    moved = recorded.all_bytes()
    multiplied = recorded.flops()
    least = max(moved / roofline[0], multiplied / roofline[1])
    return [
        {
            "kernel": name,
            "backend": backend,
            "block": list(block),
            "microseconds": time * 1e6,
            "bytes": moved,
            "flops": multiplied,
            "share_of_roofline": least / time,
        }
        for backend, time in times.items()
    ]


def tables_in(inputs: tuple[torch.Tensor, ...], recorded: ahead.Recorded) -> tuple[torch.Tensor, ...]:
    """Replace random integers by valid tables of one segmented sequence, and make log decays at most 0."""
    call = recorded.sizes["call"]
    starts = torch.arange(call.chunks) * call.chunk_size
    chunks = torch.stack([starts, (starts + call.chunk_size).clamp(max=call.tokens)], -1)
    found = []
    for x in inputs:
        if x.dtype == torch.int32 and x.shape[1] == 2:
            x = chunks.to(x)
        elif x.dtype == torch.int32:
            each = -(-call.chunks // len(x))
            first = torch.arange(len(x)) * each
            ends = [(number * call.chunk_size).clamp(max=call.tokens) for number in (first, first + each)]
            x = torch.stack([*ends, first], -1).to(x)
        found.append(-x.abs() / 32 if x.is_floating_point() else x)
    return tuple(found)


def fla() -> Any | None:
    """Return the functions of fla-core by name, or None if it is not installed."""
    if importlib.util.find_spec("fla") is None or not torch.cuda.is_available():
        return None
    kda, gdn = (importlib.import_module(f"fla.ops.{name}") for name in ("kda", "gated_delta_rule"))
    return {"kda": kda.chunk_kda, "gdn": gdn.chunk_gated_delta_rule}


def operation_rows(tokens: int, heads: int, width: int, device: str) -> Iterator[dict[str, Any]]:
    """Measure KDA and GDN with kernels, with the reference and with fla-core."""
    fla_core = fla()
    for name, rule in track({"kda": chunk_kda, "gdn": chunk_gated_delta_rule}.items(), "operations"):
        arrays = arguments(name, tokens, heads, width, device)
        implementations: dict[str, Callable] = {
            "kernels": lambda *a, rule=rule: rule(*a, impl="triton")[0],
            "reference": lambda *a, rule=rule: rule(*a, impl="reference")[0],
        }
        if fla_core is not None:
            implementations["fla-core"] = lambda *a, name=name: fla_core[name](*a)[0]
        yield from compare_implementations(name, implementations, arrays, device)


def pre_process_shares(kernels: list[dict[str, Any]], operations: list[dict[str, Any]]) -> dict[str, float]:
    """Return the time of the scan that precedes the state exchange of a context rank, relative to forward."""
    maps = {"kda": "scan.scan_forward (maps)", "gdn": "scan.scan_forward (one decay, maps)"}
    forward = {row["operation"]: row["microseconds"]["kernels"] for row in operations if row["direction"] == "forward"}
    times = {row["kernel"]: row["microseconds"] for row in kernels if row["backend"] == "torch"}
    return {name: times[kernel] / forward[name] for name, kernel in maps.items()}


def arguments(name: str, tokens: int, heads: int, width: int, device: str) -> list[torch.Tensor]:
    """Return random q, k, v, g and beta."""
    q, k, v = (torch.randn(1, tokens, heads, width, device=device) for _ in range(3))
    decay = (1, tokens, heads, width) if name == "kda" else (1, tokens, heads)
    g = -torch.rand(decay, device=device)
    beta = torch.rand(1, tokens, heads, device=device)
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    return [q.bfloat16(), k.bfloat16(), v.bfloat16(), g, beta.bfloat16()]


def show(console: Console, content: dict[str, Any]) -> None:
    """Print two tables."""
    size = f"{content['tokens']} tokens, {content['heads']} heads, K = V = {content['key']}, {content['dtype']}"
    rates = f"a copy {content['copy_bytes_per_second'] / 1e9:,.0f} GB/s, a product "
    rates += f"{content['product_flops_per_second'] / 1e12:,.1f} TFLOP/s"
    table = Table("kernel", "backend", "µs", "of roofline", title=f"{content['device']}: {size}; {rates}")
    for row in content["kernels"]:
        table.add_row(row["kernel"], row["backend"], f"{row['microseconds']:,.1f}", f"{row['share_of_roofline']:.0%}")
    console.print(table)
    table = Table("operation", "direction", "µs", "× reference", "× fla-core")
    for row in content["operations"]:
        ratios = (row["speed_relative_to"].get(who) for who in ("reference", "fla-core"))
        cells = ("absent" if ratio is None else f"{ratio:.2f}" for ratio in ratios)
        table.add_row(row["operation"], row["direction"], f"{row['microseconds']['kernels']:,.1f}", *cells)
    console.print(table)


if __name__ == "__main__":
    main()
