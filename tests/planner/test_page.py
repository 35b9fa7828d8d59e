"""The page of a plan says what the planner says: places, times, memory, copies."""

import re
from bisect import bisect_right
from dataclasses import replace

import pytest

from diptych.planner.memory import predict_memory
from diptych.planner.memory.ranks import rank_memories
from diptych.planner.memory.stages import predict_stages
from diptych.planner.page import PageRequest, describe_plan, page_html
from diptych.planner.page.copies import Span, place_copies
from diptych.planner.page.data import describe_recomputation
from diptych.planner.reports.memory import describe_blocks
from diptych.planner.reports.schedule import plan_pipeline
from diptych.planner.step_time import step_time
from diptych.plans.config import TransformerConfig
from diptych.plans.offload import Use, plan_offload
from diptych.plans.recompute import NO_RECOMPUTE
from diptych.plans.schedule.messages import dependencies
from diptych.plans.schedule.named import schedule_for
from diptych.plans.schedule.placement import SCHEDULES
from diptych.plans.schedule.simulate import simulate
from tests.planner.page_cases import FAST_LINK, REQUESTS, UNEVEN, actions_of, costs_of, described, drawn


@pytest.mark.parametrize("name", REQUESTS)
def test_every_action_stands_where_the_simulation_has_it(name):
    for entry, _, schedule in drawn(name):
        simulation, listed = simulate(schedule, costs_of(entry)), actions_of(entry)
        assert listed == [(rank, action) for rank, actions in enumerate(schedule.actions) for action in actions]
        assert entry["actions"]["start"] == [simulation.starts[action] for _, action in listed]
        assert entry["makespan"] == simulation.makespan > 0
        assert entry["idle"] == sum(simulation.bubble) / (len(simulation.bubble) * simulation.makespan)
        assert [rank["inFlight"] for rank in entry["ranks"]] == [*simulation.peak_in_flight]


@pytest.mark.parametrize("name", REQUESTS)
def test_the_step_is_as_long_as_predicted(name):
    request, entry = REQUESTS[name], described(name)["schedules"][0]
    step = step_time(
        request.config,
        request.micro_batch_size,
        request.num_microbatches,
        request.data_parallel_size,
        request.machine,
    )
    assert entry["makespan"] + entry["gradients"] + entry["update"] == step.total
    assert [stage["recomputed"] for stage in entry["stages"]] == [stage.recomputed for stage in step.stages]


@pytest.mark.parametrize("name", REQUESTS)
def test_memory_is_the_planners_at_its_peak_and_at_all_times(name):
    for entry, config, schedule in drawn(name):
        stages = predict_stages(config, REQUESTS[name].micro_batch_size)
        ranks = rank_memories(config, schedule, stages)
        costs, columns = costs_of(entry), entry["actions"]
        for rank, memory in enumerate(ranks):
            assert entry["ranks"][rank]["memory"]["total"] == memory.total
            always = memory.parameters + memory.gradients + memory.moments
            starts = {a: s for (r, a), s in zip(actions_of(entry), columns["start"], strict=True) if r == rank}
            ends = {action: start + costs.time(action) for action, start in starts.items()}
            numbers = [n for n, (r, _) in enumerate(actions_of(entry)) if r == rank]
            times = [starts[a] if a.kind == "F" else ends[a] for _, a in (actions_of(entry)[n] for n in numbers)]

            def held(at: float, starts=starts, ends=ends, schedule=schedule, stages=stages) -> tuple[int, int]:
                """What intervals of time add up to: from F to B or I, and from I to W."""
                whole = part = 0
                for action in (action for action in starts if action.kind == "F"):
                    back = schedule.backward_of(*action[1:])
                    whole += stages[action.stage].saved * (starts[action] <= at < ends[back])
                    if back.kind == "I":
                        weights = ends[back._replace(kind="W")]
                        part += stages[action.stage].weight_gradients * (ends[back] <= at < weights)
                return whole, part

            for time in times:
                place = numbers[bisect_right(times, time) - 1]
                assert (columns["saved"][place], columns["waiting"][place]) == held(time)
            peak = entry["ranks"][rank]["peakTime"]
            assert always + sum(held(peak)) == memory.total == always + max(sum(held(time)) for time in times)


