"""Zigzag attention: the plan covers what causality needs once, and ranks compute what one process does."""

from collections import Counter
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.plans.context.zigzag import (
    attention_flops,
    block_pairs,
    computed_halves,
    half_begin,
    half_lengths,
    half_moves,
    move_cost,
    score_pairs,
)
from parity.compare import relative_difference
from reference_torch.rank_pool import RankPool
from tests.context import zigzag_jobs
from tests.context.zigzag_jobs import HEADS, WIDTH, Case, cases_of
from tests.jax_process import run_cases

JOBS = "tests.context.zigzag_jobs"
SIZES = (3, 4, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 8)))
TOLERANCE = 1e-12
NARROW = 2**-7
"""Of outputs and gradients in bfloat16, whose numbers have eight bits."""

# The plan.

sizes, part_lengths = st.integers(1, 12), st.integers(1, 9)


@given(sizes)
def test_every_block_that_causality_needs_is_computed_once_and_all_ranks_have_as_many(size):
    computed = Counter(pair for rank in range(size) for pair in block_pairs(rank, size))
    assert computed == Counter((query, key) for query in range(2 * size) for key in range(query + 1))
    assert {len(block_pairs(rank, size)) for rank in range(size)} == {2 * size + 1}


@given(sizes, part_lengths)
def test_everyone_receives_what_it_computes_and_gets_its_outputs_back(size, part):
    tokens = [range(rank * part, (rank + 1) * part) for rank in range(size)]
    first = half_lengths(part)[0]
    halves = [(own[:first], own[first:]) for own in tokens]
    came, back = (
        {(receiver, place): (sender, place) for place in (0, 1) for sender, receiver in half_moves(size, place, back)}
        for back in (False, True)
    )
    assert len(came) == len(back) == 2 * size
    for rank in range(size):
        for half in computed_halves(rank, size):
            begin, end = half_begin(half, part), half_begin(half + 1, part)
            holder, place = came[rank, half % 2]
            assert [*halves[holder][place]] == [*range(begin, end)]
            assert back[holder, place] == (rank, place)


@given(sizes, part_lengths)
def test_scores_and_bytes_are_the_formula_s(size, part):
    begins = [half_begin(half, part) for half in range(2 * size + 1)]
    assert begins == sorted(begins)
    assert (begins[0], begins[-1]) == (0, size * part)
    pairs = [score_pairs("zigzag", rank, size, part) for rank in range(size)]
    for rank, found in enumerate(pairs):
        blocks = block_pairs(rank, size)
        assert found == sum(np.diff(begins)[query] * np.diff(begins)[key] for query, key in blocks)
        assert found <= score_pairs("contiguous", rank, size, part) == size * part**2
        assert attention_flops("zigzag", rank, size, part, 3, 5) == 4 * 3 * 5 * found
    if part % 2 == 0:
        assert set(pairs) == {(2 * size + 1) * (part // 2) ** 2}
    held = [set(range(rank * part, (rank + 1) * part)) for rank in range(size)]
    computed = [
        {t for half in computed_halves(r, size) for t in range(begins[half], begins[half + 1])} for r in range(size)
    ]
    moved = [len(own - here) + len(here - own) for own, here in zip(held, computed, strict=True)]
    assert move_cost(size, part, 3, 5, 2) == (30 * max(moved), 30 * sum(moved))


# PyTorch.


@pytest.fixture(scope="module", params=SIZES)
def pool(request):
    with RankPool(request.param) as pool:
        yield pool


@cache
def expected(case: Case) -> list[np.ndarray]:
    return zigzag_jobs.unsharded(case)


def assert_equal(case: Case, parts: list, tolerance: float = TOLERANCE) -> None:
    """All ranks' outputs and gradients of q, k and v together are one process's."""
    for name, own, whole in zip(("o", "q", "k", "v"), zip(*parts, strict=True), expected(case), strict=True):
        assert relative_difference(np.concatenate(own, axis=1), whole) <= tolerance, (case, name)


@pytest.mark.multiprocess
def test_ranks_compute_what_one_process_does(pool):
    cases = cases_of(pool.size)
    for case, parts in zip(cases, zip(*pool.run(f"{JOBS}:parts", cases), strict=True), strict=True):
        assert_equal(case, list(parts))


@pytest.mark.parametrize("case", cases_of(1))
def test_one_rank_is_one_process(case):
    assert_equal(case, [zigzag_jobs.part(case)])


@pytest.mark.multiprocess
def test_bfloat16_is_as_near_as_the_contiguous_layout(pool):
    case = Case((0, 10 * pool.size + 3, 16 * pool.size), dtype="bfloat16")
    for fused in (False, True):
        for layout in ("zigzag", "contiguous"):
            case = case._replace(layout=layout, fused=fused)
            own = pool.run(f"{JOBS}:part", case)
            assert_equal(Case(case.offsets), [[*x] for x in own], NARROW)


@pytest.mark.multiprocess
@pytest.mark.parametrize("part", [6, 5])
def test_bytes_and_products_are_the_formula_s(pool, part):
    """Backward sends as much as forward; keys and values are gathered, not sent from point to point."""
    for layout in ("zigzag", "contiguous"):
        sent = pool.run(f"{JOBS}:count_sent", Case((0, part * pool.size), layout=layout))
        cost = move_cost(pool.size, part, HEADS, WIDTH, 8) if layout == "zigzag" else (0, 0)
        assert (max(own["forward"] for own in sent), sum(own["forward"] for own in sent)) == cost
        assert all(own["all"] == 2 * own["forward"] for own in sent)
        flops = [attention_flops(layout, rank, pool.size, part, HEADS, WIDTH) for rank in range(pool.size)]
        assert [own["flops"] for own in sent] == flops


# JAX.


@pytest.mark.multiprocess
@pytest.mark.timeout(900)
def test_jax_computes_what_pytorch_does_alone():
    run_cases("not slow", 880, "tests/context/zigzag_jax_cases.py")


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(900)
def test_jax_on_more_ranks():
    run_cases("slow", 880, "tests/context/zigzag_jax_cases.py")
