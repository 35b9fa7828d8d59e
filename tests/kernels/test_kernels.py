"""Kernels in Triton's interpreter, from both backends: against float64 and against each other."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from diptych.plans.model.philox import dropout_keep
from diptych_kernels import jax_backend as jax_ops
from diptych_kernels import torch_backend as torch_ops
from reference_torch import hyper_connections, ops
from tests.backends import BACKENDS, assert_close, backend_module, normal, value_and_gradients
from tests.kernels.support import CASES, KERNEL_BACKENDS, R, assert_within_budget, error, inputs_of, torch_gradients

HARD = [
    ((1, 5), 3, 33, "float64"),
    ((3, 1), 5, 20, "float32"),
    ((1, 3), 4, 36, "float32"),
    ((1, 7), 2, 1, "bfloat16"),
    ((3, 7), 8, 70, "float16"),
    ((1, 5), 3, 64, "bfloat16"),
]
"""Odd and even widths, some of several tiles, numbers of tokens that no program's share divides, and every type."""


@pytest.mark.parametrize("name", CASES)
def test_kernels_are_as_exact_as_their_type_allows(name):
    @settings(max_examples=min(settings().max_examples, 10))
    @given(
        lead=st.tuples(st.integers(1, 3), st.integers(1, 7)),
        streams=st.integers(1, 8),
        width=st.one_of(st.sampled_from([1, 3, 16, 20, 33]), st.integers(1, 70)),
        dtype=st.sampled_from(["float64", "float32", "float16", "bfloat16"]),
        seed=st.integers(0, 2**16),
    )
    def check(lead, streams, width, dtype, seed):
        # One number over its own rms is 1: its gradient is all rounding.
        assume(name != "compute_mappings" or streams * width > 3)
        assert_within_budget(CASES[name], inputs_of(CASES[name], lead, streams, width, seed), dtype)

    for lead, streams, width, dtype in HARD:
        check = example(lead, streams, width, dtype, 0)(check)
    check()


