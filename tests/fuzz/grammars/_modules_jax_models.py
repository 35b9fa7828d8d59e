"""Random nnx models, as users write them: trees of blocks with parts of flax's and of the user's own classes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

BATCH, TOKENS, WIDTH = 2, 3, 4
TYPES: dict[str, Any] = {"param_dtype": jnp.float64, "dtype": jnp.float64}


@dataclass(frozen=True)
class Technique:
    """A technique, the patterns of its modules, and its settings."""

    name: str
    patterns: tuple[str, ...]
    inner: tuple[str, ...] = ()
    """Patterns of submodules within the blocks, of recompute."""
    settings: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class ModelProgram:
    """A model, the techniques that it gets, and the steps of its training."""

    blocks: tuple[tuple[str, ...], ...]
    """Kinds of the parts of each block."""
    container: str
    holder: str
    shared: bool
    """Whether all blocks have the first block's first part."""
    twice: bool
    """Whether the last part of each block is called twice."""
    output: str
    arguments: str
    """What the blocks get besides x: ``none``, ``mask`` or ``keywords``."""
    embedded: str
    """``none``, ``embed`` or ``tied``, where the head is the table too."""
    techniques: tuple[Technique, ...]
    surroundings: str
    events: tuple[str, ...]
    """What happens before each step."""
    optimizer: str
    penalty: bool
    """Whether the loss contains the squares of the parameters."""
    late: bool
    """Whether the optimizer is made after the techniques."""
    seed: int


class Count(nnx.Variable):
    """A type of Variable of the user."""


class Gains(nnx.Param):
    """A type of parameter of the user."""


class Activation(nnx.Module):
    """An activation as a module."""

    def __call__(self, x):
        return nnx.gelu(x)


class Counter(nnx.Module):
    """A module that counts its calls in an integer."""

    def __init__(self, rngs) -> None:
        self.count = Count(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.count[...] = self.count[...] + 1
        return jnp.tanh(x) * (1 + 0.1 * self.count[...].astype(x.dtype))


class Gain(nnx.Module):
    """A module with a parameter and a constant of the user's own types."""

    def __init__(self, rngs) -> None:
        self.gains = Gains(1 + 0.1 * rngs.params.normal((WIDTH,), dtype=jnp.float64))
        self.offset = nnx.Variable(jnp.linspace(0.0, 1.0, WIDTH, dtype=jnp.float64))

    def __call__(self, x):
        return jnp.sin(x * self.gains[...]) + self.offset[...]


class Average(nnx.Module):
    """A module that keeps a moving average of its inputs, and an array that is no Variable."""

    def __init__(self, rngs, plain: bool = False) -> None:
        self.mean = nnx.BatchStat(jnp.zeros((WIDTH,), jnp.float64))
        if plain:
            self.table = jnp.linspace(0.5, 1.0, WIDTH, dtype=jnp.float64)

    def __call__(self, x):
        self.mean[...] = 0.9 * self.mean[...] + 0.1 * jax.lax.stop_gradient(x).mean((0, 1))
        return jnp.tanh(x - self.mean[...]) * getattr(self, "table", 1.0)


class Sowing(nnx.Module):
    """A module that records a value."""

    def __init__(self, rngs) -> None:
        self.weight = nnx.Param(jnp.ones((WIDTH,), jnp.float64))

    def __call__(self, x):
        self.sow(nnx.Intermediate, "seen", x.mean())
        return jnp.tanh(x) * self.weight[...]


class Calls(nnx.Module):
    """A module with an attribute of Python that each call changes."""

    def __init__(self, rngs) -> None:
        self.calls = 0
        self.weight = nnx.Param(jnp.ones((WIDTH,), jnp.float64))

    def __call__(self, x):
        self.calls += 1
        return jnp.sin(x) * self.weight[...] * (1 + 0.1 * self.calls)


class Pair(nnx.Module):
    """A module that returns a tuple of an array and a dict, with entries that are no arrays."""

    def __init__(self, rngs, others: bool = False) -> None:
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs, **TYPES)
        self.others = others

    def __call__(self, x, factor=1.0, *, words=("a", "b"), table=None):
        h = self.linear(x) * factor if words[0] == "a" else x
        more = {"mean": h.mean(), "none": None} | ({"text": words[1], "number": 3} if self.others else {})
        return h if table is None else h + table, more


class Noise(nnx.Module):
    """A module that takes random numbers from an argument."""

    def __init__(self, rngs) -> None:
        self.level = nnx.Param(jnp.full((WIDTH,), 0.1))

    def __call__(self, x, rngs):
        return x + self.level[...] * rngs.noise.normal(x.shape, dtype=x.dtype)


class Gated(nnx.Module):
    """A SwiGLU whose linear layers are modules of this one."""

    def __init__(self, rngs) -> None:
        self.gate, self.up, self.down = (nnx.Linear(WIDTH, WIDTH, rngs=rngs, **TYPES) for _ in range(3))

    def __call__(self, x):
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


