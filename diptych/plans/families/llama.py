"""Llama, up to the third generation: softmax attention in groups, with an unscaled rotary embedding.

Reference: the class LlamaForCausalLM of transformers 5.23.
"""

from collections.abc import Mapping
from typing import Any

from diptych.plans.config import TransformerConfig
from diptych.plans.families.blocks import attention_links, feed_forward_links, norm_links, outer_links
from diptych.plans.families.family import Family, FamilyError, Required, Setting, integer
from diptych.plans.families.layouts import Link

ATTENTION = "full_attention"


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with the type of each layer, and with values for the settings that may be null.

    Raises:
        FamilyError: a setting has another type than expected, or the heads do not divide the width.
    """
    found = dict(config)
    heads = integer(config, "num_attention_heads", least=1)
    if found.get("num_key_value_heads") is None:
        found["num_key_value_heads"] = heads
    width = integer(config, "hidden_size", least=1)
    if width % heads:
        raise FamilyError(f"config.json, hidden_size: expected a multiple of num_attention_heads={heads}, got {width}")
    if found.get("head_dim") is None:
        found["head_dim"] = width // heads
    return {"layer_types": [ATTENTION] * integer(config, "num_hidden_layers"), **found}


def _write(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json without the types of the layers, which are all alike; the reverse of _read."""
    return {key: value for key, value in config.items() if key != "layer_types"}


def _links(config: TransformerConfig) -> list[Link]:
    """Return the links of a model."""
    links = outer_links(config)
    for number in range(config.num_layers):
        ours = f"decoder.layers.{number}"
        theirs = f"model.layers.{number}"
        links += attention_links(config, f"{ours}.self_attention", f"{theirs}.self_attn")
        links += norm_links(config, number, ours, theirs, ("input_layernorm", "post_attention_layernorm"))
        links += feed_forward_links(config, number, f"{ours}.mlp", f"{theirs}.mlp")
    return links


LLAMA = Family(
    name="llama",
    model_types=("llama",),
    architecture="LlamaForCausalLM",
    settings=(
        Setting("hidden_size", "hidden_size"),
        Setting("num_hidden_layers", "num_layers"),
        Setting("num_attention_heads", "num_attention_heads"),
        Setting("num_key_value_heads", "num_query_groups"),
        Setting("head_dim", "kv_channels"),
        Setting("intermediate_size", "ffn_hidden_size"),
        Setting("vocab_size", "vocab_size"),
        Setting("max_position_embeddings", "seq_length", 2048),
        Setting("rms_norm_eps", "layernorm_epsilon", 1e-6),
        Setting("initializer_range", "init_method_std", 0.02),
        Setting("rope_parameters.rope_theta", "rotary_base", 10000.0),
    ),
    fixed={
        "activation": "swiglu",
        "qk_layernorm": False,
        "attention_output_gate": False,
        "layernorm_zero_centered_gamma": False,
        "add_bias_linear": False,
        "rotary_percent": 1.0,
        "enable_hyper_connections": False,
    },
    required=(
        Required("hidden_act", "silu"),
        Required("attention_bias", False),
        Required("mlp_bias", False),
        Required("attention_dropout", 0.0),
        Required("rope_parameters.rope_type", "default"),
    ),
    ignored_keys=frozenset({"pretraining_tp"}),
    layer_types={ATTENTION: "attention"},
    links=_links,
    read=_read,
    write=_write,
)
