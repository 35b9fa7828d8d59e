"""Tables of rich as plain text, equal on a terminal, in a file and in a notebook."""

import io

from rich.console import Console
from rich.table import Table


def table_text(table: Table, width: int = 200) -> str:
    """Return a table without styles and trailing spaces.

    Args:
        table: the table.
        width: columns of text; longer lines are cut.
    """
    console = Console(
        file=io.StringIO(), width=width, highlight=False, force_jupyter=False, force_terminal=False, color_system=None
    )
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())
