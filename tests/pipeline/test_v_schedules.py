"""zb-h2 and the V-shaped schedules: what they promise of time and memory, each where it holds."""

from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from diptych.plans.schedule.named import build_schedule
from diptych.plans.schedule.partition import get_stage, get_stage_place, layers_by_stage, num_stages
from diptych.plans.schedule.placement import V_SCHEDULES, place_of, stage_at
from diptych.plans.schedule.simulate import Costs, simulate
from tests.pipeline.support import divided

RANKS = st.integers(2, 9)


def simulated(name: str, p: int, m: int, costs: Costs | None = None):
    return simulate(build_schedule(name, p, m, 2 if name in V_SCHEDULES else 1), costs)


@given(st.integers(1, 6), st.integers(0, 8), st.floats(0.2, 2.0), st.floats(0.1, 2.0))
def test_zb_h2(p, more, step, weights):
    """m >= 2p - 1, F = I >= W: no rank idle for more than (p - 1)(F + I - 2W) from its first to its last action."""
    assume(weights <= step)
    m = 2 * p - 1 + more
    costs = Costs(step, step, weights)
    found = simulated("zb-h2", p, m, costs)
    busy = m * (2 * step + weights)
    assert max(found.span) == pytest.approx(busy + (p - 1) * (2 * step - 2 * weights))
    assert found.peak_in_flight == (2 * p - 1,) * p


@given(RANKS, st.integers(0, 12))
def test_zb_v(p, more):
    """m >= 2p - 1, F = I = W: every rank works without a pause; all begin within p - 1 units of time."""
    m = 2 * p - 1 + more
    found = simulated("zb-v", p, m)
    assert found.span == (6 * m,) * p
    assert found.makespan == 6 * m + p - 1
    assert found.peak_in_flight == (2 * p,) * p


@given(RANKS, st.integers(0, 12))
def test_dualpipe_v(p, more):
    """m >= 2p, F = I = W: as fast as zb-v, with one stage's worth more in flight, and most backwards whole."""
    m = 2 * p + more
    found = simulated("dualpipe-v", p, m)
    assert found.makespan == 6 * m + p - 1
    assert found.peak_in_flight == (2 * p + 1,) * p
    kinds = [a.kind for a in build_schedule("dualpipe-v", p, m, 2).actions[0]]
    assert (kinds.count("B"), kinds.count("I")) == (2 * m - (2 * p - 1), 2 * p - 1)


@given(RANKS, st.integers(0, 12))
def test_v_half(p, more):
    """m >= p, F = I = W: half of what 1F1B keeps, and time that is lost once, whatever m."""
    m = p + more
    found = simulated("v-half", p, m)
    assert found.makespan == 6 * m + max(p - 1, 6 * ((p - 1) // 2) - 1)
    assert max(found.peak_in_flight) == 2 * ((p + 2) // 2)


@given(RANKS, st.integers(0, 12))
def test_v_min(p, more):
    m = p + more
    found = simulated("v-min", p, m)
    assert found.makespan == 6 * m + max(p - 1, 6 * ((4 * p - 4) // 6) - 1)
    assert max(found.peak_in_flight) == 2 * ((p + 4) // 3)


@given(st.sampled_from(["v-half", "v-min"]), RANKS, st.integers(1, 14))
def test_bounds_hold_with_few_microbatches_and_any_costs(name, p, m):
    """What is in flight is decided by the order alone."""
    most = 2 * ((p + 2) // 2) if name == "v-half" else 2 * ((p + 4) // 3)
    assert max(simulated(name, p, m, Costs(1.3, 0.4, 2.1, 0.5)).peak_in_flight) <= most


@pytest.mark.parametrize(
    ("name", "makespan", "span"),
    [("zb-h2", 27, 24), ("zb-v", 51, 48), ("v-half", 53, 53), ("v-min", 59, 59), ("dualpipe-v", 51, 51)],
)
def test_four_ranks_and_eight_microbatches(name, makespan, span):
    found = simulated(name, 4, 8)
    assert (found.makespan, max(found.span)) == (makespan, span)


@given(st.integers(1, 9), st.integers(1, 4), st.sampled_from(["loop", "v"]))
def test_places_and_stages_are_each_others_inverse(p, v, placement):
    places = [place_of(stage, p, placement) for stage in range(p * v)]
    assert [stage_at(place, p, placement) for place in places] == [*range(p * v)]
    assert sorted(places) == [(virtual, rank) for virtual in range(v) for rank in range(p)]
    ranks = [rank for _, rank in places]
    step = {abs(a - b) for a, b in pairwise(ranks)}
    assert step <= ({0, 1} if placement == "v" else {1, p - 1}), "neighbours lie side by side"


@pytest.mark.parametrize("name", V_SCHEDULES)
def test_layers_lie_there_and_back(name):
    """The loss counts on the first rank, which has the last stage."""
    config = divided(3, name, 2, num_layers=11, account_for_loss_in_pipeline_split=True)
    assert layers_by_stage(config) == (2, 2, 2, 2, 2, 1)
    assert [get_stage_place(config, stage).pp_rank for stage in range(6)] == [0, 1, 2, 2, 1, 0]
    assert [get_stage(config, *get_stage_place(config, stage)) for stage in range(num_stages(config))] == [*range(6)]
