"""The report of a mesh: its ranks, their memory, and the traffic between them in one step."""

from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise

from rich.console import Console
from rich.table import Table

from diptych.planner.memory.rank_peaks import rank_peaks
from diptych.planner.memory.ranks import RankMemory, rank_memories
from diptych.planner.memory.stages import predict_stages
from diptych.planner.reports.console import new_table
from diptych.planner.traffic import wire_traffic
from diptych.plans.config import TransformerConfig
from diptych.plans.schedule.named import schedule_for
from diptych.plans.schedule.partition import num_stages

UNITS = {"MiB": 2**20, "GiB": 2**30}
MOST_SIMULATED = 2**14
"""Largest number of stages times microbatches for which temporary buffers and messages are counted."""
MOST_ROWS = 16
"""Largest number of printed rows; longer tables show the first, some middle and the last rows."""


def describe_mesh(config: TransformerConfig, data_parallel_size: int) -> str:
    """Describe the number of ranks and their arrangement."""
    sizes = (
        (data_parallel_size, "replica"),
        (config.context_parallel_size, "context rank"),
        (config.pipeline_model_parallel_size, "pipeline rank"),
        (config.tensor_model_parallel_size, "tensor-parallel rank"),
    )
    several = [f"{size:,} {name}s" for size, name in sizes if size > 1]
    count = data_parallel_size * config.model_parallel_size
    return f"{count:,} rank{'s' * (count > 1)}" + f": {' of '.join(several)}" * (len(several) > 0)


def print_mesh(
    console: Console,
    config: TransformerConfig,
    micro_batch_size: int,
    num_microbatches: int,
    data_parallel_size: int = 1,
) -> None:
    """Print tables of the bytes of one rank and of the traffic, with the terms that they leave out.

    Args:
        console: printed to.
        config: the model, with its pipeline and context ranks.
        micro_batch_size: sequences of a microbatch.
        num_microbatches: microbatches of a step on each replica.
        data_parallel_size: replicas.

    Raises:
        ValueError: the schedule does not allow so many microbatches.
    """
    schedule = schedule_for(config, num_microbatches)
    ranks = rank_memories(config, schedule, predict_stages(config, micro_batch_size), data_parallel_size)
    console.print(_memory_table(ranks))
    largest = max(range(len(ranks)), key=lambda rank: ranks[rank].total)
    shared = config.context_parallel_size > 1
    activations = f" Activations of a rank's part of the tokens{_gathered(config)}." * shared
    offloaded = " Activations on the host are not counted." * config.enable_activation_offload
    unit = memory_unit(ranks[largest].total)
    console.print(
        f"Most on pipeline rank {largest}: {ranks[largest].total / UNITS[unit]:,.1f} {unit}. Parameters, gradients and "
        f"the optimizer's state exact, activations predicted.{activations}{offloaded} Left out: temporary buffers, "
        "messages in transit and flattened gradients."
    )
    if num_stages(config) * num_microbatches <= MOST_SIMULATED:
        peaks = rank_peaks(config, schedule, micro_batch_size)
        needed = [
            rank.parameters + rank.moments + rank.master_weights + peak for rank, peak in zip(ranks, peaks, strict=True)
        ]
        largest = max(range(len(ranks)), key=needed.__getitem__)
        console.print(
            f"With temporary buffers and messages: at most {needed[largest] / UNITS[unit]:,.1f} {unit}, on pipeline "
            f"rank {largest}."
        )
    if data_parallel_size * config.model_parallel_size > 1:
        console.print()
        console.print(_wire_table(config, micro_batch_size, num_microbatches, data_parallel_size))
        console.print(
            "Sums are ring all-reduces, in which each rank sends 2 (n - 1) / n of the bytes; gathers and scatters send "
            "n - 1 parts. Left out: message headers and sums of scalars."
        )


def _gathered(config: TransformerConfig) -> str:
    return ", but keys and values of all" * config.has_softmax


def _memory_table(ranks: Sequence[RankMemory]) -> Table:
    """Return a table of the memory of every pipeline rank, term by term."""
    always = ("parameters", "gradients", "moments", "activations", "total")
    terms = [*always[:3], "master_weights", "activations", "waiting", "total", "on_host"]
    terms = [name for name in terms if name in always or any(getattr(rank, name) for rank in ranks)]
    headings = {"waiting": "from I to W", "on_host": "also on host", "master_weights": "master weights"}
    unit = memory_unit(max(rank.total for rank in ranks))
    names = ("pipeline rank", *(headings.get(name, name) for name in terms))
    table = new_table(f"bytes of one rank, by term, {unit}", names)
    cells = [[f"{getattr(rank, name) / UNITS[unit]:,.1f}" for name in terms] for rank in ranks]
    add_rows(table, join_equal_ranks(cells))
    return table


def _wire_table(config: TransformerConfig, batch: int, count: int, replicas: int) -> Table:
    """Return a table of the traffic of one step, term by term."""
    traffic = wire_traffic(config, batch, count, replicas)
    together = [sum(each) for each in zip(*(term.by_rank for term in traffic), strict=True)]
    unit = memory_unit(max(together))
    headings = ("", "algorithm", "a rank sends", "pipeline rank", "all ranks")
    table = new_table(f"traffic of one step, {unit}", headings, left=headings[:2], no_wrap=headings)
    for name, algorithm, by_rank, total in traffic:
        most = max(by_rank)
        place = (
            "every" if min(by_rank) == most else _describe_range([r for r, size in enumerate(by_rank) if size == most])
        )
        table.add_row(name, algorithm, f"{most / UNITS[unit]:,.1f}", place, f"{total / UNITS[unit]:,.1f}")
    table.add_section()
    most = max(together)
    all_ = sum(term.total for term in traffic)
    sizes = [f"{size / UNITS[unit]:,.1f}" for size in (most, all_)]
    table.add_row("sum, at most", "", sizes[0], str(together.index(most)), sizes[1])
    return table


def memory_unit(largest: int) -> str:
    """Return the unit in which a table's numbers are short."""
    return "GiB" if largest >= 10 * UNITS["GiB"] else "MiB"


def _describe_range(numbers: Sequence[int]) -> str:
    """Describe sorted numbers as at most two ranges."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda each: each[1] - each[0])]
    words = [f"{run[0]}" if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    return ", ".join(words if len(words) <= 2 else [words[0], "..."])


def join_equal_ranks(cells: Iterable[Sequence[str]]) -> list[tuple[str, ...]]:
    """Return table rows in which consecutive ranks with equal cells are joined, as ``3 to 60``."""
    rows = []
    for row, run in groupby(enumerate(cells), lambda each: tuple(each[1])):
        numbers = [number for number, _ in run]
        rows.append((str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}", *row))
    return rows


def printed_rows(count: int) -> list[int | None]:
    """Return the rows to print: all, or the first five, two middle and the last five; None marks a gap."""
    if count <= MOST_ROWS:
        return [*range(count)]
    chosen = sorted({*range(5), count // 3, 2 * count // 3, *range(count - 5, count)})
    rows: list[int | None] = [0]
    for before, after in pairwise(chosen):
        rows += [after] if after == before + 1 else [None, after]
    return rows


def add_rows(table: Table, rows: Sequence[Sequence[str]]) -> None:
    """Add all rows of a short table, or some rows of a long one with dots between them."""
    for place in printed_rows(len(rows)):
        table.add_row(*("..." if place is None else cell for cell in rows[place or 0]))
