"""Offload of named submodules of any model."""

from typing import Any

from torch import nn

from diptych.plans.module_patterns import select
from reference_torch.offload.manager import TensorOffloadManager


def offload_modules(model: Any, modules: Any, **settings: Any) -> TensorOffloadManager:
    """Move submodules to the host, and fetch each in time for its use. The code of the model stays as it is.

    Example::

        manager = offload_modules(model, ["blocks.*"], num_prefetch_layers=1, activations=True)
        ...
        loss.backward()
        manager.step(optimizer)  # layer by layer; optimizer.step() also works, with all layers resident

    Losses, gradients and parameters are bitwise equal to those of the plain model. Parameters stay the same objects, so
    optimizers, gradient clipping, GradScaler, averages of the weights and checkpoints work as before.

    Args:
        model: any nn.Module, on its device.
        modules: patterns of the submodules that move as a whole, in the order of the model; ``*`` stands for any text
            without a dot. Modules that no pattern matches stay on the device.
        settings: arguments of TensorOffloadManager.

    Returns:
        The manager. Keep a reference to it: close(), or its deletion, moves everything back and removes all hooks.

    Raises:
        TypeError: model is no module, modules is no list of texts, or a setting is unknown.
        ValueError: a pattern matches nothing, a match is inside another, a match contains a cut of split_model, or an
            error of TensorOffloadManager or its register_layer.
        OffloadError: the host has no free memory.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    found = dict(model.named_modules())
    chosen = select("modules", modules, [*found])
    for name in chosen:
        if getattr(found[name], "contains_cut", False):
            raise ValueError(
                f"modules: expected submodules that are whole in one stage, got {name!r}, in which split_model has put "
                "a cut; name submodules of it"
            )
    manager = TensorOffloadManager(**settings)
    try:
        for number, name in enumerate(chosen):
            manager.register_layer(number, found[name])
    except BaseException:
        manager.close()
        raise
    manager.offload_all_layers()
    return manager
