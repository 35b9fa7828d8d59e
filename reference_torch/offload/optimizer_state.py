"""Optimizer state of offloaded layers, such as AdamW's moments: on the host except during the update of its layer."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from reference_torch.offload.gradients import OffloadedGradients
from reference_torch.offload.link import Link, for_each
from reference_torch.offload.statistics import OffloadStatistics
from reference_torch.offload.storage import OffloadedStorage


class OffloadedOptimizerState:
    """The optimizer state of layers, found after each update, since optimizers create it in their first step.

    A read or write between steps fetches a tensor, as with parameters; it stays until the next update of its layer.

    Args:
        link: link to the host.
        statistics: counts the copies.
    """

    def __init__(self, link: Link, statistics: OffloadStatistics) -> None:
        self._link = link
        self._statistics = statistics
        self._layers: dict[int, list[OffloadedStorage]] = {}

    def fetch(self, layer: int | None) -> None:
        """Start to copy the state of a layer to the device; None: no layer."""
        storages = self._layers.get(layer, []) if layer is not None else []
        self._statistics.note_copies("in", [storage.fetch() for storage in storages])

    def begin(self, layer: int) -> None:
        """Wait for the state of a layer before its update."""
        self.fetch(layer)
        for storage in self._layers.get(layer, []):
            storage.wait_for_fetch()
            storage.unguard()

    def end(self, layer: int, parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        """Find the state of a layer after its update, and start to copy it to the host."""
        known = {id(storage.tensors[0]): storage for storage in self._layers.get(layer, [])}
        storages = []
        for number, parameter in enumerate(parameters):
            for name, tensor in optimizer.state.get(parameter, {}).items():
                if id(tensor) in known:
                    storages.append(known[id(tensor)])
                elif self._may_move(tensor):
                    name = f"{name} of parameter {number} of layer {layer}"
                    host = self._link.host_memory(tensor.nbytes)
                    storages.append(OffloadedStorage(name, [tensor], self._link, host=host))
        self._layers[layer] = storages
        for storage in storages:
            storage.note_change()
        self._statistics.note_copies("out", [storage.evict() for storage in storages])

    def finish(self, layer: int | None) -> None:
        """Wait for the copies of a layer to the host and release its device memory; None: no layer."""
        for_each(self._layers.get(layer, []) if layer is not None else [], OffloadedStorage.finish_eviction)

    def close(self) -> None:
        """Move everything to the device."""
        for storages in self._layers.values():
            for storage in storages:
                storage.release()
        self._layers.clear()

    def _may_move(self, tensor: object) -> bool:
        """Return True for a dense tensor of several elements on the device that owns its memory."""
        if type(tensor) is not Tensor or tensor.numel() < 2 or tensor.device != self._link.device:
            return False
        return tensor.layout is torch.strided and tensor.untyped_storage().nbytes() == tensor.nbytes


def step_by_layer(
    order: Sequence[int],
    moved: Sequence[OffloadedOptimizerState | OffloadedGradients],
    update: Callable[[int], Sequence[nn.Parameter]],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Update the layers in order, with the gradients and the state of the next one on their way.

    Args:
        order: numbers of the layers.
        moved: the offloaded gradients and optimizer state.
        update: updates a layer and returns its parameters.
        optimizer: has the state.

    Raises:
        OffloadError: a copy failed.
    """
    for place, layer in enumerate(order):
        following = order[place + 1] if place + 1 < len(order) else None
        for each in moved:
            each.begin(layer)
            each.fetch(following)
        parameters = update(layer)
        for each in moved:
            each.end(layer, parameters, optimizer)
            each.finish(order[place - 1] if place else None)
    for each in moved if order else ():
        each.finish(order[-1])
