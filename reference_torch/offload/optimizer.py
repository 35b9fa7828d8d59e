"""An optimizer step in parts, one layer after the other."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from reference_torch.offload.link import OffloadError


def check_is_per_parameter(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose update of a parameter may depend on other parameters.

    Raises:
        OffloadError: it is LBFGS, not one of PyTorch's optimizers, or has step hooks, which would see one layer at a
            time.
    """
    kind = type(optimizer)
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    if any(hooks) or _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
        actual = f"a {kind.__name__} with step hooks, which would run once per layer with its parameters alone"
    elif not f"{kind.__module__}.".startswith("torch.optim."):
        actual = f"{kind.__module__}.{kind.__qualname__}, which may not do so"
    elif isinstance(optimizer, torch.optim.LBFGS):
        raise OffloadError(
            "manager.step: expected an optimizer that updates each parameter independently, got LBFGS, which combines "
            "all parameters; call optimizer.step(closure), which fetches all layers"
        )
    else:
        return
    raise OffloadError(
        f"manager.step: expected an optimizer that updates each parameter independently, got {actual}; call "
        "optimizer.step(), which fetches all layers, or manager.step(optimizer, is_per_parameter=True) if you know it"
    )


class OptimizerParts:
    """An optimizer whose step updates one layer at a time.

    Args:
        optimizer: updates each parameter independently.
        layers: parameters by layer; a shared parameter is updated with the layer that comes last in it.
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

    def parameters_of(self, layer: int) -> list[nn.Parameter]:
        """Return the parameters that are updated with a layer."""
        return [p for _, parameters in self._groups for p in parameters if self._layer_of.get(id(p)) == layer]

    def join(self) -> None:
        """Restore all parameters of the optimizer."""
        for group, parameters in self._groups:
            group["params"] = parameters
