"""Offload in JAX computes what is computed without it, alone and over several devices."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from diptych.plans.offload import describe_statistics, layer_storages
from jax_impl.decoding import Decoder
from jax_impl.saving import load_model
from jax_impl.train import Trainer
from parity.compare import relative_difference
from parity.tolerances import LOSS, PARAMETERS
from tests.backends import backend_module, tiny_corpus
from tests.jax_process import run_cases
from tests.offload.jax_support import (
    DROPPED,
    MIXED,
    MODES,
    MOVED,
    PLAIN,
    STREAMS,
    TRAIN,
    assert_same_gradients,
    kinds,
    offloaded,
    step_arguments,
    trainer_of,
)

pytestmark = pytest.mark.usefixtures("quick")

# What comes out.


@pytest.mark.parametrize(
    ("mode", "ahead"),
    [
        *(pytest.param(mode, ahead, marks=pytest.mark.slow) for mode in MODES for ahead in (0, 1, 9)),
    ],
)
def test_gradients_are_those_without_offload(mode, ahead):
    config = replace(DROPPED, **STREAMS, **MIXED, **MODES[mode])
    assert_same_gradients(trainer_of(offloaded(config, ahead)), trainer_of(config))


VARIANTS = {
    "microbatches": ({}, {"micro_batch_size": 1}, 1),
    "untied, all there": ({"untie_embeddings_and_output_weights": True}, {}, 9),
    "none ahead, recomputed": ({**STREAMS, **MIXED, **MODES["mhc, blocks of 2"]}, {"micro_batch_size": 1}, 0),
    "full": ({**STREAMS, **MODES["full, blocks of 2"]}, {}, 1),
    "clipped": ({"num_layers": 5}, {"clip_grad": 0.05, "micro_batch_size": 1}, 2),
    "activations": ({**STREAMS, **MODES["all modules"], **MOVED, "num_layers": 4}, {"micro_batch_size": 1}, 1),
    "bf16": ({**STREAMS, "params_dtype": "float32", "bf16": True}, {"micro_batch_size": 1}, 1),
}


@pytest.mark.parametrize("variant", [pytest.param(v, marks=pytest.mark.slow) for v in VARIANTS])
def test_training_is_that_without_offload(variant, tmp_path):
    """Ten steps; then validation, sampling, and each goes on from the other's checkpoint."""
    flags, train, ahead = VARIANTS[variant]
    config = replace(DROPPED, **flags)
    without = replace(config, enable_activation_offload=False)
    tolerance = {"float64": 1e-13, "float32": 1e-5}[config.params_dtype]
    plain, moved = trainer_of(without, **train), trainer_of(offloaded(config, ahead), **train)
    assert kinds(moved._params) == {True: {"pinned_host"}, False: {"device"}}
    for step in range(10):
        a, b = plain.train_step(step), moved.train_step(step)
        assert b.loss == pytest.approx(a.loss, rel=tolerance)
        assert b.grad_norm == pytest.approx(a.grad_norm, rel=tolerance)
        assert kinds(moved._params) == {True: {"pinned_host"}, False: {"device"}}
        assert {m for of in kinds(moved._optimizer_state).values() for m in of} == {"device"}
    assert_same_parameters(moved, plain, tolerance)
    stats, plan = moved.offload_statistics, moved.offload.plan
    assert plain.offload_statistics is None
    activation_bytes = 10 * moved.offload._moved.bytes * (2 // train.get("micro_batch_size", 2))
    assert (activation_bytes > 0) == config.enable_activation_offload
    assert (stats["bytes_in"], stats["bytes_out"]) == (
        10 * plan.bytes_in + activation_bytes,
        10 * plan.bytes_out + activation_bytes,
    )
    assert stats["hits"] + stats["misses"] == 10 * len(plan.moves)
    assert stats["peak_layers"] == min(ahead + 1, config.num_layers)
    assert "MiB" in describe_statistics(stats)
    assert moved.validation_loss() == pytest.approx(plain.validation_loss(), rel=tolerance)
    whole = sum(sum(sizes.values()) for sizes in layer_storages(config).values())
    forwards = 2 // train.get("micro_batch_size", 2)
    assert moved.offload_statistics["bytes_in"] == stats["bytes_in"] + forwards * whole
    assert moved.offload_statistics["bytes_out"] == stats["bytes_out"]
    text = np.frombuffer(b"the quick", np.uint8)
    logits = Decoder(moved.model).next_logits(text)
    assert relative_difference(logits, Decoder(plain.model).next_logits(text)) <= tolerance

    paths = {one: one.save(tmp_path / name) for one, name in ((plain, "plain"), (moved, "moved"))}
    assert relative_difference(Decoder(load_model(paths[moved])).next_logits(text), logits) <= tolerance
    assert moved.resume(paths[plain]) == plain.resume(paths[moved]) == 10
    assert kinds(moved._params) == {True: {"pinned_host"}, False: {"device"}}
    assert moved.train_step(10).loss == pytest.approx(plain.train_step(10).loss, rel=tolerance)
    assert_same_parameters(moved, plain, tolerance)


def assert_same_parameters(moved: Trainer, plain: Trainer, tolerance: float) -> None:
    theirs = plain.parameters()
    for name, ours in moved.parameters().items():
        assert relative_difference(ours, theirs[name]) <= tolerance, name


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_well")
def test_training_agrees_with_pytorch(monkeypatch):
    monkeypatch.undo()
    config = offloaded(replace(DROPPED, **STREAMS))
    torch_side = backend_module("torch", "train").Trainer(config, TRAIN, tiny_corpus(), device="cpu")
    ours = Trainer(config, TRAIN, tiny_corpus())
    for step in range(10):
        assert abs(torch_side.train_step(step).loss - ours.train_step(step).loss) <= LOSS["float64"]
    theirs = torch_side.parameters()
    for name, p in ours.parameters().items():
        assert relative_difference(p, theirs[name]) <= PARAMETERS["float64"], name


@pytest.mark.slow
def test_a_refused_step_changes_nothing_and_leaves_layers_on_the_host():
    trainer = trainer_of(offloaded(PLAIN))
    values = trainer.parameters()
    values["decoder.layers.1.mlp.linear_fc1.weight"][0, 0] = np.nan
    trainer.set_parameters(values)
    assert kinds(trainer._params)[True] == {"pinned_host"}
    with pytest.raises(ArithmeticError, match=r"step 0: expected a finite loss"):
        trainer.train_step(0)
    for name, p in trainer.parameters().items():
        np.testing.assert_array_equal(p, values[name], err_msg=name)
    assert kinds(trainer._params)[True] == {"pinned_host"}


# Where it runs.


def test_lowered_for_a_gpu_it_copies_from_pinned_memory():
    trainer = trainer_of(offloaded(PLAIN))
    traced = jax.jit(trainer._update_step).trace(*step_arguments(trainer))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    copies = [line for line in text.splitlines() if "annotate_device_placement" in line]
    to_host = [line for line in copies if "pinned_host" in line]
    assert len(to_host) == 6 * 4
    moved = sum(len(step.fetches) for step in trainer.offload.plan.moves)
    assert len(copies) == 6 * (4 + moved)
    main = next(line for line in text.splitlines() if "@main" in line)
    assert main.count('mhlo.memory_kind = "pinned_host"') >= 6 * 4


# Pipelines and replicas: tests/offload/jax_cases.py, in a process that has a device for every rank.


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(600)
def test_pipelines_of_several_devices():
    run_cases("not slow", 580, "tests/offload/jax_cases.py")


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(1500)
def test_more_pipelines_of_several_devices():
    run_cases("slow", 1480, "tests/offload/jax_cases.py")
