"""Time and memory of a pipeline step, compared with the prediction and with torch.distributed.pipelining.

    python -m benchmarks.pipeline             (make bench NAME=pipeline)

Sleeping stages run on 4 gloo ranks of this machine, so that the time above the predicted makespan is the overhead of
the executor. All runs alternate, and times are medians. The same stages then run on 4 CPU devices of JAX and are
compared with the time of lock-step slots. The benchmark also measures the bytes freed by
``deallocate_pipeline_outputs``, overlap on a slow link, the cost of a split backward, and temporary bytes of the JAX
program by number of microbatches.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # freed memory returns to the system at once

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.jobs.sleeping_jax import Sleeping, time_apart
from diptych.plans.config import TransformerConfig
from diptych.plans.schedule.actions import Schedule
from diptych.plans.schedule.lockstep import FUSED, lockstep_makespan
from diptych.plans.schedule.named import build_schedule
from diptych.plans.schedule.placement import V_SCHEDULES
from diptych.plans.schedule.simulate import Costs, simulate
from parity.report import environment
from reference_torch.pipeline import DeferredWeightGradients
from reference_torch.rank_pool import RankPool
from reference_torch.transformer import GPTModel

RANKS = 4
MICROBATCHES = 8
UNIT = 0.1
STEPS = 2
ROUNDS = 2
RESULT = Path("benchmarks/results/pipeline-cpu.json")
MIB = 2**20


@dataclass(frozen=True)
class Case:
    """One schedule over sleeping stages."""

    name: str
    stages_per_rank: int = 1
    delay: float = 0.0
    overlap: bool = True

    @property
    def config(self) -> TransformerConfig:
        """The configuration of sleeping stages; only the shape of the messages matters."""
        return TransformerConfig(
            16,
            RANKS * self.stages_per_rank,
            1,
            seq_length=1,
            pipeline_model_parallel_size=RANKS,
            virtual_pipeline_model_parallel_size=self.stages_per_rank if self.stages_per_rank > 1 else None,
            pipeline_schedule=self.name,  # pyright: ignore[reportArgumentType]
            overlap_p2p_comm=self.overlap,
        )

    @property
    def costs(self) -> Costs:
        """The costs of a stage; the time of a rank does not depend on its number of stages."""
        unit = UNIT / self.stages_per_rank
        return Costs(unit, unit, unit, self.delay)

    @property
    def schedule(self) -> Schedule:
        """The schedule of the case."""
        return build_schedule(self.name, RANKS, MICROBATCHES, self.stages_per_rank)

    @property
    def predicted(self) -> float:
        """The predicted makespan of the schedule in seconds."""
        return simulate(self.schedule, self.costs).makespan


CASES = (
    *(Case(name) for name in ("gpipe", "1f1b", "zb-h1", "zb-h2")),
    *(Case(name, 2) for name in ("interleaved", *V_SCHEDULES)),
)
PEERS = ("gpipe", "1f1b", "interleaved", "zb-v", "dualpipe-v")
DELAYED = (Case("1f1b", delay=0.03), Case("1f1b", delay=0.03, overlap=False))


def main() -> None:
    """Measure, print the tables, and write the JSON file."""
    console = Console()
    results: dict[str, Any] = {"environment": environment(), "unit_seconds": UNIT, "microbatches": MICROBATCHES}
    with RankPool(RANKS, 300.0) as pool:
        results["time"] = measure_times(pool, console)
        results["memory"] = measure_peaks(pool)
    results["time"] += measure_jax_times()
    results["split_backward"] = measure_split()
    results["jax"] = json.loads(
        subprocess.run(
            [sys.executable, "-m", "benchmarks.jobs.pipeline_jax"], check=True, stdout=subprocess.PIPE, text=True
        ).stdout.splitlines()[-1]
    )
    show(console, results)
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(results, indent=1) + "\n")
    console.print(f"written: {RESULT}")


def measure_times(pool: RankPool, console: Console) -> list[dict]:
    """Measure every case in this project and in torch.distributed.pipelining."""
    seconds: dict[tuple[str, Case], list[float]] = {}
    for _ in track(range(ROUNDS), "rounds of sleeping stages", console=console, transient=True):
        for case in (*CASES, *DELAYED):
            job = ("benchmarks.jobs.pipeline:time_ours", case.config, MICROBATCHES, case.costs, case.delay, STEPS)
            seconds.setdefault(("diptych", case), []).extend(np.max(pool.run(*job), axis=0).tolist())
            if case in CASES and case.name in PEERS:
                job = ("benchmarks.jobs.pipeline:time_peer", case.name, case.stages_per_rank, MICROBATCHES, case.costs)
                times = np.max(pool.run(*job, STEPS), axis=0).tolist()
                seconds.setdefault(("torch.distributed.pipelining", case), []).extend(times)
    return [row_of(executor, case, case.predicted, times) for (executor, case), times in seconds.items()]


def measure_jax_times() -> list[dict]:
    """Measure every case in JAX, and predict it from lock-step slots."""
    runs = [(case, "canonical") for case in CASES] + [(case, "fused") for case in CASES if case.name in FUSED]
    seconds = time_apart(
        [Sleeping(case.config, MICROBATCHES, case.costs, slots) for case, slots in runs], STEPS * ROUNDS
    )
    return [
        row_of(f"JAX, {slots} slots", case, lockstep_makespan(case.schedule, case.costs, fused=slots == "fused"), times)
        for (case, slots), times in zip(runs, seconds, strict=True)
    ]


def row_of(executor: str, case: Case, predicted: float, times: list[float]) -> dict[str, Any]:
    """Return the measured times of one schedule and its predicted makespan."""
    return {
        "executor": executor,
        "schedule": case.name,
        "stages_per_rank": case.stages_per_rank,
        "link_delay": case.delay,
        "overlap": case.overlap,
        "predicted_seconds": predicted,
        "seconds": float(np.median(times)),
        "all_seconds": times,
        "excess": float(np.median(times)) / predicted - 1.0,
    }


def measure_peaks(pool: RankPool) -> dict:
    """Measure peak bytes of a step on every rank, with and without deallocate_pipeline_outputs."""
    config = TransformerConfig(
        128,
        8,
        4,
        enable_hyper_connections=True,
        seq_length=256,
        pipeline_model_parallel_size=RANKS,
        use_flash_attn=True,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=2,
    )
    peaks = pool.run("benchmarks.jobs.pipeline:peak_bytes", config, 4, MICROBATCHES)
    boundary = 4 * config.seq_length * config.residual_streams * config.hidden_size * 4
    return {
        "boundary_bytes": boundary,
        "freed": [freed for freed, _ in peaks],
        "kept": [not_freed for _, not_freed in peaks],
    }


def measure_split() -> dict:
    """Count the FLOPs of I and W together, relative to B, of one layer at D=512."""
    model = GPTModel(TransformerConfig(512, 1, 8, seq_length=64, vocab_size=512))
    tokens = torch.zeros(2, 64, dtype=torch.int64)

    def flops(run) -> int:
        with FlopCounterMode(display=False) as counter:
            run()
        return counter.get_total_flops()

    loss = model(tokens, tokens)
    full = flops(loss.backward)
    deferred = DeferredWeightGradients()
    with deferred:
        loss = model(tokens, tokens)
        inputs = flops(loss.backward)
    weights = flops(deferred.run)
    return {"B": full, "I": inputs, "W": weights, "ratio": (inputs + weights) / full}


def show(console: Console, results: dict) -> None:
    """Print the results."""
    title = f"{RANKS} ranks, {MICROBATCHES} microbatches, sleeping stages"
    table = Table(box=None, title=title, title_justify="left")
    for heading in ("schedule", "executor", "predicted s", "median s", "excess"):
        table.add_column(heading, justify="right" if " s" in heading or heading == "excess" else "left")
    for row in results["time"]:
        link = f", link {row['link_delay'] * 1000:g} ms late" if row["link_delay"] else ""
        link += "" if row["overlap"] else ", no overlap"
        table.add_row(
            f"{row['schedule']}{link}",
            row["executor"],
            f"{row['predicted_seconds']:.2f}",
            f"{row['seconds']:.3f}",
            f"{row['excess']:+.1%}",
        )
    console.print(table)
    memory = results["memory"]
    for rank, (freed, not_freed) in enumerate(zip(memory["freed"], memory["kept"], strict=True)):
        console.print(
            f"rank {rank}: peak {freed / MIB:.1f} MiB with sent outputs freed, {not_freed / MIB:.1f} MiB without "
            f"({(not_freed - freed) / memory['boundary_bytes']:.1f} boundary tensors)"
        )
    console.print(f"(I + W) / B, FLOPs of PyTorch at D=512: {results['split_backward']['ratio']:.3f}")
    for line in results["jax"]["lines"]:
        console.print(line)


if __name__ == "__main__":
    main()
