"""The least recomputation of a pipeline rank, whose memory also holds the microbatches in flight.

A rank that begins an action has k microbatches in flight, each of which saves S bytes. Its blocks need

    k S + bytes beside them + saved before the block + peak of the block + left after the block <= budget

where the bytes beside are gradients of parameters, what waits for W, and messages. With S fixed,
diptych.planner.budget.solver finds the best blocks that save at most S. The search over S divides an interval of S:
with k S at its lower end and at most its upper end saved, the seconds are a bound for all S in it. Intervals whose
bound is not below the seconds found so far, up to TOLERANCE, are not divided; nor is any after MOST_BOXES divisions. A
rank with several stages has a box of intervals, one for what each stage saves.
"""

import heapq
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from diptych.planner.budget.solver import Parts, Solution, blocks_by_end, saved_range, solve
from diptych.planner.memory.rank_peaks import StageActions, backward_memory
from diptych.plans.schedule.actions import Action

TOLERANCE = 0.002
"""Relative gap between the seconds found and their bound at which a search ends."""
MOST_BOXES = 100
"""Boxes that a search divides at most."""
SHARES = 24
"""Steps of the saved bytes, from least to most, that are tried to find out if a rank fits at all."""


class MemoryConstraint(NamedTuple):
    """A limit of saved bytes: the memory of a rank during an action, beside the action's own microbatch."""

    kind: str
    """Kind of the action, of diptych.planner.budget.blocks.SIMULATED, or W."""
    in_flight: tuple[int, ...]
    """Other microbatches in flight on each stage of the rank."""
    beside: int
    """Bytes that do not depend on recompute: gradients, what waits for W, messages, and what W allocates."""


class RankSolution(NamedTuple):
    """The blocks of a rank's stages."""

    stages: list[Solution]
    seconds: float
    """Seconds of recomputation of one microbatch."""
    bound: float
    """Seconds that other blocks within the budget need at least."""


def rank_constraints(
    actions: Sequence[Action], messages: Sequence[int], stages: dict[int, StageActions]
) -> dict[int, list[MemoryConstraint]]:
    """Return the constraints of each stage of a rank, without those that are never the tightest.

    Args:
        actions: actions of the rank, in order.
        messages: bytes of messages in transit during each.
        stages: bytes of the actions of the rank's stages, without recompute, by global number of the stage.
    """
    order = {stage: place for place, stage in enumerate(stages)}
    in_flight = [0] * len(stages)
    beside = 0
    found: dict[int, list[MemoryConstraint]] = {stage: [] for stage in stages}
    memory = [stages[action.stage] for action in actions]
    for ((kind, stage, _), each, is_later), more in zip(backward_memory(actions, memory), messages, strict=True):
        if kind in "BI":
            in_flight[order[stage]] -= 1
        own = each["W"].peak - each["I"].after if kind == "W" else 0
        name = kind + " added" * (is_later and kind in "BI")
        found[stage].append(MemoryConstraint(name, tuple(in_flight), beside + more + own))
        if kind == "F":
            in_flight[order[stage]] += 1
        else:
            beside += each[kind].after - (each["I"].after if kind == "W" else 0)
    return {stage: _tightest(constraints) for stage, constraints in found.items()}


def _tightest(constraints: Sequence[MemoryConstraint]) -> list[MemoryConstraint]:
    """Return the constraints that no other one of their kind exceeds in everything."""
    distinct = [*dict.fromkeys(constraints)]

    def exceeds(other: MemoryConstraint, constraint: MemoryConstraint) -> bool:
        pairs = zip((*other.in_flight, other.beside), (*constraint.in_flight, constraint.beside), strict=True)
        return other.kind == constraint.kind and other != constraint and all(a >= b for a, b in pairs)

    return [constraint for constraint in distinct if not any(exceeds(other, constraint) for other in distinct)]


