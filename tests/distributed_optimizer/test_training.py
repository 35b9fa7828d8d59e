"""A distributed optimizer gives bitwise equal losses, parameters and moments to an unsharded one."""

import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diptych.plans.checkpoint import read_checkpoint
from diptych.plans.config import TrainConfig, TransformerConfig
from diptych.plans.mesh import unsharded
from diptych.plans.tensor_files import from_bfloat16, to_bfloat16
from jax_impl.train import Trainer as JaxTrainer
from parity.compare import relative_difference
from parity.ranks import RankTrainer
from reference_torch.train import Trainer
from tests.backends import rounds, tiny_corpus
from tests.tensor_parallel.test_training import CONFIG as DIVIDED
from tests.tensor_parallel.test_training import HYPER, OFFLOAD, PLAIN, TOKENS, TRAIN

ROOT = Path(__file__).parents[2]
ROUNDS = 3
"""Rounds of random numbers in JAX; ten take half its compiling."""
CONFIG = replace(DIVIDED, tensor_model_parallel_size=1, use_distributed_optimizer=True)
RANKS = {"tensor_model_parallel_size": 2}
SHARED = {**RANKS, "num_query_groups": 1}
"""Both ranks hold the same head of keys and values."""
STAGES = {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et|ttL"}
MIXED = {"params_dtype": "float32", "bf16": True}
"""With master weights."""
FP8 = {"fp8": "hybrid", "fp8_recipe": "delayed"}
CUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "two replicas": (2, {}),
    "three replicas": (3, {"untie_embeddings_and_output_weights": True}),
    "four replicas, no clipping": (4, {}),
    "context": (1, {"context_parallel_size": 2}),
    "replicas, context": (2, {"context_parallel_size": 2, **HYPER}),
    "replicas of stages": (2, STAGES),
    "replicas of stages on one rank": (
        2,
        {
            **STAGES,
            "pipeline_schedule": "v-half",
            "virtual_pipeline_model_parallel_size": 2,
            "num_layers": 4,
            "layer_pattern": "attention,gdn,kda,gdn",
            "pipeline_model_parallel_layout": None,
        },
    ),
    "replicas of ranks": (2, {**SHARED, **TOKENS}),
    "replicas of ranks and stages": (2, {**SHARED, **STAGES, **HYPER}),
    "replicas, offload": (2, OFFLOAD),
    "replicas of stages, offload": (2, {**STAGES, **TOKENS, **SHARED, **OFFLOAD}),
    "two replicas, bfloat16": (2, MIXED),
    "context, bfloat16": (1, {"context_parallel_size": 2, **HYPER, **MIXED}),
    "replicas of stages, bfloat16": (2, {**STAGES, **SHARED, **MIXED}),
    "replicas, offload, bfloat16": (2, {**OFFLOAD, **MIXED}),
    "replicas of stages, FP8": (2, {**STAGES, **SHARED, **MIXED, **FP8}),
    "replicas, context, FP8": (2, {"context_parallel_size": 2, **HYPER, **MIXED, **FP8, "fp8_recipe": "current"}),
    "replicas, offload, FP8": (2, {**OFFLOAD, **MIXED, **FP8, "fp8_recipe": "blockwise"}),
}
"""Number of replicas, and settings."""
DAILY = ("three replicas", "replicas of stages", "two replicas, bfloat16")
LIMITS = {"float64": 1e-9, "float32": 0.02}
"""Largest difference from one process, by type of the parameters; those in float32 have activations in bfloat16."""


def settings(cut: str) -> tuple[int, TransformerConfig, TrainConfig]:
    replicas, changes = CUTS[cut]
    train = replace(
        TRAIN,
        global_batch_size=2 * replicas,
        micro_batch_size=1 if "stages" in cut else None,
        clip_grad=0.0 if "no clipping" in cut else 0.3,
    )
    return replicas, replace(CONFIG, **changes), train


def results_of(trainer: Any, train: TrainConfig, folder: Path) -> dict[str, np.ndarray]:
    """What three steps report and leave, by name."""
    batch = tiny_corpus().batch(5, train.global_batch_size, CONFIG.seq_length)
    loss, gradients = trainer.loss_and_gradients(batch, 5)
    results = [trainer.train_step(step) for step in range(3)]
    path = trainer.save(folder)
    validation = trainer.validation_loss()
    reported = {"losses": [loss, *(r.loss for r in results), validation], "norms": [r.grad_norm for r in results]}
    named = {f"gradient of {name}": value for name, value in gradients.items()}
    return {name: np.array(value) for name, value in reported.items()} | named | read_checkpoint(path).arrays


