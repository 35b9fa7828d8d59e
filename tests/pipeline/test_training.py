"""Training through a pipeline is training: the same losses, norms, parameters and checkpoints, in both backends."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from diptych.plans.checkpoint import list_checkpoints, read_checkpoint, write_checkpoint
from diptych.plans.config import TrainConfig, TransformerConfig
from parity.cli.run import read_metrics
from parity.compare import relative_difference
from parity.ranks import RankTrainer
from reference_torch.rank_pool import RankError, RankPool
from reference_torch.train import Trainer
from tests.backends import tiny_corpus

ROOT = Path(__file__).parents[2]
CONFIG = TransformerConfig(
    hidden_size=16,
    num_layers=4,
    num_attention_heads=2,
    seq_length=12,
    enable_hyper_connections=True,
    num_residual_streams=2,
    hidden_dropout=0.1,
    layer_pattern="attention,attention+gelu+no-mlp-hc",
    params_dtype="float64",
    recompute_granularity="selective",
    recompute_modules=("mhc",),
    pipeline_timeout=30.0,
)
TRAIN = TrainConfig(
    train_iters=8, global_batch_size=4, micro_batch_size=1, lr=3e-3, min_lr=3e-4, lr_warmup_iters=2, eval_iters=2
)
STEPS = 3
WRONG_BATCH = "batch: expected global_batch_size=4 sequences, got 3; ask the corpus"
CUTS = {
    "1f1b": {"pipeline_model_parallel_size": 4},
    "interleaved": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "uneven": {
        "pipeline_model_parallel_size": 4,
        "pipeline_model_parallel_layout": "E|tt|t|tL",
        "pipeline_schedule": "zb-h1",
    },
}


def trajectory(trainer, corpus, number=5) -> tuple[dict[str, np.ndarray], ...]:
    """What a few steps report, gradients of the batch of a number before them, and parameters after them."""
    batch = corpus.batch(number, TRAIN.global_batch_size, CONFIG.seq_length)
    loss, gradients = trainer.loss_and_gradients(batch, number)
    results = [trainer.train_step(step) for step in range(STEPS)]
    reported = {
        "loss": np.array([loss, *(result.loss for result in results)]),
        "norm": np.array([result.grad_norm for result in results]),
        "validation": np.array(trainer.validation_loss()),
    }
    return reported, gradients, trainer.parameters()


def worst(found: tuple, expected: tuple) -> list[float]:
    """Largest relative difference of each part; infinite where names differ."""
    return [
        max(relative_difference(ours[name], theirs[name]) for name in theirs)
        if ours.keys() == theirs.keys()
        else float("inf")
        for ours, theirs in zip(found, expected, strict=True)
    ]


@pytest.fixture(scope="module")
def whole():
    corpus = tiny_corpus()
    return trajectory(Trainer(CONFIG, TRAIN, corpus, device="cpu"), corpus)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A folder with a checkpoint of two steps, of a run cut in two."""
    folder = tmp_path_factory.mktemp("runs")
    with RankTrainer(replace(CONFIG, pipeline_model_parallel_size=2), TRAIN, tiny_corpus()) as trainer:
        for step in range(2):
            trainer.train_step(step)
        path = trainer.save(folder / "torch")
    assert list_checkpoints(folder / "torch") == [path]
    return folder


@pytest.mark.multiprocess
@pytest.mark.parametrize("cut", CUTS)
def test_torch_trains_through_a_pipeline_as_without(cut, whole):
    corpus = tiny_corpus()
    with RankTrainer(replace(CONFIG, **CUTS[cut]), TRAIN, corpus) as trainer:
        reported, gradients, parameters = worst(trajectory(trainer, corpus), whole)
    assert reported <= 1e-12
    assert gradients <= 1e-12
    assert parameters <= 1e-10  # AdamW divides by the root of squares near 0


