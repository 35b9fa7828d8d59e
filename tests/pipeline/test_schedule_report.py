"""Pictures of schedules and the report about one: they show what the simulation says, and it is what PyTorch does."""

import io
import re
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from rich.console import Console

from diptych.planner.memory.stages import predict_stage_memory
from diptych.planner.reports.schedule import (
    plan_pipeline,
    print_schedule,
    shortened,
    warmup,
)
from diptych.planner.timeline import COLORS, IDLE, Bar, Timeline, draw_timelines, shade, timeline_of
from diptych.plans.config import TransformerConfig
from diptych.plans.schedule.actions import Action
from diptych.plans.schedule.csv import schedule_rows
from diptych.plans.schedule.named import build_schedule
from diptych.plans.schedule.partition import layers_by_stage, num_stages
from diptych.plans.schedule.simulate import Costs, simulate
from reference_torch.pipeline import DeferredWeightGradients, custom_backward
from reference_torch.recompute import measure_memory
from reference_torch.transformer import GPTModel

SCHEDULES = {
    "none": ("none", 1, 3),
    "gpipe": ("gpipe", 3, 4),
    "1f1b": ("1f1b", 3, 12),
    "interleaved": ("interleaved", 3, 6, 2),
    "zb-h1": ("zb-h1", 3, 5),
}
COSTS = Costs(forward=1.0, input_gradient=1.5, weight_gradient=0.5, communication=0.25)
CONFIG = TransformerConfig(
    hidden_size=64,
    num_layers=8,
    num_attention_heads=4,
    seq_length=32,
    enable_hyper_connections=True,
    pipeline_model_parallel_size=4,
)


