"""Real sizes: as many parameters as transformers makes, without making any."""

import math

import pytest
import torch

from diptych.plans.config import TransformerConfig
from diptych.plans.families import FAMILIES
from diptych.plans.families.family import config_of, settings_of
from diptych.plans.model.parameters import parameter_specs
from tests.families.models import BIAS, transformers

QWEN3_5_27B = {
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "linear_num_value_heads": 48,
    "max_position_embeddings": 262144,
}
SIZES = {
    "Qwen3.5-9B": (lambda: transformers.Qwen3_5TextConfig(), 8_953_803_264),
    "Qwen3.5-27B": (lambda: transformers.Qwen3_5TextConfig(**QWEN3_5_27B), 26_895_998_464),
    "OLMo-hybrid-7B": (
        lambda: transformers.OlmoHybridConfig(rope_parameters={"rope_type": "default", "rope_theta": None}),
        None,
    ),
    "Kimi-Linear-48B-A3B": (lambda: transformers.KimiLinearConfig(), None),
    "Qwen3-Next-80B-A3B": (lambda: transformers.Qwen3NextConfig(), None),
    "Qwen3-Next without experts": (lambda: transformers.Qwen3NextConfig(num_experts=0), None),
}


@pytest.mark.parametrize("name", SIZES)
def test_as_many_parameters(name):
    make, known = SIZES[name]
    config = make()
    family = FAMILIES[config.model_type]
    model = TransformerConfig(**settings_of(family, config.to_dict()))
    count = sum(math.prod(spec.shape) for spec in parameter_specs(model).values())
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    biases = [buffer for name, buffer in theirs.named_buffers() if name.endswith(BIAS)]
    assert count == sum(parameter.numel() for parameter in [*theirs.parameters(), *biases])
    assert known in (None, count)
    again = settings_of(family, config_of(family, model))
    assert TransformerConfig(**again) == model
