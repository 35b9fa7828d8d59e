"""Links of the parts that most families share: embedding and head, norms, attention, delta rule and MLP."""

from collections.abc import Sequence
from typing import NamedTuple

from diptych.plans.config import TransformerConfig
from diptych.plans.families.layouts import Layout, Link, same


def outer_links(config: TransformerConfig) -> list[Link]:
    """Return the links of embedding, final norm and head."""
    width = config.hidden_size
    links = [
        same("embedding.weight", "model.embed_tokens.weight", (config.vocab_size, width)),
        same("decoder.final_layernorm.weight", "model.norm.weight", (width,)),
    ]
    if config.untie_embeddings_and_output_weights:
        links.append(same("output_layer.weight", "lm_head.weight", (config.vocab_size, width)))
    return links


def norm_links(config: TransformerConfig, number: int, ours: str, theirs: str, names: Sequence[str]) -> list[Link]:
    """Return the links of a layer's norms of mixer and MLP, with their names in the other format."""
    found = zip(config.layer(number).norm_names, names, strict=True)
    return [same(f"{ours}.{our}.weight", f"{theirs}.{their}.weight", (config.hidden_size,)) for our, their in found]


def attention_links(config: TransformerConfig, ours: str, theirs: str) -> list[Link]:
    """Return the links of a softmax attention layer; each head's queries and gate, if any, are neighbours there."""
    heads = config.num_attention_heads
    groups = config.query_groups
    width = config.head_dim
    tail = (config.hidden_size,)
    joint = {"q": heads * width, "k": groups * width, "v": groups * width}
    mapped = [Layout(f"{ours}.linear_qkv.weight", joint, 1, tail)]
    queries = {"q": width}
    if config.attention_output_gate:
        mapped.append(Layout(f"{ours}.linear_gate.weight", {"gate": heads * width}, 1, tail))
        queries["gate"] = width
    projections = (
        Layout(f"{theirs}.q_proj.weight", queries, heads, tail),
        Layout(f"{theirs}.k_proj.weight", {"k": groups * width}, 1, tail),
        Layout(f"{theirs}.v_proj.weight", {"v": groups * width}, 1, tail),
    )
    links = [
        Link((*mapped,), projections),
        same(f"{ours}.linear_proj.weight", f"{theirs}.o_proj.weight", (config.hidden_size, heads * width)),
    ]
    if config.qk_layernorm:
        joint = config.qk_layernorm_scope == "projection"
        for name, count in (("q", heads), ("k", groups)):
            shape = (width * (count if joint else 1),)
            links.append(same(f"{ours}.{name}_layernorm.weight", f"{theirs}.{name}_norm.weight", shape))
    return links


def delta_rule_links(
    config: TransformerConfig, ours: str, theirs: str, projections: tuple[Layout, ...], names: tuple[str, str]
) -> list[Link]:
    """Return the links of a gated delta rule layer, but for its convolution.

    Args:
        config: the model.
        ours: canonical name of the mixer.
        theirs: its name in the other format.
        projections: layouts there of the parts q, k, v, z (output gate), b (beta) and a (decay).
        names: names there of output norm and output projection.
    """
    heads, value_heads, key, value = config.linear_heads
    width = config.hidden_size
    parts = {"q": heads * key, "k": heads * key, "v": value_heads * value}
    mapped = (
        Layout(f"{ours}.linear_qkv.weight", parts, 1, (width,)),
        Layout(f"{ours}.linear_gate.weight", {"z": value_heads * value}, 1, (width,)),
        Layout(f"{ours}.linear_beta.weight", {"b": value_heads}, 1, (width,)),
        Layout(f"{ours}.linear_decay.weight", {"a": value_heads}, 1, (width,)),
    )
    norm, out = names
    return [
        Link(mapped, projections),
        same(f"{ours}.decay_gate.A_log", f"{theirs}.A_log", (value_heads,)),
        same(f"{ours}.decay_gate.dt_bias", f"{theirs}.dt_bias", (value_heads,)),
        same(f"{ours}.out_norm.weight", f"{theirs}.{norm}.weight", (value,)),
        same(f"{ours}.linear_proj.weight", f"{theirs}.{out}.weight", (width, value_heads * value)),
    ]


