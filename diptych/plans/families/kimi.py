"""Kimi Linear: Kimi delta attention, multi-head latent attention without positions, and mixtures of experts.

Reference: the class KimiLinearForCausalLM of transformers 5.23.
"""

from collections.abc import Mapping
from typing import Any

from diptych.plans.config import TransformerConfig
from diptych.plans.families.blocks import (
    ExpertNames,
    convolution_link,
    feed_forward_links,
    norm_links,
    outer_links,
)
from diptych.plans.families.family import DENSE, SPARSE, ExpertSettings, Family, FamilyError, Required, Setting, integer
from diptych.plans.families.layouts import Layout, Link, same
from diptych.plans.text_files import one_line

LATENT_NORM_EPSILON = 1e-6
"""Epsilon of the norm of the latent, a constant of the class."""
KEY_VALUE_HEADS = 32
"""Value of num_key_value_heads in transformers if the key is missing."""
SHARED_WIDTH = "shared_expert_intermediate_size"
"""Key for the width of all shared experts together, which Kimi Linear has as a number of experts."""
OTHER_KEYS = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}
"""Usual keys by what config.json may have in their place; transformers reads both."""
LINEAR_KEYS = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
"""Usual keys by those of linear_attn_config, which published models have."""
EXPERT_NAMES = ExpertNames(
    router="gate", maps=("w1", "w3", "w2"), shared="shared_experts", bias="gate.e_score_correction_bias"
)


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with usual keys, the types of all layers, and the width of the shared experts.

    Raises:
        FamilyError: keys and values have other heads than queries, two keys for one setting differ, or a setting has
            another type than expected.
    """
    for other, usual in OTHER_KEYS.items():
        if other in config and usual in config and config[other] != config[usual]:
            raise FamilyError(
                f"config.json: expected either {other} or {usual}, got both, {one_line(config[other])} and "
                f"{one_line(config[usual])}; remove one"
            )
    found = {OTHER_KEYS.get(key, key): value for key, value in config.items()}
    layers = integer(found, "num_hidden_layers")
    linear = found.pop("linear_attn_config", None)
    if linear is not None:
        if not isinstance(linear, Mapping):
            raise FamilyError(f"config.json, linear_attn_config: expected a mapping, got {one_line(linear)}")
        found |= {usual: linear[key] for key, usual in LINEAR_KEYS.items() if key in linear}
        if found.get("layer_types") is None:
            found["layer_types"] = _layer_types(linear, layers)
    first = integer(found, "first_k_dense_replace", 1)
    found.pop("first_k_dense_replace", None)
    if found.get("mlp_layer_types") is None:
        found["mlp_layer_types"] = [DENSE if number < first else SPARSE for number in range(layers)]
    heads = found.pop("num_key_value_heads", KEY_VALUE_HEADS)
    queries = found.get("num_attention_heads")
    if heads not in (None, queries):
        raise FamilyError(
            f"config.json, num_key_value_heads: expected num_attention_heads={one_line(queries)}, got "
            f"{one_line(heads)}; a missing one is {KEY_VALUE_HEADS}"
        )
    shared = integer(found, "num_shared_experts", 1)
    width = integer(found, "moe_intermediate_size", 1024)
    found.pop("num_shared_experts", None)
    if not shared and SPARSE in found["mlp_layer_types"] and integer(found, "num_experts", 256):
        raise FamilyError(
            "config.json, num_shared_experts: expected at least 1, got 0: experts without a shared one are not "
            "implemented"
        )
    return {**found, SHARED_WIDTH: shared * width}


def _layer_types(linear: Mapping[str, Any], layers: int) -> list[str]:
    """Return the types of all layers by the two lists of linear_attn_config, whose numbers begin at 1.

    Raises:
        FamilyError: the lists do not name every layer once; transformers reads incomplete ones differently.
    """
    lists = {key: linear.get(key) for key in ("full_attn_layers", "kda_layers")}
    numbers = [number for found in lists.values() if isinstance(found, list) for number in found]
    if any(type(number) is not int for number in numbers) or sorted(numbers) != [*range(1, layers + 1)]:
        raise FamilyError(
            f"config.json, linear_attn_config: expected full_attn_layers and kda_layers that together have each number "
            f"from 1 to {layers} once, got {one_line(lists['full_attn_layers'])} and {one_line(lists['kda_layers'])}"
        )
    full = lists["full_attn_layers"] or []
    return ["full_attention" if number + 1 in full else "linear_attention" for number in range(layers)]


def _write(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json as transformers writes it; the reverse of _read.

    Raises:
        FamilyError: the width of the shared expert is not a multiple of that of the others.
    """
    found = dict(config)
    shared = found.pop(SHARED_WIDTH, None)
    width = found.get("moe_intermediate_size")
    if shared is None or width is None or SPARSE not in found["mlp_layer_types"]:
        shared = width = 1  # a model without experts, whose width does not matter
    if not shared or not width or shared % width:
        raise FamilyError(
            f"moe_shared_expert_intermediate_size: expected a multiple of moe_ffn_hidden_size={width} in kimi_linear, "
            f"got {shared}"
        )
    found["num_shared_experts"] = shared // width
    found["num_key_value_heads"] = found["num_attention_heads"]
    found["qk_head_dim"] = found["qk_nope_head_dim"] + found["qk_rope_head_dim"]
    found["head_dim"] = found["qk_rope_head_dim"]
    return found


