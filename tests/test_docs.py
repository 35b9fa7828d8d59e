"""What the pages in docs/ show, exists and runs: links, names, programs, commands, what make does.

Comments before a block of a page say how it is run: ``<!-- file: x.py -->``: it is saved as x.py for the blocks after
it; ``<!-- prints -->``: the block holds what the program before it prints; ``<!-- prints: module -->``: what
``python -m module`` prints. Programs of older pages that are parts of somebody's own get the rest from AROUND.
"""

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from parity.cli import main
from parity.commands import Compare, Plan, Sample, Train
from plans.config import DataConfig, TrainConfig, TransformerConfig

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = {path.name: path.read_text() for path in sorted(DOCS.glob("*.md"))}
PROSE = {page: re.sub(r"```.*?```", "", text, flags=re.DOTALL) for page, text in PAGES.items()}
"""Without programs."""
CHECKED = ("README.md", "architecture.md", "errata.md", "extending.md", "hyper_connections.md")
"""Pages in which every name in backticks is looked up."""
PACKAGES = ("plans", "kernels", "reference_torch", "jax_impl", "parity")
BACKENDS = ("reference_torch", "jax_impl")
SETTINGS = (TransformerConfig, TrainConfig, DataConfig, Compare, Plan, Sample, Train)
LANGUAGE = {"prints", "file"}
BLOCK = re.compile(r"(?:<!-- (\w+)(?:: (\S+))? -->\n)?```(\w+)\n(.*?)```", re.DOTALL)


class Program(NamedTuple):
    """A block that is run by itself."""

    page: str
    code: str
    files: dict[str, str]
    """What lies beside it."""
    prints: str | None


def programs() -> list[Program]:
    """Those of all pages, in order."""
    found: list[Program] = []
    for page, text in PAGES.items():
        files: dict[str, str] = {}
        for mark, name, language, code in BLOCK.findall(text):
            assert mark in ("", *LANGUAGE), f"{page}: <!-- {mark} -->"
            if mark == "file":
                files[name] = code
            elif mark == "prints" and not name:
                found[-1] = found[-1]._replace(prints=code)
            elif language == "python":
                found.append(Program(page, code, dict(files), None))
    return found


PROGRAMS = programs()

TRAINED = """
from parity.cli import main
small = "--train-iters 2 --seq-length 24 --global-batch-size 2 --hidden-size 16 --eval-iters 1"
main(["train", *small.split(), "--save", "runs/cross"])
"""
AROUND = {
    ("pipeline.md", "from reference_torch.groups"): (
        """
import numpy as np
from plans.config import TransformerConfig
from plans.data import Batch
from reference_torch.stage import Microbatch, forward_step as my_forward_step, model_provider

config = TransformerConfig(16, 2, 2, seq_length=128)
my_model_provider = lambda **ends: model_provider(config, **ends)
tokens = np.zeros((1, 128), np.int64)
iterator = iter([Microbatch(Batch(tokens, tokens, None), 0, i, True) for i in range(8)])
""",
        "assert len(losses) == 8 and all(p.grad is not None for p in model.parameters())",
    ),
    ("pipeline.md", "from jax_impl.pipeline"): (
        """
import jax
jax.config.update("jax_num_cpu_devices", 2)
import numpy as np
from flax import nnx
from jax_impl.transformer import GPTModel
from plans.config import TransformerConfig
from plans.partition import undivided

config = TransformerConfig(16, 2, 2, seq_length=8, pipeline_model_parallel_size=2)
model = GPTModel(undivided(config))
params = nnx.split(model, nnx.Param)[1]
tokens = targets = np.zeros((2, 1, 8), np.int32)
""",
        "assert 5 < loss < 6 and jax.tree.structure(gradients) == jax.tree.structure(staged)",
    ),
    ("offload.md", "from reference_torch.offload"): (
        """
import torch
model = torch.nn.Module()
model.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
before = [p.detach().clone() for p in model.parameters()]
""",
        """
assert manager.stats["bytes_in"] > 0
assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
manager.close()
""",
    ),
    ("drill.md", "def told_to_end"): (
        """
import inspect
import signal
from benchmarks import drill_cases
from benchmarks.drill_cases import AT, Broken, Room
""",
        """
Broken("slow", AT, seconds=1.0)  # the case itself, which make drill runs, has one line more
real = inspect.getsource(drill_cases.told_to_end)
lines = "program.signal(signal.SIGTERM)", "program.expect_end(0)", "room.resume(step=AT + 1)"
assert all(line in real for line in lines)
assert hasattr(Room, "train")
""",
    ),
    ("using.md", "import torch\nfrom reference_torch.saving"): (TRAINED, "assert output.shape == (1, 20, 256)"),
    ("using.md", "import jax\nimport jax.numpy"): (TRAINED, "assert output.shape == (1, 20, 256)"),
    ("context_parallel.md", "context = build_cp_context"): (
        """
import torch
import torch.distributed as dist
from reference_torch.context_parallel import build_cp_context
from reference_torch.delta_rule import chunk_kda

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group, cu_seqlens = dist.group.WORLD, torch.tensor([0, 5, 12], dtype=torch.int32)
q, k, v = (torch.randn(1, 12, 2, 4) for _ in range(3))
g, beta = -torch.rand(1, 12, 2, 4), torch.rand(1, 12, 2)
""",
        "assert o.shape == v.shape and final_state.shape == (2, 2, 4, 4)",
    ),
}
"""By page and beginning of a program: what comes before it, and what has to hold after it."""

