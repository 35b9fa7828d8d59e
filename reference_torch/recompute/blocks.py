"""A block of diptych/plans/recompute.py, carried out: layers run whole, replayed whole, or with some values dropped."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from diptych.plans.recompute import RecomputeBlock
from reference_torch.recompute.checkpoint import MHCBlockRecomputeManager


class BlockRecomputation:
    """What the layers of a block are handed: runs each module plainly, or drops what it gives.

    Args:
        dropped: names of values that are not kept.
        manager: of the block; needed where something is dropped.
    """

    def __init__(self, dropped: frozenset[str] = frozenset(), manager: MHCBlockRecomputeManager | None = None) -> None:
        self.dropped, self._manager = dropped, manager

    def __call__(self, value: str, fn: Callable[..., Any], *args: Any) -> Any:
        """``fn(*args)``, recomputed in backward if the value it gives is dropped.

        Args:
            value: name of what fn returns, out of diptych.plans.recompute.VALUES.
            fn, args: the call.
        """
        manager = self.manager_of(value)
        return fn(*args) if manager is None else manager.checkpoint(fn, *args)

    def manager_of(self, value: str) -> MHCBlockRecomputeManager | None:
        """The manager, if the value is dropped."""
        return self._manager if value in self.dropped else None

    def inside(self, value: str) -> "BlockRecomputation":
        """For the modules inside one that is recomputed as a whole: nothing more is dropped there."""
        return KEEP_ALL if value in self.dropped else self

    def discard_consumed(self, hidden_states: Tensor) -> None:
        """All that was dropped so far has been read by forward, but for ``hidden_states``."""
        if self._manager is not None:
            self._manager.discard_consumed(hidden_states)


KEEP_ALL = BlockRecomputation()
"""Nothing is dropped."""


def run_block(
    block: RecomputeBlock,
    layers: Callable[[Tensor, BlockRecomputation], Tensor],
    hidden_states: Tensor,
    training: bool = True,
) -> Tensor:
    """Run a block's layers as its plan says.

    Args:
        block: the plan.
        layers: runs the block's layers one after the other; hands each the second argument.
        hidden_states: what the block reads. [B, T, ...]
        training: False: nothing is dropped; nor is it where gradients are disabled.

    Returns:
        What the layers return.
    """
    if block.kind == "none" or not training or not torch.is_grad_enabled():
        return layers(hidden_states, KEEP_ALL)
    if block.kind == "full":
        return checkpoint(layers, hidden_states, KEEP_ALL, use_reentrant=False)  # pyright: ignore
    with MHCBlockRecomputeManager() as manager:
        output = layers(hidden_states, BlockRecomputation(block.dropped, manager))
        manager.discard_all_outputs_and_register_unified_recompute(output)
    return output
