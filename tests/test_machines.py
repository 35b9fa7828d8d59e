"""Runs over several machines: nodes of torchrun, processes of JAX, on loopback; restarts, and other meshes then."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from diptych.plans.checkpoint import read_checkpoint
from parity.cli.commands import Train
from parity.cli.main import main
from parity.cli.run import read_metrics
from parity.compare import relative_difference
from tests.pipeline.test_jax import free_port
from tests.pipeline.test_training import ROOT, after_steps

SMALL = (
    "--hidden-size 16 --num-layers 2 --num-attention-heads 2 --seq-length 8 --eval-iters 1 --global-batch-size 4 "
    "--micro-batch-size 1 --pipeline-timeout 15 --hidden-dropout 0.1 --params-dtype float64 --train-iters 14"
)
SETTINGS = SMALL.split()
STAGES = "--pipeline-model-parallel-size", "2"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> list[str]:
    path = tmp_path_factory.mktemp("data") / "corpus.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    return ["--data-path", str(path)]


@pytest.fixture(scope="module")
def undisturbed(data, tmp_path_factory) -> Path:
    """The run of one process."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    assert main(["train", *SETTINGS, *data, "--save", str(folder)]) == 0
    return folder


class Started:
    """Processes of one run; none outlives the test."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen] = []

    def __enter__(self) -> "Started":
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()

    def start(self, *command: object) -> subprocess.Popen:
        words = [sys.executable, "-m", *map(str, command)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.processes.append(subprocess.Popen(words, cwd=ROOT, **pipes))
        return self.processes[-1]

    def ended(self, seconds: float) -> list[tuple[int, str, str]]:
        """Exit code and output of each, within so many seconds."""
        end, found = time.monotonic() + seconds, []
        for process in self.processes:
            output, errors = process.communicate(timeout=max(1.0, end - time.monotonic()))
            found.append((process.returncode, output, errors))
        return found


def assert_same_run(found: Path, expected: Path) -> None:
    """Losses of every step, each told once, validation and parameters."""
    ours, theirs = (read_metrics(folder / "metrics.jsonl") for folder in (found, expected))
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for a, b in zip(ours, theirs, strict=True):
        name = "loss" if "loss" in b else "validation_loss"
        assert a[name] == pytest.approx(b[name], rel=1e-10), a["step"]
    ours, theirs = (read_checkpoint(folder).arrays for folder in (found, expected))
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        assert relative_difference(np.asarray(ours[name]), np.asarray(array)) <= 1e-8, name


@pytest.mark.multiprocess
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.slow
def test_two_nodes_start_again_after_a_rank_was_killed(data, undisturbed, tmp_path, monkeypatch):
    """Two replicas of two stages; the second node's rank dies, and both nodes go on from the last checkpoint."""
    run = tmp_path / "run"
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}", "--rdzv-id", "test"]
    nodes = ["--nnodes", 2, "--nproc-per-node", 2, "--max-restarts", 1, "--monitor-interval", "0.1"]
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # or the ranks meet those of the round before
    with Started() as started:
        for _ in range(2):
            command = ["torch.distributed.run", *nodes, *rendezvous, "-m", "parity.cli", "train", *SETTINGS, *STAGES]
            started.start(*command, *data, "--save", run, "--save-interval", 2, "--resume-if-saved")
        after_steps(started.processes[0], run, 5)
        victim = after_steps(started.processes[1], run, 5)[0]
        killed_at = len(read_metrics(run / "metrics.jsonl"))
        os.kill(victim, signal.SIGKILL)
        ended = started.ended(120)
    assert [code for code, _, _ in ended] == [0, 0], ended
    resumed = re.findall(r"resumed at step (\d+)", "".join(output for _, output, _ in ended))
    assert len(resumed) == 1, ended
    assert 2 <= int(resumed[0]) <= killed_at + 2
    assert_same_run(run, undisturbed)


