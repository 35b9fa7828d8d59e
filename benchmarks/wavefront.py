"""Microbatches that follow one another over ranks that share sequences, beside exchanges in which all take part.

    python -m benchmarks.wavefront           (make bench NAME=wavefront)

1. Order: layers that sleep, so that a step takes as long as its order has it, on four ranks; beside
diptych.plans.schedule.wavefront. 2. Steps of training of a KDA model, PyTorch on gloo ranks of one thread each, JAX
   on as many devices of one process. All exchanges are taken in turns in one run, beside the same ranks each
   computing its part alone, which is the least that a step can take. Where there are more ranks than cores, ranks
   take turns and what one waits is another's time.
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
SLEEPING_RANKS, SLEEPING_LAYERS, COUNTS = 4, 8, (1, 2, 4, 8)
FORWARD, BACKWARD = 0.08, 0.16
"""Seconds of a rank's part of a microbatch in all sleeping layers."""
SIZES, TURNS = (2, 4), 5
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
    """Rows of the first table."""
    rows = []
    with RankPool(SLEEPING_RANKS, 600.0, ("torch.distributed", JOBS)) as pool, console.status("layers that sleep"):
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
    """Rows of the second table."""
    rows: list[dict[str, Any]] = []
    train = TrainConfig(train_iters=100, global_batch_size=MICROBATCHES, micro_batch_size=1, eval_iters=1)
    for size in SIZES:
        with RankPool(size, 1200.0, ("torch.distributed", JOBS)) as pool, console.status(f"PyTorch, {size} ranks"):
            parts = pool.run(f"{JOBS}:torch_steps", MODEL, train, EXCHANGES, TURNS)
        found = {way: [max(step) for step in zip(*(part[way] for part in parts), strict=True)] for way in parts[0]}
        rows.append({"backend": "torch", "ranks": size} | _medians(found))
        with RankPool(1, 1800.0) as pool, console.status(f"JAX, {size} devices"):
            (found,) = pool.run(f"{JOBS}:jax_steps", MODEL, train, EXCHANGES, size, TURNS)
        rows.append({"backend": "jax", "ranks": size} | _medians(found))
    return rows


def _medians(found: dict[str, list[float]]) -> dict[str, Any]:
    return {
        way: {"seconds": statistics.median(steps), "fastest": min(steps), "slowest": max(steps)}
        for way, steps in found.items()
    }


def show(console: Console, order: list[dict[str, Any]], steps: list[dict[str, Any]]) -> None:
    """Two tables."""
    title = f"{SLEEPING_RANKS} ranks, {SLEEPING_LAYERS} layers that sleep {FORWARD + BACKWARD:.2f} s a microbatch"
    table = Table(title=title)
    for heading in ("microbatches", "predicted s", "measured s", "ratio", "of the work alone"):
        table.add_column(heading, justify="right")
    for row in order:
        measured, predicted = row["measured"], row["predicted"]
        cells = f"{predicted:.3f}", f"{measured:.3f}", f"{measured / predicted:.3f}", f"{measured / row['work']:.2f}"
        table.add_row(str(row["microbatches"]), *cells)
    console.print(table)
    table = Table(title=f"steps of {MICROBATCHES} microbatches, of the same ranks without exchange")
    for heading in ("backend", "ranks", "without, s", *EXCHANGES, "pipelined, by the plan"):
        table.add_column(heading, justify="right")
    for row in steps:
        alone, size = row["alone"]["seconds"], row["ranks"]
        ratios = [f"{row[way]['seconds'] / alone:.2f}" for way in EXCHANGES]
        table.add_row(row["backend"], str(size), f"{alone:.2f}", *ratios, f"{planned(row['backend'], size):.2f}")
    console.print(table)


def planned(backend: str, size: int) -> float:
    """Return the time of the computation in a pipelined step."""
    if backend == "jax":
        return num_lockstep_slots(size, MICROBATCHES) / MICROBATCHES
    return makespan(size, MICROBATCHES, MODEL.num_layers) / makespan(1, MICROBATCHES, MODEL.num_layers)


def main() -> None:
    """Measure, print, write JSON."""
    console = Console(width=130)
    order, steps = measure_order(console), measure_steps(console)
    show(console, order, steps)
    RESULT.write_text(json.dumps({"environment": environment(), "order": order, "steps": steps}, indent=1) + "\n")
    console.print(f"written: {RESULT}")


if __name__ == "__main__":
    main()
