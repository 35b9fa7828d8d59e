"""Schedules made for costs: valid, within the limit, never behind a name, the best there is where all can be tried."""

import math
import time
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.planner.generate import generate_schedule, named_schedules
from diptych.planner.generate.listing import list_orders, rules
from diptych.planner.generate.moves import Budget, lower_peaks
from diptych.planner.generate.orders import Pipeline, run
from diptych.plans.config import TransformerConfig
from diptych.plans.schedule.actions import Action, Schedule, ScheduleError
from diptych.plans.schedule.csv import read_schedule, schedule_from_csv, schedule_to_csv
from diptych.plans.schedule.named import build_schedule
from diptych.plans.schedule.simulate import Costs, simulate
from diptych.plans.schedule.validate import validate_schedule
from reference_torch.rank_pool import RankPool
from tests.pipeline.jobs import TINY, Case
from tests.pipeline.schedules import ANY
from tests.pipeline.support import equal_to_unsharded

SAME = 1 + 1e-9
"""Times of sums in another order."""


@st.composite
def any_costs(draw, stages: int) -> Costs:
    """Of some stages: alike, unlike, free, whole numbers or not; what waits for W may be more than was kept."""
    time = st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.0, 2.0, 4.5])
    size = st.sampled_from([0.1, 0.5, 1.0, 1.0, 3.0])

    def each(one):
        return draw(one) if draw(st.booleans()) else draw(st.lists(one, min_size=stages, max_size=stages))

    communication = draw(st.sampled_from([0.0, 0.0, 0.4, 2.5]))
    costs = Costs(each(time), each(time), each(time), communication, each(size), each(st.one_of(st.just(0.0), size)))
    return replace(costs, forward=1.0) if not makes_time(costs, stages) else costs


def makes_time(costs: Costs, stages: int) -> bool:
    return any(costs.time(Action(kind, stage, 0)) for kind in ("F", "B") for stage in range(stages))


@st.composite
def any_task(draw) -> dict:
    """Arguments of generate_schedule."""
    p, m = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    placement = draw(st.sampled_from(["loop", "loop", "v"])) if p > 1 else "loop"
    v = 2 if placement == "v" else draw(st.sampled_from([1, 1, 2, 3]))
    costs = draw(any_costs(p * v))
    needed = tightest(p, v, costs, placement)
    limit = draw(
        st.one_of(
            st.none(),
            st.just(needed),
            st.just(max(needed)),
            st.floats(1.0, float(m + 1)).map(lambda more: [room * more for room in needed]),
        )
    )
    return {
        "pp_size": p,
        "num_microbatches": m,
        "stages_per_rank": v,
        "costs": costs,
        "memory_limit": limit,
        "placement": placement,
        "effort": draw(st.sampled_from([0.0, 0.02])),
    }


def tightest(p: int, v: int, costs: Costs, placement: str) -> list[float]:
    """What one microbatch keeps on every rank."""
    home = Schedule("", p, 1, v, (), False, placement).rank_of  # pyright: ignore[reportArgumentType]
    return [sum(costs.of("activation_bytes", s) for s in range(p * v) if home(s) == rank) for rank in range(p)]


def memory_limits(task: dict) -> list[float]:
    limit, p = task["memory_limit"], task["pp_size"]
    if limit is None:
        return [math.inf] * p
    return limit if isinstance(limit, list) else [limit] * p


@pytest.mark.parametrize(("p", "limit", "makespan"), [(4, 8, 75), (6, 12, 77)])
def test_it_is_as_good_as_interleaved_zero_bubble_where_it_fits(p, limit, makespan):
    """12 microbatches, two stages a rank, F = I = W = 1, as much kept from I to W as before."""
    costs = Costs(1.0, 1.0, 1.0, 0.0, 1.0, 1.0)
    named = simulate(build_schedule("interleaved-zb1p", p, 12, 2), costs)
    assert (named.makespan, max(named.peak_bytes)) == (makespan, limit)
    found = generate_schedule(p, 12, 2, costs, limit).simulation
    assert found.makespan <= makespan
    assert max(found.peak_bytes) <= limit


@given(any_task())
def test_it_runs_fits_and_is_behind_no_name(task):
    found = generate_schedule(**task)
    schedule, costs = found.schedule, task["costs"]
    validate_schedule(schedule, "blocking")
    assert found.simulation == simulate(schedule, costs)
    limits = memory_limits(task)
    assert all(peak <= room * SAME for peak, room in zip(found.simulation.peak_bytes, limits, strict=True))
    assert found.makespan_bound <= found.simulation.makespan * SAME
    sizes = [task[name] for name in ("pp_size", "num_microbatches", "stages_per_rank", "placement")]
    for named in named_schedules(*sizes):
        simulation = simulate(named, costs)
        if all(peak <= room for peak, room in zip(simulation.peak_bytes, limits, strict=True)):
            assert found.simulation.makespan <= simulation.makespan * SAME, named.name
    assert generate_schedule(**task) == found, "the same arguments, the same table"
    assert schedule_from_csv(schedule_to_csv(schedule)).actions == schedule.actions


