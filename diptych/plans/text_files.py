"""Safe reading of text files and JSON from untrusted sources."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LARGEST = 64 * 2**20
"""Maximum size of a text file in bytes."""
PART = 2**20
"""Bytes that are read at once."""


def read_text(path: str | Path, largest: int = LARGEST) -> str:
    """Read a text file in UTF-8, with or without a byte order mark.

    Raises:
        ValueError: the file exceeds ``largest`` bytes (a device or pipe may be endless) or is not UTF-8.
        OSError: the file cannot be read.
    """
    content = bytearray()
    with Path(path).open("rb") as file:
        while part := file.read(PART):
            content += part
            if len(content) > largest:
                raise ValueError(f"more than {largest:,} bytes")
    return content.decode("utf-8-sig")


def parse_json(text: str) -> Any:
    """Parse JSON without repeated keys; NaN and Infinity are accepted.

    Raises:
        ValueError: the text is not JSON, repeats a key, is nested too deeply, or has a number with too many digits.
    """
    try:
        return json.loads(text, object_pairs_hook=_once)
    except RecursionError:
        raise ValueError("values nested too deep to be read") from None


def one_line(value: Any, longest: int = 200, quotes: bool = True) -> str:
    """Return the beginning of a value's text on one line, for an error message.

    Args:
        value: any value.
        longest: number of characters after which the text is cut.
        quotes: False: a printable text is written without quotes.
    """
    try:
        is_plain = isinstance(value, str) and not quotes and value.isprintable()
        text = str(value) if isinstance(value, Exception) or is_plain else repr(value)
    except (RecursionError, ValueError):  # nested too deep, or an integer of too many digits
        text = f"a {type(value).__name__} too large to print"
    text = " ".join(text.split())
    return text if len(text) <= longest else f"{text[:longest]}..."


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        double = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"{one_line(double)} twice")
    return found
