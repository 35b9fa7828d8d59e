"""The report of a pipeline: placement of layers, the schedule's table, its time and memory."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, TypeVar

from rich.console import Console
from rich.table import Table

from diptych.planner.memory.stages import predict_stages
from diptych.planner.reports.console import new_table, print_written
from diptych.planner.reports.memory import describe_blocks
from diptych.planner.reports.mesh import add_rows, printed_rows
from diptych.planner.step_time import Machine, StageTimes
from diptych.planner.timeline import draw_timelines, timeline_of
from diptych.plans.config import TransformerConfig
from diptych.plans.mesh import unsharded
from diptych.plans.schedule.actions import Schedule
from diptych.plans.schedule.csv import schedule_rows
from diptych.plans.schedule.lockstep import lockstep_makespan
from diptych.plans.schedule.named import num_warmup_microbatches, schedule_for
from diptych.plans.schedule.partition import get_stage_place, get_transformer_layer_offset, layers_by_stage, num_stages
from diptych.plans.schedule.placement import INTERLEAVED_SCHEDULES, SCHEDULES, V_SCHEDULES
from diptych.plans.schedule.simulate import Costs, Simulation, simulate

MIB = 2**20
DEFAULT_VIRTUAL_STAGES = 2
"""Virtual stages of interleaved and V-shaped schedules that are compared with a configuration without any."""

PRECISION = ".5g"
"""Format of printed times."""
IN_JAX = "in JAX: the makespan of lock-step slots, each as long as its busiest rank"

T = TypeVar("T")


class PipelinePlan(NamedTuple):
    """A configuration's schedule and its simulation."""

    config: TransformerConfig
    schedule: Schedule
    costs: Costs
    simulation: Simulation


def plan_pipeline(
    config: TransformerConfig, micro_batch_size: int, num_microbatches: int, roofline: StageTimes | None = None
) -> PipelinePlan:
    """Return a configuration's schedule and its simulation.

    Args:
        config: the model, with its pipeline.
        micro_batch_size: sequences of a microbatch.
        num_microbatches: microbatches of a step.
        roofline: predicts times of stages and messages in seconds, as ``diptych plan`` prints them; None: F, I and W of
            a stage each take its number of layers.

    Raises:
        ValueError: the schedule does not allow so many microbatches.
    """
    schedule = schedule_for(config, num_microbatches)
    if roofline is None:
        times = [float(count) for count in layers_by_stage(config)]
        costs = Costs(times, times, times)
    else:
        costs = roofline.costs(config, micro_batch_size)
    memory = predict_stages(config, micro_batch_size)
    costs = replace(
        costs,
        activation_bytes=[float(stage.saved) for stage in memory],
        weight_gradient_bytes=[float(stage.weight_gradients) if schedule.splits_backward else 0.0 for stage in memory],
    )
    return PipelinePlan(config, schedule, costs, simulate(schedule, costs))


def plan_schedules(
    config: TransformerConfig, names: Iterable[str], plan: Callable[[TransformerConfig], T]
) -> tuple[dict[str, T], dict[str, str]]:
    """Plan named schedules for the same model and ranks; "none" runs the model on one rank.

    Schedules with another number of stages divide the layers again, with the same options.

    Args:
        config: the model, with a pipeline of any schedule.
        names: names of schedules.
        plan: plans a configuration; it raises a ValueError if the schedule does not fit.

    Returns:
        The plans of the schedules that fit, and the reasons why the others do not fit, by name.
    """
    found = {}
    refused = {}
    for name in names:
        try:
            found[name] = plan(with_schedule(config, name))
        except ValueError as error:
            refused[name] = str(error)
    return found, refused


def with_schedule(config: TransformerConfig, name: str) -> TransformerConfig:
    """Return the same model and ranks with another schedule, and with the virtual stages it needs.

    Raises:
        ValueError: the model and ranks do not allow the schedule.
    """
    if name == "none":
        return unsharded(config)
    virtual = config.virtual_pipeline_model_parallel_size if name in INTERLEAVED_SCHEDULES else None
    if name in V_SCHEDULES or (name in INTERLEAVED_SCHEDULES and (virtual or 1) == 1):
        virtual = DEFAULT_VIRTUAL_STAGES
    return replace(
        config,
        pipeline_schedule=name,
        pipeline_schedule_file=None,
        virtual_pipeline_model_parallel_size=virtual,
        microbatch_group_size_per_vp_stage=None,
    )


