"""Pictures of runs from their metrics.jsonl: loss, gradient norm and learning rate over steps."""

from collections.abc import Sequence
from pathlib import Path

from parity.cli.run import METRICS, read_metrics
from parity.figures import JAX, TORCH

COLORS = {"torch": TORCH, "jax": JAX}
NAMES = {"torch": "PyTorch", "jax": "JAX"}


def write_curves(runs: Sequence[Path], path: Path) -> None:
    """Draw the curves of runs into one picture; the colour of a step shows the backend that trained it.

    Args:
        runs: folders with a metrics.jsonl.
        path: image file to write.

    Raises:
        ValueError: a folder has no metrics.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    axes = figure.subplots(1, 3)
    titles = (("loss", "loss (nats per token)"), ("grad_norm", "gradient norm"), ("learning_rate", "learning rate"))
    for run in runs:
        lines = read_metrics(run / METRICS)
        if not lines:
            raise ValueError(f"runs: expected a {METRICS} with steps in {run}, got none; train with --save {run}")
        for axis, (key, label) in zip(axes, titles, strict=True):
            axis.set(xlabel="step", ylabel=label)
            for backend, color in COLORS.items():
                points = [(line["step"], line[key]) for line in lines if key in line and line["backend"] == backend]
                if points:
                    axis.plot(*zip(*points, strict=True), color=color, lw=1.2, label=NAMES[backend])
        losses = [(line["step"], line["validation_loss"]) for line in lines if "validation_loss" in line]
        if losses:
            axes[0].plot(*zip(*losses, strict=True), "o", color="#222", ms=4, label="validation")
    handles = dict(
        reversed([(text, handle) for handle, text in zip(*axes[0].get_legend_handles_labels(), strict=True)])
    )
    axes[0].legend(handles.values(), handles.keys(), frameon=False)
    figure.savefig(path, dpi=110)
