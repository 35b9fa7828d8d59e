"""The pages in docs/, and how what they show is run."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {path.name: path.read_text() for path in sorted(DOCS.glob("*.md"))}
PROSE = {page: re.sub(r"```.*?```", "", text, flags=re.DOTALL) for page, text in PAGES.items()}
"""Without programs."""


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
