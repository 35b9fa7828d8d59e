"""Copies between device and host on the timeline of a schedule.

The copies are those of diptych.plans.offload's plan. An action's time is divided among its uses of layers in proportion
to their products (diptych.planner.offload_times.use_seconds), and a copy is requested when the requesting use begins.
The link copies one layer at a time. The timeline does not wait for copies. For the cost of waiting on a rank without a
pipeline, see diptych.planner.offload_times.simulate_offload.
"""

import math
from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from diptych.planner.offload_times import min_tokens_for_overlap, simulate_offload, use_seconds
from diptych.planner.step_time import Machine
from diptych.plans.config import TransformerConfig
from diptych.plans.offload import (
    OffloadPlan,
    Use,
    action_uses,
    layer_storages,
    layers_that_stay,
    plan_activations,
    plan_offload,
    rank_layers,
)
from diptych.plans.recompute import recompute_blocks
from diptych.plans.schedule.actions import Schedule
from diptych.plans.schedule.partition import get_stage_place, num_stages
from diptych.plans.schedule.simulate import Costs, Simulation

MOST_USES = 2_048
"""Largest number of uses of layers on one rank in a step for which copies are drawn."""


class Span(NamedTuple):
    """Begin and end of a use on the timeline, in seconds."""

    begin: float
    end: float


class Copy(NamedTuple):
    """A copy of a layer's parameters over the link."""

    layer: int
    to_device: bool
    begin: float
    """Time at which the link starts the copy."""
    end: float
    needed: float
    """Time at which the use that needs the copy begins, infinity if that is in the next step; for a copy to the host,
    the time of the request."""

    @property
    def is_late(self) -> bool:
        """True if the use that needs the copy begins before the copy has ended."""
        return self.to_device and self.end > self.needed


def copies_of_schedule(
    config: TransformerConfig,
    schedule: Schedule,
    costs: Costs,
    simulation: Simulation,
    updates_at: float,
    update: float,
    batch: int,
    machine: Machine,
) -> dict[str, Any] | None:
    """Return the copies of every rank in one step; None without offload.

    Args:
        config: the model.
        schedule: schedule of the step.
        costs: costs of the simulation, in seconds.
        simulation: simulation of the schedule with these costs.
        updates_at: time at which the optimizer begins.
        update: seconds of the optimizer.
        batch: sequences of a microbatch.
        machine: rates of the machine.
    """
    if not (config.enable_tensor_offload or config.enable_activation_offload):
        return None
    tokens = batch * config.seq_length // config.context_parallel_size
    seconds = use_seconds(config, tokens, machine.compute_rate)
    storages = layer_storages(config)
    found: dict[str, Any] = {
        "tokens": tokens,
        "hidingTokens": min_tokens_for_overlap(config, machine.link_bandwidth, machine.compute_rate),
        "ahead": config.tensor_offload_num_prefetch_layers,
        "parameters": config.enable_tensor_offload,
        "activations": config.enable_activation_offload,
        "ranks": [],
    }
    for rank in range(schedule.pp_size):
        uses = {action: action_uses(config, action, rank) for action in schedule.actions[rank]}
        order = [use for each in uses.values() for use in each]
        updates = [Use("S", layer) for layer in rank_layers(config, rank)]
        if len(order) + len(updates) > MOST_USES:
            return {**found, "ranks": [], "leftOut": f"{len(order) + len(updates):,} uses of layers on rank {rank}"}
        spans = [
            span
            for action, each in uses.items()
            for span in _spans(simulation.starts[action], costs.time(action), [seconds(use) for use in each])
        ]
        spans += _spans(updates_at, update, [1.0] * len(updates))
        entry: dict[str, Any] = {}
        if config.enable_tensor_offload:
            plan = plan_offload([*order, *updates], storages, config.tensor_offload_num_prefetch_layers)
            entry = _columns(plan, place_copies(plan, spans, storages, machine.link_bandwidth), updates_at + update)
            alone = simulate_offload(plan, seconds, storages, machine.link_bandwidth)
            entry |= dict(
                compute=alone.compute, transfer=alone.transfer, waited=sum(alone.waited), alone=alone.makespan
            )
        if config.enable_activation_offload:
            entry["marks"] = _activation_marks(config, order, spans)
        found["ranks"].append(entry)
    return found


def place_copies(
    plan: OffloadPlan, spans: list[Span], storages: Mapping[int, Mapping[str, int]], bandwidth: float
) -> list[Copy]:
    """Return a plan's copies on a link that copies one layer at a time, given the times of the uses.

    Args:
        plan: the offload plan.
        spans: times of its uses.
        storages: bytes of every storage of each layer.
        bandwidth: bandwidth of the link, bytes per second.
    """
    found = []
    link = 0.0
    changed = set()
    for number, (step, span) in enumerate(zip(plan.moves, spans, strict=True)):
        for layer in step.fetches:
            begin = max(link, span.begin)
            link = begin + sum(storages[layer].values()) / bandwidth
            later = zip(plan.moves[number:], spans[number:], strict=True)
            needed = next((other.begin for use, other in later if use.use.layer == layer), math.inf)
            found.append(Copy(layer, True, begin, link, needed))
        if step.use.kind == "S":
            changed.add(step.use.layer)
        for layer in changed.intersection(step.evictions):
            begin = max(link, span.end)
            link = begin + sum(storages[layer].values()) / bandwidth
            found.append(Copy(layer, False, begin, link, span.end))
            changed.remove(layer)
    return found


def _columns(plan: OffloadPlan, copies: list[Copy], end: float) -> dict[str, Any]:
    """Return columns of the copies that begin before the step ends, and totals over all copies."""
    drawn = [copy for copy in copies if copy.begin < end]
    return {
        "layer": [copy.layer for copy in drawn],
        "toDevice": [int(copy.to_device) for copy in drawn],
        "begin": [copy.begin for copy in drawn],
        "end": [copy.end for copy in drawn],
        "late": [int(copy.is_late) for copy in drawn],
        "count": len(copies),
        "lateCount": sum(copy.is_late for copy in copies),
        "bytesIn": plan.bytes_in,
        "bytesOut": plan.bytes_out,
        "peak": plan.peak_bytes,
    }


def _spans(begin: float, duration: float, weights: list[float]) -> list[Span]:
    """Divide an interval in proportion to weights."""
    total = sum(weights) or 1.0
    ends = accumulate((duration * weight / total for weight in weights), initial=begin)
    return [Span(*pair) for pair in pairwise(ends)]


def _activation_marks(config: TransformerConfig, uses: list[Use], spans: list[Span]) -> dict[str, Any]:
    """Return the times at which saved activations leave the device and are requested again, without their bytes."""
    places = [get_stage_place(config, stage) for stage in range(num_stages(config))]
    stay = layers_that_stay(config, [block for place in places for block in recompute_blocks(config, *place)])
    steps = plan_activations(uses, config.tensor_offload_num_prefetch_layers, (), stay)
    marks: dict[str, Any] = {"layer": [], "microbatch": [], "toDevice": [], "time": []}
    for step, span in zip(steps, spans, strict=False):
        moves = [(use, 1, span.begin) for use in step.fetches] + [(step.use, 0, span.end)] * step.evicts
        for use, to_device, time in moves:
            for name, value in zip(marks, (use.layer, use.microbatch, to_device, time), strict=True):
                marks[name].append(value)
    return marks
