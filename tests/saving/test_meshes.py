"""A run saved on one mesh goes on on another: parameters and both moments are those of one process alone."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from diptych.plans.checkpoint import read_checkpoint
from diptych.plans.schedule.placement import V_SCHEDULES
from parity.compare import relative_difference
from reference_torch.rank_pool import RankPool
from tests.backends import BACKENDS, backend_module, tiny_corpus
from tests.saving.support import CONFIG, TRAIN, new_trainer, steps

DEEP = replace(CONFIG, num_layers=4, layer_pattern="attention")


def run_steps(config, first: int, last: int, resumed: Path | None, saved: Path) -> None:
    """Train on this rank from a step to another, beginning from a checkpoint if one is given, and save."""
    from reference_torch.groups import make_mesh
    from reference_torch.train import Trainer

    trainer = Trainer(config, TRAIN, tiny_corpus(), device="cpu", mesh=make_mesh(config))
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
