"""Run fuzzers for a given time, or one program again: ``python -m tests.fuzz --minutes 30``.

Programs run in a process of their own, so that a crash or a hang of one is told and the others go on.
"""

import argparse
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter
from multiprocessing.connection import Connection

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("DIPTYCH_TUNE", "0")

from tests.fuzz.harness import TECHNIQUES, judge, load, program_of

SECONDS_A_PROGRAM = 120.0
"""A program that takes longer is taken for a hang."""


def _serve(technique: str, pipe: Connection) -> None:
    """Judge the programs whose numbers arrive, until None does."""
    import torch

    torch.set_num_threads(1)
    load(technique)
    pipe.send(("ready", ""))
    for number in iter(pipe.recv, None):
        try:
            outcome = judge(technique, number)
            pipe.send((outcome.verdict, outcome.detail))
        except BaseException:
            pipe.send(("failed", traceback.format_exc()))


class _Worker:
    """A process that judges programs of one technique, started anew after a crash or a hang."""

    def __init__(self, technique: str) -> None:
        self._technique = technique
        self._process = None

    def judge(self, number: int) -> tuple[str, str]:
        """Return the verdict on a program and its detail; a crash and a hang are failures."""
        if self._process is None:
            self._start()
        assert self._process is not None
        self._pipe.send(number)
        verdict, detail = self._receive()
        if verdict in ("hang", "crash"):
            self._process.kill()
            self._process.join()
            self._process = None
            program = program_of(self._technique, number)
            return "failed", f"{verdict}: {detail}\nprogram {number} of {self._technique}\n{program}"
        return verdict, detail

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._pipe.send(None)
            self._process.join(10)
            self._process.kill()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(self._technique, other))
        self._process.start()
        other.close()
        if self._receive()[0] != "ready":
            raise RuntimeError(f"the process of {self._technique} did not start")

    def _receive(self) -> tuple[str, str]:
        try:
            if not self._pipe.poll(SECONDS_A_PROGRAM):
                return "hang", f"no answer within {SECONDS_A_PROGRAM:.0f} s"
            return self._pipe.recv()
        except (EOFError, ConnectionResetError):
            return "crash", "the process ended"


def fuzz(techniques: list[str], minutes: float, first: int) -> int:
    """Run each technique's programs for its share of the time; print what was refused and what failed.

    Args:
        techniques: names.
        minutes: over all of them.
        first: number of each technique's first program.

    Returns:
        How many programs failed.
    """
    failed = 0
    for technique in techniques:
        until = time.monotonic() + 60 * minutes / len(techniques)
        verdicts: Counter = Counter()
        refusals: Counter = Counter()
        worker = _Worker(technique)
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
    parser.add_argument("--program", type=int, default=None, help="run only this one, in this process")
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
