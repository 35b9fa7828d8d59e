"""The offload manager: the public interface, and the listener of the layers' observers.

``residency.py`` moves layers, and ``scheduling.py`` decides when.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from diptych.plans.config import TransformerConfig
from diptych.plans.model.values import VALUES
from diptych.plans.offload import Use, check_num_prefetch_layers, describe_statistics
from reference_torch.offload.activations import ActivationGroup
from reference_torch.offload.lifetime import close_dropped, weak_method
from reference_torch.offload.observe import LayerObserver
from reference_torch.offload.optimizer import OptimizerParts, check_is_per_parameter
from reference_torch.offload.residency import OffloadTargets, Residency
from reference_torch.offload.saved import layer_saved_tensor_hooks
from reference_torch.offload.scheduling import UseScheduler
from reference_torch.offload.statistics import OffloadStatistics
from reference_torch.offload.update_targets import step_by_layer
from reference_torch.recompute import internals


class TensorOffloadManager:
    """A manager that places most layers' parameters on the host and fetches each layer in time for its use.

    Register the layers, then train as before::

        manager = TensorOffloadManager(num_prefetch_layers=1)
        for number, layer in enumerate(model.layers):
            manager.register_layer(number, layer)
        ...
        loss.backward()
        manager.step(optimizer)  # instead of optimizer.step(): layer by layer

    A layer is on the device during its forward and its backward, together with the next ``num_prefetch_layers`` layers
    in the order of uses. Its gradients and the optimizer state stay on the device by default. Any other read of a
    parameter fetches its layer first. Unregistered modules (embedding, final norm, head) stay on the device. Keep
    a reference to the manager, because deleting it closes it.

    With ``optimizer_state``, step() also moves what the optimizer stores for the parameters of layers, such as AdamW's
    moments: it is on the device only during the update of its layer. With ``gradients``, a gradient is on the device
    while backward adds to it and during the update of its layer. It leaves when the backward of the next layer begins.

    Args:
        enabled: if False, nothing is registered and nothing moves.
        pin_memory: place host copies in pinned memory; only on a GPU.
        num_prefetch_layers: number of layers fetched ahead of the one in use; 0: each layer is fetched when it is used.
            If it is at least the number of layers, all layers stay on the device.
        parameters: offload the parameters of layers.
        activations: offload the tensors that layers save for backward, except for the ``num_prefetch_layers + 1``
            layers whose backwards come next.
        activation_min_bytes: activations of fewer bytes stay on the device.
        activation_layers: numbers of the layers whose activations move; None: all.
        activation_values: names of the values that move, of layers of which only some do; layers name their values with
            reference_torch.recompute.name_value.
        optimizer_state: offload the optimizer state of layers, from the first step() on.
        gradients: offload the gradients of layers, which must not be in DistributedDataParallel.

    Raises:
        TypeError: the names of a layer in activation_values are no collection of texts.
        ValueError: num_prefetch_layers is negative, or a name is not in diptych.plans.model.values.VALUES.
    """

    def __init__(
        self,
        enabled: bool = True,
        pin_memory: bool = True,
        num_prefetch_layers: int = 1,
        *,
        parameters: bool = True,
        activations: bool = False,
        activation_min_bytes: int = TransformerConfig.activation_offload_min_bytes,
        activation_layers: Collection[int] | None = None,
        activation_values: Mapping[int, Collection[str]] | None = None,
        optimizer_state: bool = False,
        gradients: bool = False,
    ) -> None:
        check_num_prefetch_layers(num_prefetch_layers)
        self.enabled = enabled
        self.pin_memory = pin_memory
        self.num_prefetch_layers = num_prefetch_layers
        self._activation_layers = activation_layers
        self._activation_values = _checked_values(activation_values or {})
        self._residency = Residency(
            OffloadTargets(pin_memory, parameters, activations, activation_min_bytes, optimizer_state, gradients)
        )
        self._scheduler = UseScheduler(self._residency, num_prefetch_layers)

    def __del__(self) -> None:
        residency = vars(self).get("_residency")  # missing after a failed construction
        if residency is not None and not residency.is_closed and not sys.is_finalizing():
            close_dropped(self.close, residency.link)

    # Registration and moves

    def register_layer(self, layer_id: int, module: nn.Module) -> None:
        """Offload the parameters and buffers of a layer; the layer stays on the device until its first eviction.

        Tensors whose storage the layer does not own stay on the device: a view of part of a storage, a tensor
        subclass, a tensor without storage.

        Args:
            layer_id: position in the order of forward; layers may be registered in any order.
            module: the layer, on its device.

        Raises:
            ValueError: the number or the module is already registered, or its parameters are on an unsupported device
                or on another device than the other layers.
            OffloadError: the manager is closed, or the host has no free memory. The layer is not registered then.
        """
        if not self.enabled:
            return
        scheduler = self._scheduler
        layer = self._residency.add(layer_id, module, weak_method(scheduler.fetch_for_access))
        layer.observer = LayerObserver(layer_id, module, layer.own_parameters, self)
        layer.watch_state(
            weak_method(scheduler.require), weak_method(scheduler.evict_unneeded), weak_method(scheduler.end_failed)
        )
        self._residency.note_registered(layer)
        scheduler.add(layer_id)

    def prefetch_layer(self, layer_id: int) -> None:
        """Start to copy a layer to the device, unless it is already there."""
        self._scheduler.fetch(layer_id)

    def offload_layer(self, layer_id: int) -> None:
        """Evict a layer to the host, unless it is already there or in use."""
        self._scheduler.evict(layer_id)

    def prefetch_next_layers(self, current_layer_id: int) -> None:
        """Start to fetch the num_prefetch_layers layers that the next uses need.

        Args:
            current_layer_id: a registered layer; only checked, because the manager knows the order of uses.
        """
        self._residency.layer(current_layer_id)
        for layer_id in self._scheduler.order.next_window()[: self.num_prefetch_layers]:
            self._scheduler.fetch(layer_id)

    def offload_all_layers(self) -> None:
        """Evict every layer, for example before the first step."""
        for layer_id in self._scheduler.order.layers:
            self._scheduler.evict(layer_id)
        self._residency.finish_eviction()
        self._residency.restart_peak()

    def require(self, layer_id: int) -> None:
        """Fetch a layer and wait for it; it stays on the device until the next use ends."""
        self._scheduler.require(layer_id)

    def set_link_delay(self, seconds: Callable[[int], float] | None) -> None:
        """Add seconds to every copy, to simulate a slow link.

        Args:
            seconds: returns the extra seconds of a copy from its number of bytes; None: no delay.
        """
        if self._residency.link is not None:
            self._residency.link.delay = seconds

    def close(self) -> None:
        """Move everything to the device and remove every hook; a second call does nothing.

        Raises:
            OffloadError: the device has no room for some layers, which stay readable; call close() again later.
        """
        if not self._residency.is_closed:
            self._scheduler.forget_open()
            self._residency.close()

    # Steps

    def expect(self, uses: Iterable[Use]) -> None:
        """Announce the order of the next uses, for example of a pipeline step.

        If a use differs from it, the rest is discarded. The manager then assumes the order of forward, and the reverse
        order in backward.

        Args:
            uses: the next uses.
        """
        self._scheduler.order.expect(uses)

    def step(self, optimizer: torch.optim.Optimizer, is_per_parameter: bool = False) -> None:
        """Run the optimizer step, first for parameters that are not offloaded, then layer by layer.

        Args:
            optimizer: updates each parameter independently, as all optimizers of PyTorch except LBFGS do.
            is_per_parameter: True for another optimizer, or one with step hooks, that does so too.

        Raises:
            OffloadError: the update of a parameter may depend on other parameters.
        """
        layers = self._residency.layers
        if not self.enabled or not layers:
            optimizer.step()
            return
        if not is_per_parameter:
            check_is_per_parameter(optimizer)
        scheduler = self._scheduler
        scheduler.begin_steps()

        def update(layer_id: int) -> list[nn.Parameter]:
            scheduler.begin(Use("S", layer_id))
            parts.step(layer_id)
            layers[layer_id].note_change()
            scheduler.end(layer_id, ("S",))
            return parts.parameters_of(layer_id)

        parts = OptimizerParts(optimizer, {n: layers[n].parameters for n in reversed(scheduler.order.layers)})
        try:
            parts.step(None)
            step_by_layer(scheduler.order.layers, self._residency.update_targets, update, optimizer)
        finally:
            parts.join()

    # Uses, reported by the observers of layers, or by a model that calls these itself

    def on_forward_pre_hook(self, layer_id: int) -> None:
        """Wait for a layer before its forward and prefetch the next layers."""
        if not self.enabled:
            return
        self._scheduler.begin_forward(layer_id)
        if self._residency.gradients is not None and torch.is_grad_enabled():
            self._residency.gradients.watch(layer_id, self._residency.layers[layer_id].own_parameters)

    def on_forward_post_hook(self, layer_id: int) -> None:
        """Evict a layer after its forward, unless one of the next uses needs it."""
        self._scheduler.end(layer_id, ("F", "R"))

    def on_backward_pre_hook(self, layer_id: int) -> None:
        """Wait for a layer when a gradient of its output arrives, and prefetch the next layers of backward."""
        if self.enabled and not self._residency.is_closed:
            self._scheduler.begin_backward(layer_id)

    def on_backward_post_hook(self, layer_id: int) -> None:
        """Evict a layer once the gradients of its inputs and parameters exist."""
        self._scheduler.end_backward(layer_id)

    def on_replay(self, parameters: list[Tensor]) -> None:
        """Fetch the layer whose parameters a recompute region reads in its replay."""
        self._scheduler.replay_owner(parameters)

    def saved_tensor_hooks(self, group: ActivationGroup | None) -> saved_tensors_hooks:
        """Return the saved-tensor hooks of a layer's forward, which fetch parameters before backward reads them."""
        require = weak_method(self._scheduler.require_storage)
        return layer_saved_tensor_hooks(self._residency.storages, require, self._residency.activations, group)

    def new_group(self) -> ActivationGroup | None:
        """Return the activation group of the forward that has started, or None if no activation moves."""
        if self._residency.activations is None or not torch.is_grad_enabled() or internals.runs_in_backward():
            return None
        order = self._scheduler.order
        layer = order.current.layer
        stays = self._activation_layers is not None and layer not in self._activation_layers
        stays = stays or order.current in order.forwards_needed_next()
        return ActivationGroup(order.current, stays, self._activation_values.get(layer))

    def end_group(self, group: ActivationGroup) -> None:
        """Start to move the activations of a forward that has ended."""
        if self._residency.activations is not None:
            self._residency.activations.evict(group)

    # Reports

    @property
    def statistics(self) -> OffloadStatistics:
        """Counters of copies and waits."""
        return self._residency.statistics

    @property
    def stats(self) -> dict[str, Any]:
        """Counters of copies and waits, and under ``retained`` the reason of each storage that stays on the device."""
        return self.statistics.as_dict() | {"retained": self._residency.reasons_to_retain()}

    def print_stats(self) -> None:
        """Print the counters of copies and waits."""
        print(describe_statistics(self.stats))

    @property
    def trace(self) -> list[str] | None:
        """A list of all moves and uses, if the caller sets it to a list.

        ``+3``: layer 3 is fetched, ``F3``: used, ``-3``: evicted, ``-a3.0``: its activations of microbatch 0 leave.
        """
        return self._residency.trace

    @trace.setter
    def trace(self, events: list[str] | None) -> None:
        self._residency.trace = events

    @property
    def layer_params(self) -> dict[int, list[nn.Parameter]]:
        """Parameters of every layer."""
        return {number: layer.parameters for number, layer in self._residency.layers.items()}

    @property
    def layer_param_devices(self) -> dict[int, list[str]]:
        """Device type from which each parameter can be read now; ``cpu`` while it is on the host."""
        return {number: layer.devices() for number, layer in self._residency.layers.items()}

    @property
    def resident_layers(self) -> tuple[int, ...]:
        """Layers that are on the device or being copied to it."""
        return self._residency.resident_layers

    @property
    def device_bytes(self) -> int:
        """Bytes that registered layers occupy on the device now."""
        return self._residency.device_bytes

    @property
    def prefetch_stream(self) -> torch.cuda.Stream | None:
        """The stream for copies; None without a GPU, where a thread copies."""
        return None if self._residency.link is None else self._residency.link.stream

    def storages(self) -> dict[int, dict[str, int]]:
        """Return the bytes of every storage of every layer, as an argument for diptych.plans.offload.plan_offload."""
        layers = self._residency.layers
        return {n: {storage.name: storage.nbytes for storage in layer.storages} for n, layer in layers.items()}


def _checked_values(activation_values: Mapping[int, Collection[str]]) -> dict[int, frozenset[str]]:
    """Return the names of the values that move, by layer; TensorOffloadManager documents the errors."""
    for layer, names in activation_values.items():
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise TypeError(f'activation_values: expected names such as {{"fc1"}} for layer {layer}, got {names!r}')
        unknown = sorted(set(names) - set(VALUES))
        if unknown:
            raise ValueError(
                f"activation_values: expected names that name_value accepts, {VALUES}, got {unknown[0]!r} for layer "
                f"{layer}"
            )
    return {layer: frozenset(names) for layer, names in activation_values.items()}
