"""A small vision transformer, with dropout whose masks are inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from flax import nnx
from torch import nn

from benchmarks.mutations.cases import Bug, Case, flax_names

WIDTH, HEADS, LAYERS, CLASSES, KEEP = 12, 3, 3, 10, 0.75


class TorchAttention(nn.Module):
    """Attention over all patches."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def weights(self, q, k):
        return torch.softmax(q @ k.transpose(-1, -2) * (WIDTH // HEADS) ** -0.5, -1)

    def merge(self, x):
        return x.transpose(1, 2).flatten(2)

    def forward(self, x):
        """Return the attended patches [B, T, D]."""
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.out(self.merge(self.weights(q, k) @ v))


class JaxAttention(nnx.Module):
    """Attention over all patches."""

    def __init__(self) -> None:
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, rngs=nnx.Rngs(0))
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))

    def weights(self, q, k):
        return jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) * (WIDTH // HEADS) ** -0.5, axis=-1)

    def merge(self, x):
        return x.reshape(*x.shape[:2], WIDTH)

    def __call__(self, x):
        """Return the attended patches [B, T, D]."""
        q, k, v = jnp.moveaxis(self.qkv(x).reshape(*x.shape[:2], 3, HEADS, -1), 2, 0)
        return self.out(self.merge(jnp.einsum("bhqk,bkhd->bqhd", self.weights(q, k), v)))


class TorchMlp(nn.Module):
    """Two linear layers around GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        """Return an array of the same shape."""
        return self.down(F.gelu(self.up(x)))


class JaxMlp(nnx.Module):
    """Two linear layers around GELU."""

    def __init__(self) -> None:
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=nnx.Rngs(0))
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=nnx.Rngs(0))

    def __call__(self, x):
        """Return an array of the same shape."""
        return self.down(jax.nn.gelu(self.up(x), approximate=False))


class TorchBlock(nn.Module):
    """Attention and MLP with residuals and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attn = TorchAttention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = TorchMlp()

    def forward(self, x, attn_mask, mlp_mask):
        """Return patches [B, T, D]; masks are 1 for kept elements."""
        x = x + self.attn(self.norm1(x)) * attn_mask / KEEP
        return x + self.mlp(self.norm2(x)) * mlp_mask / KEEP


class JaxBlock(nnx.Module):
    """Attention and MLP with residuals and dropout."""

    def __init__(self) -> None:
        self.norm1 = nnx.LayerNorm(WIDTH, epsilon=1e-5, rngs=nnx.Rngs(0))
        self.attn = JaxAttention()
        self.norm2 = nnx.LayerNorm(WIDTH, epsilon=1e-5, rngs=nnx.Rngs(0))
        self.mlp = JaxMlp()

    def __call__(self, x, attn_mask, mlp_mask):
        """Return patches [B, T, D]; masks are 1 for kept elements."""
        x = x + self.attn(self.norm1(x)) * attn_mask / KEEP
        return x + self.mlp(self.norm2(x)) * mlp_mask / KEEP


class TorchVit(nn.Module):
    """Patches by a convolution, a class token, blocks, and the mean of the patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(0.1 * torch.randn(1, 5, WIDTH))
        self.blocks = nn.ModuleList(TorchBlock() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def embedded(self, x):
        return torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions

    def pooled(self, x):
        return x.mean(1)

    def forward(self, images, masks):
        """Return scores [B, classes] of images [B, H, W, 3]."""
        x = self.embedded(self.patches(images.permute(0, 3, 1, 2)).flatten(2).transpose(1, 2))
        for number, block in enumerate(self.blocks):
            x = block(x, masks[2 * number], masks[2 * number + 1])
        return self.head(self.pooled(self.norm(x)))


class JaxVit(nnx.Module):
    """Patches by a convolution, a class token, blocks, and the mean of the patches."""

    def __init__(self) -> None:
        self.patches = nnx.Conv(3, WIDTH, (4, 4), strides=4, padding="VALID", rngs=nnx.Rngs(0))
        self.token = nnx.Param(jnp.zeros((1, 1, WIDTH)))
        self.positions = nnx.Param(jnp.zeros((1, 5, WIDTH)))
        self.blocks = nnx.List([JaxBlock() for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, epsilon=1e-5, rngs=nnx.Rngs(0))
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=nnx.Rngs(0))

    def embedded(self, x):
        token = jnp.broadcast_to(self.token[...], (len(x), 1, WIDTH)).astype(x.dtype)
        return jnp.concatenate([token, x], 1) + self.positions[...]

    def pooled(self, x):
        return x.mean(1)

    def __call__(self, images, masks):
        """Return scores [B, classes] of images [B, H, W, 3]."""
        x = self.patches(images)
        x = self.embedded(x.reshape(len(images), -1, WIDTH))
        for number, block in enumerate(self.blocks):
            x = block(x, masks[2 * number], masks[2 * number + 1])
        return self.head(self.pooled(self.norm(x)))


def _inputs(rng: np.random.Generator) -> list:
    masks = [(rng.random((2, 5, WIDTH)) < KEEP).astype(np.int32) for _ in range(2 * LAYERS)]
    return [rng.standard_normal((2, 8, 8, 3)), masks]


VIT = Case("vision transformer", TorchVit, JaxVit, _inputs, flax_names)


class TanhGelu(JaxMlp):
    def __call__(self, x):
        return self.down(jax.nn.gelu(self.up(x), approximate=True))


class WrongAxis(JaxAttention):
    def weights(self, q, k):
        return jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) * (WIDTH // HEADS) ** -0.5, axis=-2)


class MissingScale(TorchAttention):
    def weights(self, q, k):
        return torch.softmax(q @ k.transpose(-1, -2), -1)


class WrongMerge(TorchAttention):
    def merge(self, x):
        return x.permute(0, 2, 3, 1).flatten(2)


class ReusedMask(JaxBlock):
    def __call__(self, x, attn_mask, mlp_mask):
        return super().__call__(x, attn_mask, attn_mask)


class NormedResidual(TorchBlock):
    def forward(self, x, attn_mask, mlp_mask):
        x = x + self.attn(self.norm1(x)) * attn_mask / KEEP
        normed = self.norm2(x)
        return normed + self.mlp(normed) * mlp_mask / KEEP


class DetachedToken(JaxVit):
    def embedded(self, x):
        return super().embedded(jax.lax.stop_gradient(x))


class ShiftedPositions(JaxVit):
    def embedded(self, x):
        return super().embedded(x) + jnp.roll(self.positions[...], 1, 1) - self.positions[...]


class SumOfPatches(TorchVit):
    def pooled(self, x):
        return x.sum(1)


class NarrowMlp(JaxMlp):
    def __call__(self, x):
        return self.down(jax.nn.gelu(self.up(x.astype(jnp.bfloat16).astype(x.dtype)), approximate=False))


class FlippedKernel(nnx.Conv):
    def __call__(self, x):
        return super().__call__(jnp.swapaxes(x, 1, 2))


VIT_BUGS = [
    Bug("GELU with tanh", "jax", "blocks.1.mlp", TanhGelu),
    Bug("softmax over queries", "jax", "blocks.2.attn", WrongAxis),
    Bug("missing scale of scores", "torch", "blocks.0.attn", MissingScale),
    Bug("heads merged in wrong order", "torch", "blocks.1.attn", WrongMerge),
    Bug("reused dropout mask", "jax", "blocks.2", ReusedMask),
    Bug("residual after the norm", "torch", "blocks.1", NormedResidual),
    Bug("detached patches", "jax", "", DetachedToken, True),
    Bug("positions off by one", "jax", "", ShiftedPositions),
    Bug("sum instead of mean of patches", "torch", "", SumOfPatches),
    Bug("input of the MLP in bfloat16", "jax", "blocks.0.mlp", NarrowMlp),
    Bug("height and width swapped", "jax", "patches", FlippedKernel),
]
