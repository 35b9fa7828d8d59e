"""A number that is not finite stays in its own sequence, whichever ranks hold the sequences: forward and backward."""

from functools import cache

import numpy as np
import pytest

from diptych.plans.context.exchange import EXCHANGES
from reference_torch.rank_pool import RankPool
from tests.context.jobs import TOKENS, Case, Poison, arrays_of, cotangents_of, gradients_of, leaves_of, own_slices
from tests.jax_process import run_cases

OFFSETS = [0, 10, 30, 40, 48]
"""Over four ranks of twelve tokens the second sequence is on three of them; the first and third end on two."""
POISONS = [
    Poison("v", 0, np.inf),
    Poison("k", 9, np.nan),
    Poison("v", 12, np.nan),
    Poison("g", 29, np.nan),
    Poison("q", 33, np.inf),
    Poison("beta", 47, np.nan),
    Poison("cotangent", 2, np.nan),
    Poison("cotangent", 29, np.inf),
    Poison("cotangent", 40, np.nan),
]


@cache
def clean(case: Case):
    """Outputs, final states and gradients of one process, of finite numbers."""
    import torch

    from tests.context.jobs import run_rule

    arrays = leaves_of(case, arrays_of(case))
    o, finals = run_rule(case, arrays, cu_seqlens=torch.tensor(case.offsets, dtype=torch.int32))
    return gradients_of(case, arrays, o, finals, *cotangents_of(case))


def assert_isolated(case: Case, poison: Poison, parts: list, size: int) -> None:
    """Every other sequence's outputs, final states and gradients are those of finite numbers."""
    o, finals, gradients = clean(case._replace(exchange="", disable_recompute=False, wire=None, truncate=None))
    bad = int(np.searchsorted(case.offsets, poison.token, side="right")) - 1
    others = np.r_[0 : case.offsets[bad], case.offsets[bad + 1] : TOKENS]
    found = {"o": np.concatenate([part[0] for part in parts], axis=1)}
    found |= {name: np.zeros_like(x) for name, x in gradients.items()} | {"finals": np.zeros_like(finals)}
    for rank, (_, own_finals, own_gradients) in enumerate(parts):
        tokens, sequences = own_slices(case, rank, size)
        found["finals"][sequences] += own_finals
        for name, x in own_gradients.items():
            found[name][sequences if name == "initial_state" else (slice(None), tokens)] += x
    expected = gradients | {"o": o, "finals": finals}
    for name, x in expected.items():
        own = np.arange(len(case.offsets) - 1) != bad if name in ("finals", "initial_state") else (slice(None), others)
        np.testing.assert_allclose(found[name][own], x[own], rtol=1e-9, atol=1e-12, err_msg=f"{name} {poison}")
    if poison.name != "cotangent":
        assert np.isfinite(found["o"][:, : poison.token]).all(), "an earlier token of its sequence"


@pytest.mark.multiprocess
@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_numbers_that_are_not_finite_stay_in_their_sequence(impl):
    with RankPool(4) as pool:
        calls = [
            (Case(rule, tuple(OFFSETS), EXCHANGES[place % len(EXCHANGES)], bool(place % 2), impl=impl), poison)
            for place, poison in enumerate(POISONS if impl == "reference" else POISONS[2::5])
            for rule in (("kda", "gdn") if impl == "reference" else ("gdn",))
        ]
        if impl == "reference":
            calls += [(Case("kda", tuple(OFFSETS), exchange), poison) for exchange in EXCHANGES for poison in POISONS]
        found = pool.run("tests.context.jobs:poisoned_parts", calls)
    for (case, poison), parts in zip(calls, zip(*found, strict=True), strict=True):
        assert_isolated(case._replace(impl="reference"), poison, list(parts), 4)


@pytest.mark.multiprocess
def test_maps_of_nearest_ranks_and_of_low_rank_keep_them_apart():
    """Sequences no longer than the ranks that are looked at, and maps of full rank: nothing is left out."""
    exchanges = [{"exchange": "ring", "truncate": 3}, {"exchange": "all_gather", "rank": 5}]
    calls = [(Case("kda", tuple(OFFSETS), **way), poison) for way in exchanges for poison in POISONS]
    with RankPool(4) as pool:
        found = pool.run("tests.context.jobs:poisoned_parts", calls)
    for (case, poison), parts in zip(calls, zip(*found, strict=True), strict=True):
        assert_isolated(case._replace(rank=None), poison, list(parts), 4)


@pytest.mark.multiprocess
@pytest.mark.timeout(900)
def test_isolation_in_jax():
    run_cases("not slow", 880, "tests/context/isolation_jax_cases.py")


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(900)
def test_more_isolation_in_jax():
    run_cases("slow", 880, "tests/context/isolation_jax_cases.py")
