"""Selection of the values that are recomputed, by layer and block.

A dropped value is not saved for backward; a replay of its block computes it again just before backward needs it. Both
backends execute :func:`recompute_blocks`: PyTorch frees and refills storages, and JAX applies one ``jax.checkpoint``
per block, which saves every named value except the dropped ones.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from itertools import groupby
from typing import Literal, NamedTuple

from diptych.plans.config import TransformerConfig
from diptych.plans.config.recompute import layout_blocks
from diptych.plans.model.values import VALUES
from diptych.plans.schedule.partition import get_num_layers_to_build, get_transformer_layer_offset

NO_RECOMPUTE = {field.name: field.default for field in fields(TransformerConfig) if "recompute" in field.name}
"""Settings of a model without recompute (the defaults)."""

MODULES: dict[str, tuple[str, ...]] = {
    "mhc": ("residual_streams", "h_pre", "h_post", "h_res", "aggregated", "mixed", "expanded"),
    "layernorm": (
        *("input_layernorm", "pre_mlp_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
        *("mixer_input_fp8", "mlp_input_fp8"),
    ),
    "pre_mlp_layernorm": ("pre_mlp_layernorm", "mlp_input_fp8"),
    "core_attn": ("attention_weights", "core_attn"),
    "activation": ("activation", "activation_fp8"),
    "mlp": ("fc1", "activation", "mlp_output", "fc1_fp8", "activation_fp8"),
}
"""Values that each module drops. ``mhc`` still saves residual_streams at the beginning of a block."""


class ModuleBytes(NamedTuple):
    """Bytes that a module's own operations and its output hold for backward."""

    before: int
    """Without recompute."""
    after: int
    """With recompute."""


class RecomputeBlock(NamedTuple):
    """Consecutive layers with one decision: save all values, drop those of some modules, or save only the input."""

    kind: Literal["none", "selective", "full"]
    """Kind of recompute."""
    layers: tuple[int, ...]
    """Global numbers of the layers."""
    modules: frozenset[str] = frozenset()
    """Recomputed modules (keys of MODULES) if kind is ``selective``."""

    @property
    def dropped(self) -> frozenset[str]:
        """Names of the values that are not saved inside the block."""
        if self.kind == "full":
            return frozenset(VALUES)
        return frozenset(name for module in self.modules for name in MODULES[module])


def without_recompute(config: TransformerConfig) -> TransformerConfig:
    """Return the same model without recompute."""
    return replace(config, **NO_RECOMPUTE)


def format_layout(blocks: Iterable[RecomputeBlock]) -> str:
    """Return the recompute_layout of blocks in the order of their layers; equal single layers are joined."""
    found: list[tuple[str, int]] = []
    for block in blocks:
        what = block.kind if block.kind != "selective" else "+".join(name for name in MODULES if name in block.modules)
        joins = what != "full" and "mhc" not in block.modules  # read back, each joined layer is a block of its own
        if joins and found and found[-1][0] == what:
            found[-1] = what, found[-1][1] + len(block.layers)
        else:
            found.append((what, len(block.layers)))
    return ",".join(what if count == 1 else f"{what}*{count}" for what, count in found)


def block_length(num_layers: int, num_residual_streams: int) -> int:
    """Return the number of layers per mHC block that minimizes the memory of block inputs and one replayed block.

    n streams of width C save n C elements per token at each of ceil(L / Lr) block boundaries, and a replay needs about
    (n + 2) C per layer of its block. n C L / Lr + (n + 2) C Lr is minimal at Lr = sqrt(n L / (n + 2)).

    Args:
        num_layers: layers L of a stage.
        num_residual_streams: streams n.
    """
    best = round(math.sqrt(num_residual_streams * num_layers / (num_residual_streams + 2)))
    return min(max(best, 1), num_layers)


def selected_modules(config: TransformerConfig) -> frozenset[str]:
    """Return the modules recomputed in every layer, from recompute_modules and the single flags."""
    flags = {
        "mhc": config.recompute_hyper_connections,
        "pre_mlp_layernorm": config.recompute_pre_mlp_layernorm,
        "mlp": config.recompute_mlp,
    }
    return frozenset(config.recompute_modules) | {module for module, wanted in flags.items() if wanted}


