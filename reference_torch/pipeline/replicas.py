"""Gradients of replicas inside a stage: DistributedDataParallel and fully_shard (FSDP2).

Both reduce gradients over replicas in every backward. A pipeline runs many backwards for one step, and the backward for
the weights may come later. ReplicaGradients therefore holds the reduction back, and starts it once after the last one.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class ReplicaGradients:
    """The reductions of a stage, which may be wrapped itself or contain wrapped submodules.

    Args:
        stage: the stage.

    Raises:
        ValueError: a wrapper has an option that fixes when gradients are reduced.
    """

    def __init__(self, stage: nn.Module) -> None:
        self._replicated = [module for module in stage.modules() if isinstance(module, DistributedDataParallel)]
        self._sharded = [module for module in stage.modules() if _is_sharded(module)]
        for module in self._replicated:
            for option in ("static_graph", "find_unused_parameters"):
                if getattr(module, option):
                    raise ValueError(
                        f"stages: expected DistributedDataParallel without {option}, since the gradients of a step are "
                        f"reduced once, whether used or not, got {option}=True; leave it out"
                    )

    def hold(self) -> None:
        """Let the following forwards and backwards reduce nothing."""
        for module in self._replicated:
            module.require_backward_grad_sync = False
            module.require_forward_param_sync = True  # buffers are broadcast before the first forward of a step
        for module in self._sharded:
            _set_last(module, False)

    def reduce(self) -> None:
        """Reduce the gradients of the whole step."""
        for module in self._replicated:
            module.require_backward_grad_sync = True
            parameters: list[Any] = [parameter for parameter in module.parameters() if parameter.requires_grad]
            # The reducer is driven by hooks of autograd. A backward with gradients of zero calls each of them once.
            unused = [parameter for parameter in parameters if parameter.grad is None]
            module.reducer.prepare_for_backward(parameters)
            torch.autograd.backward(parameters, [p.new_zeros(()).expand_as(p) for p in parameters])
            for parameter in unused:
                if not parameter.grad.any():  # on every replica
                    parameter.grad = None
        for module in self._sharded:
            _set_last(module, True)
        for module in self._sharded:
            _run_post_backward(module)

    def cancel(self) -> None:
        """Return to one reduction for each backward, without any now; used after an error."""
        for module in self._replicated:
            module.require_backward_grad_sync = True
        for module in self._sharded:
            _set_last(module, True)


def _is_sharded(module: nn.Module) -> bool:
    return dist.is_available() and isinstance(module, _sharded_type())


def _sharded_type() -> type:
    from torch.distributed.fsdp import FSDPModule  # slow to import, and not needed without torch.distributed

    return FSDPModule


def _set_last(module: Any, last: bool) -> None:
    """Set whether backwards are the last ones of a step, after which gradients are reduced and parameters sharded."""
    module.set_is_last_backward(last)
    module.set_reshard_after_backward(last, recurse=False)
    module.set_requires_gradient_sync(last, recurse=False)


def _run_post_backward(module: Any) -> None:
    """Reduce the gradients of a root of fully_shard and of all that it contains.

    PyTorch calls these functions at the end of a backward and has no public name for them;
    torch.distributed.pipelining calls them in the same way.
    """
    from torch.distributed.fsdp import fully_shard

    state: Any = fully_shard.state(module)  # pyright: ignore[reportFunctionMemberAccess]
    if not state._is_root:
        return
    for each in state._state_ctx.all_states:
        groups = each._fsdp_param_groups if hasattr(each, "_fsdp_param_groups") else [each._fsdp_param_group]
        for group in groups:
            if group is not None:
                group.post_backward()
    state._root_post_backward_final_callback()