@pytest.mark.parametrize("streams", [1, 2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("name", ["read_streams", "write_streams"])
def test_every_number_of_streams(name, streams):
    assert_within_budget(CASES[name], inputs_of(CASES[name], (1, 5), streams, 9, streams), "float64")


BUCKETS = [((2, 9), 4, 33), ((1, 5), 3, 20), ((3, 1), 8, 16), ((1, 1), 1, 5)]


@pytest.mark.parametrize("bucket", BUCKETS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_backends_agree_bitwise(name, bucket):
    case = CASES[name]
    arrays = inputs_of(case, *bucket, seed=1)
    sides = [value_and_gradients(b, case.kernel(KERNEL_BACKENDS[b], b), arrays) for b in BACKENDS]
    for ours, theirs in zip(*sides, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", CASES)
def test_jax_backend_equals_the_jax_reference(name):
    case = CASES[name]
    arrays = inputs_of(case, (2, 3), 4, 12, seed=2)
    reference = case.reference(backend_module("jax", "hyper_connections"), backend_module("jax", "ops"), "jax")
    ours = value_and_gradients("jax", case.kernel(jax_ops, "jax"), arrays)
    for one, other in zip(ours, value_and_gradients("jax", reference, arrays), strict=True):
        assert_close(one, other, 1e-13)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_backends_agree_in_narrow_types(dtype):
    x, h_pre = normal(0, 2, 5, 4, 24), normal(1, 2, 5, 4)
    ours = torch_ops.aggregate(torch.from_numpy(x).to(getattr(torch, dtype)), torch.from_numpy(h_pre).float())
    theirs = jax_ops.aggregate(jnp.asarray(x, dtype), jnp.asarray(h_pre, jnp.float32))
    assert str(theirs.dtype) == dtype
    np.testing.assert_array_equal(ours.float().numpy(), np.asarray(theirs, np.float32))


def test_backends_agree_on_subnormal_numbers():
    """XLA's threads, on which kernels are interpreted, take such numbers for 0; as inputs, between, as results."""
    ones = np.ones((1, 1, 2), np.float32)
    calls = {
        "swiglu": [np.array([[-88, -90, 1, 1, 1, 1e-40]], np.float32)],
        "gelu": [np.array([[-13.0, 1e-40, -1e-39, 3e-38]], np.float32)],
        "aggregate": [np.full((1, 1, 2, 4), 1e-20, np.float32), 1e-20 * ones],
        "apply_h_post": [np.full((1, 1, 4), 1e-39, np.float32), None, ones],
    }
    for name, arrays in calls.items():
        ours = getattr(torch_ops, name)(*(None if x is None else torch.from_numpy(x) for x in arrays)).numpy()
        theirs = np.asarray(getattr(jax_ops, name)(*(None if x is None else jnp.asarray(x) for x in arrays)))
        np.testing.assert_array_equal(ours, theirs, err_msg=name)
        assert ours.any(), name


def test_interpreted_products_of_bfloat16_are_right():
    """Triton's interpreter multiplies their bits as integers; kernels/diptych_kernels/interpreter.py widens them."""
    x, phi = normal(0, 1, 3, 4, 16), normal(1, 64, 24) / 8
    narrow = torch.from_numpy(x).bfloat16()
    arguments = (torch.from_numpy(phi).bfloat16(), torch.ones(3), torch.zeros(24))
    ours = torch_ops.compute_mappings(narrow, *arguments)
    exact = hyper_connections.compute_mappings(narrow.double(), *(a.double() for a in arguments), **R)
    for one, other in zip(ours, exact, strict=True):
        assert error(one, other) < 1e-6


def test_interpreted_bfloat16_is_rounded_to_nearest():
    """Triton's interpreter cuts float32 off; zeros, ties, infinities and NaN among what is cast."""
    values = torch.tensor([0.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-16, -2.7, 3e38, 3.4e38, 1e-40, torch.nan])
    h_post = torch.cat([values, torch.randn(9 * 16 - len(values))]).reshape(16, 9, 1)[..., :1]
    out = torch_ops.apply_h_post(torch.ones(16, 9, 3).bfloat16(), None, h_post)
    torch.testing.assert_close(out, h_post[..., None].bfloat16().expand(16, 9, 1, 3), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("width", [12, 13])
def test_dropout_is_the_mask_of_plans(width):
    """Rows above 2**32, a seed above 2**31, a step and a site; columns in and across quads."""
    samples, length, seed, site = torch.tensor([1, 2**40]), 3, 2**31 + 5, 4
    state = ops.dropout_state(seed, 2**31 + 9, samples, torch.arange(length), length)
    h_post = torch.ones(2, length, 3)
    out = torch_ops.write_streams(None, None, torch.ones(2, length, width), None, h_post, 0.4, state, site)
    numbers = samples.numpy()[:, None] * length + np.arange(length)
    keep = dropout_keep((seed, site), numbers, 3 * width, 2**31 + 9, 0.4).reshape(2, length, 3, width)
    np.testing.assert_array_equal(out.numpy() != 0, keep)
    np.testing.assert_allclose(out.numpy()[keep], 1 / 0.6, rtol=1e-6)


def test_entries_under_the_floor_are_constants():
    """Logits 300 apart: softmax entries below 1e-30 are lifted, and their logits have no gradient."""
    logits = torch.from_numpy(normal(4, 3, 4, 4)) * 100
    cotangent = torch.from_numpy(normal(5, 3, 4, 4))
    assert (logits.softmax(-2) < 1e-30).any()
    exact = torch_gradients(partial(hyper_connections.sinkhorn, **R), [logits], [cotangent])
    ours = torch_gradients(torch_ops.sinkhorn, [logits], [cotangent])
    for one, other in zip(ours, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-13)


def test_nan_goes_through():
    logits = torch.zeros(2, 3, 3)
    logits[0, 1, 1] = float("nan")
    matrices = torch_ops.sinkhorn(logits)
    assert matrices[0].isnan().any()
    assert not matrices[1].isnan().any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tokens(backend):
    case = CASES["compute_mappings"]
    arrays = inputs_of(case, (2, 0), 2, 6, 0)
    outputs, gradients = value_and_gradients(backend, case.kernel(KERNEL_BACKENDS[backend], backend), arrays)
    assert [o.shape for o in outputs] == [(2, 0, 2), (2, 0, 2), (2, 0, 2, 2)]
    assert all((g == 0).all() for g in gradients)


def test_strides_do_not_matter():
    case = CASES["write_streams"]
    arrays = [torch.from_numpy(a) for a in inputs_of(case, (2, 5), 3, 10, 3)]
    strange = [a.transpose(0, -1).contiguous().transpose(0, -1) for a in arrays]
    assert not strange[0].is_contiguous()
    cotangent = torch.from_numpy(normal(9, 10, 3, 5, 2)).permute(3, 2, 1, 0)
    function = case.kernel(torch_ops, "torch")
    for one, other in zip(*(torch_gradients(function, a, [cotangent]) for a in (arrays, strange)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_sum_of_gradients_has_the_bits_of_the_frameworks_sum(dtype):
    """Of the read, rounded, and of the write."""
    arrays = [torch.from_numpy(a) for a in inputs_of(CASES["read_streams"], (2, 5), 3, 40, 3)]
    arrays[0] = arrays[0].to(getattr(torch, dtype))
    cotangents = [torch.from_numpy(normal(i, 2, 5, *s)) for i, s in enumerate([(40,), (3,), (3, 3), (3, 40)])]
    results = []
    for merged in (True, False):
        read = partial(torch_ops.read_streams, merge_residual_gradient=merged)
        results.append(torch_gradients(read, arrays, cotangents))
        streams = arrays[0].clone().requires_grad_()
        assert (read(streams, *arrays[1:])[3] is streams) != merged
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_repeats_are_bit_equal():
    case = CASES["compute_mappings"]
    arrays = [torch.from_numpy(a).float() for a in inputs_of(case, (3, 50), 2, 9, 3)]
    cotangents = [torch.from_numpy(normal(i, *s)) for i, s in enumerate([(3, 50, 2), (3, 50, 2), (3, 50, 2, 2)])]
    for one, other in zip(
        *(torch_gradients(torch_ops.compute_mappings, arrays, cotangents) for _ in "ab"), strict=True
    ):
        assert torch.equal(one, other)


def test_language_is_whole_after_interpreting():
    """The interpreter replaces Triton's language; compiled kernels of the same process must not see that."""
    import triton.language as tl
    from triton.runtime.jit import JITFunction

    owners = (tl, tl.core, tl.math, tl.core.tensor, tl.core.dtype, tl.core.tensor_descriptor_base)
    before = [dict(vars(owner)) for owner in owners]
    call = JITFunction.__call__
    with pytest.raises(Exception, match="streams"):
        torch_ops.aggregate(torch.zeros(2, 9, 4), torch.zeros(2, 9))
    torch_ops.gelu(torch.zeros(3, 4))
    assert JITFunction.__call__ is call
    assert [dict(vars(owner)) for owner in owners] == before