def recompute_blocks(
    config: TransformerConfig, vp_stage: int | None = None, pp_rank: int | None = None
) -> tuple[RecomputeBlock, ...]:
    """Return the recompute blocks of one pipeline stage, in layer order; they cover all its layers.

    Full recompute: ``uniform`` cuts the stage into blocks of recompute_num_layers. ``block`` recomputes that many
    layers of the pipeline rank one by one, and the activation function of the following
    recompute_activation_function_num_layers. Layers are counted by (index within the stage) * (virtual stages) +
    vp_stage, which distributes them over the virtual stages.

    With recompute_layout, the blocks are those of the layout, cut at the stage's ends.

    A selectively recomputed block has only layers that save values in 8 bits, or only layers that do not.

    Selective recompute: with mhc, blocks of mhc_recompute_layer_num layers. The shorter block comes last, because
    memory peaks in the last block's backward. A block also ends where activation recompute ends, so that all its layers
    recompute the same values. Without mhc, every layer is a block.
    """
    blocks = _blocks_of(config, vp_stage, pp_rank)
    if config.activation_storage_layers is None:
        return blocks
    return tuple(
        block._replace(layers=layers)
        for block in blocks
        for layers in ([block.layers] if block.kind == "full" else _cut_by_storage(config, block.layers))
    )


def _blocks_of(config: TransformerConfig, vp_stage: int | None, pp_rank: int | None) -> tuple[RecomputeBlock, ...]:
    """Return the recompute blocks of one pipeline stage."""
    first = get_transformer_layer_offset(config, vp_stage, pp_rank)
    layers = range(first, first + get_num_layers_to_build(config, vp_stage, pp_rank))
    if config.recompute_layout is not None:
        return tuple(_of_layout(config.recompute_layout, layers))
    modules = selected_modules(config)
    if config.recompute_granularity == "full" and config.recompute_method == "uniform":
        return tuple(RecomputeBlock("full", chunk) for chunk in _cut(layers, config.recompute_num_layers or 1))
    if "mhc" in modules:
        length = config.mhc_recompute_layer_num or block_length(max(1, len(layers)), config.num_residual_streams)
        activation = _activation_layers(config, layers, vp_stage)
        return tuple(
            RecomputeBlock("selective", chunk, modules | ({"activation"} if activation.issuperset(chunk) else set()))
            for chunk in _cut_where(layers, length, activation)
        )
    full = _full_layers(config, layers, vp_stage)
    activation = _activation_layers(config, layers, vp_stage)
    blocks = []
    for number in layers:
        wanted = modules | ({"activation"} if number in activation else set())
        kind = "full" if number in full else "selective" if wanted else "none"
        blocks.append(RecomputeBlock(kind, (number,), wanted if kind == "selective" else frozenset()))
    return tuple(blocks)


def _of_layout(layout: str, layers: range) -> Iterator[RecomputeBlock]:
    """Yield the blocks of a layout that have some of the layers, with these."""
    first = 0
    for names, count in layout_blocks(layout):
        own = [number for number in range(first, first + count) if number in layers]
        first += count
        for chunk in [own] if {"full", "mhc"} & {*names} else [[number] for number in own]:
            if chunk and names in (("none",), ("full",)):
                yield RecomputeBlock("full" if names == ("full",) else "none", tuple(chunk))
            elif chunk:
                yield RecomputeBlock("selective", tuple(chunk), frozenset(names))


def _cut(layers: range, length: int) -> list[tuple[int, ...]]:
    return [tuple(layers[start : start + length]) for start in range(0, len(layers), length)]


def _cut_where(layers: range, length: int, activation: set[int]) -> list[tuple[int, ...]]:
    """Cut layers into chunks of at most ``length``, each either inside or outside the set ``activation``."""
    chunks: list[tuple[int, ...]] = []
    for number in layers:
        last = chunks[-1] if chunks else ()
        if last and len(last) < length and (number in activation) == (last[0] in activation):
            chunks[-1] = (*last, number)
        else:
            chunks.append((number,))
    return chunks


def _cut_by_storage(config: TransformerConfig, layers: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Cut layers into runs that save values alike, in 8 bits or not."""
    return [tuple(run) for _, run in groupby(layers, key=lambda number: config.layer(number).storage)]


def _full_layers(config: TransformerConfig, layers: range, vp_stage: int | None) -> set[int]:
    if config.recompute_granularity != "full":
        return set()
    return _counted(config, layers, vp_stage, 0, config.recompute_num_layers)


def _activation_layers(config: TransformerConfig, layers: range, vp_stage: int | None) -> set[int]:
    if not config.recompute_activation_function:
        return set()
    taken = 0
    if config.recompute_granularity == "full":
        if config.recompute_num_layers is None:
            return set()  # every layer is fully recomputed
        taken = config.recompute_num_layers
    return _counted(config, layers, vp_stage, taken, config.recompute_activation_function_num_layers)


def _counted(config: TransformerConfig, layers: range, vp_stage: int | None, taken: int, count: int | None) -> set[int]:
    """Return the layers whose index within their rank is in [taken, taken + count); count None: all from taken on."""
    virtual = config.virtual_pipeline_model_parallel_size or 1
    places = {number: index * virtual + (vp_stage or 0) for index, number in enumerate(layers)}
    return {number for number, place in places.items() if taken <= place and (count is None or place < taken + count)}
