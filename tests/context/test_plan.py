"""Sequences split over ranks, before a tensor exists: who holds what, and what the exchanges cost."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from diptych.plans.context.exchange import EXCHANGES, exchange_cost, scan_steps
from diptych.plans.context.sequences import check_sequences, local_sequences


@st.composite
def any_split(draw):
    size, part = draw(st.integers(1, 8)), draw(st.integers(1, 6))
    inner = draw(st.lists(st.integers(0, size * part), max_size=10))
    return np.array([0, *sorted(inner), size * part], np.int32), size, part


@pytest.mark.thorough
@given(any_split())
@example((np.array([0, 4, 4, 8, 8], np.int32), 4, 2))
@example((np.array([0, 0, 1, 3, 8], np.int32), 8, 1))
def test_c1_every_rank_knows_what_it_holds(split):
    offsets, size, part = split
    owner = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))  # the sequence of every token
    for rank in range(size):
        local = local_sequences(offsets, rank, part)
        mine = owner[rank * part : (rank + 1) * part]
        first, count = int(local.first_sequence), int(local.num_sequences)
        assert (first, first + count - 1) == (mine[0], mine[-1])
        own = local.cu_seqlens[: count + 1]
        np.testing.assert_array_equal(np.repeat(np.arange(first, first + count), np.diff(own)), mine)
        assert (local.cu_seqlens[count:] == part).all()
        ranks = np.arange(size * part) // part
        assert local.pre_num_ranks == rank - ranks[owner == mine[0]][0]
        assert local.post_num_ranks == ranks[owner == mine[-1]][-1] - rank
        assert local.pre_num_tokens == (owner[: rank * part] == mine[0]).sum()
        theirs = local_sequences(jnp.asarray(offsets), rank, part, jnp)
        for ours, other in zip(local, theirs, strict=True):
            np.testing.assert_array_equal(ours, other)


@given(size=st.integers(1, 70), seed=st.integers(0, 9))
def test_c4_a_scan_composes_all_maps_in_a_logarithm_of_rounds(size, seed):
    maps, states = np.random.default_rng(seed).standard_normal((2, size))
    expected = [0.0]
    for m, h in zip(maps, states, strict=True):
        expected.append(m * expected[-1] + h)
    m, h = maps.copy(), states.copy()
    steps = scan_steps(size)
    for step in steps if size > 1 else ():
        before_m, before_h = m.copy(), h.copy()
        if step.first_sender == 0:
            m, h = np.zeros(size), np.zeros(size)
        for sender, receiver in step.pairs(size):
            if step.first_sender == 0:
                m[receiver], h[receiver] = before_m[sender], before_h[sender]
            else:
                h[receiver] = before_m[receiver] * before_h[sender] + before_h[receiver]
                m[receiver] = before_m[receiver] * before_m[sender]
        assert len(step.pairs(size)) == step.messages(size)
        if step.is_last:
            assert step is steps[-1]
    np.testing.assert_allclose(h if size > 1 else np.zeros(1), expected[:-1], rtol=1e-9, atol=1e-12)
    assert len(steps) <= 1 + np.ceil(np.log2(max(2, size)))


def test_c4_costs_by_hand():
    """Eight ranks, H and M of two heads, K = 16, V = 32, in float64: 8192 and 4096 bytes."""
    assert exchange_cost("all_gather", 8, 2, 16, 32, 8) == (1, 12288, 8 * 7 * 12288)
    assert exchange_cost("ring", 8, 2, 16, 32, 8) == (7, 8192, 7 * 8192)
    # 7 pairs one rank on, then 6 over distance 1 and 5 over 2 from rank 1 on, and 3 states over 4
    assert exchange_cost("scan", 8, 2, 16, 32, 8) == (4, 3 * 12288 + 8192, (7 + 6 + 5) * 12288 + 3 * 8192)
    for exchange in EXCHANGES:
        assert exchange_cost(exchange, 1, 2, 16, 32) == (0, 0, 0)
    assert exchange_cost("scan", 2, 2, 16, 32, 8) == (1, 8192, 8192)


@pytest.mark.parametrize(
    ("offsets", "options", "message"),
    [
        ([0, 10], {}, "cu_seqlens: expected to end at a multiple of the number of ranks, 4, got 10"),
        ([0, 0], {}, "cu_seqlens: expected to end at a multiple of the number of ranks, 4, got 0"),
        ([1, 8], {}, "cu_seqlens: expected to begin at 0, got 1"),
        ([0, 5, 3, 8], {}, "cu_seqlens: expected offsets that never decrease, got 5 before 3 at 1"),
        ([8], {}, r"cu_seqlens: expected shape \[N \+ 1\] of at least \[2\], got \[1\]"),
        ([0, 8], {"dtype": "int64"}, "cu_seqlens: expected int32, got int64"),
        ([0, 8], {"conv1d_kernel_size": 0}, "conv1d_kernel_size: expected an integer of at least 1, or None, got 0"),
        ([0, 8], {"cp_wire_dtype": "int8"}, r"cp_wire_dtype: expected one of \(None, 'bfloat16'\), got 'int8'"),
        (
            [0, 8],
            {"cp_truncate_ranks": 1},
            "cp_truncate_ranks: expected None unless cp_exchange is 'ring', got 1 with 'all_gather'",
        ),
        (
            [0, 8],
            {"cp_transition_rank": True},
            "cp_transition_rank: expected an integer of at least 1, or None, got True",
        ),
        ([0, 8], {"cp_exchange": "tree"}, r"cp_exchange: expected one of .*'pipelined'\), got 'tree'"),
        (
            [0, 8],
            {"cp_attention_layout": "striped"},
            r"cp_attention_layout: expected one of .*'zigzag'\), got 'striped'",
        ),
    ],
)
def test_c9_bad_sequences_are_named(offsets, options, message):
    arguments = {"dtype": "int32", "size": 4} | options
    with pytest.raises(ValueError, match=message):
        check_sequences(np.array(offsets), **arguments)
