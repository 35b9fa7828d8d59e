"""Memory and time of recompute within a memory budget, compared with fixed settings and with PyTorch and JAX alone.

    python -m benchmarks.memory_budget        (make bench NAME=memory_budget)

In PyTorch, the budget is the measured peak of another way to save memory, so two steps of equal peaks are compared:
fixed recompute settings, ``torch.utils.checkpoint`` around whole layers and with products saved, and the memory budget
of ``torch.compile``. In JAX, the budgets are shares of the peak predicted for PyTorch, and policies of
``jax.checkpoint`` are measured beside them. The layouts are chosen for the rates of this processor, which are measured
first: products of matrices, and copies. In PyTorch, memory is the peak of all allocations of one forward and backward;
in JAX, the temporary memory of the compiled step. The steps of all modes take turns on one thread, and times are
medians of CPU seconds. Compilation is not timed.
"""

import os

if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
os.environ["OMP_NUM_THREADS"] = "1"

import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import torch
from flax import nnx
from jax.ad_checkpoint import checkpoint_policies
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from benchmarks.jobs.step_time import operation_rates
from benchmarks.recompute import BATCH, CONFIG, MIB, checkpointed, save_products
from diptych.planner.budget import fit_budget
from diptych.planner.memory import predict_memory
from diptych.planner.step_time import Machine
from diptych.plans.config import TransformerConfig
from diptych.plans.recompute import NO_RECOMPUTE
from parity.report import environment
from reference_torch.recompute import measure_memory
from reference_torch.transformer import GPTModel

ROUNDS = 5
RESULT = Path("benchmarks/results/memory_budget-cpu.json")
SELECTIVE = {"recompute_granularity": "selective"}
WHOLE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
FIXED = {
    "layernorm + activation": {**SELECTIVE, "recompute_modules": ("layernorm", "activation")},
    "mhc + layernorm": {**SELECTIVE, "recompute_modules": ("mhc", "layernorm")},
    "mhc + layernorm + activation": {**SELECTIVE, "recompute_modules": ("mhc", "layernorm", "activation")},
    "mhc + layernorm + core_attn + mlp": {**SELECTIVE, "recompute_modules": ("mhc", "layernorm", "core_attn", "mlp")},
    "whole layers": WHOLE,
}
"""Fixed recompute settings, by name."""
PLAIN = "no recompute"
COMPILED = "torch.compile"
BUDGETS = (0.3, 0.6)
"""Memory budgets of torch.compile."""
POLICIES = {
    "jax.checkpoint, nothing saved": checkpoint_policies.nothing_saveable,
    "jax.checkpoint, products saved": checkpoint_policies.dots_saveable,
}
"""Policies of jax.checkpoint around each layer."""
JAX_LAYERS = 8
"""Layers of the model in JAX, whose steps take long to compile."""


class Mode:
    """A step with one way to save memory, and its measurements."""

    def __init__(self, step: Callable[[], Any], peak: int, layout: str | None = None) -> None:
        self.step = step
        self.peak = peak
        self.layout = layout
        self.seconds: list[float] = []

    def time(self) -> None:
        """Add the CPU seconds of one step."""
        begin = time.process_time()
        self.step()
        self.seconds.append(time.process_time() - begin)


def torch_mode(model: GPTModel, tokens: torch.Tensor, targets: torch.Tensor, layout: str | None = None) -> Mode:
    """Return a mode that runs a model forward and backward."""

    def backward(loss: torch.Tensor) -> object:
        return torch.autograd.grad(loss, [*model.parameters()])

    def forward() -> torch.Tensor:
        return model(tokens, targets)

    backward(forward())  # the first step allocates caches, and compiles
    return Mode(lambda: backward(forward()), measure_memory(forward, backward).peak, layout)


def compiled(budget: float) -> GPTModel:
    """Return the model with layers compiled by torch.compile within a memory budget."""
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    def backend(graph: Any, inputs: Any) -> Any:  # each mode has its own, so that no mode gets the code of another
        with config.patch(activation_memory_budget=budget):
            return compile_fx(graph, inputs)

    model = GPTModel(CONFIG)
    for layer in model.decoder.layers.values():
        layer.compile(backend=backend)
    return model


