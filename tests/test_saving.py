"""Checkpoints: what they hold, resuming in either backend, and every way a file can be wrong."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import plans.checkpoint
from parity.cli import main
from parity.compare import relative_difference
from parity.driver import METRICS, TENSORBOARD, Metrics, read_metrics
from parity.tolerances import PARAMETERS
from plans.checkpoint import (
    RECORD,
    Checkpoint,
    CheckpointError,
    list_checkpoints,
    read_checkpoint,
    split_arrays,
    write_checkpoint,
)
from plans.config import TrainConfig, TransformerConfig
from plans.parameters import parameter_specs
from plans.sampling import next_token
from tests.backends import BACKENDS, TORCH_DAILY, room, tiny_corpus, trainers

CONFIG = TransformerConfig(
    hidden_size=16,
    num_layers=2,
    num_attention_heads=2,
    seq_length=12,
    enable_hyper_connections=True,
    num_residual_streams=3,
    hidden_dropout=0.1,
    layer_pattern="attention,attention+gelu+no-mlp-hc",
    params_dtype="float64",
)
TRAIN = TrainConfig(train_iters=20, global_batch_size=4, lr=3e-3, min_lr=3e-4, lr_warmup_iters=5, eval_iters=2)


def new_trainer(backend: str, config=CONFIG, train=TRAIN, corpus=None):
    return dict(zip(BACKENDS, trainers(config, train, corpus), strict=True))[backend]


def steps(trainer, first: int, last: int) -> None:
    for step in range(first, last):
        trainer.train_step(step)


@pytest.fixture
def saved(tmp_path) -> Path:
    trainer = new_trainer("torch")
    steps(trainer, 0, 3)
    return trainer.save(tmp_path / "run")


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
        model = room(backend, "saving").load_model(trainer.save(tmp_path / writer))
        if backend == "torch":
            found = room(backend, "saving").export_parameters(model)
        else:
            from flax import nnx

            found = room(backend, "saving").export_parameters(nnx.state(model, nnx.Param))
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
        (replace(CONFIG, hidden_dropout=0.2), TRAIN, None, "hidden_dropout 0.1 there, 0.2 here"),
        (CONFIG, replace(TRAIN, lr=1.0), None, "lr 0.003 there, 1.0 here"),
        (CONFIG, TRAIN, tiny_corpus(5000), "corpus_digest '[0-9a-f]+' there, '[0-9a-f]+' here"),
        (CONFIG, TRAIN, tiny_corpus(seed=3), "data_seed 0 there, 3 here"),
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
        CheckpointError, match=r"expected a whole checkpoint in .* remove it to go on from the one before"
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


def test_later_format(saved):
    with safe_open(saved, "np") as file:
        record = json.loads(file.metadata()[RECORD])
    save_file(load_file(saved), saved, {RECORD: json.dumps({**record, "format": 2})})
    with pytest.raises(CheckpointError, match=r"expected format 1 or earlier in .*, got 2; a later version wrote it"):
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

    monkeypatch.setattr(plans.checkpoint, "_write_through", full)
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
    board = EventAccumulator(str(tmp_path / TENSORBOARD)).Reload()
    curves = {
        name: [(event.step, make_ndarray(event.tensor_proto).item()) for event in board.Tensors(name)]
        for name in board.Tags()["tensors"]
    }
    assert curves == {"loss": [(0, 0.0), (1, 1.0), (2, 20.0)], "validation_loss": [(3, 1.0)]}


def test_metrics_need_no_tensorboard(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.summary", None)
    metrics = Metrics(tmp_path, 0, "torch")
    metrics.write({"step": 0, "loss": 1.0})
    assert read_metrics(tmp_path / METRICS)[0]["loss"] == 1.0
    assert not (tmp_path / TENSORBOARD).exists()


SMALL = (
    "--hidden-size 16 --num-layers 1 --num-attention-heads 2 --seq-length 8 --eval-iters 1 --global-batch-size 2 "
    "--train-iters 40 --lr-warmup-iters 2 --params-dtype float64 --hidden-dropout 0.1"
)


@pytest.fixture
def corpus(tmp_path) -> Path:
    path = tmp_path / "corpus.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    return path


def diptych(command: str, *more: object) -> int:
    return main([*command.split(), *map(str, more)])


@pytest.mark.thorough
def test_a_run_crosses_the_backends_from_the_command_line(corpus, tmp_path, capsys):
    run, whole = tmp_path / "run", tmp_path / "whole"
    train = f"train {SMALL} --eval-interval 10 --data-path {corpus}"
    assert diptych(f"{train} --backend torch --exit-step 15 --save", run) == 0
    assert "stopped after step 14 of 40 as asked; go on with --resume" in capsys.readouterr().out
    assert diptych(f"{train} --backend jax --resume --save", run) == 0
    assert "resumed at step 15" in capsys.readouterr().out
    assert diptych(f"{train} --backend torch --save", whole) == 0
    ends = [read_checkpoint(folder) for folder in (run, whole)]
    assert [end.step for end in ends] == [40, 40]
    for name, array in ends[0].arrays.items():
        if name.startswith("model."):
            assert relative_difference(array, ends[1].arrays[name]) <= PARAMETERS["float64"], name
    curves = [read_metrics(folder / METRICS) for folder in (run, whole)]
    for ours, theirs in zip(*curves, strict=True):
        assert ours["step"] == theirs["step"]
        key = "loss" if "loss" in ours else "validation_loss"
        assert ours[key] == pytest.approx(theirs[key], rel=1e-9)
    assert [line["step"] for line in curves[0] if "validation_loss" in line] == [10, 20, 30, 40]


@pytest.mark.thorough
def test_either_backend_samples_the_same_text_from_either_run(corpus, tmp_path, capsys):
    run, texts = tmp_path / "run", []
    assert diptych(f"train {SMALL} --backend jax --data-path {corpus} --save {run}") == 0
    capsys.readouterr()
    for backend in BACKENDS:
        assert main(["sample", str(run), "--backend", backend, "--prompt", "the quick", "--length", "30"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0].startswith("the quick")
    assert len(texts[0]) > len("the quick")
    assert diptych(f"sample {run} --seed 1 --length 30") == 0
    assert capsys.readouterr().out != texts[0]


def test_info_and_curves(corpus, tmp_path, capsys):
    run = tmp_path / "run"
    assert diptych(f"train {SMALL} --exit-step 3 --data-path {corpus} --save {run}") == 0
    capsys.readouterr()
    assert diptych("info", run) == 0
    told = capsys.readouterr().out
    assert told.startswith("step 3; ")
    assert "checksum right" in told
    assert "hidden_size 16" in told
    assert diptych("curves", run, "--output", tmp_path / "deep" / "curves.png") == 0
    assert (tmp_path / "deep" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert diptych("curves", tmp_path) == 2
    assert "runs: expected a metrics.jsonl with steps in" in capsys.readouterr().err


def test_next_token():
    logits = np.log(np.array([0.5, 0.25, 0.25, 1e-30]))
    assert next_token(logits, 0.0, 0, 0) == 0
    drawn = np.bincount([next_token(logits, 1.0, 7, index) for index in range(4000)], minlength=4) / 4000
    np.testing.assert_allclose(drawn, [0.5, 0.25, 0.25, 0.0], atol=0.03)
    with pytest.raises(ValueError, match=r"temperature: expected at least 0, got -1"):
        next_token(logits, -1.0, 0, 0)
    with pytest.raises(ValueError, match=r"logits: expected finite numbers, got nan"):
        next_token(np.array([0.0, np.nan]), 1.0, 0, 0)


def start(arguments: str, *more: object) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "parity.cli", *arguments.split(), *map(str, more)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent,
    )


def wait_for(path: Path, process: subprocess.Popen, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not (path.exists() and path.stat().st_size > 0):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)


@pytest.mark.multiprocess
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_signal_saves_and_exits_cleanly(backend, number, corpus, tmp_path):
    long = SMALL.replace("--train-iters 40", "--train-iters 1000000")
    process = start(f"train {long} --backend {backend} --data-path {corpus} --save", tmp_path / "run")
    wait_for(tmp_path / "run" / METRICS, process)
    process.send_signal(number)
    out, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    assert error == ""
    step = read_checkpoint(tmp_path / "run").step
    assert step > 0
    assert f"stopped by {number.name} after step {step - 1}" in out


@pytest.mark.multiprocess
def test_second_signal_ends_at_once(tmp_path):
    script = (
        "import os, signal, time\nfrom parity.driver import Interruption\nwith Interruption() as i:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n    print(i.signal.name, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(60)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=False)
    assert done.stdout == "SIGTERM\n"
    assert done.returncode == 128 + signal.SIGINT


def kill_and_resume(backend: str, kills: int, corpus: Path, folder: Path, seed: int) -> None:
    """Kill a run at random moments until it has been killed so often; it must end as one never killed."""
    random_moments = random.Random(seed)
    steps = 100 if kills < 3 else 400
    command = (
        f"train {SMALL.replace('40', str(steps))} --backend {backend} --save-interval 1 --data-path {corpus} --save"
    )
    whole = folder / "whole"
    assert diptych(command, whole) == 0
    run, killed = folder / "run", 0
    while killed < kills:
        process = start(f"{command} {run}" + (" --resume" if run.exists() and list_checkpoints(run) else ""))
        before = list_checkpoints(run)[-1:] if run.exists() else []
        while process.poll() is None and (list_checkpoints(run)[-1:] if run.exists() else []) == before:
            time.sleep(0.01)  # until it has started to save
        time.sleep(random_moments.random() * 0.2)
        process.kill()
        out, error = process.communicate(timeout=60)
        assert process.returncode in (-signal.SIGKILL, 0), out + error
        killed += process.returncode != 0
        read_checkpoint(run)
        if process.returncode == 0:
            break
    assert killed > 0, "the run was never killed"
    assert diptych(f"{command} {run} --resume") == 0
    ends = [read_checkpoint(path) for path in (run, whole)]
    assert ends[0].step == ends[1].step == steps
    for name, array in ends[1].arrays.items():
        np.testing.assert_array_equal(ends[0].arrays[name], array, err_msg=name)
    assert [line["step"] for line in read_metrics(run / METRICS)] == [*range(steps), steps]


@pytest.mark.multiprocess
@pytest.mark.parametrize("backend", TORCH_DAILY)
def test_killed_run_resumes_and_ends_the_same(backend, corpus, tmp_path):
    kill_and_resume(backend, 2, corpus, tmp_path, seed=0)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("backend", BACKENDS)
def test_killed_fifteen_times_resumes_and_ends_the_same(backend, corpus, tmp_path):
    kill_and_resume(backend, 15, corpus, tmp_path, seed=1)


def test_a_broken_step_keeps_the_last_checkpoint(corpus, tmp_path, capsys, monkeypatch):
    import reference_torch.stage

    right = reference_torch.stage.PipelineStage.forward

    def broken(self, *arguments, step=0, **more):
        return right(self, *arguments, step=step, **more) * (float("nan") if step == 7 else 1.0)

    monkeypatch.setattr(reference_torch.stage.PipelineStage, "forward", broken)
    run = tmp_path / "run"
    assert diptych(f"train {SMALL} --backend torch --save-interval 5 --data-path {corpus} --save", run) == 1
    assert "step 7: expected a finite loss and gradient norm, got loss nan" in capsys.readouterr().err
    assert read_checkpoint(run).step == 5


@pytest.mark.thorough
def test_resuming_with_a_damaged_newest_checkpoint_is_one_line(corpus, tmp_path, capsys):
    run = tmp_path / "run"
    command = f"train {SMALL} --backend torch --data-path {corpus} --save {run}"
    assert diptych(f"{command} --save-interval 5 --exit-step 12") == 0
    newest = list_checkpoints(run)[-1]
    newest.write_bytes(newest.read_bytes()[:-10])
    assert diptych(f"{command} --resume") == 2
    error = capsys.readouterr().err
    assert len(error.strip().splitlines()) == 1
    assert str(newest) in error
    assert "remove it to go on from the one before it" in error
    os.remove(newest)
    assert diptych(f"{command} --resume") == 0
    assert "resumed at step 10" in capsys.readouterr().out
