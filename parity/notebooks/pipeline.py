"""Pipeline schedules, simulated and executed in both backends, for notebook 04."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from flax import nnx

from diptych.planner.reports.schedule import plan_pipeline
from diptych.plans.config import TransformerConfig
from diptych.plans.mesh import unsharded
from diptych.plans.schedule.actions import Action, Kind, Schedule, ScheduleError
from diptych.plans.schedule.named import build_schedule, get_schedule_table, schedule_for
from diptych.plans.schedule.placement import V_SCHEDULES
from diptych.plans.schedule.simulate import Costs, simulate
from diptych.plans.schedule.validate import validate_schedule
from jax_impl.pipeline import make_pipeline_step
from jax_impl.saving import export_parameters
from jax_impl.transformer import GPTModel as JaxModel
from parity.compare import relative_difference
from parity.notebooks.pipeline_ranks import training_steps
from reference_torch.rank_pool import RankPool, preload
from reference_torch.transformer import GPTModel as TorchModel

RANKS = 4
MICROBATCHES = 8
VIRTUAL = 2
FIRST = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2")
"""Schedules that are not V-shaped."""
NAMES = (*FIRST, *V_SCHEDULES)
MODEL = TransformerConfig(
    hidden_size=32,
    num_layers=8,
    num_attention_heads=4,
    vocab_size=64,
    seq_length=16,
    init_method_std=0.3,
    params_dtype="float64",
)


def virtual_stages(name: str) -> int | None:
    """Return the virtual stages per rank of a schedule; None: it has one stage per rank."""
    return VIRTUAL if name == "interleaved" or name in V_SCHEDULES else None


def cut(config: TransformerConfig, name: str) -> TransformerConfig:
    """Return the configuration with a schedule."""
    return replace(config, pipeline_schedule=name, virtual_pipeline_model_parallel_size=virtual_stages(name))


def tables() -> dict[str, tuple[Schedule, Costs]]:
    """Return every schedule and its costs: F, I and W of a quarter of the model take one unit each."""
    found = {"none": (build_schedule("none", 1, MICROBATCHES), Costs(4.0, 4.0, 4.0))}
    for name in NAMES:
        virtual = virtual_stages(name) or 1
        found[name] = (build_schedule(name, RANKS, MICROBATCHES, virtual), Costs(*[1 / virtual] * 3))
    return found


class Use(NamedTuple):
    """Time and memory of a schedule."""

    makespan: float
    bubble: list[float]
    """Bubble of each rank."""
    saved: list[float]
    """Most microbatches that each rank saves, in stages of a quarter of the model."""


def simulated(schedule: Schedule, costs: Costs) -> Use:
    """Return the use of a schedule, simulated action by action."""
    found = simulate(schedule, costs)
    size = 4.0 / (schedule.pp_size * schedule.stages_per_rank)
    return Use(found.makespan, list(found.bubble), [size * count for count in found.peak_in_flight])


def closed_form(name: str) -> Use:
    """Return the use of a schedule by its closed form."""
    p = RANKS
    m = MICROBATCHES
    v = VIRTUAL
    if name == "none":
        return Use(12.0 * m, [0.0], [4.0])
    bubble, saved = {
        "gpipe": (3 * (p - 1), [m] * p),
        "1f1b": (3 * (p - 1), [p - r for r in range(p)]),
        "interleaved": (3 * (p - 1) / v, [((v - 1) * p + 2 * (p - 1 - r) + 1) / v for r in range(p)]),
        "zb-h1": (p - 1, [p] * p),
        "zb-h2": (p - 1, [2 * p - 1] * p),
        "zb-v": ((p - 1) / 2, [p] * p),
        "v-half": ((6 * ((p - 1) // 2) - 1) / 2, [(p + 2) // 2] * p),
        "v-min": ((6 * (4 * (p - 1) // 6) - 1) / 2, [(p + 4) // 3] * p),
        "dualpipe-v": ((p - 1) / 2, [p + 0.5] * p),
    }[name]
    return Use(3.0 * m + bubble, [float(bubble)] * p, [float(count) for count in saved])


def gap(ours: Use, theirs: Use) -> float:
    """Return the largest difference of any number of two uses."""
    pairs = zip(
        [ours.makespan, *ours.bubble, *ours.saved], [theirs.makespan, *theirs.bubble, *theirs.saved], strict=True
    )
    return max(abs(a - b) for a, b in pairs)


def planned_use(config: TransformerConfig, counts: Sequence[int]) -> list[dict[str, list[float]]]:
    """Return the predicted use of every schedule for numbers of microbatches, each by name of the schedule.

    Returns:
        Share of the bubble in the makespan, peak of the rank with the most memory, and peak of the last rank, in GiB.
    """
    plans = {name: [plan_pipeline(cut(config, name), 1, count).simulation for count in counts] for name in NAMES}
    return [
        {name: [float(np.mean(plan.bubble)) / plan.makespan for plan in found] for name, found in plans.items()},
        {name: [max(plan.peak_bytes) / 2**30 for plan in found] for name, found in plans.items()},
        {name: [plan.peak_bytes[-1] / 2**30 for plan in found] for name, found in plans.items()},
    ]


class Execution(NamedTuple):
    """One step of a schedule in both backends, with the results of the single-device model."""

    losses: tuple[float, float, float]
    """Losses of PyTorch, of JAX and of the single-device model."""
    differences: dict[str, float]
    """Largest relative difference of a gradient, by the compared pair."""
    traces: dict[str, tuple[tuple[Action, ...], ...]]
    """Actions of every rank in the table and as executed, by "table", "PyTorch" and "JAX"."""


def execute_all(tokens: np.ndarray, targets: np.ndarray) -> dict[str, Execution]:
    """Execute a step of every schedule in both backends, by name.

    Args:
        tokens: token ids of m microbatches. [m, b, T]
        targets: next tokens. [m, b, T]
    """
    parallel = replace(MODEL, pipeline_model_parallel_size=RANKS)
    configs = {"none": MODEL} | {name: cut(parallel, name) for name in NAMES}
    preload("reference_torch.train")
    with RankPool(RANKS) as pool:
        divided = [configs[name] for name in NAMES]
        per_rank = pool.run("parity.notebooks.pipeline_ranks:training_steps", divided, tokens, targets)
    outcomes = {"none": training_steps([MODEL], tokens, targets)}
    outcomes |= {name: [rank[place] for rank in per_rank] for place, name in enumerate(NAMES)}
    single_device = TorchModel(MODEL)
    batch = zip(torch.from_numpy(tokens), torch.from_numpy(targets), strict=True)
    loss = torch.stack([single_device(*microbatch) for microbatch in batch]).mean()
    loss.backward()
    expected = {name: p.grad.numpy() for name, p in single_device.named_parameters() if p.grad is not None}
    found = {}
    for name, config in configs.items():
        ranks = outcomes[name]
        jax_loss, theirs, jax_trace = jax_step(config, tokens, targets)
        ours = [(key, gradient) for rank in ranks for key, gradient in rank.gradients.items()]
        assert {key for key, _ in ours} == theirs.keys() == expected.keys()
        differences = {
            "PyTorch and JAX": max(relative_difference(gradient, theirs[key]) for key, gradient in ours),
            "PyTorch and single-device": max(relative_difference(gradient, expected[key]) for key, gradient in ours),
            "JAX and single-device": max(
                relative_difference(theirs[key], gradient) for key, gradient in expected.items()
            ),
        }
        traces = {
            "table": schedule_for(config, len(tokens)).actions,
            "PyTorch": tuple(tuple(rank.trace) for rank in ranks),
            "JAX": jax_trace,
        }
        torch_loss = float(np.mean(next(rank.losses for rank in ranks if rank.losses)))
        found[name] = Execution((torch_loss, jax_loss, loss.item()), differences, traces)
    return found


def jax_step(
    config: TransformerConfig, tokens: np.ndarray, targets: np.ndarray
) -> tuple[float, Mapping[str, np.ndarray], tuple[tuple[Action, ...], ...]]:
    """Return loss, gradients by name, and the actions of every rank, of one step in JAX."""
    model = JaxModel(unsharded(config))
    step = make_pipeline_step(model, config)
    loss, gradients = step(step.stage_parameters(nnx.split(model, nnx.Param)[1]), tokens, targets)
    return float(loss), export_parameters(step.join_parameters(gradients)), step.trace(len(tokens))


def slot_by_slot(p: int, m: int, v: int) -> Schedule:
    """Return an interleaved schedule that runs forward and backward of each slot: the first failing variant."""
    slots = get_schedule_table(m, v, p)
    kinds: tuple[Kind, ...] = ("F", "B")
    ranks = [[Action(kind, chunk * p + rank, i) for i, chunk in slots for kind in kinds] for rank in range(p)]
    return Schedule("slot by slot", p, m, v, tuple(map(tuple, ranks)))


def without_a_queue(p: int, m: int) -> Schedule:
    """Return 1F1B that runs the backward of the microbatch of the last forward: the second failing variant."""
    ranks = []
    for rank in range(p):
        warmup = min(p - 1 - rank, m)
        actions = [Action("F", rank, i) for i in range(warmup)]
        for i in range(warmup, m):
            actions += [Action("F", rank, i), Action("B", rank, i)]
        ranks.append((*actions, *[Action("B", rank, m - 1)] * (m - warmup)))
    return Schedule("without a queue", p, m, 1, tuple(ranks))


def message_of(schedule: Schedule) -> str:
    """Return the error of the validator, or "valid"."""
    try:
        validate_schedule(schedule)
    except ScheduleError as error:
        return str(error)
    return "valid"
