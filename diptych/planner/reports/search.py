"""The report of a search: a table of the fastest configurations of a model on a number of ranks."""

import re
from collections.abc import Callable

from rich.console import Console
from rich.progress import track
from rich.table import Table

from diptych.planner.reports.console import new_table
from diptych.planner.request import PlanRequest, parse_bytes
from diptych.planner.search import Found, search

MIB = 2**20


def print_search(console: Console, command: PlanRequest, name_settings: Callable[[str], str] = str) -> None:
    """Search the fastest configurations and print their times, where the time goes, and what limits each.

    Args:
        console: printed to.
        command: request with memory_limit and ranks.
        name_settings: rewrites the names of settings in a message, for example as flags.

    Raises:
        ValueError: no configuration fits, or diptych.planner.search.search refuses the request.
    """
    assert command.memory_limit is not None, "the command asks for a search"
    assert command.ranks is not None, "the command asks for a search"
    limit = parse_bytes("memory_limit", command.memory_limit)
    batch = command.global_batch_size or command.ranks
    outcome = search(
        command.model,
        command.ranks,
        limit,
        batch,
        command.machine,
        command.num_results,
        progress=lambda steps, total, part: track(steps, part, total, console=console, transient=True),
    )
    tokens = batch * command.model.seq_length
    console.print(
        f"{command.ranks:,} ranks of {limit / MIB:,.1f} MiB, {batch:,} sequences per step; {command.compute_rate:g} "
        f"TFLOP/s, {command.memory_bandwidth:g} GB/s of memory, {command.network_bandwidth:g} GB/s between ranks",
        highlight=False,
    )
    refused = ", ".join(f"{name_settings(name)} {times:,}" for name, times in outcome.refused.most_common())
    console.print(
        f"{outcome.considered:,} configurations are accepted; {outcome.too_large:,} of those looked at need more "
        f"memory, {outcome.simulated:,} were simulated, no other can be among the first {command.num_results}"
        + f"; refused, by setting: {refused}"
        * bool(refused),
        highlight=False,
    )
    if outcome.smallest is not None:
        smallest, memory = outcome.smallest
        raise ValueError(
            f"memory_limit: expected enough memory for one configuration, got {limit / MIB:,.1f} MiB: no configuration "
            f"fits, {smallest.description} needs least, {memory.total / MIB:,.1f} MiB; give more ranks or memory, "
            "shorter sequences or another batch"
        )
    console.print(_table(outcome.best, tokens))
    first = outcome.best[0]
    lost = ", ".join(f"{name} {share:.1%}" for name, share in first.shares.items() if share >= 0.001)
    console.print(f"the first: {lost}; limited by {first.constraint}", highlight=False)


def _table(best: list[Found], tokens: int) -> Table:
    """Return a table with one row per configuration, given the tokens of a step."""
    headings = ("s per step", "tokens/s", "MiB", "operations", "limited by", "configuration")
    table = new_table("fastest first, as predicted", headings, left=headings[-2:], no_wrap=headings[:-1])
    for found in best:
        table.add_row(
            f"{found.seconds:.4g}",
            f"{tokens / found.seconds:,.0f}",
            f"{found.memory.total / MIB:,.1f}",
            f"{found.shares['operations']:.0%}",
            re.split(r": | \(", found.constraint)[0],
            found.configuration.description,
        )
    return table
