"""A process with several JAX devices that runs jobs for a fuzzer.

JAX fixes its number of devices on its first use, so they need a process of their own. ``python -m
tests.fuzz.jax_child`` reads pickled jobs from standard input and writes pickled results.
"""

import importlib
import os
import pickle
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

DEVICES = 4
"""JAX devices that the process has."""


class JaxChild:
    """A process with several JAX devices that runs one job after another."""

    def __init__(self) -> None:
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
        command = [sys.executable, "-m", "tests.fuzz.jax_child"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, cwd=Path(__file__).parents[2]
        )

    def run(self, job: str, argument: Any) -> Any:
        """Call a function there.

        Args:
            job: name of the function, as ``package.module:function``.
            argument: its argument, which is pickled.

        Raises:
            RuntimeError: if it fails, with the traceback of the child.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump((job, argument), self._process.stdin)
        self._process.stdin.flush()
        succeeded, value = pickle.load(self._process.stdout)
        if not succeeded:
            raise RuntimeError(value)
        return value

    def is_running(self) -> bool:
        """Return True if the process runs."""
        return self._process.poll() is None


_children: list[JaxChild] = []


def run_in_child(job: str, argument: Any) -> Any:
    """Call a function in the one child of this process, which starts on the first call and after it has ended."""
    if not _children or not _children[-1].is_running():
        _children[:] = [JaxChild()]
    return _children[-1].run(job, argument)


def _serve() -> None:
    """Run jobs until standard input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keeps other output apart from the answers
    from diptych.plans.model.implementation import callback_threads

    os.environ["NPROC"] = str(callback_threads(DEVICES))
    import jax

    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    while True:
        try:
            job, argument = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            module, name = job.split(":")
            answer = True, getattr(importlib.import_module(module), name)(argument)
        except Exception as error:
            answer = False, "".join(traceback.format_exception(error))
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    _serve()