@given(any_task())
def test_every_rule_fits_and_ends(task):
    """Whatever the limit: no rank waits for ever for memory that another microbatch holds."""
    limits = memory_limits(task)
    p, m, v = (task[name] for name in ("pp_size", "num_microbatches", "stages_per_rank"))
    pipeline = Pipeline(p, m, v, task["costs"], limits, task["placement"])
    for rule in rules(pipeline):
        listed = list_orders(pipeline, rule)
        schedule = pipeline.schedule_of(listed.orders, "listed")
        simulation = simulate(schedule, task["costs"])
        for actions, starts in zip(schedule.actions, listed.starts, strict=True):
            for action, start in zip(actions, starts, strict=True):
                assert simulation.starts[action] <= start * SAME, f"{action} was begun before what it needs had arrived"
        assert all(peak <= room * SAME for peak, room in zip(simulation.peak_bytes, limits, strict=True))


@given(ANY, st.data())
def test_lists_of_numbers_take_as_long_as_the_table(arguments, data):
    """The lean simulation beside the one that says what a table costs, action by action."""
    schedule = build_schedule(*arguments)
    if schedule.forward_only:
        return
    p, m, v = schedule.pp_size, schedule.num_microbatches, schedule.stages_per_rank
    costs = data.draw(any_costs(p * v))
    pipeline = Pipeline(p, m, v, costs, [math.inf] * p, schedule.placement)
    orders = pipeline.orders_of(schedule)
    again = pipeline.schedule_of(orders, schedule.name)
    assert again == schedule, "named schedules take microbatches in order"
    simulation, expected = run(pipeline, orders), simulate(schedule, costs)
    assert simulation is not None
    for rank, actions in enumerate(schedule.actions):
        assert simulation.starts[rank] == [expected.starts[action] for action in actions]
    assert simulation.makespan == expected.makespan
    assert tuple(pipeline.peaks(orders)) == expected.peak_bytes


# Beside all orders there are.


def words(counts: dict[str, int], follows: dict[str, str]):
    """All arrangements of so many letters, where each letter's k-th comes after the k-th of the one it follows."""

    def extend(word: str, left: dict[str, int]):
        if not any(left.values()):
            yield word
        for letter, count in left.items():
            if count and (letter not in follows or word.count(letter) < word.count(follows[letter])):
                yield from extend(word + letter, {**left, letter: count - 1})

    yield from extend("", counts)


def all_in_order(p: int, m: int):
    """Every table of one stage a rank with split backwards, microbatches in order."""
    of_rank = [
        [
            tuple(Action(kind, rank, word[:place].count(kind)) for place, kind in enumerate(word))
            for word in words({"F": m, "I": m, "W": m}, {"I": "F", "W": "I"})
        ]
        for rank in range(p)
    ]
    for actions in product(*of_rank):
        yield Schedule("any", p, m, 1, actions)


def all_of_two():
    """Every table of two ranks and two microbatches, in any order, backwards split or whole."""
    for kinds in product(("IW", "B"), repeat=4):
        of_rank = []
        for rank in range(2):
            letters, follows, meaning = {}, {}, {}
            for i, kind in enumerate(kinds[2 * rank : 2 * rank + 2]):
                names = [f"{i}F", *(f"{i}{letter}" for letter in kind)]
                for place, name in enumerate(names):
                    letter = chr(ord("a") + len(letters))
                    letters[letter], meaning[letter] = 1, Action(name[1], rank, i)  # pyright: ignore
                    if place:
                        follows[letter] = chr(ord(letter) - 1)
            of_rank.append([tuple(meaning[letter] for letter in word) for word in words(letters, follows)])
        for actions in product(*of_rank):
            yield Schedule("any", 2, 2, 1, actions)


def best_of(schedules, costs: Costs, limits: list[float]) -> float:
    """The shortest that runs and fits."""
    shortest = math.inf
    for schedule in schedules:
        try:
            simulation = simulate(schedule, costs)
        except ScheduleError:
            continue
        if all(peak <= room * SAME for peak, room in zip(simulation.peak_bytes, limits, strict=True)):
            shortest = min(shortest, simulation.makespan)
    return shortest