def _latent_attention(config: TransformerConfig, ours: str, theirs: str) -> list[Link]:
    """Return the links of an mla layer."""
    heads, _, key, value = config.attention_heads("mla")
    rank = config.kv_lora_rank or 0
    shared = config.qk_pos_emb_head_dim or 0
    width = config.hidden_size
    down = (rank + shared, width)
    up = (heads * (key - shared + value), rank)
    return [
        same(f"{ours}.linear_q_proj.weight", f"{theirs}.q_proj.weight", (heads * key, width)),
        same(f"{ours}.linear_kv_down_proj.weight", f"{theirs}.kv_a_proj_with_mqa.weight", down),
        same(f"{ours}.kv_layernorm.weight", f"{theirs}.kv_a_layernorm.weight", (rank,)),
        same(f"{ours}.linear_kv_up_proj.weight", f"{theirs}.kv_b_proj.weight", up),
        same(f"{ours}.linear_proj.weight", f"{theirs}.o_proj.weight", (width, heads * value)),
    ]


def _delta_attention(config: TransformerConfig, ours: str, theirs: str) -> list[Link]:
    """Return the links of a kda layer."""
    heads, value_heads, key, value = config.linear_heads
    width = config.hidden_size
    parts = {"q": heads * key, "k": heads * key, "v": value_heads * value}
    separate = tuple(Layout(f"{theirs}.{part}_proj.weight", {part: rows}, 1, (width,)) for part, rows in parts.items())
    return [
        Link((Layout(f"{ours}.linear_qkv.weight", parts, 1, (width,)),), separate),
        convolution_link(config, ours, theirs, joint=False),
        same(f"{ours}.linear_beta.weight", f"{theirs}.b_proj.weight", (value_heads, width)),
        same(f"{ours}.linear_decay_down.weight", f"{theirs}.f_a_proj.weight", (value, width)),
        same(f"{ours}.linear_decay_up.weight", f"{theirs}.f_b_proj.weight", (value_heads * key, value)),
        same(f"{ours}.linear_gate_down.weight", f"{theirs}.g_a_proj.weight", (value, width)),
        same(f"{ours}.linear_gate_up.weight", f"{theirs}.g_b_proj.weight", (value_heads * value, value)),
        same(f"{ours}.decay_gate.A_log", f"{theirs}.A_log", (value_heads,), (1, 1, value_heads, 1)),
        same(f"{ours}.decay_gate.dt_bias", f"{theirs}.dt_bias", (value_heads * key,)),
        same(f"{ours}.out_norm.weight", f"{theirs}.o_norm.weight", (value,)),
        same(f"{ours}.linear_proj.weight", f"{theirs}.o_proj.weight", (width, value_heads * value)),
    ]


