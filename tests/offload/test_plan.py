"""Plans of offload: what must hold for any order of uses, closed forms of the usual ones, time, and the command."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.planner.offload_times import min_tokens_for_overlap, simulate_offload, use_seconds
from diptych.planner.reports.offload_picture import draw_offload
from diptych.plans.config import TransformerConfig
from diptych.plans.offload import (
    Use,
    action_uses,
    describe_statistics,
    expected_uses,
    layer_storages,
    pass_uses,
    plan_actions,
    plan_activations,
    plan_offload,
    rank_uses,
    step_uses,
)
from diptych.plans.recompute import RecomputeBlock
from diptych.plans.schedule.named import schedule_for
from parity.cli.main import main


@st.composite
def any_uses(draw) -> tuple[list[Use], dict[int, dict[str, int]], int]:
    """Uses in any order, layers of any sizes of which some share memory, and a number of layers ahead."""
    count = draw(st.integers(1, 6))
    use = st.builds(Use, st.sampled_from("FRBS"), st.integers(0, count - 1))
    storages = {layer: {f"own {layer}": draw(st.integers(0, 9))} for layer in range(count)}
    for layer in draw(st.sets(st.integers(0, count - 1))):
        storages[layer]["shared"] = 5
    return draw(st.lists(use, min_size=1, max_size=30)), storages, draw(st.integers(0, 7))


def walk(plan, storages, resident=()):
    """Layers on the device before and after every step, by following the moves alone."""
    here = set(resident)
    for step in plan.moves:
        assert not here & set(step.fetches), "fetched twice"
        here |= set(step.fetches)
        before = set(here)
        assert set(step.evictions) <= here, "evicted twice"
        here -= set(step.evictions)
        yield step, before, set(here)


@given(any_uses())
def test_any_order_of_uses(case):
    """Each layer is there when it is used, never more than the window's, and bytes are those of the moves."""
    uses, storages, ahead = case
    plan = plan_offload(uses, storages, ahead)
    assert [step.use for step in plan.moves] == uses
    peak = bytes_in = bytes_out = 0
    held: dict[str, int] = {}
    changed: set[str] = set()
    for number, (step, before, after) in enumerate(walk(plan, storages)):
        assert step.use.layer in before
        assert (step.use.layer in step.fetches) == (number in plan.misses)
        assert len(before) <= ahead + 1
        now = {name: size for layer in before for name, size in storages[layer].items()}
        bytes_in += sum(size for name, size in now.items() if name not in held)
        peak = max(peak, sum(now.values()))
        if step.use.kind == "S":
            changed |= storages[step.use.layer].keys()
        held = {name: size for layer in after for name, size in storages[layer].items()}
        gone = (now.keys() - held.keys()) & changed
        bytes_out += sum(now[name] for name in gone)
        changed -= gone
    assert (plan.peak_bytes, plan.bytes_in, plan.bytes_out) == (peak, bytes_in, bytes_out)


@given(any_uses())
def test_looking_further_ahead_is_late_no_more_often(case):
    """From one layer ahead on, only the very first use can be late."""
    uses, storages, ahead = case
    assert set(plan_offload(uses, storages, ahead + 1).misses) <= {0}


@given(st.integers(1, 9), st.integers(0, 12))
def test_a_plain_step_moves_what_the_formula_says(count, ahead):
    """The turns, to backward and to the update, move nothing; so each pass brings all layers but the window's."""
    size = 7
    storages = {layer: {str(layer): size} for layer in range(count)}
    plan = plan_offload(step_uses(range(count)), storages, ahead)
    window = min(ahead + 1, count)
    assert plan.peak_bytes == size * window
    again = 0 if window == count else window - 1  # come back for the next step before this one ends
    assert plan.bytes_in == size * (count + 2 * (count - window) + again)
    assert plan.bytes_out == (0 if window == count else size * count)


def test_replays_come_before_the_backward_of_their_block():
    blocks = [RecomputeBlock("full", (0, 1, 2)), RecomputeBlock("none", (3,)), RecomputeBlock("full", (4,))]
    text = " ".join(map(str, pass_uses(range(5), True, blocks)))
    assert text == "F0 F1 F2 F3 F4 B4 B3 R0 R1 B2 B1 B0"
    modules = frozenset({"layernorm"})  # each layer's own backward recomputes these
    selective = [RecomputeBlock("selective", (0, 1, 2), modules)]
    assert " ".join(map(str, pass_uses(range(3), True, selective))) == "F0 F1 F2 B2 B1 B0"


