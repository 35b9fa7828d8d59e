"""Values outside of a model that its methods reach: by global names, in closures and in caches."""

import copy
import functools
import gc
import itertools
from collections.abc import Iterable, Iterator
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from reference_torch.pipeline.nested_values import CONTAINERS, MISSING, PLAIN, attributes, contents

_DEPTH = 3
"""Depth of references from function to function up to which values are searched."""

_LIBRARIES = ("torch", "numpy", "random", "builtins", "jaxtyping", "beartype", "tqdm")
"""Packages whose functions are not searched."""

_ENTRIES = 1000
"""Number of values inside a global value that are searched: a global list may be a data set."""


def _reached(value: Any, seen: set[int], depth: int) -> Iterator[Any]:
    """Yield the values that a function reaches; of another object, the values inside it."""
    function = getattr(value, "__func__", value)  # of a method, a static method or a class method
    function = getattr(function, "fget", function)  # of a property
    if not isinstance(function, FunctionType):
        if not isinstance(value, nn.Module | ModuleType):
            yield from itertools.islice(_inside(value, set(), 1), _ENTRIES)
        return
    if not depth or id(function) in seen or _is_of_library(function.__module__):
        return
    seen.add(id(function))
    for cell in function.__closure__ or ():
        if cell != CellType():  # an empty one
            yield from _reached(cell.cell_contents, seen, depth - 1)
    if _is_of_library(function.__globals__.get("__name__")):
        return  # a decorator's function, which has the module name of the one that it wraps
    names = {*_names(function.__code__)}
    for name in names & function.__globals__.keys():
        found = function.__globals__[name]
        inner = vars(found) if isinstance(found, ModuleType | type) else {}
        for each in [found, *(inner[key] for key in names & inner.keys())]:
            yield from _reached(each, seen, depth - 1)


def _is_of_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES


def _inside(value: Any, seen: set[int], depth: int) -> Iterator[Any]:
    """Yield a value and the values inside it, except for plain values and tensors."""
    if id(value) in seen or isinstance(value, (*PLAIN, Tensor)):
        return
    seen.add(id(value))
    yield value
    if isinstance(value, CONTAINERS):
        inner = dict.values(value) if isinstance(value, dict) else value
    else:
        depth -= 1
        inner = attributes(value).values() if depth >= 0 else ()
    for each in [*itertools.islice(inner, _ENTRIES)]:
        yield from _inside(each, seen, depth)


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names that a function uses, also in functions inside of it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def reached_by(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """Yield the values that the methods of modules reach."""
    seen: set[int] = set()
    for module in modules:
        kinds = [kind for kind in type(module).__mro__ if not _is_of_library(kind.__module__)]
        methods = [value for kind in kinds if id(kind) not in seen for value in vars(kind).values()]
        seen.update(map(id, kinds))
        for method in [*methods, vars(module).get("forward")]:
            yield from _reached(method, seen, _DEPTH)


class GlobalCaches:
    """A context at whose end global lists and dicts and functools.lru_cache hold no fake tensors.

    Args:
        modules: modules whose methods may use them.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        values = [*reached_by(modules)]
        self._containers: list[Any] = [(each, copy.copy(each)) for each in values if isinstance(each, list | dict)]
        self._caches: list[Any] = [each for each in values if isinstance(each, functools._lru_cache_wrapper)]

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        for value, before in self._containers:
            if any(_has_fake(each) for each in _new_entries(before, value)):
                value.clear()
                value.extend(before) if isinstance(value, list) else value.update(before)
        for cache in self._caches:
            if _has_fake(gc.get_referents(cache)):
                cache.cache_clear()


def _new_entries(before: Any, after: Any) -> list[Any]:
    """Return the entries of a list or dict that an earlier copy of it does not have in the same place."""
    if isinstance(after, dict):  # also of a class whose methods are other ones
        return [value for key, value in dict.items(after) if dict.get(before, key, MISSING) is not value]
    return [value for index, value in enumerate(after) if index >= len(before) or before[index] is not value]


def _has_fake(value: Any) -> bool:
    return any(isinstance(each, FakeTensor) for each in contents(value, 1).values())
