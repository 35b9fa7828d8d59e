"""Settings from a TOML file, as command-line flags."""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FLAG = "--config"


def with_config_file(arguments: list[str]) -> list[str]:
    """Replace ``--config FILE`` by the file's settings, placed so that flags given beside it win.

    A key is a flag's name, with underscores or hyphens; tables only group: ``[model] hidden_size = 64`` and
    ``hidden-size = 64`` say the same.

    Args:
        arguments: subcommand and flags.

    Raises:
        ValueError: no file is named, it cannot be read, or a value is not text, number, truth value or a list.
    """
    if FLAG not in arguments:
        return arguments
    place = arguments.index(FLAG)
    if place == 0 or place + 1 == len(arguments):
        raise ValueError("config: expected a subcommand before --config and a TOML file after it")
    path = Path(arguments[place + 1])
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"config: expected a TOML file in {path}, got {error}") from None
    return [arguments[0], *_flags(content), *arguments[1:place], *arguments[place + 2 :]]


def _flags(table: dict[str, Any]) -> Iterator[str]:
    for key, value in table.items():
        name = key.replace("_", "-")
        if isinstance(value, dict):
            yield from _flags(value)
        elif isinstance(value, bool):
            yield f"--{name}" if value else f"--no-{name}"
        elif isinstance(value, str | int | float):
            yield from (f"--{name}", str(value))
        elif isinstance(value, list) and all(isinstance(item, str | int | float) for item in value):
            yield from (f"--{name}", *map(str, value))
        else:
            raise ValueError(f"config: expected text, a number, true, false or a list of them for {key}, got {value!r}")