def jax_process(started: Started, port: int, number: int, *more: object) -> subprocess.Popen:
    """One of two processes of jax.distributed."""
    joined = ["--coordinator-address", f"localhost:{port}", "--num-processes", 2, "--process-id", number]
    return started.start("parity.cli", "train", "--backend", "jax", *SETTINGS, *joined, *more)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(600)
def test_two_processes_of_jax_go_on_after_one_was_killed(data, undisturbed, tmp_path):
    """Two stages, a process each; the other ends by itself, and two replicas of one stage go on, then PyTorch."""
    run = tmp_path / "run"
    save = ["--save", run, "--save-interval", 2]
    with Started() as started:
        port = free_port()
        for number in range(2):
            jax_process(started, port, number, *STAGES, *data, *save, "--resume-if-saved")
        after_steps(started.processes[0], run, 5, 200.0)
        started.processes[1].kill()
        codes = [code for code, _, _ in started.ended(100)]
    assert codes[0] != 0
    assert codes[1] == -signal.SIGKILL
    left = read_checkpoint(run).step
    assert 4 <= left < 14
    with Started() as started:
        port = free_port()
        for number in range(2):
            jax_process(started, port, number, "--nproc", 1, *data, *save, "--resume", "--exit-step", 12)
        ended = started.ended(200)
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert f"resumed at step {left}" in ended[0][1]
    assert "step" not in ended[1][1], "one process speaks"
    context = ["--context-parallel-size", "2", *STAGES]
    with Started() as started:
        started.start("parity.cli", "train", *SETTINGS, *context, *data, "--save", run, "--resume")
        assert started.ended(120)[0][0] == 0
    assert_same_run(run, undisturbed)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(600)
def test_jax_uses_as_many_devices_as_asked_for(data, undisturbed, tmp_path):
    """Replicas of stages and of context ranks, in one process and in two."""
    run = tmp_path / "run"
    with Started() as started:
        command = ["parity.cli", "train", "--backend", "jax", *SETTINGS, *STAGES, "--context-parallel-size", 2, *data]
        started.start(*command, "--nproc", 8, "--save", run, "--exit-step", 7)
        assert started.ended(280)[0][0] == 0
    with Started() as started:
        port = free_port()
        for number in range(2):
            jax_process(started, port, number, *STAGES, "--nproc", 2, *data, "--save", run, "--resume")
        ended = started.ended(280)
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert_same_run(run, undisturbed)


def refused(**settings) -> str:
    with pytest.raises(ValueError, match=": expected") as error:
        Train(**settings)
    return str(error.value)


def test_coordinates_that_do_not_fit_are_refused():
    there = {"backend": "jax", "coordinator_address": "host:1"}
    assert "expected none with backend 'torch'" in refused(coordinator_address="host:1")
    assert "expected host:port of the first process beside" in refused(backend="jax", num_processes=2)
    assert "beside num_processes and process_id, got 'auto'" in refused(
        **there | {"coordinator_address": "auto"}, process_id=1
    )
    assert "expected host:port or auto, got 'host'" in refused(**there | {"coordinator_address": "host"})
    assert "expected both beside coordinator_address, got 2 and None" in refused(**there, num_processes=2)
    assert "expected 0 <= process_id < num_processes=2, got 2" in refused(**there, num_processes=2, process_id=2)


def test_devices_that_do_not_fit_are_refused(capsys, monkeypatch, data):
    jax = ["train", "--backend", "jax", *SETTINGS, *STAGES, *data]
    assert main([*jax, "--nproc", "3"]) == 2
    assert "nproc: expected a multiple of --pipeline-model-parallel-size=2 devices, got 3" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(jax) == 2
    assert "backend: expected 'torch' under torchrun, got 'jax'; start each" in capsys.readouterr().err


def test_the_page_shows_flags_that_are_tested():
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / "composition.md").read_text(), re.DOTALL)
    assert [block.count("parallel-size") for block in blocks] == [1, 1]
    tested = Path(__file__).read_text()
    for flag in re.findall(r"--[a-z-]+", " ".join(blocks)):
        assert f'"{flag}"' in tested or f"{flag} " in SMALL, flag
