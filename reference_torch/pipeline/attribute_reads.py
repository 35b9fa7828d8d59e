"""Attributes that submodules or the code around the cuts set, and that the code around the cuts reads."""

from collections.abc import Mapping
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from reference_torch.pipeline.nested_values import (
    CONTAINERS,
    PLAIN,
    Place,
    changes,
    containers_copied,
    contents,
    plain_in,
    same_plain,
)
from reference_torch.pipeline.partial_forward import Run, current_run


class AttributeReads:
    """A context that notes which attributes of modules the enclosing code reads and sets, and in which part.

    At its end, the submodules and those that enclose a cut have the attributes that they had before.

    Args:
        whole: the submodules, by name; what is in them is watched too.
        enclosing: submodules that enclose a cut.
    """

    def __init__(self, whole: Mapping[str, nn.Module], enclosing: Mapping[str, nn.Module]) -> None:
        inner = [
            (path, owner, module) for owner, each in whole.items() for path, module in each.named_modules(None, owner)
        ]
        self._modules = {id(module): (path, owner, module) for path, owner, module in inner}
        self._before = {key: _contents(module) for key, (_, _, module) in self._modules.items()}
        memo: dict[int, Any] = {}
        modules = [*(module for _, _, module in inner), *enclosing.values()]
        self._attributes = [(module, _copied(module, memo)) for module in modules]
        self._read: dict[tuple[int, str], set[int]] = {}
        self._enclosing = {id(module): (path, module) for path, module in enclosing.items()}
        self._set: set[tuple[int, str]] = set()
        self._from_before: dict[tuple[int, str], int] = {}
        self._at_end: dict[tuple[int, str], _Contents | None] = {}
        self._objects = {key: _plain_in_objects(module) for key, (_, module) in self._enclosing.items()}
        self._changed_objects: dict[str, int] = {}

    def __enter__(self) -> None:
        _watch(self, 1)

    def __exit__(self, *exception: object) -> None:
        _watch(self, -1)
        for module, attributes in self._attributes:
            vars(module).clear()
            vars(module).update(attributes)

    def note(self, module: nn.Module, key: str, run: Run) -> None:
        """Note the read of an attribute."""
        place = (id(module), key)
        if id(module) in self._modules and key not in _REGISTRIES:
            self._read.setdefault(place, set()).add(run.part)
        elif id(module) in self._enclosing and key not in _REGISTRIES and place not in self._set:
            self._from_before.setdefault(place, run.part)

    def note_set(self, module: nn.Module, key: str) -> None:
        """Note that the enclosing code sets an attribute."""
        self._set.add((id(module), key))

    def end_part(self, part: int) -> None:
        """Note what a part that is not the last has changed in objects, and what it has read from before this call."""
        for place, first in self._from_before.items():
            if first == part:
                self._at_end[place] = self._now(place)
        for key, (path, module) in self._enclosing.items():
            for (_, name), *_ in changes(self._objects[key], _plain_in_objects(module)):
                if (key, name) in self._from_before:  # otherwise a submodule has changed it
                    self._changed_objects.setdefault(".".join(filter(None, (path, name))), part)

    def _now(self, place: tuple[int, str]) -> "_Contents | None":
        return _contents(self._enclosing[place[0]][1], place[1]).get(place[1])

    def check(self, parts: Mapping[str, set[int]]) -> None:
        """Refuse that one part reads an attribute that another part has changed, for this call or for the next.

        Args:
            parts: parts that call each submodule.

        Raises:
            ValueError: a part does so; the message names the attribute and the stage.
        """
        for (module, key), readers in self._read.items():
            path, owner, changed = self._modules[module]
            users = readers | parts.get(owner, set())
            if len(users) > 1 and not _equal(self._before[module].get(key), _contents(changed, key).get(key)):
                raise ValueError(
                    f"split_model: expected the code around the cuts to read in stage {max(readers)} what submodules "
                    f"return, got attribute '{path}.{key}', which a submodule sets in another stage; return it from "
                    "that submodule, and pass it on as a value"
                )
        if self._changed_objects:
            path, part = next(iter(self._changed_objects.items()))
            raise ValueError(
                "split_model: expected the code around the cuts to change only numbers that are attributes of modules, "
                f"got a change inside the object in attribute {path!r}, made by stage {part}; each later stage of the "
                "process would repeat it. Store the number on the module itself, or change it after the last cut"
            )
        for place, before in self._at_end.items():
            if not _equal(before, self._now(place)):
                path = ".".join(filter(None, (self._enclosing[place[0]][0], place[1])))
                raise ValueError(
                    f"split_model: expected the code around the cuts to read in stage {self._from_before[place]} what "
                    f"it has set there or before, got attribute {path!r}, which a later stage changes for the next "
                    "call; pass it to forward and return it, or change it before the cut"
                )


