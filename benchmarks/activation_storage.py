"""Memory, time and error of gradients if values are saved for backward in 8 bits.

    python -m benchmarks.activation_storage        (make bench NAME=activation_storage)

In PyTorch, memory is what a forward saves and the peak of all allocations of a forward and backward; in JAX, the
temporary memory of the compiled step. Times are medians of CPU seconds of PyTorch on one thread, and modes take turns.
The error is the norm of the difference of all gradients from those of the same model without 8 bits, over their norm,
for new parameters and random tokens; beside it stands the error of bfloat16, from those in float32.
"""

import os

if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
os.environ["OMP_NUM_THREADS"] = "1"

import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from flax import nnx
from rich.console import Console
from rich.progress import track
from rich.table import Table

from diptych.planner.memory import predict_memory
from diptych.plans.config import TransformerConfig
from jax_impl.transformer import GPTModel as JaxModel
from parity.report import environment
from reference_torch.recompute import measure_memory
from reference_torch.transformer import GPTModel

RESULT = Path("benchmarks/results/activation_storage-cpu.json")
MIB = 2**20
BATCH = 2
ROUNDS = 5
CONFIG = TransformerConfig(
    hidden_size=256, num_layers=6, num_attention_heads=4, ffn_hidden_size=704, seq_length=512, use_flash_attn=True
)
MODELS = {
    "attention": CONFIG,
    "attention, bfloat16": replace(CONFIG, bf16=True),
    "attention, bfloat16, FP8": replace(CONFIG, bf16=True, fp8="hybrid"),
    "gdn, bfloat16": replace(CONFIG, bf16=True, layer_pattern="gdn"),
    "experts, bfloat16": replace(
        CONFIG, bf16=True, layer_pattern="attention+moe", num_moe_experts=8, moe_ffn_hidden_size=352
    ),
}


class Step:
    """A step of one model in PyTorch, with its measurements."""

    def __init__(self, config: TransformerConfig, tokens: np.ndarray) -> None:
        self.config = config
        self._tokens, self._targets = (torch.from_numpy(part) for part in tokens)
        self._model = GPTModel(config)
        self._parameters = list(self._model.parameters())
        self.gradients = torch.cat([g.flatten().float() for g in self._backward(self._forward())])
        memory = measure_memory(self._forward, self._backward)
        self.saved, self.peak = memory.saved, memory.peak

    def seconds(self) -> float:
        """Return the CPU seconds of a forward and backward."""
        start = time.process_time()
        self._backward(self._forward())
        return time.process_time() - start

    def _forward(self) -> torch.Tensor:
        return self._model(self._tokens, self._targets)

    def _backward(self, loss: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(loss, self._parameters)


def jax_bytes(config: TransformerConfig, tokens: np.ndarray) -> int:
    """Return the temporary bytes of a compiled loss with its gradients."""
    graph, state = nnx.split(JaxModel(config))

    def loss(state: Any, tokens: jax.Array) -> jax.Array:
        return nnx.merge(graph, state)(tokens[0], tokens[1])

    analysis = jax.jit(jax.grad(loss)).lower(state, tokens).compile().memory_analysis()
    assert analysis is not None, "this backend reports no memory"
    return analysis.temp_size_in_bytes


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of a difference over that of the expected gradients."""
    return float((found - expected).norm() / expected.norm())


def measured(config: TransformerConfig) -> dict[str, Any]:
    """Return the row of a model."""
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, BATCH, config.seq_length))
    packed = replace(config, activation_storage="fp8")
    steps = {"as they are": Step(config, tokens), "in 8 bits": Step(packed, tokens)}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            times[name].append(step.seconds())
    exact, found = (step.gradients for step in steps.values())
    wide = Step(replace(config, bf16=False, fp8=None), tokens).gradients if config.bf16 else exact
    return {
        name: {
            "saved_mib": step.saved / MIB,
            "peak_mib": step.peak / MIB,
            "predicted_peak_mib": predict_memory(step.config, BATCH).peak / MIB,
            "jax_temporary_mib": jax_bytes(step.config, tokens) / MIB,
            "seconds": float(np.median(times[name])),
        }
        for name, step in steps.items()
    } | {"error": apart(found, exact), "error_of_bfloat16": apart(exact, wide) if config.bf16 else None}


def main() -> None:
    """Measure all models, print the table and write it."""
    rows = {name: measured(config) for name, config in track(MODELS.items(), "models", total=len(MODELS))}
    table = Table("model", "saved, MiB", "peak, MiB", "JAX, MiB", "time", "error", "error of bfloat16")

    def change(row: dict[str, Any], key: str, show: Callable[[float], str]) -> str:
        return f"{show(row['as they are'][key])} to {show(row['in 8 bits'][key])}"

    for name, row in rows.items():
        memory = [change(row, key, "{:.0f}".format) for key in ("saved_mib", "peak_mib", "jax_temporary_mib")]
        ratio = row["in 8 bits"]["seconds"] / row["as they are"]["seconds"]
        other = row["error_of_bfloat16"]
        table.add_row(name, *memory, f"× {ratio:.2f}", f"{row['error']:.1e}", "" if other is None else f"{other:.1e}")
    Console(width=140).print(table)
    content = {"environment": environment(), "config": asdict(CONFIG), "batch": BATCH, "rows": rows}
    RESULT.write_text(json.dumps(content, indent=1, default=str) + "\n")
    print(f"written: {RESULT}")


if __name__ == "__main__":
    main()
