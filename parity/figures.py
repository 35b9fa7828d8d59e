"""One style, one colour code and the shared drawings of all figures that compare the backends.

The colour of a curve states what it shows: PyTorch, JAX, a variant that fails on purpose, or an oracle, tolerance or
other reference. Black is for quantities of neither or of both backends. matplotlib is optional: it is imported when a
figure is drawn.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TORCH = "#d1603d"
JAX = "#1f4e9c"
FAILING = "#7a4fa3"
ORACLE = "#8a8a8a"
INK = "#222222"
"""Colours of PyTorch, of JAX, of a failing variant, of oracles and tolerances, and of everything else."""
DASHED = ("median", "bfloat16")
"""Words in the label of a curve that make it dashed, with white markers."""
MOST_LABELS = 10
"""Number of sizes above which draw_errors labels every second one."""

STYLES: dict[str, dict[str, Any]] = {
    "PyTorch": {"color": TORCH, "marker": "D", "markersize": 6, "linewidth": 2.2},
    "JAX": {"color": JAX, "marker": "o", "markersize": 4, "linewidth": 1.0},
    "failing": {"color": FAILING, "marker": "s", "markersize": 4, "linewidth": 1.4},
    "oracle": {"color": ORACLE, "marker": "", "linewidth": 0.9},
    "predicted": {"color": ORACLE, "marker": "", "linewidth": 0.9},
    "reference": {"color": ORACLE, "marker": ".", "linewidth": 0.9},
}
"""Line style of a curve, by the first word of its label. JAX is drawn thinner, so that equal curves are both seen."""

_OTHER = {"color": INK, "marker": "^", "markersize": 4, "linewidth": 1.0, "linestyle": "--"}
_RC: dict[Any, Any] = {
    "figure.dpi": 90,
    "savefig.dpi": 90,
    "font.size": 9.5,
    "axes.titlesize": 10,
    "legend.fontsize": 8.5,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": ORACLE,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}


def use_style() -> None:
    """Set the style of all figures that this process draws with pyplot."""
    import matplotlib.pyplot as plt

    plt.rcParams.update(_RC)


def style_of(label: str) -> dict[str, Any]:
    """Return the line style of a curve, as keyword arguments of matplotlib.

    Args:
        label: label of the curve; its first word (a key of STYLES) selects the style. A word of DASHED makes it dashed.
    """
    style = STYLES.get(label.replace(",", " ").replace(":", " ").split()[0], _OTHER)
    is_dashed = any(word in label for word in DASHED)
    return {**style, "linestyle": "--", "markerfacecolor": "white"} if is_dashed else style


def new_figure(columns: int = 1, height: float = 3.2, rows: int = 1, **options: Any) -> "tuple[Figure, list[Axes]]":
    """Return a figure and its axes, row by row.

    Args:
        columns: number of axes of a row; a single one takes six inches, several share eleven.
        height: height in inches.
        rows: number of rows.
        options: further arguments of matplotlib.pyplot.subplots.
    """
    import matplotlib.pyplot as plt

    width = 6.0 if columns == 1 else 11.0
    figure, axes = plt.subplots(rows, columns, figsize=(width, height), squeeze=False, **options)
    return figure, list(axes.flat)


def draw_errors(
    axis: "Axes",
    sizes: Sequence[float],
    curves: Mapping[str, Sequence[float]],
    limits: tuple[float, float],
    tolerances: Mapping[str, float] | None = None,
    log_sizes: bool = True,
    log_errors: bool = True,
    **labels: str,
) -> None:
    """Draw errors against a size.

    An error of exactly 0 is drawn at the lower limit, and an error that is not finite at the upper one, as a cross.

    Args:
        axis: axis to draw on.
        sizes: sizes, for example layers, steps or tokens.
        curves: errors at the sizes, by label; see style_of for the colours.
        limits: least and largest error of the axis.
        tolerances: levels to mark in grey, by label.
        log_sizes: use a logarithmic axis for sizes.
        log_errors: use a logarithmic axis for errors.
        labels: xlabel, ylabel and title.
    """
    least, most = limits
    for label, errors in curves.items():
        style = style_of(label)
        drawn = [most if not math.isfinite(error) else min(max(error, least), most) for error in errors]
        axis.plot(sizes, drawn, label=label, clip_on=False, **style)
        beyond = [(size, most) for size, error in zip(sizes, errors, strict=True) if not math.isfinite(error)]
        if beyond:
            axis.plot(*zip(*beyond, strict=True), "x", color=style["color"], markersize=9, clip_on=False)
            axis.annotate("not finite", beyond[0], (4, -14), textcoords="offset points", color=style["color"])
    axis.set(yscale="log" if log_errors else "linear", ylim=limits, **labels)  # pyright: ignore[reportArgumentType]
    if log_errors and any(error == 0.0 for errors in curves.values() for error in errors):
        axis.annotate("bitwise equal", (0.01, least), (0, 8), ("axes fraction", "data"), "offset points", color=ORACLE)
    for label, level in (tolerances or {}).items():
        draw_tolerance(axis, level, label)
    if log_sizes:
        axis.set_xscale("log")
    labelled = sizes if len(sizes) <= MOST_LABELS else sizes[::2]
    axis.set_xticks(list(labelled), [f"{size:g}" for size in labelled])
    axis.minorticks_off()


def draw_tolerance(axis: "Axes", level: float, label: str) -> None:
    """Mark a tolerance or another level with a dashed grey line and a label."""
    axis.axhline(level, color=ORACLE, linestyle="--", linewidth=0.9)
    axis.annotate(label, (0.99, level), (0, 2), ("axes fraction", "data"), "offset points", color=ORACLE, ha="right")


def draw_values(
    axis: "Axes", sizes: Sequence[float], curves: Mapping[str, Sequence[float]], log: bool = False, **labels: str
) -> None:
    """Draw quantities of neither backend against a size, in black, grey and white markers.

    Args:
        axis: axis to draw on.
        sizes: sizes, for example ranks or tokens.
        curves: values at the sizes, by label; up to six.
        log: use logarithmic axes.
        labels: xlabel, ylabel and title.
    """
    looks = ((INK, "o-"), (ORACLE, "s-"), (INK, "^--"), (ORACLE, "D--"), (INK, "v:"), (ORACLE, "P:"))
    for (label, values), (color, look) in zip(curves.items(), looks, strict=False):
        axis.plot(sizes, values, look, color=color, markersize=4, linewidth=1.2, label=label)
    axis.set(**labels)  # pyright: ignore[reportArgumentType]
    if log:
        axis.set(xscale="log", yscale="log")
        axis.set_xticks(list(sizes), [f"{size:g}" for size in sizes])
        axis.minorticks_off()


def draw_by_name(
    axis: "Axes",
    names: Sequence[str],
    curves: Mapping[str, Sequence[float]],
    bars: Mapping[str, Sequence[float]],
    **labels: str,
) -> None:
    """Draw values of named things, one row each, the first at the bottom.

    Args:
        axis: axis to draw on.
        names: names of the rows.
        curves: values to draw as markers, by label; see style_of for the colours.
        bars: values to draw as pale bars behind them, by label.
        labels: xlabel and title.
    """
    places = np.arange(len(names))
    for label, values in bars.items():
        axis.barh(places, values, 0.6, color=style_of(label)["color"], alpha=0.25, label=label)
    markers = iter("osD^")
    for label, values in curves.items():
        style = style_of(label)
        marker = next(markers) if style is _OTHER else style["marker"] or "|"
        size = 14 if marker == "|" else style.get("markersize", 5)
        look = {**style, "linestyle": "", "marker": marker, "markersize": size, "markeredgewidth": 1.8}
        axis.plot(values, places, **look, label=label)
    axis.set_yticks(places, names)
    axis.grid(axis="y", visible=False)
    axis.set(**labels)  # pyright: ignore[reportArgumentType]


def print_errors(heading: str, sizes: Sequence[float], curves: Mapping[str, Sequence[float]]) -> None:
    """Print errors as a table, one row per curve.

    Args:
        heading: meaning of the sizes.
        sizes: sizes, one column each.
        curves: errors at the sizes, by label.
    """
    width = max(len(heading), *(len(label) for label in curves)) + 1
    print(f"{heading:{width}}", *(f"{size:>8g}" for size in sizes))
    for label, errors in curves.items():
        print(f"{label:{width}}", *(f"{'0' if error == 0.0 else f'{error:.1e}':>8}" for error in errors))


def worst(errors: Sequence[float]) -> float:
    """Return the largest error; infinity if one is not a number."""
    return float(np.max(np.nan_to_num(np.asarray(errors, float), nan=math.inf, posinf=math.inf)))
