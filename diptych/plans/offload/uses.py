"""The order in which layers are used."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from diptych.plans.config import TransformerConfig
from diptych.plans.recompute import RecomputeBlock, recompute_blocks
from diptych.plans.schedule.actions import Action
from diptych.plans.schedule.named import schedule_for
from diptych.plans.schedule.partition import get_num_layers_to_build, get_transformer_layer_offset


class Use(NamedTuple):
    """One use of a layer's parameters."""

    kind: str
    """F forward, R its replay, B backward, S optimizer step."""
    layer: int
    """Global number of the layer."""
    microbatch: int = 0
    """Microbatch of the activations."""

    def __str__(self) -> str:
        return f"{self.kind}{self.layer}"


def next_layers(upcoming: Iterable[Use], count: int) -> tuple[int, ...]:
    """Return the next ``count`` distinct layers, in the order of use."""
    found: dict[int, None] = {}
    for use in upcoming:
        if len(found) == count:
            break
        found.setdefault(use.layer)
    return tuple(found)


def pass_uses(
    layers: Sequence[int],
    backward: bool,
    blocks: Sequence[RecomputeBlock] = (),
    forward: bool = True,
    microbatch: int = 0,
) -> list[Use]:
    """Return the uses of layers in one microbatch's forward, backward, or both.

    Args:
        layers: layers in the order of forward.
        backward: include backward.
        blocks: recompute blocks. All layers of a block except the last are replayed, in order, before the backward of
            the last; the replay of the last is part of its backward.
        forward: include forward.
        microbatch: number of the microbatch.
    """
    uses = [Use("F", layer, microbatch) for layer in layers] if forward else []
    if backward:
        replayed = {block.layers[-1]: block.layers[:-1] for block in blocks if replays_layers(block)}
        for layer in reversed(layers):
            uses += [Use("R", other, microbatch) for other in replayed.get(layer, ())]
            uses.append(Use("B", layer, microbatch))
    return uses


def replays_layers(block: RecomputeBlock) -> bool:
    """Return True if a block's replay uses the parameters of all its layers before their backwards.

    This is the case if the layers' inputs are dropped. Otherwise each layer is replayed within its own backward.
    """
    return "residual_streams" in block.dropped


def step_uses(layers: Sequence[int], num_microbatches: int = 1, blocks: Sequence[RecomputeBlock] = ()) -> list[Use]:
    """Return the uses of a step without a pipeline: forward and backward of every microbatch, then the update."""
    uses = [use for m in range(num_microbatches) for use in pass_uses(layers, True, blocks, microbatch=m)]
    return uses + [Use("S", layer) for layer in layers]


def rank_uses(
    config: TransformerConfig, num_microbatches: int, pp_rank: int = 0, forward_only: bool = False
) -> list[Use]:
    """Return the uses of one rank's layers in the forwards and backwards of a step, in the order of its schedule.

    Args:
        config: the model and its parallelism.
        num_microbatches: microbatches per step.
        pp_rank: pipeline rank.
        forward_only: omit all backwards.
    """
    actions = schedule_for(config, num_microbatches, forward_only).actions[pp_rank]
    return [use for action in actions for use in action_uses(config, action, pp_rank)]


def action_uses(config: TransformerConfig, action: Action, pp_rank: int = 0, replays_stages: bool = False) -> list[Use]:
    """Return the uses of one action of a rank; W uses no parameters.

    Args:
        config: the model and its parallelism.
        action: the action.
        pp_rank: pipeline rank.
        replays_stages: True if a stage saves only its input, so that its backward begins with its forward. The last
            stage then has no other forward.
    """
    stages = config.pipeline_model_parallel_size * (config.virtual_pipeline_model_parallel_size or 1)
    is_forward = action.kind == "F"
    if action.kind == "W" or (is_forward and replays_stages and action.stage == stages - 1):
        return []
    vp_stage = action.stage // config.pipeline_model_parallel_size
    layers = stage_layers(config, vp_stage, pp_rank)
    blocks = recompute_blocks(config, vp_stage, pp_rank)
    return pass_uses(layers, not is_forward, blocks, is_forward or replays_stages, action.microbatch)


def rank_layers(config: TransformerConfig, pp_rank: int = 0) -> list[int]:
    """Return the global numbers of all layers of a rank, stage by stage."""
    stages = range(config.virtual_pipeline_model_parallel_size or 1)
    return [layer for vp_stage in stages for layer in stage_layers(config, vp_stage, pp_rank)]


def stage_layers(config: TransformerConfig, vp_stage: int = 0, pp_rank: int = 0) -> range:
    """Return the global numbers of a stage's layers."""
    first = get_transformer_layer_offset(config, vp_stage, pp_rank)
    return range(first, first + get_num_layers_to_build(config, vp_stage, pp_rank))


def expected_uses(
    layers: Sequence[int], last: Use, training: bool, replays: Mapping[int, Sequence[int]] | None = None
) -> Iterator[Use]:
    """Yield predicted uses after a use, without end, for an order that is not known in advance.

    Args:
        layers: layers in the order of the previous forward.
        last: the latest use.
        training: True if backward follows forward.
        replays: layers that the last backward replayed before a layer's own backward, by that layer.
    """
    replays = replays or {}
    if last.kind == "R":
        owner = next((layer for layer, some in replays.items() if last.layer in some), None)
        if owner is not None:
            some = replays[owner]
            yield from (Use("R", layer) for layer in some[some.index(last.layer) + 1 :])
            last = Use("B", owner)
            yield last
    kind = last.kind
    place = layers.index(last.layer)
    after = [Use("F", layer) for layer in layers]
    if kind == "S":
        yield from (Use("S", layer) for layer in layers[place + 1 :])
    elif kind == "F":
        yield from after[place + 1 :]
    if training and kind != "S":
        before = layers if kind == "F" else layers[:place]
        for layer in reversed(before):
            yield from (Use("R", other) for other in replays.get(layer, ()))
            yield Use("B", layer)
        yield from (Use("S", layer) for layer in layers)
    while True:
        yield from after
