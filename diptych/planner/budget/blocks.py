"""Memory and time of the parts of a stage: its blocks of layers, and what comes before and after them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from diptych.planner.memory.nodes import Layer, Node
from diptych.planner.memory.simulate import Gradients, Simulation
from diptych.planner.memory.stages import stage_builder
from diptych.planner.step_time import StageTimes
from diptych.plans.config import TransformerConfig
from diptych.plans.recompute import RecomputeBlock
from diptych.plans.schedule.partition import get_stage_place, get_transformer_layer_offset, layers_by_stage, num_stages

LENGTHS = (1, 2, 3, 4, 6, 8)
"""Layers of a block that is recomputed together."""
SIMULATED: dict[str, Gradients] = {
    "F": "allocated",
    "B": "allocated",
    "B added": "added",
    "I": "deferred",
    "I added": "deferred and added",
}
"""What backward does with the gradients of parameters in each kind of action; ``added``: to those of earlier ones."""


class BlockCost(NamedTuple):
    """Memory and time of a block."""

    block: RecomputeBlock
    """The recompute of its layers, or of equal ones."""
    saved: int
    """Bytes saved for backward, with the block's input."""
    peaks: tuple[int, ...]
    """Largest number of bytes of the block in each kind of action, with what the action leaves of the block."""
    seconds: float
    """Seconds of recomputation, and of packing in 8 bits and reading again."""
    is_stored: bool = False
    """True if the layers save values in 8 bits."""


class EndCost(NamedTuple):
    """Memory of what a stage runs before its layers, or after them."""

    saved: int
    """Bytes saved for backward."""
    peaks: tuple[int, ...]
    """Largest number of bytes in each kind of action."""


