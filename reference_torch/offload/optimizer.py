"""An optimizer's step taken in parts, one layer's parameters after the other."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn


class OptimizerParts:
    """Steps of an optimizer over some of its parameters at a time.

    Args:
        optimizer: treats each parameter by itself.
        layers: parameters by layer; one that several have goes with the last of them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, layers: Mapping[int, Sequence[nn.Parameter]]) -> None:
        self._optimizer = optimizer
        self._groups = [(group, group["params"]) for group in optimizer.param_groups]
        self._layer_of = {id(p): layer for layer, parameters in layers.items() for p in parameters}

    def step(self, layer: int | None) -> None:
        """Update a layer's parameters; None: those of no layer."""
        for group, parameters in self._groups:
            group["params"] = [p for p in parameters if self._layer_of.get(id(p)) == layer]
        self._optimizer.step()

    def join(self) -> None:
        """Give the optimizer all its parameters back."""
        for group, parameters in self._groups:
            group["params"] = parameters
