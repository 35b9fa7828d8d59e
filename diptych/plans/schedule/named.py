"""Pipeline schedules as data: for every rank, in which order it runs which part of which microbatch.

A stage is a run of layers, one of v on a rank; diptych.plans.schedule.placement says which ranks hold which. Both
backends execute these tables: nothing about the order of work is decided elsewhere (pipelined, JAX runs all forwards
first).

    none          one rank, forward and backward of one microbatch after the other
    gpipe         all forwards, then all backwards
    1f1b          forwards until the first backward can come, then one forward, one backward
    interleaved   1f1b over v stages a rank, microbatches in groups of g
    interleaved-zb1p     interleaved with the backward split, and fewer forwards ahead of the first
    zb-h1         1f1b with the backward split: weight gradients fill what would be bubble
    zb-h2         the same with twice the forwards ahead: no bubble but ranks beginning one after the other
    zb-v, v-half, v-min, dualpipe-v     over stages that go there and back: diptych.plans.schedule.v_shaped
    pipelined     1f1b over ranks that share sequences, each with the whole model: diptych.plans.schedule.wavefront

Reference: GPipe, arXiv 1811.06965; 1F1B and interleaving, Narayanan et al., arXiv 2104.04473, section 2.2; zero bubble,
Qi et al., arXiv 2401.10241, sections 2 and 3.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from diptych.plans.config import TransformerConfig
from diptych.plans.context.exchange import PIPELINED
from diptych.plans.schedule.actions import Action, Schedule
from diptych.plans.schedule.placement import INTERLEAVED_SCHEDULES, SCHEDULES, V_SCHEDULES
from diptych.plans.schedule.v_shaped import dualpipe_v, v_half, v_min, zb_v

NAMES = SCHEDULES


def schedule_for(
    config: TransformerConfig, num_microbatches: int, forward_only: bool = False, context_rank: int = 0
) -> Schedule:
    """The table a configuration asks for, on one of the ranks that share sequences, which differ with cp_exchange
    "pipelined" alone; the first has most in flight. Errors as build_schedule's.
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
    """In which order a rank runs microbatches that follow one another over ranks that share sequences: that of 1f1b,
    whose stages parts of sequences stand for. See diptych.plans.schedule.wavefront.

    Args:
        size, rank: of the ranks that share sequences.
        num_microbatches: of a step.
        forward_only: leave out every backward.

    Returns:
        A table of this rank alone, as of a model that lies whole on it.
    """
    table = build_schedule("1f1b" if size > 1 else "none", size, num_microbatches, forward_only=forward_only)
    actions = tuple(action._replace(stage=0) for action in table.actions[rank])
    return Schedule(PIPELINED, 1, num_microbatches, 1, (actions,), forward_only)


@lru_cache(maxsize=16)
def _built(*sizes: Any) -> Schedule:
    """build_schedule; the same one is asked for in a row."""
    return build_schedule(*sizes)


def any_num_microbatches(config: TransformerConfig) -> int:
    """A number of microbatches that a configuration's schedule can have."""
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
    """The table of a schedule.

    Args:
        name: one of NAMES.
        pp_size: pipeline ranks p.
        num_microbatches: m.
        stages_per_rank: v, virtual stages of a rank; 2 with placement v, more than 1 where interleaved, else 1.
        group_size: g, consecutive microbatches of one virtual stage; interleaved alone; None: p.
        forward_only: leave out every backward; the order of forwards stays.

    Raises:
        ValueError: the schedule is unknown, or cannot have these sizes; the message says which and why.
    """
    check_sizes(name, pp_size, num_microbatches, stages_per_rank, group_size)
    p, m, v = pp_size, num_microbatches, stages_per_rank
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
    else:
        ranks = [_one_forward_one_backward(rank, p, m) for rank in range(p)]
    schedule = Schedule(name, p, m, v, tuple(map(tuple, ranks)), False, "v" if name in V_SCHEDULES else "loop")
    return _forwards(schedule) if forward_only else schedule


_V_BUILDERS: dict[str, Callable[[int, int], list[list[Action]]]] = {
    "zb-v": zb_v,
    "v-half": v_half,
    "v-min": v_min,
    "dualpipe-v": dualpipe_v,
}


def _forwards(schedule: Schedule) -> Schedule:
    """The same without backwards."""
    actions = tuple(tuple(action for action in actions if action.kind == "F") for actions in schedule.actions)
    return replace(schedule, actions=actions, forward_only=True)


def _from_file(schedule: Schedule, num_microbatches: int, forward_only: bool) -> Schedule:
    """A table that was read, for so many microbatches as it has."""
    if schedule.num_microbatches != num_microbatches:
        raise ValueError(
            f"num_microbatches: expected the {schedule.num_microbatches} that pipeline_schedule_file has, got "
            f"{num_microbatches}; change the batch or micro_batch_size, or write a file for {num_microbatches}"
        )
    return _forwards(schedule) if forward_only else schedule


