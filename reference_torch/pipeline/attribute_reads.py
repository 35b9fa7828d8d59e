"""Attributes that submodules set in their forward, and that the code around the cuts reads."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from reference_torch.pipeline.partial_forward import Run, current_run


class AttributeReads:
    """A context that notes which attributes of whole submodules the enclosing code reads, and in which part.

    At its end, the submodules have the attributes that they had before.

    Args:
        whole: the submodules, by name. Those that are compiled are not watched.
    """

    def __init__(self, whole: Mapping[str, nn.Module]) -> None:
        modules = [(name, module) for name, module in whole.items() if module._compiled_call_impl is None]
        self._modules = {id(module): (name, module) for name, module in modules}
        self._classes = [(module, type(module)) for _, module in self._modules.values()]
        self._before = {name: _versions(module) for name, module in self._modules.values()}
        self._attributes = [(inner, dict(vars(inner))) for each in whole.values() for inner in each.modules()]
        self._read: dict[tuple[str, str], set[int]] = {}

    def __enter__(self) -> None:
        for module, kind in self._classes:
            make: Any = type(kind)
            module.__class__ = make(kind.__name__, (_Watched, kind), {"_note": self._note})

    def __exit__(self, *exception: object) -> None:
        for module, kind in self._classes:
            module.__class__ = kind
        for inner, attributes in self._attributes:
            vars(inner).clear()
            vars(inner).update(attributes)

    def _note(self, module: nn.Module, key: str, run: Run) -> None:
        """Note the read of an attribute."""
        self._read.setdefault((self._modules[id(module)][0], key), set()).add(run.part)

    def check(self, parts: Mapping[str, set[int]]) -> None:
        """Refuse that one part reads an attribute that a submodule of another part has changed.

        Args:
            parts: parts that call each submodule.
        """
        after = {name: _versions(module) for name, module in self._modules.values()}
        for (name, key), readers in self._read.items():
            users = sorted(readers | parts.get(name, set()))
            if len(users) > 1 and not _equal(self._before[name].get(key), after[name].get(key)):
                raise ValueError(
                    f"split_model: expected the code around the cuts to read in stage {max(readers)} what submodules "
                    f"return, got attribute '{name}.{key}', which a submodule sets in another stage; return it from "
                    "that submodule, and pass it on as a value"
                )


class _Watched:
    """A submodule whose attributes the enclosing code may read."""

    _note: Callable[[Any, str, Run], None]

    def __getattribute__(self, name: str) -> Any:
        run = current_run()
        if run is not None and not run.is_inside and not name.startswith("__") and name in vars(self):
            type(self)._note(self, name, run)
        return super().__getattribute__(name)


_Version = tuple[Any, int | None]
"""A value, and its version if it is a tensor that changes in place."""


def _versions(module: nn.Module) -> dict[str, _Version]:
    return {
        key: (value, value._version if isinstance(value, Tensor) and not value.is_inference() else None)
        for key, value in vars(module).items()
    }


def _equal(one: _Version | None, other: _Version | None) -> bool:
    """Return True if a value is the same object, or an equal plain value, and has the same version."""
    if one is None or other is None:
        return one is other
    plain = isinstance(one[0], int | float | str) and type(one[0]) is type(other[0]) and one[0] == other[0]
    return (one[0] is other[0] or plain) and one[1] == other[1]
