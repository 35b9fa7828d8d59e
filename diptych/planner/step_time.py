"""Predicted time of a training step on a machine of given rates: a roofline, operation by operation.

An operation takes as long as its products or as its reads and writes, whichever is longer. With ``impl="triton"``, an
operation that kernels run takes as long as their launches (diptych.planner.memory.kernel_work), each of which may also
be limited by its instructions. The times of a stage's F, I and W are sums over its operations; I includes everything
that is recomputed. The pipeline's schedule is then simulated with these times. Exchanges between context ranks are
assumed not to overlap with computation and add to F and I. With the pipelined exchange, each context rank is one layer
behind the rank before it (diptych.plans.schedule.wavefront). After the last backward come the sum of gradients over the
ranks of one stage, and the optimizer's update.

Saved values of a layer that move to the host are copied during the forward of the next layer, and come back during the
backward of that next layer. F and I wait for the rest of each copy.

Not modelled: launch overhead, contention of messages, fused kernels of compilers, and other load of the machine.
benchmarks/step_time.py compares the prediction with measured steps.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from diptych.planner.memory.kernel_work import KernelWork, Work
from diptych.planner.memory.nodes import Node
from diptych.planner.memory.offload import MovingValues
from diptych.planner.memory.ranks import shard_bytes
from diptych.planner.memory.simulate import Simulation
from diptych.planner.memory.stages import stage_builder
from diptych.planner.tensor_traffic import RingExchanges, block_exchanges, end_exchanges
from diptych.planner.traffic import layer_exchanges, message_bytes, wire_traffic
from diptych.plans.config import TransformerConfig
from diptych.plans.context.exchange import PIPELINED
from diptych.plans.model.layers import LayerConfig
from diptych.plans.recompute import RecomputeBlock, recompute_blocks
from diptych.plans.schedule.named import schedule_for
from diptych.plans.schedule.partition import get_stage_place, num_stages
from diptych.plans.schedule.simulate import Costs, simulate
from diptych.plans.schedule.simulate import Simulation as PipelineSimulation
from diptych.plans.schedule.wavefront import tokens_before
from diptych.plans.tensor_parallel import rank_config


@dataclass(frozen=True)
class Machine:
    """Rates of one rank's device and of its connections."""

    compute_rate: float = 300e12
    """Rate of matrix products, floating-point operations per second."""
    memory_bandwidth: float = 3e12
    """Bandwidth of the device's memory, bytes per second."""
    network_bandwidth: float = 50e9
    """Send bandwidth of one rank to others, bytes per second."""
    network_latency: float = 5e-6
    """Latency of a message, seconds."""
    link_bandwidth: float = 50e9
    """Bandwidth between host and device, bytes per second."""
    operation_latency: float = 0.0
    """Overhead of each operation beside its work, seconds."""
    instruction_rate: float = 250e9
    """Rate of the delta rule's kernels, warp instructions per second. On an H100 most of them reach 190e9 to 350e9."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            may_be_0 = name.endswith("latency")
            if not 0.0 <= value < float("inf") or (value == 0.0 and not may_be_0):
                least = "of at least" if may_be_0 else "above"
                raise ValueError(f"{name}: expected a finite number {least} 0, got {value}")

    def seconds(self, flops: float, moved: float) -> float:
        """Return the seconds of an operation with so many floating-point operations and bytes read and written."""
        return max(flops / self.compute_rate, moved / self.memory_bandwidth) + self.operation_latency

    def seconds_of_launches(self, launches: Sequence[Work]) -> float:
        """Return the seconds of the launches of kernels, one after the other."""
        return sum(
            max(
                self.seconds(work.flops, work.moved), work.instructions / self.instruction_rate + self.operation_latency
            )
            for work in launches
        )


class StageTime(NamedTuple):
    """Seconds of one microbatch on one stage."""

    forward: float
    input_gradient: float
    """Includes everything that is recomputed."""
    weight_gradient: float
    recomputed: float
    """Part of input_gradient that is recomputation."""
    exchanged: float
    """Part of forward and input_gradient that waits for exchanges between context or tensor-parallel ranks."""
    packed: float
    """Part of forward, input_gradient and weight_gradient in which values are packed in 8 bits and read again."""
    copied: float = 0.0
    """Part of forward and input_gradient that waits for copies of saved values to the host and back."""
    moved: int = 0
    """Bytes of saved values that move to the host."""


class StepTime(NamedTuple):
    """Predicted seconds of a step, by part."""

    total: float
    simulation: PipelineSimulation
    """Simulation of the pipeline, from the first forward to the last backward."""
    stages: tuple[StageTime, ...]
    gradients: float
    """Sum of gradients over the ranks of one stage, on the rank where it takes longest."""
    update: float
    """AdamW's update, on the rank where it takes longest."""


