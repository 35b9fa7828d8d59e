"""Processes that judge programs: a crash or a hang of one program is a failure like any other."""

import multiprocessing
import traceback
from multiprocessing.connection import Connection

from tests.fuzz.harness import GrowthWatch, judge, load, program_of

SECONDS_A_PROGRAM = 120.0
"""Time limit in seconds, above which a program counts as hanging."""


def _serve(technique: str, pipe: Connection) -> None:
    """Judge the programs whose numbers arrive, until None arrives."""
    import torch

    torch.set_num_threads(1)
    load(technique)
    pipe.send(("ready", ""))
    watch = GrowthWatch()
    for number in iter(pipe.recv, None):
        try:
            outcome = judge(technique, number)
            watch.check()
            pipe.send((outcome.verdict, outcome.detail))
        except BaseException:
            pipe.send(("failed", traceback.format_exc()))


class Worker:
    """A process that judges programs of one technique, restarted after a crash or a hang."""

    def __init__(self, technique: str) -> None:
        self._technique = technique
        self._process = None

    def judge(self, number: int) -> tuple[str, str]:
        """Return the verdict on a program and its detail; a crash and a hang are failures."""
        if self._process is None:
            self._start()
        assert self._process is not None
        self._pipe.send(number)
        verdict, detail = self._receive()
        if verdict in ("hang", "crash"):
            self._process.kill()
            self._process.join()
            self._process = None
            program = program_of(self._technique, number)
            return "failed", f"{verdict}: {detail}\nprogram {number} of {self._technique}\n{program}"
        return verdict, detail

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._pipe.send(None)
            self._process.join(10)
            self._process.kill()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(self._technique, other))
        self._process.start()
        other.close()
        if self._receive()[0] != "ready":
            raise RuntimeError(f"the process of {self._technique} did not start")

    def _receive(self) -> tuple[str, str]:
        try:
            if not self._pipe.poll(SECONDS_A_PROGRAM):
                return "hang", f"no answer within {SECONDS_A_PROGRAM:.0f} s"
            return self._pipe.recv()
        except (EOFError, ConnectionResetError):
            return "crash", "the process ended"
