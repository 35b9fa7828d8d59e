"""Predicted bytes of every pipeline rank, term by term.

Exact: parameters, their gradients, AdamW's two moments, and master weights. All but parameters with master weights are
in params_dtype (JAX also has moments, of zeros, for histories of FP8). Predicted: activations, within 2%; see
diptych.planner.memory.stages. Left out: temporary buffers of actions, buffers of messages, flattened gradients, and the
batch. Gradients are counted in full, as from a step's first backward on. Replicas are equal. Of context ranks, the
result is for one whose first sequence began on another rank.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache, partial
from typing import NamedTuple

from diptych.planner.memory.stages import StageMemory
from diptych.plans.amax_history import is_history
from diptych.plans.config import ITEM_SIZES, TransformerConfig
from diptych.plans.mesh import unsharded
from diptych.plans.model.parameters import parameter_specs
from diptych.plans.offload import layer_storages, pass_uses, rank_layers, stage_layers
from diptych.plans.optimizer_shards import shard_size, stored_dtype
from diptych.plans.recompute import recompute_blocks
from diptych.plans.schedule.actions import Action, Schedule
from diptych.plans.schedule.partition import get_stage, get_stage_place, num_stages
from diptych.plans.tensor_parallel import rank_config


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank; all but ``on_host`` are on the device."""

    parameters: int
    """On the device; with tensor offload: those outside layers, and the largest set of layers resident at once."""
    gradients: int
    moments: int
    """AdamW's two moments, or this rank's shard of them; moments and gradients are not offloaded."""
    master_weights: int
    """This rank's shard of the float32 weights of which the parameters are rounded copies."""
    activations: int
    """Activations saved for backward, at the peak of ``activations + waiting``."""
    waiting: int
    """Values saved between I and W, at the same peak."""
    on_host: int
    """Parameters of offloaded layers, stored on the host."""

    @property
    def total(self) -> int:
        """The bytes on the device."""
        return sum(getattr(self, f.name) for f in fields(self)) - self.on_host


def rank_memories(
    config: TransformerConfig, schedule: Schedule, stages: Sequence[StageMemory], data_parallel_size: int = 1
) -> list[RankMemory]:
    """Return the memory of every pipeline rank.

    Args:
        config: the model.
        schedule: schedule of its step.
        stages: bytes that a microbatch saves on each stage; see diptych.planner.memory.stages.predict_stages.
        data_parallel_size: replicas, which may divide the moments.
    """
    updated = _updated_bytes(config, data_parallel_size)
    layers = _layer_sizes(unsharded(rank_config(config))) if config.enable_tensor_offload else {}
    gradients = _by_rank(config, partial(gradient_bytes, config))
    parameters = _by_rank(config, partial(parameter_bytes, config))
    found = []
    for rank, actions in enumerate(schedule.actions):
        own = parameters[rank]
        on_host = 0
        resident = 0
        if config.enable_tensor_offload:
            on_host = sum(layers[layer] for layer in rank_layers(config, rank))
            order = _layer_order(config, rank, actions)
            ahead = config.tensor_offload_num_prefetch_layers
            resident = offload_use(order, layers, ahead).peak
        activations, waiting = _peak(actions, stages, schedule.splits_backward)
        moments, masters = updated[rank]
        on_device = own - on_host + resident
        found.append(RankMemory(on_device, gradients[rank], moments, masters, activations, waiting, on_host))
    return found


@lru_cache(maxsize=32)
def _layer_sizes(config: TransformerConfig) -> dict[int, int]:
    """Return the bytes of every layer's parameters; the argument is the single-device model, to share the cache."""
    return {number: sum(each.values()) for number, each in layer_storages(config).items()}


def standing_bytes(config: TransformerConfig, data_parallel_size: int = 1) -> list[int]:
    """Return the bytes of parameters, gradients and the optimizer's state of every pipeline rank, without offload."""
    updated = _updated_bytes(config, data_parallel_size)
    of_stages = _by_rank(config, lambda stage: parameter_bytes(config, stage) + gradient_bytes(config, stage))
    return [sum(each) + stages for each, stages in zip(updated, of_stages, strict=True)]


def _by_rank(config: TransformerConfig, of_stage: Callable[[int], int]) -> list[int]:
    """Return the sums of a number of each stage over the stages of every pipeline rank."""
    found = [0] * config.pipeline_model_parallel_size
    for stage in range(num_stages(config)):
        found[get_stage_place(config, stage).pp_rank] += of_stage(stage)
    return found


def _updated_bytes(config: TransformerConfig, data_parallel_size: int) -> list[tuple[int, int]]:
    """Return the bytes of both moments and of master weights, for the replica and context rank that has most."""
    ranks = config.context_parallel_size * data_parallel_size if config.use_distributed_optimizer else 1
    moments = _by_rank(config, lambda stage: 2 * _bytes(config, _updated(config, stage), ranks))
    masters = _by_rank(config, lambda stage: _bytes(config, _with_master_weights(config, stage), ranks))
    return [*zip(moments, masters, strict=True)]


def parameter_bytes(config: TransformerConfig, stage: int) -> int:
    """Return the exact bytes of a stage's parameters, with its copy of a tied embedding."""
    return sum(
        math.prod(shape) * ITEM_SIZES[stored_dtype(config, name, shape)]
        for name, shape in _parameters(config, stage).items()
    )


def gradient_bytes(config: TransformerConfig, stage: int) -> int:
    """Return the exact bytes of the gradients of a stage's parameters."""
    return shard_bytes(config, stage, 1)


