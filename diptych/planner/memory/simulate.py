"""Simulation of the allocations of one forward and backward pass.

A value is allocated while an operation still to run in forward reads it, or while the graph saves it for backward. For
a recomputed region the graph saves the region's inputs instead. Its outputs are discarded once forward has read them.
The first operation of backward that needs one of its values replays it, after the regions that its inputs come from.
Values that move to the host are not allocated while they are there.
"""

import copy
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

from diptych.planner.memory.nodes import Layer, Node, Value
from diptych.planner.memory.offload import MovingValues
from diptych.plans.recompute import RecomputeBlock

Gradients = Literal["allocated", "added", "deferred", "deferred and added"]
"""Treatment of parameter gradients by backward: it allocates them; adds them to those of earlier microbatches; or W of
a split backward computes those of linear layers, and allocates or adds them."""
GENERATOR_STATE = 5056
"""Bytes of the state of PyTorch's CPU generator, which torch.utils.checkpoint saves in each of its calls."""
BEFORE = -1
"""Layer number of the operations before the layers."""
AFTER = -2
"""Layer number of the operations after the layers."""


@dataclass(eq=False)
class RecomputedRegion:
    """Operations that are replayed together."""

    nodes: list[Node] = field(default_factory=list)
    is_whole: bool = False
    """True for whole layers, which torch.utils.checkpoint recomputes."""
    is_replayed: bool = False

    def __post_init__(self) -> None:
        self.inputs: list[Value] = []
        self.outputs: list[Value] = []

    def close(self, reads: Mapping[int, int], keeps_output: bool) -> None:
        """Find inputs and outputs, once all operations are in.

        Args:
            reads: how often operations of the region and outside of it read or save a value, by its identity.
            keeps_output: True if the last written value is not discarded because it is the output of a block.
        """
        written = [value for node in self.nodes for value in node.writes]
        needed = {id(v): v for node in self.nodes for v in [*node.reads, *node.saves]}
        own = {id(v) for v in written}
        inside = _reads(self.nodes)
        self.inputs = [v for i, v in needed.items() if i not in own and not v.is_view]
        self.outputs = [v for v in written if reads[id(v)] > inside[id(v)]]
        if keeps_output and self.outputs:
            self.outputs = [v for v in self.outputs if v is not written[-1]]