def test_memory_without_recomputing_is_that_of_keeping_everything():
    for name in ("pipeline", "uneven", "alone"):
        request, entry = REQUESTS[name], described(name)["schedules"][0]
        plain = replace(request.config, **NO_RECOMPUTE)
        whole = describe_plan(replace(request, config=plain))["schedules"][0]
        assert [rank["totalWithout"] for rank in entry["ranks"]] == [rank["memory"]["total"] for rank in whole["ranks"]]
        assert [stage["savedWithout"] for stage in entry["stages"]] == [stage["saved"] for stage in whole["stages"]]
        assert all(stage["again"] == "nothing" and stage["recomputed"] == 0.0 for stage in whole["stages"])
        assert any(stage["saved"] < stage["savedWithout"] for stage in entry["stages"])


def test_one_rank_keeps_what_the_whole_model_keeps():
    request, (entry,) = REQUESTS["alone"], described("alone")["schedules"]
    predicted = predict_memory(request.config, request.micro_batch_size)
    assert entry["stages"][0]["saved"] == predicted.saved
    assert (entry["name"], entry["ranksCount"], entry["idle"]) == ("none", 1, pytest.approx(0.0, abs=1e-12))


@pytest.mark.parametrize("name", REQUESTS)
def test_an_action_begins_when_its_rank_is_free_and_its_last_input_there(name):
    for entry, _, schedule in drawn(name):
        costs, starts, listed = costs_of(entry), entry["actions"]["start"], actions_of(entry)
        number = {action: place for place, (_, action) in enumerate(listed)}
        for place, (rank, action) in enumerate(listed):
            arrivals = {
                number[other]: starts[number[other]]
                + costs.time(other)
                + entry["wire"] * (schedule.rank_of(other.stage) != rank)
                for other in dependencies(schedule, action)
            }
            last = entry["actions"]["input"][place]
            is_first = place == 0 or listed[place - 1][0] != rank
            free = 0.0 if is_first else starts[place - 1] + costs.time(listed[place - 1][1])
            assert (last == -1) == (not arrivals)
            assert starts[place] == max([free, *([arrivals[last]] if arrivals else [])])
            assert not arrivals or arrivals[last] == max(arrivals.values())


def test_what_is_recomputed_is_said_of_the_stage_it_is_on():
    """With stages that turn back, stage 2 is on the second rank."""
    replayed = [stage["again"] for stage in described("uneven")["schedules"][0]["stages"]]
    assert replayed == [
        "layer 0, whole",
        "layers 1 to 2, whole, 2 at a time",
        "layers 3 to 6, whole, 2 at a time",
        "layer 7, whole",
    ]
    assert [describe_blocks(UNEVEN, stage) for stage in range(4)] == [
        "1 of 1 layer: whole layers",
        "1 of 2 layers: whole layers",
        "2 of 2 layers: whole layers",
        "1 of 1 layer: whole layers",
    ]
    block = replace(UNEVEN, recompute_method="block", recompute_num_layers=1, recompute_activation_function=True)
    assert (
        describe_recomputation(replace(block, pipeline_model_parallel_layout=None), 0)
        == "layer 0, whole; layer 1, activation"
    )


# Copies.


def test_copies_come_one_after_the_other_when_they_are_asked_for():
    uses = [Use(kind, layer) for kind, layer in (("F", 0), ("F", 1), ("F", 2), ("B", 2), ("B", 1), ("B", 0))]
    uses += [Use("S", layer) for layer in range(3)]
    storages = {layer: {f"{layer}.weight": 10} for layer in range(3)}
    spans = [Span(float(place), place + 1.0) for place in range(len(uses))]
    plan = plan_offload(uses, storages, 1)
    assert " ".join(map(str, plan.moves)) == "+0 +1 F0 -0 +2 F1 F2 B2 -2 +0 B1 B0 S0 -0 +2 S1 -1 +0 S2 -2"
    cases = {
        10.0: [
            (0, 0, 1),
            (1, 1, 2),
            (2, 2, 3),
            (0, 4, 5),
            (-1, 7, 8),
            (2, 8, 9),
            (-1, 9, 10),
            (0, 10, 11),
            (-1, 11, 12),
        ],
        5.0: [
            (0, 0, 2),
            (1, 2, 4),
            (2, 4, 6),
            (0, 6, 8),
            (-1, 8, 10),
            (2, 10, 12),
            (-1, 12, 14),
            (0, 14, 16),
            (-1, 16, 18),
        ],
    }
    late = {
        10.0: [True, True, True, False, True, False],
        5.0: [True] * 5 + [False],
    }  # the last one is for the next step
    for bandwidth, expected in cases.items():
        copies = place_copies(plan, spans, storages, bandwidth)
        assert [(copy.layer if copy.to_device else -1, copy.begin, copy.end) for copy in copies] == expected
        assert [copy.layer for copy in copies if not copy.to_device] == [0, 1, 2]
        assert [copy.is_late for copy in copies if copy.to_device] == late[bandwidth]
        assert (plan.bytes_in, plan.bytes_out) == (60, 30)
    assert not any(copy.is_late for copy in place_copies(plan, spans, storages, 1e9)[3:])


