"""A run saved on one mesh goes on on another: parameters and both moments are those of one process alone."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from diptych.plans.amax_history import is_history
from diptych.plans.checkpoint import MODEL, read_checkpoint, split_arrays
from diptych.plans.config import TrainConfig, TransformerConfig
from diptych.plans.mesh import unsharded
from diptych.plans.schedule.placement import V_SCHEDULES
from parity.compare import relative_difference
from reference_torch.rank_pool import RankPool
from tests.backends import BACKENDS, backend_module, tiny_corpus
from tests.saving.support import CONFIG, TRAIN, new_trainer, steps

ROOT = Path(__file__).parents[2]
DEEP = replace(CONFIG, num_layers=4, layer_pattern="attention")


SCALED = TransformerConfig(
    hidden_size=16,
    num_layers=2,
    num_attention_heads=4,
    num_query_groups=2,
    seq_length=16,
    layer_pattern="attention,gdn",
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    enable_hyper_connections=True,
    num_residual_streams=2,
    init_method_std=0.2,
    fp8="hybrid",
    fp8_recipe="delayed",
    fp8_amax_history_len=3,
    use_distributed_optimizer=True,
    pipeline_timeout=120.0,
)
"""Two replicas of it share the optimizer's state."""
SCALED_TRAIN = TrainConfig(train_iters=8, global_batch_size=4, micro_batch_size=1, lr_warmup_iters=2, eval_iters=1)
IN_TORCH = replace(SCALED, tensor_model_parallel_size=2, sequence_parallel=True, pipeline_model_parallel_size=2)
AFTERWARDS = replace(SCALED, context_parallel_size=2)
IN_JAX = replace(SCALED, tensor_model_parallel_size=2, context_parallel_size=2)


def run_steps(config, first: int, last: int, resumed: Path | None, saved: Path, train=TRAIN) -> None:
    """Train on this rank from a step to another, beginning from a checkpoint if one is given, and save."""
    from reference_torch.groups import make_mesh
    from reference_torch.train import Trainer

    trainer = Trainer(config, train, tiny_corpus(), device="cpu", mesh=make_mesh(config))
    if resumed is not None:
        assert trainer.resume(resumed) == first
    steps(trainer, first, last)
    trainer.save(saved)


@pytest.fixture(scope="module")
def ranks():
    with RankPool(2, 120.0) as pool:
        yield pool


@pytest.mark.multiprocess
@pytest.mark.parametrize("untied", [False, True])
@pytest.mark.parametrize("schedule", V_SCHEDULES)
def test_a_run_resumed_on_a_v_shaped_pipeline_has_the_moments_of_one_process(schedule, untied, ranks, tmp_path):
    plain = replace(DEEP, untie_embeddings_and_output_weights=untied)
    folded = replace(
        plain,
        pipeline_schedule=schedule,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
    )
    whole = new_trainer("torch", plain)
    steps(whole, 0, 2)
    whole.save(tmp_path / "two")
    steps(whole, 2, 4)
    expected = read_checkpoint(whole.save(tmp_path / "whole")).arrays
    ranks.run("tests.saving.test_meshes:run_steps", folded, 2, 4, tmp_path / "two", tmp_path / "resumed")
    found = read_checkpoint(tmp_path / "resumed").arrays
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert relative_difference(found[name], array) <= 1e-8, name


def assert_same_arrays(found: Path, expected: Path) -> None:
    """Check that two checkpoints have the same bits: parameters, both moments, and histories of FP8 that are in use."""
    ours, theirs = (read_checkpoint(path) for path in (found, expected))
    assert ours.step == theirs.step
    assert ours.arrays.keys() == theirs.arrays.keys()
    for name, array in theirs.arrays.items():
        np.testing.assert_array_equal(ours.arrays[name], array, err_msg=name)
    weights = split_arrays(theirs.arrays, MODEL)
    used = [array.any() for array in weights.values() if is_history(array.shape)]
    assert used
    assert all(used)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(600)
