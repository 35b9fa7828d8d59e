"""Standard output that tolerates early closing, a closed descriptor, and encodings without some characters."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

STANDARD_OUTPUT = 1
"""File descriptor of standard output."""


class StandardOutput:
    """A text stream that records a failed write instead of raising an error.

    After a failure further text is dropped, and ``failure`` has the cause, so that a computation can end in order.
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
        """Write buffered text."""
        if self.failure is None and self._stream is not None:
            try:
                self._stream.flush()
            except OSError as error:
                self._fail(error)

    def isatty(self) -> bool:
        """Return True if the stream is a terminal."""
        return self._stream is not None and self._stream.isatty()

    def __getattr__(self, name: str) -> Any:
        """Return another attribute of the stream, such as encoding or fileno."""
        return getattr(self.__dict__["_stream"], name)

    def _fail(self, error: OSError) -> None:
        self.failure = error
        with contextlib.suppress(OSError, ValueError, AttributeError):  # the stream may not be a file
            if self._stream.fileno() == STANDARD_OUTPUT:  # the interpreter flushes it again at exit
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, STANDARD_OUTPUT)
                os.close(null)


@contextlib.contextmanager
def standard_output() -> Iterator[StandardOutput]:
    """Replace sys.stdout by a StandardOutput."""
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
    """Return the error of a failed write to a stream; None if no write failed or the stream does not record it."""
    return stream.failure if isinstance(stream, StandardOutput) else None


def _open_descriptors() -> None:
    """Open standard descriptors that are closed, because the next opened file would get their numbers and their output.

    Standard input, output and error have numbers 0 to 2, and a new descriptor gets the lowest number that is free.
    """
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(opened)
