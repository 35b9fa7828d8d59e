"""Local search over the orders of ranks: moves that shorten a step, then some that only lower what is kept.

A step lasts as long as its longest path. On one such path, two actions that follow each other on a rank without a gap
are a pair; unless one of them stands elsewhere, that path stays. So a move takes one of a pair over its neighbour, or
some places further. It is kept if the step is not longer than before, or than it was some moves ago (late acceptance:
that is how it leaves what no single move improves). The best orders seen are the result, whatever was kept since.

Reference: pairs on the longest path, van Laarhoven, Aarts and Lenstra, Operations Research 40, 1992; late acceptance,
Burke and Bykov, European Journal of Operational Research 258, 2017.
"""

from collections.abc import Sequence
from random import Random

from diptych.planner.generate.orders import ROUNDING, B, Course, F, I, Orders, Pipeline, W, run

MEMORY = 20
"""How many moves ago a step may have been as long as a worse one that is kept."""
PLACES = (1, 1, 2, 3, 5)
"""How far a move goes, by chance."""


class Budget:
    """Actions that may still be simulated.

    Args:
        actions: so many.
    """

    def __init__(self, actions: float) -> None:
        self.left = actions

    def run(self, pipeline: Pipeline, orders: Orders) -> Course | None:
        """Simulates, and counts."""
        self.left -= sum(map(len, orders))
        return run(pipeline, orders)


def shorten(pipeline: Pipeline, orders: Orders, budget: Budget, seed: int, bound: float) -> Orders:
    """Make a step shorter by moves.

    Args:
        pipeline: sizes and costs.
        orders: that run, and fit.
        budget: ends the search.
        seed: of what is left to chance.
        bound: a step this short ends it, too.

    Returns:
        The shortest seen; of those, one that keeps least.
    """
    random = Random(seed)
    current = [_split(order) for order in orders]
    if not pipeline.all_fit(current):
        current = [[*order] for order in orders]  # whole backwards keep less here
    course = budget.run(pipeline, current)
    assert course is not None, "orders run"
    peaks = pipeline.peaks(current)
    best, shortest, least = current, course.makespan, heaviest(peaks)
    recent, pairs, count = [shortest] * MEMORY, critical_pairs(pipeline, current, course), 0
    while budget.left > 0 and shortest > bound and pairs:
        count += 1
        rank, place = random.choice(pairs)
        moved, far = [*current[rank]], random.choice(PLACES)
        if random.random() < 0.5:
            moved.insert(max(0, place + 1 - far), moved.pop(place + 1))
        else:
            moved.insert(place + far, moved.pop(place))
        peak = pipeline.peak(moved)
        if moved == current[rank] or not pipeline.fits(rank, peak):
            budget.left -= len(moved)
            continue
        changed = [*current[:rank], moved, *current[rank + 1 :]]
        found = budget.run(pipeline, changed)
        if found is not None and found.makespan <= max(course.makespan, recent[count % MEMORY]):
            current, course, peaks[rank] = changed, found, peak
            pairs = critical_pairs(pipeline, current, course)
            if (course.makespan, heaviest(peaks)) < (shortest, least):
                best, shortest, least = current, course.makespan, heaviest(peaks)
        recent[count % MEMORY] = course.makespan
    return best


def heaviest(peaks: Sequence[float]) -> tuple[float, float]:
    """What is compared of two orders that keep so much: the most of a rank, then all ranks together."""
    return max(peaks), sum(peaks)


def _split(order: list[int]) -> list[int]:
    """Every B as I and W."""
    return [part for action in order for part in ((action - B + I, action - B + W) if action & 3 == B else (action,))]


def critical_pairs(pipeline: Pipeline, orders: Orders, course: Course) -> list[tuple[int, int]]:
    """Rank and place of every action that is followed without a gap by its rank's next, both on one longest path."""
    found = []
    numbers = [{} for _ in orders]  # place: stage and microbatch of its pass
    for passes in (course.forwards, course.backwards):
        for stage, places in enumerate(passes):
            numbers[pipeline.home[stage]].update((place, (stage, i)) for i, place in enumerate(places))
    rank = course.ends.index(course.makespan)
    place = len(orders[rank]) - 1
    while True:
        starts, order = course.starts[rank], orders[rank]
        if place and starts[place - 1] + pipeline.lasts[order[place - 1]] == starts[place]:
            place -= 1
            found.append((rank, place))
            continue
        if order[place] & 3 == W or not starts[place]:
            return found
        stage, microbatch = numbers[rank][place]
        passes, other = (course.forwards, stage - 1) if order[place] & 3 == F else (course.backwards, stage + 1)
        rank, place = pipeline.home[other], passes[other][microbatch]


def lower_peaks(pipeline: Pipeline, orders: Orders, budget: Budget, limit: float) -> Orders:
    """Keep less in the same time: of each rank, what makes its peak begins later, or a W gives back before.

    Args:
        pipeline: sizes and costs.
        orders: that run.
        budget: ends it.
        limit: what a step may take.
    """
    ranks = [*range(pipeline.p)]
    while ranks and budget.left > 0:
        rank = max(ranks, key=lambda r: pipeline.peak(orders[r]))
        for order in _lower(pipeline, orders[rank]):
            changed = [*orders[:rank], order, *orders[rank + 1 :]]
            found = budget.run(pipeline, changed)
            if found is not None and found.makespan <= limit:
                orders = changed
                break
        else:
            ranks.remove(rank)
    return orders


def _lower(pipeline: Pipeline, order: list[int]) -> list[list[int]]:
    """Orders without the first peak: what begins there goes behind the next backward or W, or the next W before it."""

    def peaks(changed: list[int]) -> tuple[float, int]:
        sizes = pipeline.sizes(changed)
        return max(sizes), sum(size >= max(sizes) * (1.0 - ROUNDING) for size in sizes)

    sizes = pipeline.sizes(order)
    place = sizes.index(max(sizes))
    found = []
    for kinds, later in (((B, I, W), True), ((W,), False)):
        next_one = next((at for at in range(place + 1, len(order)) if order[at] & 3 in kinds), None)
        if next_one is not None:
            changed = [*order]
            changed.insert(*((next_one, changed.pop(place)) if later else (place, changed.pop(next_one))))
            found.append(changed)
    before = peaks(order)
    return [changed for changed in found if peaks(changed) < before]


def join(pipeline: Pipeline, orders: Orders, budget: Budget, limit: float) -> Orders:
    """Put I and the W behind it together as B wherever that costs no time; it never costs memory. As lower_peaks."""
    groups = [
        [(rank, place) for place in range(len(order) - 1) if order[place : place + 2] == [each - W + I, each]]
        for rank, order in enumerate(orders)
        for each in {action for action in order if action & 3 == W}
    ]
    joined: set[tuple[int, int]] = set()
    while groups and budget.left > 0:
        group = groups.pop()
        tried = joined.union(group)
        found = budget.run(pipeline, _joined(orders, tried))
        if found is not None and found.makespan <= limit:
            joined = tried
        elif len(group) > 1:
            groups += [group[: len(group) // 2], group[len(group) // 2 :]]
    return _joined(orders, joined)


def _joined(orders: Orders, pairs: set[tuple[int, int]]) -> Orders:
    found: Orders = []
    for rank, order in enumerate(orders):
        actions: list[int] = []
        for place, action in enumerate(order):
            if (rank, place) in pairs:
                actions.append(action - I + B)
            elif (rank, place - 1) not in pairs:
                actions.append(action)
        found.append(actions)
    return found
