"""Kernels compiled and run: the checks of test_kernels.py on one GPU (make test-gpu)."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from diptych_kernels import jax_backend as jax_ops
from diptych_kernels import launch_configs as launch
from diptych_kernels import torch_backend as torch_ops
from diptych_kernels import tuning
from reference_torch import hyper_connections, ops
from reference_torch.transformer import GPTModel
from tests.backends import normal
from tests.kernels.support import CASES, MODEL, assert_within_budget, inputs_of, torch_gradients
from tests.kernels.test_in_models import RECOMPUTED

pytestmark = pytest.mark.gpu
SHAPES = [((2, 300), 4, 256), ((1, 77), 3, 97), ((1, 33), 8, 130), ((3, 1), 1, 64), ((1, 2048), 2, 1024)]
NEEDS_JAX = pytest.mark.skipif(
    jax_ops.jax_triton() is None or jax.default_backend() == "cpu", reason="needs jax-triton and JAX on the GPU"
)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_torch_backend_is_as_exact_as_its_type_allows(name, shape, dtype):
    assert_within_budget(CASES[name], inputs_of(CASES[name], *shape, seed=3), dtype, device="cuda")


def jax_gradients(function, arrays, cotangents):
    """torch_gradients through the JAX backend."""
    arrays = [jnp.from_dlpack(a) for a in arrays]

    def listed(*arrays):
        outputs = function(*arrays)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    @jax.jit
    def run(arrays, cotangents):
        outputs, pull_back = jax.vjp(listed, *arrays)
        return outputs, pull_back(tuple(c.astype(o.dtype) for c, o in zip(cotangents, outputs, strict=True)))

    outputs, gradients = run(arrays, [jnp.from_dlpack(c) for c in cotangents])
    return [torch.from_dlpack(x) for x in (*outputs, *gradients)]


@NEEDS_JAX
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_jax_backend_is_as_exact_as_its_type_allows(name, shape, dtype):
    backend = partial(jax_gradients, CASES[name].kernel(jax_ops, "jax"))
    arrays = inputs_of(CASES[name], *shape, seed=3)
    assert_within_budget(CASES[name], arrays, dtype, device="cuda", backend=backend)


@pytest.mark.parametrize("name", CASES)
def test_repeats_are_bit_equal(name):
    case = CASES[name]
    arrays = [torch.from_numpy(a).float().cuda() for a in inputs_of(case, (4, 1000), 4, 200, seed=5)]
    function = case.kernel(torch_ops, "torch")
    with torch.no_grad():
        outputs = function(*arrays)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    cotangents = [torch.randn_like(o) for o in outputs]
    first, second = (torch_gradients(function, arrays, cotangents) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_new_token_counts_compile_nothing():
    from triton import knobs

    compiled = []
    before, knobs.runtime.jit_post_compile_hook = knobs.runtime.jit_post_compile_hook, lambda **k: compiled.append(k)
    try:
        for count in (500, 1, 16, 100, 3000):
            for case in CASES.values():
                arrays = [torch.from_numpy(a).bfloat16().cuda() for a in inputs_of(case, (1, count), 4, 72, seed=1)]
                out = case.kernel(torch_ops, "torch")(*(a.requires_grad_() for a in arrays))
                sum(o.float().sum() for o in (out if isinstance(out, tuple) else (out,))).backward()
            if count == 500:
                assert compiled
                compiled.clear()
    finally:
        knobs.runtime.jit_post_compile_hook = before
    assert not compiled


def test_offsets_above_two_to_the_31():
    """5 GB of streams: the last tokens are right."""
    tokens, streams, width = 2**17 + 3, 4, 4224
    assert tokens * streams * width > 2**31
    x = torch.zeros(tokens, streams, width, dtype=torch.bfloat16, device="cuda")
    x[-2:] = torch.randn(2, streams, width, device="cuda").bfloat16()
    h_pre = torch.rand(tokens, streams, device="cuda")
    out = torch_ops.aggregate(x, h_pre)
    expected = torch.einsum("nsd,ns->nd", x[-2:].double(), h_pre[-2:].double())
    torch.testing.assert_close(out[-2:].double(), expected, rtol=2e-2, atol=2e-2)
    assert not out[:-2].any()
    written = torch_ops.write_streams(x, None, out, None, h_pre)
    expected = x[-2:].double() + h_pre[-2:, :, None].double() * out[-2:, None].double()
    torch.testing.assert_close(written[-2:].double(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("recompute", [{}, RECOMPUTED], ids=["kept", "recomputed"])
def test_models_of_kernels_equal_the_reference(recompute):
    tokens = torch.arange(10, device="cuda").reshape(2, 5)
    results = []
    for impl in ("auto", "reference"):
        model = GPTModel(replace(MODEL, impl=impl, **recompute)).cuda()
        logits = model(tokens, step=3)
        logits.backward(torch.from_numpy(normal(1, *logits.shape)).cuda())
        results.append([logits.detach(), *(p.grad for p in model.parameters())])
    for ours, expected in zip(*results, strict=True):
        assert (ours - expected).norm() <= 1e-12 * expected.norm() + 1e-300


def test_auto_is_triton_here(monkeypatch):
    launched = []
    run = torch_ops.run
    monkeypatch.setattr(torch_ops, "run", lambda made, inputs: launched.append(made.kernel) or run(made, inputs))
    x, h_pre = torch.ones(1, 2, 3, 8, device="cuda"), torch.ones(1, 2, 3, device="cuda")
    hyper_connections.aggregate(x, h_pre)
    ops.gelu(x)
    assert launched == ["streams.aggregate_forward", "activations.gelu_forward"]
    hyper_connections.aggregate(x, h_pre, impl="reference")
    assert len(launched) == 2


def test_arrays_that_begin_anywhere_have_kernels_of_their_own():
    """Triton compiles for the alignment of arrays; compiled kernels are remembered."""
    h_pre = torch.rand(2, 3, 4, device="cuda")
    storage = torch.randn(2 * 3 * 4 * 64 + 1, device="cuda")
    for start in (0, 1, 0):
        x = storage[start : start + 2 * 3 * 4 * 64].view(2, 3, 4, 64)
        torch.testing.assert_close(torch_ops.aggregate(x, h_pre), torch.einsum("btsd,bts->btd", x, h_pre))


def test_mixed_devices_are_refused():
    with pytest.raises(ValueError, match="h_pre: expected the device of x, cuda:0, got cpu; move one of them"):
        torch_ops.aggregate(torch.ones(2, 3, 4, device="cuda"), torch.ones(2, 3))


@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=NEEDS_JAX)])
def test_blocks_are_measured_once_and_shared(backend, monkeypatch, tmp_path):
    monkeypatch.setenv("DIPTYCH_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("DIPTYCH_TUNE", "1")
    tuning._table.cache_clear()
    x = normal(0, tuning.MEASURED_TOKENS, 256)
    if backend == "torch":
        torch_ops.gelu(torch.from_numpy(x).bfloat16().cuda())
    else:
        np.asarray(jax.jit(jax_ops.gelu)(jnp.asarray(x, jnp.bfloat16)))
    (block,) = tuning._read(tmp_path / "blocks.json").values()
    assert block in launch.CANDIDATES["gelu_forward"]
    tuning._table.cache_clear()
