"""Messages that are being sent to other ranks.

A thread waits for the sends, so that the computation does not wait.
"""

import datetime
import queue
import threading
from collections import deque
from typing import Any

import torch.distributed as dist
from torch import Tensor

from diptych.plans.schedule.messages import PipelineError


class PendingSends:
    """A queue of sends that holds each message until it is sent; a thread waits for the sends.

    Args:
        lingers: if True, messages are released when the next one is added or waited for, instead of in the thread.
            PyTorch's profiler can crash if another thread frees memory.
    """

    def __init__(self, lingers: bool = False) -> None:
        self._lingers = lingers
        self._left: deque[Tensor] = deque()
        self._queue: queue.Queue[tuple[Any, Tensor, str, float] | None] = queue.Queue()
        self._error: str | None = None
        self._thread: threading.Thread | None = None

    def add(self, work: dist.Work | None, content: Tensor, expected: str, timeout: float) -> None:
        """Add a send to the queue.

        Args:
            work: the send; None: the message is already sent.
            content: the message.
            expected: beginning of the error message if the message is not received.
            timeout: seconds that the send may take.
        """
        while len(self._left) > 1:  # the thread may still hold the last one
            self._left.popleft()
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, daemon=True, name="pending sends")
            self._thread.start()
        self._queue.put((work, content, expected, timeout))

    def wait(self) -> None:
        """Wait until every message is sent.

        Raises:
            PipelineError: a message was not received in time.
        """
        self._queue.join()
        self._left.clear()
        self.check()

    def check(self) -> None:
        """Raise an error if a send has failed.

        Raises:
            PipelineError: a message was not received in time.
        """
        if self._error is not None:
            raise PipelineError(self._error)

    def dismiss(self) -> None:
        """End the thread once every message is sent, without waiting for it."""
        self._queue.put(None)

    def close(self) -> None:
        """Wait until every message is sent and the thread has ended."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _serve(self) -> None:
        """Wait for the sends of the queue, in order, until it contains None."""
        while (entry := self._queue.get()) is not None:
            work, content, expected, timeout = entry
            try:
                if work is not None and self._error is None:
                    work.wait(datetime.timedelta(seconds=timeout))
            except RuntimeError as error:
                self._error = f"{expected} within pipeline_timeout={timeout:g} s, but it was not ({cause_of(error)})"
            if self._lingers:
                self._left.append(content)
            del entry, work, content  # release the memory of the message
            self._queue.task_done()
        self._queue.task_done()


def cause_of(error: Exception) -> str:
    """Return the first line of a framework's error, without the name of its source file."""
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    return first.split("] ", 1)[-1].split(" This is typically")[0].rstrip(".")
