"""Views of a comparison for notebooks: both results beside each other, and errors against a size.

Each view is static HTML, so that a saved notebook shows it. Where a kernel runs and ipywidgets is installed, sliders
compute it anew.
"""

import base64
import html
import io
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from parity.figures import INK, draw_errors
from parity.functions import Pair, Report, compare_functions
from parity.implementations import JaxImplementation, TorchImplementation, make_inputs
from parity.pytrees import is_floating, widened
from parity.rounding import EPSILON

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Slider = tuple[float, float] | tuple[float, float, float]
"""Lowest value, highest value and, optionally, step. Integers make a slider of integers."""
LARGEST = 4
"""Number of outputs that side_by_side draws."""
ERROR_LIMITS = (1e-17, 10.0)
"""Least and largest error of sweep's axis."""


@dataclass
class View:
    """A figure and its numbers; a notebook shows it, and its sliders update it."""

    compute: Callable[[dict[str, Any]], tuple["Figure", list[Report]]]
    """Return the figure and the reports for the values of the static arguments."""
    static: dict[str, Any]
    sliders: dict[str, Slider]

    def __post_init__(self) -> None:
        for name, slider in self.sliders.items():
            if len(slider) not in (2, 3) or not slider[0] < slider[1]:
                raise ValueError(
                    f"sliders[{name!r}]: expected (lowest, highest) or (lowest, highest, step), got {slider}"
                )
            self.static.setdefault(name, slider[0])
        self.figure, self.reports = self.compute(self.static)

    def update(self, **values: Any) -> None:
        """Compute the view for other values of static arguments.

        Raises:
            ValueError: an argument has no slider, or as in the function that made the view.
        """
        unknown = sorted(values.keys() - self.sliders.keys())
        if unknown:
            raise ValueError(
                f"update: expected values of {', '.join(self.sliders) or 'no'} sliders, got {unknown[0]!r}"
            )
        self.static.update(values)
        self.figure, self.reports = self.compute(self.static)

    def check(self) -> None:
        """Raise an error if a difference is more than rounding; see Report.check."""
        for report in self.reports:
            report.check()

    def _repr_html_(self) -> str:
        """Return the figure and the verdicts as HTML without external files."""
        picture = io.BytesIO()
        self.figure.savefig(picture, format="png", dpi=90)
        encoded = base64.b64encode(picture.getvalue()).decode()
        lines = "\n".join(html.escape(str(report).splitlines()[-1]) for report in self.reports[-1:])
        return f'<img src="data:image/png;base64,{encoded}"><pre style="white-space: pre-wrap">{lines}</pre>'

    def _ipython_display_(self) -> None:
        """Show the HTML, and sliders that update it where a kernel runs."""
        from IPython.display import HTML, display

        handle = display(HTML(self._repr_html_()), display_id=True)
        if not self.sliders or not _has_kernel():
            return
        import ipywidgets

        def moved(_: Any) -> None:
            self.update(**{name: widget.value for name, widget in widgets.items()})
            if handle is not None:
                handle.update(HTML(self._repr_html_()))

        widgets = {name: self._widget(name) for name in self.sliders}
        for widget in widgets.values():
            widget.observe(moved, "value")
        display(ipywidgets.VBox(list(widgets.values())))

    def _widget(self, name: str) -> Any:
        """Return the slider of a static argument."""
        import ipywidgets

        low, high, *step = self.sliders[name]
        is_integer = all(isinstance(value, int) for value in self.sliders[name])
        kind = ipywidgets.IntSlider if is_integer else ipywidgets.FloatSlider
        given = {"step": step[0]} if step else {} if is_integer else {"step": (high - low) / 50}
        value = self.static[name]
        return kind(value=value, min=low, max=high, description=name, continuous_update=False, **given)


