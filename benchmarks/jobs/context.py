"""Code that the ranks of benchmarks/context.py execute: the delta rule of one layer on the part of a rank."""

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
    """The sizes of one sequence of one layer."""

    length: int
    """Tokens of all ranks together."""
    heads: int
    width: int
    """Width of keys and of values."""
    decay: float = 1.0
    """Scale of the log decays, which are this factor times 0.1 to 2 per token."""

    def arrays(self, rank: int = 0, size: int = 1) -> list[np.ndarray]:
        """Return random q, k, v, g and beta of a rank, with unit queries and keys."""
        parts = []
        for eighth in range(rank * 8 // size, (rank + 1) * 8 // size):  # so that 1, 2, 4 and 8 ranks get equal tokens
            draw = np.random.default_rng(eighth)
            length = self.length // 8
            q, k, v = draw.standard_normal((3, 1, length, self.heads, self.width), np.float32)
            raw = draw.standard_normal((1, length, self.heads, self.width), np.float32)
            g = -np.float32(self.decay) * np.log1p(np.exp(raw))
            beta = draw.uniform(size=(1, length, self.heads)).astype(np.float32)
            parts.append([*(x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k)), v, g, beta])
        return [np.concatenate(x, axis=1) for x in zip(*parts, strict=True)]


class Part:
    """The part of a load that this rank computes."""

    def __init__(self, load: Load, dtype: torch.dtype = torch.float32) -> None:
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.offsets = torch.tensor([0, load.length], dtype=torch.int32)
        self.inputs = [torch.from_numpy(x).to(dtype).requires_grad_() for x in load.arrays(self.rank, self.size)]

    def context(self, **options: Any) -> FLACPContext:
        """Return the context of an exchange."""
        return build_cp_context(self.offsets, dist.group.WORLD if self.size > 1 else None, **options)

    def step(self, context: FLACPContext | None) -> tuple[torch.Tensor, ...]:
        """Return outputs and gradients of all inputs; without a context, the part is an independent sequence."""
        o = self.forward(context)
        return o.detach(), *self.backward(o)

    def forward(self, context: FLACPContext | None) -> torch.Tensor:
        """Return the outputs."""
        return chunk_kda(*self.inputs, cp_context=context)[0]

    def backward(self, o: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the gradients of all inputs with v as the cotangents."""
        return torch.autograd.grad(o, self.inputs, self.inputs[2].detach())


def time_steps(load: Load, exchanges: tuple[str, ...], turns: int) -> dict[str, list[float]]:
    """Return the seconds of every step, without exchange and with each exchange; all ranks start together."""
    part = Part(load)
    contexts: dict[str, FLACPContext | None] = {"alone": None}
    contexts |= {exchange: part.context(cp_exchange=exchange) for exchange in exchanges}
    seconds: dict[str, list[float]] = {name: [] for name in contexts}
    for turn in range(turns + 1):
        for name, context in contexts.items():
            dist.barrier()
            begin = time.perf_counter()
            part.step(context)
            if turn:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def results(load: Load, options: dict[str, Any], dtype: str = "float32") -> list[np.ndarray]:
    """Return the outputs and gradients of the part of this rank."""
    part = Part(load, getattr(torch, dtype))
    return [x.numpy() for x in part.step(part.context(**options))]


def count_bytes(load: Load, exchange: str) -> list[list[int]]:
    """Return the payload bytes and the wire bytes that this rank sends, in forward and in backward."""
    part = Part(load)
    with _counted() as forward:
        o = part.forward(part.context(cp_exchange=exchange))
    with _counted() as backward:
        part.backward(o)
    return [forward, backward]


@contextmanager
def _counted() -> Iterator[list[int]]:
    sent = [0, 0]
    plain_send = dist.isend
    plain_gather = dist.all_gather

    def send(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        sent[0] += tensor.nbytes
        sent[1] += tensor.nbytes
        return plain_send(tensor, *args, **options)

    def gather(out: list[torch.Tensor], tensor: torch.Tensor, **options: Any) -> Any:
        sent[0] += tensor.nbytes
        sent[1] += tensor.nbytes * (len(out) - 1)
        return plain_gather(out, tensor, **options)

    dist.isend = send
    dist.all_gather = gather
    try:
        yield sent
    finally:
        dist.isend = plain_send
        dist.all_gather = plain_gather


def long_sequence(load: Load) -> tuple[float, int, int]:
    """Return seconds of a step, growth of the peak memory of the process, and bytes of arguments and results."""
    part = Part(load)
    context = part.context()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    outputs = part.step(context)
    seconds = time.perf_counter() - begin
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return seconds, grown * 1024, sum(x.nbytes for x in (*part.inputs, *outputs))


class _Late:
    """A collective whose result arrives after a delay."""

    def __init__(self, work: dist.Work, delay: float) -> None:
        self._work = work
        self._arrival = time.perf_counter() + delay

    def wait(self, timeout: Any) -> None:
        """Wait for the result, as torch.distributed.Work does."""
        time.sleep(max(0.0, self._arrival - time.perf_counter()))
        self._work.wait(timeout)


def time_with_delay(load: Load, delays: tuple[float, ...], turns: int) -> dict[tuple[float, bool], list[float]]:
    """Return the seconds of alternating steps with delayed exchanges, without and with overlap."""
    part = Part(load)
    plain = dist.all_gather
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
