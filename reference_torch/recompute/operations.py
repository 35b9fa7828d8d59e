"""The operations of a call and the outside tensors they read, so that a replay which differs is noticed.

A call reads more than its arguments: tensors of its closure, buffers, frozen weights, Python numbers, the training
flag of a module. None of them reaches the saved-tensor hooks, so a change between forward and replay would be silent.
Both runs are therefore recorded by a TorchFunctionMode, which sees every operation that Python calls, and compared.
"""

import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from reference_torch.recompute.guards import function_name

_SIMPLE = frozenset({bool, int, float, complex, str, type(None), torch.dtype, torch.device, slice})
"""Types of arguments that are compared by value."""


def _metadata_functions() -> frozenset[Callable]:
    """Return what is called when Python asks a tensor for its metadata: no data is read."""
    properties = (
        "shape",
        "dtype",
        "device",
        "requires_grad",
        "grad_fn",
        "is_leaf",
        "ndim",
        "layout",
        "_version",
        "_base",
    )
    properties += ("is_cuda", "is_sparse", "itemsize", "nbytes")
    methods = ("size", "dim", "numel", "stride", "storage_offset", "untyped_storage", "element_size", "is_contiguous")
    methods += ("is_floating_point", "is_complex", "is_conj", "is_neg", "register_hook", "__len__", "ndimension")
    getters = {getattr(Tensor, name).__get__ for name in properties}
    return frozenset(getters | {getattr(Tensor, name) for name in methods})


_METADATA = _metadata_functions()


class Operation(NamedTuple):
    """One differentiable operation of a call."""

    function: Callable
    constants: tuple
    """Arguments that are numbers, strings or flags, by place and by name."""
    outside: tuple["weakref.ref[Tensor] | None", ...]
    """Tensor operands from outside the call; None for those the call computed, or writes to."""

    def __str__(self) -> str:
        name = function_name(self.function)
        values = [f"{key}={value!r}" if isinstance(key, str) else repr(value) for key, value in self.constants]
        return f"{name}({', '.join(values)})"


class OperationRecorder(TorchFunctionMode):
    """The differentiable operations that run in this context, and what they read from outside.

    Args:
        arguments: tensors of the call, whose versions are checked elsewhere.
    """

    def __init__(self, arguments: list[Tensor]) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.running: Operation | None = None
        """The operation that has begun and not ended."""
        self._outside: dict[int, tuple[weakref.ref[Tensor], int, str]] = {}
        self._own = {id(tensor) for tensor in arguments}
        self._seen: dict[int, weakref.ref[Tensor]] = {}
        """Operands from outside, also those that the call has changed."""
        self._begun = torch._C._autograd._get_sequence_nr()  # pyright: ignore[reportAttributeAccessIssue]

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Run the operation, and record it."""
        kwargs = kwargs or {}
        if func in _METADATA:
            return func(*args, **kwargs)
        own = self._own
        operands = list(_tensors(args, kwargs))
        versions = [_version(operand) if self._is_outside(operand) else None for operand in operands]
        constants = tuple(_constants(args, kwargs))
        self.running = Operation(func, constants, ())
        result = func(*args, **kwargs)
        self.running = None
        outside = []
        for operand, version in zip(operands, versions, strict=True):
            if version is None or operand._version != version:  # ours, or an operand that the operation changes
                outside.append(None)
                continue
            reference = weakref.ref(operand)
            outside.append(reference)
            self._outside.setdefault(id(operand), (reference, version, function_name(func)))
        results = [result] if isinstance(result, Tensor) else result if isinstance(result, (tuple, list)) else ()
        differentiable = False
        for tensor in results:
            if isinstance(tensor, Tensor):
                differentiable = differentiable or tensor.requires_grad
                if not any(tensor is operand for operand in operands):
                    own.add(id(tensor))
        if differentiable and func is not Tensor.view_as:  # hooks of modules insert it, and it changes no value
            self.operations.append(Operation(func, constants, tuple(outside)))
        return result

    def _is_outside(self, operand: Tensor) -> bool:
        """Return whether an operand was there before the call.

        A torch.autograd.Function may return what no mode sees: the result of another thread, of NumPy or of a C++
        extension. Its node is one that this thread has made since the call began. A tensor from outside gets such a
        node when the call changes it, so the first look decides.
        """
        key = id(operand)
        if key in self._own:
            return False
        known = self._seen.get(key)
        if known is None or known() is not operand:
            if operand.grad_fn is not None and operand.grad_fn._sequence_nr() >= self._begun:
                self._own.add(key)
                return False
            self._seen[key] = weakref.ref(operand)
        return True

    def difference(self, replay: "OperationRecorder", whole: bool = True) -> str | None:
        """Say how a replay differs from this run.

        Args:
            replay: what it has done so far.
            whole: it has come to its end, so operations that are missing count.

        Returns:
            The first difference in words; None: there is none.
        """
        replayed = [*replay.operations, *([] if replay.running is None else [replay.running])]
        for place, (first, second) in enumerate(zip(self.operations, replayed, strict=False)):
            if first.function != second.function or not _equal(first.constants, second.constants):
                return f"operation {place} was {first} in forward and is {second} in the replay"
            for before, after in zip(first.outside, second.outside, strict=False):
                if before is not None and not _is_same(before(), None if after is None else after()):
                    return f"operation {place}, {first}, reads another tensor of the closure than in forward"
        for reference, version, reader in replay._outside.values():
            tensor = reference()
            known = self._outside.get(id(tensor))
            if tensor is not None and known is not None and known[0]() is tensor and known[1] != version:
                shape = tuple(tensor.shape)
                return f"a tensor of shape {shape} from outside the call, read by {reader}, was changed in place since"
        if whole and len(self.operations) != len(replay.operations):
            return f"forward made {len(self.operations)} differentiable operations, the replay {len(replay.operations)}"
        return None


def _is_same(before: Tensor | None, after: Tensor | None) -> bool:
    """Whether two runs read one tensor, or each a new view of NumPy's memory, which no mode sees being made."""
    if before is after and after is not None:
        return True
    return before is None and after is not None and not after.requires_grad and not _owns_memory(after)


def _owns_memory(tensor: Tensor) -> bool:
    return tensor.layout is not torch.strided or tensor.untyped_storage().resizable()


def _tensors(args: tuple, kwargs: dict) -> Iterator[Tensor]:
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            yield value
        elif type(value) in (tuple, list):
            for inner in value:
                if isinstance(inner, Tensor):
                    yield inner


def _constants(args: tuple, kwargs: dict) -> Iterator[tuple[int | str, Any]]:
    for place, value in enumerate(args):
        if type(value) in _SIMPLE:
            yield place, value
    for name, value in kwargs.items():
        if type(value) in _SIMPLE:
            yield name, value


def _equal(one: tuple, other: tuple) -> bool:
    """Compare constants; a NaN equals itself."""
    return one == other or repr(one) == repr(other)


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
