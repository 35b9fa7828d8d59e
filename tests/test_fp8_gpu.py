"""FP8 on one GPU (make test-gpu): numbers are quantised to the bits of the CPU, and multiplied in 8 bits."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from diptych.plans import fp8 as plan
from jax_impl import fp8 as in_jax
from parity.compare import relative_difference
from reference_torch import fp8 as in_torch
from tests.backends import normal
from tests.test_fp8 import DELAYED, QUANTIZATIONS, RECIPES, bits

pytestmark = pytest.mark.gpu
NEEDS_JAX = pytest.mark.skipif(jax.default_backend() == "cpu", reason="needs JAX on the GPU")
SHAPES = [(384, 256, 512), (100, 144, 640), (1, 16, 16), (50, 140, 132)]
"""Tokens, outputs and inputs."""
IN_8_BITS = 1e-3
"""Limit of differences, relative to the norm: sums of up to 128 products have about 14 bits."""


def arrays_of(shape: tuple[int, int, int]) -> list[np.ndarray]:
    """x, weight and gradient, with rows of different sizes."""
    tokens, outputs, inputs = shape
    found = [normal(i, *size) for i, size in enumerate([(tokens, inputs), (outputs, inputs), (tokens, outputs)])]
    return [(x * np.exp(2 * normal(9, len(x), 1))).astype(np.float32) for x in found]


def expected(recipe, x, weight, gradient) -> list[np.ndarray]:
    return [
        plan.matrix_product(x, weight, recipe.inputs, recipe.weights),
        plan.matrix_product(gradient, weight.T, recipe.gradients, recipe.weights),
        plan.matrix_product(gradient.T, x.T, recipe.gradients, recipe.inputs),
    ]


def every_number(dtype: str) -> np.ndarray:
    """All numbers of an 8-bit type, the halves between them and their neighbours in float32, as a matrix."""
    numbers = np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, dtype)).astype(np.float32)
    numbers = np.sort(numbers[np.isfinite(numbers)])
    halves = (numbers[1:] + numbers[:-1]) / 2
    found = np.concatenate([numbers, halves, np.nextafter(halves, np.inf), np.nextafter(halves, -np.inf)])
    return found[np.abs(found) <= plan.LARGEST[dtype]].astype(np.float32).reshape(1, -1)


@pytest.mark.parametrize("quantization", QUANTIZATIONS, ids=str)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_torch_quantises_to_the_bits_of_numpy(quantization, is_transposed):
    for x in (every_number(quantization.dtype), arrays_of((130, 128, 257))[0]):
        x = np.ascontiguousarray(x.T) if is_transposed else x
        on_gpu = torch.from_numpy(x).cuda()
        on_gpu, x = (on_gpu.T, x.T) if is_transposed else (on_gpu, x)
        values, scale_inv = plan.quantize(x, quantization)
        found, found_scale_inv = in_torch.quantize(on_gpu, quantization)
        np.testing.assert_array_equal(bits(found.cpu()), bits(values))
        np.testing.assert_array_equal(found_scale_inv.cpu().numpy(), scale_inv)


@NEEDS_JAX
@pytest.mark.parametrize("quantization", QUANTIZATIONS, ids=str)
def test_jax_quantises_to_the_bits_of_numpy(quantization):
    def there_and_back(x):
        return in_jax.dequantize(*in_jax.quantize(x, quantization), quantization)

    for x in (every_number(quantization.dtype), arrays_of((130, 128, 257))[0]):
        values, scale_inv = plan.quantize(x, quantization)
        found, found_scale_inv = jax.jit(in_jax.quantize, static_argnums=1)(x, quantization)
        np.testing.assert_array_equal(bits(found), bits(values))
        np.testing.assert_array_equal(np.asarray(found_scale_inv), scale_inv)
        np.testing.assert_array_equal(jax.jit(there_and_back)(x), plan.dequantize(values, scale_inv, quantization))


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_torch_multiplies_in_8_bits(recipe, shape, monkeypatch):
    calls = []
    product = in_torch.product_in_8_bits
    monkeypatch.setattr(in_torch, "product_in_8_bits", lambda *x: calls.append(1) or product(*x))
    x, weight, gradient = arrays_of(shape)
    of_x, of_weight = (torch.from_numpy(a).cuda().requires_grad_() for a in (x, weight))
    y = in_torch.fp8_linear(of_x, of_weight, recipe)
    found = [y, *torch.autograd.grad(y, [of_x, of_weight], torch.from_numpy(gradient).cuda())]
    for ours, right in zip(found, expected(recipe, x, weight, gradient), strict=True):
        assert relative_difference(ours.detach().cpu().numpy(), right) < IN_8_BITS
    if shape == SHAPES[0] and torch.cuda.get_device_capability() == (9, 0):
        mixed = recipe.inputs.block is not None and recipe.gradients.dtype == "float8_e5m2"
        assert len(calls) == (1 if mixed else 3)


@NEEDS_JAX
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_jax_multiplies_in_8_bits(recipe, shape):
    def all_products(x, weight, gradient):
        y, pull_back = jax.vjp(lambda x, weight: in_jax.fp8_linear(x, weight, recipe), x, weight)
        return y, *pull_back(gradient)

    arrays = [jnp.asarray(x) for x in arrays_of(shape)]
    compiled = jax.jit(all_products).lower(*arrays).compile()
    for ours, right in zip(compiled(*arrays), expected(recipe, *arrays_of(shape)), strict=True):
        assert relative_difference(np.asarray(ours), right) < IN_8_BITS
    if shape == SHAPES[0] and recipe.inputs.block is None:
        assert len(re.findall(r"custom-call.*matmul\$f8", compiled.as_text() or "")) == 3


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
@pytest.mark.parametrize("recipe", [*RECIPES, DELAYED], ids=str)
def test_what_is_not_finite_is_seen(recipe, wrong):
    x, weight, _ = (torch.from_numpy(a).cuda() for a in arrays_of(SHAPES[0]))
    x[3, 5] = wrong
    scales = torch.ones(3, device="cuda") if recipe is DELAYED else None
    assert in_torch.fp8_linear(x, weight, recipe, scales)[3].isnan().all()
    if jax.default_backend() != "cpu":
        as_jax = None if scales is None else jnp.ones(3)
        y = jax.jit(in_jax.fp8_linear, static_argnums=2)(
            jnp.asarray(x.cpu()), jnp.asarray(weight.cpu()), recipe, as_jax
        )
        assert np.isnan(np.asarray(y)[3]).all()
