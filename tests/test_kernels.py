"""Kernels in Triton's interpreter, from both doors: against float64, against each other, and inside the models.

Every output is NaN before a kernel runs (kernels/torch_ops.py), so what a kernel forgets to write shows. The error
budget of an array is 2 (error of the eager reference + a band of roundings of the array's type), the errors being
norm-wise against the reference in float64; the band is one rounding for what is stored narrow, eight for sums.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from kernels import jax_ops, torch_ops, tuning
from parity.compare import relative_difference
from plans.config import TransformerConfig
from plans.philox import dropout_keep
from reference_torch import hyper_connections, ops
from tests.backends import BACKENDS, assert_close, model_gradients, normal, room, value_and_gradients

DOORS = {"torch": torch_ops, "jax": jax_ops}
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24, "float64": 2.0**-53}
FEW = 32
DROPOUT = {"rate": 0.3, "site": 5}


class Case(NamedTuple):
    """An operation: the kernels', the reference's, and its inputs by shape; the first ``narrow`` have x's type."""

    kernel: Callable
    reference: Callable
    shapes: Callable[[tuple[int, int], int, int], list[tuple[int, ...]]]
    narrow: int


def rows(backend: str, lead: tuple[int, int], seed: int = 7, step: int = 3, device=None):
    array = jnp.arange if backend == "jax" else partial(torch.arange, device=device)
    return room(backend, "ops").dropout_state(seed, step, array(lead[0]), array(lead[1]), lead[1])


def written(module, backend: str, x, h_res, y, bias, h_post, **impl):
    state = rows(backend, y.shape[:2], device=y.device if backend == "torch" else None)
    return module.write_streams(x, h_res, y, bias, h_post, state=state, **DROPOUT, **impl)


R = {"impl": "reference"}
CASES = {
    "sinkhorn": Case(
        lambda k, b: k.sinkhorn,
        lambda r, o, b: partial(r.sinkhorn, **R),
        lambda lead, s, d: [(*lead, s, s)],
        1,
    ),
    "sinkhorn, columns last": Case(
        lambda k, b: partial(k.sinkhorn, iterations=3, last="column"),
        lambda r, o, b: partial(r.sinkhorn, iterations=3, last="column", **R),
        lambda lead, s, d: [(*lead, s, s)],
        1,
    ),
    "compute_mappings": Case(
        lambda k, b: k.compute_mappings,
        lambda r, o, b: partial(r.compute_mappings, **R),
        lambda lead, s, d: [(*lead, s, d), (s * d, s * (s + 2)), (3,), (s * (s + 2),)],
        1,
    ),
    "aggregate": Case(
        lambda k, b: k.aggregate,
        lambda r, o, b: partial(r.aggregate, **R),
        lambda lead, s, d: [(*lead, s, d), (*lead, s)],
        1,
    ),
    "apply_h_res": Case(
        lambda k, b: lambda x, h: k.apply_h_res(h, x),
        lambda r, o, b: lambda x, h: r.apply_h_res(h, x, **R),
        lambda lead, s, d: [(*lead, s, d), (*lead, s, s)],
        1,
    ),
    "apply_h_post": Case(
        lambda k, b: k.apply_h_post,
        lambda r, o, b: partial(r.apply_h_post, **R),
        lambda lead, s, d: [(*lead, d), (d,), (*lead, s)],
        1,
    ),
    "write_streams, plain": Case(
        lambda k, b: lambda x, y, h: k.write_streams(x, None, y, None, h),
        lambda r, o, b: lambda x, y, h: r.write_streams(x, None, y, None, h, **R),
        lambda lead, s, d: [(*lead, s, d), (*lead, d), (*lead, s)],
        2,
    ),
    "write_streams": Case(
        lambda k, b: lambda x, y, *hs: written(k, b, x, hs[0], y, *hs[1:]),
        lambda r, o, b: lambda x, y, *hs: written(r, b, x, hs[0], y, *hs[1:], **R),
        lambda lead, s, d: [(*lead, s, d), (*lead, d), (*lead, s, s), (d,), (*lead, s)],
        2,
    ),
    "swiglu": Case(
        lambda k, b: k.swiglu,
        lambda r, o, b: partial(o.swiglu, **R),
        lambda lead, s, d: [(*lead, 2 * d)],
        1,
    ),
    "gelu": Case(
        lambda k, b: k.gelu,
        lambda r, o, b: partial(o.gelu, **R),
        lambda lead, s, d: [(*lead, d)],
        1,
    ),
}


