"""Bytes that ranks send each other in one training step, term by term.

The mesh is replicas x context ranks x pipeline ranks x tensor-parallel ranks. The terms count the tensors that PyTorch
ranks send, without message headers and sums of scalars (losses, norms, token counts).

Communication libraries choose the algorithms of collectives; the terms assume the one with the fewest sent bytes. An
all-reduce over n ranks is a ring in which each rank sends 2 (n - 1) / n of its bytes; in an all-gather or a
reduce-scatter over n ranks, each rank sends n - 1 parts.
"""

import math
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from diptych.planner.memory.ranks import padded_shard_bytes
from diptych.planner.tensor_traffic import exchanged_bytes, repeated_gradient_bytes
from diptych.plans.config import ITEM_SIZES, TransformerConfig
from diptych.plans.context.exchange import PIPELINED, exchange_cost
from diptych.plans.context.sequences import halo_sizes
from diptych.plans.context.zigzag import move_cost
from diptych.plans.model.layers import SOFTMAX_MIXERS
from diptych.plans.model.parameters import embedding_spec
from diptych.plans.recompute import recompute_blocks
from diptych.plans.schedule.partition import get_stage_place, num_stages
from diptych.plans.schedule.wavefront import tokens_before
from diptych.plans.tensor_parallel import rank_config


class Traffic(NamedTuple):
    """One term of a step's traffic."""

    name: str
    algorithm: str
    """Kind of communication."""
    by_rank: tuple[int, ...]
    """Largest number of bytes that a rank sends, by pipeline rank; context ranks at the ends send less."""
    total: int
    """Bytes that all ranks receive together."""


class Exchange(NamedTuple):
    """One exchange between the context ranks of one layer, for one microbatch."""

    name: str
    algorithm: str
    one: int
    """Bytes that the rank that sends most sends."""
    total: int
    """Bytes that all ranks receive together."""
    times: int
    """Number of exchanges: forward, replayed forward if it is recomputed, and backward."""
    rounds: int = 1
    """Number of sequential messages in each exchange."""
    hops: int = 1
    """Number of sequential transfers of these bytes until the last rank has its input."""


def message_bytes(config: TransformerConfig, micro_batch_size: int) -> int:
    """Return the bytes of a message between stages: the residual streams of a rank's tokens, or their gradient."""
    parts = config.tensor_model_parallel_size if config.sequence_parallel else 1
    tokens = micro_batch_size * config.seq_length // config.context_parallel_size // parts
    return tokens * config.stage_width * ITEM_SIZES[config.compute_dtype]


