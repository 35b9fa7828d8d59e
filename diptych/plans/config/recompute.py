"""Rules of the recompute settings: excluded combinations, and bounds of the counts."""

import re
from typing import Literal, get_args

from diptych.plans.config.rules import Rule, choice, count, flag

RecomputeModule = Literal["mhc", "layernorm", "pre_mlp_layernorm", "core_attn", "activation", "mlp"]
MODULE_NAMES = get_args(RecomputeModule)

SELECTIVE_FLAGS = ("recompute_hyper_connections", "recompute_pre_mlp_layernorm", "recompute_mlp")
"""Flags that select one module each."""


def _selections(config) -> list[str]:
    """Return the settings that select a module, as the user wrote them."""
    names = [f"recompute_modules={tuple(config.recompute_modules)}"] if config.recompute_modules else []
    return names + [name for name in SELECTIVE_FLAGS if getattr(config, name)]


def _recomputes_mhc(config) -> bool:
    in_layout = "mhc" in re.split(r"[,+*]", config.recompute_layout or "")
    return config.recompute_hyper_connections or "mhc" in config.recompute_modules or in_layout


def _whole_layers(config) -> int:
    """Return the number of layers per rank that method block recomputes fully."""
    return config.layers_per_rank if config.recompute_num_layers is None else config.recompute_num_layers


def _at_most_layers(field: str) -> Rule:
    return Rule(
        f"{field} within the rank",
        lambda c: (getattr(c, field) or 0) <= c.layers_per_rank,
        lambda c: (
            f"{field}: expected at most the {c.layers_per_rank} layers of a pipeline rank, got {getattr(c, field)}"
        ),
    )


def layout_blocks(layout: str) -> list[tuple[tuple[str, ...], int]]:
    """Return the blocks of recompute_layout: ``("none",)``, ``("full",)`` or the modules, and the number of layers.

    Args:
        layout: value of TransformerConfig.recompute_layout.

    Raises:
        ValueError: it has another form, or names an unknown module.
    """
    found = []
    for text in layout.split(","):
        block = re.fullmatch(r"([a-z_+]+)(?:\*([1-9][0-9]{0,5}))?", text)
        names = tuple(block[1].split("+")) if block else ()
        known = names in (("none",), ("full",)) or {*names} <= {*MODULE_NAMES}
        if block is None or not known or len({*names}) != len(names):
            raise ValueError(
                "recompute_layout: expected blocks such as full*4 or layernorm+mlp, of none, full or modules "
                f"{', '.join(MODULE_NAMES)}, each once, got {text!r}"
            )
        found.append((names, int(block[2] or 1)))
    return found


def _layout_fault(config) -> str:
    """Return what is wrong with recompute_layout, or the empty string."""
    if config.recompute_layout is None:
        return ""
    try:
        count = sum(length for _, length in layout_blocks(str(config.recompute_layout)))
    except ValueError as error:
        return str(error)
    expected = f"recompute_layout: expected blocks of {config.num_layers} layers together, got {count}"
    return "" if count == config.num_layers else expected


def _beside_layout(config) -> list[str]:
    """Return the recompute settings that have another value than their default, beside a layout."""
    fields = type(config).__dataclass_fields__
    others = (name for name in fields if "recompute" in name and name != "recompute_layout")
    return [name for name in others if config.recompute_layout and getattr(config, name) != fields[name].default]


