"""What layers keep for their backwards, on the host while other layers are in use."""

from collections.abc import Mapping
from typing import TypeVar

import jax
from jax import Array

from diptych.plans.offload import Use, activation_event
from jax_impl.offload.device import Moved, Pass, is_on_host
from jax_impl.offload.layer import Kept

State = TypeVar("State")


class Activations:
    """What is kept of every layer, while the steps of a plan are traced one by one.

    Args:
        kept: by layer, what there is already.
        told: the pass: says what moves around a use, and is told what has.
        min_bytes: smaller arrays stay on the device.
    """

    def __init__(self, kept: Mapping[int, Kept], told: Pass, min_bytes: int) -> None:
        self.kept = dict(kept)
        self._plan, self._moved, self._min_bytes = told.activations, told.moved or Moved(), min_bytes
        self._trace = [] if told.trace is None else told.trace

    def begin(self, use: Use, state: State) -> State:
        """Issue what comes back when a use begins.

        Args:
            use: the use.
            state: what the use begins from, for which copies wait; see Device.begin.

        Returns:
            The state, to be used from now on.
        """
        step = self._plan.get(use)
        for forward in () if step is None else step.fetches:
            kept = self.kept[forward.layer]
            away = [leaf for leaf in jax.tree.leaves(kept) if is_on_host(leaf)]
            if away:
                away, state = jax.lax.optimization_barrier((away, state))
                back = iter(jax.device_put(away, jax.memory.Space.Device))
                self.kept[forward.layer] = jax.tree.map(lambda x, back=back: next(back) if is_on_host(x) else x, kept)
                self._trace.append(activation_event("+", forward))
        return state

    def end(self, use: Use, kept: Kept) -> None:
        """A forward has ended: hold what it keeps, or send it to the host."""
        self.kept[use.layer] = kept
        step = self._plan.get(use)
        if step is not None and step.leaves:
            self.kept[use.layer] = jax.tree.map(self._leave, kept)
            if any(map(is_on_host, jax.tree.leaves(self.kept[use.layer]))):
                self._trace.append(activation_event("-", use))

    def _leave(self, array: Array) -> Array:
        nbytes = array.size * array.dtype.itemsize
        if nbytes < self._min_bytes:
            return array
        self._moved.note(nbytes)
        return jax.device_put(array, jax.memory.Space.Host)
