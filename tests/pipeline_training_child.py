"""JAX trains through a pipeline on four forced devices; run as a program, prints what came out as JSON.

Of its own process, since the number of devices is fixed once JAX has been used.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jax_impl.train import Trainer
from tests.backends import tiny_corpus
from tests.test_pipeline_training import CONFIG, CUTS, TRAIN, WRONG_BATCH, course, worst


def main(folder: Path, cut: str) -> None:
    """One cut of the model beside the whole one, and runs that go on from one to the other."""
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_disable_most_optimizations", True)
    corpus, mesh, run = tiny_corpus(), None, folder / f"jax {cut}"
    if cut == "replicas":
        mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("dp", "pp"))
        config = replace(CONFIG, pipeline_model_parallel_size=2)
    else:
        config = replace(CONFIG, **CUTS[cut])
    alone, trainer = Trainer(CONFIG, TRAIN, corpus), Trainer(config, TRAIN, corpus, mesh)
    whole, found = course(alone, corpus), course(trainer, corpus)
    told: dict[str, object] = {"whole course": worst(found, whole)}
    with pytest.raises(ValueError, match=WRONG_BATCH):
        trainer.loss_and_gradients(corpus.batch(0, 3, CONFIG.seq_length))

    trainer.resume(folder / "torch")  # two steps of PyTorch's, in other stages
    trainer.train_step(2)
    told["from other stages"] = worst((trainer.parameters(),), (whole[-1],))[0]
    trainer.resume(folder / "torch")
    trainer.save(run)
    alone.resume(run)
    alone.train_step(2)
    told["to other stages"] = worst((alone.parameters(),), (whole[-1],))[0]
    print(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
