"""Microbatches that follow one another over ranks that share sequences: their order, its time, and what is computed."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import wavefront
from diptych.plans.context.exchange import CP_EXCHANGES, check_exchange
from diptych.plans.schedule.messages import PipelineError
from diptych.plans.schedule.named import build_schedule, context_schedule
from diptych.plans.schedule.simulate import Costs, simulate
from diptych.plans.schedule.wavefront import makespan, num_lockstep_slots
from parity.compare import relative_difference
from reference_torch.context_parallel import wavefront as wavefront_room
from reference_torch.ops import short_convolution
from reference_torch.rank_pool import RankPool
from tests.context.jobs import OFFSETS, Case, unsharded
from tests.context.layer_jobs import MODEL, PIPELINED_LAYERS, PIPELINED_MODELS, model_unsharded
from tests.context.test_context_parallel import assert_equal, assert_layer_equal, cases_of
from tests.jax_process import run_cases

SIZES = (3, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 8)))
JOBS, LAYERS = "tests.context.jobs", "tests.context.layer_jobs"


@pytest.fixture(scope="module", params=SIZES)
def pool(request):
    with RankPool(request.param) as pool:
        yield pool


sizes = st.tuples(st.integers(1, 8), st.integers(1, 12), st.integers(1, 40))
"""Ranks, microbatches, layers."""


@given(sizes)
def test_every_rank_runs_each_microbatch_once(numbers):
    size, count, _ = numbers
    for rank in range(size):
        (order,) = context_schedule(size, rank, count).actions
        places = {(action.kind, action.microbatch): place for place, action in enumerate(order)}
        assert len(places) == len(order) == 2 * count
        assert {action.stage for action in order} == {0}
        assert all(places["F", number] < places["B", number] for number in range(count))
        for kind in "FB":
            assert sorted(range(count), key=lambda number, kind=kind: places[kind, number]) == [*range(count)]
        assert places["B", 0] == min(count, size - rank)
        (forwards,) = context_schedule(size, rank, count, forward_only=True).actions
        assert [action.microbatch for action in forwards] == [*range(count)]


@given(sizes, st.floats(0.1, 10), st.floats(0.1, 10), st.floats(0, 2))
def test_a_step_ends_and_takes_no_less_than_it_must(numbers, forward, backward, communication):
    """A rank's own work; and from the first rank to the last and back, a layer each."""
    size, count, layers = numbers
    found = makespan(size, count, layers, forward, backward, communication)
    hops = (size - 1) * (forward + backward) / layers + 2 * (size - 1) * communication
    assert found >= count * (forward + backward) * (1 - 1e-12)
    assert found >= (forward + backward + hops) * (1 - 1e-12)


@given(sizes, st.floats(0.1, 10))
def test_what_ranks_wait_is_paid_once_a_step_and_not_once_a_microbatch(numbers, backward):
    size, count, layers = numbers
    hops = (size - 1) * (1 + backward) / layers
    assert makespan(size, count, layers, 1.0, backward) == pytest.approx(count * (1 + backward) + hops, rel=1e-9)


@given(st.integers(1, 8), st.integers(1, 12))
def test_with_one_layer_it_is_a_pipeline_whose_stages_are_parts(size, count):
    schedule = build_schedule("1f1b" if size > 1 else "none", size, count)
    assert makespan(size, count, 1) == pytest.approx(simulate(schedule, Costs()).makespan)


def test_slots_of_jax():
    assert [num_lockstep_slots(size, 4) for size in (1, 2, 8)] == [4, 5, 11]


@cache
def expected(case: Case):
    return unsharded(case._replace(exchange="", disable_recompute=False, impl="reference"))


@pytest.mark.multiprocess
def test_ranks_compute_what_one_process_does(pool):
    """Every rule, every division; a loss of final states alone, or a gradient of initial ones alone."""
    cases = cases_of("pipelined")
    cases += [Case("gdn", (0, 48), "pipelined", alone="finals")]
    cases += [Case("gdn", (0, 20, 48), "pipelined", alone="initial_state")]
    for case, parts in zip(cases, zip(*pool.run(f"{JOBS}:run_parts", cases), strict=True), strict=True):
        assert_equal(case, list(parts), pool.size)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "division", [pytest.param(name, marks=() if "many" in name else pytest.mark.slow) for name in OFFSETS]
)
def test_kernels_need_nothing_else(pool, division):
    """To them a part is whole sequences, with an initial state."""
    case = Case("gdn", tuple(OFFSETS[division]), "pipelined", impl="triton")
    parts = pool.run(f"{JOBS}:run_part", case)
    assert_equal(case, parts, pool.size, expected(case))


@pytest.mark.multiprocess
def test_convolutions_and_attention_see_the_ranks_before(pool):
    found = zip(*pool.run(f"{LAYERS}:layer_parts", PIPELINED_LAYERS), strict=True)
    for layer, parts in zip(PIPELINED_LAYERS, found, strict=True):
        assert_layer_equal(layer, list(parts))


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", PIPELINED_MODELS)
def test_a_hybrid_model_over_ranks(pool, name):
    """With documents, dropout, and recomputation, for which nothing travels a second time."""
    loss, gradients = model_unsharded(name)
    parts = pool.run(f"{LAYERS}:model_part", name)
    assert np.mean([part[0] for part in parts]) == pytest.approx(loss, rel=1e-12)
    for parameter, gradient in gradients.items():
        found = sum(part[1][parameter] for part in parts) / pool.size
        assert relative_difference(found, gradient) <= 1e-11, parameter


