"""What tests of blocks share: a small model of every kind, its gradients, and a block of calls by hand."""

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diptych.plans.config import TransformerConfig
from diptych.plans.config.recompute import MODULE_NAMES
from reference_torch.recompute.region import slot_of
from reference_torch.transformer import GPTModel
from tests.recompute.support import normal

CONFIG = TransformerConfig(
    hidden_size=16,
    num_layers=4,
    num_attention_heads=2,
    seq_length=8,
    vocab_size=11,
    enable_hyper_connections=True,
    num_residual_streams=4,
    sinkhorn_iterations=3,
    hidden_dropout=0.2,
)
TOKENS = torch.tensor([[1, 5, 2, 8, 10], [0, 3, 3, 9, 4]])

pytestmark = pytest.mark.thorough


def selective(config: TransformerConfig, *modules: str, **settings) -> TransformerConfig:
    return replace(config, recompute_granularity="selective", recompute_modules=modules, **settings)


def plain(config: TransformerConfig) -> TransformerConfig:
    """The same model without recompute."""
    return replace(
        config,
        recompute_granularity=None,
        recompute_method=None,
        recompute_num_layers=None,
        recompute_modules=(),
        recompute_hyper_connections=False,
        recompute_pre_mlp_layernorm=False,
        recompute_mlp=False,
        mhc_recompute_layer_num=None,
        recompute_activation_function=False,
        recompute_activation_function_num_layers=None,
    )


def jiggled(model: nn.Module) -> nn.Module:
    """Parameters no longer at their small initial values, so that no gradient is nearly zero."""
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.add_(normal(i, *parameter.shape, dtype=parameter.dtype, grad=False), alpha=0.3)
    return model


def model_gradients(config: TransformerConfig, around: Callable = lambda model, tokens: model(tokens)):
    """Logits, and the gradients of all parameters of a new model."""
    model = jiggled(GPTModel(config))
    logits = around(model, TOKENS)
    logits.backward(normal(100, *logits.shape, dtype=logits.dtype, grad=False))
    return [logits.detach(), *(parameter.grad for parameter in model.parameters())]


@functools.cache
def expected_gradients(config: TransformerConfig):
    return model_gradients(plain(config))


def steps(log: list | None = None) -> list[Callable[[Tensor], Tensor]]:
    """Three named steps of a block, the second keeping its own result."""

    def first(x):
        return F.gelu(x)

    def second(x):
        return x.tanh()

    def third(x):
        return (x @ x.t()).softmax(-1)

    def logged(fn):
        @functools.wraps(fn)
        def run(x):
            if log is not None:
                slot = slot_of(x)
                log.append((fn.__name__, None if slot is None else (slot.address, slot.is_full)))
            return fn(x)

        return run

    return [logged(fn) for fn in (first, second, third)]


def block(x: Tensor, run: Callable, functions=None) -> list[Tensor]:
    values = [x]
    for function in functions or steps():
        values.append(run(function, values[-1]))
    return values


def call(fn, *args):
    return fn(*args)


COMBINED: dict[str, TransformerConfig] = {
    "mhc": selective(CONFIG, "mhc"),
    "mhc by its flag": selective(CONFIG, recompute_hyper_connections=True, mhc_recompute_layer_num=3),
    "mhc, layernorm, activation": selective(CONFIG, "mhc", "layernorm", "activation"),
    "mhc, activation function": selective(CONFIG, "mhc", "layernorm", recompute_activation_function=True),
    "mhc, activation function in two layers": selective(
        CONFIG, "mhc", recompute_activation_function=True, recompute_activation_function_num_layers=2
    ),
    "norm and MLP": selective(CONFIG, recompute_pre_mlp_layernorm=True, recompute_mlp=True),
    "mhc, norm and MLP": selective(CONFIG, "mhc", "pre_mlp_layernorm", "mlp"),
    "core_attn": selective(CONFIG, "core_attn"),
    "all": selective(CONFIG, *MODULE_NAMES),
    "all, one block": selective(CONFIG, *MODULE_NAMES, mhc_recompute_layer_num=4),
    "activation function alone": replace(CONFIG, recompute_activation_function=True),
    "full, then activation function": replace(
        CONFIG,
        recompute_granularity="full",
        recompute_method="block",
        recompute_num_layers=2,
        recompute_activation_function=True,
        recompute_activation_function_num_layers=1,
    ),
    "full, uniform": replace(CONFIG, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=3),
}
