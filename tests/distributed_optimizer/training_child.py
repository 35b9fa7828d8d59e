"""JAX trains with a distributed optimizer on forced devices; run as a program, writes what came out.

Of its own process, since the number of devices is fixed once JAX has been used.

    python -m tests.distributed_optimizer.training_child FOLDER CUT...

trains every cut with a sharded and with an unsharded optimizer, and writes FOLDER/CUT: the results of both.
"""

import pickle
import sys
from dataclasses import replace
from pathlib import Path

import jax

from jax_impl import ops
from jax_impl.groups import make_mesh
from jax_impl.train import Trainer
from tests.backends import tiny_corpus
from tests.distributed_optimizer.test_training import ROUNDS, results_of, settings


def main(folder: Path, cuts: list[str]) -> None:
    """Train every cut."""
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_enable_x64", True)
    ops.ROUNDS = ROUNDS
    for cut in cuts:
        replicas, config, train = settings(cut)
        results = []
        for sharded in (True, False):
            own = replace(config, use_distributed_optimizer=sharded)
            mesh = make_mesh(own, jax.devices()[: replicas * own.model_parallel_size])
            trainer = Trainer(own, train, tiny_corpus(), mesh)
            results.append(results_of(trainer, train, folder / f"checkpoints {sharded} {cut}"))
        (folder / cut).write_bytes(pickle.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
