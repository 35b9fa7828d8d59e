"""What is on its way to other ranks: kept alive, and waited for by nobody else."""

import datetime
import queue
import threading
from collections import deque
from typing import Any

import torch.distributed as dist
from torch import Tensor

from diptych.plans.schedule.messages import PipelineError


class Departures:
    """Keeps what is being sent alive until it has left; a thread waits, so that nobody else has to.

    Args:
        lingers: what has left is let go where the next is sent or waited for, not in the thread: PyTorch's profiler has
            been seen to crash where another thread frees memory.
    """

    def __init__(self, lingers: bool = False) -> None:
        self._lingers = lingers
        self._left: deque[Tensor] = deque()
        self._queue: queue.Queue[tuple[Any, Tensor, str, float] | None] = queue.Queue()
        self._error: str | None = None
        self._thread: threading.Thread | None = None

    def add(self, work: dist.Work | None, content: Tensor, told: str, timeout: float) -> None:
        """Wait for a send beside all else.

        Args:
            work: the send; None: nothing is waited for.
            content: what is sent.
            told: beginning of the error, should nobody receive it.
            timeout: seconds it may take.
        """
        while len(self._left) > 1:  # the thread may be about to let go of the last
            self._left.popleft()
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, daemon=True, name="departures")
            self._thread.start()
        self._queue.put((work, content, told, timeout))

    def wait(self) -> None:
        """Until all has left. Raises: see check."""
        self._queue.join()
        self._left.clear()
        self.check()

    def check(self) -> None:
        """Say if something did not leave.

        Raises:
            PipelineError: it was not received in time.
        """
        if self._error is not None:
            raise PipelineError(self._error)

    def dismiss(self) -> None:
        """End the thread once all has left; nobody waits for that."""
        self._queue.put(None)

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _serve(self) -> None:
        while (waiting := self._queue.get()) is not None:
            work, content, told, timeout = waiting
            try:
                if work is not None and self._error is None:
                    work.wait(datetime.timedelta(seconds=timeout))
            except RuntimeError as error:
                self._error = f"{told} within pipeline_timeout={timeout:g} s, and it was not ({cause_of(error)})"
            if self._lingers:
                self._left.append(content)
            del waiting, work, content  # the memory, now that it has left
            self._queue.task_done()
        self._queue.task_done()


def cause_of(error: Exception) -> str:
    """A framework's error without its source file."""
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    return first.split("] ", 1)[-1].split(" This is typically")[0].rstrip(".")
