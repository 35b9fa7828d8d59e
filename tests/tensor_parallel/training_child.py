"""JAX trains over tensor-parallel ranks, on forced devices; run as a program, writes what came out.

Of its own process, since the number of devices is fixed once JAX has been used.

    python -m tests.tensor_parallel.training_child FOLDER ROUNDS CUT...

trains every cut named, with as many rounds of random numbers, and writes FOLDER/CUT.
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
from tests.backends import tiny_corpus
from tests.pipeline.test_training import trajectory
from tests.tensor_parallel.test_training import BATCHES, CONFIG, CUTS, REPLICAS, STAGES, TOKENS, TRAIN
from tests.test_documents import corpus_of_documents


def main(folder: Path, rounds: int, cuts: list[str]) -> None:
    """Train every cut."""
    jax.config.update("jax_num_cpu_devices", 16)
    jax.config.update("jax_enable_x64", True)
    ops.ROUNDS = rounds
    for cut in cuts:
        mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("dp", "pp", "tp")) if cut == REPLICAS else None
        config = replace(CONFIG, **(TOKENS | STAGES if cut == REPLICAS else CUTS[cut]))
        corpus = corpus_of_documents() if "tokens" in cut else tiny_corpus()
        found = trajectory(Trainer(config, TRAIN, corpus, mesh), corpus, BATCHES.get(cut, 5))
        (folder / cut).write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
