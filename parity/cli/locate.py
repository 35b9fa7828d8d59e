"""The command ``diptych locate``: loads two models from files of the user, and writes what locate finds."""

import base64
import contextlib
import html
import runpy
import sys
import tomllib
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from parity.cli.commands import Locate
from parity.location import Location, locate

PAGE = """<!doctype html>
<meta charset="utf-8">
<title>First difference</title>
<style>body {{ font: 15px system-ui, sans-serif; margin: 2em; max-width: 75em }} pre {{ overflow-x: auto }}</style>
<h1>First difference of two models</h1>
<p>{summary}</p>
<img alt="Differences along the depth of the models, forward and backward" src="data:image/png;base64,{picture}">
<pre>{table}</pre>
"""


def run_locate(command: Locate) -> Location:
    """Load both sides, compare them and write JSON, HTML and a figure into the output folder.

    Raises:
        ValueError: a side cannot be loaded, the names file is invalid, or the models cannot be compared.
    """
    from parity.location_figure import draw_location

    names, modules = (_read_names(flag, getattr(command, flag)) for flag in ("names", "modules"))
    with _causes(command.torch_side):
        side = _load(command.torch_side)()
    if not isinstance(side, tuple) or len(side) != 2:
        raise ValueError(f"torch_side: expected {command.torch_side} to return (module, inputs), got {_kind(side)}")
    module, inputs = side
    with _causes(command.jax_side):
        other = _load(command.jax_side)()
    with _causes(f"{command.torch_side}, {command.jax_side}"):
        location = locate(
            module,
            other,
            inputs,
            names=names,
            modules=modules,
            ignore=command.ignore,
            seed=command.seed,
            precision=command.precision,
            memory_limit=command.memory_limit,
        )
    command.output_dir.mkdir(parents=True, exist_ok=True)
    picture = command.output_dir / "location.png"
    draw_location(location, picture)
    (command.output_dir / "location.json").write_text(location.to_json())
    encoded = base64.b64encode(picture.read_bytes()).decode()
    page = PAGE.format(summary=html.escape(location.summary), picture=encoded, table=html.escape(str(location)))
    (command.output_dir / "location.html").write_text(page)
    return location


@contextlib.contextmanager
def _causes(sides: str) -> Iterator[None]:
    """Turn an error of the user's files into a ValueError that names the error and its line."""
    try:
        yield
    except (ValueError, MemoryError):
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        folders = {str(Path(side.strip().rpartition(":")[0]).parent.resolve()) for side in sides.split(",")}
        own = [frame for frame in frames if str(Path(frame.filename).resolve().parent) in folders]
        place = f" at {Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""
        first_line = (str(error) or "no message").splitlines()[0]
        raise ValueError(
            f"{sides}: expected models that load and run on the inputs, got {type(error).__name__}{place}: "
            f"{first_line}; run the file by itself to see the whole traceback"
        ) from error


def _load(side: str) -> Callable[[], Any]:
    """Return a function of a file, which may import files beside it.

    Raises:
        ValueError: there is no such file or function.
    """
    name, _, function = side.rpartition(":")
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"torch_side, jax_side: expected a Python file, got {name!r}, which does not exist")
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        found = runpy.run_path(str(path))
    finally:
        sys.path.pop(0)
    if not callable(found.get(function)):
        raise ValueError(f"torch_side, jax_side: expected a function {function!r} in {name}, got none")
    return found[function]


def _read_names(flag: str, path: Path | None) -> dict[str, Any] | None:
    """Return the mapping of a TOML file, or None without a file.

    Raises:
        ValueError: the file does not exist or is not TOML.
    """
    if path is None:
        return None
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{flag}: expected a TOML file of names, got {path}: {error}") from None


def _kind(value: Any) -> str:
    return f"{len(value)} values" if isinstance(value, tuple) else type(value).__name__
