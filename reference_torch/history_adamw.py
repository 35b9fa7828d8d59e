"""AdamW for models with delayed scaling of FP8; diptych/plans/amax_history.py defines how histories advance."""

from collections.abc import Sequence

import torch
from torch import Tensor

from diptych.plans.amax_history import advanced


class HistoryAdamW(torch.optim.AdamW):
    """AdamW that advances the parameter groups with ``history_len``, which hold histories, instead of updating them."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update all parameters that have gradients.

        Args:
            closure: None; it is there because all optimizers have it.
        """
        assert closure is None, "a closure would be called without the histories"
        groups = self.param_groups
        for group in groups:
            if "history_len" in group:
                changed = [p for p in group["params"] if p.grad is not None]
                advance(changed, [p.grad for p in changed], group["history_len"])
        self.param_groups = [group for group in groups if "history_len" not in group]
        try:
            super().step()
        finally:
            self.param_groups = groups


def advance(histories: Sequence[Tensor], gradients: Sequence[Tensor], length: int) -> None:
    """Advance histories, or shares of them, in place after an optimizer step.

    Args:
        histories: any parts of histories.
        gradients: gradients of the step, not 0 for the observed exponents, of the same shapes.
        length: number of steps for which an exponent is remembered.
    """
    for history, gradient in zip(histories, gradients, strict=True):
        history.copy_(advanced(history, gradient, length, torch))
