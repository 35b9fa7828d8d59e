"""Construction of the named pipeline schedules.

A stage is a group of consecutive layers; a rank holds v stages, placed by diptych.plans.schedule.placement. Both
backends execute these schedules and decide nothing else about the order. The exception is cp_exchange "pipelined", for
which JAX runs all forwards first.

    none          one rank; forward and backward of one microbatch after the other
    gpipe         all forwards, then all backwards
    1f1b          forwards until the first backward is ready, then one forward and one backward in turn
    interleaved   1f1b with v stages per rank and microbatches in groups of g
    interleaved-zb1p     interleaved with split backwards and fewer warm-up forwards
    zb-h1         1f1b with split backwards: W fills the bubble
    zb-h2         zb-h1 with twice the warm-up forwards: no bubble except the start delay of each rank
    zb-v, v-half, v-min, dualpipe-v     V-shaped placement: diptych.plans.schedule.v_shaped
    pipelined     1f1b over context-parallel ranks that each hold the full model: diptych.plans.schedule.wavefront

Reference: GPipe, arXiv 1811.06965; 1F1B and interleaving, Narayanan et al., arXiv 2104.04473, section 2.2; zero bubble,
Qi et al., arXiv 2401.10241, sections 2 and 3.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from diptych.plans.config import TransformerConfig
from diptych.plans.config.rules import check_at_least
from diptych.plans.context.exchange import PIPELINED
from diptych.plans.schedule.actions import Action, Schedule
from diptych.plans.schedule.placement import INTERLEAVED_SCHEDULES, SCHEDULES, V_SCHEDULES
from diptych.plans.schedule.v_shaped import dualpipe_v, v_half, v_min, zb_v
from diptych.plans.schedule.validate import validate_schedule

NAMES = SCHEDULES


def schedule_for(
    config: TransformerConfig, num_microbatches: int, forward_only: bool = False, context_rank: int = 0
) -> Schedule:
    """Return the schedule of a configuration.

    Args:
        config: the model and its parallelism.
        num_microbatches: microbatches per step.
        forward_only: omit all backwards.
        context_rank: rank whose schedule is returned with cp_exchange "pipelined", where rank 0 has the most
            microbatches in flight. Other exchanges use one schedule for all ranks.

    Raises:
        ValueError: see build_schedule.
    """
    if config.cp_exchange == PIPELINED and config.context_parallel_size > 1:
        return context_schedule(config.context_parallel_size, context_rank, num_microbatches, forward_only)
    if config.pipeline_schedule_file is not None:
        return _from_file(config.pipeline_schedule_file, num_microbatches, forward_only)
    return _built(
        config.schedule_name,
        config.pipeline_model_parallel_size,
        num_microbatches,
        config.virtual_pipeline_model_parallel_size or 1,
        config.microbatch_group_size_per_vp_stage,
        forward_only,
    )


@lru_cache(maxsize=64)
def context_schedule(size: int, rank: int, num_microbatches: int, forward_only: bool = False) -> Schedule:
    """Return the schedule of one context-parallel rank with cp_exchange "pipelined".

    The order is that of 1f1b, with parts of sequences in place of stages. See diptych.plans.schedule.wavefront.

    Args:
        size: number of context-parallel ranks.
        rank: context-parallel rank.
        num_microbatches: microbatches per step.
        forward_only: omit all backwards.

    Returns:
        A schedule with this rank as its only rank and one stage that holds the full model.
    """
    table = build_schedule("1f1b" if size > 1 else "none", size, num_microbatches, forward_only=forward_only)
    actions = tuple(action._replace(stage=0) for action in table.actions[rank])
    return Schedule(PIPELINED, 1, num_microbatches, 1, (actions,), forward_only)


@lru_cache(maxsize=16)
def _built(*sizes: Any) -> Schedule:
    """Return build_schedule's result, cached because callers request the same schedule repeatedly."""
    return build_schedule(*sizes)


def any_num_microbatches(config: TransformerConfig) -> int:
    """Return a number of microbatches that a configuration's schedule supports."""
    if config.pipeline_schedule_file is not None:
        return config.pipeline_schedule_file.num_microbatches
    return config.microbatch_group_size_per_vp_stage or config.pipeline_model_parallel_size


