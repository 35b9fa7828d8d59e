"""What a stage does with one microbatch: forward with its loss, backward, and freeing what was sent.

Reference: Megatron-core, pipeline_parallel/schedules.py, whose names and contracts stand here.
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
        forward_step_func: the user's: takes the microbatch from the iterator, runs the model, and returns its output
            and what makes a loss of it.
        data_iterator: of this stage; every stage takes its microbatches from its own.
        model: the stage; gets its input by ``set_input_tensor`` where it is not the first.
        num_microbatches: of the step.
        input_tensor: from the stage before; None on the first.
        forward_data_store: what the last stage reports is appended.
        config: the model's.
        cp_group_size: ranks that share each sequence.
        collect_non_loss_data: the reducer gives no loss, but anything to be collected.
        vp_stage: of the model within its rank.
        is_last_stage: whether there is a loss.

    Returns:
        The output, on the last stage the loss to be differentiated; the tokens it is a sum over, 0 where it is a mean.

    Raises:
        ValueError: forward_step_func returned something else; or see forward_step_calc_loss.
    """
    if input_tensor is not None:
        model.set_input_tensor(input_tensor)  # pyright: ignore[reportCallIssue]
    result = forward_step_func(data_iterator, model)
    if not isinstance(result, tuple) or len(result) != 2 or not callable(result[1]):
        raise ValueError(
            f"forward_step_func: expected (output, reducer), got {_described(result)}; return the model's output and a "
            "function that makes a loss of it"
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
    """Make the loss of the last stage, and report what the reducer says.

    The reducer returns one of

        (loss, report)                 loss a mean; divided by the number of microbatches
        (loss, num_tokens, report)     loss a sum over so many tokens; with ``calculate_per_token_loss`` it stays one,
                                       and gradients are divided once by the tokens of the whole step; without, it
                                       is divided by both numbers
        anything                       with collect_non_loss_data: called as ``loss_func(output, non_loss_data=True)``

    What is reported is copied, so that nothing done to the loss later changes it.

    Raises:
        ValueError: the reducer returned something else, two values where tokens are to be counted, or a loss that is
            no tensor of one element.
    """
    none = torch.zeros((), dtype=torch.int64)
    if collect_non_loss_data:
        forward_data_store.append(loss_func(output_tensor, non_loss_data=True))
        return output_tensor, none
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
            f"{_described(result[0])}; return e.g. the mean of the losses"
        )
    forward_data_store.append(_copied(result[-1]))
    scale = cp_group_size or 1
    if len(result) == 2:
        if config.calculate_per_token_loss:
            raise ValueError(
                "forward_step_func: expected a reducer that returns (loss, num_tokens, report) with "
                "calculate_per_token_loss, got 2 values"
            )
        return result[0] * (scale / num_microbatches), none
    loss, tokens = result[0], torch.as_tensor(result[1])
    if config.calculate_per_token_loss:
        return loss * scale, tokens.detach().clone()
    return loss * (scale / num_microbatches) / tokens.clamp(min=1), none


def check_output(output: Any, stage: int, shapes: Sequence[Shape], variable: bool, dtype: torch.dtype) -> None:
    """Refuse an output that the next stage could not receive, before anything is sent.

    Args:
        output: what a stage before the last returned.
        stage: its number, for the error.
        shapes: of the tensors that the next stage expects.
        variable: whether messages announce their shapes; then only the number of dimensions and the last are checked.
        dtype: of the tensors.

    Raises:
        ValueError: it is something else.
    """
    tensors = [output] if isinstance(output, Tensor) else output
    if not isinstance(tensors, list | tuple) or not all(isinstance(x, Tensor) for x in tensors):
        raise ValueError(
            f"forward_step_func: expected stage {stage} to return a tensor or a list of tensors, got "
            f"{_described(output)}; return what the next stage reads"
        )
    if len(tensors) != len(shapes):
        raise ValueError(
            f"forward_step_func: expected stage {stage} to return {len(shapes)} tensors, got {len(tensors)}; return as "
            "many as the next stage receives, or say otherwise by adjust_tensor_shapes_fn"
        )
    for place, tensor in enumerate(tensors):
        if tensor.layout != torch.strided or tensor.dtype != dtype:
            raise ValueError(
                f"forward_step_func: expected stage {stage} to return {str(dtype).removeprefix('torch.')}, got "
                f"{_described(tensor)}; stages exchange what the model computes in: cast the output"
            )
        expected = tuple(shapes[place])
        if variable and tensor.dim() == len(expected) and tensor.shape[-1] == expected[-1]:
            continue
        if tensor.shape != expected:
            raise ValueError(
                f"forward_step_func: expected stage {stage} to return a tensor of shape {[*expected]}, which the "
                f"next stage receives, got {[*tensor.shape]}; return that shape, give the right seq_length and "
                "micro_batch_size, or set variable_seq_lengths where only the length differs"
            )


