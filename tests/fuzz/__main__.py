"""Run fuzzers for a given time, or repeat one program: ``python -m tests.fuzz --minutes 30``.

Programs run in a separate process. A crash or a hang of one program is reported, and the other programs continue.
"""

import argparse
import os
import sys
import time
from collections import Counter

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("DIPTYCH_TUNE", "0")

from tests.fuzz.harness import TECHNIQUES, judge, program_of
from tests.fuzz.worker import Worker


def fuzz(techniques: list[str], minutes: float, first: int) -> int:
    """Run each technique's programs for its share of the time; print refusals and failures.

    Args:
        techniques: names of techniques.
        minutes: time for all techniques together.
        first: number of the first program of each technique.

    Returns:
        The number of programs that failed.
    """
    failed = 0
    for technique in techniques:
        until = time.monotonic() + 60 * minutes / len(techniques)
        verdicts: Counter = Counter()
        refusals: Counter = Counter()
        worker = Worker(technique)
        number = first
        while time.monotonic() < until:
            verdict, detail = worker.judge(number)
            verdicts[verdict] += 1
            if verdict == "failed":
                print(f"FAILED {technique} {number}\n{detail}", flush=True)
            elif detail:
                refusals[detail[:100]] += 1
            number += 1
        worker.close()
        failed += verdicts["failed"]
        counts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items()))
        print(f"{technique}: programs {first} to {number - 1}: {counts}", flush=True)
        for message, count in refusals.most_common(10):
            print(f"    {count:5} refused: {message}")
    return failed


def main() -> int:
    """Parse the command line; return 1 if a program failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("techniques", nargs="*", help=f"of {', '.join(TECHNIQUES)}; default: all")
    parser.add_argument("--minutes", type=float, default=5.0, help="time over all techniques")
    parser.add_argument("--first", type=int, default=None, help="number of the first program; default: by the clock")
    parser.add_argument("--program", type=int, default=None, help="run only this program, in this process")
    args = parser.parse_args()
    techniques = args.techniques or list(TECHNIQUES)
    if args.program is not None:
        for technique in techniques:
            print(program_of(technique, args.program))
            print(judge(technique, args.program))
        return 0
    first = int(time.time()) if args.first is None else args.first
    return 1 if fuzz(techniques, args.minutes, first) else 0


if __name__ == "__main__":
    sys.exit(main())
