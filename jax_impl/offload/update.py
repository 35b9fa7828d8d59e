"""The optimizer's update, layer by layer, of parameters whose layers lie on the host before and after it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax import Array

from diptych.plans.offload import Step
from jax_impl.offload.device import Device, Layers


class Parts(NamedTuple):
    """A tree like the parameters', taken apart."""

    rest: dict[int, Any]
    """By place among the tree's leaves: those of no layer."""
    layers: dict[int, list[Any]]


Change = Callable[[Any, Any, Any], tuple[Any, Any]]
"""``change(params, state, gradients)`` gives new parameters and state, of any part of the parameters, leaf by leaf."""


class OffloadedParameters:
    """A tree of parameters, which of its leaves are layers', and how they are moved and updated.

    Args:
        params: the tree, or one of equal structure.
        numbers: by leaf, the layer whose it is, or None.
        is_alike: whether something within an optimizer's state is a tree like the parameters.
        part_of: makes of some leaves, and whether they are a layer's, what ``change`` is given; what it gives back has
            them as leaves.
    """

    def __init__(
        self,
        params: Any,
        numbers: Sequence[int | None],
        is_alike: Callable[[Any], bool] = lambda item: isinstance(item, nnx.State),
        part_of: Callable[[list[Any], bool], Any] = lambda leaves, is_layer: leaves,
    ) -> None:
        self.numbers, self.structure = list(numbers), jax.tree.structure(params)
        self._is_alike, self._part_of = is_alike, part_of

    def place(self, params: Any) -> Any:
        """The parameters where a step finds and leaves them: the layers' in pinned host memory."""

        def to_host(number: int | None, array: Array) -> Array:
            return array if number is None else jax.device_put(array, array.sharding.with_memory_kind("pinned_host"))

        return self.structure.unflatten(map(to_host, self.numbers, jax.tree.leaves(params)))

    def split(self, params: Any) -> Parts:
        """A tree like the parameters', taken apart."""
        parts = Parts({}, {})
        for place, (number, leaf) in enumerate(zip(self.numbers, jax.tree.leaves(params), strict=True)):
            if number is None:
                parts.rest[place] = leaf
            else:
                parts.layers.setdefault(number, []).append(leaf)
        return parts

    def join(self, parts: Parts) -> Any:
        """The inverse."""
        left = {number: iter(leaves) for number, leaves in parts.layers.items()}
        return self.structure.unflatten(
            parts.rest[place] if number is None else next(left[number]) for place, number in enumerate(self.numbers)
        )

    def update(
        self,
        steps: Iterable[Step],
        change: Change,
        params: Any,
        state: Any,
        gradients: Any,
        here: Layers,
        trace: list[str] | None = None,
    ) -> tuple[Any, Any]:
        """New parameters and state: of what is not offloaded, then layer by layer, each of which goes to the host.

        Args:
            steps: of the plan; every layer's update, after which no layer is on the device.
            change: see Change.
            params: the layers' on the host.
            state: the optimizer's; what is not like the parameters belongs to all of them.
            gradients: on the device.
            here: layers that are on the device.
            trace: see Device.
        """
        parts, grads = self.split(params), self.split(gradients)
        items, structure = jax.tree.flatten(state, is_leaf=self._is_alike)
        moments = {place: self.split(item) for place, item in enumerate(items) if self._is_alike(item)}

        change_part = partial(self._change_part, change, items, structure)
        places = list(parts.rest)
        rest, found = change_part(
            [*parts.rest.values()],
            [*grads.rest.values()],
            {place: [*m.rest.values()] for place, m in moments.items()},
            is_layer=False,
        )
        device = Device(parts.layers, here, trace)
        new = {place: Parts(dict(zip(places, found[place], strict=True)), {}) for place in moments}
        before: tuple[list[Array], dict[int, list[Array]]] = [], {}
        last = -1
        for step in steps:
            number = step.use.layer
            own = grads.layers[number], {place: m.layers[number] for place, m in moments.items()}
            own, before = device.begin(step, (own, before))  # also after the update before it: one at a time
            for place, values in before[1].items():
                new[place].layers[last] = values
            with jax.named_scope(str(step.use)):
                device.here[number], changed = change_part(device.here[number], *own, is_layer=True)
            last, before = number, (device.here[number], {place: changed[place] for place in moments})
            for place, values in before[1].items():
                new[place].layers[last] = values
            device.end(step, changed=True)
        assert not device.here, f"the plan ends with {[*device.here]} on the device"
        joined = [self.join(new[place]) if place in new else item for place, item in enumerate(found)]
        parameters = Parts(dict(zip(places, rest, strict=True)), device.hosts)
        return self.join(parameters), structure.unflatten(joined)

    def _change_part(
        self,
        change: Change,
        items: Sequence[Any],
        structure: Any,
        part: list[Any],
        grad: list[Any],
        own: Mapping[int, list[Any]],
        is_layer: bool,
    ) -> tuple[list[Any], list[Any]]:
        """New leaves of a part, and the state's new items: leaves of those that are like the parameters.

        Args:
            change: see Change.
            items, structure: the state, taken apart.
            part, grad: leaves of parameters and gradients.
            own: by place among the items: the part's leaves in what is like the parameters.
            is_layer: whether the part is a layer.
        """
        part, grad = self._part_of(part, is_layer), self._part_of(grad, is_layer)
        whole = [self._part_of(own[p], is_layer) if p in own else item for p, item in enumerate(items)]
        new, changed = change(part, structure.unflatten(whole), grad)
        found = structure.flatten_up_to(changed)
        return jax.tree.leaves(new), [jax.tree.leaves(x) if p in own else x for p, x in enumerate(found)]
