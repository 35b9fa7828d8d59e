"""All private PyTorch functions that this package uses.

PyTorch 2.11 to 2.13 have them, except those that ``HAS_SWAP`` and ``HAS_READ_MESSAGE`` test for.
"""
# pyright: reportAttributeAccessIssue=false, reportReturnType=false

import contextlib
import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch._compile
import torch.autograd.forward_ad
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

outside_compiled_graphs = torch._compile._disable_dynamo
"""A decorator for functions that torch.compile must not trace; a call breaks the graph."""
skipped_by_compile = partial(torch._compile._disable_dynamo, recursive=False)
"""A decorator for functions that torch.compile must not trace, whereas it compiles what they call."""

HAS_SWAP = hasattr(torch.UntypedStorage, "_swap_data_ptr_")
"""True if two storages can exchange their memory without a copy (PyTorch 2.12 and later)."""
HAS_READ_MESSAGE = HAS_SWAP and hasattr(torch._C, "_set_storage_data_ptr_access_error_msg")
"""True if a read of an empty storage in C++ can raise an error."""


def storage_address(tensor: Tensor) -> int | None:
    """Return the address of a tensor's StorageImpl, or None if it has none (sparse, functorch)."""
    try:
        return torch._C._storage_address(tensor)
    except (RuntimeError, NotImplementedError):
        return None


def torch_checkpoint() -> Any:
    """Return the hook of the torch.utils.checkpoint that packs what operations save now, or None.

    Hooks of recompute and offload call the hooks around them, which their attribute ``outer`` holds.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # pyright: ignore[reportAttributeAccessIssue]
    while hooks is not None and getattr(hooks[0], "__module__", None) != "torch.utils.checkpoint":
        hooks = getattr(hooks[0], "outer", None)
    return None if hooks is None else hooks[0]


def runs_without_memory() -> bool:
    """Return True under a FakeTensorMode, whose tensors have shapes and no elements."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def storage_holders(storage: torch.UntypedStorage) -> int:
    """Return the number of references to a StorageImpl: one for each tensor and one for its Python object."""
    return torch._C._storage_Use_Count(storage._cdata)


def tensor_holders(tensor: Tensor) -> int:
    """Return the number of references to a tensor.

    Its Python object, each operation that saved the tensor and each view hold one.
    """
    return tensor._use_count()


def storage_from_weak(address: int) -> torch.UntypedStorage:
    """Return the storage of a weak reference that has not expired."""
    return torch.UntypedStorage._new_with_weak_ptr(address)


def storage_from_pointer(pointer: int, device: torch.device, size: int) -> torch.UntypedStorage:
    """Return a storage over memory that it does not own.

    Args:
        pointer: address of the memory.
        device: device of the memory.
        size: bytes.
    """
    return torch._C._construct_storage_from_data_pointer(pointer, device, size)


def leaves_of(tree: Any) -> list[Any]:
    """Return the leaves of nested tuples, lists and dicts; a tensor and a tuple of tensors take no walk."""
    if isinstance(tree, Tensor):
        return [tree]
    if type(tree) is tuple and all(isinstance(leaf, Tensor) for leaf in tree):
        return list(tree)
    return tree_leaves(tree)


def version_watch(tensor: Tensor) -> Tensor:
    """Return an empty tensor that shares the version counter of another tensor, but not its memory.

    A weak reference to a tensor expires with its Python object, although operations may still save the tensor.
    """
    watch = tensor.detach()  # shares the counter, also after its data is replaced
    watch.data = _nothing(tensor.dtype, tensor.device)
    return watch


@functools.cache
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an empty tensor, shared by all callers."""
    return torch.empty(0, dtype=dtype, device=device)


def without_dispatch_modes() -> contextlib.AbstractContextManager:
    """Return a context in which no TorchDispatchMode sees operations.

    Hooks registered on a saved value receive a detached copy of it, and a mode cannot detach a number.
    """
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else contextlib.nullcontext()


def negated_view(tensor: Tensor) -> Tensor:
    """Return a view with the negative bit set, as the imaginary part of a conjugate has."""
    return torch._C._VariableFunctions._neg_view(tensor)


def swap_memory(first: torch.UntypedStorage, second: torch.UntypedStorage) -> None:
    """Exchange the memory and the sizes of two storages."""
    first._swap_data_ptr_(second)


def set_read_message(storage: torch.UntypedStorage, message: str) -> None:
    """Make a read of the storage in C++ raise an error, until the storage is refilled."""
    torch._C._set_storage_data_ptr_access_error_msg(storage._cdata, message)


def outer_saved_tensor_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """Return the active saved-tensor hooks, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def is_func_tensor(tensor: Tensor) -> bool:
    """Return True for a tensor inside a torch.func transform, which has no storage or version of its own."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def is_hooks_refusal(error: RuntimeError) -> bool:
    """Return True if a torch.func transform raised the error because saved-tensor hooks are active."""
    return "saved tensor hooks" in str(error)


def runs_in_backward() -> bool:
    """Return True if this thread executes a backward pass."""
    return torch._C._current_graph_task_id() != -1


def runs_in_func_transform() -> bool:
    """Return True inside a torch.func transform or forward-mode differentiation."""
    in_dual_level = torch.autograd.forward_ad._current_level >= 0
    return in_dual_level or torch._C._functorch.peek_interpreter_stack() is not None


def is_differentiated_by_func_transform() -> bool:
    """Return True inside torch.func.grad, vjp, jvp and what builds on them, but not inside vmap alone."""
    kinds = torch._C._functorch.TransformType
    transforms = torch._C._functorch.get_interpreter_stack() or []
    return any(transform.key() in (kinds.Grad, kinds.Jvp) for transform in transforms)