def torch_modes(machine: Machine, console: Console) -> dict[str, Mode]:
    """Return the modes in PyTorch, each (except the baselines) followed by the layout that fits its peak."""
    tokens, targets = torch.randint(0, CONFIG.vocab_size, (2, BATCH, CONFIG.seq_length))
    models: dict[str, Callable[[], GPTModel]] = {PLAIN: lambda: GPTModel(CONFIG)}
    models |= {name: partial(GPTModel, replace(CONFIG, **flags)) for name, flags in FIXED.items()}
    models["torch.utils.checkpoint, whole layers"] = lambda: checkpointed(None)
    selective = partial(create_selective_checkpoint_contexts, save_products)
    models["torch.utils.checkpoint, products saved"] = lambda: checkpointed(selective)
    models |= {f"{COMPILED}, budget {budget}": partial(compiled, budget) for budget in BUDGETS}
    models[COMPILED] = partial(compiled, 1.0)
    modes: dict[str, Mode] = {}
    for name, build in track(models.items(), "PyTorch: memory", console=console):
        modes[name] = torch_mode(build(), tokens, targets)
        if name not in (PLAIN, COMPILED):
            plan = fit_budget(CONFIG, BATCH, modes[name].peak, machine)
            mode = torch_mode(GPTModel(plan.config), tokens, targets, plan.config.recompute_layout)
            modes[f"budget of {name}"] = mode
    return modes


def jax_modes(machine: Machine, console: Console) -> dict[str, Mode]:
    """Return the modes in JAX, and the layouts for shares of the peak that is predicted for PyTorch."""
    from jax_impl.transformer import GPTModel as JaxModel

    config = replace(CONFIG, num_layers=JAX_LAYERS)
    tokens, targets = jax.random.randint(jax.random.key(0), (2, BATCH, config.seq_length), 0, config.vocab_size)

    def mode(config: TransformerConfig, layout: str | None = None) -> Mode:
        graph, params = nnx.split(JaxModel(config), nnx.Param)
        loss = jax.value_and_grad(lambda params: nnx.merge(graph, params)(tokens, targets))
        step = jax.jit(loss).lower(params).compile()
        analysis: Any = step.memory_analysis()
        step(params)
        return Mode(lambda: jax.block_until_ready(step(params)), analysis.temp_size_in_bytes, layout)

    modes = {PLAIN: mode(config)}
    for name, policy in track(POLICIES.items(), "JAX: compiling", console=console):
        with mock.patch("jax_impl.recompute.policies.recompute_policy", lambda *_, policy=policy: policy):
            modes[name] = mode(replace(config, **WHOLE))
    for share in (0.3, 0.5, 0.7):
        peak = predict_peak(config)
        plan = fit_budget(config, BATCH, int(share * peak), machine)
        modes[f"budget of {share} of the peak in PyTorch"] = mode(plan.config, plan.config.recompute_layout)
    return modes


def predict_peak(config: TransformerConfig) -> int:
    """Return the predicted bytes of a step without recompute."""
    return predict_memory(replace(config, **NO_RECOMPUTE), BATCH).peak


def rows_of(modes: dict[str, Mode]) -> list[dict[str, Any]]:
    """Return peak and time of every mode, relative to no recompute."""
    plain = modes[PLAIN]
    return [
        {
            "way": name,
            "peak_bytes": mode.peak,
            "peak": mode.peak / plain.peak,
            "step_cpu_seconds": float(np.median(mode.seconds)),
            "time": float(np.median([a / b for a, b in zip(mode.seconds, plain.seconds, strict=True)])),
            "layout": mode.layout,
        }
        for name, mode in modes.items()
    ]


def show(console: Console, title: str, rows: list[dict[str, Any]]) -> None:
    """Print the table of a backend."""
    table = Table(box=None, title=title, title_justify="left")
    table.add_column("way to save memory", no_wrap=True)
    for heading in ("peak MiB", "peak", "time"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(row["way"], f"{row['peak_bytes'] / MIB:.1f}", f"{row['peak']:.3f}", f"{row['time']:.3f}")
    console.print(table)


def main() -> None:
    """Measure every mode, print the tables, and write the JSON file."""
    torch.set_num_threads(1)
    console = Console(width=130)
    machine = Machine(**operation_rates())
    console.print(f"rates: {machine}", highlight=False, soft_wrap=True)
    content: dict[str, Any] = {
        "environment": environment(),
        "model": asdict(CONFIG),
        "batch": BATCH,
        "rounds": ROUNDS,
        "machine": asdict(machine),
    }
    for backend, build in (("torch", torch_modes), ("jax", jax_modes)):
        modes = build(machine, console)
        for _ in track(range(ROUNDS), f"{backend}: time", console=console):
            for mode in modes.values():
                mode.time()
        content[backend] = rows_of(modes)
        show(console, backend, content[backend])
    RESULT.write_text(json.dumps(content, indent=1) + "\n")
    console.print(f"written: {RESULT}")


if __name__ == "__main__":
    main()
