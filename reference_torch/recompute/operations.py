"""Recording of the operations of a call, to detect a replay that differs from its forward.

A call reads more than its arguments: tensors of its closure, buffers, frozen weights, Python numbers, the training
flag of a module. The saved-tensor hooks receive none of them, so a change between forward and replay would stay
unnoticed. A TorchFunctionMode therefore records every operation that Python calls in both runs, and the two records
are compared.
"""

import array
import numbers
import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from reference_torch.recompute import internals
from reference_torch.recompute.guards import function_name

_SIMPLE = frozenset(
    {bool, int, float, complex, str, type(None), type(...), torch.dtype, torch.device, torch.Size, range}
)
"""Types of arguments that are compared as they are."""
_IS_NOT_COMPARED = object()
"""The comparable form of tensors, whose sources are compared, and of functions and other objects."""
_OVERWRITING = frozenset(
    getattr(Tensor, f"{name}_")
    for name in ("copy", "zero", "fill", "normal", "uniform", "bernoulli", "random", "exponential", "log_normal")
)
"""Functions that replace every element of their first argument."""
_NUMPY_TYPES = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32}
    | {torch.float64, torch.complex64, torch.complex128}
)
_ASYNCHRONOUS = (torch.distributed.Work,) if torch.distributed.is_available() else ()
"""Results of collectives that may write their tensors after they have returned."""
LARGEST_CHECKED = 2**14
"""Largest number of elements of a NumPy array of which all are compared; a larger array is sampled."""


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
    """A tensor from outside the call that an operation reads."""

    reference: "weakref.ref[Tensor]"
    version: int
    """Version counter when it was read."""
    values: tuple | None
    """Type, shape and elements of a small tensor, because a call may create a constant that no mode records."""
    is_borrowed: bool
    """True if NumPy owns the memory: no mode records the creation of such a tensor."""
    reader: Callable
    """The first operation that read the tensor."""


class Operation(NamedTuple):
    """An operation of a call: differentiable, or one that computes what a differentiable operation may read."""

    function: Callable
    constants: tuple
    """Arguments that are numbers, strings or flags, with their position or name."""
    operands: tuple["Outside | Operation | None", ...]
    """Source of each tensor operand: a tensor from outside the call, or the operation without gradient that computed
    it; None for those that the call computes with gradient or changes."""
    result: "weakref.ref[Tensor] | None" = None
    """Result of an operation without gradient."""
    version: int | None = None
    """Version counter of that result."""

    def __str__(self) -> str:
        name = function_name(self.function)
        values = [f"{key}={_words(value)}" if isinstance(key, str) else _words(value) for key, value in self.constants]
        return f"{name}({', '.join(values)})"


