"""The storages a region can refill, known by address to whoever reads them."""

import contextlib
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from reference_torch.recompute import internals
from reference_torch.recompute.guard_memory import lay_anew
from reference_torch.recompute.guards import (
    RecomputeMismatchError,
    RecomputeUsageError,
    empty_storage,
    mark_discarded,
    mark_restored,
    refill_storage,
)

if TYPE_CHECKING:
    from reference_torch.recompute.region import Region

_slots: weakref.WeakValueDictionary[int, "Slot"] = weakref.WeakValueDictionary()
"""Slots by the address of their StorageImpl; a slot's weak reference keeps the address from being used again."""
_thread = threading.local()


def slot_at(address: int | None) -> "Slot | None":
    """The slot of the StorageImpl at an address, if any."""
    return None if address is None else _slots.get(address)


def slot_of(tensor: Tensor) -> "Slot | None":
    """The slot whose storage a tensor uses, if any."""
    return slot_at(internals.storage_address(tensor))


def in_replay() -> bool:
    """Whether this code runs inside a replay, or inside any backward (an outer checkpoint's recompute)."""
    return getattr(_thread, "depth", 0) > 0 or internals.runs_in_backward()


@contextlib.contextmanager
def replaying() -> Iterator[None]:
    """in_replay() holds within."""
    _thread.depth = getattr(_thread, "depth", 0) + 1
    try:
        yield
    finally:
        _thread.depth -= 1


