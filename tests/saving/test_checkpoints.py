"""Checkpoints: what they hold, resuming in either backend, and every way a file can be wrong."""

import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import diptych.plans.checkpoint
from diptych.plans.checkpoint import (
    RECORD,
    Checkpoint,
    CheckpointError,
    check_settings,
    list_checkpoints,
    read_checkpoint,
    split_arrays,
    write_checkpoint,
)
from diptych.plans.model.parameters import parameter_specs
from parity.cli.run import METRICS, TENSORBOARD, Metrics, read_metrics
from parity.compare import relative_difference
from parity.tolerances import PARAMETERS
from tests.backends import BACKENDS, backend_module, tiny_corpus
from tests.saving.support import CONFIG, TRAIN, new_trainer, steps


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("torch", "float32"),
        ("torch", "float64"),
        pytest.param("jax", "float32", marks=pytest.mark.slow),
        pytest.param("jax", "float64", marks=pytest.mark.slow),
    ],
)
def test_resumed_run_is_bitwise_the_uninterrupted_one(backend, dtype, tmp_path):
    config = replace(CONFIG, params_dtype=dtype)
    whole, first = new_trainer(backend, config), new_trainer(backend, config)
    steps(whole, 0, 12)
    steps(first, 0, 5)
    first.save(tmp_path)
    second = new_trainer(backend, config)
    assert second.resume(tmp_path) == 5
    steps(second, 5, 12)
    expected = read_checkpoint(whole.save(tmp_path / "whole")).arrays
    found = read_checkpoint(second.save(tmp_path / "second")).arrays
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("starts", "goes_on"), [pytest.param("torch", "jax", marks=pytest.mark.slow), ("jax", "torch")]
)
def test_run_started_in_one_backend_resumes_in_the_other(starts, goes_on, tmp_path):
    whole, first, second = new_trainer(starts), new_trainer(starts), new_trainer(goes_on)
    steps(whole, 0, 20)
    steps(first, 0, 9)
    first.save(tmp_path)
    assert second.resume(tmp_path) == 9
    steps(second, 9, 20)
    for name, p in second.parameters().items():
        assert relative_difference(p, whole.parameters()[name]) <= PARAMETERS["float64"], name


@pytest.mark.parametrize("backend", BACKENDS)
def test_checkpoint_holds_every_parameter_and_both_moments(backend, tmp_path):
    trainer = new_trainer(backend)
    before = read_checkpoint(trainer.save(tmp_path))
    assert before.step == 0
    steps(trainer, 0, 1)
    after = read_checkpoint(trainer.save(tmp_path))
    specs = parameter_specs(CONFIG)
    for checkpoint in (before, after):
        for prefix in ("model.", "first_moment.", "second_moment."):
            arrays = split_arrays(checkpoint.arrays, prefix)
            assert {name: a.shape for name, a in arrays.items()} == {name: s.shape for name, s in specs.items()}
    assert not any(array.any() for name, array in before.arrays.items() if "moment." in name)
    assert all(array.any() for name, array in after.arrays.items() if name.startswith("second_moment."))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_is_loaded_from_either_backends_file(backend, tmp_path):
    for writer in BACKENDS:
        trainer = new_trainer(writer)
        steps(trainer, 0, 1)
        model = backend_module(backend, "saving").load_model(trainer.save(tmp_path / writer))
        if backend == "torch":
            found = backend_module(backend, "saving").export_parameters(model)
        else:
            from flax import nnx

            found = backend_module(backend, "saving").export_parameters(nnx.state(model, nnx.Param))
        for name, p in trainer.parameters().items():
            np.testing.assert_array_equal(found[name], p)


def test_only_the_newest_are_kept(tmp_path):
    trainer = new_trainer("torch")
    for step in range(5):
        trainer.train_step(step)
        trainer.save(tmp_path)
    assert [path.stem for path in list_checkpoints(tmp_path)] == ["step_00000004", "step_00000005"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [p.name for p in list_checkpoints(tmp_path)]


def test_other_settings_are_named(saved):
    for config, train, corpus, named in (
        (replace(CONFIG, hidden_dropout=0.2), TRAIN, None, "hidden_dropout 0.1 in the checkpoint, 0.2 here"),
        (CONFIG, replace(TRAIN, lr=1.0), None, "lr 0.003 in the checkpoint, 1.0 here"),
        (CONFIG, TRAIN, tiny_corpus(5000), "corpus_digest '[0-9a-f]+' in the checkpoint, '[0-9a-f]+' here"),
        (CONFIG, TRAIN, tiny_corpus(seed=3), "data_seed 0 in the checkpoint, 3 here"),
    ):
        trainer = new_trainer("torch", config, train, corpus)
        with pytest.raises(CheckpointError, match=f"expected the settings of its run, got others: {named}"):
            trainer.resume(saved)


def test_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match=r"expected step_\*\.safetensors in .*, got none; save one first"):
        read_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"expected a file or folder, got .*nothing, which does not exist"):
        read_checkpoint(tmp_path / "nothing")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.999])