def wire_traffic(
    config: TransformerConfig, micro_batch_size: int, num_microbatches: int, data_parallel_size: int = 1
) -> list[Traffic]:
    """Return the traffic of one step; terms that do not occur in this mesh are left out.

    Args:
        config: the model, with its pipeline, context and tensor-parallel ranks.
        micro_batch_size: sequences of a microbatch.
        num_microbatches: microbatches of a step on each replica.
        data_parallel_size: replicas.
    """
    n = config.tensor_model_parallel_size
    found = _among_equal_parts(config, micro_batch_size, num_microbatches, data_parallel_size)
    found = [term._replace(total=n * term.total) for term in found]
    if n == 1:
        return found
    ranks = n * config.context_parallel_size * data_parallel_size
    sent = [num_microbatches * each for each in exchanged_bytes(config, micro_batch_size)]
    found.append(Traffic("inputs and outputs of regions", f"exchanged by {n}", tuple(sent), ranks * sum(sent)))
    summed = [0] * config.pipeline_model_parallel_size
    for stage in range(num_stages(config)):
        summed[get_stage_place(config, stage).pp_rank] += 2 * (n - 1) * repeated_gradient_bytes(config, stage)
    if any(summed):
        by_rank = tuple(-(-each // n) for each in summed)
        found.append(Traffic("gradients of repeated parameters", f"sum of {n}", by_rank, ranks // n * sum(summed)))
    return found


def _among_equal_parts(config: TransformerConfig, micro_batch_size: int, count: int, replicas: int) -> list[Traffic]:
    """Return the traffic among ranks that hold the same part of their layers."""
    p = config.pipeline_model_parallel_size
    cp = config.context_parallel_size
    copies = cp * replicas
    stages = num_stages(config)

    def rank_of(stage: int) -> int:
        return get_stage_place(config, stage).pp_rank

    found = []
    if p > 1:
        sent = count * message_bytes(config, micro_batch_size)
        for name, leaving, step in (
            ("activations", range(stages - 1), 1),
            ("gradients of activations", range(1, stages), -1),
        ):
            away = Counter(rank_of(stage) for stage in leaving if rank_of(stage) != rank_of(stage + step))
            by_rank = tuple(away[rank] * sent for rank in range(p))
            found.append(Traffic(name, "point to point", by_rank, sum(by_rank) * copies))
    found += _context_traffic(rank_config(config), micro_batch_size, count, replicas)
    if copies > 1:
        scattered = [0] * p  # a buffer has a shard for every rank, some padded
        updated = [0] * p
        for stage in range(stages):
            scattered[rank_of(stage)] += padded_shard_bytes(config, stage, copies)
            updated[rank_of(stage)] += padded_shard_bytes(config, stage, copies, as_stored=True)
        once, gathered = (tuple((copies - 1) * size for size in sizes) for sizes in (scattered, updated))
        if config.use_distributed_optimizer:
            found.append(Traffic("gradients of parameters", f"scattered to {copies:,}", once, copies * sum(once)))
            found.append(Traffic("updated parameters", f"gathered by {copies:,}", gathered, copies * sum(gathered)))
        else:
            twice = tuple(2 * size for size in once)
            found.append(Traffic("gradients of parameters", f"sum of {copies:,}", twice, copies * sum(twice)))
    if p > 1 and not config.untie_embeddings_and_output_weights:
        size = math.prod(embedding_spec(rank_config(config))["weight"].shape) * ITEM_SIZES[config.params_dtype]
        ends = {rank_of(0), rank_of(stages - 1)}
        if len(ends) > 1:
            by_rank = tuple(size if rank in ends else 0 for rank in range(p))
            found.append(Traffic("gradient of tied embedding", "sum of 2", by_rank, 2 * size * copies))
    return found


def _context_traffic(config: TransformerConfig, batch: int, count: int, replicas: int) -> list[Traffic]:
    """Return the traffic between context ranks, one term per reason."""
    p = config.pipeline_model_parallel_size
    if config.context_parallel_size == 1:
        return []
    found: dict[tuple[str, str], tuple[list[int], list[int]]] = {}
    for stage in range(num_stages(config)):
        place = get_stage_place(config, stage)
        for block in recompute_blocks(config, *place):
            for number in block.layers:
                replayed = (block.kind == "full", block.kind == "full" or "core_attn" in block.modules)
                for name, algorithm, one, total, times, *_ in layer_exchanges(config, number, batch, *replayed):
                    by_rank, all_ = found.setdefault((name, algorithm), ([0] * p, [0]))
                    by_rank[place.pp_rank] += one * times * count
                    all_[0] += total * times * count * replicas
    return [Traffic(*key, tuple(by_rank), total) for key, (by_rank, (total,)) in found.items()]


def layer_exchanges(
    config: TransformerConfig, layer: int, batch: int, replays_layer: bool = False, replays_mixer: bool = False
) -> Iterator[Exchange]:
    """Yield the exchanges between the context ranks of one layer for one microbatch, forward and backward.

    Args:
        config: the model.
        layer: global number of the layer.
        batch: sequences of the microbatch.
        replays_layer: True if backward recomputes the whole layer.
        replays_mixer: True if backward recomputes attention or the delta rule, and repeats its exchange.
    """
    if config.cp_exchange == PIPELINED:
        yield from _pipelined_messages(config, layer, batch)
        return
    size = config.context_parallel_size
    item = ITEM_SIZES[config.compute_dtype]
    part = batch * config.seq_length // size
    mixer = config.layer(layer).mixer
    if mixer in SOFTMAX_MIXERS:
        heads, groups, key, value = config.attention_heads(mixer)
        own = part * groups * (key + value) * item
        gathered = (size - 1) * own, size * (size - 1) * own
        yield Exchange("keys and values", f"gathered by {size}", *gathered, 1 + replays_mixer)
        summed = 2 * (size - 1) * own, 2 * (size - 1) * size * own
        yield Exchange("gradients of keys and values", f"sum of {size}", *summed, 1)
        if config.cp_attention_layout == "zigzag":
            moved = move_cost(size, part, heads, key, item, value)
            yield Exchange("queries and outputs", "point to point", *moved, 2 + replays_mixer)
        return
    key_heads, heads, key, value = config.linear_heads
    approximate = config.cp_truncate_ranks, config.cp_transition_rank
    cost = exchange_cost(config.cp_exchange, size, heads, key, value, _state_item(config), *approximate)
    one = cost.payload_bytes * (size - 1 if config.cp_exchange == "all_gather" else 1)
    hops = cost.rounds if config.cp_exchange == "ring" and config.cp_truncate_ranks is None else 1
    algorithm = f"{config.cp_exchange} by {size}"
    times = 2 + replays_mixer
    yield Exchange("states and gradients", algorithm, one, cost.wire_bytes, times, cost.rounds, hops)
    token = (2 * key_heads * key + heads * value) * item
    halo = halo_sizes(part, config.linear_conv_kernel_dim)
    messages = [max(0, size - distance) for distance in range(1, len(halo) + 1)]
    one = sum(tokens for tokens, sent in zip(halo, messages, strict=True) if sent) * token
    total = sum(tokens * sent for tokens, sent in zip(halo, messages, strict=True)) * token
    yield Exchange("tokens of convolutions", "point to point", one, total, 2 + replays_layer)


def _pipelined_messages(config: TransformerConfig, layer: int, batch: int) -> Iterator[Exchange]:
    """Yield the messages of the pipelined exchange, for sequences that span ranks; recomputation repeats none."""
    size = config.context_parallel_size
    item = ITEM_SIZES[config.compute_dtype]
    part = batch * config.seq_length // size
    before = tokens_before(size, part, config.seq_length)
    num_receivers = sum(tokens > 0 for tokens in before)
    mixer = config.layer(layer).mixer
    if mixer in SOFTMAX_MIXERS:
        _, groups, key, value = config.attention_heads(mixer)
        token = groups * (key + value) * item
        yield Exchange("keys and values", "sent to the next rank", max(before) * token, sum(before) * token, 2)
        return
    key_heads, heads, key, value = config.linear_heads
    sent = {
        "states and gradients": heads * key * value * _state_item(config),
        "tokens of convolutions": (config.linear_conv_kernel_dim - 1) * (2 * key_heads * key + heads * value) * item,
    }
    for name, one in sent.items():
        yield Exchange(name, "sent to the next rank", one * (num_receivers > 0), one * num_receivers, 2)


def _state_item(config: TransformerConfig) -> int:
    """Return the bytes of one element of a state in a message."""
    return 2 if config.cp_wire_dtype == "bfloat16" else max(4, ITEM_SIZES[config.params_dtype])
