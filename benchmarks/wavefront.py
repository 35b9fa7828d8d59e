"""The pipelined exchange of context parallelism, compared with the other exchanges.

    python -m benchmarks.wavefront           (make bench NAME=wavefront)

1. Sleeping layers on four ranks. Their step time depends only on the order of microbatches, and is compared with the
   prediction of diptych.plans.schedule.wavefront.
2. Training steps of a KDA model, in PyTorch on gloo ranks of one thread each, in JAX on devices of one process. All
   exchanges alternate in one run. The baseline is the same ranks without exchange, a lower bound of the step time. If
   there are more ranks than cores, ranks share cores, and the wait of one rank is the computation of another.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import json
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from diptych.plans.config import TrainConfig, TransformerConfig
from diptych.plans.context.exchange import CP_EXCHANGES
from diptych.plans.schedule.wavefront import makespan, num_lockstep_slots
from parity.report import environment
from reference_torch.rank_pool import RankPool

RESULT = Path("benchmarks/results/wavefront-cpu.json")
JOBS = "benchmarks.jobs.wavefront"
SLEEPING_RANKS = 4
SLEEPING_LAYERS = 8
COUNTS = (1, 2, 4, 8)
FORWARD = 0.08
"""Seconds of forward of all sleeping layers, for the part of a microbatch that one rank has."""
BACKWARD = 0.16
"""Seconds of backward of the same layers."""
SIZES = (2, 4)
TURNS = 5
MICROBATCHES = 4
EXCHANGES = CP_EXCHANGES
MODEL = TransformerConfig(
    hidden_size=128,
    num_layers=4,
    num_attention_heads=4,
    ffn_hidden_size=256,
    layer_pattern="kda",
    linear_num_key_heads=4,
    linear_num_value_heads=4,
    seq_length=2048,
    vocab_size=256,
)


def measure_order(console: Console) -> list[dict[str, Any]]:
    """Measure sleeping layers and return the rows of the first table."""
    rows = []
    with RankPool(SLEEPING_RANKS, 600.0) as pool, console.status("sleeping layers"):
        for count in COUNTS:
            times = SLEEPING_LAYERS, FORWARD, BACKWARD
            seconds = pool.run(f"{JOBS}:time_sleeping", *times, count, TURNS)
            steps = [max(step) for step in zip(*seconds, strict=True)]
            predicted = makespan(SLEEPING_RANKS, count, *times)
            work = count * (FORWARD + BACKWARD)
            row = {"microbatches": count, "predicted": predicted, "measured": statistics.median(steps)}
            rows.append(row | {"fastest": min(steps), "slowest": max(steps), "work": work})
    return rows


def measure_steps(console: Console) -> list[dict[str, Any]]:
    """Measure training steps and return the rows of the second table."""
    rows: list[dict[str, Any]] = []
    train = TrainConfig(train_iters=100, global_batch_size=MICROBATCHES, micro_batch_size=1, eval_iters=1)
    for size in SIZES:
        with RankPool(size, 1200.0) as pool, console.status(f"PyTorch, {size} ranks"):
            parts = pool.run(f"{JOBS}:torch_steps", MODEL, train, EXCHANGES, TURNS)
        found = {name: [max(step) for step in zip(*(part[name] for part in parts), strict=True)] for name in parts[0]}
        rows.append({"backend": "torch", "ranks": size} | _medians(found))
        with RankPool(1, 1800.0) as pool, console.status(f"JAX, {size} devices"):
            (found,) = pool.run(f"{JOBS}:jax_steps", MODEL, train, EXCHANGES, size, TURNS)
        rows.append({"backend": "jax", "ranks": size} | _medians(found))
    return rows


def _medians(found: dict[str, list[float]]) -> dict[str, Any]:
    return {
        name: {"seconds": statistics.median(steps), "fastest": min(steps), "slowest": max(steps)}
        for name, steps in found.items()
    }


def show(console: Console, order: list[dict[str, Any]], steps: list[dict[str, Any]]) -> None:
    """Print two tables."""
    title = f"{SLEEPING_RANKS} ranks, {SLEEPING_LAYERS} sleeping layers, {FORWARD + BACKWARD:.2f} s per microbatch"
    table = Table(title=title)
    for heading in ("microbatches", "predicted s", "measured s", "ratio", "relative to computation"):
        table.add_column(heading, justify="right")
    for row in order:
        measured = row["measured"]
        predicted = row["predicted"]
        cells = f"{predicted:.3f}", f"{measured:.3f}", f"{measured / predicted:.3f}", f"{measured / row['work']:.2f}"
        table.add_row(str(row["microbatches"]), *cells)
    console.print(table)
    table = Table(title=f"steps of {MICROBATCHES} microbatches, relative to the same ranks without exchange")
    for heading in ("backend", "ranks", "without, s", *EXCHANGES, "pipelined, predicted"):
        table.add_column(heading, justify="right")
    for row in steps:
        alone = row["alone"]["seconds"]
        size = row["ranks"]
        ratios = [f"{row[name]['seconds'] / alone:.2f}" for name in EXCHANGES]
        table.add_row(row["backend"], str(size), f"{alone:.2f}", *ratios, f"{planned(row['backend'], size):.2f}")
    console.print(table)


def planned(backend: str, size: int) -> float:
    """Return the predicted time of a pipelined step, relative to its computation."""
    if backend == "jax":
        return num_lockstep_slots(size, MICROBATCHES) / MICROBATCHES
    return makespan(size, MICROBATCHES, MODEL.num_layers) / makespan(1, MICROBATCHES, MODEL.num_layers)


def main() -> None:
    """Measure, print the tables, and write the JSON file."""
    console = Console(width=130)
    order = measure_order(console)
    steps = measure_steps(console)
    show(console, order, steps)
    RESULT.write_text(json.dumps({"environment": environment(), "order": order, "steps": steps}, indent=1) + "\n")
    console.print(f"written: {RESULT}")


if __name__ == "__main__":
    main()