LEFT_OUT = {"offload.md": ("\n...\n", "\nloss = model.layers[1](model.layers[0](torch.ones(2, 4))).square().sum()\n")}
"""What stands for a reader's own code."""


def run(arguments: list[str], folder: Path, timeout: float = 280) -> str:
    """What a fresh process prints; the repository's packages, and none that are installed from elsewhere."""
    done = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def first_line(program: Program) -> str:
    return program.code.strip().splitlines()[0]


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "program",
    [pytest.param(p, marks=pytest.mark.slow if "load_model" in p.code else ()) for p in PROGRAMS],  # trains first
    ids=[f"{p.page}: {first_line(p)[:40]}" for p in PROGRAMS],
)
def test_programs_run_and_print_what_is_shown(program, tmp_path):
    code = program.code
    if program.page in LEFT_OUT:
        assert LEFT_OUT[program.page][0] in code
        code = code.replace(*LEFT_OUT[program.page])
    for (page, beginning), (before, after) in AROUND.items():
        if page == program.page and code.startswith(beginning):
            code = f"{before}{code}\n{after}\n"
    for name, text in program.files.items():
        (tmp_path / name).write_text(text)
    printed = run(["-c", code], tmp_path)
    if program.prints is not None:
        assert printed == program.prints


def test_no_program_is_missed():
    """Every block of Python is run or saved; every part of somebody's program is one that is there."""
    saved = {text for program in PROGRAMS for text in program.files.values()}
    fences = sum(text.count("```python\n") for text in PAGES.values())
    assert len(PROGRAMS) + len(saved) == fences >= 9
    for page, beginning in AROUND:
        assert [p for p in PROGRAMS if p.page == page and p.code.startswith(beginning)], (page, beginning)


