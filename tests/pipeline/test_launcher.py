"""The launcher of ``diptych train --nproc``: whichever rank is killed, stopped or hangs, it ends, names it, and leaves
no process.
"""

import os
import signal
import sys
import time

import pytest

from diptych.plans.schedule.messages import PipelineError
from parity.cli import processes
from parity.cli.commands import Train
from parity.cli.launch import join_processes
from parity.cli.processes import JOINED, report_joined, start_processes
from tests.fuzz.grammars.launcher import Fault, Program, check
from tests.fuzz.harness import EQUAL, REFUSED
from tests.rank_processes import gone

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]
KILLED = "was ended by SIGKILL"
STOPPED = r"(did not join the others within join_timeout=\S+ s|has been stopped|did not end by itself)"
ENDS = {
    "nothing happens": (Program(3), ""),
    "the last rank is killed when it is started": (
        Program(4, (Fault("SIGKILL", 3, 0.0),)),
        f"rank n {KILLED} before it",
    ),
    "a rank is killed before the others have come": (
        Program(3, (Fault("SIGKILL", 2, "meeting"),)),
        f"rank n {KILLED} before it had joined the others; if nobody sent it, look for a lack of memory",
    ),
    "the first rank is killed before the others have come": (
        Program(3, (Fault("SIGKILL", 0, "start"),)),
        f"rank n {KILLED} before it had joined the others",
    ),
    "a rank is killed in a message": (Program(3, (Fault("SIGKILL", 1, "message 2"),)), f"rank n {KILLED}; if nobody"),
    "a rank is stopped when it is started": (Program(4, (Fault("SIGSTOP", 3, 0.0),)), STOPPED),
    "a rank is stopped before the others have come": (Program(3, (Fault("SIGSTOP", 0, "meeting"),)), STOPPED),
    "a rank is stopped in a message": (Program(3, (Fault("SIGSTOP", 1, "message 1"),)), STOPPED),
    "a rank is stopped when all others have ended": (
        Program(2, (Fault("SIGSTOP", 1, "end"),)),
        r"rank n has been stopped \(by SIGSTOP or a debugger\) for n s; continue it in time \(kill -CONT\), or",
    ),
    "every rank is stopped": (Program(2, (Fault("SIGSTOP", 0, "joined"), Fault("SIGSTOP", 1, "joined"))), STOPPED),
    "every rank hangs before it has joined": (
        Program(2, (Fault("hang", 0, "start"), Fault("hang", 1, "start"))),
        r"ranks n, n did not join the others within join_timeout=n s; see the output of the ranks, or raise",
    ),
    "a rank hangs when all others have ended": (
        Program(2, (Fault("hang", 1, "end"),)),
        r"rank n still ran n s after another rank had ended; find what it waits for, or raise pipeline_timeout",
    ),
    "a rank is stopped, and goes on in time": (Program(2, (Fault("pause", 1, "message 1"),)), ""),
    "a rank leaves a process of its own": (Program(2, grandchild=1), ""),
    "a rank that is killed leaves a process of its own": (
        Program(2, (Fault("SIGKILL", 1, "joined"),), grandchild=1),
        KILLED,
    ),
    "a rank exits by itself": (
        Program(3, (Fault("exit", 2, "joined"),)),
        "failed, in this order: rank n with exit code n.*; see their output",
    ),
    "the launcher is interrupted": (Program(3, (), ("SIGINT", 0.3), seconds=5.0), "interrupted"),
    "the launcher is interrupted at once": (Program(4, (), ("SIGINT", 0.0), seconds=5.0), "interrupted"),
    "the launcher is told to end": (Program(3, (), ("SIGTERM", 0.3), seconds=5.0), "interrupted"),
}


@pytest.mark.parametrize("name", ENDS)
def test_the_launcher_ends_and_says_why(name):
    program, says = ENDS[name]
    assert check(program, says).verdict == (REFUSED if says else EQUAL)


