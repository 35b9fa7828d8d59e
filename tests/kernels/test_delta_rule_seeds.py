"""What seeded bugs in the kernels of the delta rule got past: things the interpreter cannot see, and rare sizes."""

import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from diptych.plans.model.delta_rule import most_chunks
from diptych_kernels import aot as ahead
from diptych_kernels import jax_backend as jax_ops
from diptych_kernels import torch_backend as torch_ops
from diptych_kernels.delta_rule import launch_configs as launches
from diptych_kernels.launch_configs import Block
from parity.compare import relative_difference
from tests.backends import backend_module
from tests.kernels.test_ahead import offset_types
from tests.kernels.test_delta_rule import RULES, drawn_arrays, torch_gradients

NEEDS_COMPILER = pytest.mark.skipif(sys.platform != "linux", reason="Triton is made for Linux")
SMALL: dict[str, Any] = {"key": 16, "value": 16, "heads": 4}


@NEEDS_COMPILER
@pytest.mark.parametrize("name", ahead.delta_rule_production(**SMALL))
def test_offsets_are_64_bit(name):
    """The interpreter's integers grow with what they hold; those of a GPU wrap around at 2^31 elements."""
    recorded = ahead.delta_rule_production(**SMALL)[name]
    found = offset_types(ahead.compile_ahead(recorded, 90).asm["ttir"])
    arguments = {name: types for name, types in found.items() if name.endswith("_ptr")}  # columns are added later
    assert arguments
    assert not {name for name, types in arguments.items() if types != {"i64"}}


@NEEDS_COMPILER
@pytest.mark.parametrize("back", [False, True])
def test_compose_waits_before_it_reads_what_it_wrote(back):
    name = "scan.compose" + " (back)" * back
    lines = ahead.compile_ahead(ahead.delta_rule_production(**SMALL)[name], 90).asm["ttir"].splitlines()
    stored = max(place for place, line in enumerate(lines) if "tt.store" in line)
    barrier = next((place for place, line in enumerate(lines) if place > stored and "barrier" in line), None)
    assert barrier is not None
    assert not any("tt.load" in line for line in lines[stored:barrier])


@pytest.mark.parametrize(("dtype", "expected"), [("bfloat16", "tf32"), ("float32", "tf32x3"), ("float64", "ieee")])
def test_products_of_wide_numbers_are_as_exact_as_they_are(dtype, expected):
    """The interpreter knows no tf32: it would hide eleven bits."""
    whatever = {"invert": "ieee", "compose": "ieee" if dtype == "float64" else "tf32x3"}
    precisions = {}
    for per_channel in (True, False):
        for recorded in ahead.delta_rule(per_channel, dtype=dtype, **SMALL):
            name, constants = recorded.launch.kernel.rsplit(".", 1)[1], dict(recorded.launch.constants)
            if "PRECISION" in constants:
                precisions.setdefault(name, set()).add(constants["PRECISION"])
    assert {*whatever, "scan_forward", "scan_backward"} <= {*precisions}
    assert precisions == {name: {whatever.get(name, expected)} for name in precisions}


