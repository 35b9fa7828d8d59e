"""What tests of JAX's offload share: small configurations, their trainers, and how they are compiled."""

from dataclasses import replace

import jax
import numpy as np

from diptych.plans.config import TrainConfig, TransformerConfig
from jax_impl.offload import layer_numbers
from jax_impl.train import Trainer
from parity.compare import relative_difference
from tests.backends import tiny_corpus

PLAIN = TransformerConfig(
    hidden_size=8,
    num_layers=4,
    num_attention_heads=2,
    ffn_hidden_size=8,
    vocab_size=128,
    seq_length=8,
    init_method_std=0.3,
    params_dtype="float64",
)
DROPPED = replace(PLAIN, num_layers=3, hidden_dropout=0.2)
STREAMS = {"enable_hyper_connections": True, "num_residual_streams": 2, "sinkhorn_iterations": 3}
MIXED = {"layer_pattern": "attention,attention+gelu+no-mlp-hc,attention+no-attention-hc", "add_bias_linear": True}
TRAIN = TrainConfig(train_iters=10, global_batch_size=2, lr=3e-3, min_lr=3e-4, lr_warmup_iters=3, eval_iters=1)
MODULES = ("mhc", "layernorm", "core_attn", "activation", "mlp")
FULL = {"recompute_granularity": "full", "recompute_method": "uniform"}
SELECTIVE = {"recompute_granularity": "selective"}
MODES = {
    "none": {},
    "mhc, blocks of 2": {**SELECTIVE, "recompute_modules": ("mhc",), "mhc_recompute_layer_num": 2},
    "layernorm": {**SELECTIVE, "recompute_modules": ("layernorm",)},
    "all modules": {**SELECTIVE, "recompute_modules": MODULES, "mhc_recompute_layer_num": 3},
    "full, blocks of 2": {**FULL, "recompute_num_layers": 2},
    "full, one by one": {
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": 2,
        "recompute_activation_function": True,
    },
}


def offloaded(config: TransformerConfig, ahead: int = 1) -> TransformerConfig:
    return replace(config, enable_tensor_offload=True, tensor_offload_num_prefetch_layers=ahead)


def trainer_of(config: TransformerConfig, **train) -> Trainer:
    return Trainer(config, replace(TRAIN, **train), tiny_corpus())


def step_arguments(trainer: Trainer) -> tuple:
    batch = trainer.corpus.batch(0, trainer.train_config.global_batch_size, trainer.config.seq_length)
    return trainer._params, trainer._optimizer_state, batch, np.uint32(0), np.float64(1e-3)


def kinds(params) -> dict[bool, set[str]]:
    """Memory kinds of parameters, by whether they are a layer's."""
    found = {True: set(), False: set()}
    for number, leaf in zip(layer_numbers(params), jax.tree.leaves(params), strict=True):
        found[number is not None].add(leaf.sharding.memory_kind)
    return found


MOVED = {"enable_activation_offload": True, "activation_offload_min_bytes": 1}


def assert_same_gradients(moved: Trainer, plain: Trainer) -> None:
    batch = plain.corpus.batch(0, 2, plain.config.seq_length)
    (expected_loss, expected), (loss, found) = (t.loss_and_gradients(batch, 3) for t in (plain, moved))
    assert abs(loss - expected_loss) <= 1e-13
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert relative_difference(found[name], gradient) <= 1e-13, name