def inputs_of(case: Case, lead: tuple[int, int], streams: int, width: int, seed: int) -> list[np.ndarray]:
    shapes = case.shapes(lead, streams, width)
    arrays = [normal(seed + place, *shape) for place, shape in enumerate(shapes)]
    if len(shapes) == 4:  # phi: logits of order 1
        arrays[1] /= np.sqrt(streams * width)
    return arrays


def torch_gradients(function: Callable, arrays: list[torch.Tensor], cotangents: list[torch.Tensor]):
    arrays = [a.clone().requires_grad_() for a in arrays]
    outputs = function(*arrays)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    cotangents = [c.to(o.dtype) for c, o in zip(cotangents, outputs, strict=True)]
    return [*(o.detach() for o in outputs), *torch.autograd.grad(outputs, arrays, cotangents)]


def error(a: torch.Tensor, exact: torch.Tensor) -> float:
    return relative_difference(a.double().cpu().numpy(), exact.cpu().numpy())


def assert_within_budget(
    case: Case, arrays: list[np.ndarray], dtype: str, device: str = "cpu", door: Callable | None = None
) -> None:
    """Outputs and all gradients of the PyTorch door against float64, by the eager reference's own error.

    door: takes the same arguments as torch_gradients after the function; None: PyTorch's.
    """
    narrow = getattr(torch, dtype)
    wide = torch.float64 if dtype == "float64" else torch.float32
    given = [torch.from_numpy(a).to(device, narrow if i < case.narrow else wide) for i, a in enumerate(arrays)]
    reference = case.reference(hyper_connections, ops, "torch")
    shapes = [o.shape for o in torch_gradients_shapes(reference, given)]
    # Cotangents that the narrow type holds exactly: their rounding is nobody's error.
    cotangents = [torch.from_numpy(normal(99 + i, *shape)).to(device, narrow) for i, shape in enumerate(shapes)]
    exact = torch_gradients(reference, [a.double() for a in given], cotangents)
    eager = torch_gradients(reference, given, cotangents)
    ours = (door or partial(torch_gradients, case.kernel(torch_ops, "torch")))(given, cotangents)
    for place, (kernel, plain, true) in enumerate(zip(ours, eager, exact, strict=True)):
        assert kernel.dtype == plain.dtype, f"array {place}"
        assert kernel.shape == plain.shape, f"array {place}"
        band = ROUNDING[str(kernel.dtype).removeprefix("torch.")] * (8 if kernel.dtype == wide else 1)
        if kernel.numel() < FEW:  # of few numbers the reference's own error may be small by luck
            band = max(band, 2 * ROUNDING[dtype])
        budget = 1e-13 if dtype == "float64" else 2 * (error(plain, true) + band)
        assert error(kernel, true) <= budget, f"array {place}: {error(kernel, true):.1e} > {budget:.1e}"


