"""Tensors with elements in a traced forward: every part creates them itself, or reads them from the model."""

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from reference_torch.pipeline.nested_values import tensors_in
from reference_torch.recompute.internals import storage_address


class RealTensors:
    """The tensors that the enclosing code makes without reading arguments or parameters.

    Args:
        enclosing: submodules that enclose a cut, by name; they may have others in attributes.
    """

    def __init__(self, enclosing: Mapping[str, nn.Module]) -> None:
        self._enclosing = enclosing
        known = _all_tensors()
        known += tensors_in([vars(module) for module in enclosing.values()])  # also after gc.freeze
        self._alive = [tensor for tensor in known if not issubclass(type(tensor), FakeTensor)]
        self._existing = {storage_of(tensor) for tensor in self._alive}
        """Storages that existed before the forward; all others it has made."""

    def check_written(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """Refuse to write something that only one part has into a tensor that every part makes for itself."""
        name = getattr(function, "__name__", "")
        in_place = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or name in _IN_PLACE
        own = in_place and args and isinstance(args[0], Tensor) and not isinstance(args[0], FakeTensor)
        if own and any(isinstance(tensor, FakeTensor) for tensor in tensors_in((args[1:], kwargs))):
            raise ValueError(
                "split_model: expected the code around the cuts not to write activations into a tensor that it makes "
                f"itself, got {name!r} on a tensor {[*args[0].shape]}; make it of an activation, as x.new_zeros does, "
                "or write the operation out of place"
            )

    @contextmanager
    def changes(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Iterator["Changes"]:
        """Find which arguments a function changes, and refuse a change that every part would make once more.

        Args:
            function: the function.
            args: its positional arguments.
            kwargs: its keyword arguments.
        """
        found = Changes(getattr(function, "__name__", str(function)), (args, kwargs))
        yield found
        for tensor in found.changed:
            if storage_of(tensor) in self._existing:
                raise ValueError(
                    f"split_model: expected the code around the cuts to change no tensor in place but its own and "
                    f"buffers, got {found.function!r} on {self._described(tensor)}, which every stage would change; "
                    "assign a new tensor, or register it as a buffer (register_buffer)"
                )

    def _described(self, tensor: Tensor) -> str:
        """Return the name of the attribute with the memory of a tensor."""
        for name, module in self._enclosing.items():
            for key, value in vars(module).items():
                if any(storage_of(each) == storage_of(tensor) for each in tensors_in(value)):
                    return f"attribute {f'{name}.{key}'.lstrip('.')!r}"
        return f"a tensor {[*tensor.shape]} that existed before"


class Changes:
    """The changes of arguments by one function.

    Args:
        function: name of the function.
        arguments: its arguments.
    """

    def __init__(self, function: str, arguments: Any) -> None:
        self.function = function
        real = [t for t in pytree.tree_leaves(arguments) if isinstance(t, Tensor) and not isinstance(t, FakeTensor)]
        self._versions = [(tensor, tensor._version) for tensor in real if not tensor.is_inference()]

    @property
    def changed(self) -> list[Tensor]:
        """The tensors that the function has changed in place."""
        return [tensor for tensor, version in self._versions if tensor._version != version]

    def check_none(self) -> None:
        """Refuse random numbers in place, which only one part draws, in a tensor that every part has."""
        if self.changed:
            raise ValueError(
                f"split_model: expected the code around the cuts to draw random numbers into new tensors, got "
                f"{self.function!r} on a tensor {[*self.changed[0].shape]}; use torch.rand, torch.randn or "
                "torch.bernoulli"
            )


def _all_tensors() -> list[Tensor]:
    """Return all tensors of this process that Python's garbage collector tracks."""
    objects = gc.get_objects()
    try:
        types = {*_with_subclasses(Tensor)}
        return [each for each in objects if type(each) in types]  # half the time of the line below
    except TypeError:  # a metaclass without a hash
        return [each for each in objects if issubclass(type(each), Tensor)]


def _with_subclasses(parent: type) -> Iterator[type]:
    """Yield a class and the classes derived from it."""
    yield parent
    for child in type.__subclasses__(parent):
        yield from _with_subclasses(child)


def storage_of(tensor: Tensor) -> int:
    """Return an identifier of the memory of a tensor; that of a sparse tensor, which has several parts, is its own."""
    address = storage_address(tensor)
    return -id(tensor) if address is None else address


_IN_PLACE = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")}