class Slot:
    """One storage among a region's outputs, emptied after forward and refilled before its first reader."""

    def __init__(self, region: "Region", place: int, tensors: Sequence[Tensor]) -> None:
        storage = tensors[0].untyped_storage()
        self.region: Region | None = region
        self.place, self.is_full = place, True
        self.address, self.nbytes = storage._cdata, storage.nbytes()
        self._storage = StorageWeakRef(storage)
        self._watches = [(watch, watch._version) for watch in map(internals.version_watch, tensors)]
        self._tensors = [weakref.ref(tensor) for tensor in tensors]
        self._aliases: list[weakref.ref[Tensor]] = []
        self._replayers: list[weakref.ref[Region]] = []
        self.event: torch.Event | None = None
        _slots[self.address] = self

    @property
    def is_alive(self) -> bool:
        """Whether anybody still holds the storage."""
        return not self._storage.expired()

    @property
    def tensors(self) -> list[Tensor]:
        """The outputs that share the storage, those still alive."""
        return [tensor for tensor in (reference() for reference in self._tensors) if tensor is not None]

    def note_replayer(self, region: "Region") -> None:
        """A region has saved an output as its input: it restores it before it reads."""
        self._replayers.append(weakref.ref(region))

    def alias(self, tensor: Tensor) -> Tensor:
        """The tensor, detached, for a reader that calls restore() before it reads."""
        alias = tensor.detach()
        self._aliases.append(weakref.ref(alias))
        return alias

    def discard(self, force: bool = False) -> None:
        """Empty the storage; nothing inside a replay, where outputs are about to be read.

        Args:
            force: also where somebody holds the memory who would not restore it before reading; without, it stays.

        Raises:
            RecomputeUsageError: an output was modified in place, which a replay could not repeat.
        """
        region = self.region
        if region is None or not self.is_alive or not self.is_full or region.is_nested or in_replay():
            return
        tensors = self.tensors
        self._check_unchanged("before its discard")
        storage = internals.storage_from_weak(self._storage.cdata)
        aliases = [alias for alias in (reference() for reference in self._aliases) if alias is not None]
        replayers = sum(reference() is not None for reference in self._replayers)
        is_ours = _times_saved(tensors) <= replayers and is_held_only_by(storage, [*tensors, *aliases])
        if not force and not is_ours:
            return
        message = f"the output of recompute region {region.name!r} was read before it was restored"
        empty_storage(storage, f"DiscardedActivationError: {message}")
        self.is_full = False
        for tensor in tensors:
            mark_discarded(tensor, region.name, self._restore_in_replay)

    def _check_unchanged(self, when: str) -> None:
        """Compare the version counters, which see a change also where no Python object of the output is left."""
        if self.is_changed:
            name = self.region.name if self.region is not None else ""
            raise RecomputeUsageError(
                f"output {self.place} of {name!r}: expected it as the call returned it, got it modified in place "
                f"{when}, which a replay cannot repeat; modify a copy, or inside the call"
            )

    @property
    def is_changed(self) -> bool:
        """Whether an output, a view or an alias of it was modified in place since the call."""
        return any(watch._version != version for watch, version in self._watches)

    def live_with_outputs(self) -> None:
        """Be known for as long as an output is."""
        for tensor in self.tensors:
            vars(tensor)["_slot"] = self

    def keep(self) -> None:
        """The output stays for good: no replay is needed for its sake, and the call's inputs may go."""
        self.region = None
        _slots.pop(self.address, None)

    def refill(self, replayed: Tensor, aliases: list[Tensor]) -> list[Tensor]:
        """Take over the memory of the replayed output.

        Args:
            replayed: the only reference to it.
            aliases: what the replayed graph keeps in the same memory.

        Returns:
            The aliases as views of this storage: two copies would stay alive otherwise.
        """
        assert self.region is not None, "a slot that is kept was refilled"
        if self.is_changed:
            lay_anew(replayed.device)
        self._check_unchanged("while it was empty")
        source = replayed.untyped_storage()
        if source.nbytes() != self.nbytes:
            raise RecomputeMismatchError(
                f"replay of {self.region.name!r}: expected output {self.place} to hold {self.nbytes} bytes as in "
                f"forward, got {source.nbytes()}"
            )
        storage = internals.storage_from_weak(self._storage.cdata)
        refill_storage(storage, source, is_held_only_by(source, [replayed, *aliases]))
        rebound = [_rebound(alias, storage) for alias in aliases]
        self.is_full, self.event = True, self.region.state.record_event(storage.device)
        for tensor in self.tensors:
            mark_restored(tensor)
        return rebound

    def restore(self) -> None:
        """Refill the storage if it is empty, and all it is computed from: nearest the input first, in a loop."""
        waiting = [] if self.is_full or self.region is None else [self.region]
        while waiting:
            region = waiting[-1]
            empty = [] if region.is_restored else region.missing_inputs
            if empty:
                waiting.extend(empty)
                continue
            waiting.pop()
            with region.lock:  # another thread may have been faster
                if not region.is_restored:
                    region.replay()
        if self.event is not None:  # a reader on another stream waits for the replay
            torch.cuda.current_stream(self.event.device).wait_event(self.event)  # pyright: ignore

    def _restore_in_replay(self) -> bool:
        if not in_replay():
            return False
        self.restore()
        return True


def _rebound(alias: Tensor, storage: torch.UntypedStorage) -> Tensor:
    """Return the same view as ``alias``, of another storage: shape, strides, dtype, conjugation and sign."""
    view = torch.empty(0, dtype=alias.dtype, device=alias.device)
    view.set_(storage, alias.storage_offset(), alias.shape, alias.stride())  # pyright: ignore[reportCallIssue, reportArgumentType]
    if alias.is_conj():
        view = view.conj()
    return internals.negated_view(view) if alias.is_neg() else view


def slot_address(tensor: Tensor) -> int:
    """Address of a tensor's StorageImpl."""
    return tensor.untyped_storage()._cdata


def is_held_only_by(storage: torch.UntypedStorage, tensors: list[Tensor]) -> bool:
    """Whether no tensor but those given, and the bases they are views of, uses the storage."""
    bases = _bases(tensors)  # alive, so that ids are theirs
    holders = {id(tensor) for tensor in [*tensors, *bases]}
    return internals.storage_holders(storage) <= len(holders) + 1


def _times_saved(tensors: list[Tensor]) -> int:
    """How often operations without hooks have saved the tensors."""
    return sum(internals.tensor_holders(tensor) - 1 for tensor in tensors) - len(_bases(tensors))


def _bases(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor._base for tensor in tensors if tensor._base is not None]
