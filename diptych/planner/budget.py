"""The fastest recompute of every layer within a budget of memory.

A model is cut into blocks of layers, and each block saves everything, recomputes some modules, or recomputes whole
layers. In backward, the block that begins at a layer needs what all layers before it have saved, its own memory
(``BlockCost.peak``), and the gradients of the parameters after it:

    saved before the block + peak of the block + gradients after the block <= budget

The least seconds of recomputation up to a layer depend on the bytes saved so far only. From the first layer on, the
solver keeps for each layer the pairs (bytes, seconds) that no other pair beats in both, so its result is the best of
all layouts. If a layer has more than 2^14 pairs, which models of 64 layers do not reach, those within 2^-14 of the
budget of each other are joined: with their bytes rounded up for the result, and down for the bound that no layout
beats. The memory of a block is that of diptych.planner.memory for the block alone. The whole model needs some bytes
more (the positions that recomputed layers save, and the loss), so the result is simulated again, and the solver repeats
with a budget that is smaller by the excess.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from itertools import product
from typing import NamedTuple

import numpy as np

from diptych.planner.memory import predict_memory
from diptych.planner.memory.graph import GraphBuilder
from diptych.planner.memory.nodes import Node
from diptych.planner.memory.simulate import Simulation
from diptych.planner.step_time import Machine, StageTimes
from diptych.plans.config import TransformerConfig
from diptych.plans.recompute import NO_RECOMPUTE, RecomputeBlock, format_layout

LENGTHS = (1, 2, 3, 4, 6, 8)
"""Layers of a block that is recomputed together."""
STEPS = 2**14
"""Parts of the budget within which bytes are not told apart."""


class BlockCost(NamedTuple):
    """Memory and time of a block."""

    block: RecomputeBlock
    """The recompute of its layers, or of equal ones."""
    saved: int
    """Bytes saved for backward, with the block's input."""
    peak: int
    """Largest number of bytes of the block in forward and backward, with the gradients of its parameters."""
    seconds: float
    """Seconds of recomputation."""


class BudgetPlan(NamedTuple):
    """A layout within a budget."""

    config: TransformerConfig
    """The model with its recompute_layout."""
    peak: int
    """Predicted bytes, as in MemoryPrediction."""
    seconds: float
    """Predicted seconds of recomputation for one microbatch."""
    bound: float
    """Seconds that every layout within the budget needs at least."""


def fit_budget(config: TransformerConfig, batch: int, budget: int, machine: Machine | None = None) -> BudgetPlan:
    """Return the layout of recompute with the least recomputation whose memory is within a budget.

    Args:
        config: the model on one device, or on one of several replicas or tensor-parallel ranks; its own recompute
            settings are replaced.
        batch: sequences of a microbatch.
        budget: bytes of a forward and backward above parameters and batch: activations, temporary buffers, and the
            gradients of parameters that exist by then; see diptych.planner.memory.predict_memory.
        machine: rates of the machine; None: the defaults of Machine.

    Raises:
        ValueError: no layout is within the budget, and the message says how much the smallest needs; or the model has
            pipeline or context ranks.
    """
    for name in ("pipeline_model_parallel_size", "context_parallel_size"):
        if getattr(config, name) != 1:
            raise ValueError(
                f"{name}: expected 1 with a budget of activation memory, got {getattr(config, name)}; write "
                "recompute_layout yourself"
            )
    config = replace(config, **NO_RECOMPUTE)
    parts = _Parts(config, batch, machine or Machine())
    allowed = budget
    for _ in range(8):
        found = _solve(parts, allowed, upper=True)
        if found is None:
            break
        chosen = replace(config, recompute_layout=format_layout(found.blocks))
        peak = predict_memory(chosen, batch).peak
        if peak <= budget:
            bound = _solve(parts, budget, upper=False)
            assert bound is not None, "the memory of blocks is at most that of the whole model"
            return BudgetPlan(chosen, peak, found.seconds, bound.seconds)
        allowed -= peak - budget + budget // STEPS + 1
    raise ValueError(
        f"activation_memory_budget: expected at least {_least(parts):,} bytes, which this model needs with most of its "
        f"values recomputed, got {budget:,}; use smaller microbatches or shorter sequences"
    )


