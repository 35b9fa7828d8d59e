"""Activation offload: values that layers save for backward are on the host while other layers are in use."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import jax
from jax import Array

from diptych.plans.model.layers import Offloaded, is_offloaded
from diptych.plans.model.values import LAYER_INPUT
from diptych.plans.offload import MoveCounter, Use, activation_event
from jax_impl.offload.layer import Saved
from jax_impl.offload.residency import Pass, array_to_host, is_on_host

State = TypeVar("State")


class Activations:
    """The saved values of every layer, while the moves of a plan are traced.

    Args:
        saved: values that are already saved, by layer.
        context: the pass, with the plan of moves and the counters for them.
        min_bytes: arrays of fewer bytes stay on the device.
    """

    def __init__(self, saved: Mapping[int, Saved], context: Pass, min_bytes: int) -> None:
        self.saved = dict(saved)
        self._plan = context.activations
        self._moved = context.moved or MoveCounter()
        self._min_bytes = min_bytes
        self._trace = [] if context.trace is None else context.trace

    def begin(self, use: Use, state: State) -> State:
        """Start the copies to the device that the plan assigns to the start of a use.

        Args:
            use: the use.
            state: inputs of the use, for which the copies wait; see Residency.begin.

        Returns:
            The state, which replaces the argument.
        """
        moves = self._plan.get(use)
        for forward in () if moves is None else moves.fetches:
            saved = self.saved[forward.layer]
            on_host = [leaf for leaf in jax.tree.leaves(saved) if is_on_host(leaf)]
            if on_host:
                on_host, state = jax.lax.optimization_barrier((on_host, state))
                returned = iter(jax.device_put(on_host, jax.memory.Space.Device))
                self.saved[forward.layer] = jax.tree.map(
                    lambda x, returned=returned: next(returned) if is_on_host(x) else x, saved
                )
                self._trace.append(activation_event("+", forward))
        return state

    def end(self, use: Use, saved: Saved, names: Sequence[str | None], offloaded: Offloaded | None) -> None:
        """Record the saved values of a forward that has ended, and copy those to the host that the plan moves.

        Args:
            use: the forward.
            saved: its values saved for backward.
            names: names of ``saved.values``; None: a value has none.
            offloaded: values of the layer that move; None: none.
        """
        self.saved[use.layer] = saved
        moves = self._plan.get(use)
        if moves is not None and moves.evicts:
            values = [self._moved_to_host(x, n, offloaded) for x, n in zip(saved.values, names, strict=True)]
            x = None if saved.x is None else self._moved_to_host(saved.x, LAYER_INPUT, offloaded)
            self.saved[use.layer] = Saved(x, values)
            if any(map(is_on_host, jax.tree.leaves(self.saved[use.layer]))):
                self._trace.append(activation_event("-", use))

    def _moved_to_host(self, array: Array, name: str | None, offloaded: Offloaded | None) -> Array:
        """Copy a value to the host, unless it stays on the device or is too small."""
        nbytes = array.size * array.dtype.itemsize
        if nbytes < self._min_bytes or not is_offloaded(name, offloaded):
            return array
        self._moved.note(nbytes)
        return array_to_host(array)
