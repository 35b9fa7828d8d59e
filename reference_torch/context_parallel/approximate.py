"""States that are not passed on whole: those of the nearest ranks, and maps of low rank.

What is left out has no gradient where states of far ranks are; of a map of low rank, gradients are those of the map
sent, and its own go to the map it stands for, as if nothing had been rounded.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

Pass = Callable[[Tensor], Tensor]
"""Hands a rank's array to the next rank, and returns what came; 0 on the first."""


class LowRank(NamedTuple):
    """diag(diagonal) + left right^T, of every head."""

    diagonal: Tensor
    """[HV, K]"""
    left: Tensor
    """[HV, K, n]"""
    right: Tensor
    """[HV, K, n]"""

    @property
    def mT(self) -> "LowRank":
        """Transposed."""
        return LowRank(self.diagonal, self.right, self.left)

    def times(self, x: Float[Tensor, "h k v"]) -> Float[Tensor, "h k v"]:
        """The product with a state."""
        return self.diagonal[..., None] * x + self.left @ (self.right.mT @ x)

    def packed(self) -> Tensor:
        """Side by side. [HV, K, 1 + 2 n]"""
        return torch.cat([self.diagonal[..., None], self.left, self.right], dim=-1)

    @staticmethod
    def unpacked(packed: Tensor) -> "LowRank":
        """The inverse."""
        left, right = packed[..., 1:].chunk(2, dim=-1)
        return LowRank(packed[..., 0], left, right)


def low_rank(transition: Float[Tensor, "h k k"], log_decay: Float[Tensor, "h g"], rank: int) -> LowRank:
    """A map beside the nearest of the rank given: with the diagonal of its decays, or without one.

    Args:
        transition: M. [HV, K, K]
        log_decay: sum of the log decays of its tokens. [HV, K], or of GDN [HV, 1]
        rank: n; larger than K is K.
    """
    rank = min(rank, transition.shape[-1])
    decay = log_decay.to(transition.dtype).exp().expand(transition.shape[:-1])
    diagonals = torch.stack([torch.zeros_like(decay), decay])
    finite = transition.isfinite().all(-1).all(-1) & decay.isfinite().all(-1)  # others have no such values
    beside = torch.where(finite[:, None, None], transition - torch.diag_embed(diagonals), 0)
    diagonals = torch.where(finite[:, None], diagonals, torch.nan)
    left, values, right = torch.linalg.svd(beside)
    dropped = values[..., rank:].amax(-1) if rank < values.shape[-1] else values[..., -1] * 0
    nearest = dropped.argmin(0)
    heads = torch.arange(len(transition), device=transition.device)
    left, values, right = (x[nearest, heads] for x in (left, values, right.mT))
    return LowRank(diagonals[nearest, heads], left[..., :rank] * values[:, None, :rank], right[..., :rank])


def states_of_nearest(transition: Tensor | None, state: Tensor, rounds: int, pass_on: Pass) -> list[Tensor]:
    """The states each rank begins with, of 1, 2, .. of the ranks before it. `rounds` of [HV, K, V]

    Args:
        transition: M; None where what is passed on does not depend on what was begun with. [HV, K, K]
        state: H. [HV, K, V]
        rounds: how many ranks.
        pass_on: forward.
    """
    found, all_ = torch.zeros_like(state), []
    for _ in range(rounds):
        found = pass_on(state if transition is None else torch.baddbmm(state, transition, found))
        all_.append(found)
    return all_


def gradients_of_nearest(
    transition: Tensor | None, found: list[Tensor], d_found: Tensor, pass_back: Pass
) -> tuple[Tensor | None, Tensor]:
    """Gradients of M and H.

    Args:
        transition: M; None: see states_of_nearest. [HV, K, K]
        found: of states_of_nearest.
        d_found: gradient of its last. [HV, K, V]
        pass_back: to the rank before; 0 comes to the last.
    """
    d_transition = None if transition is None else torch.zeros_like(transition)
    d_state = torch.zeros_like(d_found)
    for earlier in [*found[-2::-1], None]:
        came = pass_back(d_found)
        d_state = d_state + came
        if d_transition is not None and earlier is not None:
            d_transition = torch.baddbmm(d_transition, came, earlier.mT)
        d_found = torch.zeros_like(came) if transition is None else transition.mT @ came
    return d_transition, d_state
