"""Context parallelism in PyTorch: ranks that hold parts of sequences compute what one process does."""

import inspect
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.context import LONG
from benchmarks.jobs.context import Load
from diptych.plans.context.exchange import EXCHANGES, exchange_cost
from diptych.plans.context.sequences import check_part
from parity.compare import relative_difference
from reference_torch.context_parallel import (
    build_cp_context,
    compress_h0,
    cp_attention,
    cp_short_convolution,
    expand_h0,
)
from reference_torch.delta_rule import chunk_kda
from reference_torch.rank_pool import RankPool
from tests.context.jobs import OFFSETS, Case, arrays_of, held, own_slices, run_part, unsharded
from tests.context.layer_jobs import LAYERS, MODELS, Layer, layer_part, layer_unsharded, model_unsharded
from tests.jax_process import run_cases

SIZES = (3, 4, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 8)))
TOLERANCE = 1e-12


@pytest.fixture(scope="module", params=SIZES)
def pool(request):
    with RankPool(request.param) as pool:
        yield pool


@cache
def expected(case: Case):
    """Whatever way states travel."""
    return unsharded(case._replace(exchange="", disable_recompute=False))


def assert_equal(case: Case, parts: list, size: int, wanted: tuple | None = None) -> None:
    """All ranks' outputs, final states and gradients together are those wanted, or the unsharded call's."""
    o, finals, gradients = wanted or expected(case)
    assert relative_difference(np.concatenate([part[0] for part in parts], axis=1), o) <= TOLERANCE
    whole = {name: np.zeros_like(gradient) for name, gradient in gradients.items()}
    found = None if finals is None else np.zeros_like(finals)
    for rank, (_, own_finals, own_gradients) in enumerate(parts):
        tokens, sequences = own_slices(case, rank, size)
        for name, gradient in own_gradients.items():
            place = ... if name in ("A_log", "dt_bias") else sequences if name == "initial_state" else (..., tokens)
            if isinstance(place, tuple):
                whole[name][:, tokens] += gradient
            else:
                whole[name][place] += gradient
        if found is not None:
            found[sequences] += own_finals  # where a sequence goes on, its final state is 0
    if found is not None:
        there = held(case, size)
        assert relative_difference(found[there], finals[there]) <= TOLERANCE
        whole["initial_state"][~there] = gradients["initial_state"][~there]
    assert {*whole} == {name for part in parts for name in part[2]}
    for name, gradient in gradients.items():
        if case.alone == "finals" and name == "q":
            assert not gradient.any()
            assert not whole[name].any()
            continue
        assert np.linalg.norm(gradient) > 0, name
        assert relative_difference(whole[name], gradient) <= TOLERANCE, name


def cases_of(exchange: str) -> list[Case]:
    """Every way to divide, with each rule; half of them keep all for backward."""
    rules = ("kda", "gdn", "gate")
    return [
        Case(rules[(place + shift) % 3], tuple(offsets), exchange, bool(place % 2), states=shift == 0 or place % 3 == 0)
        for place, offsets in enumerate(OFFSETS.values())
        for shift in range(2)
    ]


@pytest.mark.multiprocess
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_c2_c3_c4_ranks_compute_what_one_process_does(pool, exchange):
    cases = cases_of(exchange)
    for case, parts in zip(cases, zip(*pool.run("tests.context.jobs:run_parts", cases), strict=True), strict=True):
        assert_equal(case, list(parts), pool.size)


@pytest.mark.multiprocess
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_c2_c3_kernels_over_ranks_are_the_reference_on_one(pool, exchange):
    if pool.size != 3:
        pytest.skip("the interpreter is slow: three ranks are enough")
    place = EXCHANGES.index(exchange)
    offsets = [*OFFSETS.values()][place * 2 % 3]
    case = Case(("gdn", "gate", "gdn")[place], tuple(offsets), exchange, bool(place % 2), impl="triton")
    parts = pool.run("tests.context.jobs:run_kernels", case, (1, 1, 2)[place])
    assert_equal(case._replace(impl="reference"), parts, pool.size)


