"""Values that activation offload moves to the host, in a simulation of a forward and its backward.

The saved values of a layer that move form a group. Its copy to the host begins when the layer's forward ends, and the
device memory is free when the forward of the next layer has ended. The groups of the next ``num_prefetch_layers + 1``
backwards are fetched when a layer's backward begins, and its own group when a replay of the layer begins. The last
``num_prefetch_layers + 1`` groups before the first backward do not move. See diptych.plans.offload.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from diptych.planner.memory.nodes import Value
from diptych.plans.config import TransformerConfig
from diptych.plans.model.layers import Offloaded, is_offloaded
from diptych.plans.offload import ActivationMoves, Use, action_uses, layers_that_stay, plan_activations
from diptych.plans.recompute import RecomputeBlock, recompute_blocks
from diptych.plans.schedule.actions import Action, Schedule


class MovingValues:
    """The groups of values that move, and those that are on the host.

    Args:
        moved: values of each layer whose group moves.
        min_bytes: values of fewer bytes stay on the device.
        num_prefetch_layers: backwards ahead of the current one whose groups are on the device.
        returned: layers whose groups are on the device again when the backward begins.
    """

    def __init__(
        self,
        moved: Mapping[int, Offloaded] | None = None,
        min_bytes: int = 0,
        num_prefetch_layers: int = 1,
        returned: Collection[int] = (),
    ) -> None:
        self._moved = moved or {}
        self.returned = frozenset(returned)
        self._min_bytes = min_bytes
        self._ahead = num_prefetch_layers
        self.groups: defaultdict[int, dict[int, Value]] = defaultdict(dict)
        """Values of each layer's group, by identity."""
        self.holders: Counter[int] = Counter()
        """Operations of moving groups that save a value; a value that others save too stays on the device."""
        self.on_host: set[int] = set()
        self._leaving: int | None = None

    def add(self, layer: int, values: Iterable[Value]) -> None:
        """Add values that an operation of a layer saves."""
        offloaded = self._moved.get(layer)
        for value in values if offloaded is not None else ():
            if is_offloaded(value.name, offloaded) and value.size >= self._min_bytes and not value.is_view:
                self.groups[layer][id(value)] = value
                self.holders[id(value)] += 1

    def values(self) -> dict[int, list[Value]]:
        """Return the values of each layer's group, each value with the first group that has it."""
        found: dict[int, list[Value]] = {}
        seen: set[int] = set()
        for layer in sorted(self.groups):
            found[layer] = [value for number, value in self.groups[layer].items() if number not in seen]
            seen.update(self.groups[layer])
        return found

    def end_forward(self, layer: int) -> list[Value]:
        """End the forward of a layer, and return the values whose copy to the host has ended with it."""
        left = [] if self._leaving is None else [*self.groups[self._leaving].values()]
        self._leaving = layer if layer in self._moved else None
        return left

    def begin_backward(self, layer: int) -> list[Value]:
        """Begin the backward of a layer, and return the values that are fetched."""
        return [value for number in range(layer, layer - self._ahead - 1, -1) for value in self.fetch(number)]

    def fetch(self, layer: int) -> list[Value]:
        """Return the values of a layer that are fetched, because they are on the host."""
        fetched = [value for value in self.groups[layer].values() if id(value) in self.on_host]
        self.on_host.difference_update(map(id, fetched))
        return fetched


def values_that_move(
    config: TransformerConfig, layers: Iterable[int], blocks: Iterable[RecomputeBlock]
) -> dict[int, Offloaded]:
    """Return the values that move of every layer whose saved values do; arguments as in moving_values."""
    if not config.enable_activation_offload:
        return {}
    found = {number: config.layer(number).offload for number in set(layers) - layers_that_stay(config, blocks)}
    return {number: values for number, values in found.items() if values is not None}


