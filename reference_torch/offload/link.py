"""The link between host and device: copies that run beside the computation, one after the other.

On a GPU the link is one stream of its own, and memory changes hands by events. Elsewhere it is one thread, and the
"device" is a second place in the same memory, so that order, counts, bytes and numbers are those of the GPU.
"""

import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, UntypedStorage


class OffloadError(RuntimeError):
    """Offload cannot go on; what it holds is still whole."""


class Copy:
    """A copy under way on a link's thread.

    Args:
        thread: the link's; None where the copy needs none.
    """

    def __init__(self, thread: threading.Thread | None = None) -> None:
        self._done, self._thread = threading.Event(), thread
        self.error: BaseException | None = None

    def finish(self, error: BaseException | None) -> None:
        """Called by the thread."""
        self.error = error
        self._done.set()

    def wait(self) -> None:
        """Let the computation go on only after the copy.

        Raises:
            OffloadError: it failed.
        """
        while not self._done.wait(_PATIENCE):
            if self._thread is not None and not self._thread.is_alive() and not self._done.is_set():
                raise OffloadError(
                    "copy: expected its thread to finish it, got a process without that thread (by os.fork, in the "
                    "middle of a copy); fork before offload begins"
                )
        if self.error is not None:
            raise OffloadError(f"copy: expected to move bytes between host and device, got {self.error}")

    def synchronize(self) -> None:
        """Let this thread go on only after the copy."""
        self.wait()


_PATIENCE = 1.0
"""Seconds between two looks at whether the thread that copies is alive."""


class StreamCopy(Copy):
    """A copy queued on a link's stream; waiting for it makes the current stream wait, not this thread."""

    def __init__(self, event: Any) -> None:
        super().__init__()
        self._event = event

    def wait(self) -> None:
        """Let what the current stream is given from now on run after the copy."""
        torch.cuda.current_stream().wait_event(self._event)

    def synchronize(self) -> None:
        """Let this thread go on only after the copy."""
        self._event.synchronize()


class Link:
    """Copies between host and device in the order in which they are asked for.

    Args:
        device: where layers are computed.
        pin_memory: lock host memory in place, for copies that need no help of the processor; on a GPU.
    """

    delay: Callable[[int], float] | None = None
    """Seconds that a copy of so many bytes takes longer; to see what a slow link does."""

    def __init__(self, device: torch.device, pin_memory: bool = True) -> None:
        self.device = device
        self.pins = pin_memory and device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._queue: queue.SimpleQueue[list | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if self.stream is None:
            self._thread = threading.Thread(target=_serve, args=(self._queue,), daemon=True, name="offload link")
            self._thread.start()
            weakref.finalize(self, _end, self._queue, self._thread)

    @property
    def runs_here(self) -> bool:
        """Whether this code runs on the link's own thread, which cannot wait for its copies."""
        return self._thread is threading.current_thread()

    def host_copy(self, storage: UntypedStorage) -> UntypedStorage:
        """New host memory with a storage's bytes.

        Raises:
            OffloadError: the host has no room.
        """
        memory = self.host_memory(storage.nbytes())
        memory.copy_(storage)
        return memory

    def host_memory(self, nbytes: int) -> UntypedStorage:
        """New host memory.

        Raises:
            OffloadError: the host has no room.
        """
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.pins).untyped_storage()
        except RuntimeError as error:
            kind = "pinned " if self.pins else ""
            raise OffloadError(
                f"offload: expected {nbytes} bytes of {kind}host memory, got: {str(error).splitlines()[0]}; "
                "offload fewer layers, or take --no-tensor-offload-pin-memory"
            ) from error

    def copy(self, target: UntypedStorage, source: UntypedStorage) -> Copy:
        """Copy all bytes of one storage to another of the same size, after what has been computed so far.

        Both must live until somebody has waited for the copy.
        """
        seconds = 0.0 if self.delay is None else self.delay(source.nbytes())
        if self.stream is None:
            copy = Copy(self._thread)
            job = [copy, _as_bytes(target), _as_bytes(source), seconds]
            if self._thread is not None and self._thread.is_alive():
                self._queue.put(job)
            else:  # the interpreter is ending, or this process is a fork of the one that had the thread
                _carry_out(job)
            return copy
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            if seconds:
                torch.cuda._sleep(int(seconds * _CYCLES))
            _as_bytes(target).copy_(_as_bytes(source), non_blocking=True)
            return StreamCopy(self.stream.record_event())


_CYCLES = 1.5e9
"""Of a GPU in a second, about."""


def _as_bytes(storage: UntypedStorage) -> Tensor:
    with torch.inference_mode(False):  # else only inference mode could write it, which the thread is not in
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # pyright: ignore


def _end(jobs: queue.SimpleQueue, thread: threading.Thread) -> None:
    """Let a link's thread end, and wait for that: an interpreter that ends while it lets go of a tensor aborts."""
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join(timeout=10.0)


def _serve(jobs: queue.SimpleQueue) -> None:
    """Carry copies out until told to stop."""
    while (job := jobs.get()) is not None:
        _carry_out(job)
        del job


def _carry_out(job: list) -> None:
    """Make a copy, and say so once nothing here holds its memories any more."""
    copy, target, source, seconds = job
    job.clear()
    failure = None
    try:
        time.sleep(seconds)
        target.copy_(source)
    except BaseException as error:
        failure = error
    del target, source
    copy.finish(failure)