class StageParts:
    """Costs of the parts of a stage; equal blocks are simulated once.

    Args:
        config: the whole model without recompute, with its pipeline.
        stage: global number of the stage.
        batch: sequences of a microbatch.
        times: times of the machine.
        kinds: kinds of the actions of the stage (keys of SIMULATED).
        found: blocks that are known, by their layers; stages with equal kinds share it.
        lets_wait_in_8_bits: count what later layers let wait for W as if all saved their values in 8 bits, where that
            is free to choose; for a bound.

    Layers may save their values in 8 bits if the model has activation_storage; those in activation_storage_layers do.
    """

    def __init__(
        self,
        config: TransformerConfig,
        stage: int,
        batch: int,
        times: StageTimes,
        kinds: Sequence[str],
        found: dict[object, list[BlockCost]],
        lets_wait_in_8_bits: bool = False,
    ) -> None:
        self.config = config
        self._configs = storage_choices(config)
        self._usual = self._configs[-1 if lets_wait_in_8_bits else 0]
        self.kinds = tuple(kinds)
        self._batch = batch
        self._times = times
        self._found = found
        self._is_first = stage == 0
        self._is_last = stage == num_stages(config) - 1
        first = get_transformer_layer_offset(config, *get_stage_place(config, stage))
        self.layers = range(first, first + layers_by_stage(config)[stage])
        self._settings = {number: config.layer(number) for number in self.layers}
        last = self._simulate_last()
        self.first_end = self._first_end()
        """The embedding, or the input of a later stage, which its first block saves."""
        self.last_end = EndCost(sum(last["allocated"].saved_by_name.values()), self._peaks(last))
        """The head, or the output of an earlier stage."""
        self.after = self._bytes_after(last)
        """Bytes that each kind of action has left of the layers from one on, and of what comes after them.

        They are gradients of parameters, and what waits for W. The first entry is for all layers, the last for none.
        """

    def options(self, first: int, size: int) -> list[BlockCost]:
        """Return the costs of blocks of ``size`` layers from a layer on, none of which another beats in everything."""
        key = tuple(self._settings[number] for number in range(first, first + size))
        if key not in self._found:
            blocks = [*self._choices(range(first, first + size))]
            costs = [self.cost(block, config) for config in self._configs for block in blocks]
            self._found[key] = [cost for cost in costs if not any(_beats(other, cost) for other in costs)]
        return self._found[key]

    def _choices(self, layers: range) -> Iterator[RecomputeBlock]:
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

    def cost(self, block: RecomputeBlock, config: TransformerConfig) -> BlockCost:
        """Return the cost of a block of a model, simulated alone."""
        simulations = self._simulate_block(block, config)
        settings = tuple(config.layer(number) for number in block.layers)
        times = self._times.of_block(config, settings, block, self._batch)
        saved = sum(simulations["allocated"].saved_by_name.values())
        is_stored = all(layer.storage is not None for layer in settings)
        return BlockCost(block, saved, self._peaks(simulations), times.recomputed + times.packed, is_stored)

    def _simulate_block(self, block: RecomputeBlock, config: TransformerConfig) -> dict[Gradients, Simulation]:
        found = {}
        for gradients in self._gradients:
            builder = stage_builder(config, self._batch)
            x = builder.hidden()
            begin = [Node([], [x])]
            layers = {}
            for number in block.layers:
                layers[number], x = builder.layer(number, x)
            found[gradients] = _run(begin, layers, [block], [Node([x], [])], gradients)
        return found

    @property
    def _gradients(self) -> list[Gradients]:
        found: dict[Gradients, None] = {"allocated": None}
        found.update((SIMULATED[kind], None) for kind in self.kinds)
        return [*found]

    def _peaks(self, simulations: dict[Gradients, Simulation]) -> tuple[int, ...]:
        """Return the peak in each kind of action."""
        return tuple(
            simulations["allocated"].forward_peak if kind == "F" else simulations[SIMULATED[kind]].backward_peak
            for kind in self.kinds
        )

    def _bytes_after(self, last: dict[Gradients, Simulation]) -> list[tuple[int, ...]]:
        """Return ``after``, from the simulations of what comes after the layers."""
        sizes = [self._left(last)]
        for number in reversed(self.layers):
            left = self._left(self._simulate_block(RecomputeBlock("none", (number,)), self._usual))
            sizes.append(tuple(a + b for a, b in zip(sizes[-1], left, strict=True)))
        return sizes[::-1]

    def _left(self, simulations: dict[Gradients, Simulation]) -> tuple[int, ...]:
        """Return the bytes that each kind of action leaves."""
        return tuple(0 if kind == "F" else simulations[SIMULATED[kind]].before_weights for kind in self.kinds)

    def _first_end(self) -> EndCost:
        """Return what the stage runs before its layers."""
        found = {}
        for gradients in self._gradients:
            builder = stage_builder(self.config, self._batch)
            if self._is_first:
                nodes, x = builder.embedding()
                found[gradients] = _run(nodes, {}, [], [Node([x], [])], gradients)
            else:
                found[gradients] = _run(builder.dropout_rows(), {}, [], [], gradients)
        return EndCost(sum(found["allocated"].saved_by_name.values()), self._peaks(found))

    def _simulate_last(self) -> dict[Gradients, Simulation]:
        """Simulate what the stage runs after its layers."""
        found = {}
        for gradients in self._gradients:
            builder = stage_builder(self.config, self._batch)
            y = builder.hidden()
            sent = Node([y], [], [] if self.config.deallocate_pipeline_outputs else [y])
            end = builder.head(y) if self._is_last else [sent]
            found[gradients] = _run([Node([], [y])], {}, [], end, gradients)
        return found


def storage_choices(config: TransformerConfig) -> list[TransformerConfig]:
    """Return the models that differ in how all layers save values, of which each layer may be taken."""
    if config.activation_storage is None or config.activation_storage_layers is not None:
        return [config]
    return [replace(config, activation_storage=None), config]


def _run(
    first: list[Node],
    layers: dict[int, Layer],
    blocks: list[RecomputeBlock],
    last: list[Node],
    gradients: Gradients,
) -> Simulation:
    """Simulate operations; without the positions, which the whole model has once."""
    simulation = Simulation(gradients=gradients)
    simulation.run(first, layers, blocks, last)
    return simulation


def _beats(other: BlockCost, cost: BlockCost) -> bool:
    """Return True if another block is at least as good in everything and better in something."""
    pairs = [(other.saved, cost.saved), (other.seconds, cost.seconds), *zip(other.peaks, cost.peaks, strict=True)]
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)
