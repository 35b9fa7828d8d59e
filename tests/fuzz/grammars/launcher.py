"""Runs of several processes in which ranks are killed, are stopped or hang at any time.

Most programs run a substitute of a rank through the real launcher; few run ``diptych train`` itself. In all cases the
launcher ends in time, fails unless all ranks succeed, names the rank, and leaves no process and no open file.
"""

import functools
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from tests.fuzz.grammars._launcher_rank import PHASES
from tests.fuzz.harness import Outcome, Wrong

KINDS = ("SIGKILL", "SIGSTOP", "SIGSEGV", "SIGTERM", "hang", "exit")
"""Faults of ranks. Some programs also have ``pause``, a stop that is continued in time."""
LATEST = 0.4
"""Latest time of a fault of a rank or the launcher, in seconds after the start."""

HARD_CASES = frozenset(
    {
        *(f"{kind} at {phase}" for kind in ("SIGKILL", "SIGSTOP") for phase in ("spawn", "meeting", "end")),
        *KINDS,
        "pause",
        "no fault",
        "two faults",
        "every rank stopped",
        "interrupted",
        "grandchild",
    }
)


@dataclass(frozen=True)
class Fault:
    """A fault of a rank, in one of its phases or at a number of seconds after its start."""

    kind: str
    rank: int
    when: str | float


@dataclass(frozen=True)
class Program:
    """One run of the launcher."""

    ranks: int
    faults: tuple[Fault, ...] = ()
    interrupt: tuple[str, float] | None = None
    """A signal to the launcher, and its time."""
    grandchild: int | None = None
    """The rank that starts another process."""
    seconds: float = 0.0
    """Seconds that ranks compute."""
    real: bool = False
    """True if ``diptych train --nproc`` runs."""

    @property
    def waits(self) -> bool:
        """Return True if a rank blocks the others until a timeout."""
        return any(fault.kind in ("SIGSTOP", "hang") for fault in self.faults)


def draw(rng: np.random.Generator) -> Program:
    """Draw a run."""
    ranks = int(rng.integers(2, 5))
    chance = rng.random()
    seconds = float(np.round(rng.random() * 0.1, 3))
    grandchild = int(rng.integers(ranks)) if rng.random() < 0.2 else None
    if chance < 0.15:
        return Program(ranks, (), None, grandchild, seconds)
    if chance < 0.25:
        when = float(np.round(rng.random() * LATEST, 3))
        return Program(ranks, (), (str(rng.choice(["SIGINT", "SIGTERM"])), when), grandchild, 1.0)
    if chance < 0.3:
        return Program(ranks, (Fault("pause", int(rng.integers(ranks)), _phase(rng)),), None, grandchild, seconds)
    if chance < 0.34:
        return Program(ranks, tuple(Fault("SIGSTOP", rank, _phase(rng)) for rank in range(ranks)))
    faults = [_draw_fault(rng, ranks)]
    if rng.random() < 0.15:
        faults.append(_draw_fault(rng, ranks))
    real = rng.random() < 0.01
    return Program(ranks, tuple(faults), None, None if real else grandchild, seconds, real)


def _phase(rng: np.random.Generator) -> str:
    return str(rng.choice(PHASES))


def _draw_fault(rng: np.random.Generator, ranks: int) -> Fault:
    kind = str(rng.choice(KINDS, p=(0.35, 0.2, 0.1, 0.1, 0.1, 0.15)))
    if kind.startswith("SIG") and rng.random() < 0.5:
        when = 0.0 if rng.random() < 0.3 else float(np.round(rng.random() * LATEST, 3))
        return Fault(kind, int(rng.integers(ranks)), when)
    return Fault(kind, int(rng.integers(ranks)), _phase(rng))


def features(program: Program) -> Iterable[str]:
    """Name the faults of a run."""
    for fault in program.faults:
        yield fault.kind
        yield f"{fault.kind} at {'spawn' if fault.when in (0.0, 'start') else fault.when}"
    hard = {
        "no fault": not program.faults and program.interrupt is None,
        "two faults": len(program.faults) == 2,
        "every rank stopped": [fault.kind for fault in program.faults] == ["SIGSTOP"] * program.ranks,
        "interrupted": program.interrupt is not None,
        "grandchild": program.grandchild is not None,
        "real": program.real,
    }
    yield from (name for name, has in hard.items() if has)


class LauncherProcess:
    """A process that runs programs one after another.

    The launcher forks, and a fork of a test's process may crash, because JAX has threads there.
    """

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.fuzz.grammars._launcher_check"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._lock = threading.Lock()

    def check(self, program: Program, expected: str) -> Outcome:
        """See check."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            pickle.dump((program, expected), self._process.stdin)
            self._process.stdin.flush()
            try:
                result = pickle.load(self._process.stdout)
            except EOFError:
                _process.cache_clear()
                raise Wrong(f"the launcher's process ended with exit code {self._process.wait()}") from None
        if isinstance(result, Exception):
            raise result
        return result


@functools.cache
def _process() -> LauncherProcess:
    return LauncherProcess()


def check(program: Program, expected: str = "") -> Outcome:
    """Run a program in a process of its own, and check its end.

    If ranks exceeded a short timeout, it runs again with a longer one.

    Args:
        program: the run to check.
        expected: pattern that the message of the launcher must contain.

    Raises:
        Wrong: the launcher did not end in time, named no rank, or left processes or files.
    """
    return _process().check(program, expected)