@pytest.mark.multiprocess
def test_torch_goes_on_in_other_stages(checkpoints, whole):
    with RankTrainer(replace(CONFIG, **CUTS["uneven"]), TRAIN, tiny_corpus()) as trainer:
        assert trainer.resume(checkpoints / "torch") == 2
        trainer.train_step(2)
        assert worst((trainer.parameters(),), (whole[-1],))[0] <= 1e-10
    alone = Trainer(CONFIG, TRAIN, tiny_corpus(), device="cpu")
    alone.resume(checkpoints / "torch")
    alone.train_step(2)
    assert worst((alone.parameters(),), (whole[-1],))[0] <= 1e-10


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_jax_trains_through_a_pipeline_as_without(checkpoints):
    """And goes on from checkpoints of other stages, also PyTorch's."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.pipeline.training_child", str(checkpoints), *CUTS, "replicas"],
        capture_output=True,
        text=True,
        timeout=580,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for cut, found in json.loads(done.stdout.splitlines()[-1]).items():
        reported, gradients, parameters = found["whole course"]
        assert reported <= 1e-12, cut
        assert gradients <= 1e-12, cut
        assert parameters <= 1e-10, cut
        assert found["from other stages"] <= 1e-10, cut
        assert found["to other stages"] <= 1e-10, cut


@pytest.mark.multiprocess
def test_what_only_one_rank_meets_is_raised_on_all(tmp_path):
    blocked = tmp_path / "file"
    blocked.touch()
    message = r"rank 0: CheckpointError: .*\n[\s\S]*rank 1: CheckpointError: checkpoint: expected to write"
    with (
        RankTrainer(replace(CONFIG, pipeline_model_parallel_size=2), TRAIN, tiny_corpus()) as trainer,
        pytest.raises(RankError, match=message),
    ):
        trainer.save(blocked)


@pytest.mark.multiprocess
def test_an_error_that_cannot_be_pickled_is_raised_on_all():
    with RankPool(2, timeout=20.0) as pool:
        raised = pool.run("tests.pipeline.fault_jobs:write_with_odd_error")
    assert raised == [("of the disk", "Odd"), ("of the disk", "NoneType")]


@pytest.mark.multiprocess
def test_ranks_go_on_from_one_checkpoint_alone(checkpoints, tmp_path):
    ours, other = checkpoints / "torch", tmp_path / "other"
    found = read_checkpoint(ours)
    write_checkpoint(other, found._replace(arrays={name: array + 1.0 for name, array in found.arrays.items()}))
    same = tmp_path / "same"
    shutil.copytree(ours, same)
    expected = r"CheckpointError: checkpoint: expected the same one of .* on every process, got on rank 0: step 2, .*"
    settings = replace(CONFIG, pipeline_model_parallel_size=2), TRAIN, tiny_corpus()
    with RankPool(2) as pool:
        assert pool.run("tests.pipeline.fault_jobs:resume_each", *settings, (ours, same)) == [2, 2]
        for path, theirs in ((other, "step 2, checksum"), (tmp_path / "none", "checkpoint: expected a file or folder")):
            message = "".join(
                rf"rank {rank}: {expected}; on rank 1: {theirs}.*; give a folder[\s\S]*" for rank in (0, 1)
            )
            with pytest.raises(RankError, match=message):
                pool.run("tests.pipeline.fault_jobs:resume_each", *settings, (ours, path))
        with pytest.raises(RankError, match=r"rank 1: CheckpointError: checkpoint: expected a file or folder, got"):
            pool.run("tests.pipeline.fault_jobs:resume_each", *settings, (tmp_path / "none",) * 2)


@pytest.mark.multiprocess
def test_a_batch_that_is_not_a_steps_is_refused():
    with (
        RankTrainer(replace(CONFIG, pipeline_model_parallel_size=2), TRAIN, tiny_corpus()) as trainer,
        pytest.raises(RankError, match=WRONG_BATCH),
    ):
        trainer.loss_and_gradients(tiny_corpus().batch(0, 3, CONFIG.seq_length))


def test_a_mesh_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"mesh: expected 2 processes on axis pp, .* got 1; make it by"):
        Trainer(replace(CONFIG, pipeline_model_parallel_size=2), TRAIN, tiny_corpus(), device="cpu")


COMMAND = (
    "--hidden-size 16 --num-layers 2 --num-attention-heads 2 --seq-length 8 --eval-iters 1 --global-batch-size 2 "
    "--micro-batch-size 1 --pipeline-model-parallel-size 2 --pipeline-timeout 60 --data-path"
)


@pytest.fixture
def corpus_file(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    return path


def start(launcher: list[str], *arguments: object) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", *launcher, *COMMAND.split(), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def ranks_of(process: subprocess.Popen) -> list[int]:
    """Process ids of what a process has started."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(number) for number in children.read_text().split()]


