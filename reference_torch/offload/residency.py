"""Residency: the registered layers of a manager, where their storages are, and their moves."""

from collections.abc import Callable, Collection, Mapping
from itertools import chain
from typing import NamedTuple

import torch
from torch import nn

from reference_torch.offload.activations import ActivationOffload
from reference_torch.offload.gradients import OffloadedGradients
from reference_torch.offload.layer import IN_USE, OffloadedLayer
from reference_torch.offload.lifetime import weak_method
from reference_torch.offload.link import Link, OffloadError, for_each
from reference_torch.offload.optimizer_state import OffloadedOptimizerState
from reference_torch.offload.registry import registered_number
from reference_torch.offload.statistics import OffloadStatistics
from reference_torch.offload.storage import OffloadedStorage


class OffloadTargets(NamedTuple):
    """What is offloaded, and how.

    Args:
        pin_memory: place host copies in pinned memory; only on a GPU.
        parameters: offload the parameters and buffers of layers.
        activations: offload the tensors that layers save for backward.
        activation_min_bytes: activations of fewer bytes stay on the device.
        optimizer_state: offload the optimizer state of layers.
        gradients: offload the gradients of layers.
    """

    pin_memory: bool
    parameters: bool
    activations: bool
    activation_min_bytes: int
    optimizer_state: bool
    gradients: bool