class StageTimes:
    """Times of a model's stages under any division and recompute settings.

    A stage consists of blocks of layers, embedding and head; equal parts are computed once.

    Args:
        machine: rates of the machine.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._found: dict[Hashable, StageTime] = {}
        self._blocks: dict[Hashable, tuple[StageTime, tuple[int, ...]]] = {}

    def of(self, config: TransformerConfig, batch: int, blocks: "StageBlocks | None" = None) -> tuple[StageTime, ...]:
        """Return the times of one microbatch on every stage.

        Args:
            config: the whole model, with its pipeline and context ranks.
            batch: sequences of a microbatch.
            blocks: blocks_of_stages(config), for callers that know it; None: it is computed.
        """
        stages = []
        blocks = blocks_of_stages(config) if blocks is None else blocks
        for stage, blocks_of_stage in enumerate(blocks):
            parts = self._with_copies(config, blocks_of_stage, batch)
            if stage == 0:
                parts.append(self._end(config, "embedding", batch))
            if stage == len(blocks) - 1:
                parts.append(self._end(config, "head", batch))
            stages.append(StageTime(*(sum(each) for each in zip((0.0,) * 7 + (0,), *parts, strict=True))))
        return tuple(stages)

    def costs(self, config: TransformerConfig, batch: int) -> Costs:
        """Return the times of every stage as diptych.plans.schedule.simulate takes them; arguments as in ``of``."""
        return costs_of(config, self.of(config, batch), batch, self.machine)

    def of_block(
        self, config: TransformerConfig, layer_settings: tuple[LayerConfig, ...], block: RecomputeBlock, batch: int
    ) -> StageTime:
        """Return the times of a recompute block's layers; equal blocks are computed once."""
        return self._block(config, layer_settings, block, batch)[0]

    def _block(
        self, config: TransformerConfig, layer_settings: tuple[LayerConfig, ...], block: RecomputeBlock, batch: int
    ) -> "tuple[StageTime, tuple[int, ...]]":
        """Return the times of a recompute block's layers, and the bytes of each layer that move to the host."""
        least = config.activation_offload_min_bytes
        how = config.cp_exchange, least, _in_kernels(config)
        key = layer_settings, block.kind, block.modules, batch, *how, *_sharing(config)
        if key not in self._blocks:
            builder = stage_builder(config, batch)
            layers = {}
            x = builder.hidden()
            for number in block.layers:
                layers[number], x = builder.layer(number, x)
            timed = _Timed(self.machine, _moving(config, layer_settings, block), _in_kernels(config))
            timed.run([], layers, [block], [])
            forward_wait, backward_wait = _exchanged(config, block, batch, self.machine)
            nodes = [node for layer in layers.values() for node in layer.nodes]
            inputs, weights = _gradient_times(nodes, self.machine, _in_kernels(config))
            packing = [_moved(node) for node in nodes if node.is_packing]
            unpacking = [2 * node.unpacked for node in nodes if node.unpacked]
            time = StageTime(
                timed.forward + forward_wait,
                inputs + timed.replayed + backward_wait,
                weights,
                timed.replayed,
                forward_wait + backward_wait,
                sum(self.machine.seconds(0, moved) for moved in (*packing, *unpacking)),
                moved=sum(timed.moved.values()),
            )
            self._blocks[key] = time, tuple(timed.moved.get(number, 0) for number in block.layers)
        return self._blocks[key]

    def copy_waits(self, config: TransformerConfig, moved: Any, following: tuple[Any, Any]) -> tuple[Any, Any]:
        """Return the seconds that forward and backward wait for copies of a layer's values to the host and back.

        Args:
            config: the model.
            moved: bytes of the values; a number or an array.
            following: seconds of the forward and of I of the next layer; numbers or arrays.
        """
        copy = moved / self.machine.link_bandwidth
        forward, backward = following
        hidden = backward * (config.tensor_offload_num_prefetch_layers > 0)
        return np.maximum(0.0, copy - forward), np.maximum(0.0, copy - hidden)

    def first_layer(
        self, config: TransformerConfig, layer_settings: tuple[LayerConfig, ...], block: RecomputeBlock, batch: int
    ) -> tuple[float, float]:
        """Return the seconds of F and I of the first layer of a block, without those of a replay of several layers."""
        if len(block.layers) > 1:
            layer_settings = layer_settings[:1]
            block = RecomputeBlock("none", block.layers[:1])
        return self.of_block(config, layer_settings, block, batch)[:2]

    def _with_copies(self, config: TransformerConfig, blocks: "BlocksOfStage", batch: int) -> list[StageTime]:
        """Return the times of a stage's blocks, with the waits for copies of saved values."""
        parts = []
        left = sum(len(block.layers) for _, block in blocks)
        left -= config.tensor_offload_num_prefetch_layers + 1  # the last groups before backward do not move
        for place, each in enumerate(blocks):
            time, sizes = self._block(config, *each, batch)
            moved = sizes[: max(0, left)]
            left -= len(sizes)
            if any(moved):
                own, following = (self.first_layer(config, *block, batch) for block in blocks[place : place + 2])
                nexts = [own] * (len(sizes) - 1) + [following]
                waits = [self.copy_waits(config, one, then) for one, then in zip(moved, nexts, strict=False)]
                ahead, back = (float(sum(waited)) for waited in zip(*waits, strict=True))
                time = time._replace(
                    forward=time.forward + ahead, input_gradient=time.input_gradient + back, copied=ahead + back
                )
            parts.append(time._replace(moved=sum(moved)))
        return parts

    def _end(self, config: TransformerConfig, name: str, batch: int) -> StageTime:
        key = name, batch, _in_kernels(config), *_sharing(config)
        if key not in self._found:
            builder = stage_builder(config, batch)
            nodes = builder.embedding()[0] if name == "embedding" else builder.head(builder.hidden())
            forward = sum(_forward_time(node, self.machine, _in_kernels(config)) for node in nodes)
            inputs, weights = _gradient_times(nodes, self.machine, _in_kernels(config))
            ahead, back = _waits(end_exchanges(config, name, batch), self.machine)
            self._found[key] = StageTime(forward + ahead, inputs + back, weights, 0.0, ahead + back, 0.0)
        return self._found[key]


