"""The recompute of every layer within a budget of memory, against all layouts of small models."""

import itertools
import random
import re
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.planner.budget import BudgetPlan, fit_budget, left_out, smallest, solver
from diptych.planner.budget.blocks import BlockCost, EndCost, StageParts
from diptych.planner.budget.ranks import MemoryConstraint, RankSearch
from diptych.planner.budget.solver import solve
from diptych.planner.memory import predict_memory
from diptych.planner.memory.rank_peaks import rank_peaks
from diptych.planner.search import RECOMPUTE
from diptych.planner.step_time import Machine, StageTimes
from diptych.plans.config import TransformerConfig
from diptych.plans.model.layers import format_numbers
from diptych.plans.recompute import NO_RECOMPUTE, RecomputeBlock, format_layout, recompute_blocks
from diptych.plans.schedule.named import schedule_for
from diptych.plans.schedule.placement import SCHEDULES
from tests.backends import BACKENDS, model_gradients, normal
from tests.planner.test_memory import measured

MODEL = TransformerConfig(
    hidden_size=32, num_layers=3, num_attention_heads=2, ffn_hidden_size=64, seq_length=32, vocab_size=64
)
MODELS = {
    "attention": MODEL,
    "mHC": replace(MODEL, num_layers=2, enable_hyper_connections=True),
    "mixed": replace(MODEL, layer_pattern="gdn,attention+gelu", bf16=True),
    "dropout": replace(MODEL, hidden_dropout=0.1, add_bias_linear=True, num_query_groups=1),
    "one of two ranks": replace(MODEL, tensor_model_parallel_size=2, sequence_parallel=True),
}
ONE_LAYER = ["none", "full"] + [
    "+".join(filter(None, names))
    for names in itertools.product(("", "layernorm"), ("", "core_attn"), ("", "activation", "mlp"))
    if any(names)
]
BATCH = 2


def layouts(config: TransformerConfig) -> list[str]:
    """All layouts of blocks of one layer, and of blocks of several layers that are recomputed together."""
    kinds = {1: ONE_LAYER}
    if config.enable_hyper_connections:
        with_mhc = ["mhc"] + [f"mhc+{names}" for names in ONE_LAYER[2:]]
        kinds = {1: ONE_LAYER + with_mhc, 2: with_mhc}
    kinds = {n: [*kinds.get(n, []), *(["full"] if n > 1 else [])] for n in range(1, config.num_layers + 1)}

    def of(count: int) -> list[str]:
        if not count:
            return [""]
        found = []
        for size in range(1, count + 1):
            heads = [kind if size == 1 else f"{kind}*{size}" for kind in kinds[size]]
            found += [f"{head},{rest}".rstrip(",") for head in heads for rest in of(count - size)]
        return found

    return of(config.num_layers)


def seconds_of(config: TransformerConfig, times: StageTimes) -> float:
    return times.of(config, BATCH)[0].recomputed


@pytest.mark.parametrize("name", MODELS)
def test_no_layout_within_the_budget_recomputes_less(name):
    """By simulation of every layout; another that is as fast may be found."""
    config = MODELS[name]
    times = StageTimes(Machine())
    found = []
    for layout in layouts(config):
        made = replace(config, recompute_layout=layout)
        found.append((predict_memory(made, BATCH).peak, seconds_of(made, times), layout))
    peaks, seconds, _ = (np.array(each) for each in zip(*found, strict=True))
    assert len(found) > 600
    for share in (0.02, 0.15, 0.3, 0.5, 0.7, 0.9, 1.0):
        budget = int(peaks.min() + share * (peaks.max() - peaks.min()))
        plan = fit_budget(config, BATCH, budget)
        assert plan.peak == predict_memory(plan.config, BATCH).peak <= budget
        assert plan.seconds == pytest.approx(seconds_of(plan.config, times))
        best = seconds[peaks <= budget].min()
        nearly = seconds[peaks <= budget - left_out(config.seq_length)].min(initial=np.inf)
        assert best - 1e-15 <= plan.seconds <= nearly + 1e-15, share
        assert plan.bound <= best + 1e-15
    with pytest.raises(ValueError, match=r"activation_memory_budget: expected at least [\d,]+ bytes, .* got") as error:
        fit_budget(config, BATCH, int(peaks.min() * 0.9))
    least = int(re.sub(r"\D", "", str(error.value).split("bytes")[0]))
    assert peaks.min() <= least <= 1.002 * peaks.min() + left_out(config.seq_length)
    assert fit_budget(config, BATCH, least).peak <= least


