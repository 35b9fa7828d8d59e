"""Measured time of training steps, compared with the prediction of diptych.planner.step_time.

    python -m benchmarks.step_time            (make bench NAME=step_time)

PyTorch runs two processes of one thread each, and JAX one process on one core. The rates of the machine (products,
memory, messages, latency of an operation) are measured on both processes at once. A case with one rank runs on both
processes at once, and a case with two ranks runs on them together. Times are medians of steps, and ratios are predicted
over measured. The search of the planner needs the order of configurations. The benchmark therefore counts the pairs
that are predicted in the measured order, among the pairs whose measured times differ by more than a tenth.
"""

import json
import os
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

from rich.console import Console
from rich.progress import track
from rich.table import Table

from diptych.planner.search import RECOMPUTE
from diptych.planner.step_time import Machine, step_time
from diptych.plans.config import TrainConfig, TransformerConfig
from parity.report import environment
from reference_torch.rank_pool import RankPool

RANKS = 2
STEPS = 4
JOBS = "benchmarks.jobs.step_time"
BASE = TransformerConfig(256, 4, 4, seq_length=256)
RESULT = Path("benchmarks/results/step_time-cpu.json")
DIFFERENT = 1.1
"""Ratio above which two measured times count as different."""


@dataclass(frozen=True)
class Case:
    """A configuration of training."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    micro_batch_size: int = 4
    global_batch_size: int = 4
    replicas: int = 1

    @property
    def config(self) -> TransformerConfig:
        """The configuration of the model and its pipeline."""
        return replace(BASE, **self.settings)

    @property
    def train(self) -> TrainConfig:
        """The training settings with the batch sizes of the case."""
        return TrainConfig(global_batch_size=self.global_batch_size, micro_batch_size=self.micro_batch_size)

    @property
    def together(self) -> bool:
        """True if the ranks train one model together."""
        return self.replicas * self.config.model_parallel_size > 1

    def predicted(self, machine: Machine) -> float:
        """Return the predicted seconds of a step."""
        count = self.global_batch_size // self.micro_batch_size // self.replicas
        return step_time(self.config, self.micro_batch_size, count, self.replicas, machine).total


def _pipeline(name: str, virtual: int | None = None) -> Case:
    settings = {
        "pipeline_model_parallel_size": 2,
        "pipeline_schedule": name,
        "virtual_pipeline_model_parallel_size": virtual,
    }
    return Case(f"pp 2, {name}", settings, micro_batch_size=2, global_batch_size=8)


MHC = {"enable_hyper_connections": True}
CASES = (
    *(Case(f"recompute {mode}", settings) for mode, settings in RECOMPUTE.items() if "mhc" not in mode),
    *(Case(f"mHC, recompute {mode}", MHC | RECOMPUTE[mode]) for mode in ("nothing", "mhc + layernorm", "whole layers")),
    Case("4 microbatches", micro_batch_size=1),
    Case("8 layers", {"num_layers": 8}),
    Case("wide", {"hidden_size": 512}),
    Case("long, attention at once", {"seq_length": 1024, "use_flash_attn": True}, 1, 1),
    Case("long, attention in steps", {"seq_length": 1024}, 1, 1),
    Case("gdn", {"layer_pattern": "gdn"}),
    Case("kda", {"layer_pattern": "kda"}),
    Case("dp 2", replicas=2, global_batch_size=8),
    Case("cp 2", {"context_parallel_size": 2}),
    _pipeline("gpipe"),
    _pipeline("1f1b"),
    _pipeline("zb-h1"),
    _pipeline("interleaved", 2),
    _pipeline("zb-v", 2),
)


def main() -> None:
    """Measure, print the tables, and write the JSON file."""
    console = Console()
    seconds = {}
    torch_machine, seconds["torch"] = measure_torch(console)
    rates, seconds["jax"] = measure_jax(console)
    machines = {"torch": torch_machine, "jax": replace(torch_machine, **rates, operation_latency=0.0)}
    results: dict[str, Any] = {"environment": environment(), "model": asdict(BASE), "steps": STEPS}
    for backend, machine in machines.items():
        rows = [row_of(case, machine, seconds[backend]) for case in CASES if case.name in seconds[backend]]
        results[backend] = {"machine": asdict(machine), "rows": rows, **summary(rows)}
    show(console, results)
    RESULT.write_text(json.dumps(results, indent=1) + "\n")
    console.print(f"written: {RESULT}")


def measure_torch(console: Console) -> tuple[Machine, dict[str, list[float]]]:
    """Measure the rates of the slower rank, and the step times of every case."""
    with RankPool(RANKS, 300.0) as pool:
        both = pool.run(f"{JOBS}:torch_rates")
        slowest = {name: (max if name.endswith("latency") else min)(rates[name] for rates in both) for name in both[0]}
        seconds = {}
        for case in track(CASES, "steps", console=console, transient=True):
            job = (f"{JOBS}:torch_steps", case.config, case.train, STEPS, case.together)
            seconds[case.name] = [max(times) for times in zip(*pool.run(*job), strict=True)]
    return Machine(**slowest), seconds


def measure_jax(console: Console) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Measure rates and step times of one JAX process on one core."""
    with RankPool(1, 600.0) as pool:
        (rates,) = pool.run(f"{JOBS}:jax_rates")
        alone = [case for case in CASES if not case.together]
        return rates, {
            case.name: pool.run(f"{JOBS}:jax_steps", case.config, case.train, STEPS)[0]
            for case in track(alone, "steps in JAX", console=console, transient=True)
        }


