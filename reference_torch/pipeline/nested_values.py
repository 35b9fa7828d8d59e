"""Tensors and plain values anywhere in a value: in pytrees, and in the attributes of objects such as dataclasses."""

import copy
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

_DEPTH = 3
"""Depth of objects inside of objects up to which values are searched."""

_CLOSED = (nn.Module, type, ModuleType, FunctionType, MethodType, BuiltinFunctionType)
"""Objects whose attributes are no values of a forward."""

PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))
"""Values without tensors, which == compares."""

MISSING = object()
"""A marker for a value that does not exist."""

CONTAINERS = (list, tuple, dict)
"""Types of objects that contain others by index or key."""

Place = tuple[tuple[bool, Any], ...]
"""The path to a value inside another: for each step, True for an attribute, and its name, key or index."""


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
        elif depth and id(leaf) not in seen and (own := attributes(leaf)):
            seen.add(id(leaf))
            for attribute in own.values():
                _collect(attribute, found, seen, depth - 1)


def with_tensors_replaced(value: Any, replace: Callable[[Tensor], Any]) -> Any:
    """Return a value with its tensors replaced; objects that contain tensors are copied.

    Args:
        value: the value.
        replace: returns the replacement of a tensor, or the tensor itself.
    """
    return _replaced(value, replace, {}, _DEPTH)


def _replaced(value: Any, replace: Callable[[Tensor], Any], copies: dict[int, Any], depth: int) -> Any:
    def leaf_for(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return replace(leaf)
        own = attributes(leaf) if depth else None
        if not own:
            return leaf
        if id(leaf) not in copies:
            copies[id(leaf)] = leaf  # for objects that contain themselves
            others = {name: _replaced(old, replace, copies, depth - 1) for name, old in own.items()}
            if any(tensors_in(old) for old in own.values()):
                copies[id(leaf)] = copy.copy(leaf)
                for name, other in others.items():
                    object.__setattr__(copies[id(leaf)], name, other)
        return copies[id(leaf)]

    return pytree.tree_map(leaf_for, value)


def attributes(leaf: Any) -> dict[str, Any]:
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


def contents(value: Any, depth: int = _DEPTH) -> dict[Place, Any]:
    """Return the contents of a value by place: the value, items of lists, tuples and dicts, and attributes of objects.

    The contents of an object that is in several places are listed only at the first place.
    """
    found: dict[Place, Any] = {}
    _visit((), value, found, set(), depth)
    return found


def _visit(place: Place, value: Any, found: dict[Place, Any], seen: set[int], depth: int) -> None:
    found[place] = frozenset(value) if isinstance(value, set) else value
    if id(value) in seen or isinstance(value, (*PLAIN, Tensor)):
        return
    seen.add(id(value))
    if isinstance(value, CONTAINERS):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        steps = [(False, key, item) for key, item in [*items]]
    else:
        depth -= 1
        steps = [(True, name, item) for name, item in attributes(value).items()] if depth >= 0 else []
    for is_attribute, key, item in steps:
        _visit((*place, (is_attribute, key)), item, found, seen, depth)


def plain_in(value: Any) -> dict[Place, Any]:
    """Return the plain values that a value contains, by place."""
    return {place: each for place, each in contents(value).items() if isinstance(each, (*PLAIN, frozenset))}


def changes(before: dict[Place, Any], after: dict[Place, Any]) -> dict[Place, Any]:
    """Return changed plain values, new lists and dicts (as empty ones), and MISSING for removed values, by place."""
    found: dict[Place, Any] = {}
    for place, value in after.items():
        old = before.get(place, MISSING)
        if type(value) in (dict, list) and type(old) is not type(value):
            found[place] = type(value)()
        elif isinstance(value, (*PLAIN, frozenset)) and not same_plain(old, value):
            found[place] = value
    removed = [place for place, old in before.items() if place not in after and isinstance(old, (*PLAIN, frozenset))]
    return found | dict.fromkeys(reversed(removed), MISSING)


def same_plain(one: Any, other: Any) -> bool:
    """Return True for equal plain values of one type; nan equals nan."""
    return type(one) is type(other) and bool(one == other or (one != one and other != other))


def change(value: Any, place: Place, new: Any) -> None:
    """Set or remove one plain value inside a value; do nothing if the value lacks the place."""
    *outer, (is_attribute, key) = place
    try:
        for was_attribute, name in outer:
            value = getattr(value, name) if was_attribute else value[name]
        if isinstance(new, frozenset):
            old = getattr(value, key) if is_attribute else value[key]
            old.clear()
            old.update(new)
        elif is_attribute:
            object.__delattr__(value, key) if new is MISSING else object.__setattr__(value, key, new)
        elif new is MISSING:
            del value[key]
        elif isinstance(value, list) and key == len(value):
            value.append(new)
        else:
            value[key] = copy.copy(new)
    except (AttributeError, IndexError, KeyError, TypeError):
        pass  # of an object that stages do not share


def containers_copied(value: Any, memo: dict[int, Any]) -> Any:
    """Return a value with copies of its lists, dicts and sets, also of those in tuples; other objects are not copied.

    Args:
        value: the value.
        memo: copies by the id of the original; an object that maps to itself is not copied.
    """
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, tuple):
        items = [containers_copied(item, memo) for item in value]
        if all(item is old for item, old in zip(items, value, strict=True)):
            return value
        return type(value)._make(items) if hasattr(value, "_make") else type(value)(items)  # pyright: ignore[reportAttributeAccessIssue]
    if not isinstance(value, list | dict | set):
        return value
    memo[id(value)] = copied = copy.copy(value)
    if isinstance(copied, list | dict):
        for key, item in [*(copied.items() if isinstance(copied, dict) else enumerate(copied))]:
            if isinstance(item, list | dict | set | tuple):
                copied[key] = containers_copied(item, memo)
    return copied
