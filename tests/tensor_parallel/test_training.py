"""Training over tensor-parallel ranks is training: the same losses, norms, gradients, parameters, checkpoints."""

import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from diptych.plans.config import TrainConfig, TransformerConfig
from diptych.plans.mesh import unsharded
from diptych.plans.model.parameters import initial_value, parameter_specs
from diptych.plans.training import check_trainable
from parity.ranks import RankTrainer
from reference_torch.rank_pool import RankPool
from reference_torch.train import Trainer
from reference_torch.transformer import GPTModel
from tests.backends import rounds, tiny_corpus
from tests.pipeline.test_training import trajectory, worst
from tests.recompute.test_recompute import MODES
from tests.tensor_parallel.jobs import logit_inputs
from tests.test_documents import corpus_of_documents

ROOT = Path(__file__).parents[2]
CONFIG = TransformerConfig(
    hidden_size=16,
    num_layers=3,
    num_attention_heads=4,
    num_query_groups=2,
    seq_length=12,
    vocab_size=128,
    hidden_dropout=0.1,
    layer_pattern="attention,gdn+gelu+ffn=12,kda",
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    add_bias_linear=True,
    params_dtype="float64",
    init_method_std=0.2,
    pipeline_timeout=60.0,
    tensor_model_parallel_size=2,
)
"""Of the ids of ASCII, every rank has some that occur in the text."""
TRAIN = TrainConfig(
    train_iters=8, global_batch_size=4, micro_batch_size=2, lr=3e-3, min_lr=3e-4, lr_warmup_iters=2, eval_iters=2
)
TOKENS = {"sequence_parallel": True}
FOUR = {"tensor_model_parallel_size": 4}
"""More ranks than heads of keys and values in each mixer."""
STAGES = {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et|ttL"}
HYPER = {"enable_hyper_connections": True, "num_residual_streams": 2}
SELECTIVE = {
    "recompute_granularity": "selective",
    "recompute_modules": ("mhc", "core_attn", "mlp", "layernorm", "activation"),
}
EXPERTS = {
    "layer_pattern": "attention+moe,gdn+moe,kda+moe+post-norm",
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 8,
    "moe_shared_expert_intermediate_size": 12,
    "moe_shared_expert_gate": True,
    "moe_aux_loss_coeff": 0.1,
}
LATENT = {
    "layer_pattern": "mla,gdn",
    "kv_lora_rank": 6,
    "qk_head_dim": 4,
    "qk_pos_emb_head_dim": 2,
    "v_head_dim": 4,
    "rotary_percent": 0.0,
}
NORMS = {"qk_layernorm": True, "qk_layernorm_scope": "projection", "attention_output_gate": True}
OFFLOAD = {"enable_tensor_offload": True, "enable_activation_offload": True, "activation_offload_min_bytes": 1}
PLAIN = {
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_modules": (),
    "enable_tensor_offload": False,
    "enable_activation_offload": False,
}
SIXTEEN = {**FOUR, **TOKENS, **STAGES, "context_parallel_size": 2}
CUTS = {
    "two": {},
    "two, tokens": TOKENS,
    "four": FOUR,
    "four, tokens": {**FOUR, **TOKENS},
    "joint norms": {**FOUR, **NORMS},
    "joint norms, tokens": {**FOUR, **TOKENS, **NORMS, "layernorm_zero_centered_gamma": True},
    "norms of heads": {**TOKENS, "qk_layernorm": True},
    "hyper-connections": HYPER,
    "hyper-connections, tokens": {**TOKENS, **HYPER, "mhc_head": "learned"},
    "experts": EXPERTS,
    "experts, tokens": {**TOKENS, **EXPERTS, **HYPER},
    "latent attention": {**TOKENS, **LATENT},
    "stages": {**STAGES, "untie_embeddings_and_output_weights": True},
    "V-shaped stages": {
        **{**TOKENS, "pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2, "num_layers": 4},
        "pipeline_schedule": "zb-v",
    },
    "stages of experts, zero bubble": {**TOKENS, **STAGES, **EXPERTS, **HYPER, "pipeline_schedule": "zb-h1"},
    "context": {"context_parallel_size": 2, "cp_attention_layout": "zigzag"},
    "context, tokens": {**TOKENS, **HYPER, "context_parallel_size": 2},
    "context, pipelined": {**TOKENS, "context_parallel_size": 2, "cp_exchange": "pipelined"},
    "full recompute": {**TOKENS, "recompute_granularity": "full", "recompute_method": "uniform"},
    "selective recompute": {**TOKENS, **HYPER, **SELECTIVE},
    "offload": {**TOKENS, **OFFLOAD},
    "all of it": {**TOKENS, **STAGES, **HYPER, **SELECTIVE, **OFFLOAD, "context_parallel_size": 2},
    "tokens counted": {**TOKENS, "calculate_per_token_loss": True},
    "sixteen ranks, modules": {**SIXTEEN, **HYPER, **SELECTIVE},
    "sixteen ranks, layers": {**SIXTEEN, "recompute_granularity": "full", "recompute_method": "block"},
}
# Batch 5 magnifies rounding in this one: JAX in one process differs from PyTorch by 4e-12 too, and in batch 0 by 1e-13.
BATCHES = {"experts, tokens": 0}
REPLICAS = "replicas of stages"
"""A cut of JAX alone, on a mesh with two replicas."""
TORCH_ALONE = ("tokens counted",)
DAILY = ("joint norms", "experts, tokens", "V-shaped stages")


def assert_same(found: tuple, expected: tuple) -> None:
    """Loss and gradients of one batch to 1e-12; AdamW magnifies rounding in the steps that follow."""
    reported, gradients, parameters = worst(found, expected)
    assert found[0]["loss"][0] == pytest.approx(expected[0]["loss"][0], rel=1e-12)
    assert gradients <= 1e-12
    assert reported <= 1e-11
    assert parameters <= 1e-9


@pytest.mark.multiprocess
@pytest.mark.parametrize("cut", [pytest.param(cut, marks=() if cut in DAILY else pytest.mark.slow) for cut in CUTS])
def test_s1_torch_trains_as_one_process(cut):
    corpus = corpus_of_documents() if "tokens" in cut else tiny_corpus()
    config = replace(CONFIG, **CUTS[cut])
    alone = unsharded(replace(config, **PLAIN))
    with RankTrainer(config, TRAIN, corpus) as trainer:
        assert_same(trajectory(trainer, corpus), trajectory(Trainer(alone, TRAIN, corpus, device="cpu"), corpus))


MESHES = {
    "tp 2, pp 2": {**TOKENS, **STAGES},
    "tp 2, cp 2": {**TOKENS, "context_parallel_size": 2},
    "tp 4, pp 2": {**FOUR, **STAGES},
    "tp 4, cp 2": {**FOUR, **TOKENS, "context_parallel_size": 2},
    "tp 4, pp 2, cp 2": SIXTEEN,
}


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mesh", MESHES)
def test_s1_every_recompute_mode_has_the_gradients_of_one_process(mesh):
    deep = {"num_layers": 6, "layer_pattern": "attention,gdn+gelu+ffn=12,kda", "init_method_std": 0.1, **HYPER}
    layout = {"pipeline_model_parallel_layout": "Ettt|tttL"} if "pp" in mesh else {}
    shape = MESHES[mesh] | deep | layout | {"pipeline_timeout": 300.0}
    configs = [replace(CONFIG, **shape, **mode) for mode in MODES.values()]
    with RankPool(configs[0].model_parallel_size, 800.0) as pool:
        found = pool.run("tests.tensor_parallel.jobs:losses_and_gradients", configs, TRAIN, 5)[0]
    alone = unsharded(replace(CONFIG, **deep))
    batch = tiny_corpus().batch(5, TRAIN.global_batch_size, CONFIG.seq_length)
    loss, gradients = Trainer(alone, TRAIN, tiny_corpus(), device="cpu").loss_and_gradients(batch, 5)
    for mode, (ours, of_ranks) in zip(MODES, found, strict=True):
        assert ours == pytest.approx(loss, rel=1e-12), mode
        assert worst((of_ranks,), (gradients,))[0] <= 1e-12, mode


@pytest.mark.multiprocess
def test_s1_backward_repeats_exchanges_only_with_full_recompute():
    """Of 3 layers with two regions each: before and after a region, forward and backward, and the replay of forward."""
    full = {"recompute_granularity": "full", "recompute_method": "uniform"}
    train = replace(TRAIN, micro_batch_size=TRAIN.global_batch_size)
    found = {}
    with RankPool(2) as pool:
        for tokens in (False, True):
            for name, recompute in (("none", {}), ("selective", SELECTIVE), ("full", full)):
                config = replace(CONFIG, sequence_parallel=tokens, **HYPER, **recompute)
                counts = pool.run("tests.tensor_parallel.jobs:collectives", config, train)
                assert counts[0] == counts[1]
                found[tokens, name] = counts[0]
    regions = 2 * CONFIG.num_layers
    ends = 1  # after the embedding, and before the head
    others = 3 + 1  # of the cross entropy, and the gradients that are sums over ranks
    for name in ("none", "selective"):
        assert found[False, name] == {"all_reduce": 2 * (regions + ends) + others}
        both = 2 * (regions + ends)
        assert found[True, name] == {"all_gather": both, "reduce_scatter": both, "all_reduce": others}
    assert found[False, "full"] == {"all_reduce": 2 * (regions + ends) + others + regions}
    both = 2 * (regions + ends) + regions
    assert found[True, "full"] == {"all_gather": both, "reduce_scatter": both, "all_reduce": others}


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("changes", [{}, TOKENS, {**TOKENS, **STAGES}], ids=["ranks", "tokens", "stages"])
def test_s1_replicas_of_ranks_train_as_one_process(changes):
    corpus = tiny_corpus()
    config = replace(CONFIG, **changes)
    batch = corpus.batch(5, TRAIN.global_batch_size, CONFIG.seq_length)
    with RankPool(2 * config.model_parallel_size) as pool:
        pool.hold("parity.ranks:make_trainer", config, TRAIN, corpus)
        parts = pool.call("loss_and_gradients", batch, 5)
    expected = Trainer(unsharded(config), TRAIN, corpus, device="cpu").loss_and_gradients(batch, 5)
    for loss, gradients in parts:
        assert loss == pytest.approx(expected[0], rel=1e-12)
        assert worst((gradients,), (expected[1],))[0] <= 1e-11


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("cut", [*(cut for cut in CUTS if cut not in TORCH_ALONE), REPLICAS])
def test_s1_jax_trains_as_pytorch_in_one_process(cut, tmp_path):
    count = 3  # rounds of random numbers; ten take JAX half its compiling
    child = [sys.executable, "-m", "tests.tensor_parallel.training_child", str(tmp_path), str(count), cut]
    done = subprocess.run(child, capture_output=True, text=True, timeout=580, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    corpus = corpus_of_documents() if "tokens" in cut else tiny_corpus()
    alone = unsharded(replace(CONFIG, **{**CUTS.get(cut, {}), **PLAIN}))
    with rounds(count):
        expected = trajectory(Trainer(alone, TRAIN, corpus, device="cpu"), corpus, BATCHES.get(cut, 5))
    assert_same(pickle.loads((tmp_path / cut).read_bytes()), expected)


@pytest.mark.multiprocess
def test_s1_a_checkpoint_is_of_any_number_of_ranks(tmp_path):
    """Heads that several ranks hold, and their moments, are stored once, and each rank reads its own part."""
    corpus = tiny_corpus()
    four = replace(CONFIG, **FOUR)
    two = replace(CONFIG, **TOKENS)
    alone = Trainer(unsharded(CONFIG), TRAIN, corpus, device="cpu")
    with RankTrainer(four, TRAIN, corpus) as trainer:
        trainer.train_step(0)
        trainer.save(tmp_path / "four")
    with RankTrainer(two, TRAIN, corpus) as trainer:
        assert trainer.resume(tmp_path / "four") == 1
        trainer.train_step(1)
        trainer.save(tmp_path / "two")
    assert alone.resume(tmp_path / "two") == 2
    found = alone.parameters()
    again = Trainer(unsharded(CONFIG), TRAIN, corpus, device="cpu")
    for step in range(2):
        again.train_step(step)
    assert worst((found,), (again.parameters(),))[0] <= 1e-9
    for trainer in (alone, again):
        trainer.train_step(2)  # the moments, too
    assert worst((alone.parameters(),), (again.parameters(),))[0] <= 1e-9


@pytest.mark.multiprocess
def test_a_loss_of_whole_logits_has_the_gradients_of_one_process():
    """Every rank computes the loss, which counts once."""
    with RankPool(2) as pool:
        for tokens in (False, True):
            found = pool.run("tests.tensor_parallel.jobs:gradients_of_logits", tokens)
            check_gradients_of_logits([part for part, _ in found], np.concatenate([part for _, part in found]), tokens)


@pytest.mark.slow
def test_a_loss_of_whole_logits_has_the_gradients_of_one_process_in_jax(tmp_path):
    child = [sys.executable, "-m", "tests.tensor_parallel.logits_child", str(tmp_path / "found")]
    done = subprocess.run(child, capture_output=True, text=True, timeout=300, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for tokens, (of_hidden, of_weight) in enumerate(pickle.loads((tmp_path / "found").read_bytes())):
        check_gradients_of_logits([*of_hidden], of_weight, bool(tokens))


def check_gradients_of_logits(of_hidden: list[np.ndarray], of_weight: np.ndarray, tokens: bool) -> None:
    """Gradients of the hidden states of each rank, and of the whole weight."""
    hidden, weight, weights = logit_inputs()
    for each in [np.concatenate(of_hidden, axis=1)] if tokens else of_hidden:
        np.testing.assert_allclose(each, weights @ weight, rtol=1e-12)
    np.testing.assert_allclose(of_weight, np.einsum("btv,btd->vd", weights, hidden), rtol=1e-12)


@pytest.mark.multiprocess
def test_the_copies_of_a_tied_embedding_begin_equal():
    """Also where one rank has the first stage and the last."""
    config = replace(CONFIG, **CUTS["V-shaped stages"])
    with RankPool(config.model_parallel_size) as pool:
        found = pool.run("tests.tensor_parallel.jobs:embeddings", config, TRAIN)
    whole = initial_value(config.seed, "embedding.weight", parameter_specs(unsharded(config))["embedding.weight"])
    for rank, copies in enumerate(found):
        part = np.split(whole, 2)[rank % 2]
        assert [np.array_equal(each, part) for each in copies] == [True] * (2 if rank < 2 else 0)


def test_a_model_of_all_ranks_is_refused():
    with pytest.raises(ValueError, match=r"config: expected the part of one of 2 .*rank_config\(config\)"):
        GPTModel(CONFIG)


def test_a_microbatch_whose_tokens_the_ranks_do_not_divide_is_refused():
    config = replace(CONFIG, context_parallel_size=4, **TOKENS)
    train = replace(TRAIN, micro_batch_size=1)
    with pytest.raises(
        ValueError, match=r"micro_batch_size: .* a multiple of tensor_model_parallel_size=2 tokens on each"
    ):
        check_trainable(config, train)
