"""JAX trains over ranks that share sequences, on forced devices; run as a program, writes what came out.

Of its own process, since the number of devices is fixed once JAX has been used.

    python -m tests.context.training_child CUT FOLDER ROUNDS CORPUS...

trains on every corpus named, with as many rounds of random numbers, and writes FOLDER/CORPUS.
"""

import pickle
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from jax_impl import ops
from jax_impl.train import Trainer
from tests.context.test_training import APPROXIMATE, CONFIG, CORPORA, CUTS, STAGES, TRAIN, config_of
from tests.pipeline.test_training import trajectory


def main(cut: str, folder: Path, rounds: int, corpora: list[str]) -> None:
    """One cut, or replicas of ranks."""
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_enable_x64", True)
    ops.ROUNDS = rounds
    mesh, config = None, CONFIG
    if cut in CUTS | APPROXIMATE:
        config = config_of(cut)
    else:
        config = replace(CONFIG, context_parallel_size=2, **(STAGES if "stages" in cut else {}))
        shape = (2, 2, config.pipeline_model_parallel_size)
        mesh = Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), ("dp", "cp", "pp"))
    for name in corpora:
        corpus = CORPORA[name]()
        (folder / name).write_bytes(pickle.dumps(trajectory(Trainer(config, TRAIN, corpus, mesh), corpus)))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