RECOMPUTE_RULES: tuple[Rule, ...] = (
    Rule(
        "recompute_layout",
        lambda c: not _layout_fault(c),
        _layout_fault,
    ),
    Rule(
        "recompute_layout replaces the other settings",
        lambda c: not _beside_layout(c),
        lambda c: f"recompute_layout: expected None with {', '.join(_beside_layout(c))}, got {c.recompute_layout!r}",
    ),
    choice("recompute_granularity", (None, "full", "selective")),
    choice("recompute_method", (None, "uniform", "block")),
    count("recompute_num_layers", least=0),
    *(flag(name) for name in SELECTIVE_FLAGS),
    flag("recompute_activation_function"),
    count("mhc_recompute_layer_num"),
    count("recompute_activation_function_num_layers", least=0),
    Rule(
        "recompute_modules",
        lambda c: isinstance(c.recompute_modules, tuple) and all(m in MODULE_NAMES for m in c.recompute_modules),
        lambda c: f"recompute_modules: expected a tuple of names out of {MODULE_NAMES}, got {c.recompute_modules!r}",
    ),
    Rule(
        "modules are named once",
        lambda c: len(set(c.recompute_modules)) == len(c.recompute_modules),
        lambda c: f"recompute_modules: expected each name once, got {c.recompute_modules}",
    ),
    Rule(
        "modules need selective",
        lambda c: c.recompute_granularity == "selective" or not _selections(c),
        lambda c: (
            f"recompute_granularity: expected 'selective' with {', '.join(_selections(c))}, got "
            f"{c.recompute_granularity!r}; full recompute already covers every module"
        ),
    ),
    Rule(
        "selective needs modules",
        lambda c: c.recompute_granularity != "selective" or bool(_selections(c)) or c.recompute_activation_function,
        lambda c: f"recompute_modules: expected at least one of {MODULE_NAMES} with selective recompute, got none",
    ),
    Rule(
        "mhc recompute needs mHC",
        lambda c: not _recomputes_mhc(c) or c.enable_hyper_connections,
        lambda c: (
            "enable_hyper_connections: expected True to recompute hyper-connections, got False; remove module mhc"
        ),
    ),
    Rule(
        "mhc block length needs mhc recompute",
        lambda c: c.mhc_recompute_layer_num is None or _recomputes_mhc(c),
        lambda c: (
            "mhc_recompute_layer_num: expected None without recomputed hyper-connections, got "
            f"{c.mhc_recompute_layer_num}; add recompute_hyper_connections"
        ),
    ),
    Rule(
        "mhc blocks within a stage",
        lambda c: (c.mhc_recompute_layer_num or 0) <= c.layers_per_stage,
        lambda c: (
            f"mhc_recompute_layer_num: expected at most the {c.layers_per_stage} layers of a stage, got "
            f"{c.mhc_recompute_layer_num}; a block never crosses a stage"
        ),
    ),
    Rule(
        "full needs a method",
        lambda c: c.recompute_granularity != "full" or c.recompute_method is not None,
        lambda c: "recompute_method: expected 'uniform' or 'block' with full recompute, got None",
    ),
    Rule(
        "method needs full",
        lambda c: c.recompute_granularity == "full" or (c.recompute_method is None and c.recompute_num_layers is None),
        lambda c: (
            "recompute_granularity: expected 'full' with recompute_method or recompute_num_layers, got "
            f"{c.recompute_granularity!r}"
        ),
    ),
    Rule(
        "uniform chunks have layers",
        lambda c: c.recompute_method != "uniform" or c.recompute_num_layers != 0,
        lambda c: "recompute_num_layers: expected at least 1 layer per chunk with method uniform, got 0",
    ),
    _at_most_layers("recompute_num_layers"),
    Rule(
        "activation recompute beside full needs block",
        lambda c: not c.recompute_activation_function or c.recompute_method != "uniform",
        lambda c: (
            "recompute_method: expected 'block' with recompute_activation_function, got 'uniform', which recomputes "
            "every layer fully"
        ),
    ),
    Rule(
        "activation count needs activation recompute",
        lambda c: c.recompute_activation_function or c.recompute_activation_function_num_layers is None,
        lambda c: (
            "recompute_activation_function_num_layers: expected None without recompute_activation_function, got "
            f"{c.recompute_activation_function_num_layers}"
        ),
    ),
    _at_most_layers("recompute_activation_function_num_layers"),
    Rule(
        "full and activation layers fit",
        lambda c: (
            c.recompute_granularity != "full"
            or _whole_layers(c) + (c.recompute_activation_function_num_layers or 0) <= c.layers_per_rank
        ),
        lambda c: (
            "recompute_activation_function_num_layers: expected at most the "
            f"{c.layers_per_rank - _whole_layers(c)} layers that recompute_num_layers="
            f"{c.recompute_num_layers} leaves, got {c.recompute_activation_function_num_layers}"
        ),
    ),
    Rule(
        "activation is selected once",
        lambda c: not (c.recompute_activation_function and "activation" in c.recompute_modules),
        lambda c: (
            "recompute_modules: expected no 'activation' with recompute_activation_function, which selects the layers, "
            "got both"
        ),
    ),
)
