"""Execution of the recompute blocks that diptych/plans/recompute.py defines.

A block saves everything for backward, is replayed as a whole, or drops some named values.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from diptych.plans.recompute import RecomputeBlock
from reference_torch.recompute.checkpoint import MHCBlockRecomputeManager


class BlockRecomputation:
    """The recompute decisions of one block, passed to each of its layers.

    Args:
        dropped: names of the values that are recomputed in backward.
        manager: the block's manager; required if ``dropped`` is not empty.
    """

    def __init__(self, dropped: frozenset[str] = frozenset(), manager: MHCBlockRecomputeManager | None = None) -> None:
        self.dropped = dropped
        self._manager = manager

    def __call__(self, value: str, fn: Callable[..., Any], *args: Any) -> Any:
        """Return ``fn(*args)``, and recompute it in backward if the plan drops the value.

        Args:
            value: name of the result of fn, one of diptych.plans.model.values.VALUES.
            fn: function to call.
            args: its arguments.
        """
        manager = self.manager_for(value)
        return fn(*args) if manager is None else manager.checkpoint(fn, *args)

    def manager_for(self, value: str) -> MHCBlockRecomputeManager | None:
        """Return the block's manager if the value is dropped, else None."""
        return self._manager if value in self.dropped else None

    def nested_in(self, value: str) -> "BlockRecomputation":
        """Return the decisions for modules inside the module that computes ``value``.

        If that module is replayed as a whole, the modules inside it drop nothing themselves.
        """
        return SAVE_ALL if value in self.dropped else self

    def discard_consumed(self, keep: Tensor) -> None:
        """Empty every dropped output so far except ``keep``, which forward still reads."""
        if self._manager is not None:
            self._manager.discard_consumed(keep)


SAVE_ALL = BlockRecomputation()
"""Decisions of a block that saves everything for backward."""


def run_block(
    block: RecomputeBlock,
    layers: Callable[[Tensor, BlockRecomputation], Tensor],
    hidden_states: Tensor,
    training: bool = True,
) -> Tensor:
    """Run the layers of a block and drop the values that its plan names.

    Args:
        block: the plan.
        layers: runs the block's layers in order and passes its second argument to each.
        hidden_states: input of the block. [B, T, ...]
        training: if False, or if gradients are disabled, nothing is dropped.

    Returns:
        The output of the last layer.
    """
    if block.kind == "none" or not training or not torch.is_grad_enabled():
        return layers(hidden_states, SAVE_ALL)
    if block.kind == "full":
        return checkpoint(layers, hidden_states, SAVE_ALL, use_reentrant=False)  # pyright: ignore
    with MHCBlockRecomputeManager() as manager:
        output = layers(hidden_states, BlockRecomputation(block.dropped, manager))
        manager.discard_all_outputs_and_register_unified_recompute(output)
    return output
