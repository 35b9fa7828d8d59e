"""Stages of any modules, for the executor of schedule tables: pytrees between stages, and any loss."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from diptych.plans.schedule.actions import Action, Schedule
from reference_torch.p2p import Shape
from reference_torch.pipeline.payloads import (
    Tree,
    TreeSpec,
    flatten,
    num_bytes,
    tensors_from_message,
    to_message,
    tree_from_message,
)
from reference_torch.pipeline.replicas import ReplicaGradients
from reference_torch.pipeline.steps import (
    check_requires_grad,
    custom_backward,
    deallocate_output_tensor,
    gradient_of_received,
    own_memory,
)

LossFunction = Callable[[Any, Any], Tensor]
"""``loss_fn(output, target) -> loss``, a tensor of one element."""


class Microbatches(NamedTuple):
    """The data of one step, by microbatch; None on ranks that do not read them."""

    inputs: Sequence[Any] | None
    targets: Sequence[Any] | None


class MessageSpecs(NamedTuple):
    """The known structure of messages that have not arrived."""

    known: dict[int, TreeSpec]
    """Structure of the activations that each stage sends; filled in the first step."""
    sent_along: bool
    """True if messages contain their structure."""
    may_vary: bool
    """True if the structure may differ between microbatches."""


class _Saved(NamedTuple):
    """The tensors of a forward that backward needs."""

    received: list[Tensor]
    """Tensors of the previous stage that require gradients."""
    roots: list[Tensor]
    """Outputs that require gradients, or the loss."""


@dataclass(eq=False)
class ModuleStages:
    """The stages of a rank in one step, in the form that executor.RankStages describes.

    The result of a forward is a Tree; that of a backward is the list of gradients of its differentiable tensors.

    Args:
        schedule: the table.
        modules: the stages of this rank, by number.
        replicas: reductions of these stages; None: without backwards.
        data: microbatches of the step.
        loss_fn: the loss; None: the output of the last stage is the loss.
        scale: factor of each loss before its backward; None: outputs are collected instead of losses.
        messages: known structure of messages.
        deallocate_outputs: release outputs once sent.
    """

    schedule: Schedule
    modules: Mapping[int, nn.Module]
    replicas: Mapping[int, ReplicaGradients] | None
    data: Microbatches
    loss_fn: LossFunction | None
    scale: float | None
    messages: MessageSpecs
    deallocate_outputs: bool
    collected: dict[int, Any] = field(default_factory=dict, init=False)
    """Loss or output of each microbatch, on the rank of the last stage."""
    _specs: dict[tuple[int, int], TreeSpec] = field(default_factory=dict, init=False)
    """Structure of each activation sent or received, by sending stage and microbatch, until its backward."""

    def forward(self, action: Action, received: Tree | None) -> tuple[Tree | None, _Saved]:
        """Run a stage, and on the last one the loss."""
        _, stage, microbatch = action
        module = self.modules[stage]
        if received is None:
            assert self.data.inputs is not None, "the executor checks that the first stage has inputs"
            value = self.data.inputs[microbatch]
            inputs = []
        else:
            value = received.value()
            inputs = received.differentiable
        output = _call(module, value)
        if stage + 1 == self.schedule.num_stages:
            return None, self._end(output, microbatch, stage, module, inputs)
        tree = flatten(output, stage)
        self._check_spec(stage, tree.spec)
        self._specs[stage, microbatch] = tree.spec
        if not self.schedule.forward_only:
            check_requires_grad(tree.differentiable, inputs, module, stage, False)
            if self.deallocate_outputs:
                tree = Tree(tree.spec, own_memory(tree.tensors))
        return tree, _Saved(inputs, tree.differentiable)

    def _end(self, output: Any, microbatch: int, stage: int, module: nn.Module, inputs: list[Tensor]) -> _Saved:
        """Collect the output or the loss of a microbatch."""
        if self.scale is None:
            self.collected[microbatch] = output
            return _Saved(inputs, [])
        loss = output
        if self.loss_fn is not None:
            target = None if self.data.targets is None else self.data.targets[microbatch]
            loss = self.loss_fn(output, target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            source = "the output of the last stage, without loss_fn" if self.loss_fn is None else "loss_fn"
            found = f"a tensor {[*loss.shape]}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"{source}: expected a loss, a tensor of one element, got {found}; return e.g. the mean")
        self.collected[microbatch] = loss.detach().clone()
        if self.schedule.forward_only:
            return _Saved(inputs, [])
        check_requires_grad([loss], inputs, module, stage, True)
        return _Saved(inputs, [loss * self.scale])

    def backward(self, action: Action, saved: _Saved, received: list[Tensor] | None) -> list[Tensor] | None:
        """Run the backward of a stage for one microbatch."""
        custom_backward(saved.roots, received)
        if action.stage == 0:
            return None
        return [gradient_of_received(x) for x in saved.received]

    def end_backward(self, stage: int) -> None:
        """Reduce the gradients of a stage over replicas."""
        assert self.replicas is not None, "a step with backwards has reductions"
        self.replicas[stage].reduce()

    def copy_for_next(self, result: Any) -> Any:
        """Return activations as new leaves, and gradients as they are."""
        return result.detached() if isinstance(result, Tree) else result

    def encode(self, action: Action, result: Any) -> list[Tensor]:
        """Return one tensor of bytes, with the structure of activations if the receiver does not know it."""
        if isinstance(result, Tree):
            # A tensor without a graph may be a buffer of the stage, which the next microbatch fills again.
            tensors = [tensor.clone() if tensor.grad_fn is None else tensor for tensor in result.tensors]
            return [to_message(tensors, result.spec if self.messages.sent_along else None)]
        return [to_message(result)]

    def decode(self, action: Action, tensors: Sequence[Tensor]) -> Any:
        """Return the activations or gradients of a message."""
        (message,) = tensors
        kind, stage, microbatch = action
        if kind == "F":
            tree = tree_from_message(message, None if self.messages.sent_along else self.messages.known[stage])
            self._check_spec(stage, tree.spec)
            self._specs[stage, microbatch] = tree.spec
            return tree
        spec = self._specs.pop((stage - 1, microbatch))
        return tensors_from_message(message, [tensor for tensor in spec.tensors if tensor.requires_grad])

    def message_shapes(self, action: Action) -> Sequence[Shape]:
        """Return the number of bytes of a message, which is known after the first step."""
        if self.messages.sent_along:
            return [(0,)]
        forward = action.kind == "F"
        specs = self.messages.known[action.stage - (0 if forward else 1)].tensors
        return [(num_bytes([spec for spec in specs if forward or spec.requires_grad]),)]

    def release(self, result: Tree) -> None:
        """Release the memory of sent outputs that belong to no one else."""
        with_graph = [tensor for tensor in result.tensors if tensor.grad_fn is not None]
        deallocate_output_tensor(with_graph, self.deallocate_outputs and not self.schedule.forward_only)

    def _check_spec(self, stage: int, spec: TreeSpec) -> None:
        """Check the structure of an activation against that of the first microbatch, unless it may vary."""
        first = self.messages.known.setdefault(stage, spec)
        if not self.messages.may_vary and not first.equals(spec):
            raise ValueError(
                f"output of stage {stage}: expected {_listed(first)}, as in the first microbatch, got "
                f"{_listed(spec)}; give variable_shapes=True if microbatches or steps differ in shapes, structure, or "
                "values beside tensors"
            )


def _call(module: nn.Module, value: Any) -> Any:
    """Call a stage: a tuple is its positional arguments, a dict its keyword arguments, anything else one argument."""
    if type(value) is dict and all(isinstance(name, str) for name in value):
        return module(**value)
    return module(*value) if type(value) is tuple else module(value)


def _listed(spec: TreeSpec) -> str:
    tensors = ", ".join(f"{tensor}{'' if tensor.requires_grad else ' without gradient'}" for tensor in spec.tensors)
    with suppress(Exception):  # a description only
        return f"({tensors}) in {Tree(spec, [torch.empty(0)] * len(spec.tensors)).value().__class__.__name__}"
    return f"({tensors})"
