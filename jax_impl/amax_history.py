"""Delayed scaling of FP8 in JAX; diptych/plans/amax_history.py defines histories and scales.

Mirrors ``reference_torch/amax_history.py``.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from diptych.plans.amax_history import (
    EXPONENTS,
    MANTISSA_BITS,
    SHAPE,
    is_valid,
    observed,
    scale_exponents,
)
from diptych.plans.fp8 import ProductRecipe
from diptych_kernels.mesh_axes import match_varying_axes
from jax_impl.carry import without_gradient_unless_read
from jax_impl.fp8 import GRADIENTS, amax, rounded_to


def delayed_scales(history: Float[Array, "3 1 1 e"], recipe: ProductRecipe, factor: int) -> Float[Array, "3"]:
    """Return the scales of inputs, weights and gradients, float32.

    Args:
        history: history of a linear layer. SHAPE
        recipe: how the layer quantises.
        factor: factor by which the gradients of backward exceed the gradients of the step's mean loss.

    Returns:
        The scales; NaN if an optimizer has updated the history as a weight.
    """
    remembered = lax.stop_gradient(history).reshape(SHAPE[0], EXPONENTS) > 0
    largest = jnp.where(remembered, jnp.arange(EXPONENTS, dtype=jnp.int32), 0).max(1)
    scales = lax.bitcast_convert_type(scale_exponents(largest, recipe, jnp) << MANTISSA_BITS, jnp.float32)
    return jnp.where(is_valid(history), scales.at[GRADIENTS].divide(factor), jnp.nan)


def observe(
    y: Float[Array, "*b o"],
    x: Float[Array, "*b i"],
    weight: Float[Array, "*e o i"],
    history: Float[Array, "3 1 1 e"],
    factor: int,
) -> Float[Array, "*b o"]:
    """Return y; backward returns what it observes of the arrays of the linear layer as the gradient of the history.

    Args:
        y: output of the layer. [..., O]
        x: its input. [..., I]
        weight: its weight. [O, I], or [E, O, I] of experts
        history: its history. SHAPE
        factor: see delayed_scales.
    """
    history = without_gradient_unless_read(history)
    return _observe(*match_varying_axes((y, x, weight, history)), factor)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _observe(y: Array, x: Array, weight: Array, history: Array, factor: int) -> Array:
    """Return the output."""
    del x, weight, history, factor
    return y


def _forward(y: Array, x: Array, weight: Array, history: Array, factor: int) -> tuple[Array, Array]:
    """Return the output, and save the exponents of input and weight."""
    del history, factor
    weight_exponent = _exponent(rounded_to(amax(weight), x.dtype))  # as if its elements had been rounded
    return y, jnp.stack([_exponent(x), weight_exponent])


def _backward(factor: int, exponents: Array, gradient: Array) -> tuple[Array, None, None, Array]:
    """Return the gradient of the output unchanged, and 1 at the exponents of the three arrays."""
    exponents = jnp.concatenate([exponents, _exponent(gradient, factor)[None]])
    return gradient, None, None, observed(exponents, jnp.arange(EXPONENTS), jnp).astype(jnp.float32)


_observe.defvjp(_forward, _backward)


def _exponent(x: Array, factor: int = 1) -> Array:
    """Return the exponent bits of the largest absolute element / factor, int32; 0 for an array without elements."""
    return lax.bitcast_convert_type(amax(x).astype(jnp.float32) / factor, jnp.int32) >> MANTISSA_BITS
