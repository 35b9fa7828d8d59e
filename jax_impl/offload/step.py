"""A training step with offload: microbatches' passes through the layers, and the optimizer's, as one plan has them."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jax_impl.offload.device import Device, Layers, Pass
from jax_impl.offload.moves import layer_numbers
from plans.config import TransformerConfig
from plans.offload import Step, layer_storages, plan_offload, step_uses
from plans.recompute import recompute_blocks


class _Parts(NamedTuple):
    """A tree like the parameters', taken apart."""

    rest: dict[int, Any]
    """By place among the tree's leaves: those of no layer."""
    layers: dict[int, list[Any]]


class OffloadedStep:
    """Moves and computation of a training step whose layers' parameters lie on the host before and after it.

    Where the configuration does not enable offload, the same calls compute the same and move nothing.

    Args:
        config: the model's.
        params: its parameters, or their shapes.
        num_microbatches: passes of one step.
        devices: that share the model.

    Raises:
        NotImplementedError: the model is cut into a pipeline, there are several devices, or activations are to move.
    """

    def __init__(
        self, config: TransformerConfig, params: nnx.State, num_microbatches: int = 1, devices: int = 1
    ) -> None:
        self.trace: list[str] | None = None
        """Every move and use of a step, in the order of the program, as it is traced, where somebody makes it a list;
        see TensorOffloadManager.trace."""
        self.enabled, self.steps_run = config.enable_tensor_offload, 0
        self.plan = plan_offload((), {}, then=())
        """What moves in a step; at its end every layer has left."""
        if config.enable_activation_offload:
            raise NotImplementedError(
                "offload: expected enable_activation_offload=False in JAX, which moves parameters alone, got True; "
                "leave it out, or recompute what is to be kept away from the device"
            )
        if not self.enabled:
            return
        _check_devices(config, devices)
        self._numbers, self._structure = layer_numbers(params), jax.tree.structure(params)
        layers = self._split(params).layers
        self._num_microbatches = num_microbatches
        uses = step_uses(sorted(layers), num_microbatches, recompute_blocks(config))
        self.plan = plan_offload(uses, layer_storages(config), config.tensor_offload_num_prefetch_layers, then=())
        steps = self.plan.steps
        length = (len(steps) - len(layers)) // num_microbatches
        passes = [steps[k * length : (k + 1) * length] for k in range(num_microbatches)]
        self._begin, self._pass = _first_and_every(passes)
        self._forward, self._update = len(layers), steps[num_microbatches * length :]
        self._stay = _here_after(self._pass, self._begin)

    @property
    def stats(self) -> dict[str, Any]:
        """What has been moved in the ``steps_run`` so far, by the plan; see TensorOffloadManager.stats.

        How long a step waits for copies is not known inside a compiled program.
        """
        steps, late, here, peak = self.plan.steps, Counter(), 0, 0
        arrays = Counter(self._numbers)
        for step in steps:
            peak = max(peak, here := here + len(step.fetches))
            here -= len(step.evictions)
        for place in self.plan.late:
            late[str(steps[place].use.layer)] += self.steps_run
        return {
            "bytes_in": self.plan.bytes_in * self.steps_run,
            "bytes_out": self.plan.bytes_out * self.steps_run,
            "copies_in": sum(arrays[layer] for step in steps for layer in step.fetches) * self.steps_run,
            "copies_out": sum(arrays[step.use.layer] for step in steps if step.use.kind == "S") * self.steps_run,
            "hits": len(steps) * self.steps_run - late.total(),
            "misses": late.total(),
            "misses_by_layer": dict(sorted(late.items())),
            "peak_bytes": self.plan.peak_bytes,
            "peak_layers": peak,
        }

    def place(self, params: Any) -> Any:
        """The parameters where a step finds and leaves them: the layers' in pinned host memory."""
        if not self.enabled:
            return params

        def to_host(number: int | None, array: Array) -> Array:
            return array if number is None else jax.device_put(array, array.sharding.with_memory_kind("pinned_host"))

        return self._structure.unflatten(map(to_host, self._numbers, jax.tree.leaves(params)))

    def begin(self, params: Any) -> Layers:
        """What the step's first use fetches, where all passes are one loop, whose every turn begins with it there."""
        if not self.enabled:
            return {}
        hosts = self._split(params).layers
        self._record(f"+{number}" for number in self._begin)
        return {number: jax.device_put(hosts[number], jax.memory.Space.Device) for number in self._begin}

    def value_and_grad(
        self, loss_fn: Callable[..., Array], params: Any, here: Layers, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Array, Any], Layers]:
        """Loss and gradients of one microbatch.

        Args:
            loss_fn: ``loss_fn(params, *args, **kwargs)`` runs the model once.
            params: the layers' on the host.
            here: the layers that are on the device, by begin or by the microbatch before.
            args, kwargs: of the loss.

        Returns:
            Loss and gradients, all on the device; the layers that are on the device now.
        """
        if not self.enabled:
            return jax.value_and_grad(loss_fn)(params, *args, **kwargs), here
        parts, trace = self._split(params), []
        zeros = self._split(jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), params)).layers
        stay = {number: zeros[number] for number in self._stay}

        def run(rest: dict[int, Array], gradients: Layers, stay: Layers) -> Array:
            steps = self._pass[: self._forward], self._pass[self._forward :]
            with Pass(*steps, here, gradients, stay, trace).active():
                return loss_fn(self._join(_Parts(rest, parts.layers)), *args, **kwargs)

        loss, found = jax.value_and_grad(run, argnums=(0, 1, 2))(parts.rest, zeros, stay)
        self._record(trace * self._num_microbatches)
        return (loss, self._join(_Parts(*found[:2]))), found[2]

    def update(
        self,
        change: Callable[[Any, Any, Any], tuple[Any, Any]],
        params: Any,
        state: Any,
        gradients: Any,
        here: Layers,
    ) -> tuple[Any, Any]:
        """The optimizer's update: of what is not offloaded, then layer by layer, each of which goes to the host.

        Args:
            change: ``change(params, state, gradients)`` gives new parameters and state, of any part of the parameters,
                leaf by leaf.
            params: the layers' on the host.
            state: the optimizer's; every nnx.State in it is like the parameters, the rest belongs to all of them.
            gradients: on the device.
            here: by value_and_grad.
        """
        if not self.enabled:
            return change(params, state, gradients)
        parts, grads = self._split(params), self._split(gradients)
        items, structure = jax.tree.flatten(state, is_leaf=_is_state)
        moments = {place: self._split(item) for place, item in enumerate(items) if _is_state(item)}

        def change_part(part: Any, grad: Any, own: dict[int, Any]) -> tuple[Any, list[Any]]:
            whole = structure.unflatten([own.get(place, item) for place, item in enumerate(items)])
            new, changed = change(part, whole, grad)
            return new, structure.flatten_up_to(changed)

        rest, found = change_part(parts.rest, grads.rest, {place: m.rest for place, m in moments.items()})
        device = Device(parts.layers, here, self.trace)
        new = {place: _Parts(found[place], {}) for place in moments}
        before: tuple[list[Array], dict[int, list[Array]]] = [], {}
        last = -1
        for step in self._update:
            number = step.use.layer
            own = grads.layers[number], {place: m.layers[number] for place, m in moments.items()}
            own, before = device.begin(step, (own, before))  # also after the update before it: one at a time
            for place, values in before[1].items():
                new[place].layers[last] = values
            with jax.named_scope(str(step.use)):
                device.here[number], changed = change_part(device.here[number], *own)
            last, before = number, (device.here[number], {place: changed[place] for place in moments})
            for place, values in before[1].items():
                new[place].layers[last] = values
            device.end(step, changed=True)
        assert not device.here, f"the plan ends with {[*device.here]} on the device"
        joined = [self._join(new[place]) if place in new else item for place, item in enumerate(found)]
        return self._join(_Parts(rest, device.hosts)), structure.unflatten(joined)

    def _split(self, params: nnx.State) -> _Parts:
        parts = _Parts({}, {})
        for place, (number, leaf) in enumerate(zip(self._numbers, jax.tree.leaves(params), strict=True)):
            if number is None:
                parts.rest[place] = leaf
            else:
                parts.layers.setdefault(number, []).append(leaf)
        return parts

    def _join(self, parts: _Parts) -> nnx.State:
        """The inverse."""
        left = {number: iter(leaves) for number, leaves in parts.layers.items()}
        return self._structure.unflatten(
            parts.rest[place] if number is None else next(left[number]) for place, number in enumerate(self._numbers)
        )

    def _record(self, events: Iterable[str]) -> None:
        if self.trace is not None:
            self.trace.extend(events)


