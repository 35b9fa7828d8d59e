"""Offload in a pipeline: each action fetches the layers of its stage and evicts them at its end.

An action is a branch of the program, and a copy that starts in a branch also ends in it. A window therefore ends with
the action (``diptych.plans.offload.plan_actions``): its first layer is a miss, the others are fetched ahead of their
use. Values saved for backward are stored in the entries of a buffer. With activation offload the entries are in host
memory; they are written at the end of a forward and read at the start of its backward.

The optimizer updates position by position. A position is one layer of every rank, or padding on ranks with fewer
layers.
"""

from collections import Counter
from typing import Any

import jax

from diptych.plans.offload import (
    EMPTY_PLAN,
    MoveCounter,
    OffloadPlan,
    Use,
    join_plans,
    plan_actions,
    plan_offload,
    plan_statistics,
    total_statistics,
)
from diptych.plans.schedule.named import schedule_for
from jax_impl.offload import OffloadedParameters, PlannedOffload
from jax_impl.pipeline.step import PipelineStep
from jax_impl.staged_parameters import StagedParameters


class OffloadedPipeline(PlannedOffload):
    """The placement of a pipeline's parameters between steps and their update; OffloadedStep for several devices.

    If the configuration does not enable offload, the same calls compute the same results and move nothing.

    Args:
        step: step of the pipeline.
        staged: its parameters.
        num_microbatches: number of microbatches of one step.
    """

    def __init__(self, step: PipelineStep, staged: StagedParameters, num_microbatches: int) -> None:
        config = step.config
        super().__init__(config)
        self._step = step
        self._num_microbatches = num_microbatches
        self.plans: list[OffloadPlan] = [EMPTY_PLAN] * config.pipeline_model_parallel_size
        """Moves of a step, by rank; at its end every layer is evicted."""
        self._evaluations = self.plans
        if not self.moves_parameters:
            return
        positions = positions_of(staged)
        self._positions = list(dict.fromkeys(each for each in positions if each is not None))
        numbers = [None if each is None else self._positions.index(each) for each in positions]
        self._parameters = OffloadedParameters(staged, numbers, _is_staged, _staged_part)
        self._sizes = {number: dict[str, int]() for number in range(len(self._positions))}
        for index, (number, leaf) in enumerate(zip(numbers, jax.tree.leaves(staged), strict=True)):
            if number is not None:
                self._sizes[number][str(index)] = leaf.nbytes // leaf.shape[0]
        layers = self._layers_of_positions()
        replays_stages = step.saves == "inputs"
        actions = [
            plan_actions(config, num_microbatches, rank, replays_stages=replays_stages) for rank in range(len(layers))
        ]
        updates = map(self._plan_update, layers)
        self.plans = [join_plans(plans) for plans in zip(actions, updates, strict=True)]
        self._evaluations = [
            plan_actions(config, num_microbatches, rank, forward_only=True) for rank in range(len(layers))
        ]
        self._update_moves = self._plan_update(range(len(self._positions))).moves

    @property
    def stats(self) -> dict[str, Any]:
        """Statistics of ``steps_run`` steps and ``forwards_run`` forwards on all devices; see plan_statistics.

        Peaks are those of one device.
        """
        replicas = self._step.mesh.size // len(self.plans)
        arrays = Counter[int]()
        if self.moves_parameters:
            for layers in self._layers_of_positions():
                arrays |= Counter({layer: len(self._sizes[place]) for place, layer in enumerate(layers)})
        schedule = schedule_for(self._step.config, self._num_microbatches)
        forwards = sum(action.kind == "F" for actions in schedule.actions for action in actions)
        moved = self._step.moved.times(forwards * replicas)
        training = plan_statistics(self.plans * replicas, arrays, moved, self.steps_run)
        evaluation = plan_statistics(self._evaluations * replicas, arrays, MoveCounter(), self.forwards_run)
        return total_statistics([training, evaluation])

    def _layers_of_positions(self) -> list[list[int]]:
        """Return the layer at each position, by rank; padding has a number that no layer has."""
        config = self._step.config
        result = [
            [config.num_layers + place for place in range(len(self._positions))]
            for _ in range(config.pipeline_model_parallel_size)
        ]
        for layer, (rank, vp_stage, index) in self._step.stages.by_layer().items():
            result[rank][self._positions.index((index.kind, vp_stage, index.position))] = layer
        return result

    def _plan_update(self, layers: Any) -> OffloadPlan:
        """Return the moves of the optimizer's update of these layers."""
        sizes = {layer: self._sizes[place] for place, layer in enumerate(layers)}
        uses = [Use("S", layer) for layer in layers]
        return plan_offload(uses, sizes, self._step.config.tensor_offload_num_prefetch_layers, then=())


def positions_of(staged: StagedParameters) -> list[tuple[int, int, int] | None]:
    """Return kind, virtual stage and position of the layers behind every leaf, or None for replicated leaves."""
    paths: list[Any] = [path for path, _ in jax.tree_util.tree_flatten_with_path(staged)[0]]
    return [(path[1].idx, path[3].idx, path[4].idx) if path[0].name == "layers" else None for path in paths]


def _is_staged(item: Any) -> bool:
    """Return True if an item of the optimizer state has the structure of the parameters."""
    return isinstance(item, StagedParameters)


def _staged_part(leaves: list[Any], is_layer: bool) -> StagedParameters:
    """Return some leaves as StagedParameters, which separate leaves stacked by rank from replicated ones."""
    staged_class: Any = StagedParameters  # here with lists instead of dictionaries
    return staged_class(leaves, []) if is_layer else staged_class([], leaves)
