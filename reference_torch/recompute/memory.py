"""Measurement of allocated bytes: those saved for backward, and the peak of forward and backward."""

import os
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

_MARK = "forward done"


class MemoryUse(NamedTuple):
    """Allocated bytes, relative to the start of the measurement."""

    saved: int
    """Bytes allocated when forward has returned, including its result."""
    peak: int
    """Largest number of bytes allocated during forward and backward."""


def measure_memory(forward: Callable[[], Tensor], backward: Callable[[Tensor], object]) -> MemoryUse:
    """Run forward and backward once and count every allocation.

    On the CPU, the profiler records each allocation and release of PyTorch's allocator, including those inside
    operations. On CUDA, the counters of the caching allocator are read. Run both functions once before, so that buffers
    allocated on first use exist.

    Args:
        forward: returns the tensor from which backward starts.
        backward: receives that tensor; its result is dropped at once.
    """
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return _measure_cuda(forward, backward)
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise the profiler writes its start and stop to stderr
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = forward()
        with record_function(_MARK):
            pass
        backward(result)
        del result
    events = profiler.profiler.kineto_results.events()  # pyright: ignore[reportOptionalMemberAccess]
    held = 0
    peak = 0
    saved = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        if event.name() == _MARK:
            saved = held
        elif event.name() == "[memory]":
            held += event.nbytes()  # pyright: ignore[reportAttributeAccessIssue]
            peak = max(peak, held)
    return MemoryUse(saved, peak)


def _measure_cuda(forward: Callable[[], Tensor], backward: Callable[[Tensor], object]) -> MemoryUse:
    """Measure with the counters of the caching allocator."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = forward()
    saved = torch.cuda.memory_allocated() - before
    backward(result)
    torch.cuda.synchronize()
    return MemoryUse(saved, torch.cuda.max_memory_allocated() - before)
