"""Pipelines of any modules: stages are nn.Modules of the user, and the schedule is a table or its name."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils import _pytree as pytree

from diptych.plans.schedule.actions import Action, Schedule
from diptych.plans.schedule.messages import PipelineError
from diptych.plans.schedule.named import forwards_of, schedule_of_stages
from reference_torch.autograd import refuse_transformed
from reference_torch.p2p import P2PCommunicator
from reference_torch.pipeline.executor import Executor
from reference_torch.pipeline.gradients import (
    add_earlier_gradients,
    remove_earlier_gradients,
    restore_earlier_gradients,
)
from reference_torch.pipeline.module_stages import LossFunction, MessageSpecs, Microbatches, ModuleStages
from reference_torch.pipeline.payloads import TreeSpec
from reference_torch.pipeline.replicas import ReplicaGradients
from reference_torch.pipeline.shared_parameters import SharedParameters, find_shared


@dataclass(frozen=True)
class _Transport:
    """Settings of the communicator: messages are bytes."""

    pipeline_timeout: float
    overlap_p2p_comm: bool
    variable_seq_lengths: bool
    compute_dtype: str = "uint8"


class PipelineExecutor:
    """A pipeline whose stages are modules of the user.

    Gradients are those of the mean (or sum) of the microbatches' losses. They are added to ``parameter.grad``, so any
    optimizer can follow. Stages may be wrapped by DistributedDataParallel or fully_shard, compiled, or checkpointed;
    gradients are reduced over replicas once per step.

    A stage is called with the output of the previous one: a tuple as positional arguments, a dict as keyword arguments,
    anything else as one argument. An output is a tensor or a pytree of tensors; leaves that are not tensors are sent
    with them.

    Args:
        stages: all stages of the model, in order; entries of other ranks may be None. The schedule decides the rank of
            a stage: with one stage per rank, stage i belongs to rank i.
        schedule: name of a schedule (docs/pipeline.md lists them), or a table. With one rank, the stages run in order
            for each microbatch, and a name has no effect.
        num_microbatches: number of microbatches per step; None: that of the table.
        loss_fn: ``loss_fn(output, target) -> loss``; None: the last stage returns the loss.
        group: ranks of the pipeline, in order; None: all processes.
        loss_reduction: "mean": gradients of the mean of the microbatches' losses; "sum": of their sum.
        variable_shapes: if True, every message contains its structure. Otherwise the first step fixes the shapes.
        shared_parameters: parameters that stages on several ranks share, such as a tied embedding, each as a dict from
            stage to name. Their gradients are summed over these ranks. None: those that are the same object in
            ``stages``, or that split_model found. Name them if stages are None or if fully_shard has replaced
            parameters; [] means that there are none.
        device: device of received tensors; None: that of the first parameter of the rank's stages.
        overlap_p2p_comm: if True, messages overlap with computation.
        deallocate_outputs: if True, the memory of an output is released once it is sent.
        timeout: seconds to wait for a message.

    Raises:
        ValueError: the stages do not match the schedule or the ranks.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module | None],
        schedule: str | Schedule,
        num_microbatches: int | None = None,
        loss_fn: LossFunction | None = None,
        *,
        group: ProcessGroup | None = None,
        loss_reduction: str = "mean",
        variable_shapes: bool = False,
        shared_parameters: Sequence[dict[int, str]] | None = None,
        device: torch.device | str | None = None,
        overlap_p2p_comm: bool = True,
        deallocate_outputs: bool = False,
        timeout: float = 600.0,
    ) -> None:
        if loss_reduction not in ("mean", "sum"):
            raise ValueError(
                f"loss_reduction: expected 'mean' or 'sum', got {loss_reduction!r}; leave it out for the mean of the "
                "microbatches' losses"
            )
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        size = 1 if group is None else group.size()
        self.rank = 0 if group is None else dist.get_rank(group)
        self.schedule = schedule_of_stages(schedule, size, len(stages), num_microbatches)
        self._stages = {n: stage for n, stage in enumerate(stages) if self.schedule.rank_of(n) == self.rank}
        _check_modules(self._stages, self.rank)
        self._modules: list[nn.Module] = [*self._stages.values()]  # pyright: ignore[reportAttributeAccessIssue]
        self._loss_fn = loss_fn
        self._scale = 1.0 / self.schedule.num_microbatches if loss_reduction == "mean" else 1.0
        self._transport = _Transport(timeout, overlap_p2p_comm, True)
        self._variable_shapes = variable_shapes
        self._deallocate_outputs = deallocate_outputs
        self._known: dict[bool, dict[int, TreeSpec]] = {True: {}, False: {}}
        """Structures of messages by sending stage, for steps without (True) and with (False) backward."""
        found = find_shared(stages) if shared_parameters is None else shared_parameters
        self._shared = SharedParameters(found, self._stages, self.schedule, group, timeout)
        self._communicator = None
        if group is not None and size > 1:
            first = next((p.device for module in self._modules for p in module.parameters()), "cpu")
            self._communicator = P2PCommunicator(group, self._transport, first if device is None else device)
        self._broken: str | None = None

    @property
    def is_first(self) -> bool:
        """True if this rank has the first stage, which reads the inputs."""
        return 0 in self._stages

    @property
    def is_last(self) -> bool:
        """True if this rank has the last stage, which reads the targets and has the losses."""
        return self.schedule.num_stages - 1 in self._stages

    def step(
        self,
        inputs: Any = None,
        targets: Any = None,
        trace: list[Action] | None = None,
    ) -> list[Tensor]:
        """Run forward and backward of all microbatches and add the gradients to ``parameter.grad``.

        Args:
            inputs: microbatches for the first stage; other ranks may pass None. split_batch makes them of a batch.
            targets: second argument of loss_fn for each microbatch; ranks without the last stage may pass None.
            trace: list to which every action is appended after it has run.

        Returns:
            The loss of each microbatch, detached, on the rank of the last stage; [] on other ranks.

        Raises:
            ValueError: the data, an output or a loss are not as expected.
            PipelineError: a message did not arrive or was not received in time, or a value saved for backward was
                changed in place.
            Exception: an error of a stage, with a note that names the action. After an error, the gradients are those
                before the step, and the executor cannot be used again if it has several ranks.
        """
        replicas = {number: ReplicaGradients(stage) for number, stage in self._stages.items() if stage is not None}
        earlier = remove_earlier_gradients(self._modules)
        try:
            for reduction in replicas.values():
                reduction.hold()
            losses = self._run(self.schedule, Microbatches(inputs, targets), replicas, self._scale, trace)
            self._shared.sum_gradients()
        except BaseException:
            for reduction in replicas.values():
                reduction.cancel()
            restore_earlier_gradients(self._modules, earlier)
            raise
        add_earlier_gradients(earlier)
        return losses

    @torch.no_grad()
    def evaluate(self, inputs: Any = None, targets: Any = None) -> list[Tensor]:
        """Return the losses of microbatches, without backward; arguments, result and errors are as in ``step``."""
        return self._run(forwards_of(self.schedule), Microbatches(inputs, targets), None, self._scale, None)

    @torch.no_grad()
    def forward(self, inputs: Any = None) -> list[Any]:
        """Return the output of the last stage for each microbatch; [] on other ranks. Errors are those of ``step``."""
        return self._run(forwards_of(self.schedule), Microbatches(inputs, None), None, None, None)

    def close(self) -> None:
        """End the thread that waits for sends."""
        if self._communicator is not None:
            self._communicator.close()

    def __enter__(self) -> "PipelineExecutor":
        return self

    def __exit__(self, *_: object) -> None:
        if self._broken is None:
            self.close()

    def _run(
        self,
        schedule: Schedule,
        data: Microbatches,
        replicas: dict[int, ReplicaGradients] | None,
        scale: float | None,
        trace: list[Action] | None,
    ) -> list[Any]:
        """Run a step and return what the last stage collected."""
        if self._broken is not None:
            raise PipelineError(
                f"step: expected an executor whose steps all ended, got one in which a step failed ({self._broken}), "
                "so the ranks no longer agree on their messages; make a new PipelineExecutor"
            )
        given = pytree.tree_leaves([data.inputs, data.targets])
        refuse_transformed("PipelineExecutor", "use the gradients of step", *given)
        data = self._checked(data)
        known = self._known[schedule.forward_only]
        sent_along = self._variable_shapes or not known
        stages: Any = self._stages
        messages = MessageSpecs(known, sent_along, self._variable_shapes)
        work = ModuleStages(schedule, stages, replicas, data, self._loss_fn, scale, messages, self._deallocate_outputs)
        if self._communicator is not None:
            self._communicator.config = replace(self._transport, variable_seq_lengths=sent_along)
        try:
            Executor(schedule, work, self._communicator, trace).run()
        except BaseException as error:
            known.clear()
            if self._communicator is not None:
                self._communicator.dismiss()
                self._broken = f"{type(error).__name__}: {error}"
            raise
        return [work.collected[microbatch] for microbatch in sorted(work.collected)]

    def _checked(self, data: Microbatches) -> Microbatches:
        """Check that this rank has the data that its stages read, one entry for each microbatch."""
        m = self.schedule.num_microbatches
        checked = []
        for name, items, needed in (("inputs", data.inputs, self.is_first), ("targets", data.targets, False)):
            if items is None and not needed:
                checked.append(None)
                continue
            if items is None or isinstance(items, Tensor | dict | str) or not hasattr(items, "__iter__"):
                raise ValueError(
                    f"{name}: expected a list of {m} microbatches, got {type(items).__name__}; make it of a batch by "
                    f"split_batch(batch, {m})"
                )
            checked.append([*items])
            if len(checked[-1]) != m:
                raise ValueError(
                    f"{name}: expected {m} microbatches, got {len(checked[-1])}; make them of a batch by "
                    f"split_batch(batch, {m})"
                )
        return Microbatches(*checked)


