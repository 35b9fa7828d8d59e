"""Kernels of the delta rule in Triton's interpreter: against the recurrence in float64, from both backends, and in
parts.

The error budget is that of test_kernels.py, with the reference's chunked form as the eager one. The band counts
roundings of the type of q, whatever an array is stored as, for tensor cores multiply numbers of that type: one, eight
for the gradient of g, a sum over tokens of which much cancels, and for what is wide throughout.
"""

import itertools
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from diptych.plans.config import TransformerConfig
from diptych.plans.model.delta_rule import chunk_tables
from diptych.plans.model.implementation import kernel_chunk_size
from diptych_kernels import api as functions
from diptych_kernels import torch_backend as torch_ops
from diptych_kernels.delta_rule import launch_configs as launches
from parity.compare import relative_difference
from reference_torch.delta_rule import (
    chunk_gated_delta_rule,
    chunk_kda,
    recurrent_gated_delta_rule,
    recurrent_kda,
)
from tests.backends import BACKENDS, TORCH_DAILY, assert_close, backend_module, model_gradients, normal

RULES = {"kda": (chunk_kda, recurrent_kda), "gated_delta_rule": (chunk_gated_delta_rule, recurrent_gated_delta_rule)}
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24, "float64": 2.0**-53}
UNSHRUNK = (Phase.explicit, Phase.reuse, Phase.generate)
"""The interpreter is too slow to make failing cases small."""
NAMES = ("q", "k", "v", "g", "beta", "initial_state")


def drawn_arrays(rule, seed, batch, length, heads, group, key, value, sequences, decay=1.0):
    """q, k, v, g, beta, initial_state, and cotangents of outputs and final states; keys of length one, g <= 0."""
    heads_v = heads * group
    q, k, v = (
        normal(seed + i, batch, length, *s) for i, s in enumerate([(heads, key), (heads, key), (heads_v, value)])
    )
    k /= np.sqrt((k**2).sum(-1, keepdims=True) + 1e-6)
    shape = (batch, length, heads_v, key) if rule == "kda" else (batch, length, heads_v)
    g = -decay * np.abs(normal(seed + 3, *shape))
    beta = 1 / (1 + np.exp(-2 * normal(seed + 4, batch, length, heads_v)))
    states = normal(seed + 5, sequences, heads_v, key, value)
    return [q, k, v, g, beta, states], [normal(seed + 6, *v.shape), normal(seed + 7, *states.shape)]


def torch_gradients(function, arrays, cotangents, dtype, device="cpu"):
    """Outputs, and gradients of all arrays; g and states are wide."""
    given = [x.to(device).requires_grad_() for x in rounded(arrays, dtype)]
    outputs = function(*given[:5], initial_state=given[5], output_final_state=True)
    cotangents = [torch.from_numpy(c).to(device, o.dtype) for c, o in zip(cotangents, outputs, strict=True)]
    return [x.detach() for x in outputs], torch.autograd.grad(outputs, given, cotangents)


def rounded(arrays, dtype):
    narrow = getattr(torch, dtype)
    wide = torch.promote_types(narrow, torch.float32)
    types = [wide if name in ("g", "initial_state") else narrow for name in NAMES]
    return [torch.from_numpy(x).to(kind) for x, kind in zip(arrays, types, strict=True)]


def within_budget(rule, arrays, cotangents, dtype, cu_seqlens=None, device="cpu", **options):
    """Outputs, final states and all gradients of impl='triton'."""
    chunked, recurrent = RULES[rule]
    offsets = None if cu_seqlens is None else torch.tensor(cu_seqlens, dtype=torch.int32)
    held = [x.double().numpy() for x in rounded(arrays, dtype)]
    cotangents = [torch.from_numpy(c).to(getattr(torch, dtype)).double().numpy() for c in cotangents]
    chunked, exactly = partial(chunked, cu_seqlens=offsets, **options), partial(recurrent, cu_seqlens=offsets)
    exact = torch_gradients(exactly, held, cotangents, "float64")
    eager = torch_gradients(partial(chunked, impl="reference"), held, cotangents, dtype, device)
    ours = torch_gradients(partial(chunked, impl="triton"), held, cotangents, dtype, device)
    steepest = min(np.abs(held[3]).max(), 88.0)  # exp(g) has g's rounding |g| times; beyond 88 nothing is left
    for name, kernel, plain, true in zip(
        ("o", "final_state", *NAMES), *([*outputs, *grads] for outputs, grads in (ours, eager, exact)), strict=True
    ):
        assert kernel.dtype == plain.dtype, name
        roundings = 8 + steepest if name == "g" or dtype in ("float32", "float64") else 1
        budget = 2 * (error(plain, true) + roundings * ROUNDING[dtype])
        assert error(kernel, true) <= budget, f"{name}: {error(kernel, true):.1e} > {budget:.1e}"