class Residency:
    """The layers of one manager on the device and on the host.

    Args:
        targets: what is offloaded.
    """

    def __init__(self, targets: OffloadTargets) -> None:
        self.statistics = OffloadStatistics()
        self.trace: list[str] | None = None
        self.layers: dict[int, OffloadedLayer] = {}
        self.storages: dict[int, OffloadedStorage] = {}
        """Storages that move, by their address."""
        self.link: Link | None = None
        self.activations: ActivationOffload | None = None
        self.optimizer_state: OffloadedOptimizerState | None = None
        self.gradients: OffloadedGradients | None = None
        self.is_closed = False
        self._targets = targets
        self._outgoing: list[int] = []
        """Layers whose copies to the host have started and whose device memory is not released."""
        self._retained: dict[int, OffloadedStorage] = {}
        """Storages that stayed on the device at the last eviction of their layer, because of other holders."""
        self._unguarded: set[int] = set()
        """Layers whose tensors are ordinary tensors: those in use, and those that other code has read or written."""

    def add(self, layer_id: int, module: nn.Module, fetch_for_access: Callable[[int], None]) -> OffloadedLayer:
        """Create the storages of a layer; note_registered completes the registration.

        Args:
            layer_id: number of the layer.
            module: the layer, on its device.
            fetch_for_access: called with the number if a tensor is read or written while the layer is not in use.

        Raises:
            ValueError: the number or the module is already registered, or its device does not fit.
            OffloadError: the manager is closed, or the host has no free memory.
        """
        self.check_open()
        check_new(layer_id, module, self.layers)
        link = self.link or Link(device_of(layer_id, module), self._targets.pin_memory)
        device_of(layer_id, module, link.device)
        layer = OffloadedLayer(layer_id, module, self.storages, link, fetch_for_access, self._targets.parameters)
        self.link = link
        return layer

    def note_registered(self, layer: OffloadedLayer) -> None:
        """Complete the registration of a layer, whose observer exists."""
        assert self.link is not None, "add() has created the link"
        if self._targets.activations and self.activations is None:
            record = weak_method(self.record)
            self.activations = ActivationOffload(self.link, self.statistics, self._targets.activation_min_bytes, record)
        if self._targets.optimizer_state and self.optimizer_state is None:
            self.optimizer_state = OffloadedOptimizerState(self.link, self.statistics)
        if self._targets.gradients and self.gradients is None:
            self.gradients = OffloadedGradients(self.link, self.statistics)
        self.layers[layer.layer_id] = layer
        self.storages.update({storage.device_storage._cdata: storage for storage in layer.storages})
        self._note_bytes()

    def layer(self, layer_id: int) -> OffloadedLayer:
        """Return a registered layer.

        Raises:
            ValueError: the layer is not registered.
            OffloadError: the manager is closed.
        """
        if layer_id not in self.layers:
            self.check_open()
            raise ValueError(
                f"layer_id: expected a registered layer of {sorted(self.layers)}, got {layer_id!r}; register it by "
                "register_layer first"
            )
        return self.layers[layer_id]

    def check_open(self) -> None:
        """Raise an OffloadError if the manager is closed."""
        if self.is_closed:
            raise OffloadError("manager: expected an open one, got a closed one; make a new TensorOffloadManager")

    @property
    def update_targets(self) -> list[OffloadedGradients | OffloadedOptimizerState]:
        """The gradients and the optimizer state that move with the update of a layer, if they are offloaded."""
        return [target for target in (self.gradients, self.optimizer_state) if target is not None]

    @property
    def resident_layers(self) -> tuple[int, ...]:
        """Layers that are on the device or being copied to it."""
        return tuple(number for number, layer in self.layers.items() if layer.is_resident)

    @property
    def device_bytes(self) -> int:
        """Bytes that registered layers occupy on the device now."""
        layers = [self.layers[number] for number in {*self.resident_layers, *self._outgoing}]
        storages = self._retained | {id(storage): storage for layer in layers for storage in layer.storages}
        return sum(storage.device_bytes for storage in storages.values())

    def owners(self, storage: OffloadedStorage) -> list[int]:
        """Return the layers that have a storage."""
        return [number for number, layer in self.layers.items() if storage in layer.storages]

    def reasons_to_retain(self) -> dict[str, str]:
        """Return the reasons why storages stay on the device, by the name of the storage."""
        retained = {
            f"{name} of layer {number}": reason
            for number, layer in self.layers.items()
            for name, reason in layer.retained.items()
        }
        return retained | {storage.name: IN_USE for storage in self._retained.values()}

    def fetch(self, layer_id: int) -> None:
        """Start to copy a layer to the device, unless it is already there."""
        layer = self.layer(layer_id)
        moved = [storage.fetch() for storage in layer.storages]
        if not layer.is_resident:
            layer.is_resident = True
            self.record(f"+{layer_id}")
        self.statistics.note_copies("in", moved)
        self._note_bytes()

    def note_use(self, layer_id: int) -> None:
        """Count a use as a hit or a miss, before the fetch that it causes; count nothing if parameters do not move."""
        if self._targets.parameters:
            self.statistics.note_use(layer_id, hit=self.layers[layer_id].is_resident)

    def wait_for_fetch(self, layer_id: int) -> None:
        """Wait for the copies of a layer to the device."""
        layer = self.layers[layer_id]
        if self.link is not None and not layer.is_on_device:
            with self.statistics.measure_wait(self.link.device):
                layer.wait_for_fetch()

    def evict(self, layer_id: int) -> None:
        """Start to copy a layer to the host, except what a resident layer shares or others hold."""
        layer = self.layers[layer_id]
        if not layer.is_resident or not self._targets.parameters:
            return
        layer.is_resident = False
        shared = {id(m) for other in self.layers.values() if other.is_resident for m in other.storages}
        moved = [self._evict_storage(storage) for storage in layer.storages if id(storage) not in shared]
        self._outgoing.append(layer_id)
        self.record(f"-{layer_id}")
        self.statistics.note_copies("out", moved)

    def finish_eviction(self) -> None:
        """Wait for the copies to the host and release the device memory of evicted layers."""
        outgoing = [self.layers[layer_id] for layer_id in self._outgoing]
        self._outgoing = []
        for_each(outgoing, OffloadedLayer.finish_eviction)

    def restart_peak(self) -> None:
        """Restart the peaks of the statistics with what is on the device now."""
        self.statistics.restart_peak(self.device_bytes, self._num_resident)

    def unguard(self, layer_id: int) -> None:
        """Make the tensors of a layer ordinary tensors."""
        self._unguarded.add(layer_id)
        self.layers[layer_id].unguard()

    def guard_all_except(self, used: Collection[int]) -> None:
        """Guard the tensors of every layer that is not in use, so that other reads and writes are detected."""
        in_use = {id(storage) for number in used for storage in self.layers[number].storages}
        for number in self._unguarded.difference(used):
            for storage in self.layers[number].storages:
                if id(storage) not in in_use:
                    storage.guard()
        self._unguarded.intersection_update(used)

    def record(self, event: str) -> None:
        """Add an event to the trace, if there is one."""
        if self.trace is not None:
            self.trace.append(event)

    def close(self) -> None:
        """Move everything to the device and remove every hook.

        Raises:
            OffloadError: the device has no room for some layers.
        """
        close_layers(self.layers)
        for target in self.update_targets:
            target.close()
        self.is_closed = True
        self.storages.clear()
        self._retained.clear()
        if self.activations is not None:
            self.activations.pool.clear()

    def _evict_storage(self, storage: OffloadedStorage) -> int:
        """Evict a storage, unless it has other holders, and return the number of bytes copied."""
        moved = storage.evict()
        if storage.is_on_device:
            self._retained[id(storage)] = storage
        else:
            self._retained.pop(id(storage), None)
        return moved

    @property
    def _num_resident(self) -> int:
        """The number of layers on the device, for the statistics; 0 if layers do not move."""
        return len(self.resident_layers) if self._targets.parameters else 0

    def _note_bytes(self) -> None:
        """Update the peaks of the statistics."""
        self.statistics.note_bytes(self.device_bytes, self._num_resident)