def convolution_link(config: TransformerConfig, ours: str, theirs: str, joint: bool) -> Link:
    """Return the link of a short convolution, which has one tensor there (joint) or one for each of q, k and v.

    transformers 5.23 joins the three when it reads them, and writes them as three parts of equal size.
    """
    heads, value_heads, key, value = config.linear_heads
    parts = {"q": heads * key, "k": heads * key, "v": value_heads * value}
    tail = (1, config.linear_conv_kernel_dim)
    separate = tuple(Layout(f"{theirs}.{part}_conv1d.weight", {part: rows}, 1, tail) for part, rows in parts.items())
    there = (Layout(f"{theirs}.conv1d.weight", parts, 1, tail),) if joint else separate
    return Link((Layout(f"{ours}.conv1d.weight", parts, 1, tail[1:]),), there, are_rows_of_one=True)


class ExpertNames(NamedTuple):
    """Names of the parts of a mixture of experts in the other format."""

    router: str
    maps: tuple[str, str, str]
    """Maps of an expert: gate, up and down."""
    shared: str
    """The shared expert, whose maps are gate_proj, up_proj and down_proj."""
    shared_gate: str = ""
    bias: str = ""


def feed_forward_links(
    config: TransformerConfig, number: int, ours: str, theirs: str, names: ExpertNames | None = None
) -> list[Link]:
    """Return the links of a layer's gated MLP, or of its mixture of experts with names in the other format."""
    inner = config.layer(number).ffn_hidden_size
    if not config.layer(number).moe:
        return _mlp_links(config.hidden_size, inner, ours, theirs)
    assert names is not None, "the family has no mixtures of experts"
    width = config.hidden_size
    experts = config.num_moe_experts or 0
    gate, up, down = names.maps
    ins: dict[str, int] = {}
    outs: dict[str, int] = {}
    expanding: list[Layout] = []
    contracting: list[Layout] = []
    for expert in range(experts):
        prefix = f"{theirs}.experts.{expert}"
        ins |= {f"gate {expert}": inner, f"up {expert}": inner}
        outs[f"down {expert}"] = width
        expanding.append(Layout(f"{prefix}.{gate}.weight", {f"gate {expert}": inner}, 1, (width,)))
        expanding.append(Layout(f"{prefix}.{up}.weight", {f"up {expert}": inner}, 1, (width,)))
        contracting.append(Layout(f"{prefix}.{down}.weight", {f"down {expert}": width}, 1, (inner,)))
    links = [
        same(f"{ours}.router.weight", f"{theirs}.{names.router}.weight", (experts, width)),
        Link(
            (Layout(f"{ours}.experts.linear_fc1.weight", ins, 1, (width,), (experts, 2 * inner, width)),), (*expanding,)
        ),
        Link(
            (Layout(f"{ours}.experts.linear_fc2.weight", outs, 1, (inner,), (experts, width, inner)),), (*contracting,)
        ),
    ]
    if config.moe_router_enable_expert_bias:
        links.append(same(f"{ours}.router.expert_bias", f"{theirs}.{names.bias}", (experts,)))
    shared = config.moe_shared_expert_intermediate_size
    if shared is not None:
        links += _mlp_links(width, shared, f"{ours}.shared_experts", f"{theirs}.{names.shared}")
    if config.moe_shared_expert_gate:
        links.append(same(f"{ours}.shared_expert_gate.weight", f"{theirs}.{names.shared_gate}.weight", (1, width)))
    return links


def _mlp_links(width: int, inner: int, ours: str, theirs: str) -> list[Link]:
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