_REGISTRIES = ("_parameters", "_buffers", "_modules")
"""Attributes that this class does not watch."""
_active: list[AttributeReads] = []
_lock = Lock()


def _watch(reads: AttributeReads, more: int) -> None:
    """Make modules report which attributes are read and set, while a context is active.

    Args:
        reads: the context.
        more: 1 at its start, -1 at its end.
    """
    make: Any = nn.Module
    with _lock:
        if more == 1:
            _active.append(reads)
            make.__getattribute__ = _attribute
            make.__setattr__ = _set_attribute
        else:
            _active.remove(reads)
            if not _active:
                del make.__getattribute__
                make.__setattr__ = _set_plainly


def _attribute(module: nn.Module, name: str) -> Any:
    """Return an attribute of a module, and note that the enclosing code of a traced forward reads it."""
    run = current_run()
    get = super(nn.Module, module).__getattribute__
    if run is not None and not run.is_inside and not name.startswith("__") and name in get("__dict__"):
        for reads in _active:
            reads.note(module, name, run)
    return get(name)


_set_plainly = nn.Module.__setattr__


def _set_attribute(module: nn.Module, name: str, value: Any) -> None:
    """Set an attribute of a module, and note that the enclosing code of a traced forward does."""
    run = current_run()
    if run is not None and not run.is_inside:
        for reads in _active:
            reads.note_set(module, name)
    _set_plainly(module, name, value)


def end_part(part: int) -> None:
    """Notify the active contexts that a part of the traced forward ends."""
    for reads in _active:
        reads.end_part(part)


def _copied(module: nn.Module, memo: dict[int, Any]) -> dict[str, Any]:
    """Return the attributes of a module, with containers of their own."""
    attributes = vars(module).items()
    return {key: value if key in _REGISTRIES else containers_copied(value, memo) for key, value in attributes}


_Contents = list[tuple[Any, Any, int | None]]
"""Each place in a value, the object there, and the version of a tensor that is no inference tensor."""


def _contents(module: nn.Module, only: str | None = None) -> dict[str, _Contents]:
    """Return the contents of the attributes of a module, or of one of them, by name."""
    items = [(key, value) for key, value in vars(module).items() if key not in _REGISTRIES and only in (None, key)]
    return {key: [(place, each, _version(each)) for place, each in contents(value).items()] for key, value in items}


def _plain_in_objects(module: nn.Module) -> dict[Place, Any]:
    """Return the plain values of objects in attributes of a module, which all stages of a process share, by place."""
    return {
        ((True, key), *place): each
        for key, value in vars(module).items()
        if key not in _REGISTRIES
        for place, each in plain_in(value).items()
        if any(is_attribute for is_attribute, _ in place)
    }


def _version(value: Any) -> int | None:
    """Return the version of a tensor; None for other values, and for tensors of inference mode, which have none."""
    with torch._C.DisableTorchFunction():  # a trace that is being recorded must not see these reads
        return value._version if isinstance(value, Tensor) and not value.is_inference() else None


def _equal(one: _Contents | None, other: _Contents | None) -> bool:
    """Return True if two values contain the same objects, or equal plain values, with the same versions."""
    if one is None or other is None or len(one) != len(other):
        return one is other
    return all(
        place == place_now and version == version_now and (old is new or _equal_plain(old, new))
        for (place, old, version), (place_now, new, version_now) in zip(one, other, strict=True)
    )


def _equal_plain(one: Any, other: Any) -> bool:
    if isinstance(one, CONTAINERS):  # what they contain is compared too
        return type(one) is type(other)
    return isinstance(one, (*PLAIN, frozenset)) and same_plain(one, other)
