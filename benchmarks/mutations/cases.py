"""Pairs of models with random parameters and inputs, and bugs that change one submodule of one side."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from flax import nnx
from torch import nn

from parity.pytrees import to_numpy


@dataclass(frozen=True)
class Case:
    """Two equal models."""

    name: str
    torch_model: Callable[[], nn.Module]
    jax_model: Callable[[], nnx.Module]
    inputs: Callable[[np.random.Generator], list[Any]]
    names: Callable[[nn.Module], dict[str, Any]]
    """Function from a PyTorch model to the names of the JAX parameters."""
    fixed: tuple[str, ...] = ()
    """Parameters of PyTorch that are zero."""
    ignore: tuple[str, ...] = ()
    """Patterns of parameters without counterpart."""
    jax_paths: Mapping[str, str] = field(default_factory=dict)
    """Prefixes of paths in PyTorch, with their prefix in JAX where it differs."""

    def build(self, seed: int) -> tuple[nn.Module, nnx.Module, list[Any]]:
        """Return both models and inputs, drawn from a seed; JAX gets its parameters from locate or compare_modules."""
        rng = np.random.default_rng(seed)
        torch.manual_seed(seed)
        model = self.torch_model()
        with torch.no_grad():
            for name, value in (*model.named_parameters(), *model.named_buffers()):
                if value.is_floating_point():
                    value.copy_(torch.from_numpy(self.drawn(name, to_numpy(value), rng)))
        return model, self.jax_model(), self.inputs(rng)

    def drawn(self, name: str, value: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return random values around the initial ones, so that no parameter is 0 or 1 everywhere."""
        if name in self.fixed:
            return np.zeros_like(value)
        size = max(0.1, float(np.sqrt(np.mean(np.square(value)))))
        if name.endswith("var"):
            return value * rng.uniform(0.5, 2.0, value.shape)
        return value + 0.3 * size * rng.standard_normal(value.shape)

    def jax_path(self, path: str) -> str:
        """Return the path of the submodule of JAX that belongs to one of PyTorch."""
        for ours, theirs in self.jax_paths.items():
            if path == ours or path.startswith(f"{ours}."):
                return f"{theirs}{path[len(ours) :]}"
        return path


class Bug(NamedTuple):
    """A bug in one submodule."""

    name: str
    side: str
    """"torch" or "jax"."""
    module: str
    """Path of the submodule in PyTorch."""
    change: type | Mapping[str, Any]
    """Class that replaces that of the submodule, or values of its attributes."""
    gradients_only: bool = False
    """True if the outputs are right and only gradients are wrong."""
    jax_module: str | None = None
    """Path of the submodule in JAX, if it does not follow from the prefixes of the case."""


def put_in(bug: Bug, case: Case, torch_model: nn.Module, jax_model: nnx.Module) -> None:
    """Change the submodule that a bug names."""
    if bug.side == "torch":
        target: Any = torch_model.get_submodule(bug.module)
    else:
        target = jax_model
        path = case.jax_path(bug.module) if bug.jax_module is None else bug.jax_module
        for part in filter(None, path.split(".")):
            target = target[int(part)] if part.isdigit() else getattr(target, part)
    if isinstance(bug.change, type):
        target.__class__ = bug.change
        return
    for name, value in bug.change.items():
        assert hasattr(target, name), f"{bug.name}: {bug.module} has no attribute {name}"
        setattr(target, name, value)


def flax_names(model: nn.Module) -> dict[str, Any]:
    """Return Flax's names of the parameters of a model whose modules have equal names in both frameworks."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(module, nn.Linear):
            found[f"{prefix}weight"] = {"to": f"{prefix}kernel", "transpose": True}
        elif isinstance(module, nn.Conv2d):
            found[f"{prefix}weight"] = {"to": f"{prefix}kernel", "transpose": [2, 3, 1, 0]}
        elif isinstance(module, nn.LayerNorm):
            found[f"{prefix}weight"] = f"{prefix}scale"
        elif isinstance(module, nn.Embedding):
            found[f"{prefix}weight"] = f"{prefix}embedding"
    return found