class OperationRecorder(TorchFunctionMode):
    """A recorder of the operations in its context and of the tensors they read from outside.

    Args:
        arguments: tensor arguments of the call; the region checks their versions.
        on_draw: receives a random generator before an operation draws from it.
    """

    def __init__(
        self, arguments: list[Tensor], on_draw: Callable[[torch.Generator], None] = lambda generator: None
    ) -> None:
        super().__init__()
        self._on_draw = on_draw
        self.operations: list[Operation] = []
        self._running: tuple[Callable, tuple] | None = None
        """The function and the constants of the operation that has started and not ended."""
        self._outside: dict[int, Outside] = {}
        self._own = {id(tensor): weakref.ref(tensor) for tensor in arguments}
        """Tensors of the call. The reference distinguishes them from later tensors at the same address."""
        self._sources: dict[int, Operation] = {}
        """Operations that computed tensors of the call without gradient."""
        self._seen: dict[int, weakref.ref[Tensor]] = {}
        """Operands from outside, including those that the call changes."""
        self._begun = torch._C._autograd._get_sequence_nr()  # pyright: ignore[reportAttributeAccessIssue]

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Run the operation and record it."""
        if func in _METADATA:
            return func(*args, **kwargs or {})
        kwargs = kwargs or {}
        if kwargs and isinstance(kwargs.get("generator"), torch.Generator):
            self._on_draw(kwargs["generator"])
        tensors = _tensors((*args, *kwargs.values()) if kwargs else args)
        operands = [(operand, _version(operand), self._is_outside(operand)) for operand in tensors]
        constants = _constants((*enumerate(args), *kwargs.items()) if kwargs else enumerate(args))
        self._running = func, constants
        result = func(*args, **kwargs)
        self._running = None
        is_asynchronous = isinstance(result, _ASYNCHRONOUS)
        sources: list[Outside | Operation | None] = []
        written = []
        for operand, version, is_outside in operands:
            is_written = version is None or is_asynchronous or operand._version != version
            if is_written:
                written.append(operand)
            if not is_outside:
                sources.append(self._source(operand))
            elif version is None or is_written:
                sources.append(None)
            else:
                sources.append(self._read(operand, version, func))
        overwritten = args[0] if func in _OVERWRITING else kwargs.get("out") if kwargs else None
        if isinstance(overwritten, Tensor):
            self._own[id(overwritten)] = weakref.ref(overwritten)
        is_differentiable = False
        for tensor in (result,) if isinstance(result, Tensor) else result if isinstance(result, (tuple, list)) else ():
            if isinstance(tensor, Tensor):
                is_initialised = tensor.is_leaf and any(tensor is operand for operand in written)
                is_differentiable = is_differentiable or (tensor.requires_grad and not is_initialised)
                if all(tensor is not operand for operand, _, _ in operands):
                    self._own[id(tensor)] = weakref.ref(tensor)
                    written.append(tensor)
        if not is_differentiable:
            for tensor in written:
                if self._is_own(tensor):
                    made = Operation(func, constants, tuple(sources), weakref.ref(tensor), _version(tensor))
                    self._sources[id(tensor)] = made
        elif func is not Tensor.view_as:  # module hooks insert view_as, which changes no value
            self.operations.append(Operation(func, constants, tuple(sources)))
        return result

    def _read(self, tensor: Tensor, version: int, reader: Callable) -> Outside:
        """Record that an operation reads a tensor from outside the call."""
        known = self._outside.get(id(tensor))
        if known is not None and known.reference() is tensor and known.version == version:
            return known
        is_borrowed = not tensor.requires_grad and not _owns_memory(tensor)
        read = Outside(weakref.ref(tensor), version, _few_values(tensor, is_borrowed), is_borrowed, reader)
        self._outside.setdefault(id(tensor), read)
        return read

    def _source(self, operand: Tensor) -> Operation | None:
        """Return the operation without gradient that computed a tensor of the call, or None."""
        source = self._sources.get(id(operand))
        return source if source is not None and source.result is not None and source.result() is operand else None

    def _is_own(self, tensor: Tensor) -> bool:
        """Return True if the call created the tensor or has it as an argument."""
        reference = self._own.get(id(tensor))
        return reference is not None and reference() is tensor

    def _is_outside(self, operand: Tensor) -> bool:
        """Return True if an operand existed before the call.

        A torch.autograd.Function may return a tensor that no mode records, for example from another thread, NumPy or a
        C++ extension. Such a tensor has a node that this thread created after the call began. A tensor from outside
        gets a new node when the call changes it, so the first observation of an operand decides.
        """
        key = id(operand)
        if self._is_own(operand):
            return False
        known = self._seen.get(key)
        if known is None or known() is not operand:
            if operand.grad_fn is not None and operand.grad_fn._sequence_nr() >= self._begun:
                self._own[key] = weakref.ref(operand)
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
        replayed = [*replay.operations, *([] if replay._running is None else [Operation(*replay._running, ())])]
        for place, (first, second) in enumerate(zip(self.operations, replayed, strict=False)):
            if first.function != second.function or not _equal(first.constants, second.constants):
                return f"operation {place} was {first} in forward and is {second} in the replay"
            change = _other_operand(first, second) if first.operands else None
            if change is not None:
                return f"operation {place}, {first}, reads {change}"
        for read in replay._outside.values():
            tensor = read.reference()
            known = self._outside.get(id(tensor))
            if (
                known is not None
                and tensor is not None
                and known.reference() is tensor
                and known.version != read.version
            ):
                return (
                    f"a tensor of shape {tuple(tensor.shape)} from outside the call, read by "
                    f"{function_name(read.reader)}, was changed in place since"
                )
        if whole and len(self.operations) != len(replay.operations):
            return f"forward made {len(self.operations)} differentiable operations, the replay {len(replay.operations)}"
        return None


def _other_operand(first: Operation, second: Operation) -> str | None:
    """Describe the first operand of a replayed operation that differs from forward in its source, or return None."""
    open_pairs = [(first, second)]
    compared = set()
    while open_pairs:
        first, second = open_pairs.pop()
        if (id(first), id(second)) in compared:
            continue
        compared.add((id(first), id(second)))
        for before, after in zip(first.operands, second.operands, strict=False):
            if isinstance(before, Operation):
                if isinstance(after, Outside) and not _is_cached(before, after):
                    return f"what {before} computed in forward, and in the replay a tensor from outside the call"
                if isinstance(after, Operation):
                    if before.function != after.function or not _equal(before.constants, after.constants):
                        return f"what was {before} in forward and is {after} in the replay"
                    open_pairs.append((before, after))
            elif before is not None:
                change = _other_tensor(before, after if isinstance(after, Outside) else None)
                if change is not None:
                    return change if second.result is None else f"{change}, by way of {first}"
    return None


def _words(constant: Any) -> str:
    """Return a constant as Python would write it."""
    if isinstance(constant, tuple) and constant[:1] == ("slice",):
        return f"slice({', '.join(map(_words, constant[1]))})"
    if isinstance(constant, tuple) and type(constant) is tuple:
        return f"({', '.join(map(_words, constant))})"
    return "a tensor" if constant is _IS_NOT_COMPARED else repr(constant)


def _is_cached(before: Operation, after: Outside) -> bool:
    """Return True if the replay reads, unchanged, the tensor that an operation computed in forward."""
    result = None if before.result is None else before.result()
    return result is not None and result is after.reference() and before.version == after.version


def _other_tensor(before: Outside, after: Outside | None) -> str | None:
    """Describe how a tensor that the replay reads differs from forward's; None: it is the same or an equal constant."""
    first = before.reference()
    second = None if after is None else after.reference()
    if after is not None and first is second and first is not None:
        # Version counters count every other change.
        is_changed = before.is_borrowed and not _equal(before.values or (), after.values or ())
        return "a tensor whose memory NumPy has changed since" if is_changed else None
    if after is None:
        is_equal = False
    elif before.values is not None and after.values is not None:
        is_equal = _equal(before.values, after.values)
    elif first is not None and second is not None:  # created twice where no mode records it
        has_equal_layout = (first.dtype, first.shape, first.layout) == (second.dtype, second.shape, second.layout)
        unchanged = before.version == first._version and not (first.requires_grad or second.requires_grad)
        with torch._C.DisableTorchFunction():
            is_equal = has_equal_layout and unchanged and torch.equal(first, second)
    else:
        is_equal = before.is_borrowed and after.is_borrowed
    if is_equal:
        return None
    return (
        "another tensor of the closure than in forward (or one that the call creates with a constructor that PyTorch's "
        "modes do not record, such as torch.FloatTensor or nn.Parameter: use torch.tensor)"
    )


