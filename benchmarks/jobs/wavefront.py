"""Code that the ranks of benchmarks/wavefront.py execute."""

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

TOKENS = 8
HEADS = 1
WIDTH = 4


class SleepingLayers(nn.Module):
    """Layers that each receive a state, sleep, and send a state to the next rank.

    Args:
        count: number of layers.
        forward, backward: seconds of all layers together.
    """

    def __init__(self, count: int, forward: float, backward: float) -> None:
        super().__init__()
        self.count = count
        self.times = (forward / count, backward / count)
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, context: Any) -> Tensor:
        """Map [1, T, H, W] to [1, T, H, W]."""
        x = x * self.weight
        for number in range(self.count):
            here = context.of_layer(number)
            like = x.new_zeros(HEADS, WIDTH, WIDTH)
            x, _ = run_pipelined(None, like, here, partial(self._sleep, x), x)
        return x

    def _sleep(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        state = x.new_zeros(1, HEADS, WIDTH, WIDTH) if state is None else state
        both = Slept.apply(torch.cat([x.flatten(), state.flatten()]), *self.times)
        return both[: x.numel()].view_as(x), both[x.numel() :].view_as(state)


def time_sleeping(layers: int, forward: float, backward: float, count: int, turns: int) -> list[float]:
    """Return the seconds of steps without the warm-up; all ranks start together."""
    config = TransformerConfig(8, layers, 1, context_parallel_size=dist.get_world_size(), cp_exchange="pipelined")
    model = SleepingLayers(layers, forward, backward)
    group = dist.group.WORLD
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
    """Return the seconds of alternating steps by exchange, and of this rank alone, without the warm-up."""
    from reference_torch.groups import make_mesh
    from reference_torch.train import Trainer

    size = dist.get_world_size()
    trainers = {}
    for exchange in exchanges:
        config = replace(model, context_parallel_size=size, cp_exchange=exchange)
        trainers[exchange] = Trainer(config, train, random_corpus(), device="cpu", mesh=make_mesh(config))
    alone = replace(model, seq_length=model.seq_length // size)
    trainers["alone"] = Trainer(alone, train, random_corpus(), device="cpu")
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    for turn in range(turns + 1):
        for name, trainer in trainers.items():
            dist.barrier()
            begin = time.perf_counter()
            trainer.train_step(turn)
            seconds[name].append(time.perf_counter() - begin)
    return {name: steps[1:] for name, steps in seconds.items()}


def jax_steps(
    model: TransformerConfig, train: TrainConfig, exchanges: tuple[str, ...], size: int, turns: int
) -> dict[str, list[float]]:
    """Return the seconds of steps in JAX by exchange; under "alone", every device has its own tokens."""
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
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    for turn in range(turns + 1):
        for name, trainer in trainers.items():
            begin = time.perf_counter()
            trainer.train_step(turn)
            seconds[name].append(time.perf_counter() - begin)
    return {name: steps[1:] for name, steps in seconds.items()}
