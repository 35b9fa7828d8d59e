"""Split backward: gradients of inputs first (I), gradients of weights later (W).

The previous stage waits only for the gradient of its output. Under :class:`DeferredWeightGradients`, every
``torch.nn.functional.linear`` whose weight requires a gradient becomes an operation whose backward computes the
gradient of the input and records the product for the weight. :meth:`DeferredWeightGradients.run` computes the recorded
products. Nothing is computed twice. Gradients of all other parameters (norms, hyper-connections, embedding) are cheap
and are computed in I.

Reference: Qi et al., arXiv 2401.10241, section 2. Other implementations run one part of the autograd graph in I and
the rest in W. Recording products makes no assumption about the graph, so views, custom functions and tied weights
work. Only a weight that is computed by an operation other than a cast is not split.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from diptych.plans.schedule.messages import PipelineError


class DeferredWeightGradients(TorchFunctionMode):
    """A context in which linear maps defer the gradients of their weights to ``run``.

    Use one object for one microbatch of one stage. Enter it around forward, and also around backward, because
    recomputation replays forward there.
    """

    def __init__(self) -> None:
        super().__init__()
        self._recorded: list[_Product] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace a linear map; run every other function unchanged."""
        if func is torch.nn.functional.linear and torch.is_grad_enabled():
            x, weight, bias = _linear_arguments(*args, **(kwargs or {}))
            parameter = _leaf_of(weight)
            if parameter is not None and _is_deferrable(x, weight, bias, parameter):
                return _Linear.apply(x, weight, bias, parameter, self._recorded)
        return func(*args, **(kwargs or {}))

    def run(self) -> None:
        """Compute the recorded products and add them to the gradients of the weights.

        Raises:
            PipelineError: a factor of a product was changed in place after I.
        """
        recorded = [*self._recorded]
        self._recorded.clear()
        with torch.no_grad():
            while recorded:
                recorded.pop(0).add_to_gradient()


class _Linear(torch.autograd.Function):
    """x @ weight.T + bias, with a backward that records the gradient of the weight instead of computing it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, parameter: Tensor, recorded: list) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameter = parameter
        ctx.recorded = recorded
        # The product of a batch is a view, and autograd forbids in-place changes of a custom function's view.
        return torch.nn.functional.linear(x, weight, bias).data

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        ctx.recorded.append(_Product(ctx.parameter, gradient, x))
        return (
            gradient @ weight if ctx.needs_input_grad[0] else None,
            None,  # run() computes the gradient of the weight
            gradient.reshape(-1, gradient.shape[-1]).sum(0) if ctx.needs_input_grad[2] else None,
            None,
            None,
        )


class _Product:
    """A deferred gradient of a weight: gradient.T @ x.

    Autograd checks the versions of saved tensors in I. This class checks them between I and W.
    """

    def __init__(self, parameter: Tensor, gradient: Tensor, x: Tensor) -> None:
        self._parameter = parameter
        self._factors = (gradient, x)
        self._versions = gradient._version, x._version

    def add_to_gradient(self) -> None:
        """Compute the product and add it to the gradient of the weight.

        Raises:
            PipelineError: a factor was changed in place after I.
        """
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


def _is_deferrable(x: Tensor, weight: Tensor, bias: Tensor | None, parameter: Tensor) -> bool:
    """Return True if the weight gradient of a linear map can be deferred.

    It must be one product of real matrices. Autocast would change dtypes between I and W. Hooks of a weight need the
    gradient, and only autograd calls them.
    """
    hooks = (weight._backward_hooks, parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
    return (
        weight.dim() == 2
        and not weight.is_complex()
        and (bias is None or bias.shape == weight.shape[:1])
        and not any(hooks)
        and not torch.is_autocast_enabled(x.device.type)
    )


def _leaf_of(weight: Tensor) -> Tensor | None:
    """Return the leaf behind a weight, i.e. the weight or the tensor that it was cast from, or None."""
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
    """Return the arguments of torch.nn.functional.linear by position, whether given by position or by name."""
    return input, weight, bias
