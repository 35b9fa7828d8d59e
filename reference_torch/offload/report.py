"""What a manager tells and refuses: where layers and their memories are, what has been moved, what it does not have."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from diptych.plans.offload import describe_statistics
from reference_torch.offload.layer import IN_USE, OffloadedLayer
from reference_torch.offload.link import Link, OffloadError
from reference_torch.offload.memory import OffloadedMemory
from reference_torch.offload.statistics import OffloadStatistics


class ManagerReport:
    """The part of a manager that moves nothing."""

    statistics: OffloadStatistics
    _layers: dict[int, OffloadedLayer]
    _leaving: list[int]
    _link: Link | None
    _held: dict[int, OffloadedMemory]
    _closed: bool
    trace: list[str] | None

    @property
    def layer_params(self) -> dict[int, list[nn.Parameter]]:
        """The parameters of every layer."""
        return {number: layer.parameters for number, layer in self._layers.items()}

    @property
    def layer_param_devices(self) -> dict[int, list[str]]:
        """Where each of a layer's parameters can be read now: its device, or ``cpu`` while it is away."""
        return {number: layer.devices() for number, layer in self._layers.items()}

    @property
    def prefetch_stream(self) -> torch.cuda.Stream | None:
        """The stream that copies; None without a GPU, where a thread does."""
        return None if self._link is None else self._link.stream

    @property
    def stats(self) -> dict[str, Any]:
        """Return what has been moved and waited for, and ``kept``, what stays on the device and why."""
        return self.statistics.as_dict() | {"kept": kept_memories(self._layers, self._held.values())}

    def print_stats(self) -> None:
        """Print what has been moved and waited for."""
        print(describe_statistics(self.stats))

    @property
    def resident_layers(self) -> tuple[int, ...]:
        """Layers that are on the device or on their way there."""
        return tuple(number for number, layer in self._layers.items() if layer.is_here)

    @property
    def device_bytes(self) -> int:
        """Bytes that registered layers take on the device now."""
        there = [self._layers[number] for number in {*self.resident_layers, *self._leaving}]
        memories = self._held | {id(memory): memory for layer in there for memory in layer.memories}
        return sum(memory.device_bytes for memory in memories.values())

    def storages(self) -> dict[int, dict[str, int]]:
        """Bytes of every memory of every layer; as diptych.plans.offload.plan_offload takes them."""
        return {n: {memory.name: memory.nbytes for memory in layer.memories} for n, layer in self._layers.items()}

    def _layer(self, layer_id: int) -> OffloadedLayer:
        if layer_id not in self._layers:
            self._check_open()
            raise ValueError(f"layer_id: expected a registered layer of {sorted(self._layers)}, got {layer_id!r}")
        return self._layers[layer_id]

    def _check_open(self) -> None:
        if self._closed:
            raise OffloadError("manager: expected an open one, got one that close() has ended; make a new one")

    def _record(self, event: str) -> None:
        if self.trace is not None:
            self.trace.append(event)


def kept_memories(layers: Mapping[int, OffloadedLayer], held: Iterable[OffloadedMemory]) -> dict[str, str]:
    """Return why memories stay on the device, by their names."""
    kept = [(number, *reason.split(": ", 1)) for number, layer in layers.items() for reason in layer.kept]
    since = {f"{name} of layer {number}": reason for number, name, reason in kept}
    return since | {memory.name: IN_USE for memory in held}
