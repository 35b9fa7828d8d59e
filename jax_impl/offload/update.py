"""The optimizer's update of offloaded parameters, layer by layer."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax import Array

from diptych.plans.offload import UseMoves
from jax_impl.offload.residency import Layers, Residency

LAYERS = ("decoder", "layers")
"""Keys above the number of a layer in a tree of parameters."""


class Parts(NamedTuple):
    """The leaves of a tree with the structure of the parameters, separated by layer."""

    rest: dict[int, Any]
    """Leaves outside layers, by their index in the tree."""
    layers: dict[int, list[Any]]


UpdateFunction = Callable[[Any, Any, Any], tuple[Any, Any]]
"""``update_function(params, state, gradients)`` returns new parameters and state for any subset of leaves."""


class OffloadedParameters:
    """The placement and the update of a tree of parameters with offloaded layers.

    Args:
        params: the tree, or one of equal structure.
        numbers: layer of each leaf, or None.
        is_parameter_tree: returns True if a part of the optimizer state is a tree with the structure of the parameters.
        part_of: converts some leaves to an argument of ``update_function``; its second argument is True for the leaves
            of a layer. The result of ``update_function`` must have the same leaves.
    """

    def __init__(
        self,
        params: Any,
        numbers: Sequence[int | None],
        is_parameter_tree: Callable[[Any], bool] = lambda item: isinstance(item, nnx.State),
        part_of: Callable[[list[Any], bool], Any] = lambda leaves, is_layer: leaves,
    ) -> None:
        self.numbers = list(numbers)
        self.structure = jax.tree.structure(params)
        self._is_parameter_tree = is_parameter_tree
        self._part_of = part_of

    def place(self, params: Any) -> Any:
        """Return the parameters as a step expects them, with those of layers in pinned host memory."""

        def to_host(number: int | None, array: Array) -> Array:
            return array if number is None else jax.device_put(array, array.sharding.with_memory_kind("pinned_host"))

        return self.structure.unflatten(map(to_host, self.numbers, jax.tree.leaves(params)))

    def split(self, params: Any) -> Parts:
        """Separate the leaves of a tree by layer."""
        parts = Parts({}, {})
        for index, (number, leaf) in enumerate(zip(self.numbers, jax.tree.leaves(params), strict=True)):
            if number is None:
                parts.rest[index] = leaf
            else:
                parts.layers.setdefault(number, []).append(leaf)
        return parts

    def join(self, parts: Parts) -> Any:
        """Return the tree of leaves that split() separated."""
        remaining = {number: iter(leaves) for number, leaves in parts.layers.items()}
        return self.structure.unflatten(
            parts.rest[index] if number is None else next(remaining[number])
            for index, number in enumerate(self.numbers)
        )

    def update(
        self,
        moves: Iterable[UseMoves],
        update_function: UpdateFunction,
        params: Any,
        state: Any,
        gradients: Any,
        on_device: Layers,
        trace: list[str] | None = None,
    ) -> tuple[Any, Any]:
        """Update the leaves outside layers, then layer by layer, and return new parameters and state.

        Args:
            moves: moves of the plan: the update of every layer, after which no layer is on the device.
            update_function: see UpdateFunction.
            params: parameters, with those of layers on the host.
            state: optimizer state; parts without the structure of the parameters, such as a step count, are shared.
            gradients: gradients on the device.
            on_device: layers on the device.
            trace: see Residency.
        """
        parts = self.split(params)
        grads = self.split(gradients)
        items, structure = jax.tree.flatten(state, is_leaf=self._is_parameter_tree)
        moments = {index: self.split(item) for index, item in enumerate(items) if self._is_parameter_tree(item)}

        update_part = partial(self._update_part, update_function, items, structure)
        rest, new_items = update_part(
            [*parts.rest.values()],
            [*grads.rest.values()],
            {index: [*m.rest.values()] for index, m in moments.items()},
            is_layer=False,
        )
        residency = Residency(parts.layers, on_device, trace)
        new = {index: Parts(dict(zip(parts.rest, new_items[index], strict=True)), {}) for index in moments}
        updated: tuple[list[Array], dict[int, list[Array]]] = ([], {})  # parameters and moments of the previous layer
        previous = -1

        def keep_moments() -> None:
            for index, values in updated[1].items():
                new[index].layers[previous] = values

        for each in moves:
            number = each.use.layer
            layer_inputs = (grads.layers[number], {index: m.layers[number] for index, m in moments.items()})
            # The copies wait for the previous update, too, if it has moments: XLA removes a barrier's operand whose
            # result is not read, so these are kept as they come out of the barrier.
            layer_inputs, updated = residency.begin(each, (layer_inputs, updated))
            keep_moments()
            with jax.named_scope(str(each.use)):
                layer, changed = update_part(residency.on_device[number], *layer_inputs, is_layer=True)
            residency.on_device[number] = layer
            updated = (layer, {index: changed[index] for index in moments})
            previous = number
            residency.end(each, changed=True)
        keep_moments()
        assert not residency.on_device, f"the plan ends with {[*residency.on_device]} on the device"
        joined = [self.join(new[index]) if index in new else item for index, item in enumerate(new_items)]
        parameters = Parts(dict(zip(parts.rest, rest, strict=True)), residency.host_layers)
        return self.join(parameters), structure.unflatten(joined)

    def _update_part(
        self,
        update_function: UpdateFunction,
        items: Sequence[Any],
        structure: Any,
        part: list[Any],
        grad: list[Any],
        own: Mapping[int, list[Any]],
        is_layer: bool,
    ) -> tuple[list[Any], list[Any]]:
        """Return new leaves of a part of the parameters, and new items of the state.

        Args:
            update_function: see UpdateFunction.
            items: items of the state; those with the structure of the parameters are returned as lists of leaves.
            structure: structure of the state.
            part: leaves of the parameters.
            grad: leaves of the gradients.
            own: leaves of the part in those items that have the structure of the parameters, by index of the item.
            is_layer: True if the part is a layer.
        """
        part = self._part_of(part, is_layer)
        grad = self._part_of(grad, is_layer)
        all_items = [self._part_of(own[i], is_layer) if i in own else item for i, item in enumerate(items)]
        new, changed = update_function(part, structure.unflatten(all_items), grad)
        new_items = structure.flatten_up_to(changed)
        return jax.tree.leaves(new), [jax.tree.leaves(x) if i in own else x for i, x in enumerate(new_items)]


def layer_numbers(tree: Any) -> list[int | None]:
    """Return, for every leaf of a tree, the number of its layer in its path, or None."""
    numbers = []
    for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]:
        keys = [str(entry.key) for entry in path if isinstance(entry, jax.tree_util.DictKey)]
        at = next((k for k in range(len(keys) - 2) if tuple(keys[k : k + 2]) == LAYERS), None)
        numbers.append(None if at is None else int(keys[at + 2]))
    return numbers