def test_histories_and_shards_of_the_optimizer_go_on_on_other_meshes_and_in_the_other_backend(tmp_path):
    """dp 2, tp 2, pp 2 in PyTorch; dp 2, cp 2; dp 2, tp 2, cp 2 in JAX; tp 2 in PyTorch; one process."""
    job = "tests.saving.test_meshes:run_steps"
    places = {name: tmp_path / name for name in ("eight", "copy", "four", "of jax", "jax", "copy of jax", "one")}
    with RankPool(8, 300.0) as pool:
        pool.run(job, IN_TORCH, 0, 2, None, places["eight"], SCALED_TRAIN)
    with RankPool(4, 200.0) as pool:
        pool.run(job, AFTERWARDS, 2, 2, places["eight"], places["copy"], SCALED_TRAIN)
        pool.run(job, AFTERWARDS, 2, 3, places["eight"], places["four"], SCALED_TRAIN)
    assert_same_arrays(places["copy"], places["eight"])
    moved = [str(places[name]) for name in ("four", "of jax", "jax")]
    child = [sys.executable, "-m", "tests.saving.meshes_child", *moved]
    done = subprocess.run(child, capture_output=True, text=True, timeout=300, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_same_arrays(places["of jax"], places["four"])
    with RankPool(2, 200.0) as pool:
        two = replace(SCALED, tensor_model_parallel_size=2)
        pool.run(job, two, 5, 5, places["jax"], places["copy of jax"], SCALED_TRAIN)
    assert_same_arrays(places["copy of jax"], places["jax"])
    alone = new_trainer("torch", unsharded(SCALED), SCALED_TRAIN)
    assert alone.resume(places["jax"]) == 5
    alone.save(places["one"])
    assert_same_arrays(places["one"], places["jax"])
    whole = new_trainer("torch", unsharded(SCALED), SCALED_TRAIN)
    begun = weights_of(whole)
    steps(whole, 0, 5)
    moved = np.linalg.norm(weights_of(whole) - begun)
    assert np.linalg.norm(weights_of(alone) - weights_of(whole)) <= 0.1 * moved


def weights_of(trainer) -> np.ndarray:
    """All parameters but histories, in one vector."""
    found = sorted(trainer.parameters().items())
    return np.concatenate([value.ravel() for _, value in found if not is_history(value.shape)])


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_was_imported_does_not_change_with_the_arrays_it_came_from(backend, tmp_path):
    trainer = new_trainer(backend)
    steps(trainer, 0, 1)
    arrays = read_checkpoint(trainer.save(tmp_path / "one")).arrays
    given = {name: array.copy() for name, array in arrays.items()}
    saving, state = (
        backend_module(backend, "saving"),
        (trainer._optimizer_state if backend == "jax" else trainer._optimizer),
    )
    model = trainer._params if backend == "jax" else trainer.stages
    model, state = saving.import_arrays(model, state, given, 1)
    for array in given.values():
        array[...] = 7.0
    for name, array in saving.export_arrays(model, state).items():
        np.testing.assert_array_equal(array, arrays[name], err_msg=name)


@pytest.mark.parametrize(("state", "what"), [("exp_avg", "first moment"), ("exp_avg_sq", "second moment")])
def test_moments_that_share_memory_are_told(state, what):
    import torch

    from reference_torch import saving

    trainer = new_trainer("torch")
    arrays = saving.export_arrays(trainer.stages, trainer._optimizer)
    names = [name for name, p in trainer.stages[0].named_parameters() if p.shape == (CONFIG.hidden_size,)][:2]
    saving.import_arrays(trainer.stages, trainer._optimizer, arrays, 0)
    parameters = dict(trainer.stages[0].named_parameters())
    first, second = (trainer._optimizer.state[parameters[name]] for name in names)
    second[state] = first[state].view(-1)
    with pytest.raises(AssertionError, match=f"{names[1]}: its {what} shares memory with the {what} of {names[0]}"):
        saving._check_own_memory(trainer.stages, trainer._optimizer)
    second[state] = parameters[names[1]].detach()
    with pytest.raises(AssertionError, match=f"{names[1]}: its {what} shares memory with the parameter of {names[1]}"):
        saving._check_own_memory(trainer.stages, trainer._optimizer)
    second[state] = torch.zeros_like(first[state])
    saving._check_own_memory(trainer.stages, trainer._optimizer)
