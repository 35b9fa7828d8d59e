"""Runs from the command line: across backends, sampled, interrupted, killed and taken up again."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from diptych.plans.checkpoint import list_checkpoints, read_checkpoint
from diptych.plans.model.sampling import next_token
from parity.cli.main import main
from parity.cli.run import METRICS, read_metrics
from parity.compare import relative_difference
from parity.tolerances import PARAMETERS
from tests.backends import BACKENDS, TORCH_DAILY
from tests.command import diptych

SMALL = (
    "--hidden-size 16 --num-layers 1 --num-attention-heads 2 --seq-length 8 --eval-iters 1 --global-batch-size 2 "
    "--train-iters 40 --lr-warmup-iters 2 --params-dtype float64 --hidden-dropout 0.1"
)


@pytest.mark.thorough
def test_a_run_crosses_the_backends_from_the_command_line(corpus, tmp_path, capsys):
    run, whole = tmp_path / "run", tmp_path / "whole"
    train = f"train {SMALL} --eval-interval 10 --data-path {corpus}"
    assert diptych(f"{train} --backend torch --exit-step 15 --save", run) == 0
    assert "stopped after step 14 of 40 as asked; continue with --resume" in capsys.readouterr().out
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
    printed = capsys.readouterr().out
    assert printed.startswith("step 3; ")
    assert "checksum right" in printed
    assert "hidden_size 16" in printed
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
        cwd=Path(__file__).parents[2],
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
        "import os, signal, time\nfrom parity.cli.run import Interruption\nwith Interruption() as i:\n"
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
    assert "remove it to continue from the previous checkpoint" in error
    os.remove(newest)
    assert diptych(f"{command} --resume") == 0
    assert "resumed at step 10" in capsys.readouterr().out
