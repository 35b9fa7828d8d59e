"""Pipeline schedules as tables: what they hold, when they run, what they cost."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from diptych.plans.schedule.actions import Action
from diptych.plans.schedule.messages import Message, lower
from diptych.plans.schedule.named import (
    build_schedule,
    convert_schedule_table_to_order,
    get_schedule_table,
    num_warmup_microbatches,
)
from diptych.plans.schedule.simulate import Costs, simulate
from diptych.plans.schedule.transport import ORDERINGS
from diptych.plans.schedule.validate import validate_schedule
from tests.pipeline.schedules import ANY, TIMES, sizes


@given(ANY, st.sampled_from(ORDERINGS))
def test_every_schedule_is_valid_under_all_orderings(arguments, ordering):
    validate_schedule(build_schedule(*arguments), ordering)


@given(ANY)
def test_every_message_has_two_ends_in_one_order(arguments):
    """Between two ranks, messages are received in the order they are sent, as in-order transports need."""
    schedule = build_schedule(*arguments)
    program = lower(schedule)
    assert [tuple(step for step in steps if isinstance(step, Action)) for steps in program] == [*schedule.actions]
    for rank, steps in enumerate(program):
        for peer in range(schedule.pp_size):
            sent = [s.produced_by for s in steps if isinstance(s, Message) and (s.direction, s.peer) == ("SEND", peer)]
            received = [
                s.produced_by
                for s in program[peer]
                if isinstance(s, Message) and (s.direction, s.peer) == ("RECV", rank)
            ]
            assert sent == received
            assert len(set(sent)) == len(sent)


# Closed forms, each where it holds.


@given(st.sampled_from(["gpipe", "1f1b"]).flatmap(sizes), TIMES, TIMES, TIMES)
def test_gpipe_and_1f1b(arguments, forward, inputs, weights):
    """For every p, m and cost: bubble (p - 1)(F + B); GPipe keeps m, 1F1B min(p - r, m)."""
    name, p, m = arguments
    simulation = simulate(build_schedule(*arguments), Costs(forward, inputs, weights))
    bubble = (p - 1) * (forward + inputs + weights)
    assert simulation.makespan == pytest.approx(m * (forward + inputs + weights) + bubble)
    assert simulation.bubble == pytest.approx((bubble,) * p)
    in_flight = tuple(m if name == "gpipe" else min(p - rank, m) for rank in range(p))
    assert simulation.peak_in_flight == in_flight
    assert simulation.peak_bytes == in_flight


@given(st.integers(2, 6), st.integers(1, 3), st.integers(2, 4), TIMES)
def test_interleaved_bubble_is_divided_by_v(p, groups, v, forward):
    """Whole groups of p microbatches, F and B of a rank split evenly over v stages, I = W = F."""
    simulation = simulate(build_schedule("interleaved", p, p * groups, v), Costs(*(3 * [forward / v])))
    assert simulation.bubble == pytest.approx(((p - 1) * 3 * forward / v,) * p)


@given(sizes("interleaved"))
def test_interleaved_in_flight(arguments):
    _, p, m, v, g = arguments
    simulation = simulate(build_schedule(*arguments))
    assert simulation.peak_in_flight == tuple(min(2 * (p - 1 - rank) + (v - 1) * g + 1, m * v) for rank in range(p))


@given(st.integers(1, 6), st.integers(0, 8), TIMES, TIMES)
def test_zero_bubble(p, more, step, weights):
    """m >= p, F = I >= W: bubble (p - 1)(F + I - W); any costs: p in flight at most, W kept from I on."""
    assume(weights <= step)
    m = p + more
    schedule = build_schedule("zb-h1", p, m)
    simulation = simulate(schedule, Costs(step, step, weights))
    assert simulation.bubble == pytest.approx(((p - 1) * (2 * step - weights),) * p)
    assert simulation.peak_in_flight == (p,) * p
    peaks = simulate(schedule, Costs(activation_bytes=10.0, weight_gradient_bytes=4.0)).peak_bytes
    assert peaks == tuple(10.0 * (p - rank) + 4.0 * rank for rank in range(p))


@pytest.mark.parametrize(
    ("arguments", "makespan"),
    [(("gpipe", 4, 8), 33), (("1f1b", 4, 8), 33), (("interleaved", 4, 8, 2), 57), (("zb-h1", 4, 8), 27)],
)
def test_makespans_of_the_papers_example(arguments, makespan):
    assert simulate(build_schedule(*arguments)).makespan == makespan


@given(ANY, st.floats(0.0, 2.0))
def test_communication_never_helps(arguments, time):
    schedule = build_schedule(*arguments)
    free, slow = (simulate(schedule, Costs(communication=t)) for t in (0.0, time))
    assert slow.makespan >= free.makespan
    assert slow.peak_in_flight == free.peak_in_flight


def test_communication_of_1f1b_by_hand():
    """p = 2, m = 1, F = 1, B = 2, a message 0.5: 1 + 0.5 + 1 + 2 + 0.5 + 2."""
    simulation = simulate(build_schedule("1f1b", 2, 1), Costs(communication=0.5))
    assert simulation.makespan == 7.0
    assert simulation.starts == {
        Action("F", 0, 0): 0.0,
        Action("F", 1, 0): 1.5,
        Action("B", 1, 0): 2.5,
        Action("B", 0, 0): 5.0,
    }
    assert simulation.span == (7.0, 3.0)


def test_costs_differ_by_stage():
    simulation = simulate(build_schedule("1f1b", 2, 3), Costs(forward=[1.0, 4.0], activation_bytes=[10.0, 3.0]))
    assert simulation.peak_bytes == (20.0, 3.0)
    assert simulation.makespan == 1.0 + 3 * (4.0 + 2.0) + 2.0


# The order within a rank.


def test_table_of_two_chunks_in_groups_of_three():
    """m = 5: the last group has two."""
    microbatches, chunks = zip(*get_schedule_table(5, 2, 3), strict=True)
    assert microbatches == (0, 1, 2, 0, 1, 2, 3, 4, 3, 4)
    assert chunks == (0, 0, 0, 1, 1, 1, 0, 0, 1, 1)
    order = convert_schedule_table_to_order(3, 2, get_schedule_table(5, 2, 3))
    assert order == [1, 1, 1, 2, -2, 2, -2, 2, -2, 1, -1, 1, -1, 2, -1, 2, -2, -2, -1, -1]


@given(sizes("interleaved"))
def test_warmups(arguments):
    _, p, m, v, g = arguments
    for rank, actions in enumerate(build_schedule(*arguments).actions):
        first = next(i for i, action in enumerate(actions) if action.kind == "B")
        warmup = num_warmup_microbatches(rank, p, m, v, g)
        assert first == min(warmup + 1, m * v)
        assert [a.stage % p for a in actions] == [rank] * (2 * m * v)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (4, 9, 2),
            r"num_microbatches: expected 2 equal rounds with schedule 'interleaved-zb1p', got 9, which leaves 1",
        ),
        (
            (4, 8, 1),
            r"stages_per_rank: expected at least 2 with schedule 'interleaved-zb1p', got 1; .* or choose 'zb-h1'",
        ),
        ((4, 8, 2, 4), r"group_size: expected None with schedule 'interleaved-zb1p', got 4; choose 'interleaved'"),
        ((1, 8, 2), r"pp_size: expected at least 2 with schedule 'interleaved-zb1p', got 1; choose 'none'"),
    ],
)
def test_interleaved_zero_bubble_refuses_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        build_schedule("interleaved-zb1p", *arguments)


@given(st.integers(2, 6), st.integers(1, 3), st.integers(2, 4), TIMES)
def test_interleaved_zero_bubble(p, rounds, v, weights):
    """m a multiple of p, F = I = 1 >= W of a stage: the bubble of zb-h1, of one stage; v p stages' worth in flight."""
    weights = min(weights, 1.0)
    simulation = simulate(build_schedule("interleaved-zb1p", p, rounds * p, v), Costs(1.0, 1.0, weights))
    assert simulation.bubble == pytest.approx(((p - 1) * (2.0 - weights),) * p)
    assert simulation.peak_in_flight == (v * p,) * p
