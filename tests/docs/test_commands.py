"""Test that the commands on the pages in docs/ run, and that the targets of make exist."""

import json
import os
import re
import shlex
import subprocess
import sys

import pytest

from diptych.plans.schedule.lockstep import lockstep_makespan
from diptych.plans.schedule.named import build_schedule
from diptych.plans.schedule.simulate import Costs, simulate
from parity.cli.main import main
from tests.docs.pages import PAGES, ROOT, run

CURRENT = {page: text for page, text in PAGES.items() if not page.startswith("history/")}
"""Pages whose commands exist today; records keep the commands of their day."""

COMMAND = r"(?:diptych|torchrun|python -m|make) [^`\n]*?"
ON_LINES = [
    (page, shlex.split(command, comments=True))
    for page, text in CURRENT.items()
    for command in re.findall(rf"^    ({COMMAND})$", text.replace("\\\n", ""), re.MULTILINE)
]
"""Lines of their own."""
IN_SENTENCES = [
    (page, shlex.split(" ".join(command.split())))
    for page, text in CURRENT.items()
    for command in re.findall(r"(?<!`)`((?:diptych|torchrun|python -m|make) [^`]*)`(?!`)", text)
    + re.findall(r"<!-- table.*: (python -m [\w.]+) -->", text)
]
"""Within sentences, over the ends of lines; and what writes tables."""


def is_whole(words: list[str]) -> bool:
    """Whether words within a sentence are a command that somebody could give."""
    return len(words) > 2 and not words[-1].startswith("--")


def unique(commands: list[list[str]]) -> list[list[str]]:
    return [list(words) for words in dict.fromkeys(map(tuple, commands))]


WHOLE = unique(
    [words for _, words in ON_LINES] + [words for _, words in IN_SENTENCES if words[0] != "diptych" or is_whole(words)]
)
PLANS = [words for words in WHOLE if words[:2] == ["diptych", "plan"]]
LOCATING = [words for words in WHOLE if words[:2] == ["diptych", "locate"]]
TRAINING = [words for words in WHOLE if words[0] == "torchrun" or words[1] in ("train", "compare")]
MODULES = sorted({words[2] for words in WHOLE if words[:2] == ["python", "-m"]})
TARGETS = sorted({words[1] for words in WHOLE if words[0] == "make"})
SMALL = "--train-iters 2 --lr-warmup-iters 1 --seq-length 8 --global-batch-size 4 --hidden-size 16 --eval-iters 1"


def test_every_command_is_of_a_kind_that_is_run():
    kinds = [PLANS, TRAINING, [w for w in WHOLE if w[:2] == ["python", "-m"]], [w for w in WHOLE if w[0] == "make"]]
    assert sum(map(len, [*kinds, LOCATING])) == len(WHOLE)
    assert [len(kind) > 3 for kind in kinds] == [True] * 4
    assert LOCATING


