"""Emptied storages, and the guards that detect a read before they are refilled.

A discarded tensor keeps its shape, its place in the graph and its StorageImpl; only the memory behind the
StorageImpl is released. Three guards protect it:

- Its Python class becomes :class:`DiscardedTensor`, and every use of it raises an error.
- If the PyTorch build supports an access message, a read in C++ raises an error as well.
- Otherwise (CPU builds) the storage points to guard memory (:mod:`guard_memory`), so a read in C++ gives NaN instead
  of unrelated memory.

PyTorch 2.11 supports neither of the last two. There the storage has no bytes, and such a read is undefined.
"""

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from reference_torch.recompute import internals
from reference_torch.recompute.guard_memory import guard_address


class RecomputeError(RuntimeError):
    """The base class of errors of recompute."""


class DiscardedActivationError(RecomputeError):
    """A read of a discarded activation before it was restored."""


class RecomputeMismatchError(RecomputeError):
    """A replay that differs from its forward."""


class RecomputeUsageError(RecomputeError):
    """A call that recompute cannot replay, or an unsupported use of a recompute object."""


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
"""Attributes and methods that do not read elements, and so are allowed on an empty tensor."""


def function_name(func) -> str:
    """Return the name of a function that ``__torch_function__`` receives."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):  # a property: the object that it is bound to has its name
        name = func.__self__.__name__  # pyright: ignore[reportFunctionMemberAccess]
    return name


class DiscardedTensor(torch.Tensor):
    """A tensor whose storage is empty.

    A read raises an error; during a replay it restores the tensor instead.
    """

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
            f"{name}: expected a resident tensor, got the discarded output of recompute region {region!r}, which is "
            "empty until its backward; read it before it is discarded, or compute what you need inside the region"
        )

    def __repr__(self, *, tensor_contents=None) -> str:
        return f"DiscardedTensor({vars(self).get('_region_name')!r}, shape={tuple(self.shape)})"


def mark_discarded(tensor: Tensor, region_name: str, restore_in_replay) -> None:
    """Make every use of the tensor in Python raise an error, unless ``restore_in_replay()`` restores it.

    Args:
        tensor: the tensor.
        region_name: name of the recompute region, for error messages.
        restore_in_replay: restores the tensor during a replay and returns True; returns False at any other time.
    """
    vars(tensor).update(_region_name=region_name, _restore_in_replay=restore_in_replay)
    object.__setattr__(tensor, "__class__", DiscardedTensor)


def mark_restored(tensor: Tensor) -> None:
    """Undo mark_discarded."""
    if type(tensor) is DiscardedTensor:
        object.__setattr__(tensor, "__class__", torch.Tensor)
        for attribute in ("_region_name", "_restore_in_replay"):
            vars(tensor).pop(attribute)


def empty_storage(storage: torch.UntypedStorage, message: str) -> None:
    """Release the memory of a storage.

    The storage keeps its size only where it points to guard memory.

    Args:
        storage: the storage.
        message: error of a read in C++, where the PyTorch build supports it.
    """
    if internals.HAS_SWAP and not internals.HAS_READ_MESSAGE:
        size = storage.nbytes()
        address = guard_address(size, storage.device)
        internals.swap_memory(storage, internals.storage_from_pointer(address, storage.device, size))
        return
    storage.resize_(0)
    if internals.HAS_READ_MESSAGE:
        internals.set_read_message(storage, message)


def refill_storage(storage: torch.UntypedStorage, source: torch.UntypedStorage, exclusive: bool) -> None:
    """Move or copy the memory of another storage into a storage.

    No version counter changes, so every view and alias that autograd saved sees the data.

    Args:
        storage: the emptied storage.
        source: the storage with the data.
        exclusive: no other tensor uses the source, so its memory can be moved instead of copied.
    """
    if internals.HAS_SWAP and exclusive:
        internals.swap_memory(storage, source)  # the source takes the message or the guard memory
        return
    if internals.HAS_SWAP:
        internals.swap_memory(storage, torch.UntypedStorage(0, device=storage.device))
    storage.resize_(source.nbytes())
    storage.copy_(source)
