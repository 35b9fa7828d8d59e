"""Storage of many arrays: in memory up to a limit, then in memory-mapped files."""

import mmap
import tempfile
from pathlib import Path
from typing import Self

import numpy as np

SEGMENT_BYTES = 64 * 2**20
"""Size of a file; a larger array has a file of its own."""
_ALIGNMENT = 64


class ArrayStore:
    """A store of arrays; arrays beyond a limit are in files of a temporary folder.

    The folder exists while the store is entered. Its arrays are not valid afterwards.

    Args:
        limit: bytes of arrays that stay in memory.
    """

    def __init__(self, limit: int) -> None:
        self.bytes = 0
        """Bytes of all arrays."""
        self.bytes_on_disk = 0
        self._limit = limit
        self._folder: tempfile.TemporaryDirectory | None = None
        self._segment: mmap.mmap | None = None
        self._end = 0

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="recording-")
        return self

    def __exit__(self, *exception: object) -> None:
        self._segment = None
        if self._folder is not None:
            self._folder.cleanup()

    def keep(self, array: np.ndarray) -> np.ndarray:
        """Return an equal array, which is the given one or is in a file."""
        self.bytes += array.nbytes
        if self.bytes <= self._limit or array.nbytes == 0:
            return array
        self.bytes_on_disk += array.nbytes
        stored = np.frombuffer(self._allocated(array.nbytes), array.dtype, array.size, self._end).reshape(array.shape)
        stored[...] = array
        self._end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        return stored

    def _allocated(self, size: int) -> mmap.mmap:
        """Return a mapped file with as many bytes free from ``self._end``."""
        if self._segment is None or self._end + size > len(self._segment):
            assert self._folder is not None, "a store has to be entered"
            if self._segment is not None and hasattr(mmap, "MADV_DONTNEED"):
                self._segment.madvise(mmap.MADV_DONTNEED)  # the file keeps the data; the process needs no memory for it
            number = len(list(Path(self._folder.name).iterdir()))
            with open(Path(self._folder.name) / f"{number}.bin", "w+b") as file:
                file.truncate(max(size, SEGMENT_BYTES))
                self._segment = mmap.mmap(file.fileno(), 0)
            self._end = 0
        return self._segment
