"""Drawings of offload plans: one row per layer, uses from left to right, with residency, copies and computation.

A recorded trace can be drawn over the plan as dots, which shows deviations.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from diptych.planner.timeline import COLORS, IDLE, INK
from diptych.plans.offload import OffloadPlan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ON_DEVICE = "#cfe3f1"
UPDATE = "#7a9a3a"
REPLAY = "#b0413e"
KINDS = {
    "F": ("forward", COLORS["F"]),
    "R": ("replay", REPLAY),
    "B": ("backward", COLORS["B"]),
    "S": ("update", UPDATE),
}


def draw_offload(
    plan: OffloadPlan, trace: Sequence[str] = (), title: str = "", path: Path | str | None = None
) -> "Figure":
    """Draw a plan, and the trace of a manager that should follow it.

    Args:
        plan: the offload plan.
        trace: events in the format of TensorOffloadManager.trace; empty: no trace is drawn.
        title: title of the figure.
        path: file to save the figure to; None: the figure is not saved.

    Raises:
        ValueError: the trace has an unknown event.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Rectangle

    layers = sorted({step.use.layer for step in plan.moves})
    row = {layer: len(layers) - 1 - place for place, layer in enumerate(layers)}
    figure = Figure(figsize=(11.0, 1.0 + 0.3 * len(layers)), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    on_device: set[int] = set()
    for place, step in enumerate(plan.moves):
        arriving = set(step.fetches)
        leaving = set(step.evictions)
        on_device |= arriving
        for layer in layers:
            color = ON_DEVICE if layer in on_device else IDLE
            axes.add_patch(Rectangle((place, row[layer]), 1.0, 0.86, color=color, lw=0))
            if layer in arriving:
                axes.plot(place + 0.25, row[layer] + 0.43, marker=">", color=INK, ms=3.5)
            if layer in leaving:
                axes.plot(place + 0.85, row[layer] + 0.43, marker="4", color=INK, ms=7)
        axes.add_patch(Rectangle((place + 0.1, row[step.use.layer]), 0.8, 0.86, color=KINDS[step.use.kind][1], lw=0))
        on_device -= leaving
    for place, layer in _used(trace):
        axes.plot(place + 0.5, row[layer] + 0.2, marker="o", color="white", mec=INK, mew=0.5, ms=3.5)
    axes.set_xlim(0, len(plan.moves))
    axes.set_ylim(0, len(layers))
    axes.set_yticks([row[layer] + 0.43 for layer in layers], [str(layer) for layer in layers])
    axes.set_xticks(
        [place + 0.5 for place in range(len(plan.moves))], [str(step.use) for step in plan.moves], fontsize=6
    )
    axes.tick_params(length=0)
    axes.set_ylabel("layer")
    axes.set_title(title, fontsize=9, loc="left")
    for side in axes.spines.values():
        side.set_visible(False)
    kinds = dict.fromkeys(step.use.kind for step in plan.moves)
    handles = [Patch(color=color, label=name) for kind, (name, color) in KINDS.items() if kind in kinds]
    handles += [Patch(color=ON_DEVICE, label="on the device"), Patch(color=IDLE, label="on the host")]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=7, frameon=False)
    if path is not None:
        figure.savefig(path, metadata={"Software": None} if str(path).endswith(".png") else None)
    return figure


def _used(trace: Sequence[str]) -> list[tuple[int, int]]:
    """Return place and layer of every use in a trace."""
    uses = [event for event in trace if event[0] in KINDS]
    unknown = [event for event in trace if event[0] not in (*KINDS, "+", "-")]
    if unknown:
        raise ValueError(f"trace: expected events as +3, F3, -3, got {unknown[0]!r}")
    return [(place, int(event[1:])) for place, event in enumerate(uses)]
