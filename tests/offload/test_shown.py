"""Hiding shown, mistakes named, and what the example, the command and the comparison say."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from diptych.plans.config import TransformerConfig
from diptych.plans.offload import layer_storages, plan_offload, step_uses, total_statistics
from parity.cli.main import main
from parity.cli.run import read_metrics
from reference_torch.offload import OffloadError, TensorOffloadManager
from reference_torch.offload.link import Link
from tests.backends import TORCH_DAILY
from tests.offload.support import WIDTH, assert_equal_state, batch, build, train

MODEL = {"hidden_size": 16, "num_layers": 3, "num_attention_heads": 2, "enable_hyper_connections": True}


# A slow link.


class Slow(nn.Module):
    """Takes its time, as a matrix product on a GPU would."""

    seconds = 0.1  # types are checked in tests, which takes 5 ms a layer

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH, dtype=torch.float64))

    def forward(self, x):
        time.sleep(self.seconds)
        return x @ self.weight


@pytest.mark.slow
@pytest.mark.alone
def test_o12_hiding_is_shown(managers, monkeypatch):
    """Forwards and fetches of equal length: with prefetch the longer of the two counts, without their sum."""
    count, steps = 8, 3
    monkeypatch.setattr(Link, "delay", lambda self, nbytes: 0.09)
    seconds = {}
    for n in (0, 1):
        layers = nn.ModuleList(Slow() for _ in range(count))
        managers(layers, n)
        x = batch() @ torch.ones(4, WIDTH, dtype=torch.float64)
        taken = []
        for _ in range(steps):
            begin = time.perf_counter()
            with torch.no_grad():
                for layer in layers:
                    x = layer(x)
            taken.append(time.perf_counter() - begin)
        seconds[n] = min(taken[1:])
    longer = count * Slow.seconds
    assert seconds[1] <= 1.1 * longer
    assert seconds[0] > 1.1 * longer


# What is refused.


def test_registering_is_checked(managers, monkeypatch):
    model = build()
    manager = managers([], 1)
    manager.register_layer(0, model.layers[0])
    with pytest.raises(ValueError, match=r"layer_id: expected one not registered yet, got 0 a second time"):
        manager.register_layer(0, model.layers[1])
    with pytest.raises(ValueError, match=r"module: expected one not registered yet, got Layer, which is in layer 0"):
        manager.register_layer(1, model.layers[0])
    with pytest.raises(ValueError, match=r"module: expected one not registered yet, got Linear, which is in layer 0"):
        manager.register_layer(1, model.layers[0].wide)
    with pytest.raises(
        ValueError, match=r"layer 1: expected its parameters on cpu, as the other layers, got \['meta'\]"
    ):
        manager.register_layer(1, nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match=r"layer_id: expected a registered layer of \[0\], got 5"):
        manager.prefetch_layer(5)
    with pytest.raises(
        ValueError, match=r"layer 3: expected its parameters on one device, cpu or cuda, got \['meta'\]"
    ):
        TensorOffloadManager().register_layer(3, nn.Linear(2, 2, device="meta"))


def test_a_host_without_room_is_named_and_nothing_is_lost(managers, monkeypatch):
    plain, ours = build(), build()
    manager = managers([], 1)
    manager.register_layer(0, ours.layers[0])
    empty, left = torch.empty, 4

    def full(*arguments, **options):
        nonlocal left
        left -= 1
        if left < 0:
            raise RuntimeError("CUDA error: out of memory\nmore words")
        return empty(*arguments, **options)

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(
        OffloadError, match=r"offload: expected \d+ bytes of host memory, got: CUDA error: out of memory;"
    ):
        manager.register_layer(1, ours.layers[1])
    monkeypatch.undo()
    assert list(manager.layer_params) == [0]
    assert not ours.layers[1]._forward_pre_hooks
    manager.offload_all_layers()
    assert_equal_state(ours, plain)
    train(ours, 2, manager)
    train(plain, 2)
    assert_equal_state(ours, plain)
    manager.register_layer(1, ours.layers[1])
    train(ours, 2, manager)


def test_a_copy_that_fails_is_named(managers, monkeypatch):
    model = build()
    manager = managers(model, 0)
    monkeypatch.setattr(Link, "delay", lambda self, nbytes: -1.0)
    with pytest.raises(OffloadError, match=r"copy: expected to move bytes between host and device, got sleep length"):
        manager.require(0)
    monkeypatch.undo()
    plain = build()
    assert torch.equal(model.layers[0].wide.weight, plain.layers[0].wide.weight)
    with torch.no_grad():
        for changed in (model, plain):
            changed.layers[0].wide.weight.add_(1.0)
    monkeypatch.setattr(Link, "delay", lambda self, nbytes: -1.0)
    manager.offload_layer(0)
    with pytest.raises(OffloadError, match=r"copy: expected to move bytes"):
        manager.offload_all_layers()
    monkeypatch.undo()
    train(model, 2, manager)
    train(plain, 2)
    assert_equal_state(model, plain)


@pytest.mark.thorough
def test_the_example_runs(tmp_path):
    done = subprocess.run(
        [sys.executable, "examples/tensor_offload/simple_test.py"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"PYTHONPATH": "."},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("bitwise equal\n")


@pytest.mark.multiprocess
@pytest.mark.parametrize("backend", TORCH_DAILY)
def test_the_command_ends_with_the_statistics(backend, tmp_path, capsys):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    command = (
        f"train --backend {backend} --hidden-size 16 --num-layers 3 --num-attention-heads 2 --seq-length 8 "
        "--train-iters 2 --eval-iters 1 --global-batch-size 2 --enable-tensor-offload --save"
    )
    assert main([*command.split(), str(tmp_path / "run"), "--data-path", str(corpus)]) == 0
    (line,) = (line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "offload" in line)
    plan = plan_offload(step_uses(range(3)), layer_storages(TransformerConfig(**MODEL)), 1)
    assert line["offload"]["peak_bytes"] == plan.peak_bytes
    assert line["offload"]["peak_layers"] == 2
    assert line["step"] == 2
    text = capsys.readouterr().out
    assert f"{line['offload']['copies_in']:,}" in text
    steps = [row for row in text.splitlines() if row.startswith("step ")]
    assert len(steps) == 2
    for row in steps:
        assert re.search(r"tok/s  offload \d+\.\d MiB in, \d+\.\d out a step$", row)
    assert "at most 2 layers" in text


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_comparison_shows_what_both_backends_moved(ranks, tmp_path):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    command = (
        "compare --hidden-size 16 --num-layers 4 --num-attention-heads 2 --seq-length 8 --train-iters 2 --eval-iters 1 "
        "--no-enable-hyper-connections "  # whose smallest gradients are sums that nearly cancel
        f"--global-batch-size 2 --micro-batch-size 1 --pipeline-model-parallel-size {ranks} --enable-tensor-offload "
        f"--enable-activation-offload --activation-offload-min-bytes 1 --data-path {corpus} --output-dir {tmp_path}"
    )
    diptych = Path(sys.executable).parent / "diptych"
    done = subprocess.run([diptych, *command.split()], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["failures"] == []
    assert report["offload"].keys() == {"torch", "jax"}
    for backend, stats in report["offload"].items():
        assert f"in {backend}:" in done.stdout
        assert stats["peak_layers"] == 2
        assert stats["bytes_in"] > 0
    assert report["offload"]["torch"]["peak_bytes"] == report["offload"]["jax"]["peak_bytes"]
    assert "equal within tolerance" in done.stdout


def test_statistics_of_ranks_add_up():
    ranks = [
        {"bytes_in": 3, "hits": 1, "misses_by_layer": {"0": 1}, "peak_bytes": 5, "seconds_waited": 0.5},
        {"bytes_in": 4, "hits": 2, "misses_by_layer": {"0": 1, "2": 3}, "peak_bytes": 4, "seconds_waited": 0.7},
    ]
    assert total_statistics(ranks) == {
        "bytes_in": 7,
        "hits": 3,
        "misses_by_layer": {"0": 2, "2": 3},
        "peak_bytes": 5,
        "seconds_waited": 0.7,
    }
    assert total_statistics(ranks[:1]) == ranks[0]