KINDS = ("F", "B")
COSTS = st.tuples(
    *(st.integers(0, 9),) * 3,
    st.sampled_from([0.0, 1.0, 2.5, 4.0]),
    st.sampled_from([0, 4, 9]),
    st.tuples(st.integers(3, 6), st.integers(3, 6)),
    st.integers(0, 2),
)
"""Saved bytes, bytes of the peaks of F and B beside them, seconds of a block, bytes that move, seconds of F and of B of
its first layer, and bytes by which the peaks of that layer are smaller."""


class DrawnParts:
    """Costs of a stage, drawn at random."""

    def __init__(self, data: st.DataObject, first: int, count: int) -> None:
        self.kinds = KINDS
        self.layers = range(first, first + count)
        self.drawn = {
            (begin, size): [
                self.cost(*drawn, may_move=size == 1 and begin < first + count - 1)
                for drawn in data.draw(st.lists(COSTS, min_size=1, max_size=3))
            ]
            for size in (1, 2, 3)
            for begin in range(first, first + count - size + 1)
        }
        left = data.draw(st.lists(st.integers(0, 9), min_size=count + 1, max_size=count + 1))
        self.after = [(0, each) for each in sorted(left, reverse=True)]
        peaks = st.tuples(st.integers(0, 9), st.integers(0, 9))
        self.first_end = EndCost(data.draw(st.integers(0, 5)), data.draw(peaks))
        self.last_end = EndCost(data.draw(st.integers(0, 3)), data.draw(peaks))

    @staticmethod
    def cost(saved, forward, backward, seconds, moved, begin_seconds, less, may_move) -> BlockCost:
        peaks = (saved + forward, saved + backward)
        begin_peaks = tuple(max(0, peak - less) for peak in peaks)
        moved = moved if may_move else 0
        none = RecomputeBlock("none", ())
        return BlockCost(none, max(0, saved - 2 * moved), peaks, seconds, False, moved, begin_peaks, begin_seconds)

    def options(self, first: int, size: int) -> list[BlockCost]:
        return self.drawn.get((first, size), [])

    def copy_waits(self, moved: np.ndarray, place: int, begin_seconds: np.ndarray) -> np.ndarray:
        return np.maximum(0.0, moved - begin_seconds).sum(0)

    def least_wait(self, moved: np.ndarray) -> np.ndarray:
        return 2 * np.maximum(0.0, moved - 6.0)

    def copied_beside(self, moved: np.ndarray) -> np.ndarray:
        return np.stack([moved, moved])

    def all_of(self, limits: tuple[int, int], first: int, saved: int, moved: int = 0) -> list[tuple[int, float]]:
        """Saved bytes and seconds of all sequences of blocks from a layer on that are within limits."""
        end = self.layers.stop
        if first == end:
            fits = all(saved + peak <= limit for peak, limit in zip(self.last_end.peaks, limits, strict=True))
            return [(saved + self.last_end.saved, 0.0)] if fits else []
        found = []
        for size in (1, 2, 3):
            for cost in self.options(first, size):
                left = self.after[first - self.layers.start + size]
                needed = [saved + a + b for a, b in zip(cost.peaks, left, strict=True)]
                beside = [saved + moved + a + b for a, b in zip(cost.begin_peaks, left, strict=True)]
                if all(a <= limit for a, limit in zip(needed + beside * (moved > 0), limits * 2, strict=False)):
                    rest = self.all_of(limits, first + size, saved + cost.saved, cost.moved)
                    wait = sum(max(0.0, moved - seconds) for seconds in cost.begin_seconds) if moved else 0.0
                    found += [(total, seconds + cost.seconds + wait) for total, seconds in rest]
        return found

    def every(self, limits: tuple[int, int]) -> list[tuple[int, float]]:
        """Saved bytes and seconds of all blocks of the stage that are within limits."""
        begins = zip(self.first_end.peaks, self.after[0], limits, strict=True)
        fits = all(peak + left <= limit for peak, left, limit in begins)
        return self.all_of(limits, self.layers.start, self.first_end.saved) if fits else []


