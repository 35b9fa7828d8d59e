"""Code that the ranks of benchmarks/step_time.py execute: rates and training steps in both backends."""

import os
import time
from collections.abc import Callable
from statistics import median

import numpy as np

from diptych.plans.config import TrainConfig, TransformerConfig
from diptych.plans.model.data import Corpus

SIZE = 1024
"""Width of the matrices of a product."""
LARGE = 2**22
"""Elements of a large array."""
MESSAGE = 2**22
"""Elements of a large message."""
TURNS = 7


def operation_rates() -> dict[str, float]:
    """Measure products, memory and the latency of an operation in PyTorch."""
    import torch

    a = torch.randn(SIZE, SIZE)
    b = torch.randn(SIZE, SIZE)
    x = torch.ones(LARGE)
    y = torch.empty(LARGE)
    few = torch.ones(8, requires_grad=True)
    return {
        "compute_rate": 2 * SIZE**3 / _seconds(lambda: a @ b),
        "memory_bandwidth": 2 * x.nbytes / _seconds(lambda: torch.mul(x, 2.0, out=y)),
        "operation_latency": _seconds(lambda: [few * 2.0 for _ in range(100)]) / 100,
    }


def torch_rates() -> dict[str, float]:
    """Measure operations and messages, on all ranks at once."""
    import torch
    import torch.distributed as dist

    rates = operation_rates()
    rank = dist.get_rank()
    peer = 1 - dist.get_rank()

    def exchange(message: torch.Tensor) -> None:
        """Send a message to the other rank and back."""
        for sender in (0, 1):
            (dist.send if rank == sender else dist.recv)(message, peer)

    small = torch.zeros(1)
    large = torch.zeros(MESSAGE)
    rates["network_latency"] = _seconds(lambda: exchange(small)) / 2
    rates["network_bandwidth"] = large.nbytes / (_seconds(lambda: exchange(large)) / 2)
    return rates


def jax_rates() -> dict[str, float]:
    """Measure products and memory of one device, and pin this process to one core."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    import jax
    import jax.numpy as jnp

    a = jnp.ones((SIZE, SIZE))
    x = jnp.ones(LARGE)
    product = jax.jit(jnp.matmul)
    scaled = jax.jit(lambda x: x * 2.0)
    return {
        "compute_rate": 2 * SIZE**3 / _seconds(lambda: product(a, a).block_until_ready()),
        "memory_bandwidth": 2 * x.nbytes / _seconds(lambda: scaled(x).block_until_ready()),
    }


def torch_steps(config: TransformerConfig, train: TrainConfig, steps: int, together: bool) -> list[float]:
    """Return the seconds of steps without the warm-up; each rank trains alone, or all ranks form a mesh."""
    from reference_torch.groups import make_mesh
    from reference_torch.train import Trainer

    trainer = Trainer(config, train, random_corpus(), device="cpu", mesh=make_mesh(config) if together else None)
    return [trainer.train_step(step).seconds for step in range(steps + 1)][1:]


def jax_steps(config: TransformerConfig, train: TrainConfig, steps: int) -> list[float]:
    """Return the seconds of steps in JAX on one device."""
    from jax_impl.train import Trainer

    trainer = Trainer(config, train, random_corpus())
    return [trainer.train_step(step).seconds for step in range(steps + 1)][1:]


def random_corpus() -> Corpus:
    """Return a corpus of random bytes."""
    text = np.random.default_rng(0).integers(0, 256, 65536).astype(np.uint8)
    return Corpus("random", text[:-8192], text[-8192:], 0)


def _seconds(run: Callable[[], object]) -> float:
    times = []
    for _ in range(TURNS + 1):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return median(times[1:])
