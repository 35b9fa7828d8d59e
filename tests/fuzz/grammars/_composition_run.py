"""One part of a training run in either backend, on the ranks or devices that its configuration asks for."""

from pathlib import Path
from typing import Any, NamedTuple

from diptych.plans.config import TrainConfig, TransformerConfig
from diptych.plans.model.data import Corpus
from tests.backends import tiny_corpus
from tests.test_documents import corpus_of_documents


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
        # Those of the mesh, too, of which the trainer leaves out axes of size 1: each has a thread that polls.
        for group in {*torch.distributed.distributed_c10d._world.pg_map} - {torch.distributed.group.WORLD}:
            torch.distributed.destroy_process_group(group)


def run_jax(part: Part) -> Result:
    """Run a part in JAX on the devices of this process."""
    import jax

    from jax_impl.groups import make_mesh
    from jax_impl.train import Trainer

    mesh = make_mesh(part.model, jax.devices()[: part.ranks]) if part.ranks > 1 else None
    return run_trainer(Trainer(part.model, part.train, corpus_of(part), mesh), part)
