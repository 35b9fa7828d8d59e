"""Pairs of models as a user writes them, equal but for their names and layouts."""

import jax
import jax.numpy as jnp
import torch.nn.functional as F
from flax import nnx
from torch import nn


class TorchBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x)), approximate="tanh"))


class TorchModel(nn.Module):
    def __init__(self, width, layers, vocabulary=11):
        super().__init__()
        self.emb = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(TorchBlock(width) for _ in range(layers))
        self.out = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        x = self.emb(tokens)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class JaxBlock(nnx.Module):
    def __init__(self, width, rngs):
        self.norm = nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class JaxModel(nnx.Module):
    def __init__(self, width, layers, rngs, vocabulary=11):
        self.emb = nnx.Embed(vocabulary, width, rngs=rngs)
        self.blocks = nnx.List([JaxBlock(width, rngs) for _ in range(layers)])
        self.out = nnx.Linear(width, vocabulary, rngs=rngs)

    def __call__(self, tokens):
        x = self.emb(tokens)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def stacked_model(width=16, layers=3, vocabulary=11):
    """The same model as a function over a pytree, with a scan over stacked layers."""

    def apply(p, tokens):
        def block(x, q):
            hidden = jax.nn.standardize(x, epsilon=1e-5) * q["norm"]["scale"] + q["norm"]["bias"]
            hidden = jax.nn.gelu(hidden @ q["up"]["kernel"] + q["up"]["bias"])
            return x + hidden @ q["down"]["kernel"] + q["down"]["bias"], None

        x, _ = jax.lax.scan(block, p["emb"]["embedding"][tokens], p["blocks"])
        return x @ p["out"]["kernel"] + p["out"]["bias"]

    def zeros(*shape):
        return jnp.zeros(shape)

    blocks = {
        "norm": {"scale": zeros(layers, width), "bias": zeros(layers, width)},
        "up": {"kernel": zeros(layers, width, 4 * width), "bias": zeros(layers, 4 * width)},
        "down": {"kernel": zeros(layers, 4 * width, width), "bias": zeros(layers, width)},
    }
    out = {"kernel": zeros(width, vocabulary), "bias": zeros(vocabulary)}
    return apply, {"emb": {"embedding": zeros(vocabulary, width)}, "blocks": blocks, "out": out}
