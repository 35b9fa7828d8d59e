"""The report of context parallelism: the tokens of every rank, and the messages between ranks."""

import numpy as np
from rich.console import Console
from rich.table import Table

from diptych.planner.reports.console import new_table
from diptych.planner.reports.mesh import add_rows
from diptych.planner.traffic import layer_exchanges
from diptych.plans.config import TransformerConfig
from diptych.plans.context.exchange import CP_EXCHANGES, PIPELINED, exchange_cost
from diptych.plans.context.sequences import concatenate_sequences, local_sequences
from diptych.plans.context.zigzag import ATTENTION_LAYOUTS, move_cost, score_pairs
from diptych.plans.model.layers import SOFTMAX_MIXERS

KIB = 2**10


def print_context(console: Console, config: TransformerConfig, micro_batch_size: int) -> None:
    """Print tables of the ranks and of the state exchanges for one microbatch, and a line on other messages."""
    console.print(_ranks(config, micro_batch_size))
    linear = [number for number in range(config.num_layers) if config.layer(number).mixer not in SOFTMAX_MIXERS]
    if linear:
        console.print(_exchanges(config, linear))
    console.print(_others(config, micro_batch_size, config.num_layers - len(linear), len(linear)))


def _ranks(config: TransformerConfig, batch: int) -> Table:
    """Return a table of the tokens and sequences of every context rank."""
    size = config.context_parallel_size
    length = config.seq_length
    tokens = np.zeros((batch, length), np.int32)
    offsets = concatenate_sequences(tokens, tokens, np.arange(batch)).cu_seqlens
    part = batch * length // size
    table = new_table(
        f"a microbatch of {batch} x {length:,} tokens over {size} ranks, {part:,} each",
        ("rank", "tokens", "sequences", "earlier tokens of first sequence", "later ranks of last sequence"),
    )
    rows = []
    for rank in range(size):
        local = local_sequences(offsets, rank, part)
        first = int(local.first_sequence)
        count = int(local.num_sequences)
        rows.append(
            (
                str(rank),
                f"{rank * part:,} to {(rank + 1) * part - 1:,}",
                str(first) if count == 1 else f"{first} to {first + count - 1}",
                f"{int(local.pre_num_tokens):,}",
                str(int(local.post_num_ranks)),
            )
        )
    add_rows(table, rows)
    return table


def _exchanges(config: TransformerConfig, layers: list[int]) -> Table:
    """Return a table of the cost of every state exchange."""
    _, heads, key, value = config.linear_heads
    itemsize = 2 if config.cp_wire_dtype else 8 if config.params_dtype == "float64" else 4
    ranks, rank = _left_out(config)
    approximate = f"the nearest {ranks}" if ranks is not None else f"maps of rank {rank}" if rank is not None else ""
    table = new_table(
        f"states of {len(layers)} gdn and kda layers, {heads} heads of {key} x {value}; per layer, forward, "
        "and the same backward",
        ("exchange", "rounds", "sent by one rank, KiB", "received by all, KiB", "all layers, KiB"),
        left=("exchange",),
    )
    variants: list[tuple[str, str, tuple]] = [
        (f"{exchange}{' *' if exchange == config.cp_exchange and not approximate else ''}", exchange, ())
        for exchange in CP_EXCHANGES
    ]
    if approximate:
        variants.append((f"{config.cp_exchange}, {approximate} *", config.cp_exchange, _left_out(config)))
    for name, exchange, left_out in variants:
        cost = exchange_cost(exchange, config.context_parallel_size, heads, key, value, itemsize, *left_out)
        table.add_row(
            name,
            str(cost.rounds),
            *(f"{size / KIB:,.1f}" for size in (cost.payload_bytes, cost.wire_bytes, cost.wire_bytes * len(layers))),
        )
    return table


def _left_out(config: TransformerConfig) -> tuple[int | None, int | None]:
    return config.cp_truncate_ranks, config.cp_transition_rank


def _others(config: TransformerConfig, batch: int, attention: int, linear: int) -> str:
    """Return sentences on the messages of convolutions and of attention."""
    itemsize = 2 if config.bf16 else 8 if config.params_dtype == "float64" else 4
    key_heads, heads, key, value = config.linear_heads
    size = config.context_parallel_size
    sentences = []
    if config.cp_exchange == PIPELINED:
        return _describe_pipelined_messages(config, batch)
    if linear:
        halo = (config.linear_conv_kernel_dim - 1) * (2 * key_heads * key + heads * value) * itemsize
        sentences.append(f"A gdn or kda layer's convolutions receive {halo / KIB:,.1f} KiB from earlier ranks.")
    for mixer in sorted(config.mixers & SOFTMAX_MIXERS):
        _, groups, key_width, value_width = config.attention_heads(mixer)
        whole = batch * config.seq_length * groups * (key_width + value_width) * itemsize
        sentences.append(
            f"{'An attention' if mixer == 'attention' else 'An mla'} layer gathers keys and values, "
            f"{whole / size / KIB:,.1f} KiB of every rank to every rank, {(size - 1) * whole / KIB:,.1f} KiB in total."
        )
    if attention:
        sentences.append(_scores(config, batch * config.seq_length // size, itemsize))
    return " ".join(sentences)


def _describe_pipelined_messages(config: TransformerConfig, batch: int) -> str:
    """Return sentences on the messages of the pipelined exchange."""
    size = config.context_parallel_size
    sentences = []
    for mixer in sorted(config.mixers):
        layer = next(number for number in range(config.num_layers) if config.layer(number).mixer == mixer)
        for exchange in layer_exchanges(config, layer, batch):
            sentences.append(f"{exchange.name} of {mixer} layers up to {exchange.one / KIB:,.1f} KiB each")
    return (
        f"A rank sends forward, and receives as much backward: {'; '.join(sentences)}. The last of {size} ranks starts "
        f"{size - 1} layers after the first, in JAX {size - 1} microbatches. The first has up to {size} microbatches "
        "in flight, in JAX each rank has all. The bytes below are upper bounds: the first rank's microbatches with the "
        "last rank's keys."
    )


def _scores(config: TransformerConfig, part: int, itemsize: int) -> str:
    """Return sentences on the attention scores that a rank computes, and on the cost of moving queries."""
    size = config.context_parallel_size
    layout = config.cp_attention_layout
    pairs = {name: max(score_pairs(name, rank, size, part) for rank in range(size)) for name in ATTENTION_LAYOUTS}
    sentence = f"Its layout is {layout}: a rank computes scores of {pairs[layout]:,} pairs of query and key"
    if layout == "contiguous":
        return f"{sentence}, zigzag {pairs['zigzag']:,}."
    costs = []
    for mixer in config.mixers & SOFTMAX_MIXERS:
        heads, _, key, value = config.attention_heads(mixer)
        costs.append(move_cost(size, part, heads, key, itemsize, value))
    moved = max(costs)
    return (
        f"{sentence}, contiguous {pairs['contiguous']:,}; moving queries and outputs, a rank sends up to "
        f"{moved.payload_bytes / KIB:,.1f} KiB, all {moved.wire_bytes / KIB:,.1f} KiB, and as much again backward."
    )
