"""Names of the pipeline schedules, and the placement of their stages on ranks.

    loop   stage s is placed on rank s mod p: 0 1 2 3 | 0 1 2 3; any number of virtual stages per rank
    v      V-shaped, two virtual stages per rank: 0 1 2 3 | 3 2 1 0; the last stage is placed on the first rank

With both placements, stage s is virtual stage s // p of its rank.
"""

from typing import Literal, NamedTuple, get_args

Placement = Literal["loop", "v"]

ScheduleName = Literal[
    "none",
    "gpipe",
    "1f1b",
    "interleaved",
    "interleaved-zb1p",
    "zb-h1",
    "zb-h2",
    "zb-v",
    "v-half",
    "v-min",
    "dualpipe-v",
]
"""Names of the schedules that diptych.plans.schedule.named builds."""

SCHEDULES: tuple[str, ...] = get_args(ScheduleName)

V_SCHEDULES = ("zb-v", "v-half", "v-min", "dualpipe-v")
"""Schedules with placement ``v``."""

INTERLEAVED_SCHEDULES = ("interleaved", "interleaved-zb1p")
"""Schedules with any number of virtual stages per rank."""

FROM_FILE = "file"
"""Name of a schedule that is read from a file."""


class StagePlace(NamedTuple):
    """The place of a stage: its virtual stage and its pipeline rank."""

    vp_stage: int
    """Index of the stage among the stages of its rank."""
    pp_rank: int


def place_of(stage: int, pp_size: int, placement: Placement = "loop") -> StagePlace:
    """Return the virtual stage and rank of a stage, with ``pp_size`` ranks."""
    vp_stage, along = divmod(stage, pp_size)
    return StagePlace(vp_stage, pp_size - 1 - along if placement == "v" and vp_stage % 2 else along)


def stage_at(place: StagePlace, pp_size: int, placement: Placement = "loop") -> int:
    """Return the stage at a virtual stage and rank: the inverse of place_of."""
    vp_stage, rank = place
    return vp_stage * pp_size + (pp_size - 1 - rank if placement == "v" and vp_stage % 2 else rank)
