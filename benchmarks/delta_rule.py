"""Chunked and recurrent delta rule: time, growth with the sequence length, and memory saved for backward.

    python -m benchmarks.delta_rule           (make bench NAME=delta_rule)

Each step is forward and backward of one sequence of B=1, H=4, K=V=64 in float32 on one thread. The recurrence is
``recurrent_*`` of this project, a loop over unbound tokens in PyTorch and a scan in JAX. A second PyTorch loop computes
its products by einsum. Beside GDN in PyTorch run two chunked forms in plain PyTorch that others use without a GPU: the
fallback of transformers (Qwen3-Next), if installed, and naive_chunk_gated_delta_rule of flash-linear-attention, if
FLA_CORE names the folder of its sources (``pip install --no-deps --target FOLDER fla-core einops``), because on a CPU
the package cannot be imported. The variants run in alternation, and times are medians.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

import importlib.util
import json
import runpy
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import matplotlib.pyplot as plt
import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import jax_impl.delta_rule
import reference_torch.delta_rule
from parity.report import environment

HEADS = 4
WIDTH = 64
LENGTH = 4096
FLA_CORE = os.environ.get("FLA_CORE")
TURNS = 5
LENGTHS = tuple(2**n for n in range(10, 16))
RULES = {"KDA": "kda", "GDN": "gated_delta_rule"}
RESULT = Path("benchmarks/results/delta_rule-cpu.json")
PICTURE = Path("docs/images/delta_rule.png")
MIB = 2**20

Step = Callable[[], Any]
"""A function that runs one forward and backward."""


def arrays(rule: str, length: int) -> list[np.ndarray]:
    """Return random q, k, v, g and beta: unit queries and keys, log decays of 0.1 to 2 per token, beta in (0, 1)."""
    draw = np.random.default_rng(0)
    q, k, v = draw.standard_normal((3, 1, length, HEADS, WIDTH))
    g = -np.log1p(np.exp(draw.standard_normal((1, length, HEADS, WIDTH) if rule == "KDA" else (1, length, HEADS))))
    beta = draw.uniform(size=(1, length, HEADS))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    return [x.astype(np.float32) for x in (q, k, v, g, beta)]


def torch_step(rule: str, form: str, length: int, **options: Any) -> Step:
    """Return a step in PyTorch."""
    function = getattr(reference_torch.delta_rule, f"{form}_{RULES[rule]}")
    inputs = [torch.from_numpy(x).requires_grad_() for x in arrays(rule, length)]
    cotangent = torch.from_numpy(arrays(rule, length)[2])
    return lambda: torch.autograd.grad(function(*inputs, **options)[0], inputs, cotangent)


def einsum_step(rule: str, length: int) -> Step:
    """Return a step of the PyTorch recurrence: a loop over unbound tokens, with products by torch.einsum."""
    inputs = [torch.from_numpy(x).requires_grad_() for x in arrays(rule, length)]
    cotangent = torch.from_numpy(arrays(rule, length)[2])

    def step() -> Any:
        q, k, v, g, beta = inputs
        decay = (g if rule == "KDA" else g[..., None]).exp()
        state = torch.zeros(1, HEADS, WIDTH, WIDTH)
        outputs = []
        tokens = (x.unbind(1) for x in (q * WIDTH**-0.5, k, v, decay, beta))
        for q_t, k_t, v_t, decay_t, beta_t in zip(*tokens, strict=True):
            state = state * decay_t[..., None]
            error = (v_t - torch.einsum("bhk,bhkv->bhv", k_t, state)) * beta_t[..., None]
            state = state + torch.einsum("bhk,bhv->bhkv", k_t, error)
            outputs.append(torch.einsum("bhk,bhkv->bhv", q_t, state))
        return torch.autograd.grad(torch.stack(outputs, 1), inputs, cotangent)

    return step


def peer_steps(rule: str, length: int) -> dict[str, Step]:
    """Return steps of chunked forms in plain PyTorch that this project did not write, by name; {} for KDA.

    Raises:
        AssertionError: their outputs are not those of this project.
    """
    found: dict[str, Callable[..., Any]] = {}
    if rule == "GDN" and importlib.util.find_spec("transformers"):
        qwen = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
        found["transformers"] = qwen.torch_chunk_gated_delta_rule
    if rule == "GDN" and FLA_CORE is not None:
        sys.path.append(FLA_CORE)
        module = runpy.run_path(f"{FLA_CORE}/fla/ops/gated_delta_rule/naive.py")
        found["fla, naive"] = module["naive_chunk_gated_delta_rule"]
    inputs = [torch.from_numpy(x).requires_grad_() for x in arrays(rule, length)]
    cotangent = torch.from_numpy(arrays(rule, length)[2])
    q, k, v, g, beta = inputs
    for function in found.values():
        ours = reference_torch.delta_rule.chunk_gated_delta_rule(*inputs)[0]
        torch.testing.assert_close(function(q, k, v, g=g, beta=beta)[0], ours, rtol=1e-4, atol=1e-4)

    def step(function: Callable[..., Any]) -> Any:
        return torch.autograd.grad(function(q, k, v, g=g, beta=beta)[0], inputs, cotangent)

    return {name: partial(step, function) for name, function in found.items()}


def jax_step(rule: str, form: str, length: int, **options: Any) -> Step:
    """Return a compiled step in JAX."""
    function = getattr(jax_impl.delta_rule, f"{form}_{RULES[rule]}")

    def both(inputs: list[jax.Array], cotangent: jax.Array) -> Any:
        output, pull_back = jax.vjp(lambda *inputs: function(*inputs, **options)[0], *inputs)
        return output, pull_back(cotangent)

    inputs = [jax.numpy.asarray(x) for x in arrays(rule, length)]
    compiled = jax.jit(both).lower(inputs, inputs[2]).compile()
    return lambda: jax.block_until_ready(compiled(inputs, inputs[2]))


STEPS = {"torch": torch_step, "jax": jax_step}


def medians(steps: dict[str, Step], turns: int = TURNS) -> dict[str, float]:
    """Return the median seconds of steps that run in alternation, after one warm-up each."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(turns + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def compare_with_recurrence() -> list[dict[str, Any]]:
    """Measure the chunked and recurrent forms at one length."""
    rows = []
    for backend, make in STEPS.items():
        for rule in RULES:
            variants = {
                "recurrent": make(rule, "recurrent", LENGTH),
                "chunked": make(rule, "chunk", LENGTH),
                "chunked, all kept": make(rule, "chunk", LENGTH, disable_recompute=True),
                "chunks of 32": make(rule, "chunk", LENGTH, chunk_size=32),
            }
            if backend == "torch":
                variants["recurrent, einsum"] = einsum_step(rule, LENGTH)
                variants |= peer_steps(rule, LENGTH)
            seconds = medians(variants)
            rows.append({"backend": backend, "rule": rule, "seconds": seconds})
    return rows


