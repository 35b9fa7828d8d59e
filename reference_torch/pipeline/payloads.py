"""Pytrees of tensors as messages between stages.

A message is one tensor of bytes: the tensors of the pytree one after the other, each at a multiple of 16 bytes. Where
the receiver does not know the structure, the bytes begin with it.
"""

import io
import math
import pickle
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_ALIGNMENT = 16
_LENGTH_BYTES = 8


class TensorSpec(NamedTuple):
    """The metadata of a tensor that its receiver needs."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor, rounded up to the alignment."""
        return _aligned(math.prod(self.shape) * self.dtype.itemsize)

    def __str__(self) -> str:
        return f"{[*self.shape]} {str(self.dtype).removeprefix('torch.')}"


class TreeSpec(NamedTuple):
    """The structure of a pytree, and its leaves that are not tensors."""

    structure: bytes
    """Pickled pair of the pytree's structure and its leaves, with None in place of tensors."""
    tensors: tuple[TensorSpec, ...]

    def with_specs(self) -> Any:
        """Return the pytree with a TensorSpec in place of every tensor."""
        structure, leaves = _load(self.structure)
        specs = iter(self.tensors)
        return pytree.tree_unflatten([next(specs) if leaf is _TENSOR else leaf for leaf in leaves], structure)

    def equals(self, other: "TreeSpec") -> bool:
        """Return True if two pytrees differ at most in the elements of their tensors."""
        if self.tensors != other.tensors:
            return False
        if self.structure == other.structure:
            return True
        try:  # equal values may be pickled differently
            return bool(_load(self.structure) == _load(other.structure))
        except Exception:  # a comparison of the user's class
            return False


class Tree(NamedTuple):
    """A pytree as its tensors and the rest."""

    spec: TreeSpec
    tensors: list[Tensor]

    @property
    def differentiable(self) -> list[Tensor]:
        """The tensors that require a gradient."""
        return [tensor for tensor, spec in zip(self.tensors, self.spec.tensors, strict=True) if spec.requires_grad]

    def detached(self) -> "Tree":
        """Return the same values as new leaves, which require gradients where these do."""
        pairs = zip(self.tensors, self.spec.tensors, strict=True)
        return Tree(self.spec, [tensor.detach().requires_grad_(spec.requires_grad) for tensor, spec in pairs])

    def value(self) -> Any:
        """Return the pytree."""
        structure, leaves = _load(self.spec.structure)
        tensors = iter(self.tensors)
        return pytree.tree_unflatten([next(tensors) if leaf is _TENSOR else leaf for leaf in leaves], structure)


class _Tensor:
    """The place of a tensor among the leaves of a pytree."""

    def __reduce__(self) -> str:
        return "_TENSOR"


_TENSOR = _Tensor()


def flatten(value: Any, stage: int) -> Tree:
    """Take a pytree apart.

    Args:
        value: output of a stage: a tensor or a pytree of tensors, numbers, texts and None.
        stage: number of the stage, for error messages.

    Raises:
        ValueError: the pytree has no tensor, a leaf cannot be sent, or tensors are on several devices.
    """
    leaves, structure = pytree.tree_flatten(value)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    expected = f"output of stage {stage}: expected a tensor, or a tuple, list, dict or other pytree of tensors"
    if not tensors:
        raise ValueError(f"{expected}, got {type(value).__name__} without any; return what the next stage reads")
    for tensor in tensors:
        if tensor.layout != torch.strided or type(tensor) not in (Tensor, torch.nn.Parameter):
            kind = type(tensor).__name__ if tensor.layout == torch.strided else str(tensor.layout)
            raise ValueError(f"{expected}, got a {kind}; convert it to a plain dense tensor (DTensor: full_tensor())")
    if len(devices := {tensor.device for tensor in tensors}) > 1:
        raise ValueError(f"{expected} on one device, got {sorted(map(str, devices))}")
    rest = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    try:
        pickled = _dump((structure, rest))
    except Exception as error:  # pickle raises whatever the leaf's class does
        raise ValueError(
            f"{expected}, got a leaf that cannot be sent to another rank ({error}); register its class as a pytree, "
            "or do not return it"
        ) from error
    specs = tuple(TensorSpec(tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for tensor in tensors)
    return Tree(TreeSpec(pickled, specs), tensors)


def num_bytes(specs: Sequence[TensorSpec]) -> int:
    """Return the bytes of a message with tensors alone."""
    return max(sum(spec.num_bytes for spec in specs), _ALIGNMENT)


def to_message(tensors: Sequence[Tensor], spec: TreeSpec | None = None) -> Tensor:
    """Return tensors as a message.

    Args:
        tensors: the tensors, on one device; they may be empty.
        spec: structure to begin with; None: the receiver knows it.

    Returns:
        Bytes. [n] uint8
    """
    device = tensors[0].device if tensors else "cpu"
    parts = [] if spec is None else [_header(spec).to(device)]
    for tensor in tensors:
        content = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        parts.append(content)
        padding = _aligned(content.numel()) - content.numel()
        if padding:
            parts.append(content.new_zeros(padding))
    parts = [part for part in parts if part.numel()] or [torch.zeros(_ALIGNMENT, dtype=torch.uint8, device=device)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def tree_from_message(message: Tensor, spec: TreeSpec | None) -> Tree:
    """Return the pytree of a message, whose tensors are in the memory of the message.

    Args:
        message: result of to_message. [n] uint8
        spec: the structure; None: the message begins with it.
    """
    offset = 0
    if spec is None:
        length = int.from_bytes(message[:_LENGTH_BYTES].cpu().numpy().tobytes(), "little")
        sent: TreeSpec = pickle.loads(message[_LENGTH_BYTES : _LENGTH_BYTES + length].cpu().numpy().tobytes())
        spec = sent
        offset = _aligned(_LENGTH_BYTES + length)
    tree = Tree(spec, tensors_from_message(message, spec.tensors, offset))
    return tree.detached()


def tensors_from_message(message: Tensor, specs: Sequence[TensorSpec], offset: int = 0) -> list[Tensor]:
    """Return the tensors of a message, each with a version counter of its own.

    Args:
        message: result of to_message. [n] uint8
        specs: the tensors.
        offset: bytes before the first one.
    """
    tensors = []
    for spec in specs:
        empty: Any = torch.empty(0, dtype=spec.dtype, device=message.device)
        tensors.append(empty.set_(message.untyped_storage(), offset // spec.dtype.itemsize, spec.shape))
        offset += spec.num_bytes
    return tensors


def _header(spec: TreeSpec) -> Tensor:
    """Return a pickled structure with its length, padded to the alignment. [n] uint8."""
    pickled = pickle.dumps(spec)
    content = len(pickled).to_bytes(_LENGTH_BYTES, "little") + pickled
    return torch.frombuffer(bytearray(content.ljust(_aligned(len(content)), b"\0")), dtype=torch.uint8)


class _Pickler(pickle.Pickler):
    """A pickler that refuses tensors, whose gradients would be lost."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor):
            raise ValueError("it contains a tensor, and its class is not registered as a pytree")
        return NotImplemented


def _dump(value: Any) -> bytes:
    stream = io.BytesIO()
    _Pickler(stream).dump(value)
    return stream.getvalue()


def _load(structure: bytes) -> Any:
    """Return the pair that a TreeSpec has pickled."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PyTorch pickles a class that it has deprecated
        return pickle.loads(structure)


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT
