"""Which modules are registered, by all managers, and how those are pickled and copied: without offload's hooks.

Hooks stand in the ``__dict__`` of the module they are on, so pickling a module would pickle its manager. While a module
of a class is registered, ``copyreg`` knows a reducer of that class that leaves them out.
"""

import copyreg
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

_REGISTERED: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
"""Parts of layers that some manager has registered, and their layers' numbers."""
_HOOKS: weakref.WeakKeyDictionary[nn.Module, set[int]] = weakref.WeakKeyDictionary()
"""Keys of offload's hooks among a module's."""
_BEFORE: dict[type, Callable[[Any], Any] | None] = {}
"""Classes whose reducer stands in copyreg, and what stood there before."""


def registered_number(part: nn.Module) -> int | None:
    """Return the number of the layer that a module is in, of any manager; None: of no layer."""
    return _REGISTERED.get(part)


def register(module: nn.Module, layer_id: int, handles: Iterable[RemovableHandle]) -> None:
    """Note a layer and the hooks on it and on its parts."""
    keys = {handle.id for handle in handles}
    for part in module.modules():
        _REGISTERED[part], _HOOKS[part] = layer_id, keys
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
    """Reduce a module as without offload."""
    before = _BEFORE.get(type(module))
    reduced = module.__reduce_ex__(4) if before is None else before(module)
    keys = _HOOKS.get(module)
    if keys is None or isinstance(reduced, str) or len(reduced) < 3:
        return reduced
    state = reduced[2]
    if isinstance(state, dict):
        return (*reduced[:2], _without(state, keys), *reduced[3:])
    if isinstance(state, tuple) and len(state) == 2 and isinstance(state[0], dict):  # of a class with slots
        return (*reduced[:2], (_without(state[0], keys), state[1]), *reduced[3:])
    return reduced


def _without(state: dict[str, Any], keys: set[int]) -> dict[str, Any]:
    return {
        name: type(value)((key, item) for key, item in value.items() if key not in keys)
        if "_hooks" in name and isinstance(value, dict)
        else value
        for name, value in state.items()
    }