@pytest.mark.multiprocess
@pytest.mark.parametrize("impl", ["reference", pytest.param("triton", marks=pytest.mark.slow)])
@pytest.mark.parametrize("alone", ["finals", "initial_state"])
def test_c3_all_ranks_go_backward_whatever_the_loss_is_of(pool, alone, impl):
    """A rank that only passes states on, or whose own states came from another, has a part in backward, too."""
    cases = [
        Case("gdn", tuple(offsets), exchange, alone=alone, impl=impl)
        for offsets, exchange in zip(([0, 48], [0, 20, 48]), EXCHANGES, strict=False)
    ]
    for case, parts in zip(cases, zip(*pool.run("tests.context.jobs:run_parts", cases), strict=True), strict=True):
        assert_equal(case._replace(impl="reference"), list(parts), pool.size)


@pytest.mark.multiprocess
def test_c5_parts_of_several_segments(pool):
    """Backward begins with the last segment, computed again while gradients of states travel."""
    cases = [case._replace(disable_recompute=False) for case in cases_of("ring")[::2]]
    parts = zip(*pool.run("tests.context.jobs:run_segments", cases, 4), strict=True)
    for case, own in zip(cases, parts, strict=True):
        assert_equal(case, list(own), pool.size)


@pytest.mark.multiprocess
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_c4_bytes_and_messages_are_the_formula_s(pool, exchange):
    sent = pool.run("tests.context.exchange_jobs:count_sent", pool.size, exchange, 3, 4, 5)
    cost = exchange_cost(exchange, pool.size, 3, 4, 5)
    assert max(payload for payload, _, _ in sent) == cost.payload_bytes
    assert sum(wire for _, wire, _ in sent) == cost.wire_bytes


@pytest.mark.multiprocess
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_c8_states_may_travel_in_bfloat16(pool, exchange):
    """Half the bytes of float32; what comes out is wrong by what a rounded state is, and no more."""
    sent = pool.run("tests.context.exchange_jobs:count_sent", pool.size, exchange, 3, 4, 5, "bfloat16")
    assert sum(wire for _, wire, _ in sent) == exchange_cost(exchange, pool.size, 3, 4, 5, 2).wire_bytes
    case = Case("kda", (0, 48), exchange, wire="bfloat16")
    o, _, gradients = unsharded(case)
    parts = pool.run("tests.context.jobs:run_part", case)
    assert 1e-5 < relative_difference(np.concatenate([part[0] for part in parts], axis=1), o) < 2**-8
    for name in ("q", "k", "v", "g", "beta"):
        found = np.concatenate([part[2][name] for part in parts], axis=1)
        assert 1e-5 < relative_difference(found, gradients[name]) < 2**-6, name


def assert_layer_equal(layer: Layer, parts: list) -> None:
    expected = layer_unsharded(layer)
    for place, (whole, own) in enumerate(zip(expected, zip(*parts, strict=True), strict=True)):
        found = sum(own) if whole.ndim == 2 else np.concatenate(own, axis=1)
        assert relative_difference(found, whole) <= TOLERANCE, (layer, place)


@pytest.mark.multiprocess
def test_c6_c10_convolutions_and_attention_see_the_ranks_before(pool):
    for layer, parts in zip(
        LAYERS, zip(*pool.run("tests.context.layer_jobs:layer_parts", LAYERS), strict=True), strict=True
    ):
        assert_layer_equal(layer, list(parts))


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", MODELS)
def test_c12_a_hybrid_model_over_ranks(pool, name):
    """With documents, dropout and recomputation; gradients are each rank's share."""
    loss, gradients = model_unsharded(name)
    parts = pool.run("tests.context.layer_jobs:model_part", name)
    assert np.mean([part[0] for part in parts]) == pytest.approx(loss, rel=1e-12)
    for parameter, gradient in gradients.items():
        found = sum(part[1][parameter] for part in parts) / pool.size
        assert relative_difference(found, gradient) <= 1e-11, parameter


