"""JAX goes on with a run of another mesh, on forced devices; run as a program, because JAX fixes their number.

    python -m tests.saving.meshes_child BEGIN COPY END

resumes from BEGIN, saves to COPY at once, and to END after two steps.
"""

import sys
from pathlib import Path

import jax

from jax_impl import ops
from jax_impl.groups import make_mesh
from jax_impl.train import Trainer
from tests.backends import tiny_corpus
from tests.saving.test_meshes import IN_JAX, SCALED_TRAIN


def main(begin: Path, copy: Path, end: Path) -> None:
    """Resume, save, take two steps, and save."""
    jax.config.update("jax_num_cpu_devices", 8)
    ops.ROUNDS = 3
    trainer = Trainer(IN_JAX, SCALED_TRAIN, tiny_corpus(), make_mesh(IN_JAX))
    first = trainer.resume(begin)
    trainer.save(copy)
    for step in range(first, first + 2):
        trainer.train_step(step)
    trainer.save(end)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
