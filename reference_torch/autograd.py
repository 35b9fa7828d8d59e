"""What the backends' own backward functions have in common."""

import contextlib
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
        with without_autocast(device):
            return backward(ctx, *gradients)

    return checked


def without_autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which autocast changes no types, on any kind of device, also one that has no autocast."""
    if torch.amp.is_autocast_available(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()


def refuse_transformed(name: str, remedy: str, *tensors: Any) -> None:
    """Refuse what a backward of our own cannot be taken through.

    Args:
        name: of the function.
        remedy: what can be called instead.
        tensors: its arguments.

    Raises:
        NotImplementedError: torch.func transforms one of them, or it carries a tangent of forward-mode differentiation.
    """
    given = [x for x in tensors if isinstance(x, torch.Tensor)]
    has_tangent = torch.autograd.forward_ad._current_level >= 0 and any(
        torch.autograd.forward_ad.unpack_dual(x).tangent is not None for x in given
    )
    if has_tangent or is_transformed(*given):
        raise NotImplementedError(
            f"{name}: expected tensors that no transformation of torch.func (vmap, grad, jvp, ...) and no forward-mode "
            f"differentiation is applied to, got one; {remedy}"
        )


def is_transformed(*tensors: Any) -> bool:
    """Return whether a transformation of torch.func (vmap, grad, jvp, functionalize) has wrapped one of the tensors."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # pyright: ignore[reportAttributeAccessIssue]
    return any(isinstance(x, torch.Tensor) and wrapped(x) for x in tensors)