BlocksOfStage: TypeAlias = tuple[tuple[tuple[LayerConfig, ...], RecomputeBlock], ...]
"""The recompute blocks of a stage, each with the settings of its layers."""
StageBlocks: TypeAlias = tuple[BlocksOfStage, ...]
"""The recompute blocks of every stage."""


def blocks_of_stages(config: TransformerConfig) -> StageBlocks:
    """Return the recompute blocks of every stage; they depend on the pipeline and the recompute settings."""
    settings = [config.layer(number) for number in range(config.num_layers)]
    return tuple(
        tuple(
            (tuple(settings[number] for number in block.layers), block)
            for block in recompute_blocks(config, *get_stage_place(config, stage))
        )
        for stage in range(num_stages(config))
    )


def _moving(config: TransformerConfig, settings: Sequence[LayerConfig], block: RecomputeBlock) -> MovingValues:
    """Return the groups of a block's layers that move; the settings are in the cache's key, their numbers are not."""
    moved = {number: layer.offload for number, layer in zip(block.layers, settings, strict=True) if layer.offload}
    return MovingValues(moved if block.kind != "full" else {}, config.activation_offload_min_bytes)


def _sharing(config: TransformerConfig) -> tuple[Hashable, ...]:
    """Return the settings by which ranks share tokens and layers."""
    return config.context_parallel_size, config.tensor_model_parallel_size, config.sequence_parallel


