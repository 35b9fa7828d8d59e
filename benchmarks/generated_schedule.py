"""Step time of a generated schedule and of the best named schedule, measured and predicted.

    python -m benchmarks.generated_schedule             (make bench NAME=generated_schedule)

1. Sleeping stages of unequal costs, on 4 gloo ranks of this machine, and on 4 CPU devices of JAX in lock-step.
2. Stages that compute, with one core per rank. The time of each action is measured first (benchmarks/stage_costs.py).
   The schedule is generated for these times, and measured steps are compared with its makespan.

Both schedules are read from files and run in alternation. Times are medians.
"""

import json
import os
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.jobs.generated_schedule import write_table
from benchmarks.jobs.sleeping_jax import Sleeping, time_apart
from benchmarks.stage_costs import measure
from diptych.planner.generate import generate_schedule, named_schedules
from diptych.plans.config import TransformerConfig
from diptych.plans.schedule.actions import Schedule
from diptych.plans.schedule.csv import read_schedule, schedule_to_csv
from diptych.plans.schedule.lockstep import lockstep_makespan
from diptych.plans.schedule.placement import Placement
from diptych.plans.schedule.simulate import Costs, simulate
from parity.report import environment
from reference_torch.rank_pool import RankPool

STEPS = 2
ROUNDS = 2
REAL_ROUNDS = 6
"""Rounds of computing stages; in each, the schedules run in turn."""
TIMED = 6
"""Steps in which the actions of computing stages are timed."""
JOBS = "benchmarks.jobs.generated_schedule"
RESULT = Path("benchmarks/results/generated_schedule-cpu.json")


class Case(NamedTuple):
    """A pipeline: its costs, placement and memory limit."""

    name: str
    stages_per_rank: int
    costs: Costs
    """Times in seconds; memory in units of the activations of one microbatch on a stage."""
    memory_limit: float | None = None
    placement: Placement = "loop"
    ranks: int = 4
    microbatches: int = 8


CASES = (
    Case("slow link, between zb-h1 and zb-h2", 1, Costs(0.08, 0.096, 0.072, 0.04, 1.0, 0.5), 5.0),
    Case(
        "heavy head, V-shaped",
        2,
        Costs([0.05] * 7 + [0.085], [0.06] * 7 + [0.085], [0.04] * 7 + [0.085], 0.005, 1.0, 0.5),
        placement="v",
    ),
    Case("two stages a rank", 2, Costs(0.05, 0.06, 0.04, 0.01, 1.0, 0.5)),
)


IN_JAX = {"jax_predicted_seconds": ".3f", "jax_seconds": ".3f", "jax_excess": "+.1%"}
"""Formats of the columns that only rows with JAX results have."""

REAL = TransformerConfig(
    hidden_size=256,
    num_layers=4,
    num_attention_heads=4,
    seq_length=256,
    vocab_size=4096,
    untie_embeddings_and_output_weights=True,
    pipeline_model_parallel_size=2,
    virtual_pipeline_model_parallel_size=2,
)
REAL_CASES: dict[str, tuple[TransformerConfig, Placement, int]] = {
    "two stages a rank": (replace(REAL, pipeline_schedule="interleaved"), "loop", 4),
    "V-shaped": (replace(REAL, pipeline_schedule="zb-v"), "v", 4),
    "a short last stage, one a rank": (
        replace(
            REAL, num_layers=5, virtual_pipeline_model_parallel_size=None, pipeline_model_parallel_layout="Ettt|ttL"
        ),
        "loop",
        4,
    ),
}
"""Model, placement of its stages, and number of microbatches of one sequence."""


def main() -> None:
    """Measure, print the tables, and write the JSON file."""
    console = Console(width=120)
    slept = measure_sleeping(console)
    real = measure_real(console)
    show(console, "sleeping stages", slept)
    show(console, "computing stages", real)
    results = {"environment": environment(), "time": slept, "real": real}
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(results, indent=1) + "\n")
    console.print(f"written: {RESULT}")


def measure_sleeping(console: Console) -> list[dict[str, Any]]:
    """Measure the sleeping stages and return the rows of the first table."""
    tables = [(case, schedule) for case in CASES for schedule in (best_named(case), generated(case))]
    seconds: list[list[float]] = [[] for _ in tables]
    with (
        tempfile.TemporaryDirectory() as folder,
        RankPool(max(case.ranks for case in CASES), 300.0) as pool,
    ):
        configs = [
            config_of(case, write_table(folder, str(number), schedule_to_csv(schedule)))
            for number, (case, schedule) in enumerate(tables)
        ]
        for _ in track(range(ROUNDS), "rounds of sleeping stages", console=console, transient=True):
            for number, (case, _) in enumerate(tables):
                job = (f"{JOBS}:time_table", configs[number], case.microbatches, case.costs, STEPS)
                seconds[number] += np.max(pool.run(*job), axis=0).tolist()
        # The JAX devices of one process have no slow link.
        costs = [replace(case.costs, communication=0.0) for case, _ in tables]
        inputs = zip(configs, tables, costs, strict=True)
        in_jax = time_apart(
            [Sleeping(config, case.microbatches, own) for config, (case, _), own in inputs], STEPS * ROUNDS
        )
    rows = zip(tables, seconds, costs, in_jax, strict=True)
    return [
        row_of(case, schedule, times)
        | {
            "jax_predicted_seconds": lockstep_makespan(schedule, own),
            "jax_seconds": float(np.median(theirs)),
            "jax_all_seconds": theirs,
            "jax_excess": float(np.median(theirs)) / lockstep_makespan(schedule, own) - 1.0,
        }
        for (case, schedule), times, own, theirs in rows
    ]