@settings(max_examples=300)
@given(data=st.data(), count=st.integers(1, 5), limits=st.tuples(st.integers(5, 40), st.integers(5, 40)))
def test_any_costs_of_blocks_are_solved(data, count, limits):
    """Against all sequences of blocks of one, two or three layers."""
    parts = DrawnParts(data, 2, count)
    most = data.draw(st.integers(5, 60))
    expected = min((seconds for saved, seconds in parts.every(limits) if saved <= most), default=np.inf)
    endings = solver.blocks_by_end(parts)
    for upper in (True, False):
        found = solve(parts, endings, limits, most, upper)
        assert (np.inf if found is None else found.seconds) == expected
        assert found is None or [n for block in found.blocks for n in block.layers] == [*parts.layers]
        assert found is None or found.saved <= most
    rests = solver._least_rests(parts, endings, limits, most)
    assert solver._rest_of(rests[0], np.array([parts.first_end.saved]))[0] <= expected


@settings(max_examples=60)
@given(data=st.data(), num_stages=st.integers(1, 2), budget=st.integers(20, 120))
def test_microbatches_in_flight_are_counted(data, num_stages, budget):
    """Against all blocks of all stages of a rank, within the limits that all their saved bytes leave."""
    parts = [DrawnParts(data, 10 * stage, data.draw(st.integers(1, 3))) for stage in range(num_stages)]
    flights = st.tuples(*[st.integers(0, 3)] * num_stages)
    constraint = st.builds(MemoryConstraint, st.sampled_from([*KINDS, "W"]), flights, st.integers(0, 20))
    constraints = [data.draw(st.lists(constraint, min_size=1, max_size=4)) for _ in parts]
    best = np.inf
    for choice in itertools.product(*(each.every((budget, budget)) for each in parts)):
        saved = [each for each, _ in choice]
        fits = True
        for own, held, (total, seconds) in zip(parts, constraints, choice, strict=True):
            limits = dict.fromkeys((*KINDS, "W"), budget)
            for kind, in_flight, beside in held:
                rest = budget - beside - sum(a * b for a, b in zip(in_flight, saved, strict=True))
                limits[kind] = min(limits[kind], rest)
            fits = fits and limits["W"] >= 0 and (total, seconds) in own.every((limits["F"], limits["B"]))
        if fits:
            best = min(best, sum(seconds for _, seconds in choice))
    found = RankSearch(parts, constraints).best(budget)
    assert (np.inf if found is None else found.seconds) == best
    assert found is None or found.bound <= best


DEEP = {
    "attention": {},
    "hybrid": {"layer_pattern": "gdn,gdn,gdn,attention"},
    "mHC": {"enable_hyper_connections": True},
}


@pytest.mark.parametrize("kind", DEEP)
def test_a_deep_model_is_solved_within_two_percent_of_the_bound(kind):
    config = TransformerConfig(
        hidden_size=1024, num_layers=64, num_attention_heads=16, seq_length=2048, bf16=True, **DEEP[kind]
    )
    least = smallest(config, BATCH)
    most = predict_memory(config, BATCH).peak
    for share in (0.15, 0.85):
        begin = time.process_time()
        plan = fit_budget(config, BATCH, int(least + share * (most - least)))
        assert time.process_time() - begin < 10
        assert plan.bound <= plan.seconds <= 1.02 * plan.bound
    assert fit_budget(config, BATCH, most).seconds == 0


