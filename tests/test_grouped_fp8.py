"""FP8 layers of experts: both backends multiply each expert's quantised rows, and experts compose with the rest."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from diptych.plans import fp8 as plan
from diptych.plans.config import TransformerConfig
from jax_impl import grouped_fp8 as in_jax
from parity.compare import relative_difference
from reference_torch import grouped_fp8 as in_torch
from reference_torch.ops import grouped_linear
from tests.backends import BACKENDS, model_gradients, normal
from tests.test_fp8 import DELAYED, RECIPES, TOKENS

SIZES = [(130, 0, 129, 41), (0, 0, 3, 0), (128, 256, 5, 1)]
"""Rows of each expert."""


def experts_of(sizes: tuple[int, ...], inputs: int, outputs: int) -> list[np.ndarray]:
    """Rows, weights and gradients; experts have entries of different sizes, so that a scale shows whose it is."""
    rows = sum(sizes)
    factors = np.exp(4 * normal(9, rows, 1))  # blocks, whose scales are powers of two, show in small numbers only
    x, weight, gradient = normal(1, rows, inputs), normal(2, len(sizes), outputs, inputs), normal(3, rows, outputs)
    arrays = x * factors, weight * np.exp(normal(8, len(sizes), 1, 1)), gradient / factors
    return [a.astype(np.float32) for a in arrays]


def quantised(x: np.ndarray, quantization: plan.Quantization, scale: np.float32 | None) -> np.ndarray:
    return plan.dequantize(*plan.quantize(x, quantization, scale), quantization)


def expected(sizes, recipe, scales, x, weight, gradient) -> list[np.ndarray]:
    """The products of every expert, from the definition."""
    given = scales
    if recipe.inputs.block is None and scales is None:
        recipe = plan.with_given_scales(recipe)
        arrays = zip((x, weight, gradient), recipe, strict=True)
        given = [plan.scales(np.abs(a).max(), q) for a, q in arrays]

    def read(a, number):
        return quantised(a, recipe[number], None if given is None else given[number])

    y, d_x, d_weight = np.zeros_like(gradient), np.zeros_like(x), np.zeros_like(weight)
    begin = 0
    for expert, size in enumerate(sizes):
        rows = slice(begin, begin + size)
        begin += size
        y[rows] = read(x[rows], 0) @ read(weight[expert], 1).T
        d_x[rows] = read(gradient[rows], 2) @ read(weight[expert].T, 1).T
        d_weight[expert] = read(gradient[rows].T, 2) @ read(x[rows].T, 0).T
    return [y, d_x, d_weight]


@pytest.mark.parametrize("recipe", [*RECIPES, DELAYED], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_expert_multiplies_quantised_rows(recipe, sizes):
    arrays = experts_of(sizes, 140, 132)
    scales = np.array([4.0, 8.0, 0.5], np.float32) if recipe is DELAYED else None
    right = expected(sizes, recipe, scales, *arrays)
    x, weight = (torch.from_numpy(a).requires_grad_() for a in arrays[:2])
    given = None if scales is None else torch.from_numpy(scales)
    y = in_torch.fp8_grouped_linear(x, weight, sizes, recipe, given)
    of_torch = [y, *torch.autograd.grad(y, [x, weight], torch.from_numpy(arrays[2]))]

    @jax.jit
    def all_products(x, weight, gradient, sizes):
        def forward(x, weight):
            return in_jax.fp8_grouped_linear(x, weight, sizes, recipe, None if scales is None else jnp.asarray(scales))

        y, pull_back = jax.vjp(forward, x, weight)
        return y, *pull_back(gradient)

    of_jax = all_products(*arrays, np.array(sizes))
    for ours, theirs, definition in zip(of_torch, of_jax, right, strict=True):
        assert relative_difference(ours.detach().numpy(), definition) < 1e-6
        assert relative_difference(np.asarray(theirs), definition) < 1e-6


EXPERTS = TransformerConfig(
    hidden_size=24,
    num_layers=2,
    num_attention_heads=2,
    ffn_hidden_size=40,
    vocab_size=17,
    seq_length=8,
    layer_pattern="attention+moe,gdn+moe+gelu",
    num_moe_experts=4,
    moe_router_topk=2,
    moe_ffn_hidden_size=12,
    moe_shared_expert_intermediate_size=20,
    moe_shared_expert_gate=True,
    init_method_std=0.1,
)


@pytest.mark.parametrize("recipe", ["current", "delayed", "blockwise"])
def test_both_backends_have_the_gradients(recipe):
    config = replace(EXPERTS, fp8="hybrid", fp8_recipe=recipe)
    arguments = {"tokens": TOKENS, "cotangent": normal(1, 2, 8, 17), "step": 0}
    (ours, of_torch), (theirs, of_jax) = (model_gradients(backend, config, **arguments) for backend in BACKENDS)
    assert relative_difference(ours, theirs) <= 2e-6
    far = {name: float(relative_difference(of_torch[name], of_jax[name])) for name in of_torch}
    assert max(far.values()) <= 1e-4, far
    experts = "decoder.layers.0.mlp.experts.linear_fc1.weight"
    assert relative_difference(of_torch[experts], model_gradients("torch", EXPERTS, **arguments)[1][experts]) > 1e-2


@pytest.mark.parametrize("backend", BACKENDS)
def test_second_derivatives_are_refused(backend):
    x, weight, _ = experts_of((2, 3), 5, 4)
    if backend == "torch":
        of_x, of_weight = torch.from_numpy(x).requires_grad_(), torch.from_numpy(weight)
        y = in_torch.fp8_grouped_linear(of_x, of_weight, (2, 3), RECIPES[0])
        with pytest.raises(RuntimeError, match=r"GroupedLinear.*: expected to be differentiated once"):
            torch.autograd.grad(y.pow(2).sum(), of_x, create_graph=True)
        return

    def squares(x):
        return (in_jax.fp8_grouped_linear(x, jnp.asarray(weight), jnp.array([2, 3]), RECIPES[0]) ** 2).sum()

    with pytest.raises(RuntimeError, match="fp8_grouped_linear: expected to be differentiated once"):
        jax.jit(jax.grad(lambda x: jax.grad(squares)(x).sum()))(x)


GROUPED_LINEAR_IN_JAX = jax.jit(in_jax.fp8_grouped_linear, static_argnums=3)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
@pytest.mark.parametrize("recipe", [*RECIPES, DELAYED], ids=str)
def test_what_is_not_finite_is_seen_by_all_with_its_scale(recipe, wrong):
    """All experts, unless blocks have scales of their own; also with scales from earlier steps."""
    x, w = np.ones((4, 8), np.float32), np.ones((2, 5, 8), np.float32)
    x[0, 0] = wrong
    scales = np.full(3, 16, np.float32) if recipe == DELAYED else None
    given = None if scales is None else torch.from_numpy(scales)
    ours = in_torch.fp8_grouped_linear(torch.from_numpy(x), torch.from_numpy(w), [2, 2], recipe, given).numpy()
    is_wrong = [True, *[recipe.inputs.block is None] * 3]
    np.testing.assert_array_equal(np.isnan(ours).all(1), is_wrong)
    theirs = GROUPED_LINEAR_IN_JAX(x, w, jnp.array([2, 2]), recipe, scales)
    np.testing.assert_array_equal(np.asarray(theirs), ours)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("module", [in_torch, in_jax], ids=["torch", "jax"])
def test_wrong_arguments_are_named(module):
    as_array = torch.from_numpy if module is in_torch else jnp.asarray
    x, weight, _ = (as_array(a) for a in experts_of((2, 3), 5, 4))
    sizes = (2, 3) if module is in_torch else jnp.array([2, 3])
    with pytest.raises(ValueError, match=r"weight: expected shape \(2, 4, 3\), got \(2, 4, 5\)"):
        module.fp8_grouped_linear(x[:, :3], weight, sizes, RECIPES[0])
    with pytest.raises(ValueError, match=r"sizes: expected shape \(2,\), got \(1,\)"):
        module.fp8_grouped_linear(x, weight, sizes[:1], RECIPES[0])


@pytest.mark.parametrize("sizes", [(2, 2), (3, 3), (6, -1)])
def test_groups_that_are_not_all_rows_are_refused(sizes):
    x, weight = torch.ones(5, 3), torch.ones(2, 4, 3)
    with pytest.raises(ValueError, match=r"sizes: expected numbers of rows with sum 5, the rows of x, got \["):
        in_torch.fp8_grouped_linear(x, weight, sizes, RECIPES[0])
    with pytest.raises(ValueError, match=r"sizes: expected numbers of rows with sum 5, the rows of x, got \["):
        grouped_linear(x, weight, sizes)