def print_schedule(
    console: Console,
    config: TransformerConfig,
    micro_batch_size: int,
    num_microbatches: int,
    picture: Path | str | None = None,
    roofline: StageTimes | None = None,
    name_settings: Callable[[str], str] = str,
) -> None:
    """Print the placement of layers, the actions of every rank, their cost, and a comparison of all schedules.

    Args:
        console: printed to.
        config: as in plan_pipeline.
        micro_batch_size: as in plan_pipeline.
        num_microbatches: as in plan_pipeline.
        picture: a .png or .svg for the timelines of this schedule and the others that fit; None: no picture.
        roofline: as in plan_pipeline.
        name_settings: rewrites the names of settings in a message, for example as flags.

    Raises:
        ValueError: as in plan_pipeline; or the picture is neither .png nor .svg.
    """

    def planned(config: TransformerConfig) -> PipelinePlan:
        return plan_pipeline(config, micro_batch_size, num_microbatches, roofline)

    plan = planned(config)
    schedule = plan.schedule
    others, refused = plan_schedules(config, [name for name in SCHEDULES if name != schedule.name], planned)
    unit = unit_of(roofline)
    stages = f" of {schedule.stages_per_rank} virtual stages" if schedule.stages_per_rank > 1 else ""
    console.print(
        f"pipeline: {schedule.name}, {schedule.pp_size} rank{'s' * (schedule.pp_size > 1)}{stages}, "
        f"{num_microbatches} microbatches of {micro_batch_size} x {config.seq_length:,} tokens\n"
    )
    console.print(_stage_table(plan))
    _print_blocks(console, config)
    console.print("\nactions in the format of torch.distributed.pipelining (stage, kind, microbatch)")
    rows = schedule_rows(schedule)
    for rank in printed_rows(schedule.pp_size):
        if rank is None:
            console.print("...")
            continue
        row = rows[rank]
        label = f"rank {rank:>{len(str(schedule.pp_size - 1))}}  "
        console.print(label + shortened(row, console.width - len(label)), highlight=False, no_wrap=True)
    console.print()
    console.print(_rank_table(plan, unit))
    console.print()
    console.print(_comparison(plan, others, unit))
    for name, reason in refused.items():
        console.print(f"{name} does not fit: {name_settings(reason)}", highlight=False, markup=False)
    console.print(f"time: {unit.description}. Memory: saved for backward, without temporary buffers.")
    console.print(IN_JAX)
    if picture is not None:
        drawn = [plan, *(other for name, other in others.items() if name != "none")]
        draw_timelines([timeline_of(p.schedule, in_unit(p.costs, unit)) for p in drawn], picture, unit.name)
        print_written(console, picture)


class Unit(NamedTuple):
    """The unit of printed times."""

    name: str
    description: str
    """Description of the cost model, printed below a table."""
    scale: float = 1.0
    """Factor from the simulation's times to this unit."""


def unit_of(roofline: StageTimes | None) -> Unit:
    """Return the unit of the times that plan_pipeline predicts."""
    if roofline is None:
        return Unit("a layer's forward is 1", "in forwards of one layer; I and W each take as long as F")
    return Unit(
        "ms", f"milliseconds of a roofline with {describe_machine(roofline.machine)}, as on the page (--html)", 1e3
    )


def describe_machine(machine: Machine) -> str:
    """Describe the rates that a schedule's times depend on."""
    return (
        f"{machine.compute_rate / 1e12:g} TFLOP/s, {machine.memory_bandwidth / 1e9:g} GB/s of memory and "
        f"{machine.network_bandwidth / 1e9:g} GB/s between ranks"
    )


def in_unit(costs: Costs, unit: Unit) -> Costs:
    """Return the same costs with times in another unit."""

    def scaled(value: float | Sequence[float]) -> float | list[float]:
        return [each * unit.scale for each in value] if isinstance(value, Sequence) else value * unit.scale

    return replace(
        costs,
        forward=scaled(costs.forward),
        input_gradient=scaled(costs.input_gradient),
        weight_gradient=scaled(costs.weight_gradient),
        communication=costs.communication * unit.scale,
    )


def shortened(row: str, width: int) -> str:
    """Shorten a comma-separated row to a width: entries in its middle are replaced by dots."""
    if len(row) <= width:
        return row
    entries = row.split(",")
    start = []
    end = []
    while entries:
        grown = [*start, entries[0]], [entries[-1], *end]
        side = 0 if len(",".join(start)) <= len(",".join(end)) else 1
        parts = (grown[0], end) if side == 0 else (start, grown[1])
        if len(",".join([*parts[0], "...", *parts[1]])) > width:
            break
        start, end = parts
        entries = entries[1:] if side == 0 else entries[:-1]
    return ",".join([*start, "...", *end])


def warmup(plan: PipelinePlan, rank: int) -> int:
    """Return the number of forwards that a rank runs before it alternates between forward and backward."""
    schedule = plan.schedule
    group = plan.config.microbatch_group_size_per_vp_stage
    p = schedule.pp_size
    m = schedule.num_microbatches
    v = schedule.stages_per_rank
    if schedule.name in ("none", "gpipe"):
        return 0 if schedule.name == "none" else m
    if schedule.name in ("1f1b", "interleaved", "zb-h1"):
        return num_warmup_microbatches(rank, p, m, v, group)
    kinds = [action.kind for action in schedule.actions[rank]]
    return max(0, next(i for i, kind in enumerate(kinds) if kind != "F") - 1)