@pytest.mark.parametrize("name", MODELS)
def test_no_fixed_mode_is_better_at_equal_bytes(name):
    config = replace(MODELS[name], num_layers=4)
    times = StageTimes(Machine())
    modes = [mode for mode in RECOMPUTE.values() if config.enable_hyper_connections or "mhc" not in str(mode)]
    modes += [{**RECOMPUTE["whole layers"], "recompute_num_layers": count} for count in (2, 3, 4)]
    modes += [
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": count}
        for count in (1, 2)
    ]
    for mode in modes:
        fixed = replace(config, **mode)
        plan = fit_budget(config, BATCH, predict_memory(fixed, BATCH).peak + left_out(config.seq_length))
        assert plan.seconds <= seconds_of(fixed, times) + 1e-15, mode


def test_sums_of_blocks_are_those_of_the_whole_model():
    """But for bytes that the whole model has once; so what the sums do not allow, no layout needs."""
    chosen = random.Random(0)
    offload = {"enable_activation_offload": True, "activation_offload_min_bytes": 1}
    for config, moves in itertools.product(MODELS.values(), ({}, offload)):
        config = replace(config, num_layers=4, hidden_size=128, ffn_hidden_size=256, seq_length=128, **moves)
        parts = StageParts(config, 0, BATCH, StageTimes(Machine()), ("F", "B"), {})
        for layout in chosen.sample(layouts(replace(config, num_layers=2)), 12):
            made = replace(config, recompute_layout=f"{layout},{layout}")
            saved = parts.first_end.saved
            forward, backward = (a + b for a, b in zip(parts.first_end.peaks, parts.after[0], strict=True))
            peaks = [forward, backward]
            moved = 0
            for block in recompute_blocks(made):
                cost = None
                if moves and len(block.layers) > 1 and block.kind != "full":  # blocks of several layers do not move
                    break
                cost = parts.cost(block, config)
                left = parts.after[block.layers[-1] + 1]
                peaks += [saved + a + b for a, b in zip(cost.peaks, left, strict=True)]
                peaks += [saved + moved + a + b for a, b in zip(cost.begin_peaks, left, strict=True)]
                saved += cost.saved
                moved = cost.moved
            if cost is None:
                continue
            assert moved == 0, "the last layers of a stage stay"
            peaks += [saved + peak for peak in parts.last_end.peaks]
            missing = predict_memory(made, BATCH).peak - max(peaks)
            assert 0 <= missing <= left_out(config.seq_length), made.recompute_layout


@pytest.mark.parametrize("name", ["attention", "mHC", "mixed"])
def test_a_layout_is_executed_in_both_backends(name):
    """In PyTorch bit by bit, and with the predicted memory."""
    config = replace(MODELS[name], num_layers=4, hidden_size=64, bf16=False, params_dtype="float64")
    least, most = smallest(config, BATCH), predict_memory(config, BATCH).peak
    plan = fit_budget(config, BATCH, (least + most) // 2)
    assert len({block.dropped for block in recompute_blocks(plan.config)}) > 1
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (BATCH, config.seq_length))
    cotangent = normal(1, BATCH, config.seq_length, config.vocab_size)
    plain = model_gradients("torch", config, tokens, cotangent)
    for backend in BACKENDS:
        logits, gradients = model_gradients(backend, plan.config, tokens, cotangent)
        limit = 0 if backend == "torch" else 1e-12
        assert np.abs(logits - plain[0]).max() <= limit * np.abs(plain[0]).max()
        for each, gradient in gradients.items():
            assert np.linalg.norm(gradient - plain[1][each]) <= limit * np.linalg.norm(plain[1][each]), each
    (_, peak), _ = measured(plan.config, BATCH)
    assert plan.peak == pytest.approx(peak, rel=0.02)


