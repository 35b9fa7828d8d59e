"""Layers to stages: every accepted split holds each layer once, in order, and every other is refused by name."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.plans.config import TransformerConfig
from diptych.plans.mesh import unsharded
from diptych.plans.schedule.partition import (
    check_stage_ends,
    get_num_layers_to_build,
    get_stage,
    get_transformer_layer_offset,
    is_pipeline_first_stage,
    is_pipeline_last_stage,
    layers_by_stage,
    num_stages,
)
from tests.backends import draws_are_fixed


def pipeline(num_layers: int, p: int, v: int | None = None, **options) -> TransformerConfig:
    return TransformerConfig(
        32,
        num_layers,
        4,
        pipeline_model_parallel_size=p,
        virtual_pipeline_model_parallel_size=v,
        **options,
    )


def built(config: TransformerConfig) -> list[int]:
    """Global numbers of the layers every stage builds, stage after stage."""
    found = []
    for vp_stage in range(config.virtual_pipeline_model_parallel_size or 1):
        for rank in range(config.pipeline_model_parallel_size):
            first = get_transformer_layer_offset(config, vp_stage, rank)
            found += range(first, first + get_num_layers_to_build(config, vp_stage, rank))
    return found


def refused(num_layers: int, p: int, v: int, **options) -> str:
    """Why a split is refused; empty: it is not."""
    try:
        pipeline(num_layers, p, v, **options)
    except ValueError as error:
        return str(error)
    return ""


def test_every_accepted_split_holds_every_layer_once_in_order():
    drawn = Counter()

    @settings(max_examples=4 * settings.default.max_examples)
    @given(
        p=st.integers(1, 5),
        v=st.integers(1, 3),
        per_stage=st.integers(1, 3),
        first=st.sampled_from([None, None, None, 1, 2, 3, 4]),
        last=st.sampled_from([None, None, None, 1, 2, 3, 4]),
        embedding=st.booleans(),
        loss=st.booleans(),
        surplus=st.sampled_from([0, -1, 1, 2]),
        fits=st.sampled_from([True, True, True, False]),
    )
    def check(p, v, per_stage, first, last, embedding, loss, surplus, fits):
        if fits:
            first, last = (None if count is None or p == 1 else count * v for count in (first, last))
            embedding, loss = embedding and p > 1 and first is None, loss and p > 1 and last is None
            v, surplus = v if p > 1 else 1, 0
        options = {
            "num_layers_in_first_pipeline_stage": first,
            "num_layers_in_last_pipeline_stage": last,
            "account_for_embedding_in_pipeline_split": embedding,
            "account_for_loss_in_pipeline_split": loss,
        }
        equal_ranks = [rank for rank in range(p) if (first is None or rank > 0) and (last is None or rank < p - 1)]
        layers = max(1, per_stage * v * len(equal_ranks) + (first or 0) + (last or 0) - embedding - loss + surplus)
        if reason := refused(layers, p, v, **options):
            assert any(reason.startswith(name) for name in ("num_layers", "virtual", *options)), reason
            drawn["refused"] += 1
            return
        config = pipeline(layers, p, v, **options)
        counts = layers_by_stage(config)
        assert built(config) == list(range(layers))
        assert len(counts) == num_stages(config) == p * v
        for rank, asked in ((0, first), (p - 1, last)):
            if asked is not None:
                assert sum(counts[rank::p]) == asked
        counts = [n + (stage == 0) * embedding + (stage == p * v - 1) * loss for stage, n in enumerate(counts)]
        others = {counts[stage] for stage in range(p * v) if stage % p in equal_ranks}
        assert len(others) <= 1, "each of the others has as many layers"
        for case, holds in (("first", first), ("last", last), ("embedding", embedding), ("loss", loss), ("v", v > 1)):
            drawn[case] += bool(holds)

    check()
    if draws_are_fixed():
        assert all(drawn[case] >= 3 for case in ("refused", "first", "last", "embedding", "loss", "v")), drawn


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.sampled_from(["", " ", ","]))
def test_a_layout_says_how_many_layers_a_stage_has(counts, blank):
    if sum(counts) == 0:
        counts = [*counts, 1]
    stages = [f"t*{count}" if count > 1 else "t" * count for count in counts]
    layout = f"{blank}|{blank}".join(stages)
    config = pipeline(sum(counts), len(counts), pipeline_model_parallel_layout=f"E{blank}{layout}{blank}L")
    assert layers_by_stage(config) == tuple(counts)
    assert built(config) == list(range(sum(counts)))


@pytest.mark.parametrize(
    ("layout", "counts"),
    [
        ("E t*3 | (tt|)*2 t L", (3, 2, 2, 1)),
        ("E|(t|)*2 t*6 L", (0, 1, 1, 6)),
        ("Et*2|((t)*2|)*2(t*2)L", (2, 2, 2, 2)),
        ("E t*8 | | | L", (8, 0, 0, 0)),
    ],
)
def test_layouts_written_short(layout, counts):
    assert layers_by_stage(pipeline(8, 4, pipeline_model_parallel_layout=layout)) == counts
    assert layers_by_stage(pipeline(8, 2, 2, pipeline_model_parallel_layout=layout)) == counts


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("Ettt|ttttL", r"expected 4 stages, got 2"),
        ("Et|tt|tt|ttL", r"expected num_layers=8 layers, got 7"),
        ("tt|tt|tt|ttL", r"expected E before all layers and L after them, once each, got 'tt\|tt\|tt\|ttL'"),
        ("Ett|tt|tt|ttLt", r"expected E before all layers"),
        ("EEtt|tt|tt|ttL", r"expected E before all layers"),
        ("|Ett*3|tt|ttL", r"expected E in the first stage, got ''"),
        ("Ett|tt|t*4L|", r"expected L in the last stage, got ''"),
        ("Ett|tt|tt|tt|m|L", r"got 'm' .* multi-token-prediction layers are not implemented"),
        ("Ett|tt|tt|ttX", r"expected E, t, L, \|, \(...\) and \*n, got 'X'"),
        ("Ett|(tt|)*2ttL)", r"got '\)'"),
        ("Et*|tt|tt|ttL", r"got '\*'"),
        ("", r"expected 4 stages, got 1"),
        ("(t*99999)*9999", r"expected at most 10,000 letters without repetitions"),
        ("((((t|)*99)*99)*99)*99", r"expected at most 10,000 letters without repetitions"),
    ],
)
def test_wrong_layouts(layout, message):
    with pytest.raises(ValueError, match=rf"pipeline_model_parallel_layout: .*{message}"):
        pipeline(8, 4, pipeline_model_parallel_layout=layout)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((2, 4), {}, r"num_layers: .* over 4 pipeline ranks with 1 stages each, got 2;"),
        ((8, 2, 3), {}, r"num_layers: .* over 2 pipeline ranks with 3 stages each, got 8;"),
        (
            (8, 2, 2),
            {"num_layers_in_first_pipeline_stage": 3},
            r"num_layers_in_first_pipeline_stage: expected a multiple of the 2 virtual stages of a rank, got 3",
        ),
        (
            (8, 2),
            {"num_layers_in_first_pipeline_stage": 3, "num_layers_in_last_pipeline_stage": 4},
            r"num_layers: .* over 0 pipeline ranks .* got 1 of 8 left",
        ),
        ((8, 4), {"account_for_loss_in_pipeline_split": True}, r"with embedding or loss counted.* got 9;"),
        ((8, 2), {"pipeline_schedule": "interleaved"}, r"pipeline_schedule: .* without virtual stages, got 'interl"),
        ((8, 2, 2), {"pipeline_schedule": "1f1b"}, r"pipeline_schedule: .* with virtual stages, got '1f1b'"),
        ((8, 1), {"pipeline_schedule": "gpipe"}, r"pipeline_schedule: expected None or 'none' without a pipeline"),
        ((8, 2), {"microbatch_group_size_per_vp_stage": 2}, r"expected None with schedule '1f1b', got 2"),
    ],
)
def test_what_does_not_add_up_is_refused(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        pipeline(*arguments, **options)


def test_ends_of_the_model_lie_on_its_first_and_last_stage():
    config = pipeline(8, 2, 2)
    places = [(vp_stage, rank) for vp_stage in range(2) for rank in range(2)]
    assert [get_stage(config, *place) for place in places] == [0, 1, 2, 3]
    assert [is_pipeline_first_stage(config, *place) for place in places] == [True, False, False, False]
    assert [is_pipeline_last_stage(config, *place) for place in places] == [False, False, False, True]
    check_stage_ends(config, False, True, 1, 1)
    with pytest.raises(ValueError, match=r"post_process: expected False on stage 2 of 4 \(only stage 3 has that end\)"):
        check_stage_ends(config, False, True, 1, 0)


def test_the_single_device_model_is_the_same_but_for_its_stages():
    config = pipeline(7, 4, pipeline_model_parallel_layout="Et|tt|tt|ttL", hidden_dropout=0.1)
    whole = unsharded(config)
    assert layers_by_stage(whole) == (7,)
    assert whole == TransformerConfig(32, 7, 4, hidden_dropout=0.1)
