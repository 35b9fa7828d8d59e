"""Settings from a TOML file, as command-line flags."""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from diptych.plans.text_files import one_line, read_text

FLAG = "--config"


def with_config_file(arguments: list[str]) -> list[str]:
    """Replace ``--config FILE`` by the settings of the file; explicit flags override them.

    A key is the name of a flag, with underscores or hyphens. Tables only group keys: ``[model] hidden_size = 64`` and
    ``hidden-size = 64`` are equivalent.

    Args:
        arguments: subcommand and flags.

    Raises:
        ValueError: no file is given, the file cannot be read or has a setting twice (in two tables, or with underscores
            and with hyphens), or a value is not a string, number, boolean or a list of them.
    """
    if FLAG not in arguments:
        return arguments
    place_of_flag = arguments.index(FLAG)
    if place_of_flag == 0 or place_of_flag + 1 == len(arguments):
        raise ValueError("config: expected a subcommand before --config and a TOML file after it")
    path = Path(arguments[place_of_flag + 1])
    try:
        found = list(_settings(tomllib.loads(read_text(path))))
    except RecursionError:
        raise ValueError(f"config: expected a TOML file in {path}, got one nested too deep to be read") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"config: expected a TOML file in {path}, got {one_line(error)}") from None
    places: dict[str, str] = {}
    for key, place, _ in found:
        name = key.replace("_", "-").removeprefix("no-")
        if name in places:
            raise ValueError(
                f"config: expected each setting once in {path}, got {places[name]} and {place}; keep one of them"
            )
        places[name] = place
    flags = [word for key, place, value in found for word in _flag(key, f"{place} in {path}", value)]
    return [arguments[0], *flags, *arguments[1:place_of_flag], *arguments[place_of_flag + 2 :]]


def _settings(table: dict[str, Any], tables: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield key, location in the file and value of every setting of a table and its nested tables."""
    for key, value in table.items():
        place = f"{tables}{key}"
        if isinstance(value, dict):
            yield from _settings(value, f"{place}.")
        else:
            yield key, place, value


def _flag(key: str, place: str, value: Any) -> list[str]:
    """Return a setting as command-line arguments.

    Raises:
        ValueError: the value has no form on the command line.
    """
    name = key.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(item, str | int | float) for item in values):
        raise ValueError(
            f"config: expected text, a number, true, false or a list of them for {place}, got {one_line(value)}"
        )
    try:
        return [f"--{name}", *map(str, values)]
    except ValueError:  # what was written in hexadecimal digits may be too long for decimal ones
        raise ValueError(f"config: expected a number of at most 4300 digits for {place}, got a longer one") from None
