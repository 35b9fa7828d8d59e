"""Choice of a kernel's block, measured once per device and shape and stored in a file that both backends read.

The file is ``blocks.json`` in the directory DIPTYCH_CACHE_DIR, by default ``~/.cache/diptych``. The key contains the
device, Triton's version, the kernel, the types of its outputs, its constants and ``Launch.tuned_for``, but not the
number of tokens. If several processes measure, all use the first stored result. The interpreter and compilation ahead
of time use the first candidate without measurements, and DIPTYCH_TUNE=0 does so everywhere.

Sums may round differently in another block. For bitwise equal results on every machine, copy the file or set
DIPTYCH_TUNE=0.
"""

import fcntl
import importlib
import json
import logging
import math
import os
import sys
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from diptych_kernels.launch_configs import Block, Launch

logger = logging.getLogger(__name__)
MEASURED_TOKENS = 2048
"""Smallest number of tokens of a launch that is measured."""


def kernel_function(name: str) -> Any:
    """Return the jitted function ``module.function`` of this package."""
    module, function = name.rsplit(".", 1)
    return getattr(importlib.import_module(f"diptych_kernels.{module}"), function)


def candidates_of(build: Callable[..., Launch]) -> tuple[Block, ...]:
    """Return the candidate blocks of a launch."""
    return sys.modules[build.__module__].CANDIDATES[build.__name__]


def first(build: Callable[..., Launch]) -> Block:
    """Return the default block of a launch, which is used without measurements."""
    return candidates_of(build)[0]


def choose(
    build: Callable[..., Launch], sizes: dict[str, Any], device: str, measure: Callable[[Launch], float] | None
) -> Block:
    """Return the fastest candidate block, from the cache file if it was measured before.

    Launches of fewer than MEASURED_TOKENS tokens are not measured, because larger launches share their cache entry.
    They use the cached block or the first candidate.

    Args:
        build: a function of diptych_kernels.launch_configs.
        sizes: its arguments besides the block.
        device: name of the device.
        measure: function that returns the time of a launch in seconds. Candidates that raise are skipped. None while
            nothing can be measured, as during the capture of a CUDA graph.

    Raises:
        RuntimeError: no candidate runs on the device; the message has the error of each.
        ImportError: a package that launches need is not installed.
    """
    candidates = candidates_of(build)
    if len(candidates) == 1 or os.environ.get("DIPTYCH_TUNE") == "0":
        return candidates[0]
    key = _key(built_launch(build, candidates[0], sizes), device)
    path = _path()
    table = _table(path)
    is_measured = measure is not None and math.prod(sizes.get("lead", ())) >= MEASURED_TOKENS
    if key not in table or (is_measured and table[key] not in candidates):
        table.update({key: None} | _read(path))
    block = table[key]
    if block is not None and block in candidates:
        return block
    fastest = _fastest(build, sizes, candidates, measure) if measure is not None and is_measured else None
    if fastest is None:
        return candidates[0]
    block = table[key] = _store(path, key, fastest, candidates)
    return block


def built_launch(build: Callable[..., Launch], block: Block, sizes: dict[str, Any]) -> Launch:
    """Return ``build(block, **sizes)``; launches that were built before are remembered."""
    return _built(build, block, tuple(sizes.items()))


@lru_cache(maxsize=4096)
def _built(build: Callable[..., Launch], block: Block, sizes: tuple[tuple[str, Any], ...]) -> Launch:
    """Build a launch."""
    return build(block, **dict(sizes))


def _fastest(
    build: Callable[..., Launch],
    sizes: dict[str, Any],
    candidates: tuple[Block, ...],
    measure: Callable[[Launch], float],
) -> Block | None:
    """Return the fastest candidate; None if a measurement runs out of memory."""
    times = {}
    failures = []
    for block in candidates:
        try:
            times[block] = measure(build(block, **sizes))
        except ImportError:
            raise
        except Exception as error:  # compilers and drivers raise exceptions of any type
            if "OutOfMemory" in type(error).__name__ or "RESOURCE_EXHAUSTED" in str(error):
                return None
            failures.append(f"{block}: {error}")
    if not times:
        raise RuntimeError(
            f"{build.__name__}: expected a block that runs on this device, got errors of all: {'; '.join(failures)}; "
            "give impl='reference' to compute without kernels"
        )
    best = min(times, key=times.__getitem__)
    logger.info("%s %s: %s of %s (seconds)", build.__name__, sizes, best, times)
    return best


@lru_cache(maxsize=4096)
def _key(launch: Launch, device: str) -> str:
    """Return the key of a launch in the cache file."""
    import triton

    return json.dumps([device, triton.__version__, _source_of(launch.kernel), *launch.compiled_as, launch.tuned_for])


@cache
def _source_of(kernel: str) -> str:
    """Return a digest of a kernel and of the functions that it calls, because other code has another fastest block."""
    return kernel_function(kernel).cache_key[:16]


def _path() -> Path | None:
    """Return the path of the cache file; None without a home directory."""
    return _path_in(os.environ.get("DIPTYCH_CACHE_DIR"), os.environ.get("HOME"))


@cache
def _path_in(folder: str | None, home: str | None) -> Path | None:
    """Return the path of the cache file with these values of DIPTYCH_CACHE_DIR and HOME."""
    del home
    try:
        return Path(folder or "~/.cache/diptych").expanduser() / "blocks.json"
    except RuntimeError:
        return None


@cache
def _table(path: Path | None) -> dict[str, Block | None]:
    """Return this process's cache, with None for keys that the file lacks.

    The file is read again only for new keys and before measurements.
    """
    del path
    return {}


def _read(path: Path | None) -> dict[str, Block]:
    """Return the blocks in the cache file; those that are not four whole numbers are left out."""
    entries = _entries(path).items()
    return {key: Block(*block) for key, block in entries if isinstance(block, list) and _is_block(block)}


def _is_block(numbers: list[Any]) -> bool:
    """Return True for as many whole numbers as a block has parameters."""
    return len(numbers) == len(Block._fields) and all(type(number) is int for number in numbers)


def _entries(path: Path | None) -> dict[str, Any]:
    """Return the contents of the cache file; an empty table if it is missing or unreadable."""
    if path is None:
        return {}
    try:
        return dict(json.loads(path.read_text()).items())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        logger.warning("%s is no table of blocks (%s): measuring again", path, error)
        return {}


def _store(path: Path | None, key: str, block: Block, candidates: tuple[Block, ...]) -> Block:
    """Store a block in the file and return it, or return the block that another process stored before.

    The file is replaced atomically, so that it can be read at any time.
    """
    if path is None:
        return block
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            stored = _read(path).get(key)
            if stored is not None and stored in candidates:
                return stored
            partial = path.with_suffix(f".{os.getpid()}.partial")
            partial.write_text(json.dumps({**_entries(path), key: block}, indent=1, sort_keys=True))
            os.replace(partial, path)
    except OSError as error:
        logger.warning("%s cannot be written (%s): every process measures for itself", path, error)
    return block
