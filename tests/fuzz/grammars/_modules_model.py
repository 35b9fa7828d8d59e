"""The models of the fuzzer of whole models."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.fuzz.grammars._modules_parts import WIDTH, Remembering, call, cubed, make

TOKENS = 11


class Broken(RuntimeError):
    """The exception that a program raises on purpose."""


@dataclass(frozen=True)
class Part:
    """A submodule of a block."""

    kind: str
    way: str
    """How it is called, one of CALLS."""


@dataclass(frozen=True)
class BlockSpec:
    """A block: its submodules, its residual connection and the form of its result."""

    parts: tuple[Part, ...]
    residual: str
    output: str


@dataclass(frozen=True)
class Technique:
    """A technique of this project, and its arguments."""

    name: str
    patterns: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Patterns of blocks, each with patterns of submodules."""
    settings: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Program:
    """A model, the techniques that are applied to it, and the actions of a user."""

    blocks: tuple[BlockSpec, ...]
    container: str
    nested: bool
    arguments: str
    """How the model passes the mask to its blocks: "none", "positional" or "keyword"."""
    tied: bool
    shared_part: bool
    """True if the last block has the first submodule of the first block."""
    repeated: bool
    """True if the first block runs again at the end."""
    around: str
    """What else the code around the blocks does."""
    output: str
    dtype: str
    optimizer: str
    techniques: tuple[Technique, ...]
    actions: tuple[tuple[str, int], ...]
    """Names of actions, each with a number that determines its choices."""


@dataclass
class Found:
    """An output of the model that is no pytree."""

    logits: Tensor
    extra: dict[str, Tensor]


class _BreaksInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise Broken("backward")


class Block(nn.Module):
    """A norm, submodules, and a residual connection."""

    def __init__(self, spec: BlockSpec) -> None:
        super().__init__()
        self.spec = spec
        self.breaks = ""
        self.norm = nn.LayerNorm(WIDTH)
        self.parts = nn.ModuleList(make(part.kind) for part in spec.parts)
        self.held: Any = None

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Any:
        spec = self.spec
        h = self.norm(x.clone() if spec.residual == "in place" else x)
        if self.breaks == "forward":
            raise Broken("forward")
        for part, module in zip(spec.parts, self.parts, strict=True):
            h = call(self, part.kind, part.way, module, h, mask)
        if self.breaks == "backward":
            h: Any = _BreaksInBackward.apply(h)
        if spec.residual == "in place":
            x += h * scale
        elif spec.residual == "into branch":
            h = h * scale
            h += x
            x = h
        else:
            x = x + h * scale
        if spec.output == "tuple":
            return x, h.mean(), None
        return {"hidden": x, "extra": h[..., :1]} if spec.output == "dict" else x

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"held": None}


class Model(nn.Module):
    """An embedding, blocks and a head, with other code around the blocks."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.embed = nn.Embedding(TOKENS, WIDTH)
        blocks = [Block(spec) for spec in program.blocks]
        if program.shared_part:
            blocks[-1].parts[0] = blocks[0].parts[0]
        if program.container == "dict":
            self.blocks: Any = nn.ModuleDict({f"layer{k}": block for k, block in enumerate(blocks)})
        elif program.container == "sequential":
            self.blocks = nn.Sequential(*blocks)
        else:
            self.blocks = nn.ModuleList(blocks)
        self.norm = Remembering(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        if program.tied:
            self.head.weight = self.embed.weight
        if program.around == "parameter":
            self.positions = nn.Parameter(torch.randn(4, WIDTH))
        elif program.around == "parameter list":
            self.gains = nn.ParameterList([torch.randn(WIDTH), torch.randn(WIDTH)])
        self.register_buffer("steps", torch.zeros(()))
        self.generator = torch.Generator()

    @property
    def listed(self) -> list[Block]:
        """The blocks in order."""
        blocks: Any = self.blocks
        return [*(blocks.values() if self.program.container == "dict" else blocks)]

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Any:
        around = self.program.around
        x = self.embed(ids)
        if around == "parameter":
            x = x + self.positions
        elif around == "noise":
            x = x + 0.1 * torch.randn_like(x)
        elif around == "buffer":
            self.steps += 1
            x = x * (1 + 1 / self.steps)
        elif around == "parameter list":
            x = x * self.gains[0]
        elif around == "generator":
            x = x + 0.1 * torch.randn(WIDTH, generator=self.generator, dtype=x.dtype)
        elif around == "autograd function":
            x = cubed(x)
        elif around == "positions":
            x = x + torch.arange(ids.shape[1]).to(x.dtype)[:, None] * 0.1
        first = x
        x, extra = self._run_blocks(x, mask)
        if around == "skip":
            x = x + first
        elif around == "parameter list":
            x = x * self.gains[1] + self.gains[0]
        y = self.head(self.norm(x))
        if around == "attribute":
            y = y + self.norm.seen
        elif around == "tied by a function":
            y = y + nn.functional.linear(x, self.embed.weight)
        if self.program.output == "object":
            return Found(y, {"extra": extra, "hidden": x, "first": first})
        if self.program.output == "dict":
            return {"logits": y, "extra": extra, "hidden": x}
        return (y, extra) if self.program.output == "tuple" else y + extra

    def _run_blocks(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        extra = torch.zeros((), dtype=x.dtype)
        if self.program.container == "sequential":
            return self.blocks(x), extra
        listed = self.listed
        for block in [*listed, *(listed[:1] if self.program.repeated else [])]:
            if self.program.arguments == "positional":
                out = block(x, mask, 0.5)
            elif self.program.arguments == "keyword":
                out = block(x, mask=mask, scale=0.75)
            else:
                out = block(x)
            if isinstance(out, tuple):
                x, extra = out[0], extra + out[1]
            elif isinstance(out, dict):
                x, extra = out["hidden"], extra + out["extra"].sum()
            else:
                x = out
        return x, extra


class Outer(nn.Module):
    """A model inside of another."""

    def __init__(self, core: Model) -> None:
        super().__init__()
        self.core = core

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.core(*args, **kwargs)


def build(program: Program) -> nn.Module:
    """Build the model of a program, with the same values each time."""
    torch.manual_seed(5)
    model = Model(program)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and "bias" not in name:
            torch.nn.init.normal_(parameter, 1.0, 0.2)
    model.to(getattr(torch, program.dtype))
    return Outer(model) if program.nested else model


def core(model: nn.Module) -> Model:
    """Return the model inside of another."""
    return model.core if isinstance(model, Outer) else model  # pyright: ignore[reportReturnType]
