"""Choice of ptxas, the assembler of compiled kernels, on Hopper GPUs (compute capability 9).

ptxas 12.8 miscompiles kernels with several asynchronous matrix products (wgmma): on an H100, the scans of the delta
rule in bfloat16 returned wrong results or read outside their memory. The same PTX assembled by ptxas 13.0 passes the
tests. Triton 3.6 and 3.7 contain ptxas 12.8 and use it for Hopper. The release notes of CUDA 13.3 describe an error of
this kind: https://docs.nvidia.com/cuda/archive/13.3.0/cuda-toolkit-release-notes.

This module therefore searches for the newest ptxas and compiles launches with matrix products by it. Versions before
13.0 are refused; those between 12.8 and 13.0 were not tried. Kernels of other libraries are not affected.
"""

import glob
import importlib.util
import logging
import os
import re
import shutil
import threading
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import NamedTuple

from diptych_kernels.launch_configs import Launch

logger = logging.getLogger(__name__)
HOPPER = 9
"""Major compute capability of the GPUs whose matrix products ptxas 12.8 miscompiles."""
FIRST_CORRECT = (13, 0)
"""Oldest version of ptxas with which the kernels passed their tests."""

_VARIABLES = ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH")
"""Environment variables by which a user gives Triton an assembler."""

_KNOBS = ("ptxas", "ptxas_blackwell")
"""Triton's settings of the assembler; Triton 3.6 uses the first on Hopper, and Triton 3.9 the second."""


class Assembler(NamedTuple):
    """A ptxas.

    Args:
        version: major and minor version.
        path: path of the program.
    """

    version: tuple[int, int]
    path: str


def for_launch(launch: Launch, capability: tuple[int, int]) -> AbstractContextManager[None]:
    """Return a context in which Triton compiles a launch correctly.

    Args:
        launch: the launch.
        capability: compute capability of its GPU.

    Raises:
        RuntimeError: the launch has matrix products, the GPU is a Hopper GPU, and every ptxas found is too old.
    """
    if capability[0] != HOPPER or not _has_products(launch):
        return nullcontext()
    newest = find_newest()
    if newest.version < FIRST_CORRECT:
        raise RuntimeError(
            f"{launch.kernel}: expected ptxas {FIRST_CORRECT[0]}.{FIRST_CORRECT[1]} or later, because older ones "
            f"miscompile matrix products on Hopper GPUs, got {newest.version[0]}.{newest.version[1]} at {newest.path}; "
            "pip install 'nvidia-cuda-nvcc>=13.3', or set TRITON_PTXAS_PATH, or choose impl='reference'"
        )
    return _context(newest.path)


def check_plugin(launch: Launch, platform_version: str, capability: str) -> None:
    """Reject a launch that XLA would assemble wrongly; XLA uses the ptxas of the CUDA version of JAX's plugin.

    Args:
        launch: the launch.
        platform_version: description of the plugin, such as ``cuda 13000``.
        capability: compute capability of the GPU, such as ``9.0``.

    Raises:
        RuntimeError: the launch has matrix products, the GPU is a Hopper GPU, and the plugin's CUDA is too old.
    """
    found = re.search(r"cuda (\d+)", platform_version)
    if found is None or not capability.startswith(f"{HOPPER}.") or not _has_products(launch):
        return
    version = int(found[1]) // 1000, int(found[1]) % 1000 // 10
    if version < FIRST_CORRECT:
        raise RuntimeError(
            f"{launch.kernel}: expected JAX's plugin for CUDA {FIRST_CORRECT[0]}, because older ones miscompile matrix "
            f"products on Hopper GPUs, got CUDA {version[0]}.{version[1]}; pip install 'jax[cuda13]', or choose "
            "impl='reference'"
        )


def _has_products(launch: Launch) -> bool:
    """Return True if the kernel multiplies matrices."""
    return "PRECISION" in dict(launch.constants)


@cache
def find_newest() -> Assembler:
    """Return the newest ptxas, among those of Triton's environment variables if one is set.

    Raises:
        RuntimeError: no ptxas runs.
    """
    given = [path for name in _VARIABLES if (path := os.environ.get(name))]
    found = [assembler for path in (given or _candidates()) if (assembler := _assembler_at(path)) is not None]
    if not found and given:
        names = ", ".join(name for name in _VARIABLES if os.environ.get(name))
        raise RuntimeError(
            f"{names}: expected a ptxas that runs, got {', '.join(given)}; correct or unset the variable"
        )
    if not found:
        raise RuntimeError("expected a ptxas that runs, got none at the usual places; reinstall triton")
    newest = max(found)
    logger.info("%s assembles matrix products", newest)
    return newest


def _assembler_at(path: str) -> Assembler | None:
    """Return the ptxas at a path, or None if no program there runs and tells its version."""
    from triton.knobs import NvidiaTool

    try:
        tool = NvidiaTool.from_path(path)
        return None if tool is None else Assembler(_version(tool.version), tool.path)
    except (OSError, ValueError):  # not executable, made for another machine, or another text than a version
        return None


def _candidates() -> list[str]:
    """Return paths of programs that may be a ptxas: Triton's own, NVIDIA's Python packages, and the CUDA toolkit's."""
    triton = importlib.util.find_spec("triton")
    nvidia = importlib.util.find_spec("nvidia")
    bundled = [f"{glob.escape(place)}/backends/nvidia/bin/ptxas*" for place in _places(triton)]
    packages = [f"{glob.escape(place)}/*/bin/ptxas" for place in _places(nvidia)]
    toolkit = Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda") / "bin" / "ptxas"
    on_path = shutil.which("ptxas")
    found = [path for pattern in (*bundled, *packages) for path in sorted(glob.glob(pattern))]
    return [*found, *([on_path] if on_path else []), *([str(toolkit)] if toolkit.exists() else [])]


def _places(spec: object) -> list[str]:
    """Return the folders of a package that may be missing."""
    return list(getattr(spec, "submodule_search_locations", None) or ())


def _version(text: str) -> tuple[int, int]:
    """Return a version such as 13.0 as two integers."""
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


class _Context:
    """A context in which Triton assembles with a ptxas, entered by several threads at once.

    The first thread that enters changes Triton's settings, and the last one that leaves restores them. They are changed
    in place, because an assignment to a knob also sets an environment variable. Triton remembers the version of the
    assembler, which is part of the key of its cache of compiled kernels, and forgets it here.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._inside = 0
        self._before: dict[str, str] = {}

    def __enter__(self) -> None:
        from triton import knobs
        from triton.backends.nvidia import compiler

        with self._lock:
            self._inside += 1
            if self._inside == 1:
                settings = vars(knobs.nvidia)
                self._before = {name: settings[name] for name in _KNOBS if name in settings}
                settings.update(dict.fromkeys(_KNOBS, self._path))
                compiler.get_ptxas_version.cache_clear()

    def __exit__(self, *error: object) -> None:
        from triton import knobs
        from triton.backends.nvidia import compiler

        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                settings = vars(knobs.nvidia)
                for name in _KNOBS:
                    del settings[name]
                settings.update(self._before)
                compiler.get_ptxas_version.cache_clear()


@cache
def _context(path: str) -> _Context:
    """Return the context of a ptxas."""
    return _Context(path)
