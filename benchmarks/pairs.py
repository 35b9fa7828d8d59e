"""Pairs of PyTorch and JAX from PyPI, compared by the toolkit: equal, or different, where and under which settings.

    python -m benchmarks.pairs            (make bench NAME=pairs)

The files of benchmarks/pair_cases hold the comparisons. Each case states its verdict, and a case that finds another one
fails the run. A difference is explained by a further case of the same pair that removes it and is equal.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.pair_cases import DIFFERENT, EQUAL, PAIRS, SHAPES, Case, Pair, functions, layers, losses, optimizers
from parity.report import environment

RESULT = Path("benchmarks/results/pairs.json")
GROUPS = {"Layers": layers, "Functions": functions, "Losses": losses, "Optimizers and schedules": optimizers}
"""Headings of the page's tables, and the module of each one's pairs."""


def judge(pair: Pair, case: Case, dtypes: tuple[str, ...] | None = None) -> dict[str, Any]:
    """Compare a pair in one case.

    Args:
        pair: the pair.
        case: one of its cases.
        dtypes: the dtypes to compare in; None: those of the case.

    Returns:
        The verdict, and of a difference the place, its size relative to the result, and its tolerance.
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


def table_rows(pairs: list[dict[str, Any]], group: str) -> list[str]:
    """Return the rows of one of the page's tables.

    Args:
        pairs: the pairs of the results.
        group: heading of the table.
    """
    rows = []
    for pair in pairs:
        if pair["group"] == group:
            cases = [f"{case['settings']}: {_verdict(case)}" for case in pair["cases"]]
            rows.append(f"| {pair['torch']} | {pair['jax']} | {'<br>'.join(cases)} | {pair['why']} |")
    return rows


def _verdict(case: dict[str, Any]) -> str:
    if case["verdict"] != DIFFERENT:
        return case["verdict"]
    size = "nan" if case["difference"] == float("inf") else f"{case['difference']:.0e}".replace("e-0", "e-")
    return f"**different** ({size})"


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
    console.print(f"written: {RESULT}")
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
