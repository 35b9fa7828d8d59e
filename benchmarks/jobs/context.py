"""What the ranks of benchmarks/context.py run: one layer's rule, forward and backward, on this rank's part."""

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from diptych.plans.context.sequences import FLACPContext
from reference_torch.context_parallel import build_cp_context
from reference_torch.delta_rule import chunk_kda

NAMES = ("q", "k", "v", "g", "beta")


class Load(NamedTuple):
    """One sequence of one layer."""

    length: int
    """Tokens of all ranks."""
    heads: int
    width: int
    """K and V."""
    decay: float = 1.0
    """Of log decays, which are then between 0.1 and 2 a token."""

    def arrays(self, rank: int = 0, size: int = 1) -> list[np.ndarray]:
        """Return q, k, v, g and beta of a rank, with unit keys and decays of 0.1 to 2 per token."""
        parts = []
        for place in range(rank * 8 // size, (rank + 1) * 8 // size):  # an eighth at a time: the same for 1 to 8 ranks
            draw, length = np.random.default_rng(place), self.length // 8
            q, k, v = draw.standard_normal((3, 1, length, self.heads, self.width), np.float32)
            raw = draw.standard_normal((1, length, self.heads, self.width), np.float32)
            g = -np.float32(self.decay) * np.log1p(np.exp(raw))
            beta = draw.uniform(size=(1, length, self.heads)).astype(np.float32)
            parts.append([*(x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k)), v, g, beta])
        return [np.concatenate(x, axis=1) for x in zip(*parts, strict=True)]


class Part:
    """This rank's part of a load, ready to be computed."""

    def __init__(self, load: Load, dtype: torch.dtype = torch.float32) -> None:
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.offsets = torch.tensor([0, load.length], dtype=torch.int32)
        self.inputs = [torch.from_numpy(x).to(dtype).requires_grad_() for x in load.arrays(self.rank, self.size)]

    def context(self, **travel: Any) -> FLACPContext:
        """How states travel."""
        return build_cp_context(self.offsets, dist.group.WORLD if self.size > 1 else None, **travel)

    def step(self, context: FLACPContext | None) -> tuple[torch.Tensor, ...]:
        """Return outputs, and gradients of all inputs under cotangents v; without a context, of the part alone."""
        o = self.forward(context)
        return o.detach(), *self.backward(o)

    def forward(self, context: FLACPContext | None) -> torch.Tensor:
        """Return the outputs."""
        return chunk_kda(*self.inputs, cp_context=context)[0]

    def backward(self, o: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Gradients of all inputs."""
        return torch.autograd.grad(o, self.inputs, self.inputs[2].detach())


def time_steps(load: Load, exchanges: tuple[str, ...], turns: int) -> dict[str, list[float]]:
    """Seconds of every step, all ranks starting together: without exchange, and with each."""
    part = Part(load)
    ways: dict[str, FLACPContext | None] = {"alone": None}
    ways |= {exchange: part.context(cp_exchange=exchange) for exchange in exchanges}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(turns + 1):
        for name, context in ways.items():
            dist.barrier()
            begin = time.perf_counter()
            part.step(context)
            if turn:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def results(load: Load, travel: dict[str, Any], dtype: str = "float32") -> list[np.ndarray]:
    """Return outputs and gradients of this rank's part."""
    part = Part(load, getattr(torch, dtype))
    return [x.numpy() for x in part.step(part.context(**travel))]


def count_bytes(load: Load, exchange: str) -> list[list[int]]:
    """Of forward and of backward: bytes this rank handed over, each once, and bytes that others were to receive."""
    part = Part(load)
    with _counted() as forward:
        o = part.forward(part.context(cp_exchange=exchange))
    with _counted() as backward:
        part.backward(o)
    return [forward, backward]


@contextmanager
def _counted() -> Iterator[list[int]]:
    sent, plain_send, plain_gather = [0, 0], dist.isend, dist.all_gather

    def send(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        sent[0] += tensor.nbytes
        sent[1] += tensor.nbytes
        return plain_send(tensor, *args, **options)

    def gather(out: list[torch.Tensor], tensor: torch.Tensor, **options: Any) -> Any:
        sent[0] += tensor.nbytes
        sent[1] += tensor.nbytes * (len(out) - 1)
        return plain_gather(out, tensor, **options)

    dist.isend, dist.all_gather = send, gather
    try:
        yield sent
    finally:
        dist.isend, dist.all_gather = plain_send, plain_gather


def long_sequence(load: Load) -> tuple[float, int, int]:
    """Seconds of a step; bytes by which it raised the process's largest size; bytes of arguments and results."""
    part = Part(load)
    context = part.context()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    outputs = part.step(context)
    seconds = time.perf_counter() - begin
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return seconds, grown * 1024, sum(x.nbytes for x in (*part.inputs, *outputs))


class _Late:
    """A collective whose result is there some time after it was begun, and no sooner."""

    def __init__(self, work: dist.Work, delay: float) -> None:
        self._work, self._there = work, time.perf_counter() + delay

    def wait(self, timeout: Any) -> None:
        """As a Work's."""
        time.sleep(max(0.0, self._there - time.perf_counter()))
        self._work.wait(timeout)


def time_with_delay(load: Load, delays: tuple[float, ...], turns: int) -> dict[tuple[float, bool], list[float]]:
    """Seconds of steps whose exchanges take so long on their way, without overlap and with it, in turns."""
    part, plain = Part(load), dist.all_gather
    seconds: dict[tuple[float, bool], list[float]] = {(d, overlap): [] for d in delays for overlap in (False, True)}
    try:
        for turn in range(turns + 1):
            for (delay, overlap), found in seconds.items():
                dist.all_gather = lambda *a, d=delay, **o: _Late(plain(*a, **o), d)
                context = replace(part.context(), overlap=overlap)
                dist.barrier()
                begin = time.perf_counter()
                part.step(context)
                if turn:
                    found.append(time.perf_counter() - begin)
    finally:
        dist.all_gather = plain
    return seconds
