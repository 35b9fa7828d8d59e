"""Sizes of pipelines, for fuzzers that draw them."""

import numpy as np

from diptych.plans.schedule.named import check_sizes
from diptych.plans.schedule.placement import SCHEDULES, V_SCHEDULES

VIRTUAL = tuple(name for name in SCHEDULES if name.startswith("interleaved"))
"""Schedules with any number of stages per rank."""


def stages_per_rank(rng: np.random.Generator, name: str) -> int:
    """Draw a number of stages per rank that a schedule may have."""
    return 2 if name in V_SCHEDULES else int(rng.integers(2, 4)) if name in VIRTUAL else 1


def enough_microbatches(name: str, p: int, m: int, v: int) -> int:
    """Return the first number of microbatches from m on that a schedule accepts.

    Args:
        name: name of the schedule.
        p: ranks.
        m: microbatches.
        v: stages per rank.
    """
    while True:
        try:
            check_sizes(name, p, m, v)
        except ValueError:
            m += 1
        else:
            return m
