"""What tests of recompute share: tensors, gradients under normal cotangents, what was replayed, bytes alive."""

import contextlib
import gc
import itertools
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from reference_torch.recompute import CheckpointWithoutOutput, internals, lazy_restore
from reference_torch.recompute import checkpoint as checkpoint_module
from reference_torch.recompute.region import Region, slot_of

ROOT = Path(__file__).parents[2]
SLACK = 16384
"""Bytes a measurement may be off by: generator states and empty tensors, not activations."""


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float64, grad: bool = True) -> Tensor:
    """A leaf of normal numbers that leaves the global generator alone."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype).requires_grad_(grad)


def gradients(outputs, inputs, seed: int = 100, **options) -> tuple[Tensor, ...]:
    """Of a tensor or several, under normal cotangents."""
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    cotangents = [normal(seed + i, *o.shape, dtype=o.dtype, grad=False) for i, o in enumerate(outputs)]
    return torch.autograd.grad(outputs, inputs, cotangents, **options)


def assert_equal(actual, expected) -> None:
    """Bit for bit, finite, and not zero all over."""
    for a, b in zip(actual, expected, strict=True):
        assert type(a) is Tensor
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
        assert a.numel() == 0 or (a.isfinite().all() and a.any())


def is_empty(tensor: Tensor) -> bool:
    """Whether a tensor's memory was given back."""
    slot = slot_of(tensor)
    return slot is not None and not slot.is_full


def reader(y: Tensor) -> Tensor:
    """Needs the values of y in backward, by way of y itself, of views, and of an alias with other strides."""
    return (y * y.sin()).flatten().cumsum(0) + (y.transpose(0, -1) ** 2).flatten() * y.reshape(-1)


def exact_reader(y: Tensor) -> Tensor:
    """As reader, without a cumulative sum, which a GPU does not round the same in every call."""
    return (y * y.sin()).flatten() + (y.transpose(0, -1) ** 2).flatten() * y.reshape(-1)


class Trace:
    """Regions made, and the names of those replayed, in order."""

    def __init__(self) -> None:
        self.regions: list[weakref.ref[Region]] = []
        self.replayed: list[str] = []

    @property
    def alive(self) -> list[str]:
        """Names of the regions somebody still holds."""
        return [region.name for region in (reference() for reference in self.regions) if region is not None]


@contextlib.contextmanager
def traced() -> Iterator[Trace]:
    trace = Trace()

    class Traced(Region):
        def __init__(self, *args) -> None:
            super().__init__(*args)
            trace.regions.append(weakref.ref(self))

        def replay(self) -> None:
            trace.replayed.append(self.name)
            super().replay()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_module, "Region", Traced)
        yield trace


@contextlib.contextmanager
def reference_counting_only() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def without_exchange(patch: pytest.MonkeyPatch) -> None:
    """As on PyTorch 2.11, where memory is copied back."""
    patch.setattr(internals, "HAS_SWAP", False)
    patch.setattr(internals, "HAS_READ_MESSAGE", False)


class Memory:
    """Live bytes by the allocator's own events, from the start of the measurement."""

    def __init__(self) -> None:
        self._events: list[tuple[int, int]] = []
        self._marks: dict[str, int] = {}

    def live(self, mark: str) -> int:
        return sum(size for time, size in self._events if time <= self._marks[mark])

    def peak(self, first: str, last: str) -> int:
        """Most bytes live between two marks."""
        totals = itertools.accumulate(size for _, size in self._events)
        within = [
            total
            for (time, _), total in zip(self._events, totals, strict=True)
            if self._marks[first] <= time <= self._marks[last]
        ]
        return max([self.live(first), *within])


def measure(body: Callable[[Callable[[str], None]], object]) -> Memory:
    """Run ``body(mark)`` twice, the second time measured: the first makes what is made once a process."""
    body(lambda name: None)
    memory = Memory()

    def mark(name: str) -> None:
        with torch.profiler.record_function(f"mark {name}"):
            pass

    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        held = body(mark)
    del held
    assert profile.profiler is not None
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            memory._events.append((event.start_ns(), event.nbytes()))
        elif event.name().startswith("mark "):
            memory._marks[event.name().removeprefix("mark ")] = event.end_ns()
    memory._events.sort(key=lambda event: event[0])
    return memory


def run_process(source: str) -> str:
    """What a process prints that runs this source; a crash of it fails the test."""
    done = subprocess.run([sys.executable, "-c", source], timeout=120, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"exit status {done.returncode}: {done.stderr[-2000:]}"
    return done.stdout


def branch(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.softmax(-1), (x @ x.t()).tanh()


def aliases(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = x.sigmoid()
    return y, y.view(-1), y.t()[1:]


CALLS: dict[str, Callable] = {
    "gelu": F.gelu,
    "tanh": torch.tanh,
    "softmax": lambda x: x.softmax(-1),
    "sigmoid of a view": lambda x: x.t().sigmoid(),
    "view of a result": lambda x: x.tanh().view(-1)[3:],
    "transposed": lambda x: (x @ x.t()).tanh().t(),
    "chain": lambda x: F.gelu(x @ x.t()).softmax(-1) * x.sum(),
    "dropout": lambda x: F.dropout(F.gelu(x), 0.3),
    "two outputs": branch,
    "outputs in one storage": aliases,
    "list": lambda x: [x.exp(), x.cos()],
    "saved output kept twice": lambda x: (lambda y: (y, y * y))(x.tanh()),
}


def listed(output) -> list[Tensor]:
    return [output] if isinstance(output, Tensor) else list(output)


def plain_gradients(call: Callable, x: Tensor, seed: int = 7) -> tuple[Tensor, ...]:
    torch.manual_seed(seed)
    return gradients([reader(y) for y in listed(call(x))], [x])


class HandsBack(torch.autograd.Function):
    """Gives an alias of its second input, with a new graph node."""

    @staticmethod
    def forward(ctx, x, other):
        return other.detach()

    @staticmethod
    def backward(ctx, grad):
        return grad * 2, grad * 3


def prepared(scoped: bool, call: Callable = F.gelu, weight: Tensor | None = None):
    """(leaves, loss, output, checkpoint) of a call with its output discarded."""
    x = normal(0, 4, 4)
    checkpoint = CheckpointWithoutOutput("call")
    with lazy_restore() if scoped else contextlib.nullcontext():
        args = (x * 1,) if weight is None else (x * 1, weight)
        y = checkpoint.checkpoint(call, *args)
        loss = reader(y)
        checkpoint.discard_output_and_register_recompute(loss)
    assert is_empty(y)
    return x, loss, y, checkpoint
