"""Real sizes: as many parameters as transformers makes, without making any, and as were published."""

import math
from pathlib import Path

import pytest
import torch

from diptych.plans.config import TransformerConfig
from diptych.plans.families import FAMILIES, find_family
from diptych.plans.families.family import FamilyError, config_of, settings_of
from diptych.plans.families.presets import PRESETS, find_model
from diptych.plans.model.parameters import parameter_specs
from parity.cli.main import main
from tests.families import models

PUBLISHED = {
    "Qwen3.5-0.8B": "752.39 M",  # as llama.cpp counts the text model
    "Qwen3.5-2B": "1.88 B",
    "Qwen3.5-4B": "4.21 B",
    "Qwen3.5-9B": "8.95 B",
    "Qwen3.5-27B": "26.90 B",
    "Qwen3-Next-80B-A3B": "79.67 B",
    "Kimi-Linear-48B-A3B": "49.12 B",
    "OLMo-hybrid-7B": "7.43 B",
    "Llama-3-8B": "8.03 B",
    "Llama-3-70B": "70.55 B",
}
"""Parameters of each model, as its files hold them."""


def count(model: TransformerConfig) -> int:
    """The number of a model's parameters."""
    return sum(math.prod(spec.shape) for spec in parameter_specs(model).values())


def as_many_as_theirs(config) -> TransformerConfig:
    """The model of a configuration of transformers, which has as many parameters there, and comes back unchanged."""
    family = FAMILIES[config.model_type]
    model = TransformerConfig(**settings_of(family, config.to_dict()))
    with torch.device("meta"):
        theirs = models.transformers.AutoModelForCausalLM.from_config(config)
    biases = [buffer for name, buffer in theirs.named_buffers() if name.endswith(models.BIAS)]
    assert count(model) == sum(parameter.numel() for parameter in [*theirs.parameters(), *biases])
    assert TransformerConfig(**settings_of(family, config_of(family, model))) == model
    return model


@pytest.mark.parametrize("name", PRESETS)
def test_a_published_model_has_its_parameters(name):
    config = PRESETS[name]
    number, unit = PUBLISHED[name].split()
    digits = len(number.split(".")[1])
    assert f"{count(find_model(name)) / {'M': 1e6, 'B': 1e9}[unit]:.{digits}f}" == number
    settings = {key: value for key, value in config.items() if key != "model_type"}
    theirs = models.transformers.AutoConfig.for_model(config["model_type"], **settings)
    assert as_many_as_theirs(theirs) == find_model(name)


def test_a_model_without_experts():
    as_many_as_theirs(models.transformers.Qwen3NextConfig(num_experts=0))


def test_models_are_found_by_name(capsys):
    for name in ("qwen/QWEN3.5-9b", "Qwen/Qwen3.5-9B/", "Qwen3.5-9B-Base"):
        assert find_model(name) == find_model("Qwen3.5-9B")
    assert find_model("meta-llama/Meta-Llama-3-8B-Instruct") == find_model("Llama-3-8B")
    with pytest.raises(FamilyError, match="got ''"):
        find_model("")
    assert main(["plan", "--model", "Llama-3-8B", "--pipeline-model-parallel-size", "4"]) == 0
    assert "8,030,261,248" in capsys.readouterr().out
    assert main(["plan", "--model", "Llama-4"]) == 2
    assert "--model: expected a Hugging Face folder with config.json, or one of Qwen3.5-0.8B" in capsys.readouterr().err


def test_the_docs_list_every_model():
    rows = [f"| `{name}` | {count(find_model(name)):,} |" for name in PRESETS]
    assert "\n".join(rows) in (Path(__file__).parents[2] / "docs" / "models.md").read_text()


def test_every_family_has_a_published_model():
    assert {find_family(config).name for config in PRESETS.values()} == {*FAMILIES}


def test_a_preset_is_no_path(tmp_path, monkeypatch):
    """A folder of that name comes first."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Llama-3-8B").mkdir()
    with pytest.raises(FamilyError, match="expected a Hugging Face folder"):
        find_model("Llama-3-8B")