def test_c6_c10_one_rank_is_one_process():
    for layer in LAYERS:
        assert_layer_equal(layer, [layer_part(layer)])


def test_c2_one_rank_is_one_process():
    for case in cases_of("ring"):
        assert_equal(case, [run_part(case)], 1)


def context_of(offsets: list[int], **changes):
    context = build_cp_context(torch.tensor(offsets, dtype=torch.int32), None)
    for name, value in changes.items():
        object.__setattr__(context, name, value)
    return context


def test_c7_of_the_first_states_one_is_kept():
    context, states = context_of([0, 2, 4, 6]), torch.zeros(3, 2, 4, 5)
    states[0] = torch.randn(2, 4, 5)
    compressed = compress_h0(states, context)
    assert compressed.shape == (1, 2, 4, 5)
    assert torch.equal(expand_h0(compressed, context), states)
    assert compress_h0(None, context) is None
    one = context_of([0, 6])
    assert compress_h0(states[:1], one) is not None
    assert torch.equal(expand_h0(states[:1], one), states[:1])


def test_c9_what_is_not_the_rank_s_part_is_refused():
    case = Case("kda", (0, 48), "ring", states=False)
    arrays = [torch.from_numpy(x) for x in arrays_of(case).values()]
    with pytest.raises(ValueError, match=r"q: expected T = 24, this rank's part of 24 tokens over 1 ranks, got 48"):
        chunk_kda(*arrays, cp_context=context_of([0, 24]))
    with pytest.raises(ValueError, match=r"cu_seqlens: .* cp_context.cu_seqlens, \[0, 48\], got \[0, 20, 48\]"):
        chunk_kda(*arrays, cp_context=context_of([0, 48]), cu_seqlens=torch.tensor([0, 20, 48], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"cu_seqlens: .* cp_context.cu_seqlens, \[0, 48\], got \[0, 48\] of int64"):
        chunk_kda(*arrays, cp_context=context_of([0, 48]), cu_seqlens=torch.tensor([0, 48]))
    with pytest.raises(ValueError, match="cp_context: expected what build_cp_context returns, or None, got str"):
        check_part("ranks", (1, 48, 2, 5))
    check_part(context_of([0, 48]), ())  # q itself is refused, by name
    x, weight = torch.zeros(1, 47, 3), torch.zeros(3, 4)
    with pytest.raises(ValueError, match=r"x: expected T = 48, .* got 47"):
        cp_short_convolution(x, weight, context_of([0, 48]))
    with pytest.raises(ValueError, match="weight: expected 3 taps, the context's conv1d_kernel_size, got 4"):
        cp_short_convolution(torch.zeros(1, 48, 3), weight, context_of([0, 48], conv1d_kernel_size=3))
    heads = torch.zeros(1, 48, 2, 3)
    with pytest.raises(ValueError, match=r"v: expected T = 48, .* got 1"):
        inspect.unwrap(cp_attention)(heads, heads, heads[:, :1], context_of([0, 48]))


def test_c9_contexts_of_anything_else_are_refused():
    build, offsets = inspect.unwrap(build_cp_context), torch.tensor([0, 48], dtype=torch.int32)
    with pytest.raises(ValueError, match="cu_seqlens: expected int32, got int64"):
        build(torch.tensor([0, 48]), None)
    with pytest.raises(ValueError, match="cu_seqlens: expected a tensor, got list"):
        build([0, 48], None)
    with pytest.raises(ValueError, match="cu_seqlens_cpu: expected a tensor, got list"):
        build(offsets, None, None, [0, 48])
    with pytest.raises(
        ValueError, match=r"cu_seqlens_cpu: expected torch.int32 of shape \(2,\), as cu_seqlens, got .*int64"
    ):
        build(offsets, None, None, offsets.long())
    with pytest.raises(ValueError, match=r"group: expected a process group of torch.distributed, or None, got 'cp'"):
        build(offsets, "cp")
    with pytest.raises(ValueError, match=r"conv1d_kernel_size: expected an integer of at least 1, or None, got 2.5"):
        build(offsets, None, 2.5)


@pytest.mark.multiprocess
def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_asked(pool):
    if pool.size != 3:
        pytest.skip("three ranks are enough")
    ends = pool.run("tests.context.jobs:late_part", 2.0, 7.0)
    assert [end for end in ends if end is not None], "somebody waited"
    for message, waited in filter(None, ends):
        assert "pipeline_timeout=2 s" in message
        assert waited < 6.0


@pytest.mark.multiprocess
def test_c13_states_travel_meanwhile():
    """0.2 s of other work beside each exchange of 0.1 s; the fastest of five steps."""
    with RankPool(2) as pool:
        found = pool.run("tests.context.exchange_jobs:seconds_beside_sleep", Load(64, 2, 16), 0.1, 0.2, 5)
    beside, after = (
        min(max(step) for step in zip(*(rank[way] for rank in found), strict=True)) for way in (True, False)
    )
    assert after >= 0.6
    assert 0.4 <= beside <= 0.5


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.alone
def test_c13_states_travel_while_ranks_compute():
    """Exchanges take an eighth of the computation each; of three tries one has to be undisturbed."""
    load, jobs, tries = Load(1024, 8, 64), "benchmarks.jobs.context:time_with_delay", []
    with RankPool(2) as pool:
        for _ in range(3):
            compute = slowest(pool.run(jobs, load, (0.0,), 5), (0.0, True))
            found = pool.run(jobs, load, (compute / 8,), 5)
            tries.append([slowest(found, (compute / 8, overlap)) / compute for overlap in (True, False)])
            if tries[-1][0] <= 1.1 < tries[-1][1]:
                return
    pytest.fail(f"expected steps of at most 1.1 of the computation with overlap alone, got {tries}")


@pytest.mark.slow
@pytest.mark.multiprocess
def test_c14_a_long_sequence_in_little_memory():
    """131,072 tokens over eight ranks: each grows by its arguments, its results and a constant."""
    with RankPool(8) as pool:
        found = pool.run("benchmarks.jobs.context:long_sequence", LONG)
    assert LONG.length == 131_072
    assert max(grown - given for _, grown, given in found) < 64 * 2**20


def test_c15_every_direction_has_a_verdict():
    """Those of the source, by its numbering 1.1 to 5.2."""
    page = (Path(__file__).parents[2] / "docs" / "directions.md").read_text()
    rows = [line.strip("|").split(" | ") for line in page.splitlines() if line.startswith("| ")][1:]
    verdicts = ("built", "not yet", "not tried", "not built")
    for direction, verdict in rows:
        assert verdict.startswith(verdicts), direction
    named = " ".join(direction for direction, _ in rows)
    sources = ("rank to rank", "logarithm", "overlap messages", "smaller M", "prefix products", "fuse", "beta is small")
    sources += ("smaller state", "borders of parts", "another microbatch", "nearest ranks", "CUDA graphs", "NCCL")
    assert not [source for source in sources if source not in named]


def slowest(found: list[dict], way: tuple[float, bool]) -> float:
    """Median over steps of the slowest rank's seconds."""
    return float(np.median([max(step) for step in zip(*(rank[way] for rank in found), strict=True)]))


@pytest.mark.multiprocess
@pytest.mark.timeout(900)
def test_c2_c3_c4_in_jax():
    run_cases("not slow", 880, "tests/context/jax_cases.py")


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(1800)
def test_more_in_jax():
    run_cases("slow", 1780, "tests/context/jax_cases.py")
