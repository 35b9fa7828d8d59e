"""A storage that moves between host and device, used by one or several parameters and buffers.

The Parameter stays the same object with the same storage. While it is on the host, the storage is empty and the bytes
are in a host copy, which is allocated once. While its layer is not in use, the class of the tensor is replaced: a read
or write from Python then fetches the storage first, and changes are copied back to the host.
"""

import contextlib
import copy
import sys
import weakref
from collections.abc import Callable, Iterable
from ctypes import string_at
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils._pytree import tree_leaves

from reference_torch.offload.link import Copy, Link, OffloadError
from reference_torch.recompute import internals
from reference_torch.recompute.guards import METADATA, empty_storage, function_name, refill_storage
from reference_torch.recompute.region import is_held_only_by

_READS_NOTHING = (METADATA - {"untyped_storage"}) | (
    {"requires_grad_", "register_post_accumulate_grad_hook", "retains_grad", "itemsize", "get_device", "ndimension"}
    | {"is_complex", "is_cpu", "is_cuda", "is_meta", "is_nested", "is_quantized", "is_signed", "is_sparse"}
    | {"zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"}
)
"""Names of functions that read no element of a tensor, and so need no fetch."""


def gradient_node(tensor: Tensor) -> Node | None:
    """Return the node that accumulates a parameter's gradient in every graph, or None if it needs no gradient."""
    if not tensor.requires_grad:
        return None
    with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False):
        return get_gradient_edge(tensor).node


def _is_saved_elsewhere(tensor: Tensor, saved: Iterable[Tensor], num_expected_references: int) -> bool:
    """Return True if a graph saved a tensor without offload's hooks.

    Expected are these references, the node that accumulates its gradient, and its saved views.

    Args:
        tensor: the tensor.
        saved: tensors in the same storage that were saved under offload's hooks.
        num_expected_references: see OffloadedStorage.
    """
    views = sum(view._base is tensor for view in saved)
    if internals.tensor_holders(tensor) <= num_expected_references + views:
        return False
    node = gradient_node(tensor)  # held while counted
    return internals.tensor_holders(tensor) > num_expected_references + views + (node is not None)


class _Offloaded:
    """A mixin for the class of a tensor while its layer is not in use."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function_name(func)
        with torch._C.DisableTorchFunctionSubclass():
            for leaf in tree_leaves((args, kwargs)) if name not in _READS_NOTHING else ():
                if isinstance(leaf, _Offloaded):
                    storage: OffloadedStorage = vars(leaf)["_storage"]
                    if name != "detach" or not storage.may_be_detached:
                        storage.fetch_now()
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict) -> Any:
        vars(self)["_storage"].fetch_now()
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        vars(self)["_storage"].fetch_now()
        return self.__reduce_ex__(protocol)


class OffloadedParameter(_Offloaded, nn.Parameter):
    """A parameter whose layer is not in use."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"OffloadedParameter(shape={tuple(self.shape)})"


