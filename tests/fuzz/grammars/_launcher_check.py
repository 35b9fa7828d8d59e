"""The process in which the programs of the grammar ``launcher`` run: it reads them from stdin, and writes outcomes.

python -m tests.fuzz.grammars._launcher_check
"""

import contextlib
import json
import os
import pickle
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from parity.cli import processes
from parity.cli.processes import start_processes
from tests.fuzz.grammars._launcher_rank import PLAN
from tests.fuzz.grammars.launcher import Fault, Program
from tests.fuzz.harness import EQUAL, REFUSED, Outcome, Wrong

STAND_IN = "tests.fuzz.grammars._launcher_rank"
SLACK = 20.0
"""Seconds that a loaded machine may take in addition to the timeouts of the launcher."""
GRACE = 0.2
POLL_INTERVAL = 0.01
SHORT = 0.4
"""Timeout in seconds for programs that must time out."""
LONG = 30.0
"""Timeout in seconds for programs that must not time out."""


def main() -> int:
    """Run programs until stdin ends."""
    with os.fdopen(os.dup(1), "wb") as replies:
        while True:
            try:
                program, expected = pickle.load(sys.stdin.buffer)
            except EOFError:
                return 0
            try:
                result: Outcome | Exception = check(program, expected)
            except Exception as error:
                result = error
            pickle.dump(result, replies)
            replies.flush()


def check(program: Program, expected: str = "") -> Outcome:
    """See launcher.check."""
    try:
        return _check(program, expected)
    except Wrong:
        if not program.waits:
            raise
        return _check(program, expected, patience=5.0)


