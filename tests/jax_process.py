"""Cases that need several devices, whose number JAX fixes on its first use: they run in a process of their own."""

import subprocess
import sys
from pathlib import Path

from hypothesis import settings

ROOT = Path(__file__).parent.parent


def run_cases(marked: str, seconds: int, *paths: str) -> None:
    """All cases of some files that have a mark; their failures are shown here."""
    profile = f"--hypothesis-profile={settings.get_current_profile_name()}"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", profile, *paths, "-m", marked]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
    assert " passed" in done.stdout
