"""What ranks run for benchmarks/wavefront.py."""

import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.jobs.pipeline import Slept
from benchmarks.jobs.step_time import random_corpus
from diptych.plans.config import TrainConfig, TransformerConfig
from reference_torch.context_parallel import build_cp_context
from reference_torch.context_parallel.states import run_pipelined
from reference_torch.groups import ProcessGroups
from reference_torch.pipeline import get_forward_backward_func

TOKENS, HEADS, WIDTH = 8, 1, 4


class SleepingLayers(nn.Module):
    """As many as asked, each of which takes a state before it sleeps, and hands one on.

    Args:
        count: of layers.
        forward, backward: seconds of all of them.
    """

    def __init__(self, count: int, forward: float, backward: float) -> None:
        super().__init__()
        self.count, self.times = count, (forward / count, backward / count)
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, context: Any) -> Tensor:
        """[1, T, H, W] to the same."""
        x = x * self.weight
        for number in range(self.count):
            here, like = context.of_layer(number), x.new_zeros(HEADS, WIDTH, WIDTH)
            x, _ = run_pipelined(None, like, here, partial(self._sleep, x), x)
        return x

    def _sleep(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        state = x.new_zeros(1, HEADS, WIDTH, WIDTH) if state is None else state
        both = Slept.apply(torch.cat([x.flatten(), state.flatten()]), *self.times)
        return both[: x.numel()].view_as(x), both[x.numel() :].view_as(state)


def time_sleeping(layers: int, forward: float, backward: float, count: int, turns: int) -> list[float]:
    """Seconds of steps of so many microbatches, all ranks starting together; the first is left out."""
    config = TransformerConfig(8, layers, 1, context_parallel_size=dist.get_world_size(), cp_exchange="pipelined")
    model, group = SleepingLayers(layers, forward, backward), dist.group.WORLD
    offsets = torch.tensor([0, TOKENS * dist.get_world_size()], dtype=torch.int32)

    def step(_: Any, model: SleepingLayers) -> tuple[Tensor, Any]:
        context = build_cp_context(offsets, group, cp_exchange="pipelined")
        return model(torch.ones(1, TOKENS, HEADS, WIDTH), context).mean(), lambda loss: (loss, loss)

    seconds = []
    for _ in range(turns + 1):
        dist.barrier()
        begin = time.perf_counter()
        get_forward_backward_func(config)(
            forward_step_func=step,
            data_iterator=None,
            model=model,
            num_microbatches=count,
            seq_length=TOKENS,
            micro_batch_size=1,
            config=config,
            pg_collection=ProcessGroups(cp=group, dp_cp=group),
        )
        seconds.append(time.perf_counter() - begin)
    return seconds[1:]


def torch_steps(
    model: TransformerConfig, train: TrainConfig, exchanges: tuple[str, ...], turns: int
) -> dict[str, list[float]]:
    """Seconds of steps by exchange, and of this rank alone with as many tokens; in turns, the first left out."""
    from reference_torch.groups import make_mesh
    from reference_torch.train import Trainer

    size, trainers = dist.get_world_size(), {}
    for exchange in exchanges:
        config = replace(model, context_parallel_size=size, cp_exchange=exchange)
        trainers[exchange] = Trainer(config, train, random_corpus(), device="cpu", mesh=make_mesh(config))
    alone = replace(model, seq_length=model.seq_length // size)
    trainers["alone"] = Trainer(alone, train, random_corpus(), device="cpu")
    seconds: dict[str, list[float]] = {way: [] for way in trainers}
    for turn in range(turns + 1):
        for way, trainer in trainers.items():
            dist.barrier()
            begin = time.perf_counter()
            trainer.train_step(turn)
            seconds[way].append(time.perf_counter() - begin)
    return {way: steps[1:] for way, steps in seconds.items()}


def jax_steps(
    model: TransformerConfig, train: TrainConfig, exchanges: tuple[str, ...], size: int, turns: int
) -> dict[str, list[float]]:
    """Return the seconds of steps in JAX; with ``alone``, every device has its own tokens."""
    import jax

    jax.config.update("jax_num_cpu_devices", size)
    import numpy as np
    from jax.sharding import Mesh

    from jax_impl.train import Trainer

    trainers = {}
    for exchange in exchanges:
        config = replace(model, context_parallel_size=size, cp_exchange=exchange)
        trainers[exchange] = Trainer(config, train, random_corpus())
    replicas = replace(train, global_batch_size=size * train.global_batch_size)
    alone = replace(model, seq_length=model.seq_length // size)
    mesh = Mesh(np.array(jax.devices()[:size]).reshape(size, 1), ("dp", "pp"))
    trainers["alone"] = Trainer(alone, replicas, random_corpus(), mesh)
    seconds: dict[str, list[float]] = {way: [] for way in trainers}
    for turn in range(turns + 1):
        for way, trainer in trainers.items():
            begin = time.perf_counter()
            trainer.train_step(turn)
            seconds[way].append(time.perf_counter() - begin)
    return {way: steps[1:] for way, steps in seconds.items()}
