"""Reports of a manager: where layers and memories are, and what has been copied."""

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
    """The read-only part of a manager."""

    statistics: OffloadStatistics
    _layers: dict[int, OffloadedLayer]
    _leaving: list[int]
    _link: Link | None
    _held: dict[int, OffloadedMemory]
    _closed: bool
    trace: list[str] | None

    @property
    def layer_params(self) -> dict[int, list[nn.Parameter]]:
        """Parameters of every layer."""
        return {number: layer.parameters for number, layer in self._layers.items()}

    @property
    def layer_param_devices(self) -> dict[int, list[str]]:
        """Device type from which each parameter can be read now; ``cpu`` while it is on the host."""
        return {number: layer.devices() for number, layer in self._layers.items()}

    @property
    def prefetch_stream(self) -> torch.cuda.Stream | None:
        """The stream for copies; None without a GPU, where a thread copies."""
        return None if self._link is None else self._link.stream

    @property
    def stats(self) -> dict[str, Any]:
        """Counters of copies and waits, and under ``kept`` the memories that stay on the device with the reason."""
        return self.statistics.as_dict() | {"kept": kept_memories(self._layers, self._held.values())}

    def print_stats(self) -> None:
        """Print the counters of copies and waits."""
        print(describe_statistics(self.stats))

    @property
    def resident_layers(self) -> tuple[int, ...]:
        """Layers that are on the device or being copied to it."""
        return tuple(number for number, layer in self._layers.items() if layer.is_resident)

    @property
    def device_bytes(self) -> int:
        """Bytes that registered layers occupy on the device now."""
        layers = [self._layers[number] for number in {*self.resident_layers, *self._leaving}]
        memories = self._held | {id(memory): memory for layer in layers for memory in layer.memories}
        return sum(memory.device_bytes for memory in memories.values())

    def storages(self) -> dict[int, dict[str, int]]:
        """Return the bytes of every memory of every layer, as an argument for diptych.plans.offload.plan_offload."""
        return {n: {memory.name: memory.nbytes for memory in layer.memories} for n, layer in self._layers.items()}

    def _layer(self, layer_id: int) -> OffloadedLayer:
        if layer_id not in self._layers:
            self._check_open()
            raise ValueError(f"layer_id: expected a registered layer of {sorted(self._layers)}, got {layer_id!r}")
        return self._layers[layer_id]

    def _check_open(self) -> None:
        if self._closed:
            raise OffloadError("manager: expected an open one, got a closed one; make a new one")

    def _record(self, event: str) -> None:
        if self.trace is not None:
            self.trace.append(event)


def kept_memories(layers: Mapping[int, OffloadedLayer], held: Iterable[OffloadedMemory]) -> dict[str, str]:
    """Return the reason why each memory stays on the device, by the name of the memory."""
    kept = [(number, *reason.split(": ", 1)) for number, layer in layers.items() for reason in layer.kept]
    since = {f"{name} of layer {number}": reason for number, name, reason in kept}
    return since | {memory.name: IN_USE for memory in held}
