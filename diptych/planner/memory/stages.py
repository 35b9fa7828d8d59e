"""Predicted bytes that one microbatch saves for backward on one stage; with context parallelism, on one rank."""

from collections.abc import Hashable
from dataclasses import replace
from typing import NamedTuple

from diptych.planner.memory.graph import GraphBuilder
from diptych.planner.memory.nodes import Layer, Node, Value
from diptych.planner.memory.rule import chunk_size
from diptych.planner.memory.simulate import Simulation
from diptych.plans.config import TransformerConfig
from diptych.plans.context.exchange import PIPELINED
from diptych.plans.context.zigzag import score_pairs
from diptych.plans.mesh import undivided
from diptych.plans.model.delta_rule import SEGMENT_SIZE, chunk_flops
from diptych.plans.recompute import recompute_blocks
from diptych.plans.schedule.partition import get_stage_place, get_transformer_layer_offset, layers_by_stage, num_stages
from diptych.plans.schedule.wavefront import tokens_before


class StageMemory(NamedTuple):
    """Bytes that one microbatch saves for backward on a stage, in PyTorch."""

    saved: int
    """Saved from the end of F to the end of B or I."""
    weight_gradients: int
    """Saved from the end of I to the end of W: inputs of linear maps, and gradients of their outputs."""


def predict_stage_memory(config: TransformerConfig, stage: int, batch: int, length: int | None = None) -> StageMemory:
    """Predict the bytes that one microbatch saves for backward on a stage, by simulating the allocations of its layers.

    The simulation is that of diptych.planner.memory.predict_memory for a part of the model: the first stage has the
    embedding, the last stage the head and the loss. A stage's input, which is saved for its gradient, is included, and
    so is its output if sending does not free it. Not included are token ids, messages in transit, and temporary buffers
    of actions. Gradients that wait for W are assumed to have memory of their own. With recompute, more bytes can wait
    for W than were saved for I.

    With context parallelism, the result is for a rank whose first sequence began on another rank. Softmax attention
    saves keys and values of all ranks and the attention mask; with the zigzag layout, for the queries that it computes.
    The delta rule saves its transition columns, except with the pipelined exchange, which computes none. Copies of the
    tokens before the rank's part, which a convolution makes, are not included.

    Args:
        config: the whole model, with its pipeline.
        stage: global number of the stage.
        batch: sequences of a microbatch.
        length: tokens of each sequence; None: config.seq_length.
    """
    builder = _StageBuilder(config, batch, length or config.seq_length)
    memory = Simulation(builder.length)
    if stage == 0:
        begin, x = builder.embedding()
    else:
        x = builder.hidden()
        begin = [*builder.dropout_rows(), Node([], [x], [x])]
    layers: dict[int, Layer] = {}
    for number in _layers(config, stage):
        layers[number], x = builder.layer(number, x)
    sent = Node([x], [], [] if config.deallocate_pipeline_outputs else [x])
    end = builder.head(x) if stage == num_stages(config) - 1 else [sent]
    memory.run(begin, layers, recompute_blocks(config, *get_stage_place(config, stage)), end)
    waiting = {id(value): value.size for value in builder.multiplied}
    return StageMemory(sum(memory.saved_by_name.values()), sum(waiting.values()) + builder.gradients)


def stage_builder(config: TransformerConfig, batch: int, length: int | None = None) -> GraphBuilder:
    """Return a builder of the operations on one rank's part of the tokens; arguments as in predict_stage_memory."""
    return _StageBuilder(config, batch, length or config.seq_length)


def predict_stages(config: TransformerConfig, batch: int, length: int | None = None) -> list[StageMemory]:
    """Predict the saved bytes of every stage; equal stages are simulated once. Arguments as in predict_stage_memory."""
    found: dict[Hashable, StageMemory] = {}
    stages = []
    for stage in range(num_stages(config)):
        key = _memory_key(config, stage)
        if key not in found:
            found[key] = predict_stage_memory(config, stage, batch, length)
        stages.append(found[key])
    return stages


def _memory_key(config: TransformerConfig, stage: int) -> Hashable:
    """Return the properties of a stage that determine its memory, as a cache key; equal keys give equal memory."""
    layers = _layers(config, stage)
    place = get_stage_place(config, stage)
    blocks = [(b.kind, len(b.layers), b.modules) for b in recompute_blocks(config, *place)]
    return stage == 0, stage == num_stages(config) - 1, *map(config.layer, layers), *blocks


