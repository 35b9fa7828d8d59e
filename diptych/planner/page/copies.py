"""Copies between device and host on the timeline of a schedule: what diptych.plans.offload's plan moves, and when it
asks.

An action's time is divided among its uses of layers by their products (diptych.planner.offload_times.use_seconds),
and a copy is asked for where the use begins that asks. The link takes one copy after the other. The timeline itself
does not wait for copies: its times have none. What waiting would cost is
diptych.planner.offload_times.simulate_offload's, of a rank without a pipeline.
"""

import math
from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from diptych.planner.offload_times import hiding_tokens, simulate_offload, use_seconds
from diptych.planner.step_time import Machine
from diptych.plans.config import TransformerConfig
from diptych.plans.offload import (
    OffloadPlan,
    Use,
    action_uses,
    layer_storages,
    plan_activations,
    plan_offload,
    rank_layers,
)
from diptych.plans.recompute import recompute_blocks
from diptych.plans.schedule.actions import Schedule
from diptych.plans.schedule.partition import get_stage_place, num_stages
from diptych.plans.schedule.simulate import Costs, Simulation

MOST_USES = 2_048
"""Of layers on one rank in a step, up to which copies are drawn."""


class Span(NamedTuple):
    """When a use runs on the timeline, in seconds."""

    begin: float
    end: float


class Copy(NamedTuple):
    """A layer's parameters on the link."""

    layer: int
    to_device: bool
    begin: float
    """When the link takes it."""
    end: float
    needed: float
    """When the use it is for begins, infinity where that is in the next step; of a copy to the host, when it was asked
    for."""

    @property
    def is_late(self) -> bool:
        """Whether the use it is for begins before it has arrived."""
        return self.to_device and self.end > self.needed


def copies_of_schedule(
    config: TransformerConfig,
    schedule: Schedule,
    costs: Costs,
    course: Simulation,
    updates_at: float,
    update: float,
    batch: int,
    machine: Machine,
) -> dict[str, Any] | None:
    """What moves on every rank in one step; None without offload.

    Args:
        config: the model's.
        schedule, costs, course: as simulated, in seconds.
        updates_at: when the optimizer begins.
        update: seconds it takes.
        batch: sequences of a microbatch.
        machine: its rates.
    """
    if not (config.enable_tensor_offload or config.enable_activation_offload):
        return None
    tokens = batch * config.seq_length // config.context_parallel_size
    seconds, storages = use_seconds(config, tokens, machine.compute_rate), layer_storages(config)
    found: dict[str, Any] = {
        "tokens": tokens,
        "hidingTokens": hiding_tokens(config, machine.link_bandwidth, machine.compute_rate),
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
            for span in _spans(course.starts[action], costs.time(action), [seconds(use) for use in each])
        ]
        spans += _spans(updates_at, update, [1.0] * len(updates))
        told: dict[str, Any] = {}
        if config.enable_tensor_offload:
            plan = plan_offload([*order, *updates], storages, config.tensor_offload_num_prefetch_layers)
            told = _told(plan, place_copies(plan, spans, storages, machine.link_bandwidth), updates_at + update)
            alone = simulate_offload(plan, seconds, storages, machine.link_bandwidth)
            told |= {
                "compute": alone.compute,
                "transfer": alone.transfer,
                "waited": sum(alone.waited),
                "alone": alone.makespan,
            }
        if config.enable_activation_offload:
            told["marks"] = _activation_marks(config, order, spans)
        found["ranks"].append(told)
    return found


def place_copies(
    plan: OffloadPlan, spans: list[Span], storages: Mapping[int, Mapping[str, int]], bandwidth: float
) -> list[Copy]:
    """A plan's copies on a link that takes one after the other, asked for by uses whose times are given.

    Args:
        plan: what moves.
        spans: when each of its uses runs.
        storages: bytes of every memory that a layer has.
        bandwidth: of the link, bytes a second.
    """
    found, link, changed = [], 0.0, set()
    for number, (step, span) in enumerate(zip(plan.steps, spans, strict=True)):
        for layer in step.fetches:
            begin = max(link, span.begin)
            link = begin + sum(storages[layer].values()) / bandwidth
            later = zip(plan.steps[number:], spans[number:], strict=True)
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


def _told(plan: OffloadPlan, copies: list[Copy], end: float) -> dict[str, Any]:
    """Columns of the copies that begin before a step ends, and what is told of all."""
    shown = [copy for copy in copies if copy.begin < end]
    return {
        "layer": [copy.layer for copy in shown],
        "toDevice": [int(copy.to_device) for copy in shown],
        "begin": [copy.begin for copy in shown],
        "end": [copy.end for copy in shown],
        "late": [int(copy.is_late) for copy in shown],
        "count": len(copies),
        "lateCount": sum(copy.is_late for copy in copies),
        "bytesIn": plan.bytes_in,
        "bytesOut": plan.bytes_out,
        "peak": plan.peak_bytes,
    }


def _spans(begin: float, lasts: float, weights: list[float]) -> list[Span]:
    """A time divided by weights."""
    whole = sum(weights) or 1.0
    ends = accumulate((lasts * weight / whole for weight in weights), initial=begin)
    return [Span(*pair) for pair in pairwise(ends)]


def _activation_marks(config: TransformerConfig, uses: list[Use], spans: list[Span]) -> dict[str, Any]:
    """When what a layer keeps leaves the device and is asked for again; how many bytes, the planner does not say."""
    places = [get_stage_place(config, stage) for stage in range(num_stages(config))]
    blocks = [block for place in places for block in recompute_blocks(config, *place) if block.kind == "full"]
    dropped = {layer for block in blocks for layer in block.layers}
    steps = plan_activations(uses, config.tensor_offload_num_prefetch_layers, (), dropped)
    marks: dict[str, Any] = {"layer": [], "microbatch": [], "toDevice": [], "time": []}
    for step, span in zip(steps, spans, strict=False):
        moves = [(use, 1, span.begin) for use in step.fetches] + [(step.use, 0, span.end)] * step.leaves
        for use, to_device, time in moves:
            for name, value in zip(marks, (use.layer, use.microbatch, to_device, time), strict=True):
                marks[name].append(value)
    return marks
