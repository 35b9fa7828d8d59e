"""Offload in a pipeline: each action of a rank fetches its stage's layers, and leaves none on the device.

Ranks run one program of ticks, in which an action is a branch; a copy that is issued in it ends in it. So windows end
with the action (``diptych.plans.offload.plan_actions``), its first layer is late, and the others come ahead of their
use. What a forward keeps lies in slots; with activation offload these are in host memory, filled when the forward
ends, read when its backward begins.

The optimizer's update goes by slots: one layer of every rank, or of ranks that have fewer, what pads their place.
"""

from collections import Counter
from typing import Any

import jax

from diptych.plans.offload import OffloadPlan, Use, join_plans, plan_actions, plan_offload, total_statistics
from diptych.plans.schedule.named import schedule_for
from jax_impl.offload import Change, Moved, OffloadedParameters, plan_statistics
from jax_impl.pipeline.stages import StagedParameters
from jax_impl.pipeline.step import PipelineStep


class OffloadedPipeline:
    """Where a pipeline's parameters lie between steps, and their update; as OffloadedStep, of several devices.

    Where the configuration does not enable offload, the same calls compute the same and move nothing.

    Args:
        step: the pipeline's.
        staged: its parameters.
        num_microbatches: of one step.
    """

    def __init__(self, step: PipelineStep, staged: StagedParameters, num_microbatches: int) -> None:
        self.trace: list[str] | None = None
        """Moves and uses of the optimizer's update, as it is traced, where somebody makes it a list."""
        config, self.steps_run, self.forwards_run = step.config, 0, 0
        self.moves_parameters = config.enable_tensor_offload
        self.enabled = self.moves_parameters or config.enable_activation_offload
        self._step, self._num_microbatches = step, num_microbatches
        self.plans: list[OffloadPlan] = [plan_offload((), {}, then=())] * config.pipeline_model_parallel_size
        """By rank, what moves in a step; at its end every layer has left."""
        self._evaluations = self.plans
        if not self.moves_parameters:
            return
        slots = slots_of(staged)
        self._slots = list(dict.fromkeys(slot for slot in slots if slot is not None))
        numbers = [None if slot is None else self._slots.index(slot) for slot in slots]
        self._parameters = OffloadedParameters(staged, numbers, _is_staged, _staged_part)
        self._sizes = {number: dict[str, int]() for number in range(len(self._slots))}
        for place, (number, leaf) in enumerate(zip(numbers, jax.tree.leaves(staged), strict=True)):
            if number is not None:
                self._sizes[number][str(place)] = leaf.nbytes // leaf.shape[0]
        layers = self._layers_of_slots()
        self.plans = [
            join_plans([plan_actions(config, num_microbatches, rank), self._plan_update(of_rank)])
            for rank, of_rank in enumerate(layers)
        ]
        self._evaluations = [
            plan_actions(config, num_microbatches, rank, forward_only=True) for rank in range(len(layers))
        ]
        self._update = self._plan_update(range(len(self._slots))).steps

    @property
    def stats(self) -> dict[str, Any]:
        """What has been moved in the ``steps_run`` and ``forwards_run`` so far on all devices; see plan_statistics.

        Peaks are those of one device.
        """
        replicas = self._step.mesh.size // len(self.plans)
        arrays = Counter[int]()
        if self.moves_parameters:
            for layers in self._layers_of_slots():
                arrays |= Counter({layer: len(self._sizes[slot]) for slot, layer in enumerate(layers)})
        schedule = schedule_for(self._step.config, self._num_microbatches)
        forwards = sum(action.kind == "F" for actions in schedule.actions for action in actions)
        moved = self._step.moved.times(forwards * replicas)
        training = plan_statistics(self.plans * replicas, arrays, moved, self.steps_run)
        evaluation = plan_statistics(self._evaluations * replicas, arrays, Moved(), self.forwards_run)
        return total_statistics([training, evaluation])

    def place(self, params: StagedParameters) -> StagedParameters:
        """The parameters where a step finds and leaves them: the layers' in pinned host memory."""
        return self._parameters.place(params) if self.moves_parameters else params

    def update(self, change: Change, params: Any, state: Any, gradients: Any, here: Any) -> tuple[Any, Any]:
        """New parameters and optimizer's state; see OffloadedParameters.update."""
        if not self.moves_parameters:
            return change(params, state, gradients)
        return self._parameters.update(self._update, change, params, state, gradients, here, self.trace)

    def _layers_of_slots(self) -> list[list[int]]:
        """By rank: the layer in each slot; where there is only padding, a number that no layer has."""
        config = self._step.config
        found = [
            [config.num_layers + slot for slot in range(len(self._slots))]
            for _ in range(config.pipeline_model_parallel_size)
        ]
        for layer, (rank, vp_stage, place) in self._step.stages.by_layer().items():
            found[rank][self._slots.index((place.kind, vp_stage, place.position))] = layer
        return found

    def _plan_update(self, layers: Any) -> OffloadPlan:
        sizes = {layer: self._sizes[slot] for slot, layer in enumerate(layers)}
        uses = [Use("S", layer) for layer in layers]
        return plan_offload(uses, sizes, self._step.config.tensor_offload_num_prefetch_layers, then=())


def slots_of(staged: StagedParameters) -> list[tuple[int, int, int] | None]:
    """For every leaf: kind, virtual stage and position of the layers whose it is, one a rank; None of an end's."""
    paths: list[Any] = [path for path, _ in jax.tree_util.tree_flatten_with_path(staged)[0]]
    return [(path[1].idx, path[3].idx, path[4].idx) if path[0].name == "layers" else None for path in paths]


def _is_staged(item: Any) -> bool:
    return isinstance(item, StagedParameters)


def _staged_part(leaves: list[Any], is_layer: bool) -> StagedParameters:
    """Some leaves as a tree of the whole's kind, of which it is known what is stacked by rank."""
    whole: Any = StagedParameters  # here of lists, without names
    return whole(leaves, []) if is_layer else whole([], leaves)