def _waits(exchanges: RingExchanges, machine: Machine) -> tuple[float, float]:
    """Return the seconds of exchanges in rings, forward and backward."""
    return (
        exchanges.forward / machine.network_bandwidth + exchanges.rounds_forward * machine.network_latency,
        exchanges.backward / machine.network_bandwidth + exchanges.rounds_backward * machine.network_latency,
    )


def costs_of(config: TransformerConfig, stages: Sequence[StageTime], batch: int, machine: Machine) -> Costs:
    """Return the costs of stages and messages for diptych.plans.schedule.simulate."""
    wire = message_bytes(config, batch) / machine.network_bandwidth + machine.network_latency
    return Costs(
        [stage.forward for stage in stages],
        [stage.input_gradient for stage in stages],
        [stage.weight_gradient for stage in stages],
        wire if config.pipeline_model_parallel_size > 1 else 0.0,
    )


def step_time(
    config: TransformerConfig,
    micro_batch_size: int,
    num_microbatches: int,
    data_parallel_size: int = 1,
    machine: Machine | None = None,
) -> StepTime:
    """Predict the time of a training step.

    Args:
        config: the model, with its pipeline and context ranks.
        micro_batch_size: sequences of a microbatch.
        num_microbatches: microbatches of a step on each replica.
        data_parallel_size: replicas.
        machine: rates of the machine; None: the defaults of Machine.

    Raises:
        ValueError: the schedule does not allow so many microbatches.
    """
    machine = machine or Machine()
    stages = StageTimes(machine).of(config, micro_batch_size)
    schedule = schedule_for(config, num_microbatches)
    simulation = simulate(schedule, costs_of(config, stages, micro_batch_size, machine))
    waits = wavefront_delay(config, micro_batch_size, stages, machine)
    simulation = replace(simulation, makespan=simulation.makespan + waits)
    gradients, update = after_backward(config, micro_batch_size, num_microbatches, data_parallel_size, machine)
    return StepTime(simulation.makespan + gradients + update, simulation, stages, gradients, update)


