"""The report of a generated schedule, compared with every named one: ``diptych plan --generate-schedule``."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from diptych.planner.generate import GENERATED, generate_schedule
from diptych.planner.memory.ranks import standing_bytes
from diptych.planner.memory.stages import predict_stages
from diptych.planner.reports.console import new_table, print_written
from diptych.planner.reports.mesh import add_rows
from diptych.planner.reports.schedule import IN_JAX, plan_schedules, time_cells
from diptych.planner.request import PlanRequest, parse_bytes
from diptych.planner.stage_costs import read_stage_costs
from diptych.planner.step_time import StageTimes, costs_of
from diptych.planner.timeline import draw_timelines, timeline_of
from diptych.plans.config import TransformerConfig
from diptych.plans.schedule.actions import Schedule
from diptych.plans.schedule.csv import read_schedule, schedule_to_csv
from diptych.plans.schedule.named import schedule_for
from diptych.plans.schedule.partition import num_stages
from diptych.plans.schedule.placement import SCHEDULES, place_of
from diptych.plans.schedule.simulate import Costs, Simulation, simulate

MIB = 2**20


class Planned(NamedTuple):
    """A schedule with its costs and simulation, for the comparison."""

    schedule: Schedule
    costs: Costs
    simulation: Simulation
    largest: float
    """Bytes of the rank that needs most memory."""


def print_generated(
    console: Console, command: PlanRequest, path: Path, name_settings: Callable[[str], str] = str
) -> TransformerConfig:
    """Generate a schedule for a pipeline's costs, write it, and print its comparison with the named schedules.

    Args:
        console: printed to.
        command: request with generate_schedule.
        path: CSV file to write.
        name_settings: rewrites the names of settings in a message, for example as flags.

    Returns:
        The configuration that runs the file.

    Raises:
        ValueError: the costs cannot be read, or the memory limit is below the need of one microbatch.
    """
    config = command.model
    m = command.num_microbatches
    costs = stage_costs(command, config)
    standing = standing_bytes(config, command.data_parallel_size)
    limit = None if command.memory_limit is None else parse_bytes("memory_limit", command.memory_limit)
    found = generate_schedule(
        config.pipeline_model_parallel_size,
        m,
        config.virtual_pipeline_model_parallel_size or 1,
        costs,
        None if limit is None else _memory_limits(config, costs, standing, limit),
        config.placement,
        command.generate_effort,
    )
    path.write_text(schedule_to_csv(found.schedule))
    made = Planned(found.schedule, costs, found.simulation, _largest(found.simulation, standing))
    named, refused = _named(command)
    source = "predicted" if command.stage_costs is None else f"of {escape(str(command.stage_costs))}"
    console.print(
        f"pipeline: {GENERATED}, {config.pipeline_model_parallel_size} ranks of {made.schedule.stages_per_rank} "
        f"stage{'s' * (made.schedule.stages_per_rank > 1)}, {m} microbatches of {command.micro_batch_size} x "
        f"{config.seq_length:,} tokens; times {source}\n",
        highlight=False,
    )
    console.print(_stage_table(made))
    console.print()
    console.print(_comparison(made, named, limit))
    for name, reason in refused.items():
        console.print(f"{name} does not fit: {name_settings(reason)}", highlight=False, markup=False)
    console.print(IN_JAX)
    _print_bound(console, made.simulation.makespan, found.makespan_bound)
    print_written(console, path)
    if command.picture is not None:
        drawn = [made, *(each for each in named if each.schedule.num_stages == made.schedule.num_stages)]
        draw_timelines([timeline_of(each.schedule, each.costs) for each in drawn], command.picture, "seconds")
        print_written(console, command.picture)
    return replace(
        config,
        pipeline_schedule=None,
        pipeline_schedule_file=read_schedule(path),
        microbatch_group_size_per_vp_stage=None,
    )


def _print_bound(console: Console, makespan: float, bound: float) -> None:
    console.print(
        f"{GENERATED}: makespan {makespan:.5g} s, at least {bound:.5g} s: {makespan / bound - 1.0:.1%} above a lower "
        "bound for all schedules of these stages",
        highlight=False,
    )


def stage_costs(command: PlanRequest, config: TransformerConfig) -> Costs:
    """Return seconds and bytes of every stage, from a file or predicted.

    Args:
        command: request, with the name of a file or the rates of a machine.
        config: the model, with its pipeline.

    Raises:
        ValueError: the file is not in the format of diptych.planner.stage_costs.
    """
    batch = command.micro_batch_size
    if command.stage_costs is not None:
        costs, has_bytes = read_stage_costs(command.stage_costs, num_stages(config))
        if has_bytes:
            return costs
    else:
        machine = command.machine
        costs = costs_of(config, StageTimes(machine).of(config, batch), batch, machine)
    memory = predict_stages(config, batch)
    return replace(
        costs,
        activation_bytes=[float(stage.saved) for stage in memory],
        weight_gradient_bytes=[float(stage.weight_gradients) for stage in memory],
    )


def _memory_limits(config: TransformerConfig, costs: Costs, standing: Sequence[int], limit: int) -> list[float]:
    """Return the bytes that the limit leaves on every rank for values saved for backward."""
    p = config.pipeline_model_parallel_size
    placement = config.placement
    home = [place_of(stage, p, placement).pp_rank for stage in range(num_stages(config))]
    for rank, size in enumerate(standing):
        saved = sum(costs.of("activation_bytes", stage) for stage, here in enumerate(home) if here == rank)
        if size + saved > limit:
            raise ValueError(
                f"memory_limit: expected at least {size + saved:,.0f} bytes, which pipeline rank {rank} holds with one "
                f"microbatch ({size:,} without), got {limit:,}; give more, or make microbatches smaller"
            )
    return [float(limit - size) for size in standing]


def _largest(simulation: Simulation, standing: Sequence[int]) -> float:
    """Return the bytes of the rank that needs most memory."""
    return max(size + saved for size, saved in zip(standing, simulation.peak_bytes, strict=True))


def _named(command: PlanRequest) -> tuple[list[Planned], dict[str, str]]:
    """Return every named schedule of the same model and ranks, and the reasons why others do not fit.

    If times are predicted, schedules with other stages have their own; measured times do not apply to them.
    """
    stages = num_stages(command.model)

    def planned(config: TransformerConfig) -> Planned:
        if command.stage_costs is not None and num_stages(config) != stages:
            raise ValueError(
                f"costs: expected {num_stages(config)} stages, as the schedule has, got {stages}; give costs for this "
                "schedule"
            )
        schedule = schedule_for(config, command.num_microbatches)
        costs = stage_costs(command, config)
        simulation = simulate(schedule, costs)
        standing = standing_bytes(config, command.data_parallel_size)
        return Planned(schedule, costs, simulation, _largest(simulation, standing))

    found, refused = plan_schedules(command.model, SCHEDULES[1:], planned)
    return [*found.values()], refused


def _stage_table(made: Planned) -> Table:
    """Return a table of the costs of every stage."""
    headings = ("rank", "stage", "F, ms", "I, ms", "W, ms", "saved for backward, MiB", "from I to W, MiB")
    table = new_table("stages, one microbatch", headings)
    schedule = made.schedule
    costs = made.costs
    rows = []
    for rank in range(schedule.pp_size):
        for stage in (stage for stage in range(schedule.num_stages) if schedule.rank_of(stage) == rank):
            times = [costs.of(name, stage) * 1e3 for name in ("forward", "input_gradient", "weight_gradient")]
            sizes = [costs.of(name, stage) / MIB for name in ("activation_bytes", "weight_gradient_bytes")]
            rows.append([str(rank), str(stage), *(f"{t:.4g}" for t in times), *(f"{size:,.1f}" for size in sizes)])
    add_rows(table, rows)
    return table


def _comparison(made: Planned, named: Sequence[Planned], limit: int | None) -> Table:
    """Return a table of the generated schedule and the named ones."""
    headings = ("", "makespan, s", "relative", "in JAX, s", "bubble", "rank that holds most, MiB", "")
    table = new_table("schedules", headings)
    for each in (made, *named):
        note = "over memory_limit" if limit is not None and each.largest > limit else ""
        times = time_cells(each.schedule, each.costs, each.simulation, made.simulation.makespan)
        table.add_row(*times, f"{each.largest / MIB:,.1f}", note)
    return table
