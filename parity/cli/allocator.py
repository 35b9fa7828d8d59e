"""The allocator of the C library, which JAX on a CPU asks for the temporary memory of every step."""

import ctypes
import sys

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt."""
MOST = 2**31 - 1
"""Largest value of a parameter."""


def keep_freed_memory() -> bool:
    """Let this process keep memory that it frees, and return whether its C library can.

    glibc returns large freed blocks to the system, and each step touches every page of new ones first. Without that, a
    step of a small model in JAX takes about half the time on a CPU. The process then never needs less memory than at
    its peak.

    Reference: mallopt(3).
    """
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is None:
        return False
    return all(mallopt(parameter, MOST) == 1 for parameter in (TRIM_THRESHOLD, MMAP_THRESHOLD))
