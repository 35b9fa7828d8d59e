"""Helpers for custom backward functions and for gradients."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Return the type in which the gradients of a parameter are summed."""
    return parameter.grad_dtype or parameter.dtype


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a backward function that cannot be differentiated itself.

    It raises a RuntimeError under ``create_graph=True``, because second derivatives would be incomplete. It runs
    without autocast.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{type(ctx).__name__}: expected to be differentiated once, got create_graph=True; leave it out, or "
                "use a function of PyTorch's own operations, such as recurrent_kda or recurrent_gated_delta_rule"
            )
        device = next((gradient.device.type for gradient in gradients if gradient is not None), "cpu")
        with without_autocast(device):
            return backward(ctx, *gradients)

    return checked


def as_one_operation(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that reads only its arguments, so that modes of torch.overrides see it as one operation.

    Recompute records every operation that such a mode sees, which costs microseconds for each.
    """

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        if torch.overrides.has_torch_function(tensors):
            return torch.overrides.handle_torch_function(called, tensors, *args, **kwargs)
        return function(*args, **kwargs)

    return called


def without_autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    """Return a context without autocast, for any device type, including those without autocast support."""
    if torch.amp.is_autocast_available(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()


def refuse_transformed(name: str, remedy: str, *tensors: Any) -> None:
    """Check that a custom backward function can differentiate its arguments.

    Args:
        name: name of the function.
        remedy: advice on an alternative, for the error message.
        tensors: arguments of the function.

    Raises:
        NotImplementedError: torch.func transforms an argument, or it has a tangent of forward-mode differentiation.
    """
    plain_tensors = [x for x in tensors if isinstance(x, torch.Tensor)]
    has_tangent = torch.autograd.forward_ad._current_level >= 0 and any(
        torch.autograd.forward_ad.unpack_dual(x).tangent is not None for x in plain_tensors
    )
    if has_tangent or is_transformed(*plain_tensors):
        raise NotImplementedError(
            f"{name}: expected tensors without transformations of torch.func (vmap, grad, jvp, ...) and without "
            f"tangents of forward-mode differentiation, got a transformed one; {remedy}"
        )


def is_transformed(*tensors: Any) -> bool:
    """Return True if a torch.func transformation (vmap, grad, jvp, functionalize) has wrapped one of the tensors."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # pyright: ignore[reportAttributeAccessIssue]
    return any(isinstance(x, torch.Tensor) and wrapped(x) for x in tensors)
