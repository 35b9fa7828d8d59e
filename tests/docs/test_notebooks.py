"""Notebooks run top to bottom; their last cell asserts the headline number."""

import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.conftest import GIVEN

PATHS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
DAILY = ("00_start_here",)
"""What make test executes."""
LONGEST_CELL = 15
"""Lines of a code cell; longer code belongs to parity/notebooks."""
STYLE = re.compile(r"#[0-9a-fA-F]{6}\b|rcParams|color\w*=|cmap=")
"""What sets a colour or a style; both belong to parity/figures.py."""
NOTEBOOKS = [pytest.param(path, id=path.stem, marks=() if path.stem in DAILY else pytest.mark.slow) for path in PATHS]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_every_link_leads_somewhere(path):
    prose = "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown")
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        assert target.startswith("https://") or (path.parent / target).exists(), target


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_code_cells_are_short_and_set_no_style(path):
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            lines = cell.source.splitlines()
            assert len(lines) <= LONGEST_CELL, f"{cell.id}: expected at most {LONGEST_CELL} lines, got {len(lines)}"
            assert not STYLE.search(cell.source), f"{cell.id} sets {STYLE.search(cell.source)[0]!r}"


@pytest.mark.notebook
@pytest.mark.multiprocess
@pytest.mark.parametrize("path", NOTEBOOKS)
def test_notebook_runs(path, monkeypatch):
    for name, value in GIVEN.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(path.parent.parent), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(path, as_version=4)
    assert any(cell.cell_type == "code" and cell.outputs for cell in notebook.cells), "committed without outputs"
    assert "assert" in next(cell for cell in reversed(notebook.cells) if cell.cell_type == "code").source
    NotebookClient(notebook, timeout=240, kernel_name="python3").execute()
    streams = [
        output for cell in notebook.cells for output in cell.get("outputs", []) if output.get("name") == "stderr"
    ]
    assert not streams, streams
