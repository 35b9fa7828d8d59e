"""Output that all commands share."""

from pathlib import Path

from rich.console import Console


def print_written(console: Console, *paths: Path | str) -> None:
    """Print the names of written files on one line; names are printed as they are, without markup."""
    console.print(f"written: {', '.join(map(str, paths))}", markup=False, soft_wrap=True)
