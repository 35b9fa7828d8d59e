"""Split backward: gradients of inputs first (I), gradients of weights later (W).

The previous stage waits only for the gradient of its output. Under :class:`DeferredWeightGradients`, every linear
layer, matrix product and convolution whose weight requires a gradient becomes an operation whose backward computes the
gradient of the input and records the factors of the gradient of the weight. :meth:`DeferredWeightGradients.run`
computes the recorded gradients. Nothing is computed twice. Gradients of all other parameters (norms, hyper-connections,
embedding) are cheap and are computed in I. Those of a compiled module are too: it is one operation of autograd.

Reference: Qi et al., arXiv 2401.10241, section 2. Other implementations run one part of the autograd graph in I and
the rest in W. Recording products makes no assumption about the graph, so views, custom functions and tied weights
work. Only a weight that is computed by an operation other than a cast is not split.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from diptych.plans.fp8 import ProductRecipe
from diptych.plans.schedule.messages import PipelineError
from reference_torch.activation_storage import PackedProducts, packed_linear
from reference_torch.autograd import gradient_dtype
from reference_torch.fp8 import ALONE, Fp8Products, SharingRanks, fp8_linear
from reference_torch.offload.writes import UseHook


class DeferredWeightGradients(TorchFunctionMode):
    """A context in which linear layers and convolutions defer the gradients of their weights to ``run``.

    Use one object for one microbatch of one stage. Enter it once around forward, then once around backward, because
    recomputation replays forward there, and because a gradient that forward itself computes is not deferred.
    """

    def __init__(self) -> None:
        super().__init__()
        self._recorded: list[_Recorded] = []
        self._entered = 0

    def __enter__(self) -> Any:
        self._entered += 1
        return super().__enter__()

    @property
    def in_backward(self) -> bool:
        """True once the context was entered for backward."""
        return self._entered > 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace a linear layer or convolution; run every other function unchanged."""
        read = _READERS.get(func)
        if read is not None and _may_defer():
            operation = _read(read, args, kwargs or {})
            if operation is not None:
                x, weight, bias, kind, saved = operation
                device = x.device.type
                if torch.is_autocast_enabled(device) and func not in (fp8_linear, packed_linear):
                    dtype = torch.get_autocast_dtype(device)
                    x, weight, bias = (_autocast(tensor, dtype) for tensor in (x, weight, bias))
                parameter = _leaf_of(weight)
                if parameter is not None and _is_deferrable(weight, parameter):
                    with torch.autocast(device, enabled=False):
                        return _Deferred.apply(x, weight, bias, parameter, self, kind, x if saved is None else saved)
        return func(*args, **(kwargs or {}))

    def record(self, gradient: "_Recorded") -> None:
        """Add a gradient for ``run``."""
        self._recorded.append(gradient)

    def run(self) -> None:
        """Compute the recorded gradients and add them to those of the weights.

        Raises:
            PipelineError: a factor of a gradient was changed in place after I.
        """
        recorded = [*self._recorded]
        self._recorded.clear()
        with torch.no_grad():
            while recorded:
                recorded.pop(0).add_to_gradient()


