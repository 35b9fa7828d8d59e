"""Draw docs/images/architecture.png: the packages, their imports, and the mesh of ranks with its messages.

    python -m docs.generate.architecture          (draws the figure)

The background is white, so that the figure is readable on dark and on light pages.
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch

PICTURE = Path(__file__).parents[1] / "images" / "architecture.png"
INK = "#222222"
GREY = "#666666"
PLANS = "#f6edc9"
KERNELS = "#e4e4e4"
TORCH = "#f7d9cd"
JAX = "#d5e5f4"
PARITY = "#dcecd8"
USERS = "#f4f4f4"
DPI = 130
SIZE = (11.0, 8.8)

PLANS_FILES = (
    (
        ("config/", "settings and their rules"),
        ("model/", "layers, parameters, data, Philox"),
        ("training", "batches, learning rate, clipping"),
        ("checkpoint", "files and their checks"),
    ),
    (
        ("schedule/partition", "layers of each stage"),
        ("schedule/named", "order of work of each rank"),
        ("schedule/messages", "messages between ranks"),
        ("schedule/simulate", "time, bubble, memory"),
    ),
    (
        ("recompute", "dropped values, blocks"),
        ("offload/", "moves of layers"),
        ("context/", "tokens of each rank, exchanges"),
        ("mesh", "axes of the ranks"),
    ),
)
KERNELS_FILES = (
    ("launch_configs", "grids, blocks"),
    ("autodiff_rules", "forward and backward"),
    ("api", "public functions"),
    ("streams", "mHC"),
    ("coefficients", "mHC"),
    ("activations", "SwiGLU, GELU"),
    ("delta_rule/", "GDN, KDA"),
)
MODULES = (
    ("train", "Trainer: a step, AdamW, resume"),
    ("pipeline/", "executes the schedule"),
    ("saving", "state as named arrays"),
    ("transformer", "GPTModel, layers, attention, MLP"),
    ("linear_attention", "Gated DeltaNet, KDA layers"),
    ("hyper_connections", "Sinkhorn, residual streams"),
    ("context_parallel/", "exchanges of states"),
    ("delta_rule/", "recurrent and chunked"),
    ("offload/", "executes the moves"),
    ("recompute", "drops and replays values"),
    ("ops", "norms, rotary, dropout, loss"),
)
LINE = 0.205
"""Distance between two lines of a module."""


def box(axes: Axes, x: float, y: float, width: float, height: float, color: str, title: str) -> None:
    """Draw a package with its name."""
    shape = FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=0.08", fc=color, ec=INK, lw=0.9)
    axes.add_patch(shape)
    axes.text(x + 0.12, y + height - 0.11, title, va="top", size=10, weight="bold", color=INK)


def files(axes: Axes, x: float, y: float, lines: tuple[tuple[str, str], ...], indent: float) -> None:
    """Draw names of files with their content, from the top line down."""
    for number, (name, what) in enumerate(lines):
        axes.text(x, y - number * LINE, name, va="top", size=7.6, weight="bold", color=INK)
        axes.text(x + indent, y - number * LINE, what, va="top", size=7.6, color=INK)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], **style: object) -> None:
    """Draw an arrow from the importing package to the imported one."""
    given: dict = {
        "arrowstyle": "-|>",
        "mutation_scale": 11,
        "lw": 1.3,
        "color": INK,
        "shrinkA": 0,
        "shrinkB": 0,
    } | style
    axes.add_patch(FancyArrowPatch(start, end, **given))


def draw_modules(axes: Axes) -> None:
    """Draw the packages, each above those that import it."""
    box(axes, 0.1, 4.6, 10.8, 1.3, PLANS, "diptych/plans/   decisions before a tensor exists (NumPy only)")
    for number, lines in enumerate(PLANS_FILES):
        files(axes, 0.22 + 3.6 * number, 5.5, lines, 1.4)
    for x, color, title in ((0.1, TORCH, "reference_torch/   PyTorch"), (7.1, JAX, "jax_impl/   JAX, Flax")):
        box(axes, x, 1.35, 3.8, 2.78, color, title)
        files(axes, x + 0.12, 3.75, MODULES, 1.4)
    box(axes, 4.3, 2.1, 2.4, 2.03, KERNELS, "kernels/   Triton")
    files(axes, 4.42, 3.75, KERNELS_FILES, 1.0)
    for x, name in ((4.3, "torch_backend"), (5.55, "jax_backend")):
        box(axes, x, 1.65, 1.15, 0.36, KERNELS, "")
        axes.text(x + 0.575, 1.83, name, ha="center", va="center", size=7.6, weight="bold", color=INK)
    arrow(axes, (3.9, 1.83), (4.3, 1.83))
    arrow(axes, (7.1, 1.83), (6.7, 1.83))
    for x in (2.0, 5.5, 9.0):
        arrow(axes, (x, 4.13), (x, 4.6))
    arrow(axes, (3.94, 1.48), (7.06, 1.48), arrowstyle="<|-|>", linestyle=(0, (4, 3)), color=GREY)
    axes.text(5.5, 1.37, "mirrored files: same names, order, signatures", ha="center", va="top", size=7.6, color=GREY)
    box(
        axes,
        0.1,
        0.55,
        10.8,
        0.42,
        PARITY,
        "parity/   imports both backends: comparison, reports, the diptych command",
    )
    for x in (2.0, 9.0):
        arrow(axes, (x, 0.97), (x, 1.35))
    below = "tests/, notebooks/ and benchmarks/ import everything. Black arrows: imports."
    axes.text(5.5, 0.3, below, ha="center", va="center", size=8.5, color=INK)
    axes.set(xlim=(0, 11), ylim=(0.1, 6.0))


def draw_mesh(axes: Axes) -> None:
    """Draw two replicas of two context ranks of a pipeline of four."""
    pp = 4
    cp = 2
    dp = 2
    for replica in range(dp):
        left = 0.45 + replica * 5.6
        frame = FancyBboxPatch(
            (left - 0.35, 0.42), 4.75, 1.7, boxstyle="round,pad=0,rounding_size=0.08", fc=USERS, ec=GREY
        )
        axes.add_patch(frame)
        axes.text(left - 0.22, 2.04, f"dp_rank {replica}", va="top", size=8, weight="bold", color=INK)
        for part in range(cp):
            y = 1.48 - 0.72 * part
            axes.text(left - 0.22, y, f"cp_rank {part}", va="center", size=7, color=GREY)
            for rank in range(pp):
                x = left + 0.78 + rank * 1.02
                number = (replica * cp + part) * pp + rank
                axes.add_patch(Circle((x, y), 0.17, fc="white", ec=INK, lw=1.0))
                axes.text(x, y, str(number), ha="center", va="center", size=8.5, color=INK)
                if rank + 1 < pp:
                    arrow(axes, (x + 0.17, y), (x + 0.85, y), arrowstyle="<|-|>", color="#16325c")
                if part == 0:
                    arrow(axes, (x, y - 0.17), (x, y - 0.55), arrowstyle="<|-|>", color="#b0413e")
    arrow(axes, (4.95, 1.12), (5.7, 1.12), arrowstyle="<|-|>", color="#3b7a3b", lw=1.8)
    for x, color, text in (
        (0.1, "#16325c", "pp: residual streams and their\ngradients, one message per action"),
        (3.75, "#b0413e", "cp: states of delta-rule layers, keys\nand values, tokens of convolutions"),
        (7.45, "#3b7a3b", "dp and cp: gradients of equal\nparameters, summed once per step"),
    ):
        axes.text(x, 0.33, text, va="top", size=7.8, color=color, linespacing=1.35)
    axes.text(
        0.1,
        2.42,
        "A mesh dp x cp x pp of 2 x 2 x 4:   rank = (dp_rank * cp_size + cp_rank) * pp_size + pp_rank",
        size=10,
        weight="bold",
        color=INK,
    )
    axes.set(xlim=(0, 11), ylim=(-0.1, 2.65))


def main() -> None:
    """Draw the picture."""
    with plt.rc_context({"font.family": "DejaVu Sans"}):
        figure, (modules, mesh) = plt.subplots(2, 1, figsize=SIZE, height_ratios=[5.9, 2.75], layout="constrained")
        draw_modules(modules)
        draw_mesh(mesh)
        for axes in (modules, mesh):
            axes.set_axis_off()
            axes.set_aspect("equal")
        figure.savefig(PICTURE, dpi=DPI, facecolor="white", metadata={"Software": ""})
        plt.close(figure)


if __name__ == "__main__":
    main()