def slugs(text: str) -> set[str]:
    """Anchors of a page's headings, as they are made of them on GitHub."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", PROSE[page]):
        path, _, anchor = target.partition("#")
        if path.startswith("https://"):
            continue
        there = (DOCS / path).resolve() if path else DOCS / page
        assert there.exists(), target
        assert not anchor or anchor in slugs(there.read_text()), target


def test_the_index_names_every_page():
    linked = re.findall(r"^\| \[\w+\]\((\w+\.md)\) \|", PAGES["README.md"], re.MULTILINE)
    assert sorted([*linked, "README.md"]) == [*sorted(PAGES)]
    notebooks = {path.name for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert notebooks == set(re.findall(r"notebooks/(\w+\.ipynb)", PAGES["README.md"]))


# Names.


def names_of(page: str) -> list[tuple[str, tuple[str, ...]]]:
    """What stands in backticks, programs apart, with the packages it may be relative to."""
    found = []
    for line in PROSE[page].splitlines():
        cells = line.strip("| ").split(" | ") if line.startswith("|") else [line]
        for place, cell in enumerate(cells):
            # The third and fourth columns of a table of four are the backends'.
            roots = (
                BACKENDS if page != "architecture.md" or len(cells) != 3 else (BACKENDS[place - 1 : place] or BACKENDS)
            )
            found += [(name, roots) for name in re.findall(r"`([^`]+)`", cell)]
    return found


@cache
def sources() -> str:
    """All code, for words that have to be in it somewhere."""
    files = [path for package in (*PACKAGES, "tests", "benchmarks") for path in (ROOT / package).rglob("*.py")]
    return "\n".join(path.read_text() for path in [*files, ROOT / "pyproject.toml"] if path != Path(__file__))


def is_path(name: str) -> bool:
    """Whether something looks like one."""
    return re.fullmatch(r"[\w./-]+/|[\w./-]+\.(py|md|ipynb|json|toml|png)", name) is not None


def attribute(name: str) -> object:
    """What a dotted name means.

    Raises:
        AttributeError, ModuleNotFoundError: nothing.
    """
    head, *rest = name.split(".")
    value: object = importlib.import_module("jax.lax" if head == "lax" else head)
    path = value.__name__  # pyright: ignore[reportAttributeAccessIssue]
    for part in rest:
        path += f".{part}"
        if not hasattr(value, part):
            importlib.import_module(path)
        value = getattr(value, part)
    return value


def means_something(name: str, roots: tuple[str, ...]) -> bool:
    """Whether a name in backticks exists: a file, a module's attribute, an option, a word of the code."""
    if is_path(name):
        return (ROOT / name).exists() or all((ROOT / root / name).exists() for root in roots)
    if re.fullmatch(r"--[\w-]+( \w+)?", name):
        option = name.split()[0].removeprefix("--").removeprefix("no-").replace("-", "_")
        return option in {field.name for settings in SETTINGS for field in fields(settings)}
    if re.fullmatch(r"[A-Za-z_]\w*(\.\w+)+", name):
        known = name.split(".")[0] in (*PACKAGES, "benchmarks", "jax", "lax", "torch")
        for full in [name] if known else [f"{root}.{name}" for root in roots]:
            try:
                attribute(full)
            except (AttributeError, ModuleNotFoundError):
                return False
        return True
    if re.fullmatch(r"[A-Za-z_]\w*", name):
        return re.search(rf"\b{name}\b", sources()) is not None
    return True


@pytest.mark.parametrize("page", CHECKED)
def test_every_name_exists(page):
    names = names_of(page)
    assert page == "README.md" or len(names) > 10
    missing = [name for name, roots in names if name != ".data" and not means_something(name, roots)]
    assert not missing


def test_names_that_do_not_exist_are_seen():
    for name in ("plans/nothing.py", "train.Trainer.nothing", "plans.schedule.nothing", "--nothing", "nothing_like_it"):
        assert not means_something(name, BACKENDS), name
    assert not means_something("stage.py", BACKENDS), "JAX has none"
    assert means_something("stage.forward_step", BACKENDS[:1])


# Commands.

COMMAND = r"(?:diptych|torchrun|python -m|make) [^`\n]*?"
SHOWN = [
    (page, shlex.split(command, comments=True))
    for page, text in PAGES.items()
    for command in re.findall(rf"^    ({COMMAND})$", text.replace("\\\n", ""), re.MULTILINE)
]
"""Lines of their own."""
TOLD = [
    (page, shlex.split(" ".join(command.split())))
    for page, text in PAGES.items()
    for command in re.findall(r"(?<!`)`((?:diptych|torchrun|python -m|make) [^`]*)`(?!`)", text)
    + re.findall(r"<!-- table.*: (python -m [\w.]+) -->", text)
]
"""Within sentences, over the ends of lines; and what writes tables."""


def is_whole(words: list[str]) -> bool:
    """Whether words within a sentence are a command that somebody could give."""
    return len(words) > 2 and not words[-1].startswith("--")


def unique(commands: list[list[str]]) -> list[list[str]]:
    return [list(words) for words in dict.fromkeys(map(tuple, commands))]


WHOLE = unique([words for _, words in SHOWN] + [words for _, words in TOLD if words[0] != "diptych" or is_whole(words)])
PLANS = [words for words in WHOLE if words[:2] == ["diptych", "plan"]]
TRAINING = [words for words in WHOLE if words[0] == "torchrun" or words[1] in ("train", "compare")]
MODULES = sorted({words[2] for words in WHOLE if words[:2] == ["python", "-m"]})
TARGETS = sorted({words[1] for words in WHOLE if words[0] == "make"})
SMALL = "--train-iters 2 --lr-warmup-iters 1 --seq-length 8 --global-batch-size 4 --hidden-size 16 --eval-iters 1"


