"""The matrix products of linear layers, whose weight gradients may be computed later.

A pipeline schedule may split a backward into I, which computes the gradients of inputs, and W, which computes those of
weights. Under :class:`LinearTaps`, I returns the operands of W.
"""

import math
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import DTypeLike


@dataclass(frozen=True)
class LinearProducts:
    """The matrix products of a linear layer and of its gradients, in the type of its input."""

    def __call__(self, x: Array, weight: Array, scales: Array | None = None, packed: Array | None = None) -> Array:
        """Return x @ weight.T, differentiably.

        Args:
            x: input. [..., I]
            weight: weight. [O, I]
            scales: scales of inputs, weights and gradients that come from earlier steps; only FP8 has some. [3]
            packed: x as it is saved for backward; see activation_storage. None: x itself.
        """
        del packed  # only PackedProducts of activation_storage saves x packed
        return x @ weight.T.astype(x.dtype)

    def read(self, saved: Array, width: int, dtype: DTypeLike) -> Array:
        """Return the input [..., width] from the array that was saved for backward in place of it."""
        return saved

    def input_gradient(self, x: Any, weight: Array, gradient: Array, scales: Array | None = None) -> Array:
        """Return the gradient of x from the gradient of the output; only shape and type of x are read."""
        return gradient @ weight.astype(x.dtype)

    def weight_gradient(self, x: Array, gradient: Array, scales: Array | None = None) -> Array:
        """Return the gradient of the weight from the input and the gradient of the output.

        XLA's CPU backend copies the first operand to transpose it, so that is the narrower one.
        """
        x = as_matrix(x)
        gradient = as_matrix(gradient)
        if gradient.shape[1] <= x.shape[1]:
            return jnp.einsum("no,ni->oi", gradient, x)
        return jnp.einsum("ni,no->io", x, gradient).T


def as_matrix(x: Array) -> Array:
    """Return an array as a matrix of its last axis."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def multiply(
    products: LinearProducts, x: Array, weight: Array, scales: Array | None = None, packed: Array | None = None
) -> Array:
    """Return x @ weight.T by these matrix products, with the tap of the weight if the active LinearTaps has one."""
    taps = _TAPS.get()
    multiplied = products if taps is None else partial(taps.product, products)
    return multiplied(x, weight, scales, packed)


@partial(jax.tree_util.register_dataclass, data_fields=["input", "output", "scales"], meta_fields=["products"])
@dataclass(frozen=True)
class LinearTap:
    """Arrays with the shapes of a linear layer's input and output; see LinearTaps."""

    input: Any
    output: Any
    scales: Any
    """None if the layer takes none."""
    products: LinearProducts
    """The matrix products of the layer, by which its weight gradient is computed later."""


class LinearTaps:
    """A context in which backward returns the operands of weight gradients instead of the gradients.

    A tap is a group of zero arrays with the shapes of a linear layer's input, output and, if it has some, scales. The
    layer does not read the tap. The gradients of the tap are the operands of the weight's gradient: the layer's input,
    the gradient of its output, and the scales. So a backward pass with taps computes no weight gradients, and they can
    be computed later. A tap is an ordinary argument of jax.vjp, so this also works under jax.checkpoint.

    Args:
        weights: arrays that linear will receive (compared by identity), by name.
        taps: taps by name; None: only record the shapes of taps.
    """

    def __init__(self, weights: Mapping[str, Array], taps: Mapping[str, LinearTap] | None = None) -> None:
        self.shapes: dict[str, LinearTap] = {}
        self._names = {id(weight): name for name, weight in weights.items()}
        self._taps = taps
        self._twice: set[str] = set()
        """Weights of several linear layers, which have no tap."""

    def __enter__(self) -> "LinearTaps":
        self._before = _TAPS.set(self)
        return self

    def __exit__(self, *exception: object) -> None:
        _TAPS.reset(self._before)

    def product(
        self, products: LinearProducts, x: Array, weight: Array, scales: Array | None, packed: Array | None
    ) -> Array:
        """Return x @ weight.T, with the tap of the weight if it has one."""
        name = self._names.get(id(weight))
        if name is None:
            return products(x, weight, scales, packed)
        if name in self._twice or name in self.shapes:
            assert self._taps is None, f"{name} is the weight of two linear layers, but has one tap"
            self._twice.add(name)
            self.shapes.pop(name, None)
            return products(x, weight, scales, packed)
        likes = (
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((*x.shape[:-1], weight.shape[0]), x.dtype),
            None if scales is None else jax.ShapeDtypeStruct(scales.shape, scales.dtype),
        )
        self.shapes[name] = LinearTap(*likes, products)
        if self._taps is None:
            return products(x, weight, scales, packed)
        tap = self._taps[name]
        return _tapped_product(products, x, weight, scales, packed, (tap.input, tap.output, tap.scales))


_TAPS: ContextVar[LinearTaps | None] = ContextVar("linear taps", default=None)
Operands = tuple[Array, Array, Array | None]
"""Operands of a product and its scales; or the arrays of a tap."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tapped_product(
    products: LinearProducts, x: Array, weight: Array, scales: Array | None, packed: Array | None, tap: Operands
) -> Array:
    """Return x @ weight.T, with the operands of the weight gradient as gradients of the tap; see LinearTaps."""
    return products(x, weight, scales, packed)


def _tapped_forward(
    products: LinearProducts, x: Array, weight: Array, scales: Array | None, packed: Array | None, tap: Operands
) -> tuple[Array, Operands]:
    """Return the product, and save its operands."""
    return products(x, weight, scales, packed), (x if packed is None else packed, weight, scales)


def _tapped_backward(
    products: LinearProducts, saved: Operands, grad: Array
) -> tuple[Array, None, None, None, tuple[Array, Array, Array | None]]:
    """Return the gradient of x, and x, the output gradient and the scales as gradients of the tap."""
    held, weight, scales = saved
    x = products.read(held, weight.shape[1], grad.dtype)
    return products.input_gradient(x, weight, grad, scales), None, None, None, (x, grad, scales)


_tapped_product.defvjp(_tapped_forward, _tapped_backward)
