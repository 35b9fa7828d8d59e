"""A pool of gloo ranks on this machine, which run one function after another.

The pool is made for tests, measurements and comparisons. A fork server that has loaded PyTorch once starts four ranks
in a fraction of a second. If a rank raises an error, dies or does not answer, the caller receives an error. No rank
outlives the pool or the process that created it.
"""

import contextlib
import datetime
import importlib
import multiprocessing
import os
import pickle
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

GRACE_SECONDS = 2.0
"""Seconds that the other ranks have to answer after the first error."""


_preloaded = dict.fromkeys(["torch.distributed", "torch._dynamo"])


def preload(*modules: str) -> None:
    """Let the fork server load modules once for the ranks of all pools, which otherwise load them one by one.

    Call this before the first pool starts, because the fork server starts with it. PyTorch's distributed package and
    its compiler, which optimizers load, are always among them.

    Args:
        modules: names. A module must not start threads when it is imported, because ranks are forks.
    """
    _preloaded.update(dict.fromkeys(modules))


class RankError(RuntimeError):
    """A failure of a rank; the message contains the errors of all ranks."""


class RankPool:
    """A pool of ranks of one process group, started at the first call.

    Args:
        size: number of ranks.
        timeout: seconds that a call, and a collective within it, may take.
    """

    def __init__(self, size: int, timeout: float = 60.0) -> None:
        self.size = size
        self.timeout = timeout
        self._ranks: list[_Rank] = []
        self._folder: tempfile.TemporaryDirectory | None = None

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def run(self, function: str, *args: Any, timeout: float | None = None) -> list[Any]:
        """Call a function on every rank.

        Args:
            function: ``package.module:name``, imported on each rank; its arguments and result are pickled, so that each
                rank and the caller have their own copies of tensors.
            args: arguments for every rank.
            timeout: seconds; None: the timeout of the pool.

        Returns:
            The results, by rank.

        Raises:
            RankError: a rank raised an error, died or did not answer in time. After any error, all ranks are ended, and
                the next call starts new ones.
        """
        return self._send(("run", function, args), timeout)

    def hold(self, function: str, *args: Any, timeout: float | None = None) -> None:
        """Call a function on every rank and keep its result there, for ``call``.

        Args:
            function: see run.
            args: see run.
            timeout: see run.
        """
        self._send(("hold", function, args), timeout)

    def call(self, method: str, *args: Any, timeout: float | None = None) -> list[Any]:
        """Call a method of the object that ``hold`` created on every rank, and return the results as run does.

        Args:
            method: name of the method.
            args: see run.
            timeout: see run.
        """
        return self._send(("call", method, args), timeout)

    def process_ids(self) -> list[int]:
        """Return the process ids of the ranks, for tests that kill one."""
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
        """Send a job to every rank and return the answers; after an error, end all ranks."""
        try:
            if not self._ranks:
                self._start()
            message = pickle.dumps(job)  # a connection's own send would share the memory of tensors with the ranks
            for rank in self._ranks:
                with contextlib.suppress(BrokenPipeError):  # _collect reports a rank that has died
                    rank.jobs.send_bytes(message)
            return self._collect(timeout or self.timeout)
        except BaseException:  # any error: the next call must not read an old answer
            self.close()
            raise

    def _start(self) -> None:
        """Start all ranks and wait until they have joined the process group."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*_preloaded])
        self._folder = tempfile.TemporaryDirectory()
        store = f"{self._folder.name}/store"
        self._ranks = [_Rank(context, rank, self.size, store, self.timeout) for rank in range(self.size)]
        self._collect(self.timeout)

    def _collect(self, timeout: float) -> list[Any]:
        """Return the answers of all ranks, or raise a RankError with the errors of all ranks."""
        answers: dict[int, Any] = {}
        errors: dict[int, str] = {}
        pending = {rank.jobs: number for number, rank in enumerate(self._ranks)}
        end = time.monotonic() + timeout
        while pending and (ready := wait([*pending], max(0.0, end - time.monotonic()))):
            for connection in ready:
                number = pending.pop(connection)  # pyright: ignore[reportArgumentType]
                answered, value = self._ranks[number].answer()
                (answers if answered else errors)[number] = value
                if not answered:  # the others may wait for this rank forever
                    end = min(end, time.monotonic() + GRACE_SECONDS)
        if errors or pending:
            for number in pending.values():
                errors[number] = f"rank {number}: no answer" + ("" if len(errors) else f" in {timeout:g} s")
            raise RankError("\n".join(errors[number] for number in sorted(errors)))
        return [answers[number] for number in range(self.size)]


class _Rank:
    """A process with two pipes: one for jobs and answers, and one that breaks when the parent ends."""

    def __init__(self, context: Any, rank: int, size: int, store: str, timeout: float) -> None:
        self.number = rank
        self.jobs, child_end = context.Pipe()
        watched, self._life = context.Pipe(duplex=False)
        self.process = context.Process(
            target=_serve, args=(rank, size, store, child_end, watched, timeout), daemon=True
        )
        self.process.start()
        child_end.close()
        watched.close()

    def answer(self) -> tuple[bool, Any]:
        """Return (True, result of the function) or (False, error message)."""
        try:
            return pickle.loads(self.jobs.recv_bytes())
        except (EOFError, ConnectionResetError):
            self.process.join(GRACE_SECONDS)
            return False, f"rank {self.number}: died with exit code {self.process.exitcode}"

    def end(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.join()
        self.process.close()
        self.jobs.close()
        self._life.close()


def _serve(rank: int, size: int, store: str, jobs: Connection, life: Connection, timeout: float) -> None:
    """Run the jobs of the parent until the parent ends."""
    threading.Thread(target=_end_with_parent, args=(life,), daemon=True).start()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)

    def join_group() -> None:
        limit = datetime.timedelta(seconds=timeout)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=limit)

    held: Any = None

    def run(message: bytes) -> Any:
        nonlocal held
        job, name, args = pickle.loads(message)
        if job == "call":
            return getattr(held, name)(*args)
        module, _, function = name.partition(":")
        value = getattr(importlib.import_module(module), function)(*args)
        if job == "hold":
            held = value
            return None
        return value

    _answer(rank, jobs, join_group)
    while True:
        try:
            message = jobs.recv_bytes()
        except EOFError:
            os._exit(0)  # no cleanup, because it may wait for ranks that have ended
        _answer(rank, jobs, partial(run, message))


def _answer(rank: int, jobs: Connection, function: Callable[[], Any]) -> None:
    """Call a function and send its result to the parent, or its error."""
    try:
        answer = pickle.dumps((True, function()))
    except BaseException as error:  # report any error to the parent
        trace = "".join(traceback.format_exception(error))
        answer = pickle.dumps((False, f"rank {rank}: {type(error).__name__}: {error}\n{trace}"))
    jobs.send_bytes(answer)


def _end_with_parent(life: Connection) -> None:
    """End this process when the pipe to the parent breaks."""
    try:
        life.recv()
    except EOFError:
        os._exit(1)
