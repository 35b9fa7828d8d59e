"""Values that activation offload moves to the host, in a simulation of a forward and its backward.

A layer's saved values form a group. Its copy to the host begins when the layer's forward ends, and the device memory is
free when the forward of the next layer has ended. The groups of the next ``num_prefetch_layers + 1`` backwards are
fetched when a layer's backward begins, and a layer's own group when a replay of the layer begins. The last
``num_prefetch_layers + 1`` groups before the first backward do not move. See diptych.plans.offload.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from diptych.planner.memory.nodes import Value
from diptych.plans.config import TransformerConfig
from diptych.plans.offload import layers_that_stay
from diptych.plans.recompute import RecomputeBlock


class MovingValues:
    """The groups of values that move, and those that are on the host.

    Args:
        layers: layers whose groups move.
        min_bytes: values of fewer bytes stay on the device.
        num_prefetch_layers: backwards ahead of the current one whose groups are on the device.
    """

    def __init__(self, layers: Iterable[int] = (), min_bytes: int = 0, num_prefetch_layers: int = 1) -> None:
        self.layers = frozenset(layers)
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
        if layer in self.layers:
            for value in values:
                if value.size >= self._min_bytes and not value.is_view:
                    self.groups[layer][id(value)] = value
                    self.holders[id(value)] += 1

    def values(self) -> list[Value]:
        """Return the values of all groups, each once."""
        return [*{number: value for group in self.groups.values() for number, value in group.items()}.values()]

    def end_forward(self, layer: int) -> list[Value]:
        """End the forward of a layer, and return the values whose copy to the host has ended with it."""
        left = [] if self._leaving is None else [*self.groups[self._leaving].values()]
        self._leaving = layer if layer in self.layers else None
        return left

    def begin_backward(self, layer: int) -> list[Value]:
        """Begin the backward of a layer, and return the values that are fetched."""
        return [value for number in range(layer, layer - self._ahead - 1, -1) for value in self.fetch(number)]

    def fetch(self, layer: int) -> list[Value]:
        """Return the values of a layer that are fetched, because they are on the host."""
        fetched = [value for value in self.groups[layer].values() if id(value) in self.on_host]
        self.on_host.difference_update(map(id, fetched))
        return fetched


def layers_that_move(config: TransformerConfig, layers: Iterable[int], blocks: Iterable[RecomputeBlock]) -> set[int]:
    """Return the layers whose saved values move; arguments as in moving_values."""
    return set(layers) - layers_that_stay(config, blocks) if config.enable_activation_offload else set()


def moving_values(
    config: TransformerConfig, layers: Sequence[int], blocks: Iterable[RecomputeBlock], backward_follows: bool = True
) -> MovingValues:
    """Return the groups of a stage's layers that move, still empty.

    Args:
        config: the model.
        layers: layers of the stage, in order.
        blocks: recompute blocks with the layers.
        backward_follows: True if the backward of the last layer follows its forward, so that the last groups stay.
    """
    ahead = config.tensor_offload_num_prefetch_layers
    moving = layers_that_move(config, layers, blocks)
    if backward_follows:
        moving -= set(layers[-ahead - 1 :])
    return MovingValues(moving, config.activation_offload_min_bytes, ahead)