@pytest.mark.thorough
@pytest.mark.parametrize("words", LOCATING, ids=" ".join)
def test_locating_runs_and_names_the_submodule(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert main([*words[1:], "--output-dir", str(tmp_path)]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("first difference: blocks.7 (forward), between blocks.7.up and blocks.7.down: ")
    assert json.loads((tmp_path / "location.json").read_text())["module"] == "blocks.7"
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".html", ".png"}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "words",
    [pytest.param(words, marks=pytest.mark.slow if "8192" in words else ()) for words in PLANS],
    ids=lambda words: " ".join(words),
)
def test_plans_are_printed(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(words[1:]) == 0, capsys.readouterr().err
    assert capsys.readouterr().out
    assert ("--picture" not in words) or (tmp_path / words[words.index("--picture") + 1]).exists()


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("words", TRAINING, ids=" ".join)
def test_training_runs_when_made_small(words, tmp_path):
    """In processes of its own, which ranks and devices need; two steps. What goes on from another's comes after it."""
    start = ["torch.distributed.run"] if words[0] == "torchrun" else ["parity.cli"]
    warnings = ["-W", "default"] if words[0] == "torchrun" else []  # of torchrun's own
    folder = words[words.index("--save") + 1] if "--resume" in words else None
    before = [other for other in TRAINING if folder in other and "--exit-step" in other][-1:]
    printed = ""
    for command in (*before, words):
        early = [] if command is words else ["--exit-step", "1"]
        printed = run([*warnings, "-m", *start, *command[1:], *SMALL.split(), *early], tmp_path)
    assert "equal within tolerance" in printed or re.search(r"validation loss: \d\.\d+", printed)


@pytest.mark.parametrize(
    "words", unique([w for _, w in IN_SENTENCES if w[0] == "diptych" and not is_whole(w)]), ids=" ".join
)
def test_commands_told_in_passing_exist(words, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*words[1:2], "--help"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in words[2:])


TABLES = {
    "benchmarks.saved_values": "tests/recompute/test_recompute.py",
    "benchmarks.kernels_report": "tests/kernels/test_ahead.py",
    "tests.composition_report": "tests/test_composition.py",
}
"""What writes tables into pages, and the tests that make the tables again."""


@pytest.mark.parametrize("module", MODULES)
def test_modules_told_can_be_run(module):
    path = ROOT / module.replace(".", "/")
    source = (path / "__main__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    assert re.search(r'\nif __name__ == "__main__":\n    (main\(\)|sys\.exit\(main\(sys\.argv\[1:\]\)\))\n$', source)
    assert f"python -m {module}" in source
    if module in TABLES:
        package, name = module.split(".")
        assert f"from {package}.{name} import BEGIN" in (ROOT / TABLES[module]).read_text()
    else:
        run_elsewhere = (
            "docs.generate.api",
            "docs.generate.architecture",
            "docs.generate.errata",
            "tests.faults",
            "tests.everywhere.support_matrix",
            "tests.everywhere.support_matrix_jax",
        )
        assert module in (*run_elsewhere, "benchmarks.stage_costs"), "run it below, or in test_generate_report.py"


@pytest.mark.parametrize("target", TARGETS)
def test_make_targets_exist(target):
    done = subprocess.run(["make", "-n", target], capture_output=True, text=True, check=False, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", sorted({word[5:] for words in WHOLE for word in words if word.startswith("NAME=")}))
def test_benchmarks_named_on_the_pages_exist(name):
    source = (ROOT / f"benchmarks/{name}.py").read_text()
    assert re.search(r"^def main\(", source, re.MULTILINE)
    assert 'if __name__ == "__main__":' in source


def test_the_list_of_benchmarks_ends_when_its_reader_has_gone():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as output:
        command = [sys.executable, "-m", "benchmarks"]
        done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


SHRUNK = {
    "mhc": "STEPS, b.WARM_UP, b.WIDTHS = 1, 0, (32,)",
    "recompute": "CONFIG, b.BATCH, b.ROUNDS = replace(b.CONFIG, hidden_size=32, seq_length=16), 1, 1\n"
    "b.MODES = {name: {**flags} for name, flags in b.MODES.items()}",
    "delta_rule": "LENGTH, b.LENGTHS, b.TURNS = 128, (64, 128), 1",
    "context": "PER_RANK, b.TURNS, b.DELAYS, b.LONG = 128, 1, (0.05,), b.LONG._replace(length=1024)",
    "approximate_context": "PER_RANK, b.HEADS, b.WIDTH, b.TEXTS = 16, 2, 8, b.TEXTS[:1]",
    "zigzag": "SIZES, b.LENGTHS, b.TURNS = (2,), (64,), 1",
    "step_time": "STEPS, b.BASE = 1, replace(b.BASE, hidden_size=32, seq_length=16)\nb.CASES = b.CASES[0], b.CASES[-1]",
    "generated_schedule": "CASES = (b.CASES[-1]._replace(costs=b.Costs(0.005, 0.006, 0.004, 0.001, 1.0, 0.5)),)\n"
    "b.REAL_CASES = {name: (replace(config, hidden_size=16, seq_length=8, vocab_size=64), *more)\n"
    "                for name, (config, *more) in b.REAL_CASES.items()}\n"
    "b.REAL_ROUNDS, b.TIMED = 1, 1",
    "wavefront": "COUNTS, b.SIZES, b.TURNS, b.EXCHANGES = (2,), (2,), 1, ('pipelined',)\n"
    "b.MODEL = replace(b.MODEL, hidden_size=32, seq_length=32)",
    "everywhere": "SIZES, b.ROUNDS, b.COMPILED, b.BISECTIONS = b.Sizes(32, 2, 2, 16, 1, 64), 1, ('GPT-2',), 1\n"
    "b.PIPELINE = b.SIZES._replace(blocks=4, batch=b.MICROBATCHES)\n"
    "b.EAGER, b.OFFLOADED, b.PIPELINED = ('GPT-2',), ('Llama',), b.PIPELINED[::4]",
    "offload": "CONFIG, b.BATCH, b.STEPS, b.AHEAD = replace(b.CONFIG, hidden_size=32, seq_length=16), 1, 2, range(2)",
}
"""Benchmarks that make starts, as small as their constants make them. Those of kernels are run in test_kernels_ahead;
that of pipelines, whose times mean something in full only, is checked to exist."""


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("name", SHRUNK)
def test_benchmarks_run_when_made_small(name, tmp_path):
    for folder in ("benchmarks/results", "docs/images"):
        (tmp_path / folder).mkdir(parents=True)
    start = f"from dataclasses import replace\nimport benchmarks.{name} as b\nb.{SHRUNK[name]}\n"
    code = f"{start}if __name__ == '__main__':\n    b.main()\n"  # processes of ranks import it again
    (tmp_path / "small.py").write_text(code)
    assert "written: " in run(["small.py"], tmp_path)
    assert json.loads((tmp_path / f"benchmarks/results/{name}-cpu.json").read_text())["environment"]


def test_the_cost_of_mhc_is_the_benchmark_s():
    """The table of hyper_connections.md, and the ratios below it, are those of the committed results."""
    found = json.loads((ROOT / "benchmarks/results/mhc-cpu.json").read_text())
    page = PAGES["hyper_connections.md"]
    small, large = found["widths"]
    rows = re.findall(r"^\| ([\w ,]+?) \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    seconds = [result["median_step_seconds"] for result in (small, large)]
    assert rows == [(name, f"{1e3 * seconds[0][name]:.1f}", f"{1e3 * seconds[1][name]:.1f}") for name in seconds[0]]
    for backend, words in (
        ("torch", "{:.2f} (D=128) and {:.2f} (D=512) times as long in PyTorch"),
        ("jax", "{:.2f} and {:.2f} times in JAX"),
    ):
        ratios = [result["ratios"][f"{backend}: step time with mHC / without"] for result in (small, large)]
        assert words.format(*ratios) in " ".join(page.split())
    assert found["environment"]["date"].startswith(re.findall(r"results.*?\), (\d{4}-\d\d-\d\d)", page)[0])


def test_measured_pipelines_are_the_benchmark_s():
    """Every time of the results stands in its line of pipeline.md, beside what the tables' simulation says today."""
    page, times = PAGES["pipeline.md"], json.loads((ROOT / "benchmarks/results/pipeline-cpu.json").read_text())["time"]
    for row in times:
        schedule = build_schedule(row["schedule"], 4, 8, row["stages_per_rank"])
        unit = 0.1 / row["stages_per_rank"]
        costs = Costs(unit, unit, unit, row["link_delay"])
        predicted = simulate(schedule, costs).makespan
        if "JAX" in row["executor"]:
            predicted = lockstep_makespan(schedule, costs, fused="fused" in row["executor"])
        assert row["predicted_seconds"] == pytest.approx(predicted)
        label = row["schedule"] + ", fused slots" * ("fused" in row["executor"])
        if row["link_delay"]:
            late = f"1f1b, every message {1e3 * row['link_delay']:g} ms late"
            label = late if row["overlap"] else "the same, waiting for each message"
        (line,) = re.findall(rf"^\| {re.escape(label)}(?:, 2 virtual stages)? (\|.*) \|$", page, re.MULTILINE)
        assert f"| {row['seconds']:.3f} | {row['excess']:.1%}" in line
        assert f"| {predicted:.2f} |" in line
