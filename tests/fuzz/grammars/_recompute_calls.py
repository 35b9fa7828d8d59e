"""Functions and modules that programs of the recompute fuzzer call, and the objects that their closures use."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference_torch.recompute import CheckpointWithoutOutput

N = 4


class World:
    """Objects that the closures of a program use: modules, frozen tensors, buffers, counters, a cache."""

    def __init__(self, complex_numbers: bool) -> None:
        generator = torch.Generator().manual_seed(1)

        def normal(*shape: int) -> Tensor:
            values = torch.randn(shape, dtype=torch.float64, generator=generator)
            return torch.complex(values, values.flip(-1)) if complex_numbers else values

        torch.manual_seed(2)
        self.linear = nn.Linear(N, N).to(torch.complex128 if complex_numbers else torch.float64)
        self.frozen = normal(N, N)
        self.buffer = normal(N)
        self.weight = normal(N, N).requires_grad_()
        self.scale = 1.5
        self.offsets = [normal(N, N)]
        self.dropout = nn.Dropout(0.4)
        self.norm = nn.LayerNorm(N).double()
        self.batch = nn.BatchNorm1d(N).double()
        self.counter = torch.ones((), dtype=torch.float64)
        self.calls = 0
        self.table = normal(20)
        self.workspace = normal(N, N)
        self.statistics = normal(N)
        self.generator = torch.Generator().manual_seed(4)
        self.cache: dict[str, Tensor] = {}
        self.stash: list[Any] = []
        self.leaves = [normal(N, N).requires_grad_() for _ in range(2)]
        self.narrow = torch.randn(N, N, generator=generator).requires_grad_()

    @property
    def targets(self) -> list[Tensor]:
        """Return every tensor whose gradient is compared."""
        modules = [self.linear, self.norm, self.batch]
        return [*self.leaves, self.weight, self.narrow, *(p for module in modules for p in module.parameters())]


def _cached(w: World, x: Tensor) -> Tensor:
    if "cos" not in w.cache:
        w.cache["cos"] = torch.arange(N, dtype=torch.float64).cos()
    return (x * w.cache["cos"]).sin()


def _counted(w: World, x: Tensor) -> Tensor:
    w.counter.add_(1)
    return x.sin() * w.counter


def _rebinding(w: World, x: Tensor) -> Tensor:
    w.statistics = 0.9 * w.statistics + 0.1 * x.detach().mean(0)
    return (x - w.statistics).sin()


def _next(w: World) -> int:
    w.calls += 1
    return w.calls


def _workspace(w: World, x: Tensor) -> Tensor:
    w.workspace.copy_(x.detach()).mul_(0.5)
    return x.sin() * w.workspace


def _stashing(w: World, x: Tensor) -> Tensor:
    y = x.sin()
    w.stash.append(y.detach())
    return y


def _inside_in_place(w: World, x: Tensor) -> Tensor:
    y = x * w.scale
    y.add_(1)
    return y.sin().mul_(2)


def _saved_then_changed(w: World, x: Tensor) -> Tensor:
    inner = x.exp()
    product = inner * inner
    inner.add_(1)
    return product + inner


def _nested(w: World, x: Tensor) -> Tensor:
    inner = CheckpointWithoutOutput("inner")
    h = inner.checkpoint(torch.tanh, x) if w.cache.get("recompute") is not None else x.tanh()
    y = h * h.sin()
    if w.cache.get("recompute") is not None:
        inner.discard_output_and_register_recompute(y)
    return y


class Doubling(torch.autograd.Function):
    """A custom autograd function that saves its output."""

    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].conj()


CALLS: dict[str, Callable[[World, Tensor], Any]] = {
    "tanh": lambda w, x: x.tanh(),
    "exp sin": lambda w, x: (x * 0.1).exp().sin(),
    "linear": lambda w, x: w.linear(x),
    "linear module": lambda w, x: w.linear,
    "closure weight": lambda w, x: (x @ w.weight).tanh(),
    "frozen weight": lambda w, x: x.sin() @ w.frozen,
    "frozen not saved": lambda w, x: (x + w.frozen.sin()).tanh(),
    "buffer": lambda w, x: (x * w.buffer).sin(),
    "late scale": lambda w, x: x.tanh() * w.scale,
    "late tensor": lambda w, x: x.sin() + w.offsets[0],
    "cached": _cached,
    "counter": _counted,
    "stashing": _stashing,
    "in place inside": _inside_in_place,
    "saved then changed inside": _saved_then_changed,
    "view of result": lambda w, x: x.tanh().t(),
    "flat view of result": lambda w, x: x.tanh().view(-1).view(N, N),
    "two": lambda w, x: (x.tanh(), (x * 2).sin().t()),
    "aliases": lambda w, x: (lambda y: (y, y.view(-1), y.t()))(x.tanh()),
    "tuple and dict": lambda w, x: {"a": [x.sin()], "b": (None, x.cos())},
    "input back": lambda w, x: (x, x.sin()),
    "view of input": lambda w, x: x.view(-1, 2).t(),
    "changes input": lambda w, x: x.mul_(1.5).sin(),
    "custom function": lambda w, x: Doubling.apply(x * 0.1),
    "nested": _nested,
    "expanded": lambda w, x: x.tanh().sum(0, keepdim=True).tanh().expand(N, N),
    "no grad part": lambda w, x: x.tanh() * x.detach().sin(),
    "rebound statistics": _rebinding,
    "next of a table": lambda w, x: x.sin() * w.table[_next(w)],
    "next of a slice of a table": lambda w, x: x.sin() * w.table[_next(w) :][:N],
    "next slice": lambda w, x: x.sin().repeat(1, 3)[:, _next(w) : w.calls + N],
    "next value": lambda w, x: x.sin() * torch.full((N,), float(_next(w))),
    "next list": lambda w, x: x.sin() * torch.tensor([float(_next(w))] * N),
    "next number of NumPy": lambda w, x: x.sin() * np.float32(_next(w)),
    "next after zeros": lambda w, x: x.sin() * (torch.zeros(N) if _next(w) == 1 else torch.ones(N)),
    "next of largest and smallest": lambda w, x: (
        x.sin() * (w.table.abs().amax() if _next(w) == 1 else w.table.abs().amin())
    ),
    "next of a tuple in a list": lambda w, x: x.sin() * torch.tensor([[float(_next(w))] * N]),
    "workspace": _workspace,
    "ensemble": lambda w, x: torch.vmap(lambda row: x.sin() * row)(w.frozen).sum(0),
    "drawn by NumPy": lambda w, x: x.sin() * torch.from_numpy(np.random.rand(N, N)),
    "drawn by an own generator": lambda w, x: x.sin() * torch.rand(N, N, generator=w.generator).double(),
    "gradient inside": lambda w, x: x.sin() * torch.func.grad(lambda t: (t * t.conj()).real.sum())(x.detach()),
    "constant of a constructor": lambda w, x: x.tanh() * torch.DoubleTensor([1, 2, 3, 4]),
}
COUNTING = frozenset({"counter", "rebound statistics"} | {name for name in CALLS if name.startswith("next ")})
"""Calls whose results differ each time."""
REAL_CALLS: dict[str, Callable[[World, Tensor], Any]] = {
    "dropout": lambda w, x: F.dropout(x.sin(), 0.4),
    "dropout module": lambda w, x: w.dropout(x).tanh(),
    "layer norm": lambda w, x: w.norm(x),
    "batch norm": lambda w, x: w.batch(x).tanh(),
    "gelu": lambda w, x: F.gelu(x),
    "softmax": lambda w, x: x.softmax(-1),
    "relu": lambda w, x: F.relu(x),
    "float32 product": lambda w, x: (x.float() @ w.narrow).double().tanh(),
    "float32 layer": lambda w, x: F.linear((x.float() @ w.narrow).tanh(), w.narrow, w.narrow[0]).double(),
    "other dtype": lambda w, x: x.float().tanh().double() * x,
    "sparse product": lambda w, x: torch.sparse.mm(torch.eye(N, dtype=torch.float64).to_sparse(), x).tanh(),
    "through complex": lambda w, x: torch.fft.fft(x).exp().conj().real * 0.01,
}
COMPLEX_CALLS: dict[str, Callable[[World, Tensor], Any]] = {
    "conjugate product": lambda w, x: (lambda a: (a, (a * a.conj()).real))((x * 0.1).exp()),
    "conjugate result": lambda w, x: (x * 0.1).exp().conj(),
    "imaginary part": lambda w, x: (lambda a: (a, a.conj().imag))((x * 0.1).exp()),
    "resolved": lambda w, x: (x * 0.1).exp().conj().resolve_conj() * x,
    "as real": lambda w, x: torch.view_as_real((x * 0.1).exp()),
}
