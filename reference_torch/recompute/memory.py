"""Bytes really allocated: what is kept from forward to backward, and the peak over both."""

import os
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

_MARK = "forward done"


class MemoryUse(NamedTuple):
    """Bytes above what was allocated when the measurement began."""

    saved: int
    """Held when forward has returned, its result included."""
    peak: int
    """The most held at any moment of forward and backward."""


def measure_memory(forward: Callable[[], Tensor], backward: Callable[[Tensor], object]) -> MemoryUse:
    """Run forward and backward once, counting every allocation.

    On the CPU each allocation and release of PyTorch's allocator is seen, those inside operations included. On
    CUDA the caching allocator's counters are read. Run once before, so that buffers made on first use exist.

    Args:
        forward: gives the tensor backward starts from.
        backward: is handed that tensor; what it returns is dropped at once.
    """
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return _measure_cuda(forward, backward)
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else the profiler writes to stderr that it starts and stops
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = forward()
        with record_function(_MARK):
            pass
        backward(result)
        del result
    events = profiler.profiler.kineto_results.events()  # pyright: ignore[reportOptionalMemberAccess]
    held = peak = saved = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        if event.name() == _MARK:
            saved = held
        elif event.name() == "[memory]":
            held += event.nbytes()  # pyright: ignore[reportAttributeAccessIssue]
            peak = max(peak, held)
    return MemoryUse(saved, peak)


def _measure_cuda(forward: Callable[[], Tensor], backward: Callable[[Tensor], object]) -> MemoryUse:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = forward()
    saved = torch.cuda.memory_allocated() - before
    backward(result)
    torch.cuda.synchronize()
    return MemoryUse(saved, torch.cuda.max_memory_allocated() - before)
