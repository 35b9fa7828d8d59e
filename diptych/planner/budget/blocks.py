"""Memory and time of the parts of a stage: its blocks of layers, and what comes before and after them."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import product
from typing import NamedTuple

import numpy as np

from diptych.planner.memory.nodes import Node
from diptych.planner.memory.offload import MovingValues, values_that_move
from diptych.planner.memory.simulate import Gradients, Simulation
from diptych.planner.memory.stages import stage_builder
from diptych.planner.step_time import StageTimes
from diptych.plans.config import TransformerConfig
from diptych.plans.model.layers import Offloaded
from diptych.plans.model.values import VALUES
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
"""Treatment of parameter gradients by each kind of action; ``added``: to the gradients of earlier microbatches."""


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
    moved: int = 0
    """Bytes of saved values that move to the host; ``saved`` does not count them, ``peaks`` do."""
    begin_peaks: tuple[int, ...] | None = None
    """Like ``peaks``, in the forward or backward of the block's first layer, during which values of the layer before
    the block are on the device; None: ``peaks``."""
    begin_seconds: tuple[float, float] = (0.0, 0.0)
    """Seconds of the forward and of I of the block's first layer, behind which copies of these values are hidden."""
    offloaded: Offloaded | None = None
    """Values that move to the host; None: none."""
    held: int = 0
    """Bytes of the embedded tokens, if the model's first block does not leave them on the device: a variable holds them
    during the forward of the other layers."""


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
        lets_wait_in_8_bits: count the values of later layers that wait for W in 8 bits, if layers may choose their
            storage. This gives a bound.

    Layers may save their values in 8 bits if the model has activation_storage; those in activation_storage_layers do.
    Likewise, the values of a layer may move to the host with enable_activation_offload, if the layer is a block of its
    own, is not recomputed whole, and is not one of the stage's last layers, whose values may be needed next. Either all
    its values move, or those whose copies are hidden behind the next layer; see _hidden_values.
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
        self._configs = [each for stored in storage_choices(config) for each in offload_choices(stored)]
        self._usual = storage_choices(config)[-1 if lets_wait_in_8_bits else 0]
        self.kinds = tuple(kinds)
        self._batch = batch
        self._times = times
        self._found = found
        self._is_first = stage == 0
        self._is_last = stage == num_stages(config) - 1
        first = get_transformer_layer_offset(config, *get_stage_place(config, stage))
        self.layers = range(first, first + layers_by_stage(config)[stage])
        self._settings = {number: config.layer(number) for number in self.layers}
        self._staying = self.layers[-config.tensor_offload_num_prefetch_layers - 1 :]
        """Layers whose values do not move; see diptych.planner.memory.offload."""
        self._message_copied = 0 if self._is_first or not self.layers else self._copied_of_message()
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
        """Return the costs of blocks of ``size`` layers from a layer on, without those that another beats."""
        layers = range(first, first + size)
        ends = first in self._staying, first == self.layers.start, self._is_first
        key = (*(self._settings[number] for number in layers), *ends)
        if key not in self._found:
            blocks = [*self._choices(layers)]
            possible = [cost for config in self._configs for block in blocks for cost in self._costs(block, config)]
            self._found[key] = [cost for cost in possible if not any(self._beats(other, cost) for other in possible)]
        return self._found[key]

    def _beats(self, other: BlockCost, cost: BlockCost) -> bool:
        """Return True if another block is at least as good in everything, whatever comes next, and better in something.

        A block whose values move makes the step wait at least as long as if the slowest layer came next.
        """
        pairs: list[tuple[float, float]] = [(other.saved, cost.saved), *zip(other.peaks, cost.peaks, strict=True)]
        pairs.append((other.held, cost.held))
        pairs += zip(other.begin_peaks or other.peaks, cost.begin_peaks or cost.peaks, strict=True)
        if other.moved or not cost.moved:
            pairs += [(other.moved, cost.moved), (other.seconds, cost.seconds)]
        else:
            pairs.append((other.seconds, cost.seconds + float(self.least_wait(np.array(cost.moved)))))
        return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)

    def _reads_message(self, layers: Sequence[int]) -> bool:
        """Return True if a block of layers reads the message to the stage."""
        return layers[0] == self.layers.start and not self._is_first

    def _embeds(self, block: RecomputeBlock) -> bool:
        """Return True if a block reads the embedded tokens, not streams that are made of them."""
        is_first = self._is_first and block.layers[0] == self.layers.start
        return is_first and not self.config.enable_hyper_connections

    def _copied_of_message(self) -> int:
        """Return the bytes of the message to the stage if it is copied to the host with the first layer's values."""
        number = self.layers.start
        block = RecomputeBlock("none", (number,))
        moving = self._values_that_move(block, self.config)
        if not moving:
            return 0
        copied = self._times.of_block(self.config, (self._settings[number],), block, self._batch).moved
        return copied - sum(self._simulate_block(block, self.config, moving)["allocated"].moved.values())

    @cached_property
    def _slowest_layer(self) -> tuple[float, float]:
        """The most seconds of the forward and of I, with recomputation, of any layer of the model."""
        times = [
            self._times.of_block(config, (config.layer(number),), RecomputeBlock("full", (number,)), self._batch)
            for config in storage_choices(self.config)
            for number in range(config.num_layers)
        ]
        return max(each.forward for each in times), max(each.input_gradient for each in times)

    def copy_waits(self, moved: np.ndarray, place: int, begin_seconds: np.ndarray) -> np.ndarray:
        """Return the seconds that a step waits for copies of a layer's values to the host and back.

        Args:
            moved: bytes of the values, without the message to the stage, which also stays on the device.
            place: place of the next block, in layers of the stage.
            begin_seconds: BlockCost.begin_seconds of the next block. [2, ...]
        """
        moved = moved + (self._message_copied if place == 1 else 0)
        forward, backward = begin_seconds
        ahead, back = self._times.copy_waits(self.config, moved, (forward, backward))
        return ahead + back

    def least_wait(self, moved: np.ndarray) -> np.ndarray:
        """Return the least seconds for which any block waits for copies of values of the layer before it."""
        ahead, back = self._times.copy_waits(self.config, moved, self._slowest_layer)
        return ahead + back

    def copied_beside(self, moved: np.ndarray) -> np.ndarray:
        """Return the bytes of a layer's values that are on the device beside the next layer, in each kind of action."""
        prefetches = self.config.tensor_offload_num_prefetch_layers > 0
        return np.stack([moved if kind == "F" or prefetches else np.zeros_like(moved) for kind in self.kinds])

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

    def _costs(self, block: RecomputeBlock, config: TransformerConfig) -> Iterator[BlockCost]:
        """Yield the costs of a block, one for each way to offload its values that is considered."""
        moved = self._values_that_move(block, config)
        if moved and len(block.layers) > 1:
            return
        simulations = self._simulate_block(block, config, moved)
        yield self._cost(block, config, moved, simulations)
        if moved and self.config.activation_offload_layers is None:
            for names in sorted(self._hidden_values(block, simulations["allocated"].moved_by_name), key=sorted):
                some: dict[int, Offloaded] = dict.fromkeys(moved, names)
                yield self._cost(block, config, some, self._simulate_block(block, config, some))

    def _hidden_values(self, block: RecomputeBlock, sizes: Counter[str]) -> set[frozenset[str]]:
        """Return the names of the values of a layer with the most bytes that are copied during the next layer.

        There is one choice for each kind of next layer, because the copy to the host has the time of its forward, and
        the copy back that of its backward. A layer that reads the message to the stage has none: its copy takes time
        although the message stays on the device.

        Args:
            block: the layer.
            sizes: bytes of the values that move if all do, by name.
        """
        found: set[frozenset[str]] = set()
        if self._reads_message(block.layers):
            return found
        names = [name for name in VALUES if sizes[name]]
        choices = (np.arange(2 ** len(names))[:, None] >> np.arange(len(names))) % 2
        sums = choices @ np.array([sizes[name] for name in names], dtype=np.int64)
        for most in self._hidden_bytes:
            chosen = choices[np.argmax(np.where(sums <= most, sums, -1))]
            if most < sizes.total() and chosen.any():
                found.add(frozenset(name for name, is_chosen in zip(names, chosen, strict=True) if is_chosen))
        return found

    @cached_property
    def _hidden_bytes(self) -> list[int]:
        """Bytes that can be copied to the host and back while a layer runs, for every kind of layer."""
        if not self.config.tensor_offload_num_prefetch_layers:
            return []
        link = self._times.machine.link_bandwidth
        found = set()
        for number in range(self.config.num_layers):
            block = RecomputeBlock("none", (number,))
            times = self._times.first_layer(self.config, (self.config.layer(number),), block, self._batch)
            found.add(int(min(times) * link))
        return sorted(found)

    def _values_that_move(self, block: RecomputeBlock, config: TransformerConfig) -> dict[int, Offloaded]:
        """Return the values of each layer of a block that move, without those of the stage's last layers."""
        moved = values_that_move(config, block.layers, [block])
        return {number: values for number, values in moved.items() if number not in self._staying}

    def cost(self, block: RecomputeBlock, config: TransformerConfig) -> BlockCost:
        """Return the cost of a block, simulated alone."""
        moved = self._values_that_move(block, config)
        return self._cost(block, config, moved, self._simulate_block(block, config, moved))

    def _cost(
        self,
        block: RecomputeBlock,
        config: TransformerConfig,
        moved: Mapping[int, Offloaded],
        simulations: dict[Gradients, Simulation],
    ) -> BlockCost:
        """Return the cost of a block.

        Args:
            block: the block.
            config: the model.
            moved: the values of each layer that move.
            simulations: result of _simulate_block.
        """
        settings = tuple(config.layer(number) for number in block.layers)
        times = self._times.of_block(config, settings, block, self._batch)
        first = simulations["allocated"]
        moved_bytes = sum(first.moved.values())
        return BlockCost(
            block,
            sum(first.saved_by_name.values()) - moved_bytes,
            self._peaks(simulations),
            times.recomputed + times.packed,
            all(layer.storage is not None for layer in settings),
            moved_bytes,
            self._peaks(simulations, min(block.layers)),
            self._times.first_layer(config, settings, block, self._batch),
            moved[block.layers[0]] if moved_bytes else None,
            first.input_left_out if self._embeds(block) else 0,
        )

    def _simulate_block(
        self, block: RecomputeBlock, config: TransformerConfig, moved: Mapping[int, Offloaded] | None = None
    ) -> dict[Gradients, Simulation]:
        builder = stage_builder(config, self._batch)
        x = builder.hidden()
        begin = [Node([], [x], [x] if self._reads_message(block.layers) else [])]  # it stays for its gradient
        layers = {}
        for number in block.layers:
            layers[number], x = builder.layer(number, x)
        simulation = Simulation(moving=MovingValues(moved, config.activation_offload_min_bytes))
        return simulation.run_each(begin, layers, [block], [Node([x], [])], self._gradients)

    @property
    def _gradients(self) -> list[Gradients]:
        found: dict[Gradients, None] = {"allocated": None}
        found.update((SIMULATED[kind], None) for kind in self.kinds)
        return [*found]

    def _peaks(self, simulations: dict[Gradients, Simulation], layer: int | None = None) -> tuple[int, ...]:
        """Return the peak in each kind of action; with ``layer``, only during the pass of that layer."""

        def forward(simulation: Simulation) -> int:
            return simulation.forward_peak if layer is None else simulation.forward_peaks[layer]

        def backward(simulation: Simulation) -> int:
            return simulation.backward_peak if layer is None else simulation.backward_peaks[layer]

        return tuple(
            forward(simulations["allocated"]) if kind == "F" else backward(simulations[SIMULATED[kind]])
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
        builder = stage_builder(self.config, self._batch)
        if self._is_first:
            nodes, x = builder.embedding()
            last = [Node([x], [])]
        else:
            nodes = builder.dropout_rows()
            last = []
        found = Simulation().run_each(nodes, {}, [], last, self._gradients)
        return EndCost(sum(found["allocated"].saved_by_name.values()), self._peaks(found))

    def _simulate_last(self) -> dict[Gradients, Simulation]:
        """Simulate what the stage runs after its layers."""
        builder = stage_builder(self.config, self._batch)
        y = builder.hidden()
        sent = Node([y], [], [] if self.config.deallocate_pipeline_outputs else [y])
        end = builder.head(y) if self._is_last else [sent]
        return Simulation().run_each([Node([], [y])], {}, [], end, self._gradients)


def storage_choices(config: TransformerConfig) -> list[TransformerConfig]:
    """Return the models, one for each way to save values; each layer may be as in any of them."""
    if config.activation_storage is None or config.activation_storage_layers is not None:
        return [config]
    return [replace(config, activation_storage=None), config]


def offload_choices(config: TransformerConfig) -> list[TransformerConfig]:
    """Return the models without and with moves of saved values, where open; each layer may be as in any of them."""
    if not config.enable_activation_offload or config.activation_offload_layers is not None:
        return [config]
    return [replace(config, enable_activation_offload=False), config]
