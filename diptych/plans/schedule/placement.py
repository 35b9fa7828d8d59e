"""Names of the pipeline schedules, and on which rank each one's stages lie.

    loop   stage s on rank s mod p: 0 1 2 3 | 0 1 2 3; any number of virtual stages a rank
    v      there and back, two virtual stages a rank: 0 1 2 3 | 3 2 1 0; the last stage lies on the first rank

Either way stage s is virtual stage s // p of its rank.
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
"""Those that diptych.plans.schedule.named builds by name."""

SCHEDULES: tuple[str, ...] = get_args(ScheduleName)

V_SCHEDULES = ("zb-v", "v-half", "v-min", "dualpipe-v")
"""Those of placement ``v``."""

INTERLEAVED_SCHEDULES = ("interleaved", "interleaved-zb1p")
"""Those of any number of virtual stages a rank."""

FROM_FILE = "file"
"""What a schedule is called that is read from a file."""


class StagePlace(NamedTuple):
    """Where a stage lies."""

    vp_stage: int
    """Which of its rank's stages it is."""
    pp_rank: int


def place_of(stage: int, pp_size: int, placement: Placement = "loop") -> StagePlace:
    """Where a stage lies among ``pp_size`` ranks."""
    vp_stage, along = divmod(stage, pp_size)
    return StagePlace(vp_stage, pp_size - 1 - along if placement == "v" and vp_stage % 2 else along)


def stage_at(place: StagePlace, pp_size: int, placement: Placement = "loop") -> int:
    """The inverse of place_of."""
    vp_stage, rank = place
    return vp_stage * pp_size + (pp_size - 1 - rank if placement == "v" and vp_stage % 2 else rank)
