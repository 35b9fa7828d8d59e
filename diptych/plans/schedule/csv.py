"""Schedule files in the CSV format of torch.distributed.pipelining: one row per rank, one action per cell.

    0F0,0F1,,0B0,0B1        stage, kind, microbatch; empty cells are ignored
    (0F2;3B0)OVERLAP_F_B    two actions that may overlap; read as two consecutive actions

PyTorch's ``_PipelineScheduleRuntime._load_csv`` reads files written here, and this module reads files that PyTorch's
``_dump_csv`` writes for computation only. Files contain no messages; diptych.plans.schedule.messages adds them.
"""

import csv
import re
from collections.abc import Iterable
from pathlib import Path
from typing import cast, get_args

from diptych.plans.schedule.actions import Action, Kind, Schedule
from diptych.plans.schedule.placement import FROM_FILE, Placement, place_of
from diptych.plans.schedule.validate import validate_schedule
from diptych.plans.text_files import one_line, read_text

_ACTION = re.compile(r"([0-9]{1,18})([FBIW])([0-9]{1,18})")
_PAIR = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_LOWERED = re.compile(r"\d+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)\d*")


def schedule_to_csv(schedule: Schedule) -> str:
    """Return a schedule as CSV text, with one line per rank."""
    return "".join(f"{row}\n" for row in schedule_rows(schedule))


def schedule_rows(schedule: Schedule) -> list[str]:
    """Return the CSV line of each rank, e.g. ``0F0,0F1,0B0,0B1``."""
    return [",".join(map(str, actions)) for actions in schedule.actions]


def schedule_from_csv(text: str, name: str = FROM_FILE) -> Schedule:
    """Parse a schedule from CSV text without validating its order.

    Args:
        text: CSV in the format of the module docstring.
        name: name of the schedule.

    Raises:
        ValueError: a cell is not an action (the message names row and cell), or the stages have no placement of
            diptych.plans.schedule.placement.
    """
    try:
        cells = [*csv.reader(text.splitlines())]
    except csv.Error as error:
        raise ValueError(f"schedule: expected rows of cells with commas between them, got {error}") from None
    while cells and not any(cell.strip() for cell in cells[-1]):
        cells.pop()
    rows = [list(_actions(row, rank)) for rank, row in enumerate(cells)]
    if not any(rows):
        raise ValueError("schedule: expected a row of actions for each rank, got none")
    if not all(rows):
        raise ValueError(f"schedule, row {rows.index([])}: expected a rank's actions, got none")
    everything = [action for row in rows for action in row]
    _check_numbers(everything)
    stages = 1 + max(action.stage for action in everything)
    microbatches = 1 + max(action.microbatch for action in everything)
    per_rank = -(-stages // len(rows))
    forward_only = all(action.kind == "F" for action in everything)
    placement = _placement(rows, stages)
    return Schedule(name, len(rows), microbatches, per_rank, tuple(map(tuple, rows)), forward_only, placement)


def read_schedule(path: str | Path) -> Schedule:
    """Read and validate a schedule from a CSV file.

    Args:
        path: the file.

    Raises:
        ValueError: the file is malformed (see schedule_from_csv), or its schedule is invalid (see
            diptych.plans.schedule.validate.validate_schedule); the message begins with the path.
        FileNotFoundError: the file does not exist.
    """
    try:
        schedule = schedule_from_csv(read_text(path))
        validate_schedule(schedule)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    return schedule


def _check_numbers(actions: list[Action]) -> None:
    """Reject stage and microbatch numbers that exceed the number of actions, before anything is allocated by them."""
    for name in ("stage", "microbatch"):
        largest = max(actions, key=lambda action: getattr(action, name))
        if getattr(largest, name) >= len(actions):
            raise ValueError(
                f"schedule: expected {name} numbers from 0 on without gaps in a schedule of {len(actions)} actions, "
                f"got {largest}"
            )


def _actions(cells: Iterable[str], rank: int) -> Iterable[Action]:
    """Yield the actions in the cells of one row."""
    for place, cell in enumerate(cells):
        pair = _PAIR.fullmatch(cell.strip())
        for part in pair[1].split(";") if pair else [cell]:
            found = _ACTION.fullmatch(part.strip())
            if found is not None:
                stage, kind, microbatch = found.groups()
                yield Action(cast("Kind", kind), int(stage), int(microbatch))
            elif part.strip():
                remedy = "; save only computations, without messages" if _LOWERED.fullmatch(part.strip()) else ""
                raise ValueError(
                    f"schedule, row {rank}, cell {place}: expected stage, one of F, B, I and W, and microbatch, as in "
                    f"'0F1', got {one_line(part.strip())}{remedy}"
                )


def _placement(rows: list[list[Action]], stages: int) -> Placement:
    """Return the placement that matches the stages in every rank's actions."""
    p = len(rows)
    held = [sorted({action.stage for action in row}) for row in rows]
    for placement in get_args(Placement):
        if placement == "v" and stages != 2 * p:
            continue
        if held == [[s for s in range(stages) if place_of(s, p, placement).pp_rank == rank] for rank in range(p)]:
            return placement
    found = "; ".join(f"rank {rank}: {', '.join(map(str, own)) or 'none'}" for rank, own in enumerate(held))
    raise ValueError(
        f"schedule: expected stage s on rank s mod {p}, or V-shaped placement (0 1 2 | 2 1 0), got {found}"
    )
