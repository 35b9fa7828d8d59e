"""Where a case happens: a folder, a deadline, the programs it starts, and what is expected of them.

A case is a function of its Workspace. It starts programs there, breaks them, and states what it expects. The workspace
records what the programs did: exit codes, seconds, messages, and what a later run made of it. No process outlives its
workspace: all are found by a word in their environment, those that ranks start included.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diptych.plans.checkpoint import list_checkpoints, read_checkpoint
from parity.cli.main import FAILURE, USER_ERROR
from parity.cli.processes import GRACE
from parity.cli.run import METRICS, read_metrics
from tests.faults.faults import Broken

ROOT = Path(__file__).parents[2]
MARK = "DIPTYCH_FAULTS"
"""In the environment of every process a case has started."""
TIMEOUT, PATIENCE = 8.0, 100.0
"""Seconds a message between ranks may take, where a fault makes ranks wait for it, and where not."""
MARGIN = 15.0
"""Seconds everything else may take until the last process is gone: other cases run beside this one."""
STEPS, INTERVAL, LAST, AT = 12, 4, 8, 9
"""Of every run: steps, steps between checkpoints, the newest one when most faults strike, and the step."""
REFUSED, FAILED, KILLED = USER_ERROR, FAILURE, -signal.SIGKILL
"""Exit codes."""
COMMON = (
    "--hidden-size 16 --num-layers 2 --num-attention-heads 2 --num-residual-streams 2 --seq-length 8 --eval-iters 1 "
    f"--global-batch-size 4 --micro-batch-size 1 --train-iters {STEPS} --lr-warmup-iters 2 --hidden-dropout 0.1 "
    f"--save-interval {INTERVAL} --data-path corpus.txt"
).split()
STAGES = "torch, 2 stages"
LAYOUTS = {
    "torch": "",
    STAGES: "--pipeline-model-parallel-size 2 --nproc 2",
    "torch, 2 stages x 2 replicas": "--pipeline-model-parallel-size 2 --nproc 4",
    "torch, 2 context ranks": "--context-parallel-size 2 --layer-pattern gdn,attention --nproc 2",
    "jax": "",
    "jax, 2 stages": "--pipeline-model-parallel-size 2",
    "jax, 2 context ranks": "--context-parallel-size 2",
}
"""What a run is laid over, and the flags that say so."""
TEXT = "the quick brown fox jumps over the lazy dog\n" * 40


@dataclass(frozen=True)
class Case:
    """Something that is broken on purpose, where, and what has to come of it."""

    name: str
    layout: str
    """Of LAYOUTS."""
    expected: str
    run: Callable[["Workspace"], None]
    """Module-level, since it is called in a process of its own."""
    deadline: float = 240.0
    """Seconds."""


class Unexpected(Exception):
    """The outcome of a case is not the one expected."""


@dataclass
class Observed:
    """What came of a case, as far as it went."""

    programs: list[dict[str, Any]] = field(default_factory=list)
    """Of each that was broken: exit code, seconds until it and its ranks were gone, error lines, the one expected."""
    notes: list[str] = field(default_factory=list)


class Workspace:
    """Where one case happens.

    Args:
        layout: of the programs started here.
        folder: empty; theirs.
        references: uninterrupted runs, by layout.
        seconds: until the case is overdue.
        mark: found in the environment of everything started here.
    """

    def __init__(self, layout: str, folder: Path, references: Path, seconds: float, mark: str) -> None:
        self.layout, self.folder, self.references, self.mark = layout, folder, references, mark
        self.observed = Observed()
        self._end = time.monotonic() + seconds
        self._started = 0
        (folder / "corpus.txt").write_text(TEXT)

    @property
    def backend(self) -> str:
        """Of the layout."""
        return self.layout.split(",")[0]

    def train(
        self,
        *more: str,
        fault: Broken | None = None,
        run: str = "run",
        prefix: Sequence[str] = (),
        launcher: Sequence[str] = (),
    ) -> "Program":
        """Start ``diptych train`` in the layout, with more flags or others, or by a launcher of processes."""
        self._started += 1
        struck = self.folder / f"struck {self._started}"
        timeout = TIMEOUT if fault is not None and fault.makes_wait else PATIENCE
        flags = ["--backend", self.backend, "--pipeline-timeout", f"{timeout:g}", "--save", run]
        laid = LAYOUTS[self.layout].split()
        laid = laid[: laid.index("--nproc")] if launcher else laid
        arguments = [*flags, *COMMON, *laid, *more]
        module = launcher or ["parity.cli" if fault is None else "tests.faults.faults", "train"]
        variables = {} if fault is None else fault.environment(self.backend, struck)
        command = [*prefix, sys.executable, "-m", *module, *arguments]
        return Program(self, command, {**self._environment(), **variables}, struck)

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Raises Unexpected where the case is overdue."""
        while not condition():
            self.expect(time.monotonic() < self._end, f"overdue: {what} did not come to pass")
            time.sleep(0.03)

    def expect(self, condition: bool, otherwise: str) -> None:
        """Raises Unexpected, saying what came instead."""
        if not condition:
            raise Unexpected(otherwise)

    def note(self, text: str) -> None:
        """Write down something that was observed."""
        self.observed.notes.append(text)

    def ended_run(self, newest: int = LAST) -> Path:
        """A copy of the uninterrupted run as it was when its checkpoint of that step was its newest."""
        run = self.folder / "run"
        shutil.copytree(self.references / self.layout, run)
        for path in list_checkpoints(run):
            if read_checkpoint(path).step > newest:
                path.unlink()
        return run

    def expect_checkpoint(self, step: int = LAST, run: str = "run") -> None:
        """The run's newest checkpoint is whole, of that step, and where the uninterrupted run has one the same bits."""
        newest = read_checkpoint(self.folder / run)
        self.expect(newest.step == step, f"newest checkpoint: expected step {step}, got {newest.step}")
        for path in list_checkpoints(self.references / self.layout):
            theirs = read_checkpoint(path)
            same = theirs.step != step or theirs.checksum == newest.checksum
            self.expect(same, f"checkpoint of step {step}: not the uninterrupted run's")

    def expect_equal_end(self, run: str = "run") -> None:
        """Every step's numbers and the last checkpoint are bitwise equal to those of the uninterrupted run."""
        whole = self.references / self.layout
        ours, theirs = (_curve(folder / METRICS) for folder in (self.folder / run, whole))
        self.expect(ours == theirs, f"curve: expected the uninterrupted run's, {theirs}, got {ours}")
        self.expect_checkpoint(STEPS, run)
        left = [path.name for path in (self.folder / run).glob(".*")]
        self.expect(not left, f"left over in the folder: {left}")

    def resume(self, *more: str, step: int = LAST, run: str = "run") -> None:
        """Go on with the run to its end, without a fault; it must end as the uninterrupted one."""
        again = self.train("--resume", *more, run=run)
        again.wait()
        self.expect(again.process.returncode == 0, f"resumed run: exit code {again.process.returncode}, {again.errors}")
        self.expect(f"resumed at step {step} " in again.output, f"resumed run: expected step {step}, {again.output}")
        self.expect_equal_end(run)
        self.note(f"resumed at step {step}: bitwise equal")

    def _environment(self) -> dict[str, str]:
        """Of a program: one thread, no accelerator, no process group but its own."""
        ours = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        settings = {"OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
        settings["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # these runs compile much longer than they compute
        # Not the user's: a process that is killed may leave half a compiled program there.
        cache = {"JAX_COMPILATION_CACHE_DIR": str(self.references.with_name("compiled"))}
        cache |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
        return {**ours, **settings, **cache, MARK: self.mark}


class Program:
    """A program that was started, and everything that it started."""

    def __init__(self, workspace: Workspace, command: list[str], environment: dict[str, str], struck: Path) -> None:
        self.workspace, self._struck = workspace, struck
        self._files = [struck.with_suffix(name) for name in (".out", ".err")]
        with self._files[0].open("w") as out, self._files[1].open("w") as errors:
            self.begun = time.monotonic()
            self.process = subprocess.Popen(
                command,
                stdout=out,
                stderr=errors,
                stdin=subprocess.DEVNULL,
                cwd=workspace.folder,
                env=environment,
                start_new_session=True,  # as in a terminal of its own
            )

    @property
    def output(self) -> str:
        """Standard output so far."""
        return self._files[0].read_text(errors="replace")

    @property
    def errors(self) -> str:
        """Standard error so far, without the folder's path and the ports of this run."""
        text = self._files[1].read_text(errors="replace").replace(f"{self.workspace.folder}/", "")
        return re.sub(r"\[127\.0\.0\.1\]:\d+", "the other process", text)

    @property
    def struck(self) -> float | None:
        """When the fault happened; None: not yet."""
        text = self._struck.read_text() if self._struck.exists() else ""
        return float(text) if text else None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal when the program has come to where its fault is; the moment counts as the fault's."""
        self.workspace.wait_until(lambda: self.struck is not None, "the step to strike in")
        os.kill(self.process.pid, number)
        self._struck.write_text(repr(time.monotonic()))

    def wait(self) -> float:
        """Until the program and all it has started are gone; seconds since the fault, or else since the start."""
        what = f"the end of the program and its ranks: {self.errors.splitlines()[-3:]}"
        self.workspace.wait_until(lambda: self.process.poll() is not None and not marked(self.workspace.mark), what)
        return time.monotonic() - (self.struck or self.begun)

    def expect_end(
        self, code: int, *says: str, strikes: bool = True, traceback: bool = False, within: float = 0.0
    ) -> None:
        """Wait for the end, and check it.

        Args:
            code: the exit code there has to be.
            says: patterns, each of which some line of standard error has to match; the first goes into the table.
            strikes: whether the fault happens within the program, and not before it starts.
            traceback: whether an unforeseen error's traceback may be shown.
            within: seconds from the fault until every process is gone; 0: what a message may take, and some.
        """
        seconds = self.wait()
        # Of two ranks that speak at once two lines may lie on one; torch says of which rank a traceback is.
        every = re.split(r"\n|(?=diptych: )", self.errors)
        lines = [line for line in every if re.match(r"diptych: |(\[rank\d+\]: )?\w+Error: ", line)]
        matching = [[line for line in lines if re.search(pattern, line)] for pattern in says]
        program = {
            "exit code": self.process.returncode,
            "seconds": seconds,
            "since": "fault" if self.struck else "start",
        }
        self.workspace.observed.programs.append(
            {**program, "error": matching[0][0] if says and matching[0] else "", "errors": lines}
        )
        expect = self.workspace.expect
        expect(self.process.returncode == code, f"exit code: expected {code}, got {self.process.returncode}: {lines}")
        missing = [pattern for pattern, found in zip(says, matching, strict=True) if not found]
        expect(not missing, f"standard error: expected lines like {missing}, got {self.errors[-2000:]}")
        expect(traceback or "Traceback" not in self.errors, f"standard error: got a traceback: {self.errors[-2000:]}")
        expect(not strikes or self.struck is not None, "the fault did not happen")
        within = within or TIMEOUT + GRACE + MARGIN
        expect(not strikes or seconds < within, f"seconds until all were gone: expected {within:g}, got {seconds:.1f}")


def marked(mark: str) -> list[int]:
    """Processes with this mark in their environment that have not ended."""
    found, sought = [], f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if sought in (entry / "environ").read_bytes().split(b"\0"):  # empty of those that have ended
                    found.append(int(entry.name))
            except OSError:  # gone meanwhile, or another user's
                continue
    return found


def _curve(path: Path) -> list[dict[str, Any]]:
    """What a run wrote of its steps, but not how long they took."""
    return [{name: value for name, value in line.items() if name != "seconds"} for line in read_metrics(path)]
