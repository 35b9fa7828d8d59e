"""Memory of NaN that emptied CPU storages point at: address space without pages of its own.

A read in C++ that no Python object saw coming gives NaN rather than somebody else's memory. One file of a mebibyte of
ones bits (NaN in every floating type) is mapped again and again, so a range of any size costs no more memory than the
file. The mappings are private: what is written there stays in the page that was written, until the range is laid anew.
Ranges stay mapped for the life of the process, since a storage may outlive everything that knows of it. Where such
mappings cannot be made (Windows; devices other than the CPU), a range is a buffer as large as the largest storage.
"""

import ctypes
import functools
import mmap
import os
import tempfile

import torch
from torch import Tensor

PATTERN_BYTES = 1 << 20
_MAP_FIXED = 0x10  # the same on Linux and macOS; Python's mmap has no name for it
_READ_WRITE = 0x1 | 0x2


class _GuardMemory:
    """A range of at least ``size`` bytes that reads as NaN."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = -(-size // PATTERN_BYTES) * PATTERN_BYTES
        self._buffer: Tensor | None = None
        if device.type == "cpu" and hasattr(mmap, "MAP_ANONYMOUS"):
            self._range = mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._range))
            self.lay()
        else:
            self._buffer = torch.full((self.size,), 0xFF, dtype=torch.uint8, device=device)
            self.address = self._buffer.data_ptr()

    def lay(self) -> None:
        """Make the whole range NaN, whatever was written there."""
        if self._buffer is not None:
            self._buffer.fill_(0xFF)
            return
        file = _pattern()
        for place in range(self.address, self.address + self.size, PATTERN_BYTES):
            if _map()(place, PATTERN_BYTES, _READ_WRITE, _MAP_FIXED | mmap.MAP_PRIVATE, file, 0) != place:
                raise MemoryError(f"guard memory: could not map {PATTERN_BYTES} bytes at {place:#x}")


_ranges: dict[torch.device, list[_GuardMemory]] = {}
"""The ranges of a device, each at least twice as large as the one before."""


def guard_address(size: int, device: torch.device) -> int:
    """Return the address of at least ``size`` bytes of NaN."""
    ranges = _ranges.setdefault(device, [])
    if not ranges or ranges[-1].size < size:
        ranges.append(_GuardMemory(1 << (size - 1).bit_length(), device))
    return ranges[-1].address


def lay_anew(device: torch.device) -> None:
    """Make all guard memory of a device NaN again, after something wrote to it."""
    for found in _ranges.get(device, []):
        found.lay()


@functools.cache
def _pattern() -> int:
    """Return the descriptor of the file, open for the life of the process."""
    with tempfile.TemporaryFile() as file:
        file.write(b"\xff" * PATTERN_BYTES)
        file.flush()
        return os.dup(file.fileno())


@functools.cache
def _map():
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    sizes = (ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    function.argtypes = (ctypes.c_void_p, *sizes)
    return function