def _linear(rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(WIDTH, WIDTH, rngs=rngs, **TYPES)


PARTS: dict[str, Callable[[nnx.Rngs], Any]] = {
    "layer norm": lambda r: nnx.LayerNorm(WIDTH, rngs=r, **TYPES),
    "rms norm": lambda r: nnx.RMSNorm(WIDTH, rngs=r, **TYPES),
    "batch norm": lambda r: nnx.BatchNorm(WIDTH, rngs=r, **TYPES),
    "dropout": lambda r: nnx.Dropout(0.3, rngs=r),
    "linear": _linear,
    "attention": lambda r: nnx.MultiHeadAttention(num_heads=2, in_features=WIDTH, decode=False, rngs=r, **TYPES),
    "conv": lambda r: nnx.Conv(WIDTH, WIDTH, kernel_size=(2,), rngs=r, **TYPES),
    "activation": lambda r: Activation(),
    "function": lambda r: nnx.silu,
    "sequential": lambda r: nnx.Sequential(_linear(r), nnx.gelu, nnx.LayerNorm(WIDTH, rngs=r, **TYPES)),
    "gated": Gated,
    "counter": Counter,
    "gain": Gain,
    "average": Average,
    "plain array": lambda r: Average(r, plain=True),
    "sowing": Sowing,
    "python counter": Calls,
    "pair": Pair,
    "pair with others": lambda r: Pair(r, others=True),
    "noise": Noise,
}
"""Makers of the parts of blocks."""


class Block(nnx.Module):
    """A block of parts, each with a residual connection."""

    def __init__(self, p: ModelProgram, number: int, rngs: nnx.Rngs, first: Any) -> None:
        parts = [PARTS[kind](rngs) for kind in p.blocks[number]]
        if first is not None:
            parts[0] = first
        self.number, self.holder, self.is_twice, self.output = len(parts), p.holder, p.twice, p.output
        self.kinds = (p.blocks[0][0] if first is not None else p.blocks[number][0], *p.blocks[number][1:])
        self.rngs = nnx.Rngs(noise=number)
        self.parts: Any
        if p.holder == "list":
            self.parts = nnx.List(parts)
        elif p.holder == "dict":
            self.parts = nnx.Dict({f"p{k}": part for k, part in enumerate(parts)})
        else:
            for k, part in enumerate(parts):
                setattr(self, f"p{k}", part)

    def part(self, k: int) -> Any:
        if self.holder == "list":
            return self.parts[k]
        return self.parts[f"p{k}"] if self.holder == "dict" else getattr(self, f"p{k}")

    def run(self, k: int, x, mask, scale):
        kind, part = self.kinds[k], self.part(k)
        if kind == "attention":
            return part(x, x, mask=mask)
        if kind.startswith("pair"):
            found, more = part(x, scale, words=("a", "b"), table=mask if mask is None else jnp.ones(WIDTH))
            return found + more["mean"] * more.get("number", 1)
        if kind == "noise":
            return part(x, rngs=self.rngs)
        return part(x)

    def __call__(self, x, mask=None, *, scale=1.0, mode="usual"):
        for k in range(self.number):
            changed = self.run(k, x, mask, scale)
            if self.is_twice and k == self.number - 1:
                changed = changed + self.run(k, 0.5 * x, mask, scale)
            x = x + 0.5 * changed if mode == "usual" or k else changed
        if self.output == "tuple":
            return x, {"mean": x.mean()}
        return {"hidden": x, "means": (x.mean(), None)} if self.output == "dict" else x


class Model(nnx.Module):
    """Blocks between a table of embeddings and a head."""

    def __init__(self, p: ModelProgram) -> None:
        rngs = nnx.Rngs(p.seed % 1000)
        self.arguments, self.embedded, self.container = p.arguments, p.embedded, p.container
        if p.embedded != "none":
            self.embed = nnx.Embed(5, WIDTH, rngs=rngs, **TYPES)
        blocks: list[Block] = []
        for number in range(len(p.blocks)):
            blocks.append(Block(p, number, rngs, blocks[0].part(0) if p.shared and blocks else None))
        self.blocks: Any
        if p.container == "dict":
            self.blocks = nnx.Dict({f"b{k}": block for k, block in enumerate(blocks)})
        else:
            self.blocks = nnx.Sequential(*blocks) if p.container == "sequential" else nnx.List(blocks)
        self.head = _linear(rngs)

    def __call__(self, x):
        if self.embedded != "none":
            x = self.embed(x)
        more: list[Any] = []
        if self.container == "sequential":
            x = self.blocks(x)
        else:
            for block in self.blocks.values() if self.container == "dict" else self.blocks:
                x = _hidden(block(x, *self.positional(x), **self.keywords()), more)
        y = self.head(x)
        return self.embed.attend(y) if self.embedded == "tied" else y, more

    def positional(self, x) -> tuple:
        return (nnx.make_causal_mask(jnp.ones((BATCH, TOKENS))),) if self.arguments == "mask" else ()

    def keywords(self) -> dict[str, Any]:
        return {"scale": jnp.asarray(0.5), "mode": "usual"} if self.arguments == "keywords" else {}


def _hidden(found: Any, more: list[Any]) -> Any:
    if isinstance(found, tuple):
        more.append(found[1]["mean"])
        return found[0]
    if isinstance(found, dict):
        more.append(found["means"][0])
        return found["hidden"]
    return found


def batch(p: ModelProgram) -> jax.Array:
    """Return the inputs of a model."""
    rng = np.random.default_rng(p.seed)
    if p.embedded != "none":
        return jnp.asarray(rng.integers(0, 5, (BATCH, TOKENS)))
    return jnp.asarray(rng.standard_normal((BATCH, TOKENS, WIDTH)))
