"""The link between host and device, which copies storages in order and in parallel with the computation.

On a GPU the link is a separate stream, synchronized by events. Elsewhere it is a thread, and the "device" is a second
region of host memory, so that order, counts, bytes and values are equal to those on a GPU.
"""

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, UntypedStorage

T = TypeVar("T")


class OffloadError(RuntimeError):
    """A failure of offload that leaves all tensors intact."""


def for_each(items: Iterable[T], function: Callable[[T], object]) -> None:
    """Call a function with every item, even after an error, then raise the first error."""
    errors = []
    for item in items:
        try:
            function(item)
        except RuntimeError as error:  # an OffloadError, or out of memory
            errors.append(error)
    if errors:
        raise errors[0]


class Copy:
    """A copy on the thread of a link.

    Args:
        thread: thread of the link; None if the copy needs none.
    """

    def __init__(self, thread: threading.Thread | None = None) -> None:
        self._done = threading.Event()
        self._thread = thread
        self.error: BaseException | None = None

    def finish(self, error: BaseException | None) -> None:
        """Mark the copy as finished; the thread calls this.

        Args:
            error: why the copy failed, if it did.
        """
        self.error = error
        self._done.set()

    def wait(self) -> None:
        """Make the computation wait for the copy.

        Raises:
            OffloadError: the copy failed.
        """
        while not self._done.wait(_LIVENESS_INTERVAL):
            if self._thread is not None and not self._thread.is_alive() and not self._done.is_set():
                raise OffloadError(
                    "copy: expected its thread to finish it, got a process without that thread (by os.fork, in the "
                    "middle of a copy); fork before offload begins"
                )
        if self.error is not None:
            raise OffloadError(f"copy: expected to move bytes between host and device, got {self.error}")

    def synchronize(self) -> None:
        """Block this thread until the copy has ended."""
        self.wait()


_LIVENESS_INTERVAL = 1.0
"""Seconds between two checks that the thread of the link is alive."""


class StreamCopy(Copy):
    """A copy on the stream of a link; wait() blocks the current stream of the device, not this thread."""

    def __init__(self, event: Any, device: torch.device) -> None:
        super().__init__()
        self._event = event
        self._device = device  # the current device may be another one

    def wait(self) -> None:
        """Make later work of the current stream wait for the copy."""
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def synchronize(self) -> None:
        """Block this thread until the copy has ended."""
        self._event.synchronize()


class Link:
    """A queue of copies between host and device.

    Args:
        device: device on which layers are computed.
        pin_memory: allocate pinned host memory, for asynchronous copies; only on a GPU.
    """

    delay: Callable[[int], float] | None = None
    """A function from bytes to extra seconds for each copy, to simulate a slow link."""

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
        """True on the thread of the link, which cannot wait for its own copies."""
        return self._thread is threading.current_thread()

    def host_copy(self, storage: UntypedStorage) -> UntypedStorage:
        """Return new host memory with the bytes of a storage.

        Raises:
            OffloadError: the host has no free memory.
        """
        copy = self.host_memory(storage.nbytes())
        copy.copy_(storage)
        return copy

    def host_memory(self, nbytes: int) -> UntypedStorage:
        """Return new host memory of ``nbytes`` bytes.

        Raises:
            OffloadError: the host has no free memory.
        """
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.pins).untyped_storage()
        except RuntimeError as error:
            kind = "pinned " if self.pins else ""
            raise OffloadError(
                f"offload: expected {nbytes} bytes of {kind}host memory, got: {str(error).splitlines()[0]}; "
                "offload fewer layers, or use --no-tensor-offload-pin-memory"
            ) from error

    def copy(self, target: UntypedStorage, source: UntypedStorage) -> Copy:
        """Start to copy one storage to another of the same size, after all computation queued so far.

        Args:
            target: storage to write; the caller keeps it alive until it has waited for the copy.
            source: storage to read, likewise.
        """
        seconds = 0.0 if self.delay is None else self.delay(source.nbytes())
        if self.stream is None:
            copy = Copy(self._thread)
            job = [copy, _as_bytes(target), _as_bytes(source), seconds]
            if self._thread is not None and self._thread.is_alive():
                self._queue.put(job)
            else:  # the interpreter is exiting, or this process is a fork without the thread
                _carry_out(job)
            return copy
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            if seconds:
                torch.cuda._sleep(int(seconds * _CYCLES))
            _as_bytes(target).copy_(_as_bytes(source), non_blocking=True)
            return StreamCopy(self.stream.record_event(), self.device)


_CYCLES = 1.5e9
"""Approximate clock cycles of a GPU per second."""


def _as_bytes(storage: UntypedStorage) -> Tensor:
    """Return a storage as a tensor of bytes."""
    with torch.inference_mode(False):  # the thread cannot write an inference tensor
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # pyright: ignore


def _end(jobs: queue.SimpleQueue, thread: threading.Thread) -> None:
    """End the thread of a link and wait for it, because the interpreter aborts if a tensor is freed during exit."""
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join(timeout=10.0)


def _serve(jobs: queue.SimpleQueue) -> None:
    """Run copies until the queue contains None."""
    while (job := jobs.get()) is not None:
        _carry_out(job)
        del job


def _carry_out(job: list) -> None:
    """Run a copy and mark it as finished once this function holds no reference to its storages."""
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
