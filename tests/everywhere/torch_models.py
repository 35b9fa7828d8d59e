"""Models of others, tiny: what a technique must work with from outside."""

import copy
import importlib
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()


class Example(NamedTuple):
    """A model, its inputs, and where a technique applies."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Tensor]]
    recomputed: dict[str, list[str]]
    """Argument of recompute_modules."""
    offloaded: list[str]
    """Argument of offload_modules."""


def _causal(config: Any) -> nn.Module:
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def _tokens() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(0, 60, (2, 12), generator=torch.Generator().manual_seed(1))}


def _pixels() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))}


def _llama() -> nn.Module:
    sizes = {"vocab_size": 60, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_dropout": 0.1}
    return _causal(transformers.LlamaConfig(**sizes, **heads, pad_token_id=0))


def _gpt2() -> nn.Module:
    return _causal(transformers.GPT2Config(vocab_size=60, n_embd=16, n_layer=3, n_head=4, n_positions=32))


def _qwen3_5() -> nn.Module:
    sizes = {"vocab_size": 60, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    widths = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "pad_token_id": 0}
    return _causal(transformers.Qwen3_5TextConfig(**sizes, **heads, **widths))


def _vit() -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 32}
    config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8, hidden_dropout_prob=0.1)
    return transformers.ViTForImageClassification._from_config(config, attn_implementation="eager")


def _resnet() -> nn.Module:
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic")
    return transformers.ResNetForImageClassification(config)


TORCHVISION = Path(sys.prefix) / "torchvision"
"""Where make test-all installs torchvision: on the path of imports, it would stop transformers from working."""


def _torchvision() -> Any:
    """torchvision.models, without its operations in C++, which these models do not use.

    The builds of PyPI link these operations with CUDA; beside a CPU build of PyTorch, registering their shapes fails.
    """
    sys.modules.setdefault("torchvision._meta_registrations", types.ModuleType("_meta_registrations"))
    sys.path.append(str(TORCHVISION))
    try:
        return importlib.import_module("torchvision.models")
    finally:
        sys.path.remove(str(TORCHVISION))


def _torchvision_resnet() -> nn.Module:
    models = _torchvision()
    return models.ResNet(models.resnet.BasicBlock, [2, 2, 1, 1], num_classes=2)


def _torchvision_vit() -> nn.Module:
    sizes = {"num_layers": 3, "num_heads": 4, "hidden_dim": 16, "mlp_dim": 32}
    return _torchvision().VisionTransformer(32, 8, **sizes, dropout=0.1, num_classes=2)


def _images() -> dict[str, Tensor]:
    return {"x": _pixels()["pixel_values"]}


class Recurrent(nn.Module):
    """An LSTM language model as tutorials write it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(60, 16)
        self.lstm = nn.LSTM(16, 24, num_layers=2, dropout=0.1, batch_first=True)
        self.norm = nn.LayerNorm(24)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(24, 60)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(input_ids))
        return self.head(self.dropout(self.norm(hidden)))


MODELS = {
    "Llama": Example(
        _llama,
        _tokens,
        {"model.layers.*": ["input_layernorm", "post_attention_layernorm", "mlp.act_fn"]},
        ["model.layers.*"],
    ),
    "GPT-2": Example(
        _gpt2,
        _tokens,
        {"transformer.h.*": ["ln_*", "mlp.act", "mlp.dropout", "attn.resid_dropout"]},
        ["transformer.h.*"],
    ),
    "Qwen3.5": Example(
        _qwen3_5,
        _tokens,
        {"model.layers.*": ["input_layernorm", "post_attention_layernorm", "mlp"]},
        ["model.layers.*"],
    ),
    "ViT": Example(
        _vit,
        _pixels,
        {"vit.layers.*": ["layernorm_before", "layernorm_after", "mlp.activation_fn"]},
        ["vit.layers.*"],
    ),
    "ResNet": Example(
        _resnet,
        _pixels,
        {"resnet.encoder.stages.*.layers.*": ["layer.*.normalization"]},
        ["resnet.encoder.stages.*.layers.*"],
    ),
    "LSTM": Example(Recurrent, _tokens, {"": ["norm", "dropout"]}, ["lstm", "head"]),
    "torchvision ResNet": Example(_torchvision_resnet, _images, {"layer*.*": ["bn*", "downsample.1"]}, ["layer*.*"]),
    "torchvision ViT": Example(
        _torchvision_vit, _images, {"encoder.layers.*": ["ln_1", "ln_2", "mlp.1", "mlp.2"]}, ["encoder.layers.*"]
    ),
}
"""Four of transformers' language and vision models, networks with batch norms, and an LSTM."""

_needs_torchvision = pytest.mark.skipif(not TORCHVISION.exists(), reason="needs make .venv/installed-peers")
NAMES = [
    pytest.param(name, marks=[_needs_torchvision, pytest.mark.slow]) if name.startswith("torchvision") else name
    for name in MODELS
]
"""Names of all models for parametrize."""


def build(name: str) -> nn.Module:
    """A model in training mode; each call returns equal weights."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return MODELS[name].make().train()


def step(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Outputs, gradients and buffers of a forward and backward, by name."""
    torch.manual_seed(3)
    model.zero_grad()
    result = model(**copy.copy(inputs))
    output = result if isinstance(result, Tensor) else result.logits
    cotangent = torch.randn(output.shape, dtype=output.dtype, generator=torch.Generator().manual_seed(2))
    output.backward(cotangent)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return {"output": output.detach(), **gradients, **buffers}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Results must be bitwise equal."""
    assert found.keys() == expected.keys()
    assert not [name for name in expected if not torch.equal(found[name], expected[name])]
