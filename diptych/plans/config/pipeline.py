"""Rules of the pipeline settings: the partition into stages and the schedule."""

from functools import lru_cache

from diptych.plans.config.rules import Rule, choice, count, flag, number
from diptych.plans.context.exchange import PIPELINED
from diptych.plans.schedule.actions import Schedule, ScheduleError
from diptych.plans.schedule.partition import layers_by_stage
from diptych.plans.schedule.placement import INTERLEAVED_SCHEDULES, SCHEDULES, V_SCHEDULES
from diptych.plans.schedule.validate import validate_schedule

_SPLITS = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""Settings that make the partition uneven."""


def _split_settings(config) -> list[str]:
    return [f"{name}={getattr(config, name)}" for name in _SPLITS if getattr(config, name)]


def _split_error(config) -> str:
    """Return the fault of the partition into stages, or the empty string."""
    try:
        layers_by_stage(config)
    except ValueError as error:
        return str(error)
    return ""


def _schedule_error(config) -> str:
    """Return why the schedule does not support these ranks and virtual stages, or the empty string."""
    name = config.schedule_name
    p = config.pipeline_model_parallel_size
    v = config.virtual_pipeline_model_parallel_size
    if (name == "none") != (p == 1):
        expected = "None or 'none' without a pipeline" if p == 1 else f"one of {SCHEDULES[1:]} with {p} pipeline ranks"
        return f"pipeline_schedule: expected {expected}, got {name!r}"
    if name in V_SCHEDULES:
        if v != 2:
            return (
                f"virtual_pipeline_model_parallel_size: expected 2 with schedule {name!r}, which is V-shaped, got {v}"
            )
    elif (name in INTERLEAVED_SCHEDULES) != ((v or 1) > 1):
        several = "'interleaved', 'interleaved-zb1p', None or, for 2, one of " + ", ".join(map(repr, V_SCHEDULES))
        expected = f"{several} with" if (v or 1) > 1 else "another schedule without"
        remedy = "2 or more" if name == "interleaved" else "2"
        remedy = f"give virtual_pipeline_model_parallel_size {remedy}" if (v or 1) == 1 else "choose one of them"
        return f"pipeline_schedule: expected {expected} virtual stages, got {name!r}; {remedy}"
    if config.microbatch_group_size_per_vp_stage is not None and name != "interleaved":
        return (
            f"microbatch_group_size_per_vp_stage: expected None with schedule {name!r}, got "
            f"{config.microbatch_group_size_per_vp_stage}; give virtual_pipeline_model_parallel_size"
        )
    return ""


def _file_error(config) -> str:
    """Return why the schedule from a file cannot be used, or the empty string."""
    schedule = config.pipeline_schedule_file
    if not isinstance(schedule, Schedule):
        return (
            "pipeline_schedule_file: expected a schedule, as diptych.plans.schedule.csv.read_schedule returns it, got "
            f"{schedule!r}"
        )
    if config.pipeline_schedule is not None:
        return f"pipeline_schedule: expected None beside pipeline_schedule_file, got {config.pipeline_schedule!r}"
    if config.cp_exchange == PIPELINED and config.context_parallel_size > 1:
        return (
            "pipeline_schedule_file: expected None with cp_exchange 'pipelined', which has an order, got a schedule of "
            f"{schedule.pp_size} ranks"
        )
    if fault := _fault_of(schedule):
        return f"pipeline_schedule_file: expected a schedule that runs, got one with a fault: {fault}"
    if schedule.pp_size == 1:
        return "pipeline_schedule_file: expected at least two rows (one per rank), got one"
    for name, given, found in (
        ("pipeline_model_parallel_size", config.pipeline_model_parallel_size, schedule.pp_size),
        (
            "virtual_pipeline_model_parallel_size",
            config.virtual_pipeline_model_parallel_size or 1,
            schedule.stages_per_rank,
        ),
    ):
        if given != found:
            return f"{name}: expected {found} as in pipeline_schedule_file, got {given}"
    if schedule.forward_only:
        return "pipeline_schedule_file: expected backwards, too, got forwards alone"
    if config.microbatch_group_size_per_vp_stage is not None:
        return (
            "microbatch_group_size_per_vp_stage: expected None with pipeline_schedule_file, got "
            f"{config.microbatch_group_size_per_vp_stage}"
        )
    return ""


@lru_cache(maxsize=16)  # the planner copies configurations thousands of times
def _fault_of(schedule: Schedule) -> str:
    """Return the first fault of a schedule, or the empty string."""
    try:
        validate_schedule(schedule)
    except ScheduleError as error:
        return str(error)
    return ""


def _end_settings(config) -> list[str]:
    """Return the settings that give the first or last rank its own number of layers."""
    return [f"{name}={getattr(config, name)}" for name in _SPLITS[:2] if getattr(config, name) is not None]


PIPELINE_RULES: tuple[Rule, ...] = (
    count("pipeline_model_parallel_size"),
    count("virtual_pipeline_model_parallel_size"),
    count("num_layers_in_first_pipeline_stage"),
    count("num_layers_in_last_pipeline_stage"),
    flag("account_for_embedding_in_pipeline_split"),
    flag("account_for_loss_in_pipeline_split"),
    Rule(
        "pipeline_model_parallel_layout",
        lambda c: c.pipeline_model_parallel_layout is None or isinstance(c.pipeline_model_parallel_layout, str),
        lambda c: (
            "pipeline_model_parallel_layout: expected stages as a string, e.g. 'Ett|ttL', got "
            f"{c.pipeline_model_parallel_layout!r}"
        ),
    ),
    choice("pipeline_schedule", (None, *SCHEDULES)),
    Rule(
        "pipeline_schedule_file",
        lambda c: c.pipeline_schedule_file is None or not _file_error(c),
        _file_error,
    ),
    count("microbatch_group_size_per_vp_stage"),
    flag("deallocate_pipeline_outputs"),
    flag("overlap_p2p_comm"),
    flag("variable_seq_lengths"),
    flag("calculate_per_token_loss"),
    number("pipeline_timeout", "(0, inf)"),
    Rule(
        "virtual stages need a pipeline",
        lambda c: c.virtual_pipeline_model_parallel_size in (None, 1) or c.pipeline_model_parallel_size > 1,
        lambda c: (
            "virtual_pipeline_model_parallel_size: expected None with pipeline_model_parallel_size=1, "
            f"got {c.virtual_pipeline_model_parallel_size}; virtual stages interleave pipeline ranks"
        ),
    ),
    Rule(
        "uneven splits need a pipeline",
        lambda c: c.pipeline_model_parallel_size > 1 or not _split_settings(c),
        lambda c: f"{_split_settings(c)[0]}: expected a pipeline to split, got pipeline_model_parallel_size=1",
    ),
    Rule(
        "a layout excludes other split settings",
        lambda c: c.pipeline_model_parallel_layout is None or not _split_settings(c),
        lambda c: (
            f"pipeline_model_parallel_layout: expected None with {', '.join(_split_settings(c))}, got "
            f"{c.pipeline_model_parallel_layout!r}; a layout places every layer"
        ),
    ),
    Rule(
        "counted ends exclude explicit layer counts",
        lambda c: (
            not (
                (c.account_for_embedding_in_pipeline_split and c.num_layers_in_first_pipeline_stage is not None)
                or (c.account_for_loss_in_pipeline_split and c.num_layers_in_last_pipeline_stage is not None)
            )
        ),
        lambda c: (
            "account_for_embedding_in_pipeline_split, account_for_loss_in_pipeline_split: expected False if that "
            f"stage's number of layers is given, got {', '.join(_split_settings(c))}"
        ),
    ),
    Rule(
        "schedule fits the stages",
        lambda c: c.pipeline_schedule_file is not None or not _schedule_error(c),
        _schedule_error,
    ),
    Rule(
        "V-shaped placement has both ends on one rank",
        lambda c: c.placement == "loop" or not _end_settings(c),
        lambda c: (
            f"{_end_settings(c)[0].split('=')[0]}: expected None with schedule {c.schedule_name!r}, where the first "
            f"rank holds the first and the last stage, got {', '.join(_end_settings(c))}; list the stages in "
            "pipeline_model_parallel_layout"
        ),
    ),
    Rule("stages divide layers", lambda c: not _split_error(c), _split_error),
)
