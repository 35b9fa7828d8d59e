"""Rules of the settings of mixtures of experts."""

from typing import Any

from diptych.plans.config.rules import Rule, choice, count, flag, number

SCORE_FUNCTIONS = ("softmax", "sigmoid")


def has_experts(config: Any) -> bool:
    """Return True if a layer is a mixture of experts."""
    return any(layer.moe for layer in config.repeated_layers)


def _groups_fit(config: Any) -> bool:
    """Return True if the groups of experts, if there are any, hold the chosen experts."""
    groups = config.moe_router_num_groups
    chosen = config.moe_router_group_topk
    if groups is None or chosen is None:
        return groups is chosen
    experts = config.num_moe_experts or 0
    size = experts // groups
    return experts % groups == 0 and size >= 2 and chosen <= groups and config.moe_router_topk <= chosen * size


EXPERT_RULES: tuple[Rule, ...] = (
    count("num_moe_experts"),
    count("moe_router_topk"),
    count("moe_ffn_hidden_size"),
    count("moe_shared_expert_intermediate_size"),
    flag("moe_shared_expert_gate"),
    choice("moe_router_score_function", SCORE_FUNCTIONS),
    flag("moe_router_norm_topk_prob"),
    flag("moe_router_enable_expert_bias"),
    count("moe_router_num_groups"),
    count("moe_router_group_topk"),
    number("moe_router_topk_scaling_factor", "(0, inf)"),
    number("moe_aux_loss_coeff", "[0, inf)"),
    Rule(
        "pipelined without moe_aux_loss_coeff",
        lambda c: c.moe_aux_loss_coeff == 0 or c.cp_exchange != "pipelined" or c.context_parallel_size == 1,
        lambda c: (
            "moe_aux_loss_coeff: expected 0.0 with cp_exchange 'pipelined', whose ranks are not at one layer at the "
            f"same time, got {c.moe_aux_loss_coeff!r}; choose another cp_exchange"
        ),
    ),
    Rule(
        "layers of experts have experts",
        lambda c: c.num_moe_experts is not None or not has_experts(c),
        lambda c: f"num_moe_experts: expected a number with moe in layer_pattern={c.layer_pattern!r}, got None",
    ),
    Rule(
        "experts have layers",
        lambda c: (c.num_moe_experts is None and c.moe_aux_loss_coeff == 0) or has_experts(c),
        lambda c: (
            "num_moe_experts, moe_aux_loss_coeff: expected None and 0.0 without moe in layer_pattern, got "
            f"{c.num_moe_experts} and {c.moe_aux_loss_coeff}; write attention+moe for a layer of experts"
        ),
    ),
    Rule(
        "experts suffice",
        lambda c: c.num_moe_experts is None or c.moe_router_topk <= c.num_moe_experts,
        lambda c: f"moe_router_topk: expected at most num_moe_experts={c.num_moe_experts}, got {c.moe_router_topk}",
    ),
    Rule(
        "groups of experts",
        _groups_fit,
        lambda c: (
            "moe_router_num_groups, moe_router_group_topk: expected None, or groups of at least two of the "
            f"num_moe_experts={c.num_moe_experts} experts, of which the chosen ones have moe_router_topk="
            f"{c.moe_router_topk} experts, got {c.moe_router_num_groups} and {c.moe_router_group_topk}"
        ),
    ),
    Rule(
        "a gate needs a shared expert",
        lambda c: not c.moe_shared_expert_gate or c.moe_shared_expert_intermediate_size is not None,
        lambda c: "moe_shared_expert_gate: expected False without moe_shared_expert_intermediate_size, got True",
    ),
)