def split_batch(batch: Any, num_microbatches: int) -> list[Any]:
    """Split a batch into microbatches of equal size.

    Args:
        batch: a tensor, or a pytree of tensors; dimension 0 of each is split. Other leaves are repeated.
        num_microbatches: number of microbatches.

    Returns:
        Pytrees of the same structure, whose tensors are views of the batch.

    Raises:
        ValueError: a tensor cannot be split evenly, or num_microbatches is not an integer of at least 1.
    """
    if not isinstance(num_microbatches, int) or num_microbatches < 1:
        raise ValueError(
            f"num_microbatches: expected a whole number of at least 1, got {num_microbatches!r}; pass an int that "
            "divides the batch"
        )
    leaves, structure = pytree.tree_flatten(batch)
    parts = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            parts.append([leaf] * num_microbatches)
            continue
        if leaf.dim() == 0 or leaf.shape[0] % num_microbatches:
            raise ValueError(
                f"batch: expected tensors whose dimension 0 is a multiple of {num_microbatches}, the number of "
                f"microbatches, got shape {[*leaf.shape]}; leave out or repeat some samples, or change the number of "
                "microbatches"
            )
        parts.append([*leaf.chunk(num_microbatches)] if leaf.shape[0] else [leaf] * num_microbatches)
    return [pytree.tree_unflatten([part[i] for part in parts], structure) for i in range(num_microbatches)]


def _check_modules(stages: dict[int, Any], rank: int) -> None:
    """Check that the stages of a rank are modules."""
    for number, stage in stages.items():
        if not isinstance(stage, nn.Module):
            raise ValueError(
                f"stages: expected a module for stage {number}, which belongs to rank {rank}, got "
                f"{type(stage).__name__}; only stages of other ranks may be None"
            )
