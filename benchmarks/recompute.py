"""Memory and time of each recompute mode, measured and predicted, compared with torch.utils.checkpoint.

    python -m benchmarks.recompute            (make bench NAME=recompute)

The benchmark runs on one thread of one core. Memory counts all allocations of one forward and backward pass. The modes
alternate step by step, and times are medians. The baselines are torch.utils.checkpoint around whole layers
(non-reentrant) and its selective form, which saves matrix products.
"""

import os

if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
os.environ["OMP_NUM_THREADS"] = "1"

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from diptych.planner.memory import predict_memory
from diptych.plans.config import TransformerConfig
from diptych.plans.recompute import block_length
from parity.report import environment
from reference_torch.recompute import MemoryUse, measure_memory
from reference_torch.transformer import GPTModel, TransformerLayer

CONFIG = TransformerConfig(
    hidden_size=256,
    num_layers=16,
    num_attention_heads=4,
    seq_length=512,
    enable_hyper_connections=True,
    use_flash_attn=True,
)
BATCH = 2
ROUNDS = 5
RESULT = Path("benchmarks/results/recompute-cpu.json")
PICTURE = Path("docs/images/recompute.png")
MIB = 2**20
SELECTIVE = {"recompute_granularity": "selective"}
BEST = block_length(CONFIG.num_layers, CONFIG.num_residual_streams)
MODES = {
    "none": {},
    **{name: {**SELECTIVE, "recompute_modules": (name,)} for name in ("layernorm", "core_attn", "activation", "mlp")},
    f"mhc, blocks of {BEST} (default)": {**SELECTIVE, "recompute_modules": ("mhc",)},
    **{
        f"mhc + layernorm, blocks of {n}": {
            **SELECTIVE,
            "recompute_modules": ("mhc", "layernorm"),
            "mhc_recompute_layer_num": n,
        }
        for n in sorted({1, 2, BEST, 4, CONFIG.num_layers})
    },
    "mhc + layernorm + activation": {**SELECTIVE, "recompute_modules": ("mhc", "layernorm", "activation")},
    "mhc + layernorm + core_attn + mlp": {**SELECTIVE, "recompute_modules": ("mhc", "layernorm", "core_attn", "mlp")},
    "full, block, 8 layers": {
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": CONFIG.num_layers // 2,
    },
}
DEFAULT = f"mhc + layernorm, blocks of {BEST}"
WITH_ACTIVATION = "mhc + layernorm + activation"
WHOLE = "torch.utils.checkpoint, whole layers"
TARGETS = {DEFAULT: (0.60, 0.68, 1.12), WITH_ACTIVATION: (0.43, 0.55, 1.12)}
"""Upper limits of saved bytes, peak and time, relative to no recompute."""


