"""Context parallelism: bytes and their formula, step time, errors of a bfloat16 wire, and a sequence of 128K tokens.

    python -m benchmarks.context           (make bench NAME=context)

The benchmark runs the delta rule of one KDA layer, forward and backward, on one sequence over gloo ranks of one thread
each. If there are more ranks than cores, ranks share cores: compare an exchange only with the same number of ranks
without exchange.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.jobs.context import Load, results
from diptych.plans.context.exchange import EXCHANGES, exchange_cost
from parity.compare import relative_difference
from parity.report import environment
from reference_torch.rank_pool import RankPool

PER_RANK = 1024
TURNS = 7
HEADS = 4
WIDTH = 64
LONG = Load(2**17, 2, 32)
SLOW = 2**-10
"""Scale of the log decays at which the initial state of a rank influences all tokens of its part."""
DELAYS = (0.05, 0.1, 0.15, 0.2, 0.4)
DELAY = "delay of a step's computation"
RESULT = Path("benchmarks/results/context-cpu.json")
JOBS = "benchmarks.jobs.context"
MIB = 2**20


def bytes_and_times(pool: RankPool) -> list[dict[str, Any]]:
    """Return one row per exchange for the ranks of a pool, with PER_RANK tokens each."""
    size = pool.size
    load = Load(PER_RANK * pool.size, HEADS, WIDTH)
    seconds = pool.run(f"{JOBS}:time_steps", load, EXCHANGES, TURNS)
    rows = []
    for exchange in EXCHANGES:
        cost = exchange_cost(exchange, size, HEADS, WIDTH, WIDTH)
        sent = pool.run(f"{JOBS}:count_bytes", load, exchange)
        found = {
            name: statistics.median(map(max, zip(*(ranks[name] for ranks in seconds), strict=True)))
            for name in ("alone", exchange)
        }
        rows.append(
            {
                "ranks": size,
                "exchange": exchange,
                "payload bytes": sum(max(ranks[direction][0] for ranks in sent) for direction in (0, 1)),
                "payload bytes by formula": 2 * cost.payload_bytes,
                "wire bytes": sum(wire for ranks in sent for _, wire in ranks),
                "wire bytes by formula": 2 * cost.wire_bytes,
                "seconds without exchange": found["alone"],
                "seconds": found[exchange],
            }
        )
    return rows


def wire_errors(pool: RankPool) -> list[dict[str, Any]]:
    """Return the errors of outputs and gradients relative to one process in float64."""
    load = Load(PER_RANK * pool.size, HEADS, WIDTH, SLOW)
    exact = results(load, {}, "float64")
    rows = []
    for exchange in EXCHANGES:
        for wire in (None, "bfloat16"):
            parts = pool.run(f"{JOBS}:results", load, {"cp_exchange": exchange, "cp_wire_dtype": wire})
            found = [np.concatenate(x, axis=1) for x in zip(*parts, strict=True)]
            errors = [relative_difference(ours, theirs) for ours, theirs in zip(found, exact, strict=True)]
            rows.append(
                {"exchange": exchange, "wire": wire or "float32", "outputs": errors[0], "gradients": max(errors[1:])}
            )
    return rows


def overlap() -> list[dict[str, Any]]:
    """Return step times of two ranks with delayed messages, relative to the longer of computation and communication."""
    load = Load(2 * 512, 8, 64)
    with RankPool(2, 600.0) as pool:

        def measure(delays: tuple[float, ...]) -> dict[tuple[float, bool], float]:
            found = pool.run(f"{JOBS}:time_with_delay", load, delays, TURNS)
            return {key: statistics.median(map(max, zip(*(f[key] for f in found), strict=True))) for key in found[0]}

        estimate = measure((0.0,))[0.0, True]
        seconds = measure((0.0, *(share * estimate for share in DELAYS)))
    compute = seconds[0.0, True]
    rows = []
    for share in DELAYS:
        delay = share * estimate
        ratios = {mode: seconds[delay, mode == "on"] / max(compute, 2 * delay) for mode in ("off", "on")}
        rows.append({DELAY: delay / compute, "seconds of computation": compute} | ratios)
    return rows


def long_sequence() -> dict[str, Any]:
    """Return time and memory of a step of 128K tokens over eight ranks."""
    with RankPool(8, 600.0) as pool:
        found = pool.run(f"{JOBS}:long_sequence", LONG)
    return {
        "load": LONG._asdict(),
        "seconds": max(seconds for seconds, _, _ in found),
        "grown bytes a rank": max(grown for _, grown, _ in found),
        "bytes of arguments and results a rank": found[0][2],
    }


def show(console: Console, rows: list[dict], errors: list[dict], late: list[dict], long: dict[str, Any]) -> None:
    """Print the tables."""
    table = Table(title=f"{PER_RANK} tokens a rank, H={HEADS}, K=V={WIDTH}, float32, forward and backward")
    for name in ("ranks", "exchange", "one rank sends", "formula", "on the wire", "formula", "ms alone", "ms", "ratio"):
        table.add_column(name, justify="right")
    for row in rows:
        sizes = [f"{row[name]:,}" for name in row if "bytes" in name]
        times = row["seconds without exchange"], row["seconds"]
        cells = [*(f"{1000 * t:.1f}" for t in times), f"{times[1] / times[0]:.2f}"]
        table.add_row(str(row["ranks"]), row["exchange"], *sizes, *cells)
    console.print(table)
    table = Table(title="Error relative to one process in float64, 4 ranks, slow decays")
    for name in errors[0]:
        table.add_column(name, justify="right")
    for row in errors:
        table.add_row(row["exchange"], row["wire"], f"{row['outputs']:.1e}", f"{row['gradients']:.1e}")
    console.print(table)
    table = Table(title="Step / max(computation, communication), two ranks, all_gather delayed twice")
    for name in ("delay / computation", "sequential", "overlapped"):
        table.add_column(name, justify="right")
    for row in late:
        table.add_row(f"{row[DELAY]:.0%}", f"{row['off']:.2f}", f"{row['on']:.2f}")
    console.print(table)
    grown = long["grown bytes a rank"]
    given = long["bytes of arguments and results a rank"]
    console.print(
        f"{LONG.length:,} tokens over 8 ranks, H={LONG.heads}, K=V={LONG.width}: {long['seconds']:.1f} s; "
        f"memory of a rank grew by {grown / MIB:.0f} MiB, arguments and results are {given / MIB:.0f} MiB"
    )


def main() -> None:
    """Measure, print the tables, and write the JSON file."""
    torch.set_num_threads(1)
    console = Console(width=150)
    rows = []
    errors = []
    for size in (1, 2, 4):
        with RankPool(size, 600.0) as pool, console.status(f"{size} ranks"):
            rows += bytes_and_times(pool)
            errors = wire_errors(pool) if size == 4 else errors
    with console.status("overlap, and a long sequence"):
        late = overlap()
        long = long_sequence()
    show(console, rows, errors, late, long)
    content = {"environment": environment(), "exchanges": rows, "wire": errors, "overlap": late, "long sequence": long}
    RESULT.write_text(json.dumps(content, indent=1) + "\n")
    console.print(f"written: {RESULT}")


if __name__ == "__main__":
    main()
