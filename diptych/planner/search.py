"""The search for the fastest configurations of a model on a number of ranks, within a limit of memory.

A configuration is a mesh (pipeline, context and tensor-parallel ranks, replicas), a schedule with its virtual stages,
recompute settings, offload of parameters on or off, and a microbatch size. Memory is predicted by
diptych.planner.memory, time by diptych.planner.step_time. Offload of activations is not searched.

Dominated configurations are dropped: those that another configuration beats or equals in both time and memory.

Configurations are tried in the order of a lower bound of their time. The search stops once the bound exceeds the
slowest of the requested results, so the result equals that of trying all configurations (tests/planner/test_search.py).
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from typing import Any, NamedTuple

from diptych.planner.memory.ranks import RankMemory, moved_bytes, rank_memories
from diptych.planner.memory.stages import StageMemory, predict_stages
from diptych.planner.step_time import (
    Machine,
    StageBlocks,
    StageTime,
    StageTimes,
    after_backward,
    blocks_of_stages,
    costs_of,
    wavefront_delay,
)
from diptych.plans.config import TransformerConfig
from diptych.plans.config.rules import check_at_least
from diptych.plans.mesh import unsharded
from diptych.plans.recompute import NO_RECOMPUTE
from diptych.plans.schedule.named import check_sizes, schedule_for
from diptych.plans.schedule.partition import get_stage_place, num_stages
from diptych.plans.schedule.placement import INTERLEAVED_SCHEDULES, SCHEDULES, V_SCHEDULES
from diptych.plans.schedule.simulate import simulate
from diptych.plans.training import check_microbatch

RECOMPUTE: dict[str, dict[str, Any]] = {
    "nothing": {},
    **{
        " + ".join(modules): {"recompute_granularity": "selective", "recompute_modules": modules}
        for modules in (
            ("layernorm",),
            ("mhc", "layernorm"),
            ("core_attn",),
            ("layernorm", "activation"),
            ("mhc", "layernorm", "activation"),
            ("layernorm", "core_attn", "mlp"),
        )
    },
    "whole layers": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
"""Recompute settings to try, by name; those with mhc only for models with hyper-connections."""

MAX_TENSOR_PARALLEL = 8
"""Largest number of tensor-parallel ranks to try: they exchange activations in every layer, so a node should hold them.

