"""Stages that exchange pytrees, on ranks and in one process."""

import time
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from reference_torch.pipeline import PipelineExecutor, split_batch, split_model


class Named(Tensor):
    """A subclass, as DTensor is one."""


class Holder:
    """A class that is no pytree."""

    def __init__(self, held: Any) -> None:
        self.held = held


class Pair(NamedTuple):
    real: Tensor
    rest: Any


class First(nn.Module):
    """Tokens to a pytree of real, integer, boolean and complex tensors, and leaves that are no tensors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(10, 4, dtype=torch.float64)

    def forward(self, tokens: Tensor, scale: float = 1.0) -> dict[str, Any]:
        x = self.embedding(tokens) * scale
        return {
            "pair": Pair(x.transpose(0, 1), {"mask": tokens > 3, "name": "first", "none": None}),
            "ids": [tokens, x],
        }


class Middle(nn.Module):
    """The whole pytree, or parts of it, and a tensor that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.map = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, pair: Pair, ids: list[Tensor]) -> tuple[Any, ...]:
        tokens, x = ids
        assert pair.rest["name"] == "first"
        assert pair.rest["none"] is None
        y = torch.where(pair.rest["mask"].unsqueeze(-1), self.map(pair.real.transpose(0, 1)), x)
        return y.to(torch.complex128), tokens, {"unused": y.sin(), "same": x}


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.map = nn.Linear(4, 1, dtype=torch.float64)

    def forward(self, y: Tensor, tokens: Tensor, more: dict[str, Tensor]) -> Tensor:
        return self.map(y.real + more["same"]).squeeze(-1) * tokens


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def stages() -> list[nn.Module]:
    return [First(), Middle(), Last()]


def batch(step: int, m: int, lengths: bool = False) -> tuple[list[Any], list[Tensor]]:
    """Microbatches by keyword, and targets; with lengths, each microbatch has another shape."""
    generator = torch.Generator().manual_seed(step)
    shapes = [(2, 3 + i % 3 if lengths else 3) for i in range(m)]
    inputs = [{"tokens": torch.randint(0, 10, shape, generator=generator), "scale": 0.5} for shape in shapes]
    return inputs, [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def composed(steps: int, m: int, lengths: bool, reduction: str = "mean") -> tuple[list[list[float]], dict[str, Tensor]]:
    """Losses of every step and gradients of all, one stage after the other in this process."""
    modules = stages()
    losses = []
    for step in range(steps):
        losses.append([])
        for inputs, target in zip(*batch(step, m, lengths), strict=True):
            value = loss(modules[2](*modules[1](**modules[0](**inputs))), target)
            (value / m if reduction == "mean" else value).backward()
            losses[-1].append(value.item())
    return losses, gradients_of(dict(enumerate(modules)))


def gradients_of(modules: dict[int, Any]) -> dict[str, Tensor]:
    return {
        f"{number}.{name}": p.grad.clone()
        for number, module in modules.items()
        for name, p in module.named_parameters()
        if p.grad is not None
    }


def run(schedule: str, steps: int, m: int, lengths: bool, reduction: str = "mean") -> tuple[Any, Any, Any]:
    """One rank: losses, gradients, and losses and outputs without backward in between."""
    modules: list[Any] = stages()
    with PipelineExecutor(
        modules, schedule, m, loss, variable_shapes=lengths, loss_reduction=reduction, timeout=20.0
    ) as pipeline:
        losses = []
        evaluated = []
        for step in range(steps):
            inputs, targets = batch(step, m, lengths)
            evaluated.append([value.item() for value in pipeline.evaluate(inputs, targets)])
            losses.append([value.item() for value in pipeline.step(inputs, targets)])
            outputs = pipeline.forward(inputs)
            assert len(outputs) == (m if pipeline.is_last else 0)
        own = {n: module for n, module in enumerate(modules) if pipeline.schedule.rank_of(n) == pipeline.rank}
        return losses, gradients_of(own), evaluated


class Reused(nn.Module):
    """A stage that fills one buffer again for every microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("buffer", torch.zeros(1_000_000))

    def forward(self, x: Tensor) -> Tensor:
        return torch.mul(x, 2.0, out=self.buffer)


class Slow(nn.Module):
    """A stage that is slower than the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.03)
        return (x * self.weight).mean()