def _layers(config: TransformerConfig, stage: int) -> range:
    """Return the global numbers of a stage's layers."""
    first = get_transformer_layer_offset(config, *get_stage_place(config, stage))
    return range(first, first + layers_by_stage(config)[stage])


class _StageBuilder(GraphBuilder):
    """A builder of the operations on one rank's part of the tokens, which records inputs and outputs of linear maps.

    Attributes:
        length_of_all: tokens of a sequence, on all ranks.
        multiplied: inputs of linear maps.
        gradients: bytes of the gradients of their outputs.
    """

    def __init__(self, config: TransformerConfig, batch: int, length: int) -> None:
        self.cp_size = config.context_parallel_size
        self.length_of_all = length
        if self.cp_size > 1:  # sequences are concatenated
            length = batch * length // self.cp_size
            batch = 1
        size = config.tensor_model_parallel_size
        whole = replace(undivided(config), tensor_model_parallel_size=size, sequence_parallel=config.sequence_parallel)
        super().__init__(whole, batch, length)
        self.multiplied: list[Value] = []
        self.gradients = 0

    def _linear(self, x: Value, y: Value, name: str, region: tuple[str, ...]) -> list[Node]:
        self.multiplied.append(x)
        self.gradients += y.size
        return super()._linear(x, y, name, region)

    def _core_attention(self, nodes: list[Node], inputs: list[Value], attended: Value, mixer: str) -> None:
        """Append softmax attention over the keys and values of all context ranks."""
        if self.cp_size == 1:
            super()._core_attention(nodes, inputs, attended, mixer)
            return
        config = self.config
        region = ("core_attn",)
        layout = config.cp_attention_layout
        q, *own = inputs
        found = attended
        pairs = max(score_pairs(layout, rank, self.cp_size, self.tokens) for rank in range(self.cp_size))
        keys = self.cp_size * self.tokens
        if config.cp_exchange == PIPELINED:  # keys of other ranks belong to the rank's first sequence only
            keys = self.tokens + max(tokens_before(self.cp_size, self.tokens, self.length_of_all))
            pairs = self.tokens * keys
        k, v = (Value(f"{value.name} of all ranks", value.size * keys // self.tokens) for value in own)
        heads, _, key, value = config.attention_heads(mixer)
        scored, mixed = (2 * pairs * heads * width for width in (key, value))
        allowed = Value("attention mask", pairs * (self.item if config.use_flash_attn else 1))
        nodes += [Node([value], [all_], [], region) for value, all_ in zip(own, (k, v), strict=True)]
        if layout == "zigzag":
            q = Value("queries of two half-parts", q.size)
            found = Value("outputs of two half-parts", attended.size)
            nodes.append(Node([inputs[0]], [q], [], region))
        if config.use_flash_attn:  # the mask is added to the scores, as floating-point numbers
            statistics = self.coefficient("attention statistics", config.num_attention_heads)
            saves = [q, k, v, found, statistics, allowed]
            writes = [found, statistics, allowed]
            nodes.append(Node([q, k, v], writes, saves, region, flops=scored + mixed, recomputed_flops=scored))
        else:
            count = config.num_attention_heads * pairs
            softmax = Value("attention weights", count * self.wide)
            weights = Value("attention_weights", count * self.item)
            nodes += [
                Node([q, k], [allowed, softmax], [q, k, allowed, softmax], region, flops=scored),
                Node([softmax, v], [weights, found], [weights, v], region, flops=mixed),  # as that product reads them
            ]
        if found is not attended:
            nodes.append(Node([found], [attended], [], region))

    def _rule(self, nodes: list[Node], inputs: list[Value], parameters: int) -> Value:
        """Append the delta rule, with its transition columns if context ranks exchange states."""
        attended = super()._rule(nodes, inputs, parameters)
        if self.cp_size > 1 and self.config.cp_exchange != PIPELINED:
            _, heads, key, value = self.config.linear_heads
            segments = -(-self.length // SEGMENT_SIZE)
            states = heads * key * ((segments - 1) * key + 3 * (value + key)) * self.wide
            outputs = self.coefficient("transition_output", heads * value)
            transition_output = self.coefficient("transition_output", heads * key)
            saves = [transition_output, Value("states and transitions", states)]
            nodes[-1].writes += [outputs, *saves]  # outputs are completed with the saved values, then dropped
            nodes[-1].saves += saves
            size = chunk_size(self.length)
            columns = chunk_flops(size, key, value + key) - chunk_flops(size, key, value)
            more = -(-self.length // size) * self.batch * heads * columns
            nodes[-1].flops += more
            nodes[-1].recomputed_flops += more
        return attended