@pytest.mark.parametrize("name", ["offloaded", "alone"])
def test_copies_are_those_of_the_plan(name):
    request = replace(REQUESTS[name], machine=FAST_LINK)
    for entry in (described(name)["schedules"][0], describe_plan(request)["schedules"][0]):
        for rank, copies in enumerate(entry["copies"]["ranks"]):
            end = entry["makespan"] + entry["gradients"] + entry["update"]
            assert all(begin < end for begin in copies["begin"])
            assert entry["ranks"][rank]["memory"]["on_host"] > 0
            assert copies["peak"] <= entry["ranks"][rank]["memory"]["parameters"]
    assert all(copies["lateCount"] > 9 for copies in described(name)["schedules"][0]["copies"]["ranks"])
    fast = entry["copies"]["ranks"]
    assert [copies["count"] - len(copies["begin"]) for copies in fast] == [1] * len(fast), "the last layer goes back"
    assert all(copies["lateCount"] <= 2 for copies in fast), "the first use has to wait, however fast the link"


def test_activations_that_leave_come_back():
    for rank in described("offloaded")["schedules"][0]["copies"]["ranks"]:
        marks = rank["marks"]
        moves = [*zip(marks["layer"], marks["microbatch"], marks["toDevice"], marks["time"], strict=True)]
        left = {(layer, i): time for layer, i, back, time in moves if not back}
        back = {(layer, i): time for layer, i, back, time in moves if back}
        assert left.keys() == back.keys() != set()
        assert all(left[key] <= back[key] for key in left)


# What is drawn, and what is refused.


def test_other_schedules_stand_beside_the_chosen_one_or_say_why_not():
    plan = described("pipeline")
    names = [schedule["name"] for schedule in plan["schedules"]] + [other["name"] for other in plan["refused"]]
    assert names[0] == "zb-h1"
    assert sorted(names) == sorted(
        [
            "none",
            "gpipe",
            "1f1b",
            "interleaved",
            "interleaved-zb1p",
            "zb-h1",
            "zb-h2",
            "zb-v",
            "v-half",
            "v-min",
            "dualpipe-v",
        ]
    )
    assert {other["name"] for other in plan["refused"]} == {"interleaved"}
    assert "num_microbatches: expected" in plan["refused"][0]["reason"]
    assert len(described("alone")["schedules"]) == 1


def test_of_a_large_plan_the_chosen_schedule_is_drawn_and_larger_ones_are_refused():
    config = TransformerConfig(16, 16, 2, pipeline_model_parallel_size=16, pipeline_schedule="gpipe")
    plan = describe_plan(PageRequest(config, 1, 129))
    assert (plan["limits"]["pieces"], len(plan["schedules"])) == (2064, 1)
    message = "html: expected at most 16,384 stages times microbatches to draw, got 16,400; choose fewer"
    with pytest.raises(ValueError, match=re.escape(message)):
        PageRequest(config, 1, 1025)


def test_eight_ranks_with_all_schedules_are_below_three_megabytes():
    config = TransformerConfig(256, 16, 4, pipeline_model_parallel_size=8)
    plan = describe_plan(PageRequest(config, 1, 32))
    assert len(plan["schedules"]) == len(SCHEDULES)
    assert len(page_html(plan)) < 1.5e6


def test_the_planners_own_times_are_used_with_the_rates_given():
    """Twice as fast a machine is twice as fast: every rate, and the message's latency."""
    request = REQUESTS["pipeline"]
    rates = vars(request.machine)
    fast = {name: value * (0.5 if name == "network_latency" else 2.0) for name, value in rates.items()}
    schedules = describe_plan(replace(request, machine=type(request.machine)(**fast)))["schedules"]
    for before, after in zip(described("pipeline")["schedules"], schedules, strict=True):
        assert after["makespan"] == pytest.approx(before["makespan"] / 2, rel=1e-12)


def test_times_are_those_of_the_planned_pipeline():
    entry, config, _ = drawn("pipeline")[0]
    assert simulate(schedule_for(config, 6), costs_of(entry)).makespan == entry["makespan"]
    assert [*plan_pipeline(config, 2, 6).simulation.peak_bytes] == [
        rank["memory"]["activations"] + rank["memory"]["waiting"] for rank in entry["ranks"]
    ]
