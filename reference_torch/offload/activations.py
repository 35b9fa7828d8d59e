"""Activations on the host: what a layer keeps for backward leaves after its forward, and comes back for its backward.

Everything that operations of one forward of a layer keep is a group, and moves together; a memory is moved once for
each layer, however many views of it are kept. Parameters, small tensors, and what recompute will discard anyway are
left alone.
"""

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

from diptych.plans.offload import Use, activation_event
from reference_torch.offload.link import Copy, Link, OffloadError
from reference_torch.offload.statistics import OffloadStatistics
from reference_torch.recompute.region import slot_of


class HostPool:
    """Host memories that are handed out again, by size, so that nothing is allocated once every size has been seen."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._free: dict[int, list[UntypedStorage]] = defaultdict(list)
        self.allocated = 0
        """Memories made so far."""

    def take(self, nbytes: int) -> UntypedStorage:
        """One of so many bytes.

        Raises:
            OffloadError: the host has no room.
        """
        if self._free[nbytes]:
            return self._free[nbytes].pop()
        self.allocated += 1
        return self._link.host_memory(nbytes)

    def clear(self) -> None:
        """Let go what nobody uses now."""
        self._free.clear()

    def give_back(self, memory: UntypedStorage) -> None:
        """Nobody reads it any more."""
        self._free[memory.nbytes()].append(memory)


class KeptMemory:
    """One memory behind saved tensors; on the device, on its way, or on the host."""

    def __init__(self, storage: UntypedStorage, link: Link, pool: HostPool) -> None:
        self._home: UntypedStorage | None = storage
        self.nbytes = storage.nbytes()
        self._link, self._pool = link, pool
        self._watched: list[tuple[Tensor, int]] = []
        self._host: UntypedStorage | None = None
        self._leaving: Copy | None = None
        self._coming: Copy | None = None

    def __del__(self) -> None:
        for copied in (self._leaving, self._coming):  # what it reads or writes is about to be somebody else's
            if copied is not None:
                with contextlib.suppress(OffloadError):
                    copied.wait()
        if self._host is not None:
            self._pool.give_back(self._host)

    def watch(self, tensor: Tensor) -> int:
        """Remember a tensor in it and the version it has; returns a number for check_unchanged.

        Each has its own: aliases by ``.data`` count their versions apart.
        """
        self._watched.append((tensor.detach(), tensor._version))  # shares the version counter
        return len(self._watched) - 1

    def is_still(self, storage: UntypedStorage) -> bool:
        """Whether it is a storage's, with what was there when it was kept: the host may have a copy of that."""
        is_there = self._home is not None and self._home._cdata == storage._cdata
        return is_there and all(alias._version == version for alias, version in self._watched)

    def leave(self) -> int:
        """Begin to copy it to the host, where it is not already; returns the bytes copied."""
        if self._home is None or self._leaving is not None:
            return 0
        if self._host is not None:  # it came back, and the host's copy is good
            self._home = None
            return 0
        self._check_unchanged()
        self._host = self._pool.take(self.nbytes)
        self._leaving = self._link.copy(self._host, self._home)
        return self.nbytes

    def finish_leaving(self) -> None:
        """Wait for the copy, and let the device's memory go."""
        if self._leaving is None:
            return
        copied, self._leaving = self._leaving, None
        try:
            copied.wait()
        except OffloadError:
            self._host = None
            raise
        self._check_unchanged()
        self._home, self._watched = None, []

    def fetch(self) -> int:
        """Begin to bring it back; returns the bytes copied."""
        if self._leaving is not None:  # has not left yet: both are good
            self._leaving.wait()
            self._leaving = None
        if self._home is not None or self._host is None:
            return 0
        self._home = UntypedStorage(self.nbytes, device=self._link.device)
        self._coming = self._link.copy(self._home, self._host)
        return self.nbytes

    def arrive(self) -> UntypedStorage:
        """The memory on the device, once it is whole."""
        if self._coming is not None:
            copied, self._coming = self._coming, None
            try:
                copied.wait()
            except OffloadError:
                self._home = None
                raise
        assert self._home is not None, "what is read has been fetched"
        return self._home

    def check_unchanged(self, place: int) -> None:
        """Refuse a tensor that was written after it was kept, as autograd does.

        Args:
            place: by watch. What has left since is as it was when it left.

        Raises:
            OffloadError: it was.
        """
        if place >= len(self._watched):
            return
        alias, version = self._watched[place]
        if alias._version != version:
            raise OffloadError(
                "backward: expected values kept for backward unchanged, got one modified in place (one of the "
                f"variables needed for gradient computation is at version {alias._version}; expected version {version})"
            )

    def _check_unchanged(self) -> None:
        for place in range(len(self._watched)):
            self.check_unchanged(place)


