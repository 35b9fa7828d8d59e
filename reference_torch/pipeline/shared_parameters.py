"""Parameters that stages on several ranks share, such as a tied embedding: each rank has a copy of its own."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from diptych.plans.schedule.actions import Schedule
from reference_torch.groups import wait_for


def find_shared(stages: Sequence[nn.Module | None]) -> list[dict[int, str]]:
    """Return the parameters that several stages share, each as a dict from stage to the first name in it.

    Args:
        stages: stages of the model; those that are None share nothing. A stage of split_model knows what it shares with
            others, also after a wrapper has replaced its parameters.

    Raises:
        ValueError: a wrapper has replaced parameters, so that it cannot be seen which ones are shared.
    """
    for stage in stages:
        recorded = getattr(unwrapped(stage), "shared_parameters", None) if stage is not None else None
        if recorded is not None:
            return [*recorded]
    owners: dict[Tensor, dict[int, str]] = {}
    for number, stage in enumerate(stages):
        for name, parameter in stage.named_parameters() if stage is not None else ():
            if hasattr(parameter, "to_local"):
                kind = type(parameter).__name__
                raise ValueError(
                    f"shared_parameters: expected a list, since {name!r} of stage {number} is a {kind}, so stages do "
                    "not show what they share after fully_shard or parallelize_module, got None; give [] if they share "
                    "nothing"
                )
            owners.setdefault(parameter, {})[number] = name
    return [names for names in owners.values() if len(names) > 1]


def unwrapped(module: Any) -> nn.Module:
    """Return the module inside of DistributedDataParallel and torch.compile."""
    while True:
        inner = getattr(module, "_orig_mod", None)
        if inner is None and isinstance(module, nn.parallel.DistributedDataParallel):
            inner = module.module
        if inner is None:
            return module
        module = inner


class SharedParameters:
    """The shared parameters of a rank, whose gradients are summed over all ranks that have a copy.

    Args:
        shared: all shared parameters, each as a dict from stage to name.
        stages: stages of this rank, by number.
        schedule: the table, which says where the stages are.
        group: ranks of the pipeline; None: one rank.
        timeout: seconds that a sum may take.

    Raises:
        ValueError: a stage or a name does not exist, or the copies on one rank are different parameters.
    """

    def __init__(
        self,
        shared: Sequence[Mapping[int, str]],
        stages: Mapping[int, nn.Module | None],
        schedule: Schedule,
        group: ProcessGroup | None,
        timeout: float,
    ) -> None:
        self._timeout = timeout
        self._stages = stages
        self._groups: dict[tuple[int, ...], ProcessGroup] = {}
        self._sums: list[tuple[tuple[int, ...], int, str]] = []
        rank = 0 if group is None else dist.get_rank(group)
        for names in shared:
            if not all(0 <= stage < schedule.num_stages for stage in names):
                raise ValueError(f"shared_parameters: expected stages below {schedule.num_stages}, got {dict(names)}")
            ranks = tuple(sorted({schedule.rank_of(stage) for stage in names}))
            own = [stage for stage in names if stage in stages]
            copies = {id(self._parameter(stage, names[stage])) for stage in own}
            if len(copies) > 1:
                raise ValueError(
                    f"shared_parameters: expected one parameter in the stages {own} of one rank, got {len(copies)}; "
                    "assign the same nn.Parameter to both"
                )
            if len(ranks) == 1:
                continue
            assert group is not None, "several ranks are a group"
            if rank in ranks:
                self._sums.append((ranks, own[0], names[own[0]]))
            if ranks not in self._groups:
                self._groups[ranks] = _group_of(ranks, group)

    def sum_gradients(self) -> None:
        """Replace the gradient of each copy by the sum of all.

        Raises:
            PipelineError: a rank did not take part in time.
        """
        for ranks, stage, name in self._sums:
            parameter = self._parameter(stage, name)
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient: Any = parameter.grad
            local = gradient.to_local() if hasattr(gradient, "to_local") else gradient  # a DTensor of fully_shard
            what = f"the sum of the gradients of the shared parameter {name!r}"
            wait_for(dist.all_reduce(local, group=self._groups[ranks], async_op=True), what, self._timeout)

    def _parameter(self, stage: int, name: str) -> nn.Parameter:
        """Return a parameter of a stage of this rank."""
        module = unwrapped(self._stages[stage])
        for prefix in ("module.", "_orig_mod."):
            name = name.removeprefix(prefix)
        try:
            return module.get_parameter(name)
        except AttributeError:
            raise ValueError(
                f"shared_parameters: expected a parameter {name!r} in stage {stage}, got none; names are those of "
                "stage.named_parameters()"
            ) from None


def _group_of(ranks: tuple[int, ...], group: ProcessGroup) -> ProcessGroup:
    """Return a group of some ranks of a pipeline; other ranks get a group of their own.

    Ranks deadlock if they have created different numbers of groups before, so every rank of the pipeline creates one.
    """
    if len(ranks) == group.size():
        return group
    own = dist.get_rank(group)
    members = [dist.get_global_rank(group, each) for each in (ranks if own in ranks else [own])]
    return cast("ProcessGroup", dist.new_group(members, use_local_synchronization=True))
