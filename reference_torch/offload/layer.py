"""A registered layer: its storages, and access to its state dict while its parameters are on the host."""

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.utils.hooks import RemovableHandle

from reference_torch.offload.link import Link, OffloadError, for_each
from reference_torch.offload.observe import LayerObserver
from reference_torch.offload.registry import forget, register
from reference_torch.offload.storage import OffloadedParameter, OffloadedStorage, OffloadedTensor
from reference_torch.offload.writes import (
    has_backward_hooks,
    has_forward_hooks,
    has_gradient_hooks,
    possible_statistics,
)
from reference_torch.recompute.region import is_held_only_by

IN_USE = "its storage is used by others"
"""The reason to retain a storage on the device if another holder reads it without fetching it first."""


class OffloadedLayer:
    """The tensors of a layer and their storages.

    Args:
        layer_id: number of the layer.
        module: the layer.
        known: storages of other layers, by address; shared ones are taken from there.
        link: link to the host.
        fetch_for_access: called with the number if a tensor is used while the layer is not.
        moves: True if its storages move.

    Raises:
        OffloadError: the host has no free memory.
    """

    def __init__(
        self,
        layer_id: int,
        module: nn.Module,
        known: Mapping[int, OffloadedStorage],
        link: Link,
        fetch_for_access: Callable[[int], None],
        moves: bool = True,
    ) -> None:
        self.layer_id = layer_id
        self.module = module
        self.is_resident = True
        """True while the layer is on the device or being fetched."""
        self._is_replayed = False
        self.observer: LayerObserver | None = None
        self.parameters = list(module.parameters())
        self.retained: dict[str, str] = {}
        """Reasons why tensors stay on the device, by the name of the tensor."""
        self.storages: list[OffloadedStorage] = []
        self._handles: list[RemovableHandle] = []
        self._ids = {id(tensor) for tensor in chain(module.parameters(), module.buffers())}
        self._storage_of: dict[int, OffloadedStorage] = {}
        for address, (storage, tensors) in self._by_storage().items() if moves else ():
            moving = known.get(address)
            reason = _reason_to_retain(storage, list(tensors.values())) if moving is None else None
            if reason is not None:
                self.retained[next(iter(tensors))] = reason
                continue
            if moving is None:
                name = f"{next(iter(tensors))} of layer {layer_id}"
                moving = OffloadedStorage(name, tensors.values(), link, lambda: fetch_for_access(layer_id))
            else:
                moving.add(tensors.values())
            self.storages.append(moving)
            self._storage_of.update(dict.fromkeys(map(id, tensors.values()), moving))
        shared = {id(tensor) for storage in known.values() for tensor in storage.tensors}
        self.own_parameters = [p for p in self.parameters if id(p) not in shared]
        self._parts = list(module.modules())
        self._possible_statistics = [t for t in possible_statistics(self._parts) if id(t) in self._storage_of]

    @property
    def is_on_device(self) -> bool:
        """True if all bytes of the layer are on the device."""
        return all(storage.is_on_device for storage in self.storages)

    def has_any(self, tensors: Iterable[Tensor]) -> bool:
        """Return True if one of the tensors belongs to this layer."""
        return any(id(tensor) in self._ids for tensor in tensors)

    def devices(self) -> list[str]:
        """Return the device type from which each parameter can be read."""
        on_host = {i for i, storage in self._storage_of.items() if not storage.is_on_device}
        return ["cpu" if id(p) in on_host else p.device.type for p in self.parameters]

    def wait_for_fetch(self) -> None:
        """Wait for the copies to the device.

        Raises:
            OffloadError: a copy failed; it is repeated at the next fetch.
        """
        for_each(self.storages, OffloadedStorage.wait_for_fetch)

    def finish_eviction(self) -> None:
        """Wait for the copies to the host and release the device memory.

        Raises:
            OffloadError: a copy failed; the layer stays on the device until its next eviction.
        """
        try:
            for_each(self.storages, OffloadedStorage.finish_eviction)
        except OffloadError:
            self.is_resident = True
            raise

    def unguard(self) -> None:
        """Make the layer's tensors ordinary tensors, because the layer is in use."""
        for storage in self.storages:
            storage.unguard()

    def begin_replay(self) -> None:
        """Prepare for the replay of a region that reads the parameters and saves aliases of them for backward."""
        self._is_replayed = True
        for storage in self.storages:
            storage.begin_replay()

    def note_replay(self) -> None:
        """Record that the current use replays the layer's forward or a part of it."""
        self._is_replayed = True

    def end_replay(self) -> None:
        """Record that backward has consumed everything that the replay saved."""
        self._is_replayed = False
        for storage in self.storages:
            storage.end_replay()

    def note_change(self) -> None:
        """Record that the parameters may differ from their copies on the host."""
        for storage in self.storages:
            storage.note_change()

    def note_untracked_writes(self, kind: str) -> None:
        """Record writes of a use that no version counter records.

        Examples are the running statistics of a batch norm in forward, fused optimizers that run by hooks on parameters
        in backward, and hooks that write ``.data`` in either.

        Args:
            kind: kind of the use that has ended.
        """
        runs_forward = kind in ("F", "R") or self._is_replayed
        is_backward = kind == "B"
        if is_backward:
            self.end_replay()
        runs_hooks = is_backward and has_backward_hooks(self._parts)
        runs_hooks = runs_hooks or (runs_forward and has_forward_hooks(self._parts))
        writes_buffers = runs_hooks or (runs_forward and any(part.training for part in self._parts))
        for storage in self.storages:
            for tensor in storage.tensors:
                if isinstance(tensor, nn.Parameter):
                    written = runs_hooks or (is_backward and has_gradient_hooks(tensor))
                else:
                    written = writes_buffers
                if written:
                    storage.note_change()
        if runs_forward:
            for tensor in self._possible_statistics:
                if not tensor.requires_grad:
                    self._storage_of[id(tensor)].note_change_if_bytes_differ()

    def watch_state(
        self, require: Callable[[int], None], evict_unneeded: Callable[[], None], end_failed: Callable[[], None]
    ) -> None:
        """Register hooks that make ``state_dict`` and ``load_state_dict`` work while the layer is on the host.

        Args:
            require: fetches the layer, before its state is loaded.
            evict_unneeded: evicts layers that the next uses do not need, after the state is loaded.
            end_failed: ends uses that an exception has left open, before the state is read.
        """

        def before_reading(*_: Any) -> None:
            end_failed()
            self._allow_detach(True)

        for part in self.module.modules():
            self._handles += [
                part.register_state_dict_pre_hook(before_reading),
                part.register_state_dict_post_hook(lambda *arguments: self._insert_host_copies(*arguments)),
                part.register_load_state_dict_pre_hook(
                    lambda part, _, __, metadata, *___: self._before_load(part, metadata, require)
                ),
            ]
        self._handles.append(self.module.register_load_state_dict_post_hook(lambda *_: evict_unneeded()))
        watching = [] if self.observer is None else self.observer.handles
        register(self.module, self.layer_id, [*self._handles, *watching])

    def close(self) -> None:
        """Move the layer to the device permanently and remove every hook."""
        if self.observer is not None:
            self.observer.close()
        for handle in self._handles:
            handle.remove()
        for_each(self.storages, OffloadedStorage.release)
        forget(self.module)
        self.is_resident = True

    def _insert_host_copies(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Replace tensors in a state dict by their copies on the host, because they may move before they are read."""
        self._allow_detach(False)
        for name, tensor in chain(
            module.named_parameters(prefix[:-1], recurse=False), module.named_buffers(prefix[:-1], recurse=False)
        ):
            storage = self._storage_of.get(id(tensor))
            if storage is not None and name in state and state[name] is not tensor:  # it is with keep_vars=True
                state[name] = storage.host_view(tensor)

    def _before_load(self, part: nn.Module, metadata: dict[str, Any], require: Callable[[int], None]) -> None:
        """Fetch the layer before its state is loaded.

        Raises:
            OffloadError: the state would replace the parameters (assign=True).
        """
        if not any(part is own_part for own_part in self.module.modules()):  # a copied module still has the hooks
            return
        if metadata.get("assign_to_params_buffers", False):
            raise OffloadError(
                f"load_state_dict: expected assign=False while layer {self.layer_id} is registered, got assign=True, "
                "which replaces the parameters that move; close() the manager before"
            )
        require(self.layer_id)

    def _allow_detach(self, allowed: bool) -> None:
        """Allow ``detach`` of the layer's tensors without a fetch, while a state dict is built."""
        for storage in self.storages:
            storage.may_be_detached = allowed

    def _by_storage(self) -> dict[int, tuple[UntypedStorage, dict[str, Tensor]]]:
        """Return the tensors by the address of their storage."""
        by_address: dict[int, tuple[UntypedStorage, dict[str, Tensor]]] = {}
        for name, tensor in chain(self.module.named_parameters(), self.module.named_buffers()):
            if type(tensor) not in (Tensor, nn.Parameter, OffloadedParameter, OffloadedTensor):
                self.retained[name] = f"a tensor subclass, {type(tensor).__name__}"
                continue
            if tensor.is_inference():
                self.retained[name] = "a tensor of inference mode, whose changes are not counted"
                continue
            with torch._C.DisableTorchFunctionSubclass():
                storage = tensor.untyped_storage()
            by_address.setdefault(storage._cdata, (storage, {}))[1][name] = tensor
        return by_address


def _reason_to_retain(storage: UntypedStorage, tensors: list[Tensor]) -> str | None:
    """Return the reason why a storage must stay on the device, or None if it may move."""
    if storage.nbytes() == 0:
        return "no storage"
    if any(tensor.nbytes != storage.nbytes() for tensor in tensors):
        return "a view of part of a storage"
    if not is_held_only_by(storage, tensors):
        return IN_USE
    return None
