"""Context parallelism over packed documents: a step of each rank, compared with the same tokens on one rank.

    python -m benchmarks.packed_context

The benchmark runs KDA forward and backward on two gloo ranks of one thread each, with 2,048 tokens per rank, H=4,
K=V=64 and float32. The first document ends 64 tokens after the border between the ranks; documents of 256 tokens
follow.
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

PART = 2048
HEADS = 4
WIDTH = 64
TURNS = 9


def step_times() -> dict[str, list[float]]:
    """Return the CPU seconds of each step of this rank, with context parallelism and with independent sequences."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    ends = np.r_[0, PART + 64 : size * PART : 256, size * PART].astype(np.int32)
    context = build_cp_context(torch.from_numpy(ends), dist.group.WORLD)
    draw = torch.Generator().manual_seed(rank)
    q, k, v, raw = (torch.randn(1, PART, HEADS, WIDTH, generator=draw) for _ in range(4))
    beta = torch.rand(1, PART, HEADS, generator=draw)
    inputs = [torch.nn.functional.normalize(q, dim=-1), torch.nn.functional.normalize(k, dim=-1), v]
    inputs = [x.requires_grad_() for x in (*inputs, -torch.nn.functional.softplus(raw), beta)]
    variants = {"over ranks": {"cp_context": context}, "alone": {"cu_seqlens": context.cu_seqlens}}
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(TURNS + 1):
        for name, options in variants.items():
            dist.barrier()
            begin = time.process_time()
            o, _ = chunk_kda(*inputs, **options)
            torch.autograd.grad(o, inputs, inputs[2].detach())
            if turn:
                seconds[name].append(time.process_time() - begin)
    return seconds


def main() -> None:
    """Print the median CPU seconds of each rank."""
    with RankPool(2) as pool:
        found = pool.run("benchmarks.packed_context:step_times")
    for rank, seconds in enumerate(found):
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        ratio = medians["over ranks"] / medians["alone"]
        print(f"rank {rank}: {', '.join(f'{n} {s:.3f} s' for n, s in medians.items())}, ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
