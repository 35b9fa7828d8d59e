"""A pool of gloo ranks on this machine: processes that stay, and run one function after another on all ranks.

For tests, measurements and comparisons: a fork server that has loaded PyTorch once starts four ranks in a fraction of
a second. What a rank raises, that it died, and that it does not answer all reach the caller as an error; no rank
outlives the pool, nor the process that made it.
"""

import contextlib
import datetime
import importlib
import multiprocessing
import os
import tempfile
import threading
import time
import traceback
from multiprocessing.connection import Connection, wait
from typing import Any

GRACE = 2.0
"""Seconds the other ranks get to answer after the first error."""


class RankError(RuntimeError):
    """Some rank failed; the message has what each of them said."""


class RankPool:
    """Ranks of a process group, started at the first call.

    Args:
        size: number of ranks.
        timeout: seconds a call may take, and a collective within it.
        preload: modules the fork server loads once for all ranks.
    """

    def __init__(self, size: int, timeout: float = 60.0, preload: tuple[str, ...] = ("torch.distributed",)) -> None:
        self.size, self.timeout, self._preload = size, timeout, preload
        self._ranks: list[_Rank] = []
        self._folder: tempfile.TemporaryDirectory | None = None

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def run(self, function: str, *args: Any, timeout: float | None = None) -> list[Any]:
        """Call a function on every rank.

        Args:
            function: ``package.module:name``, imported on each rank; what it takes and returns is pickled.
            args: given to every rank.
            timeout: seconds; None: the pool's.

        Returns:
            What it returned, by rank.

        Raises:
            RankError: a rank raised, died or did not answer in time. After this or any other error all ranks are gone;
                the next call starts new ones.
        """
        return self._send(("run", function, args), timeout)

    def hold(self, function: str, *args: Any, timeout: float | None = None) -> None:
        """As run, but every rank keeps what the function returned; ``call`` uses it."""
        self._send(("hold", function, args), timeout)

    def call(self, method: str, *args: Any, timeout: float | None = None) -> list[Any]:
        """Call a method of what every rank holds. Arguments, result and errors as run's."""
        return self._send(("call", method, args), timeout)

    def process_ids(self) -> list[int]:
        """Of the ranks, for tests that kill one."""
        return [rank.process.pid or 0 for rank in self._ranks]

    def close(self) -> None:
        """End every rank."""
        for rank in self._ranks:
            rank.end()
        self._ranks = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _send(self, job: tuple[str, str, tuple], timeout: float | None) -> list[Any]:
        try:
            if not self._ranks:
                self._start()
            for rank in self._ranks:
                with contextlib.suppress(BrokenPipeError):  # it is gone, as its missing answer will tell
                    rank.jobs.send(job)
            return self._collect(timeout or self.timeout)
        except BaseException:  # whatever it is: an answer that nobody read would be taken for the next call's
            self.close()
            raise

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(self._preload))
        self._folder = tempfile.TemporaryDirectory()
        store = f"{self._folder.name}/store"
        self._ranks = [_Rank(context, rank, self.size, store, self.timeout) for rank in range(self.size)]
        self._collect(self.timeout)

    def _collect(self, timeout: float) -> list[Any]:
        answers: dict[int, Any] = {}
        errors: dict[int, str] = {}
        waiting = {rank.jobs: number for number, rank in enumerate(self._ranks)}
        end = time.monotonic() + timeout
        while waiting and (ready := wait([*waiting], max(0.0, end - time.monotonic()))):
            for connection in ready:
                number = waiting.pop(connection)  # pyright: ignore[reportArgumentType]
                answered, value = self._ranks[number].answer()
                (answers if answered else errors)[number] = value
                if not answered:  # the others may wait for this rank for ever
                    end = min(end, time.monotonic() + GRACE)
        if errors or waiting:
            for number in waiting.values():
                errors[number] = f"rank {number}: no answer" + ("" if len(errors) else f" in {timeout:g} s")
            raise RankError("\n".join(errors[number] for number in sorted(errors)))
        return [answers[number] for number in range(self.size)]


class _Rank:
    """One process, and the two pipes to it: jobs and answers, and one that breaks when the parent is gone."""

    def __init__(self, context: Any, rank: int, size: int, store: str, timeout: float) -> None:
        self.number = rank
        self.jobs, theirs = context.Pipe()
        watched, self._life = context.Pipe(duplex=False)
        self.process = context.Process(target=_serve, args=(rank, size, store, theirs, watched, timeout), daemon=True)
        self.process.start()
        theirs.close()
        watched.close()

    def answer(self) -> tuple[bool, Any]:
        """(True, what the function returned), or (False, what went wrong)."""
        try:
            return self.jobs.recv()
        except (EOFError, ConnectionResetError):
            self.process.join(GRACE)
            return False, f"rank {self.number}: died with exit code {self.process.exitcode}"

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        self.jobs.close()
        self._life.close()


def _serve(rank: int, size: int, store: str, jobs: Connection, life: Connection, timeout: float) -> None:
    """Run what the parent sends until it is gone."""
    threading.Thread(target=_end_with_parent, args=(life,), daemon=True).start()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=timeout),
    )
    jobs.send((True, None))
    held: Any = None
    while True:
        try:
            job, name, args = jobs.recv()
        except EOFError:
            os._exit(0)  # no tidying up: that may wait for ranks that are gone
        try:
            if job == "call":
                value = getattr(held, name)(*args)
            else:
                module, _, function = name.partition(":")
                value = getattr(importlib.import_module(module), function)(*args)
            if job == "hold":
                held, value = value, None
            jobs.send((True, value))
        except BaseException as error:  # whatever it is, the parent has to hear of it
            told = "".join(traceback.format_exception(error))
            jobs.send((False, f"rank {rank}: {type(error).__name__}: {error}\n{told}"))


def _end_with_parent(life: Connection) -> None:
    try:
        life.recv()
    except EOFError:
        os._exit(1)
