"""Detection of hooks and buffers whose writes no version counter records, in forward and in backward."""

from collections.abc import Iterable, Iterator
from functools import partial

from torch import Tensor, nn
from torch.nn.modules import module as hooks_of_all
from torch.nn.modules.batchnorm import _NormBase

LARGEST_STATISTICS = 2**20
"""Bytes up to which a tensor may be the running statistics of a batch norm."""


class OwnHook(partial):
    """A hook of offload on the gradient of a parameter, which writes no parameter."""


class UseHook(OwnHook):
    """A hook of offload that notes that backward has reached a parameter; it does not need the gradient."""


def possible_statistics(parts: Iterable[nn.Module]) -> Iterator[Tensor]:
    """Return the tensors of a layer that its forward may pass, as vectors, to F.batch_norm as running statistics.

    PyTorch's own modules pass nothing else than the buffers of norms; any module may hold the others.

    Args:
        parts: the layer and the modules inside it.
    """
    for part in parts:
        if type(part).__module__.startswith("torch.nn.modules.") and not isinstance(part, _NormBase):
            continue
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            if tensor is not None and tensor.is_floating_point() and tensor.nbytes <= LARGEST_STATISTICS:
                yield tensor


def has_forward_hooks(parts: Iterable[nn.Module]) -> bool:
    """Return True if hooks of a user run in the forward of a layer, which consists of these modules."""
    if hooks_of_all._global_forward_hooks or hooks_of_all._global_forward_pre_hooks:
        return True
    hooks = (
        hook for part in parts for each in (part._forward_hooks, part._forward_pre_hooks) for hook in each.values()
    )
    return any(not str(getattr(hook, "__module__", "")).startswith("reference_torch.") for hook in hooks)


def has_backward_hooks(parts: Iterable[nn.Module]) -> bool:
    """Return True if hooks of a user run in the backward of a layer, which consists of these modules."""
    if hooks_of_all._global_backward_hooks or hooks_of_all._global_backward_pre_hooks:
        return True
    return any(part._backward_hooks or part._backward_pre_hooks for part in parts)


def has_gradient_hooks(parameter: nn.Parameter) -> bool:
    """Return True if a hook that is not offload's runs when the gradient of a parameter arrives."""
    if getattr(parameter, "_post_accumulate_grad_hooks", None):
        return True
    hooks = parameter._backward_hooks
    return bool(hooks) and any(not isinstance(hook, OwnHook) for hook in hooks.values())