def _has_kernel() -> bool:
    """Return True in a notebook whose kernel has ipywidgets."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if getattr(shell, "kernel", None) is None:
        return False
    try:
        import ipywidgets  # noqa: F401
    except ImportError:
        return False
    return True


def side_by_side(
    torch_function: Callable,
    jax_function: Any,
    inputs: Any,
    *,
    static: Mapping[str, Any] | None = None,
    sliders: Mapping[str, Slider] | None = None,
    dtype: str = "float32",
    seed: int = 0,
) -> View:
    """Show the outputs of both functions and their difference in ulps as heat maps.

    Args:
        torch_function: as in compare_functions.
        jax_function: as in compare_functions.
        inputs: as in compare_functions.
        static: as in compare_functions.
        sliders: static arguments that a slider changes; the first value is that of static, or the lowest.
        dtype: dtype of the run; float64, float32 or bfloat16.
        seed: as in compare_functions.

    Returns:
        A view with the report of the comparison in this dtype. The last axis of an output runs to the right, all others
        run downwards. The difference is in ulps of the output's largest element.

    Raises:
        ValueError: as in compare_functions, or a slider has no range.
    """

    def compute(values: dict[str, Any]) -> tuple["Figure", list[Report]]:
        call = make_inputs(inputs, values)
        pair = Pair(TorchImplementation(torch_function, call), JaxImplementation(jax_function, call), call)
        report = pair.compare([dtype], gradients=True, seed=seed)
        arrays = {name: widened(array) for name, array in call.arrays.items()}
        ours, theirs = (v.rounded(dtype) for v in pair.values(pair.torch.parameters, arrays))
        results = pair.torch.run(ours, dtype, None).outputs, pair.jax.run(theirs, dtype, None).outputs
        return _draw_outputs(*results, dtype), [report]

    return View(compute, dict(static or {}), dict(sliders or {}))


def _draw_outputs(ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray], dtype: str) -> "Figure":
    """Return heat maps of outputs of both sides and of their differences, one row for each output."""
    from matplotlib.figure import Figure

    names = [name for name in ours if is_floating(ours[name]) and ours[name].size][:LARGEST]
    figure = Figure(figsize=(10.5, 2.6 * max(1, len(names))), layout="constrained")
    axes = figure.subplots(max(1, len(names)), 3, squeeze=False)
    for row, name in zip(axes, names, strict=False):
        first, second = (np.abs(side[name]) if np.iscomplexobj(side[name]) else side[name] for side in (ours, theirs))
        largest = max(np.abs(first).max(), np.abs(second).max())
        unit = EPSILON[dtype] * 2.0 ** np.floor(np.log2(largest)) if 0.0 < largest < np.inf else 1.0
        ulps = np.abs(ours[name] - theirs[name]) / unit
        panels = [
            (f"PyTorch: {name}", first, {"cmap": "RdBu_r", "vmin": -largest, "vmax": largest}),
            (f"JAX: {name}", second, {"cmap": "RdBu_r", "vmin": -largest, "vmax": largest}),
            (f"difference in ulps of {dtype}", ulps, {"cmap": "magma", "vmin": 0.0, "vmax": max(1.0, ulps.max())}),
        ]
        for axis, (title, array, colors) in zip(row, panels, strict=True):
            flat = array.reshape(-1, array.shape[-1]) if array.ndim else array.reshape(1, 1)
            image = axis.imshow(flat, aspect="auto", interpolation="nearest", **colors)
            axis.grid(False)
            axis.set_title(title, fontsize=9, color=INK)
            axis.grid(False)
            axis.yaxis.get_major_locator().set_params(integer=True)
            figure.colorbar(image, ax=axis)
    return figure


def sweep(
    torch_function: Callable,
    jax_function: Any,
    inputs: Callable[[int], Any],
    sizes: Sequence[int],
    *,
    static: Mapping[str, Any] | Callable[[int], Mapping[str, Any]] | None = None,
    sliders: Mapping[str, Slider] | None = None,
    dtypes: Sequence[str] = ("float64", "float32", "bfloat16"),
    xlabel: str = "size",
    seed: int = 0,
) -> View:
    """Show the errors of both functions against a size or a depth.

    In float64 the figure shows the difference of both functions, and in a narrower dtype the error of each function
    relative to its own float64 result. Both are the largest of all outputs and gradients.

    Args:
        torch_function: as in compare_functions.
        jax_function: as in compare_functions.
        inputs: function that returns the inputs of a size.
        sizes: sizes, for example tokens, or layers if static depends on them.
        static: static arguments, or a function that returns those of a size.
        sliders: as in side_by_side.
        dtypes: as in compare_functions.
        xlabel: name of the size.
        seed: as in compare_functions.

    Returns:
        A view with one report for each size.

    Raises:
        ValueError: as in compare_functions, or there are no sizes.
    """
    if not sizes:
        raise ValueError("sizes: expected at least one size, got none")

    def compute(values: dict[str, Any]) -> tuple["Figure", list[Report]]:
        reports = []
        for size in sizes:
            given = static(size) if callable(static) else {}
            merged = {**values, **given}
            arrays = inputs(size)
            reports.append(
                compare_functions(torch_function, jax_function, arrays, static=merged, dtypes=dtypes, seed=seed)
            )
        return _draw_sweep(sizes, reports, dtypes, xlabel), reports

    return View(compute, {} if callable(static) else dict(static or {}), dict(sliders or {}))


def _draw_sweep(sizes: Sequence[int], reports: Sequence[Report], dtypes: Sequence[str], xlabel: str) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * len(dtypes), 3.4), layout="constrained")
    for axis, dtype in zip(figure.subplots(1, len(dtypes), squeeze=False)[0], dtypes, strict=True):
        rows = [[row for row in report.rows if row.dtype == dtype] for report in reports]
        curves = {
            "PyTorch": [max(row.torch_error for row in group) for group in rows],
            "JAX": [max(row.jax_error for row in group) for group in rows],
        }
        levels = {"unit roundoff": EPSILON[dtype] / 2}
        if dtype == "float64":
            curves = {"difference": [max(row.difference.norm for row in group) for group in rows]}
            levels = {"largest tolerance": max(row.difference.tolerance for group in rows for row in group)}
        ylabel = "relative difference" if dtype == "float64" else "relative error against float64"
        draw_errors(axis, sizes, curves, ERROR_LIMITS, levels, xlabel=xlabel, ylabel=ylabel, title=dtype)
        axis.legend(frameon=False)
    return figure