def test_offsets_jax_does_not_know_may_need_every_chunk():
    offsets, size = np.array([0, 1, 2, 3, 20], np.int32), 16
    assert most_chunks(20, 4, size) == sum(-(-n // size) for n in np.diff(offsets)), "no chunk to spare"
    arrays, _ = drawn_arrays("gated_delta_rule", 7, 1, 20, 1, 1, 3, 2, 4)
    given = [jnp.asarray(x, jnp.float32) for x in arrays[:5]]
    rule = backend_module("jax", "delta_rule").chunk_gated_delta_rule

    def run(offsets, impl):
        return rule(*given, cu_seqlens=offsets, chunk_size=size, impl=impl)[0]

    found = jax.jit(lambda offsets: run(offsets, "triton"))(offsets)
    np.testing.assert_allclose(found, run(offsets, "reference"), rtol=1e-5, atol=1e-6)


def test_parts_count_the_chunks_of_a_sequence_not_of_all():
    assert launches.parts_of(chunks=40, sequences=4, value_heads=1, value=16) == 1
    assert launches.parts_of(chunks=160, sequences=4, value_heads=1, value=16) == 5


@pytest.mark.parametrize("rule", RULES)
def test_nothing_beside_an_array_is_read(rule):
    """Each lies in memory full of NaN; a chunk's last tile has two tokens, and reading on would leave the array."""
    arrays, (cotangent, _) = drawn_arrays(rule, 12, 1, 18, 1, 1, 3, 2, 1)

    def among_nan(x):
        around = torch.full((3, *x.shape), float("nan"), dtype=torch.float64)
        around[1] = torch.from_numpy(x)
        return around[1]

    given = [among_nan(x).requires_grad_() for x in arrays]
    outputs = RULES[rule][0](*given[:5], initial_state=given[5], output_final_state=True, impl="triton")
    cotangents = [among_nan(cotangent), torch.ones_like(outputs[1])]
    for x in (*outputs, *torch.autograd.grad(outputs, given, cotangents)):
        assert torch.isfinite(x).all()


def test_states_may_pass_what_float16_holds():
    """A large value is lost neither for the tokens before it nor in the final state; nor a large gradient."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((1, 20, 1, 16)) for _ in range(3)] + [-0.1 * np.ones((1, 20, 1))] * 2
    q, k, v, g, beta = (torch.tensor(x) for x in arrays)
    q, k, beta = (
        0.01 * torch.nn.functional.normalize(q, dim=-1),
        torch.nn.functional.normalize(k, dim=-1),
        beta * 0 + 1.9,
    )
    v[:, 10] = 4e4
    found = {}
    for impl in ("triton", "reference"):
        given = [x.half().requires_grad_() for x in (q, k, v)]
        rule = backend_module("torch", "delta_rule").chunk_gated_delta_rule
        o, final = rule(*given, g.float(), beta.float(), output_final_state=True, impl=impl)
        gradients = torch.autograd.grad(0.01 * (o.float().sum() + final.sum()), given)
        found[impl] = [x.detach().double().numpy() for x in (o, final, *gradients)]
    for ours, theirs in zip(*found.values(), strict=True):
        assert np.isfinite(theirs).all()
        assert relative_difference(ours, theirs) <= 2e-3


@pytest.mark.slow
@pytest.mark.thorough
def test_what_jax_measures_on_has_work_in_it():
    """Tables that say nothing would leave loops empty, and their fastest block would be everybody's."""
    tables = 0
    for per_channel in (True, False):
        for recorded in ahead.delta_rule(per_channel, dtype="bfloat16", **SMALL):
            constants = dict(recorded.launch.constants)
            inputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in recorded.inputs]
            arrays = [np.asarray(x) for x in jax_ops.examples(recorded.launch, inputs) if x.dtype == jnp.int32]
            longest = max((x.shape[0] for x in recorded.inputs if len(x.shape) in (2, 3)), default=0)
            for table in (x for x in arrays if x.ndim == 2 and x.shape[0]):
                tables += 1
                first, after = table.T[:2]
                assert (after >= first).all()
                assert after.max() <= longest
                assert (after - first).sum() == min(longest, len(table) * constants["C"]) or table.shape[1] == 3
                assert table.shape[1] == 2 or (after - first).sum() == longest
    assert tables > 8


def test_decays_have_the_digits_of_float32():
    """Tensor cores add log decays of 16 bits; their remainders are added as well."""
    chunks = torch.tensor([[0, 64]], dtype=torch.int32)
    ones = torch.ones(64, 1, 16, dtype=torch.bfloat16)
    g = -torch.from_numpy(np.random.default_rng(0).uniform(0.1, 1.6, (64, 1, 16))).float()
    call = launches.Call(True, 1.0, 64, 1, 1, 1, 1, 16, 16, 64, "bfloat16", "float32", "bfloat16")
    exact = g.double().cumsum(0)
    for build in (launches.decay_queries_and_keys, launches.terms_by_channel):
        launch = build(Block(1, 16, 4), (64,), call)
        _, k_from_start, k_to_end, decay, *_ = torch_ops.run(launch, (ones, ones, g, chunks))
        assert torch.allclose(decay.double(), exact[-1].exp()[None], rtol=1e-4, atol=0)
        assert torch.allclose(k_from_start.double(), exact.exp(), rtol=2.0**-8, atol=0)
        assert torch.allclose(k_to_end.double(), (exact[-1] - exact).exp(), rtol=2.0**-8, atol=0)


@pytest.mark.parametrize("rule", RULES)
def test_a_gate_may_forget_everything(rule):
    """A log decay of minus infinity, of the first token of a chunk too, is one that leaves nothing."""
    arrays, cotangents = drawn_arrays(rule, 15, 1, 36, 1, 1, 18, 3, 1, decay=0.1)
    results = []
    for forgotten in (-np.inf, -1e4):
        for token in (0, 7, 16, 35):
            arrays[3][:, token] = forgotten
        outputs, gradients = torch_gradients(
            partial(RULES[rule][0], impl="triton", chunk_size=16), arrays, cotangents, "bfloat16"
        )
        results.append([*outputs, *gradients])
    for found, expected in zip(*results, strict=True):
        assert torch.isfinite(found).all()
        assert torch.equal(found, expected)