def test_truncated_file(saved, share):
    content = saved.read_bytes()
    saved.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(
        CheckpointError, match=r"expected a whole checkpoint in .* remove it to continue from the previous checkpoint"
    ):
        read_checkpoint(saved)


def test_every_kind_of_flipped_bit_is_refused(saved):
    content = saved.read_bytes()
    header = int.from_bytes(content[:8], "little")
    random_places = random.Random(0).sample(range(len(content)), 60)
    for place in [0, 3, 9, header // 2, header + 7, header + 9, len(content) - 1, *random_places]:
        flipped = bytearray(content)
        flipped[place] ^= 1 << (place % 8)
        if (
            bytes(flipped[8 : 8 + header]).strip() == content[8 : 8 + header].strip()
            and place < 8 + header
            and place >= 8
        ):
            continue  # padding of the header
        saved.write_bytes(flipped)
        with pytest.raises(CheckpointError):
            read_checkpoint(saved)
    saved.write_bytes(content)
    read_checkpoint(saved)


def test_settings_that_an_earlier_version_did_not_have_are_the_defaults(saved):
    checkpoint = read_checkpoint(saved)
    for name in ("qk_layernorm", "rotary_percent"):
        del checkpoint.settings["model"][name]
    now = read_checkpoint(saved).settings
    check_settings(checkpoint, now)
    with pytest.raises(CheckpointError, match="qk_layernorm False in the checkpoint, True here"):
        check_settings(checkpoint, now | {"model": now["model"] | {"qk_layernorm": True}})


def test_later_format(saved):
    with safe_open(saved, "np") as file:
        record = json.loads(file.metadata()[RECORD])
    save_file(load_file(saved), saved, {RECORD: json.dumps({**record, "format": 3})})
    with pytest.raises(CheckpointError, match=r"expected format 2 or earlier in .*, got 3; a later version wrote it"):
        read_checkpoint(saved)


def test_another_safetensors_file(tmp_path):
    save_file({"w": np.zeros(3)}, tmp_path / "step_00000001.safetensors")
    with pytest.raises(CheckpointError, match=r"expected a whole checkpoint in"):
        read_checkpoint(tmp_path)


def test_full_disk_leaves_the_last_checkpoint(saved, monkeypatch):
    """A quota at the write call: some bytes go through, then the disk is full."""

    def full(path: Path, content: bytes) -> None:
        path.write_bytes(content[: len(content) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(diptych.plans.checkpoint, "_write_through", full)
    checkpoint = read_checkpoint(saved)
    with pytest.raises(
        CheckpointError, match=r"expected to write .* bytes to .*, got No space left on device; earlier"
    ):
        write_checkpoint(saved.parent, checkpoint._replace(step=9))
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]
    read_checkpoint(saved)


def test_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"expected to write"):
        write_checkpoint(tmp_path / "file", Checkpoint(0, {"w": np.zeros(2)}, {}))


def test_stale_partial_files_are_removed(saved):
    stale = saved.parent / ".step_00000002.safetensors.99.partial"
    stale.write_bytes(b"half")
    write_checkpoint(saved.parent, read_checkpoint(saved)._replace(step=4))
    assert not stale.exists()


def test_metrics_of_a_resumed_run_are_one_curve(tmp_path):
    metrics = Metrics(tmp_path, 0, "torch")
    for step in range(5):
        metrics.write({"step": step, "loss": float(step)})
    metrics.write({"step": 3, "validation_loss": 1.0})
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"step": 5, "lo')  # cut short by a kill
    Metrics(tmp_path, 3, "jax").write({"step": 3, "loss": 30.0})
    assert [line["step"] for line in read_metrics(tmp_path / METRICS)] == [0, 1, 2, 3, 3]
    assert read_metrics(tmp_path / METRICS)[-1] == {"backend": "jax", "step": 3, "loss": 30.0}


def test_tensorboard_shows_the_same_numbers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    metrics = Metrics(tmp_path, 0, "torch")
    for step in range(4):
        metrics.write({"step": step, "loss": float(step)})
    resumed = Metrics(tmp_path, 2, "jax")
    resumed.write({"step": 2, "loss": 20.0})
    resumed.write({"step": 3, "validation_loss": 1.0})
    resumed.write({"step": 4, "validation_loss": -1e300})  # float64 that 32 bits do not have
    board = EventAccumulator(str(tmp_path / TENSORBOARD)).Reload()
    curves = {
        name: [(event.step, make_ndarray(event.tensor_proto).item()) for event in board.Tensors(name)]
        for name in board.Tags()["tensors"]
    }
    assert curves == {"loss": [(0, 0.0), (1, 1.0), (2, 20.0)], "validation_loss": [(3, 1.0), (4, -np.inf)]}


def test_metrics_need_no_tensorboard(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.summary", None)
    metrics = Metrics(tmp_path, 0, "torch")
    metrics.write({"step": 0, "loss": 1.0})
    assert read_metrics(tmp_path / METRICS)[0]["loss"] == 1.0
    assert not (tmp_path / TENSORBOARD).exists()
