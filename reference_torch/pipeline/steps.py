"""Operations of a stage on one microbatch: forward with loss, backward, and release of sent outputs.

Reference: Megatron-core, pipeline_parallel/schedules.py, with the same names and contracts.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from diptych.plans.config import TransformerConfig

Tensors = Tensor | Sequence[Tensor]
Shape = tuple[int, ...]
ForwardStep = Callable[[Any, Any], tuple[Any, Callable[..., Any]]]
"""``forward_step_func(data_iterator, model) -> (output, reducer)``."""


def forward_step(
    forward_step_func: ForwardStep,
    data_iterator: Iterator[Any] | None,
    model: nn.Module,
    num_microbatches: int,
    input_tensor: Tensors | None,
    forward_data_store: list[Any],
    config: TransformerConfig,
    cp_group_size: int = 1,
    collect_non_loss_data: bool = False,
    vp_stage: int | None = None,
    is_last_stage: bool = True,
) -> tuple[Any, Tensor]:
    """Run one microbatch through a stage.

    Args:
        forward_step_func: function of the user that takes the microbatch from the iterator, runs the model, and
            returns the output and the reducer that computes the loss.
        data_iterator: microbatches of this stage; every stage has its own iterator.
        model: the stage; it receives its input by ``set_input_tensor`` unless it is the first.
        num_microbatches: number of microbatches of the step.
        input_tensor: output of the previous stage; None on the first stage.
        forward_data_store: list to which the reports of the last stage are appended.
        config: configuration of the model.
        cp_group_size: number of context ranks that share each sequence; the loss is multiplied by it.
        collect_non_loss_data: the reducer returns data to collect instead of a loss.
        vp_stage: index of the virtual stage within its rank.
        is_last_stage: if True, a loss is computed.

    Returns:
        The output, or on the last stage the loss to differentiate; and the number of tokens that the loss sums over,
        0 if the loss is a mean.

    Raises:
        ValueError: forward_step_func returned something else, or forward_step_calc_loss raised it.
    """
    if input_tensor is not None:
        model.set_input_tensor(input_tensor)  # pyright: ignore[reportCallIssue]
    result = forward_step_func(data_iterator, model)
    if not isinstance(result, tuple) or len(result) != 2 or not callable(result[1]):
        raise ValueError(
            f"forward_step_func: expected (output, reducer), got {_describe(result)}; return the model's output and a "
            "function that computes a loss from it"
        )
    output, reducer = result
    if not is_last_stage:
        return output, torch.zeros((), dtype=torch.int64)
    return forward_step_calc_loss(
        model,
        output,
        reducer,
        config,
        vp_stage,
        collect_non_loss_data,
        num_microbatches,
        forward_data_store,
        cp_group_size,
        is_last_stage,
    )


def forward_step_calc_loss(
    model: nn.Module,
    output_tensor: Any,
    loss_func: Callable[..., Any],
    config: TransformerConfig,
    vp_stage: int | None,
    collect_non_loss_data: bool,
    num_microbatches: int,
    forward_data_store: list[Any],
    cp_group_size: int | None = None,
    is_last_stage: bool | None = None,
) -> tuple[Any, Tensor]:
    """Compute the loss of the last stage and store the report of the reducer.

    Arguments and result are those of forward_step. The reducer ``loss_func`` returns one of

        (loss, report)                 loss is a mean; it is divided by the number of microbatches
        (loss, num_tokens, report)     loss is a sum over num_tokens tokens. With ``calculate_per_token_loss`` it stays
                                       a sum, and the gradients are divided once by the tokens of the whole step.
                                       Otherwise it is divided by both numbers
        anything                       with collect_non_loss_data: called as ``loss_func(output, non_loss_data=True)``

    The report is copied, so that later operations on the loss do not change it.

    Raises:
        ValueError: the reducer returned something else, two values although tokens must be counted, or a loss that is
            not a tensor with one element.
    """
    no_tokens = torch.zeros((), dtype=torch.int64)
    if collect_non_loss_data:
        forward_data_store.append(loss_func(output_tensor, non_loss_data=True))
        return output_tensor, no_tokens
    result = loss_func(output_tensor)
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        raise ValueError(
            "forward_step_func: expected a reducer that returns (loss, report) or (loss, num_tokens, report), got "
            f"{type(result).__name__}{f' of {len(result)}' if isinstance(result, tuple) else ''}; use "
            "collect_non_loss_data=True for anything else"
        )
    if not isinstance(result[0], Tensor) or result[0].numel() != 1:
        raise ValueError(
            f"forward_step_func: expected a reducer whose loss is a tensor of one element, got "
            f"{_describe(result[0])}; return e.g. the mean of the losses"
        )
    forward_data_store.append(_copy_report(result[-1]))
    scale = cp_group_size or 1
    if len(result) == 2:
        if config.calculate_per_token_loss:
            raise ValueError(
                "forward_step_func: expected a reducer that returns (loss, num_tokens, report) with "
                "calculate_per_token_loss, got 2 values"
            )
        return result[0] * (scale / num_microbatches), no_tokens
    loss = result[0]
    num_tokens = torch.as_tensor(result[1])
    if config.calculate_per_token_loss:
        return loss * scale, num_tokens.detach().clone()
    return loss * (scale / num_microbatches) / num_tokens.clamp(min=1), no_tokens


def check_output(output: Any, stage: int, shapes: Sequence[Shape], variable: bool, dtype: torch.dtype) -> None:
    """Check, before anything is sent, that the next stage can receive an output.

    Args:
        output: result of a stage that is not the last.
        stage: number of the stage, for error messages.
        shapes: shapes that the next stage expects.
        variable: if True, messages contain their shapes; only the number of dimensions and the last size are checked.
        dtype: dtype that the next stage expects.

    Raises:
        ValueError: the output has another structure, shape or dtype.
    """
    tensors = [output] if isinstance(output, Tensor) else output
    if not isinstance(tensors, list | tuple) or not all(isinstance(x, Tensor) for x in tensors):
        raise ValueError(
            f"forward_step_func: expected stage {stage} to return a tensor or a list of tensors, got "
            f"{_describe(output)}; return what the next stage reads"
        )
    if len(tensors) != len(shapes):
        raise ValueError(
            f"forward_step_func: expected stage {stage} to return {len(shapes)} tensors, got {len(tensors)}; return as "
            "many as the next stage receives, or change the shapes with adjust_tensor_shapes_fn"
        )
    for index, tensor in enumerate(tensors):
        if tensor.layout != torch.strided or tensor.dtype != dtype:
            raise ValueError(
                f"forward_step_func: expected stage {stage} to return {str(dtype).removeprefix('torch.')}, got "
                f"{_describe(tensor)}; stages exchange what the model computes in: cast the output"
            )
        expected = tuple(shapes[index])
        if variable and tensor.dim() == len(expected) and tensor.shape[-1] == expected[-1]:
            continue
        if tensor.shape != expected:
            raise ValueError(
                f"forward_step_func: expected stage {stage} to return a tensor of shape {[*expected]}, which the "
                f"next stage receives, got {[*tensor.shape]}; return that shape, give the right seq_length and "
                "micro_batch_size, or set variable_seq_lengths where only the length differs"
            )


def check_requires_grad(
    outputs: Sequence[Tensor], received: Sequence[Tensor], model: nn.Module, stage: int, last: bool
) -> None:
    """Check that an output or a loss is not detached from trainable inputs.

    Args:
        outputs: outputs of a stage, or the loss of the last stage.
        received: tensors that the stage received and that require gradients.
        model: the stage.
        stage: number of the stage, for error messages.
        last: if True, it is the last stage.

    Raises:
        ValueError: the output requires no gradient, although the input or a parameter does.
    """
    if any(x.requires_grad for x in outputs):
        return
    if received or any(parameter.requires_grad for parameter in model.parameters()):
        subject = "loss" if last else "output"
        raise ValueError(
            f"{subject} of stage {stage}: expected a tensor that requires a gradient, got a detached one, which leaves "
            "nothing before it a gradient; drop detach() or torch.no_grad(), or freeze what is not to be trained"
        )


def backward_step(
    input_tensor: Tensors | None,
    output_tensor: Tensors,
    output_tensor_grad: Tensors | None,
    model_type: object = None,
    config: TransformerConfig | None = None,
) -> Any:
    """Run the backward of a stage for one microbatch and accumulate the gradients of parameters.

    Args:
        input_tensor: input of the stage; None on the first stage.
        output_tensor: output of the stage, deallocated or not; the loss on the last stage.
        output_tensor_grad: gradient from the next stage; None on the last stage.
        model_type: ignored; callers of Megatron-core pass it.
        config: ignored; callers of Megatron-core pass it.

    Returns:
        The gradient of input_tensor, with the same structure (a tensor or a list); None on the first stage.
    """
    custom_backward(output_tensor, output_tensor_grad)
    if input_tensor is None:
        return None
    gradients = [gradient_of_received(x) for x in as_list(input_tensor)]
    return gradients[0] if isinstance(input_tensor, Tensor) else gradients


def gradient_of_received(received: Tensor) -> Tensor:
    """Return the gradient of a tensor that a stage received; zeros if no output depends on it.

    Raises:
        ValueError: the tensor has become the result of an operation, and what backward computes is another gradient.
    """
    if received.grad_fn is not None:
        raise ValueError(
            f"input_tensor: expected a tensor that a stage received, {[*received.shape]}, to stay a leaf, got the "
            f"result of {received.grad_fn.name()}; let the torch.autograd.Function that returns it take it as an "
            "argument, or return a new tensor"
        )
    return torch.zeros_like(received) if received.grad is None else received.grad


def custom_backward(output: Tensors, grad_output: Tensors | None) -> None:
    """Run backward from outputs that may be deallocated.

    ``torch.autograd.backward`` compares the shape of each gradient with its tensor, and a deallocated tensor has lost
    its shape. The autograd engine only needs the node of the tensor.

    Args:
        output: one tensor or several; those that require no gradient are skipped.
        grad_output: one gradient for each output; None: the outputs are scalars with gradient 1.

    Raises:
        ValueError: the numbers of outputs and gradients differ, or an output without gradient is not a scalar.
    """
    outputs = as_list(output)
    gradients = [None] * len(outputs) if grad_output is None else as_list(grad_output)
    if len(gradients) != len(outputs):
        raise ValueError(f"grad_output: expected {len(outputs)} gradients, one per output, got {len(gradients)}")
    roots = []
    seeds = []
    for root, seed in zip(outputs, gradients, strict=True):
        if not root.requires_grad:
            continue
        if seed is None and root.numel() != 1:
            raise ValueError(f"grad_output: expected a gradient for an output of shape {[*root.shape]}, got None")
        roots.append(root)
        seeds.append(torch.ones_like(root, memory_format=torch.preserve_format) if seed is None else seed)
    if roots:
        Variable._execution_engine.run_backward(  # pyright: ignore[reportAttributeAccessIssue]
            tuple(roots), tuple(seeds), False, False, (), allow_unreachable=True, accumulate_grad=True
        )


def deallocate_output_tensor(out: Any, deallocate_pipeline_outputs: bool = False) -> None:
    """Release the memory of sent outputs and keep their graph nodes, from which backward starts.

    Operations have saved all tensors that backward reads, so the elements of the output are not needed.

    Args:
        out: a tensor, or a list or dict of tensors; None does nothing.
        deallocate_pipeline_outputs: False does nothing.

    Raises:
        ValueError: a tensor is a view, whose memory belongs to another tensor.
    """
    if out is None or not deallocate_pipeline_outputs:
        return
    for tensor in out.values() if isinstance(out, dict) else as_list(out):
        if not isinstance(tensor, Tensor):
            continue
        if tensor._base is not None:
            raise ValueError(
                f"out: expected tensors that own their memory, got a view of shape {[*tensor.shape]} of another of "
                f"shape {[*tensor._base.shape]}, whose bytes would stay; send a copy (own_memory)"
            )
        tensor.data = torch.empty((1,), device=tensor.device, dtype=tensor.dtype)


def own_memory(out: Any) -> Any:
    """Copy the tensors of an output whose memory has other users, so that it can be deallocated once sent.

    These are views, and all tensors of an output with several, because one operation may have saved the result of
    another.

    Args:
        out: a tensor or a list of tensors.
    """
    if isinstance(out, Tensor):
        return out.clone() if out._base is not None else out
    return [tensor.clone() for tensor in out] if len(out) > 1 else [own_memory(tensor) for tensor in out]


def as_list(tensors: Tensors) -> list[Tensor]:
    """Return one tensor or several as a list."""
    return [tensors] if isinstance(tensors, Tensor) else [*tensors]


def _describe(value: Any) -> str:
    """Describe a value for an error message."""
    if isinstance(value, Tensor):
        layout = "" if value.layout == torch.strided else f" {str(value.layout).removeprefix('torch.')}"
        return f"a{layout} tensor {[*value.shape]} of {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {', '.join(map(_describe, value[:4])) or 'nothing'}"
    return "None" if value is None else f"a {type(value).__name__}"


def _copy_report(report: Any) -> Any:
    """Return a report with every tensor copied and detached."""
    if isinstance(report, Tensor):
        return report.detach().clone()
    if isinstance(report, dict):
        return {name: _copy_report(value) for name, value in report.items()}
    if isinstance(report, list | tuple):
        copies = [_copy_report(value) for value in report]
        return type(report)(*copies) if hasattr(report, "_fields") else type(report)(copies)
    return report
