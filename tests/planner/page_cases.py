"""Plans whose pages are tested, small enough to be drawn at once."""

from dataclasses import replace
from functools import cache
from typing import Any

from diptych.planner.page import PageRequest, describe_plan
from diptych.planner.reports.schedule import with_schedule
from diptych.planner.step_time import Machine
from diptych.plans.config import TransformerConfig
from diptych.plans.schedule.actions import Action, Schedule
from diptych.plans.schedule.named import schedule_for
from diptych.plans.schedule.simulate import Costs

MODEL = TransformerConfig(512, 8, 8, seq_length=512, bf16=True, use_flash_attn=True)
PIPELINE = replace(
    MODEL,
    pipeline_model_parallel_size=4,
    pipeline_schedule="zb-h1",
    recompute_granularity="selective",
    recompute_modules=("activation", "layernorm"),
)
UNEVEN = replace(
    MODEL,
    pipeline_model_parallel_size=2,
    virtual_pipeline_model_parallel_size=2,
    pipeline_schedule="zb-v",
    pipeline_model_parallel_layout="Et|tt|tttt|tL",
    recompute_granularity="full",
    recompute_method="uniform",
    recompute_num_layers=2,
)
OFFLOADED = replace(
    MODEL,
    pipeline_model_parallel_size=2,
    enable_tensor_offload=True,
    enable_activation_offload=True,
    enable_hyper_connections=True,
    recompute_granularity="selective",
    recompute_modules=("mhc",),
)
ALONE = replace(MODEL, enable_tensor_offload=True, recompute_granularity="full", recompute_method="block")
FAST_LINK = Machine(link_bandwidth=1e13)

REQUESTS = {
    "pipeline": PageRequest(PIPELINE, 2, 6),
    "uneven": PageRequest(UNEVEN, 1, 5),
    "offloaded": PageRequest(OFFLOADED, 1, 4),
    "alone": PageRequest(ALONE, 4, 3),
    "mesh": PageRequest(replace(MODEL, pipeline_model_parallel_size=2, context_parallel_size=2), 2, 4, 3),
}


@cache
def described(name: str) -> dict[str, Any]:
    return describe_plan(REQUESTS[name])


def drawn(name: str) -> list[tuple[dict[str, Any], TransformerConfig, Schedule]]:
    """Every schedule of a page, with the configuration and the table it is about."""
    request, found = REQUESTS[name], []
    for place, entry in enumerate(described(name)["schedules"]):
        config = request.config if place == 0 else with_schedule(request.config, entry["name"])
        found.append((entry, config, schedule_for(config, request.num_microbatches)))
    return found


def costs_of(entry: dict[str, Any]) -> Costs:
    """Times as the page has them."""
    times = [[stage[kind] for stage in entry["stages"]] for kind in "FIW"]
    return Costs(*times, communication=entry["wire"])


def actions_of(entry: dict[str, Any]) -> list[tuple[int, Action]]:
    columns = entry["actions"]
    stages, microbatches = columns["stage"], columns["microbatch"]
    return [*zip(columns["rank"], map(Action, columns["kind"], stages, microbatches), strict=True)]
