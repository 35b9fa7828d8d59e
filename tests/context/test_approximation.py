"""Approximate exchanges of states: what ranks compute is what one process passes on, and within its bound."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diptych.plans.context.approximation import (
    RankBounds,
    low_rank_bounds,
    low_rank_errors,
    rank_bounds,
    truncation_bounds,
)
from diptych.plans.context.exchange import exchange_cost
from diptych.plans.context.sequences import local_sequences
from reference_torch.context_parallel import build_cp_context
from reference_torch.context_parallel.approximate import low_rank
from reference_torch.delta_rule import chunk_kda
from reference_torch.rank_pool import RankPool
from tests.context.approximate_jobs import APPROXIMATIONS, approximated
from tests.context.jobs import OFFSETS, Case
from tests.context.test_context_parallel import assert_equal


@pytest.fixture(scope="module")
def pool():
    with RankPool(4) as pool:
        yield pool


@pytest.mark.multiprocess
@pytest.mark.parametrize("way", APPROXIMATIONS)
def test_c8_ranks_compute_what_one_process_hands_on(pool, way):
    rules = ("kda", "gdn", "gate")
    cases = [
        Case(
            rules[place % 3],
            tuple(offsets),
            disable_recompute=bool(place % 2),
            states=place != 2,
            **APPROXIMATIONS[way],
        )
        for place, offsets in enumerate(OFFSETS.values())
    ]
    for case, parts in zip(cases, zip(*pool.run("tests.context.jobs:run_parts", cases), strict=True), strict=True):
        assert_equal(case, list(parts), pool.size, approximated(case, pool.size))


@pytest.mark.multiprocess
@pytest.mark.parametrize("way", [{"cp_exchange": "ring", "cp_truncate_ranks": 2}, {"cp_transition_rank": 2}])
def test_c8_bytes_and_rounds_are_the_formula_s(pool, way):
    exchange = way.get("cp_exchange", "all_gather")
    sent = pool.run("tests.context.exchange_jobs:count_sent", pool.size, exchange, 3, 4, 5, None, way)
    approximate = way.get("cp_truncate_ranks"), way.get("cp_transition_rank")
    cost = exchange_cost(exchange, pool.size, 3, 4, 5, 4, *approximate)
    assert max(payload for payload, _, _ in sent) == cost.payload_bytes
    assert sum(wire for _, wire, _ in sent) == cost.wire_bytes


def test_c8_kernels_are_refused():
    context = build_cp_context(torch.tensor([0, 8], dtype=torch.int32), None, cp_transition_rank=2)
    x = torch.ones(1, 8, 1, 4)
    with pytest.raises(ValueError, match="impl: expected 'auto' or 'reference' with a cp_context that approximates"):
        chunk_kda(x, x, x, -x, x[..., 0], cp_context=context, impl="triton")


class Stream(NamedTuple):
    """Tokens of one or several sequences over ranks, in numpy."""

    k: np.ndarray
    v: np.ndarray
    g: np.ndarray
    beta: np.ndarray
    offsets: np.ndarray
    size: int

    @property
    def bounds(self) -> RankBounds:
        """Of its ranks."""
        return rank_bounds(*self[:5], self.size)

    def maps(self) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Of every rank, a token at a time: M [HV, K, K], H [HV, K, V] and the product of decays [HV, K]."""
        found, (_, tokens, heads, width) = [], self.v.shape
        key, part = self.k.shape[-1], tokens // self.size
        for rank in range(self.size):
            local = local_sequences(self.offsets, rank, part)
            last = int(local.num_sequences) - 1
            begin, end = (rank * part + int(x) for x in local.cu_seqlens[last : last + 2])
            goes_on, came = int(local.post_num_ranks) > 0, last == 0 and int(local.pre_num_ranks) > 0
            state = np.zeros((heads, key, key + width))
            state[..., :key] = np.eye(key)
            decay = np.ones((heads, key))
            for t in range(begin, end):
                k = np.repeat(self.k[0, t], heads // self.k.shape[2], axis=0)
                a = np.exp(self.g[0, t]).reshape(heads, -1)
                v = np.concatenate([np.zeros((heads, key)), self.v[0, t]], axis=-1)
                state = state * a[..., None]
                error = self.beta[0, t, :, None] * (v - np.einsum("hkw,hk->hw", state, k))
                state = state + k[..., None] * error[:, None]
                decay = decay * a
            found.append((state[..., :key] * (goes_on and came), state[..., key:] * goes_on, decay))
        return found


@st.composite
def streams(draw) -> Stream:
    """Of any gates: from none to those that forget at once; keys longer than one, too."""
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    size, part = draw(st.integers(2, 5)), draw(st.integers(1, 6))
    key, value, heads, group = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 2)), 2
    tokens = size * part
    cut = draw(st.none() | st.integers(1, tokens - 1))
    is_kda = draw(st.booleans())
    decay = (1, tokens, heads * group, key) if is_kda else (1, tokens, heads * group)
    k = rng.standard_normal((1, tokens, heads, key))
    return Stream(
        k * draw(st.sampled_from([0.0, 0.3, 1.0])) / np.linalg.norm(k, axis=-1, keepdims=True),
        rng.standard_normal((1, tokens, heads * group, value)),
        -rng.uniform(size=decay) * draw(st.sampled_from([0.0, 0.01, 0.5, 20.0])),
        rng.uniform(size=(1, tokens, heads * group)) * draw(st.sampled_from([0.1, 1.0, 2.0])),
        np.array([0, tokens] if cut is None else [0, cut, tokens], np.int32),
        size,
    )


