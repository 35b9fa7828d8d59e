"""The models of the offload fuzzer: layers, and orders of layers, that are difficult to offload."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from reference_torch.recompute import CheckpointWithoutOutput

WIDTH = 4


@dataclass(frozen=True)
class Program:
    """A model, an optimizer, a manager, and actions of a user."""

    layers: tuple[str, ...]
    order: str
    tie: str
    optimizer: str
    num_prefetch_layers: int
    activations: bool
    clip: bool
    early_alias: bool
    actions: tuple[tuple[str, int], ...]
    """Names of the actions, each with a number that determines its choices."""
    gradients: bool = False
    """True if gradients and optimizer state move too."""


class Broken(RuntimeError):
    """The exception that a program raises on purpose."""


class Interruption(BaseException):
    """An interruption as by Ctrl-C, after which PyTorch runs no hooks."""


class _BreaksInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise Broken("backward")


class _Layer(nn.Module):
    """A layer of a given kind."""

    def __init__(self, kind: str, generator: torch.Generator) -> None:
        super().__init__()
        self.kind = kind
        self.breaks = ""
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator) * 0.5)
        if kind in ("mlp", "bias", "frozen"):
            self.bias = nn.Parameter(torch.randn(WIDTH, generator=generator))
        if kind == "mlp":
            self.inner = nn.Linear(WIDTH, WIDTH)
            self.inner.weight.data.copy_(torch.randn(WIDTH, WIDTH, generator=generator))
            self.inner.bias.data.zero_()
        if kind == "buffer":
            self.register_buffer("count", torch.zeros(()))
            self.register_buffer("shift", torch.randn(WIDTH, generator=generator), persistent=False)
        if kind == "batchnorm":
            self.norm = nn.BatchNorm1d(WIDTH)
        if kind == "adapted":
            self.mean = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)
            self.variance = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        if kind == "frozen":
            self.weight.requires_grad_(False)
        if kind == "complex":
            self.phase = nn.Parameter(torch.randn(WIDTH, generator=generator, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        if self.breaks == "forward":
            raise Broken("forward")
        if self.breaks == "interruption":
            raise Interruption
        y = x @ self.weight.t() if self.kind == "view" else nn.functional.linear(x, self.weight)
        if self.kind == "mlp":
            y = self.inner(torch.tanh(y + self.bias))
        elif self.kind in ("bias", "frozen"):
            y = torch.sin(y + self.bias)
        elif self.kind == "buffer":
            self.count += 1
            y = y + self.shift * self.count
        elif self.kind == "batchnorm":
            y = self.norm(y)
        elif self.kind == "adapted":
            y = nn.functional.batch_norm(y, self.mean, self.variance, training=True)
        elif self.kind == "scale":
            y = y * self.weight.sum(0)
        elif self.kind == "complex":
            y = (y * self.phase.conj()).real * 0.5
        elif self.kind == "dropout":
            y = nn.functional.dropout(y, 0.3, self.training)
        if self.breaks == "backward":
            y = _BreaksInBackward.apply(y)
        return x + 0.3 * torch.tanh(y)


class Model(nn.Module):
    """Layers between an embedding and a head that are not offloaded."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.order = program.order
        self.first = nn.Linear(2, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)
        for part in (self.first, self.head):
            part.weight.data.copy_(torch.randn(part.weight.shape, generator=generator))
            part.bias.data.zero_()
        self.layers = nn.ModuleList(_Layer(kind, generator) for kind in program.layers)
        if program.tie == "layers":
            self.layers[-1].weight = self.layers[0].weight
        elif program.tie == "head":
            self.head.weight = self.layers[0].weight
        elif program.tie == "whole layer":
            self.layers.append(self.layers[0])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        layers = [*self.layers]
        if self.order == "twice":
            layers += layers[:2]
        elif self.order == "reversed":
            layers.reverse()
        if self.order == "parallel":
            x = sum(layer(x) for layer in layers[:2])
            layers = layers[2:]
        if self.order in ("checkpoint", "reentrant", "region"):
            for k in range(0, len(layers), 2):
                x = self._recomputed(layers[k : k + 2], x)
        else:
            for layer in layers:
                x = layer(x)
        return self.head(x)

    def _recomputed(self, layers: list[nn.Module], x: Tensor) -> Tensor:
        def run(y):
            for layer in layers:
                y = layer(y)
            return y

        if self.order != "region":
            return checkpoint(run, x, use_reentrant=self.order == "reentrant")
        if not torch.is_grad_enabled():
            return run(x)
        region = CheckpointWithoutOutput()
        inner = region.checkpoint(run, x)
        y = inner.sin()
        region.discard_output_and_register_recompute(y)
        return y
