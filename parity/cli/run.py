"""The training loop of both backends: saving, resuming, metrics, signals.

The loop takes a trainer of either backend and imports neither, so ``diptych train --backend jax`` runs without PyTorch
and ``--backend torch`` without JAX.
"""

import json
import math
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from rich.console import Console

from diptych.plans.checkpoint import METRICS, CheckpointError, check_names, check_unused
from diptych.plans.config import TrainConfig
from diptych.plans.offload import describe_statistics
from diptych.plans.text_files import one_line, parse_json
from diptych.plans.training import StepResult
from parity.cli.output import output_failure
from parity.cli.progress import training_progress

TENSORBOARD = "tensorboard"
FLOAT32_MAX = 3.4e38
"""Largest number that TensorBoard stores: float32."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""UTF-8 mark with which some editors begin files."""


class Trainer(Protocol):
    """The methods of both backends' trainers that the loop uses."""

    train_config: TrainConfig
    steps_taken: int

    def train_step(self, step: int) -> StepResult:
        """Run one optimizer step."""
        ...

    def validation_loss(self) -> float:
        """Return the mean loss of the validation split."""
        ...

    @property
    def is_main_process(self) -> bool:
        """True if this process writes files and prints."""
        ...

    @property
    def offload_statistics(self) -> dict[str, Any] | None:
        """Statistics of offload; None without offload."""
        ...

    def any_process(self, flag: bool) -> bool:
        """Return True if the flag is set on any process of the run."""
        ...

    def save(self, folder: Path, keep: int = 2) -> Path:
        """Write a checkpoint."""
        ...

    def resume(self, path: Path) -> int:
        """Resume from a checkpoint, and return its step."""
        ...


@dataclass(frozen=True)
class SavePlan:
    """The folder and the steps at which a run is saved, and the step at which it stops."""

    folder: Path | None
    """Folder of the checkpoints; None: no file is written."""
    interval: int
    """Steps between checkpoints; 0: only at the end."""
    exit_step: int | None
    """Number of steps of the whole run after which it stops, as if interrupted; None: no early stop."""
    overwrites_metrics: bool = False
    """True if metrics in a folder without checkpoints are from an earlier start of this run and may be overwritten."""


class Interruption:
    """The causes that stop a run early: SIGINT, SIGTERM, and closed standard output.

    The first signal stops the loop after its step, the second ends the process at once.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __enter__(self) -> "Interruption":
        self._previous = {s: signal.signal(s, self._received) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @property
    def cause(self) -> str | None:
        """The cause that asks the loop to stop, or None."""
        if self.signal is not None:
            return self.signal.name
        return None if output_failure(sys.stdout) is None else "standard output, which was closed,"

    def _received(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            os._exit(128 + number)
        self.signal = signal.Signals(number)


def run_training(
    trainer: Trainer, plan: SavePlan, console: Console, log_interval: int, resume: bool, backend: str
) -> None:
    """Train to the end or until a signal, saving as planned.

    Args:
        trainer: trainer of either backend.
        plan: when to save and stop.
        console: printed to.
        log_interval: steps between printed lines.
        resume: True to resume from the newest checkpoint.
        backend: name of the backend, for the metrics.

    Raises:
        CheckpointError: a checkpoint cannot be read or written; or the folder of a new run is in use.
        NonFiniteLossError: the loss of a step or of validation is not finite; the last checkpoint remains.
    """
    _check_folder(trainer, plan, resume)
    if resume and plan.folder is not None:
        console.print(f"resumed at step {trainer.resume(plan.folder)} from {plan.folder}", markup=False)
    end = trainer.train_config.train_iters
    stop = min(end, plan.exit_step or end)
    metrics = Metrics(plan.folder if trainer.is_main_process else None, trainer.steps_taken, backend, end)
    with Interruption() as interruption:
        steps = _steps(trainer, stop, plan, metrics, interruption)
        training_progress(console, steps, stop - trainer.steps_taken, log_interval, _OffloadNote(trainer))
    if plan.folder is not None:
        console.print(f"saved: {trainer.save(plan.folder)}", markup=False)
    if trainer.any_process(interruption.cause is not None):
        reason = f"stopped by {interruption.cause or 'another process'} after step {trainer.steps_taken - 1}"
        console.print(reason)
        if output_failure(sys.stdout) is not None:  # the line above was not printed
            saved = "nothing was saved" if plan.folder is None else "continue with --resume"
            print(f"diptych: {reason}; {saved}", file=sys.stderr)
    elif trainer.steps_taken < end:
        console.print(f"stopped after step {trainer.steps_taken - 1} of {end} as asked; continue with --resume")
    else:
        loss = trainer.validation_loss()
        metrics.write({"step": trainer.steps_taken, "validation_loss": loss})
        console.print(f"validation loss: {loss:.6f} nats per token")
    if trainer.offload_statistics is not None:
        metrics.write({"step": trainer.steps_taken, "offload": trainer.offload_statistics})
        console.print(describe_statistics(trainer.offload_statistics), highlight=False)


def _check_folder(trainer: Trainer, plan: SavePlan, resume: bool) -> None:
    """Check on every process that the run can be saved in its folder, before any process writes there.

    Raises:
        ValueError: see diptych.plans.checkpoint.check_unused and check_names, and read_metrics.
    """
    failure = None
    try:
        if plan.folder is not None:
            check_names(plan.folder)
        if plan.folder is not None and not resume:
            check_unused(plan.folder, plan.overwrites_metrics)
        if plan.folder is not None and trainer.is_main_process:
            read_metrics(plan.folder / METRICS)  # the run rewrites them after it has resumed
    except ValueError as error:
        failure = error
    if trainer.any_process(failure is not None):
        raise failure or CheckpointError(
            f"save: expected a folder that every process can use, got {plan.folder}, which another process rejects; "
            "see the output of that process"
        )


class _OffloadNote:
    """A note on the bytes that offload moves per step, for the progress display."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._before = trainer.offload_statistics

    def __call__(self, steps: int) -> str:
        """Return the note for the steps since the last call."""
        before = self._before
        now = self._trainer.offload_statistics
        self._before = now
        if before is None or now is None:
            return ""
        moved = [(now[name] - before[name]) / steps / 2**20 for name in ("bytes_in", "bytes_out")]
        return f"  offload {moved[0]:,.1f} MiB in, {moved[1]:,.1f} out a step"