def measure_real(console: Console) -> list[dict[str, Any]]:
    """Measure the computing stages and return the rows of the second table."""
    tables = []
    for name, (config, placement, count) in track(REAL_CASES.items(), "actions", console=console, transient=True):
        costs = measure(config, 1, count, TIMED)
        ranks = config.pipeline_model_parallel_size
        stages = config.virtual_pipeline_model_parallel_size or 1
        case = Case(name, stages, costs, None, placement, ranks, count)
        tables += [(case, config, schedule) for schedule in (best_named(case), generated(case))]
    seconds: list[list[float]] = [[] for _ in tables]
    with (
        tempfile.TemporaryDirectory() as folder,
        RankPool(max(case.ranks for case, *_ in tables), 300.0) as pool,
    ):
        paths = [write_table(folder, str(n), schedule_to_csv(schedule)) for n, (*_, schedule) in enumerate(tables)]
        for _ in track(range(REAL_ROUNDS), "rounds of computing stages", console=console, transient=True):
            for number, (case, config, _) in enumerate(tables):
                by_file = replace(config, pipeline_schedule=None, pipeline_schedule_file=read_schedule(paths[number]))
                ranks = pool.run(f"{JOBS}:time_steps", by_file, 1, case.microbatches, STEPS)
                seconds[number] += np.max(ranks, axis=0).tolist()
    return [
        row_of(case, schedule, times) | {"costs": asdict(case.costs)}
        for (case, _, schedule), times in zip(tables, seconds, strict=True)
    ]


def best_named(case: Case) -> Schedule:
    """Return the shortest named schedule that fits the memory limit."""
    found = []
    for schedule in named_schedules(case.ranks, case.microbatches, case.stages_per_rank, case.placement):
        simulation = simulate(schedule, case.costs)
        if case.memory_limit is None or max(simulation.peak_bytes) <= case.memory_limit:
            found.append((simulation.makespan, schedule.name, schedule))
    return min(found, key=lambda each: each[:2])[-1]


def generated(case: Case) -> Schedule:
    """Return the schedule generated for the costs."""
    sizes = case.ranks, case.microbatches, case.stages_per_rank
    return generate_schedule(*sizes, case.costs, case.memory_limit, case.placement).schedule


def config_of(case: Case, path: str) -> TransformerConfig:
    """Return the configuration of sleeping stages; only the shape of the messages matters."""
    return TransformerConfig(
        16,
        case.ranks * case.stages_per_rank,
        1,
        seq_length=1,
        pipeline_model_parallel_size=case.ranks,
        virtual_pipeline_model_parallel_size=case.stages_per_rank if case.stages_per_rank > 1 else None,
        pipeline_schedule_file=read_schedule(path),
    )


def row_of(case: Case, schedule: Schedule, times: list[float]) -> dict[str, Any]:
    """Return the measured times of one schedule and its predicted makespan."""
    simulation = simulate(schedule, case.costs)
    return {
        "case": case.name,
        "ranks": case.ranks,
        "microbatches": case.microbatches,
        "schedule": schedule.name,
        "predicted_seconds": simulation.makespan,
        "peak_kept": max(simulation.peak_bytes),
        "seconds": float(np.median(times)),
        "all_seconds": times,
        "excess": float(np.median(times)) / simulation.makespan - 1.0,
    }


def show(console: Console, title: str, rows: list[dict[str, Any]]) -> None:
    """Print the rows as a table."""
    title += f": {rows[0]['ranks']} ranks, {rows[0]['microbatches']} microbatches"
    table = Table(box=None, title=title, title_justify="left")
    headings = ["costs", "schedule", "peak memory", "predicted s", "median s", "excess"]
    in_jax = "jax_seconds" in rows[0]
    for heading in [*headings, *(["in JAX: predicted s", "median s", "excess"] if in_jax else [])]:
        table.add_column(heading, justify="left" if heading in ("costs", "schedule") else "right")
    for row in rows:
        table.add_row(
            row["case"],
            row["schedule"],
            f"{row['peak_kept']:g}",
            f"{row['predicted_seconds']:.3f}",
            f"{row['seconds']:.3f}",
            f"{row['excess']:+.1%}",
            *(f"{row[name]:{form}}" for name, form in IN_JAX.items() if in_jax),
        )
    console.print(table)


if __name__ == "__main__":
    main()
