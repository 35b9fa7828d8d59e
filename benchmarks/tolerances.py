"""Derived tolerances: how close correct pairs of generated programs come to them, and how small a bug they see.

    python -m benchmarks.tolerances [PROGRAMS]

Pairs are those of tests/parity/generated_programs.py: up to six operations in two algebraically equal forms. PROGRAMS
(default 200) pairs are compared in float64, then each of their operations is made wrong by 100 ulps in JAX.
"""

import platform
import sys

import numpy as np
from rich.progress import track

from parity import compare_functions
from parity.rounding import FACTOR
from tests.parity.generated_programs import draw

PROGRAMS = 200


def main(programs: int = PROGRAMS) -> None:
    """Print quantiles of the largest difference of each pair, as a multiple of its tolerance, and the bugs found."""
    correct, wrong = [], []
    for seed in track(range(programs), "programs"):
        program = draw(seed)
        for step in (None, *range(len(program.steps))):
            pair = (program.torch(), program.jax() if step is None else program.jax(step))
            report = compare_functions(*pair, program.inputs(), dtypes=["float64"])
            excess = max(row.difference.excess for row in report.rows)
            (correct if step is None else wrong).append(excess)
    print(f"{platform.machine()}; {programs} pairs, factor {FACTOR:g}; differences as multiples of the tolerance")
    for label, found in (("correct pairs", correct), ("one operation wrong by 100 ulps", wrong)):
        least, median, most = np.quantile(found, (0.0, 0.5, 1.0))
        alarms = sum(excess > 1.0 for excess in found)
        print(
            f"{label:32} {alarms:5} of {len(found):5} differ; least {least:.2f}, median {median:.2f}, most {most:.2f}"
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
