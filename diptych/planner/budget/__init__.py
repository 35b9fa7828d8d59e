"""Choice of the fastest recompute, and of storage in 8 bits, for every layer within a memory budget.

diptych.planner.budget.solver finds the blocks of a stage, and diptych.planner.budget.ranks those of a rank with several
microbatches in flight. The memory of a block is that of diptych.planner.memory for the block alone. The whole model
needs some bytes more (the positions that recomputed layers save, and the loss), so the result is simulated again. If
it does not fit, the solver repeats with budgets that shrink ever faster, and finally falls back to equal blocks.
"""

from dataclasses import replace
from typing import NamedTuple

from diptych.planner.budget.blocks import LENGTHS, BlockCost, StageParts, offload_choices, storage_choices
from diptych.planner.budget.ranks import MemoryConstraint, RankSearch, RankSolution, rank_constraints
from diptych.planner.budget.solver import STEPS
from diptych.planner.memory.in_transit import most_in_transit
from diptych.planner.memory.rank_peaks import rank_peaks, stage_actions
from diptych.planner.step_time import Machine, StageTimes
from diptych.planner.traffic import message_bytes
from diptych.plans.config import TransformerConfig
from diptych.plans.model.layers import format_numbers, format_offload
from diptych.plans.recompute import RecomputeBlock, format_layout, without_recompute
from diptych.plans.schedule.named import schedule_for

__all__ = ["BudgetPlan", "fit_budget", "smallest"]


ATTEMPTS = 16
"""Smaller budgets that are tried for blocks whose simulation as a whole exceeds the budget."""


class BudgetPlan(NamedTuple):
    """A layout within a budget."""

    config: TransformerConfig
    """The model with its recompute_layout."""
    budget: int
    """Bytes that each rank may need."""
    peaks: list[int]
    """Predicted bytes of each pipeline rank; see diptych.planner.memory.rank_peaks."""
    seconds: float
    """Predicted seconds of recomputation, of packing in 8 bits, and of waits for copies to the host and back, for one
    microbatch on all ranks together."""
    bound: float
    """Seconds that every layout within the budget needs at least, of those that are searched: all layouts, and of
    offload the sets of values that diptych.planner.budget.blocks considers."""

    @property
    def peak(self) -> int:
        """Predicted bytes of the rank that needs most."""
        return max(self.peaks)


def fit_budget(
    config: TransformerConfig, batch: int, budget: int, machine: Machine | None = None, num_microbatches: int = 1
) -> BudgetPlan:
    """Return the layout with the least recomputation and packing whose memory is within a budget on every rank.

    Args:
        config: the model, with its pipeline; its own recompute settings are replaced. With activation_storage, layers
            may save values in 8 bits: those of activation_storage_layers, or None: those for which that is faster than
            recomputation. With enable_activation_offload, saved values of layers may move to the host: those of
            activation_offload_layers, or None: those for which that is faster. Of context ranks, the plan is for the
            one that needs most.
        batch: sequences of a microbatch.
        budget: bytes of a rank in the forwards and backwards of a step, above parameters and batches: activations,
            temporary buffers, messages, and the gradients of parameters that exist by then.
        machine: rates of the machine; None: the defaults of Machine.
        num_microbatches: microbatches of a step.

    Raises:
        ValueError: no layout is within the budget (the message says how much the smallest needs), or activations are
            offloaded with more than one layer fetched ahead.
    """
    config = without_recompute(config)
    if config.enable_activation_offload and config.tensor_offload_num_prefetch_layers > 1:
        raise ValueError(
            "tensor_offload_num_prefetch_layers: expected 0 or 1 with activation_memory_budget and "
            f"enable_activation_offload, got {config.tensor_offload_num_prefetch_layers}"
        )
    request = _Request(config, batch, budget, machine or Machine(), num_microbatches)
    searches = _searches(config, batch, request.machine, num_microbatches)
    plan = _fitting(searches, request)
    if plan is None:
        raise ValueError(
            f"activation_memory_budget: expected at least {_least(searches, request):,} bytes, which this model needs "
            f"with most of its values recomputed, got {budget:,}; use smaller microbatches or shorter sequences"
        )
    return plan


class _Request(NamedTuple):
    """The request for a layout; fields as in fit_budget."""

    config: TransformerConfig
    batch: int
    budget: int
    machine: Machine
    num_microbatches: int