def check_new(layer_id: int, module: nn.Module, layers: Mapping[int, OffloadedLayer]) -> None:
    """Check that a layer can be registered.

    Args:
        layer_id: number of the new layer.
        module: the new layer.
        layers: the layers of this manager, by number.

    Raises:
        ValueError: the number, the module or a part of it is already registered with this or another manager, or a part
            of the module is a ScriptModule.
    """
    if layer_id in layers:
        raise ValueError(
            f"layer_id: expected one not registered yet, got {layer_id!r} a second time; give each layer its own number"
        )
    layer_of_part = {id(part): number for number, layer in layers.items() for part in layer.module.modules()}
    for part in module.modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise ValueError(
                "module: expected modules that accept hooks, got a ScriptModule; register the module from which "
                "torch.jit.script made it"
            )
        number = registered_number(part)
        if number is not None and id(part) not in layer_of_part:
            raise ValueError(
                f"module: expected one of no other manager, got {type(part).__name__}, which is in layer {number} of "
                "another manager; close() that manager first"
            )
        if id(part) in layer_of_part:
            raise ValueError(
                f"module: expected one not registered yet, got {type(part).__name__}, which is in layer "
                f"{layer_of_part[id(part)]}; register a shared module in one layer only"
            )


def close_layers(layers: dict[int, OffloadedLayer]) -> None:
    """Move layers to the device permanently and remove them from the dictionary.

    Raises:
        OffloadError: the device has no room for some layers, which stay in the dictionary.
    """
    errors: list[RuntimeError] = []
    for number, layer in list(layers.items()):
        try:
            layer.close()
            del layers[number]
        except RuntimeError as error:
            errors.append(error)
    if errors:
        raise OffloadError(f"close: expected room for all layers, got: {errors[0]}; close() again") from errors[0]


def device_of(layer_id: int, module: nn.Module, expected_device: torch.device | None = None) -> torch.device:
    """Return the device on which a layer is computed.

    Args:
        layer_id: number of the layer, for error messages.
        module: the layer.
        expected_device: device of the other layers, if any.

    Raises:
        ValueError: the tensors are on an unsupported device, on several, or on another than the other layers.
    """
    devices = {tensor.device for tensor in chain(module.parameters(), module.buffers())}
    allowed = devices if expected_device is None else {expected_device}
    if any(device.type not in ("cpu", "cuda") for device in devices) or len(devices | allowed) > 1:
        expected = "one device, cpu or cuda" if expected_device is None else f"{expected_device}, as the other layers"
        actual = sorted(map(str, devices))
        raise ValueError(f"layer {layer_id}: expected its parameters on {expected}, got {actual}")
    return next(iter(devices | allowed), torch.device("cpu"))
