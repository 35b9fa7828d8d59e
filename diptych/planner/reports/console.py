"""Output that all commands share."""

from collections.abc import Collection, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table


def print_written(console: Console, *paths: Path | str) -> None:
    """Print the names of written files on one line; names are printed as they are, without markup."""
    console.print(f"written: {', '.join(map(str, paths))}", markup=False, soft_wrap=True)


def new_table(
    title: str, headings: Sequence[str], left: Collection[str] = ("",), no_wrap: Collection[str] = ()
) -> Table:
    """Return an empty table without borders, with its title on the left.

    Args:
        title: line above the table.
        headings: headings of the columns.
        left: headings of the columns that are aligned to the left; the others are aligned to the right.
        no_wrap: headings of the columns whose cells are not wrapped.
    """
    table = Table(box=None, title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right", no_wrap=heading in no_wrap)
    return table
