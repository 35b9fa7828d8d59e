"""What ranks send each other, counted, and what they do meanwhile."""

import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.jobs.context import Load, time_with_delay
from reference_torch.context_parallel import build_cp_context
from reference_torch.context_parallel.exchange import StateExchange, run_exchange


def count_sent(
    size: int, exchange: str, heads: int, key: int, value: int, wire: str | None = None, options: Any = ()
) -> tuple[int, int, int]:
    """Bytes this rank handed over, bytes that others were to receive, and messages, in one exchange."""
    sent = [0, 0, 0]
    plain_send, plain_gather = dist.isend, dist.all_gather

    def send(tensor: torch.Tensor, *args: Any, **options: Any):
        sent[0] += tensor.nbytes
        sent[1] += tensor.nbytes
        sent[2] += 1
        return plain_send(tensor, *args, **options)

    def gather(out: list[torch.Tensor], tensor: torch.Tensor, **options: Any):
        sent[0] += tensor.nbytes
        sent[1] += tensor.nbytes * (size - 1)
        sent[2] += 1
        return plain_gather(out, tensor, **options)

    dist.isend, dist.all_gather = send, gather
    try:
        offsets = torch.tensor([0, 4 * size], dtype=torch.int32)
        settings = {"cp_exchange": exchange, "cp_wire_dtype": wire} | dict(options)
        context = build_cp_context(offsets, dist.group.WORLD, **settings)
        map_ = torch.zeros(heads, key, key), torch.ones(heads, key, value)
        run_exchange(*map_, torch.zeros(heads, key), context)
    finally:
        dist.isend, dist.all_gather = plain_send, plain_gather
    return sent[0], sent[1], sent[2]


def seconds_beside_sleep(load: Load, delay: float, work: float, turns: int) -> dict[bool, list[float]]:
    """Of steps, by whether exchanges overlap: a rank sleeps where it computes on once an exchange can begin, forward
    and backward, and what is exchanged is there so much later.
    """
    plain_begin, plain_back = StateExchange.begin, StateExchange.exchange_gradients

    def begin(self: StateExchange, finals: torch.Tensor) -> None:
        plain_begin(self, finals)
        time.sleep(work)

    def exchange_gradients(self: StateExchange, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        overlapped_work = self.overlapped_work
        assert overlapped_work is not None, "there is something to compute meanwhile"
        if self.context.overlap:
            self.overlapped_work = lambda: (time.sleep(work), overlapped_work())
        else:
            time.sleep(work)
        return plain_back(self, *arguments)

    StateExchange.begin, StateExchange.exchange_gradients = begin, exchange_gradients
    try:
        found = time_with_delay(load, (delay,), turns)
    finally:
        StateExchange.begin, StateExchange.exchange_gradients = plain_begin, plain_back
    return {overlap: seconds for (_, overlap), seconds in found.items()}
