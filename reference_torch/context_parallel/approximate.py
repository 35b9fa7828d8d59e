"""Approximate state exchange: only the states of the nearest ranks, or transitions of low rank.

The states of far ranks get no gradient. A low-rank transition is used in forward and backward; its own gradient is
given to the full transition that it replaces (a straight-through gradient).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

Shift = Callable[[Tensor], Tensor]
"""A function that sends an array to the next rank, and returns that of the previous rank (0 on the first rank)."""


class LowRank(NamedTuple):
    """The matrix diag(diagonal) + left right^T of every head."""

    diagonal: Tensor
    """[HV, K]"""
    left: Tensor
    """[HV, K, n]"""
    right: Tensor
    """[HV, K, n]"""

    @property
    def mT(self) -> "LowRank":
        """The transposed matrix."""
        return LowRank(self.diagonal, self.right, self.left)

    def times(self, x: Float[Tensor, "h k v"]) -> Float[Tensor, "h k v"]:
        """Return the product with a state.

        Args:
            x: state. [HV, K, V]
        """
        return self.diagonal[..., None] * x + self.left @ (self.right.mT @ x)

    def packed(self) -> Tensor:
        """Return the three parts, concatenated to [HV, K, 1 + 2 n]."""
        return torch.cat([self.diagonal[..., None], self.left, self.right], dim=-1)

    @staticmethod
    def unpacked(packed: Tensor) -> "LowRank":
        """Invert packed.

        Args:
            packed: [HV, K, 1 + 2 n]
        """
        left, right = packed[..., 1:].chunk(2, dim=-1)
        return LowRank(packed[..., 0], left, right)


def low_rank(transition: Float[Tensor, "h k k"], log_decay: Float[Tensor, "h g"], rank: int) -> LowRank:
    """Approximate a transition by a matrix of rank n, plus the diagonal of its decays if that is more accurate.

    Args:
        transition: M. [HV, K, K]
        log_decay: sum of the log decays of its tokens. [HV, K], or [HV, 1] for GDN
        rank: n; at most K is used.
    """
    rank = min(rank, transition.shape[-1])
    decay = log_decay.to(transition.dtype).exp().expand(transition.shape[:-1])
    diagonals = torch.stack([torch.zeros_like(decay), decay])
    finite = transition.isfinite().all(-1).all(-1) & decay.isfinite().all(-1)  # svd needs finite elements
    remainder = torch.where(finite[:, None, None], transition - torch.diag_embed(diagonals), 0)
    diagonals = torch.where(finite[:, None], diagonals, torch.nan)
    left, values, right = torch.linalg.svd(remainder)
    error = values[..., rank:].amax(-1) if rank < values.shape[-1] else values[..., -1] * 0
    choice = error.argmin(0)
    heads = torch.arange(len(transition), device=transition.device)
    left, values, right = (x[choice, heads] for x in (left, values, right.mT))
    return LowRank(diagonals[choice, heads], left[..., :rank] * values[:, None, :rank], right[..., :rank])


def states_of_nearest(transition: Tensor | None, state: Tensor, rounds: int, send_next: Shift) -> list[Tensor]:
    """Return the initial states of this rank, computed from 1, 2, ..., rounds previous ranks.

    Args:
        transition: M, [HV, K, K]; None: the final state does not depend on the initial state.
        state: S_local. [HV, K, V]
        rounds: number of previous ranks.
        send_next: sends to the next rank.

    Returns:
        One state [HV, K, V] per number of ranks.
    """
    initial = torch.zeros_like(state)
    initials = []
    for _ in range(rounds):
        initial = send_next(state if transition is None else torch.baddbmm(state, transition, initial))
        initials.append(initial)
    return initials


def gradients_of_nearest(
    transition: Tensor | None, initial: list[Tensor], d_initial: Tensor, send_previous: Shift
) -> tuple[Tensor | None, Tensor]:
    """Return the gradients of M, [HV, K, K] or None, and of S_local, [HV, K, V].

    Args:
        transition: see states_of_nearest.
        initial: result of states_of_nearest.
        d_initial: gradient of its last state. [HV, K, V]
        send_previous: sends to the previous rank; the last rank receives 0.
    """
    d_transition = None if transition is None else torch.zeros_like(transition)
    d_state = torch.zeros_like(d_initial)
    for earlier in [*initial[-2::-1], None]:
        d_received = send_previous(d_initial)
        d_state = d_state + d_received
        if d_transition is not None and earlier is not None:
            d_transition = torch.baddbmm(d_transition, d_received, earlier.mT)
        d_initial = torch.zeros_like(d_received) if transition is None else transition.mT @ d_received
    return d_transition, d_state