def test_a_signal_that_comes_while_ranks_are_started_reaches_all(monkeypatch, tmp_path):
    """Also those that did not exist yet."""
    script = tmp_path / "sleeper.py"
    script.write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    started = []

    class Interrupting(processes._Rank):
        def __init__(self, number, *arguments):
            super().__init__(number, *arguments)
            started.append(self.pid)
            if number == 0:
                os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(processes, "_Rank", Interrupting)
    assert start_processes(3, "sleeper", []) == 128 + signal.SIGTERM
    assert len(started) == 3
    assert all(map(gone, started))


def test_a_rank_that_cannot_be_started_leaves_none_behind(monkeypatch, capfd):
    started = []

    class Failing(processes._Rank):
        def __init__(self, number, command, environment):
            super().__init__(number, ["/nowhere"] if number == 2 else command, environment)
            started.append(self.pid)

    monkeypatch.setattr(processes, "_Rank", Failing)
    monkeypatch.setattr(processes, "GRACE", 0.2)
    files = len(os.listdir("/proc/self/fd"))
    assert start_processes(3, "http.server", ["0"]) == processes.CANNOT_START
    assert "diptych: expected to run /nowhere, got: [Errno 2] No such file or directory" in capfd.readouterr().err
    assert len(started) == 3
    assert all(map(gone, started))
    assert len(os.listdir("/proc/self/fd")) == files


REFUSING = """
import os, sys, time
from parity.cli.launch import reports_errors
time.sleep(0.3 * (os.environ["RANK"] == "0"))
if ALL or os.environ["RANK"] == "1":
    if reports_errors():
        print(f"diptych: what rank {os.environ['RANK']} has to say", file=sys.stderr)
    sys.exit(2)
time.sleep(60)
"""


@pytest.mark.parametrize("everyone", [True, False])
def test_what_all_refuse_is_said_once_and_what_one_refuses_is_said(everyone, monkeypatch, tmp_path, capfd):
    (tmp_path / "refusing.py").write_text(REFUSING.replace("ALL", str(everyone)))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "."), os.getcwd()]))
    assert start_processes(2, "refusing", []) == 2
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("diptych")]
    if everyone:
        assert said == ["diptych: what rank 0 has to say"]
    else:
        assert said[0] == "diptych: what rank 1 has to say"
        assert said[1] == "diptych: rank 0 did not end by itself, and was stopped"
        assert said[2].startswith("diptych: failed, in this order: rank 1 with exit code 2; see")


def test_a_process_that_no_launcher_started_reports_to_nobody(monkeypatch):
    monkeypatch.delenv(JOINED, raising=False)
    report_joined()


def test_ranks_that_do_not_come_are_missed_in_time(monkeypatch):
    """Under torchrun too, whose launcher does not look at ranks that are stopped."""
    settings = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    message = r"rank 1: expected all 2 ranks to meet at 127.0.0.1:1 within join_timeout=1 s, but they did not \(.*start"
    begin = time.monotonic()
    with pytest.raises(PipelineError, match=message):
        join_processes("cpu", 1.0)
    assert time.monotonic() - begin < 15.0


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_join_timeout_is_checked(seconds):
    with pytest.raises(
        ValueError, match=rf"join_timeout: expected more than 0 and at most 1e\+09 sec.*, got {seconds}"
    ):
        Train(join_timeout=seconds)


REAL = {
    "the last rank is killed when it is started": Program(4, (Fault("SIGKILL", 3, 0.0),), real=True),
    "a rank is killed after some seconds": Program(4, (Fault("SIGKILL", 2, 2.0),), real=True),
    "the last rank is stopped when it is started": Program(4, (Fault("SIGSTOP", 3, 0.0),), real=True),
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", REAL)
def test_training_ends_whichever_rank_does_not_come(name):
    assert check(REAL[name]).verdict == REFUSED
