"""Recording of the operations of a call, to detect a replay that differs from its forward.

A call reads more than its arguments: tensors of its closure, buffers, frozen weights, Python numbers, the training
flag of a module. The saved-tensor hooks receive none of them, so a change between forward and replay would stay
unnoticed. A TorchFunctionMode therefore records every operation that Python calls in both runs, and the two records
are compared.
"""

import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from reference_torch.recompute.guards import function_name

_SIMPLE = frozenset({bool, int, float, complex, str, type(None), type(...), torch.dtype, torch.device, slice})
_SIMPLE |= {torch.Size, np.bool_, np.float32, np.float64, np.int32, np.int64}
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


class Outside(NamedTuple):
    """A tensor from outside the call, which an operation reads."""

    reference: "weakref.ref[Tensor]"
    values: tuple | None
    """Of a few numbers: type, shape and elements. A call may make a constant where no mode sees it."""


class Operation(NamedTuple):
    """One operation of a call: differentiable, or one that computes what such an operation may read."""

    function: Callable
    constants: tuple
    """Arguments that are numbers, strings or flags, by place and by name."""
    operands: tuple["Outside | Operation | None", ...]
    """Where tensor operands come from: a tensor from outside the call, or the operation without gradient that computed
    it; None for those the call computed with gradient, or writes to."""
    result: "weakref.ref[Tensor] | None" = None
    """Of an operation without gradient."""

    def __str__(self) -> str:
        name = function_name(self.function)
        values = [f"{key}={value!r}" if isinstance(key, str) else repr(value) for key, value in self.constants]
        return f"{name}({', '.join(values)})"


class OperationRecorder(TorchFunctionMode):
    """A recorder of the differentiable operations in its context and of the tensors they read from outside.

    Args:
        arguments: tensors of the call, whose versions are checked elsewhere.
        on_draw: told of a random generator before an operation draws from it.
    """

    def __init__(
        self, arguments: list[Tensor], on_draw: Callable[[torch.Generator], None] = lambda generator: None
    ) -> None:
        super().__init__()
        self._on_draw = on_draw
        self.operations: list[Operation] = []
        self.running: Operation | None = None
        """The operation that has started and not ended."""
        self._outside: dict[int, tuple[weakref.ref[Tensor], int, str]] = {}
        self._own = {id(tensor) for tensor in arguments}
        self._sources: dict[int, Operation] = {}
        """What computed the call's tensors without gradient."""
        self._seen: dict[int, weakref.ref[Tensor]] = {}
        """Operands from outside, including those that the call changes."""
        self._begun = torch._C._autograd._get_sequence_nr()  # pyright: ignore[reportAttributeAccessIssue]

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Run the operation and record it."""
        kwargs = kwargs or {}
        if func in _METADATA:
            return func(*args, **kwargs)
        if kwargs and isinstance(kwargs.get("generator"), torch.Generator):
            self._on_draw(kwargs["generator"])
        own = self._own
        operands = list(_tensors(args, kwargs))
        versions = [_version(operand) for operand in operands]
        from_outside = [self._is_outside(operand) for operand in operands]
        constants = tuple(_constants(args, kwargs))
        self.running = Operation(func, constants, ())
        result = func(*args, **kwargs)
        self.running = None
        sources: list[Outside | Operation | None] = []
        written = []
        for operand, version, outside in zip(operands, versions, from_outside, strict=True):
            if not outside:
                sources.append(self._source(operand))
            if version is None or operand._version != version:
                written.append(operand)
                if outside:
                    sources.append(None)
            elif outside:
                reference = weakref.ref(operand)
                sources.append(Outside(reference, _few_values(operand)))
                self._outside.setdefault(id(operand), (reference, version, function_name(func)))
        results = [result] if isinstance(result, Tensor) else result if isinstance(result, (tuple, list)) else ()
        computed = [tensor for tensor in results if isinstance(tensor, Tensor)]
        differentiable = any(tensor.requires_grad for tensor in computed)
        for tensor in computed:
            if not any(tensor is operand for operand in operands):
                own.add(id(tensor))
                written.append(tensor)
        if differentiable:
            if func is not Tensor.view_as:  # hooks of modules insert it, and it changes no value
                self.operations.append(Operation(func, constants, tuple(sources)))
        else:
            for tensor in written:
                if id(tensor) in own:
                    self._sources[id(tensor)] = Operation(func, constants, tuple(sources), weakref.ref(tensor))
        return result

    def _source(self, operand: Tensor) -> Operation | None:
        """Return what computed a tensor of the call; None: an operation with gradient, or one that no mode sees."""
        source = self._sources.get(id(operand))
        return source if source is not None and source.result is not None and source.result() is operand else None

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
            change = _other_operand(first, second)
            if change is not None:
                return f"operation {place}, {first}, reads {change}"
        for reference, version, reader in replay._outside.values():
            tensor = reference()
            known = self._outside.get(id(tensor))
            if tensor is not None and known is not None and known[0]() is tensor and known[1] != version:
                shape = tuple(tensor.shape)
                return f"a tensor of shape {shape} from outside the call, read by {reader}, was changed in place since"
        if whole and len(self.operations) != len(replay.operations):
            return f"forward made {len(self.operations)} differentiable operations, the replay {len(replay.operations)}"
        return None


def _other_operand(first: Operation, second: Operation) -> str | None:
    """Say what a replayed operation reads that is another tensor, or was computed from another, than in forward."""
    waiting, compared = [(first, second)], set()
    while waiting:
        first, second = waiting.pop()
        if (id(first), id(second)) in compared:
            continue
        compared.add((id(first), id(second)))
        for before, after in zip(first.operands, second.operands, strict=False):
            if isinstance(before, Operation):
                # What forward has computed and a cache holds may be read, or computed in another way, in the replay.
                if isinstance(after, Operation) and before.function == after.function:
                    if not _equal(before.constants, after.constants):
                        return f"what was {before} in forward and is {after} in the replay"
                    waiting.append((before, after))
            elif before is not None and not _is_same(before, after if isinstance(after, Outside) else None):
                through = "" if second.result is None else f" by way of {first}"
                return (
                    f"another tensor of the closure than in forward{through} (or one that the call makes by a "
                    "constructor that PyTorch's modes do not see, as torch.FloatTensor or nn.Parameter: use "
                    "torch.tensor)"
                )
    return None


def _is_same(before: Outside, after: Outside | None) -> bool:
    """Whether two runs read one tensor, or each a new constant, which no mode sees being made."""
    first, second = before.reference(), None if after is None else after.reference()
    if after is None or (first is second and first is not None):
        return after is not None
    if before.values is not None and after.values is not None:
        return _equal(before.values, after.values)
    return first is None and second is not None and not second.requires_grad and not _owns_memory(second)


def _few_values(tensor: Tensor) -> tuple | None:
    if type(tensor) is not Tensor or tensor.grad_fn is not None or tensor.device.type != "cpu":
        return None
    if tensor.layout is not torch.strided or tensor.numel() > 64:
        return None
    return tensor.dtype, tuple(tensor.shape), tensor.tolist()


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
    for name, value in (*enumerate(args), *kwargs.items()):
        if type(value) in _SIMPLE:
            yield name, value
        elif type(value) in (tuple, list):  # an index, a padding, a shape
            yield name, tuple(inner for inner in value if type(inner) in _SIMPLE)


def _equal(one: tuple, other: tuple) -> bool:
    """Return True if constants are equal; a NaN equals itself."""
    return one == other or repr(one) == repr(other)


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
