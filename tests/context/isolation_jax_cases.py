"""Isolation of sequences in JAX; tests/context/test_isolation.py runs this file in a process with several devices."""

import jax
import numpy as np
import pytest

from diptych.plans.context.exchange import EXCHANGES
from tests.context.jax_cases import LONGEST, by_rank, padded, program
from tests.context.jobs import Case, Poison, own_slices, poisoned
from tests.context.test_isolation import OFFSETS, POISONS, assert_isolated

SIZE = 4


def parts_of(case: Case, poison: Poison) -> list:
    """What ranks of PyTorch give, of one program of JAX."""
    arrays, (d_o, d_finals) = poisoned(case, poison)
    given = arrays | {"initial_state": by_rank(arrays["initial_state"], case, SIZE, LONGEST)}
    compute = program(case._replace(offsets=()), SIZE)
    gradients, (o, finals) = compute(given, padded(case.offsets), d_o, by_rank(d_finals, case, SIZE, LONGEST))
    parts = []
    for rank in range(SIZE):
        tokens, sequences = own_slices(case, rank, SIZE)
        count = sequences.stop - sequences.start
        own = {name: np.asarray(x)[:, tokens] for name, x in gradients.items() if name != "initial_state"}
        own["initial_state"] = np.asarray(gradients["initial_state"])[rank, :count]
        parts.append((np.asarray(o)[:, tokens], np.asarray(finals)[rank, :count], own))
    return parts


@pytest.mark.parametrize("keep", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_numbers_that_are_not_finite_stay_in_their_sequence(exchange, keep):
    case = Case("gdn", tuple(OFFSETS), exchange, keep)
    for poison in POISONS:
        assert_isolated(case, poison, parts_of(case, poison), SIZE)


@pytest.mark.parametrize("way", [{"exchange": "ring", "truncate": 3}, {"exchange": "all_gather", "rank": 5}])
def test_approximate_exchanges_keep_them_apart(way):
    case = Case("gdn", tuple(OFFSETS), **way)
    for poison in POISONS:
        assert_isolated(case._replace(rank=None), poison, parts_of(case, poison), SIZE)


def test_kernels_keep_them_apart():
    case = Case("gdn", tuple(OFFSETS), "ring", impl="triton")
    for poison in POISONS[2::5]:
        assert_isolated(case._replace(impl="reference"), poison, parts_of(case, poison), SIZE)


jax.config.update("jax_enable_x64", True)