def _least(parts: "_Parts") -> int:
    """Return bytes within which there is a layout; 0.1% less may be too few."""
    low = 0
    high = smallest(parts.config, parts.batch)
    while high - low > high // 1000:
        middle = (low + high) // 2
        if _solve(parts, middle, upper=True) is None:
            low = middle
        else:
            high = middle
    return high + left_out(parts.length)


def left_out(length: int) -> int:
    """Return the bytes that a whole model may need beside its blocks: positions of ``length`` tokens, and the loss."""
    return 8 * length + 8


def smallest(config: TransformerConfig, batch: int) -> int:
    """Return the bytes of whole layers recomputed in equal blocks, of the length that needs least.

    Args:
        config: as in fit_budget.
        batch: sequences of a microbatch.
    """
    config = replace(config, **NO_RECOMPUTE)
    layers = range(config.num_layers)
    found = []
    for size in (size for size in LENGTHS if size <= config.num_layers and config.num_layers % size in (0, *LENGTHS)):
        blocks = [RecomputeBlock("full", tuple(layers[i : i + size])) for i in range(0, config.num_layers, size)]
        layout = replace(config, recompute_layout=format_layout(blocks))
        found.append(predict_memory(layout, batch).peak)
    return min(found)


class _Parts:
    """Costs of the parts of a model; equal blocks are simulated once."""

    def __init__(self, config: TransformerConfig, batch: int, machine: Machine) -> None:
        self.config = config
        self.batch = batch
        self.length = config.seq_length
        self._times = StageTimes(machine)
        self._settings = [config.layer(number) for number in range(config.num_layers)]
        self._found: dict[object, list[BlockCost]] = {}

    def options(self, first: int, size: int) -> list[BlockCost]:
        """Return the costs of blocks of ``size`` layers from a layer on, none of which another beats in everything."""
        key = tuple(self._settings[first : first + size])
        if key not in self._found:
            costs = [self._cost(first, size, block) for block in self._kinds(range(first, first + size))]
            self._found[key] = [cost for cost in costs if not any(_beats(other, cost) for other in costs)]
        return self._found[key]

    def _kinds(self, layers: range) -> Iterator[RecomputeBlock]:
        """Yield the recompute blocks that consist of some layers."""
        has_mhc = self.config.enable_hyper_connections
        if len(layers) == 1:
            yield RecomputeBlock("none", tuple(layers))
        yield RecomputeBlock("full", tuple(layers))
        inner = ((), ("activation",), ("mlp",))
        for mhc, norms, core, mlp in product((False, True), (False, True), (False, True), inner):
            names = ("mhc",) * mhc + ("layernorm",) * norms + ("core_attn",) * core + mlp
            if names and (mhc or len(layers) == 1) and (has_mhc or not mhc):
                yield RecomputeBlock("selective", tuple(layers), frozenset(names))

    def _cost(self, first: int, size: int, block: RecomputeBlock) -> BlockCost:
        """Return the cost of a block, simulated alone."""
        builder = GraphBuilder(self.config, self.batch, self.length)
        x = builder.hidden()
        begin = [Node([], [x])]
        layers = {}
        for number in range(first, first + size):
            layers[number], x = builder.layer(number, x)
        simulation = Simulation()  # without the positions, which the whole model has once
        simulation.run(begin, layers, [block], [Node([x], [])])
        settings = tuple(self._settings[first : first + size])
        seconds = self._times.of_block(self.config, settings, block, self.batch).recomputed
        return BlockCost(block, sum(simulation.saved_by_name.values()), simulation.peak, seconds)

    @cached_property
    def gradients(self) -> list[int]:
        """Bytes of the gradients of the parameters after each layer, and before all layers of all of them."""
        builder = GraphBuilder(self.config, self.batch, self.length)
        head = sum(node.parameters for node in builder.head(builder.hidden()))
        sizes = [self._parameters(number) for number in range(self.config.num_layers)]
        return [head + sum(sizes[number:]) for number in range(self.config.num_layers + 1)]

    def _parameters(self, number: int) -> int:
        builder = GraphBuilder(self.config, self.batch, self.length)
        return sum(node.parameters for node in builder.layer(number, builder.hidden())[0].nodes)

    @cached_property
    def ends(self) -> tuple[int, int, int]:
        """Bytes that the embedding saves, its peak, and the peak of the head."""
        builder = GraphBuilder(self.config, self.batch, self.length)
        nodes, x = builder.embedding()
        embedding = Simulation()
        embedding.run(nodes, {}, [], [Node([x], [])])
        head = Simulation()
        head.run([Node([], [y := builder.hidden()])], {}, [], builder.head(y))
        return sum(embedding.saved_by_name.values()), embedding.peak, head.peak


