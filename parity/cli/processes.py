"""Processes of one run on this machine: started together, watched until all have ended, and none left behind.

A rank may be killed, or stopped, at any moment from its start to its end. What is promised whatever happens: the
launcher ends in time, says which rank it was, and no process outlives it. Four clocks see to that:

    GRACE          from the first rank that failed until those that have not ended by themselves are killed
    join_timeout   from the start until every rank has said that it has met all others (report_joined)
    silence        that a rank may be stopped (SIGSTOP), or go on after another rank has ended well
    (a message's)  pipeline_timeout: ranks that wait for one that is gone or stopped end by themselves
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
"""Seconds the other processes get to end by themselves after one has failed."""
CHILD = "DIPTYCH_CHILD"
"""Set where start_processes started this process, whose standard input then ends with its parent."""
JOINED = "DIPTYCH_JOINED"
"""The file descriptor on which a rank says that it has joined the others."""
TIMEOUT = 600.0
"""Seconds, where a caller names none."""
REFUSED = 2
"""Exit code of a rank that refuses what the user asked for, as all ranks do alike."""
CANNOT_START = 127
"""Exit code of a rank whose program could not be loaded."""
TICK = 0.05
"""Seconds between two looks at the ranks."""


def start_processes(
    count: int, module: str, arguments: Sequence[str], join_timeout: float = TIMEOUT, silence: float = TIMEOUT
) -> int:
    """Run a module in several processes on this machine, and wait for all of them.

    Signals go on to every process. When one fails, the others get a moment to say what they missed, and are ended. When
    this process dies, however it does, they end too.

    Args:
        count: number of processes.
        module: run as ``python -m``; calls report_joined once it has met the others.
        arguments: of the module.
        join_timeout: seconds until all have called it.
        silence: seconds that a rank may be stopped, or may outlast one that ended well.

    Returns:
        The exit code of the first to fail, 1 where it was ended by a signal or had to be, or 0.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Of torchrun, where it started this process alone: ranks would look for the store it keeps for its own.
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
    """One process, the leader of a session of its own: a terminal's Ctrl-C comes to the launcher, and goes on once."""

    def __init__(self, number: int, command: list[str], environment: dict[str, str]) -> None:
        self.number, self.joined = number, False
        self.stopped_at: float | None = None
        self.code: int | None = None
        self._said, reports = os.pipe()
        lifeline, self._lifeline = os.pipe()
        os.set_blocking(self._said, False)
        own = {"RANK": str(number), "LOCAL_RANK": str(number), JOINED: str(reports)}
        self.pid = _start(command, {**environment, **own}, lifeline, reports)
        os.close(reports)
        os.close(lifeline)

    def look(self, now: float) -> None:
        """Note whether it has joined, is stopped, or has ended."""
        if not self.joined:
            with contextlib.suppress(BlockingIOError):
                self.joined = bool(os.read(self._said, 1))
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
        """Send a signal, if it is there: until it has been reaped, nobody else has its number."""
        if self.code is None:
            os.kill(self.pid, number)

    def end(self) -> None:
        """Kill it and all that it started, stopped or not, and reap it."""
        if self.code is None:
            self._kill_group()
            os.kill(self.pid, signal.SIGKILL)  # it may not lead its group yet
            self._ended(os.waitpid(self.pid, 0)[1])
        os.close(self._lifeline)
        os.close(self._said)

    def _ended(self, status: int) -> None:
        self.code = os.waitstatus_to_exitcode(status)
        self._kill_group()  # what it had started

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def _start(command: list[str], environment: dict[str, str], lifeline: int, reports: int) -> int:
    """Fork and run a program; its process id.

    Not by subprocess, which waits until the new program has been loaded: for ever, and deaf to signals, where the
    process is stopped before that.

    Args:
        command: the program and its arguments.
        environment: its own.
        lifeline: becomes its standard input.
        reports: a file descriptor that it inherits.
    """
    signals = (signal.SIGINT, signal.SIGTERM)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # the child must not forward what comes now
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of threads that a fork does not copy: the child calls the system alone
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
    """Looks at the ranks until all have ended, or until those that are left have had their time."""

    def __init__(self, ranks: Sequence[_Rank], join_timeout: float, silence: float, signals: Sequence[int]) -> None:
        self._ranks, self._join_timeout, self._silence = ranks, join_timeout, silence
        self._signals, self._begin = signals, time.monotonic()
        self._failed: list[_Rank] = []
        self._end, self._outlasted = float("inf"), float("inf")

    def wait(self) -> int:
        """The exit code of the whole run, once it is over and has been told."""
        while True:
            now = time.monotonic()
            for rank in self._ranks:  # every one: a rank that is gone must not wait for those before it to end
                rank.look(now)
                if rank.code and rank not in self._failed:
                    self._failed.append(rank)
                    self._end = min(self._end, now + GRACE)
                if rank.code == 0:
                    self._outlasted = min(self._outlasted, now + self._silence)
            left = [rank for rank in self._ranks if rank.code is None]
            if self._ranks[0].code == REFUSED:  # and said why; the others, which would say the same, leave it to it
                return REFUSED
            if not left or now >= self._end or self._is_late(left, now):
                return self._told(left)
            time.sleep(TICK)

    def _is_late(self, left: Sequence[_Rank], now: float) -> bool:
        """Whether nothing more is to be expected of the ranks that are left; says why."""
        missing = [rank for rank in left if not rank.joined]
        if missing and now >= self._begin + self._join_timeout:
            _say(
                f"{_named(missing)} did not join the others within join_timeout={self._join_timeout:g} s; look at "
                "what the ranks say, or raise join_timeout"
            )
            return True
        stopped = [rank for rank in left if rank.stopped_at is not None and now >= rank.stopped_at + self._silence]
        if stopped:
            _say(
                f"{_named(stopped)} has been stopped (by SIGSTOP or a debugger) for {self._silence:g} s; continue it "
                "in time (kill -CONT), or raise pipeline_timeout"
            )
            return True
        if now >= self._outlasted:
            _say(
                f"{_named(left)} still ran {self._silence:g} s after another rank had ended; look at what it waits "
                "for, or raise pipeline_timeout"
            )
            return True
        return False

    def _told(self, left: Sequence[_Rank]) -> int:
        """Say which ranks failed, and what became of all that say nothing themselves; the exit code."""
        first = self._failed[0] if self._failed else None
        for rank in self._ranks:
            if rank.code is not None and rank.code < 0 and -rank.code not in self._signals:
                before = "" if rank.joined else " before it had joined the others"
                _say(
                    f"rank {rank.number} was ended by {signal.Signals(-rank.code).name}{before}; if nobody sent that, "
                    "look for a lack of memory (dmesg) or a fault in a library, and go on with --resume"
                )
        for rank in left:
            state = "" if rank.stopped_at is None else " (it had been stopped by a signal)"
            _say(f"rank {rank.number} did not end by itself, and was stopped{state}")
        failed = [rank for rank in self._failed if rank.code is not None and rank.code > 0]
        if failed and not self._signals:
            each = ", ".join(f"rank {rank.number} with exit code {rank.code}" for rank in failed)
            _say(f"failed, the first one first: {each}; look at what they said")
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
    """SIGINT and SIGTERM go to every process instead of ending this one; yields those that came."""
    came: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        came.append(number)
        for rank in ranks:
            rank.send(number)

    previous = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def report_joined() -> None:
    """Tell start_processes, where it started this process, that this rank has met all others."""
    descriptor = os.environ.pop(JOINED, None)
    if descriptor is not None:
        with contextlib.suppress(OSError):  # the launcher is gone, as standard input will tell
            os.write(int(descriptor), b"j")
            os.close(int(descriptor))


def end_with_parent() -> None:
    """Where start_processes started this process: end it when the parent is gone."""

    def watch() -> None:
        # Not sys.stdin, whose lock this thread would hold for good: an interpreter that ends by an error aborts on it.
        while os.read(0, 1024):
            pass
        os._exit(1)

    if os.environ.get(CHILD):
        threading.Thread(target=watch, daemon=True).start()
