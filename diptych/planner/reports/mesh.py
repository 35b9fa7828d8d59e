"""A whole mesh before it runs: how many ranks, what each of them holds, and what they send each other in a step."""

from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise

from rich.console import Console
from rich.table import Table

from diptych.planner.memory.ranks import RankMemory, rank_memories
from diptych.planner.memory.stages import predict_stages
from diptych.planner.traffic import wire_traffic
from diptych.plans.config import TransformerConfig
from diptych.plans.schedule.named import schedule_for

UNITS = {"MiB": 2**20, "GiB": 2**30}
MOST_ROWS = 16
"""Of a table; of longer ones the first, some and the last are shown."""


def mesh_words(config: TransformerConfig, data_parallel_size: int) -> str:
    """How many ranks there are, and how they are arranged."""
    sizes = (
        (data_parallel_size, "replica"),
        (config.context_parallel_size, "context rank"),
        (config.pipeline_model_parallel_size, "pipeline rank"),
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
    """Tables of the bytes of one rank, and of the bytes on the wire, with what they leave out.

    Args:
        console: to print to.
        config: the model's, with its pipeline and context ranks.
        micro_batch_size: sequences of a microbatch.
        num_microbatches: of a step, on each replica.
        data_parallel_size: replicas.

    Raises:
        ValueError: the schedule cannot have so many microbatches.
    """
    schedule = schedule_for(config, num_microbatches)
    ranks = rank_memories(config, schedule, predict_stages(config, micro_batch_size))
    console.print(_memory_table(ranks))
    largest = max(range(len(ranks)), key=lambda rank: ranks[rank].total)
    shared = config.context_parallel_size > 1
    activations = f" Activations of a rank's part of the tokens{_gathered(config)}." * shared
    offloaded = " Activations as without their offload." * config.enable_activation_offload
    unit = memory_unit(ranks[largest].total)
    console.print(
        f"Most on pipeline rank {largest}: {ranks[largest].total / UNITS[unit]:,.1f} {unit}. Parameters, gradients and "
        f"AdamW's two moments exact, activations predicted.{activations}{offloaded} Left out: what an action needs "
        "only while it runs, messages and flattened gradients on their way."
    )
    if data_parallel_size * config.model_parallel_size > 1:
        console.print()
        console.print(_wire_table(config, micro_batch_size, num_microbatches, data_parallel_size))
        console.print(
            "A sum goes round a ring twice, what is gathered once: each rank sends 2 (n - 1) / n of the bytes, or "
            "n - 1 parts. Left out: headers of messages, and numbers summed alone."
        )


def _gathered(config: TransformerConfig) -> str:
    return ", but keys and values of all" * ("attention" in config.mixers)


def _memory_table(ranks: Sequence[RankMemory]) -> Table:
    terms = ["parameters", "gradients", "moments", "activations", "waiting", "total", "on_host"]
    terms = [name for name in terms if name not in ("waiting", "on_host") or any(getattr(r, name) for r in ranks)]
    headings = {"waiting": "from I to W", "on_host": "beside, on host"}
    unit = memory_unit(max(rank.total for rank in ranks))
    table = Table(box=None, title=f"bytes of one rank, by term, {unit}", title_justify="left")
    for heading in ("pipeline rank", *(headings.get(name, name) for name in terms)):
        table.add_column(heading, justify="right")
    cells = [[f"{getattr(rank, name) / UNITS[unit]:,.1f}" for name in terms] for rank in ranks]
    add_rows(table, join_alike(cells))
    return table


def _wire_table(config: TransformerConfig, batch: int, count: int, replicas: int) -> Table:
    traffic = wire_traffic(config, batch, count, replicas)
    together = [sum(each) for each in zip(*(term.by_rank for term in traffic), strict=True)]
    unit = memory_unit(max(together))
    table = Table(box=None, title=f"bytes on the wire, of one step, {unit}", title_justify="left")
    for heading in ("", "how", "a rank sends", "pipeline rank", "all ranks"):
        table.add_column(heading, justify="left" if heading in ("", "how") else "right", no_wrap=True)
    for name, algorithm, by_rank, total in traffic:
        most = max(by_rank)
        place = "every" if min(by_rank) == most else _range_words([r for r, size in enumerate(by_rank) if size == most])
        table.add_row(name, algorithm, f"{most / UNITS[unit]:,.1f}", place, f"{total / UNITS[unit]:,.1f}")
    table.add_section()
    most, all_ = max(together), sum(term.total for term in traffic)
    sizes = [f"{size / UNITS[unit]:,.1f}" for size in (most, all_)]
    table.add_row("together, at most", "", sizes[0], str(together.index(most)), sizes[1])
    return table


def memory_unit(largest: int) -> str:
    """In which a table's numbers are short."""
    return "GiB" if largest >= 10 * UNITS["GiB"] else "MiB"


def _range_words(numbers: Sequence[int]) -> str:
    """Numbers, in order: runs of them by their ends, not more than two."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda each: each[1] - each[0])]
    words = [f"{run[0]}" if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    return ", ".join(words if len(words) <= 2 else [words[0], "..."])


def join_alike(cells: Iterable[Sequence[str]]) -> list[tuple[str, ...]]:
    """Rows of consecutive ranks, those that are alike as one, the ranks in front: ``3 to 60``."""
    rows = []
    for row, run in groupby(enumerate(cells), lambda each: tuple(each[1])):
        numbers = [number for number, _ in run]
        rows.append((str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}", *row))
    return rows


def places_shown(count: int) -> list[int | None]:
    """Which of so many rows are shown: all, or five first, two between and five last; None where some are left out."""
    if count <= MOST_ROWS:
        return [*range(count)]
    chosen = sorted({*range(5), count // 3, 2 * count // 3, *range(count - 5, count)})
    shown: list[int | None] = [0]
    for before, after in pairwise(chosen):
        shown += [after] if after == before + 1 else [None, after]
    return shown


def add_rows(table: Table, rows: Sequence[Sequence[str]]) -> None:
    """All rows of a short table, some of a long one, dots between them."""
    for place in places_shown(len(rows)):
        table.add_row(*("..." if place is None else cell for cell in rows[place or 0]))
