"""One memory that moves: a parameter's, a buffer's, or what several of them share.

The Parameter stays the same object over the same storage. While it is away the storage is empty and the bytes are in a
copy on the host, made once. While its layer is not in use its class is another, there or away: whoever then reads or
writes it from Python is noticed, finds it there, and what was written is written back.
"""

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterable
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


def gradient_node(tensor: Tensor) -> Node | None:
    """Return the node that adds a parameter's gradient up: of every graph the same; None: it wants no gradient."""
    if not tensor.requires_grad:
        return None
    with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False):
        return get_gradient_edge(tensor).node


def _is_kept_by_others(tensor: Tensor, saved: Iterable[Tensor]) -> bool:
    """Whether a graph keeps a tensor itself that was not kept under offload's hooks.

    Known are its Python object, the node that adds its gradient up, and what its views hold that were kept.
    """
    views = sum(view._base is tensor for view in saved)
    if internals.tensor_holders(tensor) <= 1 + views:
        return False
    node = gradient_node(tensor)  # held while counted
    return internals.tensor_holders(tensor) > 1 + views + (node is not None)


class _Offloaded:
    """What a tensor's class has in front while its layer is not in use."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function_name(func)
        with torch._C.DisableTorchFunctionSubclass():
            for leaf in tree_leaves((args, kwargs)) if name not in _READS_NOTHING else ():
                if isinstance(leaf, _Offloaded):
                    memory: OffloadedMemory = vars(leaf)["_memory"]
                    if name != "detach" or not memory.may_be_detached:
                        memory.bring_back()
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict) -> Any:
        vars(self)["_memory"].bring_back()
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        vars(self)["_memory"].bring_back()
        return self.__reduce_ex__(protocol)


class OffloadedParameter(_Offloaded, nn.Parameter):
    """Class of a parameter while its layer is not in use."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"OffloadedParameter(shape={tuple(self.shape)})"


class OffloadedTensor(_Offloaded, Tensor):
    """Class of a buffer while its layer is not in use."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"OffloadedTensor(shape={tuple(self.shape)})"


def host_value(tensor: Tensor) -> Tensor:
    """What a tensor shares its bytes with, to be read or written in its place and without moving anything.

    A parameter whose memory is away: its copy on the host. Any other tensor: itself.
    """
    if not isinstance(tensor, _Offloaded):
        return tensor
    memory: OffloadedMemory = vars(tensor)["_memory"]
    if not memory.is_home:
        return memory.host_view(tensor)
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach()


def bring_back(tensor: Tensor) -> None:
    """Bring a tensor's memory to the device where it is away."""
    if isinstance(tensor, _Offloaded):
        memory: OffloadedMemory = vars(tensor)["_memory"]
        if not memory.is_home:
            memory.bring_back()


