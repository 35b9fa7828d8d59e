"""What a step takes by a schedule made for its costs, and by the best one with a name, beside what both are to take.

    python -m benchmarks.generated_schedule             (make bench-generated-schedule)

Stages that sleep, unlike each other, on 4 gloo ranks of this machine. Both tables run from files, turn by turn; medians
are quoted.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.generated_schedule_jobs import write_table
from parity.report import environment
from plans.actions import Schedule
from plans.config import TransformerConfig
from plans.generate import generate_schedule, named_schedules
from plans.placement import Placement
from plans.schedule_file import schedule_to_csv
from plans.simulate import Costs, simulate
from reference_torch.rank_pool import RankPool

RANKS, MICROBATCHES = 4, 8
STEPS, ROUNDS = 2, 2
RESULT = Path("benchmarks/results/generated_schedule-cpu.json")


class Case(NamedTuple):
    """Stages, and what a rank may keep."""

    name: str
    stages_per_rank: int
    costs: Costs
    """Seconds; in units of one microbatch's activations on a stage."""
    memory_limit: float | None = None
    placement: Placement = "loop"


CASES = (
    Case("slow link, between zb-h1 and zb-h2", 1, Costs(0.08, 0.096, 0.072, 0.04, 1.0, 0.5), 5.0),
    Case(
        "heavy head, there and back",
        2,
        Costs([0.05] * 7 + [0.085], [0.06] * 7 + [0.085], [0.04] * 7 + [0.085], 0.005, 1.0, 0.5),
        placement="v",
    ),
    Case("two stages a rank", 2, Costs(0.05, 0.06, 0.04, 0.01, 1.0, 0.5)),
)


def main() -> None:
    """Measure, print, and write the JSON file."""
    console = Console()
    tables = [(case, schedule) for case in CASES for schedule in (best_named(case), generated(case))]
    seconds: list[list[float]] = [[] for _ in tables]
    with (
        tempfile.TemporaryDirectory() as folder,
        RankPool(RANKS, 300.0, ("benchmarks.generated_schedule_jobs",)) as pool,
    ):
        configs = [
            config_of(case, write_table(folder, str(place), schedule_to_csv(schedule)))
            for place, (case, schedule) in enumerate(tables)
        ]
        for _ in track(range(ROUNDS), "rounds of sleeping stages", console=console, transient=True):
            for place, (case, _) in enumerate(tables):
                job = ("benchmarks.generated_schedule_jobs:time_table", configs[place], MICROBATCHES, case.costs, STEPS)
                seconds[place] += np.max(pool.run(*job), axis=0).tolist()
    rows = [row_of(case, table, times) for (case, table), times in zip(tables, seconds, strict=True)]
    show(console, rows)
    results = {"environment": environment(), "microbatches": MICROBATCHES, "time": rows}
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(results, indent=1) + "\n")
    console.print(f"written: {RESULT}")


def best_named(case: Case) -> Schedule:
    """The shortest of those with a name that fit."""
    found = []
    for schedule in named_schedules(RANKS, MICROBATCHES, case.stages_per_rank, case.placement):
        course = simulate(schedule, case.costs)
        if case.memory_limit is None or max(course.peak_bytes) <= case.memory_limit:
            found.append((course.makespan, schedule.name, schedule))
    return min(found, key=lambda each: each[:2])[-1]


def generated(case: Case) -> Schedule:
    """The one made for the costs."""
    made = generate_schedule(RANKS, MICROBATCHES, case.stages_per_rank, case.costs, case.memory_limit, case.placement)
    return made.schedule


def config_of(case: Case, path: str) -> TransformerConfig:
    """Stages that sleep have no layers that matter; width and length are those of what is sent."""
    return TransformerConfig(
        16,
        RANKS * case.stages_per_rank,
        1,
        seq_length=1,
        pipeline_model_parallel_size=RANKS,
        virtual_pipeline_model_parallel_size=case.stages_per_rank if case.stages_per_rank > 1 else None,
        pipeline_schedule_file=path,
    )


def row_of(case: Case, schedule: Schedule, times: list[float]) -> dict[str, Any]:
    """What was measured of one table, beside its makespan."""
    course = simulate(schedule, case.costs)
    return {
        "case": case.name,
        "schedule": schedule.name,
        "predicted_seconds": course.makespan,
        "peak_kept": max(course.peak_bytes),
        "seconds": float(np.median(times)),
        "all_seconds": times,
        "excess": float(np.median(times)) / course.makespan - 1.0,
    }


def show(console: Console, rows: list[dict[str, Any]]) -> None:
    """A table."""
    title = f"{RANKS} ranks, {MICROBATCHES} microbatches, stages that sleep"
    table = Table(box=None, title=title, title_justify="left")
    for heading in ("costs", "schedule", "kept at most", "predicted s", "median s", "over"):
        table.add_column(heading, justify="left" if heading in ("costs", "schedule") else "right")
    for row in rows:
        table.add_row(
            row["case"],
            row["schedule"],
            f"{row['peak_kept']:g}",
            f"{row['predicted_seconds']:.3f}",
            f"{row['seconds']:.3f}",
            f"{row['excess']:+.1%}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
