"""Start and supervision of the processes of one run on this machine.

A rank can be killed or stopped at any time. In every case the launcher ends in time, names the rank, and leaves no
process behind. Four time limits ensure this:

    GRACE             from the first failed rank until ranks that have not ended by themselves are killed
    join_timeout      from the start until every rank has reported that it has joined the others (report_joined)
    silence           time that a rank may be stopped (SIGSTOP), or continue after another rank has ended without error
    pipeline_timeout  time that a rank waits for a message from an ended or stopped rank before it ends by itself
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from types import FrameType

GRACE = 10.0
"""Seconds that other processes have to end by themselves after one has failed."""
CHILD = "DIPTYCH_CHILD"
"""Environment variable set by start_processes; the process's standard input then closes with its parent."""
JOINED = "DIPTYCH_JOINED"
"""Environment variable with the file descriptor on which a rank reports that it has joined the others."""
TIMEOUT = 600.0
"""Default time-out in seconds."""
REFUSED = 2
"""Exit code of a rank that refuses invalid input; all ranks refuse it."""
CANNOT_START = 127
"""Exit code of a rank whose program could not be loaded."""
POLL_INTERVAL = 0.05
"""Seconds between two polls of the ranks."""


def start_processes(
    count: int, module: str, arguments: Sequence[str], join_timeout: float = TIMEOUT, silence: float = TIMEOUT
) -> int:
    """Run a module in several processes on this machine, and wait for all of them.

    Signals are forwarded to every process. When one process fails, the others have GRACE seconds to report what they
    missed, and are then ended. If this process dies, in whatever way, they end too.

    Args:
        count: number of processes.
        module: run as ``python -m``; calls report_joined once it has joined the others.
        arguments: arguments of the module.
        join_timeout: seconds until all processes must have called report_joined.
        silence: seconds that a rank may be stopped, or may outlast one that ended without error.

    Returns:
        0 if no process failed, REFUSED if rank 0 refused its input, else the exit code of the first process that
        failed: 128 plus its number if it was ended by a forwarded signal, 1 if by another signal or by this function.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # If torchrun started this process alone, ranks must not look for the store of that torchrun.
    outside = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), CHILD: "1"}
    ranks: list[_Rank] = []
    with _forwarded(ranks) as signals:
        try:
            for number in range(count):
                ranks.append(_Rank(number, [sys.executable, "-m", module, *arguments], {**outside, **shared}))
                for signal_number in signals:
                    ranks[-1].send(signal_number)
            return _Watch(ranks, join_timeout, silence, signals).wait()
        finally:
            for rank in ranks:
                rank.end()


class _Rank:
    """One process, the leader of its own session, so that a terminal's Ctrl-C reaches only the launcher.

    The launcher forwards the signal once.
    """

    def __init__(self, number: int, command: list[str], environment: dict[str, str]) -> None:
        self.number = number
        self.joined = False
        self.stopped_at: float | None = None
        self.code: int | None = None
        self._reports, reports = os.pipe()
        lifeline, self._lifeline = os.pipe()
        os.set_blocking(self._reports, False)
        own = {"RANK": str(number), "LOCAL_RANK": str(number), JOINED: str(reports)}
        self.pid = _start(command, {**environment, **own}, lifeline, reports)
        os.close(reports)
        os.close(lifeline)

    def look(self, now: float) -> None:
        """Record if the process has joined, is stopped, or has ended."""
        if not self.joined:
            with contextlib.suppress(BlockingIOError):
                self.joined = bool(os.read(self._reports, 1))
        while self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            if not pid:
                return
            if os.WIFSTOPPED(status):
                self.stopped_at = now
            elif os.WIFCONTINUED(status):
                self.stopped_at = None
            else:
                self._ended(status)

    def send(self, number: int) -> None:
        """Send a signal if the process exists; until it is reaped, its id is not reused."""
        if self.code is None:
            os.kill(self.pid, number)

    def end(self) -> None:
        """Kill the process and all processes it started, stopped or not, and reap it."""
        if self.code is None:
            self._kill_group()
            os.kill(self.pid, signal.SIGKILL)  # it may not lead its process group yet
            self._ended(os.waitpid(self.pid, 0)[1])
        os.close(self._lifeline)
        os.close(self._reports)

    def _ended(self, status: int) -> None:
        self.code = os.waitstatus_to_exitcode(status)
        self._kill_group()  # the processes it had started

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def _start(command: list[str], environment: dict[str, str], lifeline: int, reports: int) -> int:
    """Fork and run a program, and return its process id.

    Subprocess is not used: it waits until the new program is loaded, without handling signals, and would wait forever
    if the process is stopped before that.

    Args:
        command: the program and its arguments.
        environment: environment of the program.
        lifeline: file descriptor that becomes its standard input.
        reports: file descriptor that it inherits.
    """
    signals = (signal.SIGINT, signal.SIGTERM)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # the child must not forward signals that arrive now
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # forks do not copy threads, but the child makes only system calls
            pid = os.fork()
        if pid:
            return pid
        try:
            os.setsid()
            for number in signals:
                signal.signal(number, signal.SIG_DFL)
            os.dup2(lifeline, 0)
            os.set_inheritable(reports, True)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.execve(command[0], command, environment)
        except OSError as error:
            os.write(2, f"diptych: expected to run {command[0]}, got: {error}\n".encode())
        finally:
            os._exit(CANNOT_START)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Watch:
    """A supervisor that polls the ranks until all have ended or a clock has expired."""

    def __init__(self, ranks: Sequence[_Rank], join_timeout: float, silence: float, signals: Sequence[int]) -> None:
        self._ranks = ranks
        self._join_timeout = join_timeout
        self._silence = silence
        self._signals = signals
        self._begin = time.monotonic()
        self._failed: list[_Rank] = []
        self._end = float("inf")
        self._silence_end = float("inf")

    def wait(self) -> int:
        """Wait for the end of the run, print messages about failed ranks, and return the exit code."""
        while True:
            now = time.monotonic()
            for rank in self._ranks:  # poll all: a rank that is gone must not wait until earlier ones have ended
                rank.look(now)
                if rank.code and rank not in self._failed:
                    self._failed.append(rank)
                    self._end = min(self._end, now + GRACE)
                if rank.code == 0:
                    self._silence_end = min(self._silence_end, now + self._silence)
            left = [rank for rank in self._ranks if rank.code is None]
            if self._ranks[0].code == REFUSED:  # rank 0 has printed the error that all ranks have
                return REFUSED
            if not left or now >= self._end or self._is_late(left, now):
                return self._report_failures(left)
            time.sleep(POLL_INTERVAL)

    def _is_late(self, left: Sequence[_Rank], now: float) -> bool:
        """Return True if a clock of the remaining ranks has expired, and print which."""
        missing = [rank for rank in left if not rank.joined]
        if missing and now >= self._begin + self._join_timeout:
            _say(
                f"{_named(missing)} did not join the others within join_timeout={self._join_timeout:g} s; see "
                "the output of the ranks, or raise join_timeout"
            )
            return True
        stopped = [rank for rank in left if rank.stopped_at is not None and now >= rank.stopped_at + self._silence]
        if stopped:
            _say(
                f"{_named(stopped)} has been stopped (by SIGSTOP or a debugger) for {self._silence:g} s; continue it "
                "in time (kill -CONT), or raise pipeline_timeout"
            )
            return True
        if now >= self._silence_end:
            _say(
                f"{_named(left)} still ran {self._silence:g} s after another rank had ended; find what it waits "
                "for, or raise pipeline_timeout"
            )
            return True
        return False

    def _report_failures(self, left: Sequence[_Rank]) -> int:
        """Print which ranks failed, and the fate of ranks that print nothing themselves; return the exit code."""
        first = self._failed[0] if self._failed else None
        for rank in self._ranks:
            if rank.code is not None and rank.code < 0 and -rank.code not in self._signals:
                before = "" if rank.joined else " before it had joined the others"
                _say(
                    f"rank {rank.number} was ended by {signal.Signals(-rank.code).name}{before}; if nobody sent it, "
                    "look for a lack of memory (dmesg) or a fault in a library, and continue with --resume"
                )
        for rank in left:
            state = "" if rank.stopped_at is None else " (it had been stopped by a signal)"
            _say(f"rank {rank.number} did not end by itself, and was stopped{state}")
        failed = [rank for rank in self._failed if rank.code is not None and rank.code > 0]
        if failed and not self._signals:
            each = ", ".join(f"rank {rank.number} with exit code {rank.code}" for rank in failed)
            _say(f"failed, in this order: {each}; see their output")
        if first is None:
            return 1 if left else 0
        assert first.code is not None, "it has failed"
        if first.code > 0:
            return first.code
        return 128 - first.code if -first.code in self._signals else 1


def _named(ranks: Sequence[_Rank]) -> str:
    numbers = ", ".join(str(rank.number) for rank in ranks)
    return f"rank{'s' if len(ranks) > 1 else ''} {numbers}"


def _say(text: str) -> None:
    print(f"diptych: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _forwarded(ranks: Sequence[_Rank]) -> Iterator[list[int]]:
    """Forward SIGINT and SIGTERM to every process instead of ending this one; yield the received signals."""
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for rank in ranks:
            rank.send(number)

    previous = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def report_joined() -> None:
    """Report to start_processes, if it started this process, that this rank has joined all others."""
    descriptor = os.environ.pop(JOINED, None)
    if descriptor is not None:
        with contextlib.suppress(OSError):  # the launcher is gone; end_with_parent handles that
            os.write(int(descriptor), b"j")
            os.close(int(descriptor))


def end_with_parent() -> None:
    """End this process when its parent is gone, if start_processes started it."""

    def watch() -> None:
        # Not sys.stdin: this thread would hold its lock, on which an interpreter that exits with an error aborts.
        while os.read(0, 1024):
            pass
        os._exit(1)

    if os.environ.get(CHILD):
        threading.Thread(target=watch, daemon=True).start()
