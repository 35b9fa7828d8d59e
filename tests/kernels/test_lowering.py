"""Kernels lowered for CUDA through jax-triton, without a GPU."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diptych.plans.model.delta_rule import chunk_tables
from diptych.plans.model.implementation import kernel_chunk_size
from diptych_kernels import api as functions
from diptych_kernels import jax_backend as jax_ops
from diptych_kernels.delta_rule import launch_configs as launches
from diptych_kernels.launch_configs import CANDIDATES


@pytest.fixture
def hopper(monkeypatch):
    """A machine whose GPU is asked for nothing but its compute capability."""
    if jax_ops.jax_triton() is None:
        pytest.skip("needs jax-triton and the library of JAX's CUDA plugin")
    from jax._src.lib import gpu_triton

    monkeypatch.setattr(gpu_triton, "get_compute_capability", lambda device: 90)
    return sys.modules["jax_triton.triton_lib"]._COMPILED_KERNEL_CACHE


def everything(x, phi, alpha, bias, y, width_bias, low, high, step):
    """The gradient of a function of all operations."""
    from jax_impl.ops import DropoutState

    def loss(x, phi, alpha, bias, y, width_bias):
        h_pre, h_post, h_res = jax_ops.compute_mappings(x, phi, alpha, bias)
        both = jnp.concatenate([jax_ops.aggregate(x, h_pre), y], -1)
        out = jax_ops.swiglu(both) + jax_ops.gelu(y)
        state = DropoutState(7, step, low, high)
        aggregated, _, _, residual = jax_ops.read_streams(x, phi, alpha, bias)
        h_res = jax_ops.sinkhorn(h_res)
        mixed = jax_ops.write_streams(residual, h_res, out + aggregated, width_bias, h_post, 0.1, state, 3)
        return jnp.sum(jax_ops.write_streams(mixed, None, out, None, h_post).astype(jnp.float32) ** 2)

    return jax.grad(loss, argnums=range(6))(x, phi, alpha, bias, y, width_bias)


def exported(tokens: int, dtype: str) -> str:
    streams, width = 4, 64
    narrow, wide = (jnp.dtype(t) for t in (dtype, "float64" if dtype == "float64" else "float32"))
    shapes = [
        ((1, tokens, streams, width), narrow),
        ((streams * width, 24), wide),
        ((3,), wide),
        ((24,), wide),
        ((1, tokens, width), narrow),
        ((width,), wide),
        ((1, tokens), jnp.uint32),
        ((1, tokens), jnp.uint32),
        ((), jnp.uint32),
    ]
    check = jax.export.DisabledSafetyCheck.custom_call("triton_kernel_call")
    function = jax.export.export(jax.jit(everything), platforms=["cuda"], disabled_checks=[check])
    return function(*(jax.ShapeDtypeStruct(*shape) for shape in shapes)).mlir_module()


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_every_operation_lowers_for_cuda_and_new_token_counts_compile_nothing(hopper, dtype):
    hopper.clear()
    module = exported(300, dtype)
    assert module.count("triton_kernel_call") >= 15
    assert "callback" not in module
    compiled = len(hopper)
    kernels = {key[0].fn.__name__ for key in hopper}
    assert kernels == set(CANDIDATES)
    for tokens in (17, 64, 5000):
        exported(tokens, dtype)
    assert len(hopper) == compiled


def exported_delta_rule(tokens: int, per_channel: bool) -> str:
    """The gradient of the rule over one sequence of bfloat16, two heads of values a head of q."""
    narrow, wide = jnp.dtype("bfloat16"), jnp.dtype("float32")
    decay = (1, tokens, 2, 16) if per_channel else (1, tokens, 2)
    shapes = [
        *[((1, tokens, 1, 16), narrow)] * 2,
        ((1, tokens, 2, 16), narrow),
        (decay, wide),
        ((1, tokens, 2), narrow),
    ]
    shapes += [((1, 2, 16, 16), wide)]

    def loss(*arrays):
        size = kernel_chunk_size(64)
        tables = chunk_tables(np.array([0, tokens], np.int32), size)
        o, final = jax_ops.delta_rule(*arrays, tables, size, 0.25)
        return jnp.sum(o.astype(jnp.float32) ** 2) + jnp.sum(final**2)

    check = jax.export.DisabledSafetyCheck.custom_call("triton_kernel_call")
    function = jax.export.export(jax.jit(jax.grad(loss, range(6))), platforms=["cuda"], disabled_checks=[check])
    return function(*(jax.ShapeDtypeStruct(*shape) for shape in shapes)).mlir_module()


@pytest.mark.slow
def test_the_delta_rule_lowers_for_cuda_and_new_token_counts_compile_nothing(hopper, monkeypatch):
    hopper.clear()
    for parts in (1, 3):
        monkeypatch.setattr(functions, "parts_of", lambda *sizes, parts=parts: parts)
        for per_channel in (True, False):
            module = exported_delta_rule(300, per_channel)
            assert module.count("triton_kernel_call") >= 8
            assert "callback" not in module
    compiled = len(hopper)
    assert {key[0].fn.__name__ for key in hopper} == set(launches.CANDIDATES)
    for tokens in (17, 64, 5000):
        for per_channel in (True, False):
            exported_delta_rule(tokens, per_channel)
    assert len(hopper) == compiled


def test_lowering_for_cuda_without_jax_triton_is_an_error(monkeypatch):
    monkeypatch.setattr(jax_ops, "jax_triton", lambda: None)
    with pytest.raises(Exception, match="cuda"):
        jax.export.export(jax.jit(jax_ops.gelu), platforms=["cuda"])(jax.ShapeDtypeStruct((3, 71), jnp.float32))


def test_jax_triton_leaves_the_environment_alone(monkeypatch):
    import os

    monkeypatch.setenv("TRITON_CACHE_DIR", "/somewhere")
    jax_ops.jax_triton.cache_clear()
    for name in [name for name in sys.modules if name.startswith("jax_triton")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    assert jax_ops.jax_triton() is None
    assert os.environ["TRITON_CACHE_DIR"] == "/somewhere"
    jax_ops.jax_triton.cache_clear()
