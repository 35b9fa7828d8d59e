"""Tiny random models of transformers, exact in float64: the oracle of every family."""

import contextlib
import copy
import tempfile
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from diptych.plans import families
from diptych.plans.families.family import Family
from diptych.plans.tensor_files import TensorFile

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

VOCABULARY = 97
LAYERS = ["linear_attention", "full_attention", "linear_attention"]
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rms_norm_eps": 1e-3,
    "head_dim": 12,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "layer_types": LAYERS,
}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}}


def without(settings: dict[str, Any], name: str) -> dict[str, Any]:
    """Settings without one."""
    return {key: value for key, value in settings.items() if key != name}


EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
    "shared_expert_intermediate_size": 10,
    "mlp_only_layers": [1],
}
KIMI = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 10,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 7,
    "linear_num_heads": 3,
    "linear_head_dim": 8,
    "layer_types": LAYERS,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 6,
    "n_shared_experts": 2,
    "n_group": 3,
    "topk_group": 2,
}
FAMILIES: dict[str, Any] = {
    "qwen3_next": lambda more: transformers.Qwen3NextConfig(**{**SIZES, **LINEAR, **ROPE, "num_experts": 0, **more}),
    "qwen3_next with experts": lambda more: transformers.Qwen3NextConfig(
        **{**SIZES, **LINEAR, **ROPE, **EXPERTS, **more}
    ),
    "qwen3_5_text": lambda more: transformers.Qwen3_5TextConfig(**{**SIZES, **LINEAR, **ROPE, **more}),
    "kimi_linear": lambda more: transformers.KimiLinearConfig(**{**without(SIZES, "head_dim"), **KIMI, **more}),
    "llama": lambda more: transformers.LlamaConfig(
        **{**SIZES, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}, **more}
    ),
    "olmo_hybrid": lambda more: transformers.OlmoHybridConfig(
        **{
            **without(SIZES, "head_dim"),
            **LINEAR,
            "rope_parameters": {"rope_type": "default", "rope_theta": None},
            **more,
        }
    ),
}
"""Configurations by the name of the family, and of the variant."""


def family_of(name: str) -> Family:
    """The table of a name of FAMILIES."""
    return families.FAMILIES[name.split()[0]]


BIAS = "e_score_correction_bias"
"""End of the name of the bias of a router's choice, which is a buffer."""


class Exact(TorchFunctionMode):
    """A mode in which a model computes in float64 where it would widen to float32."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.float:
            return args[0].to(torch.float64)
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return function(*(torch.float64 if arg is torch.float32 else arg for arg in args), **kwargs)


class Results(NamedTuple):
    """Results of a batch."""

    logits: np.ndarray
    """[B, T, V]"""
    loss: float
    gradients: dict[str, np.ndarray]
    """Gradients of the loss, by the names of tensors in files."""


@cache
def build(family: str, **settings: Any):
    """A model whose weights are moved away from their initial values, where many mistakes hardly show."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family](settings))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("A_log", "dt_bias")):
                parameter.zero_()  # initial decays are so strong that their gradients are rounding errors
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        for name, buffer in model.named_buffers():
            if name.endswith(BIAS):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    model.set_experts_implementation("eager")  # the others know no float64
    model = model.double().eval()
    rotary = getattr(model.model, "rotary_emb", None)
    if rotary is not None:
        with Exact():
            rotary.inv_freq = rotary.compute_default_rope_parameters(model.config)[0]
    return model


def save(model, folder: Path, dtype: torch.dtype = torch.float64, shard: str = "5GB") -> Path:
    """Save a model as transformers does, in a type."""
    copy.deepcopy(model).to(dtype).save_pretrained(folder, max_shard_size=shard)
    return folder


def batch(seed: int = 2, shape: tuple[int, int] = (2, 70)) -> np.ndarray:
    """Token ids. Their length exceeds a chunk of the delta rule."""
    return np.random.default_rng(seed).integers(0, VOCABULARY, shape)


def results(model, tokens: np.ndarray) -> Results:
    """Logits, the mean loss of the next tokens, and all gradients."""
    model.zero_grad()
    inputs = torch.from_numpy(tokens)
    with Exact():
        logits = model(inputs, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), inputs[:, 1:].flatten())
        loss.backward()
    return Results(logits.detach().numpy(), loss.item(), gradients_of(model))


def gradients_of(model) -> dict[str, np.ndarray]:
    """Gradients as the tensors that transformers would save if they were the weights."""
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for target, source in zip(copied.parameters(), model.parameters(), strict=True):
            target.copy_(source.grad)
        for name, buffer in copied.named_buffers():
            if name.endswith(BIAS):
                buffer.zero_()  # it has no gradient
    with tempfile.TemporaryDirectory() as folder:
        file = TensorFile(save(copied, Path(folder)) / "model.safetensors")
        return {name: file.read(name).copy() for name in file.tensors}


@contextlib.contextmanager
def patched(target: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute for a while."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, name, value)
        yield
