"""Optimizer state of offloaded layers, such as AdamW's moments: on the host except during the update of its layer."""

from collections.abc import Sequence

import torch
from torch import nn

from reference_torch.offload.link import Link
from reference_torch.offload.statistics import OffloadStatistics
from reference_torch.offload.storage import OffloadedStorage
from reference_torch.offload.update_targets import UpdateTarget


class OffloadedOptimizerState(UpdateTarget):
    """The optimizer state of layers, found after each update, since optimizers create it in their first step.

    A read or write between steps fetches a tensor, as with parameters; it stays until the next update of its layer.
    """

    def __init__(self, link: Link, statistics: OffloadStatistics) -> None:
        super().__init__(link, statistics)
        self._layers: dict[int, list[OffloadedStorage]] = {}

    def storages_of(self, layer: int) -> Sequence[OffloadedStorage]:
        """Return the storages of a layer's state."""
        return self._layers.get(layer, [])

    def write_back(self, layer: int, parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        """Find the state of a layer after its update, and start to copy it to the host."""
        known = {id(storage.tensors[0]): storage for storage in self.storages_of(layer)}
        storages = []
        for number, parameter in enumerate(parameters):
            for name, tensor in optimizer.state.get(parameter, {}).items():
                if id(tensor) in known:
                    storages.append(known[id(tensor)])
                elif self.may_move(tensor):
                    name = f"{name} of parameter {number} of layer {layer}"
                    host = self._link.host_memory(tensor.nbytes)
                    storages.append(OffloadedStorage(name, [tensor], self._link, host=host))
        self._layers[layer] = storages
        for storage in storages:
            storage.note_change()
        self.evict(storages)

    def close(self) -> None:
        """Move everything to the device."""
        for storages in self._layers.values():
            for storage in storages:
                storage.release()
        self._layers.clear()