def num_warmup_microbatches(
    pp_rank: int,
    pp_size: int,
    num_microbatches: int,
    stages_per_rank: int = 1,
    group_size: int | None = None,
    forward_only: bool = False,
) -> int:
    """Forwards a rank runs before its first pair of a forward and a backward, counted in stages times microbatches.

    Reference: Megatron-core, get_pp_rank_microbatches.
    """
    p, m, v, r = pp_size, num_microbatches, stages_per_rank, pp_rank
    if forward_only:
        return m * v
    if v == 1:
        return min(p - 1 - r, m)
    return min(2 * (p - 1 - r) + (v - 1) * (group_size or p), m * v)


def get_schedule_table(num_microbatches: int, num_model_chunks: int, group_size: int) -> list[tuple[int, int]]:
    """(microbatch, virtual stage) of every forward of a rank, in order: group by group, stage by stage.

    The backwards have the same order, with virtual stage v - 1 - that of the forward.

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
    """The order of a rank's forwards (1 to v, the virtual stage + 1) and backwards (-1 to -v, the same negated).

    Reference: Megatron-core's function of the same name.
    """
    forwards = [chunk + 1 for _, chunk in schedule_table]
    backwards = [chunk - num_model_chunks for _, chunk in schedule_table]
    order = forwards[:num_warmup_microbatches]
    for forward, backward in zip(forwards[num_warmup_microbatches:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(backwards) - num_warmup_microbatches :]


def check_sizes(name: str, p: int, m: int, v: int, g: int | None = None) -> None:
    """Refuse what a schedule cannot have. Arguments and errors as build_schedule's."""
    if name not in NAMES:
        raise ValueError(f"schedule: expected one of {NAMES}, got {name!r}")
    for field, value in (("pp_size", p), ("num_microbatches", m), ("stages_per_rank", v)):
        if value < 1:
            raise ValueError(f"{field}: expected at least 1, got {value}")
    if name == "none" and p != 1:
        raise ValueError(f"pp_size: expected 1 without a pipeline, got {p}; choose one of {NAMES[1:]}")
    if p == 1 and name in (*INTERLEAVED_SCHEDULES, *V_SCHEDULES):
        raise ValueError(f"pp_size: expected at least 2 with schedule {name!r}, got 1; choose 'none'")
    if name != "interleaved" and g is not None:
        raise ValueError(f"group_size: expected None with schedule {name!r}, got {g}; choose 'interleaved'")
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
    """Refuse microbatches that rounds of at least p, all alike, do not divide."""
    rounds = max(1, m // p)
    if m % rounds:
        raise ValueError(
            f"num_microbatches: expected {rounds} rounds of as many with schedule 'interleaved-zb1p', got {m}, which "
            f"leaves {m % rounds}; choose a multiple of pp_size={p}"
        )


def _check_groups(p: int, m: int, g: int | None) -> None:
    """Refuse a size of groups of ``interleaved``, or microbatches that it does not divide well enough."""
    if m < p:
        raise ValueError(f"num_microbatches: expected at least pp_size={p} with schedule 'interleaved', got {m}")
    g = p if g is None else g
    if not p <= g <= m:
        raise ValueError(f"group_size: expected from pp_size={p} to num_microbatches={m}, got {g}")
    if 0 < m % g < p:
        raise ValueError(
            f"num_microbatches: expected the last group to be whole or of at least pp_size={p}, got {m} in groups of "
            f"{g}, which leaves {m % g}; change num_microbatches or group_size"
        )


def _one_forward_one_backward(rank: int, p: int, m: int) -> list[Action]:
    warmup = num_warmup_microbatches(rank, p, m)
    actions = [Action("F", rank, i) for i in range(warmup)]
    for i in range(m - warmup):
        actions += [Action("F", rank, warmup + i), Action("B", rank, i)]
    return actions + [Action("B", rank, i) for i in range(m - warmup, m)]


def _zero_bubble(rank: int, p: int, m: int, ahead: int = 1) -> list[Action]:
    """``ahead`` forwards for each rank that comes after, before the first I; W of a microbatch comes ``ahead * rank``
    microbatches after its I. So every rank holds at most ahead * (p - 1) + 1.
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
    """As _interleaved, with I in place of B, p - 1 - rank forwards ahead instead of twice as many, and W of an I after
    the rank-th I that follows it. Microbatches come in rounds of m // (m // p).

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
    table = get_schedule_table(m, v, g)
    order = convert_schedule_table_to_order(num_warmup_microbatches(rank, p, m, v, g), v, table)
    forwards, backwards = iter(table), iter(table)
    actions = []
    for number in order:
        microbatch, chunk = next(forwards) if number > 0 else next(backwards)
        vp_stage = chunk if number > 0 else v - 1 - chunk
        actions.append(Action("F" if number > 0 else "B", vp_stage * p + rank, microbatch))
    return actions
