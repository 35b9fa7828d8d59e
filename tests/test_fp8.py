"""FP8: both backends quantise to the bits that diptych/plans/fp8.py defines, and multiply what it says."""

import hypothesis.extra.numpy as arrays
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.plans import fp8 as plan
from jax_impl import fp8 as in_jax
from reference_torch import fp8 as in_torch

RECIPES = [plan.product_recipe(format, recipe) for format in ("e4m3", "hybrid") for recipe in ("current", "blockwise")]
QUANTIZATIONS = sorted({each for recipe in RECIPES for each in recipe}, key=str)
ANY_FLOAT = st.floats(width=32, allow_subnormal=False) | st.sampled_from([1e-44, -1e-39, 448.0, 464.0, 1e-6, 3e38])


def bits(x) -> np.ndarray:
    """The bits of an 8-bit array, with one NaN for all."""
    if isinstance(x, torch.Tensor):
        found = x.view(torch.uint8).numpy().copy()
        is_nan = x.float().isnan().numpy()
    else:
        found = np.asarray(x).view(np.uint8).copy()
        is_nan = np.isnan(np.asarray(x).astype(np.float32))
    found[is_nan] = 255
    return found


QUANTIZE_IN_JAX = jax.jit(in_jax.quantize, static_argnums=1)


def assert_quantised_alike(x: np.ndarray, quantization: plan.Quantization) -> None:
    values, inverse = plan.quantize(x, quantization)
    of_torch = in_torch.quantize(torch.from_numpy(x), quantization)
    of_jax = QUANTIZE_IN_JAX(jnp.asarray(x), quantization)
    for found, found_inverse in (of_torch, of_jax):
        np.testing.assert_array_equal(bits(found), bits(values))
        np.testing.assert_array_equal(np.asarray(found_inverse), inverse)
    whole = plan.dequantize(values, inverse, quantization)
    np.testing.assert_array_equal(in_torch.dequantize(*of_torch, quantization).numpy(), whole)
    np.testing.assert_array_equal(np.asarray(in_jax.dequantize(*of_jax, quantization)), whole)


@settings(max_examples=60)
@given(arrays.arrays(np.float32, (3, 5), elements=ANY_FLOAT))
def test_any_numbers_are_quantised_to_the_same_bits(x):
    for quantization in QUANTIZATIONS:
        assert_quantised_alike(x, quantization)


@pytest.mark.parametrize("quantization", QUANTIZATIONS, ids=str)
def test_every_rounding_is_to_the_nearest_and_to_even(quantization):
    """All numbers of the type, what lies half-way between two, and the float32 on both sides of that."""
    exact = np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, quantization.dtype)).astype(np.float32)
    exact = np.unique(exact[np.isfinite(exact)])
    half = ((exact[1:] + exact[:-1]) / 2).astype(np.float32)
    x = np.concatenate([exact, half, np.nextafter(half, np.float32(np.inf)), np.nextafter(half, np.float32(-np.inf))])
    rows = -(-len(x) // 64)
    x = np.pad(x, (0, rows * 64 - len(x))).reshape(rows, 64)
    x = np.insert(x, 0, quantization.largest, axis=1)  # so that every block has the scale 1
    assert_quantised_alike(x, quantization)
    values, inverse = plan.quantize(x, quantization)
    assert (inverse == 1).all()
    distance = np.abs(values.astype(np.float32)[..., None] - x[..., None])
    assert (distance <= np.abs(exact - x[..., None]).min(-1, keepdims=True)).all()
    of_halves = plan.quantize(np.insert(half[None], 0, quantization.largest, axis=1), quantization)[0]
    assert not (of_halves[:, 1:].view(np.uint8) & 1).any()  # the last bit of an even number is 0


@pytest.mark.parametrize("shape", [(1, 1), (3, 128), (130, 257), (128, 256)], ids=str)
def test_blocks_of_any_shape(shape):
    random = np.random.default_rng(shape[0])
    x = (random.normal(size=shape) * np.exp2(random.integers(-40, 40, shape))).astype(np.float32)
    for quantization in QUANTIZATIONS:
        assert_quantised_alike(x, quantization)
        values, inverse = plan.quantize(x, quantization)
        rows, columns = quantization.block or shape
        for (i, j), found in np.ndenumerate(inverse):
            block = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            scale = np.float32(quantization.largest) / np.abs(x[block]).max()
            scale = np.exp2(np.floor(np.log2(scale.astype(np.float64)))) if quantization.block else scale
            assert found == np.float32(1) / np.float32(scale)
            np.testing.assert_array_equal(
                bits(values[block]), bits((x[block] * np.float32(scale)).astype(values.dtype)), str(quantization)
            )


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_linear_map_and_its_gradients_are_products_of_quantised_arrays(recipe, dtype):
    random = np.random.default_rng(0)
    x = random.normal(size=(3, 50, 140)).astype(np.float32).astype(dtype)
    g = random.normal(size=(3, 50, 132)).astype(np.float32).astype(dtype)
    w = random.normal(size=(132, 140)).astype(np.float32)
    flat, rows = x.reshape(150, 140), g.reshape(150, 132)
    expected = (
        plan.product(flat, w, recipe.inputs, recipe.weights).reshape(3, 50, 132),
        plan.product(rows, w.T, recipe.gradients, recipe.weights).reshape(x.shape),
        plan.product(rows.T, flat.T, recipe.gradients, recipe.inputs),
    )

    def tensor(a):
        return torch.from_numpy(a.astype(np.float32)).to(getattr(torch, str(a.dtype))).requires_grad_()

    of_x, of_w = tensor(x), tensor(w)
    y = in_torch.fp8_linear(of_x, of_w, recipe)
    y.backward(tensor(g).detach())
    in_jax_y, pull_back = jax.vjp(lambda x, w: in_jax.fp8_linear(x, w, recipe), jnp.asarray(x), jnp.asarray(w))
    of_jax = (in_jax_y, *pull_back(jnp.asarray(g)))
    assert of_x.grad is not None
    assert of_w.grad is not None
    limits = (1e-6, 1e-6, 1e-6) if dtype == "float32" else (4e-3, 4e-3, 1e-6)
    for ours, theirs, right, limit in zip((y, of_x.grad, of_w.grad), of_jax, expected, limits, strict=True):
        for found in (ours.detach().float().numpy(), np.asarray(theirs).astype(np.float32)):
            assert np.linalg.norm(found - right) <= limit * np.linalg.norm(right)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_what_is_not_finite_is_seen(recipe, wrong):
    """It becomes NaN, instead of the largest number of the type."""
    x = np.ones((2, 3), np.float32)
    x[0, 1] = wrong
    y = in_torch.fp8_linear(torch.from_numpy(x), torch.ones(4, 3), recipe).numpy()
    np.testing.assert_array_equal(np.isnan(y).all(1), [True, recipe.inputs.block is None])
    np.testing.assert_array_equal(np.asarray(in_jax.fp8_linear(jnp.asarray(x), jnp.ones((4, 3)), recipe)), y)