@dataclass
class Mode:
    """The model and measurements of one recompute mode."""

    config: TransformerConfig
    model: GPTModel
    memory: MemoryUse | None = None
    predicted: tuple[int, int] | None = None
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The median seconds of a step."""
        return float(np.median(self.seconds))


def checkpointed(context_fn: Callable | None) -> GPTModel:
    """Return the model whose layers run inside torch.utils.checkpoint."""
    model = GPTModel(CONFIG)
    extra = {} if context_fn is None else {"context_fn": context_fn}
    for layer in model.decoder.layers.values():
        plain = partial(TransformerLayer.forward, layer)
        layer.forward = partial(checkpoint, plain, use_reentrant=False, **extra)
    return model


def save_products(context, operation, *args, **kwargs) -> CheckpointPolicy:
    """Save the outputs of matrix products and attention."""
    aten = torch.ops.aten
    saved = {aten.mm.default, aten.addmm.default, aten._scaled_dot_product_flash_attention_for_cpu.default}
    return CheckpointPolicy.MUST_SAVE if operation in saved else CheckpointPolicy.PREFER_RECOMPUTE


def main() -> None:
    """Measure every mode, print the table, write the JSON file and draw the picture."""
    torch.set_num_threads(1)
    console = Console(width=130)
    configs = {name: replace(CONFIG, **flags) for name, flags in MODES.items()}
    modes = {name: Mode(config, GPTModel(config)) for name, config in configs.items()}
    modes[WHOLE] = Mode(CONFIG, checkpointed(None))
    selective = partial(create_selective_checkpoint_contexts, save_products)
    modes["torch.utils.checkpoint, keeping products"] = Mode(CONFIG, checkpointed(selective))
    tokens, targets = torch.randint(0, CONFIG.vocab_size, (2, BATCH, CONFIG.seq_length))

    def backward(mode: Mode, loss: torch.Tensor) -> object:
        return torch.autograd.grad(loss, list(mode.model.parameters()))

    for mode in track(modes.values(), "memory", console=console):
        forward = partial(mode.model, tokens, targets)
        backward(mode, forward())
        mode.memory = measure_memory(forward, partial(backward, mode))
    for name in MODES:
        prediction = predict_memory(modes[name].config, BATCH)
        modes[name].predicted = prediction.saved, prediction.peak
    for _ in track(range(ROUNDS), "time", console=console):
        for mode in modes.values():
            start = time.perf_counter()
            backward(mode, mode.model(tokens, targets))
            mode.seconds.append(time.perf_counter() - start)
    rows = summarise(modes)
    show(console, rows)
    content = {"environment": environment(), "model": asdict(CONFIG), "batch": BATCH, "rounds": ROUNDS, "ways": rows}
    RESULT.write_text(json.dumps(content, indent=1) + "\n")
    draw(rows)
    console.print(f"written: {RESULT}, {PICTURE}")


def summarise(modes: dict[str, Mode]) -> list[dict]:
    """Return one row per mode: bytes, seconds, ratios to no recompute, and predictions."""
    base = modes["none"]
    rows = []
    for name, mode in modes.items():
        assert mode.memory is not None
        assert base.memory is not None
        row = {
            "way": name,
            "saved_bytes": mode.memory.saved,
            "peak_bytes": mode.memory.peak,
            "step_seconds": mode.median,
            "saved": mode.memory.saved / base.memory.saved,
            "peak": mode.memory.peak / base.memory.peak,
            "time": float(np.median([a / b for a, b in zip(mode.seconds, base.seconds, strict=True)])),
        }
        if mode.predicted is not None:
            row["predicted_saved"], row["predicted_peak"] = (
                p / m for p, m in zip(mode.predicted, mode.memory, strict=True)
            )
        if name in TARGETS:
            row["targets"] = TARGETS[name]
        rows.append(row)
    return rows


def show(console: Console, rows: list[dict]) -> None:
    """Print the table and compare it with the targets."""
    table = Table(box=None)
    table.add_column("recompute mode", no_wrap=True)
    for heading in ("saved MiB", "peak MiB", "step s", "saved", "peak", "time", "predicted / measured"):
        table.add_column(heading, justify="right")
    for row in rows:
        predicted = (
            f"{row['predicted_saved']:.3f} {row['predicted_peak']:.3f}" if "predicted_saved" in row else "not predicted"
        )
        table.add_row(
            row["way"],
            f"{row['saved_bytes'] / MIB:.1f}",
            f"{row['peak_bytes'] / MIB:.1f}",
            f"{row['step_seconds']:.2f}",
            *(f"{row[k]:.3f}" for k in ("saved", "peak", "time")),
            predicted,
        )
    console.print(table)
    for row in rows:
        if "targets" in row:
            met = all(row[k] <= t for k, t in zip(("saved", "peak", "time"), row["targets"], strict=True))
            console.print(f"{row['way']}: targets {row['targets']} {'met' if met else 'MISSED'}")
    lowest = min((row for row in rows if row["way"].startswith("mhc + layernorm, blocks")), key=lambda r: r["peak"])
    console.print(f"lowest peak of the block lengths: {lowest['way']}")


def draw(rows: list[dict]) -> None:
    """Draw time over bytes, with one point per mode."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    for axes, key, title in zip(
        figure.subplots(1, 2, sharey=True), ("saved", "peak"), ("saved for backward", "peak of a step"), strict=True
    ):
        for number, row in enumerate(rows, 1):
            own = "predicted_saved" in row
            axes.plot(row[key], row["time"], "o" if own else "s", color="#1f4e9c" if own else "#d1603d", ms=7)
            axes.annotate(str(number), (row[key], row["time"]), xytext=(5, 4), textcoords="offset points", fontsize=9)
        axes.set(xlabel=f"bytes {title}, relative to no recompute", title=title.capitalize())
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("time of a step, relative")
    names = "\n".join(f"{number}  {row['way']}" for number, row in enumerate(rows, 1))
    figure.axes[1].text(1.04, 1.0, names, transform=figure.axes[1].transAxes, va="top", fontsize=8.5)
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    main()
