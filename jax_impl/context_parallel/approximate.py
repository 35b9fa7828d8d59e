"""States that are not passed on whole: those of the nearest ranks, and maps of low rank.

What is left out has no gradient where states of far ranks are; of a map of low rank, gradients are those of the map
sent, and its own go to the map it stands for, as if nothing had been rounded.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float


class LowRank(NamedTuple):
    """diag(diagonal) + left right^T, of every head."""

    diagonal: Array
    """[HV, K]"""
    left: Array
    """[HV, K, n]"""
    right: Array
    """[HV, K, n]"""

    @property
    def mT(self) -> "LowRank":
        """Transposed."""
        return LowRank(self.diagonal, self.right, self.left)

    def times(self, x: Float[Array, "h k v"]) -> Float[Array, "h k v"]:
        """The product with a state."""
        return self.diagonal[..., None] * x + self.left @ (self.right.mT @ x)

    def packed(self) -> Array:
        """Side by side. [HV, K, 1 + 2 n]"""
        return jnp.concatenate([self.diagonal[..., None], self.left, self.right], axis=-1)

    @staticmethod
    def unpacked(packed: Array) -> "LowRank":
        """The inverse."""
        left, right = jnp.split(packed[..., 1:], 2, axis=-1)
        return LowRank(packed[..., 0], left, right)


def low_rank(transition: Float[Array, "h k k"], log_decay: Float[Array, "h g"], rank: int) -> LowRank:
    """A map beside the nearest of the rank given: with the diagonal of its decays, or without one.

    Args:
        transition: M. [HV, K, K]
        log_decay: sum of the log decays of its tokens. [HV, K], or of GDN [HV, 1]
        rank: n; larger than K is K.
    """
    rank = min(rank, transition.shape[-1])
    decay = jnp.broadcast_to(jnp.exp(log_decay.astype(transition.dtype)), transition.shape[:-1])
    diagonals = jnp.stack([jnp.zeros_like(decay), decay])
    finite = jnp.isfinite(transition).all((-2, -1)) & jnp.isfinite(decay).all(-1)  # others have no such values
    beside = jnp.where(finite[:, None, None], transition - diagonals[..., None] * jnp.eye(transition.shape[-1]), 0)
    diagonals = jnp.where(finite[:, None], diagonals, jnp.nan)
    left, values, right = jnp.linalg.svd(beside)
    dropped = values[..., rank:].max(-1) if rank < values.shape[-1] else values[..., -1] * 0
    nearest = dropped.argmin(0)
    heads = jnp.arange(len(transition))
    left, values, right = (x[nearest, heads] for x in (left, values, right.mT))
    return LowRank(diagonals[nearest, heads], left[..., :rank] * values[:, None, :rank], right[..., :rank])


def state_of_nearest(
    transition: Array, state: Array, goes_through: Array, rounds: int, pass_on: Callable[[Array], Array]
) -> Array:
    """The state each rank begins with, of so many ranks before it; automatic differentiation goes through. [HV, K, V]

    Args:
        transition: M. [HV, K, K]
        state: H. [HV, K, V]
        goes_through: whether what is passed on depends on what was begun with. []
        rounds: how many ranks.
        pass_on: hands a rank's array to the next rank, and returns what came; 0 on the first.
    """
    found = jnp.zeros_like(state)
    for _ in range(rounds):
        found = pass_on(jnp.where(goes_through, transition @ found + state, state))
    return found
