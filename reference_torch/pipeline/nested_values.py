"""Tensors anywhere in a value: in pytrees, and in the attributes of objects such as dataclasses."""

import copy
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

_DEPTH = 3
"""Objects inside of objects that are searched."""

_CLOSED = (nn.Module, type, ModuleType, FunctionType, MethodType, BuiltinFunctionType)
"""Objects whose attributes are no values of a forward."""


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of a value, in an order that only its structure decides."""
    if isinstance(value, Tensor):
        return [value]
    found: list[Tensor] = []
    _collect(value, found, set(), _DEPTH)
    return found


def _collect(value: Any, found: list[Tensor], seen: set[int], depth: int) -> None:
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif depth and id(leaf) not in seen and (attributes := _attributes(leaf)):
            seen.add(id(leaf))
            for attribute in attributes.values():
                _collect(attribute, found, seen, depth - 1)


def with_tensors_replaced(value: Any, replace: Callable[[Tensor], Any]) -> Any:
    """Return a value with other tensors in the places of its tensors; objects that contain them are copied.

    Args:
        value: the value.
        replace: returns what takes the place of a tensor, or the tensor itself.
    """
    return _replaced(value, replace, {}, _DEPTH)


def _replaced(value: Any, replace: Callable[[Tensor], Any], copies: dict[int, Any], depth: int) -> Any:
    def leaf_for(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return replace(leaf)
        attributes = _attributes(leaf) if depth else None
        if not attributes:
            return leaf
        if id(leaf) not in copies:
            copies[id(leaf)] = leaf  # for objects that contain themselves
            others = {name: _replaced(old, replace, copies, depth - 1) for name, old in attributes.items()}
            if any(tensors_in(old) for old in attributes.values()):
                copies[id(leaf)] = copy.copy(leaf)
                for name, other in others.items():
                    object.__setattr__(copies[id(leaf)], name, other)
        return copies[id(leaf)]

    return pytree.tree_map(leaf_for, value)


def _attributes(leaf: Any) -> dict[str, Any]:
    """Return the attributes of an object; {} if they are no values of a forward."""
    if isinstance(leaf, _CLOSED):
        return {}
    slots = [name for kind in type(leaf).__mro__ for name in _slots(kind)]
    found = {name: getattr(leaf, name) for name in slots if hasattr(leaf, name)}
    return found | getattr(leaf, "__dict__", {})


def _slots(kind: type) -> list[str]:
    slots = vars(kind).get("__slots__", ())
    names = [slots] if isinstance(slots, str) else [*slots]
    return [name for name in names if name not in ("__dict__", "__weakref__") and not name.startswith("__")]
