"""Text files and JSON that others may have written: read whole or refused, whatever is in them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LARGEST = 64 * 2**20
"""Bytes of a text file that is read."""


def read_text(path: str | Path, largest: int = LARGEST) -> str:
    """Read a text file in UTF-8, with or without a byte order mark.

    Raises:
        ValueError: it is larger than ``largest`` bytes, which a device or pipe may be without end, or is not UTF-8.
        OSError: it cannot be read.
    """
    with Path(path).open("rb") as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise ValueError(f"more than {largest:,} bytes")
    return content.decode("utf-8-sig")


def parse_json(text: str) -> Any:
    """Parse JSON in which no object has a key twice. NaN and Infinity are numbers, as Python writes them.

    Raises:
        ValueError: it is not, is nested too deep, or has a number of more digits than Python reads.
    """
    try:
        return json.loads(text, object_pairs_hook=_once)
    except RecursionError:
        raise ValueError("values nested too deep to be read") from None


def one_line(value: Any, longest: int = 200) -> str:
    """Return a value's text for an error message: its beginning, on one line."""
    try:
        text = str(value) if isinstance(value, Exception) else repr(value)
    except (RecursionError, ValueError):  # nested too deep, or an integer of too many digits
        text = f"a {type(value).__name__} too large to be shown"
    text = " ".join(text.split())
    return text if len(text) <= longest else f"{text[:longest]}..."


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        double = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"{one_line(double)} twice")
    return found