def test_every_command_is_of_a_kind_that_is_run():
    kinds = [PLANS, TRAINING, [w for w in WHOLE if w[:2] == ["python", "-m"]], [w for w in WHOLE if w[0] == "make"]]
    assert sum(map(len, kinds)) == len(WHOLE)
    assert [len(kind) > 3 for kind in kinds] == [True] * 4


@pytest.mark.thorough
@pytest.mark.parametrize("words", PLANS, ids=" ".join)
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


@pytest.mark.parametrize("words", unique([w for _, w in TOLD if w[0] == "diptych" and not is_whole(w)]), ids=" ".join)
def test_commands_told_in_passing_exist(words, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*words[1:2], "--help"])
    assert stop.value.code == 0
    told = capsys.readouterr().out
    assert all(word in told for word in words[2:])


TABLES = {
    "benchmarks.kept_values": "tests/test_recompute.py",
    "benchmarks.kernels_report": "tests/test_kernels_ahead.py",
    "tests.composition_report": "tests/test_composition.py",
}
"""What writes tables into pages, and the tests that make the tables again."""


@pytest.mark.parametrize("module", MODULES)
def test_modules_told_can_be_run(module):
    source = (ROOT / f"{module.replace('.', '/')}.py").read_text()
    assert re.search(r'\nif __name__ == "__main__":\n    (main\(\)|sys\.exit\(main\(sys\.argv\[1:\]\)\))\n$', source)
    assert f"python -m {module}" in source
    if module in TABLES:
        package, name = module.split(".")
        assert f"from {package}.{name} import BEGIN" in (ROOT / TABLES[module]).read_text()
    else:
        run_elsewhere = "parity.api_reference", "benchmarks.architecture", "benchmarks.errata", "benchmarks.drill"
        assert module in (*run_elsewhere, "benchmarks.stage_costs"), "run it below, or in test_generate_report.py"


def test_the_picture_is_drawn(tmp_path, monkeypatch):
    from benchmarks import architecture

    monkeypatch.setattr(architecture, "PICTURE", tmp_path / "architecture.png")
    architecture.main()
    assert (tmp_path / "architecture.png").read_bytes()[:4] == b"\x89PNG"
    for line in architecture.ROOMS:
        assert (
            means_something(line[0] if line[0].endswith("/") else f"{line[0]}.py", BACKENDS) or line[0] == "recompute"
        )
    for lines, package in [(sum(architecture.PLANS_FILES, ()), "plans"), (architecture.KERNELS_FILES, "kernels")]:
        for name in ", ".join(name for name, _ in lines).split(", "):
            assert (ROOT / package / (name if name.endswith("/") else f"{name}.py")).exists(), name


@pytest.mark.multiprocess
def test_errata_print_what_is_shown(tmp_path):
    (shown,) = [code for mark, name, _, code in BLOCK.findall(PAGES["errata.md"]) if name == "benchmarks.errata"]
    assert run(["-m", "benchmarks.errata"], tmp_path) == shown


@pytest.mark.multiprocess
def test_the_api_page_is_what_the_code_says(tmp_path):
    printed = run(["-c", "from parity.api_reference import page; print(page(), end='')"], tmp_path)
    assert printed == PAGES["api.md"], "python -m parity.api_reference writes it anew"


@pytest.mark.parametrize("target", TARGETS)
def test_make_targets_exist_and_their_modules_too(target, tmp_path):
    done = subprocess.run(["make", "-n", target], capture_output=True, text=True, check=False, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    for module in re.findall(r"-m (benchmarks\.\w+)", done.stdout):
        source = (ROOT / f"{module.replace('.', '/')}.py").read_text()
        assert "def main() -> None:" in source or "sys.exit(main(" in source


SHRUNK = {
    "mhc": "STEPS, b.WARM_UP = 1, 0",
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
    rows = dict(re.findall(r"^\| ([\w ,]+?) \| ([\d.]+) \|$", page, re.MULTILINE))
    assert rows == {name: f"{1e3 * seconds:.1f}" for name, seconds in found["median_step_seconds"].items()}
    for backend, words in (("torch", "{:.1f}\ntimes as long in PyTorch"), ("jax", "{:.1f} times in JAX")):
        assert words.format(found["ratios"][f"{backend}: step time with mHC / without"]) in page
    assert found["environment"]["date"].startswith(re.findall(r"results.*?\), (\d{4}-\d\d-\d\d)", page)[0])
