"""Schedules made from the command line: what is read, what is refused, what is written and printed; measured costs."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import stage_costs as measuring
from diptych.planner.memory.ranks import rank_memories, standing_bytes
from diptych.planner.memory.stages import predict_stages
from diptych.planner.reports.generate import stage_costs
from diptych.planner.stage_costs import read_stage_costs, write_stage_costs
from diptych.plans.config import TransformerConfig
from diptych.plans.schedule.actions import Action
from diptych.plans.schedule.csv import read_schedule
from diptych.plans.schedule.named import build_schedule
from diptych.plans.schedule.simulate import Costs, simulate
from diptych.plans.schedule.validate import validate_schedule
from parity.cli.commands import Plan
from tests.command import diptych

ROOT = Path(__file__).parents[2]
SHAPE = "plan --num-layers 4 --pipeline-model-parallel-size 2 --num-microbatches 6"
MEASURED = Costs([0.010, 0.020], [0.012, 0.020], [0.008, 0.016], 0.004)


def config_of(**settings) -> TransformerConfig:
    """The command's model."""
    model = Plan().model
    return replace(model, num_layers=4, pipeline_model_parallel_size=2, **settings)


@pytest.mark.parametrize("has_bytes", [True, False])
def test_what_is_written_is_read(has_bytes, tmp_path):
    costs = replace(MEASURED, activation_bytes=[3.0, 5.0], weight_gradient_bytes=[1.0, 2.0])
    write_stage_costs(tmp_path / "costs.json", costs, 2, has_bytes, {"machine": "this one"})
    found = read_stage_costs(tmp_path / "costs.json", 2)
    assert found == (costs if has_bytes else MEASURED, has_bytes)


