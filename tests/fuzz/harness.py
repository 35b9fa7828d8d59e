"""The interface of a fuzzer, and functions that draw, run and judge its programs."""

import contextlib
import gc
import importlib
import resource
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
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
    """A program whose results differ from the plain program's, or that ended in an error of another origin."""


class Fuzzer(Protocol):
    """A module of tests/fuzz/grammars: a grammar of programs, and a check of one program."""

    HARD_CASES: frozenset[str]
    """Features of the grammar that a hundred programs must contain."""

    def draw(self, rng: np.random.Generator) -> Any:
        """Draw a program: a value with a complete repr."""

    def features(self, program: Any) -> Iterable[str]:
        """Name the features of the grammar that a program uses."""

    def check(self, program: Any) -> Outcome:
        """Run a program and compare it with the plain one.

        Raises:
            Wrong: if the results differ. Any other exception is also a failure.
        """


TECHNIQUES = tuple(sorted(path.stem for path in (Path(__file__).parent / "grammars").glob("[!_]*.py")))
"""Names of the fuzzers, which are modules of tests/fuzz/grammars."""


def load(technique: str) -> Fuzzer:
    """Import the fuzzer of a technique.

    Raises:
        ValueError: if the technique is unknown.
    """
    if technique not in TECHNIQUES:
        raise ValueError(f"technique: expected one of {', '.join(TECHNIQUES)}, got {technique!r}")
    return importlib.import_module(f"tests.fuzz.grammars.{technique}")  # pyright: ignore[reportReturnType]


def program_of(technique: str, number: int) -> Any:
    """Draw program ``number`` of a technique, which is the same each time."""
    return load(technique).draw(np.random.default_rng([zlib.crc32(technique.encode()), number]))


def judge(technique: str, number: int) -> Outcome:
    """Draw a program, run it and compare it with the plain one.

    Raises:
        Wrong: if it fails; the message contains the program and the command that repeats it.
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
    """A record of threads and memory of this process, for comparison at a later time."""

    def __init__(self) -> None:
        gc.collect()
        self.threads = threading.active_count()
        self.mebibytes = _resident_mebibytes()

    def check(self, threads: int = 0, mebibytes: float = 64.0) -> None:
        """Compare the record with the present state.

        Raises:
            Wrong: if threads or memory grew by more than the allowance.
        """
        now = Growth()
        if now.threads > self.threads + threads:
            raise Wrong(f"threads grew from {self.threads} to {now.threads}: {threading.enumerate()}")
        if now.mebibytes > self.mebibytes + mebibytes:
            raise Wrong(f"resident memory grew from {self.mebibytes:.0f} to {now.mebibytes:.0f} MiB")


def check_nothing_grows(run: Callable[[], object], threads: int = 0, mebibytes: float = 8.0) -> None:
    """Run a function up to three times until nothing grows; leaks recur in every run, caches grow only once.

    Raises:
        Wrong: if threads or memory grew by more than the allowance in each of three runs.
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
    """A detector of leaks in a long run: leaks grow in every window of programs, caches only in the first ones.

    Args:
        programs: number of programs in a window.
        mebibytes: allowed growth of resident memory per window.
        filling: number of windows at the start in which caches fill.
    """

    def __init__(self, programs: int = 100, mebibytes: float = 8.0, filling: int = 6) -> None:
        self._programs = programs
        self._mebibytes = mebibytes
        self._filling = filling
        self._count = 0
        self._sizes: list[Growth] = []

    def check(self) -> None:
        """Count one program; at the end of a window, compare the last four.

        Raises:
            Wrong: if threads or memory grew in each of the last three windows.
        """
        self._count += 1
        if self._count % self._programs or self._count < self._filling * self._programs:
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


@contextlib.contextmanager
def bounded_memory(mebibytes: int = 2048) -> Iterator[None]:
    """Limit further allocations of this process, so that a huge allocation raises an error."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + mebibytes * 2**20, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def run_programs(technique: str, numbers: Iterable[int]) -> Counter:
    """Run programs and count verdicts and features, each feature under ``uses <feature>``.

    Raises:
        Wrong: if a program is neither equal nor refused.
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
