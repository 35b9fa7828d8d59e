"""Predicted bytes that one microbatch saves for backward on one stage; with context parallelism, on one rank."""

import math
from collections.abc import Hashable
from dataclasses import replace
from typing import NamedTuple

from diptych.planner.memory.graph import GraphBuilder
from diptych.planner.memory.kernel_work import delta_rule
from diptych.planner.memory.nodes import Layer, Node, Value
from diptych.planner.memory.offload import ActionMoves, moving_values
from diptych.planner.memory.rule import chunk_size, rule_moved, rule_scratch
from diptych.planner.memory.simulate import Gradients, Simulation
from diptych.plans.config import TransformerConfig
from diptych.plans.context.exchange import PIPELINED
from diptych.plans.context.zigzag import computed_halves, half_begin, half_lengths, score_pairs
from diptych.plans.mesh import unsharded
from diptych.plans.model.delta_rule import SEGMENT_SIZE, chunk_flops
from diptych.plans.recompute import recompute_blocks
from diptych.plans.schedule.partition import get_stage_place, get_transformer_layer_offset, layers_by_stage, num_stages
from diptych.plans.schedule.wavefront import tokens_before


class StageMemory(NamedTuple):
    """Bytes that one microbatch saves for backward on a stage, in PyTorch."""

    saved: int
    """Saved from the end of F to the end of B or I."""
    weight_gradients: int
    """Saved from the end of I to the end of W: inputs of linear layers, and gradients of their outputs."""


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
    memory = simulate_stage(config, stage, batch, length, "deferred")
    return StageMemory(sum(memory.saved_by_name.values()), memory.waiting)


def simulate_stage(
    config: TransformerConfig,
    stage: int,
    batch: int,
    length: int | None = None,
    gradients: Gradients = "allocated",
    moves: ActionMoves | None = None,
) -> Simulation:
    """Simulate one microbatch on a stage.

    Args:
        config: as in predict_stage_memory.
        stage: as in predict_stage_memory.
        batch: as in predict_stage_memory.
        length: as in predict_stage_memory.
        gradients: what backward does with the gradients of parameters.
        moves: moves of the microbatch's saved values; None: those of a backward that follows its forward at once.
    """
    builder = _StageBuilder(config, batch, length or config.seq_length)
    blocks = recompute_blocks(config, *get_stage_place(config, stage))
    moving = moving_values(config, _layers(config, stage), blocks, moves)
    memory = Simulation(builder.length, gradients, moving)
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
    memory.run(begin, layers, blocks, end)
    return memory


def stage_builder(config: TransformerConfig, batch: int, length: int | None = None) -> GraphBuilder:
    """Return a builder of the operations on one rank's part of the tokens; arguments as in predict_stage_memory."""
    return _StageBuilder(config, batch, length or config.seq_length)


def predict_stages(config: TransformerConfig, batch: int, length: int | None = None) -> list[StageMemory]:
    """Predict the saved bytes of every stage; equal stages are simulated once. Arguments as in predict_stage_memory."""
    found: dict[Hashable, StageMemory] = {}
    stages = []
    for stage in range(num_stages(config)):
        key = memory_key(config, stage)
        if key not in found:
            found[key] = predict_stage_memory(config, stage, batch, length)
        stages.append(found[key])
    return stages


