"""Values saved in 8 bits: both backends read the numbers of the definition, save no others, and change no forward."""

from dataclasses import replace
from typing import Any

import hypothesis.extra.numpy as arrays
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.plans import activation_storage as plan
from diptych.plans import fp8
from diptych.plans.model.layers import format_numbers, format_offload, layer_numbers, offloaded_values
from diptych.plans.model.values import VALUES
from diptych.plans.recompute import recompute_blocks, without_recompute
from jax_impl import activation_storage as in_jax
from jax_impl.linear_products import LinearProducts
from parity.compare import relative_difference
from reference_torch import activation_storage as in_torch
from reference_torch import ops
from reference_torch.fp8 import Fp8Products
from reference_torch.recompute import residual_report
from reference_torch.transformer import GPTModel
from tests.backends import BACKENDS, model_gradients, normal
from tests.test_fp8 import ANY_FLOAT, LATENT, LAYERS, TOKENS

CONFIG = replace(LAYERS, activation_storage="fp8")
MODELS = {
    "layers": CONFIG,
    "latent": replace(LATENT, activation_storage="fp8"),
    "FP8": replace(CONFIG, fp8="hybrid", fp8_recipe="delayed"),
    "experts": replace(CONFIG, layer_pattern="attention+moe,gdn", num_moe_experts=4, moe_ffn_hidden_size=12),
    "post-norm, GELU": replace(CONFIG, layer_pattern="attention+post-norm+gelu,kda"),
}
SAVED = frozenset(name for name in VALUES if name.endswith("fp8"))


@settings(max_examples=60)
@given(arrays.arrays(np.float32, (3, 5), elements=ANY_FLOAT))
def test_any_numbers_are_packed_to_the_same_bytes(x):
    assert_packed_alike(x)


@pytest.mark.parametrize("shape", [(1, 1), (2, 3, 128), (4, 130), (3, 257), (0, 130)], ids=str)
def test_arrays_of_any_shape(shape):
    assert_packed_alike(normal(0, *shape).astype(np.float32))


PACK_IN_JAX, UNPACK_IN_JAX = jax.jit(in_jax.pack), jax.jit(in_jax.unpack, static_argnums=(1, 2))


def assert_packed_alike(x: np.ndarray) -> None:
    packed = plan.pack(x)
    assert packed.shape == (*x.shape[:-1], plan.packed_width(x.shape[-1]))
    read = plan.unpack(packed, x.shape[-1])
    finite = np.isfinite(x).all(-1)
    of_torch, of_jax = in_torch.pack(torch.from_numpy(x)), PACK_IN_JAX(x)
    np.testing.assert_array_equal(in_torch.unpack(of_torch, x.shape[-1], torch.float32).numpy(), read)
    np.testing.assert_array_equal(np.asarray(UNPACK_IN_JAX(of_jax, x.shape[-1], jnp.float32)), read)
    for found in (of_torch, of_jax):
        np.testing.assert_array_equal(np.asarray(found)[finite], packed[finite])
    whole, scale_inv = fp8.quantize(x.reshape(-1, x.shape[-1]), plan.QUANTIZATION)
    np.testing.assert_array_equal(read.reshape(whole.shape), fp8.dequantize(whole, scale_inv, plan.QUANTIZATION))


@pytest.mark.parametrize("recipe", [None, fp8.product_recipe("e4m3", "blockwise")], ids=["float32", "FP8"])
def test_backward_of_a_linear_layer_reads_its_input_in_8_bits(recipe):
    x, weight, gradient = normal(0, 3, 7, 140), normal(1, 9, 140), normal(2, 3, 7, 9)
    x, weight, gradient = (a.astype(np.float32) for a in (x, weight, gradient))
    read = plan.unpack(plan.pack(x), 140).reshape(-1, 140)
    rows = gradient.reshape(-1, 9)
    if recipe is None:
        right = [x @ weight.T, gradient @ weight, rows.T @ read]
        of_torch, of_jax = in_torch.PlainProducts(), LinearProducts()
    else:
        right = [
            fp8.matrix_product(x.reshape(-1, 140), weight, recipe.inputs, recipe.weights).reshape(gradient.shape),
            fp8.matrix_product(rows, weight.T, recipe.gradients, recipe.weights).reshape(x.shape),
            fp8.matrix_product(rows.T, read.T, recipe.gradients, recipe.inputs),
        ]
        from jax_impl.fp8 import Fp8Products as JaxProducts

        of_torch, of_jax = Fp8Products(recipe, torch.float32), JaxProducts(recipe)
    given, of_weight = torch.from_numpy(x).requires_grad_(), torch.from_numpy(weight).requires_grad_()
    y = in_torch.packed_linear(given, of_weight, in_torch.pack(given), of_torch)
    ours = [y, *torch.autograd.grad(y, [given, of_weight], torch.from_numpy(gradient))]
    products = in_jax.PackedProducts(of_jax)

    @jax.jit
    def run(x, w, gradient):
        y, pull_back = jax.vjp(lambda x, w: products(x, w, None, in_jax.pack(x)), x, w)
        return y, *pull_back(gradient)

    for found, other, definition in zip(ours, run(x, weight, gradient), right, strict=True):
        assert relative_difference(found.detach().numpy(), definition) < 1e-6
        assert relative_difference(np.asarray(other), definition) < 1e-6


