"""The fastest ways to train a model on so many ranks, as a table."""

import re

from rich.console import Console
from rich.progress import track
from rich.table import Table

from diptych.planner.request import PlanRequest, parse_bytes
from diptych.planner.search import Found, search

MIB = 2**20


def print_search(console: Console, command: PlanRequest) -> None:
    """Search, and print what was found, where its time goes, and what keeps it from being faster.

    Args:
        console: to print to.
        command: with memory_limit and ranks.

    Raises:
        ValueError: see diptych.planner.search.search; or no configuration fits.
    """
    assert command.memory_limit is not None, "the command asks for a search"
    assert command.ranks is not None, "the command asks for a search"
    limit, batch = parse_bytes("memory_limit", command.memory_limit), command.global_batch_size or command.ranks
    outcome = search(
        command.model,
        command.ranks,
        limit,
        batch,
        command.machine,
        command.num_results,
        progress=lambda ways, total: track(ways, "ways", total, console=console, transient=True),
    )
    tokens = batch * command.model.seq_length
    console.print(
        f"{command.ranks:,} ranks of {limit / MIB:,.1f} MiB, {batch:,} sequences a step; {command.compute_rate:g} "
        f"TFLOP/s, {command.memory_bandwidth:g} GB/s of memory, {command.network_bandwidth:g} GB/s between ranks",
        highlight=False,
    )
    refused = ", ".join(f"{name} {times:,}" for name, times in outcome.refused.most_common())
    console.print(
        f"{outcome.considered:,} ways are accepted; {outcome.too_large:,} of those looked at need more memory, "
        f"{outcome.simulated:,} were simulated, no other can be among the first {command.num_results}"
        + f"; refused, by setting: {refused}"
        * bool(refused),
        highlight=False,
    )
    if outcome.smallest is not None:
        way, memory = outcome.smallest
        raise ValueError(
            f"memory_limit: expected room for one configuration, got {limit / MIB:,.1f} MiB: no configuration fits, "
            f"{way.words} needs least, {memory.total / MIB:,.1f} MiB; give more ranks or memory, shorter sequences or "
            "another batch"
        )
    console.print(_table(outcome.best, tokens))
    first = outcome.best[0]
    lost = ", ".join(f"{name} {share:.1%}" for name, share in first.shares.items() if share >= 0.001)
    console.print(f"the first: {lost}; held back by {first.constraint}", highlight=False)


def _table(best: list[Found], tokens: int) -> Table:
    """A row a way, given the tokens of a step."""
    table = Table(box=None, title="fastest first, as predicted", title_justify="left")
    for heading in ("s a step", "tokens/s", "MiB", "operations", "held back by", "way"):
        justify = "left" if heading in ("held back by", "way") else "right"
        table.add_column(heading, justify=justify, no_wrap=heading != "way")
    for found in best:
        table.add_row(
            f"{found.seconds:.4g}",
            f"{tokens / found.seconds:,.0f}",
            f"{found.memory.total / MIB:,.1f}",
            f"{found.shares['operations']:.0%}",
            re.split(r": | \(", found.constraint)[0],
            found.way.words,
        )
    return table
