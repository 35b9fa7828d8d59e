"""Kernels of the delta rule compiled and run: the checks of test_kernels_delta_rule.py on one GPU (make test-gpu)."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from diptych_kernels import api as functions
from diptych_kernels import torch_backend as torch_ops
from reference_torch.delta_rule import chunk_gated_delta_rule
from reference_torch.transformer import GPTModel
from tests.backends import backend_module, normal
from tests.kernels.test_delta_rule import HYBRID, NAMES, RULES, drawn_arrays, error, torch_gradients, within_budget
from tests.kernels.test_gpu import NEEDS_JAX

pytestmark = pytest.mark.gpu
SHAPES = [  # batch, offsets, heads, values a head, K, V
    (2, [0, 300], 2, 1, 128, 128),
    (1, [0, 1, 1, 130, 131, 700], 1, 2, 64, 96),
    (1, [0, 77], 3, 1, 37, 20),
    (1, [0, 129], 1, 1, 256, 256),
    (1, [0, 1], 1, 1, 16, 16),
]


def drawn(rule, shape, decay):
    batch, offsets, heads, group, key, value = shape
    sequences = batch if len(offsets) == 2 else len(offsets) - 1
    arrays = drawn_arrays(rule, 3, batch, offsets[-1], heads, group, key, value, sequences, decay)
    return arrays, None if len(offsets) == 2 else offsets


@pytest.mark.parametrize("decay", [0.02, 1.0, 50.0])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_torch_backend_is_as_exact_as_its_type_allows(rule, shape, dtype, decay):
    if dtype == "float16" and decay == 50.0:
        pytest.skip("exp(-50) is less than a float16 holds")
    if dtype in ("bfloat16", "float16") and shape[1][-1] == 1:
        pytest.skip("a norm of few numbers is at the mercy of single roundings")
    arrays, offsets = drawn(rule, shape, decay)
    within_budget(rule, *arrays, dtype, offsets, device="cuda")


@NEEDS_JAX
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_backends_agree(rule, shape, dtype):
    (arrays, cotangents), offsets = drawn(rule, shape, 1.0)
    offsets = None if offsets is None else np.array(offsets, np.int32)
    known = None if offsets is None else torch.from_numpy(offsets)
    expected = torch_gradients(
        partial(RULES[rule][0], cu_seqlens=known, impl="triton"), arrays, cotangents, dtype, "cuda"
    )
    types = ["float32" if name in ("g", "initial_state") else dtype for name in NAMES]
    given = [jnp.asarray(x, d) for x, d in zip(arrays, types, strict=True)]
    rule_of = getattr(backend_module("jax", "delta_rule"), RULES[rule][0].__name__)

    @jax.jit
    def ours(*given):
        def run(*given):
            states = {"initial_state": given[5], "output_final_state": True}
            return rule_of(*given[:5], cu_seqlens=offsets, impl="triton", **states)

        outputs, pull_back = jax.vjp(run, *given)
        return outputs, pull_back(tuple(c.astype(o.dtype) for c, o in zip(cotangents, outputs, strict=True)))

    for a, b in zip(jax.tree.leaves(ours(*given)), [*expected[0], *expected[1]], strict=True):
        assert error(torch.from_numpy(np.asarray(a, np.float64)), b.double().cpu()) <= 2.0**-7


@pytest.mark.parametrize("rule", RULES)
def test_repeats_and_parts(rule, monkeypatch):
    """Again the same bits; in parts the same within rounding."""
    (arrays, cotangents), _ = drawn(rule, (1, [0, 3000], 2, 1, 64, 64), 1.0)
    run = partial(torch_gradients, partial(RULES[rule][0], impl="triton"), arrays, cotangents, "float32", "cuda")
    monkeypatch.setattr(functions, "parts_of", lambda *sizes: 1)
    first, second = run(), run()
    monkeypatch.setattr(functions, "parts_of", lambda *sizes: 5)
    parts = run()
    for a, b, c in zip(*([*outputs, *gradients] for outputs, gradients in (first, second, parts)), strict=True):
        assert torch.equal(a, b)
        assert error(c.double().cpu(), a.double().cpu()) <= 1e-5


@pytest.mark.parametrize("rule", RULES)
def test_a_cuda_graph_computes_what_calls_do(rule):
    """Forward and backward of packed sequences, replayed for other numbers."""
    chunk = partial(RULES[rule][0], cu_seqlens=torch.tensor([0, 130, 300], dtype=torch.int32), impl="triton")
    (first, cotangents), _ = drawn(rule, (1, [0, 130, 300], 2, 1, 64, 64), 1.0)
    (second, _), _ = drawn(rule, (1, [0, 130, 300], 2, 1, 64, 64), 0.02)
    inputs = [torch.tensor(x, dtype=torch.float32, device="cuda", requires_grad=True) for x in first[:5]]
    cotangent = torch.tensor(cotangents[0], dtype=torch.float32, device="cuda")

    def step():
        output, _ = chunk(*inputs)
        return [output.detach(), *torch.autograd.grad(output, inputs, cotangent)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step()
    for numbers in (first, second):
        with torch.no_grad():
            for x, number in zip(inputs, numbers, strict=False):
                x.copy_(torch.tensor(number, dtype=torch.float32))
        graph.replay()
        for ours, expected in zip(replayed, step(), strict=True):
            assert torch.equal(ours, expected)


def test_more_than_65535_sequence_heads():
    batch, heads = 1100, 60
    q, k, v = (torch.randn(batch, 2, heads, 16, device="cuda") for _ in range(3))
    g, beta = -torch.rand(batch, 2, heads, device="cuda"), torch.rand(batch, 2, heads, device="cuda")
    k = torch.nn.functional.normalize(k, dim=-1)
    ours, _ = chunk_gated_delta_rule(q, k, v, g, beta, impl="triton")
    expected, _ = chunk_gated_delta_rule(q, k, v, g, beta, impl="reference")
    assert error(ours.double().cpu(), expected.double().cpu()) <= 1e-5


def test_hybrid_models_of_kernels_equal_the_reference():
    tokens = torch.arange(18, device="cuda").reshape(1, 18) % 13
    results = []
    for impl in ("auto", "reference"):
        model = GPTModel(replace(HYBRID, impl=impl)).cuda()
        logits = model(tokens, step=3)
        logits.backward(torch.from_numpy(normal(1, *logits.shape)).cuda())
        results.append([logits.detach(), *(p.grad for p in model.parameters())])
    for ours, expected in zip(*results, strict=True):
        assert (ours - expected).norm() <= 1e-12 * expected.norm() + 1e-300


def test_auto_is_triton_here(monkeypatch):
    launched, run = [], torch_ops.run
    monkeypatch.setattr(torch_ops, "run", lambda made, inputs: launched.append(made.kernel) or run(made, inputs))
    x, g = torch.ones(1, 3, 1, 16, device="cuda"), torch.zeros(1, 3, 1, device="cuda")
    chunk_gated_delta_rule(x, x, x, g, g)
    assert "delta_rule.scan.scan_forward" in launched
