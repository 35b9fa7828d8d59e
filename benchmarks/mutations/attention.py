"""A decoder with rotary positions, grouped queries, norms of queries and keys, and a sliding window."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from flax import nnx
from torch import nn

from benchmarks.mutations.cases import Bug, Case, flax_names

WIDTH, HEADS, GROUPS, HEAD, LAYERS, CLASSES, WINDOW, LENGTH = 16, 4, 2, 8, 2, 11, 4, 9
EPSILON = 1e-6


class TorchNorm(nn.Module):
    """Root-mean-square norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x):
        """Return an array of the same shape."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON) * self.gain


class JaxNorm(nnx.Module):
    """Root-mean-square norm."""

    def __init__(self, width: int) -> None:
        self.gain = nnx.Param(jnp.ones(width))

    def __call__(self, x):
        """Return an array of the same shape."""
        return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + EPSILON) * self.gain[...]


class TorchRope(nn.Module):
    """Rotation of the halves of each head."""

    def forward(self, x, positions):
        """Return rotated heads [B, T, H, d]."""
        half = x.shape[-1] // 2
        angle = positions.to(x.dtype)[:, None, None] * 100.0 ** -(torch.arange(half, dtype=x.dtype) / half)
        left, right = x.chunk(2, -1)
        return torch.cat([left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()], -1)


class JaxRope(nnx.Module):
    """Rotation of the halves of each head."""

    def __call__(self, x, positions):
        """Return rotated heads [B, T, H, d]."""
        half = x.shape[-1] // 2
        angle = positions.astype(x.dtype)[:, None, None] * 100.0 ** -(jnp.arange(half, dtype=x.dtype) / half)
        left, right = jnp.split(x, 2, -1)
        turned = left * jnp.cos(angle) - right * jnp.sin(angle), right * jnp.cos(angle) + left * jnp.sin(angle)
        return jnp.concatenate(turned, -1)


class TorchAttention(nn.Module):
    """Attention of grouped queries."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, HEADS * HEAD, bias=False)
        self.k = nn.Linear(WIDTH, GROUPS * HEAD, bias=False)
        self.v = nn.Linear(WIDTH, GROUPS * HEAD, bias=False)
        self.q_norm = TorchNorm(HEAD)
        self.k_norm = TorchNorm(HEAD)
        self.rope = TorchRope()
        self.out = nn.Linear(HEADS * HEAD, WIDTH, bias=False)

    def mask(self, rows, columns):
        return (columns <= rows) & (columns > rows - WINDOW)

    def spread(self, x):
        return x.repeat_interleave(HEADS // GROUPS, 2)

    def positions(self, x):
        return torch.arange(x.shape[1])

    def weights(self, scores):
        return scores.softmax(-1)

    def forward(self, x):
        """Return attended tokens [B, T, D]."""
        positions = self.positions(x)
        q = self.rope(self.q_norm(self.q(x).unflatten(-1, (HEADS, HEAD))), positions=positions)
        k = self.rope(self.k_norm(self.k(x).unflatten(-1, (GROUPS, HEAD))), positions=positions)
        k, v = self.spread(k), self.spread(self.v(x).unflatten(-1, (GROUPS, HEAD)))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * HEAD**-0.5
        places = torch.arange(x.shape[1])
        scores = scores.masked_fill(~self.mask(places[:, None], places), -torch.inf)
        return self.out(torch.einsum("bhqk,bkhd->bqhd", self.weights(scores), v).flatten(2))


class JaxAttention(nnx.Module):
    """Attention of grouped queries."""

    def __init__(self) -> None:
        def linear(inputs, outputs):
            return nnx.Linear(inputs, outputs, use_bias=False, rngs=nnx.Rngs(0))

        self.q = linear(WIDTH, HEADS * HEAD)
        self.k = linear(WIDTH, GROUPS * HEAD)
        self.v = linear(WIDTH, GROUPS * HEAD)
        self.q_norm = JaxNorm(HEAD)
        self.k_norm = JaxNorm(HEAD)
        self.rope = JaxRope()
        self.out = linear(HEADS * HEAD, WIDTH)

    def mask(self, rows, columns):
        return (columns <= rows) & (columns > rows - WINDOW)

    def spread(self, x):
        return jnp.repeat(x, HEADS // GROUPS, axis=2)

    def positions(self, x):
        return jnp.arange(x.shape[1])

    def weights(self, scores):
        return jax.nn.softmax(scores, axis=-1)

    def __call__(self, x):
        """Return attended tokens [B, T, D]."""
        positions = self.positions(x)
        q = self.rope(self.q_norm(self.q(x).reshape(*x.shape[:2], HEADS, HEAD)), positions)
        k = self.rope(self.k_norm(self.k(x).reshape(*x.shape[:2], GROUPS, HEAD)), positions)
        k, v = self.spread(k), self.spread(self.v(x).reshape(*x.shape[:2], GROUPS, HEAD))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * HEAD**-0.5
        places = jnp.arange(x.shape[1])
        scores = jnp.where(self.mask(places[:, None], places), scores, -jnp.inf)
        return self.out(jnp.einsum("bhqk,bkhd->bqhd", self.weights(scores), v).reshape(*x.shape[:2], -1))


class TorchBlock(nn.Module):
    """Attention with a norm and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = TorchNorm(WIDTH)
        self.attn = TorchAttention()

    def forward(self, x):
        """Return tokens [B, T, D]."""
        return x + self.attn(self.norm(x))


class JaxBlock(nnx.Module):
    """Attention with a norm and a residual."""

    def __init__(self) -> None:
        self.norm = JaxNorm(WIDTH)
        self.attn = JaxAttention()

    def __call__(self, x):
        """Return tokens [B, T, D]."""
        return x + self.attn(self.norm(x))


class TorchDecoder(nn.Module):
    """An embedding that is also the output layer, and blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(TorchBlock() for _ in range(LAYERS))
        self.norm = TorchNorm(WIDTH)

    def forward(self, tokens):
        """Return scores [B, T, classes]."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embed.weight) * WIDTH**-0.5


class JaxDecoder(nnx.Module):
    """An embedding that is also the output layer, and blocks."""

    def __init__(self) -> None:
        self.embed = nnx.Embed(CLASSES, WIDTH, rngs=nnx.Rngs(0))
        self.blocks = nnx.List([JaxBlock() for _ in range(LAYERS)])
        self.norm = JaxNorm(WIDTH)

    def __call__(self, tokens):
        """Return scores [B, T, classes]."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x)) * WIDTH**-0.5


def _inputs(rng: np.random.Generator) -> list:
    return [rng.integers(0, CLASSES, (2, LENGTH))]


ROTARY = Case("rotary attention", TorchDecoder, JaxDecoder, _inputs, flax_names)


class Interleaved(JaxRope):
    def __call__(self, x, positions):
        width = x.shape[-1]
        order = np.r_[0:width:2, 1:width:2]
        return super().__call__(x[..., order], positions)[..., np.argsort(order)]


class OppositeRotation(TorchRope):
    def forward(self, x, positions):
        return super().forward(x, -positions)


class LargerWindow(JaxAttention):
    def mask(self, rows, columns):
        return (columns <= rows) & (columns >= rows - WINDOW)


class TiledGroups(JaxAttention):
    def spread(self, x):
        return jnp.tile(x, (1, 1, HEADS // GROUPS, 1))


class ScaledPositions(TorchAttention):
    def positions(self, x):
        return 1.01 * torch.arange(x.shape[1], dtype=x.dtype)


class DetachedValues(TorchAttention):
    def spread(self, x):
        return super().spread(x.detach())


class NarrowSoftmax(JaxAttention):
    def weights(self, scores):
        return jax.nn.softmax(scores.astype(jnp.float32), axis=-1).astype(scores.dtype)


class EpsilonOutside(TorchNorm):
    def forward(self, x):
        return x / (x.square().mean(-1, keepdim=True).sqrt() + EPSILON) * self.gain


class StoppedRoot(JaxNorm):
    def __call__(self, x):
        root = jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + EPSILON)
        return x * jax.lax.stop_gradient(root) * self.gain[...]


ROTARY_BUGS = [
    Bug("rotary pairs interleaved", "jax", "blocks.1.attn.rope", Interleaved),
    Bug("opposite rotation", "torch", "blocks.0.attn.rope", OppositeRotation),
    Bug("window off by one", "jax", "blocks.1.attn", LargerWindow),
    Bug("groups tiled, not repeated", "jax", "blocks.0.attn", TiledGroups),
    Bug("wrong position scale", "torch", "blocks.1.attn", ScaledPositions),
    Bug("detached keys and values", "torch", "blocks.0.attn", DetachedValues, True),
    Bug("softmax in float32", "jax", "blocks.0.attn", NarrowSoftmax),
    Bug("epsilon of the key norm outside of the root", "torch", "blocks.0.attn.k_norm", EpsilonOutside),
    Bug("gradient through the root stopped", "jax", "blocks.1.norm", StoppedRoot, True),
]
