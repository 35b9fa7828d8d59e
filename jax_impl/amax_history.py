"""Delayed scaling of FP8 in JAX; diptych/plans/amax_history.py defines histories and scales.

Mirrors ``reference_torch/amax_history.py``.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from diptych.plans.amax_history import (
    EXPONENTS,
    MANTISSA_BITS,
    SHAPE,
    advanced,
    is_history,
    observed,
    scale_exponents,
)
from diptych.plans.fp8 import ProductRecipe


def delayed_scales(history: Float[Array, "3 1 1 e"], recipe: ProductRecipe, shift: int) -> Float[Array, "3"]:
    """Return the scales of inputs, weights and gradients, float32.

    Args:
        history: history of a linear map. SHAPE
        recipe: how the map quantises.
        shift: see diptych.plans.amax_history.gradient_shift.
    """
    remembered = lax.stop_gradient(history).reshape(SHAPE[0], EXPONENTS) > 0
    largest = jnp.where(remembered, jnp.arange(EXPONENTS, dtype=jnp.int32), 0).max(1)
    return lax.bitcast_convert_type(scale_exponents(largest, recipe, shift, jnp) << MANTISSA_BITS, jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def observe(
    y: Float[Array, "*b o"],
    x: Float[Array, "*b i"],
    weight: Float[Array, "o i"],
    history: Float[Array, "3 1 1 e"],
    shift: int,
) -> Float[Array, "*b o"]:
    """Return the output of a linear map, whose backward observes its arrays: the gradient of the history.

    Args:
        y: output of the map. [..., O]
        x: its input. [..., I]
        weight: its weight. [O, I]
        history: its history. SHAPE
        shift: see diptych.plans.amax_history.gradient_shift.
    """
    del x, weight, history, shift
    return y


def _forward(y: Array, x: Array, weight: Array, history: Array, shift: int) -> tuple[Array, Array]:
    """Return the output, and save the exponents of input and weight."""
    del history, shift
    return y, jnp.stack([_exponent(x), _exponent(weight)])


def _backward(shift: int, exponents: Array, gradient: Array) -> tuple[Array, None, None, Array]:
    """Return the gradient of the output unchanged, and 1 at the exponents of the three arrays."""
    exponents = jnp.concatenate([exponents, _exponent(gradient)[None]])
    return gradient, None, None, observed(exponents, shift, jnp.arange(EXPONENTS), jnp).astype(jnp.float32)


observe.defvjp(_forward, _backward)


def _exponent(x: Array) -> Array:
    """Return the exponent bits of the largest entry, a number of int32; 0 for an array without entries."""
    sizes = jnp.where(jnp.isfinite(x), jnp.abs(x), jnp.inf)  # XLA's maximum of a NaN and a number may be the number
    amax = sizes.max(initial=0).astype(jnp.float32)
    return lax.bitcast_convert_type(amax, jnp.int32) >> MANTISSA_BITS


def without_histories(gradients: Any, flags: Any) -> Any:
    """Return gradients with zeros for histories, of which an optimizer and a norm know nothing.

    Args:
        gradients: gradients, or shares of them.
        flags: True for every history, in a tree of the same structure.
    """
    return jax.tree.map(lambda g, is_one: jnp.zeros_like(g) if is_one else g, gradients, flags)


def with_advanced(updated: Any, histories: Any, gradients: Any, flags: Any, length: int) -> Any:
    """Return updated parameters in which histories have advanced by an optimizer step.

    Args:
        updated: parameters after the step of an optimizer, or shares of them.
        histories: the same before the step.
        gradients: what the step has observed.
        flags: True for every history.
        length: steps that are remembered.
    """
    return jax.tree.map(
        lambda new, old, g, is_one: advanced(old, g, length, jnp) if is_one else new,
        *(updated, histories, gradients, flags),
    )


def history_flags(shapes: Any) -> Any:
    """Return True for every leaf with the shape of a history."""
    return jax.tree.map(lambda p: is_history(p.shape), shapes)
