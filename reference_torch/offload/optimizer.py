"""An optimizer step in parts, one layer after the other."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn


class OptimizerParts:
    """An optimizer whose step updates one layer at a time.

    Args:
        optimizer: updates each parameter independently.
        layers: parameters by layer; a shared parameter is updated with the last of its layers.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, layers: Mapping[int, Sequence[nn.Parameter]]) -> None:
        self._optimizer = optimizer
        self._groups = [(group, group["params"]) for group in optimizer.param_groups]
        self._layer_of = {id(p): layer for layer, parameters in layers.items() for p in parameters}

    def step(self, layer: int | None) -> None:
        """Update the parameters of a layer; None: the parameters of no layer."""
        for group, parameters in self._groups:
            group["params"] = [p for p in parameters if self._layer_of.get(id(p)) == layer]
        self._optimizer.step()

    def join(self) -> None:
        """Restore all parameters of the optimizer."""
        for group, parameters in self._groups:
            group["params"] = parameters
