"""The pages in docs/ and docs/history/, and a function that runs the programs they show."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {str(path.relative_to(DOCS)): path.read_text() for path in sorted(DOCS.rglob("*.md"))}
"""Text of each page, by its path in docs/."""
PROSE = {page: re.sub(r"```.*?```", "", text, flags=re.DOTALL) for page, text in PAGES.items()}
"""Text of each page without its code blocks."""


def run(arguments: list[str], folder: Path, timeout: float = 280) -> str:
    """Run a fresh process with this repository's packages first on the path, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "kernels")))},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
