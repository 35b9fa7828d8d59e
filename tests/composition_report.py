"""The table in docs/composition.md: which pairs of features have learnt together what the plain model learns.

python -m tests.composition_report [torch cases] [JAX cases]          (make composition: some minutes)
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
PAGE, RESULTS = ROOT / "docs" / "composition.md", ROOT / "benchmarks" / "results" / "composition-cpu.json"
BEGIN, END = "<!-- table: python -m tests.composition_report -->\n", "<!-- end of table -->\n"
TORCH_CASES, JAX_CASES = 300, 60
SEED = 20261122


@dataclass(frozen=True)
class Case:
    """A composition that was run."""

    backend: str
    features: tuple[str, ...]
    ranks: int
    seconds: float
    failure: str
    """The empty string: it learnt as the plain one."""


def draw(count: int) -> list[Composition]:
    """So many compositions, the same every time."""
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
    """One composition, compared with the plain one."""
    start, failure = time.monotonic(), ""
    try:
        found = pools.step(composition) if backend == "torch" else jax_step(composition)
        assert_learns_as_plain(found, composition, rounds_alike=backend == "torch")
    except Exception as error:  # whatever it is: it is the result
        failure = f"{type(error).__name__}: {error}".splitlines()[0]
    return Case(backend, composition.features, composition.ranks, round(time.monotonic() - start, 2), failure)


def counted(cases: list[dict]) -> Counter[tuple[str, str, str]]:
    """How often a pair of features was run, by backend and the pair in the order of FEATURES."""
    return Counter((case["backend"], *pair) for case in cases for pair in combinations(case["features"], 2))


def table(results: dict) -> str:
    """Markdown: dimensions by dimensions, runs in PyTorch / in JAX of any pair of their features."""
    cases, names = results["cases"], [*DIMENSIONS]
    pairs: Counter[tuple[str, str, str]] = Counter()
    for (backend, *pair), times in counted(cases).items():
        dimensions = sorted((FEATURES[name][0] for name in pair), key=names.index)
        pairs[backend, dimensions[0], dimensions[1]] += times
    environment = results["environment"]
    runs = {backend: sum(case["backend"] == backend for case in cases) for backend in ("torch", "jax")}
    failed = [case for case in cases if case["failure"]]
    possible = [p for p in combinations(QUICK, 2) if FEATURES[p[0]][0] != FEATURES[p[1]][0]]
    possible = [pair for pair in possible if are_accepted(*pair)]
    seen = {backend: sum((backend, *pair) in counted(cases) for pair in possible) for backend in runs}
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
    lines += [f"\nUnlike the plain model, {c['backend']}: {', '.join(c['features'])}: {c['failure']}" for c in failed]
    return "\n".join(lines) + "\n"


def written(page: str, text: str) -> str:
    """The page with the table in its place."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + text + END + rest.split(END, 1)[1]


def main() -> None:
    """Run, and write results and table; so many cases in PyTorch and in JAX as the command says."""
    import jax

    torch_cases, jax_cases = map(int, sys.argv[1:] or (TORCH_CASES, JAX_CASES))
    os.environ["NPROC"] = str(callback_threads(8))
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_disable_most_optimizations", True)
    from parity.report import environment

    drawn, pools = draw(torch_cases), Pools()
    try:
        cases = [run("torch", each, pools) for each in track(drawn, "in PyTorch")]
    finally:
        pools.close()
    rare_first = sorted(drawn, key=lambda composition: not {*RARE} & {*composition.features})
    cases += [run("jax", each, pools) for each in track(rare_first[:jax_cases], "in JAX")]
    results = {"environment": environment(), "seed": SEED, "cases": [asdict(case) for case in cases]}
    RESULTS.write_text(json.dumps(json.loads(json.dumps(results)), indent=1) + "\n")
    PAGE.write_text(written(PAGE.read_text(), table(json.loads(RESULTS.read_text()))))
    failed = [case for case in cases if case.failure]
    for case in failed:
        print(case)
    print(f"{len(cases)} compositions, {len(failed)} unlike the plain model; written: {RESULTS}, {PAGE}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
