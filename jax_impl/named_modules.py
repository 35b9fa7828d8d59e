"""Submodules of an nnx model by name, and classes in the place of theirs."""

from collections.abc import Callable, Iterator
from typing import Any

from flax import nnx


def named_modules(model: nnx.Module) -> Iterator[tuple[str, nnx.Module]]:
    """Yield the submodules with their dotted names, in the order of the model; the model itself has none."""
    for path, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Module) and not isinstance(node, nnx.List | nnx.Dict):
            yield ".".join(map(str, path)), node


def subclass_with(kind: type, call: Callable[..., Any]) -> type:
    """Return a subclass with another ``__call__`` and the same name."""
    return type(kind)(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


def change_class(module: nnx.Module, kind: type) -> None:
    """Give an instance another class, a subclass of its own or the class that it was made from."""
    object.__setattr__(module, "__class__", kind)
