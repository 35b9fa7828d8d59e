"""Memory filled with NaN, to which emptied CPU storages point.

A read in C++ that bypasses the Python guards then gives NaN instead of unrelated memory. One file of 1 MiB with all
bits set (NaN in every floating type) is mapped repeatedly, so a range of any size costs no more memory than the file.
The mappings are private: a write changes only the written page, until the range is mapped again. Ranges stay mapped
for the life of the process, because a storage may outlive all other objects. Where such mappings are not available
(Windows, devices other than the CPU), a range is a buffer as large as the largest storage.
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
            self.reset()
        else:
            self._buffer = torch.full((self.size,), 0xFF, dtype=torch.uint8, device=device)
            self.address = self._buffer.data_ptr()

    def reset(self) -> None:
        """Fill the whole range with NaN again, whatever was written there."""
        if self._buffer is not None:
            self._buffer.fill_(0xFF)
            return
        file = _pattern()
        for address in range(self.address, self.address + self.size, PATTERN_BYTES):
            if _map()(address, PATTERN_BYTES, _READ_WRITE, _MAP_FIXED | mmap.MAP_PRIVATE, file, 0) != address:
                raise MemoryError(f"guard memory: could not map {PATTERN_BYTES} bytes at {address:#x}")


_ranges: dict[torch.device, list[_GuardMemory]] = {}
"""The ranges of a device; each is at least twice as large as the previous one."""


def guard_address(size: int, device: torch.device) -> int:
    """Return the address of at least ``size`` bytes of NaN on a device."""
    ranges = _ranges.setdefault(device, [])
    if not ranges or ranges[-1].size < size:
        ranges.append(_GuardMemory(1 << (size - 1).bit_length(), device))
    return ranges[-1].address


def reset_guard_memory(device: torch.device) -> None:
    """Fill all guard memory of a device with NaN again, after a write to it."""
    for memory in _ranges.get(device, []):
        memory.reset()


@functools.cache
def _pattern() -> int:
    """Return the descriptor of the file with the pattern, open for the life of the process."""
    with tempfile.TemporaryFile() as file:
        file.write(b"\xff" * PATTERN_BYTES)
        file.flush()
        return os.dup(file.fileno())


@functools.cache
def _map():
    """Return mmap of the C library, which can map at a fixed address."""
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    sizes = (ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    function.argtypes = (ctypes.c_void_p, *sizes)
    return function
