"""The report of tensor offload: bytes moved, memory on the device, and overlap of copies with computation."""

from collections.abc import Mapping
from dataclasses import replace

from rich.console import Console

from diptych.planner.offload_times import min_tokens_for_overlap, simulate_offload, use_seconds
from diptych.planner.reports.console import new_table
from diptych.planner.request import PlanRequest
from diptych.plans.offload import Use, join_plans, layer_storages, plan_actions, plan_offload, rank_layers, rank_uses

MIB = 2**20


def print_offload(console: Console, command: PlanRequest) -> None:
    """Print a table over the number of prefetched layers, for one rank, and the criterion for overlap.

    The rank is the first of those with the most layers, because other ranks of a pipeline may have none. In a pipeline,
    JAX has a column of its own: its copies do not extend from one action into the next.
    """
    config = command.model
    asked = command.model.tensor_offload_num_prefetch_layers
    tokens = command.micro_batch_size * config.seq_length // config.context_parallel_size
    bandwidth = command.link_bandwidth * 1e9
    rate = command.compute_rate * 1e12
    storages = layer_storages(config)
    rank = max(range(config.pipeline_model_parallel_size), key=lambda rank: len(rank_layers(config, rank)))
    layers = rank_layers(config, rank)
    count = 1 if config.pipeline_model_parallel_size == 1 else command.num_microbatches
    updates = [Use("S", layer) for layer in layers]
    uses = rank_uses(config, count, rank) + updates
    in_pipeline = config.pipeline_model_parallel_size > 1
    headings = ("prefetched", "on device, MiB", "to device, MiB", "to host, MiB", "misses", "step, s", "over")
    table = new_table(
        f"offloaded parameters of {len(layers)} layers, a step of {count} x {tokens:,} tokens on rank {rank}; "
        f"{command.link_bandwidth:g} GB/s, {command.compute_rate:g} TFLOP/s",
        (*headings, "in JAX, s") if in_pipeline else headings,
    )
    for ahead in sorted({*range(5), asked}):
        plan = plan_offload(uses, storages, ahead)
        seconds = use_seconds(config, tokens, rate)
        times = simulate_offload(plan, seconds, storages, bandwidth)
        in_jax = []
        if in_pipeline:
            actions = plan_actions(replace(config, tensor_offload_num_prefetch_layers=ahead), count, rank)
            joined = join_plans([actions, plan_offload(updates, storages, ahead, then=())])
            in_jax = [f"{simulate_offload(joined, seconds, storages, bandwidth).makespan:.3g}"]
        table.add_row(
            f"{ahead}{' *' if ahead == asked else ''}",
            *(f"{size / MIB:,.1f}" for size in (plan.peak_bytes, plan.bytes_in, plan.bytes_out)),
            f"{len(plan.misses)} of {len(uses)}",
            f"{times.makespan:.3g}",
            f"{times.makespan / max(times.compute, times.transfer):.2f}x",
            *in_jax,
        )
    console.print(table)
    console.print(_criterion(storages, layers, tokens, min_tokens_for_overlap(config, bandwidth, rate)))


def _criterion(storages: Mapping[int, Mapping[str, int]], layers: list[int], tokens: int, needed: float) -> str:
    whole = sum(sum(storages[layer].values()) for layer in layers) / MIB
    verdict = "does" if tokens >= needed else "does not"
    return (
        f"over: ratio to the longer of computation and copies. Without offload {whole:,.1f} MiB on the device. "
        f"A layer's copy overlaps fully with its forward from {needed:,.0f} tokens per microbatch; with {tokens:,} it "
        f"{verdict}."
    )
