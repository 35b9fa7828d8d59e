"""How long a training step takes on a machine of given rates: a roofline, operation by operation, before anything runs.

An operation takes as long as its products or as what it reads and writes, whichever is longer. A stage's F, I and W are
sums of that over its operations, I with everything that recomputing runs again; the pipeline's table is then simulated
with them. What ranks that share sequences exchange is not hidden and comes on top of F and I; pipelined, the last is
behind the first by a layer a rank (diptych.plans.schedule.wavefront). After the last backward
come the sum of gradients over the ranks that hold the same stage, and the update.

Left out: launching operations, messages that wait for one another on a wire, kernels that read less than single
operations do, and whatever the machine does besides. Beside measured steps: benchmarks/step_time.py.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from diptych.planner.memory.nodes import Node
from diptych.planner.memory.ranks import parameter_bytes
from diptych.planner.memory.simulate import Simulation
from diptych.planner.memory.stages import stage_builder
from diptych.planner.traffic import layer_exchanges, message_bytes, wire_traffic
from diptych.plans.config import TransformerConfig
from diptych.plans.context.exchange import PIPELINED
from diptych.plans.recompute import RecomputeBlock, recompute_blocks
from diptych.plans.schedule.named import schedule_for
from diptych.plans.schedule.partition import get_stage_place, num_stages
from diptych.plans.schedule.simulate import Costs, simulate
from diptych.plans.schedule.simulate import Simulation as Course
from diptych.plans.schedule.wavefront import tokens_before


@dataclass(frozen=True)
class Machine:
    """Rates of one rank's device and of what connects it."""

    compute_rate: float = 300e12
    """Of products, floating-point operations a second."""
    memory_bandwidth: float = 3e12
    """Of the device's own memory, bytes a second."""
    network_bandwidth: float = 50e9
    """Between ranks, bytes a second that one rank sends."""
    network_latency: float = 5e-6
    """Of a message, seconds."""
    link_bandwidth: float = 50e9
    """Between host and device, bytes a second."""
    operation_latency: float = 0.0
    """The least that an operation takes beside its work, seconds."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0.0 <= value < float("inf") or (value == 0.0 and not name.endswith("latency")):
                raise ValueError(f"{name}: expected a number above 0, got {value}")

    def seconds(self, flops: float, moved: float) -> float:
        """Of an operation."""
        return max(flops / self.compute_rate, moved / self.memory_bandwidth) + self.operation_latency


class StageTime(NamedTuple):
    """Seconds of one microbatch on a stage."""

    forward: float
    input_gradient: float
    """With everything that is computed again."""
    weight_gradient: float
    recomputed: float
    """Of the input gradient's: what is computed again."""
    exchanged: float
    """Of both: what ranks that share sequences wait for each other."""


class StepTime(NamedTuple):
    """Seconds of a step, and where they go."""

    total: float
    course: Course
    """Of the pipeline, from the first forward to the last backward."""
    stages: tuple[StageTime, ...]
    gradients: float
    """The sum over ranks that hold the same stage, on the rank where it takes longest."""
    update: float
    """AdamW's, the same."""


class StageTimes:
    """Times of the stages of one model, however it is divided and recomputed.

    Stages are made of blocks of layers and the model's two ends; what is alike is computed once.

    Args:
        machine: its rates.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._found: dict[Hashable, StageTime] = {}

    def of(self, config: TransformerConfig, batch: int) -> tuple[StageTime, ...]:
        """Times of one microbatch on every stage.

        Args:
            config: the whole model, with its pipeline and context ranks.
            batch: sequences of a microbatch.
        """
        stages = []
        for stage in range(num_stages(config)):
            parts = [
                self._block(config, block, batch) for block in recompute_blocks(config, *get_stage_place(config, stage))
            ]
            if stage == 0:
                parts.append(self._end(config, "embedding", batch))
            if stage == num_stages(config) - 1:
                parts.append(self._end(config, "head", batch))
            stages.append(StageTime(*(sum(each) for each in zip((0.0,) * 5, *parts, strict=True))))
        return tuple(stages)

    def costs(self, config: TransformerConfig, batch: int) -> Costs:
        """Return the times of every stage as diptych.plans.schedule.simulate takes them. Arguments as ``of``'s."""
        return costs_of(config, self.of(config, batch), batch, self.machine)

    def _block(self, config: TransformerConfig, block: RecomputeBlock, batch: int) -> StageTime:
        alike = tuple(map(config.layer, block.layers))
        key = alike, block.kind, block.modules, batch, config.context_parallel_size, config.cp_exchange
        if key not in self._found:
            builder, layers = stage_builder(config, batch), {}
            x = builder.hidden()
            for number in block.layers:
                layers[number], x = builder.layer(number, x)
            timed = _Timed(self.machine)
            timed.run([], layers, [block], [])
            forward_wait, backward_wait = _exchanged(config, block, batch, self.machine)
            nodes = [node for layer in layers.values() for node in layer.nodes]
            inputs, weights = _gradient_times(nodes, self.machine)
            self._found[key] = StageTime(
                timed.forward + forward_wait,
                inputs + timed.replayed + backward_wait,
                weights,
                timed.replayed,
                forward_wait + backward_wait,
            )
        return self._found[key]

    def _end(self, config: TransformerConfig, name: str, batch: int) -> StageTime:
        key = name, batch, config.context_parallel_size
        if key not in self._found:
            builder = stage_builder(config, batch)
            nodes = builder.embedding()[0] if name == "embedding" else builder.head(builder.hidden())
            forward = sum(self.machine.seconds(node.flops, _moved(node)) for node in nodes)
            self._found[key] = StageTime(forward, *_gradient_times(nodes, self.machine), 0.0, 0.0)
        return self._found[key]


