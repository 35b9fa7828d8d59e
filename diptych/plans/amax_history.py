"""Delayed scaling of FP8: the largest elements of earlier optimizer steps, from which both backends take scales.

A linear layer has a history of its inputs, its weight and the gradients of its outputs. The history of an array has an
entry for each exponent of a float32. Entry e counts the optimizer steps for which an amax with exponent e is still
remembered, where the amax is the largest absolute element of the array. So

    amax < 2^(e + 1),    e = largest remembered exponent,
    scale = 2^(floor(log2(largest)) - 1 - e)

where ``largest`` is the largest number of the 8-bit type, and 1 is the scale while no exponent is remembered. Elements
up to 1.75 times the largest remembered one, at least, are not clipped.

The history is a parameter of the linear layer that no optimizer updates. Its gradient is 1 at each exponent that the
backward of a microbatch has observed. Microbatches and ranks with other samples, tokens or heads therefore add up what
they have observed as they add up gradients, in any order, and where a sum is not 0, the exponent was observed. After
the step,

    history = length where the gradient is not 0,  else max(history - 1, 0)

A forward, a replay of recompute and a validation change nothing.

Gradients are remembered as those of the mean loss of a step, whatever the number of ranks that take a mean of gradients
after backward, or the number of tokens that they are divided by: what backward observes is divided by this factor, and
so are the scales of gradients.

A history with a negative element, or one that is not finite, gives scales NaN: an optimizer has updated it as a weight.

Reference: Micikevicius et al., arXiv 2209.05433, section 3.2, for scales from earlier steps. That the largest elements
are known by their exponents, so that a maximum becomes a sum, is this project's choice.
"""

import math
from typing import Any

import numpy as np

from diptych.plans.config import TransformerConfig
from diptych.plans.fp8 import ProductRecipe, linear_recipe

NAME = "amax_history"
"""Name of the parameter."""
EXPONENTS = 256
"""Exponents of a float32, 2^(i - 127) for i from 1 to 254. 0 and 255 stand for zero, infinity and NaN."""
SHAPE = (3, 1, 1, EXPONENTS)
"""Shape of the history of inputs, weights and gradients. No weight has four axes, by which optimizers know it."""
MANTISSA_BITS = 23
"""Bits of a float32 below its exponent."""
BIAS = 127
"""Exponent of the number 1 in the bits of a float32."""


def has_history(config: TransformerConfig, name: str) -> bool:
    """Return True if a linear layer takes its scales from a history.

    Args:
        config: configuration of the model.
        name: canonical name of the layer.
    """
    recipe = linear_recipe(config, name)
    return recipe is not None and recipe.inputs.has_given_scale


def is_history(shape: tuple[int, ...]) -> bool:
    """Return True for the shape of a history."""
    return tuple(shape) == SHAPE


def observed(exponents: Any, places: Any, xp: Any = np) -> Any:
    """Return 1 at the exponents of the largest elements of a layer's arrays, else 0, as floating-point array of SHAPE.

    An array of zeros (or numbers below 2^-126), or with an element that is not finite, has no exponent.

    Args:
        exponents: bits of the exponents of inputs, weight and gradients. [3] integer
        places: numbers from 0 to EXPONENTS - 1.
        xp: numpy, jax.numpy or torch.
    """
    has_one = (exponents > 0) & (exponents < EXPONENTS - 1)
    found = (places == exponents[:, None]) & has_one[:, None]
    return xp.where(found, 1.0, 0.0).reshape(SHAPE)


def advanced(history: Any, gradient: Any, length: int, xp: Any = np) -> Any:
    """Return the history after an optimizer step.

    Args:
        history: history before the step, or a part of its elements.
        gradient: what the step has observed, of the same shape; 0: not observed.
        length: steps that are remembered.
        xp: numpy, jax.numpy or torch.
    """
    return xp.where(gradient != 0, xp.full_like(history, length), xp.clip(history - 1, 0, None))


def scales(history: np.ndarray, recipe: ProductRecipe, factor: int = 1) -> np.ndarray:
    """Return the scales of inputs, weights and gradients, [3] float32.

    Args:
        history: history of a linear layer. SHAPE
        recipe: how the layer quantises.
        factor: gradients of backward divided by those of the mean loss of the step.
    """
    if not is_valid(history):
        return np.full(3, np.nan, np.float32)
    remembered = history.reshape(SHAPE[0], EXPONENTS) > 0
    largest = np.where(remembered, np.arange(EXPONENTS), 0).max(axis=1)
    exponents = scale_exponents(largest, recipe)
    return (exponents.astype(np.int32) << MANTISSA_BITS).view(np.float32) / np.array([1, 1, factor], np.float32)


def is_valid(history: Any) -> Any:
    """Return True if no element of a history is negative, infinite or NaN."""
    return ((history >= 0) & (history < float("inf"))).all()


def scale_exponents(largest: Any, recipe: ProductRecipe, xp: Any = np) -> Any:
    """Return the exponents of the scales, as bits of a float32.

    Args:
        largest: largest remembered exponent of inputs, weights and gradients; 0: none. [3] integer
        recipe: how the layer quantises.
        xp: numpy, jax.numpy or torch.
    """
    tops = [math.frexp(quantization.largest)[1] - 1 for quantization in recipe]
    each = [xp.where(e == 0, BIAS, top - 1 + 2 * BIAS - e) for top, e in zip(tops, largest, strict=True)]
    return xp.clip(xp.stack(each), 1, 2 * BIAS - 1)  # both a scale and its inverse are normal numbers
