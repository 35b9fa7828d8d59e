"""Which way of training a model on so many ranks is fastest: of all accepted within a bound of memory, by prediction.

A way is a mesh (pipeline, context ranks, replicas), a schedule with its virtual stages, what is recomputed, whether
parameters are offloaded, and how many sequences a microbatch has. Memory is diptych.planner.memory's, time
diptych.planner.step_time's. Offloaded activations are not searched: their memory is not predicted.

What is as slow as another way or slower, and needs as much memory or more, is not listed: nobody would choose it.

Ways are taken in the order of a bound that no schedule beats: a rank's work, with what has to come before and after it.
Once the bound exceeds the slowest of the ways asked for, nothing that follows can be among them; so the result is that
of trying all, which a test does where there are few.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

from diptych.planner.memory.ranks import RankMemory, moved_bytes, rank_memories
from diptych.planner.memory.stages import StageMemory, predict_stages
from diptych.planner.step_time import Machine, StageTime, StageTimes, after_backward, costs_of, waits_of_wavefront
from diptych.plans.config import TransformerConfig
from diptych.plans.context.sequences import check_shared
from diptych.plans.mesh import undivided
from diptych.plans.recompute import NO_RECOMPUTE
from diptych.plans.schedule.named import check_sizes, schedule_for
from diptych.plans.schedule.partition import get_stage_place
from diptych.plans.schedule.placement import INTERLEAVED_SCHEDULES, SCHEDULES, V_SCHEDULES
from diptych.plans.schedule.simulate import simulate

RECOMPUTE: dict[str, dict[str, Any]] = {
    "nothing": {},
    "layernorm": {"recompute_granularity": "selective", "recompute_modules": ("layernorm",)},
    "mhc + layernorm": {"recompute_granularity": "selective", "recompute_modules": ("mhc", "layernorm")},
    "core_attn": {"recompute_granularity": "selective", "recompute_modules": ("core_attn",)},
    "layernorm + activation": {"recompute_granularity": "selective", "recompute_modules": ("layernorm", "activation")},
    "mhc + layernorm + activation": {
        "recompute_granularity": "selective",
        "recompute_modules": ("mhc", "layernorm", "activation"),
    },
    "layernorm + core_attn + mlp": {
        "recompute_granularity": "selective",
        "recompute_modules": ("layernorm", "core_attn", "mlp"),
    },
    "whole layers": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
"""What is tried, by name; of those with mhc, only where a model has hyper-connections."""

VIRTUAL = (2, 4)
"""Stages a rank that are tried with the interleaved schedules."""


class Way(NamedTuple):
    """One way of training."""

    config: TransformerConfig
    micro_batch_size: int
    num_microbatches: int
    data_parallel_size: int
    recompute: str
    """Key of RECOMPUTE."""

    @property
    def words(self) -> str:
        """What it is, short."""
        config = self.config
        virtual = config.virtual_pipeline_model_parallel_size
        parts = [
            f"dp {self.data_parallel_size}" * (self.data_parallel_size > 1),
            f"cp {config.context_parallel_size}" * (config.context_parallel_size > 1),
            f"pp {config.pipeline_model_parallel_size} {config.pipeline_schedule}"
            * (config.pipeline_schedule != "none"),
            f"v {virtual}" if virtual and config.pipeline_schedule in INTERLEAVED_SCHEDULES else "",
            f"{self.num_microbatches} x {self.micro_batch_size} sequences",
            f"recompute {self.recompute}" * (self.recompute != "nothing"),
            "parameters offloaded" * config.enable_tensor_offload,
        ]
        return ", ".join(filter(None, parts))


@dataclass(frozen=True)
class Found:
    """A way, and what is predicted of it."""

    way: Way
    seconds: float
    """Of a step."""
    memory: RankMemory
    """Of the rank that needs most."""
    shares: Mapping[str, float]
    """Of the step's time on the busiest rank: ``operations``, ``computed again``, ``exchanges``,
    ``waiting in the pipeline``, ``gradients``, ``update``, ``copies``."""
    constraint: str = ""
    """What keeps it from being faster."""


@dataclass
class Outcome:
    """What a search has found."""

    best: list[Found]
    """Fastest first; each needs less memory than all before it."""
    considered: int
    """Ways that are accepted."""
    simulated: int
    too_large: int
    """Of those looked at: ways that need more memory."""
    refused: Counter[str] = field(default_factory=Counter)
    """By the setting that a refusal names: ways that are none."""
    smallest: tuple[Way, RankMemory] | None = None
    """Where none fits: the way that needs least, and what its rank that needs most does."""


def undecided(config: TransformerConfig) -> TransformerConfig:
    """The model without any setting that a search decides."""
    return undivided(replace(config, enable_activation_offload=False, enable_tensor_offload=False, **NO_RECOMPUTE))


def search(
    config: TransformerConfig,
    ranks: int,
    memory_limit: int,
    global_batch_size: int,
    machine: Machine | None = None,
    count: int = 10,
    schedules: tuple[str, ...] = SCHEDULES,
    progress: Callable[[Iterable[Any], int], Iterable[Any]] = lambda ways, _: ways,
) -> Outcome:
    """The fastest ways of training a model.

    Args:
        config: the model's; how it is divided, scheduled, recomputed and offloaded is what is searched.
        ranks: of the whole mesh.
        memory_limit: bytes a rank has.
        global_batch_size: sequences of a step.
        machine: its rates; None: Machine's own.
        count: ways wanted, at most: there may be fewer of which none is slower and larger than another.
        schedules: those tried.
        progress: shows how far it is, given the ways and their number.

    Raises:
        ValueError: sizes below 1, an unknown schedule, or no way at all that is accepted.
    """
    _check_request(ranks, memory_limit, count, schedules)
    predictions, outcome = _Predictions(machine or Machine()), Outcome([], 0, 0, 0)
    ways = [
        (predictions.bound(way), place, way)
        for place, way in enumerate(_ways(config, ranks, global_batch_size, schedules, outcome))
    ]
    outcome.considered = len(ways)
    if not ways:
        raise ValueError(
            f"ranks: expected a number that {config.num_layers} layers and {global_batch_size} sequences can be "
            f"divided over, got {ranks}; change num_layers, global_batch_size or ranks"
        )
    ways.sort(key=lambda each: each[:2])
    too_large: list[tuple[float, Way, RankMemory]] = []
    for bound, _, way in progress(ways, len(ways)):
        if len(outcome.best) >= count and bound > outcome.best[count - 1].seconds:
            break  # what follows is slower than these, and dominates none of them
        if (largest := predictions.memory(way)).total > memory_limit:
            too_large.append((bound, way, largest))
            continue
        outcome.simulated += 1
        outcome.best = _undominated([*outcome.best, predictions.found(way, largest)])
    outcome.best = outcome.best[:count]
    if not outcome.best:
        outcome.smallest = min(too_large, key=lambda each: each[2].total)[1:]
    faster: Found | None = None  # the fastest of those too large that were looked at, by the order of their bounds
    outcome.too_large = len(too_large)
    for place, found in enumerate(outcome.best):
        while too_large and too_large[0][0] < found.seconds and (faster is None or faster.seconds >= found.seconds):
            _, way, largest = too_large.pop(0)
            other = predictions.found(way, largest)
            faster = other if faster is None or other.seconds < faster.seconds else faster
        outcome.best[place] = replace(found, constraint=_constraint(found, faster))
    return outcome


def _undominated(found: list[Found]) -> list[Found]:
    """Those than which none is both as fast and as small; of ways alike in both, the first. Fastest first."""
    kept: list[Found] = []
    for each in sorted(found, key=lambda each: (each.seconds, each.memory.total)):
        if not kept or each.memory.total < kept[-1].memory.total:
            kept.append(each)
    return kept


def _check_request(ranks: int, memory_limit: int, count: int, schedules: tuple[str, ...]) -> None:
    for name, value in (("ranks", ranks), ("memory_limit", memory_limit), ("count", count)):
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    if unknown := [name for name in schedules if name not in SCHEDULES]:
        raise ValueError(f"schedules: expected some of {SCHEDULES}, got {unknown[0]!r}")


def _constraint(found: Found, faster: Found | None) -> str:
    """What keeps a way from being faster: memory, if one that needs more than there is would be; else where its time
    goes.
    """
    if faster is not None and faster.seconds < found.seconds:
        needed = faster.memory.total / 2**20
        return f"memory: {faster.way.words} takes {faster.seconds:.3g} s and needs {needed:,.1f} MiB"
    lost = {name: share for name, share in found.shares.items() if name != "operations"}
    name = max(lost, key=lambda each: lost[each])
    return f"{name} ({lost[name]:.0%})" if lost[name] >= 0.01 else "operations"


def _ways(
    config: TransformerConfig, ranks: int, batch: int, schedules: tuple[str, ...], outcome: Outcome
) -> Iterator[Way]:
    """Every accepted way; refusals are counted."""
    base = undecided(config)
    modes = {name: s for name, s in RECOMPUTE.items() if config.enable_hyper_connections or "mhc" not in name}
    for p in _divisors(ranks):
        for cp in _divisors(ranks // p):
            replicas = ranks // p // cp
            if batch % replicas:
                outcome.refused["global_batch_size"] += 1
                continue
            for name, virtual in _schedules(p, schedules):
                for mode, settings in modes.items():
                    for offload in (False, True):
                        try:
                            made = replace(
                                base,
                                pipeline_model_parallel_size=p,
                                context_parallel_size=cp,
                                pipeline_schedule=name,
                                virtual_pipeline_model_parallel_size=virtual,
                                enable_tensor_offload=offload,
                                **settings,
                            )
                        except ValueError as error:
                            outcome.refused[str(error).split(":")[0]] += 1
                            continue
                        for size in _divisors(batch // replicas):
                            m = batch // replicas // size
                            try:
                                check_shared(size, config.seq_length, cp)
                                check_sizes(name, p, m, virtual or 1)
                            except ValueError as error:
                                outcome.refused[str(error).split(":")[0]] += 1
                                continue
                            yield Way(made, size, m, replicas, mode)


def _schedules(p: int, names: tuple[str, ...]) -> Iterator[tuple[str, int | None]]:
    """Schedules of so many ranks, with their virtual stages."""
    for name in names:
        if (name == "none") == (p == 1):
            yield from (
                ((name, v) for v in VIRTUAL)
                if name in INTERLEAVED_SCHEDULES
                else [(name, 2 if name in V_SCHEDULES else None)]
            )


@cache
def _divisors(number: int) -> list[int]:
    low = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return sorted({*low, *(number // each for each in low)})


class _Predictions:
    """What is predicted of ways; of ways that share a cut, once."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._stages = StageTimes(machine)
        self._times: dict[Any, tuple[StageTime, ...]] = {}
        self._memories: dict[Any, list[StageMemory]] = {}
        self._after: dict[Any, tuple[float, float]] = {}

    def bound(self, way: Way) -> float:
        """Seconds that no schedule can be below.

        A rank waits for its first forward; its forwards and input gradients follow; then the last gradient has to reach
        the first stage, or weights' gradients are left. Of the rank where that takes longest, with the sum of gradients
        and the update.
        """
        config, times = way.config, self._stage_times(way)
        costs = costs_of(config, times, way.micro_batch_size, self._machine)
        passes, weights, first = ([0.0] * config.pipeline_model_parallel_size for _ in range(3))
        leads = [(0.0, 0.0)]  # of the stages before one: forwards, and input gradients, with their messages
        for stage, time in enumerate(times):
            rank = get_stage_place(config, stage).pp_rank
            if not passes[rank]:
                first[rank] = stage
            passes[rank] += way.num_microbatches * (time.forward + time.input_gradient)
            weights[rank] += way.num_microbatches * time.weight_gradient
            ahead, back = leads[-1]
            wire = costs.communication
            leads.append((ahead + time.forward + wire, back + time.input_gradient + wire))
        bounds = []
        for own, late, stage in zip(passes, weights, map(int, first), strict=True):
            ahead, back = leads[stage]
            bounds.append(ahead + own + max(late, back + (times[0].weight_gradient if stage else 0.0)))
        return max(bounds) + sum(self._after_backward(way))

    def memory(self, way: Way) -> RankMemory:
        """Of the rank that needs most."""
        stages = self._kept(way)
        ranks = rank_memories(way.config, schedule_for(way.config, way.num_microbatches), stages)
        return max(ranks, key=lambda rank: rank.total)

    def found(self, way: Way, memory: RankMemory) -> Found:
        """Its time, and where that goes."""
        config, times = way.config, self._stage_times(way)
        costs = costs_of(config, times, way.micro_batch_size, self._machine)
        course = simulate(schedule_for(config, way.num_microbatches), costs)
        waits = waits_of_wavefront(config, way.micro_batch_size, times, self._machine)
        course = replace(course, makespan=course.makespan + waits)
        gradients, update = self._after_backward(way)
        copies = max(0.0, self._copies(way) - course.makespan - update)
        total = course.makespan + gradients + update + copies
        work = max(self._work(way), key=sum)
        shares = {
            "operations": work[0],
            "computed again": work[1],
            "exchanges": work[2],
            "waiting in the pipeline": course.makespan - sum(work),
            "gradients": gradients,
            "update": update,
            "copies": copies,
        }
        return Found(way, total, memory, {name: seconds / total for name, seconds in shares.items()})

    def _key(self, way: Way) -> Any:
        """What decides the times and the memory of stages."""
        c = way.config
        return (
            c.pipeline_model_parallel_size,
            c.virtual_pipeline_model_parallel_size,
            c.pipeline_schedule in V_SCHEDULES,
            c.context_parallel_size,
            way.recompute,
            way.micro_batch_size,
        )

    def _stage_times(self, way: Way) -> tuple[StageTime, ...]:
        key = self._key(way)
        if key not in self._times:
            self._times[key] = self._stages.of(way.config, way.micro_batch_size)
        return self._times[key]

    def _kept(self, way: Way) -> list[StageMemory]:
        key = self._key(way)
        if key not in self._memories:
            self._memories[key] = predict_stages(way.config, way.micro_batch_size)
        return self._memories[key]

    def _after_backward(self, way: Way) -> tuple[float, float]:
        key = *self._key(way)[:4], way.data_parallel_size
        if key not in self._after:
            self._after[key] = after_backward(
                way.config, way.micro_batch_size, way.num_microbatches, way.data_parallel_size, self._machine
            )
        return self._after[key]

    def _work(self, way: Way) -> list[tuple[float, float, float]]:
        """By rank, seconds of a step: operations, what is computed again, exchanges."""
        sums = [[0.0, 0.0, 0.0] for _ in range(way.config.pipeline_model_parallel_size)]
        for stage, time in enumerate(self._stage_times(way)):
            of_rank = sums[get_stage_place(way.config, stage).pp_rank]
            whole = time.forward + time.input_gradient + time.weight_gradient
            for place, part in enumerate((whole - time.recomputed - time.exchanged, time.recomputed, time.exchanged)):
                of_rank[place] += way.num_microbatches * part
        return [(a, b, c) for a, b, c in sums]

    def _copies(self, way: Way) -> float:
        """Seconds of the link with offloaded parameters, of the rank that copies most."""
        if not way.config.enable_tensor_offload:
            return 0.0
        moved = moved_bytes(way.config, schedule_for(way.config, way.num_microbatches))
        return max(moved) / self._machine.link_bandwidth