def test_layouts_read_back():
    for config in MODELS.values():
        for layout in random.Random(0).sample(layouts(config), 50):
            blocks = recompute_blocks(replace(config, recompute_layout=layout))
            again = format_layout(blocks)
            assert recompute_blocks(replace(config, recompute_layout=again)) == blocks
            assert [number for block in blocks for number in block.layers] == [*range(config.num_layers)]


def test_a_layout_is_cut_at_the_ends_of_stages():
    config = replace(MODEL, num_layers=4, pipeline_model_parallel_size=2, recompute_layout="full*3,layernorm", **{})
    stages = [recompute_blocks(config, None, rank) for rank in range(2)]
    assert [[(block.kind, block.layers) for block in blocks] for blocks in stages] == [
        [("full", (0, 1))],
        [("full", (2,)), ("selective", (3,))],
    ]


PIPELINES = {
    "1f1b": {},
    "zb-h1": {"layer_pattern": "gdn,attention"},
    "interleaved": {"virtual_pipeline_model_parallel_size": 2},
    "zb-v": {"virtual_pipeline_model_parallel_size": 2, "enable_hyper_connections": True},
    "context": {"pipeline_model_parallel_size": 1, "context_parallel_size": 2, "layer_pattern": "kda,attention"},
}


@pytest.mark.parametrize("name", PIPELINES)
def test_no_layout_of_a_pipeline_within_the_budget_recomputes_less(name):
    """Against layouts of which each layer is one of a few, all or a sample."""
    settings = {"pipeline_model_parallel_size": 2, "pipeline_schedule": name if name in SCHEDULES else "none"}
    config = replace(MODEL, num_layers=4, **settings | PIPELINES[name])
    schedule = schedule_for(config, 4)
    times = StageTimes(Machine())
    kinds = ["none", "full", "layernorm", "core_attn+mlp", "layernorm+activation"]
    found = []
    for layout in random.Random(1).sample([*itertools.product(kinds, repeat=4)], 150):
        made = replace(config, recompute_layout=",".join(layout))
        seconds = sum(stage.recomputed for stage in times.of(made, BATCH))
        found.append((max(rank_peaks(made, schedule, BATCH)), seconds))
    peaks, seconds = (np.array(each) for each in zip(*found, strict=True))
    for share in (0.1, 0.4, 0.8):
        budget = int(peaks.min() + share * (peaks.max() - peaks.min()))
        plan = fit_budget(config, BATCH, budget, num_microbatches=4)
        assert plan.peaks == rank_peaks(plan.config, schedule, BATCH)
        assert plan.peak <= budget
        assert plan.seconds == pytest.approx(sum(stage.recomputed for stage in times.of(plan.config, BATCH)))
        assert plan.bound <= plan.seconds <= 1.005 * plan.bound + 1e-12
        assert plan.seconds <= 1.005 * seconds[peaks <= budget - 4 * left_out(config.seq_length)].min(initial=np.inf)
    with pytest.raises(ValueError, match=r"activation_memory_budget: expected at least [\d,]+ bytes, .* got") as error:
        fit_budget(config, BATCH, int(peaks.min() * 0.3), num_microbatches=4)
    least = int(re.sub(r"\D", "", str(error.value).split("bytes")[0]))
    assert fit_budget(config, BATCH, least, num_microbatches=4).peak <= least


QUICK_MACHINE = Machine(compute_rate=1e12, memory_bandwidth=1e12, network_bandwidth=1e12, link_bandwidth=1e12)
"""A machine on which packing in 8 bits is faster than most recomputation."""
STORED = {
    "one device": {"num_layers": 3},
    "split": {"num_layers": 4, "pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1"},
    "mHC": {"num_layers": 3, "enable_hyper_connections": True},
}