class ActivationGroup:
    """What one forward of a layer keeps.

    Args:
        use: the forward.
        stays: whether its backward is so near that nothing leaves.
    """

    def __init__(self, use: Use, stays: bool) -> None:
        self.use, self.stays = use, stays
        self.memories: list[weakref.ref[KeptMemory]] = []  # the graph holds them, and lets them go

    @property
    def alive(self) -> list[KeptMemory]:
        """Memories that the graph still holds."""
        return [memory for memory in (reference() for reference in self.memories) if memory is not None]


class SavedActivation:
    """What the graph keeps instead of a tensor."""

    __slots__ = ("dtype", "memory", "offset", "place", "shape", "stride")

    def __init__(self, tensor: Tensor, memory: KeptMemory) -> None:
        self.memory, self.place = memory, memory.watch(tensor)
        self.dtype, self.shape, self.stride = tensor.dtype, tensor.shape, tensor.stride()
        self.offset = tensor.storage_offset()


class ActivationOffload:
    """Moves groups.

    Args:
        link: to the host.
        statistics: where moves are counted.
        min_bytes: smaller memories stay.
        record: called with each move, ``-a3.0``: the activations of layer 3's forward of microbatch 0 leave.
    """

    def __init__(
        self, link: Link, statistics: OffloadStatistics, min_bytes: int, record: Callable[[str], None]
    ) -> None:
        self.pool, self.min_bytes = HostPool(link), min_bytes
        self._link, self._statistics, self._record = link, statistics, record
        self._known: weakref.WeakValueDictionary[int, KeptMemory] = weakref.WeakValueDictionary()
        self._away: dict[Use, ActivationGroup] = {}
        self._leaving: ActivationGroup | None = None

    def keep(self, group: ActivationGroup, tensor: Tensor) -> SavedActivation | None:
        """Take a tensor into a group; None: it is left alone."""
        owner = tensor if tensor._base is None else tensor._base
        is_plain = tensor.layout is torch.strided and type(tensor) is Tensor and tensor.device == self._link.device
        is_lazy = tensor.is_conj() or tensor.is_neg()  # bits of the tensor, not of its bytes
        if not is_plain or is_lazy or isinstance(owner, nn.Parameter) or slot_of(tensor) is not None:
            return None
        storage = tensor.untyped_storage()
        if storage.nbytes() < self.min_bytes:
            return None
        memory = self._known.get(storage._cdata)
        if memory is None or not memory.is_still(storage):
            memory = KeptMemory(tensor.untyped_storage(), self._link, self.pool)
            self._known[storage._cdata] = memory
        if not any(reference() is memory for reference in group.memories):
            group.memories.append(weakref.ref(memory))
        return SavedActivation(tensor, memory)

    def take(self, saved: SavedActivation) -> Tensor:
        """The tensor again; waits for its memory, and fetches it where nobody has."""
        memory = saved.memory
        memory.check_unchanged(saved.place)
        self._statistics.note_copies("in", [memory.fetch()])
        with self._statistics.waiting(self._link.device):
            storage = memory.arrive()
        empty: Any = torch.empty(0, dtype=saved.dtype, device=self._link.device)
        return empty.set_(storage, saved.offset, saved.shape, saved.stride)

    def leave(self, group: ActivationGroup) -> None:
        """A forward has ended; its group begins to leave, when the one before it has left."""
        self.finish_leaving()
        if group.stays or not group.alive:
            return
        self._record(activation_event("-", group.use))
        self._statistics.note_copies("out", [memory.leave() for memory in group.alive])
        self._away[group.use] = self._leaving = group

    def finish_leaving(self) -> None:
        """Wait until what is on its way to the host has left the device."""
        group, self._leaving = self._leaving, None
        for memory in [] if group is None else group.alive:
            memory.finish_leaving()

    def fetch(self, forwards: tuple[Use, ...]) -> None:
        """Begin to bring groups back, in this order."""
        for use in forwards:
            group = self._away.pop(use, None)
            if group is None or not group.alive:
                continue
            self._record(activation_event("+", use))
            self._statistics.note_copies("in", [memory.fetch() for memory in group.alive])
            if group is self._leaving:
                self._leaving = None
