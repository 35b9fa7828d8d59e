"""Training over ranks that share sequences is training: the same losses, norms, gradients, parameters, checkpoints."""

import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from diptych.plans.config import TrainConfig, TransformerConfig
from diptych.plans.context.sequences import concatenate_sequences
from diptych.plans.model.data import Corpus
from diptych.plans.training import check_trainable
from jax_impl import ops
from parity.ranks import RankTrainer
from reference_torch.rank_pool import RankPool
from reference_torch.train import Trainer
from tests.backends import rounds, tiny_corpus
from tests.pipeline.test_training import trajectory, worst
from tests.test_documents import corpus_of_documents

ROOT = Path(__file__).parents[2]
CONFIG = TransformerConfig(
    hidden_size=8,
    num_layers=3,
    num_attention_heads=2,
    seq_length=12,
    hidden_dropout=0.1,
    layer_pattern="kda,gdn,attention",
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    params_dtype="float64",
    init_method_std=0.2,
    pipeline_timeout=30.0,
)
TRAIN = TrainConfig(
    train_iters=8, global_batch_size=4, micro_batch_size=2, lr=3e-3, min_lr=3e-4, lr_warmup_iters=2, eval_iters=2
)
HYPER = {
    "enable_hyper_connections": True,
    "num_residual_streams": 2,
    "recompute_granularity": "selective",
    "recompute_modules": ("mhc", "core_attn"),
}
OFFLOAD = {"enable_tensor_offload": True, "enable_activation_offload": True, "activation_offload_min_bytes": 1}
STAGES = {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et|ttL"}
CUTS = {  # three ranks share a microbatch of two sequences: every border but one lies inside a sequence
    "ranks": {"context_parallel_size": 4},
    "a scan over three": {"context_parallel_size": 3, "cp_exchange": "scan"},
    "stages": {"context_parallel_size": 3, "cp_exchange": "ring", **STAGES},
    "stages, zero bubble": {
        "context_parallel_size": 3,
        "cp_exchange": "scan",
        **STAGES,
        "pipeline_schedule": "zb-h1",
    },
    "offload": {"context_parallel_size": 3, **OFFLOAD},
    "stages, recomputed, offload": {"context_parallel_size": 3, **STAGES, **HYPER, **OFFLOAD},
    "zigzag": {"context_parallel_size": 4, "cp_attention_layout": "zigzag"},
    "stages, recomputed, zigzag": {"context_parallel_size": 3, "cp_attention_layout": "zigzag", **STAGES, **HYPER},
    "pipelined": {"context_parallel_size": 4, "cp_exchange": "pipelined"},
    "pipelined, recomputed": {"context_parallel_size": 3, "cp_exchange": "pipelined", **HYPER},
    "tokens counted": {"context_parallel_size": 3, "calculate_per_token_loss": True},
}
APPROXIMATE = {
    "the nearest": {"context_parallel_size": 6, "cp_exchange": "ring", "cp_truncate_ranks": 1},
    "rank 1": {"context_parallel_size": 6, "cp_transition_rank": 1},
}
"""Not what one process computes, and the same in both backends; a sequence is divided among three ranks."""
TORCH_ALONE = ("tokens counted",)
CORPORA = {"documents": corpus_of_documents, "text": tiny_corpus}
DAILY = (
    ("stages, zero bubble", "documents"),
    ("a scan over three", "text"),
    ("stages, recomputed, offload", "documents"),
    ("stages, recomputed, zigzag", "documents"),
    ("pipelined, recomputed", "documents"),
)
"""What make test takes, of PyTorch; JAX compiles long."""


def config_of(cut: str) -> TransformerConfig:
    return replace(CONFIG, **(CUTS | APPROXIMATE)[cut])


def unsharded_outcome(cut: str, corpus: Corpus) -> tuple:
    """Of PyTorch in one process."""
    alone = replace(CONFIG, **HYPER) if "recomputed" in cut else CONFIG
    return trajectory(Trainer(alone, TRAIN, corpus, device="cpu"), corpus)


def assert_same(found: tuple, expected: tuple) -> None:
    reported, gradients, parameters = worst(found, expected)
    assert reported <= 1e-12
    assert gradients <= 1e-11
    assert parameters <= 1e-9  # AdamW divides by the root of squares near 0


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("cut", "name"),
    [
        pytest.param(cut, name, marks=() if (cut, name) in DAILY else pytest.mark.slow)
        for cut in CUTS
        for name in CORPORA
    ],
)
def test_c11_c12_torch_trains_as_one_process(cut, name):
    corpus = CORPORA[name]()
    with RankTrainer(config_of(cut), TRAIN, corpus) as trainer:
        assert_same(trajectory(trainer, corpus), unsharded_outcome(cut, corpus))


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("cut", [cut for cut in CUTS if cut not in TORCH_ALONE])
def test_c11_c12_jax_trains_as_pytorch_in_one_process(cut, tmp_path):
    names = CORPORA if cut == "ranks" else ["documents"]
    with rounds(3):  # ten take JAX half its compiling
        for name, found in in_jax(cut, tmp_path, *names).items():
            assert_same(found, unsharded_outcome(cut, CORPORA[name]()))


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("cut", ["replicas", "replicas of stages"])
def test_c11_c12_jax_trains_with_replicas(cut, tmp_path):
    with rounds(3):
        found = in_jax(cut, tmp_path, "documents")["documents"]
        assert_same(found, unsharded_outcome(cut, corpus_of_documents()))


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("cut", APPROXIMATE)
def test_c8_both_train_alike_with_states_that_are_not_passed_on_whole(cut, tmp_path):
    corpus = tiny_corpus()
    with RankTrainer(config_of(cut), TRAIN, corpus) as trainer:
        found = trajectory(trainer, corpus)
    assert_same(in_jax(cut, tmp_path, "text")["text"], found)
    assert worst(found, unsharded_outcome(cut, corpus))[0] > 1e-9  # something was left out


