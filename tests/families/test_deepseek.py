"""The hyper-connections of DeepSeek-V4 in transformers: values, every gradient in float64, and bugs that are seen."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from diptych.plans.config import TransformerConfig
from parity.compare import relative_difference
from parity.implementations import OUTPUT, Values, make_inputs
from tests.backends import BACKENDS, IMPLEMENTATIONS, around, backend_module, normal
from tests.families import models

deepseek = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
pytestmark = pytest.mark.thorough

S, D = 3, 8
EPSILON = 1e-4
THEIRS = SimpleNamespace(hc_mult=S, hc_sinkhorn_iters=5, hc_eps=EPSILON, hidden_size=D, rms_norm_eps=1e-3)
CONFIG = TransformerConfig(
    hidden_size=D,
    num_layers=1,
    num_attention_heads=1,
    enable_hyper_connections=True,
    num_residual_streams=S,
    sinkhorn_iterations=5,
    layernorm_epsilon=1e-3,
    mhc_epsilon=EPSILON,
    mhc_transpose_h_res=True,
    mhc_head="learned",
    params_dtype="float64",
    impl="reference",
)
SHARPNESS = 10.0
"""Factor of the logits of h_res. Some of its entries are then far below the epsilon."""


def connection() -> tuple[torch.nn.Module, list[torch.Tensor]]:
    """Their hyper-connection and its parameters: projection, gains and bias."""
    module = deepseek.DeepseekV4HyperConnection(THEIRS).double()
    return module, filled(module.fn, module.scale, module.base)


def head() -> tuple[torch.nn.Module, list[torch.Tensor]]:
    """Their head and its parameters."""
    module = deepseek.DeepseekV4HyperHead(THEIRS).double()
    return module, filled(module.hc_fn, module.hc_scale, module.hc_base)


def filled(*parameters: torch.Tensor) -> list[torch.Tensor]:
    """Parameters with random values."""
    for seed, parameter in enumerate(parameters):
        parameter.data = torch.from_numpy(normal(seed, *parameter.shape))
    parameters[1].data[-1] = SHARPNESS
    return [*parameters]


def theirs(kind: str) -> dict[str, np.ndarray]:
    """Outputs and gradients of their module, by our names."""
    module, parameters = {"connection": connection, "head": head}[kind]()
    x = torch.from_numpy(normal(7, 2, 5, S, D)).requires_grad_()
    y = torch.from_numpy(normal(8, 2, 5, D)).requires_grad_()
    with models.Exact():
        if kind == "head":
            outputs = [module(x)]
        else:
            post, comb, collapsed = module(x)
            written = post.unsqueeze(-1) * y.unsqueeze(-2) + torch.matmul(comb.transpose(-1, -2), x)
            outputs = [collapsed, written]
        cotangents = [torch.from_numpy(normal(20 + place, *out.shape)) for place, out in enumerate(outputs)]
        inputs = [x, *parameters] if kind == "head" else [x, y, *parameters]
        gradients = torch.autograd.grad(outputs, inputs, cotangents)
    names = ["x", *(["y"] if kind == "connection" else []), "phi", "alpha", "bias"]
    found = dict(zip(names, gradients, strict=True)) | {f"output {n}": out for n, out in enumerate(outputs)}
    found["phi"] = found["phi"].T
    return {name: value.detach().numpy() for name, value in found.items()}


def read_and_write(module: Any, x: Any, y: Any) -> tuple:
    """The input of a sublayer, and the streams with its output y."""
    aggregated, mixed, h_post = module.read(x)
    return aggregated, module.apply_h_post_dropout_add((y, None), h_post, mixed, None, 0)


def ours(kind: str, backend: str, config: TransformerConfig) -> dict[str, np.ndarray]:
    """Outputs and gradients of our module with the same parameters."""
    modules = backend_module(backend, "hyper_connections")
    _, (phi, alpha, bias) = {"connection": connection, "head": head}[kind]()
    parameters = {"phi": phi.detach().numpy().T.copy(), "alpha": alpha.detach().numpy(), "bias": bias.detach().numpy()}
    x, y = normal(7, 2, 5, S, D), normal(8, 2, 5, D)
    if kind == "head":
        call, module = make_inputs([x]), modules.HyperConnectionHead(config, "head")
        module = around(backend, module, lambda inner, x: inner(x))
    else:
        call, module = make_inputs([x, y]), modules.HyperConnectionModule(config, 0)
        module = around(backend, module, read_and_write)
    values = Values(call.arrays, {f"inner.{name}": value for name, value in parameters.items()})

    def cotangent(name: str, output: np.ndarray) -> np.ndarray:
        return normal(20 + (0 if name == OUTPUT else int(name)), *output.shape)

    run = IMPLEMENTATIONS[backend](module, call).run(values, None, cotangent)
    found = dict(zip("xy", run.input_gradients.values(), strict=False))
    found |= {name.removeprefix("inner."): value for name, value in run.parameter_gradients.items()}
    return found | {f"output {n}": out for n, out in enumerate(run.outputs.values())}


def worst(kind: str, backend: str, config: TransformerConfig) -> float:
    expected, found = theirs(kind), ours(kind, backend, config)
    assert expected.keys() == found.keys()
    return max(relative_difference(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["connection", "head"])
def test_equals_transformers(kind, backend, impl):
    assert worst(kind, backend, replace(CONFIG, impl=impl)) < 1e-12


@pytest.mark.parametrize(
    "wrong",
    [{"mhc_epsilon": 0.0}, {"mhc_transpose_h_res": False}, {"sinkhorn_last": "column"}, {"layernorm_epsilon": 1e-5}],
    ids=str,
)
def test_a_mistake_is_seen(wrong):
    assert worst("connection", "torch", replace(CONFIG, **wrong)) > 1e-6