class RankSearch:
    """The search for the blocks of a rank's stages.

    Args:
        parts: costs of the stages, in the order of MemoryConstraint.in_flight.
        constraints: constraints of each stage, in the same order.
        for_bound: lower bounds of these costs and constraints for every layout; None: parts and constraints themselves.
    """

    def __init__(
        self,
        parts: Sequence[Parts],
        constraints: Sequence[Sequence[MemoryConstraint]],
        for_bound: tuple[Sequence[Parts], Sequence[Sequence[MemoryConstraint]]] | None = None,
    ) -> None:
        self._parts = parts
        self._constraints = constraints
        self._for_bound = for_bound
        self._endings = [blocks_by_end(each) for each in parts]
        self._endings_for_bound = [blocks_by_end(each) for each in for_bound[0]] if for_bound else self._endings
        ranges = [saved_range(*each) for each in zip(parts, self._endings, strict=True)]
        self._least = [least for least, _ in ranges]
        self._most = [most for _, most in ranges]
        self.microbatches = 1 + max(sum(constraint.in_flight) for each in constraints for constraint in each)
        """Largest number of microbatches of which the rank has saved values."""
        self._solved: dict[tuple[int, ...], Solution | None] = {}

    def fits(self, budget: int) -> bool:
        """Return True if some blocks are found within a budget."""
        shares = (share / SHARES for share in range(SHARES + 1))
        saved = ([int(a + each * (b - a)) for a, b in zip(self._least, self._most, strict=True)] for each in shares)
        return any(self._solve_all(budget, each, each, upper=True) is not None for each in saved)

    def best(self, budget: int) -> RankSolution | None:
        """Return the fastest blocks within a budget, or None."""
        found, bound = self._divide(budget, None)
        if found is None:
            return None
        if self._for_bound is not None:
            _, bound = self._divide(budget, _seconds(found))
        return RankSolution(found, _seconds(found), bound)

    def bound(self, budget: int) -> float:
        """Return the seconds that all blocks within a budget need at least."""
        return self._divide(budget, math.inf)[1]

    def _divide(self, budget: int, known: float | None) -> tuple[list[Solution] | None, float]:
        """Return the fastest blocks that are found in the boxes of saved bytes, and a bound for all boxes.

        Args:
            budget: bytes of the rank.
            known: seconds of blocks within the budget, for a bound only, by the costs for it; None: find blocks.
        """
        found: list[Solution] | None = None
        least = math.inf if known is None else known
        boxes: list[tuple[float, int, list[int], list[int]]] = []
        count = itertools.count()

        def add(lower: list[int], upper: list[int]) -> None:
            nonlocal found, least
            bound = self._solve_all(budget, lower, upper, upper=False, for_bound=known is not None)
            if bound is None:
                return
            heapq.heappush(boxes, (_seconds(bound), next(count), lower, upper))
            for saved in ([each.saved for each in bound], upper) if known is None else ():
                if _seconds(bound) >= least * (1 - TOLERANCE):
                    break  # no blocks in the box are faster by more than the tolerance
                solved = self._solve_all(budget, saved, saved, upper=True)
                if solved is not None and _seconds(solved) < least:
                    found = solved
                    least = _seconds(solved)

        add(self._least, self._most)
        for _ in range(MOST_BOXES):
            if not boxes or boxes[0][0] >= least * (1 - TOLERANCE):
                break
            _, _, lower, upper = heapq.heappop(boxes)
            sizes = [(b - a) / (1 + most) for a, b, most in zip(lower, upper, self._most, strict=True)]
            place = max(range(len(sizes)), key=sizes.__getitem__)
            middle = (lower[place] + upper[place]) // 2
            add(lower, [*upper[:place], middle, *upper[place + 1 :]])
            add([*lower[:place], middle, *lower[place + 1 :]], upper)
        return found, min([least, *(box[0] for box in boxes)])

    def _solve_all(
        self, budget: int, in_flight: Sequence[int], most_saved: Sequence[int], upper: bool, for_bound: bool = False
    ) -> list[Solution] | None:
        """Return the fastest blocks of every stage, or None; arguments as in _solve, for every stage."""
        found = []
        for place, most in enumerate(most_saved):
            solution = self._solve(place, budget, in_flight, most, upper, for_bound)
            if solution is None:
                return None
            found.append(solution)
        return found

    def _solve(
        self, place: int, budget: int, in_flight: Sequence[int], most_saved: int, upper: bool, for_bound: bool
    ) -> Solution | None:
        """Return the fastest blocks of a stage.

        Args:
            place: place of the stage.
            budget: bytes of the rank.
            in_flight: bytes that a microbatch in flight has saved on each stage.
            most_saved: bytes that the stage may save.
            upper: see solver.solve.
            for_bound: take the costs and constraints for the bound.
        """
        all_parts, all_constraints = (for_bound and self._for_bound) or (self._parts, self._constraints)
        parts = all_parts[place]
        endings = (self._endings_for_bound if for_bound else self._endings)[place]
        limits = dict.fromkeys((*parts.kinds, "W"), budget)
        for constraint in all_constraints[place]:
            held = sum(count * saved for count, saved in zip(constraint.in_flight, in_flight, strict=True))
            limits[constraint.kind] = min(limits[constraint.kind], budget - held - constraint.beside)
        if limits.pop("W") < 0:
            return None
        key = place, most_saved, upper, for_bound, *limits.values()
        if key not in self._solved:
            self._solved[key] = solve(parts, endings, [*limits.values()], most_saved, upper)
        return self._solved[key]


def _seconds(stages: Iterable[Solution]) -> float:
    """Return the seconds of recomputation of stages together."""
    return sum(stage.seconds for stage in stages)
