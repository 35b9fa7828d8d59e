"""OLMo-hybrid: pre-norm layers of the gated delta rule, and post-norm layers of attention.

Reference: the class OlmoHybridForCausalLM of transformers 5.23.
"""

from collections.abc import Mapping
from typing import Any

from diptych.plans.config import TransformerConfig
from diptych.plans.families.blocks import (
    attention_links,
    convolution_link,
    delta_rule_links,
    feed_forward_links,
    norm_links,
    outer_links,
)
from diptych.plans.families.family import Family, FamilyError, Required, Setting
from diptych.plans.families.layouts import Layout, Link
from diptych.plans.text_files import one_line

OUTPUT_NORM_EPSILON = 1e-5
"""Epsilon of the output norm of its delta rule layers, a constant of the class."""
NO_POSITIONS = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.0}
"""Settings of the rotary embedding that stand for none."""


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with a share of turned channels, and with values for the settings that may be null.

    Raises:
        FamilyError: it does not say whether there are positions.
    """
    found = dict(config)
    rope = found.get("rope_parameters")
    if not isinstance(rope, Mapping) or "rope_theta" not in rope:
        raise FamilyError(
            "config.json, rope_parameters: expected a rope_theta, null for a model without positions, got "
            f"{one_line(rope)}; versions of transformers read its absence differently"
        )
    found["rope_parameters"] = NO_POSITIONS if rope["rope_theta"] is None else {**rope, "partial_rotary_factor": 1.0}
    for name in ("num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads"):
        if found.get(name) is None:
            found[name] = found.get("num_attention_heads")
    return found


def _write(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json as transformers reads it; the reverse of _read.

    Raises:
        FamilyError: only some channels are turned.
    """
    found = dict(config)
    rope = dict(found["rope_parameters"])
    share = rope.pop("partial_rotary_factor")
    if share not in (0.0, 1.0):
        raise FamilyError(f"rotary_percent: expected 0.0 or 1.0 in olmo_hybrid, got {share!r}")
    found["rope_parameters"] = rope if share else {**rope, "rope_theta": None}
    return found


def _separate(config: TransformerConfig, theirs: str) -> tuple[Layout, ...]:
    """Return the projections of a delta rule layer, one tensor for each part."""
    heads, value_heads, key, value = config.linear_heads
    rows = {"q": heads * key, "k": heads * key, "v": value_heads * value, "a": value_heads, "b": value_heads}
    projections = [
        Layout(f"{theirs}.{part}_proj.weight", {part: n}, 1, (config.hidden_size,)) for part, n in rows.items()
    ]
    gate = Layout(f"{theirs}.g_proj.weight", {"z": value_heads * value}, 1, (config.hidden_size,))
    return (*projections, gate)


def _links(config: TransformerConfig) -> list[Link]:
    """Return the links of a model."""
    links = outer_links(config)
    for number in range(config.num_layers):
        ours = f"decoder.layers.{number}"
        theirs = f"model.layers.{number}"
        if config.layer(number).mixer == "attention":
            norms = ("feedforward_layer_norm", "post_feedforward_layernorm")
            links += attention_links(config, f"{ours}.self_attention", f"{theirs}.self_attn")
        else:
            norms = ("attention_layer_norm", "feedforward_layer_norm")
            mixer = f"{theirs}.linear_attn"
            names = ("o_norm", "o_proj")
            links += delta_rule_links(config, f"{ours}.self_attention", mixer, _separate(config, mixer), names)
            links.append(convolution_link(config, f"{ours}.self_attention", mixer, joint=False))
        links += norm_links(config, number, ours, theirs, norms)
        links += feed_forward_links(config, number, f"{ours}.mlp", f"{theirs}.mlp")
    return links


OLMO_HYBRID = Family(
    name="olmo_hybrid",
    model_types=("olmo_hybrid",),
    architecture="OlmoHybridForCausalLM",
    settings=(
        Setting("hidden_size", "hidden_size"),
        Setting("num_hidden_layers", "num_layers"),
        Setting("num_attention_heads", "num_attention_heads"),
        Setting("num_key_value_heads", "num_query_groups"),
        Setting("intermediate_size", "ffn_hidden_size"),
        Setting("linear_num_key_heads", "linear_num_key_heads"),
        Setting("linear_num_value_heads", "linear_num_value_heads"),
        Setting("linear_key_head_dim", "linear_key_head_dim"),
        Setting("linear_value_head_dim", "linear_value_head_dim"),
        Setting("linear_conv_kernel_dim", "linear_conv_kernel_dim", 4),
        Setting("linear_allow_neg_eigval", "linear_allow_neg_eigval", True),
        Setting("vocab_size", "vocab_size"),
        Setting("max_position_embeddings", "seq_length", 65536),
        Setting("rms_norm_eps", "layernorm_epsilon", 1e-6),
        Setting("initializer_range", "init_method_std", 0.02),
        Setting("rope_parameters.rope_theta", "rotary_base"),
        Setting("rope_parameters.partial_rotary_factor", "rotary_percent"),
    ),
    fixed={
        "activation": "swiglu",
        "kv_channels": None,
        "qk_layernorm": True,
        "qk_layernorm_scope": "projection",
        "linear_norm_epsilon": OUTPUT_NORM_EPSILON,
        "attention_output_gate": False,
        "layernorm_zero_centered_gamma": False,
        "add_bias_linear": False,
        "enable_hyper_connections": False,
    },
    required=(
        Required("hidden_act", "silu"),
        Required("attention_bias", False),
        Required("attention_dropout", 0.0),
        Required("rope_parameters.rope_type", "default"),
    ),
    ignored_keys=frozenset(
        {"linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor"}
    ),
    layer_types={"linear_attention": "gdn", "full_attention": "attention+post-norm"},
    links=_links,
    other_names={"input_layernorm": "attention_layer_norm", "post_attention_layernorm": "feedforward_layer_norm"},
    read=_read,
    write=_write,
)
