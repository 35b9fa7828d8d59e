"""Empty storages, and what stands guard over them until they are refilled.

A discarded tensor keeps its shape, its place in the graph and its StorageImpl; only the memory behind the
StorageImpl is given back. Three guards stand over it:

- its Python class becomes :class:`DiscardedTensor`, whose every use raises;
- where this build of PyTorch has the message, a read in C++ raises as well;
- elsewhere (CPU builds) the storage points at guard memory (:mod:`guard_memory`), so that a read in C++ that no
  Python object saw coming gives NaN rather than somebody else's memory. PyTorch 2.11 has neither: there
  the storage has no bytes, and what such a read does is undefined.
"""

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from reference_torch.recompute import internals
from reference_torch.recompute.guard_memory import guard_address


class RecomputeError(RuntimeError):
    """Something recompute cannot do right, found before it could do it wrong."""


class DiscardedActivationError(RecomputeError):
    """A discarded activation was read before it was restored."""


class RecomputeMismatchError(RecomputeError):
    """A replay did not do what its forward did."""


class RecomputeUsageError(RecomputeError):
    """A call that recompute cannot replay, or an object used in a way it is not made for."""


METADATA = frozenset(
    {"shape", "dtype", "device", "requires_grad", "grad_fn", "is_leaf", "ndim", "layout", "names", "grad"}
    | {"size", "dim", "numel", "stride", "storage_offset", "untyped_storage", "element_size", "nbytes"}
    | {
        "is_contiguous",
        "is_floating_point",
        "is_complex",
        "is_conj",
        "is_neg",
        "itemsize",
        "is_cuda",
        "is_sparse",
        "register_hook",
        "retain_grad",
        "_version",
        "_base",
        "__class__",
    }
)
"""What may be asked of a tensor whose memory is not there: all that does not read its elements."""


def function_name(func) -> str:
    """What ``__torch_function__`` is asked for, by name."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):  # a property: its own name stands one object further
        name = func.__self__.__name__  # pyright: ignore[reportFunctionMemberAccess]
    return name


class DiscardedTensor(torch.Tensor):
    """Class of a tensor while its storage is empty. Reading it raises; during a replay it is restored instead."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        name = function_name(func)
        if name in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        discarded = [leaf for leaf in tree_leaves((args, kwargs)) if type(leaf) is DiscardedTensor]
        restored = [vars(leaf)["_restore_in_replay"]() for leaf in discarded]
        if all(restored):
            return func(*args, **(kwargs or {}))
        region = vars(discarded[0])["_region_name"]
        raise DiscardedActivationError(
            f"{name}: expected a tensor whose memory is there, got the output of recompute region {region!r}, which is "
            "empty until its backward; read it before it is discarded, or compute what you need inside the region"
        )

    def __repr__(self, *, tensor_contents=None) -> str:
        return f"DiscardedTensor({vars(self).get('_region_name')!r}, shape={tuple(self.shape)})"


def mark_discarded(tensor: Tensor, region_name: str, restore_in_replay) -> None:
    """Make every use of the tensor in Python raise, or restore it where ``restore_in_replay()`` says it did."""
    vars(tensor).update(_region_name=region_name, _restore_in_replay=restore_in_replay)
    object.__setattr__(tensor, "__class__", DiscardedTensor)


def mark_restored(tensor: Tensor) -> None:
    """The inverse of mark_discarded."""
    if type(tensor) is DiscardedTensor:
        object.__setattr__(tensor, "__class__", torch.Tensor)
        for attribute in ("_region_name", "_restore_in_replay"):
            vars(tensor).pop(attribute)


def empty_storage(storage: torch.UntypedStorage, message: str) -> None:
    """Give a storage's memory back; its size stays only where it is pointed at NaN.

    Args:
        message: what a read in C++ raises, where this build can.
    """
    if internals.HAS_SWAP and not internals.HAS_READ_MESSAGE:
        size = storage.nbytes()
        poison = guard_address(size, storage.device)
        internals.swap_memory(storage, internals.storage_from_pointer(poison, storage.device, size))
        return
    storage.resize_(0)
    if internals.HAS_READ_MESSAGE:
        internals.set_read_message(storage, message)


def refill_storage(storage: torch.UntypedStorage, source: torch.UntypedStorage, exclusive: bool) -> None:
    """Give a storage the memory of another: exchanged where nobody else holds the source, else copied.

    No version counter moves, so every view and alias that autograd saved sees the data.
    """
    if internals.HAS_SWAP and exclusive:
        internals.swap_memory(storage, source)  # message or poison go to the source, and die with it
        return
    if internals.HAS_SWAP:
        internals.swap_memory(storage, torch.UntypedStorage(0, device=storage.device))
    storage.resize_(source.nbytes())
    storage.copy_(source)