def _fitting(searches: list[RankSearch], request: _Request) -> BudgetPlan | None:
    """Return the fastest layout whose simulation is within the budget, or None.

    Blocks are discrete: a budget reduced by the excess may give the same ones, so the reduction grows each time.
    If none fits, the result is whole layers recomputed in equal blocks, if these are within the budget.
    """
    config, batch, budget, machine, count = request
    schedule = schedule_for(config, count)
    allowed = [budget] * len(searches)
    for attempt in range(ATTEMPTS):
        found = [search.best(each) for search, each in zip(searches, allowed, strict=True)]
        solved = [each for each in found if each is not None]
        if len(solved) < len(found):
            break
        settings = _storage(config, solved) | _offload(config, solved)
        chosen = replace(config, recompute_layout=format_layout(_in_order(solved)), **settings)
        peaks = rank_peaks(chosen, schedule, batch)
        if max(peaks) <= budget:
            return BudgetPlan(chosen, budget, peaks, *_seconds(searches, solved, allowed, budget))
        excess = [max(0, peak - budget) for peak in peaks]
        allowed = [a - ((e + budget // STEPS + 1) << attempt) * (e > 0) for a, e in zip(allowed, excess, strict=True)]
    uniform, peaks = _uniform(config, batch, count)
    if max(peaks) > budget:
        return None
    seconds = sum(each.recomputed + each.packed + each.copied for each in StageTimes(machine).of(uniform, batch))
    return BudgetPlan(uniform, budget, peaks, seconds, min(seconds, sum(search.bound(budget) for search in searches)))


def _seconds(
    searches: list[RankSearch], solved: list[RankSolution], allowed: list[int], budget: int
) -> tuple[float, float]:
    """Return the seconds of all ranks, and their bound for the whole budget."""
    bounds = []
    for search, solution, own in zip(searches, solved, allowed, strict=True):
        whole = solution if own == budget else search.best(budget)
        assert whole is not None, "more memory allows what less does"
        bounds.append(whole.bound)
    return sum(solution.seconds for solution in solved), sum(bounds)


def _in_order(solved: list[RankSolution]) -> list[RecomputeBlock]:
    """Return the blocks of all stages in the order of their layers."""
    blocks = [block for rank in solved for stage in rank.stages for block in stage.blocks]
    return sorted(blocks, key=lambda block: block.layers)


def _storage(config: TransformerConfig, solved: list[RankSolution]) -> dict[str, str | None]:
    """Return the settings of the layers that save values in 8 bits, if the model leaves them open."""
    if len(storage_choices(config)) == 1:
        return {}
    stored = {number for rank in solved for stage in rank.stages for number in stage.stored}
    layers = None if len(stored) == config.num_layers else format_numbers(stored)
    return (
        {"activation_storage": "fp8", "activation_storage_layers": layers} if stored else {"activation_storage": None}
    )


def _offload(config: TransformerConfig, solved: list[RankSolution]) -> dict[str, bool | str | None]:
    """Return the settings of the layers whose saved values move to the host, if the model leaves them open."""
    if len(offload_choices(config)) == 1:
        return {}
    offloaded = {
        number: values for rank in solved for stage in rank.stages for number, values in stage.offloaded.items()
    }
    layers = format_offload(offloaded) if offloaded else None
    return {"enable_activation_offload": bool(offloaded), "activation_offload_layers": layers}


def _searches(config: TransformerConfig, batch: int, machine: Machine, count: int) -> list[RankSearch]:
    """Return the search of every pipeline rank.

    Args:
        config: the model without recompute.
        batch: sequences of a microbatch.
        machine: rates of the machine.
        count: microbatches of a step.
    """
    schedule = schedule_for(config, count)
    times = StageTimes(machine)
    message = message_bytes(config, batch)
    found: dict[tuple[str, ...], dict[object, list[BlockCost]]] = {}

    def parts_of(rank: int, in_8_bits: bool) -> tuple[list[StageParts], list[list[MemoryConstraint]]]:
        """Return parts and constraints of a rank; in_8_bits: if layers may choose, what waits for W is in 8 bits."""
        actions = schedule.actions[rank]
        usual = storage_choices(config)[-1 if in_8_bits else 0]
        own = sorted({action.stage for action in actions})
        stages = {stage: stage_actions(usual, stage, batch, schedule.splits_backward) for stage in own}
        constraints = rank_constraints(actions, [message * each for each in transit[rank]], stages)
        parts = []
        for stage, each in constraints.items():
            kinds = tuple(sorted({constraint.kind for constraint in each} - {"W"}))
            parts.append(StageParts(config, stage, batch, times, kinds, found.setdefault(kinds, {}), in_8_bits))
        return parts, [*constraints.values()]

    transit = most_in_transit(schedule)
    has_choice = schedule.splits_backward and len(storage_choices(config)) > 1
    return [
        RankSearch(*parts_of(rank, False), parts_of(rank, True) if has_choice else None)
        for rank in range(len(schedule.actions))
    ]


def _least(searches: list[RankSearch], request: _Request) -> int:
    """Return a budget within which a layout is found, near the smallest: bisected to 0.1%, then raised to fit."""
    config, batch, _, _, count = request
    low = 0
    high = smallest(config, batch, count)
    most = high
    while high - low > high // 1000:
        middle = (low + high) // 2
        if all(search.fits(middle) for search in searches):
            high = middle
        else:
            low = middle
    found = high + left_out(config.seq_length) * max(search.microbatches for search in searches)
    while found < most and _fitting(searches, request._replace(budget=found)) is None:
        found += found // 500 + 1
    return min(found, most)


def left_out(length: int) -> int:
    """Return the bytes that a microbatch may need beside its blocks: positions of ``length`` tokens, and the loss."""
    return 8 * length + 8


def smallest(config: TransformerConfig, batch: int, num_microbatches: int = 1) -> int:
    """Return the bytes of the rank that needs most if whole layers are recomputed in equal blocks of the best length.

    Args:
        config: as in fit_budget.
        batch: sequences of a microbatch.
        num_microbatches: microbatches of a step.
    """
    return max(_uniform(without_recompute(config), batch, num_microbatches)[1])


def _uniform(config: TransformerConfig, batch: int, count: int) -> tuple[TransformerConfig, list[int]]:
    """Return the model with whole layers recomputed in equal blocks of the best length, and the bytes of every rank."""
    schedule = schedule_for(config, count)
    layers = range(config.num_layers)
    found = []
    for size in (size for size in LENGTHS if size <= config.num_layers and config.num_layers % size in (0, *LENGTHS)):
        blocks = [RecomputeBlock("full", tuple(layers[i : i + size])) for i in range(0, config.num_layers, size)]
        layout = replace(config, recompute_layout=format_layout(blocks))
        found.append((layout, rank_peaks(layout, schedule, batch)))
    return min(found, key=lambda each: max(each[1]))
