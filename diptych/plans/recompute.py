"""What is recomputed: which values are dropped, in which layers, in blocks of which length.

A value that is dropped is not kept from forward to backward; it is computed again just before backward
needs it. Both backends carry out :func:`recompute_blocks`: PyTorch by emptying and refilling storages,
JAX by one ``jax.checkpoint`` a block that keeps every named value but those dropped.
"""

import math
from dataclasses import fields
from typing import Literal, NamedTuple

from diptych.plans.config import TransformerConfig
from diptych.plans.schedule.partition import get_num_layers_to_build, get_transformer_layer_offset

NO_RECOMPUTE = {field.name: field.default for field in fields(TransformerConfig) if "recompute" in field.name}
"""Settings of a model that keeps everything, which is the default of each."""

VALUES = (
    "residual_streams",
    "h_pre",
    "h_post",
    "h_res",
    "aggregated",
    "mixed",
    "expanded",
    "input_layernorm",
    "q",
    "k",
    "v",
    "short_conv",
    "attention_weights",
    "core_attn",
    "attention_output",
    "pre_mlp_layernorm",
    "fc1",
    "activation",
    "mlp_output",
)
"""Names of a layer's values, the same in both backends, in kernels and in reports.

residual_streams is what one sublayer hands the next, [B, T, S, D] or [B, T, D]; h_pre to expanded are the
hyper-connections'; short_conv is q, k and v of a gdn or kda layer, side by side; fc1 is what the activation function
reads, activation what it gives.
"""

MODULES: dict[str, tuple[str, ...]] = {
    "mhc": ("residual_streams", "h_pre", "h_post", "h_res", "aggregated", "mixed", "expanded"),
    "layernorm": ("input_layernorm", "pre_mlp_layernorm"),
    "pre_mlp_layernorm": ("pre_mlp_layernorm",),
    "core_attn": ("attention_weights", "core_attn"),
    "activation": ("activation",),
    "mlp": ("fc1", "activation", "mlp_output"),
}
"""What can be recomputed, and the values each drops. ``mhc`` keeps residual_streams where a block begins."""


class RecomputeBlock(NamedTuple):
    """Consecutive layers that are recomputed together."""

    kind: Literal["none", "selective", "full"]
    layers: tuple[int, ...]
    """Global numbers."""
    modules: frozenset[str] = frozenset()
    """Keys of MODULES; only where kind is ``selective``."""

    @property
    def dropped(self) -> frozenset[str]:
        """Names of the values not kept inside the block."""
        if self.kind == "full":
            return frozenset(VALUES)
        return frozenset(name for module in self.modules for name in MODULES[module])


def block_length(num_layers: int, num_residual_streams: int) -> int:
    """Layers per mHC block where the sum of kept block inputs and one block's restored values is least.

    n streams of width C keep n C at each of ceil(L / Lr) block boundaries and need about (n + 2) C per layer
    of the block in work, so n C L / Lr + (n + 2) C Lr is least at sqrt(n L / (n + 2)).
    """
    best = round(math.sqrt(num_residual_streams * num_layers / (num_residual_streams + 2)))
    return min(max(best, 1), num_layers)


def selected_modules(config: TransformerConfig) -> frozenset[str]:
    """Modules recomputed in every layer, however they were asked for."""
    flags = {
        "mhc": config.recompute_hyper_connections,
        "pre_mlp_layernorm": config.recompute_pre_mlp_layernorm,
        "mlp": config.recompute_mlp,
    }
    return frozenset(config.recompute_modules) | {module for module, wanted in flags.items() if wanted}


def recompute_blocks(
    config: TransformerConfig, vp_stage: int | None = None, pp_rank: int | None = None
) -> tuple[RecomputeBlock, ...]:
    """The blocks of one pipeline stage, in layer order; together exactly its layers.

    Full recompute: ``uniform`` cuts the stage into blocks of recompute_num_layers; ``block`` recomputes that many
    layers of the pipeline rank, one by one, and after them the activation function of
    recompute_activation_function_num_layers more. A layer's place in that count is (index within the stage) *
    (virtual stages) + vp_stage, so every virtual stage gets its share.

    Selective recompute: with mhc, blocks of mhc_recompute_layer_num layers, the short one last, since the peak of
    memory falls in the last block's backward (a block also ends where activation recompute ends, so that its layers are
    alike); else a block a layer.
    """
    first = get_transformer_layer_offset(config, vp_stage, pp_rank)
    layers = range(first, first + get_num_layers_to_build(config, vp_stage, pp_rank))
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


def _cut(layers: range, length: int) -> list[tuple[int, ...]]:
    return [tuple(layers[start : start + length]) for start in range(0, len(layers), length)]


def _cut_where(layers: range, length: int, activation: set[int]) -> list[tuple[int, ...]]:
    """Chunks of at most ``length`` layers, none with layers both in and outside the set."""
    chunks: list[tuple[int, ...]] = []
    for number in layers:
        last = chunks[-1] if chunks else ()
        if last and len(last) < length and (number in activation) == (last[0] in activation):
            chunks[-1] = (*last, number)
        else:
            chunks.append((number,))
    return chunks


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
            return set()  # every layer is recomputed whole
        taken = config.recompute_num_layers
    return _counted(config, layers, vp_stage, taken, config.recompute_activation_function_num_layers)


def _counted(config: TransformerConfig, layers: range, vp_stage: int | None, taken: int, count: int | None) -> set[int]:
    """The layers whose place within their pipeline rank is in [taken, taken + count); None: all the rest."""
    virtual = config.virtual_pipeline_model_parallel_size or 1
    places = {number: index * virtual + (vp_stage or 0) for index, number in enumerate(layers)}
    return {number for number, place in places.items() if taken <= place and (count is None or place < taken + count)}