def error(a, exact):
    """Relative to the exact value, or to what the type holds with all its digits where that is larger."""
    least = torch.finfo(a.dtype).tiny / torch.finfo(a.dtype).eps
    size = float(torch.linalg.vector_norm(exact))
    return relative_difference(a.double().cpu().numpy(), exact.cpu().numpy()) * min(1.0, size / least)


def divisions(length):
    """Offsets of up to four sequences, of which some may be empty."""
    return st.lists(st.integers(0, length), max_size=3).map(lambda cuts: [0, *sorted(cuts), length])


HARD = [
    ("float32", 21, [0, 5, 5, 21], 1, (1, 2), (7, 9), 0.02, 16, False),
    ("bfloat16", 24, None, 2, (2, 1), (16, 24), 1.0, 16, True),
]
"""Packed sequences, one of them empty, heads that share keys; 16 bits: left to no chance."""


@pytest.mark.thorough
@pytest.mark.parametrize("rule", ["kda", pytest.param("gated_delta_rule", marks=pytest.mark.slow)])
def test_kernels_are_as_exact_as_their_type_allows(rule):
    def check(dtype, length, packed, batch, heads_and_group, widths, decay, chunk_size, keep):
        sequences = batch if packed is None else len(packed) - 1
        drawn = drawn_arrays(rule, 5, batch, length, *heads_and_group, *widths, sequences, decay)
        within_budget(rule, *drawn, dtype, packed, chunk_size=chunk_size, disable_recompute=keep)

    @settings(max_examples=min(settings().max_examples, 5 if rule == "kda" else 15), phases=UNSHRUNK)
    @given(data=st.data())
    def check_drawn(data):
        dtype = data.draw(st.sampled_from([*ROUNDING]), "type")
        narrow = dtype in ("bfloat16", "float16")  # a norm of few numbers is at the mercy of single roundings
        length = data.draw(st.integers(8 if narrow else 1, 24 if rule == "kda" else 70), "tokens")
        packed = data.draw(st.none() | divisions(length), "offsets")
        batch = data.draw(st.integers(1, 2), "batch") if packed is None else 1
        heads_and_group = data.draw(st.sampled_from([(1, 2), (1, 1), (2, 1)]), "heads")
        widths = data.draw(st.tuples(*[st.integers(6 if narrow else 1, 40)] * 2), "K, V")
        decay = data.draw(st.sampled_from([0.0, 0.02, 1.0, 50.0]), "decay")
        chunk_size, keep = data.draw(st.sampled_from([16, 32, 64]), "chunk"), data.draw(st.booleans(), "keep")
        check(dtype, length, packed, batch, heads_and_group, widths, decay, chunk_size, keep)

    for case in HARD:
        check(*case)
    check_drawn()


WIDE = [("gated_delta_rule", 256, 130, "float32"), ("gated_delta_rule", 128, 256, "bfloat16")]


@pytest.mark.parametrize(
    ("rule", "key", "value", "dtype"), [*WIDE, pytest.param("kda", 256, 130, "float32", marks=pytest.mark.slow)]
)
def test_wide_heads(rule, key, value, dtype):
    within_budget(rule, *drawn_arrays(rule, 3, 1, 19, 1, 1, key, value, 1), dtype, chunk_size=16)


@pytest.mark.parametrize("rule", [pytest.param("kda", marks=pytest.mark.slow), "gated_delta_rule"])
def test_chunks_of_four_tiles(rule):
    within_budget(rule, *drawn_arrays(rule, 4, 1, 70, 1, 1, 6, 5, 1, decay=0.1), "float64")


@pytest.mark.parametrize("rule", RULES)
def test_chunks_of_three_tiles(rule):
    """The decay over a whole tile between two others."""
    within_budget(rule, *drawn_arrays(rule, 4, 1, 34, 1, 1, 3, 2, 1, decay=0.1), "float64")


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float64", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("rule", RULES)
def test_grouped_heads(rule, dtype):
    """Two heads of q, each of two of values; in KDA, whose products know of them, chunks of two tiles."""
    size = 32 if rule == "kda" else 16
    within_budget(rule, *drawn_arrays(rule, 9, 1, 24, 2, 2, 8, 6, 2, decay=0.1), dtype, [0, 3, 24], chunk_size=size)