def build_schedule(
    name: str,
    pp_size: int,
    num_microbatches: int,
    stages_per_rank: int = 1,
    group_size: int | None = None,
    forward_only: bool = False,
) -> Schedule:
    """Build a named schedule.

    Args:
        name: one of NAMES.
        pp_size: number p of pipeline ranks.
        num_microbatches: number m of microbatches per step.
        stages_per_rank: number v of virtual stages per rank: 2 for V-shaped, at least 2 for interleaved, any for none,
            else 1.
        group_size: number g of consecutive microbatches of one virtual stage, for interleaved only; None: p.
        forward_only: omit all backwards; the order of forwards is unchanged.

    Raises:
        ValueError: the schedule is unknown or does not support these sizes.
    """
    check_sizes(name, pp_size, num_microbatches, stages_per_rank, group_size)
    p = pp_size
    m = num_microbatches
    v = stages_per_rank
    if name == "interleaved":
        ranks = [_interleaved(rank, p, m, v, group_size or p) for rank in range(p)]
    elif name == "interleaved-zb1p":
        ranks = [_interleaved_zero_bubble(rank, p, m, v) for rank in range(p)]
    elif name == "gpipe":
        ranks = [[Action(kind, rank, i) for kind in ("F", "B") for i in range(m)] for rank in range(p)]
    elif name == "zb-h1":
        ranks = [_zero_bubble(rank, p, m) for rank in range(p)]
    elif name == "zb-h2":
        ranks = [_zero_bubble(rank, p, m, ahead=2) for rank in range(p)]
    elif name in _V_BUILDERS:
        ranks = _V_BUILDERS[name](p, m)
    elif name == "none":
        ranks = [_one_microbatch_after_another(m, v)]
    else:
        assert name == "1f1b", f"build_schedule: no branch builds {name!r}"
        ranks = [_one_forward_one_backward(rank, p, m) for rank in range(p)]
    schedule = Schedule(name, p, m, v, tuple(map(tuple, ranks)), False, "v" if name in V_SCHEDULES else "loop")
    return forwards_of(schedule) if forward_only else schedule


_V_BUILDERS: dict[str, Callable[[int, int], list[list[Action]]]] = {
    "zb-v": zb_v,
    "v-half": v_half,
    "v-min": v_min,
    "dualpipe-v": dualpipe_v,
}


