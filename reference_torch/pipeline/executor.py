"""Execution of one rank's part of a schedule table.

``diptych/plans/schedule/named.py`` decides the order of actions and ``diptych/plans/schedule/messages.py`` the
messages between them; the executor reorders nothing. Sends do not block. With ``overlap_p2p_comm``, a receive is posted
before the action that precedes it starts. B is the full backward; a split backward is I (inputs) and W (weights).
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from diptych.plans.config import TransformerConfig
from diptych.plans.schedule.actions import Action, Schedule
from diptych.plans.schedule.messages import Message, PipelineError, Program, dependencies, lower, receiver
from reference_torch.p2p import P2PCommunicator, Shape
from reference_torch.pipeline.gradients import GradientSums
from reference_torch.pipeline.split_backward import DeferredWeightGradients
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


@dataclass
class StepInputs:
    """The arguments of a schedule function, by virtual stage of this rank."""

    forward_step_func: ForwardStep
    data_iterators: Sequence[Iterator[Any] | None]
    models: Sequence[nn.Module]
    config: TransformerConfig
    shapes: Sequence[tuple[Sequence[Shape], Sequence[Shape]]]
    """Shapes of the tensors that each stage receives and sends."""
    collect_non_loss_data: bool = False
    cp_group_size: int = 1


class Executor:
    """The executor of one step of one rank.

    Args:
        schedule: the table.
        inputs: models and data of the rank.
        communicator: communicator of the pipeline; None: the pipeline has one rank.
        sums: sums of gradients over replicas.
        trace: list to which every action is appended after it has run.
    """

    def __init__(
        self,
        schedule: Schedule,
        inputs: StepInputs,
        communicator: P2PCommunicator | None,
        sums: GradientSums,
        trace: list[Action] | None = None,
    ) -> None:
        self._schedule = schedule
        self._inputs = inputs
        self._communicator = communicator
        self._rank = 0 if communicator is None else communicator.rank
        self._sums = sums
        self._trace = [] if trace is None else trace
        self._stage_inputs: dict[tuple[int, int], list[Tensor] | None] = {}
        """Input of each forward whose backward has not run, by stage and microbatch."""
        self._stage_outputs: dict[tuple[int, int], Any] = {}
        """Output of each such forward."""
        self._results: dict[Action, list[Tensor]] = {}
        """Results of actions that wait for a send or for another stage of this rank."""
        self._deferred: defaultdict[tuple[int, int], DeferredWeightGradients] = defaultdict(DeferredWeightGradients)
        self._backwards_remaining = dict.fromkeys(range(schedule.stages_per_rank), schedule.num_microbatches)
        self.reports: list[Any] = []
        self._reported_microbatches: list[int] = []
        self._data = [_MicrobatchData(*each) for each in zip(inputs.data_iterators, self._orders(), strict=True)]
        self.num_tokens = torch.zeros((), dtype=torch.float64)  # exact, and a mask may be summed in any type

    def run(self) -> None:
        """Run all actions and messages of the rank.

        Raises:
            PipelineError: a message did not arrive, or was not received.
        """
        program = _program(self._schedule)
        steps = program[self._rank]
        if self._communicator is not None:
            self._communicator.begin_step(program)
        posted = 0
        for index, step in enumerate(steps):
            posted = self._post_receives(steps, index, posted)
            if isinstance(step, Action):
                self._run(step)
                self._trace.append(step)
            elif step.direction == "SEND":
                self._send(step)
        if self._communicator is not None:
            self._communicator.end_step()
        if len(self.reports) == len(self._reported_microbatches):  # one for each microbatch: sort them by microbatch
            self.reports = [self.reports[index] for index in np.argsort(self._reported_microbatches)]

    def _orders(self) -> list[list[int]]:
        """Return the microbatches of each virtual stage, in the order of their forwards."""
        orders: list[list[int]] = [[] for _ in range(self._schedule.stages_per_rank)]
        for kind, stage, microbatch in self._schedule.actions[self._rank]:
            if kind == "F":
                orders[stage // self._schedule.pp_size].append(microbatch)
        return orders

    def _post_receives(self, steps: Sequence[Action | Message], index: int, posted: int) -> int:
        """Post every receive before the next action, and return the index up to which receives are posted.

        With overlap, a receive is posted before the action that precedes it starts. Without overlap, it is posted and
        waited for at its own place in the program.

        Args:
            steps: program of the rank.
            index: index of the current step.
            posted: index up to which receives are posted already.
        """
        end = index + 1
        if self._inputs.config.overlap_p2p_comm:
            while end < len(steps) and not isinstance(steps[end], Action):
                end += 1
        for step in steps[max(posted, index) : end]:
            if isinstance(step, Message) and step.direction == "RECV":
                assert self._communicator is not None, "messages need another rank"
                self._communicator.post_receive(step, self._shapes_of(step))
        return max(posted, end)

    def _shapes_of(self, message: Message) -> Sequence[Shape]:
        """Return the shapes of a message: input shapes of the receiving stage, or its output shapes for gradients."""
        forward = message.produced_by.kind == "F"
        stage = message.produced_by.stage + (1 if forward else -1)
        return self._inputs.shapes[stage // self._schedule.pp_size][0 if forward else 1]

    def _run(self, action: Action) -> None:
        """Run one action of one stage and microbatch.

        Raises:
            ValueError: forward changes its input in place.
            PipelineError: another microbatch changed a value that backward needs in place.
            Exception: an error of the stage, with a note that names the action.
        """
        steps: dict[str, Callable[[Action], None]] = {
            "F": self._forward,
            "B": self._backward,
            "I": self._backward,
            "W": self._weight_gradients,
        }
        try:
            steps[action.kind](action)
        except Exception as error:
            explained = _explain(error, action)
            explained.add_note(
                f"rank {self._rank}, {action}: {KIND_NAMES[action.kind]} of stage {action.stage}, "
                f"microbatch {action.microbatch}"
            )
            if explained is error:
                raise
            raise explained from error
        vp_stage = action.stage // self._schedule.pp_size
        if action.kind in "BW":
            self._backwards_remaining[vp_stage] -= 1
            if self._backwards_remaining[vp_stage] == 0:
                self._sums.start(self._inputs.models[vp_stage])

    def _forward(self, action: Action) -> None:
        """Run F: receive the input of the stage, run it, and store its output for the next stage and for backward."""
        stage = action.stage
        key = (stage, action.microbatch)
        inputs = self._inputs
        vp_stage = stage // self._schedule.pp_size
        last = stage == self._schedule.num_stages - 1
        received = None
        if stage > 0:
            received = [x.requires_grad_(not self._schedule.forward_only) for x in self._take_received(action)]
        with self._defer_weight_gradients(action):
            output, tokens = forward_step(
                inputs.forward_step_func,
                self._data[vp_stage].iterator_for(action.microbatch),
                inputs.models[vp_stage],
                self._schedule.num_microbatches,
                None if received is None else received[0] if len(received) == 1 else received,
                self.reports,
                inputs.config,
                inputs.cp_group_size,
                inputs.collect_non_loss_data,
                vp_stage,
                last,
            )
        self.num_tokens = self.num_tokens.to(tokens.device) + tokens
        if last:
            self._reported_microbatches.append(action.microbatch)
        else:
            self._check_output(output, stage)
        if not self._schedule.forward_only:
            check_requires_grad(output, received, inputs.models[vp_stage], stage, last)
        if not last:
            if inputs.config.deallocate_pipeline_outputs:
                output = own_memory(output)
            self._results[action] = as_list(output)
        if not self._schedule.forward_only:
            self._stage_inputs[key] = received
            self._stage_outputs[key] = output

    def _check_output(self, output: Any, stage: int) -> None:
        """Check that the next stage, on this rank or another, can receive an output."""
        config = self._inputs.config
        expected = self._inputs.shapes[stage // self._schedule.pp_size][1]
        check_output(output, stage, expected, config.variable_seq_lengths, getattr(torch, config.compute_dtype))

    def _backward(self, action: Action) -> None:
        """Run B or I: receive the gradient of the output, and store that of the input for the previous stage."""
        key = (action.stage, action.microbatch)
        received = self._stage_inputs.pop(key)
        output = self._stage_outputs.pop(key)
        gradient = None
        if action.stage + 1 < self._schedule.num_stages:
            gradient = self._take_received(action)
        with self._defer_weight_gradients(action):
            gradients = backward_step(received, output, gradient)
        if gradients is not None:
            self._results[action] = as_list(gradients)

    def _weight_gradients(self, action: Action) -> None:
        """Run W: compute the weight gradients that I deferred."""
        self._deferred.pop((action.stage, action.microbatch)).run()

    def _defer_weight_gradients(self, action: Action) -> AbstractContextManager[Any]:
        """Return the context that defers weight gradients if the table splits this backward into I and W."""
        key = action.stage, action.microbatch
        return self._deferred[key] if self._schedule.splits(*key) else nullcontext()

    def _take_received(self, action: Action) -> list[Tensor]:
        """Return the tensors that an action needs from a neighbouring stage, of this rank or another."""
        (needed,) = [other for other in dependencies(self._schedule, action) if other.stage != action.stage]
        if self._schedule.rank_of(needed.stage) == self._rank:
            return [tensor.detach() for tensor in self._results.pop(needed)]
        assert self._communicator is not None, "messages need another rank"
        return self._communicator.receive(Message("RECV", needed, self._schedule.rank_of(needed.stage)))

    def _send(self, message: Message) -> None:
        """Send the result of an action; an activation is released afterwards if the configuration says so."""
        assert self._communicator is not None, "messages need another rank"
        assert receiver(self._schedule, message.produced_by) == message.peer, "the message has another receiver"
        sent = self._results.pop(message.produced_by)
        self._communicator.send(message, sent)
        if message.produced_by.kind == "F":
            # A tensor without a graph is the input of the stage or data of the user, so it is not released.
            to_release = [tensor for tensor in sent if tensor.grad_fn is not None]
            deallocate_output_tensor(to_release, self._inputs.config.deallocate_pipeline_outputs)


KIND_NAMES = {"F": "forward", "B": "backward", "I": "backward for the input", "W": "backward for the weights"}
"""Names of the kinds of actions, for error messages."""


def _explain(error: Exception, action: Action) -> Exception:
    """Return an error that explains a PyTorch error in terms of the pipeline, or the error itself."""
    text = str(error).splitlines()[0] if str(error) else ""
    if isinstance(error, RuntimeError) and "leaf Variable that requires grad is being used in an in-place" in text:
        return ValueError(
            f"forward_step_func: expected stage {action.stage} not to change the tensor that it received, got an "
            "operation in place on it; write x = x + y, or change a copy, x.clone()"
        )
    if type(error) is RuntimeError and "has been modified by an inplace operation" in text:
        return PipelineError(
            f"{action}: expected values saved for backward unchanged, got one changed in place ({text[:160]}); "
            "other microbatches ran in between: yield new tensors from the data iterator, and write into no buffer "
            "that forward reads"
        )
    return error


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


@lru_cache(maxsize=32)
def _program(schedule: Schedule) -> Program:
    """Return the program of a table with its messages, which is the same at every step."""
    return lower(schedule)
