"""Drawings of pipeline schedules: one row per rank, time from left to right, one labelled cell per action.

The colours of F, B, I and W differ in greyscale too; the virtual stages of a rank are shades, lighter for later ones.
Equal schedules and costs give identical files.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from diptych.plans.schedule.actions import Action, Schedule
from diptych.plans.schedule.simulate import Costs, simulate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = {"F": "#6aa9d6", "B": "#16325c", "I": "#b0413e", "W": "#ecd06f"}
KINDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
SHADES = {
    "F": ("#619bc5", "#81b6dc"),
    "B": ("#112849", "#233e65"),
    "I": ("#9b3937", "#b85451"),
    "W": ("#dcc268", "#f2df9d"),
}
"""Colours of a rank's first and last virtual stage, if it has several: lightness (CIE L*) 5 below and above."""
IDLE = "#f1f1f1"
INK = "#222222"

WIDTH = 11.0
LEFT = 0.62
RIGHT = 0.12
ROW = 0.25
TITLE = 0.34
LEGEND = 0.22
BOTTOM = 0.48
TALLEST = 18.0
"""Inches: figure width and side margins; a rank's row, a title, the legend, the time axis, the tallest figure."""
CELL = 0.88
"""Height of a cell as a share of its row."""
DIGIT = 0.64
"""Width of a digit as a share of its height."""
SMALLEST = 4.5
LARGEST = 8.0
"""Smallest and largest font of the numbers in cells, points; narrower cells have no number."""
DPI = 160


class Bar(NamedTuple):
    """Start and duration of an action."""

    start: float
    duration: float


class Timeline(NamedTuple):
    """A schedule with the times of its actions, predicted or measured."""

    schedule: Schedule
    bars: Mapping[Action, Bar]
    title: str

    @property
    def end(self) -> float:
        """The time at which the last action ends."""
        return max((bar.start + bar.duration for bar in self.bars.values()), default=0.0)


def timeline_of(schedule: Schedule, costs: Costs | None = None, title: str | None = None) -> Timeline:
    """Return the timeline of a schedule, by simulation.

    Args:
        schedule: any valid schedule.
        costs: times of actions and messages; None: the defaults of Costs.
        title: None: name, makespan and bubble share.
    """
    costs = costs or Costs()
    simulation = simulate(schedule, costs)
    if title is None:
        bubble = sum(simulation.bubble) / (schedule.pp_size * simulation.makespan) if simulation.makespan else 0.0
        stages = f", {schedule.stages_per_rank} virtual stages per rank" if schedule.stages_per_rank > 1 else ""
        title = f"{schedule.name}{stages}: makespan {simulation.makespan:g}, bubble {bubble:.1%}"
    bars = {action: Bar(start, costs.time(action)) for action, start in simulation.starts.items()}
    return Timeline(schedule, bars, title)


def draw_timelines(
    timelines: Sequence[Timeline], path: Path | str | None = None, unit: str = "a stage's forward is 1"
) -> "Figure":
    """Draw schedules below each other, on one time axis.

    Args:
        timelines: from top to bottom.
        path: a .png or .svg to write; None: no file is written.
        unit: unit of time, for the axis.

    Raises:
        ValueError: there is no timeline, or the file is neither .png nor .svg.
    """
    from matplotlib.figure import Figure

    if not timelines:
        raise ValueError("timelines: expected at least one, got none")
    if path is not None and Path(path).suffix not in (".png", ".svg"):
        raise ValueError(f"path: expected a name that ends in .png or .svg, got {str(path)!r}")
    rows = sum(timeline.schedule.pp_size for timeline in timelines)
    row = min(ROW, (TALLEST - LEGEND - BOTTOM - TITLE * len(timelines)) / rows)
    height = LEGEND + BOTTOM + TITLE * len(timelines) + row * rows
    figure = Figure(figsize=(WIDTH, height))
    figure.set_layout_engine("none")
    end = max(timeline.end for timeline in timelines)
    top = LEGEND
    width = WIDTH - LEFT - RIGHT
    for place, timeline in enumerate(timelines):
        tall = row * timeline.schedule.pp_size
        top += TITLE
        axes = figure.add_axes((LEFT / WIDTH, 1 - (top + tall) / height, width / WIDTH, tall / height))
        _draw(axes, timeline, end, 72 * width, 72 * tall)
        is_last = place == len(timelines) - 1
        axes.tick_params(axis="x", length=3 if is_last else 0, labelbottom=is_last)
        top += tall
    figure.axes[-1].set_xlabel(f"time ({unit})", fontsize=9, color=INK)
    _add_legend(figure, timelines, height)
    if path is not None:
        _save(figure, Path(path))
    return figure


def shade(kind: str, vp_stage: int, stages_per_rank: int) -> tuple[float, float, float]:
    """Return the colour of an action: its kind's, darker for early virtual stages and lighter for late ones."""
    if stages_per_rank == 1:
        return _parts(COLORS[kind])
    first, last = (_parts(color) for color in SHADES[kind])
    place = vp_stage / (stages_per_rank - 1)
    red, green, blue = (a + place * (b - a) for a, b in zip(first, last, strict=True))
    return red, green, blue