They divide sequences as well (sequence_parallel) if their number times that of context ranks divides the length. Of 66
pairs of configurations with and without it, for each of two small models, some took up to 6% more memory or 8% more
time with it. Configurations without it are not tried where it is possible."""

VIRTUAL = (2, 4)
"""Virtual stages per rank to try with the interleaved schedules."""


class Configuration(NamedTuple):
    """One configuration of a training step."""

    config: TransformerConfig
    micro_batch_size: int
    num_microbatches: int
    data_parallel_size: int
    recompute: str
    """Key of RECOMPUTE."""

    @property
    def description(self) -> str:
        """A short description."""
        config = self.config
        virtual = config.virtual_pipeline_model_parallel_size
        parts = [
            f"dp {self.data_parallel_size}" * (self.data_parallel_size > 1),
            f"cp {config.context_parallel_size}" * (config.context_parallel_size > 1),
            f"tp {config.tensor_model_parallel_size}" * (config.tensor_model_parallel_size > 1),
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
    """A configuration with its predicted time and memory."""

    configuration: Configuration
    seconds: float
    """Seconds of a step."""
    memory: RankMemory
    """Memory of the rank that needs most."""
    shares: Mapping[str, float]
    """Shares of the step's time on the busiest rank: ``operations``, ``recomputation``, ``exchanges``,
    ``bubble``, ``gradients``, ``update``, ``copies``."""
    constraint: str = ""
    """Reason why it is not faster."""


@dataclass
class Outcome:
    """The result of a search."""

    best: list[Found]
    """Fastest first; each needs less memory than all before it."""
    considered: int
    """Accepted configurations."""
    simulated: int
    too_large: int
    """Configurations that were looked at and need more memory."""
    refused: Counter[str] = field(default_factory=Counter)
    """Refused configurations, by the setting that the refusal names."""
    smallest: tuple[Configuration, RankMemory] | None = None
    """If none fits: the smallest configuration, and the memory of its largest rank."""


def without_searched_settings(config: TransformerConfig) -> TransformerConfig:
    """Return the model with every searched setting at its default."""
    return unsharded(replace(config, enable_activation_offload=False, enable_tensor_offload=False, **NO_RECOMPUTE))


def search(
    config: TransformerConfig,
    ranks: int,
    memory_limit: int,
    global_batch_size: int,
    machine: Machine | None = None,
    count: int = 10,
    schedules: tuple[str, ...] = SCHEDULES,
    progress: Callable[[Iterable[Any], int | None, str], Iterable[Any]] = lambda steps, *_: steps,
) -> Outcome:
    """Return the fastest configurations that fit into memory, none of which is both slower and larger than another.

    Args:
        config: the model; its parallel sizes, schedule, recompute and offload settings are searched.
        ranks: ranks of the whole mesh.
        memory_limit: bytes per rank.
        global_batch_size: sequences of one step.
        machine: rates of the machine; None: the defaults of Machine.
        count: largest number of configurations returned.
        schedules: names of the schedules to try.
        progress: wraps the iterable of each part of the search, given also its number of steps, if it is known, and
            its name, to show progress.

    Returns:
        The configurations, fastest first, and counts of the accepted, refused and too large ones.

    Raises:
        ValueError: sizes below 1, an unknown schedule, or no accepted configuration.
    """
    _check_request(ranks, memory_limit, count, schedules)
    predictions = _Predictions(machine or Machine())
    outcome = Outcome([], 0, 0, 0)
    configurations = _configurations(config, ranks, global_batch_size, schedules, outcome)
    accepted = list(progress(configurations, None, "listing configurations"))
    outcome.considered = len(accepted)
    if not accepted:
        raise ValueError(
            f"ranks: expected a number that {config.num_layers} layers and {global_batch_size} sequences can be "
            f"divided over, got {ranks}; change num_layers, global_batch_size or ranks"
        )
    timed = progress(enumerate(accepted), len(accepted), "bounding their times")
    candidates = [(predictions.bound(candidate), place, candidate) for place, candidate in timed]
    candidates.sort(key=lambda each: each[:2])
    too_large: list[tuple[float, Configuration, RankMemory]] = []
    for bound, _, candidate in progress(candidates, len(candidates), "simulating the fastest"):
        if len(outcome.best) >= count and bound > outcome.best[count - 1].seconds:
            break  # every remaining configuration is slower than these, so it cannot dominate one of them
        if (largest := predictions.memory(candidate)).total > memory_limit:
            too_large.append((bound, candidate, largest))
            continue
        outcome.simulated += 1
        outcome.best = _undominated([*outcome.best, predictions.found(candidate, largest)])
    outcome.best = outcome.best[:count]
    if not outcome.best:
        outcome.smallest = min(too_large, key=lambda each: each[2].total)[1:]
    outcome.too_large = len(too_large)
    _add_constraints(outcome.best, too_large, predictions)
    return outcome


def _add_constraints(
    best: list[Found], too_large: list[tuple[float, Configuration, RankMemory]], predictions: "_Predictions"
) -> None:
    """Set the constraint of every found configuration; too_large is in the order of its bounds, and is consumed."""
    faster: Found | None = None  # the fastest of too_large with bounds below the current configuration's time
    for place, found in enumerate(best):
        while too_large and too_large[0][0] < found.seconds and (faster is None or faster.seconds >= found.seconds):
            _, candidate, largest = too_large.pop(0)
            other = predictions.found(candidate, largest)
            faster = other if faster is None or other.seconds < faster.seconds else faster
        best[place] = replace(found, constraint=_constraint(found, faster))


def _undominated(found: list[Found]) -> list[Found]:
    """Return the configurations that no other beats in time and memory, fastest first; of equal ones, the first."""
    undominated: list[Found] = []
    for each in sorted(found, key=lambda each: (each.seconds, each.memory.total)):
        if not undominated or each.memory.total < undominated[-1].memory.total:
            undominated.append(each)
    return undominated


def _check_request(ranks: int, memory_limit: int, count: int, schedules: tuple[str, ...]) -> None:
    check_at_least(1, ranks=ranks, memory_limit=memory_limit, count=count)
    if unknown := [name for name in schedules if name not in SCHEDULES]:
        raise ValueError(f"schedules: expected some of {SCHEDULES}, got {unknown[0]!r}")


def _constraint(found: Found, faster: Found | None) -> str:
    """Return the reason why a configuration is not faster.

    The reason is memory if a faster configuration was too large, and otherwise the largest share of its time besides
    operations.
    """
    if faster is not None and faster.seconds < found.seconds:
        needed = faster.memory.total / 2**20
        return f"memory: {faster.configuration.description} takes {faster.seconds:.3g} s and needs {needed:,.1f} MiB"
    lost = {name: share for name, share in found.shares.items() if name != "operations"}
    name = max(lost, key=lambda each: lost[each])
    return f"{name} ({lost[name]:.0%})" if lost[name] >= 0.01 else "operations"


def _configurations(
    config: TransformerConfig, ranks: int, batch: int, schedules: tuple[str, ...], outcome: Outcome
) -> Iterator[Configuration]:
    """Yield every accepted configuration, and count the refused ones by setting."""
    base = without_searched_settings(config)
    modes = {name: s for name, s in RECOMPUTE.items() if config.enable_hyper_connections or "mhc" not in name}
    for p, cp, tp in _meshes(ranks):
        replicas = ranks // (p * cp * tp)
        if batch % replicas:
            outcome.refused["global_batch_size"] += 1
            continue
        divides_tokens = tp > 1 and base.seq_length % (cp * tp) == 0
        for (name, virtual), mode, offload in product(_schedules(p, schedules), modes, (False, True)):
            try:
                made = replace(
                    base,
                    pipeline_model_parallel_size=p,
                    context_parallel_size=cp,
                    tensor_model_parallel_size=tp,
                    sequence_parallel=divides_tokens,
                    pipeline_schedule=name,
                    virtual_pipeline_model_parallel_size=virtual,
                    enable_tensor_offload=offload,
                    **modes[mode],
                )
            except ValueError as error:
                outcome.refused[str(error).split(":")[0]] += 1
                continue
            for size in _divisors(batch // replicas):
                m = batch // replicas // size
                try:
                    check_microbatch(made, size)
                    check_sizes(name, p, m, virtual or 1)
                except ValueError as error:
                    outcome.refused[str(error).split(":")[0]] += 1
                    continue
                yield Configuration(made, size, m, replicas, mode)


def _meshes(ranks: int) -> Iterator[tuple[int, int, int]]:
    """Yield numbers of pipeline, context and tensor-parallel ranks; replicas fill the rest."""
    for p in _divisors(ranks):
        for cp in _divisors(ranks // p):
            yield from ((p, cp, tp) for tp in _divisors(ranks // p // cp) if tp <= MAX_TENSOR_PARALLEL)


def _schedules(p: int, names: tuple[str, ...]) -> Iterator[tuple[str, int | None]]:
    """Yield the names of schedules for p ranks, each with its number of virtual stages."""
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
    """Predictions of configurations; configurations that divide the model equally share stage times and memory."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._stages = StageTimes(machine)
        self._ranks: dict[Any, list[int]] = {}
        self._blocks: dict[Any, StageBlocks] = {}
        self._times: dict[Any, tuple[StageTime, ...]] = {}
        self._memories: dict[Any, list[StageMemory]] = {}
        self._after: dict[Any, tuple[float, float]] = {}

    def bound(self, candidate: Configuration) -> float:
        """Return a lower bound of a step's seconds under any schedule.

        A rank waits for its first forward and runs its forwards and input gradients. Then the last gradient has to
        reach stage 0, or the rank has weight gradients left. The bound is the largest of these sums over all ranks,
        plus the sum of gradients and the update.
        """
        config = candidate.config
        times = self._stage_times(candidate)
        costs = costs_of(config, times, candidate.micro_batch_size, self._machine)
        passes, weights, first = ([0.0] * config.pipeline_model_parallel_size for _ in range(3))
        leads = [(0.0, 0.0)]  # by stage: seconds of the stages before it, forward and input gradient, with messages
        for stage, (rank, time) in enumerate(zip(self._stage_ranks(candidate), times, strict=True)):
            if not passes[rank]:
                first[rank] = stage
            passes[rank] += candidate.num_microbatches * (time.forward + time.input_gradient)
            weights[rank] += candidate.num_microbatches * time.weight_gradient
            ahead, back = leads[-1]
            wire = costs.communication
            leads.append((ahead + time.forward + wire, back + time.input_gradient + wire))
        bounds = []
        for own, late, stage in zip(passes, weights, map(int, first), strict=True):
            ahead, back = leads[stage]
            bounds.append(ahead + own + max(late, back + (times[0].weight_gradient if stage else 0.0)))
        return max(bounds) + sum(self._after_backward(candidate))

    def memory(self, candidate: Configuration) -> RankMemory:
        """Return the memory of the rank that needs most."""
        stages = self._stage_memories(candidate)
        schedule = schedule_for(candidate.config, candidate.num_microbatches)
        ranks = rank_memories(candidate.config, schedule, stages, candidate.data_parallel_size)
        return max(ranks, key=lambda rank: rank.total)

    def found(self, candidate: Configuration, memory: RankMemory) -> Found:
        """Return the predicted seconds of a step and their shares."""
        config = candidate.config
        times = self._stage_times(candidate)
        costs = costs_of(config, times, candidate.micro_batch_size, self._machine)
        simulation = simulate(schedule_for(config, candidate.num_microbatches), costs)
        waits = wavefront_delay(config, candidate.micro_batch_size, times, self._machine)
        simulation = replace(simulation, makespan=simulation.makespan + waits)
        gradients, update = self._after_backward(candidate)
        copies = max(0.0, self._copies(candidate) - simulation.makespan - update)
        total = simulation.makespan + gradients + update + copies
        work = max(self._work(candidate), key=sum)
        shares = {
            "operations": work[0],
            "recomputation": work[1],
            "exchanges": work[2],
            "bubble": simulation.makespan - sum(work),
            "gradients": gradients,
            "update": update,
            "copies": copies,
        }
        return Found(candidate, total, memory, {name: seconds / total for name, seconds in shares.items()})

    def _key(self, candidate: Configuration) -> Any:
        """Return all that the times and the memory of stages depend on."""
        c = candidate.config
        return (
            c.pipeline_model_parallel_size,
            c.virtual_pipeline_model_parallel_size,
            c.pipeline_schedule in V_SCHEDULES,
            c.context_parallel_size,
            c.tensor_model_parallel_size,
            candidate.recompute,
            candidate.micro_batch_size,
        )

    def _stage_ranks(self, candidate: Configuration) -> list[int]:
        """Return the pipeline rank of every stage."""
        config = candidate.config
        key = self._key(candidate)[:3]
        if key not in self._ranks:
            self._ranks[key] = [get_stage_place(config, stage).pp_rank for stage in range(num_stages(config))]
        return self._ranks[key]

    def _stage_times(self, candidate: Configuration) -> tuple[StageTime, ...]:
        key = self._key(candidate)
        if key not in self._times:
            divided = *key[:3], candidate.recompute
            if divided not in self._blocks:
                self._blocks[divided] = blocks_of_stages(candidate.config)
            self._times[key] = self._stages.of(candidate.config, candidate.micro_batch_size, self._blocks[divided])
        return self._times[key]

    def _stage_memories(self, candidate: Configuration) -> list[StageMemory]:
        key = self._key(candidate)
        if key not in self._memories:
            self._memories[key] = predict_stages(candidate.config, candidate.micro_batch_size)
        return self._memories[key]

    def _after_backward(self, candidate: Configuration) -> tuple[float, float]:
        """Return the seconds of the gradient sum and of the update."""
        key = *self._key(candidate)[:5], candidate.data_parallel_size
        if key not in self._after:
            self._after[key] = after_backward(
                candidate.config,
                candidate.micro_batch_size,
                candidate.num_microbatches,
                candidate.data_parallel_size,
                self._machine,
            )
        return self._after[key]

    def _work(self, candidate: Configuration) -> list[tuple[float, float, float]]:
        """Return seconds of a step by rank: operations, recomputation, exchanges."""
        sums = [[0.0, 0.0, 0.0] for _ in range(candidate.config.pipeline_model_parallel_size)]
        for rank, time in zip(self._stage_ranks(candidate), self._stage_times(candidate), strict=True):
            of_rank = sums[rank]
            total = time.forward + time.input_gradient + time.weight_gradient
            for place, part in enumerate((total - time.recomputed - time.exchanged, time.recomputed, time.exchanged)):
                of_rank[place] += candidate.num_microbatches * part
        return [(a, b, c) for a, b, c in sums]

    def _copies(self, candidate: Configuration) -> float:
        """Return seconds of the host link with offloaded parameters, on the rank that copies most."""
        if not candidate.config.enable_tensor_offload:
            return 0.0
        moved = moved_bytes(candidate.config, schedule_for(candidate.config, candidate.num_microbatches))
        return max(moved) / self._machine.link_bandwidth