def _links(config: TransformerConfig) -> list[Link]:
    """Return the links of a model; mixtures of experts and MLPs have names of their own, as in published models."""
    links = outer_links(config)
    for number in range(config.num_layers):
        ours = f"decoder.layers.{number}"
        theirs = f"model.layers.{number}"
        mixer = _latent_attention if config.layer(number).mixer == "mla" else _delta_attention
        links += mixer(config, f"{ours}.self_attention", f"{theirs}.self_attn")
        links += norm_links(config, number, ours, theirs, ("input_layernorm", "post_attention_layernorm"))
        name = "block_sparse_moe" if config.layer(number).moe else "mlp"
        links += feed_forward_links(config, number, f"{ours}.mlp", f"{theirs}.{name}", EXPERT_NAMES)
    return links


KIMI_LINEAR = Family(
    name="kimi_linear",
    model_types=("kimi_linear",),
    architecture="KimiLinearForCausalLM",
    settings=(
        Setting("hidden_size", "hidden_size"),
        Setting("num_hidden_layers", "num_layers"),
        Setting("num_attention_heads", "num_attention_heads"),
        Setting("intermediate_size", "ffn_hidden_size", 9216),
        Setting("kv_lora_rank", "kv_lora_rank", 512),
        Setting("qk_nope_head_dim", "qk_head_dim", 128),
        Setting("qk_rope_head_dim", "qk_pos_emb_head_dim", 64),
        Setting("v_head_dim", "v_head_dim", 128),
        Setting("linear_num_heads", "linear_num_key_heads", 32),
        Setting("linear_head_dim", "linear_key_head_dim", 128),
        Setting("linear_conv_kernel_dim", "linear_conv_kernel_dim", 4),
        Setting("vocab_size", "vocab_size", 163840),
        Setting("model_max_length", "seq_length", 1048576),
        Setting("rms_norm_eps", "layernorm_epsilon", 1e-5),
        Setting("initializer_range", "init_method_std", 0.02),
    ),
    fixed={
        "activation": "swiglu",
        "rotary_percent": 0.0,
        "mla_norm_epsilon": LATENT_NORM_EPSILON,
        "linear_num_value_heads": None,
        "linear_value_head_dim": None,
        "linear_norm_epsilon": None,
        "linear_allow_neg_eigval": False,
        "kda_lower_bound": None,
        "layernorm_zero_centered_gamma": False,
        "add_bias_linear": False,
        "enable_hyper_connections": False,
    },
    required=(
        Required("hidden_act", "silu"),
        Required("attention_bias", False),
        Required("attention_dropout", 0.0),
        Required("q_lora_rank", None),
        Required("tie_word_embeddings", False, "transformers does not tie them either"),
        Required("mla_use_nope", True),
        Required("moe_router_activation_func", "sigmoid"),
        Required("moe_layer_freq", 1),
        Required("use_grouped_topk", True),
        Required("num_nextn_predict_layers", 0),
    ),
    ignored_keys=frozenset({"head_dim", "qk_head_dim", "pretraining_tp", "output_router_logits", "rope_parameters"}),
    layer_types={"linear_attention": "kda", "full_attention": "mla"},
    links=_links,
    experts=ExpertSettings(
        key="num_experts",
        default=256,
        settings=(
            Setting("num_experts", "num_moe_experts", 256),
            Setting("num_experts_per_token", "moe_router_topk", 8),
            Setting("moe_intermediate_size", "moe_ffn_hidden_size", 1024),
            Setting(SHARED_WIDTH, "moe_shared_expert_intermediate_size"),
            Setting("moe_renormalize", "moe_router_norm_topk_prob", True),
            Setting("num_expert_group", "moe_router_num_groups", 1),
            Setting("topk_group", "moe_router_group_topk", 1),
            Setting("routed_scaling_factor", "moe_router_topk_scaling_factor", 2.446),
        ),
        fixed={
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_shared_expert_gate": False,
        },
    ),
    other_names={"block_sparse_moe": "mlp"},
    read=_read,
    write=_write,
)
