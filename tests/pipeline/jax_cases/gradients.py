"""Loss and gradients of the single-device model, whatever the schedule, the split and the transform."""

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh

from diptych.planner.generate import generate_schedule
from diptych.plans.config import TransformerConfig
from diptych.plans.mesh import unsharded
from diptych.plans.schedule.actions import Schedule
from diptych.plans.schedule.csv import read_schedule, schedule_to_csv
from diptych.plans.schedule.named import build_schedule
from diptych.plans.schedule.simulate import Costs
from parity.compare import relative_difference
from parity.tolerances import PARAMETERS
from tests.pipeline.draws import any_cut
from tests.pipeline.jax_cases.support import (
    DROPPED,
    FOUR,
    HYPER,
    PLAIN,
    SEVEN,
    TWICE_TWO,
    check,
    devices,
    reference,
    run_step,
)
from tests.pipeline.test_schedule_file import written_by_torch
from tests.test_documents import CONFIG, TRAIN, assert_alike, trained

CASES = {
    "zero bubble": lambda: check(replace(DROPPED, **FOUR, pipeline_schedule="zb-h1"), 5, transform="shard_map"),
    "hyper-connections, recompute, data parallel": lambda: check(
        replace(HYPER, pipeline_model_parallel_size=2),
        3,
        mesh=Mesh(devices(2, 2), ("dp", "pp")),
        transform="shard_map",
    ),
    "a table made for its costs, some backwards split": lambda: check(
        replace(DROPPED, **TWICE_TWO, pipeline_schedule_file=read_schedule(made_for_uneven_stages())), 4
    ),
    "V-shaped, some backwards split": lambda: check(replace(DROPPED, **TWICE_TWO, pipeline_schedule="dualpipe-v"), 5),
}


def own_schedule(schedule: Schedule | str | None = None) -> str:
    """A file with a schedule; None: of two ranks and four microbatches, in which only some backwards are split."""
    path = Path(tempfile.mkdtemp(prefix="schedule")) / "own.csv"
    schedule = schedule or build_schedule("dualpipe-v", 2, 4, 2)
    path.write_text(schedule if isinstance(schedule, str) else schedule_to_csv(schedule))
    return str(path)


def made_for_uneven_stages() -> str:
    """A file with a schedule made for stages unlike each other, slow messages and little memory."""
    costs = Costs([1.0, 2.0, 1.0, 2.6], [1.2, 2.0, 1.5, 2.0], [0.7, 1.9, 0.8, 2.0], 0.4, 1.0, 0.5)
    return own_schedule(generate_schedule(2, 4, 2, costs, 4.0, effort=0.1).schedule)


HYBRID = replace(DROPPED, layer_pattern="kda,gdn,attention", linear_num_value_heads=4)

SEVEN_OF_EIGHT = replace(
    SEVEN,
    pipeline_model_parallel_size=4,
    virtual_pipeline_model_parallel_size=2,
    pipeline_model_parallel_layout="Et|t|t|t|t|t|t|L",
)
ANY_ORDER = "0F2,0F0,0B2,0F1,0B0,0B1\n1F2,1I2,1F0,1B0,1W2,1F1,1B1"

