"""What the backends' own backward functions have in common."""

import functools
from collections.abc import Callable
from typing import Any

import torch


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward that refuses to be differentiated, rather than leave a second derivative's terms out.

    It raises a RuntimeError under ``create_graph=True``, and runs outside of autocast.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{type(ctx).__name__}: expected to be differentiated once, got create_graph=True; leave it out, or "
                "take a function of PyTorch's own operations, as recurrent_kda and recurrent_gated_delta_rule are"
            )
        device = next((gradient.device.type for gradient in gradients if gradient is not None), "cpu")
        with torch.autocast(device, enabled=False):
            return backward(ctx, *gradients)

    return checked


def is_transformed(*tensors: Any) -> bool:
    """Return whether a transformation of torch.func (vmap, grad, jvp, functionalize) has wrapped one of the tensors."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # pyright: ignore[reportAttributeAccessIssue]
    return any(isinstance(x, torch.Tensor) and wrapped(x) for x in tensors)
