"""Kernels inside what JAX wraps around a function, and inside the models of both backends."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import Mesh, PartitionSpec

from diptych_kernels import jax_backend as jax_ops
from diptych_kernels import torch_backend as torch_ops
from reference_torch.hyper_connections import DeferredMix, HyperConnectionModule
from tests.backends import BACKENDS, assert_close, backend_module, model_gradients, normal, value_and_gradients
from tests.kernels.support import MODEL

# What JAX wraps around a function.


def loss_of(x, h_pre):
    return jnp.sum(jnp.sin(jax_ops.aggregate(x, h_pre)))


def reference_loss(x, h_pre):
    return jnp.sum(jnp.sin(jnp.einsum("...sd,...s->...d", x, h_pre)))


def one_device(function: Callable, check_vma: bool) -> Callable:
    mesh = Mesh(np.array(jax.devices()[:1]), ("cp",))
    spec = PartitionSpec("cp")
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma))


def scanned(x, h_pre, loss):
    return jax.lax.scan(lambda carry, row: (carry + loss(*row), None), jnp.zeros(()), (x, h_pre))[0]


WRAPPED = {
    "eager": lambda loss: jax.grad(loss, (0, 1)),
    "jit": lambda loss: jax.jit(jax.grad(loss, (0, 1))),
    "checkpoint": lambda loss: jax.jit(jax.grad(jax.checkpoint(loss), (0, 1))),
    "vmap": lambda loss: jax.jit(jax.vmap(jax.grad(loss, (0, 1)))),
    "scan": lambda loss: jax.jit(jax.grad(partial(scanned, loss=loss), (0, 1))),
    "shard_map": lambda loss: one_device(jax.grad(loss, (0, 1)), check_vma=False),
    "shard_map, checked": lambda loss: one_device(jax.grad(loss, (0, 1)), check_vma=True),
}


def read_and_written(x, h_pre):
    parameters = jnp.asarray(normal(2, 32, 24)) / 6, jnp.ones(3), jnp.zeros(24)
    aggregated, h_post, h_res, residual = jax_ops.read_streams(x, *parameters)
    return jnp.sum(jnp.sin(jax_ops.write_streams(residual, h_res, aggregated, None, h_post * h_pre)))


def separately(x, h_pre):
    parameters = jnp.asarray(normal(2, 32, 24)) / 6, jnp.ones(3), jnp.zeros(24)
    weights, h_post, h_res = jax_ops.compute_mappings(x, *parameters)
    aggregated = jax_ops.aggregate(x, weights)
    return jnp.sum(jnp.sin(jax_ops.write_streams(x, h_res, aggregated, None, h_post * h_pre)))


@pytest.mark.parametrize("wrapping", WRAPPED)
@pytest.mark.parametrize("losses", [(loss_of, reference_loss), (read_and_written, separately)], ids=["sum", "read"])
def test_jax_transforms(wrapping, losses):
    x, h_pre = jnp.asarray(normal(0, 2, 3, 4, 8)), jnp.asarray(normal(1, 2, 3, 4))
    ours, expected = (WRAPPED[wrapping](loss)(x, h_pre) for loss in losses)
    assert_close(ours, expected, 1e-14)


@pytest.mark.multiprocess
def test_replicated_parameters_in_shard_map_get_the_whole_gradient():
    """Two devices, each with half of the tokens and all of phi; checked, so that types say what varies."""
    script = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
from diptych_kernels import jax_backend as jax_ops
assert len(jax.devices()) == 2
random = np.random.default_rng(0)
x, phi = jnp.asarray(random.normal(size=(2, 3, 2, 4))), jnp.asarray(random.normal(size=(8, 8)) / 3)
alpha, bias = jnp.ones(3), jnp.zeros(8)
def total(x, phi):
    mappings = jax_ops.compute_mappings(x, phi, alpha, bias, iterations=3)
    return sum(jnp.sum(jnp.sin(h * (i + 1))) for i, h in enumerate(mappings))
def local(x, phi):
    return jax.grad(total, argnums=(0, 1))(x, phi)
mesh = Mesh(np.array(jax.devices()), ("dp",))
split = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P("dp"), P()), out_specs=(P("dp"), P())))
for one, other in zip(split(x, phi), jax.grad(total, argnums=(0, 1))(x, phi), strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-13)
"""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_ENABLE_X64": "1", "NPROC": "32"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, env={**os.environ, **flags}, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr


