"""Functions and layers of PyTorch compared with their counterparts in JAX, flax and optax, each with a verdict.

    python -m benchmarks.pairs            (make bench NAME=pairs)

The files of benchmarks/pair_cases hold the comparisons. Each case states its verdict, and a case that finds another one
fails the run. A further case of the same pair, which is equal, shows which setting removes a difference.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.pair_cases import DIFFERENT, EQUAL, PAIRS, SHAPES, Case, Pair, functions, layers, losses, optimizers
from parity.report import environment

RESULT, PAGE = Path("benchmarks/results/pairs.json"), Path("docs/pairs.md")
BEGIN = "<!-- make bench NAME=pairs writes these tables -->"
END = "<!-- end of tables -->"
GROUPS = {"Layers": layers, "Functions": functions, "Losses": losses, "Optimizers and schedules": optimizers}
"""Headings of the page's tables, and the module of each one's pairs."""


def judge(pair: Pair, case: Case, dtypes: tuple[str, ...] | None = None) -> dict[str, Any]:
    """Compare a pair in one case.

    Args:
        pair: the pair.
        case: one of its cases.
        dtypes: the dtypes to compare in; None: those of the case.

    Returns:
        The verdict, and for a difference its place, its size relative to the result, and its tolerance.
    """
    dtypes = dtypes or case.dtypes
    stated = {"settings": case.settings, "stated": case.verdict, "dtypes": dtypes}
    try:
        report = pair.compare(dtypes, **case.arguments)
    except ValueError as error:
        if "expected equal shapes" not in str(error):
            raise
        return {**stated, "verdict": SHAPES, "where": str(error)}
    found = {**stated, "verdict": EQUAL if report.is_equal else DIFFERENT, "notes": report.notes}
    if report.different:
        row = report.different[0]
        found |= {
            "where": f"{row.kind} {row.name}",
            "dtype": row.dtype,
            "difference": row.difference.norm,
            "tolerance": row.difference.tolerance,
        }
    return found


def group_of(pair: Pair) -> str:
    """Return the heading of the table that holds a pair."""
    (name,) = [name for name, module in GROUPS.items() if pair.compare.__module__ == module.__name__]
    return name


def page_table(pairs: list[dict[str, Any]]) -> str:
    """Return the tables of the page for the pairs of the results."""
    lines = []
    for group in GROUPS:
        lines += [f"### {group}", "", "| PyTorch | JAX | different | equal | reason |", "|---|---|---|---|---|"]
        for pair in pairs:
            if pair["group"] == group:
                different = "; ".join(_difference(case) for case in pair["cases"] if case["verdict"] != EQUAL)
                equal = "; ".join(case["settings"] for case in pair["cases"] if case["verdict"] == EQUAL)
                lines.append(
                    f"| {pair['torch']} | {pair['jax']} | {different} | {equal} | {pair['why']} |".replace("*", r"\*")
                )
        lines.append("")
    return "\n".join(lines)


def _difference(case: dict[str, Any]) -> str:
    """Return the settings of a case that differs, and the difference relative to the result."""
    if case["verdict"] == SHAPES:
        return f"{case['settings']} (shapes)"
    return f"{case['settings']} ({'nan' if np.isinf(case['difference']) else format(case['difference'], '.0e')})"


def write_page(content: dict[str, Any]) -> None:
    """Write the tables of the results into the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{page_table(content['pairs'])}{END}{rest.partition(END)[2]}")


def main() -> None:
    """Compare all pairs, print the table, and write the results."""
    console = Console(width=150)
    pairs = []
    started = time.perf_counter()
    for pair in track(PAIRS, "comparing", console=console):
        cases = [judge(pair, case) for case in pair.cases]
        pairs.append({"torch": pair.torch, "jax": pair.jax, "group": group_of(pair), "why": pair.why, "cases": cases})
    table = Table(box=None)
    for heading in ("PyTorch", "JAX", "settings", "verdict", "where", "difference"):
        table.add_column(heading, overflow="fold")
    wrong = []
    for pair in pairs:
        for case in pair["cases"]:
            size = f"{case['difference']:.1e}" if "difference" in case else ""
            where = case.get("where", "") if case["verdict"] == DIFFERENT else ""
            table.add_row(pair["torch"], pair["jax"], case["settings"], case["verdict"], where, size)
            if case["verdict"] != case["stated"]:
                wrong.append(
                    f"{pair['torch']}, {case['settings']}: {case['stated']} is stated, {case['verdict']} found"
                )
    console.print(table)
    console.print(f"{len(pairs)} pairs, {sum(len(pair['cases']) for pair in pairs)} comparisons")
    seconds = time.perf_counter() - started
    content = {"environment": environment(), "seconds": round(seconds), "pairs": pairs}
    RESULT.write_text(json.dumps(content, indent=1) + "\n")
    write_page(content)
    console.print(f"written: {RESULT}, {PAGE}")
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
