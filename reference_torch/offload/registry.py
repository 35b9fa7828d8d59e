"""The registered modules of all managers, and how they are pickled and copied without offload's hooks.

The ``__dict__`` of a module contains its hooks, so pickling a module would pickle its manager. While a module of a
class is registered, ``copyreg`` has a reducer for that class that omits offload's hooks.
"""

import copyreg
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from reference_torch.offload.interruptions import ObservedCall

_REGISTERED: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
"""Modules inside registered layers, with the number of their layer."""
_HOOKS: weakref.WeakKeyDictionary[nn.Module, set[int]] = weakref.WeakKeyDictionary()
"""Keys of offload's hooks of each module."""
_BEFORE: dict[type, Callable[[Any], Any] | None] = {}
"""Classes with a reducer of offload in copyreg, with their previous reducer."""


def registered_number(part: nn.Module) -> int | None:
    """Return the number of the registered layer that contains a module, or None."""
    return _REGISTERED.get(part)


def register(module: nn.Module, layer_id: int, handles: Iterable[RemovableHandle]) -> None:
    """Register a layer and its hooks.

    Args:
        module: the layer.
        layer_id: number of the layer.
        handles: offload's hooks of the layer and the modules inside it.
    """
    keys = {handle.id for handle in handles}
    for part in module.modules():
        _REGISTERED[part] = layer_id
        _HOOKS[part] = keys
        kind = type(part)
        if kind not in _BEFORE:
            _BEFORE[kind] = copyreg.dispatch_table.get(kind)
            copyreg.pickle(kind, _reduce)  # pyright: ignore[reportArgumentType]


def forget(module: nn.Module) -> None:
    """Undo register."""
    for part in module.modules():
        _REGISTERED.pop(part, None)
        _HOOKS.pop(part, None)
    for kind in _BEFORE.keys() - {type(part) for part in _REGISTERED}:
        before = _BEFORE.pop(kind)
        if before is not None:
            copyreg.pickle(kind, before)
        else:
            copyreg.dispatch_table.pop(kind, None)


def _reduce(module: nn.Module) -> Any:
    """Reduce a module for pickle without offload's hooks."""
    before = _BEFORE.get(type(module))
    reduced = module.__reduce_ex__(4) if before is None else before(module)
    keys = _HOOKS.get(module)
    if keys is None or isinstance(reduced, str) or len(reduced) < 3:
        return reduced
    state = reduced[2]
    if isinstance(state, dict):
        return (*reduced[:2], _without(state, keys), *reduced[3:])
    if isinstance(state, tuple) and len(state) == 2 and isinstance(state[0], dict):  # its class has slots
        return (*reduced[:2], (_without(state[0], keys), state[1]), *reduced[3:])
    return reduced


def _without(state: dict[str, Any], keys: set[int]) -> dict[str, Any]:
    """Return the ``__dict__`` of a module without the hooks that have these keys, and with its own call."""
    found = {
        name: type(value)((key, item) for key, item in value.items() if key not in keys)
        if "_hooks" in name and isinstance(value, dict)
        else value
        for name, value in state.items()
    }
    call = found.get("_call_impl")
    if isinstance(call, ObservedCall):
        call.leave(found)
    return found