@pytest.mark.parametrize("decay", [pytest.param(0.1, marks=pytest.mark.slow), 5.0])
def test_chunks_and_tiles_by_products_and_by_columns(decay, monkeypatch):
    """The decay of 5 per token exceeds what keys may be multiplied by in all chunks and in some of their tiles."""
    from diptych_kernels.delta_rule import products

    arrays, cotangents = drawn_arrays("kda", 12, 1, 36, 1, 1, 6, 5, 1, decay=decay)
    function = partial(RULES["kda"][0], impl="triton", chunk_size=32)
    within_budget("kda", arrays, cotangents, "bfloat16", chunk_size=32)
    results = []
    for limit in (60.0, 0.0):
        monkeypatch.setattr(products, "MAX_FACTORED_DECAY", products.tl.constexpr(limit))
        outputs, gradients = torch_gradients(function, arrays, cotangents, "bfloat16")
        results.append([*outputs, *gradients])
    assert any(not torch.equal(a, b) for a, b in zip(*results, strict=True))  # the two were computed differently
    for a, b in zip(*results, strict=True):
        assert error(a.double(), b.double()) <= 2.0**-6


def test_one_channel_that_decays_much():
    """It is not in the first slice of channels; the others would allow products of the whole chunk."""
    arrays, cotangents = drawn_arrays("kda", 13, 1, 40, 1, 2, 40, 8, 1, decay=0.2)
    arrays[3][:, 3:, 1, 36] *= 40
    within_budget("kda", arrays, cotangents, "bfloat16", chunk_size=32)


@pytest.mark.parametrize("rule", RULES)
def test_states_are_wide_between_chunks(rule):
    """A decay by less than half a unit of bfloat16 in a chunk would be lost in it, again and again."""
    arrays, cotangents = drawn_arrays(rule, 11, 1, 48, 1, 1, 2, 2, 1)
    arrays[3][:], arrays[4][:], cotangents[0][:] = -1e-4, 0.0, 0.0
    function = partial(RULES[rule][0], impl="triton", chunk_size=16)
    (_, final), gradients = torch_gradients(function, arrays, cotangents, "bfloat16")
    for found, begun in ((final, arrays[5]), (gradients[5], cotangents[1])):
        assert relative_difference(found.numpy(), begun * np.exp(-48e-4)) <= 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_scale_and_rows(backend):
    """A scale of one's own, of two rows."""
    arrays, _ = drawn_arrays("gated_delta_rule", 10, 2, 5, 1, 1, 3, 2, 2)
    array = torch.from_numpy if backend == "torch" else jnp.asarray
    q, k, v, g, beta, state = map(array, arrays)
    rule = backend_module(backend, "delta_rule").chunk_gated_delta_rule
    found = [
        rule(q, k, v, g, beta, scale=0.3, initial_state=state, output_final_state=True, impl=impl)
        for impl in ("triton", "reference")
    ]
    for a, b in zip(*found, strict=True):
        assert relative_difference(np.asarray(a), np.asarray(b)) <= 1e-14


def test_chunks_are_of_sizes_kernels_have():
    assert [kernel_chunk_size(size) for size in (1, 16, 32, 64, 128)] == [16, 16, 32, 64, 64]


@pytest.mark.parametrize("rule", RULES)
def test_equal_keys_and_full_corrections(rule):
    """Powers of the system's matrix, which grow as binomial coefficients here, would have no digit left."""
    arrays, cotangents = drawn_arrays(rule, 4, 1, 40, 1, 1, 6, 5, 1, decay=0.0)
    arrays[1][:] = arrays[1][:, :1]
    arrays[4][:] = 1.0
    within_budget(rule, arrays, cotangents, "float32")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_output_knows_the_future(rule, dtype):
    """To the bit: whatever follows token t, outputs until t and their gradients are the same."""
    length, t = 36, 21
    arrays, _ = drawn_arrays(rule, 6, 1, length, 1, 1, 5, 4, 1)
    others, cotangents = drawn_arrays(rule, 16, 1, length, 1, 1, 5, 4, 1)
    cotangents[0][:, t + 1 :] = 0
    cotangents[1][:] = 0
    changed = [np.concatenate([x[:, : t + 1], y[:, t + 1 :]], 1) for x, y in zip(arrays[:5], others, strict=False)]
    function = partial(RULES[rule][0], impl="triton", chunk_size=16)
    (o, _), gradients = torch_gradients(function, arrays, cotangents, dtype)
    (other, _), others = torch_gradients(function, [*changed, arrays[5]], cotangents, dtype)
    for a, b in zip((o, *gradients[:5]), (other, *others[:5]), strict=True):
        assert torch.equal(a[:, : t + 1], b[:, : t + 1])
        assert a is o or not a[:, t + 1 :].any()


