"""Enforcement of the annotations of a package: shapes by jaxtyping, all other types by beartype.

jaxtyping's own import hook decorates functions inside of functions at each call of the outer one, and binds the
arguments of functions that take no arrays: a tenth of the time of make test. This hook leaves out the former, and gives
the latter to beartype alone. Checking every call would take a sixth of the time: each function is checked in its first
calls in a process, and then in some. Functions are not checked while torch.compile traces them.
"""

import ast
import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any, ForwardRef, get_args

import jaxtyping
from beartype import BeartypeConf, beartype

_DECORATOR = "__enforce_annotations__"
_check_types = beartype(conf=BeartypeConf(violation_type=TypeError))

FIRST = 30
"""Calls of a function, in a process, that are all checked."""
EACH = 10
"""Of the calls after them, each so-manieth is checked."""


def enforce_annotations(*packages: str) -> None:
    """Check the annotations of functions, methods and dataclasses of packages that are imported after this call.

    Args:
        packages: names of packages, which are checked with all their modules.
    """
    sys.meta_path.insert(0, _Finder(packages))


def _enforce(checked: Any) -> Any:
    """Decorate a function or class at the top level of a module, or a method."""
    if inspect.isclass(checked):
        if dataclasses.is_dataclass(checked):
            checked.__init__ = _enforce(checked.__init__)
        return checked
    if not checked.__annotations__:
        return checked
    if any(_is_jaxtypings(hint) for hint in checked.__annotations__.values()):
        return _in_some_calls(checked, jaxtyping.jaxtyped(typechecker=beartype)(checked))
    return _in_some_calls(checked, _check_types(checked))


def _in_some_calls(function: Callable, with_checks: Callable) -> Callable:
    """Return the function with checks in the first calls, and in some of the others."""
    is_compiling = sys.modules["torch"].compiler.is_compiling if "torch" in sys.modules else bool
    calls = 0

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        __tracebackhide__ = True
        if is_compiling() or jaxtyping.config.jaxtyping_disable:
            return function(*args, **kwargs)
        calls += 1
        return (with_checks if calls <= FIRST or calls % EACH == 0 else function)(*args, **kwargs)

    return call


def _is_jaxtypings(hint: Any) -> bool:
    """Return True if an annotation contains an array of jaxtyping, or a name that only jaxtyping looks up rightly."""
    if isinstance(hint, str | ForwardRef):
        return True
    is_array = inspect.isclass(hint) and issubclass(hint, jaxtyping.AbstractArray)
    return is_array or any(_is_jaxtypings(part) for part in get_args(hint))


class _Finder(MetaPathFinder):
    """Finds the modules of packages for the loader that decorates them."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in self._packages:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(fullname, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    """Compiles a module with decorators, and without the files in __pycache__, which have none."""

    def exec_module(self, module: ModuleType) -> None:
        setattr(module, _DECORATOR, _enforce)
        super().exec_module(module)

    def get_code(self, fullname: str) -> Any:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)

    def source_to_code(self, data: Any, path: Any, **more: Any) -> Any:
        tree = ast.parse(data)
        _decorate(tree)
        return compile(tree, path, "exec", dont_inherit=True)


def _decorate(parent: ast.Module | ast.ClassDef) -> None:
    """Add the decorator to classes, first, and to functions, last, where their annotations are still their own."""
    for node in parent.body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        decorator = ast.fix_missing_locations(ast.copy_location(ast.Name(_DECORATOR, ast.Load()), node))
        if isinstance(node, ast.ClassDef):
            node.decorator_list.insert(0, decorator)
            _decorate(node)
        else:
            node.decorator_list.append(decorator)
