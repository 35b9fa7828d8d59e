"""Which weights may be rounded before a step: those that every layer reads rounded."""

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from diptych.plans.config import TrainConfig, TransformerConfig
from diptych.plans.model.parameters import parameter_specs
from diptych.plans.optimizer_shards import has_master_weights, stored_dtype
from diptych.plans.tensor_files import from_bfloat16, to_bfloat16
from jax_impl.train import Trainer as JaxTrainer
from reference_torch.distributed_optimizer import DistributedAdamW
from reference_torch.train import Trainer
from tests.backends import tiny_corpus

MODEL = TransformerConfig(
    hidden_size=32,
    num_layers=3,
    num_attention_heads=2,
    vocab_size=128,
    seq_length=16,
    bf16=True,
    num_residual_streams=2,
    enable_hyper_connections=True,
    linear_num_value_heads=2,
    add_bias_linear=True,
)
TRAIN = TrainConfig(global_batch_size=2)
PATTERNS = {
    "softmax and linear attention": {"layer_pattern": "gdn,kda,attention", "qk_layernorm": True},
    "latent attention and experts": {
        "layer_pattern": "mla,attention+moe,attention+gelu",
        "attention_output_gate": True,
        "rotary_percent": 0.0,
        **{"kv_lora_rank": 8, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 8},
        **{"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 16},
        **{"moe_shared_expert_intermediate_size": 16, "moe_shared_expert_gate": True},
    },
}


FP8 = [None, "current", "delayed", "blockwise"]


@pytest.mark.parametrize("backend", [Trainer, JaxTrainer], ids=["torch", "jax"])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("recipe", FP8)
def test_rounding_stored_weights_changes_nothing(recipe, pattern, backend):
    fp8 = {} if recipe is None else {"fp8": "hybrid", "fp8_recipe": recipe}
    config = replace(MODEL, **PATTERNS[pattern], **fp8)
    sharded = replace(config, use_distributed_optimizer=True)
    trainer = backend(config, TRAIN, tiny_corpus())
    batch = tiny_corpus().batch(0, 2, config.seq_length)
    exact = trainer.parameters()
    is_rounded = {name: stored_dtype(sharded, name, value.shape) == "bfloat16" for name, value in exact.items()}
    rounded = {name: from_bfloat16(to_bfloat16(value)) if is_rounded[name] else value for name, value in exact.items()}
    assert sum(not np.array_equal(rounded[name], value) for name, value in exact.items()) == sum(is_rounded.values())
    expected, gradients = trainer.loss_and_gradients(batch)
    trainer.set_parameters(rounded)
    loss, found = trainer.loss_and_gradients(batch)
    assert loss == expected
    assert [name for name, value in gradients.items() if not np.array_equal(found[name], value)] == []


def test_most_weights_are_stored_rounded():
    """All matrices of layers but routers; the coefficients of hyper-connections are float32."""
    for pattern in PATTERNS.values():
        config = replace(MODEL, use_distributed_optimizer=True, **pattern)
        specs = parameter_specs(config)
        rounded = {name for name, spec in specs.items() if stored_dtype(config, name, spec.shape) == "bfloat16"}
        others = {name for name in specs if "layers" in name and "weight" in name} - rounded
        assert rounded
        assert all(len(specs[name].shape) == 1 or "router" in name for name in others)
        assert not any("phi" in name or "embedding" in name or "norm" in name for name in rounded)


@pytest.mark.parametrize("change", [{"bf16": False}, {"use_distributed_optimizer": False}])
def test_other_models_store_whole_weights(change):
    config = replace(MODEL, **{"use_distributed_optimizer": True, **change})
    assert not has_master_weights(config)
    assert {stored_dtype(config, name, spec.shape) for name, spec in parameter_specs(config).items()} == {"float32"}


SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def train_rounded(weight: torch.nn.Parameter, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Train a linear layer in bfloat16 on two microbatches per step, whose gradients are summed in float32."""
    for step in steps:
        optimizer.zero_grad()
        for microbatch in range(2):
            x = torch.randn(5, 24, generator=torch.Generator().manual_seed(2 * step + microbatch)).bfloat16()
            F.linear(x, weight.bfloat16()).float().square().mean().backward()
        optimizer.step()


def test_a_users_layer_trains_as_with_float32_weights():
    initial = torch.randn(8, 24, generator=torch.Generator().manual_seed(9))
    plain = torch.nn.Parameter(initial.clone())
    train_rounded(plain, torch.optim.AdamW([plain], **SETTINGS, fused=True), range(6))
    weight = torch.nn.Parameter(initial.clone())
    optimizer = DistributedAdamW([weight], None, 1.0, **SETTINGS)
    optimizer.keep_master_weights(torch.bfloat16, [weight])
    train_rounded(weight, optimizer, range(3))
    again = torch.nn.Parameter(initial.clone())
    resumed = DistributedAdamW([again], None, 1.0, **SETTINGS)
    resumed.keep_master_weights(torch.bfloat16, [again])
    resumed.load_state_dict(optimizer.state_dict())
    with torch.no_grad():
        again.copy_(weight)
    train_rounded(again, resumed, range(3, 6))
    assert again.dtype is torch.bfloat16
    assert again.grad is not None
    assert again.grad.dtype is torch.float32
    assert torch.equal(resumed.unshard(resumed.master_weight(again), again), plain)
    assert torch.equal(again, plain.bfloat16())


def optimizer_of(*parameters: torch.nn.Parameter, **changes: float) -> DistributedAdamW:
    return DistributedAdamW(parameters, None, 1.0, **{**SETTINGS, **changes})


def test_what_an_optimizer_of_shards_cannot_do_is_refused_by_name():
    weight = torch.nn.Parameter(torch.ones(8, 24))
    with pytest.raises(TypeError, match="maximize"):
        optimizer_of(weight, maximize=True)
    with pytest.raises(ValueError, match="param_groups: expected lr, betas, eps, weight_decay, got amsgrad"):
        DistributedAdamW([{"params": [weight], "amsgrad": True}], None, 1.0)
    with pytest.raises(ValueError, match="Invalid learning rate: -1"):
        DistributedAdamW([{"params": [weight], "lr": -1.0}], None, 1.0)
    with pytest.raises(ValueError, match=r"expected contiguous parameters, .* store it as parameter.contiguous"):
        optimizer_of(torch.nn.Parameter(torch.ones(8, 24).T))
    with pytest.raises(TypeError, match=r"save its state_dict\(\)"):
        copy.deepcopy(optimizer_of(weight))
    with pytest.raises(TypeError, match=r"save its state_dict\(\)"):
        pickle.dumps(optimizer_of(weight))
    embedding = torch.nn.Embedding(4, 8, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="expected dense gradients"):
        optimizer_of(embedding.weight).step()


def test_master_weights_are_made_once_and_loaded_where_they_were_saved():
    weight = torch.nn.Parameter(torch.full((8, 24), 1.001))
    optimizer = optimizer_of(weight)
    before = optimizer.state_dict()
    optimizer.keep_master_weights(torch.bfloat16, [weight, weight])  # tied weights may be listed twice
    assert optimizer.master_weight(weight).dtype is torch.float32
    with pytest.raises(ValueError, match="call keep_master_weights once"):
        optimizer.keep_master_weights(torch.bfloat16, [weight])
    with pytest.raises(ValueError, match="expected parameters of this optimizer"):
        optimizer.keep_master_weights(torch.bfloat16, [torch.nn.Parameter(torch.ones(3))])
    with pytest.raises(ValueError, match="expected master weights of parameter 0, as this optimizer has, got none"):
        optimizer.load_state_dict(before)
    with pytest.raises(ValueError, match=r"expected the state of .*'ranks': 1\}.* got \{'rank': 1, 'ranks': 2\}"):
        optimizer.load_state_dict(optimizer.state_dict() | {"rank": 1, "ranks": 2})
    with pytest.raises(ValueError, match="got \\{'rank': None"):
        optimizer.load_state_dict(torch.optim.AdamW([weight]).state_dict())
    assert torch.equal(optimizer.master_weight(weight), torch.full((8 * 24,), 1.001))
