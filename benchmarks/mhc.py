"""Time of a training step of both backends, compared with plain networks in PyTorch and JAX, with and without mHC.

    python -m benchmarks.mhc            (make bench NAME=mhc)

The process is pinned to one core and one thread, so that PyTorch and XLA have the same resources. The trainers
alternate step by step in one run, and ratios are those of medians. Then the PyTorch step with mHC is profiled, and each
operation that copies all residual streams is named.
"""

import os

if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # XLA counts the cores when it is imported
os.environ["OMP_NUM_THREADS"] = "1"

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import jax_impl.train
import reference_torch.train
from benchmarks import plain_jax, plain_torch
from diptych.plans.config import DataConfig, TrainConfig, TransformerConfig
from diptych.plans.model.data import Corpus, load_corpus
from parity.report import environment

WIDTHS = (128, 512)
STEPS = 40
"""Measured steps at the smaller width; at the larger width, a third of them."""
WARM_UP = 3
BACKENDS = ("torch", "jax")
RESULT = Path("benchmarks/results/mhc-cpu.json")


def main() -> None:
    """Measure, print the tables, and write the JSON file."""
    torch.set_num_threads(1)
    console = Console()
    corpus = load_corpus(DataConfig())
    train = TrainConfig()
    results = []
    for width in WIDTHS:
        config = TransformerConfig(
            hidden_size=width, num_layers=2, num_attention_heads=4, enable_hyper_connections=True
        )
        trainers = make_trainers(config, train, corpus)
        medians = measure(trainers, STEPS if width == WIDTHS[0] else max(1, STEPS // 3), console)
        result = {
            "model": asdict(config),
            "median_step_seconds": medians,
            "ratios": ratios(medians),
            "profile": profile_step(trainers["torch, mHC"], config, train),
        }
        show(console, config, train, result)
        results.append(result)
    RESULT.parent.mkdir(exist_ok=True)
    content = {"environment": environment(), "batch": train.global_batch_size, "steps": STEPS, "widths": results}
    RESULT.write_text(json.dumps(content, indent=1) + "\n")
    console.print(f"written: {RESULT}")


def make_trainers(hyper: TransformerConfig, train: TrainConfig, corpus: Corpus) -> dict[str, Any]:
    """Return the trainers by name; hyper: configuration with mHC."""
    residual = replace(hyper, enable_hyper_connections=False)
    return {
        "plain PyTorch": plain_torch.PlainTrainer(residual, train, corpus, "explicit"),
        "torch": reference_torch.train.Trainer(residual, train, corpus, device="cpu"),
        "torch, mHC": reference_torch.train.Trainer(hyper, train, corpus, device="cpu"),
        "plain JAX": plain_jax.PlainTrainer(residual, train, corpus),
        "jax": jax_impl.train.Trainer(residual, train, corpus),
        "jax, mHC": jax_impl.train.Trainer(hyper, train, corpus),
    }


def measure(trainers: dict[str, Any], steps: int, console: Console) -> dict[str, float]:
    """Return the median seconds of a step of each trainer; the trainers alternate."""
    seconds = {name: [] for name in trainers}
    for step in track(range(WARM_UP + steps), "steps", console=console, transient=True):
        for name, trainer in trainers.items():
            start = time.perf_counter()
            trainer.train_step(step)
            if step >= WARM_UP:
                seconds[name].append(time.perf_counter() - start)
    return {name: float(np.median(times)) for name, times in seconds.items()}


def ratios(medians: dict[str, float]) -> dict[str, float]:
    """Return the ratios of the medians that the documentation states."""
    plain = dict(zip(BACKENDS, ("plain PyTorch", "plain JAX"), strict=True))
    with_mhc = {f"{name}: step time with mHC / without": medians[f"{name}, mHC"] / medians[name] for name in BACKENDS}
    return with_mhc | {f"{name}: step time / {plain[name]}": medians[name] / medians[plain[name]] for name in BACKENDS}


def profile_step(trainer, config: TransformerConfig, train: TrainConfig, steps: int = 5) -> list[dict]:
    """Return the slowest operations of PyTorch steps, and all copies of stream-wide tensors with their callers."""
    wide = train.global_batch_size * config.seq_length * config.num_residual_streams * config.hidden_size
    with torch.profiler.profile(record_shapes=True) as profile:
        for step in range(steps):
            trainer.train_step(step)
    rows: dict[str, dict] = {}
    for event in profile.events():
        largest = max((int(np.prod(shape)) for shape in event.input_shapes if shape), default=0)
        stream_wide_copy = event.name == "aten::copy_" and largest >= wide
        key = event.name
        if stream_wide_copy:
            caller = event
            while caller.cpu_parent is not None and caller.cpu_parent.name.startswith("aten::"):
                caller = caller.cpu_parent
            outer = (
                caller.cpu_parent.name.removeprefix("autograd::engine::evaluate_function: ")
                if caller.cpu_parent
                else ""
            )
            key = f"stream-wide copy in {caller.name}" + (f" of {outer}" if outer else "")
        row = rows.setdefault(
            key, {"operation": key, "ms_per_step": 0.0, "calls_per_step": 0.0, "copy": stream_wide_copy}
        )
        row["ms_per_step"] += event.self_cpu_time_total / 1e3 / steps
        row["calls_per_step"] += 1 / steps
    ordered = sorted(rows.values(), key=lambda row: -row["ms_per_step"])
    return [row for index, row in enumerate(ordered) if index < 12 or row["copy"]]


def show(console: Console, config: TransformerConfig, train: TrainConfig, result: dict[str, Any]) -> None:
    """Print the medians, the ratios and the profile of a width."""
    machine = environment()
    cores = f"pinned to {machine['xla_cores']} core, torch threads {machine['torch_threads']}"
    console.print(f"{machine['machine']}; {cores}")
    console.print(
        f"{config.num_layers} layers, D={config.hidden_size}, S={config.num_residual_streams}, "
        f"T={config.seq_length}, batch {train.global_batch_size}, float32; steps alternate"
    )
    table = Table("training step", "median ms", box=None)
    for name, median in result["median_step_seconds"].items():
        table.add_row(name, f"{1e3 * median:.1f}")
    console.print(table)
    table = Table("ratio of medians", "", box=None)
    for name, ratio in result["ratios"].items():
        table.add_row(name, f"{ratio:.2f}")
    console.print(table)
    table = Table("PyTorch step with mHC", "ms per step", "calls per step", box=None)
    for row in result["profile"]:
        table.add_row(row["operation"], f"{row['ms_per_step']:.2f}", f"{row['calls_per_step']:.0f}")
    console.print(table)


if __name__ == "__main__":
    main()