def shard_bytes(config: TransformerConfig, stage: int, ranks: int) -> int:
    """Return the bytes of the shards of a stage's gradients that the first of some ranks has, which has most.

    Args:
        config: the model.
        stage: number of the stage.
        ranks: ranks that divide the gradients; see diptych.plans.optimizer_shards.
    """
    return _bytes(config, _parameters(config, stage), ranks)


def padded_shard_bytes(config: TransformerConfig, stage: int, ranks: int, as_stored: bool = False) -> int:
    """Return the bytes of every rank's shards of a stage in a buffer of all shards.

    Args:
        config: the model.
        stage: number of the stage.
        ranks: as in shard_bytes.
        as_stored: True for parameters, in the types in which they are stored; False for gradients.
    """
    found = 0
    for name, shape in _parameters(config, stage).items():
        dtype = stored_dtype(config, name, shape) if as_stored else config.params_dtype
        found += shard_size(math.prod(shape), ranks) * ITEM_SIZES[dtype]
    return found


def _bytes(config: TransformerConfig, shapes: Mapping[str, tuple[int, ...]], ranks: int) -> int:
    """Return the bytes in params_dtype of the first rank's shards of arrays."""
    sizes = [math.prod(shape) for shape in shapes.values()]
    return sum(min(n, shard_size(n, ranks)) for n in sizes) * ITEM_SIZES[config.params_dtype]


def _parameters(config: TransformerConfig, stage: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters of a stage, by canonical name."""
    config = rank_config(config)
    last = num_stages(config) - 1
    specs = parameter_specs(config, stage == 0, stage == last, *get_stage_place(config, stage))
    return {name: spec.shape for name, spec in specs.items()}


def _updated(config: TransformerConfig, stage: int) -> dict[str, tuple[int, ...]]:
    """Return those of a stage's parameters of which AdamW has moments."""
    return {name: shape for name, shape in _parameters(config, stage).items() if not is_history(shape)}


def _with_master_weights(config: TransformerConfig, stage: int) -> dict[str, tuple[int, ...]]:
    """Return those of a stage's parameters that are rounded copies of master weights."""
    parameters = _parameters(config, stage)
    return {name: s for name, s in parameters.items() if stored_dtype(config, name, s) != config.params_dtype}


class OffloadUse(NamedTuple):
    """Memory and copies of offloaded layers in one step."""

    peak: int
    """Largest number of their bytes on the device."""
    moved: int
    """Bytes copied to the device and, of layers that the optimizer has changed, back to the host."""


def offload_use(order: Sequence[int], sizes: Mapping[int, int], num_prefetch_layers: int) -> OffloadUse:
    """Return peak and copies as plan_offload gives them from a second step on, in one pass over a long order.

    When a use begins, its layer and the next others are resident. Layers that share memory are counted twice.

    Args:
        order: layers in the order of their uses in a step, including the optimizer's; all steps are equal.
        sizes: bytes of each layer.
        num_prefetch_layers: number of layers fetched ahead.
    """
    window: list[int] = []
    peak = 0
    moved = 0
    leave: set[int] = set()
    for place, layer in enumerate(reversed([*order, *order])):
        later = window
        window = [layer, *(other for other in window if other != layer)][: num_prefetch_layers + 1]
        if place >= len(order):
            peak = max(peak, sum(sizes[each] for each in window))
            fetched = [each for each in later if each not in window]
            moved += sum(sizes[each] for each in fetched)
            leave.update(fetched)
    return OffloadUse(peak, moved + sum(sizes[each] for each in leave))


def moved_bytes(config: TransformerConfig, schedule: Schedule) -> list[int]:
    """Return the bytes that offload of parameters copies per step on every pipeline rank, in both directions."""
    layers = _layer_sizes(unsharded(rank_config(config)))
    ahead = config.tensor_offload_num_prefetch_layers
    return [
        offload_use(_layer_order(config, rank, actions), layers, ahead).moved
        for rank, actions in enumerate(schedule.actions)
    ]


def _layer_order(config: TransformerConfig, rank: int, actions: Iterable[Action]) -> list[int]:
    """Return the layers of a rank in the order of their uses in a step, including the optimizer's."""
    uses: dict[tuple[int, bool], list[int]] = {}
    for vp_stage in range(config.virtual_pipeline_model_parallel_size or 1):
        layers = stage_layers(config, vp_stage, rank)
        blocks = recompute_blocks(config, vp_stage, rank)
        stage = get_stage(config, vp_stage, rank)
        for forward in (True, False):
            uses[stage, forward] = [use.layer for use in pass_uses(layers, not forward, blocks, forward)]
    order = [layer for kind, stage, _ in actions if kind != "W" for layer in uses[stage, kind == "F"]]
    return order + rank_layers(config, rank)


def _peak(actions: Iterable[Action], stages: Sequence[StageMemory], splits_backward: bool) -> tuple[int, int]:
    """Return the bytes saved by forwards and those waiting for W, when their sum is largest."""
    activations = 0
    waiting = 0
    most = (0, 0)
    for kind, stage, _ in actions:
        saved = stages[stage].saved
        part = stages[stage].weight_gradients * splits_backward
        if kind == "F":
            activations += saved
            most = max(most, (activations, waiting), key=sum)
        elif kind == "W":
            waiting -= part
        else:
            activations -= saved
            waiting += part * (kind == "I")
            most = max(most, (activations, waiting), key=sum)
    return most
