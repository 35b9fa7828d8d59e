"""Programs shown on the pages in docs/ run and print what is shown.

Comments before a block of a page say how it is run: ``<!-- file: x.py -->``: it is saved as x.py for the blocks after
it; ``<!-- prints -->``: the block holds what the program before it prints; ``<!-- prints: module -->``: what
``python -m module`` prints. Programs of older pages that are parts of somebody's own get the rest from AROUND.
"""

import re
from typing import NamedTuple

import pytest

from tests.docs.pages import PAGES, ROOT, run
from tests.docs.test_names import BACKENDS, means_something

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
from parity.cli.main import main
small = "--train-iters 2 --seq-length 24 --global-batch-size 2 --hidden-size 16 --eval-iters 1"
main(["train", *small.split(), "--save", "runs/using"])
"""
BLOCKS = "\n".join(
    p.code.split("model = ")[0] for p in PROGRAMS if p.page == "everywhere.md" and "class Block" in p.code
)
"""The modules that the first program of the page defines and the others use."""
AROUND = {
    **{
        ("everywhere.md", f"from reference_torch{name}"): (BLOCKS, "")
        for name in (".pipeline", ".offload", " import add_hyper_connections")
    },
    ("everywhere.md", "import jax\nimport jax.numpy as jnp\nfrom jax_impl.pipeline"): (
        'import jax\njax.config.update("jax_num_cpu_devices", 4)\n',
        "assert losses.shape == (8,)",
    ),
    ("pipeline.md", "from reference_torch.groups"): (
        """
import numpy as np
from diptych.plans.config import TransformerConfig
from diptych.plans.model.data import Batch
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
from diptych.plans.config import TransformerConfig
from diptych.plans.mesh import unsharded

config = TransformerConfig(16, 2, 2, seq_length=8, pipeline_model_parallel_size=2)
model = GPTModel(unsharded(config))
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
    ("fault_injection.md", "def terminated"): (
        """
import inspect
import signal
from tests.faults import cases as fault_cases
from tests.faults.cases import AT, Broken, Workspace
""",
        """
Broken("slow", AT, seconds=1.0)  # the case itself, which make faults runs, has one line more
real = inspect.getsource(fault_cases.terminated)
lines = "program.signal(signal.SIGTERM)", "program.expect_end(0)", "workspace.resume(step=AT + 1)"
assert all(line in real for line in lines)
assert hasattr(Workspace, "train")
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


def test_the_picture_is_drawn(tmp_path, monkeypatch):
    from docs.generate import architecture

    monkeypatch.setattr(architecture, "PICTURE", tmp_path / "architecture.png")
    architecture.main()
    assert (tmp_path / "architecture.png").read_bytes()[:4] == b"\x89PNG"
    for line in architecture.MODULES:
        assert (
            means_something(line[0] if line[0].endswith("/") else f"{line[0]}.py", BACKENDS) or line[0] == "recompute"
        )
    for lines, package in [
        (sum(architecture.PLANS_FILES, ()), "diptych/plans"),
        (architecture.KERNELS_FILES, "kernels/diptych_kernels"),
    ]:
        for name in ", ".join(name for name, _ in lines).split(", "):
            assert (ROOT / package / (name if name.endswith("/") else f"{name}.py")).exists(), name


@pytest.mark.multiprocess
def test_errata_print_what_is_shown(tmp_path):
    (printed,) = [
        code for mark, name, _, code in BLOCK.findall(PAGES["history/errata.md"]) if name == "docs.generate.errata"
    ]
    assert run(["-m", "docs.generate.errata"], tmp_path) == printed


@pytest.mark.multiprocess
def test_the_api_page_is_what_the_code_says(tmp_path):
    printed = run(["-c", "from docs.generate.api import page; print(page(), end='')"], tmp_path)
    assert printed == PAGES["api.md"], "python -m docs.generate.api writes it anew"
