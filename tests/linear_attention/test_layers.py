"""Layers of the delta rule: against themselves by hand, in both backends, causal, recomputed, in training."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flax import nnx

from diptych.plans.config import TrainConfig, TransformerConfig
from diptych.plans.model.parameters import delta_rule_specs, initial_value
from parity.compare import relative_difference
from parity.tolerances import GRADIENT, PARAMETERS
from reference_torch.forward_context import ForwardContext
from tests.backends import BACKENDS, TORCH_FIRST, backend_module, model_gradients, normal, tiny_corpus

CONFIG = TransformerConfig(
    hidden_size=16,
    num_layers=3,
    num_attention_heads=2,
    ffn_hidden_size=16,
    vocab_size=32,
    seq_length=24,
    init_method_std=0.3,
    params_dtype="float64",
    layer_pattern="kda,gdn,attention",
    linear_num_value_heads=4,
    linear_value_head_dim=6,
    hidden_dropout=0.1,
)
VARIANTS = {
    "plain": {},
    "mhc, biases, bounded": {
        "enable_hyper_connections": True,
        "num_residual_streams": 2,
        "add_bias_linear": True,
        "linear_allow_neg_eigval": True,
        "kda_lower_bound": -2.0,
    },
}
RECOMPUTED = {
    "attention": {"recompute_granularity": "selective", "recompute_modules": ("core_attn",)},
    "all modules": {"recompute_granularity": "selective", "recompute_modules": ("mlp", "layernorm", "core_attn")},
    "whole layers": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
}
TOKENS = np.random.default_rng(0).integers(0, 32, (2, 24)).astype(np.int32)
COTANGENT = normal(1, 2, 24, 32)


def by_hand(config: TransformerConfig, mixer, x: torch.Tensor) -> torch.Tensor:
    """One layer's mixer from PyTorch's own functions and the recurrence."""
    rule = backend_module("torch", "delta_rule")
    p = dict(mixer.named_parameters())
    heads, value_heads, key, value = config.linear_heads

    def mapped(x, name):
        return F.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias"))

    qkv = F.pad(mapped(x, "linear_qkv").mT, (config.linear_conv_kernel_dim - 1, 0))
    qkv = F.silu(F.conv1d(qkv, p["conv1d.weight"][:, None], groups=qkv.shape[1]).mT)
    q, k, v = qkv.split((heads * key, heads * key, value_heads * value), -1)
    q, k, v = (x.unflatten(-1, (h, -1)) for x, h in ((q, heads), (k, heads), (v, value_heads)))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    beta = torch.sigmoid(mapped(x, "linear_beta")) * (2 if config.linear_allow_neg_eigval else 1)
    rate, bias = p["decay_gate.A_log"].exp(), p["decay_gate.dt_bias"]
    if "linear_decay.weight" in p:
        g = -rate * F.softplus(mapped(x, "linear_decay") + bias, threshold=100)
        o, gate = rule.recurrent_gated_delta_rule(q, k, v, g, beta)[0], F.silu(mapped(x, "linear_gate"))
    else:
        g = (mapped(mapped(x, "linear_decay_down"), "linear_decay_up") + bias).unflatten(-1, (value_heads, -1))
        rate, bound = rate[:, None], config.kda_lower_bound
        g = -rate * F.softplus(g, threshold=100) if bound is None else bound * torch.sigmoid(rate * g)
        o = rule.recurrent_kda(q, k, v, g, beta)[0]
        gate = torch.sigmoid(mapped(mapped(x, "linear_gate_down"), "linear_gate_up"))
    o = F.rms_norm(o, (value,), p["out_norm.weight"], config.layernorm_epsilon) * gate.unflatten(-1, (value_heads, -1))
    return mapped(o.flatten(2), "linear_proj")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("number", [0, 1])
def test_a_layer_is_what_it_says(number, variant):
    config = replace(CONFIG, **VARIANTS[variant])
    mixer = backend_module("torch", "transformer").MIXER_MODULES[config.layer(number).mixer](config, number, "mixer")
    x = torch.from_numpy(normal(0, 2, 24, 16))
    output, bias = mixer(x, ForwardContext(torch.arange(24)))
    expected = by_hand(config, mixer, x)
    actual = output if bias is None else output + bias
    assert relative_difference(actual.detach().numpy(), expected.detach().numpy()) < 1e-12


@pytest.mark.thorough
@pytest.mark.parametrize("variant", [pytest.param("plain", marks=pytest.mark.slow), "mhc, biases, bounded"])
def test_backends_agree_on_a_hybrid_model_and_every_gradient(variant):
    config = replace(CONFIG, **VARIANTS[variant])
    logits, gradients = model_gradients("torch", config, TOKENS, COTANGENT)
    theirs, others = model_gradients("jax", config, TOKENS, COTANGENT)
    assert relative_difference(logits, theirs) <= GRADIENT["float64"]
    assert gradients.keys() == others.keys()
    for name, gradient in gradients.items():
        assert np.linalg.norm(gradient) > 0, name
        assert relative_difference(gradient, others[name]) <= GRADIENT["float64"], name


@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", RECOMPUTED)
def test_recomputation_changes_no_gradient(backend, mode):
    logits, gradients = model_gradients(backend, CONFIG, TOKENS, COTANGENT)
    again, others = model_gradients(backend, replace(CONFIG, **RECOMPUTED[mode]), TOKENS, COTANGENT)
    assert relative_difference(logits, again) <= 1e-14
    for name, gradient in gradients.items():
        assert relative_difference(gradient, others[name]) <= 1e-13, name


@pytest.mark.parametrize("backend", TORCH_FIRST)
def test_a_hybrid_model_is_causal(backend):
    config = replace(CONFIG, hidden_dropout=0.0)
    model = backend_module(backend, "transformer").GPTModel(config)
    changed = TOKENS.copy()
    changed[:, 13:] = (changed[:, 13:] + 1) % 32
    if backend == "torch":
        before, after = (model(torch.from_numpy(x)).detach().numpy() for x in (TOKENS, changed))
    else:
        run = nnx.jit(lambda model, tokens: model(tokens))
        before, after = (np.asarray(run(model, jnp.asarray(x))) for x in (TOKENS, changed))
    assert relative_difference(after[:, :13], before[:, :13]) < 1e-15
    assert (np.abs(after[:, 13:] - before[:, 13:]).max(-1) > 1e-6).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mask_is_refused(backend):
    model = backend_module(backend, "transformer").GPTModel(replace(CONFIG, num_layers=1, layer_pattern="kda"))
    convert = torch.from_numpy if backend == "torch" else jnp.asarray
    mask = convert(np.tril(np.ones((2, 24, 24), bool)))
    with pytest.raises(ValueError, match=r"attention_mask: expected None in a model with gdn or kda layers.*24, 24"):
        model(convert(TOKENS), attention_mask=mask)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"linear_num_key_heads": 3}, "linear_num_value_heads: expected a multiple of linear_num_key_heads=3, got 4"),
        ({"kda_lower_bound": -6.0}, r"kda_lower_bound: expected None or a number in \[-5, 0\), got -6.0"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim: expected an integer >= 1, got 0"),
        (
            {"layer_pattern": "kdb"},
            "layer_pattern: expected a mixer out of .*'attention', 'mla', 'gdn', 'kda'.*, got 'kdb'",
        ),
    ],
)
def test_bad_settings_are_named(flags, message):
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **flags)


def test_decays_begin_between_a_thousandth_and_four_fifths():
    specs = delta_rule_specs(replace(CONFIG, linear_num_key_heads=64, linear_num_value_heads=64), "kda")["decay_gate"]
    rate, bias = (initial_value(0, name, spec) for name, spec in specs.items())
    step = np.log1p(np.exp(bias))
    assert 0.001 <= step.min() < 0.002
    assert 0.05 < step.max() <= 0.1
    assert 1 <= np.exp(rate).min() < 3
    assert 14 < np.exp(rate).max() <= 16


@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_a_hybrid_model_learns(backend):
    config = replace(CONFIG, vocab_size=128, params_dtype="float32", init_method_std=0.1)
    train = TrainConfig(train_iters=30, global_batch_size=8, lr=1e-2, min_lr=1e-3, lr_warmup_iters=3)
    trainer = backend_module(backend, "train").Trainer(config, train, tiny_corpus())
    losses = [trainer.train_step(step).loss for step in range(30)]
    assert losses[-1] < 0.75 * losses[0]


@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_offload_changes_no_step(backend):
    """Parameters and what the layers keep: bitwise equal in PyTorch, in JAX after AdamW as two programs are."""
    config = replace(CONFIG, vocab_size=128, hidden_dropout=0.0)
    train = TrainConfig(train_iters=5, global_batch_size=2, lr=1e-2, min_lr=1e-3, lr_warmup_iters=1)
    moved = replace(config, enable_tensor_offload=True, enable_activation_offload=True, activation_offload_min_bytes=1)
    plain, moving = (backend_module(backend, "train").Trainer(c, train, tiny_corpus()) for c in (config, moved))
    for step in range(3):
        assert moving.train_step(step).loss == pytest.approx(plain.train_step(step).loss, rel=1e-13, abs=0)
    theirs = plain.parameters()
    for name, ours in moving.parameters().items():
        assert relative_difference(ours, theirs[name]) <= (0 if backend == "torch" else PARAMETERS["float64"]), name
    assert moving.offload_statistics["bytes_in"] > 0
