"""The data of the page, as JSON: a plan's simulation, its memory, and other predictions of the planner.

Times are seconds of diptych.planner.step_time's roofline, bytes are those of diptych.planner.memory. The page computes
no prediction of its own. The actions of a schedule are numbered rank by rank, in each rank's order.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from diptych.planner.memory.ranks import rank_memories
from diptych.planner.memory.stages import StageMemory, predict_stages
from diptych.planner.page.copies import copies_of_schedule
from diptych.planner.reports.mesh import UNITS, describe_mesh, memory_unit
from diptych.planner.reports.schedule import PipelinePlan, describe_stage, plan_pipeline, plan_schedules
from diptych.planner.step_time import Machine, StageTimes, after_backward
from diptych.planner.traffic import message_bytes
from diptych.plans.config import TransformerConfig
from diptych.plans.recompute import recompute_blocks, without_recompute
from diptych.plans.schedule.actions import Action, Schedule
from diptych.plans.schedule.messages import dependencies
from diptych.plans.schedule.named import schedule_for
from diptych.plans.schedule.partition import get_stage_place, get_transformer_layer_offset, layers_by_stage, num_stages
from diptych.plans.schedule.placement import SCHEDULES
from diptych.plans.schedule.simulate import Costs

WITH_OTHERS = 2_048
"""Largest number of stages times microbatches for which other schedules are drawn too."""
MOST_PIECES = 16_384
"""Largest number of stages times microbatches for which a page is written."""


class SavedBytes(NamedTuple):
    """Saved bytes on a rank after each of its actions, in its order."""

    saved: list[int]
    """Saved for backward: from the start of F to the end of B or I."""
    pending: list[int]
    """Saved for weight gradients: from the end of I to the end of W."""


@dataclass(frozen=True)
class PageRequest:
    """The plan that a page describes.

    Raises:
        ValueError: stages times microbatches exceed MOST_PIECES.
    """

    config: TransformerConfig
    """The model, with its pipeline and context ranks."""
    micro_batch_size: int
    """Sequences of a microbatch."""
    num_microbatches: int
    """Microbatches of a step on each replica."""
    data_parallel_size: int = 1
    """Replicas."""
    machine: Machine = field(default_factory=Machine)
    """Rates of the machine."""
    name_settings: Callable[[str], str] = str
    """Rewrites the names of settings in a message, for example as flags."""

    def __post_init__(self) -> None:
        pieces = self.pieces
        if pieces > MOST_PIECES:
            raise ValueError(
                f"html: expected at most {MOST_PIECES:,} stages times microbatches to draw, got {pieces:,}; choose "
                "fewer microbatches (num_microbatches), since the schedule repeats"
            )

    @property
    def pieces(self) -> int:
        """The number of stages times microbatches."""
        return num_stages(self.config) * self.num_microbatches


def describe_plan(request: PageRequest) -> dict[str, Any]:
    """Return the data of the page: the configuration, the plan's simulation, and those of other schedules.

    Args:
        request: the plan to describe.

    Returns:
        Nested dicts with string keys, lists, strings, finite numbers, booleans and None; equal for equal plans.

    Raises:
        ValueError: the schedule does not allow so many microbatches.
    """
    config = request.config
    times = StageTimes(request.machine)
    chosen = _describe(request, config, times)
    has_others = config.pipeline_model_parallel_size > 1 and request.pieces <= WITH_OTHERS
    names = [name for name in SCHEDULES if has_others and name != chosen["name"]]
    others, refused = plan_schedules(config, names, lambda other: _describe(request, other, times))
    unit = memory_unit(max(rank["memory"]["total"] for rank in chosen["ranks"]))
    return {
        "title": _title(chosen),
        "words": _words(request),
        "memoryUnit": {"name": unit, "size": UNITS[unit]},
        "message": message_bytes(config, request.micro_batch_size),
        "replicas": request.data_parallel_size,
        "contextRanks": config.context_parallel_size,
        "machine": asdict(request.machine),
        "limits": {"withOthers": WITH_OTHERS, "most": MOST_PIECES, "pieces": request.pieces},
        "schedules": [chosen, *others.values()],
        "refused": [{"name": name, "reason": request.name_settings(text)} for name, text in refused.items()],
    }


def saved_over_time(actions: Sequence[Action], stages: Sequence[StageMemory], splits_backward: bool) -> SavedBytes:
    """Return the saved bytes on a rank after each of its actions.

    Args:
        actions: actions of the rank, in order.
        stages: bytes that a microbatch saves on each stage.
        splits_backward: True if backward is split into I and W.
    """
    found = SavedBytes([], [])
    activations = 0
    pending = 0
    for kind, stage, _ in actions:
        saved = stages[stage].saved
        part = stages[stage].weight_gradients * splits_backward
        if kind == "F":
            activations += saved
        elif kind == "W":
            pending -= part
        else:
            activations -= saved
            pending += part * (kind == "I")
        found.saved.append(activations)
        found.pending.append(pending)
    return found


def _describe(request: PageRequest, config: TransformerConfig, times: StageTimes) -> dict[str, Any]:
    """Return the data of one schedule of the model."""
    batch = request.micro_batch_size
    count = request.num_microbatches
    machine = request.machine
    stage_times = times.of(config, batch)
    plan = plan_pipeline(config, batch, count, times)
    schedule = plan.schedule
    simulation = plan.simulation
    gradients, update = after_backward(config, batch, count, request.data_parallel_size, machine)
    memory = predict_stages(config, batch)
    everything = predict_stages(without_recompute(config), batch)
    unsaved = rank_memories(without_recompute(config), schedule, everything, request.data_parallel_size)
    stages = [
        {
            "rank": schedule.rank_of(stage),
            "virtual": get_stage_place(config, stage).vp_stage,
            "holds": describe_stage(config, stage),
            "first": get_transformer_layer_offset(config, *get_stage_place(config, stage)),
            "layers": layers_by_stage(config)[stage],
            "again": describe_recomputation(config, stage),
            **dict(
                zip(
                    ("F", "I", "W", "recomputed", "exchanged", "packed", "copied", "moved"),
                    stage_times[stage],
                    strict=True,
                )
            ),
            "saved": memory[stage].saved,
            "waiting": memory[stage].weight_gradients * schedule.splits_backward,
            "savedWithout": everything[stage].saved,
        }
        for stage in range(schedule.num_stages)
    ]
    actions, saved = _actions(plan, memory)
    return {
        "name": schedule.name,
        "ranksCount": schedule.pp_size,
        "microbatches": schedule.num_microbatches,
        "virtual": schedule.stages_per_rank,
        "makespan": simulation.makespan,
        "idle": sum(simulation.bubble) / (schedule.pp_size * simulation.makespan),
        "gradients": gradients,
        "update": update,
        "wire": plan.costs.communication,
        "stages": stages,
        "ranks": [
            {**rank, "totalWithout": whole.total}
            for rank, whole in zip(_ranks(plan, memory, saved, request.data_parallel_size), unsaved, strict=True)
        ],
        "actions": actions,
        "copies": copies_of_schedule(
            config, schedule, plan.costs, simulation, simulation.makespan + gradients, update, batch, machine
        ),
    }


def _actions(plan: PipelinePlan, memory: Sequence[StageMemory]) -> tuple[dict[str, Any], list[SavedBytes]]:
    """Return all actions as columns, and the saved bytes of every rank."""
    schedule = plan.schedule
    starts = plan.simulation.starts
    costs = plan.costs
    order = [action for actions in schedule.actions for action in actions]
    number = {action: place for place, action in enumerate(order)}
    saved = [saved_over_time(actions, memory, schedule.splits_backward) for actions in schedule.actions]
    columns = {
        "rank": [rank for rank, actions in enumerate(schedule.actions) for _ in actions],
        "kind": "".join(action.kind for action in order),
        "stage": [action.stage for action in order],
        "microbatch": [action.microbatch for action in order],
        "start": [starts[action] for action in order],
        "input": [
            -1 if (last := last_input(schedule, costs, starts, action)) is None else number[last] for action in order
        ],
        "saved": [size for each in saved for size in each.saved],
        "waiting": [size for each in saved for size in each.pending],
    }
    return columns, saved


def describe_recomputation(config: TransformerConfig, stage: int) -> str:
    """Describe which modules of which layers of a stage are recomputed, and the block lengths."""
    runs: list[tuple[tuple[int, str], list[int]]] = []
    for block in recompute_blocks(config, *get_stage_place(config, stage)):
        if block.kind == "none":
            continue
        key = len(block.layers), "whole" if block.kind == "full" else ", ".join(sorted(block.modules))
        if runs and runs[-1][0] == key and runs[-1][1][-1] + 1 == block.layers[0]:
            runs[-1][1].extend(block.layers)
        else:
            runs.append((key, [*block.layers]))
    words = []
    for (length, what), layers in runs:
        named = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]} to {layers[-1]}"
        words.append(f"{named}, {what}{f', {length} at a time' * (length > 1)}")
    return "; ".join(words) or "nothing"


def last_input(schedule: Schedule, costs: Costs, starts: dict[Action, float], action: Action) -> Action | None:
    """Return the dependency of an action that arrives last; None if it has no dependency.

    Args:
        schedule: the simulated schedule.
        costs: costs of the simulation.
        starts: start of each action.
        action: the action.
    """
    rank = schedule.rank_of(action.stage)

    def arrival(other: Action) -> float:
        away = schedule.rank_of(other.stage) != rank
        return starts[other] + costs.time(other) + (costs.communication if away else 0.0)

    return max(dependencies(schedule, action), key=arrival, default=None)


def _ranks(
    plan: PipelinePlan, memory: Sequence[StageMemory], saved: Sequence[SavedBytes], replicas: int
) -> list[dict[str, Any]]:
    """Return bubble and memory of every rank, and the time of its peak."""
    schedule = plan.schedule
    simulation = plan.simulation
    found = []
    for rank, sizes in enumerate(rank_memories(plan.config, schedule, memory, replicas)):
        together = [a + b for a, b in zip(*saved[rank], strict=True)]
        place = together.index(max(together))
        action = schedule.actions[rank][place]
        time = simulation.starts[action] + (0.0 if action.kind == "F" else plan.costs.time(action))
        found.append(
            {
                "idle": simulation.bubble[rank],
                "inFlight": simulation.peak_in_flight[rank],
                "peakTime": time,
                "memory": {**asdict(sizes), "total": sizes.total},
            }
        )
    return found


def _title(chosen: dict[str, Any]) -> str:
    count = chosen["microbatches"]
    ranks = chosen["ranksCount"]
    microbatches = f"{count:,} microbatch{'es' * (count != 1)}"
    if ranks == 1:
        return f"{microbatches} on one rank"
    stages = f", {chosen['virtual']} stages each" if chosen["virtual"] > 1 else ""
    return f"{chosen['name']}: {microbatches} on {ranks:,} ranks{stages}"


def _words(request: PageRequest) -> list[list[str]]:
    """Describe the configuration, as pairs of a name and a text."""
    config = request.config
    machine = request.machine
    mhc = f", hyper-connections of {config.num_residual_streams} streams" if config.enable_hyper_connections else ""
    schedule = schedule_for(config, request.num_microbatches).name
    virtual = f", {config.virtual_pipeline_model_parallel_size} virtual stages per rank"
    words = [
        ["model", f"{config.num_layers:,} layers ({config.layer_pattern}) of width {config.hidden_size:,}{mhc}"],
        ["data types", f"parameters {config.params_dtype}, activations {config.compute_dtype}"],
        ["mesh", describe_mesh(config, request.data_parallel_size)],
        ["schedule", schedule + virtual * ((config.virtual_pipeline_model_parallel_size or 1) > 1)],
        [
            "step",
            f"{request.num_microbatches:,} microbatches of {request.micro_batch_size:,} x {config.seq_length:,} tokens",
        ],
        [
            "machine",
            f"{machine.compute_rate / 1e12:g} TFLOP/s, {machine.memory_bandwidth / 1e9:g} GB/s of memory, "
            f"{machine.network_bandwidth / 1e9:g} GB/s between ranks, {machine.link_bandwidth / 1e9:g} GB/s to hosts"
            + f", {machine.instruction_rate / 1e9:g} billion warp instructions/s"
            * (config.impl == "triton"),
        ],
    ]
    if config.enable_tensor_offload or config.enable_activation_offload:
        what = ["parameters"] * config.enable_tensor_offload + ["activations"] * config.enable_activation_offload
        ahead = config.tensor_offload_num_prefetch_layers
        words.append(["offload", f"{' and '.join(what)}, {ahead} layer{'s' * (ahead != 1)} fetched ahead"])
    return words
