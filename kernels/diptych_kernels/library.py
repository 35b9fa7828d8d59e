"""The operations in torch.library, so that compiled models and fake tensors contain them as single nodes.

Each operation of autodiff_rules is ``diptych::NAME``, with a backward ``diptych::NAME_backward``. Both take a list of
tensors and the static arguments as text. ``diptych::NAME`` returns the outputs, followed by what it saves for backward
besides its inputs. Fake implementations ask the launches for the shapes of their outputs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from diptych_kernels import autodiff_rules, tuning
from diptych_kernels.autodiff_rules import Operation
from diptych_kernels.delta_rule.autodiff_rules import DELTA_RULE, DeltaRule
from diptych_kernels.launch_configs import Launch, MappingOptions, Write

NAMESPACE = "diptych"
OPERATIONS = (
    autodiff_rules.SINKHORN,
    autodiff_rules.COMPUTE_MAPPINGS,
    autodiff_rules.AGGREGATE,
    autodiff_rules.READ,
    autodiff_rules.WRITE,
    autodiff_rules.SWIGLU,
    autodiff_rules.GELU,
    DELTA_RULE,
)
_REGISTERED: set[str] = set()
_STATIC = {kind.__name__: kind for kind in (MappingOptions, Write, DeltaRule)}


class _Shapes:
    """A backend that launches nothing and returns empty tensors of the right shapes."""

    def __call__(self, build: Callable[..., Launch], sizes: dict[str, Any], *inputs: Tensor) -> tuple[Tensor, ...]:
        launch = build(tuning.first(build), **sizes)
        device = inputs[0].device
        return tuple(torch.empty(shape, dtype=getattr(torch, dtype), device=device) for shape, dtype in launch.outputs)

    def cast(self, x: Tensor, dtype: str) -> Tensor:
        """Cast x to another type."""
        return x.to(getattr(torch, dtype))


def is_registered(operation: Operation, static: Any) -> bool:
    """Return True if an operation is registered and ``static`` can be written as text, which excludes an exchange."""
    return operation.name in _REGISTERED and getattr(static, "exchange", None) is None


def text_of(static: Any) -> str:
    """Return static arguments as text, by operations that the compiler evaluates while it traces."""
    return "None" if static is None else f"{type(static).__name__}({', '.join([repr(value) for value in static])})"


def _static_of(text: str) -> Any:
    """Return the static arguments of a text."""
    return eval(text, {"__builtins__": {}}, _STATIC)


def apply(operation: Operation, static: Any, *inputs: Tensor | None) -> tuple[Tensor, ...]:
    """Return the outputs of an operation as one node of the graph."""
    given = [x is not None for x in inputs]
    tensors = [x for x in inputs if x is not None]
    results = getattr(torch.ops.diptych, operation.name)(tensors, given, text_of(static))
    return tuple(results[: operation.num_outputs])


def register(operation: Operation, backend: Any) -> None:
    """Register an operation and its backward.

    Both take the inputs that are given, in order, and for each input whether it is given, because the autograd of
    torch.library does not see tensors in a list that contains None.

    Args:
        operation: the operation.
        backend: launches kernels for tensors.
    """
    name = operation.name
    num_outputs = operation.num_outputs

    def forward_with(backend: Any, tensors: Sequence[Tensor], given: Sequence[bool], static: str) -> list[Tensor]:
        inputs = _with_missing(tensors, given)
        outputs, saved = operation.forward(backend, _static_of(static), *inputs)
        assert len(outputs) == num_outputs, f"{name}: {len(outputs)} outputs"
        additional = [x for x in saved if x is not None and all(x is not tensor for tensor in tensors)]
        return _own([*outputs, *additional], tensors)

    def backward_with(
        backend: Any,
        tensors: Sequence[Tensor],
        given: Sequence[bool],
        additional: Sequence[Tensor],
        grads: Sequence[Tensor],
        static: str,
    ) -> list[Tensor]:
        inputs = _with_missing(tensors, given)
        saved = _saved(operation, static, inputs, additional)
        gradients = operation.backward(backend, _static_of(static), saved, *grads)
        differentiable = [g for g, x in zip(gradients, inputs, strict=True) if _has_gradient(x)]
        return _own(differentiable, [*tensors, *additional, *grads])

    @torch.library.custom_op(f"{NAMESPACE}::{name}", mutates_args=())
    def forward(tensors: list[Tensor], given: list[bool], static: str) -> list[Tensor]:
        return forward_with(backend, tensors, given, static)

    @forward.register_fake
    def _(tensors: list[Tensor], given: list[bool], static: str) -> list[Tensor]:
        return forward_with(_Shapes(), tensors, given, static)

    @torch.library.custom_op(f"{NAMESPACE}::{name}_backward", mutates_args=())
    def backward(
        tensors: list[Tensor], given: list[bool], additional: list[Tensor], grads: list[Tensor], static: str
    ) -> list[Tensor]:
        return backward_with(backend, tensors, given, additional, grads, static)

    @backward.register_fake
    def _(
        tensors: list[Tensor], given: list[bool], additional: list[Tensor], grads: list[Tensor], static: str
    ) -> list[Tensor]:
        return backward_with(_Shapes(), tensors, given, additional, grads, static)

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        tensors, ctx.given, ctx.static = inputs
        ctx.num_tensors = len(tensors)
        ctx.outputs = [(x.shape, x.dtype, x.device) for x in output[:num_outputs]]
        ctx.save_for_backward(*tensors, *output[num_outputs:])

    def differentiate(ctx: Any, grads: Any) -> Any:
        tensors = ctx.saved_tensors[: ctx.num_tensors]
        additional = ctx.saved_tensors[ctx.num_tensors :]
        own = [
            torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad
            for grad, (shape, dtype, device) in zip(grads[:num_outputs], ctx.outputs, strict=True)
        ]
        found = iter(backward([*tensors], ctx.given, [*additional], own, ctx.static))
        return [next(found) if _has_gradient(x) else None for x in tensors], None, None

    forward.register_autograd(differentiate, setup_context=setup_context)
    _REGISTERED.add(name)


def _with_missing(tensors: Sequence[Tensor], given: Sequence[bool]) -> list[Tensor | None]:
    """Return the inputs of an operation, with None for missing ones."""
    rest = iter(tensors)
    return [next(rest) if is_given else None for is_given in given]


def _has_gradient(x: Tensor | None) -> bool:
    """Return True for inputs that have a gradient: all but whole numbers and missing ones."""
    return x is not None and x.is_floating_point()


def _own(results: Sequence[Tensor], arguments: Sequence[Tensor | None]) -> list[Tensor]:
    """Return results that share no memory with arguments or with each other, as torch.library demands."""
    used = {x.untyped_storage()._cdata for x in arguments if x is not None}
    own = []
    for result in results:
        address = result.untyped_storage()._cdata
        own.append(result.clone() if address in used else result)
        used.add(address)
    return own


def _saved(
    operation: Operation, static: str, inputs: Sequence[Tensor | None], additional: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Return what an operation saves, from its inputs and the additional results of its forward."""
    shapes = [None if x is None else torch.empty(x.shape, dtype=x.dtype, device="meta") for x in inputs]
    rest = iter(additional)
    result = []
    for saved in operation.forward(_Shapes(), _static_of(static), *shapes)[1]:
        index = next((i for i, shape in enumerate(shapes) if shape is saved), None)
        if saved is None:
            result.append(None)
        else:
            result.append(next(rest) if index is None else inputs[index])
    return tuple(result)