class OffloadedTensor(_Offloaded, Tensor):
    """A buffer whose layer is not in use."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"OffloadedTensor(shape={tuple(self.shape)})"


def storage_of(tensor: Tensor) -> "OffloadedStorage | None":
    """Return the storage of a tensor whose layer is not in use, or None for an ordinary tensor."""
    return vars(tensor)["_storage"] if isinstance(tensor, _Offloaded) else None


def host_value(tensor: Tensor) -> Tensor:
    """Return a tensor with the current bytes of ``tensor`` that can be read or written without a fetch.

    It is the host copy if the storage is on the host, after every copy from or to it has ended, else the tensor itself.
    """
    storage = storage_of(tensor)
    if storage is None:
        return tensor
    storage.wait_for_copies()
    if not storage.is_on_device:
        return storage.host_view(tensor)
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach()


def fetch_now(tensor: Tensor) -> None:
    """Fetch the storage of a tensor if it is on the host."""
    storage = storage_of(tensor)
    if storage is not None and not storage.is_on_device:
        storage.fetch_now()


class OffloadedStorage:
    """A storage with a copy on the host.

    Args:
        name: canonical name of its first tensor.
        tensors: all tensors in the storage; each covers it completely.
        link: link to the host.
        fetch_layer: called if a tensor is used while its layer is not; calls ``fetch``, ``wait_for_fetch`` and
            ``unguard``. None: the storage does so itself.
        host: storage on the host for the copy, written by the first eviction; None: new memory, written at once.
        num_expected_references: C++ references to each tensor besides those of graphs: 1 for its Python object, 2 if it
            is also the ``grad`` of a parameter.

    Raises:
        OffloadError: the host has no free memory.
    """

    def __init__(
        self,
        name: str,
        tensors: Iterable[Tensor],
        link: Link,
        fetch_layer: Callable[[], None] | None = None,
        host: UntypedStorage | None = None,
        num_expected_references: int = 1,
    ) -> None:
        self.name = name
        self.tensors = list(tensors)
        self._link = link
        self.device_storage = self.tensors[0].untyped_storage()
        self.nbytes = self.device_storage.nbytes()
        self.host = link.host_copy(self.device_storage) if host is None else host
        self._expected_references = num_expected_references
        self._fetch_layer = fetch_layer
        self._aliases: dict[int, weakref.ref[Tensor]] = {}
        self._is_replayed = False
        self.may_be_detached = False
        """True if ``detach`` may return an empty alias, which the caller then replaces."""
        self._incoming: tuple[UntypedStorage, Copy] | None = None
        self._outgoing: Copy | None = None
        self._last_copy: Copy | None = None
        """The last copy from or to the host, which may still run on a GPU after wait(); copies run in order."""
        self._is_on_device = True
        self._host_versions: tuple[int, ...] | None = self._version if host is None else None
        """Version counters when the host copy was last equal; None: it may differ."""

    @property
    def is_on_device(self) -> bool:
        """True if the bytes are on the device."""
        return self._is_on_device

    @property
    def device_bytes(self) -> int:
        """Bytes allocated on the device."""
        if self._incoming is not None:
            return self._incoming[0].nbytes()
        return self.device_storage.nbytes() if self._is_on_device or self._outgoing is not None else 0

    @property
    def is_held(self) -> bool:
        """True if another holder uses the storage without fetching it: an alias, or a graph without offload's hooks."""
        if self._is_replayed:
            return False
        with torch._C.DisableTorchFunctionSubclass():
            saved = [alias for alias in (reference() for reference in [*self._aliases.values()]) if alias is not None]
            if not is_held_only_by(self.device_storage, [*self.tensors, *saved]):
                return True
            return any(_is_saved_elsewhere(tensor, saved, self._expected_references) for tensor in self.tensors)

    @property
    def is_dropped(self) -> bool:
        """True if no other code holds the only tensor in this storage."""
        references = sys.getrefcount(self.tensors[0]) - 1  # without the argument's
        return references <= 1 and internals.tensor_holders(self.tensors[0]) <= 1

    @property
    def has_own_storage(self) -> bool:
        """True unless a tensor has been given another storage."""
        address = self.device_storage._cdata
        return all(internals.storage_address(tensor) == address for tensor in self.tensors)

    @property
    def is_changed(self) -> bool:
        """True if the tensors changed after they were copied to the host."""
        return self._is_on_device and self._host_versions != self._version

    @property
    def _version(self) -> tuple[int, ...]:
        """Version counters of all tensors."""
        return tuple(tensor._version for tensor in self.tensors)

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Add tensors that use the same storage."""
        known = {id(tensor) for tensor in self.tensors}
        changed = self.is_changed
        self.tensors += [tensor for tensor in tensors if id(tensor) not in known]
        self._host_versions = None if changed else self._version

    def forget_tensors(self) -> None:
        """Release the tensors, which refer to this storage while they are guarded, without waiting for a collection."""
        self.unguard()
        self.tensors.clear()

    def note_alias(self, alias: Tensor) -> None:
        """Record a tensor in this storage that a graph saved under offload's hooks."""
        if any(alias is tensor for tensor in self.tensors):
            return
        key = id(alias)
        self._aliases[key] = weakref.ref(alias, lambda _, aliases=self._aliases: aliases.pop(key, None))

    def begin_replay(self) -> None:
        """Prepare for a replay, whose saved values are in this storage and are read in the layer's backward.

        Until it ends, the aliases that the replay saves do not count as holders, because backward reads them before the
        storage is evicted.
        """
        self._is_replayed = self._is_replayed or not self.is_held

    def end_replay(self) -> None:
        """Record that the layer's backward has read all values that the replay saved."""
        self._is_replayed = False

    def note_change(self) -> None:
        """Record that the tensors were written."""
        self._host_versions = None

    def note_change_if_bytes_differ(self) -> None:
        """Record a change if the bytes differ from those on the host; on a GPU always, because comparing would wait."""
        if not self._is_on_device or self.is_changed:
            return
        here = self.device_storage
        there = self.host
        is_cpu = here.device.type == "cpu"
        if not is_cpu or string_at(here.data_ptr(), self.nbytes) != string_at(there.data_ptr(), self.nbytes):
            self.note_change()

    def host_view(self, tensor: Tensor) -> Tensor:
        """Return the current host copy with the shape of a tensor.

        Args:
            tensor: a tensor in this storage.

        Raises:
            OffloadError: the tensor now has another storage.
        """
        self._check_storage()
        before = self._host_versions
        if self.is_changed:
            self.write_back()
        if self._last_copy is not None:  # it may still write the bytes that the caller reads, or read those it writes
            try:
                self._last_copy.synchronize()
            except OffloadError:
                self._note_failed_copy()
                raise
        if before is None:  # a holder that wrote it undetected may do so again
            self._host_versions = before
        with torch.inference_mode(False):
            like = torch.empty(0, dtype=tensor.dtype)
            return like.set_(self.host, tensor.storage_offset(), tensor.shape, tensor.stride())  # pyright: ignore

    def fetch_now(self) -> None:
        """Fetch the storage for a read or write outside the layer's uses."""
        if self._fetch_layer is None:
            self.fetch()
            self.wait_for_fetch()
            self.unguard()
            self.note_change()  # the caller may write it through .data or an alias, which no version counts
            return
        self._fetch_layer()
        # A closed manager fetches nothing. The device may have had no room when it was closed.
        if not self._is_on_device or self._incoming is not None:
            self.release()

    def fetch(self) -> int:
        """Start the copy to the device and return the number of bytes copied."""
        if self._is_on_device or self._incoming is not None:
            return 0
        if self._outgoing is not None:  # the device memory is still there
            written = self._outgoing
            self._outgoing = None
            self._is_on_device = True
            try:
                written.wait()
            except OffloadError:
                self._note_failed_copy()
            return 0
        if internals.HAS_SWAP:
            target = UntypedStorage(self.nbytes, device=self._link.device)
        else:
            self.device_storage.resize_(self.nbytes)
            target = self.device_storage
        self._last_copy = self._link.copy(target, self.host)
        self._incoming = target, self._last_copy
        return self.nbytes

    def wait_for_copies(self) -> None:
        """Wait for a copy to the device or to the host that is on its way."""
        self.wait_for_fetch()
        self.finish_eviction()

    def wait_for_fetch(self) -> None:
        """Wait for the copy to the device, after which the tensors can be read."""
        if self._incoming is None:
            return
        target, copied = self._incoming
        self._incoming = None
        try:
            copied.wait()
        except OffloadError:
            self._last_copy = None
            raise
        if target is not self.device_storage:
            refill_storage(self.device_storage, target, exclusive=True)
        self._is_on_device = True

    def evict(self) -> int:
        """Evict the storage, unless it has other holders, and return the number of bytes copied.

        If the host copy is current, the device memory is released at once, else after a copy to the host.
        """
        self.wait_for_fetch()
        if not self._is_on_device:
            return 0
        self._check_storage()
        if self.is_held:
            self.note_change()  # the holder may write it and release it before the next check
            return 0
        written = self.write_back() if self.is_changed else None
        self.guard()
        self._is_on_device = False
        if written is None:
            self._empty()
            return 0
        self._outgoing = written
        return self.nbytes

    def finish_eviction(self) -> None:
        """Wait for the copy to the host and release the device memory."""
        if self._outgoing is None:
            return
        written = self._outgoing
        self._outgoing = None
        try:
            written.wait()
        except OffloadError:
            self._is_on_device = True  # only the device has valid bytes
            self._note_failed_copy()
            raise
        self._empty()

    def write_back(self) -> Copy:
        """Start to update the host copy; the caller waits for it before it uses either storage."""
        self._last_copy = self._link.copy(self.host, self.device_storage)
        self._host_versions = self._version
        return self._last_copy

    def _note_failed_copy(self) -> None:
        """Record that the host copy may not be current, so that the next eviction copies it again."""
        self._host_versions = None
        self._last_copy = None

    def release(self) -> None:
        """Move the storage to the device permanently, even after a failed copy."""
        with contextlib.suppress(OffloadError):
            self.finish_eviction()
        with contextlib.suppress(OffloadError):
            self.wait_for_fetch()
        self.fetch()
        self.wait_for_fetch()
        self.unguard()

    def unguard(self) -> None:
        """Make the tensors ordinary tensors, because their layer is in use."""
        self.may_be_detached = False  # still True if an error has ended a state_dict
        for tensor in self.tensors:
            if isinstance(tensor, _Offloaded):
                vars(tensor).pop("_storage")
                object.__setattr__(tensor, "__class__", nn.Parameter if isinstance(tensor, nn.Parameter) else Tensor)

    def guard(self) -> None:
        """Guard the tensors, because their layer is not in use: other reads and writes fetch the storage first."""
        for tensor in self.tensors:
            if not isinstance(tensor, _Offloaded):
                vars(tensor)["_storage"] = self
                guarded = OffloadedParameter if isinstance(tensor, nn.Parameter) else OffloadedTensor
                object.__setattr__(tensor, "__class__", guarded)

    def _check_storage(self) -> None:
        """Raise an OffloadError if a tensor has been given another storage."""
        if not self.has_own_storage:
            raise OffloadError(
                f"{self.name}: expected to stay in its storage, got another (by .data = or Module.to); close() the "
                "manager before, and register the layer with a new manager afterwards"
            )

    def _empty(self) -> None:
        """Release the device memory; later reads in C++ raise an error."""
        empty_storage(self.device_storage, f"OffloadError: {self.name} was read while its storage was on the host")
