"""Comparison of two implementations, one in PyTorch and one in JAX: of this project, or any other.

The names load on first use. The ``diptych`` command is in ``parity.cli``.
"""

from typing import Any

from parity.frameworks import import_with_frameworks

_MODULES = {
    "compare_functions": "functions",
    "compare_modules": "modules",
    "suggest_names": "modules",
    "locate": "location",
    "Location": "location",
    "Report": "functions",
    "DifferenceError": "functions",
}

__all__ = ["compare_functions", "compare_modules", "suggest_names", "locate", "Location", "Report", "DifferenceError"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {__all__}")
    return getattr(import_with_frameworks(f"{__name__}.{_MODULES[name]}", f"{__name__}.{name}"), name)
