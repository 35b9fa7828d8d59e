"""Every rule of plans/config refuses what it should, in words."""

from dataclasses import replace

import numpy as np
import pytest

from diptych.plans.config import RULES, TransformerConfig
from diptych.plans.model.layers import LayerConfig, parse_layer
from diptych.plans.schedule.partition import get_num_layers_to_build, get_transformer_layer_offset
from tests.broken_settings import BROKEN, MODEL


def test_every_rule_has_a_case():
    assert set(BROKEN) == {(kind, rule.name) for kind, rules in RULES.items() for rule in rules}


@pytest.mark.parametrize(("kind", "name"), BROKEN)
def test_rule_refuses(kind, name):
    settings, message = BROKEN[kind, name]
    base = MODEL if kind is TransformerConfig else {}
    with pytest.raises(ValueError, match=message):
        kind(**{**base, **settings})
    broken = object.__new__(kind)
    for field in kind.__dataclass_fields__.values():
        object.__setattr__(broken, field.name, {**base, **settings}.get(field.name, field.default))
    first = next(rule for rule in RULES[kind] if not rule.holds(broken))
    assert first.name == name, f"another rule, {first.name!r}, speaks first"


def test_configurations_are_frozen_and_replaceable():
    config = TransformerConfig(**MODEL)
    with pytest.raises(AttributeError):
        config.hidden_size = 64
    with pytest.raises(ValueError, match="num_attention_heads"):
        replace(config, num_attention_heads=3)


def test_numpy_integers_and_subclasses_are_fine():
    class Mine(TransformerConfig):
        pass

    assert Mine(**{**MODEL, "hidden_size": np.int64(32)}).head_dim == 8


def test_unknown_setting_is_refused():
    with pytest.raises(TypeError, match="hidden_sizes"):
        TransformerConfig(**MODEL, hidden_sizes=3)


@pytest.mark.parametrize(
    ("description", "layer"),
    [
        ("attention", LayerConfig("attention", "swiglu", 88, True, True)),
        ("attention+gelu", LayerConfig("attention", "gelu", 128, True, True)),
        ("attention+gelu+ffn=7", LayerConfig("attention", "gelu", 7, True, True)),
        ("attention+no-mlp-hc", LayerConfig("attention", "swiglu", 88, True, False)),
        ("attention+no-attention-hc+ffn=5", LayerConfig("attention", "swiglu", 5, False, True)),
    ],
)
def test_layer_descriptions(description, layer):
    assert parse_layer(description, TransformerConfig(**MODEL, enable_hyper_connections=True).layer_defaults) == layer


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ("attention+relu", r"expected an option out of .* got 'relu' in 'attention\+relu'"),
        ("attention+ffn=0", r"got 'ffn=0'"),
        ("attention+ffn=x", r"got 'ffn=x'"),
        ("", r"expected a mixer"),
        ("attention,", r"got '' in ''"),
        ("attention+ffn=²", r"got 'ffn=²'"),
        ("attention+gelu+swiglu", r"expected each kind of option once, got 'attention\+gelu\+swiglu'"),
        ("attention+ffn=3+ffn=5", r"expected each kind of option once"),
        ("attention,attention,attention,attention,attention", r"expected at most num_layers=4 layers, got 5"),
    ],
)
def test_wrong_layer_descriptions(description, message):
    with pytest.raises(ValueError, match=message):
        TransformerConfig(**MODEL, layer_pattern=description)


def test_layer_pattern_repeats_over_the_depth():
    config = TransformerConfig(**MODEL, layer_pattern="attention,attention+gelu,attention+ffn=24")
    assert [config.layer(n).ffn_hidden_size for n in range(4)] == [88, 128, 24, 88]
    with pytest.raises(ValueError, match=r"layer_number: expected 0 <= layer_number < num_layers=4, got 4"):
        config.layer(4)


@pytest.mark.parametrize(("chunk", "rank", "name"), [(2, 0, "vp_stage"), (0, 2, "pp_rank"), (-1, 0, "vp_stage")])
def test_stage_out_of_range(chunk, rank, name):
    config = TransformerConfig(32, 4, 4, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    for function in (get_num_layers_to_build, get_transformer_layer_offset):
        with pytest.raises(ValueError, match=rf"{name}: expected 0 <= {name} < 2, got"):
            function(config, chunk, rank)


def test_full_recompute_without_a_count_leaves_no_layer_for_activations():
    with pytest.raises(ValueError, match=r"expected at most the 0 layers that recompute_num_layers=None leaves, got 2"):
        TransformerConfig(
            **MODEL,
            recompute_granularity="full",
            recompute_method="block",
            recompute_activation_function=True,
            recompute_activation_function_num_layers=2,
        )
