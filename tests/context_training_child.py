"""JAX trains over ranks that share sequences, on forced devices; run as a program, writes what came out.

Of its own process, since the number of devices is fixed once JAX has been used.
"""

import pickle
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from jax_impl.train import Trainer
from tests.test_context_training import APPROXIMATE, CONFIG, CUTS, STAGES, TRAIN, config_of, corpus_of
from tests.test_pipeline_training import course


def main(cut: str, documents: bool, path: Path) -> None:
    """One cut, or replicas of ranks."""
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_disable_most_optimizations", True)
    mesh, config = None, CONFIG
    if cut in CUTS | APPROXIMATE:
        config = config_of(cut)
    else:
        config = replace(CONFIG, context_parallel_size=2, **(STAGES if "stages" in cut else {}))
        shape = (2, 2, config.pipeline_model_parallel_size)
        mesh = Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), ("dp", "cp", "pp"))
    corpus = corpus_of(documents)
    path.write_bytes(pickle.dumps(course(Trainer(config, TRAIN, corpus, mesh), corpus)))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "True", Path(sys.argv[3]))
