"""Every part of PyTorch below its public interface that this package rests on, in one place.

Present in PyTorch 2.11 to 2.13, but for what the two constants say.
"""
# pyright: reportAttributeAccessIssue=false, reportReturnType=false

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch._compile
import torch.autograd.forward_ad
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

outside_compiled_graphs = torch._compile._disable_dynamo
"""Decorator of functions that torch.compile must not trace: a call of one breaks the graph."""

HAS_SWAP = hasattr(torch.UntypedStorage, "_swap_data_ptr_")
"""Whether a storage's memory can be exchanged without a copy (PyTorch 2.12 and later)."""
HAS_READ_MESSAGE = HAS_SWAP and hasattr(torch._C, "_set_storage_data_ptr_access_error_msg")
"""Whether a read of an empty storage in C++ can be made to raise."""


def storage_address(tensor: Tensor) -> int | None:
    """Address of a tensor's StorageImpl; None where it has none (sparse, functorch)."""
    try:
        return torch._C._storage_address(tensor)
    except (RuntimeError, NotImplementedError):
        return None


def storage_holders(storage: torch.UntypedStorage) -> int:
    """How many references hold a StorageImpl: one a tensor, and one for its Python object."""
    return torch._C._storage_Use_Count(storage._cdata)


def tensor_holders(tensor: Tensor) -> int:
    """How many references hold a tensor: one for its Python object, one for each operation that saved it, each view."""
    return tensor._use_count()


def storage_from_weak(address: int) -> torch.UntypedStorage:
    """The storage of a weak reference that has not expired."""
    return torch.UntypedStorage._new_with_weak_ptr(address)


def storage_from_pointer(pointer: int, device: torch.device, size: int) -> torch.UntypedStorage:
    """A storage over memory it does not own."""
    return torch._C._construct_storage_from_data_pointer(pointer, device, size)


def version_watch(tensor: Tensor) -> Tensor:
    """Return a tensor without elements that shares the version counter of another, and holds nothing of its memory.

    A weak reference to a tensor dies with its Python object, while operations that saved the tensor keep it alive.
    """
    watch = tensor.detach()  # shares the counter; taking other data leaves the counter in place
    watch.data = _nothing(tensor.dtype, tensor.device)
    return watch


@functools.cache
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=dtype, device=device)


def without_dispatch_modes() -> contextlib.AbstractContextManager:
    """Return a context in which no TorchDispatchMode sees operations.

    Hooks registered on a saved value are given a detached copy of it, and a mode cannot detach a number.
    """
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else contextlib.nullcontext()


def negated_view(tensor: Tensor) -> Tensor:
    """Return a view whose elements count as negated, as the imaginary part of a conjugate has it."""
    return torch._C._VariableFunctions._neg_view(tensor)


def swap_memory(one: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    """Exchange what two storages point at, their sizes included."""
    one._swap_data_ptr_(other)


def set_read_message(storage: torch.UntypedStorage, message: str) -> None:
    """Make a read of the storage in C++ raise; what refills the storage takes the message away."""
    torch._C._set_storage_data_ptr_access_error_msg(storage._cdata, message)


def outer_saved_tensor_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """The saved-tensor hooks now in force."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def runs_in_backward() -> bool:
    """Whether this thread is executing a backward pass."""
    return torch._C._current_graph_task_id() != -1


def runs_in_func_transform() -> bool:
    """Whether this code is traced by torch.func, or runs in forward-mode differentiation."""
    in_dual_level = torch.autograd.forward_ad._current_level >= 0
    return in_dual_level or torch._C._functorch.peek_interpreter_stack() is not None