def test_a_rank_uses_its_stages_in_the_schedules_order():
    config = TransformerConfig(
        hidden_size=8,
        num_layers=8,
        num_attention_heads=2,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
    )
    text = " ".join(map(str, rank_uses(config, 2, 0)))
    assert text == "F0 F1 F0 F1 F4 F5 F4 F5 B5 B4 B5 B4 B1 B0 B1 B0"
    assert [use.microbatch for use in rank_uses(config, 2, 0)][:8] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert " ".join(map(str, rank_uses(config, 2, 1, forward_only=True))) == "F2 F3 F2 F3 F6 F7 F6 F7"


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1"])
@pytest.mark.parametrize("ahead", [0, 1, 9])
def test_plans_of_actions_end_with_them(schedule, ahead):
    """The same uses as the whole plan's; between two actions nothing is on the device."""
    config = TransformerConfig(
        hidden_size=8,
        num_layers=8,
        num_attention_heads=2,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2 if schedule == "interleaved" else None,
        pipeline_schedule=schedule,
        tensor_offload_num_prefetch_layers=ahead,
    )
    storages = layer_storages(config)
    for rank in range(2):
        plan = plan_actions(config, 4, rank)
        assert [step.use for step in plan.moves] == rank_uses(config, 4, rank)
        around = list(walk(plan, storages))
        at, late = 0, set(plan.misses)
        for action in schedule_for(config, 4).actions[rank]:
            uses = action_uses(config, action, rank)
            if uses:
                assert at in late
                assert around[at][1] == set(around[at][0].fetches), "nothing is there before"
                at += len(uses)
                assert around[at - 1][2] == set()
        assert at == len(plan.moves)
        assert (len(late) == at) == (ahead == 0)
        one = sum(storages[0].values())
        fetched = sum(len(step.fetches) for step in plan.moves)
        assert (plan.bytes_in, plan.bytes_out) == (fetched * one, 0)
        stage = 4 if schedule != "interleaved" else 2
        assert plan.peak_bytes == min(ahead + 1, stage) * one


@pytest.mark.parametrize(
    ("last", "training", "expected"),
    [
        (Use("F", 1), True, "F2 B2 B1 B0 S0 S1 S2 F0"),
        (Use("F", 1), False, "F2 F0 F1 F2 F0"),
        (Use("B", 1), True, "B0 S0 S1 S2 F0"),
        (Use("S", 1), True, "S2 F0 F1"),
        (Use("S", 2), False, "F0 F1 F2"),
    ],
)
def test_what_is_expected_where_nobody_says(last, training, expected):
    words = expected.split()
    uses = expected_uses(range(3), last, training)
    assert [str(next(uses)) for _ in words] == words


@given(st.integers(1, 6), st.integers(0, 7), st.integers(1, 3))
def test_activations_of_any_plain_step(count, ahead, microbatches):
    """Each forward that leaves comes back once, before its backward or with it; the last of a pass stay."""
    uses = step_uses(range(count), microbatches)
    away, moved = set(), 0
    for step in plan_activations(uses, ahead):
        for forward in step.fetches:
            away.remove(forward)
        if step.use.kind == "B":
            assert step.use._replace(kind="F") not in away
        if step.evicts:
            away.add(step.use)
            moved += 1
    assert not away
    assert moved == microbatches * max(0, count - ahead - 1)


def test_a_plan_in_time():
    """One layer ahead hides what is no longer than a use; nothing ahead adds both; the update is the link's alone."""
    storages = {layer: {str(layer): 10} for layer in range(4)}
    uses = [Use("F", layer) for layer in range(4)] * 10
    for ahead, expected in ((0, 40 * 1.0 + 40 * 0.5), (1, 0.5 + 40 * 1.0)):
        times = simulate_offload(plan_offload(uses, storages, ahead), lambda use: 1.0, storages, bandwidth=20.0)
        assert times.makespan == pytest.approx(expected)
        assert times.compute == 40.0
        assert times.transfer == 20.0 + 0.5 * ahead  # the next pass's first layer
        assert sum(times.waited) == pytest.approx(expected - 40.0)
    slow = simulate_offload(plan_offload(uses, storages, 1), lambda use: 1.0, storages, bandwidth=5.0, latency=1.0)
    assert slow.makespan == pytest.approx(40 * 3.0 + 1.0, rel=0.05)
    update = plan_offload([Use("S", layer) for layer in range(4)], storages, 1)
    assert simulate_offload(update, lambda use: 0.0, storages, 10.0).makespan == pytest.approx(8.0, abs=2.0)