TRIED = [
    (Costs(), None),
    (Costs(1.0, 1.3, 0.6), None),
    (Costs([1.0, 2.0], [1.0, 2.5], [1.0, 1.5]), None),
    (Costs([2.0, 0.5], [1.0, 0.5], [0.2, 2.0], 0.3), None),
    (Costs(1.0, 1.4, 0.8, 0.9), None),
    (Costs(1.0, 1.4, 0.8, 0.9, 1.0, 0.5), 2.0),
    (Costs(1.0, 1.0, 1.0, 0.4, 1.0, 0.5), 1.0),
    (Costs([1.0, 1.7], [1.2, 0.7], [0.8, 1.1], 0.5, [1.0, 2.0], [0.6, 1.0]), [1.7, 3.0]),
    (Costs([1.0, 1.7], [1.2, 0.7], [0.8, 1.1], 0.5, [1.0, 1.0], [1.5, 0.2]), 2.0),
]
"""Costs of two stages, and limits."""


@pytest.mark.parametrize("case", range(len(TRIED)))
@pytest.mark.parametrize("m", [1, 2, 3])
def test_it_is_the_best_of_all_tables_of_two_ranks(case, m):
    """Gap 0 with up to three microbatches; and the bound is above none of them."""
    costs, limit = TRIED[case]
    limits = memory_limits({"memory_limit": limit, "pp_size": 2})
    shortest = best_of(all_in_order(2, m), costs, limits)
    found = generate_schedule(2, m, 1, costs, limit)
    if any(action.kind == "B" for actions in found.schedule.actions for action in actions) and limit is not None:
        assert found.simulation.makespan <= shortest * SAME, "a whole backward may need less memory than I and W"
    else:
        assert found.simulation.makespan == pytest.approx(shortest, rel=1e-9)
    assert found.makespan_bound <= min(shortest, found.simulation.makespan) * SAME


@pytest.mark.parametrize("case", range(len(TRIED)))
def test_no_order_of_microbatches_and_no_whole_backward_is_better(case):
    """Also with microbatches out of order, and backwards whole, split or both."""
    costs, limit = TRIED[case]
    shortest = best_of(all_of_two(), costs, memory_limits({"memory_limit": limit, "pp_size": 2}))
    assert generate_schedule(2, 2, 1, costs, limit).simulation.makespan == pytest.approx(shortest, rel=1e-9)


@pytest.mark.parametrize("costs", [Costs(1.0, 1.3, 0.6, 0.2), Costs([1.0, 0.5, 2.0], [1.5, 0.5, 2.0], [0.5, 0.7, 1.0])])
def test_it_is_the_best_of_all_tables_of_three_ranks(costs):
    shortest = best_of(all_in_order(3, 2), costs, [math.inf] * 3)
    assert generate_schedule(3, 2, 1, costs).simulation.makespan == pytest.approx(shortest, rel=1e-9)


# Where no name fits the costs.

HEAD = [1.0] * 7 + [1.7]
BETTER = {
    "a heavy head, V-shaped": (2, Costs(HEAD, [1.2] * 7 + [1.7], [0.8] * 7 + [1.7], 0.1), None, "v"),
    "I longer than W, two stages a rank": (2, Costs(1.0, 1.2, 0.8, 0.2), None, "loop"),
    "slow messages, a limit between zb-h1 and zb-h2": (1, Costs(1.0, 1.2, 0.9, 0.5, 1.0, 0.5), 5.0, "loop"),
    "a limit between v-min and v-half": (2, Costs(activation_bytes=1.0, weight_gradient_bytes=0.5), 5.0, "v"),
}
"""Four ranks, eight microbatches: stages a rank, costs, limit, placement."""
GAIN = {
    "a heavy head, V-shaped": 0.02,
    "I longer than W, two stages a rank": 0.065,
    "slow messages, a limit between zb-h1 and zb-h2": 0.08,
    "a limit between v-min and v-half": 0.04,
}
"""Share of the best named schedule's makespan that is saved at least."""


@pytest.mark.parametrize("name", BETTER)
def test_it_is_shorter_than_every_name_that_fits(name):
    v, costs, limit, placement = BETTER[name]
    courses = [simulate(schedule, costs) for schedule in named_schedules(4, 8, v, placement)]  # pyright: ignore
    best = min(c.makespan for c in courses if limit is None or max(c.peak_bytes) <= limit)
    found = generate_schedule(4, 8, v, costs, limit, placement)  # pyright: ignore[reportArgumentType]
    assert found.simulation.makespan <= (1.0 - GAIN[name]) * best
    assert limit is None or max(found.simulation.peak_bytes) <= limit


def test_of_equally_short_ones_it_is_one_that_keeps_less():
    costs = Costs([1.0, 1.0, 1.0, 1.8], [1.0, 1.0, 1.0, 1.8], [1.0, 1.0, 1.0, 1.8])
    found = generate_schedule(4, 8, 1, costs)
    named = simulate(build_schedule("zb-h1", 4, 8), costs)
    assert found.simulation.makespan == pytest.approx(named.makespan, rel=1e-9)
    assert max(found.simulation.peak_bytes) < max(named.peak_bytes)


