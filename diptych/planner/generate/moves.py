"""Local search over the orders of ranks: moves that shorten a step, then moves that lower the peak of memory.

The makespan is the length of a critical path. Two actions that follow each other on a rank without a gap, both on that
path, are a critical pair; unless one of them moves, the path remains. So a move puts one action of a pair before its
neighbour, or some places further. A move is accepted if the step is not longer than before, or than it was some moves
ago: this late acceptance leaves local optima. The result is the best order seen.

Reference: critical pairs, van Laarhoven, Aarts and Lenstra, Operations Research 40, 1992; late acceptance,
Burke and Bykov, European Journal of Operational Research 258, 2017.
"""

from collections.abc import Sequence
from random import Random

from diptych.planner.generate.orders import ROUNDING, B, F, I, Orders, Pipeline, Timing, W, run

MEMORY = 20
"""Number of moves over which late acceptance looks back."""
PLACES = (1, 1, 2, 3, 5)
"""Distances of a move; one is drawn at random."""


class Budget:
    """A budget of actions that may still be simulated.

    Args:
        actions: number of actions.
    """

    def __init__(self, actions: float) -> None:
        self.left = actions

    def run(self, pipeline: Pipeline, orders: Orders) -> Timing | None:
        """Simulate orders and subtract their actions from the budget; None: the orders deadlock."""
        self.left -= sum(map(len, orders))
        return run(pipeline, orders)


def shorten(pipeline: Pipeline, orders: Orders, budget: Budget, seed: int, bound: float) -> Orders:
    """Make a step shorter by moves.

    Args:
        pipeline: sizes and costs.
        orders: valid orders that fit into memory.
        budget: limit of the search.
        seed: seed of the random moves.
        bound: makespan at which the search stops.

    Returns:
        The shortest orders seen; of equally short ones, those with the lowest peak of memory.
    """
    random = Random(seed)
    current = [_split(order) for order in orders]
    if not pipeline.all_fit(current):
        current = [[*order] for order in orders]  # full backwards need less memory here
    timing = budget.run(pipeline, current)
    assert timing is not None, "orders run"
    peaks = pipeline.peaks(current)
    best = current
    shortest = timing.makespan
    least = heaviest(peaks)
    recent = [shortest] * MEMORY
    pairs = critical_pairs(pipeline, current, timing)
    count = 0
    while budget.left > 0 and shortest > bound and pairs:
        count += 1
        rank, place = random.choice(pairs)
        moved = [*current[rank]]
        far = random.choice(PLACES)
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
        if found is not None and found.makespan <= max(timing.makespan, recent[count % MEMORY]):
            current = changed
            timing = found
            peaks[rank] = peak
            pairs = critical_pairs(pipeline, current, timing)
            if (timing.makespan, heaviest(peaks)) < (shortest, least):
                best = current
                shortest = timing.makespan
                least = heaviest(peaks)
        recent[count % MEMORY] = timing.makespan
    return best


def heaviest(peaks: Sequence[float]) -> tuple[float, float]:
    """Return the key by which orders' memory is compared: the largest peak of a rank, then the sum over all ranks."""
    return max(peaks), sum(peaks)


def _split(order: list[int]) -> list[int]:
    """Replace every B by I and W."""
    return [part for action in order for part in ((action - B + I, action - B + W) if action & 3 == B else (action,))]


def critical_pairs(pipeline: Pipeline, orders: Orders, timing: Timing) -> list[tuple[int, int]]:
    """Return rank and place of the first action of every critical pair on one critical path."""
    found = []
    numbers = [{} for _ in orders]  # by place in the order: stage and microbatch
    for passes in (timing.forwards, timing.backwards):
        for stage, places in enumerate(passes):
            numbers[pipeline.home[stage]].update((place, (stage, i)) for i, place in enumerate(places))
    rank = timing.ends.index(timing.makespan)
    place = len(orders[rank]) - 1
    while True:
        starts = timing.starts[rank]
        order = orders[rank]
        if place and starts[place - 1] + pipeline.durations[order[place - 1]] == starts[place]:
            place -= 1
            found.append((rank, place))
            continue
        if order[place] & 3 == W or not starts[place]:
            return found
        stage, microbatch = numbers[rank][place]
        passes, other = (timing.forwards, stage - 1) if order[place] & 3 == F else (timing.backwards, stage + 1)
        rank = pipeline.home[other]
        place = passes[other][microbatch]


def lower_peaks(pipeline: Pipeline, orders: Orders, budget: Budget, limit: float) -> Orders:
    """Lower the peaks of memory without exceeding a makespan: delay the action at a peak, or run a W before it.

    Args:
        pipeline: sizes and costs.
        orders: valid orders.
        budget: limit of the search.
        limit: largest makespan accepted.
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
    """Return orders without the first peak: move its action behind the next backward or W, or the next W before it."""

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
    """Merge I and the W behind it into B where that costs no time; it never costs memory. Arguments as lower_peaks."""
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
    """Return orders in which each given I and the W behind it, located by rank and place of I, are one B."""
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
