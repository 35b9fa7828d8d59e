"""The mixture of experts of DeepSeek-V3 and Kimi Linear in transformers: values, gradients, and bugs that are seen."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import torch

from diptych.plans.config import TransformerConfig
from parity.compare import relative_difference
from parity.implementations import OUTPUT, Values, make_inputs
from tests.backends import BACKENDS, IMPLEMENTATIONS, around, backend_module, call, normal, value_and_gradients
from tests.families import models

deepseek = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
pytestmark = pytest.mark.thorough

D = 8
CONFIG = TransformerConfig(
    hidden_size=D,
    num_layers=1,
    num_attention_heads=1,
    layer_pattern="attention+moe",
    num_moe_experts=9,
    moe_router_topk=4,
    moe_ffn_hidden_size=5,
    moe_shared_expert_intermediate_size=10,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_num_groups=3,
    moe_router_group_topk=2,
    moe_router_topk_scaling_factor=2.5,
    params_dtype="float64",
    impl="reference",
)
THEIRS = SimpleNamespace(
    hidden_size=D,
    num_local_experts=9,
    num_experts_per_tok=4,
    moe_intermediate_size=5,
    intermediate_size=5,
    n_shared_experts=2,
    routed_scaling_factor=2.5,
    n_group=3,
    topk_group=2,
    norm_topk_prob=True,
    hidden_act="silu",
    mlp_bias=False,
    pretraining_tp=1,
    _experts_implementation="eager",
)
NAMES = {
    "router.weight": "gate.weight",
    "experts.linear_fc1.weight": "experts.gate_up_proj",
    "experts.linear_fc2.weight": "experts.down_proj",
    "shared_experts.linear_fc2.weight": "shared_experts.down_proj.weight",
}
SHARED = ("shared_experts.gate_proj.weight", "shared_experts.up_proj.weight")
"""Their first two maps of the shared expert, which are one here."""


def module():
    """Their module with random parameters, and a bias that changes the choice of experts."""
    found = deepseek.DeepseekV3MoE(THEIRS).double()
    for seed, parameter in enumerate(found.parameters()):
        parameter.data = torch.from_numpy(normal(seed, *parameter.shape))
    found.gate.e_score_correction_bias = torch.from_numpy(normal(50, 9))
    return found


def renamed(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Parameters or gradients by our names."""
    found = {ours: tensors[theirs] for ours, theirs in NAMES.items()}
    return found | {"shared_experts.linear_fc1.weight": np.concatenate([tensors[name] for name in SHARED])}


def theirs(x: np.ndarray) -> dict[str, np.ndarray]:
    """Output and gradients of their module."""
    layer = module()
    inputs = torch.from_numpy(x).requires_grad_()
    with models.Exact():
        output = layer(inputs)
        output.backward(torch.from_numpy(normal(20, *output.shape)))
    gradients = {name: parameter.grad.numpy() for name, parameter in layer.named_parameters()}
    return renamed(gradients) | {"x": inputs.grad.numpy(), "output": output.detach().numpy()}


def ours(backend: str, config: TransformerConfig, x: np.ndarray) -> dict[str, np.ndarray]:
    """Output and gradients of our module."""
    layer = module()
    parameters = renamed({name: parameter.detach().numpy() for name, parameter in layer.named_parameters()})
    parameters["router.expert_bias"] = layer.gate.e_score_correction_bias.numpy()
    given = make_inputs([x])
    inner = backend_module(backend, "mlp").MixtureOfExperts(config, 0, "mlp")
    side = IMPLEMENTATIONS[backend](around(backend, inner, lambda inner, x: inner(x)), given)
    values = Values(given.arrays, {f"inner.{name}": value for name, value in parameters.items()})
    run = side.run(values, None, lambda name, output: normal(20, *output.shape))
    gradients = {name.removeprefix("inner."): value for name, value in run.parameter_gradients.items()}
    assert not gradients.pop("router.expert_bias").any()
    return gradients | {"x": next(iter(run.input_gradients.values())), "output": run.outputs[OUTPUT]}