def torch_gradients_shapes(function: Callable, arrays: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        outputs = function(*arrays)
    return outputs if isinstance(outputs, tuple) else (outputs,)


DRAWN: dict[str, set] = {}


@pytest.mark.parametrize("name", CASES)
def test_kernels_are_as_exact_as_their_type_allows(name):
    seen = DRAWN.setdefault(name, set())

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
        seen.update({dtype, "odd" if width % 2 else "even", "ragged" if (lead[0] * lead[1]) % 4 else "whole"})
        assert_within_budget(CASES[name], inputs_of(CASES[name], lead, streams, width, seed), dtype)

    check()
    assert {"float64", "odd", "even", "ragged"} <= seen, "the hard cases were not drawn"


@pytest.mark.parametrize("streams", [1, 2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("name", ["compute_mappings", "write_streams"])
def test_every_number_of_streams(name, streams):
    assert_within_budget(CASES[name], inputs_of(CASES[name], (1, 5), streams, 9, streams), "float64")


BUCKETS = [((2, 9), 4, 33), ((1, 5), 3, 20), ((3, 1), 8, 16), ((1, 1), 1, 5)]


@pytest.mark.parametrize("bucket", BUCKETS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_doors_agree_to_the_bit(name, bucket):
    case = CASES[name]
    arrays = inputs_of(case, *bucket, seed=1)
    sides = [value_and_gradients(b, case.kernel(DOORS[b], b), arrays) for b in BACKENDS]
    for ours, theirs in zip(*sides, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", CASES)
def test_jax_door_equals_the_jax_reference(name):
    case = CASES[name]
    arrays = inputs_of(case, (2, 3), 4, 12, seed=2)
    reference = case.reference(room("jax", "hyper_connections"), room("jax", "ops"), "jax")
    ours = value_and_gradients("jax", case.kernel(jax_ops, "jax"), arrays)
    for one, other in zip(ours, value_and_gradients("jax", reference, arrays), strict=True):
        assert_close(one, other, 1e-13)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_doors_agree_in_narrow_types(dtype):
    x, h_pre = normal(0, 2, 5, 4, 24), normal(1, 2, 5, 4)
    ours = torch_ops.aggregate(torch.from_numpy(x).to(getattr(torch, dtype)), torch.from_numpy(h_pre).float())
    theirs = jax_ops.aggregate(jnp.asarray(x, dtype), jnp.asarray(h_pre, jnp.float32))
    assert str(theirs.dtype) == dtype
    np.testing.assert_array_equal(ours.float().numpy(), np.asarray(theirs, np.float32))


def test_interpreted_products_of_bfloat16_are_right():
    """Triton's interpreter multiplies their bits as integers; kernels/interpreter.py widens them."""
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
    outputs, gradients = value_and_gradients(backend, case.kernel(DOORS[backend], backend), arrays)
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


@pytest.mark.parametrize("wrapping", WRAPPED)
def test_jax_transforms(wrapping):
    x, h_pre = jnp.asarray(normal(0, 2, 3, 4, 8)), jnp.asarray(normal(1, 2, 3, 4))
    ours, expected = (WRAPPED[wrapping](loss)(x, h_pre) for loss in (loss_of, reference_loss))
    assert_close(ours, expected, 1e-14)


@pytest.mark.multiprocess
def test_replicated_parameters_in_shard_map_get_the_whole_gradient():
    """Two devices, each with half of the tokens and all of phi; checked, so that types say what varies."""
    script = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
from kernels import jax_ops
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


# The models.

MODEL = TransformerConfig(
    hidden_size=12,
    num_layers=2,
    num_attention_heads=2,
    layer_pattern="attention+gelu,attention",
    vocab_size=13,
    seq_length=5,
    enable_hyper_connections=True,
    num_residual_streams=3,
    sinkhorn_iterations=4,
    hidden_dropout=0.25,
    params_dtype="float64",
)
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


@pytest.mark.parametrize("backend", BACKENDS)
def test_kernels_run_only_where_they_are_asked_for(backend, monkeypatch):
    launched = []
    run = torch_ops.run
    monkeypatch.setattr(torch_ops, "run", lambda launch, inputs: launched.append(launch.kernel) or run(launch, inputs))
    x = normal(0, 1, 2, 6)
    swiglu = room(backend, "ops").swiglu
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


# What is refused.

X, H = torch.zeros(2, 3, 4, 8), torch.zeros(2, 3, 4)
REFUSED = {
    "integers": (lambda: torch_ops.gelu(torch.zeros(3, dtype=torch.int32)), r"x: expected a type among .*, got int32"),
    "complex": (lambda: jax_ops.gelu(jnp.zeros(3, jnp.complex64)), r"x: expected a type among .*, got complex64"),
    "nine streams": (
        lambda: torch_ops.aggregate(torch.zeros(2, 9, 4), torch.zeros(2, 9)),
        r"x: expected at most 8 residual streams, got 9; impl='reference' takes any number",
    ),
    "h_pre": (
        lambda: torch_ops.aggregate(X, torch.zeros(2, 3, 5)),
        r"h_pre: expected shape \(2, 3, 4\), got \(2, 3, 5\)",
    ),
    "phi": (
        lambda: torch_ops.compute_mappings(X, torch.zeros(32, 23), torch.zeros(3), torch.zeros(24)),
        r"phi: expected shape \(32, 24\), got \(32, 23\)",
    ),
    "square": (
        lambda: torch_ops.sinkhorn(torch.zeros(2, 3, 4)),
        r"logits: expected shape \(2, 3, 3\), got \(2, 3, 4\)",
    ),
    "iterations": (lambda: torch_ops.sinkhorn(torch.zeros(3, 3), 0), r"iterations: expected at least 1, got 0"),
    "last": (lambda: torch_ops.sinkhorn(torch.zeros(3, 3), 1, "both"), r"last: expected 'row' or 'column', got 'both'"),
    "two types": (
        lambda: torch_ops.write_streams(X, None, torch.zeros(2, 3, 8).half(), None, H),
        r"x: expected the type of residual, float32, got float16; cast one of them",
    ),
    "y without h_post": (
        lambda: torch_ops.write_streams(X, None, torch.zeros(2, 3, 8), None, None),
        r"write_streams: expected .*; got residual, x$",
    ),
    "nothing to write": (
        lambda: torch_ops.write_streams(X, None, None, None, None),
        r"write_streams: .* got residual$",
    ),
    "nothing to mix": (
        lambda: torch_ops.write_streams(None, torch.zeros(2, 3, 4, 4), torch.zeros(2, 3, 8), None, H),
        r"h_res: expected a residual to mix, got residual=None",
    ),
    "rate": (
        lambda: torch_ops.write_streams(X, None, torch.zeros(2, 3, 8), None, H, rate=1.0),
        r"rate: expected a number in \[0, 1\), got 1.0",
    ),
    "row_high": (
        lambda: torch_ops.write_streams(
            X, None, torch.zeros(2, 3, 8), None, H, 0.1, rows("torch", (2, 3))._replace(row_high=torch.zeros(1)), 0
        ),
        r"state.row_high: expected shape \(2, 3\), got \(1,\)",
    ),
    "no axes": (lambda: torch_ops.gelu(torch.tensor(1.0)), r"x: expected at least 1 axes, got shape \(\)"),
    "one axis": (lambda: torch_ops.sinkhorn(torch.zeros(3)), r"logits: expected at least 2 axes, got shape \(3,\)"),
    "odd gate": (lambda: torch_ops.swiglu(torch.zeros(3, 5)), r"x: expected gate and value side by side.* got 5"),
    "two devices": (
        lambda: torch_ops.aggregate(X, H.to("meta")),
        r"h_pre: expected the device of x, cpu, got meta; move one of them",
    ),
    "no kernels there": (
        lambda: torch_ops.gelu(X.to("meta")),
        r"x: expected a CUDA tensor, or a CPU tensor for the interpreter, got one on meta; impl='reference' runs",
    ),
    "impl": (lambda: ops.gelu(X, impl="cuda"), r"impl: expected one of \('auto', 'reference', 'triton'\), got 'cuda'"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what):
    call, message = REFUSED[what]
    with pytest.raises(ValueError, match=message):
        call()


def test_jax_triton_missing_says_what_to_install(monkeypatch):
    monkeypatch.setattr(jax_ops, "jax_triton", lambda: None)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(tuning, "choose", lambda build, *_: tuning.first(build))
    with pytest.raises(ImportError, match=r"expected jax-triton .* pip install 'jax-triton>=0\.3\.1' 'jax\[cuda13\]'"):
        room("jax", "ops").gelu(jnp.zeros((3, 77)), impl="triton")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a PyTorch without CUDA")
def test_cuda_asked_of_a_cpu_only_torch():
    from plans.config import TrainConfig
    from reference_torch.train import Trainer
    from tests.backends import tiny_corpus

    config = replace(MODEL, vocab_size=256)
    with pytest.raises(ValueError, match=r"device: expected one this PyTorch .* got 'cuda', and it sees no GPU; make"):
        Trainer(config, TrainConfig(), tiny_corpus(), device="cuda")


def test_autocast_hands_narrow_outputs_to_wide_streams():
    x, y, h_post = torch.randn(1, 3, 2, 8), torch.randn(1, 3, 8), torch.rand(1, 3, 2)
    with torch.autocast("cpu", torch.bfloat16):
        out = torch_ops.write_streams(x, None, torch.nn.functional.linear(y, torch.eye(8)), None, h_post)
    torch.testing.assert_close(out, x + h_post[..., None] * y[:, :, None], rtol=1e-2, atol=2e-2)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile's own
def test_compiled_functions_call_kernels():
    x = torch.randn(4, 8, requires_grad=True)
    compiled = torch.compile(lambda x: torch_ops.swiglu(x) * 2, backend="eager")
    out = compiled(x)
    torch.testing.assert_close(out, ops.swiglu(x, **R) * 2)
    cotangent = torch.randn_like(out)
    (grad,) = torch.autograd.grad(out, x, cotangent)
    (expected,) = torch.autograd.grad(ops.swiglu(x, **R) * 2, x, cotangent)
    torch.testing.assert_close(grad, expected)


def test_infinite_logits_are_not_hidden():
    logits = torch.zeros(2, 3, 3)
    logits[0, :, 1] = -torch.inf
    ours, reference = torch_ops.sinkhorn(logits), hyper_connections.sinkhorn(logits, **R)
    assert reference[0].isnan().all()
    torch.testing.assert_close(ours, reference, equal_nan=True)


def test_auto_in_jax_goes_by_where_an_array_lies(monkeypatch):
    """A machine with a GPU, an array on its CPU."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    from jax_impl.ops import kernel_door

    assert kernel_door("auto", jnp.ones(3)) is None
    assert kernel_door("triton", jnp.ones(3)) is jax_ops


def test_second_derivatives_are_refused():
    x = torch.randn(2, 6, requires_grad=True)
    (grad,) = torch.autograd.grad(torch_ops.gelu(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="twice: kernels have first derivatives only"):
        grad.sum().backward()
