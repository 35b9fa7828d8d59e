"""Gradients of offloaded layers: on the host except while backward adds to them and while their layer is updated."""

import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, UntypedStorage, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from reference_torch.offload.lifetime import weak_method
from reference_torch.offload.link import Link, OffloadError, for_each
from reference_torch.offload.statistics import OffloadStatistics
from reference_torch.offload.storage import OffloadedStorage, storage_of
from reference_torch.offload.update_targets import UpdateTarget
from reference_torch.offload.writes import OwnHook


class OffloadedGradients(UpdateTarget):
    """The gradients of layers, which backward creates and ``zero_grad`` drops.

    A gradient goes to the host once the backward of the next layer begins. It is fetched before backward adds to it. A
    read or write between steps fetches it, as with parameters; it stays until the update of its layer.
    """

    def __init__(self, link: Link, statistics: OffloadStatistics) -> None:
        super().__init__(link, statistics)
        self._layers: dict[int, list[nn.Parameter]] = {}
        self._storages: dict[int, OffloadedStorage] = {}
        """Storage of the gradient of a parameter, by the id of the parameter."""
        self._host: dict[int, UntypedStorage] = {}
        """Host storage for the next gradient of a parameter, by the id of the parameter."""
        self._kept: weakref.WeakSet[OffloadedStorage] = weakref.WeakSet()
        """Storages of former gradients that other code holds."""
        self._arrived: dict[int, nn.Parameter] = {}
        """Parameters to whose gradients the running backward adds, by id."""
        self._outgoing: list[OffloadedStorage] = []
        """Storages whose copies to the host the running backward has begun."""
        self._handles: dict[int, RemovableHandle] = {}

    def watch(self, layer: int, parameters: Iterable[nn.Parameter]) -> None:
        """Watch the gradients of a layer's parameters, including those that were frozen before.

        Raises:
            OffloadError: the model is inside of DistributedDataParallel.
        """
        if getattr(DistributedDataParallel, "_active_ddp_module", None) is not None:
            raise OffloadError(
                "gradients: expected a model without DistributedDataParallel, which writes gradients after their "
                "backward, got one inside of it; leave gradients=True out, or use fully_shard, which shards them"
            )
        self._layers[layer] = list(parameters)
        note = weak_method(self._note_arrival)
        for parameter in self._layers[layer]:
            if parameter.requires_grad and id(parameter) not in self._handles:
                reference = weakref.ref(parameter)  # its hook must not keep it alive
                hook = OwnHook(_call_with, note, reference)
                self._handles[id(parameter)] = parameter.register_hook(hook)

    def evict_arrived(self) -> None:
        """Start to copy the gradients to the host that backward has added to since the last call."""
        with self._lock:
            outgoing = self._outgoing
            self._outgoing = []
            for_each(outgoing, OffloadedStorage.finish_eviction)
            arrived = list(self._arrived.values())
            self._arrived.clear()
            self._outgoing = [storage for storage in map(self._storage_for, arrived) if storage is not None]
            self.evict(self._outgoing)

    def storages_of(self, layer: int) -> Sequence[OffloadedStorage]:
        """Return the storages of a layer's present gradients."""
        parameters = self._layers.get(layer, [])
        return [storage for storage in map(self._current_storage, parameters) if storage is not None]

    def write_back(self, layer: int, parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        """Start to copy the gradients of a layer to the host after its update."""
        with self._lock:
            self.evict(self.storages_of(layer))

    def close(self) -> None:
        """Move everything to the device and remove every hook."""
        with self._lock:
            for handle in self._handles.values():
                handle.remove()
            for storage in (*self._storages.values(), *self._kept):
                storage.release()
            self._kept.clear()
            for known in (self._handles, self._storages, self._host, self._layers, self._arrived):
                known.clear()
            self._outgoing.clear()

    def _note_arrival(self, parameter: nn.Parameter) -> None:
        """Fetch the gradient of a parameter, because backward adds to it next."""
        with self._lock:
            self._arrived[id(parameter)] = parameter
            storage = self._current_storage(parameter)
            if storage is not None:
                self._statistics.note_copies("in", [storage.fetch()])
                storage.wait_for_fetch()
                storage.unguard()

    def _current_storage(self, parameter: nn.Parameter) -> OffloadedStorage | None:
        """Return the storage of a parameter's present gradient; None: it never moved. Forget one that was replaced."""
        gradient = parameter.grad
        storage = self._storages.get(id(parameter))
        if storage is not None and (storage.tensors[0] is not gradient or not storage.has_own_storage):  # or by .data =
            del self._storages[id(parameter)]
            if storage.tensors[0] is gradient or storage.is_dropped:
                self._host[id(parameter)] = storage.host  # copies run in order, so one that still runs does no harm
                storage.forget_tensors()
            else:
                self._kept.add(storage)
            storage = None
        if storage is None and gradient is not None:
            former = storage_of(gradient)  # if other code kept the gradient, or took it from another parameter
            if former is not None and (former in self._kept or any(former is m for m in self._storages.values())):
                storage = self._storages[id(parameter)] = former
        return storage

    def _storage_for(self, parameter: nn.Parameter) -> OffloadedStorage | None:
        """Return the storage of a parameter's gradient, a new one for a new gradient; None: the gradient stays."""
        storage = self._current_storage(parameter)
        gradient = parameter.grad
        if storage is None and gradient is not None and not gradient.requires_grad and self.may_move(gradient):
            host = self._host.pop(id(parameter), None)
            if host is None or host.nbytes() != gradient.nbytes:
                host = self._link.host_memory(gradient.nbytes)
            name = f"gradient of shape {tuple(gradient.shape)}"
            storage = OffloadedStorage(name, [gradient], self._link, host=host, num_expected_references=2)
            self._storages[id(parameter)] = storage
        return storage


def _call_with(note: Callable[[nn.Parameter], None], reference: "weakref.ref[nn.Parameter]", _: Tensor | None) -> None:
    """Call a function with a parameter that is still alive, as a hook of its gradient."""
    parameter = reference()
    if parameter is not None:
        note(parameter)
