"""What moves with the update of a layer: its gradients and its optimizer state."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from reference_torch.offload.link import Link, for_each
from reference_torch.offload.statistics import OffloadStatistics
from reference_torch.offload.storage import OffloadedStorage


class UpdateTarget(ABC):
    """Storages of layers that are on the device during the update of their layer.

    Args:
        link: link to the host.
        statistics: counts the copies.
    """

    def __init__(self, link: Link, statistics: OffloadStatistics) -> None:
        self._link = link
        self._statistics = statistics
        self._lock = threading.RLock()  # PyTorch runs backwards of a GPU in threads of its own

    @abstractmethod
    def storages_of(self, layer: int) -> Sequence[OffloadedStorage]:
        """Return the storages of a layer."""

    @abstractmethod
    def write_back(self, layer: int, parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        """Start to copy a layer's storages to the host after the update of its parameters by the optimizer."""

    def fetch(self, layer: int) -> None:
        """Start to copy the storages of a layer to the device."""
        with self._lock:
            self._statistics.note_copies("in", [storage.fetch() for storage in self.storages_of(layer)])

    def fetch_and_wait(self, layer: int) -> None:
        """Fetch the storages of a layer before its update."""
        with self._lock:
            self.fetch(layer)
            for storage in self.storages_of(layer):
                storage.wait_for_fetch()
                storage.unguard()

    def evict(self, storages: Sequence[OffloadedStorage]) -> None:
        """Start to copy storages to the host; what other code holds stays on the device."""
        self._statistics.note_copies("out", [storage.evict() for storage in storages])

    def finish_eviction(self, layer: int) -> None:
        """Wait for the copies of a layer to the host and release its device memory."""
        with self._lock:
            for_each(self.storages_of(layer), OffloadedStorage.finish_eviction)

    def may_move(self, tensor: object) -> bool:
        """Return True for a dense tensor of several elements on the device that owns its memory."""
        if type(tensor) is not Tensor or tensor.numel() < 2 or tensor.device != self._link.device:
            return False
        return tensor.layout is torch.strided and tensor.untyped_storage().nbytes() == tensor.nbytes


def step_by_layer(
    order: Sequence[int],
    targets: Sequence[UpdateTarget],
    update: Callable[[int], Sequence[nn.Parameter]],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Update the layers in order, with the gradients and the state of the next one on their way.

    Args:
        order: numbers of the layers.
        targets: the offloaded gradients and optimizer state.
        update: updates a layer and returns its parameters.
        optimizer: has the state.

    Raises:
        OffloadError: a copy failed.
    """
    for place, layer in enumerate(order):
        for target in targets:
            target.fetch_and_wait(layer)
            for following in order[place + 1 : place + 2]:
                target.fetch(following)
        parameters = update(layer)
        for target in targets:
            target.write_back(layer, parameters, optimizer)
            for previous in order[max(place - 1, 0) : place]:
                target.finish_eviction(previous)
    for target in targets:
        for layer in order[-1:]:
            target.finish_eviction(layer)