class _Deferred(torch.autograd.Function):
    """A linear layer or convolution whose backward records the gradient of the weight instead of computing it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        parameter: Tensor,
        deferred: Any,
        kind: Any,
        saved: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(saved, weight)
        ctx.parameter = parameter
        ctx.deferred = deferred
        ctx.kind = kind
        # The product of a batch is a view, and autograd forbids in-place changes of a custom function's view.
        return kind.forward(x, weight, bias).data

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        d_weight = None  # run() computes it
        if ctx.deferred.in_backward:
            ctx.deferred.record(_Recorded(ctx.parameter, gradient, x, ctx.kind))
        elif ctx.needs_input_grad[1]:
            d_weight = ctx.kind.weight_gradient(x, weight, gradient)
        return (
            ctx.kind.input_gradient(x, weight, gradient) if ctx.needs_input_grad[0] else None,
            d_weight,
            ctx.kind.bias_gradient(gradient) if ctx.needs_input_grad[2] else None,
            None,
            None,
            None,
            None,
        )


class _Linear:
    """x @ weight.T + bias."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x, weight, bias)

    def input_gradient(self, x: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
        return gradient @ weight

    def weight_gradient(self, x: Tensor, parameter: Tensor, gradient: Tensor) -> Tensor:
        return _rows(gradient).T @ _rows(x)

    def bias_gradient(self, gradient: Tensor) -> Tensor:
        return _rows(gradient).sum(0)


class _Product(_Linear):
    """x @ weight + bias."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return x @ weight if bias is None else torch.addmm(bias, x, weight)

    def input_gradient(self, x: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
        return gradient @ weight.T

    def weight_gradient(self, x: Tensor, parameter: Tensor, gradient: Tensor) -> Tensor:
        return _rows(x).T @ _rows(gradient)


@dataclass(frozen=True)
class _Convolution:
    """A convolution of a batch."""

    apply: Callable[..., Tensor]
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.apply(x, weight, bias, self.stride, self.padding, self.dilation, self.groups)

    def input_gradient(self, x: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
        return self._gradients(gradient, x, weight, [True, False, False])[0]

    def weight_gradient(self, x: Tensor, parameter: Tensor, gradient: Tensor) -> Tensor:
        return self._gradients(gradient, x, torch.empty_like(parameter, dtype=x.dtype), [False, True, False])[1]

    def bias_gradient(self, gradient: Tensor) -> Tensor:
        return gradient.sum([0, *range(2, gradient.dim())])

    def _gradients(self, gradient: Tensor, x: Tensor, weight: Tensor, wanted: list[bool]) -> Any:
        no_output_padding = [0] * len(self.stride)
        sizes = (None, self.stride, self.padding, self.dilation, False, no_output_padding, self.groups, wanted)
        return torch.ops.aten.convolution_backward(gradient, x, weight, *sizes)


class _Recorded:
    """A deferred gradient of a weight.

    Autograd checks the versions of saved tensors in I. This class checks them between I and W.
    """

    def __init__(self, parameter: Tensor, gradient: Tensor, x: Tensor, kind: Any) -> None:
        self._parameter = parameter
        self._dtype = gradient_dtype(parameter)  # known in I, when offload has the parameter here; W needs no fetch
        self._factors = (gradient, x)
        self._versions = gradient._version, x._version
        self._kind = kind

    def add_to_gradient(self) -> None:
        """Compute the gradient and add it to that of the weight.

        Raises:
            PipelineError: a factor was changed in place after I.
        """
        gradient, x = self._factors
        for name, factor, version in zip(
            ("gradient of the output", "input"), self._factors, self._versions, strict=True
        ):
            if factor._version != version:
                raise PipelineError(
                    f"expected the {name} of a linear layer, {[*factor.shape]}, unchanged from I to W, got one that "
                    "was changed in place in between, when other microbatches ran; yield new tensors from the data "
                    "iterator, and do not write into buffers that forward has read"
                )
        parameter = self._parameter
        product = self._kind.weight_gradient(x, parameter, gradient).to(self._dtype)
        parameter.grad = product if parameter.grad is None else parameter.grad.add_(product)


_Operation = tuple[Tensor, Tensor, Tensor | None, Any, Tensor | None] | None
"""Input, weight, bias and kind of an operation, and what it saves instead of its input, if anything; None: its weight
gradient is not one of the known kinds."""


def _read(read: Callable[..., _Operation], args: tuple, kwargs: dict[str, Any]) -> _Operation:
    """Return the operation that a reader finds; None if the function has an argument that it does not know."""
    try:
        return read(*args, **kwargs)
    except TypeError:  # such as out, out_dtype, or what the function itself refuses
        return None


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> _Operation:
    fits = weight.dim() == 2 and (bias is None or bias.shape == weight.shape[:1])
    return (input, weight, bias, _Linear(), None) if fits else None


def _matmul(input: Tensor, other: Any = None, mat2: Any = None) -> _Operation:
    weight = mat2 if other is None else other
    if other is not None and mat2 is not None:  # out_dtype by position
        return None
    fits = isinstance(weight, Tensor) and weight.dim() == 2 and input.dim() >= 2
    return (input, weight, None, _Product(), None) if fits else None


def _addmm(input: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1) -> _Operation:
    fits = (beta, alpha) == (1, 1) and mat2.dim() == 2 and input.shape == mat2.shape[1:]
    return (mat1, mat2, input, _Product(), None) if fits else None


def _convolution(apply: Callable[..., Tensor], dimensions: int) -> Callable[..., _Operation]:
    """Return the reader of a convolution over a number of dimensions."""

    def read(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> _Operation:
        if isinstance(padding, str) or input.dim() != dimensions + 2:
            return None
        sizes = ([each] * dimensions if isinstance(each, int) else [*each] for each in (stride, padding, dilation))
        full = [each * dimensions if len(each) == 1 else each for each in sizes]
        return input, weight, bias, _Convolution(apply, full[0], full[1], full[2], groups), None

    return read


def _fp8_linear(
    x: Tensor, weight: Tensor, recipe: ProductRecipe, scales: Tensor | None = None, ranks: SharingRanks = ALONE
) -> _Operation:
    return x, weight, None, Fp8Products(recipe, weight.dtype, scales, ranks), None


def _packed_linear(x: Tensor, weight: Tensor, packed: Tensor | None, products: Any) -> _Operation:
    return x, weight, None, PackedProducts(products), packed


_READERS: dict[Any, Callable[..., _Operation]] = {
    functional.linear: _linear,
    fp8_linear: _fp8_linear,
    packed_linear: _packed_linear,
    torch.addmm: _addmm,
    Tensor.addmm: _addmm,
    **dict.fromkeys((torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__), _matmul),
    functional.conv1d: _convolution(functional.conv1d, 1),
    functional.conv2d: _convolution(functional.conv2d, 2),
    functional.conv3d: _convolution(functional.conv3d, 3),
}
"""Functions whose weight gradients can be deferred, with what reads their arguments."""


def _may_defer() -> bool:
    """Return True if autograd computes gradients, and neither a compiler nor a transform such as vmap does."""
    is_transformed = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    return torch.is_grad_enabled() and not is_transformed


def _is_deferrable(weight: Tensor, parameter: Tensor) -> bool:
    """Return True if the gradient of a weight can be deferred.

    The weight must be real and have no hook that needs its gradient, because only autograd calls hooks. The hooks that
    note the use of an offloaded layer do not need it. Those of offloaded gradients do: they fetch the gradient before
    backward adds to it.
    """
    if not isinstance(parameter, torch.nn.Parameter):  # a weight from another stage, whose gradient is sent back
        return False
    hooks = (weight._backward_hooks, parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
    others = [hook for each in hooks if each for hook in each.values() if not isinstance(hook, UseHook)]
    return not weight.is_complex() and not others


def _autocast(tensor: Tensor | None, dtype: torch.dtype) -> Any:
    """Return a tensor as autocast passes it to a product."""
    if tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


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
