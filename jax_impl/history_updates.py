"""Histories of delayed FP8 scaling in an optimizer step; diptych/plans/amax_history.py defines how they advance."""

from typing import Any

import jax
import jax.numpy as jnp

from diptych.plans.amax_history import advanced, is_history


def without_histories(gradients: Any, flags: Any) -> Any:
    """Return gradients with zeros for histories, so that optimizer and gradient norm ignore them.

    Args:
        gradients: gradients, or shards of them.
        flags: True for every history, in a tree of the same structure.
    """
    return jax.tree.map(lambda g, is_one: jnp.zeros_like(g) if is_one else g, gradients, flags)


def with_advanced(updated: Any, histories: Any, gradients: Any, flags: Any, length: int) -> Any:
    """Return updated parameters in which histories have advanced by an optimizer step.

    Args:
        updated: parameters after the step of an optimizer, or shards of them.
        histories: the same before the step.
        gradients: gradients of the step; those of histories are the observed exponents.
        flags: True for every history.
        length: number of steps for which an exponent is remembered.
    """
    return jax.tree.map(
        lambda new, old, g, is_one: advanced(old, g, length, jnp) if is_one else new,
        *(updated, histories, gradients, flags),
    )


def history_flags(shapes: Any) -> Any:
    """Return True for every leaf with the shape of a history."""
    return jax.tree.map(lambda p: is_history(p.shape), shapes)
