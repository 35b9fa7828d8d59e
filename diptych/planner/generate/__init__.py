"""Generation of schedules for given costs: a search over orders of actions, within a memory limit.

    named     every schedule of diptych.plans.schedule.named with these ranks, stages and placement that fits
    listed    schedules of list scheduling, by a family of rules (diptych.planner.generate.listing)
    moved     the best of both, improved by local search (diptych.planner.generate.moves)

The result is the shortest of all, so no named schedule that fits is shorter; of equally short schedules it is one that
saves less for backward. Full backwards replace I and W where that takes no more time. The result comes with a lower
bound of the makespan (diptych.planner.generate.bound). The search is deterministic.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import product
from typing import NamedTuple, get_args

from diptych.planner.generate.bound import lower_bound
from diptych.planner.generate.listing import list_orders, rules
from diptych.planner.generate.moves import Budget, heaviest, join, lower_peaks, shorten
from diptych.planner.generate.orders import Orders, Pipeline, Timing, run
from diptych.plans.config.rules import check_at_least
from diptych.plans.schedule.actions import Schedule
from diptych.plans.schedule.named import build_schedule, check_sizes
from diptych.plans.schedule.placement import SCHEDULES, V_SCHEDULES, Placement
from diptych.plans.schedule.simulate import Costs, Simulation, simulate

__all__ = ["GENERATED", "Generated", "check_costs", "generate_schedule", "named_schedules"]

GENERATED = "generated"
"""Name of a generated schedule."""
UNIT = 1_000_000
"""Actions simulated per unit of effort."""
TIMES = ("forward", "input_gradient", "weight_gradient")
SAME = 1e-12
"""Relative difference below which times count as equal: their sums differ in rounding."""
SEEDS = (0, 1)
"""Seeds of the searches from each start."""


class Generated(NamedTuple):
    """A generated schedule."""

    schedule: Schedule
    simulation: Simulation
    makespan_bound: float
    """Lower bound of the makespan of any schedule, in the unit of the costs."""


def generate_schedule(
    pp_size: int,
    num_microbatches: int,
    stages_per_rank: int,
    costs: Costs,
    memory_limit: float | Sequence[float] | None = None,
    placement: Placement = "loop",
    effort: float = 3.0,
) -> Generated:
    """Return the best schedule found for given costs.

    Args:
        pp_size: number of pipeline ranks p.
        num_microbatches: number of microbatches m.
        stages_per_rank: number of stages per rank v; 2 with placement ``v``.
        costs: times, and bytes saved for backward, of all p v stages.
        memory_limit: bytes that every rank may save for backward, or a sequence with one number per rank; None: no
            limit.
        placement: placement of the stages on ranks.
        effort: effort of the search, in millions of simulated actions, including those of list scheduling; a million
            takes about half a second. At least one rule is tried.

    Raises:
        ValueError: invalid sizes, costs or limit; the message names the argument.
    """
    _check_sizes(pp_size, num_microbatches, stages_per_rank, placement, effort)
    check_costs(costs, pp_size * stages_per_rank)
    memory_limits = _memory_limits(memory_limit, pp_size)
    pipeline = Pipeline(pp_size, num_microbatches, stages_per_rank, costs, memory_limits, placement)
    _check_memory_limits(pipeline)
    makespan_bound = lower_bound(pipeline)
    best = _search(pipeline, makespan_bound, Budget(effort * UNIT))
    schedule = pipeline.schedule_of(best, GENERATED)
    return Generated(schedule, simulate(schedule, costs), makespan_bound)


def named_schedules(
    pp_size: int, num_microbatches: int, stages_per_rank: int, placement: Placement = "loop"
) -> Iterator[Schedule]:
    """Yield every named schedule of these sizes; ``interleaved`` with groups of p to 2 p, and of m.

    Arguments as in generate_schedule.
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
    """Check the costs of a pipeline.

    Args:
        costs: the costs.
        num_stages: number of stages that they must be for.

    Raises:
        ValueError: a cost has another number of stages, is below 0 or not finite; or no action takes time.
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
    """Reject invalid sizes, placement or effort of generate_schedule."""
    check_at_least(1, pp_size=p, num_microbatches=m, stages_per_rank=v)
    if placement not in get_args(Placement):
        raise ValueError(f"placement: expected one of {get_args(Placement)}, got {placement!r}")
    if placement == "v" and v != 2:
        raise ValueError(f"stages_per_rank: expected 2 with placement 'v', got {v}; choose placement 'loop'")
    if not 0.0 <= effort < math.inf:
        raise ValueError(f"effort: expected a finite number of at least 0, got {effort}")


def _memory_limits(limit: float | Sequence[float] | None, p: int) -> list[float]:
    """Return the memory limit of every rank, in bytes."""
    if limit is None:
        return [math.inf] * p
    if isinstance(limit, Sequence) and len(limit) != p:
        raise ValueError(f"memory_limit: expected one number, or one for each of {p} ranks, got {len(limit)}")
    memory_limits = [float(one) for one in limit] if isinstance(limit, Sequence) else [float(limit)] * p
    for one in memory_limits:
        if not one >= 0.0:
            raise ValueError(f"memory_limit: expected at least 0 bytes, got {one}")
    return memory_limits


def _check_memory_limits(pipeline: Pipeline) -> None:
    """Check that one microbatch fits on every rank, with the saved bytes of all its stages on that rank."""
    for rank, own in enumerate(pipeline.own):
        needed = sum(pipeline.saved[stage] for stage in own)
        if not pipeline.fits(rank, needed):
            raise ValueError(
                f"memory_limit: expected at least {needed:g} bytes on rank {rank}, which one microbatch saves there, "
                f"got {pipeline.memory_limits[rank]:g}; give more, or make microbatches smaller"
            )


def _search(pipeline: Pipeline, makespan_bound: float, budget: Budget) -> Orders:
    """Return the best orders among named schedules, listed schedules, and those improved by moves."""
    enough = makespan_bound * (1.0 + SAME)

    def grade(orders: Orders) -> tuple[float, float, float]:
        """Return the sort key of orders; the smallest is best."""
        return round(_timing(pipeline, orders).makespan / makespan_bound, 12), *heaviest(pipeline.peaks(orders))

    schedules = named_schedules(pipeline.p, pipeline.m, pipeline.v, pipeline.placement)
    named = [orders for orders in map(pipeline.orders_of, schedules) if pipeline.all_fit(orders)]
    listed = []
    most = budget.left / 2
    for rule in rules(pipeline):
        listed.append(list_orders(pipeline, rule).orders)
        budget.left -= sum(map(len, listed[-1]))
        if budget.left < most:
            break
    starts = [min(group, key=grade) for group in (named, listed) if group]
    best = min(starts, key=grade)
    share = budget.left * 0.8 / (len(starts) * len(SEEDS))
    for start, seed in product(starts, SEEDS):
        if _timing(pipeline, best).makespan > enough:
            best = min(best, shorten(pipeline, start, Budget(share), seed, enough), key=grade)
    limit = _timing(pipeline, best).makespan * (1.0 + SAME)
    rest = Budget(budget.left * 0.2)
    return join(pipeline, lower_peaks(pipeline, best, rest, limit), rest, limit)


def _timing(pipeline: Pipeline, orders: Orders) -> Timing:
    """Return the timing of orders that do not deadlock."""
    timing = run(pipeline, orders)
    assert timing is not None, "compared orders do not deadlock"
    return timing
