"""A pool of gloo ranks on this machine, which run one function after another.

The pool is made for tests, measurements and comparisons. A fork server that has loaded PyTorch once starts four ranks
in a fraction of a second. If a rank raises an error, dies or does not answer, the caller receives an error. No rank
outlives the pool or the process that created it.
"""

import contextlib
import datetime
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

GRACE_SECONDS = 2.0
"""Seconds that the other ranks have to answer after the first error."""

NEW_FILE = b"!"
"""Sent when the file of a job or an answer is complete."""

_preloaded = dict.fromkeys(["torch.distributed", "torch._dynamo"])


def preload(*modules: str) -> None:
    """Let the fork server load modules once for the ranks of all pools, which otherwise load them one by one.

    Call this before the first pool starts, because the fork server starts with it. PyTorch's distributed package and
    its compiler, which optimizers load, are always among them.

    Args:
        modules: names. A module must not start threads when it is imported, because ranks are forks.

    Raises:
        ModuleNotFoundError: a module is not installed; the fork server itself would not say so.
    """
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(f"preload: expected names of installed modules, got {module!r}", name=module)
    _preloaded.update(dict.fromkeys(modules))


class RankError(RuntimeError):
    """A failure of a rank; the message contains the errors of all ranks."""


class RankPool:
    """A pool of ranks of one process group, started at the first call.

    Ranks see the environment variables that their parent has when they start; what a library reads when it is imported
    may be that of the first pool, because the fork server keeps libraries loaded. A rank computes with one thread, and
    can start processes, which end with it. Threads can share a pool: their calls, and close, wait for each other.

    Args:
        size: number of ranks.
        timeout: seconds that a call, and a collective within it, may take.
    """

    def __init__(self, size: int, timeout: float = 60.0) -> None:
        self.size = size
        self.timeout = timeout
        self._ranks: list[_Rank] = []
        self._folder: Path | None = None
        self._process = 0
        """The process that has started the ranks."""
        self._lock = threading.RLock()
        self._finalizer: Finalize | None = None

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
        with self._lock:
            if self._finalizer is not None:
                self._finalizer()  # does nothing in a fork of the process that has started the ranks
            self._finalizer = None
            self._ranks = []
            self._folder = None

    def _send(self, job: tuple[str, str, tuple], timeout: float | None) -> list[Any]:
        """Send a job to every rank and return the answers; after an error, end all ranks."""
        if self._folder is not None and self._process != os.getpid():
            raise RuntimeError(
                "RankPool: expected a call in the process that has started the ranks, got one in a fork of it; make a "
                "pool in each process"
            )
        with self._lock:
            try:
                folder = self._folder or self._start()
                # In a file, so that no rank can delay this process; a connection's own send would share the memory of
                # tensors with the ranks.
                (folder / "job").write_bytes(pickle.dumps(job))
                for rank in self._ranks:
                    with contextlib.suppress(BrokenPipeError):  # _collect reports a rank that has died
                        rank.pipe.send_bytes(NEW_FILE)
                return self._collect(timeout or self.timeout)
            except BaseException:  # any error: the next call must not read an old answer
                self.close()
                raise

    def _start(self) -> Path:
        """Start all ranks, wait until they have joined the process group, and return the folder of jobs and answers."""
        context = multiprocessing.get_context("forkserver")
        _set_preloaded(context)
        folder = self._folder = Path(tempfile.mkdtemp(prefix="diptych-ranks-"))
        self._process = os.getpid()
        # Ends the ranks before Python waits for the children of this process, or when the pool is dropped.
        self._finalizer = Finalize(self, _end, (self._ranks, folder), exitpriority=0)
        for rank in range(self.size):
            self._ranks.append(_Rank(context, rank, self.size, folder, self.timeout))
        self._collect(self.timeout)
        return folder

    def _collect(self, timeout: float) -> list[Any]:
        """Return the answers of all ranks, or raise a RankError with the errors of all ranks."""
        answers: dict[int, Any] = {}
        errors: dict[int, str] = {}
        pending = {*range(len(self._ranks))}
        end = time.monotonic() + timeout
        while pending:
            handles = {handle: number for number in pending for handle in self._ranks[number].handles}
            ready = wait([*handles], max(0.0, end - time.monotonic()))
            if not ready:
                break
            for number in {handles[handle] for handle in ready}:  # pyright: ignore[reportArgumentType]
                pending.remove(number)
                answered, value = self._ranks[number].answer()
                (answers if answered else errors)[number] = value
                if not answered:  # the others may wait for this rank forever
                    end = min(end, time.monotonic() + GRACE_SECONDS)
        if errors or pending:
            late = "" if errors else f" in {timeout:g} s; give a longer timeout if it was still at work"
            for number in pending:
                errors[number] = f"rank {number}: no answer{late}"
            raise RankError("\n".join(errors[number] for number in sorted(errors)))
        return [answers[number] for number in range(self.size)]


