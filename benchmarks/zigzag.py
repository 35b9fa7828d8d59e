"""FLOPs and step time of zigzag attention, compared with the contiguous layout.

    python -m benchmarks.zigzag           (make bench NAME=zigzag)

The benchmark runs softmax attention of one layer without projections, forward and backward, on one sequence over gloo
ranks of one thread each. Steps of both layouts alternate, and the time of a step is that of its slowest rank. If there
are more ranks than cores, ranks share cores: compare the two times of a row, but not times of different rows.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import json
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.utils.flop_counter import FlopCounterMode

from diptych.plans.context.sequences import FLACPContext
from diptych.plans.context.zigzag import ATTENTION_LAYOUTS, attention_flops, move_cost
from parity.report import environment
from reference_torch.context_parallel import build_cp_context, cp_attention
from reference_torch.rank_pool import RankPool

HEADS = 4
GROUPS = 2
WIDTH = 64
SIZES = (2, 4)
LENGTHS = (2048, 4096)
TURNS = 7
RESULT = Path("benchmarks/results/zigzag-cpu.json")
JOBS = "benchmarks.zigzag"


class Load(NamedTuple):
    """The length of a sequence and the implementation of attention."""

    length: int
    fused: bool


class Part:
    """The part of a load that this rank computes."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.size = dist.get_world_size()
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.inputs = [
            torch.randn(1, load.length // self.size, heads, WIDTH, generator=generator).requires_grad_()
            for heads in (HEADS, GROUPS, GROUPS)
        ]
        self.cotangent = torch.randn(self.inputs[0].shape, generator=generator)

    def context(self, layout: str) -> FLACPContext:
        """Return the context of a layout."""
        offsets = torch.tensor([0, self.load.length], dtype=torch.int32)
        return build_cp_context(offsets, dist.group.WORLD, cp_attention_layout=layout)

    def step(self, context: FLACPContext) -> None:
        """Run forward and backward."""
        torch.autograd.grad(cp_attention(*self.inputs, context, self.load.fused), self.inputs, self.cotangent)


def count_flops(load: Load) -> dict[str, int]:
    """Return the FLOPs of matrix products in forward and backward, by layout."""
    part = Part(load)
    found = {}
    for layout in ATTENTION_LAYOUTS:
        with FlopCounterMode(display=False) as counter:
            part.step(part.context(layout))
        found[layout] = counter.get_total_flops()
    return found


def time_steps(load: Load, turns: int) -> dict[str, list[float]]:
    """Return the seconds of every step by layout, without the warm-up; all ranks start together."""
    part = Part(load)
    contexts = {layout: part.context(layout) for layout in ATTENTION_LAYOUTS}
    seconds: dict[str, list[float]] = {layout: [] for layout in contexts}
    for turn in range(turns + 1):
        for layout, context in contexts.items():
            dist.barrier()
            begin = time.perf_counter()
            part.step(context)
            if turn:
                seconds[layout].append(time.perf_counter() - begin)
    return seconds


def measure(pool: RankPool, load: Load) -> dict[str, Any]:
    """Measure one load and return its row."""
    size = pool.size
    part = load.length // pool.size
    counted = None if load.fused else pool.run(f"{JOBS}:count_flops", load)
    seconds = pool.run(f"{JOBS}:time_steps", load, TURNS)
    row: dict[str, Any] = {"ranks": size, "tokens": load.length, "fused": load.fused}
    for layout in ATTENTION_LAYOUTS:
        flops = max(attention_flops(layout, rank, size, part, HEADS, WIDTH) for rank in range(size))
        steps = [max(each) for each in zip(*(own[layout] for own in seconds), strict=True)]
        row[layout] = {
            "flops of a rank by formula": 3 * flops,
            "flops of a rank counted": None if counted is None else max(own[layout] for own in counted),
            "seconds": statistics.median(steps),
            "fastest": min(steps),
            "slowest": max(steps),
        }
    row["bytes moved by the rank that sends most"] = 2 * move_cost(size, part, HEADS, WIDTH).payload_bytes
    return row


def show(console: Console, rows: list[dict[str, Any]]) -> None:
    """Print the rows as a table."""
    table = Table(title=f"softmax attention, H={HEADS}, G={GROUPS}, d={WIDTH}, float32, forward and backward")
    headings = ("ranks", "tokens", "fused", "GFLOP contiguous", "zigzag", "ratio", "ms contiguous", "zigzag", "ratio")
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        pair = [row[layout] for layout in ATTENTION_LAYOUTS]
        flops, seconds = ([each[name] for each in pair] for name in ("flops of a rank by formula", "seconds"))
        cells = [str(row["ranks"]), f"{row['tokens']:,}", "yes" if row["fused"] else "no"]
        cells += [*(f"{x / 1e9:.2f}" for x in flops), f"{flops[1] / flops[0]:.3f}"]
        table.add_row(*cells, *(f"{1000 * x:.0f}" for x in seconds), f"{seconds[1] / seconds[0]:.2f}")
    console.print(table)


def main() -> None:
    """Measure, print the tables, and write the JSON file."""
    console = Console(width=130)
    rows = []
    for size in SIZES:
        with RankPool(size, 600.0) as pool, console.status(f"{size} ranks"):
            rows += [measure(pool, Load(length, fused)) for length in LENGTHS for fused in (False, True)]
    show(console, rows)
    RESULT.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")
    console.print(f"written: {RESULT}")


if __name__ == "__main__":
    main()
