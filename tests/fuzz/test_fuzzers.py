"""A hundred programs of every fuzzer: equal to the plain program, or refused by an error of this project."""

import pytest

from tests.fuzz.harness import EQUAL, TECHNIQUES, Growth, load, run_programs

PROGRAMS = 100


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("technique", TECHNIQUES)
def test_a_hundred_programs(technique):
    run_programs(technique, range(5))  # what is made on first use exists
    before = Growth()
    counts = run_programs(technique, range(5, PROGRAMS))
    before.check()
    assert counts[EQUAL] >= PROGRAMS // 5, counts  # a fuzzer that is always refused tests nothing
    missing = {case for case in load(technique).HARD_CASES if not counts[f"uses {case}"]}
    assert not missing, (missing, counts)
