"""Recording of the operations of a call, to detect a replay that differs from its forward.

A call reads more than its arguments: tensors of its closure, buffers, frozen weights, Python numbers, the training
flag of a module. The saved-tensor hooks receive none of them, so a change between forward and replay would stay
unnoticed. A TorchFunctionMode therefore records every operation that Python calls in both runs, and the two records
are compared.
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
    """Return the functions that read the metadata of a tensor, but not its elements."""
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
    """A differentiable operation of a call."""

    function: Callable
    constants: tuple
    """Arguments that are numbers, strings or flags, with their position or name."""
    outside: tuple["weakref.ref[Tensor] | None", ...]
    """Tensor operands from outside the call; None for those that the call computes or changes."""

    def __str__(self) -> str:
        name = function_name(self.function)
        values = [f"{key}={value!r}" if isinstance(key, str) else repr(value) for key, value in self.constants]
        return f"{name}({', '.join(values)})"


class OperationRecorder(TorchFunctionMode):
    """A recorder of the differentiable operations in its context and of the tensors they read from outside.

    Args:
        arguments: tensor arguments of the call; the region checks their versions.
    """

    def __init__(self, arguments: list[Tensor]) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.running: Operation | None = None
        """The operation that has started and not ended."""
        self._outside: dict[int, tuple[weakref.ref[Tensor], int, str]] = {}
        self._own = {id(tensor) for tensor in arguments}
        self._seen: dict[int, weakref.ref[Tensor]] = {}
        """Operands from outside, including those that the call changes."""
        self._begun = torch._C._autograd._get_sequence_nr()  # pyright: ignore[reportAttributeAccessIssue]

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Run the operation and record it."""
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
            if version is None or operand._version != version:  # the call computes it, or the operation changes it
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
        if differentiable and func is not Tensor.view_as:  # module hooks insert view_as, which changes no value
            self.operations.append(Operation(func, constants, tuple(outside)))
        return result

    def _is_outside(self, operand: Tensor) -> bool:
        """Return True if an operand existed before the call.

        A torch.autograd.Function may return a tensor that no mode records, for example from another thread, NumPy or a
        C++ extension. Such a tensor has a node that this thread created after the call began. A tensor from outside
        gets a new node when the call changes it, so the first observation of an operand decides.
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
        """Describe the first difference of a replay from this run.

        Args:
            replay: record of the replay.
            whole: True if the replay has ended, so that missing operations count as a difference.

        Returns:
            The first difference in words, or None.
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
    """Return True if two runs read the same tensor.

    Two new views of NumPy memory count as the same tensor, because no mode records their creation.
    """
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
    """Return True if constants are equal; a NaN equals itself."""
    return one == other or repr(one) == repr(other)


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
