"""Approximate state exchange between context ranks: bytes, the error bound from the gates, and the measured error.

    python -m benchmarks.approximate_context          (make bench NAME=approximate_context)

The benchmark runs the delta rule of one KDA layer over four gloo ranks, forward and backward. It computes in float64,
so that the approximation is the only error. The error of states is the maximum over ranks and heads, relative to the
largest state. The errors of outputs and gradients are relative norms of the difference from the exact exchange.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.jobs.context import Load
from diptych.plans.context.approximation import low_rank_bounds, rank_bounds, truncation_bounds
from diptych.plans.context.exchange import exchange_cost
from parity.compare import relative_difference
from parity.report import environment
from reference_torch.context_parallel import build_cp_context, exchange
from reference_torch.delta_rule import chunk_kda
from reference_torch.rank_pool import RankPool

RANKS = 4
PER_RANK = 256
HEADS = 4
WIDTH = 64
RESULT = Path("benchmarks/results/approximate_context-cpu.json")


class Text(NamedTuple):
    """The distribution of gates and betas of a sequence."""

    name: str
    decay: float
    """Scale of the log decays, which are this factor times 0.1 to 2 per token."""
    share: float
    """Maximum of beta."""

    def arrays(self) -> list[np.ndarray]:
        """Return q, k, v, g and beta of all tokens in float64."""
        q, k, v, g, beta = Load(RANKS * PER_RANK, HEADS, WIDTH, self.decay).arrays()
        return [x.astype(np.float64) for x in (q, k, v, g, beta * np.float32(self.share))]


TEXTS = (
    Text("slow decay", 0.001, 1.0),
    Text("slow decay, small beta", 0.001, 0.02),
    Text("middling decay", 0.01, 1.0),
    Text("middling decay, small beta", 0.01, 0.02),
    Text("fast decay", 0.1, 1.0),
)
APPROXIMATIONS: dict[str, dict[str, Any]] = {
    "the nearest rank": {"cp_exchange": "ring", "cp_truncate_ranks": 1},
    "the nearest two": {"cp_exchange": "ring", "cp_truncate_ranks": 2},
    **{f"rank {rank}": {"cp_transition_rank": rank} for rank in (2, 8, 16, 31)},
}


def run_rule(text: Text, options: dict[str, Any]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the initial state of this rank, and its outputs and gradients."""
    rank = dist.get_rank()
    part = slice(rank * PER_RANK, (rank + 1) * PER_RANK)
    inputs = [torch.from_numpy(x[:, part].copy()).requires_grad_() for x in text.arrays()]
    offsets = torch.tensor([0, RANKS * PER_RANK], dtype=torch.int32)
    context = build_cp_context(offsets, dist.group.WORLD, **options)
    found = []
    plain = exchange.run_exchange

    def recorded(*arguments: Any) -> exchange.Exchanged:
        found.append(plain(*arguments))
        return found[-1]

    exchange.run_exchange = recorded
    try:
        o = chunk_kda(*inputs, cp_context=context)[0]
        gradients = torch.autograd.grad(o, inputs, inputs[2].detach())
    finally:
        exchange.run_exchange = plain
    return found[0].initial.detach().numpy(), [x.detach().numpy() for x in (o, *gradients)]


def measure(pool: RankPool, text: Text) -> list[dict[str, Any]]:
    """Return one row of results for each approximation."""
    _, k, v, g, beta = text.arrays()
    bounds = rank_bounds(k, v, g, beta, np.array([0, RANKS * PER_RANK], np.int32), RANKS)
    exact_states, exact = gather(pool.run("benchmarks.approximate_context:run_rule", text, {}))
    largest = norms(exact_states).max()
    rows = []
    for name, options in APPROXIMATIONS.items():
        states, found = gather(pool.run("benchmarks.approximate_context:run_rule", text, options))
        ranks = options.get("cp_truncate_ranks")
        rank = options.get("cp_transition_rank")
        bound = low_rank_bounds(bounds, rank) if rank else truncation_bounds(bounds, ranks)
        errors = norms(states - exact_states)
        if (errors > bound * (1 + 1e-9) + 1e-12 * largest).any():
            raise AssertionError(f"{text.name}, {name}: the error of a state exceeds its bound")
        cost = exchange_cost(options.get("cp_exchange", "all_gather"), RANKS, HEADS, WIDTH, WIDTH, 4, ranks, rank)
        differences = [relative_difference(ours, theirs) for ours, theirs in zip(found, exact, strict=True)]
        rows.append(
            {
                "text": text.name,
                "way": name,
                "rounds": cost.rounds,
                "payload": cost.payload_bytes / exchange_cost("all_gather", RANKS, HEADS, WIDTH, WIDTH).payload_bytes,
                "state_bound": float(bound.max() / largest),
                "state_error": float(errors.max() / largest),
                "output_error": differences[0],
                "gradient_error": max(differences[1:]),
            }
        )
    return rows


def gather(ranks: list) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the states by rank, and outputs and gradients of all tokens."""
    return np.stack([state for state, _ in ranks]), [
        np.concatenate(x, axis=1) for x in zip(*(found for _, found in ranks), strict=True)
    ]


def norms(states: np.ndarray) -> np.ndarray:
    """Return the Frobenius norms [R, HV] of states."""
    return np.sqrt((states**2).sum((-1, -2)))


def main() -> None:
    """Measure, print the table, and write the JSON file."""
    console = Console(width=130)
    with RankPool(RANKS, 300.0) as pool:
        rows = [row for text in track(TEXTS, "texts", console=console, transient=True) for row in measure(pool, text)]
    title = f"{PER_RANK} tokens on each of {RANKS} ranks, H={HEADS}, K=V={WIDTH}; sent: relative to all_gather"
    table = Table(box=None, title=title, title_justify="left")
    for heading in ("text", "exchange", "rounds", "sent", "state, bound", "state", "outputs", "gradients"):
        table.add_column(heading, justify="left" if heading in ("text", "exchange") else "right")
    for row in rows:
        errors = (f"{row[name]:.1e}" for name in ("state_bound", "state_error", "output_error", "gradient_error"))
        table.add_row(row["text"], row["way"], str(row["rounds"]), f"{row['payload']:.2f}", *errors)
    console.print(table)
    RESULT.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")
    console.print(f"written: {RESULT}")


if __name__ == "__main__":
    main()