def reused() -> list[list[float]]:
    """Losses of three steps; the first sends structures along, later ones the bytes of the output alone."""
    with PipelineExecutor([Reused(), Slow()], "gpipe", 4, timeout=20.0) as pipeline:
        inputs = [torch.full((1_000_000,), float(i)) for i in range(4)]
        return [[value.item() for value in pipeline.step(inputs)] for _ in range(3)]


class Normed(nn.Module):
    """A batch norm, whose buffers replicas share, and a map that forward does not call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.map, self.unused = nn.Linear(4, 4, dtype=torch.float64), nn.Linear(4, 4, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.map(x))


def replicated(pipeline: bool, steps: int = 3, m: int = 2) -> tuple[dict[str, Tensor | None], dict[str, Tensor]]:
    """Gradients and buffers of one of two replicas: a pipeline of one rank, or DDP as its documentation says."""
    rank = dist.get_rank()
    alone = [dist.new_group([each]) for each in range(dist.get_world_size())][rank]
    model = DistributedDataParallel(Normed(), find_unused_parameters=not pipeline)
    for step in range(steps):
        generator = torch.Generator().manual_seed(2 * step + rank)
        inputs = torch.randn(m, 5, 4, generator=generator, dtype=torch.float64)
        model.zero_grad()
        if pipeline:
            PipelineExecutor([model], "none", m, loss, group=alone).step([*inputs], [*inputs.flip(0)])
            continue
        for number in range(m):
            with model.no_sync() if number < m - 1 else nullcontext():
                (loss(model(inputs[number]), inputs.flip(0)[number]) / m).backward()
    return {n: p.grad for n, p in model.module.named_parameters()}, dict(model.module.named_buffers())


def refused(case: str) -> tuple[str, str]:
    """The errors of the failed step and of the next one."""
    modules: list[Any] = stages()
    inputs, targets = batch(0, 4, lengths=case == "shapes")
    if case == "detached":
        modules[1].register_forward_hook(lambda module, args, out: (out[0].detach(), out[1], {}))
    if case == "subclass":
        modules[1].register_forward_hook(lambda module, args, out: (out[0].as_subclass(Named), *out[1:]))
    if case == "sparse":
        modules[1].register_forward_hook(lambda module, args, out: (out[0], out[1].to_sparse(), out[2]))
    if case == "tensor in a class":
        modules[1].register_forward_hook(lambda module, args, out: (out[0], out[1], Holder(out[2])))
    if case == "not sent":
        modules[1].register_forward_hook(lambda module, args, out: (out[0], lambda: None))
    if case == "in place":
        modules[1].register_forward_pre_hook(lambda module, args, kwargs: kwargs["ids"][1].add_(1), with_kwargs=True)
    if case == "error":
        modules[1].register_forward_hook(lambda module, args, out: 1 / 0)
    pipeline = PipelineExecutor(modules, "1f1b", 4, loss, timeout=3.0)
    messages = []
    for _ in range(2):
        try:
            pipeline.step(inputs, targets)
            messages.append("")
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error} {getattr(error, '__notes__', '')}")
    return messages[0], messages[1]


class Overlapping(nn.Module):
    """Three layers; one gain is read in stages 0 and 1, another in stages 1 and 2."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.first, self.second = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """Return the output [B, 8] of inputs [B, 8]."""
        h = self.layers[0](x * self.first)
        h = self.layers[1](h) * self.first * self.second
        return self.layers[2](h) * self.second


def overlapping_inputs() -> Tensor:
    """Return the inputs of eight samples."""
    return torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def gains_of_overlapping_stages() -> dict[str, np.ndarray]:
    """Run a step on three ranks; return the gradients of this rank's gains."""
    x = overlapping_inputs()
    stages = split_model(Overlapping(), ["layers.1", "layers.2"], (x[:2],))
    pipeline = PipelineExecutor(stages, "1f1b", 4, lambda y, t: y.square().mean(), timeout=30.0)
    pipeline.step(split_batch(x, 4))
    own = stages[dist.get_rank()]
    return {name: p.grad.numpy() for name, p in own.named_parameters() if "layers" not in name and p.grad is not None}
