"""Every technique in everything that surrounds a model: the tables of docs/everywhere.md."""

import re

import pytest
import torch

from reference_torch.rank_pool import RankPool
from tests.everywhere import support_matrix_jax
from tests.everywhere.support_matrix import (
    INACTIVE,
    RANKS,
    REFUSED,
    SURROUNDINGS,
    TECHNIQUES,
    difference,
    limit,
    run,
    updated,
)
from tests.everywhere.support_table import PAGE
from tests.jax_process import run_cases

CELLS = [
    pytest.param(
        technique,
        surroundings,
        marks=[
            *([pytest.mark.multiprocess] if technique == "cp_context" or surroundings in RANKS else []),
            *([pytest.mark.slow] if surroundings == "torch.compile" else []),  # traces the model for half a minute
        ],
    )
    for technique in TECHNIQUES
    for surroundings in SURROUNDINGS
]


@pytest.fixture(scope="module")
def pools():
    made: dict[int, RankPool] = {}
    yield made
    for pool in made.values():
        pool.close()


def outcomes(technique: str, surroundings: str, pools: dict[int, RankPool]) -> list[str]:
    """What every rank found."""
    count = RANKS.get(surroundings, 1) * (2 if technique == "cp_context" else 1)
    if count == 1:
        return [run(technique, surroundings)]
    if count not in pools:
        pools[count] = RankPool(count, 120.0)
    return pools[count].run("tests.everywhere.support_matrix:run", technique, surroundings)


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("unchecked_shapes")  # whose checks torch.compile does not understand
@pytest.mark.parametrize(("technique", "surroundings"), CELLS)
def test_a_cell(technique, surroundings, pools):
    for outcome in outcomes(technique, surroundings, pools):
        if (technique, surroundings) in REFUSED:
            assert re.match(REFUSED[technique, surroundings], outcome, re.DOTALL), outcome
        elif (technique, surroundings) in INACTIVE:
            assert outcome == "inactive"
        else:
            assert re.fullmatch(r"\de[+-]\d\d", outcome), outcome
            assert float(outcome) <= limit(technique, surroundings)


@pytest.mark.multiprocess
@pytest.mark.timeout(600)
def test_cells_of_jax():
    run_cases("not slow", 580, "tests/everywhere/support_cases_jax.py")


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(1200)
def test_more_cells_of_jax():
    run_cases("slow", 1180, "tests/everywhere/support_cases_jax.py")


@pytest.mark.parametrize("update", [updated, support_matrix_jax.updated], ids=["PyTorch", "JAX"])
def test_the_page_has_the_table(update):
    assert update(PAGE.read_text()) == PAGE.read_text()


def test_a_wrong_gradient_is_seen():
    expected = {"weight": torch.ones(3), "bias": torch.zeros(2)}
    found = {**expected, "weight": torch.tensor([1.0, 1.0, 1.001])}
    assert difference(found, expected) == pytest.approx(1e-3, rel=1e-3)
    with pytest.raises(AssertionError, match="no result for"):
        difference({"weight": expected["weight"]}, expected)