def _beats(other: BlockCost, cost: BlockCost) -> bool:
    """Return True if another block is at least as good in everything and better in something."""
    pairs = [(other.saved, cost.saved), (other.peak, cost.peak), (other.seconds, cost.seconds)]
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


class _Solution(NamedTuple):
    """The blocks of a layout, and its seconds of recomputation."""

    blocks: list[RecomputeBlock]
    seconds: float


class _Front(NamedTuple):
    """Pairs of saved bytes and seconds up to a layer, none of which another beats, and how each was reached."""

    saved: np.ndarray
    seconds: np.ndarray
    step: np.ndarray
    """Number of the block in the list of blocks that end at the layer."""
    before: np.ndarray
    """Number of the pair at the beginning of the block."""


def _solve(parts: _Parts, budget: int, upper: bool) -> _Solution | None:
    """Return the fastest layout within a budget, or None.

    Args:
        parts: costs of the model's parts.
        budget: bytes.
        upper: round joined bytes up, so that the layout is within the budget; False: down, for a bound of the seconds.
    """
    count = parts.config.num_layers
    saved_first, peak_first, peak_head = parts.ends
    if peak_first + parts.gradients[0] > budget:
        return None
    fronts = [_Front(np.array([saved_first]), np.zeros(1), np.zeros(1, int), np.zeros(1, int))]
    endings: list[list[tuple[int, BlockCost]]] = [[]]
    for end in range(1, count + 1):
        blocks = [(end - size, cost) for size in LENGTHS if size <= end for cost in parts.options(end - size, size)]
        limits = [budget - cost.peak - parts.gradients[end] for _, cost in blocks]
        fronts.append(_joined(fronts, blocks, limits, budget / STEPS, upper))
        endings.append(blocks)
    fits = fronts[count].saved + peak_head <= budget
    if not fits.any():
        return None
    place = int(np.flatnonzero(fits)[np.argmin(fronts[count].seconds[fits])])
    seconds = float(fronts[count].seconds[place])
    chosen: list[RecomputeBlock] = []
    end = count
    while end:
        front = fronts[end]
        begin, cost = endings[end][front.step[place]]
        chosen.append(cost.block._replace(layers=tuple(range(begin, end))))
        place = int(front.before[place])
        end = begin
    return _Solution(chosen[::-1], seconds)


def _joined(
    fronts: list[_Front],
    blocks: Iterable[tuple[int, BlockCost]],
    limits: list[int],
    step: float,
    upper: bool,
) -> _Front:
    """Return the pairs that blocks reach from earlier layers.

    Args:
        fronts: pairs up to every earlier layer.
        blocks: first layer and costs of every block.
        limits: largest number of bytes saved before each block.
        step: bytes within which pairs are joined.
        upper: see _solve.
    """
    found = []
    for number, ((begin, cost), limit) in enumerate(zip(blocks, limits, strict=True)):
        front = fronts[begin]
        (allowed,) = np.nonzero(front.saved <= limit)
        found.append(
            (
                front.saved[allowed] + cost.saved,
                front.seconds[allowed] + cost.seconds,
                np.full(len(allowed), number),
                allowed,
            )
        )
    saved, seconds, steps, before = (np.concatenate(each) for each in zip(*found, strict=True))
    left = _undominated(saved, seconds)
    if len(left) > STEPS:
        rounded = np.ceil(saved / step) if upper else np.floor(saved / step)
        saved = (rounded * step).astype(np.int64)
        left = _undominated(saved, seconds)
    return _Front(saved[left], seconds[left], steps[left], before[left])


def _undominated(saved: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Return the numbers of the pairs that no other pair beats, in order of their bytes."""
    order = np.lexsort((seconds, saved))
    best = np.minimum.accumulate(seconds[order])
    return order[np.concatenate([[True], best[1:] < best[:-1]])] if len(order) else order
