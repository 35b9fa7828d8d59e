"""The validator names every fault of a table and of its messages, and accepts all others."""

import re
from collections import Counter
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.plans.schedule.actions import Action, Schedule, ScheduleError
from diptych.plans.schedule.messages import Message, Program, lower
from diptych.plans.schedule.named import build_schedule, get_schedule_table
from diptych.plans.schedule.transport import ORDERINGS, validate_program
from diptych.plans.schedule.validate import validate_schedule
from tests.pipeline.schedules import ANY, sizes


def one_f_one_b() -> Schedule:
    return build_schedule("1f1b", 3, 4)


def edited(rank: int, edit) -> Schedule:
    schedule = one_f_one_b()
    actions = [list(a) for a in schedule.actions]
    edit(actions[rank])
    return replace(schedule, actions=tuple(map(tuple, actions)))


FAULTS = {
    "drop": (lambda a: a.remove(Action("B", 1, 2)), r"rank 1, 1B2: expected once, got none; add it"),
    "duplicate": (lambda a: a.append(Action("F", 1, 0)), r"rank 1, 1F0: expected once, got 2 times; list it once"),
    "microbatch out of range": (
        lambda a: a.append(Action("F", 1, 4)),
        r"rank 1, 1F4: expected F and B of stages 0 to 2 and microbatches 0 to 3, got another action; remove it",
    ),
    "stage out of range": (lambda a: a.append(Action("F", 4, 0)), r"rank 1, 4F0: expected F and B of stages 0 to 2"),
    "another rank's": (
        lambda a: a.append(Action("F", 2, 0)),
        r"rank 1, 2F0: expected actions of this rank's .*, got stage 2, which is placed on rank 2; move it to rank 2",
    ),
    "a weight's gradient twice": (
        lambda a: a.append(Action("W", 1, 0)),
        r"rank 1, 1W0: expected B, or else I and W, got 1B0 beside it; remove one of them",
    ),
    "half a backward": (
        lambda a: a.__setitem__(a.index(Action("B", 1, 0)), Action("I", 1, 0)),
        r"rank 1, 1W0: expected once, got none",
    ),
    "swap": (
        lambda a: a.__setitem__(slice(None), [a[i] for i in (2, 1, 0, *range(3, len(a)))]),
        r"rank 1 cannot run 1B0 before 1F0 and 2B0",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_validator_names_the_fault(fault):
    edit, message = FAULTS[fault]
    with pytest.raises(ScheduleError, match=message):
        validate_schedule(edited(1, edit))


@given(ANY, st.data())
def test_validator_finds_every_dropped_duplicated_or_moved_action(arguments, data):
    schedule = build_schedule(*arguments)
    rank = data.draw(st.integers(0, schedule.pp_size - 1))
    actions = list(schedule.actions[rank])
    place = data.draw(st.integers(0, len(actions) - 1))
    fault = data.draw(st.sampled_from(["drop", "duplicate", "out of range"]))
    broken = {
        "drop": actions[:place] + actions[place + 1 :],
        "duplicate": [*actions, actions[place]],
        "out of range": [*actions[:place], actions[place]._replace(microbatch=-1), *actions[place + 1 :]],
    }[fault]
    lists = (*schedule.actions[:rank], tuple(broken), *schedule.actions[rank + 1 :])
    with pytest.raises(ScheduleError, match=re.escape(str(actions[place])) if fault != "out of range" else "-1"):
        validate_schedule(replace(schedule, actions=lists))


def test_ranks_that_wait_for_each_other_are_both_named():
    """Rank 0 wants a backward before the forward that the backward comes from, by way of rank 1."""
    actions = (
        (Action("F", 0, 0), Action("B", 0, 0), Action("F", 0, 1), Action("B", 0, 1)),
        (Action("F", 1, 0), Action("F", 1, 1), Action("B", 1, 0), Action("B", 1, 1)),
    )
    with pytest.raises(ScheduleError, match="rank 0 cannot run 0B0 before 1B0; rank 1 cannot run 1F1 before 0F1"):
        validate_schedule(Schedule("by hand", 2, 2, 1, actions))


def test_the_seeds_interleaved_loop_deadlocks():
    """One forward and at once its backward, slot by slot: the first backward waits for forwards that come later."""
    p, m, v = 2, 4, 2
    table = get_schedule_table(m, v, p)
    actions = tuple(
        tuple(Action(kind, chunk * p + rank, microbatch) for microbatch, chunk in table for kind in ("F", "B"))
        for rank in range(p)
    )
    with pytest.raises(ScheduleError, match="rank 0 cannot run 0B0 before 1B0; rank 1 cannot run 1B0 before 2B0"):
        validate_schedule(Schedule("slot by slot", p, m, v, actions))


def test_sends_that_wait_for_their_receives_can_deadlock_where_others_run():
    """Two ranks, each sending before it receives."""
    schedule = build_schedule("1f1b", 2, 2)
    forwards = [Action("F", 0, i) for i in range(2)], [Action("F", 1, i) for i in range(2)]
    backwards = [Action("B", 0, i) for i in range(2)], [Action("B", 1, i) for i in range(2)]
    program = (
        (
            forwards[0][0],
            Message("SEND", forwards[0][0], 1),
            forwards[0][1],
            Message("SEND", forwards[0][1], 1),
            Message("RECV", backwards[1][0], 1),
            backwards[0][0],
            Message("RECV", backwards[1][1], 1),
            backwards[0][1],
        ),
        (
            Message("RECV", forwards[0][0], 0),
            forwards[1][0],
            backwards[1][0],
            Message("SEND", backwards[1][0], 0),
            Message("RECV", forwards[0][1], 0),
            forwards[1][1],
            backwards[1][1],
            Message("SEND", backwards[1][1], 0),
        ),
    )
    validate_program(schedule, program, "async")
    message = "rank 0 waits in SEND 0F1 to rank 1; rank 1 waits in SEND 1B0 to rank 0"
    with pytest.raises(ScheduleError, match=message):
        validate_program(schedule, program, "blocking")


@st.composite
def disordered(draw) -> tuple[Schedule, Program]:
    """A program some of whose messages stand elsewhere than lower puts them: sends later, or receives beside them."""
    name = draw(st.sampled_from(["1f1b", "interleaved", "zb-v"]))
    schedule = build_schedule(*draw(sizes(name, 4)))
    program = [list(steps) for steps in lower(schedule)]
    for _ in range(draw(st.integers(0, 4))):
        steps = program[draw(st.integers(0, len(program) - 1))]
        pairs = [i for i, pair in enumerate(pairwise(steps)) if all(isinstance(step, Message) for step in pair)]
        if pairs and draw(st.booleans()):
            place = draw(st.sampled_from(pairs))
            steps[place : place + 2] = steps[place + 1], steps[place]
        elif sends := [i for i, step in enumerate(steps) if isinstance(step, Message) and step.direction == "SEND"]:
            place = draw(st.sampled_from(sends))
            steps.insert(place + draw(st.integers(1, 2)), steps.pop(place))
    return schedule, tuple(map(tuple, program))


def runs(program: Program, ordering: str) -> bool:
    """Whether what has to come before what makes no circle.

    Nodes are steps being reached and, apart from them, messages being handed over. A step is reached after the one
    before it; after a receive, and where sends block after a send, once the message has been handed over. A message is
    handed over once its ends have been reached (async: its send alone), and after those before it in its queues.
    """
    order: TopologicalSorter = TopologicalSorter()
    for rank, steps in enumerate(program):
        queues: dict[object, Action] = {}
        for place, step in enumerate(steps):
            order.add((rank, place), *([(rank, place - 1)] if place else []))
            if isinstance(step, Action):
                continue
            if step.direction == "SEND" or ordering != "async":
                order.add(step.produced_by, (rank, place))
            if (step.direction == "RECV" or ordering == "blocking") and place + 1 < len(steps):
                order.add((rank, place + 1), step.produced_by)
            if ordering in ("pair", "rank"):
                queue = step.peer if ordering == "pair" else None
                if queue in queues:
                    order.add(step.produced_by, queues[queue])
                queues[queue] = step.produced_by
    try:
        order.prepare()
    except CycleError:
        return False
    return True


def test_orderings_accept_what_makes_no_circle():
    """Against the graph of what waits for what; what a stricter transport runs, a laxer one runs too.

    One queue a rank and sends that block refuse the same: between two messages a rank only computes, which ends.
    """
    outcomes: Counter[tuple[bool, ...]] = Counter()

    @settings(max_examples=300)
    @given(disordered())
    def accepted(drawn):
        schedule, program = drawn
        found = []
        for ordering in ORDERINGS:
            try:
                validate_program(schedule, program, ordering)
                found.append(True)
            except ScheduleError:
                found.append(False)
        assert found == [runs(program, ordering) for ordering in ORDERINGS]
        assert found == sorted(found, reverse=True)
        assert found[2] == found[3]
        outcomes[tuple(found)] += 1

    accepted()
    assert len(outcomes) >= 3, outcomes


def test_a_ring_of_sends_blocks_ranks_with_one_queue():
    """Each of three ranks sends to the next before it receives from the one before: no two of them block each other."""
    schedule = build_schedule("interleaved", 3, 3, 2, None, True)
    program = [list(steps) for steps in lower(schedule)]
    for rank, sent in ((1, Action("F", 4, 0)), (2, Action("F", 2, 2))):
        steps = program[rank]
        place = steps.index(Message("SEND", sent, (rank + 1) % 3))
        steps[place - 1 : place + 1] = steps[place], steps[place - 1]
    lists = tuple(map(tuple, program))
    validate_program(schedule, lists, "pair")
    for ordering in ("rank", "blocking"):
        with pytest.raises(ScheduleError, match=r"rank 0 waits in .*; rank 1 waits in .*; rank 2 waits in "):
            validate_program(schedule, lists, ordering)


def test_two_sends_that_meet_block_their_pair_of_ranks():
    """Each rank sends before it receives: nothing waits where messages have names, and all does where they queue."""
    schedule = build_schedule("1f1b", 2, 2)
    there, back = [Action("F", 0, i) for i in range(2)], [Action("B", 1, i) for i in range(2)]
    program = (
        (
            there[0],
            Message("SEND", there[0], 1),
            there[1],
            Message("SEND", there[1], 1),
            Message("RECV", back[0], 1),
            Action("B", 0, 0),
            Message("RECV", back[1], 1),
            Action("B", 0, 1),
        ),
        (
            Message("RECV", there[0], 0),
            Action("F", 1, 0),
            back[0],
            Message("SEND", back[0], 0),
            Message("RECV", there[1], 0),
            Action("F", 1, 1),
            back[1],
            Message("SEND", back[1], 0),
        ),
    )
    validate_program(schedule, program, "async")
    message = (
        r"rank 0 waits in RECV 1B0 from rank 1 behind SEND 0F1 to rank 1; "
        r"rank 1 waits in RECV 0F1 from rank 0 behind SEND 1B0 to rank 0"
    )
    with pytest.raises(ScheduleError, match=message):
        validate_program(schedule, program, "pair")


def test_a_message_that_nobody_takes_is_named():
    schedule = one_f_one_b()
    program = list(map(list, lower(schedule)))
    program[0].append(Message("SEND", Action("F", 0, 1), 1))
    for ordering in ("pair", "rank"):
        with pytest.raises(ScheduleError, match="no rank receives SEND 0F1 to rank 1"):
            validate_program(schedule, tuple(map(tuple, program)), ordering)
    with pytest.raises(ScheduleError, match="rank 1 lacks RECV 0F1 from rank 0"):
        validate_program(schedule, tuple(map(tuple, program)), "async")


def test_a_message_that_is_received_twice_is_named():
    schedule = one_f_one_b()
    program = list(map(list, lower(schedule)))
    program[1].append(Message("RECV", Action("F", 0, 1), 0))
    with pytest.raises(ScheduleError, match="rank 1 waits in RECV 0F1 from rank 0"):
        validate_program(schedule, tuple(map(tuple, program)), "async")


def test_a_lost_message_is_named():
    schedule = one_f_one_b()
    program = list(map(list, lower(schedule)))
    program[0].remove(Message("SEND", Action("F", 0, 1), 1))
    with pytest.raises(ScheduleError, match="rank 1 waits in RECV 0F1 from rank 0"):
        validate_program(schedule, tuple(map(tuple, program)))


REFUSED = {
    ("2f2b", 2, 4): r"schedule: expected one of .*'zb-h1'.*, got '2f2b'",
    ("1f1b", 0, 4): r"pp_size: expected at least 1, got 0",
    ("1f1b", 2, 0): r"num_microbatches: expected at least 1, got 0",
    ("none", 2, 4): r"pp_size: expected 1 without a pipeline, got 2",
    ("1f1b", 2, 4, 2): r"stages_per_rank: expected 1 with schedule '1f1b', got 2; choose 'interleaved'",
    (
        "zb-v",
        2,
        4,
    ): r"stages_per_rank: expected 2 with schedule 'zb-v', got 1; set virtual_pipeline_model_parallel_size",
    ("v-min", 1, 4, 2): r"pp_size: expected at least 2 with schedule 'v-min', got 1; choose 'none'",
    ("v-half", 2, 4, 2, 2): r"group_size: expected None with schedule 'v-half', got 2",
    ("1f1b", 2, 4, 1, 2): r"group_size: expected None with schedule '1f1b', got 2",
    ("interleaved", 1, 4, 2): r"pp_size: expected at least 2 with schedule 'interleaved', got 1; choose 'none'",
    ("interleaved", 2, 4, 1): r"stages_per_rank: expected at least 2 .* choose '1f1b'",
    ("interleaved", 4, 3, 2): r"num_microbatches: expected at least pp_size=4 with schedule 'interleaved', got 3",
    ("interleaved", 2, 4, 2, 1): r"group_size: expected from pp_size=2 to num_microbatches=4, got 1",
    ("interleaved", 2, 4, 2, 5): r"group_size: expected from pp_size=2 to num_microbatches=4, got 5",
    ("interleaved", 4, 6, 2): r"num_microbatches: .* got 6 in groups of 4, which leaves 2; change",
}


@pytest.mark.parametrize("arguments", REFUSED, ids=str)
def test_sizes_no_schedule_has_are_refused(arguments):
    with pytest.raises(ValueError, match=REFUSED[arguments]):
        build_schedule(*arguments)


def test_unknown_ordering():
    with pytest.raises(
        ValueError, match=r"ordering: expected one of \('async', 'pair', 'rank', 'blocking'\), got 'eager'"
    ):
        validate_schedule(one_f_one_b(), "eager")  # pyright: ignore[reportArgumentType]