class OffloadedMemory:
    """A storage with a copy on the host.

    Args:
        name: canonical name of the first tensor in it.
        tensors: all that use it, each as a whole.
        link: to the host.
        bring_back: called when a tensor is used while its layer is not; calls ``fetch``, ``arrive`` and ``show``.

    Raises:
        OffloadError: the host has no room.
    """

    def __init__(self, name: str, tensors: Iterable[Tensor], link: Link, bring_back: Callable[[], None]) -> None:
        self.name, self.tensors, self._link = name, list(tensors), link
        self.home = self.tensors[0].untyped_storage()
        self.nbytes = self.home.nbytes()
        self.host = link.host_copy(self.home)
        self._bring_back = bring_back
        self._aliases: dict[int, weakref.ref[Tensor]] = {}
        self._is_replayed = False
        self.may_be_detached = False
        """Whether ``detach`` may give an empty alias; the caller replaces it."""
        self._coming: tuple[UntypedStorage, Copy] | None = None
        self._leaving: Copy | None = None
        self._is_home = True
        self._copied_at = self._version

    @property
    def is_home(self) -> bool:
        """Whether its bytes are on the device."""
        return self._is_home

    @property
    def device_bytes(self) -> int:
        """Bytes it really takes on the device."""
        if self._coming is not None:
            return self._coming[0].nbytes()
        return self.home.nbytes() if self._is_home or self._leaving is not None else 0

    @property
    def is_held(self) -> bool:
        """Whether somebody uses the memory who would not bring it back: an alias, or a graph made elsewhere."""
        if self._is_replayed:
            return False
        with torch._C.DisableTorchFunctionSubclass():
            saved = [alias for alias in (reference() for reference in [*self._aliases.values()]) if alias is not None]
            if not is_held_only_by(self.home, [*self.tensors, *saved]):
                return True
            return any(_is_kept_by_others(tensor, saved) for tensor in self.tensors)

    @property
    def is_changed(self) -> bool:
        """Whether the host's copy is older than the tensors."""
        return self._is_home and self._copied_at != self._version

    @property
    def _version(self) -> tuple[int, ...]:
        return tuple(tensor._version for tensor in self.tensors)

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Other tensors that use it."""
        known, changed = {id(tensor) for tensor in self.tensors}, self.is_changed
        self.tensors += [tensor for tensor in tensors if id(tensor) not in known]
        self._copied_at = () if changed else self._version

    def note_alias(self, alias: Tensor) -> None:
        """A graph keeps a tensor in it, for a reader that brings it back first."""
        if any(alias is tensor for tensor in self.tensors):
            return
        key = id(alias)
        self._aliases[key] = weakref.ref(alias, lambda _, aliases=self._aliases: aliases.pop(key, None))

    def begin_replay(self) -> None:
        """A region is about to be run again: what it records is in the memory, and read in its layer's backward."""
        self._is_replayed = self._is_replayed or not self.is_held

    def end_replay(self) -> None:
        """The layer's backward has ended, and with it all that reads what was recorded."""
        self._is_replayed = False

    def note_change(self) -> None:
        """Somebody has written the tensors."""
        self._copied_at = ()

    def host_view(self, tensor: Tensor) -> Tensor:
        """The copy on the host, up to date, in a tensor's shape.

        Raises:
            OffloadError: the tensor has been given another memory.
        """
        self._check_place()
        before = self._copied_at
        written = self.write_back() if self.is_changed else self._leaving
        if written is not None:
            written.synchronize()
        if before == ():  # whoever may have written it unseen may do so again
            self._copied_at = before
        with torch.inference_mode(False):
            like = torch.empty(0, dtype=tensor.dtype)
            return like.set_(self.host, tensor.storage_offset(), tensor.shape, tensor.stride())  # pyright: ignore

    def bring_back(self) -> None:
        """Bring it back for somebody who reads or writes it."""
        self._bring_back()
        if not self._is_home or self._coming is not None:  # the manager is gone, and had no room for it
            self.release()

    def fetch(self) -> int:
        """Begin to bring it back; returns the bytes copied."""
        if self._is_home or self._coming is not None:
            return 0
        if self._leaving is not None:  # has not left yet
            written, self._leaving, self._is_home = self._leaving, None, True
            try:
                written.wait()
            except OffloadError:
                self._copied_at = ()  # it is written back when it next leaves
            return 0
        if internals.HAS_SWAP:
            target = UntypedStorage(self.nbytes, device=self._link.device)
        else:
            self.home.resize_(self.nbytes)
            target = self.home
        self._coming = target, self._link.copy(target, self.host)
        return self.nbytes

    def arrive(self) -> None:
        """End a fetch: the tensors can be read again."""
        if self._coming is None:
            return
        (target, copied), self._coming = self._coming, None
        copied.wait()
        if target is not self.home:
            refill_storage(self.home, target, exclusive=True)
        self._is_home = True

    def leave(self) -> int:
        """Let it go: at once where the host's copy is good, else after it is written back; returns the bytes copied.

        Where somebody else holds it, it stays.
        """
        self.arrive()
        if not self._is_home:
            return 0
        self._check_place()
        if self.is_held:
            self.note_change()  # whoever holds it may write it, and let it go before this is asked again
            return 0
        written = self.write_back() if self.is_changed else None
        self.hide()
        self._is_home = False
        if written is None:
            self._empty()
            return 0
        self._leaving = written
        return self.nbytes

    def finish_leaving(self) -> None:
        """Wait for what is being written back, and give its memory back."""
        if self._leaving is None:
            return
        written, self._leaving = self._leaving, None
        try:
            written.wait()
        except OffloadError:
            self._is_home, self._copied_at = True, ()  # the only good copy is here
            raise
        self._empty()

    def write_back(self) -> Copy:
        """Begin to bring the host's copy up to date; waited for before the memory or the copy is used."""
        self._copied_at = self._version
        return self._link.copy(self.host, self.home)

    def release(self) -> None:
        """Bring it back for good, also after a copy that failed."""
        with contextlib.suppress(OffloadError):
            self.finish_leaving()
        with contextlib.suppress(OffloadError):
            self.arrive()
        self.fetch()
        self.arrive()
        self.show()

    def show(self) -> None:
        """Its layer is in use: its tensors are as any others."""
        for tensor in self.tensors:
            if isinstance(tensor, _Offloaded):
                vars(tensor).pop("_memory")
                object.__setattr__(tensor, "__class__", nn.Parameter if isinstance(tensor, nn.Parameter) else Tensor)

    def hide(self) -> None:
        """Its layer is not in use: whoever reads or writes it is noticed."""
        for tensor in self.tensors:
            if not isinstance(tensor, _Offloaded):
                vars(tensor)["_memory"] = self
                guarded = OffloadedParameter if isinstance(tensor, nn.Parameter) else OffloadedTensor
                object.__setattr__(tensor, "__class__", guarded)

    def _check_place(self) -> None:
        if any(internals.storage_address(tensor) != self.home._cdata for tensor in self.tensors):
            raise OffloadError(
                f"{self.name}: expected to stay in its memory, got another (by .data = or Module.to); close() the "
                "manager before, and register the layer with a new one after"
            )

    def _empty(self) -> None:
        empty_storage(self.home, f"OffloadError: {self.name} was read while its memory was on the host")
