"""The table in docs/composition.md: pairs of features that were compared with the plain model together.

python -m tests.composition_report [torch cases] [JAX cases]          (make composition; takes minutes)
"""

import json
import os
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path

import hypothesis
from hypothesis import Phase, given, settings
from rich.progress import track

from diptych.plans.model.implementation import callback_threads
from tests.composition import (
    DIMENSIONS,
    FEATURES,
    MAX_RANKS,
    QUICK,
    RARE,
    Composition,
    Pools,
    are_accepted,
    assert_learns_as_plain,
    compositions,
    jax_step,
)

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "composition.md"
RESULTS = ROOT / "benchmarks" / "results" / "composition-cpu.json"
BEGIN = "<!-- table: python -m tests.composition_report -->\n"
END = "<!-- end of table -->\n"
TORCH_CASES = 300
JAX_CASES = 60
SEED = 20261122


@dataclass(frozen=True)
class Case:
    """The result of running one composition."""

    backend: str
    features: tuple[str, ...]
    ranks: int
    seconds: float
    failure: str
    """The error; empty if the step equals that of the plain model within tolerance."""


def draw(count: int) -> list[Composition]:
    """Draw compositions with a fixed seed."""
    drawn: list[Composition] = []

    @hypothesis.seed(SEED)
    @settings(
        max_examples=count, database=None, phases=[Phase.generate], suppress_health_check=[*hypothesis.HealthCheck]
    )
    @given(compositions(QUICK))
    def collect(composition: Composition) -> None:
        drawn.append(composition)

    collect()
    return drawn


def run(backend: str, composition: Composition, pools: Pools) -> Case:
    """Run one composition and compare it with the plain model."""
    start = time.monotonic()
    failure = ""
    try:
        found = pools.step(composition) if backend == "torch" else jax_step(composition)
        assert_learns_as_plain(found, composition, same_rounding=backend == "torch")
    except Exception as error:  # every error is a result
        failure = f"{type(error).__name__}: {error}".splitlines()[0]
    return Case(backend, composition.features, composition.ranks, round(time.monotonic() - start, 2), failure)


def count_pairs(cases: list[dict]) -> Counter[tuple[str, str, str]]:
    """Count the runs of each pair of features, by backend and pair in the order of FEATURES."""
    return Counter((case["backend"], *pair) for case in cases for pair in combinations(case["features"], 2))


def table(results: dict) -> str:
    """Return the Markdown table of runs in PyTorch / in JAX, by pair of dimensions."""
    cases = results["cases"]
    names = [*DIMENSIONS]
    pairs: Counter[tuple[str, str, str]] = Counter()
    for (backend, *pair), times in count_pairs(cases).items():
        dimensions = sorted((FEATURES[name][0] for name in pair), key=names.index)
        pairs[backend, dimensions[0], dimensions[1]] += times
    environment = results["environment"]
    runs = {backend: sum(case["backend"] == backend for case in cases) for backend in ("torch", "jax")}
    failed = [case for case in cases if case["failure"]]
    possible = [p for p in combinations(QUICK, 2) if FEATURES[p[0]][0] != FEATURES[p[1]][0]]
    possible = [pair for pair in possible if are_accepted(*pair)]
    seen = {backend: sum((backend, *pair) in count_pairs(cases) for pair in possible) for backend in runs}
    versions = ", ".join(f"{name} {environment['versions'][name]}" for name in ("torch", "jax"))
    lines = [
        f"{environment['date'][:10]}, {environment['machine']}, {versions}: {runs['torch']} compositions in PyTorch, "
        f"{runs['jax']} of them in JAX, {len(failed)} different from the reference model. Of "
        f"{len(possible)} compatible pairs of features of two dimensions, PyTorch ran {seen['torch']} and JAX "
        f"{seen['jax']}. Number of compositions by pair of dimensions, PyTorch / JAX:\n",
        "| |" + "".join(f" {name} |" for name in names[1:-1]),
        "|---|" + "---|" * (len(names) - 2),
    ]
    for row, first in enumerate(names[:-2]):
        cells = [
            "" if column <= row else f"{pairs['torch', first, second]} / {pairs['jax', first, second]}"
            for column, second in enumerate(names[1:-1], start=1)
        ]
        lines.append(f"| {first} | " + " | ".join(cells) + " |")
    lines += [
        f"\nDifferent from the plain model, {c['backend']}: {', '.join(c['features'])}: {c['failure']}" for c in failed
    ]
    return "\n".join(lines) + "\n"


def updated(page: str, text: str) -> str:
    """Return the page with a new table."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + text + END + rest.split(END, 1)[1]


def main() -> None:
    """Run the numbers of cases that the command line gives, and write results and table."""
    import jax

    torch_cases, jax_cases = map(int, sys.argv[1:] or (TORCH_CASES, JAX_CASES))
    os.environ["NPROC"] = str(callback_threads(MAX_RANKS))
    jax.config.update("jax_num_cpu_devices", MAX_RANKS)
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_disable_most_optimizations", True)
    from parity.report import environment

    drawn = draw(torch_cases)
    pools = Pools()
    try:
        cases = [run("torch", each, pools) for each in track(drawn, "in PyTorch")]
    finally:
        pools.close()
    rare_first = sorted(drawn, key=lambda composition: not {*RARE} & {*composition.features})
    cases += [run("jax", each, pools) for each in track(rare_first[:jax_cases], "in JAX")]
    results = {"environment": environment(), "seed": SEED, "cases": [asdict(case) for case in cases]}
    RESULTS.write_text(json.dumps(json.loads(json.dumps(results)), indent=1) + "\n")
    PAGE.write_text(updated(PAGE.read_text(), table(json.loads(RESULTS.read_text()))))
    failed = [case for case in cases if case.failure]
    for case in failed:
        print(case)
    print(f"{len(cases)} compositions, {len(failed)} different from the plain model; written: {RESULTS}, {PAGE}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
