"""Output of a comparison: a live table, a summary, a JSON file and a picture."""

import json
import math
import os
import platform
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from diptych.planner.reports.memory import MIB
from diptych.plans.config import TrainConfig, TransformerConfig
from diptych.plans.model.data import Corpus
from diptych.plans.offload import describe_statistics
from parity.compare import Comparison, StepPair, tokens_per_second
from parity.figures import INK, JAX, ORACLE, TORCH
from parity.measured_memory import MeasuredMemory
from parity.tolerances import GRADIENT, GRADIENT_FLOOR

RECENT_STEPS = 10
"""Number of steps over which a displayed speed is the median."""
VISIBLE_ROWS = 16


class LiveComparison:
    """A side-by-side table that grows while both backends train.

    On a terminal the last rows and a progress bar are redrawn in place; elsewhere each row is printed once.

    Args:
        console: printed to.
        total: number of steps.
        interval: steps between rows.
    """

    def __init__(self, console: Console, total: int, interval: int) -> None:
        self.console = console
        self.total = total
        self.interval = interval
        self._recent: list[StepPair] = []
        self._rows: list[tuple[str, ...]] = []
        self._progress = Progress(
            TextColumn("training both"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._progress.add_task("steps", total=total)
        self._live = Live(self._progress, console=console, refresh_per_second=4)

    def __enter__(self) -> "LiveComparison":
        if self.console.is_terminal:
            self._live.start()
        else:
            self.console.print(_row_text(_HEADINGS))
        return self

    def __exit__(self, *exception: object) -> None:
        if self.console.is_terminal:
            self._live.stop()

    def step(self, pair: StepPair) -> None:
        """Show one step."""
        self._recent = [*self._recent[1 - RECENT_STEPS :], pair]
        step = pair.torch.step
        if step % self.interval == 0 or step == self.total - 1:
            row = _row(pair, self._recent)
            self._rows.append(row)
            if not self.console.is_terminal:
                self.console.print(_row_text(row))
        if self.console.is_terminal:
            self._progress.update(self._task, completed=step + 1)
            self._live.update(Group(_table(self._rows[-VISIBLE_ROWS:]), self._progress))


_HEADINGS = ("step", "loss torch", "loss jax", "difference", "tok/s torch", "tok/s jax")


def _row(pair: StepPair, recent: list[StepPair]) -> tuple[str, ...]:
    return (
        str(pair.torch.step),
        f"{pair.torch.loss:.6f}",
        f"{pair.jax.loss:.6f}",
        f"{pair.difference:+.1e}",
        f"{tokens_per_second(p.torch for p in recent):,.0f}",
        f"{tokens_per_second(p.jax for p in recent):,.0f}",
    )


def _row_text(row: tuple[str, ...]) -> str:
    return "".join(f"{cell:>13}" for cell in row)


def _table(rows: list[tuple[str, ...]]) -> Table:
    table = Table(box=None)
    for heading in _HEADINGS:
        table.add_column(heading, justify="right", min_width=12)
    for row in rows:
        table.add_row(*row)
    return table


def print_summary(console: Console, comparison: Comparison, most: int = 8) -> None:
    """Print gradient differences, largest first, and the verdict."""
    table = Table(title="Gradients at equal parameters, worst first", box=None, title_justify="left")
    table.add_column("parameter", overflow="fold")
    for heading in ("step", "in float64", f"in {comparison.dtype}", "norm"):
        table.add_column(heading, justify="right", no_wrap=True)
    for gradient in comparison.gradients[:most]:
        differences = (f"{gradient.exact:.1e}", f"{gradient.relative:.1e}")
        table.add_row(gradient.parameter, str(gradient.step), *differences, f"{gradient.norm:.2e}")
    console.print(table)
    hidden = len(comparison.gradients) - most
    if hidden > 0:
        console.print(f"... and {hidden} closer ones\n")
    worst = comparison.worst_step
    console.print(
        f"losses: at most {abs(worst.difference):.1e} apart (step {worst.torch.step}), "
        f"tolerance {comparison.loss_tolerance:.0e}"
    )
    console.print(
        f"gradients in float64: at most {max(g.exact for g in comparison.gradients):.1e} apart, "
        f"tolerance {GRADIENT['float64']:.0e}"
    )
    console.print(
        f"gradients in {comparison.dtype}: at most {max(g.judged(comparison.dtype) for g in comparison.gradients):.1e} "
        f"apart, tolerance {comparison.gradient_tolerance:.0e}"
        + (f" (small ones relative to {floor:.0%} of the whole)" if (floor := GRADIENT_FLOOR[comparison.dtype]) else "")
    )
    if comparison.memory is not None:
        console.print(_describe_memory(comparison.memory))
    console.print(
        "validation loss, nats per token: "
        + ", ".join(f"{backend} {loss:.6f}" for backend, loss in comparison.validation.items())
    )
    for backend, stats in comparison.offload.items():
        console.print(f"in {backend}:\n{describe_statistics(stats)}", highlight=False)
    for failure in comparison.failures:
        console.print(f"[red]over tolerance[/red] {failure}")
    if comparison.first_difference is not None:
        console.print(f"in float64, without dropout: {comparison.first_difference}", markup=False)
    if not comparison.failures:
        console.print("[green]equal within tolerance[/green]")


def _describe_memory(memory: MeasuredMemory) -> str:
    return (
        f"memory in PyTorch, predicted and measured, MiB: saved for backward {memory.predicted_saved / MIB:.1f} and "
        f"{memory.saved / MIB:.1f}, peak {memory.predicted_peak / MIB:.1f} and {memory.peak / MIB:.1f}"
    )


def environment() -> dict[str, Any]:
    """Return the machine and the versions of the libraries, for reports."""
    import torch

    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "python": sys.version.split()[0],
        "versions": {name: version(name) for name in ("torch", "jax", "flax", "optax", "numpy")},
        "torch_threads": torch.get_num_threads(),
        "xla_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }


def write_json(
    path: Path, comparison: Comparison, config: TransformerConfig, train: TrainConfig, corpus: Corpus
) -> None:
    """Write the whole comparison to a JSON file, with the settings needed to repeat it."""
    content = {
        "environment": environment(),
        "model": asdict(config),
        "train": asdict(train),
        "replicas": comparison.replicas,
        "corpus": {"name": corpus.name, "digest": corpus.digest, "tokens": len(corpus.training)},
        "tolerances": {"loss": comparison.loss_tolerance, "gradient": comparison.gradient_tolerance},
        "validation_loss": comparison.validation,
        "tokens_per_second": {
            "torch": tokens_per_second(pair.torch for pair in comparison.steps),
            "jax": tokens_per_second(pair.jax for pair in comparison.steps),
        },
        "gradients": [gradient._asdict() for gradient in comparison.gradients],
        "steps": [
            {
                "step": pair.torch.step,
                "learning_rate": pair.torch.learning_rate,
                "loss": {"torch": pair.torch.loss, "jax": pair.jax.loss},
                "grad_norm": {"torch": pair.torch.grad_norm, "jax": pair.jax.grad_norm},
            }
            for pair in comparison.steps
        ],
        "memory_bytes": comparison.memory._asdict() if comparison.memory is not None else None,
        "offload": comparison.offload or None,
        "failures": comparison.failures,
        "first_difference": comparison.first_difference,
    }
    path.write_text(json.dumps(finite_json(content), indent=1, allow_nan=False) + "\n")


def finite_json(value: Any) -> Any:
    """Return the value with non-finite numbers, which JSON lacks, replaced by the texts "nan", "inf" and "-inf"."""
    if isinstance(value, dict):
        return {key: finite_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite_json(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def write_picture(path: Path, comparison: Comparison) -> None:
    """Draw the loss curves of both backends, their difference, and gradient differences by parameter."""
    from matplotlib.figure import Figure

    steps = [pair.torch.step for pair in comparison.steps]
    figure = Figure(figsize=(12, 4), layout="constrained")
    curves, differences, gradients = figure.subplots(1, 3)

    curves.plot(steps, [pair.torch.loss for pair in comparison.steps], label="PyTorch", color=TORCH, lw=2.4)
    curves.plot(steps, [pair.jax.loss for pair in comparison.steps], label="JAX", color=JAX, lw=1, ls="--")
    for backend, color in (("torch", TORCH), ("jax", JAX)):
        curves.plot(len(steps), comparison.validation[backend], "D", color=color, ms=6 if backend == "torch" else 3)
    curves.set(xlabel="step", ylabel="loss (nats per token)", title="One model, two backends")
    curves.legend(frameon=False, title=f"validation {comparison.validation['torch']:.3f} (diamonds)")

    loss_dtype = "float64" if comparison.dtype == "float64" else "float32"
    equal = np.finfo(loss_dtype).eps / 16  # where a difference of exactly 0 is drawn
    differences.semilogy(steps, [max(abs(p.difference), equal) for p in comparison.steps], ".", ms=3, color="#444")
    differences.axhline(comparison.loss_tolerance, color="#888", lw=1, ls=":")
    differences.annotate("tolerance", (0, comparison.loss_tolerance), va="bottom", fontsize=9, color="#666")
    differences.annotate("bitwise equal", (0, equal), va="bottom", fontsize=9, color="#666")
    differences.set(xlabel="step", ylabel="|loss PyTorch - loss JAX|", title="Losses apart", ylim=(equal / 2, None))

    after = sorted((g for g in comparison.gradients if g.step > 0), key=lambda g: g.relative, reverse=True)
    for values, marker, color, label in (
        ([g.relative for g in after], "o", INK, comparison.dtype),
        ([g.exact for g in after], "x", ORACLE, "float64"),
    ):
        gradients.semilogy(range(len(values)), np.maximum(values, 1e-17), marker, ms=4, color=color, label=label)
    gradients.set(xlabel="parameter", ylabel="relative difference", title="Gradients apart, after training")
    gradients.legend(frameon=False)
    figure.savefig(path, dpi=110)
