"""Qwen3-Next and Qwen3.5: gated delta rule and gated attention, in dense form.

Reference: the classes Qwen3NextForCausalLM and Qwen3_5ForCausalLM of transformers 5.23.
"""

from dataclasses import replace

from diptych.plans.config import TransformerConfig
from diptych.plans.families.family import Family, Required, Setting
from diptych.plans.families.layouts import Layout, Link, same

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
}
LAYER_TYPES = {"linear_attention": "gdn", "full_attention": "attention"}


def _attention(config: TransformerConfig, ours: str, theirs: str) -> list[Link]:
    """Return the links of a softmax attention layer; each head's queries and gate are neighbours in their tensor."""
    heads, groups, width = config.num_attention_heads, config.query_groups, config.head_dim
    tail = (config.hidden_size,)
    joint = {"q": heads * width, "k": groups * width, "v": groups * width}
    projections = Link(
        (
            Layout(f"{ours}.linear_qkv.weight", joint, 1, tail),
            Layout(f"{ours}.linear_gate.weight", {"gate": heads * width}, 1, tail),
        ),
        (
            Layout(f"{theirs}.q_proj.weight", {"q": width, "gate": width}, heads, tail),
            Layout(f"{theirs}.k_proj.weight", {"k": groups * width}, 1, tail),
            Layout(f"{theirs}.v_proj.weight", {"v": groups * width}, 1, tail),
        ),
    )
    return [
        projections,
        same(f"{ours}.q_layernorm.weight", f"{theirs}.q_norm.weight", (width,)),
        same(f"{ours}.k_layernorm.weight", f"{theirs}.k_norm.weight", (width,)),
        same(f"{ours}.linear_proj.weight", f"{theirs}.o_proj.weight", (config.hidden_size, heads * width)),
    ]


def _delta_rule(config: TransformerConfig, ours: str, theirs: str, projections: tuple[Layout, ...]) -> list[Link]:
    """Return the links of a gated delta rule layer with the given projections of their format."""
    heads, value_heads, key, value = config.linear_heads
    width, kernel = config.hidden_size, config.linear_conv_kernel_dim
    channels = 2 * heads * key + value_heads * value
    parts = {"q": heads * key, "k": heads * key, "v": value_heads * value}
    mapped = (
        Layout(f"{ours}.linear_qkv.weight", parts, 1, (width,)),
        Layout(f"{ours}.linear_gate.weight", {"z": value_heads * value}, 1, (width,)),
        Layout(f"{ours}.linear_beta.weight", {"b": value_heads}, 1, (width,)),
        Layout(f"{ours}.linear_decay.weight", {"a": value_heads}, 1, (width,)),
    )
    return [
        Link(mapped, projections),
        same(f"{ours}.conv1d.weight", f"{theirs}.conv1d.weight", (channels, kernel), (channels, 1, kernel)),
        same(f"{ours}.decay_gate.A_log", f"{theirs}.A_log", (value_heads,)),
        same(f"{ours}.decay_gate.dt_bias", f"{theirs}.dt_bias", (value_heads,)),
        same(f"{ours}.out_norm.weight", f"{theirs}.norm.weight", (value,)),
        same(f"{ours}.linear_proj.weight", f"{theirs}.out_proj.weight", (width, value_heads * value)),
    ]


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


def _mlp(ours: str, theirs: str, width: int, inner: int) -> list[Link]:
    """Return the links of a gated MLP."""
    return [
        Link(
            (Layout(f"{ours}.linear_fc1.weight", {"gate": inner, "up": inner}, 1, (width,)),),
            (
                Layout(f"{theirs}.gate_proj.weight", {"gate": inner}, 1, (width,)),
                Layout(f"{theirs}.up_proj.weight", {"up": inner}, 1, (width,)),
            ),
        ),
        same(f"{ours}.linear_fc2.weight", f"{theirs}.down_proj.weight", (width, inner)),
    ]


def _links(config: TransformerConfig, projections) -> list[Link]:
    """Return the links of a model whose delta rule layers have the given projections."""
    width = config.hidden_size
    links = [same("embedding.weight", "model.embed_tokens.weight", (config.vocab_size, width))]
    for number in range(config.num_layers):
        ours, theirs = f"decoder.layers.{number}", f"model.layers.{number}"
        links.append(same(f"{ours}.input_layernorm.weight", f"{theirs}.input_layernorm.weight", (width,)))
        if config.layer(number).mixer == "attention":
            links += _attention(config, f"{ours}.self_attention", f"{theirs}.self_attn")
        else:
            mixer = f"{theirs}.linear_attn"
            links += _delta_rule(config, f"{ours}.self_attention", mixer, projections(config, mixer))
        links.append(same(f"{ours}.pre_mlp_layernorm.weight", f"{theirs}.post_attention_layernorm.weight", (width,)))
        links += _mlp(f"{ours}.mlp", f"{theirs}.mlp", width, config.layer(number).ffn_hidden_size)
    links.append(same("decoder.final_layernorm.weight", "model.norm.weight", (width,)))
    if config.untie_embeddings_and_output_weights:
        links.append(same("output_layer.weight", "lm_head.weight", (config.vocab_size, width)))
    return links


QWEN3_NEXT = Family(
    name="qwen3_next",
    model_types=("qwen3_next",),
    architecture="Qwen3NextForCausalLM",
    settings=SETTINGS,
    fixed=FIXED,
    required=(*REQUIRED, Required("num_experts", 0, "layers of experts are not implemented", 512)),
    ignored_keys=frozenset(
        {
            *("decoder_sparse_step", "mlp_only_layers", "moe_intermediate_size", "norm_topk_prob"),
            *("num_experts_per_tok", "output_router_logits", "router_aux_loss_coef", "shared_expert_intermediate_size"),
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
    required=REQUIRED,
    ignored_keys=frozenset(
        {
            *("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
            *("rope_parameters.mrope_section", "rope_parameters.mrope_interleaved"),  # text is equal in all sections
        }
    ),
    links=lambda config: _links(config, _separate),
)