# From both backends.


@pytest.mark.thorough
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_backends_agree_bitwise(rule, dtype):
    arrays, cotangents = drawn_arrays(rule, 7, 1, 21, 1, 2, 5, 3, 3)
    offsets = np.array([0, 4, 4, 21], np.int32)
    options = {"impl": "triton", "chunk_size": 16}
    function = partial(RULES[rule][0], cu_seqlens=torch.from_numpy(offsets), **options)
    expected = torch_gradients(function, arrays, cotangents, dtype)
    types = ["float32" if name in ("g", "initial_state") else dtype for name in NAMES]
    given = [jnp.asarray(x, d) for x, d in zip(arrays, types, strict=True)]

    @jax.jit
    def ours(offsets, *given):
        def run(*given):
            rule_of = getattr(backend_module("jax", "delta_rule"), RULES[rule][0].__name__)
            states = {"initial_state": given[5], "output_final_state": True}
            return rule_of(*given[:5], cu_seqlens=offsets, **states, **options)

        outputs, pull_back = jax.vjp(run, *given)
        return outputs, pull_back(tuple(c.astype(o.dtype) for c, o in zip(cotangents, outputs, strict=True)))

    found = ours(offsets, *given)
    for a, b in zip(jax.tree.leaves(found), [*expected[0], *expected[1]], strict=True):
        assert np.array_equal(np.asarray(a, np.float32), b.float().numpy())


@pytest.mark.parametrize("rule", RULES)
def test_jax_takes_offsets_it_does_not_know(rule):
    """Traced, they bound the number of chunks, of which some are none."""
    arrays, _ = drawn_arrays(rule, 7, 1, 21, 1, 1, 5, 3, 3)
    run = partial(getattr(backend_module("jax", "delta_rule"), RULES[rule][0].__name__), impl="triton", chunk_size=16)
    offsets = np.array([0, 4, 4, 21], np.int32)
    given = [jnp.asarray(x, jnp.float32) for x in arrays[:5]]
    known, _ = jax.jit(partial(run, cu_seqlens=offsets))(*given)
    found, _ = jax.jit(lambda offsets, *given: run(*given, cu_seqlens=offsets))(offsets, *given)
    assert np.array_equal(known, found)