def costs_of(config: TransformerConfig, stages: Sequence[StageTime], batch: int, machine: Machine) -> Costs:
    """What diptych.plans.schedule.simulate needs to know of them."""
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
    """A step of training.

    Args:
        config: the model's, with its pipeline and context ranks.
        micro_batch_size: sequences of a microbatch.
        num_microbatches: of a step, on each replica.
        data_parallel_size: replicas.
        machine: its rates; None: Machine's own.

    Raises:
        ValueError: the schedule cannot have so many microbatches.
    """
    machine = machine or Machine()
    stages = StageTimes(machine).of(config, micro_batch_size)
    schedule = schedule_for(config, num_microbatches)
    course = simulate(schedule, costs_of(config, stages, micro_batch_size, machine))
    waits = waits_of_wavefront(config, micro_batch_size, stages, machine)
    course = replace(course, makespan=course.makespan + waits)
    gradients, update = after_backward(config, micro_batch_size, num_microbatches, data_parallel_size, machine)
    return StepTime(course.makespan + gradients + update, course, stages, gradients, update)


def waits_of_wavefront(config: TransformerConfig, batch: int, stages: Sequence[StageTime], machine: Machine) -> float:
    """Seconds from the first rank's beginning to the last one's and back, where microbatches follow one another over
    ranks that share sequences (diptych.plans.schedule.wavefront); else 0. As long as the longest row of ranks that
    share one.
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
    """Seconds of the sum of gradients and of the update, each on the rank where it takes longest."""
    named = ("gradients of parameters", "gradient of tied embedding")
    sums = [term for term in wire_traffic(config, batch, count, replicas) if term.name in named]
    sent = max((sum(each) for each in zip(*(t.by_rank for t in sums), strict=True)), default=0)
    rounds = 2 * (config.context_parallel_size * replicas - 1)
    waits = sent / machine.network_bandwidth + rounds * machine.network_latency * (sent > 0)
    own = [0] * config.pipeline_model_parallel_size
    for stage in range(num_stages(config)):
        own[get_stage_place(config, stage).pp_rank] += parameter_bytes(config, stage)
    return waits, UPDATE_MOVES * max(own) / machine.memory_bandwidth


UPDATE_MOVES = 8
"""Of AdamW with its gradients' norm, in sizes of the parameters: gradients twice, parameters and both moments read and
written."""


def _exchanged(config: TransformerConfig, block: RecomputeBlock, batch: int, machine: Machine) -> tuple[float, float]:
    """Seconds of what ranks that share sequences send each other, forward and backward."""
    if config.context_parallel_size == 1:
        return 0.0, 0.0
    forward = backward = 0.0
    replayed = block.kind == "full", block.kind == "full" or "core_attn" in block.modules
    for number in block.layers:
        for exchange in layer_exchanges(config, number, batch, *replayed):
            once = exchange.hops * exchange.one / machine.network_bandwidth + exchange.rounds * machine.network_latency
            ahead = 0 if exchange.name.startswith("gradients of") else 1
            forward += once * ahead
            backward += once * (exchange.times - ahead)
    return forward, backward


def _moved(node: Node) -> int:
    return sum(value.size for value in [*node.reads, *node.writes] if not value.is_view)


def _gradient_times(nodes: Sequence[Node], machine: Machine) -> tuple[float, float]:
    """Seconds of operations' I and W."""
    inputs = weights = 0.0
    for node in nodes:
        kept, gradients = sum(value.size for value in node.keeps), _moved(node)
        if node.is_linear:  # a product for each
            inputs += machine.seconds(node.flops, gradients + node.parameters)
            weights += machine.seconds(node.flops, kept + gradients // 2 + node.parameters)
        else:
            inputs += machine.seconds(2 * node.flops + node.flops_again, kept + gradients + node.parameters)
    return inputs, weights


class _Timed(Simulation):
    """Adds up how long what is run takes, forward and again in backward."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine, self._is_backward = machine, False
        self.forward = self.replayed = 0.0

    def _backward(self, nodes: list[Node]) -> None:
        self._is_backward = True
        super()._backward(nodes)

    def _make(self, node: Node) -> None:
        super()._make(node)
        seconds = self._machine.seconds(node.flops, _moved(node))
        if self._is_backward:
            self.replayed += seconds
        else:
            self.forward += seconds