def test_backward_of_an_activation_function_reads_its_input_in_8_bits():
    x, gradient = normal(0, 5, 260).astype(np.float32), normal(1, 5, 130).astype(np.float32)
    given, read = (torch.from_numpy(a).requires_grad_() for a in (x, plan.unpack(plan.pack(x), 260)))
    y = in_torch.packed_activation(ops.swiglu, given, "reference")
    torch.testing.assert_close(y, ops.swiglu(given, "reference"), rtol=0, atol=0)
    (ours,) = torch.autograd.grad(y, given, torch.from_numpy(gradient))
    (right,) = torch.autograd.grad(ops.swiglu(read, "reference"), read, torch.from_numpy(gradient))
    torch.testing.assert_close(ours, right, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", MODELS)
def test_both_backends_change_no_forward_and_have_the_gradients(kind):
    config = MODELS[kind]
    arguments = {"tokens": TOKENS, "cotangent": normal(1, 2, 8, 17), "step": 0}
    (ours, of_torch), (theirs, of_jax) = (model_gradients(backend, config, **arguments) for backend in BACKENDS)
    plain, exact = model_gradients("torch", replace(config, activation_storage=None), **arguments)
    np.testing.assert_array_equal(ours, plain)
    assert relative_difference(theirs, plain) <= 2e-6
    far = {name: float(relative_difference(of_torch[name], of_jax[name])) for name in of_torch}
    assert max(far.values()) <= (5e-2 if config.fp8 else 1e-4), far
    changed = {name: float(relative_difference(of_torch[name], exact[name])) for name in of_torch}
    of_maps = {name: value for name, value in changed.items() if name.endswith((".linear_qkv.weight", "fc2.weight"))}
    assert 1e-3 < min(of_maps.values()) < max(of_maps.values()) < (0.2 if config.fp8 else 0.1), of_maps


@pytest.mark.parametrize("mode", [{}, {"recompute_layout": "full*2,layernorm,none"}], ids=["", "recomputed"])
def test_layers_are_chosen(mode):
    """Layers after the last chosen one have exact gradients, and the chosen ones those of storage in all layers."""
    config = replace(CONFIG, num_layers=4, params_dtype="float32", activation_storage_layers="0,2", **mode)
    arguments = {"tokens": TOKENS, "cotangent": normal(1, 2, 8, 17), "step": 0}
    (_, of_torch), (_, of_jax) = (model_gradients(backend, config, **arguments) for backend in BACKENDS)
    far = {name: float(relative_difference(of_torch[name], of_jax[name])) for name in of_torch}
    assert max(far.values()) <= 1e-4, far
    exact = model_gradients(
        "torch", replace(config, activation_storage=None, activation_storage_layers=None), **arguments
    )
    for name, gradient in of_torch.items():
        if ".3." in name:
            np.testing.assert_array_equal(gradient, exact[1][name], name)
    for name in ("linear_fc1", "linear_fc2"):
        weight = f"decoder.layers.2.mlp.{name}.weight"
        assert relative_difference(of_torch[weight], exact[1][weight]) > 1e-3


def test_layers_that_are_recomputed_together_save_alike():
    """Blocks end where the storage changes, and the gradients are those without recompute."""
    settings = {"enable_hyper_connections": True, "num_layers": 4, "activation_storage_layers": "1-2"}
    config = replace(CONFIG, layer_pattern="attention", recompute_layout="mhc+layernorm*3,mhc", **settings)
    assert [block.layers for block in recompute_blocks(config)] == [(0,), (1, 2), (3,)]
    assert [block.layers for block in recompute_blocks(replace(config, recompute_layout="full*4"))] == [(0, 1, 2, 3)]
    arguments = {"tokens": TOKENS, "cotangent": normal(1, 2, 8, 17), "step": 0}
    plain = model_gradients("torch", without_recompute(config), **arguments)[1]
    for backend in BACKENDS:
        gradients = model_gradients(backend, config, **arguments)[1]
        for name in plain:  # gradients of alpha and bias are remainders of terms that cancel
            is_small = name.endswith(("hyper_connection.alpha", "hyper_connection.bias"))
            limit = 0 if backend == "torch" else 4e-4 if is_small else 1e-5
            assert float(relative_difference(gradients[name], plain[name])) <= limit, name


def test_numbers_of_layers_are_read_and_written():
    assert layer_numbers("0-2,4,9-9") == {0, 1, 2, 4, 9}
    assert format_numbers({9, 4, 0, 2, 1}) == "0-2,4,9"


@given(st.dictionaries(st.integers(0, 30), st.just("all") | st.frozensets(st.sampled_from(VALUES), min_size=1)))
def test_offloaded_values_are_read_as_written(moved):
    assert not moved or offloaded_values(format_offload(moved)) == moved


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0:", "expected names of values out of .*, got '' in '0:'"),
        ("0:fc1+act", "expected names of values out of .*, got 'act' in '0:fc1.act'"),
        ("0-3,2:fc1", "expected one entry for each layer, got '0-3,2:fc1', where two name layer 2"),
        ("fc1:0", "expected numbers of layers, with names of values where not all move, .*, got 'fc1:0'"),
        ("3-1:fc1", "expected numbers of layers, .*, got '3-1:fc1'"),
    ],
)
def test_offloaded_values_of_another_form_are_refused(text, message):
    with pytest.raises(ValueError, match=f"^activation_offload_layers: {message}"):
        replace(CONFIG, num_layers=4, enable_activation_offload=True, activation_offload_layers=text)


