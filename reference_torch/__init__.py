"""The PyTorch backend, whose names load on first use, so that importing the package is fast."""

import importlib
from typing import Any

_MODULES = {
    "GPTModel": "transformer",
    "TransformerBlock": "transformer",
    "TransformerLayer": "transformer",
    "HyperConnectionModule": "hyper_connections",
    "sinkhorn": "doubly_stochastic",
    "Trainer": "train",
    "recompute_modules": "recompute",
    "add_hyper_connections": "added_connections",
}

__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {__all__}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