def _few_values(tensor: Tensor, is_borrowed: bool) -> tuple | None:
    """Return dtype, shape and elements of a small constant, or a fingerprint of NumPy's memory; None for others."""
    if type(tensor) is not Tensor or tensor.grad_fn is not None or tensor.device.type != "cpu":
        return None
    if is_borrowed:
        is_readable = tensor.dtype in _NUMPY_TYPES and not tensor.is_conj() and not tensor.is_neg()
        return _fingerprint(tensor.numpy()) if is_readable else None
    if tensor.layout is not torch.strided or tensor.numel() > 64 or tensor.is_quantized:
        return None
    return tensor.dtype, tuple(tensor.shape), tensor.tolist()


def _fingerprint(array: np.ndarray) -> tuple:
    """Return the type, the shape and a checksum of the elements, or of a sample of many elements."""
    if array.dtype.hasobject:
        return array.dtype, array.shape
    if array.size > LARGEST_CHECKED:
        checked = array.flat[:: array.size // LARGEST_CHECKED]
    else:
        checked = np.ascontiguousarray(array)
    return array.dtype, array.shape, zlib.crc32(checked.tobytes())


def _owns_memory(tensor: Tensor) -> bool:
    """Return False if NumPy or another library owns the memory of a tensor."""
    is_plain = tensor.layout is torch.strided and internals.storage_address(tensor) is not None
    return not is_plain or tensor.untyped_storage().resizable()


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among arguments, also inside lists, tuples and slices, but not those of a torch.vmap."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            if not internals.is_func_tensor(value):
                found.append(value)
        elif isinstance(value, (tuple, list)) and type(value) is not torch.Size:
            found.extend(_tensors(value))
        elif type(value) is slice:
            found.extend(_tensors((value.start, value.stop, value.step)))
    return found


def _constants(arguments: Iterable[tuple[int | str, Any]]) -> tuple[tuple[int | str, Any], ...]:
    """Return the arguments that are compared by value, with their positions or names."""
    found = []
    for name, value in arguments:
        kind = type(value)
        if kind in _SIMPLE:
            found.append((name, value))
        elif kind is not Tensor and kind is not nn.Parameter:
            constant = _constant(value)
            if constant is not _IS_NOT_COMPARED:
                found.append((name, constant))
    return tuple(found)


def _constant(value: Any) -> Any:
    """Return a form of an argument that can be compared by value, or _IS_NOT_COMPARED."""
    if type(value) in _SIMPLE:
        return value
    if isinstance(value, Tensor):
        return _IS_NOT_COMPARED
    if type(value) is slice:
        return "slice", tuple(map(_constant, (value.start, value.stop, value.step)))
    if isinstance(value, np.ndarray):
        return _fingerprint(value)
    if isinstance(value, np.generic):
        return value.dtype, value.tobytes()
    if isinstance(value, (array.array, memoryview)):
        return _fingerprint(np.asarray(value))
    if isinstance(value, numbers.Number):  # an IntEnum, a fraction, a subclass of float
        return repr(value)
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):  # an index, a padding, a shape, a constant
        return tuple(map(_constant, value))
    return repr(value) if isinstance(value, (str, bytes, Set)) else _IS_NOT_COMPARED


def _equal(one: tuple, other: tuple) -> bool:
    """Return True if constants are equal; a NaN equals itself."""
    return one == other or repr(one) == repr(other)


def _version(tensor: Tensor) -> int | None:
    """Return the version counter of a tensor, or None if it has none."""
    try:
        return None if tensor.is_inference() else tensor._version
    except ValueError:  # a parameter of a lazy module before its first forward
        return None
