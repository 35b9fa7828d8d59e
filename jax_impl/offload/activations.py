"""Activation offload: values that layers save for backward are on the host while other layers are in use."""

from collections.abc import Mapping
from typing import TypeVar

import jax
from jax import Array

from diptych.plans.offload import Use, activation_event
from jax_impl.offload.device import Moved, Pass, is_on_host
from jax_impl.offload.layer import Saved

State = TypeVar("State")


class Activations:
    """The saved values of every layer, while the steps of a plan are traced.

    Args:
        saved: values that are already saved, by layer.
        context: the pass, with the plan of moves and the counters for them.
        min_bytes: arrays of fewer bytes stay on the device.
    """

    def __init__(self, saved: Mapping[int, Saved], context: Pass, min_bytes: int) -> None:
        self.saved = dict(saved)
        self._plan = context.activations
        self._moved = context.moved or Moved()
        self._min_bytes = min_bytes
        self._trace = [] if context.trace is None else context.trace

    def begin(self, use: Use, state: State) -> State:
        """Start the copies to the device that the plan assigns to the start of a use.

        Args:
            use: the use.
            state: inputs of the use, for which the copies wait; see Device.begin.

        Returns:
            The state, which replaces the argument.
        """
        step = self._plan.get(use)
        for forward in () if step is None else step.fetches:
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

    def end(self, use: Use, saved: Saved) -> None:
        """Record the saved values of a forward that has ended, and copy them to the host if the plan moves them.

        Args:
            use: the forward.
            saved: its values saved for backward.
        """
        self.saved[use.layer] = saved
        step = self._plan.get(use)
        if step is not None and step.leaves:
            self.saved[use.layer] = jax.tree.map(self._move_to_host, saved)
            if any(map(is_on_host, jax.tree.leaves(self.saved[use.layer]))):
                self._trace.append(activation_event("-", use))

    def _move_to_host(self, array: Array) -> Array:
        """Copy an array to the host, unless it is too small."""
        nbytes = array.size * array.dtype.itemsize
        if nbytes < self._min_bytes:
            return array
        self._moved.note(nbytes)
        return jax.device_put(array, jax.memory.Space.Host)