@pytest.mark.multiprocess
def test_a_context_may_serve_one_pass_after_the_other_but_not_two_at_once_that_are_computed_again(pool):
    """What came with an earlier text is not taken for that of a later one."""
    found = [gradients for gradients, error in pool.run(f"{JOBS}:reused_context", 3, False) if not error]
    whole = np.arange(8.0 * pool.size).reshape(1, -1, 2)
    for number, gradients in enumerate(zip(*found, strict=True)):
        weight = torch.arange(1.0, 4.0).repeat(2, 1).requires_grad_()
        x = torch.from_numpy(whole + number).float()
        short_convolution(x, weight, torch.arange(x.shape[1])).square().sum().backward()
        assert weight.grad is not None
        assert relative_difference(sum(gradients), weight.grad.numpy()) <= 1e-5
    if pool.size == 3:
        ((one, no_error), *_) = pool.run(f"{JOBS}:reused_context", 1, True)
        assert not no_error
        assert relative_difference(one[0], found[0][0]) <= 1e-5
        errors = [error for _, error in pool.run(f"{JOBS}:reused_context", 2, True)]
        assert "expected a separate context for every microbatch" in errors[-1]
        assert "got 2 passes without backward that received the tokens of a convolution of layer 0" in errors[-1]


@pytest.mark.multiprocess
def test_states_may_travel_in_bfloat16(pool):
    case = Case("kda", (0, 48), "pipelined", wire="bfloat16")
    o, _, gradients = unsharded(case)
    parts = pool.run(f"{JOBS}:run_part", case)
    assert 1e-5 < relative_difference(np.concatenate([part[0] for part in parts], axis=1), o) < 2**-8
    for name in ("q", "k", "v", "g", "beta"):
        found = np.concatenate([part[2][name] for part in parts], axis=1)
        assert 1e-5 < relative_difference(found, gradients[name]) < 2**-6, name


def test_a_group_that_takes_the_name_of_another_begins_anew():
    """As in a process that joins again after a failure."""
    for _ in range(2):
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        try:
            group = dist.new_group([0])
            assert [wavefront_room.MicrobatchMessages(group).number for _ in range(3)] == [0, 1, 2]
            wavefront_room.finish(group)
            wavefront_room._shared(group).pending_sends._error = "it was not received"
            with pytest.raises(PipelineError, match="it was not received"):
                wavefront_room.finish(group)
        finally:
            dist.destroy_process_group()


@pytest.mark.multiprocess
def test_nobody_waits_for_a_rank_longer_than_asked(pool):
    if pool.size != 3:
        pytest.skip("three ranks are enough")
    ends = pool.run(f"{JOBS}:late_part", 2.0, 7.0, "pipelined")
    waited = [end for end in ends if end is not None]
    assert waited, "somebody waited"
    for message, seconds in waited:
        assert "expected the state of layer 5" in message
        assert "pipeline_timeout=2 s" in message
        assert seconds < 6.0


def test_what_needs_ranks_to_be_at_one_layer_is_refused():
    with pytest.raises(ValueError, match=r"cp_attention_layout: expected 'contiguous' with cp_exchange 'pipelined', "):
        check_exchange("pipelined", cp_attention_layout="zigzag")
    with pytest.raises(ValueError, match=r"cp_truncate_ranks: expected None unless cp_exchange is 'ring', got 1"):
        check_exchange("pipelined", cp_truncate_ranks=1)
    with pytest.raises(ValueError, match=r"pipeline_model_parallel_size: expected 1 with cp_exchange 'pipelined', "):
        replace(
            MODEL,
            num_layers=4,
            cp_exchange="pipelined",
            context_parallel_size=2,
            pipeline_model_parallel_size=2,
        )


def test_the_tables_of_measured_steps_are_the_benchmark_s():
    root = Path(__file__).parents[2]
    results = json.loads((root / "benchmarks/results/wavefront-cpu.json").read_text())
    page = (root / "docs/context_parallel.md").read_text()
    for row in results["order"]:
        predicted, measured = row["predicted"], row["measured"]
        cells = f"{predicted:.3f} | {measured:.3f} | {measured / predicted - 1:.1%} | {measured / row['work']:.2f}"
        assert f"| {row['microbatches']} | {cells} |\n" in page
    for row in results["steps"]:
        alone, size = row["alone"]["seconds"], row["ranks"]
        ratios = [row[way]["seconds"] / alone for way in CP_EXCHANGES]
        ratios.append(wavefront.planned(row["backend"], size))
        backend = {"torch": "PyTorch", "jax": "JAX"}[row["backend"]]
        ranks = f"{size}, on 2 cores" if size > 2 else f"{size}"
        assert f"| {backend} | {ranks} | {alone:.2f} | " + " | ".join(f"{r:.2f}" for r in ratios) + " |\n" in page


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(900)
def test_in_jax():
    run_cases("not slow", 880, "tests/context/wavefront_jax_cases.py")


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(1200)
def test_more_in_jax():
    run_cases("slow", 1180, "tests/context/wavefront_jax_cases.py")
