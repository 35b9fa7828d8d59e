"""Rules of the pipeline settings: how layers are cut into stages, and in which order ranks work."""

from plans.config.rules import Rule, choice, count, flag, number
from plans.partition import layers_by_stage

SCHEDULES = ("none", "gpipe", "1f1b", "interleaved", "zb-h1")

_SPLITS = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""Settings that change an even split."""


def schedule_name(config) -> str:
    """The schedule asked for, or the one that fits ranks and virtual stages."""
    if config.pipeline_schedule is not None:
        return config.pipeline_schedule
    if config.pipeline_model_parallel_size == 1:
        return "none"
    return "interleaved" if (config.virtual_pipeline_model_parallel_size or 1) > 1 else "1f1b"


def _split_asked(config) -> list[str]:
    return [f"{name}={getattr(config, name)}" for name in _SPLITS if getattr(config, name)]


def _split_error(config) -> str:
    """What does not add up, or the empty string."""
    try:
        layers_by_stage(config)
    except ValueError as error:
        return str(error)
    return ""


def _schedule_error(config) -> str:
    """Why the schedule cannot have these ranks and virtual stages, or the empty string."""
    name, p, v = schedule_name(config), config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    if (name == "none") != (p == 1):
        expected = "None or 'none' without a pipeline" if p == 1 else f"one of {SCHEDULES[1:]} with {p} pipeline ranks"
        return f"pipeline_schedule: expected {expected}, got {name!r}"
    if (name == "interleaved") != ((v or 1) > 1):
        expected = "'interleaved' or None with" if (v or 1) > 1 else "another schedule without"
        return f"pipeline_schedule: expected {expected} virtual stages, got {name!r}"
    if config.microbatch_group_size_per_vp_stage is not None and name != "interleaved":
        return (
            f"microbatch_group_size_per_vp_stage: expected None with schedule {name!r}, got "
            f"{config.microbatch_group_size_per_vp_stage}; give virtual_pipeline_model_parallel_size"
        )
    return ""


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
        lambda c: c.pipeline_model_parallel_size > 1 or not _split_asked(c),
        lambda c: f"{_split_asked(c)[0]}: expected a pipeline to split, got pipeline_model_parallel_size=1",
    ),
    Rule(
        "a layout is the whole split",
        lambda c: c.pipeline_model_parallel_layout is None or not _split_asked(c),
        lambda c: (
            f"pipeline_model_parallel_layout: expected None beside {', '.join(_split_asked(c))}, got "
            f"{c.pipeline_model_parallel_layout!r}; a layout says where everything lies"
        ),
    ),
    Rule(
        "counted ends have no number of their own",
        lambda c: (
            not (
                (c.account_for_embedding_in_pipeline_split and c.num_layers_in_first_pipeline_stage is not None)
                or (c.account_for_loss_in_pipeline_split and c.num_layers_in_last_pipeline_stage is not None)
            )
        ),
        lambda c: (
            "account_for_embedding_in_pipeline_split, account_for_loss_in_pipeline_split: expected False where that "
            f"stage's number of layers is given, got {', '.join(_split_asked(c))}"
        ),
    ),
    Rule("stages divide layers", lambda c: not _split_error(c), _split_error),
    Rule("schedule fits the stages", lambda c: not _schedule_error(c), _schedule_error),
)
