"""One part of a training run in either backend, on the ranks or devices that its configuration asks for.

``python -m tests.fuzz.grammars._composition_run`` serves runs in JAX: it reads pickled parts from standard input and
writes pickled results. JAX fixes its number of devices on its first use, so it needs a process of its own.
"""

import os
import pickle
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any, NamedTuple

from diptych.plans.config import TrainConfig, TransformerConfig
from diptych.plans.model.data import Corpus
from tests.backends import tiny_corpus
from tests.test_documents import corpus_of_documents

DEVICES = 4
"""JAX devices that the child process has."""


class Part(NamedTuple):
    """Consecutive steps of a run, from its beginning or from a checkpoint, and a checkpoint at their end."""

    model: TransformerConfig
    train: TrainConfig
    ranks: int
    documents: bool
    first: int
    last: int
    """The step after the last one."""
    saved: Path
    """Folder of the checkpoint at the end."""
    resumed: Path | None = None
    """Folder of a checkpoint of step ``first``; None: initial parameters."""
    stale_steps: int = 0
    """Steps trained before the checkpoint is read, which it must undo."""
    validates: bool = False
    """True if the validation loss is computed after each step."""


class Result(NamedTuple):
    """The reports of the steps."""

    losses: list[float]
    norms: list[float]
    validations: list[float]


def corpus_of(part: Part) -> Corpus:
    """Return the training corpus."""
    return corpus_of_documents() if part.documents else tiny_corpus()


def run_trainer(trainer: Any, part: Part) -> Result:
    """Train either backend's trainer over the steps of a part, and save."""
    for step in range(part.stale_steps):
        trainer.train_step(step)
    if part.resumed is not None:
        assert trainer.resume(part.resumed) == part.first, "another step was resumed than was saved"
    result = Result([], [], [])
    for step in range(part.first, part.last):
        report = trainer.train_step(step)
        result.losses.append(report.loss)
        result.norms.append(report.grad_norm)
        if part.validates:
            result.validations.append(trainer.validation_loss())
    trainer.save(part.saved)
    return result


def run_torch(part: Part) -> Result:
    """Run a part in PyTorch on this rank; every rank calls it."""
    import torch

    from reference_torch.groups import make_mesh
    from reference_torch.train import Trainer

    mesh = make_mesh(part.model) if part.ranks > 1 else None
    trainer = Trainer(part.model, part.train, corpus_of(part), device="cpu", mesh=mesh)
    try:
        return run_trainer(trainer, part)
    finally:
        trainer.offload.close()
        for group in {*trainer._groups} - {None, torch.distributed.group.WORLD}:  # each has a thread
            torch.distributed.destroy_process_group(group)


def run_jax(part: Part) -> Result:
    """Run a part in JAX on the devices of this process."""
    import jax

    from jax_impl.groups import make_mesh
    from jax_impl.train import Trainer

    mesh = make_mesh(part.model, jax.devices()[: part.ranks]) if part.ranks > 1 else None
    return run_trainer(Trainer(part.model, part.train, corpus_of(part), mesh), part)


class JaxChild:
    """A process with several JAX devices that runs one part after another."""

    def __init__(self) -> None:
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
        command = [sys.executable, "-m", "tests.fuzz.grammars._composition_run"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, cwd=Path(__file__).parents[3]
        )

    def run(self, part: Part) -> Result:
        """Run a part there.

        Raises:
            RuntimeError: if it fails, with the traceback of the child.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump(part, self._process.stdin)
        self._process.stdin.flush()
        succeeded, value = pickle.load(self._process.stdout)
        if not succeeded:
            raise RuntimeError(value)
        return value

    def is_running(self) -> bool:
        """Return True if the process runs."""
        return self._process.poll() is None


def serve() -> None:
    """Run parts in JAX until standard input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keeps other output apart from the answers
    from diptych.plans.model.implementation import callback_threads

    os.environ["NPROC"] = str(callback_threads(DEVICES))
    import jax

    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    while True:
        try:
            part = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer = True, run_jax(part)
        except Exception as error:
            answer = False, "".join(traceback.format_exception(error))
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    from tests.fuzz.grammars import _composition_run  # under the name by which parts are pickled

    _composition_run.serve()