def in_jax(cut: str, folder: Path, *names: str) -> dict[str, tuple]:
    """What came out, by corpus, of training in a process that has the devices; see tests/context/training_child.py.

    With as many rounds of random numbers as JAX has here.
    """
    child = [sys.executable, "-m", "tests.context.training_child", cut, str(folder), str(ops.ROUNDS), *names]
    done = subprocess.run(child, capture_output=True, text=True, timeout=280, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: pickle.loads((folder / name).read_bytes()) for name in names}


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "changes",
    [pytest.param({}, marks=pytest.mark.slow), STAGES, {"cp_exchange": "pipelined"}],
    ids=["ranks", "stages", "pipelined"],
)
def test_c11_replicas_of_ranks_train_as_one_process(changes):
    """Gradients are summed over parts of sequences and over sequences."""
    corpus, config = corpus_of_documents(), replace(CONFIG, context_parallel_size=2, **changes)
    with RankPool(2 * config.model_parallel_size) as pool:
        pool.hold("parity.ranks:make_trainer", config, TRAIN, corpus)
        batch = corpus.batch(5, TRAIN.global_batch_size, CONFIG.seq_length)
        parts = pool.call("loss_and_gradients", batch, 5)
    expected = Trainer(CONFIG, TRAIN, corpus, device="cpu").loss_and_gradients(batch, 5)
    for loss, gradients in parts:
        assert loss == pytest.approx(expected[0], rel=1e-12)
        assert worst((gradients,), (expected[1],))[0] <= 1e-11


@pytest.mark.multiprocess
def test_a_checkpoint_is_of_any_number_of_ranks(tmp_path):
    corpus = tiny_corpus()
    alone = Trainer(CONFIG, TRAIN, corpus, device="cpu")
    with RankTrainer(config_of("ranks"), TRAIN, corpus) as trainer:
        for each in (alone, trainer):
            each.train_step(0)
        trainer.save(tmp_path / "run")
    again = Trainer(CONFIG, TRAIN, corpus, device="cpu")
    assert again.resume(tmp_path / "run") == 1
    for each in (again, alone):
        each.train_step(1)
    assert worst((again.parameters(),), (alone.parameters(),))[0] <= 1e-9


def test_sequences_lie_end_to_end():
    tokens = np.arange(24).reshape(2, 2, 6)
    starts = np.array([[[0, 4], [0, 6]], [[0, 1], [0, 2]]], np.int32)
    laid = concatenate_sequences(tokens, -tokens, np.array([[3, 4], [5, 6]]), starts)
    np.testing.assert_array_equal(laid.tokens, [[np.arange(12)], [np.arange(12, 24)]])
    np.testing.assert_array_equal(laid.targets, -laid.tokens)
    np.testing.assert_array_equal(laid.samples, [[[3] * 6 + [4] * 6], [[5] * 6 + [6] * 6]])
    np.testing.assert_array_equal(laid.positions, [*range(6), *range(6)])
    np.testing.assert_array_equal(laid.cu_seqlens, [[0, 4, 6, 12, 12], [0, 1, 6, 8, 12]])
    whole = concatenate_sequences(tokens[0], tokens[0], np.arange(2))
    np.testing.assert_array_equal(whole.cu_seqlens, [0, 6, 12])


def test_c9_a_microbatch_that_ranks_cannot_share_is_refused():
    message = r"context_parallel_size: expected a divisor of a microbatch's 2 x 12 tokens, got 5; change"
    with pytest.raises(ValueError, match=message):
        check_trainable(replace(CONFIG, context_parallel_size=5), TRAIN)
    with pytest.raises(ValueError, match=r"mesh: expected 4 processes on axis cp, as many as context_parallel_size"):
        Trainer(config_of("ranks"), TRAIN, tiny_corpus(), device="cpu")