def _check_devices(config: TransformerConfig, devices: int) -> None:
    if config.pipeline_model_parallel_size > 1:
        raise NotImplementedError(
            "offload: expected enable_tensor_offload or pipeline_model_parallel_size above 1 in JAX, got both (with "
            f"{config.pipeline_model_parallel_size}); leave one out"
        )
    if devices > 1:
        raise NotImplementedError(
            f"offload: expected one device with enable_tensor_offload in JAX, got a mesh of {devices}; leave one out"
        )


def _is_state(item: Any) -> bool:
    return isinstance(item, nnx.State)


def _first_and_every(passes: Sequence[tuple[Step, ...]]) -> tuple[tuple[int, ...], tuple[Step, ...]]:
    """What is fetched before the first pass, and what every pass does, as one loop needs it."""
    if len(passes) == 1:
        return (), passes[0]
    passes = [tuple(s._replace(use=s.use._replace(microbatch=0)) for s in one) for one in passes]
    (first, *others), every = passes[0], passes[1]
    begin = tuple(layer for layer in first.fetches if layer not in every[0].fetches)
    looped = first._replace(fetches=every[0].fetches), *others
    assert all(one == every for one in (looped, *passes[1:])), (
        "the plan moves other layers in one microbatch than in another"
    )
    return begin, every


def _here_after(steps: Sequence[Step], here: Iterable[int]) -> tuple[int, ...]:
    """Layers that are on the device after some steps, given those before."""
    found = dict.fromkeys(here)
    for step in steps:
        found |= dict.fromkeys(step.fetches)
        for layer in step.evictions:
            del found[layer]
    return tuple(found)