def worst(backend: str, config: TransformerConfig) -> float:
    x = normal(7, 2, 30, D)
    expected, found = theirs(x), ours(backend, config, x)
    assert expected.keys() == found.keys()
    return max(relative_difference(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_transformers(backend):
    assert worst(backend, CONFIG) < 1e-12


@pytest.mark.parametrize(
    "wrong",
    [
        {"moe_router_norm_topk_prob": False},
        {"moe_router_topk": 3},
        {"moe_router_score_function": "softmax"},
        {"moe_router_num_groups": None, "moe_router_group_topk": None},
        {"moe_router_topk_scaling_factor": 1.0},
    ],
    ids=str,
)
def test_a_mistake_is_seen(wrong):
    assert worst("torch", replace(CONFIG, **wrong)) > 1e-6


def test_a_bias_in_the_weights_is_seen(monkeypatch):
    """The bias chooses experts; it is not part of their weights."""
    from reference_torch import mlp

    class Biased(mlp.Router):
        def scores(self, x):
            return super().scores(x) + self.expert_bias.detach()

    monkeypatch.setattr(mlp, "Router", Biased)
    assert worst("torch", CONFIG) > 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_first_of_equal_experts_is_chosen(backend):
    """Equal scores, as those of a router of zeros, give the same experts in both backends."""
    scores = np.array([[0.5, 0.5, 0.5, 0.5], [0.1, 0.7, 0.7, 0.7], [0.3, 0.2, 0.3, 0.2]])
    function = backend_module(backend, "mlp").choose_experts
    np.testing.assert_array_equal(call(backend, lambda x: function(x, 2), scores), [[0, 1], [1, 2], [0, 2]])
    grouped = call(backend, lambda x: function(x, 1, None, 2, 1), scores)
    np.testing.assert_array_equal(grouped, [[0], [2], [0]])


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_load_balancing_loss_is_that_of_transformers(backend):
    """Of one sequence and one layer; that of transformers is k times as large. Its gradient too."""
    from transformers.models.qwen3_next.modeling_qwen3_next import load_balancing_loss_func

    experts, topk = 6, 2
    logits = normal(3, 40, experts)
    router = torch.from_numpy(logits).requires_grad_()
    expected = load_balancing_loss_func((router,), experts, topk) / topk
    (gradient,) = torch.autograd.grad(expected, router)
    functions = backend_module(backend, "mlp"), backend_module(backend, "aux_loss")

    def loss(logits):
        scores = logits.softmax(-1) if backend == "torch" else jax.nn.softmax(logits)
        return functions[1].token_aux_loss(scores, functions[0].choose_experts(scores, topk), 1).mean()

    (value,), (found,) = value_and_gradients(backend, loss, [logits])
    cotangent = normal(0)
    np.testing.assert_allclose(value, expected.item(), rtol=1e-6)  # that of transformers is computed in float32
    assert relative_difference(found, gradient.numpy() * cotangent) < 1e-6


def test_documents_are_balanced_each_by_itself():
    """The loss of documents in one row is that of the documents in rows of their own."""
    from reference_torch.aux_loss import token_aux_loss
    from reference_torch.documents import pack_documents

    scores = torch.from_numpy(normal(4, 12, 5)).softmax(-1)
    chosen = scores.topk(2).indices
    starts = torch.tensor([[0, 5, 8]], dtype=torch.int32)
    packed = token_aux_loss(scores, chosen, 1, pack_documents(starts, torch.zeros(1, 12), False))[0]
    parts = [token_aux_loss(scores[a:b], chosen[a:b], 1)[0] for a, b in ((0, 5), (5, 8), (8, 12))]
    torch.testing.assert_close(packed, torch.cat(parts))
    assert not torch.allclose(packed, token_aux_loss(scores, chosen, 1)[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_near_zero_have_finite_gradients(backend):
    """Sigmoids whose sum is near the number that is added to it, in float32; JAX once divided by its square."""
    logits = np.array([[-50.0, -50.5, -51.0], [-95.0, -96.0, -97.0], [1.0, -50.0, -51.0]], np.float32)
    aux_loss = backend_module(backend, "aux_loss")

    def ratios(x):
        return aux_loss.divided_by_sum(x.sigmoid() if backend == "torch" else jax.nn.sigmoid(x))

    (value,), (gradient,) = value_and_gradients(backend, ratios, [logits])
    scores = 1 / (1 + np.exp(-logits.astype(np.float64)))
    np.testing.assert_allclose(value, scores / (scores.sum(-1, keepdims=True) + 1e-20), rtol=1e-5, atol=1e-7)
    assert np.isfinite(gradient).all()
    assert np.abs(gradient[0]).max() > 1e-3