def row_of(case: Case, machine: Machine, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Return the measured and predicted times of a case."""
    measured = median(seconds[case.name])
    predicted = case.predicted(machine)
    return {
        "case": case.name,
        "measured_seconds": measured,
        "all_seconds": seconds[case.name],
        "predicted_seconds": predicted,
        "ratio": predicted / measured,
    }


def summary(rows: list[dict]) -> dict[str, float]:
    """Return the median and extremes of the ratios, and the number of pairs that are predicted in order."""
    ratios = sorted(row["ratio"] for row in rows)
    apart = right = 0
    for one, other in combinations(rows, 2):
        faster, slower = sorted((one, other), key=lambda row: row["measured_seconds"])
        if slower["measured_seconds"] > DIFFERENT * faster["measured_seconds"]:
            apart += 1
            right += slower["predicted_seconds"] > faster["predicted_seconds"]
    return {
        "median_ratio": median(ratios),
        "lowest_ratio": ratios[0],
        "highest_ratio": ratios[-1],
        "pairs": apart,
        "pairs_in_order": right,
    }


def show(console: Console, results: dict) -> None:
    """Print the table and the rates."""
    table = Table(box=None, title="seconds of a step: predicted, measured, ratio", title_justify="left")
    table.add_column("case")
    for backend in ("torch", "jax"):
        for word in (backend, "", ""):
            table.add_column(word, justify="right")
    by_case = {backend: {row["case"]: row for row in results[backend]["rows"]} for backend in ("torch", "jax")}
    for case in CASES:
        cells = []
        for backend in ("torch", "jax"):
            row = by_case[backend].get(case.name)
            names = ("predicted_seconds", "measured_seconds", "ratio")
            cells += ["", "", ""] if row is None else [f"{row[name]:.3f}" for name in names]
        table.add_row(case.name, *cells)
    console.print(table)
    for backend in ("torch", "jax"):
        part = results[backend]
        rates = ", ".join(f"{name} {value:.3g}" for name, value in part["machine"].items())
        console.print(f"{backend}: {rates}", highlight=False, soft_wrap=True)
        console.print(
            f"  ratio {part['median_ratio']:.2f} ({part['lowest_ratio']:.2f} to {part['highest_ratio']:.2f}); "
            f"{part['pairs_in_order']} of {part['pairs']} pairs predicted in order"
        )


if __name__ == "__main__":
    main()