def schedule_of_stages(
    schedule: str | Schedule, pp_size: int, num_stages: int, num_microbatches: int | None
) -> Schedule:
    """Return the table for a list of stages.

    Args:
        schedule: name of a schedule, or a table. With one rank, the stages run in order for each microbatch, and a name
            has no effect.
        pp_size: number of ranks.
        num_stages: number of stages of the model.
        num_microbatches: microbatches per step; None: as in the table.

    Raises:
        ValueError: the schedule does not support these sizes, or the table is for other ones or invalid.
    """
    if isinstance(schedule, Schedule):
        if (schedule.pp_size, schedule.num_stages) != (pp_size, num_stages):
            raise ValueError(
                f"schedule: expected a table for {pp_size} ranks and {num_stages} stages, got one for "
                f"{schedule.pp_size} ranks and {schedule.num_stages} stages"
            )
        if num_microbatches not in (None, schedule.num_microbatches):
            raise ValueError(
                f"num_microbatches: expected {schedule.num_microbatches}, as in the table, or None, got "
                f"{num_microbatches}"
            )
        validate_schedule(schedule)
        return schedule
    if num_microbatches is None:
        raise ValueError("num_microbatches: expected the number of microbatches of a step, got None")
    if num_stages == 0 or num_stages % pp_size:
        raise ValueError(
            f"stages: expected a multiple of {pp_size}, the number of ranks, got {num_stages}; give all stages of the "
            "model, also those of other ranks"
        )
    if schedule not in NAMES:
        raise ValueError(f"schedule: expected one of {NAMES}, or a table, got {schedule!r}")
    return _built("none" if pp_size == 1 else schedule, pp_size, num_microbatches, num_stages // pp_size)


def forwards_of(schedule: Schedule) -> Schedule:
    """Return a schedule without its backwards."""
    actions = tuple(tuple(action for action in actions if action.kind == "F") for actions in schedule.actions)
    return replace(schedule, actions=actions, forward_only=True)


def _from_file(schedule: Schedule, num_microbatches: int, forward_only: bool) -> Schedule:
    """Return a schedule from a file after checking its number of microbatches."""
    if schedule.num_microbatches != num_microbatches:
        raise ValueError(
            f"num_microbatches: expected the {schedule.num_microbatches} that pipeline_schedule_file has, got "
            f"{num_microbatches}; change the batch or micro_batch_size, or write a file for {num_microbatches}"
        )
    return forwards_of(schedule) if forward_only else schedule


def num_warmup_microbatches(
    pp_rank: int,
    pp_size: int,
    num_microbatches: int,
    stages_per_rank: int = 1,
    group_size: int | None = None,
    forward_only: bool = False,
) -> int:
    """Return the number of warm-up forwards of a rank, which come before its first pair of forward and backward.

    The unit is one stage's forward of one microbatch.

    Reference: Megatron-core, get_pp_rank_microbatches.
    """
    p = pp_size
    m = num_microbatches
    v = stages_per_rank
    r = pp_rank
    if forward_only:
        return m * v
    if v == 1:
        return min(p - 1 - r, m)
    return min(2 * (p - 1 - r) + (v - 1) * (group_size or p), m * v)


def get_schedule_table(num_microbatches: int, num_model_chunks: int, group_size: int) -> list[tuple[int, int]]:
    """Return the pair (microbatch, virtual stage) of every forward of a rank, ordered by group, then by stage.

    Backwards have the same order, with virtual stage k replaced by v - 1 - k.

    Reference: Megatron-core's function of the same name.
    """
    return [
        (microbatch, chunk)
        for first in range(0, num_microbatches, group_size)
        for chunk in range(num_model_chunks)
        for microbatch in range(first, min(first + group_size, num_microbatches))
    ]


def convert_schedule_table_to_order(
    num_warmup_microbatches: int, num_model_chunks: int, schedule_table: Sequence[tuple[int, int]]
) -> list[int]:
    """Return the order of a rank's forwards (virtual stage + 1) and backwards (the same number, negated).

    Reference: Megatron-core's function of the same name.
    """
    forwards = [chunk + 1 for _, chunk in schedule_table]
    backwards = [chunk - num_model_chunks for _, chunk in schedule_table]
    order = forwards[:num_warmup_microbatches]
    for forward, backward in zip(forwards[num_warmup_microbatches:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(backwards) - num_warmup_microbatches :]


def check_sizes(name: str, p: int, m: int, v: int, g: int | None = None) -> None:
    """Reject sizes that a schedule does not support; see build_schedule for arguments and errors."""
    if name not in NAMES:
        raise ValueError(f"schedule: expected one of {NAMES}, got {name!r}")
    check_at_least(1, pp_size=p, num_microbatches=m, stages_per_rank=v)
    if name == "none" and p != 1:
        raise ValueError(f"pp_size: expected 1 without a pipeline, got {p}; choose one of {NAMES[1:]}")
    if p == 1 and name in (*INTERLEAVED_SCHEDULES, *V_SCHEDULES):
        raise ValueError(f"pp_size: expected at least 2 with schedule {name!r}, got 1; choose 'none'")
    if name != "interleaved" and g is not None:
        raise ValueError(f"group_size: expected None with schedule {name!r}, got {g}; choose 'interleaved'")
    if name == "none":
        return
    if name not in INTERLEAVED_SCHEDULES:
        virtual = 2 if name in V_SCHEDULES else 1
        if v != virtual:
            remedy = "set virtual_pipeline_model_parallel_size" if virtual == 2 else "choose 'interleaved'"
            raise ValueError(f"stages_per_rank: expected {virtual} with schedule {name!r}, got {v}; {remedy}")
        return
    if v == 1:
        alone = "1f1b" if name == "interleaved" else "zb-h1"
        raise ValueError(
            f"stages_per_rank: expected at least 2 with schedule {name!r}, got 1; set "
            f"virtual_pipeline_model_parallel_size, or choose {alone!r}"
        )
    if name == "interleaved-zb1p":
        _check_rounds(p, m)
        return
    _check_groups(p, m, g)


def _check_rounds(p: int, m: int) -> None:
    """Reject a number of microbatches that does not divide into equal rounds of at least p."""
    rounds = max(1, m // p)
    if m % rounds:
        raise ValueError(
            f"num_microbatches: expected {rounds} equal rounds with schedule 'interleaved-zb1p', got {m}, which "
            f"leaves {m % rounds}; choose a multiple of pp_size={p}"
        )


def _check_groups(p: int, m: int, g: int | None) -> None:
    """Reject a group size of ``interleaved`` that is out of range or leaves too small a last group."""
    if m < p:
        raise ValueError(f"num_microbatches: expected at least pp_size={p} with schedule 'interleaved', got {m}")
    g = p if g is None else g
    if not p <= g <= m:
        raise ValueError(f"group_size: expected from pp_size={p} to num_microbatches={m}, got {g}")
    if 0 < m % g < p:
        raise ValueError(
            f"num_microbatches: expected a last group of {g} or at least pp_size={p}, got {m} in groups of {g}, which "
            f"leaves {m % g}; change num_microbatches or group_size"
        )


def _one_microbatch_after_another(m: int, v: int) -> list[Action]:
    """Return the actions of one rank with all v stages."""
    forwards = [[Action("F", stage, i) for stage in range(v)] for i in range(m)]
    backwards = [[Action("B", stage, i) for stage in reversed(range(v))] for i in range(m)]
    return [action for both in zip(forwards, backwards, strict=True) for actions in both for action in actions]


def _one_forward_one_backward(rank: int, p: int, m: int) -> list[Action]:
    warmup = num_warmup_microbatches(rank, p, m)
    actions = [Action("F", rank, i) for i in range(warmup)]
    for i in range(m - warmup):
        actions += [Action("F", rank, warmup + i), Action("B", rank, i)]
    return actions + [Action("B", rank, i) for i in range(m - warmup, m)]


def _zero_bubble(rank: int, p: int, m: int, ahead: int = 1) -> list[Action]:
    """Return a rank's actions of zb-h1 (ahead=1) or zb-h2 (ahead=2).

    Before its first pair of F and I, a rank runs ``ahead`` forwards for each following rank. W comes ``ahead * rank``
    microbatches after its I. Every rank has at most ahead * (p - 1) + 1 microbatches in flight.
    """
    warmup = min(ahead * (p - 1 - rank), m)
    actions = [Action("F", rank, i) for i in range(warmup)]
    weights = 0
    for i in range(m):
        if warmup + i < m:
            actions.append(Action("F", rank, warmup + i))
        actions.append(Action("I", rank, i))
        if i >= ahead * rank or warmup + i >= m:
            actions.append(Action("W", rank, weights))
            weights += 1
    return actions + [Action("W", rank, i) for i in range(weights, m)]


def _interleaved_zero_bubble(rank: int, p: int, m: int, v: int) -> list[Action]:
    """Return a rank's actions of interleaved-zb1p.

    The order is that of _interleaved with I in place of B, p - 1 - rank warm-up forwards instead of twice as many, and
    each W after the rank-th I that follows its own I. Microbatches form rounds of m // (m // p).

    Reference: Qi et al., arXiv 2401.10241 (ZB-1p), interleaved as in torch.distributed.pipelining's
    ScheduleInterleavedZeroBubble.
    """
    table = get_schedule_table(m, v, m // max(1, m // p))
    warmup = min((v - 1) * (m // max(1, m // p)) + p - 1 - rank, m * v)
    forwards = [Action("F", chunk * p + rank, microbatch) for microbatch, chunk in table]
    inputs = [Action("I", (v - 1 - chunk) * p + rank, microbatch) for microbatch, chunk in table]
    weights = [action._replace(kind="W") for action in inputs]
    actions = forwards[:warmup]
    for number, action in enumerate(inputs):
        actions += forwards[warmup + number : warmup + number + 1]
        actions.append(action)
        if number >= rank:
            actions.append(weights[number - rank])
    return actions + weights[max(0, len(inputs) - rank) :]


def _interleaved(rank: int, p: int, m: int, v: int, g: int) -> list[Action]:
    """Return a rank's actions of interleaved."""
    table = get_schedule_table(m, v, g)
    order = convert_schedule_table_to_order(num_warmup_microbatches(rank, p, m, v, g), v, table)
    forwards = iter(table)
    backwards = iter(table)
    actions = []
    for number in order:
        microbatch, chunk = next(forwards) if number > 0 else next(backwards)
        vp_stage = chunk if number > 0 else v - 1 - chunk
        actions.append(Action("F" if number > 0 else "B", vp_stage * p + rank, microbatch))
    return actions