def after_steps(process: subprocess.Popen, run: Path, count: int, seconds: float = 60.0) -> list[int]:
    """Wait until a run has taken some steps; its ranks' process ids."""
    end = time.monotonic() + seconds
    while len(read_metrics(run / "metrics.jsonl")) < count:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end, f"no {count} steps in {seconds:g} s"
        time.sleep(0.05)
    return ranks_of(process)


def assert_gone(ranks: list[int]) -> None:
    assert ranks
    end = time.monotonic() + 5
    while any(Path(f"/proc/{rank}").exists() for rank in ranks):
        assert time.monotonic() < end, "a rank outlived its run"
        time.sleep(0.05)


@pytest.mark.multiprocess
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_signal_saves_once_and_ends_every_rank(corpus_file, tmp_path):
    run = tmp_path / "run"
    process = start(["parity.cli", "train"], corpus_file, "--nproc", 2, "--train-iters", 100000, "--save", run)
    ranks = after_steps(process, run, 3)
    process.send_signal(signal.SIGTERM)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert out.count("stopped by") == 1
    assert read_checkpoint(run).step == len(read_metrics(run / "metrics.jsonl"))
    assert_gone(ranks)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("victim", ["rank", "parent"])
def test_a_killed_process_ends_the_run(victim, corpus_file, tmp_path):
    run = tmp_path / "run"
    process = start(["parity.cli", "train"], corpus_file, "--nproc", 2, "--train-iters", 100000, "--save", run)
    ranks = after_steps(process, run, 3)
    os.kill(ranks[1] if victim == "rank" else process.pid, signal.SIGKILL)
    errors = process.communicate(timeout=60)[1]
    assert_gone(ranks)
    if victim == "rank":
        assert process.returncode == 1
        assert "rank 1 was ended by SIGKILL" in errors
        # Whatever rank 0 was waiting for: a message, or a sum.
        assert re.search(r"rank 0(, step \d+)?: (expected|RECV|SEND)", errors), errors


@pytest.mark.slow
@pytest.mark.multiprocess
def test_torchrun_and_the_command_train_alike(corpus_file, tmp_path):
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "parity.cli", "train"]
    outputs = []
    for launcher, more in (
        (torchrun, ()),
        (["parity.cli", "train"], ("--nproc", 2)),
        (["parity.cli", "train", "--backend", "jax"], ()),
    ):
        process = start(launcher, corpus_file, *more, "--train-iters", 4)
        out, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        outputs.append(out.splitlines()[-1])
    assert outputs[0].startswith("validation loss")
    assert outputs == outputs[:1] * 3


@pytest.mark.slow
@pytest.mark.multiprocess
def test_one_process_of_torchrun_starts_those_it_needs(corpus_file):
    """They keep a store of their own: looked for at torchrun's, nobody is found, for half an hour."""
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m", "parity.cli", "train"]
    process = start(torchrun, corpus_file, "--train-iters", 2)
    try:
        out, errors = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.communicate(timeout=60)
        raise
    assert process.returncode == 0, errors
    assert out.splitlines()[-1].startswith("validation loss")