@pytest.mark.multiprocess
@pytest.mark.parametrize("cut", [pytest.param(cut, marks=() if cut in DAILY else pytest.mark.slow) for cut in CUTS])
def test_s2_torch_trains_as_with_an_unsharded_optimizer(cut, tmp_path):
    replicas, config, train = settings(cut)
    found = []
    for sharded in (True, False):
        own = replace(config, use_distributed_optimizer=sharded)
        with RankTrainer(own, train, tiny_corpus(), replicas) as trainer:
            found.append(results_of(trainer, train, tmp_path / str(sharded)))
    alone = unsharded(replace(config, **PLAIN))
    expected = results_of(Trainer(alone, train, tiny_corpus(), device="cpu"), train, tmp_path / "alone")
    check(found, expected, train, LIMITS[config.params_dtype])


def check(
    found: list[dict[str, np.ndarray]], expected: dict[str, np.ndarray], train: TrainConfig, limit: float
) -> None:
    """Results with shards are those of an unsharded optimizer, and up to rounding those of one process."""
    sharded, unsharded = found
    assert sharded.keys() == unsharded.keys() == expected.keys()
    assert [name for name in unsharded if not np.array_equal(sharded[name], unsharded[name])] == []
    assert not train.clip_grad or (sharded["norms"] > train.clip_grad).all()
    compared = expected if limit < 1e-6 else ["losses"]  # gradients of another rounding differ after a step
    differences = {name: relative_difference(sharded[name], expected[name]) for name in compared}
    assert {name: value for name, value in differences.items() if value > limit} == {}


@pytest.mark.multiprocess
def test_s2_a_checkpoint_is_of_any_number_of_replicas_and_of_both_backends(tmp_path):
    corpus = tiny_corpus()
    config = CONFIG
    train = replace(TRAIN, global_batch_size=6, micro_batch_size=None)
    with RankTrainer(config, train, corpus, replicas=3) as trainer:
        trainer.train_step(0)
        trainer.save(tmp_path / "three")
    with RankTrainer(replace(config, **RANKS), train, corpus, replicas=2) as trainer:
        assert trainer.resume(tmp_path / "three") == 1
        trainer.train_step(1)
        trainer.save(tmp_path / "four")
    again = Trainer(unsharded(config), train, corpus, device="cpu")
    for step in range(3):
        again.train_step(step)
    alone = JaxTrainer(unsharded(config), train, corpus)
    assert alone.resume(tmp_path / "four") == 2
    alone.train_step(2)
    found = alone.parameters()
    for name, expected in again.parameters().items():
        assert relative_difference(found[name], expected) <= 1e-9, name


@pytest.mark.multiprocess
def test_s2_master_weights_resume_on_other_replicas_and_in_one_process_of_either_backend(tmp_path):
    """Their bits: a resumed run that began with rounded weights would differ."""
    corpus = tiny_corpus()
    config = replace(CONFIG, **MIXED)
    train = replace(TRAIN, global_batch_size=6, micro_batch_size=None)
    with RankTrainer(config, train, corpus, replicas=3) as trainer:
        trainer.train_step(0)
        trainer.save(tmp_path)
        expected = trainer.parameters()
    assert any((value != from_bfloat16(to_bfloat16(value))).any() for value in expected.values())
    for make in (Trainer, JaxTrainer):
        resumed = make(unsharded(config), train, corpus)
        assert resumed.resume(tmp_path) == 1
        found = resumed.parameters()
        assert [name for name, value in expected.items() if not np.array_equal(found[name], value)] == []
        resumed.set_parameters(expected)
        assert [name for name, value in resumed.parameters().items() if not np.array_equal(expected[name], value)] == []
    with RankTrainer(config, train, corpus, replicas=2) as trainer:
        assert trainer.resume(tmp_path) == 1
        again = trainer.parameters()
    assert [name for name, value in expected.items() if not np.array_equal(again[name], value)] == []


@pytest.mark.multiprocess
@pytest.mark.parametrize("cut", [pytest.param(cut, marks=() if cut == DAILY[0] else pytest.mark.slow) for cut in CUTS])
def test_s2_jax_trains_as_with_an_unsharded_optimizer(cut, tmp_path):
    _, config, train = settings(cut)
    child = [sys.executable, "-m", "tests.distributed_optimizer.training_child", str(tmp_path), cut]
    done = subprocess.run(child, capture_output=True, text=True, timeout=580, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    with rounds(ROUNDS):
        trainer = Trainer(unsharded(replace(config, **PLAIN)), train, tiny_corpus(), device="cpu")
        expected = results_of(trainer, train, tmp_path / "alone")
    check(pickle.loads((tmp_path / cut).read_bytes()), expected, train, LIMITS[config.params_dtype])
