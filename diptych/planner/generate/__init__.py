"""Schedules made for given costs: orders of work searched on paper, within a bound of memory.

    named     every schedule of diptych.plans.schedule.named with these ranks, stages and their places, that fits
    listed    what list scheduling makes by a family of rules (diptych.planner.generate.listing)
    moved     the best of both, changed action by action (diptych.planner.generate.moves)

The shortest is the result; of equally short ones, one that keeps less. So no named schedule that fits is ever shorter.
Whole backwards stand where I and W one after the other take no less. What none can be below is told beside it
(diptych.planner.generate.bound). Nothing is left to the clock: the same arguments give the same table.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import product
from typing import NamedTuple, get_args

from diptych.planner.generate.bound import lower_bound
from diptych.planner.generate.listing import list_orders, rules
from diptych.planner.generate.moves import Budget, heaviest, join, lower_peaks, shorten
from diptych.planner.generate.orders import Course, Orders, Pipeline, run
from diptych.plans.schedule.actions import Schedule
from diptych.plans.schedule.named import build_schedule, check_sizes
from diptych.plans.schedule.placement import SCHEDULES, V_SCHEDULES, Placement
from diptych.plans.schedule.simulate import Costs, Simulation, simulate

__all__ = ["GENERATED", "Generated", "check_costs", "generate_schedule", "named_schedules"]

GENERATED = "generated"
"""What such a schedule is called."""
UNIT = 1_000_000
"""Actions simulated for one of effort."""
TIMES = ("forward", "input_gradient", "weight_gradient")
SAME = 1e-12
"""Times that differ by less, relative, are equal: sums in another order."""
SEEDS = (0, 1)
"""Of the searches from each start."""


class Generated(NamedTuple):
    """A schedule made for costs."""

    schedule: Schedule
    course: Simulation
    at_least: float
    """Time that no schedule can be below, in the unit of the costs."""


def generate_schedule(
    pp_size: int,
    num_microbatches: int,
    stages_per_rank: int,
    costs: Costs,
    memory_limit: float | Sequence[float] | None = None,
    placement: Placement = "loop",
    effort: float = 3.0,
) -> Generated:
    """The best order of work that is found for costs.

    Args:
        pp_size: pipeline ranks p.
        num_microbatches: m.
        stages_per_rank: v; 2 with placement ``v``.
        costs: times, and bytes kept for backward, of all p v stages.
        memory_limit: bytes that every rank may keep for backward, or a sequence with one number a rank; None: any.
        placement: where stages lie.
        effort: how long to search, in millions of actions simulated, what rules make counted too; a million takes
            about half a second. At least one rule is tried.

    Raises:
        ValueError: sizes, costs or a limit that cannot be; the message names which, and what was expected.
    """
    _check_sizes(pp_size, num_microbatches, stages_per_rank, placement, effort)
    check_costs(costs, pp_size * stages_per_rank)
    rooms = _rooms(memory_limit, pp_size)
    pipeline = Pipeline(pp_size, num_microbatches, stages_per_rank, costs, rooms, placement)
    _check_rooms(pipeline)
    at_least = lower_bound(pipeline)
    best = _search(pipeline, at_least, Budget(effort * UNIT))
    schedule = pipeline.schedule_of(best, GENERATED)
    return Generated(schedule, simulate(schedule, costs), at_least)


def named_schedules(
    pp_size: int, num_microbatches: int, stages_per_rank: int, placement: Placement = "loop"
) -> Iterator[Schedule]:
    """Every schedule with a name that has these sizes; ``interleaved`` in groups of p to 2 p, and of m.

    Arguments as generate_schedule's.
    """
    for name in SCHEDULES:
        if (name in V_SCHEDULES) != (placement == "v"):
            continue
        several = sorted({*range(pp_size, 2 * pp_size + 1), num_microbatches})
        for group in several if name == "interleaved" else (None,):
            try:
                check_sizes(name, pp_size, num_microbatches, stages_per_rank, group)
            except ValueError:
                continue
            yield build_schedule(name, pp_size, num_microbatches, stages_per_rank, group)


def check_costs(costs: Costs, num_stages: int) -> None:
    """Refuse what is no cost.

    Raises:
        ValueError: a cost of another number of stages, below 0 or not finite; or nothing that takes time.
    """
    for name in fields(costs):
        value = getattr(costs, name.name)
        numbers = value if isinstance(value, Sequence) else [value]
        if isinstance(value, Sequence) and len(value) != num_stages:
            raise ValueError(f"costs: expected {name.name} of {num_stages} stages, got {len(value)}")
        for number in numbers:
            if not 0.0 <= number < math.inf:
                raise ValueError(f"costs: expected {name.name} to be finite and at least 0, got {number}")
    times = [costs.of(name, s) for name in TIMES for s in range(num_stages)]
    if not any(times):
        raise ValueError("costs: expected an action that takes time, got 0 for all; give F, I or W")


def _check_sizes(p: int, m: int, v: int, placement: Placement, effort: float) -> None:
    for name, value in (("pp_size", p), ("num_microbatches", m), ("stages_per_rank", v)):
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    if placement not in get_args(Placement):
        raise ValueError(f"placement: expected one of {get_args(Placement)}, got {placement!r}")
    if placement == "v" and v != 2:
        raise ValueError(f"stages_per_rank: expected 2 with placement 'v', got {v}; choose placement 'loop'")
    if not 0.0 <= effort < math.inf:
        raise ValueError(f"effort: expected a finite number of at least 0, got {effort}")


def _rooms(limit: float | Sequence[float] | None, p: int) -> list[float]:
    """Bytes of every rank."""
    if limit is None:
        return [math.inf] * p
    if isinstance(limit, Sequence) and len(limit) != p:
        raise ValueError(f"memory_limit: expected one number, or one for each of {p} ranks, got {len(limit)}")
    rooms = [float(room) for room in limit] if isinstance(limit, Sequence) else [float(limit)] * p
    for room in rooms:
        if not room >= 0.0:
            raise ValueError(f"memory_limit: expected at least 0 bytes, got {room}")
    return rooms


def _check_rooms(pipeline: Pipeline) -> None:
    """One microbatch has to fit: its last stage on a rank runs while all others there are kept."""
    for rank, own in enumerate(pipeline.own):
        needed = sum(pipeline.kept[stage] for stage in own)
        if not pipeline.fits(rank, needed):
            raise ValueError(
                f"memory_limit: expected at least {needed:g} bytes on rank {rank}, which one microbatch keeps there, "
                f"got {pipeline.rooms[rank]:g}; give more, or make microbatches smaller"
            )


def _search(pipeline: Pipeline, at_least: float, budget: Budget) -> Orders:
    """The best orders: of those with a name, those that rules make, and what moves make of both."""
    enough = at_least * (1.0 + SAME)

    def grade(orders: Orders) -> tuple[float, float, float]:
        """The smaller the better."""
        return round(_course(pipeline, orders).makespan / at_least, 12), *heaviest(pipeline.peaks(orders))

    schedules = named_schedules(pipeline.p, pipeline.m, pipeline.v, pipeline.placement)
    named = [orders for orders in map(pipeline.orders_of, schedules) if pipeline.all_fit(orders)]
    listed, most = [], budget.left / 2
    for rule in rules(pipeline):
        listed.append(list_orders(pipeline, rule).orders)
        budget.left -= sum(map(len, listed[-1]))
        if budget.left < most:
            break
    starts = [min(group, key=grade) for group in (named, listed) if group]
    best, share = min(starts, key=grade), budget.left * 0.8 / (len(starts) * len(SEEDS))
    for start, seed in product(starts, SEEDS):
        if _course(pipeline, best).makespan > enough:
            best = min(best, shorten(pipeline, start, Budget(share), seed, enough), key=grade)
    limit, rest = _course(pipeline, best).makespan * (1.0 + SAME), Budget(budget.left * 0.2)
    return join(pipeline, lower_peaks(pipeline, best, rest, limit), rest, limit)


def _course(pipeline: Pipeline, orders: Orders) -> Course:
    course = run(pipeline, orders)
    assert course is not None, "what is compared runs"
    return course