class _Rank:
    """A process with two pipes: one for notices of jobs and answers, and one that breaks when the parent ends."""

    def __init__(self, context: Any, rank: int, size: int, folder: Path, timeout: float) -> None:
        self.number = rank
        self.pipe, child_end = context.Pipe()
        watched, self._life = context.Pipe(duplex=False)
        self._answer = _answer_file(folder, rank)
        # Not a daemon, so that its jobs can start processes, such as those of a DataLoader.
        arguments = rank, size, folder, child_end, watched, timeout, {**os.environ}
        self.process = context.Process(target=_serve, args=arguments, daemon=False)
        self.process.start()
        child_end.close()
        watched.close()

    @property
    def handles(self) -> tuple[Connection, int]:
        """What is ready when the rank has answered or has died, also if processes that it started hold its pipes."""
        return self.pipe, self.process.sentinel

    def answer(self) -> tuple[bool, Any]:
        """Return (True, result of the function) or (False, error message)."""
        try:
            if not self.pipe.poll():
                raise EOFError
            self.pipe.recv_bytes()
        except (EOFError, ConnectionResetError):
            self.process.join(GRACE_SECONDS)
            return False, f"rank {self.number}: died with exit code {_exit_code(self.process.exitcode)}"
        answer = pickle.loads(self._answer.read_bytes())
        self._answer.unlink()
        return answer

    def end(self) -> None:
        """Kill the process, and the processes that it has started."""
        with contextlib.suppress(ProcessLookupError):  # it may not lead a group yet
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.process.close()
        self.pipe.close()
        self._life.close()


def _set_preloaded(context: Any) -> None:
    """Let a fork server that has not started load our modules besides those that the user's code has asked for."""
    asked = getattr(forkserver._forkserver, "_preload_modules", [])  # pyright: ignore[reportAttributeAccessIssue]
    default = ["__main__"]  # a script may start threads when it is imported
    context.set_forkserver_preload([*dict.fromkeys([*(asked if asked != default else []), *_preloaded])])


def _end(ranks: list[_Rank], folder: Path) -> None:
    """End ranks and remove their files."""
    for rank in ranks:
        rank.end()
    shutil.rmtree(folder, ignore_errors=True)


def _answer_file(folder: Path, rank: int) -> Path:
    """Return the file in which a rank answers."""
    return folder / f"answer-{rank}"


def _exit_code(code: int | None) -> str:
    """Describe an exit code of a rank."""
    if code is None or code >= 0:
        return f"{code}; what it wrote to standard error may tell why"
    hint = ", for example because memory ran out" if -code == signal.SIGKILL else ""
    return f"{code} ({signal.strsignal(-code)}{hint})"


def _serve(
    rank: int, size: int, folder: Path, pipe: Connection, life: Connection, timeout: float, environment: dict[str, str]
) -> None:
    """Run the jobs of the parent until the parent ends."""
    os.setsid()  # the processes that jobs start are in its group, and end with it
    threading.Thread(target=_end_with_parent, args=(life, folder), daemon=True).start()
    os.environ.clear()
    os.environ.update(environment)  # the fork server has that of its own start
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)

    def join_group() -> None:
        limit = datetime.timedelta(seconds=timeout)
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=limit)

    held: Any = None

    def run() -> Any:
        nonlocal held
        job, name, args = pickle.loads((folder / "job").read_bytes())
        if job == "call":
            if held is None:
                raise RuntimeError(
                    f"call of {name}: expected the object that hold has made, got none, because an error of an earlier "
                    "job ended its ranks; make it again"
                )
            return getattr(held, name)(*args)
        module, _, function = name.partition(":")
        value = getattr(importlib.import_module(module), function)(*args)
        if job == "hold":
            held = value
            return None
        return value

    answer = _answer_file(folder, rank)
    _answer(rank, answer, pipe, join_group)
    while True:
        try:
            pipe.recv_bytes()
        except EOFError:
            os._exit(0)  # no cleanup, because it may wait for ranks that have ended
        _answer(rank, answer, pipe, run)


def _answer(rank: int, file: Path, pipe: Connection, function: Callable[[], Any]) -> None:
    """Call a function and give the parent its result, or its error."""
    try:
        answer = pickle.dumps((True, function()))
    except BaseException as error:  # report any error to the parent
        trace = "".join(traceback.format_exception(error))
        answer = pickle.dumps((False, f"rank {rank}: {type(error).__name__}: {error}\n{trace}"))
    file.write_bytes(answer)
    pipe.send_bytes(NEW_FILE)


def _end_with_parent(life: Connection, folder: Path) -> None:
    """End this process, and remove its files, when the pipe to the parent breaks."""
    try:
        life.recv()
    except EOFError:
        shutil.rmtree(folder, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)
