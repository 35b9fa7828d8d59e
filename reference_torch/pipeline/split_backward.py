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

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from diptych.plans.schedule.messages import PipelineError


class DeferredWeightGradients(TorchFunctionMode):
    """Linear maps called inside leave their weights' gradients to ``run``.

    One object serves one microbatch of one stage. It has to be entered around forward, and around backward too, where
    recomputation calls forward again.
    """

    def __init__(self) -> None:
        super().__init__()
        self._noted: list[_Product] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace a linear map; leave everything else as it is."""
        if func is torch.nn.functional.linear and torch.is_grad_enabled():
            x, weight, bias = _linear_arguments(*args, **(kwargs or {}))
            parameter = _parameter_behind(weight)
            if parameter is not None and _can_wait(x, weight, bias, parameter):
                return _Linear.apply(x, weight, bias, parameter, self._noted)
        return func(*args, **(kwargs or {}))

    def run(self) -> None:
        """Compute what was noted down, and add it to the weights' gradients.

        Raises:
            PipelineError: a factor of a product was changed in place after I, which would make it wrong.
        """
        noted, self._noted[:] = [*self._noted], []
        with torch.no_grad():
            while noted:
                noted.pop(0).add_to_gradient()


class _Linear(torch.autograd.Function):
    """x @ weight.T + bias, whose backward only notes the weight's gradient down."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, parameter: Tensor, noted: list) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameter, ctx.noted = parameter, noted
        # The product of a batch is a view, which nobody could change in place behind a function of one's own.
        return torch.nn.functional.linear(x, weight, bias).data

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        (x, weight), parameter = ctx.saved_tensors, ctx.parameter
        ctx.noted.append(_Product(parameter, gradient, x))
        return (
            gradient @ weight if ctx.needs_input_grad[0] else None,
            None,  # the weight's
            gradient.reshape(-1, gradient.shape[-1]).sum(0) if ctx.needs_input_grad[2] else None,
            None,
            None,
        )


class _Product:
    """A weight's gradient that is still to be computed: gradient.T @ x.

    Autograd compares versions where it hands a saved tensor out, which it did in I; from there on that is done here.
    """

    def __init__(self, parameter: Tensor, gradient: Tensor, x: Tensor) -> None:
        self._parameter, self._factors = parameter, (gradient, x)
        self._versions = gradient._version, x._version

    def add_to_gradient(self) -> None:
        gradient, x = self._factors
        for name, factor, version in zip(
            ("gradient of the output", "input"), self._factors, self._versions, strict=True
        ):
            if factor._version != version:
                raise PipelineError(
                    f"expected the {name} of a linear map, {[*factor.shape]}, unchanged from I to W, got one that was "
                    "changed in place in between, when other microbatches ran; yield new tensors from the data "
                    "iterator, and do not write into buffers that forward has read"
                )
        product = (gradient.reshape(-1, gradient.shape[-1]).T @ x.reshape(-1, x.shape[-1])).to(self._parameter.dtype)
        parameter = self._parameter
        parameter.grad = product if parameter.grad is None else parameter.grad.add_(product)


def _can_wait(x: Tensor, weight: Tensor, bias: Tensor | None, parameter: Tensor) -> bool:
    """Whether a linear map's weight gradient may come later: it is one real product, and nobody asks to see it.

    Autocast would choose another type in between. Hooks on a weight change its gradient or wait for it, and only
    autograd calls them.
    """
    hooks = (weight._backward_hooks, parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
    return (
        weight.dim() == 2
        and not weight.is_complex()
        and (bias is None or bias.shape == weight.shape[:1])
        and not any(hooks)
        and not torch.is_autocast_enabled(x.device.type)
    )


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
