"""Test that links on the pages in docs/ have targets and that names in backticks exist in the code."""

import importlib
import re
import runpy
from dataclasses import fields
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import nbformat
import pytest

from diptych.plans.config import DataConfig, TrainConfig, TransformerConfig
from parity.cli.commands import Compare, Plan, Sample, Train
from tests.docs.pages import DOCS, PAGES, PROSE, ROOT

CHECKED = (
    "README.md",
    "architecture.md",
    "concepts.md",
    "extending.md",
    "find.md",
    "hardware.md",
    "history/errata.md",
    "hyper_connections.md",
)
"""Pages in which every name in backticks is looked up."""
PACKAGES = ("diptych", "diptych_kernels", "reference_torch", "jax_impl", "parity")
FOLDERS = ("diptych", "kernels", "reference_torch", "jax_impl", "parity")
BACKENDS = ("reference_torch", "jax_impl")
SETTINGS = (TransformerConfig, TrainConfig, DataConfig, Compare, Plan, Sample, Train)


def slugs(text: str) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", PROSE[page]):
        path, _, anchor = target.partition("#")
        if path.startswith("https://"):
            continue
        there = ((DOCS / page).parent / path).resolve() if path else DOCS / page
        assert there.exists(), target
        assert not anchor or anchor in slugs(there.read_text()), target


def test_the_index_names_every_page():
    linked = re.findall(r"^\| \[\w+\]\(([\w/]+\.md)\) \|", PAGES["README.md"], re.MULTILINE)
    assert sorted([*linked, "README.md"]) == [*sorted(PAGES)]
    notebooks = {path.name for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert notebooks == set(re.findall(r"notebooks/(\w+\.ipynb)", PAGES["README.md"]))


def test_the_site_has_every_page():
    contents = runpy.run_path(str(DOCS / "generate/site/conf.py"))["_TABLES_OF_CONTENTS"]
    patterns = [f"{pattern}.md" for patterns in contents.values() for pattern in patterns]
    assert [page for page in PAGES if not any(fnmatch(f"docs/{page}", pattern) for pattern in patterns)] == []


def names_of(page: str) -> list[tuple[str, tuple[str, ...]]]:
    """Return the names in backticks outside code blocks, each with the packages it may be relative to."""
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
    """Return all code as one text, in which single words are looked up."""
    files = [path for package in (*FOLDERS, "tests", "benchmarks") for path in (ROOT / package).rglob("*.py")]
    return "\n".join(path.read_text() for path in [*files, ROOT / "pyproject.toml"] if path != Path(__file__))


def is_path(name: str) -> bool:
    """Return True if the name looks like the path of a file or folder."""
    return re.fullmatch(r"[\w./-]+/|[\w./-]+\.(py|md|ipynb|json|toml|png)", name) is not None


def attribute(name: str) -> object:
    """Return the object that a dotted name refers to.

    Raises:
        AttributeError, ModuleNotFoundError: the name refers to nothing.
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
    """Return True if a name in backticks is a file, an attribute of a module, an option, or a word of the code."""
    if is_path(name):
        return (ROOT / name).exists() or all((ROOT / root / name).exists() for root in roots)
    if re.fullmatch(r"--[\w-]+( \w+)?", name):
        option = name.split()[0].removeprefix("--").removeprefix("no-").replace("-", "_")
        return option in {field.name for settings in SETTINGS for field in fields(settings)}
    if re.fullmatch(r"[A-Za-z_]\w*(\.\w+)+", name):
        known = name.split(".")[0] in (*PACKAGES, "benchmarks", "jax", "lax", "torch", "optax", "triton")
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
    assert page == "README.md" or len(names) >= 5
    missing = [name for name, roots in names if name != ".data" and not means_something(name, roots)]
    assert not missing


NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_name_in_a_notebook_exists(path):
    cells = nbformat.read(path, as_version=4).cells
    own = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    prose = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    names = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", prose, flags=re.DOTALL))
    names = [re.sub(r"^tl\.", "triton.language.", name) for name in names if not name.startswith("ld.")]  # PTX
    roots = [BACKENDS, *((package,) for package in PACKAGES)]
    missing = [n for n in names if not any(means_something(n, root) for root in roots)]
    assert not [n for n in missing if not re.search(rf"\b{re.escape(n)}\b", own)]


def test_names_that_do_not_exist_are_seen():
    for name in (
        "diptych/plans/nothing.py",
        "train.Trainer.nothing",
        "diptych.plans.schedule.named.nothing",
        "--nothing",
        "nothing_like_it",
    ):
        assert not means_something(name, BACKENDS), name
    assert not means_something("stage.py", BACKENDS), "JAX has none"
    assert means_something("stage.forward_step", BACKENDS[:1])
