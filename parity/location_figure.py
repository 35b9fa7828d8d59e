"""Figure of the differences of two models along their depth, forward and backward."""

from pathlib import Path

from parity.figures import FAILING, INK, ORACLE
from parity.location import BACKWARD, FORWARD, Location

LEAST = 1e-17
"""Difference at which equal values are drawn."""


def draw_location(location: Location, path: Path) -> None:
    """Draw the inherited differences at all points, and mark the submodule that causes them.

    Args:
        location: the result of locate.
        path: image file to write.
    """
    from matplotlib.figure import Figure

    entries = [entry for entry in location.points if entry.point.path]
    figure = Figure(figsize=(min(16.0, 4.0 + 0.22 * len(entries)), 4.4), layout="constrained")
    axis = figure.subplots()
    places = range(len(entries))
    for direction, color, look in ((FORWARD, INK, "o-"), (BACKWARD, ORACLE, "s--")):
        values = [max(LEAST, getattr(entry, direction)) for entry in entries]
        label = "outputs (forward)" if direction == FORWARD else "cotangents (backward)"
        axis.plot(places, values, look, color=color, markersize=4, linewidth=1.1, label=label)
    for place, entry in enumerate(entries):
        if entry.point == location.point:
            axis.axvline(place, color=FAILING, linewidth=6, alpha=0.3, label=f"first difference ({location.direction})")
    axis.set(
        yscale="log", ylabel="relative difference in float64", title=location.place or "no difference beyond rounding"
    )
    axis.set_xticks(list(places), [str(entry.point) for entry in entries], rotation=90, fontsize=7)
    axis.grid(True, axis="y", color="#e6e6e6")
    axis.legend(frameon=False)
    figure.savefig(path, dpi=100)