class Simulation:
    """A simulation of operations, forward and backward, that counts allocated bytes.

    Args:
        length: tokens of a sequence, whose positions torch.utils.checkpoint saves.
        gradients: what backward does with the gradients of parameters.
        moving: values that move to the host; None: none.

    Attributes:
        held: bytes allocated now.
        peak: largest number of bytes allocated so far.
        forward_peak: largest number of bytes allocated in forward.
        backward_peak: largest number of bytes allocated in backward.
        before_weights: bytes allocated when backward has ended: gradients, and what waits for W.
        weights_peak: largest number of bytes allocated in W.
        waiting: bytes that wait for W when backward has ended.
        forward_peaks: largest number of bytes allocated in the forward of each layer, BEFORE them and AFTER them.
        backward_peaks: largest number of bytes allocated in the backward of each layer, BEFORE them and AFTER them.
        saved_by_name: bytes saved for backward on the device by name, after forward.
        moved: bytes of the saved values that move to the host, by layer.
        moved_by_name: bytes of the saved values that move to the host, by name.
        input_left_out: bytes of the first layer's input, if forward does not leave it on the device.
    """

    def __init__(self, length: int = 0, gradients: Gradients = "allocated", moving: MovingValues | None = None) -> None:
        self._position_bytes = 8 * length
        self._adds, self._defers = _treatment(gradients)
        self.held = 0
        self.peak = 0
        self.forward_peak = 0
        self.backward_peak = 0
        self.before_weights = 0
        self.weights_peak = 0
        self.waiting = 0
        self._deferred: list[tuple[Node, int]] = []
        self.saved_by_name: Counter[str] = Counter()
        self._present: dict[int, Value] = {}
        self._holders: Counter[int] = Counter()
        self._values: dict[int, Value] = {}
        self._region_of: dict[int, RecomputedRegion] = {}
        self._maker: dict[int, RecomputedRegion] = {}
        self._discarded: set[int] = set()
        self._moving = moving or MovingValues()
        self.moved: dict[int, int] = {}
        self.input_left_out = 0
        self.moved_by_name: Counter[str] = Counter()
        self._leaving: dict[int, list[Value]] = {}
        """Saved values that move to the host, by layer."""
        self.forward_peaks: Counter[int] = Counter()
        self.backward_peaks: Counter[int] = Counter()
        self._peaks = self.forward_peaks
        self._layer_of: dict[int, int] = {}
        """Layer of each operation, by identity."""
        self._layer = BEFORE
        """Layer of the current operation."""

    def run(
        self, first: list[Node], layers: dict[int, Layer], blocks: Iterable[RecomputeBlock], last: list[Node]
    ) -> None:
        """Simulate forward over all operations, then backward.

        Args:
            first: operations before the layers.
            layers: layers by global number.
            blocks: recompute blocks of the layers to run, in order.
            last: operations after the layers.
        """
        self._run_backward(self._run_forward(first, layers, blocks, last))

    def run_each(
        self,
        first: list[Node],
        layers: dict[int, Layer],
        blocks: Iterable[RecomputeBlock],
        last: list[Node],
        each: Iterable[Gradients],
    ) -> "dict[Gradients, Simulation]":
        """Simulate forward once, and backward with every treatment of parameter gradients.

        Args:
            first: see run.
            layers: see run.
            blocks: see run.
            last: see run.
            each: treatments of gradients.

        Returns:
            The simulations, as if each had been run alone.
        """
        nodes = self._run_forward(first, layers, blocks, last)
        found: dict[Gradients, Simulation] = {gradients: self._with(gradients) for gradients in each}
        for simulation in found.values():
            simulation._run_backward(nodes)
        return found

    def _with(self, gradients: Gradients) -> "Simulation":
        """Return a copy after forward whose backward treats gradients in another way."""
        other = copy.copy(self)
        other._adds, other._defers = _treatment(gradients)
        other._deferred = []
        other._present = dict(self._present)
        other._holders = Counter(self._holders)
        other._moving = copy.copy(self._moving)
        other._moving.on_host = set(self._moving.on_host)
        other.backward_peaks = Counter()
        return other

    def _run_forward(
        self, first: list[Node], layers: dict[int, Layer], blocks: Iterable[RecomputeBlock], last: list[Node]
    ) -> list[Node]:
        """Simulate forward, and return all operations; arguments as in run."""
        nodes = [*first]
        blocks = [*blocks]
        discards: dict[int, list[RecomputedRegion]] = {}
        if any(block.kind == "full" for block in blocks):
            positions = Value("positions", self._position_bytes)
            nodes.append(Node([], [positions], [positions]))
        for block in blocks:
            if block.kind == "full":
                state = Value("generator state", GENERATOR_STATE)
                nodes.append(Node([], [state], [state]))
                self._layer_of[id(nodes[-1])] = block.layers[0]
            self._plan(block, layers, nodes, discards, last)
        nodes += last
        self._layer_of.update((id(node), AFTER) for node in last)
        self._forward(nodes, discards)
        for value in self._present.values():
            self.saved_by_name[value.name] += value.size
        moved = {layer: [*filter(self._leaves, values)] for layer, values in self._moving.values().items()}
        self.moved = {layer: sum(value.size for value in values) for layer, values in moved.items()}
        for value in chain.from_iterable(moved.values()):
            self.moved_by_name[value.name] += value.size
        left = {id(value) for value in self._present.values()} - {id(v) for v in chain.from_iterable(moved.values())}
        self.input_left_out = sum(value.size for value in first[-1].writes if id(value) not in left) if first else 0
        self.forward_peak = self.peak
        self._leaving = moved
        return nodes

    def _run_backward(self, nodes: list[Node]) -> None:
        """Simulate backward over the operations of forward."""
        for region in self._region_of.values():
            region.is_replayed = False  # by the backward of another simulation of the same forward
        self._peaks = self.backward_peaks
        for layer, values in self._leaving.items():
            self._place(values, on_host=layer not in self._moving.returned)
        self.peak = self.held
        self._backward(nodes)
        self.backward_peak = self.peak
        self.before_weights = self.held
        if self._defers:
            self.peak = self.held
            self._weight_gradients()
            self.weights_peak = self.peak
            allocated = 0 if self._adds else sum(node.parameters for node, _ in self._deferred)
            self.waiting = self.before_weights + allocated - self.held
        self.peak = max(self.forward_peak, self.backward_peak, self.weights_peak)

    def _plan(
        self,
        block: RecomputeBlock,
        layers: dict[int, Layer],
        nodes: list[Node],
        discards: dict[int, list[RecomputedRegion]],
        last: list[Node],
    ) -> None:
        """Append a block's operations; record its regions, and the operations after which their outputs are freed."""
        start = len(nodes)
        regions = []
        ends = []
        for number in block.layers:
            ends += [len(nodes) + end for end in layers[number].sublayer_ends]
            for place, node in enumerate(layers[number].nodes):
                name = "all" if block.kind == "full" else next((r for r in node.region if r in block.dropped), None)
                if node.is_message:
                    nodes += [node] if name is not None else []
                    continue
                nodes.append(node)
                self._layer_of[id(node)] = number
                if name is not None:
                    key = (name, None if name == "all" else (number, _sublayer(layers[number], place), name))
                    if not regions or regions[-1][0] != key:
                        regions.append((key, RecomputedRegion(is_whole=name == "all")))
                    regions[-1][1].nodes.append(node)
                    self._region_of[id(node)] = regions[-1][1]
        # Outputs are discarded when the sublayer that reads them has ended.
        following = next((n for n in range(block.layers[-1] + 1, max(layers) + 1)), None)
        outside = last if following is None else layers[following].nodes
        reads = _reads([*nodes[start:], *outside])
        last_read = {id(v): i for i, node in enumerate(nodes) for v in [*node.reads, *node.saves]}
        for _, region in regions:
            region.close(reads, keeps_output=region.nodes[-1] is nodes[-1])
            if not region.is_whole:
                _pack_in_backward(region.outputs, nodes[start:])
            if not region.outputs and not any(node.saves for node in region.nodes):
                for node in region.nodes:  # nothing to discard: PyTorch does not recompute such a region
                    del self._region_of[id(node)]
                continue
            for value in (v for node in region.nodes for v in node.writes):
                self._maker[id(value)] = region
            if block.kind != "full":
                outputs = {id(value) for value in region.outputs}
                self._discarded |= outputs
                read = max((last_read.get(output, 0) for output in outputs), default=0)
                end = next((e for e in ends if e > read), len(nodes))
                discards.setdefault(end - 1, []).append(region)

    def _forward(self, nodes: list[Node], discards: dict[int, list[RecomputedRegion]]) -> None:
        """Simulate the allocations of forward."""
        last_read = {id(v): i for i, node in enumerate(nodes) for v in [*node.reads, *node.saves, *node.alive]}
        opened: set[int] = set()
        for index, node in enumerate(nodes):
            self._layer = self._layer_of.get(id(node), BEFORE)
            self._make(node)
            region = self._region_of.get(id(node))
            if region is None:
                self._hold(node.saves)
                self._moving.add(self._layer, self._not_discarded(node.saves))
            elif id(region) not in opened:
                opened.add(id(region))
                self._hold(region.inputs)
                self._moving.add(self._layer, self._not_discarded(region.inputs))
            for value in [*node.reads, *node.writes, *node.saves, *node.alive]:
                is_read = last_read.get(id(value), -1) > index
                is_held = self._holders[id(value)] > 0 and id(value) not in self._moving.on_host
                if not is_read and not is_held and value.name != "loss":
                    self._drop(value)
            for discarded in discards.get(index, []):
                for value in discarded.outputs:
                    self._drop(value)
            is_end = index + 1 == len(nodes) or self._layer_of.get(id(nodes[index + 1])) != self._layer
            if is_end and self._layer >= 0:
                for value in filter(self._leaves, self._moving.end_forward(self._layer)):
                    self._moving.on_host.add(id(value))
                    if last_read.get(id(value), -1) <= index:
                        self._drop(value)

    def _backward(self, nodes: list[Node]) -> None:
        """Simulate the allocations of backward, with replays of recomputed regions."""
        gradients: dict[int, int] = {}
        for node in reversed(nodes):
            layer = self._layer_of.get(id(node), BEFORE)
            if layer != self._layer:
                self._layer = layer
                self._fetch(self._moving.begin_backward(layer))
            region = self._region_of.get(id(node))
            if region is None:
                self._restore(node.saves)
            elif node.saves and not region.is_replayed:
                self._replay(region)
            is_deferred = self._defers and node.is_linear
            is_rounded = node.narrow_gradient > 0 and not is_deferred
            parameters = 0 if is_deferred else node.parameters
            self._allocate(0 if is_rounded else parameters)
            new = 0
            shared = _share(node, gradients)
            for value in {id(v): v for v in node.reads if id(v) not in shared}.values():
                new += value.size
                if id(value) not in gradients:
                    gradients[id(value)] = value.size
                    new -= value.size
                    self._allocate(value.size)
            self._allocate(node.backward_scratch + new)
            if is_deferred:
                self._own_shared(node, gradients)
            sizes = [gradients.pop(id(value), 0) for value in node.writes]
            if is_rounded:
                self._release(node.saves)
                self._free(node.backward_scratch - node.narrow_gradient + sum(sizes))
                self._allocate(parameters)
                self._free(node.narrow_gradient + new - sum(sizes))
            else:
                self._free(node.backward_scratch + new)
            if self._adds:
                self._free(parameters)
            if not is_rounded:
                self._release(node.saves[is_deferred:])  # W reads the first, the input of a linear layer
            if is_deferred:
                self._deferred.append((node, sum(sizes)))
            else:
                self._free(sum(sizes))
            if region is not None and node is region.nodes[0]:
                self._release(region.inputs)

    def _own_shared(self, node: Node, gradients: dict[int, int]) -> None:
        """Give the gradients of a linear layer's outputs their own memory, which W reads.

        If a residual has the same gradient, autograd adds the next one to it out of place, because W still holds it.
        """
        for value in node.writes:
            if gradients.get(id(value)) == 0:
                gradients[id(value)] = value.size
                self._allocate(value.size)

    def _weight_gradients(self) -> None:
        """Simulate W, which reads the inputs of linear layers and the gradients of their outputs."""
        for node, size in self._deferred:
            self._allocate(node.parameters)
            self._free(size + (node.parameters if self._adds else 0))
            self._release(node.saves[:1])

    def _replay(self, region: RecomputedRegion) -> None:
        """Replay a region: its discarded outputs are allocated again, and the inputs of its backward are saved."""
        for number in dict.fromkeys(self._layer_of[id(node)] for node in region.nodes):
            self._fetch(self._moving.fetch(number))
        self._restore(region.inputs)
        region.is_replayed = True
        nodes = region.nodes
        if region.is_whole:  # torch.utils.checkpoint stops before the last operation that saves a value
            nodes = nodes[: max(index for index, node in enumerate(nodes) if node.saves)]
        saved = {id(v) for node in region.nodes for v in node.saves}
        wanted = {id(v) for v in region.outputs if self._holders[id(v)]}
        last_read = {id(v): i for i, node in enumerate(region.nodes) for v in [*node.reads, *node.saves, *node.alive]}
        for index, node in enumerate(nodes):
            self._make(node)
            for value in [*node.reads, *node.writes, *node.saves, *node.alive]:
                is_own = self._maker.get(id(value)) is region and id(value) not in saved | wanted
                if is_own and last_read.get(id(value), -1) <= index:
                    self._drop(value)
        for value in (v for node in nodes for v in node.writes):
            if id(value) not in saved | wanted:
                self._drop(value)
        for node in region.nodes:
            self._hold(node.saves)

    def _restore(self, values: Iterable[Value]) -> None:
        for value in values:
            region = self._maker.get(id(value))
            if id(value) not in self._present and region is not None and not region.is_replayed:
                self._replay(region)

    def _place(self, values: Iterable[Value], on_host: bool) -> None:
        """Let values be on the host, or on the device, when backward begins."""
        for value in values:
            if on_host:
                self._moving.on_host.add(id(value))
                self._drop(value)
            elif id(value) in self._moving.on_host:
                self._moving.on_host.discard(id(value))
                self._fetch([value])

    def _fetch(self, values: Iterable[Value]) -> None:
        """Allocate values that are copied from the host, unless nothing needs them any more."""
        for value in values:
            if self._holders[id(value)] > 0 and id(value) not in self._present:
                self._present[id(value)] = value
                self._allocate(value.size)

    def _not_discarded(self, values: Iterable[Value]) -> list[Value]:
        """Return the values that no region discards."""
        return [value for value in values if id(value) not in self._discarded]

    def _leaves(self, value: Value) -> bool:
        """Return True if only moving layers save a value; a value that another operation saves stays on the device."""
        return self._holders[id(value)] == self._moving.holders[id(value)]

    def _make(self, node: Node) -> None:
        for value in node.writes:
            if id(value) not in self._present and not value.is_view:
                self._present[id(value)] = value
                self._allocate(value.size)
        self._allocate(node.forward_scratch)
        self._free(node.forward_scratch)

    def _hold(self, values: Iterable[Value]) -> None:
        for value in values:
            self._holders[id(value)] += 1

    def _release(self, values: Iterable[Value]) -> None:
        for value in values:
            self._holders[id(value)] -= 1
            if self._holders[id(value)] <= 0:
                self._drop(value)

    def _drop(self, value: Value) -> None:
        if self._present.pop(id(value), None) is not None:
            self._free(value.size)

    def _allocate(self, size: int) -> None:
        self.held += size
        self.peak = max(self.peak, self.held)
        self._peaks[self._layer] = max(self._peaks[self._layer], self.held)

    def _free(self, size: int) -> None:
        self.held -= size


