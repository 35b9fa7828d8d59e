"""Comparison of two implementations, one in PyTorch and one in JAX: of this project, or any other.

The names load on first use. The ``diptych`` command is in ``parity.cli``.
"""

from typing import Any

from parity.frameworks import import_with_frameworks

_MODULES = {
    "compare_functions": "functions",
    "compare_modules": "modules",
    "compare_training": "training",
    "suggest_names": "modules",
    "locate": "location",
    "side_by_side": "views",
    "sweep": "views",
    "Report": "functions",
    "Location": "location",
    "DifferenceError": "functions",
}

__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {__all__}")
    return getattr(import_with_frameworks(f"{__name__}.{_MODULES[name]}", f"{__name__}.{name}"), name)
