"""Values that move to the host within a budget of memory: the choice of layers and values, and its memory."""

import contextlib
import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from diptych.planner.budget import fit_budget, left_out, smallest
from diptych.planner.budget.blocks import StageParts
from diptych.planner.memory import predict_memory
from diptych.planner.memory.rank_peaks import rank_peaks
from diptych.planner.step_time import Machine, StageTimes
from diptych.plans.config import TransformerConfig
from diptych.plans.model.layers import format_offload
from diptych.plans.model.values import VALUES
from diptych.plans.recompute import RecomputeBlock
from diptych.plans.schedule.named import schedule_for
from parity.compare import relative_difference
from tests.backends import BACKENDS, model_gradients, normal
from tests.planner.host_memory import uncounted_host
from tests.planner.test_budget import BATCH, MODEL, QUICK_MACHINE
from tests.planner.test_memory import measured

MOVED = {
    "one device": {"num_layers": 5},
    "mHC": {"num_layers": 4, "enable_hyper_connections": True, "activation_storage": "fp8"},
    "1f1b": {"num_layers": 6, "pipeline_model_parallel_size": 2},
    "split, without prefetch": {
        **{"num_layers": 6, "pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1"},
        "tensor_offload_num_prefetch_layers": 0,
    },
}


OFFLOADED = ["all", "all", frozenset({"fc1"}), frozenset({"q", "k", "v", "core_attn"}), frozenset({"residual_streams"})]


@pytest.mark.parametrize("name", MOVED)
def test_values_move_to_the_host_where_that_is_faster(name):
    """No drawn choice of recompute and offload within the budget is faster."""
    offload = {"enable_activation_offload": True, "activation_offload_min_bytes": 1000}
    config = replace(MODEL, hidden_size=64, seq_length=256, **offload, **MOVED[name])
    count = 1 if config.pipeline_model_parallel_size == 1 else 4
    schedule = schedule_for(config, count)
    machine = replace(QUICK_MACHINE, link_bandwidth=1e11)
    times = StageTimes(machine)

    def seconds(made: TransformerConfig) -> float:
        return sum(stage.recomputed + stage.packed + stage.copied for stage in times.of(made, BATCH))

    kinds = ["none", "full", "layernorm", "core_attn+mlp", "layernorm+core_attn"]
    chosen = random.Random(3)
    found = []
    for _ in range(120):
        layout = ",".join(chosen.choice(kinds) for _ in range(config.num_layers))
        moved = [0, *(number for number in range(1, config.num_layers) if chosen.random() < 0.5)]
        numbers = format_offload({number: chosen.choice(OFFLOADED) for number in moved})
        made = replace(config, recompute_layout=layout, activation_offload_layers=numbers, activation_storage=None)
        found.append((max(rank_peaks(made, schedule, BATCH)), seconds(made)))
    peaks, times_found = (np.array(each) for each in zip(*found, strict=True))
    without = replace(config, enable_activation_offload=False)
    faster = []
    for share in (0.05, 0.3, 0.65):
        budget = int(peaks.min() + share * (peaks.max() - peaks.min()))
        plan = fit_budget(config, BATCH, budget, machine, count)
        assert plan.peaks == rank_peaks(plan.config, schedule, BATCH)
        assert plan.peak <= budget
        assert plan.seconds == pytest.approx(seconds(plan.config))
        assert plan.bound <= plan.seconds <= 1.002 * plan.bound
        most = plan.seconds
        with contextlib.suppress(ValueError):  # the budget may be too small for recompute alone
            most = fit_budget(without, BATCH, budget, machine, count).seconds
        assert plan.seconds <= 1.002 * most
        faster.append(plan.seconds < 0.9 * most and plan.config.enable_activation_offload)
        least = times_found[peaks <= budget - 4 * left_out(config.seq_length)].min(initial=np.inf)
        assert plan.seconds <= 1.005 * least
        given = replace(config, activation_offload_layers="0")
        with contextlib.suppress(ValueError):
            with_given = fit_budget(given, BATCH, budget, machine, count)
            assert with_given.config.activation_offload_layers == "0"
            assert with_given.seconds >= plan.bound
    assert any(faster)


def test_the_values_of_a_layer_move_that_are_copied_during_the_next():
    """Those of all sets of values with the most bytes, by enumeration; all may move as well."""
    config = replace(MODEL, hidden_size=64, seq_length=256, enable_activation_offload=True)
    config = replace(config, activation_offload_min_bytes=1000, layer_pattern="attention,gdn", num_layers=4)
    machine = replace(QUICK_MACHINE, link_bandwidth=2e10)
    times = StageTimes(machine)
    parts = StageParts(config, 0, BATCH, times, ("F", "B"), {})
    layer = RecomputeBlock("none", (0,))
    costs = [cost for cost in parts.options(0, 1) if cost.block == layer and cost.offloaded]
    assert "all" in [cost.offloaded for cost in costs]
    without = replace(config, enable_activation_offload=False)
    still = parts.cost(layer, without)
    most = predict_memory(without, BATCH).saved
    saved = {}
    for name in VALUES:
        saved[name] = most - predict_memory(replace(config, activation_offload_layers=f"0:{name}"), BATCH).saved
    named = [name for name, size in saved.items() if size]
    sizes = {}
    for count in range(len(named) + 1):
        for names in itertools.combinations(named, count):
            sizes[frozenset(names)] = sum(saved[name] for name in names)
    for number in (0, 1):
        block = RecomputeBlock("none", (number,))
        following = times.first_layer(config, (config.layer(number),), block, BATCH)
        most = min(following) * machine.link_bandwidth
        best = max(size for size in sizes.values() if size <= most)
        assert 0 < best < sum(saved[name] for name in named)
        chosen = [cost for cost in costs if cost.moved == best and sizes[cost.offloaded] == best]
        assert chosen
        assert chosen[0].saved == still.saved - best