def _treatment(gradients: Gradients) -> tuple[bool, bool]:
    """Return whether backward adds gradients to earlier ones, and whether W computes those of linear layers."""
    return gradients in ("added", "deferred and added"), gradients in ("deferred", "deferred and added")


def _share(node: Node, gradients: dict[int, int]) -> set[int]:
    """Let the inputs of a sum have the memory of its output's gradient, and return the identities of these inputs.

    Args:
        node: the operation.
        gradients: bytes of the gradients that exist, by identity of the value.
    """
    heir = node.heir
    if heir is None or id(heir) in gradients or id(node.writes[0]) not in gradients:
        return set()
    gradients[id(heir)] = gradients.pop(id(node.writes[0]))
    others = {id(value) for value in node.reads if value.size == heir.size and id(value) not in gradients}
    gradients.update(dict.fromkeys(others, 0))
    return {id(heir), *others}


def _pack_in_backward(dropped: Iterable[Value], nodes: Iterable[Node]) -> None:
    """Let operations whose input recompute drops save the input itself, which their backward packs and reads."""
    exact = {id(value) for value in dropped}
    for node in nodes:
        if node.is_packing and id(node.reads[0]) in exact:
            node.writes = []
            node.forward_scratch = 0
        if node.exact is not None and id(node.exact) in exact:
            node.saves = [node.exact, *node.saves[1:]]
            node.backward_scratch = node.packing_scratch


def _reads(nodes: Iterable[Node]) -> Counter[int]:
    """Return how often operations read or save a value, by its identity."""
    return Counter(id(value) for node in nodes for value in [*node.reads, *node.saves])


def _sublayer(layer: Layer, place: int) -> int:
    return sum(place >= end for end in layer.sublayer_ends)