def _stage_table(plan: PipelinePlan) -> Table:
    """Return a table of the layers of every stage, and of the bytes that a microbatch saves there."""
    config = plan.config
    schedule = plan.schedule
    virtual = schedule.stages_per_rank > 1
    split = schedule.splits_backward
    headings = ["rank", *(["virtual stage"] if virtual else []), "stage", "holds", "saved for backward, MiB"]
    table = new_table("stages", [*headings, *(["from I to W, MiB"] if split else [])], left=("holds",))
    rows = []
    for rank in range(schedule.pp_size):
        for stage in (stage for stage in range(schedule.num_stages) if schedule.rank_of(stage) == rank):
            place = [str(rank), *([str(stage // schedule.pp_size)] if virtual else []), str(stage)]
            sizes = [plan.costs.of("activation_bytes", stage), plan.costs.of("weight_gradient_bytes", stage)]
            cells = [f"{size / MIB:,.1f}" for size in sizes[: 1 + split]]
            rows.append([*place, describe_stage(config, stage), *cells])
    add_rows(table, rows)
    return table


def _print_blocks(console: Console, config: TransformerConfig) -> None:
    """Print the recompute blocks of the stages; equal stages are printed once."""
    words = [describe_blocks(config, stage) for stage in range(num_stages(config))]
    for what, run in groupby(range(len(words)), words.__getitem__):
        first, *rest = run
        stages = f"stages {first} to {rest[-1]}" if rest else f"stage {first}"
        console.print(f"blocks, {stages}: {what or 'no layer'}", highlight=False)
    if config.recompute_layout is not None:
        console.print(f"--recompute-layout {config.recompute_layout}", highlight=False, soft_wrap=True)


def describe_stage(config: TransformerConfig, stage: int) -> str:
    """Describe the embedding, layers and head of a stage."""
    count = layers_by_stage(config)[stage]
    first = get_transformer_layer_offset(config, *get_stage_place(config, stage))
    parts = ["embedding"] if stage == 0 else []
    if count:
        parts.append(f"layer {first}" if count == 1 else f"layers {first} to {first + count - 1}")
    if stage == num_stages(config) - 1:
        tied = not config.untie_embeddings_and_output_weights and stage > 0
        parts.append("norm, tied head, loss" if tied else "norm, head, loss")
    return " + ".join(parts) or "nothing"


def _rank_table(plan: PipelinePlan, unit: Unit) -> Table:
    """Return a table of warm-up, bubble and memory of every rank."""
    schedule = plan.schedule
    simulation = plan.simulation
    name = " ms" if unit.name == "ms" else ""
    bubble = f"bubble{',' * bool(name)}{name}"
    table = new_table(
        f"ranks; makespan {simulation.makespan * unit.scale:{PRECISION}}{name}",
        ("rank", "warm-up forwards", bubble, "share", "peak in flight", "peak saved, MiB"),
    )
    rows = [
        (
            str(rank),
            str(warmup(plan, rank)),
            f"{simulation.bubble[rank] * unit.scale:{PRECISION}}",
            f"{simulation.bubble[rank] / simulation.makespan:.1%}",
            str(simulation.peak_in_flight[rank]),
            f"{simulation.peak_bytes[rank] / MIB:,.1f}",
        )
        for rank in range(schedule.pp_size)
    ]
    add_rows(table, rows)
    return table


def _comparison(plan: PipelinePlan, others: Mapping[str, PipelinePlan], unit: Unit) -> Table:
    """Return a table of the chosen schedule and all others that fit."""
    title = f"schedules{'; times in ms' if unit.name == 'ms' else ''}; in flight and saved: largest of all ranks"
    headings = ("", "makespan", "relative", "in JAX", "bubble", "in flight", "saved, MiB", "")
    table = new_table(title, headings, no_wrap=headings)
    for name, other in {plan.schedule.name: plan, **others}.items():
        simulation = other.simulation
        note = "chosen" if other is plan else "one rank" if name == "none" else ""
        table.add_row(
            *time_cells(other.schedule, other.costs, simulation, plan.simulation.makespan, unit.scale),
            str(max(simulation.peak_in_flight)),
            f"{max(simulation.peak_bytes) / MIB:,.1f}",
            note,
        )
    return table


def time_cells(
    schedule: Schedule, costs: Costs, simulation: Simulation, makespan: float, scale: float = 1.0
) -> tuple[str, ...]:
    """Return the cells of a schedule in a comparison: name, makespan, relative, in JAX, and bubble.

    Args:
        schedule: the schedule.
        costs: times of its actions and messages.
        simulation: its simulation.
        makespan: makespan of the schedule that it is compared with.
        scale: factor from the simulation's times to printed times.
    """
    return (
        f"{schedule.name}, v={schedule.stages_per_rank}" if schedule.stages_per_rank > 1 else schedule.name,
        f"{simulation.makespan * scale:{PRECISION}}",
        f"{simulation.makespan / makespan:.3f}",
        f"{lockstep_makespan(schedule, costs) * scale:{PRECISION}}",
        f"{sum(simulation.bubble) / (schedule.pp_size * simulation.makespan):.1%}",
    )
