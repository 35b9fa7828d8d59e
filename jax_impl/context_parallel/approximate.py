"""Approximate state exchange: only the states of the nearest ranks, or transitions of low rank.

The states of far ranks get no gradient. A low-rank transition is used in forward and backward; its own gradient is
given to the full transition that it replaces (a straight-through gradient).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float


class LowRank(NamedTuple):
    """The matrix diag(diagonal) + left right^T of every head."""

    diagonal: Array
    """[HV, K]"""
    left: Array
    """[HV, K, n]"""
    right: Array
    """[HV, K, n]"""

    @property
    def mT(self) -> "LowRank":
        """The transposed matrix."""
        return LowRank(self.diagonal, self.right, self.left)

    def times(self, x: Float[Array, "h k v"]) -> Float[Array, "h k v"]:
        """Return the product with a state.

        Args:
            x: state. [HV, K, V]
        """
        return self.diagonal[..., None] * x + self.left @ (self.right.mT @ x)

    def packed(self) -> Array:
        """Return the three parts, concatenated to [HV, K, 1 + 2 n]."""
        return jnp.concatenate([self.diagonal[..., None], self.left, self.right], axis=-1)

    @staticmethod
    def unpacked(packed: Array) -> "LowRank":
        """Invert packed.

        Args:
            packed: [HV, K, 1 + 2 n]
        """
        left, right = jnp.split(packed[..., 1:], 2, axis=-1)
        return LowRank(packed[..., 0], left, right)


def low_rank(transition: Float[Array, "h k k"], log_decay: Float[Array, "h g"], rank: int) -> LowRank:
    """Approximate a transition by a matrix of rank n, plus the diagonal of its decays if that is more accurate.

    Args:
        transition: M. [HV, K, K]
        log_decay: sum of the log decays of its tokens. [HV, K], or [HV, 1] for GDN
        rank: n; at most K is used.
    """
    rank = min(rank, transition.shape[-1])
    decay = jnp.broadcast_to(jnp.exp(log_decay.astype(transition.dtype)), transition.shape[:-1])
    diagonals = jnp.stack([jnp.zeros_like(decay), decay])
    finite = jnp.isfinite(transition).all((-2, -1)) & jnp.isfinite(decay).all(-1)  # svd needs finite elements
    remainder = jnp.where(finite[:, None, None], transition - diagonals[..., None] * jnp.eye(transition.shape[-1]), 0)
    diagonals = jnp.where(finite[:, None], diagonals, jnp.nan)
    left, values, right = jnp.linalg.svd(remainder)
    error = values[..., rank:].max(-1) if rank < values.shape[-1] else values[..., -1] * 0
    choice = error.argmin(0)
    heads = jnp.arange(len(transition))
    left, values, right = (x[choice, heads] for x in (left, values, right.mT))
    return LowRank(diagonals[choice, heads], left[..., :rank] * values[:, None, :rank], right[..., :rank])


def state_of_nearest(
    transition: Array, state: Array, goes_through: Array, rounds: int, send_next: Callable[[Array], Array]
) -> Array:
    """Return the initial state of this rank, computed from the nearest previous ranks, differentiably.

    Args:
        transition: M. [HV, K, K]
        state: S_local. [HV, K, V]
        goes_through: True if the final state depends on the initial state. []
        rounds: number of previous ranks.
        send_next: sends a rank's array to the next rank, and returns the array of the previous rank (0 on the first).

    Returns:
        [HV, K, V]
    """
    initial = jnp.zeros_like(state)
    for _ in range(rounds):
        initial = send_next(jnp.where(goes_through, transition @ initial + state, state))
    return initial