def begun(maps: list, size: int, first_of: Callable[[int], int]) -> np.ndarray:
    """The state every rank begins with, of the ranks from the one given on."""
    found = np.zeros((size, *maps[0][1].shape))
    for rank in range(size):
        for transition, state, _ in maps[first_of(rank) : rank]:
            found[rank] = transition @ found[rank] + state
    return found


def norms(x: np.ndarray) -> np.ndarray:
    return np.sqrt((x**2).sum((-1, -2)))


SLACK = 1e-12


@given(streams(), st.integers(1, 5))
def test_c8_truncation_is_within_its_bound(stream, ranks):
    maps, bounds = stream.maps(), stream.bounds
    exact = begun(maps, stream.size, lambda rank: 0)
    for (transition, *_), largest in zip(maps, bounds.transition, strict=True):
        assert (np.linalg.norm(transition, 2, axis=(-2, -1)) <= largest * (1 + SLACK) + SLACK).all()
    assert (norms(exact) <= bounds.initial * (1 + SLACK) + SLACK).all()
    near = begun(maps, stream.size, lambda rank: max(0, rank - ranks))
    bound = truncation_bounds(bounds, ranks)
    assert (norms(exact - near) <= bound * (1 + SLACK) + SLACK).all()
    assert not bound[: ranks + 1].any()  # nothing was left out


@given(streams(), st.integers(1, 5))
def test_c8_a_low_rank_is_within_its_bound(stream, rank):
    maps, bounds, key = stream.maps(), stream.bounds, stream.k.shape[-1]
    for (transition, _, decay), largest in zip(maps, bounds.beside_diagonal, strict=True):
        beside = transition - np.where(transition.any(), 1.0, 0.0) * decay[..., None] * np.eye(key)
        assert (np.linalg.svd(beside, compute_uv=False) <= largest * (1 + 1e-9) + 1e-9).all()
    exact, wrong, rounded = begun(maps, stream.size, lambda _: 0), low_rank_errors(bounds, rank), []
    for (transition, state, decay), errors in zip(maps, wrong, strict=True):
        log_decay = torch.from_numpy(np.log(np.maximum(decay, 1e-300)))
        sent = low_rank(torch.from_numpy(transition), log_decay, rank)
        nearest = sent.times(torch.eye(key, dtype=torch.float64).expand(len(transition), -1, -1)).numpy()
        assert (np.linalg.norm(transition - nearest, 2, axis=(-2, -1)) <= errors * (1 + 1e-9) + SLACK).all()
        rounded.append((nearest, state, decay))
    bound = low_rank_bounds(bounds, rank)
    assert (norms(exact - begun(rounded, stream.size, lambda _: 0)) <= bound * (1 + 1e-9) + SLACK).all()


def test_c8_a_state_that_nothing_erases_is_what_the_bound_says():
    """One token is written, orthogonal keys of no share follow: decays alone shrink it, and the bound is its norm."""
    tokens, size = 12, 4
    k = np.zeros((1, tokens, 1, 2))
    k[..., 0] = 1.0
    v = np.full((1, tokens, 1, 1), 3.0)
    beta = np.zeros((1, tokens, 1))
    beta[0, 0] = 0.5
    stream = Stream(k, v, np.full((1, tokens, 1), -0.1), beta, np.array([0, tokens], np.int32), size)
    for ranks in (1, 2):
        bound = truncation_bounds(stream.bounds, ranks)[:, 0]
        expected = [0.5 * 3.0 * np.exp(-0.1 * (3 * rank - 1)) * (rank > ranks) for rank in range(size)]
        np.testing.assert_allclose(bound, expected, rtol=1e-12)


def test_c8_few_tokens_that_matter_are_sent_whole():
    """Of tokens whose share is 0 nothing is lost: M is its decays and as many terms as there are others."""
    rng = np.random.default_rng(0)
    k, g, beta = rng.standard_normal((1, 12, 1, 4)) / 2, -rng.uniform(size=(1, 12, 1, 4)), np.zeros((1, 12, 1))
    beta[0, [5, 7]] = 0.7
    stream = Stream(k, rng.standard_normal((1, 12, 1, 2)), g, beta, np.array([0, 12], np.int32), 3)
    assert low_rank_errors(stream.bounds, 2).max() < 1e-7
    assert low_rank_errors(stream.bounds, 1)[1] > 1e-3
