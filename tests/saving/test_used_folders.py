"""A folder that another run has used, and names that are no checkpoint's: nothing of an earlier run is lost."""

import os

import numpy as np
import pytest

from diptych.plans.checkpoint import Checkpoint, CheckpointError, list_checkpoints, read_checkpoint, write_checkpoint
from parity.cli.run import METRICS, TENSORBOARD, read_metrics
from tests.backends import BACKENDS
from tests.command import diptych
from tests.saving.support import new_trainer, steps

SMALL = (
    "--hidden-size 16 --num-layers 1 --num-attention-heads 2 --seq-length 8 --eval-iters 1 --global-batch-size 2 "
    "--train-iters 8 --lr-warmup-iters 2"
)


def content_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_new_run_in_a_used_folder_is_refused_and_loses_nothing(backend, corpus, tmp_path, capsys):
    run = tmp_path / "run"
    train = f"train {SMALL} --backend {backend} --data-path {corpus} --save {run}"
    assert diptych(f"{train} --save-interval 2") == 0
    before = content_of(run)
    assert diptych(f"{train} --lr 0.002 --exit-step 4") == 2
    error = capsys.readouterr().err
    assert f"save: expected a folder without checkpoints for a new run, got {run}/step_00000008.safetensors" in error
    assert "give --resume to continue that run, or another folder" in error
    assert content_of(run) == before
    for path in list_checkpoints(run):
        path.unlink()
    assert diptych(f"{train} --exit-step 4") == 2
    assert "save: expected a folder without metrics for a new run, got" in capsys.readouterr().err
    assert len(read_metrics(run / METRICS)) == 9
    assert diptych(f"{train} --exit-step 4 --resume-if-saved") == 0  # a run that was ended before its first checkpoint
    assert [line["step"] for line in read_metrics(run / METRICS)] == [0, 1, 2, 3]


def test_a_folder_of_other_files_is_taken_and_they_stay(corpus, tmp_path):
    run = tmp_path / "run"
    (run / TENSORBOARD).mkdir(parents=True)
    (run / TENSORBOARD / "source.py").write_text("mine")
    (run / "step_1.safetensors").write_text("of another program")
    assert diptych(f"train {SMALL} --exit-step 2 --data-path {corpus} --save {run}") == 0
    assert (run / TENSORBOARD / "source.py").read_text() == "mine"
    assert (run / "step_1.safetensors").read_text() == "of another program"


def test_a_directory_named_like_a_checkpoint_is_told_before_a_step_is_spent(corpus, tmp_path, capsys):
    run = tmp_path / "run"
    (run / "step_00000002.safetensors").mkdir(parents=True)
    assert diptych(f"train {SMALL} --data-path {corpus} --save {run}") == 2
    captured = capsys.readouterr()
    assert "save: expected only files with names like" in captured.err
    assert "rename it" in captured.err
    assert "step      0" not in captured.out
    assert list_checkpoints(run) == []
    with pytest.raises(CheckpointError, match=r"expected step_\*\.safetensors in .*, got none"):
        read_checkpoint(run)


def test_the_newest_steps_are_kept_whatever_their_number_of_digits(tmp_path):
    for step in (99_999_998, 99_999_999, 100_000_000, 100_000_001, 4_294_967_296):
        path = write_checkpoint(tmp_path, Checkpoint(step, {"w": np.zeros(2)}, {}))
        assert list_checkpoints(tmp_path)[-1] == path
    names = ["step_100000001.safetensors", "step_4294967296.safetensors"]
    assert [path.name for path in list_checkpoints(tmp_path)] == names


def test_a_step_is_not_written_beside_later_ones(tmp_path):
    trainer = new_trainer("torch")
    steps(trainer, 0, 2)
    later = trainer.save(tmp_path)
    other = new_trainer("torch")
    steps(other, 0, 1)
    with pytest.raises(CheckpointError, match=r"expected no later step than 1 in .*, got step_00000002\.safetensors; "):
        other.save(tmp_path)
    assert list_checkpoints(tmp_path) == [later]
    assert trainer.save(tmp_path) == later  # the same step again


def test_fewer_than_one_to_keep(tmp_path):
    with pytest.raises(ValueError, match="keep: expected at least 1, got 0"):
        write_checkpoint(tmp_path, Checkpoint(1, {"w": np.zeros(2)}, {}), keep=0)


def test_what_cannot_be_read_is_not_written(tmp_path):
    write_checkpoint(tmp_path, Checkpoint(1, {"model.w": np.zeros(2)}, {}))
    for name, value, got in (
        ("model.w", np.inf, "inf in model.w"),
        ("second_moment.w", -1.0, "-1.0 in second_moment.w"),
    ):
        with pytest.raises(
            CheckpointError, match=f"expected to write step 2, got {got}, .*earlier checkpoints are unt"
        ):
            write_checkpoint(tmp_path, Checkpoint(2, {name: np.array([0.0, value])}, {}))
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_00000001.safetensors"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes in this file system")
def test_a_pipe_is_no_checkpoint(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match=r"expected a file or folder, got .*pipe, which is a device or pipe"):
        read_checkpoint(tmp_path / "pipe")
