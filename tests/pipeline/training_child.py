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

from diptych.plans.model.data import Corpus
from jax_impl.train import Trainer
from tests.backends import tiny_corpus
from tests.pipeline.test_training import CONFIG, CUTS, TRAIN, WRONG_BATCH, trajectory, worst


def main(folder: Path, cuts: list[str]) -> None:
    """Cuts of the model beside the whole one, and runs that go on from one to the other."""
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_enable_x64", True)
    corpus = tiny_corpus()
    alone = Trainer(CONFIG, TRAIN, corpus)
    whole = trajectory(alone, corpus)
    print(json.dumps({cut: compare(folder, cut, alone, whole, corpus) for cut in cuts}))


def compare(folder: Path, cut: str, alone: Trainer, whole: tuple, corpus: Corpus) -> dict[str, object]:
    """How far one cut is from the whole model, and from it where either goes on from the other's checkpoint."""
    mesh, run = None, folder / f"jax {cut}"
    if cut == "replicas":
        mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("dp", "pp"))
        config = replace(CONFIG, pipeline_model_parallel_size=2)
    else:
        config = replace(CONFIG, **CUTS[cut])
    trainer = Trainer(config, TRAIN, corpus, mesh)
    found: dict[str, object] = {"whole course": worst(trajectory(trainer, corpus), whole)}
    with pytest.raises(ValueError, match=WRONG_BATCH):
        trainer.loss_and_gradients(corpus.batch(0, 3, CONFIG.seq_length))

    trainer.resume(folder / "torch")  # two steps of PyTorch's, in other stages
    trainer.train_step(2)
    found["from other stages"] = worst((trainer.parameters(),), (whole[-1],))[0]
    trainer.resume(folder / "torch")
    trainer.save(run)
    alone.resume(run)
    alone.train_step(2)
    found["to other stages"] = worst((alone.parameters(),), (whole[-1],))[0]
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