def drawn_cells(axes) -> dict[tuple[str, int], set[tuple[float, float, int]]]:
    """(start, end, row) of every rectangle, by kind and virtual stage."""
    found: dict[tuple[str, int], set[tuple[float, float, int]]] = {}
    for collection in axes.collections:
        kind, _, vp_stage = (collection.get_gid() or "").partition("/")
        if kind not in COLORS:
            continue
        for path in collection.get_paths():
            (x0, y0), (x1, y1) = path.vertices.min(0), path.vertices.max(0)
            cell = (round(x0, 9), round(x1, 9), round((y0 + y1) / 2))
            cells = found.setdefault((kind, int(vp_stage)), set())
            assert cell not in cells, "drawn twice"
            cells.add(cell)
    return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_cells_are_the_simulations_actions(name):
    schedule = build_schedule(*SCHEDULES[name])
    axes = draw_timelines([timeline_of(schedule, COSTS)]).axes[0]
    expected: dict[tuple[str, int], set[tuple[float, float, int]]] = {}
    for action, start in simulate(schedule, COSTS).starts.items():
        duration = {"F": 1.0, "B": 2.0, "I": 1.5, "W": 0.5}[action.kind]
        cell = (round(start, 9), round(start + duration, 9), action.stage % schedule.pp_size)
        expected.setdefault((action.kind, action.stage // schedule.pp_size), set()).add(cell)
    assert drawn_cells(axes) == expected
    assert axes.get_ylim() == (schedule.pp_size - 0.5, -0.5)  # rank 0 above


@pytest.mark.parametrize("name", SCHEDULES)
def test_numbers_are_the_microbatches(name):
    schedule = build_schedule(*SCHEDULES[name])
    axes = draw_timelines([timeline_of(schedule)]).axes[0]
    starts = simulate(schedule).starts
    numbers = {text.get_gid(): text for text in axes.texts}
    assert len(axes.texts) == len(starts)
    for action, start in starts.items():
        text = numbers[str(action)]
        assert text.get_text() == str(action.microbatch)
        middle = start + (1.0 if action.kind == "B" else 0.5)
        assert text.get_position() == pytest.approx((middle, action.stage % schedule.pp_size))


def test_no_number_is_wider_than_its_cell():
    """Long cells have numbers, short ones none; what is written fits."""
    figure = draw_timelines([timeline_of(build_schedule("1f1b", 2, 24), Costs(0.2, 1.0, 1.0))])
    axes, canvas = figure.axes[0], FigureCanvasAgg(figure)
    assert [text.get_gid()[1] for text in axes.texts] == ["B"] * 48
    unit = np.ptp(axes.transData.transform([(0, 0), (1, 0)])[:, 0])
    for text in axes.texts:
        assert text.get_window_extent(canvas.get_renderer()).width < 2.0 * unit


def test_timelines_share_one_axis():
    timelines = [timeline_of(build_schedule(*SCHEDULES[name])) for name in ("gpipe", "zb-h1")]
    figure = draw_timelines(timelines)
    limits = {axes.get_xlim() for axes in figure.axes}
    assert limits == {(0.0, max(timeline.end for timeline in timelines))}
    assert [axes.get_title(loc="left") for axes in figure.axes] == [t.title for t in timelines]
    assert timelines[0].title == "gpipe: makespan 18, bubble 33.3%"


def test_measured_times_can_be_drawn():
    schedule = build_schedule("none", 1, 1)
    bars = {Action("F", 0, 0): Bar(0.5, 1.25), Action("B", 0, 0): Bar(2.0, 0.5)}
    axes = draw_timelines([Timeline(schedule, bars, "measured")]).axes[0]
    assert drawn_cells(axes) == {("F", 0): {(0.5, 1.75, 0)}, ("B", 0): {(2.0, 2.5, 0)}}


def lightness(color) -> float:
    """CIE L*, 0 to 100: what is left of a colour in greyscale."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in color]
    return 116 * float(np.dot((0.2126, 0.7152, 0.0722), linear)) ** (1 / 3) - 16


@pytest.mark.parametrize("stages_per_rank", [1, 2, 4])
def test_kinds_stay_apart_in_greyscale(stages_per_rank):
    idle = lightness([int(IDLE[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    ranges = sorted(
        (min(shades), max(shades))
        for kind in COLORS
        for shades in [[lightness(shade(kind, k, stages_per_rank)) for k in range(stages_per_rank)]]
    )
    assert len(ranges) == 4
    gaps = [after[0] - before[1] for before, after in zip(ranges, [*ranges[1:], (idle, idle)], strict=True)]
    assert min(gaps) > (10 if stages_per_rank == 1 else 5)
    for kind in COLORS:
        steps = np.diff([lightness(shade(kind, k, stages_per_rank)) for k in range(stages_per_rank)])
        assert all(steps > 2)
        assert lightness(shade(kind, 0, 2)) < lightness(shade(kind, 0, 1)) < lightness(shade(kind, 1, 2))


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_files_are_equal_to_the_byte(tmp_path, suffix):
    schedule = build_schedule(*SCHEDULES["interleaved"])
    paths = [tmp_path / f"{name}.{suffix}" for name in ("one", "two")]
    for path in paths:
        draw_timelines([timeline_of(schedule, COSTS)], path)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert b"date" not in paths[0].read_bytes().lower()


def test_what_cannot_be_drawn(tmp_path):
    with pytest.raises(ValueError, match=r"path: expected a name that ends in \.png or \.svg, got '.*a\.gif'"):
        draw_timelines([timeline_of(build_schedule("none", 1, 1))], tmp_path / "a.gif")
    with pytest.raises(ValueError, match="timelines: expected at least one, got none"):
        draw_timelines([])


# The report.


def printed(*arguments, width: int = 100, **options) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_schedule(console, *arguments, **options)
    return console.file.getvalue()


def rows_after(text: str, heading: str, count: int) -> list[list[str]]:
    lines = text.splitlines()
    place = next(i for i, line in enumerate(lines) if line.startswith(heading))
    return [line.split() for line in lines[place + 2 : place + 2 + count]]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "interleaved"])
def test_printed_numbers_are_the_simulations(schedule):
    virtual = 2 if schedule == "interleaved" else None
    config = replace(CONFIG, pipeline_schedule=schedule, virtual_pipeline_model_parallel_size=virtual)
    text = printed(config, 2, 8)
    layers = [*map(float, layers_by_stage(config))]
    memory = [predict_stage_memory(config, stage, 2) for stage in range(num_stages(config))]
    weights = [float(m.weight_gradients) if schedule == "zb-h1" else 0.0 for m in memory]
    costs = Costs(layers, layers, layers, 0.0, [float(m.saved) for m in memory], weights)
    table = build_schedule(schedule, 4, 8, virtual or 1)
    simulation = simulate(table, costs)
    assert f"ranks; makespan {simulation.makespan:g}" in text
    warmups = {"gpipe": [8] * 4, "interleaved": [10, 8, 6, 4]}.get(schedule, [3, 2, 1, 0])
    for rank, row in enumerate(rows_after(text, "ranks;", 4)):
        assert row == [
            str(rank),
            str(warmups[rank]),
            f"{simulation.bubble[rank]:g}",
            f"{simulation.bubble[rank] / simulation.makespan:.1%}",
            str(simulation.peak_in_flight[rank]),
            f"{simulation.peak_bytes[rank] / 2**20:,.1f}",
        ]
    assert f"rank 0  {table.actions[0][0]},{table.actions[0][1]}," in text


def test_every_other_schedule_is_shown():
    text = printed(replace(CONFIG, num_layers=4), 1, 8)
    assert re.search(r"^ 1f1b +33 +1\.000 +40 +27\.3% +4 .* chosen", text, re.M)
    assert re.search(r"^ gpipe +33 +1\.000 +33 +27\.3% +8 ", text, re.M)
    assert re.search(r"^ zb-h1 +27 +0\.818 +27 +11\.1% +4 ", text, re.M)
    assert re.search(r"^ none +96 +2\.909 +96 +0\.0% +1 .* one rank", text, re.M)
    assert "interleaved does not fit: num_layers: expected layers that divide evenly over 4 pipeline" in text


def test_layers_of_every_stage_are_named():
    config = replace(
        CONFIG,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        pipeline_model_parallel_layout="Ett|t||ttttt L",
    )
    rows = [re.sub(r" +", " ", line).strip() for line in printed(config, 1, 4).splitlines()]
    assert any(row.startswith("0 0 0 embedding + layers 0 to 1 ") for row in rows)
    assert any(row.startswith("0 1 2 nothing ") for row in rows)
    assert any(row.startswith("1 0 1 layer 2 ") for row in rows)
    assert any(row.startswith("1 1 3 layers 3 to 7 + norm, tied head, loss ") for row in rows)


def test_memory_of_a_small_case_by_hand():
    """1F1B keeps p - r microbatches; ZB-H1 p, of which r wait for W: here no order or number of layers is alike."""
    config = replace(CONFIG, num_layers=6, pipeline_model_parallel_size=3, pipeline_model_parallel_layout="Ett|ttt|tL")
    memory = [predict_stage_memory(config, stage, 2) for stage in range(3)]
    assert memory[1].saved > memory[0].saved
    plan = plan_pipeline(config, 2, 6)
    assert plan.simulation.peak_bytes == tuple((3 - rank) * memory[rank].saved for rank in range(3))
    zero = plan_pipeline(replace(config, pipeline_schedule="zb-h1"), 2, 6)
    assert zero.simulation.peak_bytes == tuple(
        (3 - rank) * memory[rank].saved + rank * memory[rank].weight_gradients for rank in range(3)
    )


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_memory_grows_with_layers_batch_and_microbatches(schedule):
    config = replace(CONFIG, pipeline_schedule=schedule)
    peaks = [plan_pipeline(config, batch, 8).simulation.peak_bytes for batch in (1, 2, 3)]
    for before, after in pairwise(peaks):
        assert all(a < b for a, b in zip(before, after, strict=True))
    deep = plan_pipeline(replace(config, num_layers=16), 1, 8).simulation.peak_bytes
    assert all(a < b for a, b in zip(peaks[0], deep, strict=True))
    many = plan_pipeline(config, 1, 16).simulation.peak_bytes
    assert (many > peaks[0]) if schedule == "gpipe" else (many == peaks[0])


FULL = {"recompute_granularity": "full", "recompute_method": "uniform"}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ("mhc", "layernorm", "mlp")}
MEASURED = {
    "first stage": (0, {}),
    "middle, selective": (1, SELECTIVE),
    "middle, no mhc": (1, {"enable_hyper_connections": False}),
    "last, full": (2, FULL),
}


@pytest.mark.thorough
@pytest.mark.parametrize("case", MEASURED)
def test_stage_memory_is_pytorchs(case):
    """Within 2% of every allocation of that stage; its input is counted, its output is not, as sending frees it."""
    layout = {"pipeline_model_parallel_size": 3, "pipeline_model_parallel_layout": "Et|tt|tL", "num_layers": 4}
    stage, settings = MEASURED[case]
    config = replace(CONFIG, seq_length=96, use_flash_attn=True, **layout, **settings)
    last, streams = stage == 2, config.residual_streams if config.enable_hyper_connections else None
    model = GPTModel(config, stage == 0, last, 0, stage)
    tokens, targets = torch.randint(0, config.vocab_size, (2, 4, 96))
    shape = (4, 96, *([streams] if streams else []), 64)
    x = tokens if stage == 0 else torch.randn(shape, requires_grad=True)
    parameters = [*model.parameters(), *([] if stage == 0 else [x])]
    weights = DeferredWeightGradients()

    def forward():
        return model(x, targets if last else None)

    def forward_and_input_gradient():
        with weights:
            y = forward()
        gradient = torch.randn_like(y)
        with weights:
            custom_backward(y, gradient)
        return torch.empty(0)

    for tensor in parameters:
        tensor.grad = torch.zeros_like(tensor)
    forward_and_input_gradient()  # buffers made on first use
    weights.run()
    saved, _ = measure_memory(forward, lambda y: torch.autograd.grad(y, parameters, torch.ones_like(y)))
    waiting, _ = measure_memory(forward_and_input_gradient, lambda _: weights.run())
    hidden = 4 * np.prod(shape)
    prediction = predict_stage_memory(config, stage, 4)
    assert prediction.saved == pytest.approx(saved + hidden * (stage > 0) - hidden * (not last), rel=0.02)
    assert prediction.weight_gradients == pytest.approx(waiting, rel=0.02)


def test_an_output_that_is_not_freed_is_counted():
    retained = replace(CONFIG, enable_hyper_connections=False, deallocate_pipeline_outputs=False)
    freed = replace(retained, deallocate_pipeline_outputs=True)
    output = 4 * 2 * 32 * 64
    difference = [
        predict_stage_memory(retained, s, 2).saved - predict_stage_memory(freed, s, 2).saved for s in range(4)
    ]
    assert difference == [output, output, output, 0]


def test_microbatches_a_schedule_cannot_have():
    config = replace(CONFIG, virtual_pipeline_model_parallel_size=2)
    with pytest.raises(ValueError, match="num_microbatches: expected at least pp_size=4"):
        printed(config, 1, 3)
    assert "interleaved does not fit: num_microbatches: expected at least pp_size=4" in printed(CONFIG, 1, 3)


def test_long_rows_lose_their_middle():
    row = schedule_rows(build_schedule("1f1b", 2, 16))[0]
    assert row.startswith("0F0,0F1,0B0,0F2,0B1,")
    assert shortened(row, len(row)) == row
    for width in range(20, len(row)):
        short = shortened(row, width)
        start, _, end = short.partition(",...,")
        assert len(short) <= width < len(short) + 10
        assert row.startswith(start + ",")
        assert row.endswith("," + end)


def test_warmup_without_pipeline():
    config = TransformerConfig(hidden_size=64, num_layers=2, num_attention_heads=4, seq_length=32)
    assert warmup(plan_pipeline(config, 1, 4), 0) == 0
    assert "pipeline: none, 1 rank, 4 microbatches of 1 x 32 tokens" in printed(config, 1, 4)


def test_picture_is_written(tmp_path):
    text = printed(CONFIG, 1, 4, picture=tmp_path / "plan.svg")
    assert "written: " in text
    assert (tmp_path / "plan.svg").stat().st_size > 10_000
