"""Qwen3-Next and dense Qwen3.5: gated delta rule and gated attention, in Qwen3-Next with mixtures of experts.

Reference: the classes Qwen3NextForCausalLM and Qwen3_5ForCausalLM of transformers 5.23.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from diptych.plans.config import TransformerConfig
from diptych.plans.families.blocks import (
    ExpertNames,
    attention_links,
    convolution_link,
    delta_rule_links,
    feed_forward_links,
    norm_links,
    outer_links,
)
from diptych.plans.families.family import (
    DENSE,
    SPARSE,
    ExpertSettings,
    Family,
    FamilyError,
    Required,
    Setting,
    integer,
)
from diptych.plans.families.layouts import Layout, Link
from diptych.plans.text_files import one_line

SETTINGS = (
    Setting("hidden_size", "hidden_size"),
    Setting("num_hidden_layers", "num_layers"),
    Setting("num_attention_heads", "num_attention_heads"),
    Setting("num_key_value_heads", "num_query_groups"),
    Setting("head_dim", "kv_channels", 256),
    Setting("intermediate_size", "ffn_hidden_size"),
    Setting("linear_num_key_heads", "linear_num_key_heads", 16),
    Setting("linear_num_value_heads", "linear_num_value_heads", 32),
    Setting("linear_key_head_dim", "linear_key_head_dim", 128),
    Setting("linear_value_head_dim", "linear_value_head_dim", 128),
    Setting("linear_conv_kernel_dim", "linear_conv_kernel_dim", 4),
    Setting("vocab_size", "vocab_size"),
    Setting("max_position_embeddings", "seq_length", 32768),
    Setting("rms_norm_eps", "layernorm_epsilon", 1e-6),
    Setting("initializer_range", "init_method_std", 0.02),
    Setting("rope_parameters.rope_theta", "rotary_base", 10000.0),
    Setting("rope_parameters.partial_rotary_factor", "rotary_percent", 0.25),
)
REQUIRED = (
    Required("hidden_act", "silu"),
    Required("attention_bias", False),
    Required("attention_dropout", 0.0),
    Required("rope_parameters.rope_type", "default"),
    Required("attn_output_gate", True),
)
FIXED = {
    "activation": "swiglu",
    "qk_layernorm": True,
    "attention_output_gate": True,
    "layernorm_zero_centered_gamma": True,
    "add_bias_linear": False,
    "linear_allow_neg_eigval": False,
    "enable_hyper_connections": False,
    "qk_layernorm_scope": "head",
    "linear_norm_epsilon": None,
}
EXPERT_NAMES = ExpertNames(
    router="gate",
    maps=("gate_proj", "up_proj", "down_proj"),
    shared="shared_expert",
    shared_gate="shared_expert_gate",
)
EXPERTS = ExpertSettings(
    key="num_experts",
    default=512,
    settings=(
        Setting("num_experts", "num_moe_experts", 512),
        Setting("num_experts_per_tok", "moe_router_topk", 10),
        Setting("moe_intermediate_size", "moe_ffn_hidden_size", 512),
        Setting("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", 512),
        Setting("norm_topk_prob", "moe_router_norm_topk_prob", True),
    ),
    fixed={
        "moe_shared_expert_gate": True,
        "moe_router_score_function": "softmax",
        "moe_router_enable_expert_bias": False,
        "moe_router_num_groups": None,
        "moe_router_group_topk": None,
        "moe_router_topk_scaling_factor": 1.0,
    },
)
LAYER_TYPES = {"linear_attention": "gdn", "full_attention": "attention"}


def _mlp_layer_types(config: Mapping[str, Any]) -> list[str]:
    """Return which layers are mixtures of experts, by config.json.

    Raises:
        FamilyError: a setting has another type than expected.
    """
    step = integer(config, "decoder_sparse_step", 1, least=1)
    dense = config.get("mlp_only_layers") or []
    layers = range(integer(config, "num_hidden_layers"))
    if not isinstance(dense, list) or any(type(number) is not int or number not in layers for number in dense):
        raise FamilyError(
            f"config.json, mlp_only_layers: expected a list of numbers of {len(layers)} layers, got {one_line(dense)}"
        )
    return [SPARSE if number not in dense and (number + 1) % step == 0 else DENSE for number in layers]


def _read_experts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with the type of each layer's feed-forward sublayer.

    Raises:
        FamilyError: a setting has another type than expected, or is one of another family.
    """
    if "mlp_layer_types" in config:
        raise FamilyError("config.json: expected settings of qwen3_next, got 'mlp_layer_types', which it does not have")
    types = _mlp_layer_types(config)
    if SPARSE in types and integer(config, "num_experts", 512) and config.get("shared_expert_intermediate_size") == 0:
        raise FamilyError(
            "config.json, shared_expert_intermediate_size: expected at least 1, got 0: experts without a shared one "
            "are not implemented"
        )
    return {"mlp_layer_types": types, **config}


