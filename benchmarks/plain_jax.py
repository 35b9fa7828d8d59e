"""A GPT without mHC in plain JAX that imports nothing from this project.

Its step time is the baseline of the JAX backend. Its architecture equals that of the backend: pre-norm, rotary
positions, causal softmax attention, SwiGLU, tied head and AdamW.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Parameters = dict[str, Any]
EPSILON = 1e-5


class PlainTrainer:
    """Training steps of the plain network on the same corpus."""

    def __init__(self, config, train, corpus) -> None:
        self.corpus = corpus
        self.shape = (train.global_batch_size, config.seq_length)
        width, inner = config.hidden_size, config.layer(0).ffn_hidden_size
        self.heads = config.num_attention_heads
        self.params = initial(np.random.default_rng(0), width, config.num_layers, inner)
        self.optimizer = optax.chain(
            optax.clip_by_global_norm(train.clip_grad),
            optax.adamw(train.lr, train.adam_beta1, train.adam_beta2, weight_decay=train.weight_decay),
        )
        self.state = self.optimizer.init(self.params)
        self.update = jax.jit(self._update, donate_argnums=(0, 1))

    def train_step(self, step: int) -> float:
        """Run a training step and return its loss."""
        batch = self.corpus.batch(step, *self.shape)
        self.params, self.state, loss = self.update(self.params, self.state, batch.tokens, batch.targets)
        return loss.item()

    def _update(self, params, state, tokens, targets):
        loss, gradients = jax.value_and_grad(partial(mean_loss, self.heads))(params, tokens, targets)
        updates, state = self.optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss


def initial(rng: np.random.Generator, width: int, layers: int, inner: int) -> Parameters:
    """Return initial parameters in float32."""

    def normal(scale: float, *shape: int) -> jax.Array:
        return jnp.asarray(scale * rng.standard_normal(shape), jnp.float32)

    def layer() -> Parameters:
        return {
            "norm1": jnp.ones(width),
            "qkv": normal(0.02, width, 3 * width),
            "out": normal(0.01, width, width),
            "norm2": jnp.ones(width),
            "up": normal(0.02, width, 2 * inner),
            "down": normal(0.01, inner, width),
        }

    return {
        "embedding": normal(0.02, 256, width),
        "layers": [layer() for _ in range(layers)],
        "norm": jnp.ones(width),
    }


def mean_loss(heads: int, params: Parameters, tokens: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the mean loss of tokens [B, T] and targets [B, T]."""
    x = params["embedding"][tokens]
    for layer in params["layers"]:
        q, k, v = jnp.split((rms_norm(x, layer["norm1"]) @ layer["qkv"]).reshape(*x.shape[:2], 3 * heads, -1), 3, 2)
        x = x + attention(rotate(q), rotate(k), v) @ layer["out"]
        gate, value = jnp.split(rms_norm(x, layer["norm2"]) @ layer["up"], 2, -1)
        x = x + (jax.nn.silu(gate) * value) @ layer["down"]
    logits = rms_norm(x, params["norm"]) @ params["embedding"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def rms_norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Return x [..., D] divided by its root mean square, times a weight."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + EPSILON) * weight


def rotate(x: jax.Array) -> jax.Array:
    """Apply rotary positions to x [B, T, H, D]."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None] * 10000.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Return causal softmax attention of q, k and v [B, T, H, D], as [B, T, H * D]."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    scores = jnp.where(jnp.tri(q.shape[1], dtype=bool), scores, -jnp.inf)
    y = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    return y.reshape(*y.shape[:2], -1)
