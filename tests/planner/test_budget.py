"""The recompute of every layer within a budget of memory, against all layouts of small models."""

import itertools
import random
import re
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.planner.budget import BlockCost, BudgetPlan, _Parts, _solve, fit_budget, left_out, smallest
from diptych.planner.memory import predict_memory
from diptych.planner.search import RECOMPUTE
from diptych.planner.step_time import Machine, StageTimes
from diptych.plans.config import TransformerConfig
from diptych.plans.recompute import NO_RECOMPUTE, RecomputeBlock, format_layout, recompute_blocks
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


COSTS = st.tuples(st.integers(0, 9), st.integers(0, 9), st.sampled_from([0.0, 1.0, 2.5, 4.0]))
"""Saved bytes, bytes of the peak beside them, and seconds of a block."""


@settings(max_examples=60)
@given(data=st.data(), count=st.integers(1, 5), budget=st.integers(5, 60))
def test_any_costs_of_blocks_are_solved(data, count, budget):
    """Against all sequences of blocks of one, two or three layers."""
    drawn = {
        (first, size): [
            BlockCost(RecomputeBlock("none", ()), saved, saved + more, seconds)
            for saved, more, seconds in data.draw(st.lists(COSTS, min_size=1, max_size=3))
        ]
        for size in (1, 2, 3)
        for first in range(count - size + 1)
    }
    gradients = sorted(data.draw(st.lists(st.integers(0, 9), min_size=count + 1, max_size=count + 1)), reverse=True)
    ends = data.draw(st.tuples(st.integers(0, 5), st.integers(0, 9), st.integers(0, 9)))
    parts = SimpleNamespace(
        config=SimpleNamespace(num_layers=count),
        options=lambda first, size: drawn.get((first, size), []),
        gradients=gradients,
        ends=ends,
    )

    def best(first: int, saved: int) -> float:
        """Least seconds of the layers from one on, by trying all of their blocks."""
        if first == count:
            return 0.0 if saved + ends[2] <= budget else np.inf
        return min(
            (
                cost.seconds + best(first + size, saved + cost.saved)
                for size in (1, 2, 3)
                for cost in drawn.get((first, size), [])
                if saved + cost.peak + gradients[first + size] <= budget
            ),
            default=np.inf,
        )

    expected = best(0, ends[0]) if ends[1] + gradients[0] <= budget else np.inf
    for upper in (True, False):
        found = _solve(parts, budget, upper)  # pyright: ignore[reportArgumentType]
        assert (np.inf if found is None else found.seconds) == expected
        assert found is None or sum(len(block.layers) for block in found.blocks) == count


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
    for config in MODELS.values():
        config = replace(config, num_layers=4, hidden_size=128, ffn_hidden_size=256, seq_length=128)
        parts = _Parts(config, BATCH, Machine())
        for layout in chosen.sample(layouts(replace(config, num_layers=2)), 12):
            made = replace(config, recompute_layout=f"{layout},{layout}")
            saved, peak, head = parts.ends
            peaks = [peak + parts.gradients[0]]
            for block in recompute_blocks(made):
                cost = parts._cost(block.layers[0], len(block.layers), block)
                peaks.append(saved + cost.peak + parts.gradients[block.layers[-1] + 1])
                saved += cost.saved
            peaks.append(saved + head)
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


@pytest.mark.parametrize("name", ["pipeline_model_parallel_size", "context_parallel_size"])
def test_pipelines_and_context_ranks_are_refused(name):
    with pytest.raises(ValueError, match=rf"{name}: expected 1 with a budget .*, got 2; write recompute_layout"):
        fit_budget(replace(MODEL, num_layers=4, **{name: 2}), BATCH, 2**30)


def test_recompute_settings_of_the_model_are_replaced():
    fixed = replace(MODEL, recompute_granularity="selective", recompute_mlp=True)
    plan = fit_budget(fixed, BATCH, 2**30)
    assert isinstance(plan, BudgetPlan)
    assert replace(plan.config, recompute_layout=None) == replace(MODEL, **NO_RECOMPUTE)