def check_learns(output: Tensors, entered: Sequence[Tensor] | None, model: nn.Module, stage: int, last: bool) -> None:
    """Refuse an output, or a loss, that cuts off the gradient of everything before it.

    Args:
        output: of a stage, or of the last stage the loss.
        entered: what the stage received; None on the first.
        model: the stage.
        stage: its number, for the error.
        last: whether it is the last.

    Raises:
        ValueError: nothing of it requires a gradient, but something before it does.
    """
    if any(x.requires_grad for x in listed(output)):
        return
    if entered is not None or any(parameter.requires_grad for parameter in model.parameters()):
        what = "a loss" if last else "an output"
        raise ValueError(
            f"forward_step_func: expected {what} of stage {stage} that requires a gradient, got a detached one, which "
            "leaves nothing before it a gradient; drop detach() or torch.no_grad(), or freeze what is not to be trained"
        )


def backward_step(
    input_tensor: Tensors | None,
    output_tensor: Tensors,
    output_tensor_grad: Tensors | None,
    model_type: object = None,
    config: TransformerConfig | None = None,
) -> Any:
    """Run one microbatch back through a stage; parameters' gradients are added up.

    Args:
        input_tensor: what the stage read; None on the first stage.
        output_tensor: what it gave, freed or not; on the last stage the loss.
        output_tensor_grad: from the stage after; None on the last.
        model_type, config: of no effect; Megatron-core's callers pass them.

    Returns:
        The gradient of input_tensor, of the same kind (a tensor or a list); None on the first stage.
    """
    custom_backward(output_tensor, output_tensor_grad)
    if input_tensor is None:
        return None
    gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in listed(input_tensor)]
    return gradients[0] if isinstance(input_tensor, Tensor) else gradients


def custom_backward(output: Tensors, grad_output: Tensors | None) -> None:
    """Backward from outputs that may have been freed.

    ``torch.autograd.backward`` compares each gradient with the tensor it belongs to, whose memory and with it whose
    shape is gone; the engine below it only needs the node that made the tensor.

    Args:
        output: one tensor or several; those that want no gradient are left out.
        grad_output: as many gradients; None: the outputs are scalars, each with gradient 1.

    Raises:
        ValueError: counts differ, or an output without gradient is no scalar.
    """
    outputs = listed(output)
    gradients = [None] * len(outputs) if grad_output is None else listed(grad_output)
    if len(gradients) != len(outputs):
        raise ValueError(f"grad_output: expected {len(outputs)} gradients, one an output, got {len(gradients)}")
    roots, seeds = [], []
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
    """Free what a stage has sent: its bytes go, the node that made it stays, and backward can start there.

    Whatever backward reads was saved by the operations that read it, so the output's own bytes are of no more use.

    Args:
        out: a tensor, or a list or dict of tensors; None does nothing.
        deallocate_pipeline_outputs: False does nothing.

    Raises:
        ValueError: a tensor is a view: its bytes belong to another tensor, and would stay.
    """
    if out is None or not deallocate_pipeline_outputs:
        return
    for tensor in out.values() if isinstance(out, dict) else listed(out):
        if not isinstance(tensor, Tensor):
            continue
        if tensor._base is not None:
            raise ValueError(
                f"out: expected tensors that own their memory, got a view of shape {[*tensor.shape]} of another of "
                f"shape {[*tensor._base.shape]}, whose bytes would stay; send a copy (own_memory)"
            )
        tensor.data = torch.empty((1,), device=tensor.device, dtype=tensor.dtype)


def own_memory(out: Any) -> Any:
    """A stage's output, with a copy in place of whatever has other users, so that sending can free it.

    Those are views; and of several tensors all, since what made one of them may have saved another.
    """
    if isinstance(out, Tensor):
        return out.clone() if out._base is not None else out
    return [tensor.clone() for tensor in out] if len(out) > 1 else [own_memory(tensor) for tensor in out]


def listed(tensors: Tensors) -> list[Tensor]:
    """One tensor or several, as a list."""
    return [tensors] if isinstance(tensors, Tensor) else [*tensors]


def _described(value: Any) -> str:
    """What a value is, for an error."""
    if isinstance(value, Tensor):
        layout = "" if value.layout == torch.strided else f" {str(value.layout).removeprefix('torch.')}"
        return f"a{layout} tensor {[*value.shape]} of {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {', '.join(map(_described, value[:4])) or 'nothing'}"
    return "None" if value is None else f"a {type(value).__name__}"


def _copied(report: Any) -> Any:
    """A report with every tensor copied, cut off from its graph."""
    if isinstance(report, Tensor):
        return report.detach().clone()
    if isinstance(report, dict):
        return {name: _copied(value) for name, value in report.items()}
    if isinstance(report, list | tuple):
        copies = [_copied(value) for value in report]
        return type(report)(*copies) if hasattr(report, "_fields") else type(report)(copies)
    return report