SLOW = {
    "interleaved, fused": lambda: check(
        replace(DROPPED, **TWICE_TWO, microbatch_group_size_per_vp_stage=3), 5, transform="shard_map", slots="fused"
    ),
    "gpipe, inputs kept": lambda: check(replace(DROPPED, **FOUR, pipeline_schedule="gpipe"), 5, saves="inputs"),
    "delta rule, zero bubble, inputs kept": lambda: check(
        replace(HYBRID, **FOUR, pipeline_schedule="zb-h1"), 5, saves="inputs"
    ),
    "delta rule, zero bubble": lambda: check(
        replace(HYBRID, **FOUR, pipeline_schedule="zb-h1"), 5, transform="shard_map"
    ),
    "one rank": lambda: check(DROPPED, 3),
    "fewer microbatches than ranks": lambda: check(replace(DROPPED, **FOUR), 2, slots="fused"),
    "interleaved-zb1p": lambda: check(replace(DROPPED, **TWICE_TWO, pipeline_schedule="interleaved-zb1p"), 6),
    "interleaved": lambda: check(replace(DROPPED, **TWICE_TWO), 6, saves="inputs"),
    "hyper-connections, zero bubble, inputs kept": lambda: check(
        replace(HYPER, pipeline_model_parallel_size=2, pipeline_schedule="zb-h1"), 3, saves="inputs"
    ),
    "hyper-connections, empty ends": lambda: check(
        replace(HYPER, pipeline_model_parallel_size=4, pipeline_model_parallel_layout="E|t|t|L"), 3
    ),
    "full recompute by blocks": lambda: check(
        replace(
            SEVEN,
            hidden_dropout=0.2,
            pipeline_model_parallel_size=2,
            pipeline_model_parallel_layout="Ettt|ttttL",
            recompute_granularity="full",
            recompute_method="uniform",
            recompute_num_layers=2,
        ),
        3,
    ),
    "zb-h2, inputs kept": lambda: check(replace(DROPPED, **FOUR, pipeline_schedule="zb-h2"), 8, saves="inputs"),
    "zb-v, hyper-connections": lambda: check(
        replace(
            HYPER,
            pipeline_model_parallel_size=2,
            virtual_pipeline_model_parallel_size=2,
            pipeline_model_parallel_layout="Et||t|L",
            pipeline_schedule="zb-v",
        ),
        4,
    ),
    **{
        f"{name}, four ranks": lambda name=name, m=m: check(replace(SEVEN_OF_EIGHT, pipeline_schedule=name), m)
        for name, m in (("v-half", 6), ("dualpipe-v", 8))
    },
    "microbatches in any order": lambda: check(
        replace(
            DROPPED,
            pipeline_model_parallel_size=2,
            pipeline_model_parallel_layout="Ett|tL",
            pipeline_schedule_file=read_schedule(own_schedule(ANY_ORDER)),
        ),
        3,
    ),
    "PyTorch's interleaved zero bubble": lambda: check(
        replace(
            DROPPED,
            **TWICE_TWO,
            pipeline_schedule_file=read_schedule(
                own_schedule(written_by_torch("ScheduleInterleavedZeroBubble", 2, 4, 2))
            ),
        ),
        4,
    ),
    "v-min, data parallel, inputs kept": lambda: check(
        replace(DROPPED, **TWICE_TWO, pipeline_schedule="v-min"),
        4,
        b=4,
        mesh=Mesh(devices(2, 4), ("pp", "dp")),
        transform="shard_map",
        saves="inputs",
    ),
    "dualpipe-v, inputs kept": lambda: check(
        replace(DROPPED, **TWICE_TWO, pipeline_schedule="dualpipe-v"), 5, saves="inputs"
    ),
    "data parallel, interleaved": lambda: check(
        replace(DROPPED, **TWICE_TWO), 4, b=4, mesh=Mesh(devices(2, 4), ("pp", "dp")), transform="shard_map"
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_the_single_device_model(case):
    CASES[case]()


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_equals_the_single_device_model_in_more_ways(case):
    SLOW[case]()


@pytest.mark.slow
def test_documents_of_the_corpus_reach_every_stage():
    """Of two replicas."""
    config = replace(CONFIG, pipeline_model_parallel_size=3)
    train = replace(TRAIN, micro_batch_size=2)
    mesh = Mesh(devices(2, 3), ("dp", "pp"))
    assert_alike(trained("jax", config, train, mesh=mesh), trained("jax"), PARAMETERS["float64"])


SMALL_HYPER = {
    "enable_hyper_connections": True,
    "num_residual_streams": 2,
    "sinkhorn_iterations": 3,
    "mhc_init_gating_factor": 0.5,
}


@st.composite
def any_case(draw) -> tuple[TransformerConfig, int, str]:
    """A configuration, a number of microbatches, and what a slot is."""
    cut = draw(any_cut())
    config = replace(PLAIN, hidden_dropout=0.1, **cut.settings, **(SMALL_HYPER if draw(st.booleans()) else {}))
    alternates = config.pipeline_schedule in ("1f1b", "interleaved")
    slots = draw(st.sampled_from(["canonical", "fused"])) if alternates else "canonical"
    return config, cut.num_microbatches, slots


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("saves", ["inputs", "residuals"])
@pytest.mark.parametrize("transform", ["pmap", "shard_map"])
def test_any_schedule_over_any_split_computes_what_one_device_does(transform, saves):
    """The schedules themselves are all in SLOW."""

    @settings(max_examples=3, phases=(Phase.explicit, Phase.generate))
    @given(any_case())
    def compute(case):
        config, m, slots = case
        check(config, m, slots=slots, transform=transform, saves=saves)

    compute()


@pytest.mark.slow
@pytest.mark.parametrize("saves", ["inputs", "residuals"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_mixed_precision(schedule, saves):
    """As far from float32 as the single-device model in bfloat16 is, over all gradients together."""
    wide = replace(PLAIN, params_dtype="float32", num_layers=4)
    config = replace(wide, bf16=True, pipeline_model_parallel_size=2, pipeline_schedule=schedule)
    losses, exact = reference(wide, 4)
    theirs = reference(unsharded(config), 4)[1]
    loss, ours, _ = run_step(config, 4, saves=saves)
    assert all(gradient.dtype == np.float32 for gradient in ours)
    far, unsharded_far = (
        relative_difference(*(np.concatenate([g.ravel() for g in side]) for side in (gradients, exact)))
        for gradients in (ours, theirs)
    )
    assert far <= 1.5 * unsharded_far
    assert loss == pytest.approx(losses.mean(), rel=1e-2)
