"""Test the wheel: its packages, each extra alone, and other packages with similar names beside it."""

import os
import re
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.docs.test_readme import CONNECTIONS
from tests.docs.test_readme import README as README_TEXT

ROOT = Path(__file__).parent.parent
PACKAGES = {"diptych", "diptych_kernels", "reference_torch", "jax_impl", "parity"}
FRAMEWORKS = {"torch": ("torch", "jax"), "jax": ("jax", "torch")}
"""Backend of each extra, and the backend whose framework is missing there."""
README_EXAMPLES = re.findall(r"```python\n(.*?)```", README_TEXT, re.DOTALL)
SMALL = "--hidden-size 16 --num-layers 1 --seq-length 8 --train-iters 2 --eval-iters 1"
TRAIN = f"train --backend {{}} {SMALL}"

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, tracked.split("\0")):
        if name.split("/")[0] in {"diptych", "kernels", "reference_torch", "jax_impl", "parity"} or "/" not in name:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, source]
    subprocess.run(build, check=True, timeout=120)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_has_these_packages_alone(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == PACKAGES
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)
    assert "diptych/planner/page/template.html" in names


def requirements(wheel: Path, extra: str) -> Iterator[Requirement]:
    """Yield the requirements of the wheel with one extra."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("METADATA")]
        lines = archive.read(name).decode().splitlines()
    for line in lines:
        if line.startswith("Requires-Dist: "):
            requirement = Requirement(line.removeprefix("Requires-Dist: "))
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                yield requirement


def installed_closure(wheel: Path, extra: str, others: Sequence[str] = ()) -> set[str]:
    """Return all distributions that pip would install for the wheel with one extra, as they are installed here.

    Args:
        wheel: the built wheel.
        extra: of the wheel.
        others: distributions to install beside it.
    """
    found: set[str] = set()
    waiting = [*requirements(wheel, extra), *map(Requirement, others)]
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        if name == "diptych":  # the extra that is all others
            waiting += [each for own in wanted.extras for each in requirements(wheel, own)]
        elif name not in found:
            try:
                required = map(Requirement, metadata.requires(name) or [])
            except metadata.PackageNotFoundError:
                assert name.startswith(("nvidia", "cuda", "jax-cuda")), f"{name} is required, but not installed"
                continue
            found.add(name)
            extras = wanted.extras or {""}
            waiting += [
                each for each in required if not each.marker or any(each.marker.evaluate({"extra": e}) for e in extras)
            ]
    return found


def environment(folder: Path, wheel: Path, distributions: set[str]) -> Path:
    """Make an environment with the wheel and links to the distributions, and nothing else; return its interpreter."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    (site,) = (folder / "lib").glob("python*/site-packages")
    for name in distributions:
        distribution = metadata.distribution(name)
        here = Path(str(distribution.locate_file("")))
        for top in {file.parts[0] for file in distribution.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            if not (site / top).exists():
                (site / top).symlink_to(here / top)
    installed = run(python, ["-m", "pip", "install", "-q", "--no-deps", "--no-index", str(wheel)], folder)
    assert installed.returncode == 0, installed.stderr
    return python


def run(python: Path, arguments: list[str], folder: Path) -> subprocess.CompletedProcess:
    """Run Python outside the checkout, without its paths."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [python, "-W", "ignore", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=folder,
        env=variables | {"JAX_PLATFORMS": "cpu"},
        check=False,
    )


EXAMPLES = {
    "torch": [example for example in README_EXAMPLES if "CheckpointWithoutOutput" in example] + CONNECTIONS[:1],
    "jax": CONNECTIONS[1:],
    "all": [example for example in README_EXAMPLES if "compare_functions" in example],
}
"""Programs of the README and of the page it links to that run with each extra."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("extra", FRAMEWORKS)
def test_an_extra_is_enough_for_its_backend(extra, wheel, tmp_path):
    """A small run, every command of one backend, and the examples work; others name the missing framework in a line."""
    backend, missing = FRAMEWORKS[extra]
    distributions = installed_closure(wheel, extra)
    assert missing not in distributions
    python = environment(tmp_path / "env", wheel, distributions)
    for command in (
        f"{TRAIN.format(backend)} --save run",
        "plan --num-layers 4",
        f"sample run --backend {backend} --length 2",
        "info run",
        "curves run --output curves.png",
    ):
        done = run(python, ["-m", "parity.cli", *command.split()], tmp_path)
        assert done.returncode == 0, done.stderr
        assert "validation loss" in done.stdout or not command.startswith("train")
    assert EXAMPLES[extra]
    for example in EXAMPLES[extra]:
        done = run(python, ["-c", example], tmp_path)
        assert done.returncode == 0, done.stderr
    for command in (TRAIN.format(missing), f"sample run --backend {missing}", "compare", "locate a.py:f b.py:g"):
        refused = run(python, ["-m", "parity.cli", *command.split()], tmp_path)
        assert refused.returncode == 2, refused.stderr
        assert f"expected an installed framework for {missing!r}" in refused.stderr
        assert refused.stderr.strip().count("\n") == 0
    refused = run(python, ["-c", "from parity import compare_functions"], tmp_path)
    assert f"expected an installed framework for {missing!r}" in refused.stderr.splitlines()[-1]


@pytest.mark.timeout(600)
def test_the_extra_for_both_runs_a_small_demo_and_the_example(wheel, tmp_path):
    python = environment(tmp_path / "env", wheel, installed_closure(wheel, "all"))
    compared = run(python, ["-m", "parity.cli", "compare", *SMALL.split()], tmp_path)
    assert compared.returncode == 0, compared.stderr
    assert "equal within tolerance" in compared.stdout
    (example,) = EXAMPLES["all"]
    assert "expected a relative difference of at most" in run(python, ["-c", example], tmp_path).stdout


BESIDE = """
import importlib.util, sys
import kernels
assert hasattr(kernels, "get_kernel"), kernels  # the package that loads kernels from a hub
from transformers import Qwen3NextForCausalLM
import diptych.plans, diptych_kernels, parity
from reference_torch import GPTModel
from jax_impl import GPTModel
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("place", ["the wheel", "a checkout"])
def test_packages_of_other_projects_import_beside_ours(place, wheel, tmp_path):
    others = ("kernels", "transformers")
    if absent := [name for name in others if not _is_installed(name)]:
        pytest.skip(f"needs {' and '.join(absent)}: pip install {' '.join(absent)}")
    distributions = installed_closure(wheel, "all", others)
    python = environment(tmp_path / "env", wheel, distributions)
    done = run(python, ["-c", BESIDE], tmp_path if place == "the wheel" else ROOT)
    assert done.returncode == 0, done.stderr


def _is_installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True
