"""The table in docs/kernels.md: what every kernel uses, compiled ahead of time for two GPUs, without either.

python -m benchmarks.kernels_report          (make kernels-report: writes it anew)
"""

from pathlib import Path

import triton
from rich.progress import track

from kernels import ahead

PAGE = Path(__file__).parent.parent / "docs" / "kernels.md"
BEGIN, END = "<!-- table: python -m benchmarks.kernels_report -->\n", "<!-- end of table -->\n"
TOKENS, STREAMS, WIDTH, DTYPE = 8192, 4, 4096, "bfloat16"


def resources() -> dict[str, dict[int, ahead.Resources]]:
    """What every kernel uses at its production shape, by kernel and compute capability."""
    recorded = ahead.production(TOKENS, STREAMS, WIDTH, DTYPE)
    pairs = [(name, capability) for name in recorded for capability in ahead.TARGETS]
    used: dict[str, dict[int, ahead.Resources]] = {name: {} for name in recorded}
    for name, capability in track(pairs, "compiling"):
        used[name][capability] = ahead.resources(recorded[name], capability)
    return used


def table(used: dict[str, dict[int, ahead.Resources]]) -> str:
    """Markdown: a row a kernel."""
    recorded = ahead.production(TOKENS, STREAMS, WIDTH, DTYPE)
    lines = [
        f"Triton {triton.__version__}, {TOKENS} tokens of S = {STREAMS}, D = {WIDTH}, {DTYPE}; registers a thread / "
        "spilled bytes a thread / shared bytes a program, and the share of a multiprocessor's warps registers allow.\n",
        "| kernel | ideal bytes a token | warps |" + "".join(f" sm_{target} |" for target in ahead.TARGETS),
        "|---|---|---|" + "---|" * len(ahead.TARGETS),
    ]
    for name, entry in recorded.items():
        cells = (
            f" {use.registers} / {use.spilled} / {use.shared}, {ahead.occupancy(use):.0%} |"
            for use in (used[name][target] for target in ahead.TARGETS)
        )
        moved = f"{entry.ideal_bytes(TOKENS):,}"
        lines.append(f"| {name} | {moved} | {entry.launch.num_warps} |" + "".join(cells))
    return "\n".join(lines) + "\n"


def main() -> None:
    """Replace the table in the page."""
    page = PAGE.read_text()
    start, end = page.index(BEGIN) + len(BEGIN), page.index(END)
    PAGE.write_text(page[:start] + table(resources()) + page[end:])


if __name__ == "__main__":
    main()
