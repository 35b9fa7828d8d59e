"""Which of a kernel's blocks is used: measured once per device and shape, kept in a file both doors read.

The file is ``blocks.json`` in the directory DIPTYCH_CACHE_DIR, by default ``~/.cache/diptych``. The key holds the
device, Triton's version, the kernel, its types and constants, and not the number of tokens. The interpreter and
compilation ahead of time use the first candidate and measure nothing; so does everything if DIPTYCH_TUNE is 0.
"""

import importlib
import json
import logging
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from kernels.launch import CANDIDATES, Block, Launch

logger = logging.getLogger(__name__)


def kernel_function(name: str) -> Any:
    """The jitted function ``module.function`` of this package."""
    module, function = name.split(".")
    return getattr(importlib.import_module(f"kernels.{module}"), function)


def first(build: Callable[..., Launch]) -> Block:
    """The block used where nothing is measured."""
    return CANDIDATES[build.__name__][0]


def choose(
    build: Callable[..., Launch], sizes: dict[str, Any], device: str, measure: Callable[[Launch], float]
) -> Block:
    """The fastest candidate, from the file if it was measured before.

    Args:
        build: a function of kernels.launch.
        sizes: its arguments besides the block.
        device: name of the device.
        measure: time of a launch in any unit. A candidate that raises, for want of shared memory say, is passed over.

    Raises:
        RuntimeError: no candidate runs.
    """
    candidates = CANDIDATES[build.__name__]
    if len(candidates) == 1 or os.environ.get("DIPTYCH_TUNE") == "0":
        return candidates[0]
    key, path = _key(build(candidates[0], **sizes), device), _path()
    table = _table(path)
    if key not in table:
        table.update(_read(path))
    if key not in table:
        table[key] = _fastest(build, sizes, candidates, measure)
        _write(path, {**_read(path), key: table[key]})
    return table[key]


def _fastest(
    build: Callable[..., Launch],
    sizes: dict[str, Any],
    candidates: tuple[Block, ...],
    measure: Callable[[Launch], float],
) -> Block:
    times, failures = {}, []
    for block in candidates:
        try:
            times[block] = measure(build(block, **sizes))
        except Exception as error:  # compilers and drivers raise what they like
            failures.append(f"{block}: {error}")
    if not times:
        raise RuntimeError(f"{build.__name__}: none of its blocks runs on this device: " + "; ".join(failures))
    best = min(times, key=times.__getitem__)
    logger.info("%s %s: %s of %s", build.__name__, sizes, best, times)
    return best


def _key(launch: Launch, device: str) -> str:
    import triton

    return json.dumps([device, triton.__version__, *launch.compiled_as])


def _path() -> Path:
    return Path(os.environ.get("DIPTYCH_CACHE_DIR") or Path.home() / ".cache" / "diptych") / "blocks.json"


@cache
def _table(path: Path) -> dict[str, Block]:
    """What this process knows; the file is read again only for a key that is not here."""
    return {}


def _read(path: Path) -> dict[str, Block]:
    try:
        return {key: Block(*block) for key, block in json.loads(path.read_text()).items()}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, AttributeError) as error:
        logger.warning("%s is no table of blocks (%s): measuring again", path, error)
        return {}


def _write(path: Path, table: dict[str, Block]) -> None:
    """Whole or not at all: other processes may read at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
        json.dump(table, file, indent=1, sort_keys=True)
    os.replace(file.name, path)
