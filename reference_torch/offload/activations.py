"""Activation offload: tensors saved for backward move to the host after forward and return for backward.

The tensors that one forward of a layer saves form a group, which moves together: all of them, or the values of some
names. Each storage moves once for a layer, even if several views of it are saved. Parameters, small tensors and outputs
that recompute discards do not move.
"""

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

from diptych.plans.offload import Use, activation_event
from reference_torch.offload.link import Copy, Link, OffloadError, for_each
from reference_torch.offload.statistics import OffloadStatistics
from reference_torch.recompute import NamedValue
from reference_torch.recompute.internals import version_watch
from reference_torch.recompute.region import slot_of


class HostPool:
    """A pool of storages on the host by size, so that no storage is allocated once every size has occurred.

    Args:
        link: link to the host, which allocates the storages.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._free: dict[int, list[UntypedStorage]] = defaultdict(list)
        self.allocated = 0
        """Number of storages allocated so far."""

    def take(self, nbytes: int) -> UntypedStorage:
        """Return a storage of ``nbytes`` bytes.

        Raises:
            OffloadError: the host has no free memory.
        """
        if self._free[nbytes]:
            return self._free[nbytes].pop()
        self.allocated += 1
        return self._link.host_memory(nbytes)

    def clear(self) -> None:
        """Release all storages that are not in use."""
        self._free.clear()

    def give_back(self, storage: UntypedStorage) -> None:
        """Return a storage to the pool once no copy reads or writes it."""
        self._free[storage.nbytes()].append(storage)


class SavedStorage:
    """The storage of saved tensors: on the device, being copied, or on the host.

    Args:
        storage: the storage on the device.
        link: link to the host.
        pool: pool from which the host memory is taken.
    """

    def __init__(self, storage: UntypedStorage, link: Link, pool: HostPool) -> None:
        self._device_storage: UntypedStorage | None = storage
        self.nbytes = storage.nbytes()
        self._link = link
        self._pool = pool
        self._watched: list[tuple[Tensor, int]] = []
        self._host: UntypedStorage | None = None
        self._outgoing: Copy | None = None
        self._incoming: Copy | None = None

    def __del__(self) -> None:
        for copied in (self._outgoing, self._incoming):  # the storages are reused, so the copies must have ended
            if copied is not None:
                with contextlib.suppress(OffloadError):
                    copied.wait()
        if self._host is not None:
            self._pool.give_back(self._host)

    @property
    def address(self) -> int | None:
        """Address of the storage; None while it is not on the device."""
        return None if self._device_storage is None else self._device_storage._cdata

    @property
    def is_incoming(self) -> bool:
        """True if a copy to the device is on its way."""
        return self._incoming is not None

    def watch(self, tensor: Tensor) -> int:
        """Record the version of a tensor in this storage and return its index for check_unchanged.

        Every tensor is recorded, because aliases made by ``.data`` have separate version counters.
        """
        self._watched.append((version_watch(tensor), tensor._version))
        return len(self._watched) - 1

    def holds_unchanged(self, storage: UntypedStorage) -> bool:
        """Return True if this is ``storage`` and it has not changed since it was saved."""
        return self.address == storage._cdata and not self._is_changed

    def evict(self) -> int:
        """Start the copy to the host if the host has no copy yet, and return the number of bytes copied.

        A storage that was modified since stays on the device, where the read of backward finds that.
        """
        if self._device_storage is None or self._outgoing is not None:
            return 0
        if self._host is not None:  # fetched before, so the host has a valid copy
            self._device_storage = None
            return 0
        if self._is_changed:
            return 0
        self._host = self._pool.take(self.nbytes)
        self._outgoing = self._link.copy(self._host, self._device_storage)
        return self.nbytes

    def finish_eviction(self) -> None:
        """Wait for the copy and release the device memory."""
        if self._outgoing is None:
            return
        copied = self._outgoing
        self._outgoing = None
        try:
            copied.wait()
        except OffloadError:
            self._host = None
            raise
        if self._is_changed and self._host is not None:
            self._pool.give_back(self._host)
            self._host = None
            return
        self._device_storage = None
        self._watched = []

    def fetch(self) -> int:
        """Start the copy to the device and return the number of bytes copied."""
        if self._outgoing is not None:  # the device memory is still there, and always valid
            copied = self._outgoing
            self._outgoing = None
            try:
                copied.wait()
            except OffloadError:
                self._host = None
        if self._device_storage is not None or self._host is None:
            return 0
        self._device_storage = UntypedStorage(self.nbytes, device=self._link.device)
        self._incoming = self._link.copy(self._device_storage, self._host)
        return self.nbytes

    def wait_for_fetch(self) -> UntypedStorage:
        """Wait for the copy to the device and return the device memory."""
        if self._incoming is not None:
            copied = self._incoming
            self._incoming = None
            try:
                copied.wait()
            except OffloadError:
                self._device_storage = None
                raise
        assert self._device_storage is not None, "a storage was read before it was fetched"
        return self._device_storage

    def check_unchanged(self, index: int) -> None:
        """Check that a tensor was not modified after it was saved, as autograd does.

        Args:
            index: index that watch() returned; a storage that has moved since is not checked, because its copy on the
                host cannot change.

        Raises:
            OffloadError: the tensor was modified.
        """
        if index >= len(self._watched):
            return
        alias, version = self._watched[index]
        if alias._version != version:
            raise OffloadError(
                "backward: expected values saved for backward unchanged, got one modified in place (one of the "
                f"variables needed for gradient computation is at version {alias._version}; expected version {version})"
            )

    @property
    def _is_changed(self) -> bool:
        """True if a recorded tensor was modified since it was saved."""
        return any(alias._version != version for alias, version in self._watched)


class ActivationGroup:
    """The storages that one forward of a layer saves for backward.

    Args:
        use: the forward.
        stays_on_device: True if its backward comes so soon that nothing moves.
        values: names of the values that move, see reference_torch.recompute.name_value; None: all values move, also
            those without a name.
    """

    def __init__(self, use: Use, stays_on_device: bool, values: Collection[str] | None = None) -> None:
        self.use = use
        self.stays_on_device = stays_on_device
        self.values = values
        self.named: list[NamedValue] = []
        """Values that the forward has named, until select()."""
        self.storages: list[weakref.ref[SavedStorage]] = []  # only the graph keeps them alive

    @property
    def alive(self) -> list[SavedStorage]:
        """Storages that the graph still uses."""
        return [storage for storage in (reference() for reference in self.storages) if storage is not None]

    def select(self) -> None:
        """Drop the storages of values that do not move from the group, once the forward has ended."""
        if self.values is None:
            return
        names: dict[int, str] = {}
        for value in self.named:
            names.setdefault(value.storage.cdata, value.name)
        self.storages = [
            reference
            for reference in self.storages
            if (storage := reference()) is not None and names.get(storage.address or 0) in self.values
        ]
        self.named = []


class SavedActivation:
    """A stand-in for a saved tensor: its storage, shape, stride, offset and dtype.

    Args:
        tensor: the saved tensor.
        storage: the storage of the tensor.
    """

    __slots__ = ("dtype", "index", "offset", "shape", "storage", "stride")

    def __init__(self, tensor: Tensor, storage: SavedStorage) -> None:
        self.storage = storage
        self.index = storage.watch(tensor)
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()


class ActivationOffload:
    """A scheduler of the copies of activation groups.

    Args:
        link: link to the host.
        statistics: counters of the copies.
        min_bytes: storages of fewer bytes stay on the device.
        record: called with each move. ``-a3.0`` means that the activations of layer 3 and microbatch 0 leave.
    """

    def __init__(
        self, link: Link, statistics: OffloadStatistics, min_bytes: int, record: Callable[[str], None]
    ) -> None:
        self.pool = HostPool(link)
        self.min_bytes = min_bytes
        self._link = link
        self._statistics = statistics
        self._record = record
        self._known: weakref.WeakValueDictionary[int, SavedStorage] = weakref.WeakValueDictionary()
        self._on_host: dict[Use, ActivationGroup] = {}
        self._outgoing: ActivationGroup | None = None

    def pack(self, group: ActivationGroup, tensor: Tensor) -> SavedActivation | None:
        """Add a saved tensor to a group and return its stand-in, or None if the tensor does not move."""
        owner = tensor if tensor._base is None else tensor._base
        is_plain = tensor.layout is torch.strided and type(tensor) is Tensor and tensor.device == self._link.device
        is_lazy = tensor.is_conj() or tensor.is_neg()  # flags of the tensor, absent from its bytes
        if not is_plain or is_lazy or isinstance(owner, nn.Parameter) or slot_of(tensor) is not None:
            return None
        storage = tensor.untyped_storage()
        if storage.nbytes() < self.min_bytes:
            return None
        saved = self._known.get(storage._cdata)
        if saved is None or not saved.holds_unchanged(storage):
            saved = SavedStorage(tensor.untyped_storage(), self._link, self.pool)
            self._known[storage._cdata] = saved
        if not any(reference() is saved for reference in group.storages):
            group.storages.append(weakref.ref(saved))
        return SavedActivation(tensor, saved)

    def unpack(self, saved: SavedActivation) -> Tensor:
        """Return the saved tensor, after its storage is fetched and has arrived."""
        saved.storage.check_unchanged(saved.index)
        self._statistics.note_copies("in", [saved.storage.fetch()])
        waits = saved.storage.is_incoming
        with self._statistics.measure_wait(self._link.device) if waits else contextlib.nullcontext():
            storage = saved.storage.wait_for_fetch()
        empty: Any = torch.empty(0, dtype=saved.dtype, device=self._link.device)
        return empty.set_(storage, saved.offset, saved.shape, saved.stride)

    def evict(self, group: ActivationGroup) -> None:
        """Start to move the group of a forward that has ended, once the previous group has left."""
        group.select()
        self.finish_eviction()
        if group.stays_on_device or not group.alive:
            return
        self._record(activation_event("-", group.use))
        self._statistics.note_copies("out", [storage.evict() for storage in group.alive])
        self._on_host[group.use] = group
        self._outgoing = group

    def finish_eviction(self) -> None:
        """Wait until the group that is being copied to the host has left the device."""
        group = self._outgoing
        self._outgoing = None
        for_each([] if group is None else group.alive, SavedStorage.finish_eviction)

    def fetch(self, forwards: tuple[Use, ...]) -> None:
        """Start to copy the groups of these forwards to the device, in this order."""
        for use in forwards:
            group = self._on_host.pop(use, None)
            if group is None or not group.alive:
                continue
            self._record(activation_event("+", use))
            self._statistics.note_copies("in", [storage.fetch() for storage in group.alive])
            if group is self._outgoing:
                self._outgoing = None
