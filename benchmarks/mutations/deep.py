"""A deep decoder, to measure time and memory of locate, and the process that measures them.

python -m benchmarks.mutations.deep forward          (or backward; prints one line of JSON)
"""

import json
import resource
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from flax import nnx
from torch import nn

from benchmarks.mutations.cases import Bug, Case, flax_names, put_in
from parity import locate

WIDTH, HEADS, LAYERS, LENGTH, BATCH, VOCABULARY = 256, 4, 24, 64, 2, 256
FAULTY = 16
"""Number of the block with the bug."""


class TorchBlock(nn.Module):
    """Causal attention and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        """Return tokens [B, T, D]."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class JaxBlock(nnx.Module):
    """Causal attention and an MLP."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm1 = nnx.LayerNorm(WIDTH, epsilon=1e-5, rngs=rngs)
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm2 = nnx.LayerNorm(WIDTH, epsilon=1e-5, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        """Return tokens [B, T, D]."""
        q, k, v = jnp.moveaxis(self.qkv(self.norm1(x)).reshape(*x.shape[:2], 3, HEADS, -1), 2, 0)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (WIDTH // HEADS) ** -0.5
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
        x = x + self.out(jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape))
        return x + self.down(jax.nn.gelu(self.up(self.norm2(x)), approximate=False))


class TorchDecoder(nn.Module):
    """An embedding, blocks and an output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(TorchBlock() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        """Return scores [B, T, vocabulary]."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class JaxDecoder(nnx.Module):
    """An embedding, blocks and an output layer."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.blocks = nnx.List([JaxBlock(rngs) for _ in range(LAYERS)])
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens):
        """Return scores [B, T, vocabulary]."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class StoppedGradient(nnx.LayerNorm):
    """A norm that passes no gradient to its input."""

    def __call__(self, x, **options):
        """Return an array of the same shape."""
        return super().__call__(jax.lax.stop_gradient(x), **options)


def _inputs(rng: np.random.Generator) -> list:
    return [rng.integers(0, VOCABULARY, (BATCH, LENGTH))]


DEEP = Case("24 layers of width 256", TorchDecoder, JaxDecoder, _inputs, flax_names)
DEEP_BUGS = {
    "forward": Bug("epsilon of a norm", "jax", f"blocks.{FAULTY}.norm2", {"epsilon": 1e-6}),
    "backward": Bug("stop-gradient in a norm", "jax", f"blocks.{FAULTY}.norm2", StoppedGradient, True),
}


def main(direction: str) -> None:
    """Locate one bug, and print the module, seconds and the peak of the process's memory."""
    torch.set_num_threads(1)
    bug = DEEP_BUGS[direction]
    torch_model, jax_model, inputs = DEEP.build(0)
    put_in(bug, DEEP, torch_model, jax_model)
    start = time.perf_counter(), time.process_time()
    found = locate(torch_model, jax_model, inputs, names=DEEP.names(torch_model))
    seconds, cpu_seconds = time.perf_counter() - start[0], time.process_time() - start[1]
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    located = None if found.point is None else found.point.path
    print(
        json.dumps(
            {
                "bug": bug.name,
                "module": bug.module,
                "located": located,
                "direction": found.direction,
                "seconds": seconds,
                "cpu_seconds": cpu_seconds,
                "peak_bytes": peak,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
