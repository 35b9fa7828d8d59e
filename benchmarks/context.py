"""Context parallelism: bytes beside the formula, step time, what a narrower wire costs, a sequence of 128K tokens.

    python -m benchmarks.context           (make bench NAME=context)

One KDA layer's rule, forward and backward, one sequence over gloo ranks of one thread each. Where there are more ranks
than cores, times are of ranks that take turns: compare a row's exchange with the same ranks without one.
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

PER_RANK, TURNS = 1024, 7
HEADS, WIDTH = 4, 64
LONG = Load(2**17, 2, 32)
SLOW = 2**-10
"""Log decays of so many thousandths a token: what a rank begins with is then felt over all its part."""
DELAYS = (0.05, 0.1, 0.15, 0.2, 0.4)
DELAY = "delay of a step's computation"
RESULT = Path("benchmarks/results/context-cpu.json")
JOBS, MIB = "benchmarks.jobs.context", 2**20


def bytes_and_times(pool: RankPool) -> list[dict[str, Any]]:
    """Of one number of ranks, PER_RANK tokens each."""
    size, load = pool.size, Load(PER_RANK * pool.size, HEADS, WIDTH)
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
                "payload bytes": sum(max(ranks[way][0] for ranks in sent) for way in (0, 1)),
                "payload bytes by formula": 2 * cost.payload_bytes,
                "wire bytes": sum(wire for ranks in sent for _, wire in ranks),
                "wire bytes by formula": 2 * cost.wire_bytes,
                "seconds without exchange": found["alone"],
                "seconds": found[exchange],
            }
        )
    return rows


def wire_errors(pool: RankPool) -> list[dict[str, Any]]:
    """Of outputs and gradients, beside one process in float64."""
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
    """C13: a step of two ranks whose exchanges take some share of its time on their way, forward and backward."""
    load = Load(2 * 512, 8, 64)
    with RankPool(2, 600.0, (JOBS,)) as pool:

        def measure(delays: tuple[float, ...]) -> dict[tuple[float, bool], float]:
            found = pool.run(f"{JOBS}:time_with_delay", load, delays, TURNS)
            return {way: statistics.median(map(max, zip(*(f[way] for f in found), strict=True))) for way in found[0]}

        about = measure((0.0,))[0.0, True]
        seconds = measure((0.0, *(share * about for share in DELAYS)))
    compute, rows = seconds[0.0, True], []
    for share in DELAYS:
        delay = share * about
        ratios = {way: seconds[delay, way == "on"] / max(compute, 2 * delay) for way in ("off", "on")}
        rows.append({DELAY: delay / compute, "seconds of computation": compute} | ratios)
    return rows


def long_sequence() -> dict[str, Any]:
    """C14: as many tokens as a long text has, over eight ranks."""
    with RankPool(8, 600.0, (JOBS,)) as pool:
        found = pool.run(f"{JOBS}:long_sequence", LONG)
    return {
        "load": LONG._asdict(),
        "seconds": max(seconds for seconds, _, _ in found),
        "grown bytes a rank": max(grown for _, grown, _ in found),
        "bytes of arguments and results a rank": found[0][2],
    }


def show(console: Console, rows: list[dict], errors: list[dict], late: list[dict], long: dict[str, Any]) -> None:
    """Tables."""
    table = Table(title=f"{PER_RANK} tokens a rank, H={HEADS}, K=V={WIDTH}, float32, forward and backward")
    for name in ("ranks", "exchange", "one rank sends", "formula", "on the wire", "formula", "ms alone", "ms", "ratio"):
        table.add_column(name, justify="right")
    for row in rows:
        sizes = [f"{row[name]:,}" for name in row if "bytes" in name]
        times = row["seconds without exchange"], row["seconds"]
        shown = [*(f"{1000 * t:.1f}" for t in times), f"{times[1] / times[0]:.2f}"]
        table.add_row(str(row["ranks"]), row["exchange"], *sizes, *shown)
    console.print(table)
    table = Table(title="Relative error beside one process in float64, 4 ranks, slow decays")
    for name in errors[0]:
        table.add_column(name, justify="right")
    for row in errors:
        table.add_row(row["exchange"], row["wire"], f"{row['outputs']:.1e}", f"{row['gradients']:.1e}")
    console.print(table)
    table = Table(title="Step beside the longer of computing and sending, two ranks, all_gather delayed twice")
    for name in ("delay, of computing", "one after the other", "overlapped"):
        table.add_column(name, justify="right")
    for row in late:
        table.add_row(f"{row[DELAY]:.0%}", f"{row['off']:.2f}", f"{row['on']:.2f}")
    console.print(table)
    grown, given = long["grown bytes a rank"], long["bytes of arguments and results a rank"]
    console.print(
        f"{LONG.length:,} tokens over 8 ranks, H={LONG.heads}, K=V={LONG.width}: {long['seconds']:.1f} s; "
        f"a rank grew by {grown / MIB:.0f} MiB, arguments and results are {given / MIB:.0f} MiB"
    )


def main() -> None:
    """Measure, print, write JSON."""
    torch.set_num_threads(1)
    console, rows, errors = Console(width=150), [], []
    for size in (1, 2, 4):
        with RankPool(size, 600.0, (JOBS,)) as pool, console.status(f"{size} ranks"):
            rows += bytes_and_times(pool)
            errors = wire_errors(pool) if size == 4 else errors
    with console.status("overlap, and a long sequence"):
        late, long = overlap(), long_sequence()
    show(console, rows, errors, late, long)
    content = {"environment": environment(), "exchanges": rows, "wire": errors, "overlap": late, "long sequence": long}
    RESULT.write_text(json.dumps(content, indent=1) + "\n")
    console.print(f"written: {RESULT}")


if __name__ == "__main__":
    main()