def test_tokens_that_hide_a_layer_are_where_copy_and_forward_are_equal():
    pattern = "attention,attention+gelu"
    config = TransformerConfig(hidden_size=64, num_layers=2, num_attention_heads=2, layer_pattern=pattern)
    storages = layer_storages(config)
    assert sum(storages[0].values()) == 4 * (2 * 64 + 4 * 64 * 64 + 3 * 64 * 176)
    tokens = min_tokens_for_overlap(config, bandwidth=3e9, rate=1e12)
    for layer, sizes in storages.items():
        assert use_seconds(config, int(tokens), 1e12)(Use("F", layer)) == pytest.approx(
            sum(sizes.values()) / 3e9, rel=0.01
        )


def test_the_picture_has_every_use_and_every_dot(tmp_path):
    plan = plan_offload(step_uses(range(3)), {layer: {str(layer): 1} for layer in range(3)}, 1)
    trace = " ".join(map(str, plan.moves)).split()
    figure = draw_offload(plan, trace, "three layers", tmp_path / "plan.svg")
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_xticklabels()] == [str(step.use) for step in plan.moves]
    dots = [line for line in axes.lines if line.get_marker() == "o"]
    assert len(dots) == len(plan.moves)
    assert len([line for line in axes.lines if line.get_marker() == ">"]) == sum("+" in event for event in trace)
    assert len([line for line in axes.lines if line.get_marker() == "4"]) == sum("-" in event for event in trace)
    assert "three layers" in (tmp_path / "plan.svg").read_text()
    with pytest.raises(ValueError, match=r"trace: expected events as \+3, F3, -3, got 'x1'"):
        draw_offload(plan, ["+0", "x1"])


def test_refused():
    with pytest.raises(ValueError, match=r"uses: expected layers of \[0\], got \[3\]"):
        plan_offload([Use("F", 3)], {0: {}})
    for wrong in (-1, 1.5, True, "2"):
        with pytest.raises(ValueError, match=rf"num_prefetch_layers: expected an integer >= 0, got {wrong!r}"):
            plan_offload([], {}, wrong)


def test_statistics_in_words():
    stats = {"copies_in": 1200, "copies_out": 3, "bytes_in": 2**21, "bytes_out": 2**20, "hits": 5, "misses": 2}
    text = describe_statistics(stats | {"peak_layers": 2, "peak_bytes": 2**20})
    assert text.splitlines() == [
        "offload        to device       to host",
        "copies             1,200             3",
        "MiB                  2.0           1.0",
        "2 of 7 uses of a layer began before its copy was requested",
        "at most 2 layers, 1.0 MiB of them on the device",
    ]
    assert describe_statistics(stats | {"peak_layers": 2, "peak_bytes": 0, "seconds_waited": 0.5}).endswith(
        "; waited 0.500 s for copies"
    )


PLAN = "plan --hidden-size 256 --num-layers 4 --seq-length 1000 --enable-tensor-offload"


def test_the_command_prints_plan_and_criterion(capsys):
    assert main([*PLAN.split(), "--micro-batch-size", "2", "--link-bandwidth", "10", "--compute-rate", "5"]) == 0
    text = capsys.readouterr().out
    config = TransformerConfig(
        hidden_size=256, num_layers=4, num_attention_heads=4, seq_length=1000, enable_hyper_connections=True
    )
    assert "fully with its forward from 1,000 tokens per microbatch" in " ".join(text.split())
    plan = plan_offload(step_uses(range(4)), layer_storages(config), 1)
    (row,) = (line for line in text.splitlines() if line.split()[:2] == ["1", "*"])
    assert f"{plan.bytes_in / 2**20:,.1f}" in row.split()
    assert f"{len(plan.misses)} of 12" in row
    assert "in JAX" not in text
    assert main([*PLAN.split(), "--pipeline-model-parallel-size", "2"]) == 0
    assert "in JAX, s" in capsys.readouterr().out
    assert main([*PLAN.split(), "--link-bandwidth", "0"]) == 2
    assert "--link-bandwidth: expected a number from 1e-06 to 1e+09, got 0" in capsys.readouterr().err
