"""What all commands print alike."""

from pathlib import Path

from rich.console import Console


def print_written(console: Console, *paths: Path | str) -> None:
    """Say which files were written, on one line, whatever characters their names have."""
    console.print(f"written: {', '.join(map(str, paths))}", markup=False, soft_wrap=True)
