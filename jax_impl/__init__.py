"""The JAX and Flax backend. Names load on first use, so importing the package costs nothing."""

import importlib
from typing import Any

_HOMES = {
    "GPTModel": "transformer",
    "TransformerBlock": "transformer",
    "TransformerLayer": "transformer",
    "HyperConnectionModule": "hyper_connections",
    "sinkhorn": "hyper_connections",
    "Trainer": "train",
}

__all__ = ["GPTModel", "TransformerBlock", "TransformerLayer", "HyperConnectionModule", "sinkhorn", "Trainer"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {__all__}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