def memory_key(config: TransformerConfig, stage: int) -> Hashable:
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
    """A builder of the operations on one rank's part of the tokens.

    Attributes:
        length_of_all: tokens of a sequence, on all ranks.
    """

    def __init__(self, config: TransformerConfig, batch: int, length: int) -> None:
        self.cp_size = config.context_parallel_size
        self.length_of_all = length
        if self.cp_size > 1:  # sequences are concatenated
            length = batch * length // self.cp_size
            batch = 1
        size = config.tensor_model_parallel_size
        one_stage = replace(
            unsharded(config), tensor_model_parallel_size=size, sequence_parallel=config.sequence_parallel
        )
        super().__init__(one_stage, batch, length)

    def _core_attention(self, nodes: list[Node], inputs: list[Value], attended: Value, mixer: str) -> None:
        """Append softmax attention over the keys and values of all context ranks."""
        if self.cp_size == 1:
            super()._core_attention(nodes, inputs, attended, mixer)
            return
        config = self.config
        region = ("core_attn",)
        layout = config.cp_attention_layout
        q, *own = inputs
        keys = self.cp_size * self.tokens
        if config.cp_exchange == PIPELINED:  # keys of other ranks belong to the rank's first sequence only
            keys = self.tokens + max(tokens_before(self.cp_size, self.tokens, self.length_of_all))
        k, v = (Value(f"{value.name} of all ranks", value.size * keys // self.tokens) for value in own)
        if config.cp_exchange == PIPELINED:
            joined = self._prepended(nodes, own, (k, v))
            self._masked_attention(nodes, (q, k, v), attended, (self.tokens, keys), mixer, joined)
            return
        for value, all_ in zip(own, (k, v), strict=True):
            parts = all_.size
            nodes.append(Node([value], [all_], [], region, forward_scratch=parts, backward_scratch=parts))
        if layout != "zigzag":
            self._masked_attention(nodes, (q, k, v), attended, (self.tokens, keys), mixer)
            return
        ranks = range(self.cp_size)
        rank = max(ranks, key=lambda rank: score_pairs(layout, rank, self.cp_size, self.tokens))
        halves = []
        for half in computed_halves(rank, self.cp_size):
            queries = half_lengths(self.tokens)[half % 2]
            size = q.size * queries // self.tokens
            halves.append((Value("queries of a half-part", size), Value("outputs of a half-part", size), half))
        nodes.append(Node([q], [queries for queries, _, _ in halves], [], region))
        for queries, outputs, half in halves:
            count = half_lengths(self.tokens)[half % 2]
            outputs.size = attended.size * count // self.tokens
            sizes = count, half_begin(half + 1, self.tokens)
            self._masked_attention(nodes, (queries, k, v), outputs, sizes, mixer)
        nodes.append(Node([outputs for _, outputs, _ in halves], [attended], [], region))

    def _prepended(self, nodes: list[Node], own: list[Value], all_: tuple[Value, Value]) -> Value:
        """Append the join of received keys and values with the rank's own, and return it; two views of it are read.

        Args:
            nodes: operations so far.
            own: keys and values of the rank's tokens.
            all_: keys and values with those that were received; they become views.
        """
        parts = sum(value.size for value in own)
        joined = Value("keys and values of all ranks", sum(value.size for value in all_))
        received = Value("received keys and values", joined.size - parts)
        nodes.append(Node([], [received], [received], ("core_attn",), is_message=True))
        scratch = parts + 2 * received.size  # the rank's own, what is received, and the shape that it has
        nodes.append(Node(own, [joined], [], ("core_attn",), forward_scratch=scratch))
        nodes.append(Node([joined], [*all_], [], ("core_attn",)))
        for value in all_:
            value.is_view = True
        return joined

    def _masked_attention(
        self,
        nodes: list[Node],
        operands: tuple[Value, Value, Value],
        found: Value,
        sizes: tuple[int, int],
        mixer: str,
        joined: Value | None = None,
    ) -> None:
        """Append softmax attention with a mask.

        Args:
            nodes: operations so far.
            operands: queries, keys and values.
            found: output.
            sizes: numbers of queries and of keys, including masked ones.
            mixer: kind of the layer's mixer.
            joined: memory of which keys and values are views; None: they have their own.
        """
        region = ("core_attn",)
        q, k, v = operands
        kept_k, kept_v = (joined or value for value in (k, v))
        pairs = math.prod(sizes)
        heads, _, key, value = self.config.attention_heads(mixer)
        scored, mixed = (2 * pairs * heads * width for width in (key, value))
        mask = Value("attention mask", pairs)
        nodes.append(Node([], [mask], [], region, forward_scratch=2 * pairs))
        if self.config.use_flash_attn:  # the mask is added to the scores, as floating-point numbers
            statistics = Value("attention statistics", found.size // self.item // value * self.wide)
            added = Value("attention mask", pairs * self.item)
            saves = [q, *dict.fromkeys((kept_k, kept_v)), found, statistics, added]
            tile = self._attention_tile(*sizes)
            scratch = {"forward_scratch": tile, "backward_scratch": 2 * tile + found.size}
            more = {"flops": scored + mixed, "recomputed_flops": scored, "alive": [mask], **scratch}
            nodes.append(Node([q, k, v], [found, statistics, added], saves, region, **more))
            return
        count = self.config.num_attention_heads * pairs
        scores, scaled, filled = (Value("scores", count * self.item) for _ in range(3))
        softmax = Value("attention weights", count * self.wide)
        weights = Value("attention_weights", count * self.item)
        begin = len(nodes)
        nodes += [
            Node([q, k], [scores], [q, kept_k], region, flops=scored),
            Node([scores], [scaled], [], region),
            Node([scaled], [filled], [mask], region),
        ]
        filled = self._cast(nodes, filled, self.wide, region)
        nodes += [
            Node([filled], [softmax], [softmax], region, backward_scratch=softmax.size),  # a contiguous copy
            Node([softmax], [weights], [], region),  # as the product reads them
            Node([weights, v], [found], [weights, kept_v], region, flops=mixed),
        ]
        for node in nodes[begin + 2 :]:
            node.alive.append(scaled)

    def _rule(self, nodes: list[Node], inputs: list[Value], parameters: int) -> Value:
        """Append the delta rule, with its transition columns if a sequence continues on the next context rank."""
        attended = super()._rule(nodes, inputs, parameters)
        is_cut = self.cp_size > 1 and any(tokens_before(self.cp_size, self.tokens, self.length_of_all))
        if is_cut and self.config.cp_exchange != PIPELINED:
            _, heads, key, value = self.config.linear_heads
            segments = -(-self.length // SEGMENT_SIZE)
            states = heads * key * ((segments - 1) * key + 3 * (value + key)) * self.wide
            outputs = self.coefficient("transition_output", heads * value)
            transition_output = self.coefficient("transition_output", heads * key)
            saves = [transition_output, Value("states and transitions", states)]
            shape = self.rule_shape(parameters)
            forward, backward = rule_scratch(shape._replace(value=shape.value + shape.key))
            nodes[-1].forward_scratch = forward
            nodes[-1].backward_scratch = backward + outputs.size + transition_output.size  # their joined gradients
            nodes[-1].writes += [outputs, *saves]  # outputs are completed with the saved values, then dropped
            nodes[-1].saves += saves
            size = chunk_size(self.length)
            columns = chunk_flops(size, key, value + key) - chunk_flops(size, key, value)
            more = -(-self.length // size) * self.batch * heads * columns
            nodes[-1].flops += more
            nodes[-1].recomputed_flops += more
            nodes[-1].inner_moved = rule_moved(shape._replace(value=shape.value + shape.key))
            nodes[-1].kernels = delta_rule(shape, is_cut=True)
        return attended
