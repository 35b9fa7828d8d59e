"""Backward in two parts: gradients of inputs now (I), gradients of weights later (W).

What the stage before waits for is the gradient of its output alone. While a stage runs under
:class:`DeferredWeightGradients`, every ``torch.nn.functional.linear`` with a weight that wants a gradient becomes an
operation whose backward multiplies by the weight, hands that on, and notes the other product down instead of
computing it; :meth:`DeferredWeightGradients.run` computes what was noted. Nothing is computed twice. Gradients of all
other parameters (norms, hyper-connections, embedding) are small, and come with I.

Reference: Qi et al., arXiv 2401.10241, section 2. Other implementations walk the autograd graph and run parts of it
for I and the rest for W; noting products down asks nothing of the graph: views, custom functions and tied weights are
as good as any other, and only lose the split where a weight is computed by something else than a change of type.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class DeferredWeightGradients(TorchFunctionMode):
    """Linear maps called inside leave their weights' gradients to ``run``.

    One object serves one microbatch of one stage. It has to be entered around forward, and around backward too, where
    recomputation calls forward again.
    """

    def __init__(self) -> None:
        super().__init__()
        self._noted: list[Callable[[], None]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace a linear map; leave everything else as it is."""
        if func is torch.nn.functional.linear and torch.is_grad_enabled():
            x, weight, bias = _linear_arguments(*args, **(kwargs or {}))
            parameter = _parameter_behind(weight)
            if parameter is not None and not torch.is_autocast_enabled(x.device.type):
                return _Linear.apply(x, weight, bias, parameter, self._noted)
        return func(*args, **(kwargs or {}))

    def run(self) -> None:
        """Compute what was noted down, and add it to the weights' gradients."""
        noted, self._noted[:] = [*self._noted], []
        with torch.no_grad():
            while noted:
                noted.pop(0)()


class _Linear(torch.autograd.Function):
    """x @ weight.T + bias, whose backward only notes the weight's gradient down."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, parameter: Tensor, noted: list) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameter, ctx.noted = parameter, noted
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        (x, weight), parameter = ctx.saved_tensors, ctx.parameter
        ctx.noted.append(lambda: _add_weight_gradient(parameter, gradient, x))
        return (
            gradient @ weight if ctx.needs_input_grad[0] else None,
            None,  # the weight's
            gradient.reshape(-1, gradient.shape[-1]).sum(0) if ctx.needs_input_grad[2] else None,
            None,
            None,
        )


def _add_weight_gradient(parameter: Tensor, gradient: Tensor, x: Tensor) -> None:
    product = (gradient.reshape(-1, gradient.shape[-1]).T @ x.reshape(-1, x.shape[-1])).to(parameter.dtype)
    parameter.grad = product if parameter.grad is None else parameter.grad.add_(product)


def _parameter_behind(weight: Tensor) -> Tensor | None:
    """The leaf whose gradient a weight's is: itself, or what it was cast from; None: neither, or it wants none."""
    if not weight.requires_grad:
        return None
    if weight.is_leaf:
        return weight
    node = weight.grad_fn
    if node is not None and node.name() == "ToCopyBackward0":
        return getattr(node.next_functions[0][0], "variable", None)
    return None


def _linear_arguments(
    input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    return input, weight, bias