def test_peaks_are_lowered_in_the_same_time():
    """zb-h2 has forwards ahead that F = I = W has no use for: zb-h1 takes as long and keeps 4; moves get to 6."""
    pipeline = Pipeline(4, 8, 1, Costs(activation_bytes=1.0, weight_gradient_bytes=0.5), [math.inf] * 4)
    orders = pipeline.orders_of(build_schedule("zb-h2", 4, 8))
    before, lowered = pipeline.peaks(orders), lower_peaks(pipeline, orders, Budget(1e5), 27.0)
    simulation = run(pipeline, lowered)
    assert simulation is not None
    assert simulation.makespan == 27.0
    assert all(after <= peak for after, peak in zip(pipeline.peaks(lowered), before, strict=True))
    assert (max(before), max(pipeline.peaks(lowered))) == (7.0, 6.0)


def test_eight_ranks_and_many_microbatches_take_seconds():
    start = time.process_time()
    found = generate_schedule(8, 32, 1, Costs(1.0, 1.2, 0.9, 0.3, 1.0, 0.5), 10.0)
    assert time.process_time() - start < 15.0, "about two on a core of its own"
    assert found.simulation.makespan < 114.0, "zb-h1 takes 116.7"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"pp_size": 0}, "pp_size: expected at least 1, got 0"),
        ({"num_microbatches": 0}, "num_microbatches: expected at least 1, got 0"),
        ({"stages_per_rank": 0}, "stages_per_rank: expected at least 1, got 0"),
        ({"placement": "w"}, r"placement: expected one of \('loop', 'v'\), got 'w'"),
        ({"placement": "v"}, "stages_per_rank: expected 2 with placement 'v', got 1; choose placement 'loop'"),
        ({"effort": -1.0}, r"effort: expected a finite number of at least 0, got -1\.0"),
        ({"effort": math.nan}, "effort: expected a finite number of at least 0, got nan"),
        ({"costs": Costs([1.0])}, "costs: expected forward of 2 stages, got 1"),
        ({"costs": Costs(weight_gradient=[1.0, -1.0])}, r"costs: expected weight_gradient to be finite .*, got -1\.0"),
        (
            {"costs": Costs(communication=math.inf)},
            "costs: expected communication to be finite and .*, got inf",
        ),
        ({"costs": Costs(0.0, 0.0, 0.0)}, "costs: expected an action that takes time, got 0 for all; give F, I or W"),
        ({"memory_limit": [1.0]}, "memory_limit: expected one number, or one for each of 2 ranks, got 1"),
        ({"memory_limit": math.nan}, "memory_limit: expected at least 0 bytes, got nan"),
        (
            {"memory_limit": [2.0, 0.5]},
            r"memory_limit: expected at least 1 bytes on rank 1, which one microbatch saves there, got 0\.5; give more",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(changed, message):
    task = {"pp_size": 2, "num_microbatches": 2, "stages_per_rank": 1, "costs": Costs()}
    with pytest.raises(ValueError, match=f"^{message}"):
        generate_schedule(**{**task, **changed})


# In both executors; JAX's is among tests/pipeline/jax_cases/gradients.py.


def written(path, p: int, m: int, v: int, costs: Costs, **more) -> TransformerConfig:
    """A configuration that runs a table made for costs."""
    schedule = generate_schedule(p, m, v, costs, effort=0.1, **more).schedule
    assert {action.kind for actions in schedule.actions for action in actions} == {"F", "B", "I", "W"}
    path.write_text(schedule_to_csv(schedule))
    virtual = v if v > 1 else None
    return replace(
        TINY,
        pipeline_model_parallel_size=p,
        virtual_pipeline_model_parallel_size=virtual,
        pipeline_schedule_file=read_schedule(path),
    )


@pytest.mark.multiprocess
def test_two_ranks_compute_what_one_process_does(tmp_path):
    uneven = Costs([1.0, 2.0, 1.0, 2.6], [1.2, 2.0, 1.5, 2.0], [0.7, 1.9, 0.8, 2.0], 0.4, 1.0, 0.5)
    with RankPool(2) as pool:
        cases = {
            "one stage a rank": Case(written(tmp_path / "1.csv", 2, 5, 1, Costs([1.0, 1.6], 1.2, 0.7, 0.4)), 5),
            "two stages a rank, a limit": Case(written(tmp_path / "2.csv", 2, 4, 2, uneven, memory_limit=4.0), 4),
            "V-shaped": Case(written(tmp_path / "v.csv", 2, 5, 2, uneven, placement="v"), 5),
        }
        equal_to_unsharded(pool, cases)
