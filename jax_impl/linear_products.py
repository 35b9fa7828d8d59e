"""The products of linear maps, whose weight gradients may be computed later.

A pipeline schedule may split a backward into I, which computes the gradients of inputs, and W, which computes those of
weights. Under :class:`LinearTaps`, I returns what W multiplies.
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


@dataclass(frozen=True)
class LinearProducts:
    """The products of a linear map and of its gradients, in the type of its input."""

    def __call__(self, x: Array, weight: Array) -> Array:
        """Return x @ weight.T, differentiably."""
        return x @ weight.T.astype(x.dtype)

    def input_gradient(self, x: Array, weight: Array, gradient: Array) -> Array:
        """Return the gradient of x from that of the output."""
        return gradient @ weight.astype(x.dtype)

    def weight_gradient(self, x: Array, gradient: Array) -> Array:
        """Return the gradient of the weight from the input and the gradient of the output."""
        return jnp.einsum("no,ni->oi", as_matrix(gradient), as_matrix(x))


def as_matrix(x: Array) -> Array:
    """Return an array as a matrix of its last axis."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def multiply(products: LinearProducts, x: Array, weight: Array) -> Array:
    """Return x @ weight.T by these products, with the tap of the weight if a context gives it one."""
    taps = _TAPS.get()
    return products(x, weight) if taps is None else taps.product(products, x, weight)


@partial(jax.tree_util.register_dataclass, data_fields=["input", "output"], meta_fields=["products"])
@dataclass(frozen=True)
class LinearTap:
    """Arrays with the shapes of a linear map's input and output; see LinearTaps."""

    input: Any
    output: Any
    products: LinearProducts
    """The products of the map, by which its weight gradient is computed later."""


class LinearTaps:
    """A context in which backward returns the operands of weight gradients instead of the gradients.

    A tap is a pair of zero arrays with the shapes of a linear map's input and output. The map does not read the tap.
    The gradients of the tap are the map's input and the gradient of its output, whose product is the gradient of the
    weight. So a backward pass with taps computes no weight gradients, and they can be computed later. A tap is an
    ordinary argument of jax.vjp, so this also works under jax.checkpoint.

    Args:
        weights: arrays that linear will receive (compared by identity), by name.
        taps: taps by name; None: only record the shapes of taps.
    """

    def __init__(self, weights: Mapping[str, Array], taps: Mapping[str, LinearTap] | None = None) -> None:
        self.shapes: dict[str, LinearTap] = {}
        self._names = {id(weight): name for name, weight in weights.items()}
        self._taps = taps
        self._twice: set[str] = set()
        """Weights of several linear maps, which have no tap."""

    def __enter__(self) -> "LinearTaps":
        self._before = _TAPS.set(self)
        return self

    def __exit__(self, *exception: object) -> None:
        _TAPS.reset(self._before)

    def product(self, products: LinearProducts, x: Array, weight: Array) -> Array:
        """Return x @ weight.T, with the tap of the weight if it has one."""
        name = self._names.get(id(weight))
        if name is None:
            return products(x, weight)
        if name in self._twice or name in self.shapes:
            assert self._taps is None, f"{name} is the weight of two linear maps, but has one tap"
            self._twice.add(name)
            self.shapes.pop(name, None)
            return products(x, weight)
        output = jax.ShapeDtypeStruct((*x.shape[:-1], weight.shape[0]), x.dtype)
        self.shapes[name] = LinearTap(jax.ShapeDtypeStruct(x.shape, x.dtype), output, products)
        if self._taps is None:
            return products(x, weight)
        tap = self._taps[name]
        return _tapped_product(products, x, weight, *(tap.input, tap.output))


_TAPS: ContextVar[LinearTaps | None] = ContextVar("linear taps", default=None)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tapped_product(products: LinearProducts, x: Array, weight: Array, input_tap: Array, output_tap: Array) -> Array:
    """Return x @ weight.T, with the operands of the weight gradient as gradients of the taps; see LinearTaps."""
    return products(x, weight)


def _tapped_forward(
    products: LinearProducts, x: Array, weight: Array, *taps: Array
) -> tuple[Array, tuple[Array, Array]]:
    """Return the product, and save its operands."""
    return products(x, weight), (x, weight)


def _tapped_backward(
    products: LinearProducts, saved: tuple[Array, Array], grad: Array
) -> tuple[Array, None, Array, Array]:
    """Return the gradient of x, and x and the output gradient as gradients of the taps."""
    x, weight = saved
    return products.input_gradient(x, weight, grad), None, x, grad


_tapped_product.defvjp(_tapped_forward, _tapped_backward)
