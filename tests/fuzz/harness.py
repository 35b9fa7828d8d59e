"""The contract of a fuzzer, and how its programs are drawn, run and judged."""

import contextlib
import gc
import importlib
import resource
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

EQUAL = "equal"
REFUSED = "refused"


class Outcome(NamedTuple):
    """The verdict on one program."""

    verdict: str
    """EQUAL: results are those of the plain program. REFUSED: an error of this project names the cause."""
    detail: str = ""
    """The message of a refusal."""


class Wrong(AssertionError):
    """A program whose results differ from the plain program's, or that ended in an error which is not ours."""


class Fuzzer(Protocol):
    """A module of tests/fuzz/grammars: a grammar of programs, and the judgement on one of them."""

    HARD_CASES: frozenset[str]
    """Features of the grammar that a hundred programs must contain."""

    def draw(self, rng: np.random.Generator) -> Any:
        """Draw a program: a value whose repr shows the whole of it."""

    def features(self, program: Any) -> Iterable[str]:
        """Name the features of the grammar that a program uses."""

    def check(self, program: Any) -> Outcome:
        """Run a program beside the plain one.

        Raises:
            Wrong: the results differ. Any other exception is a failure as well: an error that is not ours.
        """


TECHNIQUES = tuple(sorted(path.stem for path in (Path(__file__).parent / "grammars").glob("[!_]*.py")))
"""The fuzzers there are: the modules of tests/fuzz/grammars."""


def load(technique: str) -> Fuzzer:
    """Import the fuzzer of a technique.

    Raises:
        ValueError: there is no such technique.
    """
    if technique not in TECHNIQUES:
        raise ValueError(f"technique: expected one of {', '.join(TECHNIQUES)}, got {technique!r}")
    return importlib.import_module(f"tests.fuzz.grammars.{technique}")  # pyright: ignore[reportReturnType]


def program_of(technique: str, number: int) -> Any:
    """Draw program ``number`` of a technique: the same one each time."""
    return load(technique).draw(np.random.default_rng([zlib.crc32(technique.encode()), number]))


def judge(technique: str, number: int) -> Outcome:
    """Draw a program and run it beside the plain one.

    Raises:
        Wrong: with the program and how to run it again.
    """
    program = program_of(technique, number)
    try:
        return load(technique).check(program)
    except Exception as error:
        raise Wrong(
            f"program {number} of {technique} ({type(error).__name__}: {error})\n{program}\n"
            f"again: python -m tests.fuzz {technique} --program {number}"
        ) from error


class Growth:
    """Threads and memory of this process at one moment, to be compared with a later one."""

    def __init__(self) -> None:
        gc.collect()
        self.threads = threading.active_count()
        self.mebibytes = _resident_mebibytes()

    def check(self, threads: int = 0, mebibytes: float = 64.0) -> None:
        """Compare with now.

        Raises:
            Wrong: there are more threads, or more memory, than the allowance given.
        """
        now = Growth()
        if now.threads > self.threads + threads:
            raise Wrong(f"threads grew from {self.threads} to {now.threads}: {threading.enumerate()}")
        if now.mebibytes > self.mebibytes + mebibytes:
            raise Wrong(f"resident memory grew from {self.mebibytes:.0f} to {now.mebibytes:.0f} MiB")


def check_nothing_grows(run: Callable[[], object], threads: int = 0, mebibytes: float = 8.0) -> None:
    """Run something again and again until it leaves nothing; what leaks does so every time, what fills caches once.

    Raises:
        Wrong: three runs left more threads, or more memory, than the allowance given.
    """
    for attempt in range(3):
        before = Growth()
        run()
        try:
            return before.check(threads, mebibytes)
        except Wrong:
            if attempt == 2:
                raise


class GrowthWatch:
    """A watch over a long run: what leaks grows in every window of programs, what fills caches does so once.

    Args:
        programs: number of programs in a window.
        mebibytes: growth of resident memory that one window may have.
    """

    def __init__(self, programs: int = 100, mebibytes: float = 8.0) -> None:
        self._programs, self._mebibytes = programs, mebibytes
        self._count = 0
        self._sizes: list[Growth] = []

    def check(self) -> None:
        """Count one program; at the end of a window, compare the last four.

        Raises:
            Wrong: threads or memory grew in each of the last three windows.
        """
        self._count += 1
        if self._count % self._programs:
            return
        self._sizes = [*self._sizes[-3:], Growth()]
        pairs = [*pairwise(self._sizes)]
        if len(pairs) < 3:
            return
        if all(after.threads > before.threads for before, after in pairs):
            raise Wrong(f"threads grew in every {self._programs} programs: {[size.threads for size in self._sizes]}")
        if all(after.mebibytes > before.mebibytes + self._mebibytes for before, after in pairs):
            sizes = ", ".join(f"{size.mebibytes:.0f}" for size in self._sizes)
            raise Wrong(f"resident memory grew in every {self._programs} programs, MiB: {sizes}")


def run_programs(technique: str, numbers: Iterable[int]) -> Counter:
    """Run programs and count verdicts and features, each feature under ``uses <feature>``.

    Raises:
        Wrong: at the first program that is neither equal nor refused.
    """
    counts: Counter = Counter()
    for number in numbers:
        counts[judge(technique, number).verdict] += 1
        counts.update(f"uses {feature}" for feature in set(load(technique).features(program_of(technique, number))))
    return counts


def _resident_mebibytes() -> float:
    with contextlib.suppress(OSError), open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