def growth(console: Console) -> list[dict[str, Any]]:
    """Measure every length, and fit the exponent of the growth."""
    rows = []
    for backend, make in STEPS.items():
        for rule in RULES:
            steps = {
                str(length): make(rule, "chunk", length)
                for length in track(LENGTHS, f"{backend} {rule}", console=console)
            }
            seconds = list(medians(steps, 3).values())
            exponent = float(np.polyfit(np.log(LENGTHS), np.log(seconds), 1)[0])
            rows.append({"backend": backend, "rule": rule, "seconds": seconds, "exponent": exponent})
    return rows


def saved_bytes() -> list[dict[str, Any]]:
    """Return the bytes that PyTorch saves for backward, with the custom backward of the rule and with autograd."""

    def saved(rule: str, **options: Any) -> int:
        storages: dict[int, int] = {}
        function = getattr(reference_torch.delta_rule, f"chunk_{RULES[rule]}")

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = function(*(torch.from_numpy(x).requires_grad_() for x in arrays(rule, LENGTH)), **options)
        del output
        return sum(storages.values())

    return [{"rule": r, "kept": saved(r), "by autodiff": saved(r, disable_recompute=True)} for r in RULES]


def show(console: Console, rows: list[dict], growing: list[dict], saved: list[dict]) -> None:
    """Print the tables and draw the picture."""
    table = Table(
        title=f"Forward and backward, in ms and relative to chunked: T={LENGTH}, H={HEADS}, K=V={WIDTH}, float32"
    )
    variants = list(dict.fromkeys(name for row in rows for name in row["seconds"]))
    for name in ("", *variants):
        table.add_column(name, justify="right")
    for row in rows:
        seconds = row["seconds"]
        times = [
            f"{1000 * seconds[name]:.0f}, {seconds[name] / seconds['chunked']:.1f}x" if name in seconds else ""
            for name in variants
        ]
        table.add_row(f"{row['backend']} {row['rule']}", *times)
    console.print(table)
    for row in growing:
        listed = ", ".join(f"{1000 * s:.0f}" for s in row["seconds"])
        lengths = f"T = {LENGTHS[0]} to {LENGTHS[-1]}"
        console.print(f"{row['backend']} {row['rule']}: {listed} ms at {lengths}, exponent {row['exponent']:.2f}")
    for row in saved:
        share = row["kept"] / row["by autodiff"]
        sizes = f"{row['kept'] / MIB:.1f} MiB, by autodiff {row['by autodiff'] / MIB:.1f} MiB ({share:.1%})"
        console.print(f"saved for backward in torch, {row['rule']}: {sizes}")
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for row in growing:
        label = f"{row['backend']} {row['rule']}, exponent {row['exponent']:.2f}"
        axes.loglog(LENGTHS, row["seconds"], "o-" if row["backend"] == "torch" else "s--", label=label)
    axes.set(xlabel="tokens T", ylabel="seconds, forward and backward", title="The chunked delta rule")
    axes.legend()
    figure.savefig(PICTURE, dpi=120)


def main() -> None:
    """Measure, print, draw, and write the JSON file."""
    torch.set_num_threads(1)
    console = Console(width=150)
    rows = compare_with_recurrence()
    growing = growth(console)
    saved = saved_bytes()
    show(console, rows, growing, saved)
    content = {"environment": environment(), "beside the recurrence": rows, "growth": growing, "kept": saved}
    RESULT.write_text(json.dumps(content, indent=1) + "\n")
    console.print(f"written: {RESULT}, {PICTURE}")


if __name__ == "__main__":
    main()