def test_more_memory_is_never_refused():
    """The simulation of the whole model exceeds that of its blocks by little, and the next best blocks may be far."""
    small = {"hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "seq_length": 8, "vocab_size": 97}
    layout = {"pipeline_model_parallel_layout": "E|tt|tt||tt|ttL", "virtual_pipeline_model_parallel_size": 2}
    pipeline = {"pipeline_model_parallel_size": 3, "pipeline_schedule": "interleaved-zb1p", **layout}
    config = TransformerConfig(num_layers=8, bf16=True, **small, **pipeline)
    least = smallest(config, 1, 4)
    for budget in (least, 400_000, 427_368, 440_000):
        assert fit_budget(config, 1, budget, num_microbatches=4).peak <= budget
    with pytest.raises(ValueError, match="expected at least") as error:
        fit_budget(config, 1, least // 3, num_microbatches=4)
    stated = int(re.sub(r"\D", "", str(error.value).split("bytes")[0]))
    for budget in np.linspace(stated, 2 * stated, 9):
        assert fit_budget(config, 1, int(budget), num_microbatches=4).peak <= budget


@pytest.mark.parametrize("name", STORED)
def test_layers_save_in_8_bits_where_that_is_faster(name):
    """No drawn choice of recompute and storage within the budget is faster."""
    config = replace(MODEL, hidden_size=64, seq_length=256, bf16=True, activation_storage="fp8", **STORED[name])
    count = 1 if config.pipeline_model_parallel_size == 1 else 4
    schedule = schedule_for(config, count)
    times = StageTimes(QUICK_MACHINE)

    def seconds(made: TransformerConfig) -> float:
        return sum(stage.recomputed + stage.packed for stage in times.of(made, BATCH))

    kinds = ["none", "full", "layernorm", "core_attn+mlp", "layernorm+core_attn"]
    chosen = random.Random(2)
    found = []
    for _ in range(120):
        layout = ",".join(chosen.choice(kinds) for _ in range(config.num_layers))
        stored = [number for number in range(config.num_layers) if chosen.random() < 0.5]
        storage = {"activation_storage": "fp8" if stored else None}
        storage |= {"activation_storage_layers": format_numbers(stored) if stored else None}
        made = replace(config, recompute_layout=layout, **storage)
        found.append((max(rank_peaks(made, schedule, BATCH)), seconds(made)))
    peaks, times_found = (np.array(each) for each in zip(*found, strict=True))
    stored = []
    for share in (0.15, 0.3, 0.65, 0.8):
        budget = int(peaks.min() + share * (peaks.max() - peaks.min()))
        plan = fit_budget(config, BATCH, budget, QUICK_MACHINE, count)
        exact = fit_budget(replace(config, activation_storage=None), BATCH, budget, QUICK_MACHINE, count)
        stored.append(plan.config.activation_storage)
        assert plan.peaks == rank_peaks(plan.config, schedule, BATCH)
        assert plan.peak <= budget
        assert plan.seconds == pytest.approx(seconds(plan.config))
        assert plan.bound <= plan.seconds <= 1.002 * exact.seconds
        assert plan.seconds <= 1.005 * times_found[peaks <= budget - 4 * left_out(config.seq_length)].min(
            initial=np.inf
        )
        given = replace(config, activation_storage_layers="1")
        with_given = fit_budget(given, BATCH, budget, QUICK_MACHINE, count)
        assert with_given.config.activation_storage_layers == "1"
        assert with_given.seconds >= plan.bound
    assert "fp8" in stored


def test_later_microbatches_of_one_device_have_all_gradients():
    """So a step of several needs more than its first microbatch."""
    one, several = (rank_peaks(MODEL, schedule_for(MODEL, count), BATCH)[0] for count in (1, 3))
    assert one < several
    plan = fit_budget(MODEL, BATCH, several, num_microbatches=3)
    assert (plan.seconds, plan.peaks) == (0, [several])
    assert fit_budget(MODEL, BATCH, one, num_microbatches=3).seconds > 0


def test_recompute_settings_of_the_model_are_replaced():
    fixed = replace(MODEL, recompute_granularity="selective", recompute_mlp=True)
    plan = fit_budget(fixed, BATCH, 2**30)
    assert isinstance(plan, BudgetPlan)
    assert replace(plan.config, recompute_layout=None) == replace(MODEL, **NO_RECOMPUTE)