@dataclass
class ActionMoves:
    """Moves of saved values in an action of a pipeline rank."""

    leaving: frozenset[int]
    """Layers whose values move to the host after the microbatch's forward."""
    on_host: frozenset[int] = frozenset()
    """Layers whose values are on the host when the microbatch's backward begins."""
    frees: Use | None = None
    """The forward of an earlier action whose values are free on the device when the first layer's forward has ended."""
    fetches: dict[int, list[Use]] = field(default_factory=dict)
    """By layer, forwards of other microbatches whose values are fetched when the layer's backward begins."""


def moving_values(
    config: TransformerConfig,
    layers: Sequence[int],
    blocks: Iterable[RecomputeBlock],
    moves: ActionMoves | None = None,
) -> MovingValues:
    """Return the groups of a stage's layers that move, still empty.

    Args:
        config: the model.
        layers: layers of the stage, in order.
        blocks: recompute blocks with the layers.
        moves: moves of the microbatch; None: backward follows forward at once, so the last groups stay.
    """
    ahead = config.tensor_offload_num_prefetch_layers
    leaving = set(layers[: -ahead - 1]) if moves is None else moves.leaving
    returned = frozenset() if moves is None else moves.leaving - moves.on_host
    moved = {number: each for number, each in values_that_move(config, layers, blocks).items() if number in leaving}
    return MovingValues(moved, config.activation_offload_min_bytes, ahead, returned)


class _Places(NamedTuple):
    """The places of the saved values that move, by the forward that saved them."""

    on_host: set[Use]
    outgoing: list[Use]
    """The forward whose values are being copied to the host, if there is one."""


def action_moves(config: TransformerConfig, schedule: Schedule, rank: int) -> list[ActionMoves]:
    """Return the moves of saved values in each action of a pipeline rank.

    A copy to the host that begins with the last forward of an action ends with the first forward of a later one.

    Args:
        config: the model, with its pipeline.
        schedule: schedule of the step.
        rank: the pipeline rank.
    """
    actions = schedule.actions[rank]
    if not config.enable_activation_offload:
        return [ActionMoves(frozenset()) for _ in actions]
    blocks = [
        block
        for vp_stage in range(config.virtual_pipeline_model_parallel_size or 1)
        for block in recompute_blocks(config, vp_stage, rank)
    ]
    uses = [action_uses(config, action, rank) for action in actions]
    joined = [use for each in uses for use in each]
    stay = layers_that_stay(config, blocks)
    steps = iter(plan_activations(joined, config.tensor_offload_num_prefetch_layers, stay=stay))
    left: dict[tuple[int, int], frozenset[int]] = {}
    places = _Places(set(), [])
    found = []
    for action, own in zip(actions, uses, strict=True):
        each = [next(steps) for _ in own]
        if action.kind == "F":
            left[action[1:]] = frozenset(step.use.layer for step in each if step.evicts)
            found.append(_forward_moves(each, left[action[1:]], places))
        else:
            found.append(_backward_moves(action, each, left[action[1:]], places))
    return found


def _forward_moves(steps: Iterable[ActivationMoves], leaving: frozenset[int], places: _Places) -> ActionMoves:
    """Return the moves of a forward, and update the places."""
    moves = ActionMoves(leaving)
    for number, step in enumerate(steps):
        if number == 0 and places.outgoing:
            moves.frees = places.outgoing[0]
        places.on_host.update(places.outgoing)
        places.outgoing[:] = [step.use] * step.evicts
    return moves


def _backward_moves(
    action: Action, steps: Iterable[ActivationMoves], leaving: frozenset[int], places: _Places
) -> ActionMoves:
    """Return the moves of a backward, and update the places."""
    own = {use.layer for use in places.on_host if use.microbatch == action.microbatch and use.layer in leaving}
    moves = ActionMoves(leaving, frozenset(own))
    for step in steps:
        for forward in step.fetches:
            is_own = forward.microbatch == action.microbatch and forward.layer in leaving
            if forward in places.on_host and not is_own:
                moves.fetches.setdefault(step.use.layer, []).append(forward)
            places.on_host.discard(forward)
            places.outgoing[:] = [use for use in places.outgoing if use != forward]
    return moves