def test_pmap():
    x, h_pre = jnp.asarray(normal(0, 1, 3, 4, 8)), jnp.asarray(normal(1, 1, 3, 4))
    assert_close([jax.pmap(jax_ops.aggregate)(x, h_pre)], [jnp.einsum("...sd,...s->...d", x, h_pre)], 1e-14)


RECOMPUTED = {
    "recompute_granularity": "selective",
    "recompute_modules": ("mhc", "layernorm", "activation"),
    "mhc_recompute_layer_num": 2,
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "recompute", [pytest.param({}, id="kept", marks=pytest.mark.slow), pytest.param(RECOMPUTED, id="recomputed")]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_models_of_kernels_equal_the_reference(backend, recompute):
    tokens, cotangent = np.random.default_rng(0).integers(0, 13, (2, 5)), normal(1, 2, 5, 13)
    run = partial(model_gradients, tokens=tokens, cotangent=cotangent, step=3)
    config = replace(MODEL, **recompute)
    logits, gradients = run(backend, replace(config, impl="triton"))
    expected_logits, expected = run(backend, replace(config, impl="reference"))
    assert_close([logits], [expected_logits], 1e-13)
    assert_close([gradients[n] for n in expected], list(expected.values()), 1e-12)


def test_recompute_changes_no_bit_and_one_kernel_writes_the_gradient_of_the_streams(monkeypatch):
    launched = []
    run = torch_ops.run
    monkeypatch.setattr(torch_ops, "run", lambda launch, inputs: launched.append(launch) or run(launch, inputs))
    tokens, cotangent = np.random.default_rng(0).integers(0, 13, (2, 5)), normal(1, 2, 5, 13)
    results = []
    for recompute in ({}, RECOMPUTED):
        launched.clear()
        config = replace(MODEL, impl="triton", **recompute)
        results.append(model_gradients("torch", config, tokens=tokens, cotangent=cotangent, step=3))
        sums = [dict(launch.constants) for launch in launched if launch.kernel == "coefficients.project_backward"]
        added = [(made["AGGREGATE"], made["RESIDUAL_GRAD"]) for made in sums]
        assert added == [(True, not recompute)] * 2 * MODEL.num_layers
    connection = HyperConnectionModule(replace(MODEL, impl="triton"), 0)
    _, mixed, _ = connection.read(torch.ones(1, 2, MODEL.num_residual_streams, MODEL.hidden_size, requires_grad=True))
    assert isinstance(mixed, DeferredMix)
    assert "KernelFunction" in type(mixed.residual.grad_fn).__name__, "the streams are those of read_streams"
    (logits, gradients), (other_logits, others) = results
    assert np.array_equal(logits, other_logits)
    assert {name for name in gradients if not np.array_equal(gradients[name], others[name])} == set()


@pytest.mark.parametrize("backend", BACKENDS)
def test_kernels_run_only_where_they_are_asked_for(backend, monkeypatch):
    launched = []
    run = torch_ops.run
    monkeypatch.setattr(torch_ops, "run", lambda launch, inputs: launched.append(launch.kernel) or run(launch, inputs))
    x = normal(0, 1, 2, 6)
    swiglu = backend_module(backend, "ops").swiglu
    for impl, expected in (("auto", 0), ("reference", 0), ("triton", 1)):
        launched.clear()
        value_and_gradients(backend, partial(swiglu, impl=impl), [x])
        assert launched == ["activations.swiglu_forward", "activations.swiglu_backward"][: 2 * expected], impl


def test_a_written_stream_is_mixed_in_the_same_pass(monkeypatch):
    launched = []
    run = torch_ops.run
    monkeypatch.setattr(torch_ops, "run", lambda launch, inputs: launched.append(launch) or run(launch, inputs))
    tokens = np.zeros((1, 5), np.int64)
    model_gradients("torch", replace(MODEL, impl="triton"), tokens, normal(1, 1, 5, 13))
    writes = [dict(launch.constants) for launch in launched if launch.kernel.startswith("streams.write")]
    assert [w["ADD"] for w in writes] == ["mix"] * 8
    assert all(w["POST"] for w in writes)