GOOD = {
    "forward_seconds": [1.0, 2.0],
    "input_gradient_seconds": [1, 2],
    "weight_gradient_seconds": [1, 2],
    "communication_seconds": 0.5,
}
REFUSED = {
    "no JSON": ("{", r"expected a JSON file, got Expecting property name"),
    "no object": ("[1]", r"expected a JSON object, got list"),
    "an entry twice": ('{"about": 1, "about": 2}', r"expected a JSON file, got 'about' twice"),
    "an entry too many": (GOOD | {"forward": 1}, r"expected entries of \['forward_seconds', .*\], got 'forward'"),
    "an entry too few": ({**GOOD, "communication_seconds": None}, r"expected communication_seconds to be .* got None"),
    "no messages": (
        {name: value for name, value in GOOD.items() if "comm" not in name},
        r"expected an entry 'communication_seconds', got \['forward_seconds', ",
    ),
    "half of the bytes": (GOOD | {"activation_bytes": [1, 2]}, r"expected an entry 'weight_gradient_bytes', got \["),
    "one number": (GOOD | {"forward_seconds": 1.0}, r"expected forward_seconds as a list of 2 numbers, .* got 1\.0"),
    "another number": (GOOD | {"forward_seconds": [1.0]}, r"expected forward_seconds as a list of 2 numbers, .* got 1"),
    "below 0": (
        GOOD | {"input_gradient_seconds": [1.0, -1.0]},
        r"expected input_gradient_seconds, stage 1 to be a finite number of at least 0, got -1\.0",
    ),
    "not a number": (
        GOOD | {"weight_gradient_seconds": [float("nan"), 1.0]},
        r"expected weight_gradient_seconds, stage 0 .* got nan",
    ),
    "no time": (GOOD | {"communication_seconds": float("inf")}, r"expected communication_seconds to be .* got inf"),
    "a truth": (GOOD | {"forward_seconds": [True, 1.0]}, r"expected forward_seconds, stage 0 .* got True"),
    "words": (GOOD | {"forward_seconds": ["1", 1.0]}, r"expected forward_seconds, stage 0 .* got '1'"),
    "far too much": (
        GOOD | {"communication_seconds": 1e308},
        r"expected communication_seconds to be 0 or from 1e-15 to",
    ),
    "far too little": (
        GOOD | {"communication_seconds": 5e-324},
        r"expected .* to be 0 or from 1e-15 to 1e\+15, got 5e-3",
    ),
    "401 digits": (
        GOOD | {"forward_seconds": [10**400, 1.0]},
        r"expected forward_seconds, stage 0 to be 0 or .* got 1000",
    ),
    "5000 digits": (f'{{"communication_seconds": {"9" * 5000}}}', r"expected a JSON file, got Exceeds the limit"),
    "60,000 entries": ({f"entry {n}": 1 for n in range(60_000)}, r"expected entries of .*, got 'entry 0'"),
    "60,000 entries more, one twice": (
        f'{{{", ".join(f""""entry {n}": 1""" for n in range(60_000))}, "entry 5": 2}}',
        r"expected a JSON file, got 'entry 5' twice",
    ),
    "nested": ('{"about": ' + "[" * 100_000, r"expected a JSON file, got values nested too deep to be read"),
    "nothing but 0": (
        {name: [0, 0] if isinstance(value, list) else 0 for name, value in GOOD.items()},
        r"expected an action that takes time, got 0 for all",
    ),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_costs_that_are_none_are_refused_by_name(fault, tmp_path):
    content, message = REFUSED[fault]
    path = tmp_path / "costs.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=f"^stage_costs, {re.escape(str(path))}: {message}"):
        read_stage_costs(path, 2)


@pytest.mark.timeout(20)
def test_a_byte_order_mark_says_nothing(tmp_path):
    (tmp_path / "costs.json").write_text(json.dumps(GOOD), encoding="utf-8-sig")
    assert read_stage_costs(tmp_path / "costs.json", 2).costs.communication == 0.5


def test_a_file_without_end_is_refused():
    with pytest.raises(ValueError, match=r"stage_costs, /dev/zero: expected a JSON file, got more than .* bytes"):
        read_stage_costs("/dev/zero", 1)


def test_there_is_no_such_file(tmp_path):
    with pytest.raises(ValueError, match=r"stage_costs, .*: expected a JSON file, got .*No such file"):
        read_stage_costs(tmp_path / "none.json", 2)


def test_plan_makes_a_schedule_for_measured_costs(tmp_path, capsys):
    costs, made = tmp_path / "costs.json", tmp_path / "new" / "own.csv"
    write_stage_costs(costs, MEASURED, 2, False)
    assert diptych(SHAPE, "--stage-costs", costs, "--generate-schedule", made) == 0
    printed = capsys.readouterr().out
    schedule = read_schedule(made)
    validate_schedule(schedule, "blocking")
    simulation = simulate(schedule, MEASURED)
    rows = dict(re.findall(r"^ (generated|gpipe|1f1b|zb-h1|zb-h2) +([\d.]+)", printed, re.MULTILINE))
    assert float(rows["generated"]) == pytest.approx(simulation.makespan, rel=1e-4)
    for name in ("gpipe", "1f1b", "zb-h1", "zb-h2"):
        named = simulate(build_schedule(name, 2, 6), MEASURED).makespan
        assert float(rows[name]) == pytest.approx(named, rel=1e-4)
        assert simulation.makespan <= named * (1 + 1e-9)
    assert "interleaved does not fit: costs: expected 4 stages, as the schedule has, got 2; give costs" in printed
    bound = re.search(r"generated: makespan ([\d.]+) s, at least ([\d.]+) s", printed)
    assert bound is not None
    assert float(bound[2]) <= float(bound[1])
    assert "bytes of one rank, by term" in printed
    # The file then is a configuration's schedule.
    assert diptych(SHAPE, "--pipeline-schedule-file", made) == 0
    assert "pipeline: file, 2 ranks" in capsys.readouterr().out


def test_without_measured_costs_they_are_predicted(tmp_path, capsys):
    picture, shape = tmp_path / "own.svg", f"{SHAPE} --virtual-pipeline-model-parallel-size 2 --schedule v-half"
    assert diptych(shape, "--generate-schedule", tmp_path / "own.csv", "--picture", picture) == 0
    printed = capsys.readouterr().out
    assert "times predicted" in printed
    for name in ("1f1b", "interleaved, v=2", "zb-v, v=2", "generated, v=2"):
        assert f" {name} " in printed
    assert read_schedule(tmp_path / "own.csv").placement == "v"
    assert picture.exists()


def test_the_limit_is_of_all_that_a_rank_holds(tmp_path, capsys):
    """What the planner counts of the file that is written is within it; below one microbatch it is refused."""
    config, made = config_of(), tmp_path / "own.csv"
    stages, standing = predict_stages(config, 8), standing_bytes(config)
    assert standing == [
        rank.parameters + rank.gradients + rank.moments
        for rank in rank_memories(config, build_schedule("1f1b", 2, 6), stages)
    ]
    limit = standing[0] + 2 * stages[0].saved - 1  # a byte less than two microbatches on the first rank
    assert diptych(SHAPE, "--generate-schedule", made, "--memory-limit", f"{limit}B") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "over memory_limit" in printed, "gpipe keeps all six"
    with_file = replace(config, pipeline_schedule_file=read_schedule(made))
    ranks = rank_memories(with_file, read_schedule(made), stages)
    assert max(rank.total for rank in ranks) <= limit
    least = max(size + stage.saved for size, stage in zip(standing, stages, strict=True))
    assert diptych(SHAPE, "--generate-schedule", made, "--memory-limit", f"{least - 1}B") == 2
    assert f"--memory-limit: expected at least {least:,} bytes, which pipeline rank" in capsys.readouterr().err


def test_bytes_of_the_file_count(tmp_path):
    given = replace(MEASURED, activation_bytes=[3.0, 5.0], weight_gradient_bytes=[1.0, 2.0])
    for has_bytes in (True, False):
        write_stage_costs(tmp_path / "costs.json", given, 2, has_bytes)
        command = Plan(model=config_of(), generate_schedule=tmp_path / "own.csv", stage_costs=tmp_path / "costs.json")
        found = stage_costs(command, command.model)
        expected = [float(stage.saved) for stage in predict_stages(command.model, 8)]
        assert found.activation_bytes == ([3.0, 5.0] if has_bytes else expected)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--stage-costs costs.json", "--stage-costs: expected None without --generate-schedule, got 'costs.json'"),
        ("--generate-schedule own.txt", "--generate-schedule: expected a name that ends in .csv, got 'own.txt'"),
        ("--generate-schedule own.csv --ranks 8", "ranks: expected none with --generate-schedule, got '8'; --generate"),
        (
            "--generate-schedule own.csv --write-schedule b.csv",
            "--write-schedule: expected none with --generate",
        ),
        (
            "--generate-schedule own.csv --enable-tensor-offload",
            "--enable-tensor-offload: expected none with --generate",
        ),
        (
            "--generate-schedule own.csv --generate-effort -1",
            "--generate-effort: expected a finite number of at least 0",
        ),
        (
            "--generate-schedule own.csv --stage-costs none.json --html p.html",
            "html: expected None with --stage-costs, whose times the page does not have, got 'p.html'; plan the file",
        ),
        ("--generate-schedule own.csv --stage-costs none.json", "--stage-costs, none.json: expected a JSON file, got"),
        ("--generate-schedule own.csv --memory-limit many", "--memory-limit: expected a size such as 80GiB or 80GB"),
        ("--memory-limit 1GiB", "ranks: expected a value, since --memory-limit and ranks go together, got None"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(flags, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert diptych(f"{SHAPE} {flags}") == 2
    assert message in capsys.readouterr().err


def test_a_page_shows_the_schedule_that_was_made(tmp_path, capsys):
    """Also where the model's own schedule cannot have so many microbatches; paths are printed as they are."""
    folder = tmp_path / "[draft] with a name that is longer than a line of the terminal is where nobody looks [/b]"
    made, page = folder / "own.csv", folder / "page.html"
    shape = SHAPE.replace("microbatches 6", "microbatches 1") + " --virtual-pipeline-model-parallel-size 2"
    assert diptych(shape, "--generate-schedule", made, "--html", page) == 0
    out = capsys.readouterr().out
    assert f"written: {made}\n" in out
    assert f"written: {page}\n" in out
    title = re.search(r"<title>(.*?)</title>", page.read_text())[1]
    assert title.startswith("file")


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to this user")
def test_a_file_that_may_not_be_written_is_refused_before_the_work(tmp_path, capsys):
    path = tmp_path / "own.csv"
    path.touch(0o444)
    assert diptych(f"{SHAPE} --generate-effort 1e9", "--generate-schedule", path) == 2
    assert "that may not be written" in capsys.readouterr().err


def test_access_is_asked_for(tmp_path, capsys, monkeypatch):
    path = tmp_path / "own.csv"
    path.touch()
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert diptych(f"{SHAPE} --generate-effort 1e9", "--generate-schedule", path) == 2
    assert f"a file {path} that may not be written" in capsys.readouterr().err.replace("\n", "")


def test_a_pipeline_is_needed(capsys):
    assert diptych("plan --generate-schedule own.csv") == 2
    assert "--generate-schedule: expected --pipeline-model-parallel-size above 1, got 1" in capsys.readouterr().err


def test_a_table_is_split_everywhere():
    schedule = measuring.split(build_schedule("dualpipe-v", 2, 5, 2))
    validate_schedule(schedule)
    assert {action.kind for actions in schedule.actions for action in actions} == {"F", "I", "W"}
    assert Action("I", 0, 0) in schedule.actions[0]


def test_the_table_of_measured_steps_is_the_benchmark_s():
    results = json.loads((ROOT / "benchmarks/results/generated_schedule-cpu.json").read_text())
    page = (ROOT / "docs/pipeline.md").read_text()
    for row in [*results["time"], *results["real"]]:
        cells = [row["case"], row["schedule"], f"{row['peak_kept']:g}"]
        for backend in ("", *(["jax_"] if row in results["time"] else [])):
            cells += [f"{row[f'{backend}{name}']:.3f}" for name in ("predicted_seconds", "seconds")]
            cells.append(f"{row[f'{backend}excess']:.1%}")
        assert "| " + " | ".join(cells) + " |\n" in page


@pytest.mark.multiprocess
def test_measured_costs_of_stages_make_a_schedule(tmp_path, capsys):
    """Stages of unlike length: what takes longer is measured longer. From the measurement to the table."""
    path, made = tmp_path / "costs.json", tmp_path / "own.csv"
    shape = "--num-layers 7 --hidden-size 64 --num-attention-heads 4 --pipeline-model-parallel-size 2 "
    shape += "--pipeline-model-parallel-layout Et|ttttttL --num-microbatches 4 --micro-batch-size 1"
    assert measuring.main([*shape.split(), "--output", str(path), "--steps", "2"]) == 0
    assert f"written: {path}" in capsys.readouterr().out
    costs, has_bytes = read_stage_costs(path, 2)
    assert not has_bytes
    for name in ("forward", "input_gradient", "weight_gradient"):
        assert 1.5 * costs.of(name, 0) < costs.of(name, 1), name  # six layers to one; 1.97 beside other work
    assert 0.0 < costs.communication < 1.0
    assert json.loads(path.read_text())["about"]["environment"]["versions"]
    assert diptych(f"plan {shape}", "--stage-costs", path, "--generate-schedule", made) == 0
    assert read_schedule(made).num_microbatches == 4