HYBRID = TransformerConfig(
    num_layers=3,
    hidden_size=12,
    num_attention_heads=2,
    ffn_hidden_size=8,
    vocab_size=13,
    seq_length=18,
    layer_pattern="kda,gdn,attention",
    linear_num_value_heads=4,
    linear_value_head_dim=5,
    hidden_dropout=0.1,
    params_dtype="float64",
)
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.mark.parametrize("recompute", [{}, pytest.param(RECOMPUTED, marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", TORCH_DAILY)
def test_hybrid_models_of_kernels_equal_the_reference(backend, recompute):
    config = replace(HYBRID, **recompute)
    tokens, cotangent = np.random.default_rng(0).integers(0, 13, (1, 18)), normal(1, 1, 18, 13)
    run = partial(model_gradients, tokens=tokens, cotangent=cotangent, step=3)
    logits, gradients = run(backend, replace(config, impl="triton"))
    expected_logits, expected = run(backend, replace(config, impl="reference"))
    assert_close([logits], [expected_logits], 1e-13)
    assert_close([gradients[n] for n in expected], list(expected.values()), 1e-12)


# Parts of a sequence, side by side.


@pytest.mark.thorough
@pytest.mark.parametrize("rule", RULES)
def test_parts_are_the_whole(rule, monkeypatch):
    arrays, cotangents = drawn_arrays(rule, 8, 1, 70, 1, 1, 5, 4, 3)
    offsets = torch.tensor([0, 50, 50, 70], dtype=torch.int32)
    function = partial(RULES[rule][0], impl="triton", chunk_size=16, cu_seqlens=offsets)
    whole = torch_gradients(function, arrays, cotangents, "float64")
    monkeypatch.setattr(functions, "parts_of", lambda *sizes: 3 if sizes == (6, 3, 1, 4) else 1)
    launched, run = [], torch_ops.run
    monkeypatch.setattr(torch_ops, "run", lambda launch, inputs: launched.append(launch.kernel) or run(launch, inputs))
    parts = torch_gradients(function, arrays, cotangents, "float64")
    assert launched.count("delta_rule.scan.compose") == 3, "forward, and again and back in backward"
    for a, b in zip([*parts[0], *parts[1]], [*whole[0], *whole[1]], strict=True):
        assert error(a, b) <= 1e-14


@pytest.mark.parametrize(
    ("value", "disable_recompute"), [(17, False), (32, False), pytest.param(17, True, marks=pytest.mark.slow)]
)
def test_parts_of_wide_heads(value, disable_recompute, monkeypatch):
    """Several heads, and more columns and values than a tile of compose has; tiles of values may be full."""
    arrays, cotangents = drawn_arrays("gated_delta_rule", 8, 1, 34, 1, 2, 34, value, 2, decay=0.1)
    offsets = torch.tensor([0, 1, 34], dtype=torch.int32)
    options = {"chunk_size": 16, "cu_seqlens": offsets, "disable_recompute": disable_recompute}
    function = partial(chunk_gated_delta_rule, impl="triton", **options)
    whole = torch_gradients(function, arrays, cotangents, "float64")
    monkeypatch.setattr(functions, "parts_of", lambda *sizes: 2)
    parts = torch_gradients(function, arrays, cotangents, "float64")
    for a, b in zip([*parts[0], *parts[1]], [*whole[0], *whole[1]], strict=True):
        assert error(a, b) <= 1e-13


def test_sequences_are_cut_where_heads_are_few():
    assert launches.parts_of(chunks=2048, sequences=1, value_heads=32, value=128) == 1
    assert launches.parts_of(chunks=2048, sequences=1, value_heads=4, value=128) == 16
    assert launches.parts_of(chunks=64, sequences=1, value_heads=4, value=128) == 8, "of eight chunks at least"
    assert launches.parts_of(chunks=16, sequences=1, value_heads=4, value=128) == 1
    assert launches.parts_of(chunks=2048, sequences=16, value_heads=4, value=128) == 1
    assert launches.parts_of(chunks=0, sequences=1, value_heads=4, value=128) == 1


@given(divisions(200), st.sampled_from([16, 32, 64]), st.integers(1, 5))
def test_tables_hold_every_token_once(offsets, chunk_size, parts):
    tables = chunk_tables(np.array(offsets, np.int32), chunk_size)
    tokens = [t for first, last in tables.chunks for t in range(first, last)]
    assert tokens == [*range(offsets[-1])]
    assert all(0 < last - first <= chunk_size for first, last in tables.chunks)
    for rows in (tables.sequences[:, None], tables.cut(parts, chunk_size).reshape(-1, parts, 3)):
        for (start, stop), of_one in zip(itertools.pairwise(offsets), rows, strict=True):
            assert [t for first, last, _ in of_one for t in range(first, last)] == [*range(start, stop)]
            for first, last, chunk in of_one:
                if last > first:
                    assert tables.chunks[chunk][0] == first
                    assert (first - start) % chunk_size == 0


@given(
    tokens=st.integers(1, 2**22),
    sequences=st.integers(1, 10**5),
    heads=st.integers(1, 128),
    key=st.integers(1, 256),
    value=st.integers(1, 256),
    per_channel=st.booleans(),
)
def test_grids_are_within_what_a_gpu_takes(tokens, sequences, heads, key, value, per_channel):
    """More than 65535 sequence-heads, or chunk-heads, are on the axis that takes 2^31 - 1."""
    chunks = tokens // 64 + sequences
    types = ("bfloat16", "float32", "bfloat16")
    of = launches.Call(per_channel, 1.0, tokens, chunks, sequences, heads, heads, key, value, 64, *types)
    for name, (block, *_) in launches.CANDIDATES.items():
        more = {"slices": 2} if name == "gate_gradients" else {"parts": 3, "back": True} if name == "compose" else {}
        grid = getattr(launches, name)(block, (tokens,), of, **more).grid
        assert 0 < grid[0] < 2**31
        assert all(0 < size <= 65535 for size in grid[1:])


# What is refused.


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_too_wide_heads_are_refused(backend):
    array = torch.zeros if backend == "torch" else jnp.zeros
    q, v, g = array((1, 4, 1, 257)), array((1, 4, 1, 2)), array((1, 4, 1))
    rule = backend_module(backend, "delta_rule").chunk_gated_delta_rule
    with pytest.raises(
        ValueError, match=r"q: expected at most 256 channels, got 257; impl='reference' supports any number"
    ):
        rule(q, q, v, g, g, impl="triton")
