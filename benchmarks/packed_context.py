"""Context parallelism over packed documents: a step of the second of two ranks beside the same part alone.

    python -m benchmarks.packed_context

Two gloo ranks of one thread each, 2,048 tokens a rank, H=4, K=V=64, float32, forward and backward of KDA. The first
document ends 64 tokens after the border; documents of 256 tokens follow.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import statistics
import time

import numpy as np
import torch
import torch.distributed as dist

from reference_torch.context_parallel import build_cp_context
from reference_torch.delta_rule import chunk_kda
from reference_torch.rank_pool import RankPool

PART, HEADS, WIDTH, TURNS = 2048, 4, 64, 9


def step_times() -> dict[str, list[float]]:
    """Return this rank's seconds of every step, with its context and with its sequences as if they began here."""
    rank, size = dist.get_rank(), dist.get_world_size()
    ends = np.r_[0, PART + 64 : size * PART : 256, size * PART].astype(np.int32)
    context = build_cp_context(torch.from_numpy(ends), dist.group.WORLD)
    draw = torch.Generator().manual_seed(rank)
    q, k, v, raw = (torch.randn(1, PART, HEADS, WIDTH, generator=draw) for _ in range(4))
    beta = torch.rand(1, PART, HEADS, generator=draw)
    inputs = [torch.nn.functional.normalize(q, dim=-1), torch.nn.functional.normalize(k, dim=-1), v]
    inputs = [x.requires_grad_() for x in (*inputs, -torch.nn.functional.softplus(raw), beta)]
    ways = {"over ranks": {"cp_context": context}, "alone": {"cu_seqlens": context.cu_seqlens}}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(TURNS + 1):
        for name, options in ways.items():
            dist.barrier()
            begin = time.process_time()
            o, _ = chunk_kda(*inputs, **options)
            torch.autograd.grad(o, inputs, inputs[2].detach())
            if turn:
                seconds[name].append(time.process_time() - begin)
    return seconds


def main() -> None:
    """Print seconds of computing of each rank."""
    with RankPool(2) as pool:
        found = pool.run("benchmarks.packed_context:step_times")
    for rank, seconds in enumerate(found):
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        ratio = medians["over ranks"] / medians["alone"]
        print(f"rank {rank}: {', '.join(f'{n} {s:.3f} s' for n, s in medians.items())}, ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
