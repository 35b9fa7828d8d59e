"""What the tests of schedules as files run on ranks: a table through torch.distributed.pipelining's own runtime."""

from itertools import chain
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from diptych.plans.schedule.csv import read_schedule

WIDTH, BATCH = 4, 2


def linear_stage(stage: int) -> torch.nn.Module:
    """One linear layer and a curve."""
    torch.manual_seed(stage)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH, dtype=torch.float64), torch.nn.Tanh())


def data(num_microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of a step. [m * BATCH, WIDTH]"""
    generator = torch.Generator().manual_seed(7)
    x, y = torch.randn(2, num_microbatches * BATCH, WIDTH, generator=generator, dtype=torch.float64)
    return x, y


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Of one microbatch."""
    return ((output - target) ** 2).sum()


def by_the_peers_runtime(path: str) -> dict[int, list[np.ndarray]]:
    """Gradients of this rank's stages, by stage, of the sum of all losses, run by PyTorch in the order of a file."""
    schedule, rank = read_schedule(Path(path)), dist.get_rank()
    own = [stage for stage in range(schedule.num_stages) if schedule.rank_of(stage) == rank]
    modules = {stage: linear_stage(stage) for stage in own}
    stages = [PipelineStage(modules[stage], stage, schedule.num_stages, torch.device("cpu")) for stage in own]
    runtime = _PipelineScheduleRuntime(stages, schedule.num_microbatches, loss_fn=loss_of, scale_grads=False)
    runtime._load_csv(path)
    x, y = data(schedule.num_microbatches)
    runtime.step(*([x] if 0 in own else []), **({"target": y} if schedule.num_stages - 1 in own else {}))
    return {stage: [p.grad.numpy().copy() for p in module.parameters()] for stage, module in modules.items()}


def unsharded(num_stages: int, num_microbatches: int) -> dict[int, list[np.ndarray]]:
    """The same without a pipeline."""
    modules = [linear_stage(stage) for stage in range(num_stages)]
    x, y = data(num_microbatches)
    for module in modules:
        x = module(x)
    loss_of(x, y).backward()
    assert all(p.grad is not None for p in chain(*(module.parameters() for module in modules)))
    return {stage: [p.grad.numpy() for p in module.parameters()] for stage, module in enumerate(modules)}  # pyright: ignore