def wavefront_delay(config: TransformerConfig, batch: int, stages: Sequence[StageTime], machine: Machine) -> float:
    """Return the seconds that the pipelined exchange adds to a step because the last rank starts after the first.

    It is the delay along the longest row of context ranks that share a sequence, forward and backward; 0 with any other
    exchange. See diptych.plans.schedule.wavefront.
    """
    size = config.context_parallel_size
    if config.cp_exchange != PIPELINED or size == 1:
        return 0.0
    (stage,) = stages
    layer = (stage.forward + stage.input_gradient + stage.weight_gradient) / config.num_layers
    before = tokens_before(size, batch * config.seq_length // size, config.seq_length)
    longest = max(len(row) for row in "".join("01"[tokens > 0] for tokens in before).split("0"))
    return longest * (layer + 2 * machine.network_latency)


def after_backward(
    config: TransformerConfig, batch: int, count: int, replicas: int, machine: Machine
) -> tuple[float, float]:
    """Return the seconds of the gradient sum and of the update, each on the rank where it takes longest."""
    named = (
        *("gradients of parameters", "updated parameters"),
        *("gradient of tied embedding", "gradients of repeated parameters"),
    )
    sums = [term for term in wire_traffic(config, batch, count, replicas) if term.name in named]
    sent = max((sum(each) for each in zip(*(t.by_rank for t in sums), strict=True)), default=0)
    rounds = 2 * (config.context_parallel_size * replicas - 1)
    waits = sent / machine.network_bandwidth + rounds * machine.network_latency * (sent > 0)
    own = [0] * config.pipeline_model_parallel_size
    updated = config.context_parallel_size * replicas if config.use_distributed_optimizer else 1
    for stage in range(num_stages(config)):
        own[get_stage_place(config, stage).pp_rank] += shard_bytes(config, stage, updated)
    return waits, UPDATE_MOVES * max(own) / machine.memory_bandwidth


UPDATE_MOVES = 8
"""Bytes that AdamW and the gradients' norm move, in sizes of the parameters: gradients are read twice, parameters and
both moments are read and written."""


def _exchanged(config: TransformerConfig, block: RecomputeBlock, batch: int, machine: Machine) -> tuple[float, float]:
    """Return the seconds that context and tensor-parallel ranks spend on exchanges, forward and backward."""
    forward, backward = _waits(block_exchanges(config, block, batch), machine)
    if config.context_parallel_size == 1:
        return forward, backward
    replayed = block.kind == "full", block.kind == "full" or "core_attn" in block.modules
    for number in block.layers:
        for exchange in layer_exchanges(rank_config(config), number, batch, *replayed):
            once = exchange.hops * exchange.one / machine.network_bandwidth + exchange.rounds * machine.network_latency
            ahead = 0 if exchange.name.startswith("gradients of") else 1
            forward += once * ahead
            backward += once * (exchange.times - ahead)
    return forward, backward


def _in_kernels(config: TransformerConfig) -> bool:
    """Return whether kernels run operations; impl="auto" is predicted as the reference."""
    return config.impl == "triton"


def _kernels(node: Node, in_kernels: bool) -> KernelWork | None:
    """Return the launches that run an operation; None if the framework runs it."""
    return node.kernels if in_kernels else None


def _moved(node: Node) -> int:
    return sum(value.size for value in [*node.reads, *node.writes] if not value.is_view)


def _forward_time(node: Node, machine: Machine, in_kernels: bool) -> float:
    """Return the seconds of an operation's forward."""
    kernels = _kernels(node, in_kernels)
    if kernels is not None:
        return machine.seconds_of_launches(kernels.forward)
    return machine.seconds(node.flops, _moved(node) + node.inner_moved[0])


def _gradient_times(nodes: Sequence[Node], machine: Machine, in_kernels: bool) -> tuple[float, float]:
    """Return the seconds of the operations' I and W."""
    inputs = 0.0
    weights = 0.0
    for node in nodes:
        saved = sum(value.size for value in node.saves) + 2 * node.unpacked
        gradients = _moved(node)
        kernels = _kernels(node, in_kernels)
        if kernels is not None:
            inputs += machine.seconds_of_launches(kernels.backward)
            inputs += machine.seconds(0, 2 * node.unpacked) if node.unpacked else 0.0
        elif node.is_linear:  # one product for the input's gradient, one for the weight's
            inputs += machine.seconds(node.flops, gradients + node.parameters)
            weights += machine.seconds(node.flops, saved + gradients // 2 + node.parameters)
        else:
            moved = saved + gradients + node.parameters + node.inner_moved[1]
            inputs += machine.seconds(2 * node.flops + node.recomputed_flops, moved)
    return inputs, weights


class _Timed(Simulation):
    """A memory simulation that also sums up the time of forward and of recomputation in backward."""

    def __init__(self, machine: Machine, moving: MovingValues, in_kernels: bool) -> None:
        super().__init__(moving=moving)
        self._machine = machine
        self._in_kernels = in_kernels
        self._is_backward = False
        self.forward = 0.0
        self.replayed = 0.0

    def _backward(self, nodes: list[Node]) -> None:
        self._is_backward = True
        super()._backward(nodes)

    def _make(self, node: Node) -> None:
        super()._make(node)
        seconds = _forward_time(node, self._machine, self._in_kernels)
        if self._is_backward:
            self.replayed += seconds
        else:
            self.forward += seconds
