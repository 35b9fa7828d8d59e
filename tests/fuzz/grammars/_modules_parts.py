"""The submodules of the fuzzer of whole models: what users write, and what is difficult to apply from outside."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WIDTH = 8


class Transposed(nn.Module):
    """A submodule that takes channels before positions."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


class Counter(nn.Module):
    """A buffer that each call changes in place, or replaces."""

    def __init__(self, replaces: bool = False) -> None:
        super().__init__()
        self.replaces = replaces
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("count", torch.ones((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.replaces:
            self.average = self.average * 0.9 + x.detach().mean((0, 1)) * 0.1
            self.count = self.count + 1
        else:
            self.average.lerp_(x.detach().mean((0, 1)).to(self.average.dtype), 0.1)
            self.count += 1
        return (x - self.average) / self.count


class Noise(nn.Module):
    """Random numbers of its own, also in eval mode."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + 0.1 * torch.randn_like(x))


class Holding(nn.Module):
    """An intermediate value and the result, held in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.held: Any = None

    def forward(self, x: Tensor) -> Tensor:
        inner = self.linear(x).tanh()
        result = inner.sin()
        self.held = {"inner": inner, "result": result}
        return result

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"held": None}


class Partly(nn.Module):
    """Views of one product, and an operation in place on a result of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.linear(x).chunk(2, -1)
        y = gate.sigmoid() * value
        y += x
        return y


class Several(nn.Module):
    """Outputs in a tuple, in a dict with None, or none at all."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, /, mask: Tensor | None = None, *, scale: float = 1.0) -> Any:
        y = self.norm(x) * scale
        if mask is not None:
            y = y.masked_fill(mask[..., None], 0.25)
        if self.kind == "nothing":
            self.seen = None
            return None
        if self.kind == "tuple":
            return y, (y * 0.5).mean(-1, keepdim=True)
        if self.kind == "dict":
            return {"hidden": y, "cache": None, "extra": [x * 0.5]}
        return y


class _Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.tanh()
        ctx.save_for_backward(x, y)
        return y**3

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        x, y = ctx.saved_tensors
        return gradients[0] * 3 * y**2 * (1 - y**2) + 0 * x


cubed: Any = _Cubed.apply


class OwnFunction(nn.Module):
    """An autograd function of the user."""

    def forward(self, x: Tensor) -> Tensor:
        return cubed(x)


class Remembering(nn.RMSNorm):
    """A norm that leaves a value in an attribute for the code around it."""

    seen: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.seen = y.square().mean()
        return y

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"seen": None}


class Recurrent(nn.Module):
    """A GRU, whose outputs are a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x)[0]


def halve(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Return half of an output, as a forward hook of the user."""
    return output * 0.5


def shift(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return a shifted input, as a forward pre-hook of the user."""
    return (args[0] + 0.125, *args[1:])


def damp(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    """Return half of the gradients of inputs, as a backward hook of the user."""
    return tuple(None if gradient is None else gradient * 0.5 for gradient in inputs)


def _hooked(kind: str) -> nn.Module:
    module = nn.Linear(WIDTH, WIDTH)
    if kind == "forward":
        module.register_forward_hook(halve)
    elif kind == "pre":
        module.register_forward_pre_hook(shift)
    else:
        module.register_full_backward_hook(damp)
    return module


def _frozen() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH).requires_grad_(False)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "rms norm": lambda: nn.RMSNorm(WIDTH),
    "batch norm": lambda: Transposed(nn.BatchNorm1d(WIDTH)),
    "dropout": lambda: nn.Dropout(0.3),
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "relu": nn.ReLU,
    "relu in place": lambda: nn.ReLU(inplace=True),
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "conv": lambda: Transposed(nn.Conv1d(WIDTH, WIDTH, 3, padding=1)),
    "sequential": lambda: nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Dropout(0.1), nn.Linear(12, WIDTH)),
    "in place inside": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(inplace=True), nn.Dropout(0.2)),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "identity": nn.Identity,
    "softmax": lambda: nn.Softmax(-1),
    "buffer in place": Counter,
    "buffer replaced": lambda: Counter(replaces=True),
    "noise": Noise,
    "holding": Holding,
    "views": Partly,
    "own function": OwnFunction,
    "recurrent": Recurrent,
    "frozen": _frozen,
    "forward hook": lambda: _hooked("forward"),
    "pre hook": lambda: _hooked("pre"),
    "backward hook": lambda: _hooked("backward"),
}
"""Submodules that take a tensor and return one of its shape."""
SPECIAL: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True, dropout=0.1),
    "attention weights": lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True),
    "tuple": lambda: Several("tuple"),
    "dict": lambda: Several("dict"),
    "nothing": lambda: Several("nothing"),
    "keyword": lambda: Several("keyword"),
    "mask": lambda: Several("mask"),
}
"""Submodules that are called in their own way."""
INNER = {"batch norm": "inner", "conv": "inner", "sequential": "1", "in place inside": "0", "recurrent": "gru"}
INNER |= {"holding": "linear", "views": "linear", "tuple": "norm", "dict": "norm", "keyword": "norm", "mask": "norm"}
"""A submodule of a submodule, by the kind of the latter."""
CALLS = ("once", "twice", "gate", "changed after", "checkpointed", "held", "detached too", "stacked")
"""Ways to call a submodule that takes a tensor and returns one."""


def make(kind: str) -> nn.Module:
    """Make a submodule of a kind."""
    return (KINDS | SPECIAL)[kind]()


def call(owner: Any, kind: str, way: str, part: nn.Module, h: Tensor, mask: Tensor | None) -> Tensor:
    """Call a submodule as the block ``owner`` does, and return a tensor of the shape of ``h``."""
    if kind == "attention":
        return h + part(h, h, h, key_padding_mask=mask, need_weights=False)[0]
    if kind == "attention weights":
        output, weights = part(h, h, h)
        return output + weights.mean(-1, keepdim=True)
    if kind == "tuple":
        y, extra = part(h)
        return y + extra
    if kind == "dict":
        found = part(h)
        return found["hidden"] + found["extra"][0]
    if kind == "nothing":
        return h if part(h) is None else h * 2
    if kind == "keyword":
        return part(h, scale=0.5)
    if kind == "mask":
        return part(h, mask)
    return _call_simple(owner, way, part, h)


def _call_simple(owner: Any, way: str, part: nn.Module, h: Tensor) -> Tensor:
    if way == "twice":
        return part(part(h))
    if way == "gate":
        return h * part(h)
    if way == "changed after":
        y = part(h.clone())
        y += 0.5
        return y
    if way == "checkpointed" and torch.is_grad_enabled():
        return checkpoint(part, h, use_reentrant=False)  # pyright: ignore[reportReturnType]
    if way == "held":
        owner.held = part(h)
        return owner.held * 0.5 + h
    if way == "detached too":
        y = part(h)
        return y + y.detach().mean()
    if way == "stacked":
        return torch.stack([part(h), h]).sum(0)
    return part(h)