def _parts(color: str) -> tuple[float, float, float]:
    return int(color[1:3], 16) / 255, int(color[3:5], 16) / 255, int(color[5:], 16) / 255


def _draw(axes: "Axes", timeline: Timeline, end: float, width: float, height: float) -> None:
    """Draw background rows, cells, numbers and a title; width and height of the axes in points."""
    schedule = timeline.schedule
    axes.broken_barh([(0.0, timeline.end)], (-CELL / 2, CELL), facecolor=IDLE, linewidth=0, gid="idle")
    for rank in range(1, schedule.pp_size):
        axes.broken_barh([(0.0, timeline.end)], (rank - CELL / 2, CELL), facecolor=IDLE, linewidth=0, gid="idle")
    _draw_cells(axes, timeline, 0.5 if width / max(end, 1e-12) * _shortest(timeline) > SMALLEST else 0.0)
    _write_numbers(axes, timeline, width / max(end, 1e-12), height / schedule.pp_size * CELL)
    axes.set_xlim(0, end or 1)
    axes.set_ylim(schedule.pp_size - 0.5, -0.5)
    ranks = range(0, schedule.pp_size, 1 if height / schedule.pp_size > 8 else 4)
    axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks], fontsize=8, color=INK)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8, colors=INK)
    axes.spines[:].set_visible(False)
    axes.grid(visible=False)
    axes.set_title(timeline.title, loc="left", fontsize=9.5, color=INK, pad=5)


def _draw_cells(axes: "Axes", timeline: Timeline, line: float) -> None:
    """Add one collection of rectangles for each kind and virtual stage."""
    from matplotlib.collections import PolyCollection

    schedule = timeline.schedule
    shapes: dict[tuple[str, int], list[list[tuple[float, float]]]] = {}
    for action, (start, duration) in timeline.bars.items():
        rank = schedule.rank_of(action.stage)
        vp_stage = action.stage // schedule.pp_size
        x = (start, start + duration)
        y = (rank - CELL / 2, rank + CELL / 2)
        corners = [(x[0], y[0]), (x[1], y[0]), (x[1], y[1]), (x[0], y[1])]
        shapes.setdefault((action.kind, vp_stage), []).append(corners)
    for (kind, vp_stage), corners in sorted(shapes.items()):
        color = shade(kind, vp_stage, schedule.stages_per_rank)
        cells = PolyCollection(corners, facecolor=color, edgecolor="white", linewidth=line, gid=f"{kind}/{vp_stage}")
        axes.add_collection(cells, autolim=False)


def _write_numbers(axes: "Axes", timeline: Timeline, unit: float, height: float) -> None:
    """Write microbatch numbers into cells that are wide enough; unit of time and cell height in points."""
    digits = len(str(timeline.schedule.num_microbatches - 1))
    fitting = min(0.8 * height, unit * _shortest(timeline) / (DIGIT * (digits + 0.5)))
    size = min(max(fitting, SMALLEST), LARGEST)
    if 0.9 * height < size:
        return
    for action, (start, duration) in timeline.bars.items():
        text = str(action.microbatch)
        if DIGIT * size * (len(text) + 0.4) > unit * duration:
            continue
        light = action.kind in "FW"
        axes.text(
            start + duration / 2,
            timeline.schedule.rank_of(action.stage),
            text,
            fontsize=size,
            color=INK if light else "white",
            ha="center",
            va="center_baseline",
            clip_on=True,
            gid=str(action),
        )


def _shortest(timeline: Timeline) -> float:
    return min((bar.duration for bar in timeline.bars.values() if bar.duration > 0), default=1.0)


def _add_legend(figure: "Figure", timelines: Sequence[Timeline], height: float) -> None:
    """Add a legend with the kinds that occur, the bubble, and the shades of virtual stages."""
    from matplotlib.patches import Patch

    occurring = {action.kind for timeline in timelines for action in timeline.bars}
    patches = [Patch(color=COLORS[kind], label=f"{kind}: {name}") for kind, name in KINDS.items() if kind in occurring]
    patches.append(Patch(color=IDLE, label="bubble"))
    most = max((timeline.schedule.stages_per_rank for timeline in timelines), default=1)
    if most > 1:
        for vp_stage, words in ((0, "first virtual stage, darker"), (most - 1, "last, lighter")):
            patches.append(Patch(color=shade("F", vp_stage, most), label=words))
    figure.legend(
        handles=patches,
        loc="upper left",
        bbox_to_anchor=(LEFT / WIDTH, 1 - 0.08 / height),
        ncols=len(patches),
        frameon=False,
        fontsize=8.5,
        labelcolor=INK,
        borderaxespad=0,
        borderpad=0,
        handlelength=1.3,
        columnspacing=1.6,
    )


def _save(figure: "Figure", path: Path) -> None:
    """Save without date, version or random names, so that equal figures give identical files."""
    import matplotlib

    metadata = {"Date": None, "Creator": None} if path.suffix == ".svg" else {"Software": None}
    with matplotlib.rc_context({"svg.hashsalt": "diptych"}):
        figure.savefig(path, dpi=DPI, metadata=metadata)
