"""In which order layers are used."""

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
    microbatch: int = 0
    """Which microbatch's activations; parameters are the same for all."""

    def __str__(self) -> str:
        return f"{self.kind}{self.layer}"


def next_layers(upcoming: Iterable[Use], count: int) -> tuple[int, ...]:
    """The first ``count`` different layers that uses need, in the order in which they need them."""
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
    """Uses of one microbatch's forward, or backward, or both, through some layers.

    Args:
        layers: in the order of forward.
        backward: whether backward is run.
        blocks: what is recomputed. All layers of a block but its last are replayed, in order, before the last's
            backward; the last's replay is part of its backward.
        forward: whether forward is run.
        microbatch: its number.
    """
    uses = [Use("F", layer, microbatch) for layer in layers] if forward else []
    if backward:
        replayed = {block.layers[-1]: block.layers[:-1] for block in blocks if replays_layers(block)}
        for layer in reversed(layers):
            uses += [Use("R", other, microbatch) for other in replayed.get(layer, ())]
            uses.append(Use("B", layer, microbatch))
    return uses


def replays_layers(block: RecomputeBlock) -> bool:
    """Whether a block's replay goes through its layers, reading their parameters, before their backwards.

    It does where what one layer hands the next is dropped. Else each layer's replay is within its own backward.
    """
    return "residual_streams" in block.dropped


def step_uses(layers: Sequence[int], num_microbatches: int = 1, blocks: Sequence[RecomputeBlock] = ()) -> list[Use]:
    """Uses of a training step without a pipeline: every microbatch's forward and backward, then the optimizer's."""
    uses = [use for m in range(num_microbatches) for use in pass_uses(layers, True, blocks, microbatch=m)]
    return uses + [Use("S", layer) for layer in layers]


def rank_uses(
    config: TransformerConfig, num_microbatches: int, pp_rank: int = 0, forward_only: bool = False
) -> list[Use]:
    """Uses of one rank's layers in a step's forwards and backwards, in the order of the pipeline's schedule.

    Args:
        config: the model's; without a pipeline its only rank runs one microbatch after the other.
        num_microbatches: of a step.
        pp_rank: the rank.
        forward_only: evaluation.
    """
    actions = schedule_for(config, num_microbatches, forward_only).actions[pp_rank]
    return [use for action in actions for use in action_uses(config, action, pp_rank)]


def action_uses(config: TransformerConfig, action: Action, pp_rank: int = 0) -> list[Use]:
    """Uses of one action of a rank. The gradients of weights alone (W) need no weights."""
    if action.kind == "W":
        return []
    vp_stage = action.stage // config.pipeline_model_parallel_size
    layers, forward = stage_layers(config, vp_stage, pp_rank), action.kind == "F"
    blocks = recompute_blocks(config, vp_stage, pp_rank)
    return pass_uses(layers, not forward, blocks, forward, action.microbatch)


def rank_layers(config: TransformerConfig, pp_rank: int = 0) -> list[int]:
    """Global numbers of all layers of a rank, stage by stage."""
    stages = range(config.virtual_pipeline_model_parallel_size or 1)
    return [layer for vp_stage in stages for layer in stage_layers(config, vp_stage, pp_rank)]


def stage_layers(config: TransformerConfig, vp_stage: int = 0, pp_rank: int = 0) -> range:
    """Global numbers of a stage's layers."""
    first = get_transformer_layer_offset(config, vp_stage, pp_rank)
    return range(first, first + get_num_layers_to_build(config, vp_stage, pp_rank))


def expected_uses(
    layers: Sequence[int], last: Use, training: bool, replays: Mapping[int, Sequence[int]] | None = None
) -> Iterator[Use]:
    """Yield the uses that most likely come after a use, without end, where nobody has said what does.

    Args:
        layers: in the order in which forward has used them.
        last: the use.
        training: whether backward follows forward.
        replays: by layer, the layers that the last backward replayed before this layer's own backward.
    """
    replays = replays or {}
    if last.kind == "R":
        owner = next((layer for layer, some in replays.items() if last.layer in some), None)
        if owner is not None:
            some = replays[owner]
            yield from (Use("R", layer) for layer in some[some.index(last.layer) + 1 :])
            last = Use("B", owner)
            yield last
    kind, place = last.kind, layers.index(last.layer)
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
