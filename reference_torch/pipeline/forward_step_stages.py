"""Stages that run the forward_step_func of a Megatron-core program, for the executor of schedule tables."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from diptych.plans.config import TransformerConfig
from diptych.plans.schedule.actions import Action, Schedule
from reference_torch.p2p import Shape
from reference_torch.pipeline.gradients import GradientSums
from reference_torch.pipeline.steps import (
    ForwardStep,
    as_list,
    backward_step,
    check_output,
    check_requires_grad,
    deallocate_output_tensor,
    forward_step,
    own_memory,
)


class StepInputs(NamedTuple):
    """The arguments of a schedule function, by virtual stage of this rank."""

    forward_step_func: ForwardStep
    data_iterators: Sequence[Iterator[Any] | None]
    models: Sequence[nn.Module]
    config: TransformerConfig
    shapes: Sequence[tuple[Sequence[Shape], Sequence[Shape]]]
    """Shapes of the tensors that each stage receives and sends."""
    collect_non_loss_data: bool = False
    cp_group_size: int = 1


class ForwardStepStages:
    """The stages of a rank, in the form that executor.RankStages describes. Results are lists of tensors.

    Args:
        schedule: the table.
        rank: pipeline rank.
        inputs: models and data of the rank.
        sums: sums of gradients over replicas.
    """

    def __init__(self, schedule: Schedule, rank: int, inputs: StepInputs, sums: GradientSums) -> None:
        self._schedule = schedule
        self._inputs = inputs
        self._sums = sums
        self._reports: list[Any] = []
        self._reported_microbatches: list[int] = []
        orders = _orders(schedule, rank)
        self._data = [_MicrobatchData(*each) for each in zip(inputs.data_iterators, orders, strict=True)]
        self.num_tokens = torch.zeros((), dtype=torch.float64)  # exact, and a mask may be summed in any type

    @property
    def reports(self) -> list[Any]:
        """The reports of the reducers, in order of the microbatches if there is one for each."""
        if len(self._reports) != len(self._reported_microbatches):
            return self._reports
        return [self._reports[index] for index in np.argsort(self._reported_microbatches)]

    def forward(self, action: Action, received: list[Tensor] | None) -> tuple[list[Tensor], Any]:
        """Run forward_step_func, and on the last stage its reducer."""
        stage = action.stage
        inputs = self._inputs
        vp_stage = self._vp_stage(stage)
        last = stage == self._schedule.num_stages - 1
        if received is not None:
            received = [x.requires_grad_(not self._schedule.forward_only) for x in received]
        output, tokens = forward_step(
            inputs.forward_step_func,
            self._data[vp_stage].iterator_for(action.microbatch),
            inputs.models[vp_stage],
            self._schedule.num_microbatches,
            None if received is None else received[0] if len(received) == 1 else received,
            self._reports,
            inputs.config,
            inputs.cp_group_size,
            inputs.collect_non_loss_data,
            vp_stage,
            last,
        )
        if last:
            self.num_tokens = self.num_tokens.to(tokens.device) + tokens
            self._reported_microbatches.append(action.microbatch)
        else:
            self._check_output(output, stage)
        if not self._schedule.forward_only:
            check_requires_grad(as_list(output), received or [], inputs.models[vp_stage], stage, last)
        if last:
            return [], (received, output)
        if inputs.config.deallocate_pipeline_outputs:
            output = own_memory(output)
        return as_list(output), (received, output)

    def backward(self, action: Action, saved: Any, received: list[Tensor] | None) -> list[Tensor] | None:
        """Run backward_step."""
        inputs, output = saved
        gradients = backward_step(inputs, output, received)
        return None if gradients is None else as_list(gradients)

    def end_backward(self, stage: int) -> None:
        """Start to sum the gradients of a stage over replicas."""
        self._sums.start(self._inputs.models[self._vp_stage(stage)])

    def copy_for_next(self, result: list[Tensor]) -> list[Tensor]:
        """Return the tensors without their graphs."""
        return [tensor.detach() for tensor in result]

    def encode(self, action: Action, result: list[Tensor]) -> list[Tensor]:
        """Return the tensors as they are."""
        return result

    def decode(self, action: Action, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors as they are."""
        return [*tensors]

    def message_shapes(self, action: Action) -> Sequence[Shape]:
        """Return the input shapes of the receiving stage, or its output shapes for gradients."""
        forward = action.kind == "F"
        return self._inputs.shapes[self._vp_stage(action.stage + (1 if forward else -1))][0 if forward else 1]

    def release(self, result: list[Tensor]) -> None:
        """Release the memory of sent outputs if the configuration says so.

        A tensor without a graph is the input of the stage or data of the user, so it is not released.
        """
        to_release = [tensor for tensor in result if tensor.grad_fn is not None]
        deallocate_output_tensor(to_release, self._inputs.config.deallocate_pipeline_outputs)

    def _vp_stage(self, stage: int) -> int:
        return stage // self._schedule.pp_size

    def _check_output(self, output: Any, stage: int) -> None:
        """Check that the next stage, on this rank or another, can receive an output."""
        config = self._inputs.config
        expected = self._inputs.shapes[self._vp_stage(stage)][1]
        check_output(output, stage, expected, config.variable_seq_lengths, getattr(torch, config.compute_dtype))


def _orders(schedule: Schedule, rank: int) -> list[list[int]]:
    """Return the microbatches of each virtual stage, in the order of their forwards."""
    orders: list[list[int]] = [[] for _ in range(schedule.stages_per_rank)]
    for kind, stage, microbatch in schedule.actions[rank]:
        if kind == "F":
            orders[stage // schedule.pp_size].append(microbatch)
    return orders


class _MicrobatchData:
    """The microbatches of a virtual stage, which a table may request in any order.

    Args:
        iterator: iterator over the microbatches, in their own order; None: the stage reads none.
        order: order of the microbatches in the table.
    """

    def __init__(self, iterator: Iterator[Any] | None, order: Sequence[int]) -> None:
        self._iterator = iterator
        self._in_order = list(order) == sorted(order)
        self._read_ahead: dict[int, Any] = {}
        self._next = 0

    def iterator_for(self, microbatch: int) -> Iterator[Any] | None:
        """Return an iterator whose next item is this microbatch."""
        if self._iterator is None or self._in_order:
            return self._iterator
        while self._next <= microbatch:
            self._read_ahead[self._next] = next(self._iterator)
            self._next += 1
        return iter([self._read_ahead.pop(microbatch)])