def _steps(
    trainer: Trainer, stop: int, plan: SavePlan, metrics: "Metrics", interruption: Interruption
) -> Iterator[StepResult]:
    """Yield the results of training steps; write metrics and checkpoints when they are due."""
    evaluate = trainer.train_config.eval_interval
    for step in range(trainer.steps_taken, stop):
        result = trainer.train_step(step)
        metrics.write(result._asdict())
        taken = trainer.steps_taken
        if evaluate and taken % evaluate == 0 and taken < trainer.train_config.train_iters:
            metrics.write({"step": taken, "validation_loss": trainer.validation_loss()})
        if plan.folder is not None and plan.interval and taken % plan.interval == 0 and taken < stop:
            trainer.save(plan.folder)
        yield result
        if trainer.any_process(interruption.cause is not None):
            return


class Metrics:
    """A file with one JSON object per line: results of steps, and validation losses.

    If the package tensorboard is installed, the numbers are also written to a folder that it reads.

    Args:
        folder: folder of metrics.jsonl; None: no file is written.
        first_step: lines of this step and later ones are dropped, because a resumed run writes them again.
        backend: name of the backend, written in every line.
        end: steps of the whole run, after which its validation loss is measured.

    Raises:
        ValueError: see read_metrics.
    """

    def __init__(self, folder: Path | None, first_step: int, backend: str, end: int = 2**32) -> None:
        self.backend = backend
        self.path = None if folder is None else folder / METRICS
        self._board = None
        if self.path is not None and folder is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            earlier = [line for line in read_metrics(self.path) if _belongs_before(line, first_step, end)]
            partial = self.path.with_suffix(".partial")
            partial.write_text("".join(json.dumps(line) + "\n" for line in earlier))
            os.replace(partial, self.path)
            self._board = _Board.open(folder / TENSORBOARD, earlier)

    def write(self, line: dict[str, Any]) -> None:
        """Append one line."""
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps({"backend": self.backend, **line}) + "\n")
        if self._board is not None:
            self._board.write(line)


class _Board:
    """Metrics as TensorBoard scalars."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    @classmethod
    def open(cls, folder: Path, lines: list[dict[str, Any]]) -> "_Board | None":
        """Rewrite the folder from the lines that a resumed run keeps; return None if tensorboard is not installed."""
        try:
            from tensorboard.summary import Writer  # pyright: ignore[reportMissingImports]
        except ModuleNotFoundError:
            return None
        for events in folder.glob("events.out.tfevents.*"):
            events.unlink()
        board = cls(Writer(str(folder)))
        for line in lines:
            board.write(line)
        return board

    def write(self, line: dict[str, Any]) -> None:
        for name, value in line.items():
            if name != "step" and isinstance(value, int | float):
                stored = value if abs(value) < FLOAT32_MAX else math.copysign(math.inf, value)
                self._writer.add_scalar(name, stored, line["step"])
        self._writer.flush()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics file; an empty list if there is no file.

    Lines that are not JSON are skipped: a killed process can leave a truncated line, a power failure a line of zero
    bytes.

    Args:
        path: path of the file.

    Raises:
        ValueError: the path is not a file, cannot be read, or contains JSON that no run writes.
    """
    if not path.exists():
        return []
    if not path.is_file():
        raise ValueError(f"metrics: expected a file, got {path}, which is not one; rename it")
    try:
        content = path.read_bytes().removeprefix(BYTE_ORDER_MARK)
    except OSError as error:
        raise ValueError(f"metrics: expected a file that can be read, got {error}") from None
    lines = []
    for number, text in enumerate(content.split(b"\n"), start=1):
        try:
            line = parse_json(text.decode())
        except ValueError:
            continue
        if wrong := _wrong_entry(line):
            raise ValueError(f"metrics: expected results of a step in line {number} of {path}, got {wrong}; remove it")
        lines.append(line)
    return lines


def _wrong_entry(line: Any) -> str:
    """Return a description of the entry that no run writes, or the empty string."""
    if not isinstance(line, dict):
        return one_line(line)
    step = line.get("step")
    backend = line.get("backend")
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step <= 2**32:
        return f"step {one_line(step)}"
    if not isinstance(backend, str):
        return f"backend {one_line(backend)}"
    for name in ("loss", "grad_norm", "learning_rate", "validation_loss"):
        value = line.get(name, 0.0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
            return f"{name} {one_line(value)}"
    return ""


def _belongs_before(line: dict[str, Any], first_step: int, end: int) -> bool:
    """Return True if a resumed run keeps a line: earlier steps, and validation losses that it does not repeat.

    A run that is resumed at its end measures that loss again.
    """
    if line["step"] == first_step and first_step < end:
        return "validation_loss" in line
    return line["step"] < first_step
