"""JSON files with measured costs of a pipeline's stages, for generating schedules.

{
  "forward_seconds": [0.011, 0.010],            of one microbatch, one number per stage
  "input_gradient_seconds": [0.013, 0.012],
  "weight_gradient_seconds": [0.009, 0.010],
  "communication_seconds": 0.0004,              from the end of an action to its result's arrival on another rank
  "activation_bytes": [1000000, 900000],        optional, together with the next entry; otherwise predicted
  "weight_gradient_bytes": [500000, 500000],
  "about": {}                                   optional; any value, ignored
}
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from diptych.plans.schedule.simulate import Costs
from diptych.plans.text_files import one_line, parse_json, read_text

TIMES = {
    "forward_seconds": "forward",
    "input_gradient_seconds": "input_gradient",
    "weight_gradient_seconds": "weight_gradient",
}
BYTES = {"activation_bytes": "activation_bytes", "weight_gradient_bytes": "weight_gradient_bytes"}
SMALLEST = 1e-15
LARGEST = 1e15
"""Accepted seconds or bytes, beside 0: within these limits sums and quotients of all costs are finite."""
LINK = "communication_seconds"
ABOUT = "about"


class StageCosts(NamedTuple):
    """The content of a file."""

    costs: Costs
    """Times in seconds."""
    has_bytes: bool
    """True if the file has the bytes saved for backward."""


def read_stage_costs(path: str | Path, num_stages: int) -> StageCosts:
    """Read a file of stage costs.

    Args:
        path: path of the file.
        num_stages: number of stages that the file must have costs for.

    Raises:
        ValueError: the file cannot be read or has another format; the message names the entry.
    """
    content = _content(path)
    named = [*TIMES, LINK, *BYTES, ABOUT]
    if unknown := [name for name in content if name not in named]:
        raise ValueError(f"stage_costs, {path}: expected entries of {named}, got {one_line(unknown[0])}")
    has_bytes = any(name in content for name in BYTES)
    needed = [*TIMES, LINK, *(BYTES if has_bytes else ())]
    if missing := [name for name in needed if name not in content]:
        raise ValueError(f"stage_costs, {path}: expected an entry {missing[0]!r}, got {[*content]}")
    values: dict[str, Any] = {}
    for name, field in {**TIMES, **(BYTES if has_bytes else {})}.items():
        value = content[name]
        if not isinstance(value, list) or len(value) != num_stages:
            got = f"{len(value)}" if isinstance(value, list) else one_line(value)
            raise ValueError(
                f"stage_costs, {path}: expected {name} as a list of {num_stages} numbers, one a stage, got {got}"
            )
        values[field] = [_number(path, f"{name}, stage {stage}", each) for stage, each in enumerate(value)]
    if not any(any(values[field]) for field in TIMES.values()):
        raise ValueError(f"stage_costs, {path}: expected an action that takes time, got 0 for all")
    return StageCosts(Costs(**values, communication=_number(path, LINK, content[LINK])), has_bytes)


def write_stage_costs(path: str | Path, costs: Costs, num_stages: int, has_bytes: bool, about: Any = None) -> None:
    """Write a file that read_stage_costs reads.

    Args:
        path: path of the file.
        costs: the costs, times in seconds.
        num_stages: number of stages of the pipeline.
        has_bytes: True to write the bytes saved for backward.
        about: source of the numbers; any JSON value.
    """
    content: dict[str, Any] = {
        name: [costs.of(field, stage) for stage in range(num_stages)]
        for name, field in {**TIMES, **(BYTES if has_bytes else {})}.items()
    }
    content |= {LINK: costs.communication} | ({} if about is None else {ABOUT: about})
    Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _content(path: str | Path) -> Mapping[str, Any]:
    try:
        content = parse_json(read_text(path))
    except (OSError, ValueError) as error:
        raise ValueError(f"stage_costs, {path}: expected a JSON file, got {one_line(error)}") from None
    if not isinstance(content, dict):
        raise ValueError(f"stage_costs, {path}: expected a JSON object, got {type(content).__name__}")
    return content


def _number(path: str | Path, name: str, value: Any) -> float:
    expected = f"stage_costs, {path}: expected {name} to be"
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < math.inf:
        raise ValueError(f"{expected} a finite number of at least 0, got {one_line(value)}")
    if value != 0 and not SMALLEST <= value <= LARGEST:
        raise ValueError(f"{expected} 0 or from {SMALLEST:g} to {LARGEST:g}, got {one_line(value)}")
    return float(value)
