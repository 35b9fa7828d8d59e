"""The tables of docs/everywhere.md: techniques by surroundings."""

from collections.abc import Callable, Sequence
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "everywhere.md"


def write_table(techniques: Sequence[str], surroundings: Sequence[str], cell: Callable[[str, str], str]) -> str:
    """Return a table in Markdown.

    Args:
        techniques: names of the columns.
        surroundings: names of the rows.
        cell: returns the text of a cell, given its technique and its surroundings.
    """
    lines = ["| |" + "".join(f" `{name}` |" for name in techniques), "|---|" + "---|" * len(techniques)]
    for row in surroundings:
        lines.append(f"| {row} | " + " | ".join(cell(technique, row) for technique in techniques) + " |")
    return "\n".join(lines) + "\n"


def limit_in_words(limit: float) -> str:
    """Return a largest difference as the table writes it."""
    return f"{limit:.0e}".replace("e-0", "e-") if limit else "bitwise"


def update(page: str, command: str, table: str) -> str:
    """Return a page with a table in the place that the command marks."""
    begin = f"<!-- table: {command} -->\n"
    end = "<!-- end of table -->\n"
    before, rest = page.split(begin)
    return before + begin + table + end + rest.split(end, 1)[1]