def _write_experts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with the dense layers as Qwen3-Next names them; the reverse of _read_experts."""
    found = dict(config)
    types = found.pop("mlp_layer_types")
    if found.get("num_experts") and types != _mlp_layer_types(found):
        dense = [number for number, kind in enumerate(types) if kind == DENSE]
        found |= {"decoder_sparse_step": 1, "mlp_only_layers": dense}
    return found


def _fused_by_key_head(config: TransformerConfig, theirs: str) -> tuple[Layout, ...]:
    """Return Qwen3-Next's projections: for each key head its q, k, and the v and z of its value heads."""
    heads, value_heads, key, value = config.linear_heads
    each = value_heads // heads
    tail = (config.hidden_size,)
    qkvz = {"q": key, "k": key, "v": each * value, "z": each * value}
    return (
        Layout(f"{theirs}.in_proj_qkvz.weight", qkvz, heads, tail),
        Layout(f"{theirs}.in_proj_ba.weight", {"b": each, "a": each}, heads, tail),
    )


def _separate(config: TransformerConfig, theirs: str) -> tuple[Layout, ...]:
    """Return Qwen3.5's projections."""
    heads, value_heads, key, value = config.linear_heads
    tail = (config.hidden_size,)
    qkv = {"q": heads * key, "k": heads * key, "v": value_heads * value}
    return (
        Layout(f"{theirs}.in_proj_qkv.weight", qkv, 1, tail),
        Layout(f"{theirs}.in_proj_z.weight", {"z": value_heads * value}, 1, tail),
        Layout(f"{theirs}.in_proj_b.weight", {"b": value_heads}, 1, tail),
        Layout(f"{theirs}.in_proj_a.weight", {"a": value_heads}, 1, tail),
    )


def _links(
    config: TransformerConfig, projections: Callable[[TransformerConfig, str], tuple[Layout, ...]]
) -> list[Link]:
    """Return the links of a model whose delta rule layers have the given projections."""
    links = outer_links(config)
    for number in range(config.num_layers):
        ours = f"decoder.layers.{number}"
        theirs = f"model.layers.{number}"
        if config.layer(number).mixer == "attention":
            links += attention_links(config, f"{ours}.self_attention", f"{theirs}.self_attn")
        else:
            mixer = f"{theirs}.linear_attn"
            names = ("norm", "out_proj")
            links += delta_rule_links(config, f"{ours}.self_attention", mixer, projections(config, mixer), names)
            links.append(convolution_link(config, f"{ours}.self_attention", mixer, joint=True))
        links += norm_links(config, number, ours, theirs, ("input_layernorm", "post_attention_layernorm"))
        links += feed_forward_links(config, number, f"{ours}.mlp", f"{theirs}.mlp", EXPERT_NAMES)
    return links


QWEN3_NEXT = Family(
    name="qwen3_next",
    model_types=("qwen3_next",),
    architecture="Qwen3NextForCausalLM",
    settings=SETTINGS,
    fixed=FIXED,
    required=REQUIRED,
    experts=EXPERTS,
    read=_read_experts,
    write=_write_experts,
    ignored_keys=frozenset(
        {
            *("decoder_sparse_step", "mlp_only_layers", "output_router_logits", "router_aux_loss_coef"),
        }
    ),
    layer_types=LAYER_TYPES,
    links=lambda config: _links(config, _fused_by_key_head),
    ignored_tensors=("mtp.",),
)
QWEN3_5 = replace(
    QWEN3_NEXT,
    name="qwen3_5_text",
    model_types=("qwen3_5_text",),
    architecture="Qwen3_5ForCausalLM",
    experts=None,
    read=dict,
    write=dict,
    ignored_keys=frozenset(
        {
            *("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
            *("rope_parameters.mrope_section", "rope_parameters.mrope_interleaved"),  # text is equal in all sections
        }
    ),
    links=lambda config: _links(config, _separate),
)