def test_a_frozen_weight_saves_no_input_and_transforms_are_refused():
    x, weight = torch.randn(4, 130, requires_grad=True), torch.randn(3, 130)
    y = in_torch.packed_linear(x, weight, in_torch.pack(x), in_torch.PlainProducts())
    node: Any = y.grad_fn
    assert [saved is None for saved in node.saved_tensors] == [True, False]
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], weight.sum(0).expand(4, -1))
    with pytest.raises(NotImplementedError, match=r"packed_linear: .*leave activation_storage out"):
        torch.func.vmap(lambda x: in_torch.packed_linear(x, weight, None, in_torch.PlainProducts()))(x[:, None])


def test_second_derivatives_are_refused_in_jax():
    """PyTorch's custom functions refuse them too; see tests/test_fp8.py."""
    x, weight, rows = jnp.ones((5, 130)), jnp.ones((3, 130)), jnp.ones((2, 3, 130))
    products = in_jax.PackedProducts(LinearProducts())
    functions = [
        lambda x: products(x, weight, None, in_jax.pack(x)),
        lambda x: in_jax.packed_grouped_linear(x, rows, jnp.array([2, 3]), in_jax.pack(x)),
        lambda x: in_jax.packed_activation(lambda x, impl: x**3, x, "reference"),
    ]
    for function in functions:
        first = jax.grad(lambda x, function=function: (function(x) ** 2).sum())
        assert np.isfinite(jax.jit(first)(x)).all()
        with pytest.raises(RuntimeError, match="activation_storage: expected to be differentiated once"):
            jax.jit(jax.grad(lambda x, first=first: first(x).sum()))(x)


def test_autocast_does_not_change_a_model():
    model: Any = GPTModel(CONFIG)
    tokens = torch.from_numpy(TOKENS)
    results: list[Any] = []
    for enabled in (False, True):
        with torch.autocast("cpu", enabled=enabled, cache_enabled=False):
            linear = model.decoder.layers["0"].mlp.linear_fc1
            y = linear(torch.ones(1, 2, 24, requires_grad=True))[0]
        results.append([y, *torch.autograd.grad(y.float().sum(), [linear.weight])])
    torch.testing.assert_close(*results, rtol=0, atol=0)
    assert model(tokens).isfinite().all()


@pytest.mark.parametrize("kind", MODELS)
def test_inputs_are_saved_in_8_bits_and_not_as_they_are(kind):
    config = MODELS[kind]
    report = residual_report(GPTModel(config), torch.from_numpy(TOKENS))
    assert report.keys() & SAVED
    routed = {"pre_mlp_layernorm"} if "moe" in config.layer_pattern else set()
    assert not report.keys() & ({"input_layernorm", "pre_mlp_layernorm", "fc1", "activation"} - routed)
    for name in report.keys() & SAVED:
        assert report[name].dtype == "uint8"
