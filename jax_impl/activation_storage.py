"""Values saved for backward in 8 bits in JAX; diptych/plans/activation_storage.py defines them.

Mirrors ``reference_torch/activation_storage.py``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import DTypeLike, Float, Int, UInt8

from diptych.plans.activation_storage import ACTIVATION_INPUT, QUANTIZATION, packed_width
from diptych.plans.fp8 import ProductRecipe
from diptych_kernels.mesh_axes import match_varying_axes
from jax_impl.autograd import differentiable_once
from jax_impl.fp8 import ALONE, SharingRanks, dequantize, quantize
from jax_impl.grouped_fp8 import fp8_grouped_linear
from jax_impl.linear_products import LinearProducts
from jax_impl.ops import grouped_linear
from jax_impl.recompute import name_value


def pack(x: Float[Array, "*b k"]) -> UInt8[Array, "*b p"]:
    """Return an array in 8 bits, [..., packed_width(K)] uint8.

    Args:
        x: the array. [..., K]
    """
    values, scale_inv = quantize(lax.stop_gradient(x).reshape(-1, x.shape[-1]), QUANTIZATION)
    exponents = lax.bitcast_convert_type(1 / scale_inv, jnp.int32) >> 23 & 255
    elements = lax.bitcast_convert_type(values, jnp.uint8)
    joined = jnp.concatenate([elements, exponents.astype(jnp.uint8)], axis=1)
    return joined.reshape(*x.shape[:-1], packed_width(x.shape[-1]))


def unpack(packed: UInt8[Array, "*b p"], width: int, dtype: DTypeLike) -> Float[Array, "*b k"]:
    """Return the values [..., K] of a packed array.

    Args:
        packed: array that pack has returned. [..., packed_width(K)]
        width: elements of a row. K
        dtype: type of the result.
    """
    rows = packed.reshape(-1, packed.shape[-1])
    scale_inv = 1 / lax.bitcast_convert_type(rows[:, width:].astype(jnp.int32) << 23, jnp.float32)
    values = lax.bitcast_convert_type(rows[:, :width], jnp.float8_e4m3fn)
    return dequantize(values, scale_inv, QUANTIZATION).astype(dtype).reshape(*packed.shape[:-1], width)


def packed_for_backward(x: Float[Array, "*b k"], name: str | None) -> UInt8[Array, "*b p"] | None:
    """Pack an array under a name that recompute policies know, or return None if it is not saved in 8 bits.

    Args:
        x: the array. [..., K]
        name: name of the value, one of diptych.plans.model.values.VALUES; None: it is not saved in 8 bits.

    Returns:
        [..., packed_width(K)] uint8, or None.
    """
    return None if name is None else name_value(pack(x), name)


@differentiable_once("activation_storage", "activation_storage", static=(0,))
def _once(backward: Callable[..., Any], *operands: Any) -> Any:
    """Return ``backward(*operands)``, whose derivative raises an error, because packed values have none."""
    return backward(*operands)


def _packed_first(y: Array, packed: Array) -> tuple[Array, Array]:
    """Return both arguments behind a barrier: XLA packs before it uses y, and frees the exact input in forward."""
    return lax.optimization_barrier((y, packed))


@dataclass(frozen=True)
class PackedProducts(LinearProducts):
    """Matrix products whose gradients read an input that was saved packed."""

    products: LinearProducts

    def __call__(self, x: Array, weight: Array, scales: Array | None = None, packed: Array | None = None) -> Array:
        """Return x @ weight.T, differentiably; ``packed`` is x as packed_for_backward returns it."""
        assert packed is not None, "a layer with packed products packs its input"
        return _packed_linear(self, *match_varying_axes((x, weight, scales, packed)))

    def read(self, saved: Array, width: int, dtype: DTypeLike) -> Array:
        """Return the values of a packed input."""
        return unpack(saved, width, dtype)

    def input_gradient(self, x: Any, weight: Array, gradient: Array, scales: Array | None = None) -> Array:
        """Return the gradient of x from that of the output."""
        return self.products.input_gradient(x, weight, gradient, scales)

    def weight_gradient(self, x: Array, gradient: Array, scales: Array | None = None) -> Array:
        """Return the gradient of the weight from the input that was read, and the gradient of the output."""
        return self.products.weight_gradient(x, gradient, scales)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _packed_linear(products: PackedProducts, x: Array, weight: Array, scales: Array | None, packed: Array) -> Array:
    """Return x @ weight.T."""
    return products.products(x, weight, scales)


Saved = tuple[Array, Array, Array | None]
"""Packed input, weight and scales of a linear layer."""


def _forward(
    products: PackedProducts, x: Array, weight: Array, scales: Array | None, packed: Array
) -> tuple[Array, Saved]:
    """Return the product, and save the packed input."""
    y, packed = _packed_first(products.products(x, weight, scales), packed)
    return y, (packed, weight, scales)


def _backward(products: PackedProducts, saved: Saved, gradient: Array) -> tuple[Array, Array, None, None]:
    """Return the gradients of both operands; each is one matrix product."""

    def gradients(saved: Saved, gradient: Array) -> tuple[Array, Array]:
        packed, weight, scales = saved
        x = products.read(packed, weight.shape[1], gradient.dtype)
        d_weight = products.weight_gradient(x, gradient, scales).astype(weight.dtype)
        return products.input_gradient(x, weight, gradient, scales), d_weight

    return *_once(gradients, saved, gradient), None, None


_packed_linear.defvjp(_forward, _backward)


def packed_grouped_linear(
    x: Float[Array, "m i"],
    weight: Float[Array, "e o i"],
    sizes: Int[Array, " e"],
    packed: UInt8[Array, "m p"],
    recipe: ProductRecipe | None = None,
    scales: Float[Array, "3"] | None = None,
    ranks: SharingRanks = ALONE,
) -> Float[Array, "m o"]:
    """Multiply consecutive rows by the matrix of their group; backward reads the rows in 8 bits.

    Args:
        x: rows, those of the first group first. [M, I]
        weight: a matrix for each group. [E, O, I]
        sizes: number of rows of each group.
        packed: the rows as packed_for_backward returns them. [M, packed_width(I)]
        recipe: how the arrays are quantised for matrix products of 8-bit floats; None: not at all.
        scales: see fp8.fp8_linear.
        ranks: see fp8.fp8_linear.

    Returns:
        [M, O] in the type of x.
    """
    return _packed_grouped((recipe, ranks), *match_varying_axes((x, weight, sizes, scales, packed)))


def _by_groups(
    how: tuple[ProductRecipe | None, SharingRanks], x: Array, weight: Array, sizes: Array, scales: Array | None
) -> Array:
    """Return the rows of packed_grouped_linear by plain matrix products, or by those of a recipe."""
    recipe, ranks = how
    return (
        grouped_linear(x, weight, sizes)
        if recipe is None
        else fp8_grouped_linear(x, weight, sizes, recipe, scales, ranks)
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _packed_grouped(
    how: tuple[ProductRecipe | None, SharingRanks],
    x: Array,
    weight: Array,
    sizes: Array,
    scales: Array | None,
    packed: Array,
) -> Array:
    """Return the rows of packed_grouped_linear."""
    return _by_groups(how, x, weight, sizes, scales)


def _grouped_forward(how: Any, x: Array, weight: Array, sizes: Array, scales: Array | None, packed: Array) -> Any:
    """Return the rows, and save the packed ones."""
    y, packed = _packed_first(_by_groups(how, x, weight, sizes, scales), packed)
    return y, (packed, weight, sizes, scales)


def _grouped_backward(how: Any, saved: Any, gradient: Array) -> tuple[Array, Array, None, None, None]:
    """Return the gradients of both operands, from the unpacked rows."""

    def gradients(saved: Any, gradient: Array) -> tuple[Array, Array]:
        packed, weight, sizes, scales = saved
        x = unpack(packed, weight.shape[2], gradient.dtype)
        return jax.vjp(lambda x, weight: _by_groups(how, x, weight, sizes, scales), x, weight)[1](gradient)

    return *_once(gradients, saved, gradient), None, None, None


_packed_grouped.defvjp(_grouped_forward, _grouped_backward)


def packed_activation(function: Callable[..., Array], x: Float[Array, "*b k"], impl: str) -> Array:
    """Return ``function(x, impl)``, whose backward reads x in 8 bits.

    Args:
        function: activation function.
        x: its input. [..., K]
        impl: implementation of the function.
    """
    return _activation(partial(function, impl=impl), x.shape[-1], x, packed_for_backward(x, ACTIVATION_INPUT))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _activation(function: Callable[[Array], Array], width: int, x: Array, packed: Array) -> Array:
    """Return the function of x."""
    return function(x)


def _activation_forward(function: Callable[[Array], Array], width: int, x: Array, packed: Array) -> tuple[Array, Array]:
    """Return the function of x, and save x packed."""
    return _packed_first(function(x), packed)


def _activation_backward(
    function: Callable[[Array], Array], width: int, packed: Array, gradient: Array
) -> tuple[Array, None]:
    """Return the gradient of the function at the saved values."""

    def gradients(packed: Array, gradient: Array) -> tuple[Array]:
        return jax.vjp(function, unpack(packed, width, gradient.dtype))[1](gradient)

    return *_once(gradients, packed, gradient), None


_activation.defvjp(_activation_forward, _activation_backward)
