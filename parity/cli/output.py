"""Standard output that may close early, be closed from the start, or have an alphabet too small for what is written."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

STANDARD_OUTPUT = 1
"""Its file descriptor."""


class StandardOutput:
    """A text stream that passes on what is written, and keeps a failure to itself instead of raising it.

    After a failure what is written is dropped, and ``failure`` tells the cause: who computes can end in order.
    Characters that the stream's encoding lacks are written as escapes.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.failure: OSError | None = None

    def write(self, text: str) -> int:
        """Write text; return its length."""
        if self.failure is None and self._stream is not None:
            try:
                self._stream.write(text)
            except UnicodeEncodeError as error:
                self.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
            except OSError as error:
                self._fail(error)
        return len(text)

    def flush(self) -> None:
        """Write out what is buffered."""
        if self.failure is None and self._stream is not None:
            try:
                self._stream.flush()
            except OSError as error:
                self._fail(error)

    def isatty(self) -> bool:
        """Return whether a terminal shows what is written."""
        return self._stream is not None and self._stream.isatty()

    def __getattr__(self, name: str) -> Any:
        """Return what else the stream has: encoding, fileno and so on."""
        return getattr(self.__dict__["_stream"], name)

    def _fail(self, error: OSError) -> None:
        self.failure = error
        with contextlib.suppress(OSError, ValueError, AttributeError):  # of a stream that is no file
            if self._stream.fileno() == STANDARD_OUTPUT:  # the interpreter flushes it once more when it ends
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, STANDARD_OUTPUT)
                os.close(null)


@contextlib.contextmanager
def standard_output() -> Iterator[StandardOutput]:
    """Put a StandardOutput in the place of sys.stdout."""
    original = sys.stdout
    if original is None or original is sys.__stdout__:
        _open_descriptors()
    output = StandardOutput(original)
    sys.stdout = output  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield output
    finally:
        output.flush()
        sys.stdout = original


def output_failure(stream: Any) -> OSError | None:
    """Return why a stream no longer writes; None where it does, or cannot tell."""
    return stream.failure if isinstance(stream, StandardOutput) else None


def _open_descriptors() -> None:
    """Open the standard descriptors that were closed: the next file would get their numbers, and what is written there.

    Standard input, output and error have numbers 0 to 2, and a new descriptor gets the lowest number that is free.
    """
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(opened)