def _check(program: Program, expected: str, patience: float = 1.0) -> Outcome:
    files, threads = _open_files(), threading.active_count()
    with tempfile.TemporaryDirectory() as folder:
        with _captured_stderr(folder) as captured, _Striker(program) as striker:
            begin = time.monotonic()
            code = _launch(program, folder, patience)
            seconds = time.monotonic() - begin
        output = captured.read_text()
        grandchild = Path(folder, "grandchild")
        pids = [*striker.seen, *(int(file.read_text()) for file in [grandchild] if file.exists())]
    end = time.monotonic() + 5.0
    while any(map(_is_there, pids)) and time.monotonic() < end:
        time.sleep(0.005)  # a process that a rank started is killed, and this process cannot reap it
    left = [pid for pid in pids if _is_there(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    if left:
        raise Wrong(f"processes {left} of {striker.seen} outlived the launcher, which wrote: {output}")
    if seconds > SLACK * patience + (60.0 if program.real else 0.0):
        raise Wrong(f"the launcher took {seconds:.1f} s: {output}")
    if _open_files() > files:
        raise Wrong(f"open files grew from {files} to {_open_files()}")
    if threading.active_count() > threads:
        raise Wrong(f"threads grew from {threads} to {threading.active_count()}")
    outcome = _judged(program, code, output, striker.struck)
    if not re.search(expected, outcome.detail):
        raise Wrong(f"expected {expected!r} in what the launcher wrote: {outcome.detail}")
    return outcome


def _judged(program: Program, code: int, output: str, struck: bool) -> Outcome:
    lines = re.findall(r"diptych: (.*)", output)
    if program.interrupt is not None:
        if code < 0 or (code == 0 and struck):
            raise Wrong(f"interrupted, and exit code {code}: {output}")
        return Outcome(REFUSED, "interrupted")
    harmful = [fault for fault in program.faults if fault.kind != "pause"]
    if code == 0:
        # A timed fault may occur after the end of the rank.
        if any(isinstance(fault.when, str) for fault in harmful) or lines:
            raise Wrong(f"exit code 0 after {harmful}: {output}")
        return Outcome(EQUAL)
    if not harmful:
        raise Wrong(f"exit code {code} without a fault: {output}")
    if not any(_is_named(fault, output) for fault in harmful):
        raise Wrong(f"exit code {code}, and none of {harmful} is named: {output}")
    return Outcome(REFUSED, re.sub(r"\d+(\.\d+)?", "n", " | ".join(lines)))


def _is_named(fault: Fault, output: str) -> bool:
    """Return True if the launcher names the rank of a fault."""
    rank = rf"ranks?( \d+,)* {fault.rank}\b"
    if fault.kind in ("SIGSTOP", "hang"):
        return bool(re.search(rf"diptych: {rank}.* (did not|has been stopped|still ran)", output))
    if fault.kind == "exit":
        return bool(re.search(f"diptych: failed, .*{rank} with exit code 3", output))
    return bool(re.search(f"diptych: {rank} was ended by {fault.kind}", output))


def _launch(program: Program, folder: str, patience: float) -> int:
    if program.real:
        return _launch_training(program, folder)
    faults = [asdict(fault) for fault in program.faults if isinstance(fault.when, str)]
    clock = SHORT * patience if program.waits else LONG
    plan = {"faults": faults, "grandchild": program.grandchild, "folder": folder, "seconds": program.seconds}
    before = processes.GRACE, processes.POLL_INTERVAL
    processes.GRACE = GRACE
    processes.POLL_INTERVAL = POLL_INTERVAL
    os.environ[PLAN] = json.dumps({**plan, "timeout": clock})
    try:
        return start_processes(program.ranks, STAND_IN, [], 3 * clock, clock)
    finally:
        processes.GRACE, processes.POLL_INTERVAL = before
        del os.environ[PLAN]


def _launch_training(program: Program, folder: str) -> int:
    """Run ``diptych train`` with timed faults of its ranks."""
    Path(folder, "text").write_bytes(b"a text that is learnt by heart. " * 40)
    sizes = "--hidden-size 8 --num-attention-heads 1 --seq-length 8 --micro-batch-size 1 --global-batch-size 4"
    layers = f"--num-layers {program.ranks} --pipeline-model-parallel-size {program.ranks}"
    times = "--pipeline-timeout 10 --join-timeout 40 --train-iters 3 --eval-iters 1 --lr-warmup-iters 0"
    flags = f"train --data-path {folder}/text {sizes} {layers} {times}".split()
    return start_processes(program.ranks, "parity.cli", flags, 40.0, 10.0)


@contextlib.contextmanager
def _captured_stderr(folder: str) -> Iterator[Path]:
    """Collect standard error of the launcher and all ranks, and discard standard output."""
    path = Path(folder, "captured")
    sys.stderr.flush()
    sys.stdout.flush()
    originals = os.dup(1), os.dup(2)
    with path.open("w") as file, open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            with contextlib.redirect_stderr(file):
                yield path
        finally:
            for number, copy in enumerate(originals, 1):
                os.dup2(copy, number)
                os.close(copy)


class _Striker:
    """A thread that executes timed faults of ranks and the launcher, and records all processes."""

    def __init__(self, program: Program) -> None:
        self.seen: list[int] = []
        self.struck = False
        self._due = [(float(f.when), f.kind, f.rank) for f in program.faults if not isinstance(f.when, str)]
        if program.interrupt is not None:
            self._due.append((program.interrupt[1], program.interrupt[0], -1))
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._strike)
        self._main = threading.get_native_id()

    def __enter__(self) -> "_Striker":
        self._before = {n: signal.signal(n, lambda *_: None) for n in (signal.SIGINT, signal.SIGTERM)}
        self._children = {*self._now()}
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _now(self) -> list[int]:
        return [int(pid) for pid in Path(f"/proc/self/task/{self._main}/children").read_text().split()]

    def _strike(self) -> None:
        begin: float | None = None
        while not self._over.is_set():
            for pid in self._now():
                if pid not in self.seen and pid not in self._children:
                    self.seen.append(pid)  # in the order of their ranks
                    begin = begin or time.monotonic()
            for due in [*self._due]:
                when, kind, rank = due
                if begin is not None and time.monotonic() - begin >= when and len(self.seen) > rank:
                    self._due.remove(due)
                    self._send(kind, rank)
            time.sleep(0.002)

    def _send(self, kind: str, rank: int) -> None:
        if rank < 0:
            self.struck = any(_is_there(pid) for pid in self.seen)
            os.kill(os.getpid(), getattr(signal, kind))
        elif _is_there(self.seen[rank]):
            os.kill(self.seen[rank], getattr(signal, kind))


def _is_there(pid: int) -> bool:
    """Return True if a process runs or is stopped, and False if it has ended but is not reaped."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


if __name__ == "__main__":
    sys.exit(main())
