"""Pipeline schedules as data: for every rank, in which order it runs which part of which microbatch.

A stage is a run of layers; stage s lies on rank s mod p and is that rank's virtual stage s // p, so that p ranks with v
stages each hold p v stages. Both backends execute these tables: nothing about the order of work is decided elsewhere.

    none          one rank, forward and backward of one microbatch after the other
    gpipe         all forwards, then all backwards
    1f1b          forwards until the first backward can come, then one forward, one backward
    interleaved   1f1b over v stages a rank, microbatches in groups of g
    zb-h1         1f1b with the backward split: weight gradients fill what would be bubble

Reference: GPipe, arXiv 1811.06965; 1F1B and interleaving, Narayanan et al., arXiv 2104.04473, section 2.2; zero bubble,
Qi et al., arXiv 2401.10241, section 2.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from plans.config import TransformerConfig
from plans.config.pipeline import SCHEDULES, schedule_name

Kind = Literal["F", "B", "I", "W"]
NAMES = SCHEDULES


class Action(NamedTuple):
    """One piece of computation."""

    kind: Kind
    """F: forward; B: backward; I: gradient of the input alone; W: gradients of the weights, after I."""
    stage: int
    """Global number."""
    microbatch: int

    def __str__(self) -> str:
        """As torch.distributed.pipelining writes it: ``0F1`` is stage 0, microbatch 1."""
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """What every rank does, in order."""

    name: str
    pp_size: int
    num_microbatches: int
    stages_per_rank: int
    actions: tuple[tuple[Action, ...], ...]
    """By rank."""
    forward_only: bool = False
    """Nothing is run backward: validation, inference."""

    @property
    def num_stages(self) -> int:
        """Stages of all ranks."""
        return self.pp_size * self.stages_per_rank

    def rank_of(self, stage: int) -> int:
        """The rank that holds a stage."""
        return stage % self.pp_size

    @cached_property  # asked for every action of a simulation
    def splits_backward(self) -> bool:
        """Whether input and weight gradients are computed apart."""
        return any(action.kind in "IW" for actions in self.actions for action in actions)


def schedule_for(config: TransformerConfig, num_microbatches: int, forward_only: bool = False) -> Schedule:
    """The table a configuration asks for. Errors as build_schedule's."""
    return build_schedule(
        schedule_name(config),
        config.pipeline_model_parallel_size,
        num_microbatches,
        config.virtual_pipeline_model_parallel_size or 1,
        config.microbatch_group_size_per_vp_stage,
        forward_only,
    )


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
        stages_per_rank: v, virtual stages of a rank; more than 1 for interleaved alone.
        group_size: g, consecutive microbatches of one virtual stage; interleaved alone; None: p.
        forward_only: leave out every backward; the order of forwards stays.

    Raises:
        ValueError: the schedule is unknown, or cannot have these sizes; the message says which and why.
    """
    _check(name, pp_size, num_microbatches, stages_per_rank, group_size)
    p, m, v = pp_size, num_microbatches, stages_per_rank
    if name == "interleaved":
        ranks = [_interleaved(rank, p, m, v, group_size or p) for rank in range(p)]
    elif name == "gpipe":
        ranks = [[Action(kind, rank, i) for kind in ("F", "B") for i in range(m)] for rank in range(p)]
    elif name == "zb-h1":
        ranks = [_zero_bubble(rank, p, m) for rank in range(p)]
    else:
        ranks = [_one_forward_one_backward(rank, p, m) for rank in range(p)]
    kept = "F" if forward_only else "FBIW"
    actions = tuple(tuple(action for action in actions if action.kind in kept) for actions in ranks)
    return Schedule(name, p, m, v, actions, forward_only)


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


def _check(name: str, p: int, m: int, v: int, g: int | None) -> None:
    if name not in NAMES:
        raise ValueError(f"schedule: expected one of {NAMES}, got {name!r}")
    for field, value in (("pp_size", p), ("num_microbatches", m), ("stages_per_rank", v)):
        if value < 1:
            raise ValueError(f"{field}: expected at least 1, got {value}")
    if name == "none" and p != 1:
        raise ValueError(f"pp_size: expected 1 without a pipeline, got {p}; choose one of {NAMES[1:]}")
    if name != "interleaved":
        if v != 1:
            raise ValueError(f"stages_per_rank: expected 1 with schedule {name!r}, got {v}; choose 'interleaved'")
        if g is not None:
            raise ValueError(f"group_size: expected None with schedule {name!r}, got {g}; choose 'interleaved'")
        return
    if p == 1:
        raise ValueError("pp_size: expected at least 2 with schedule 'interleaved', got 1; choose 'none'")
    if v == 1:
        raise ValueError(
            "stages_per_rank: expected at least 2 with schedule 'interleaved', got 1; set "
            "virtual_pipeline_model_parallel_size, or choose '1f1b'"
        )
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


def _zero_bubble(rank: int, p: int, m: int) -> list[Action]:
    """W of a microbatch comes ``rank`` microbatches after its I, so that every rank holds at most p."""
    warmup = num_warmup_microbatches(rank, p, m)
    actions = [Action("F", rank, i) for i in range(warmup)]
    weights = 0
    for i in range(m):
        if warmup + i < m:
            actions.append(Action("F", rank, warmup + i))
        actions.append(Action("I", rank, i))
        if i >= rank or warmup + i >= m:
            actions.append(Action("W", rank, weights))
            weights += 1
    return actions + [Action("W", rank, i) for i in range(weights, m)]


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