def test_the_first_layer_of_a_later_stage_moves_all_its_values_or_none():
    """Its input is the message to the stage, which stays on the device but is copied with the others."""
    config = replace(MODEL, hidden_size=64, seq_length=256, num_layers=8, pipeline_model_parallel_size=2)
    config = replace(config, enable_activation_offload=True, activation_offload_min_bytes=1000)
    times = StageTimes(replace(QUICK_MACHINE, link_bandwidth=2e10))
    offloaded = {}
    for stage, layer in ((0, 0), (1, 4), (1, 5)):
        parts = StageParts(config, stage, BATCH, times, ("F", "B"), {})
        offloaded[layer] = {cost.offloaded for cost in parts.options(layer, 1)}
    assert offloaded[4] == {None, "all"}
    assert offloaded[0] == offloaded[5]
    assert len(offloaded[0]) > 2


def test_fewer_values_move_over_a_slower_link_and_results_are_equal():
    config = replace(MODEL, num_layers=6, hidden_size=64, seq_length=256, params_dtype="float64")
    config = replace(config, enable_activation_offload=True, activation_offload_min_bytes=1000)
    without = replace(config, enable_activation_offload=False)
    most = predict_memory(without, BATCH).peak
    budget = int(most - 0.4 * (most - smallest(config, BATCH)))
    fast, slow = (fit_budget(config, BATCH, budget, replace(QUICK_MACHINE, link_bandwidth=b)) for b in (1e12, 3e10))
    assert fast.seconds < slow.seconds < fit_budget(without, BATCH, budget, QUICK_MACHINE).seconds
    assert ":" in str(slow.config.activation_offload_layers)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (BATCH, config.seq_length))
    cotangent = normal(1, BATCH, config.seq_length, config.vocab_size)
    plain = model_gradients("torch", without, tokens, cotangent)
    for backend in BACKENDS:
        logits, gradients = model_gradients(backend, slow.config, tokens, cotangent)
        limit = 0 if backend == "torch" else 1e-12
        assert relative_difference(logits, plain[0]) <= limit
        for name, gradient in plain[1].items():
            assert relative_difference(gradients[name], gradient) <= limit, name


def test_every_layer_of_a_block_waits_for_its_own_copy():
    """Also of a block of several layers that are recomputed together, whose layers move different values."""
    config = replace(MODEL, num_layers=4, enable_hyper_connections=True, recompute_layout="mhc*3,none")
    moves = {"enable_activation_offload": True, "activation_offload_min_bytes": 1}
    times = StageTimes(Machine(link_bandwidth=1e7))

    def copied(layers: str) -> float:
        return times.of(replace(config, **moves, activation_offload_layers=layers), BATCH)[0].copied

    assert copied("0:fc1,1") == pytest.approx(copied("0:fc1") + copied("1"))
    assert copied("1") > copied("0:fc1") > 0
    assert copied("2-3") == 0, "the last two stay"


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_step_waits_for_what_is_left_of_a_copy(ahead):
    """A slow link: the copy to the host is hidden by the forward of the next layer, the copy back by its backward."""
    still = replace(MODEL, num_layers=4, tensor_offload_num_prefetch_layers=ahead)
    moves = {"enable_activation_offload": True, "activation_offload_layers": "0", "activation_offload_min_bytes": 1}
    times = StageTimes(Machine(link_bandwidth=1e7))
    (without,), (stage,) = (times.of(config, BATCH) for config in (still, replace(still, **moves)))
    layer = times.of_block(still, (still.layer(1),), RecomputeBlock("none", (1,)), BATCH)
    assert stage.moved == predict_memory(still, BATCH).saved - predict_memory(replace(still, **moves), BATCH).saved
    copy = stage.moved / 1e7
    assert copy > 2 * max(layer.forward, layer.input_gradient)
    assert stage.forward - without.forward == pytest.approx(copy - layer.forward)
    hidden = layer.input_gradient * ahead
    assert stage.input_gradient - without.input_gradient == pytest.approx(copy - hidden)
    assert stage.copied == pytest.approx(2 * copy - layer.forward - hidden)


def test_a_plan_that_moves_values_has_the_predicted_memory():
    config = replace(MODEL, num_layers=6, hidden_size=64, seq_length=256, enable_activation_offload=True)
    config = replace(config, activation_offload_min_bytes=1000)
    without = replace(config, enable_activation_offload=False)
    least, most = smallest(config, BATCH), predict_memory(without, BATCH).peak
    plan = fit_budget(config, BATCH, (2 * least + most) // 3, replace(QUICK_MACHINE, link_bandwidth=1e11))
    assert plan.config.activation_offload_layers is not None
    with uncounted_host():
        assert plan.peak == pytest.approx(measured(plan.config, BATCH)[0].peak, rel=0.02)


def test_layers_that_move_are_fetched_at_most_one_ahead():
    config = replace(MODEL, enable_activation_offload=True, tensor_offload_num_prefetch_layers=2)
    with pytest.raises(ValueError, match=r"tensor_offload_num_prefetch_layers: expected 0 or 1 .*, got 2"):
        fit_budget(config, BATCH, 2**30)
