"""Modules of PyTorch against modules of Flax: a transformer encoder, and an LSTM."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from flax.nnx.nn.attention import dot_product_attention_weights
from torch import nn

from benchmarks.mutations.cases import Bug, Case, flax_names

WIDTH, HEADS, INNER, LAYERS, CLASSES = 12, 3, 20, 2, 9
HEAD = WIDTH // HEADS


class TorchEncoder(nn.Module):
    """torch.nn.TransformerEncoder and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        options = {"activation": "gelu", "batch_first": True, "norm_first": True}
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, INNER, 0.0, **options)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        """Return scores [B, T, classes]."""
        return self.head(self.encoder(x))


def _attention(query, key, value, mask=None, **_):
    """Run Flax's attention in the dtype of the query; nnx.dot_product_attention computes its softmax in float32."""
    weights = dot_product_attention_weights(query, key, mask=mask)
    return jnp.einsum("...hqk,...khd->...qhd", weights, value)


class JaxEncoderLayer(nnx.Module):
    """The encoder layer in its pre-norm form, from Flax's modules."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.norm1 = nnx.LayerNorm(WIDTH, epsilon=1e-5, rngs=rngs)
        self.self_attn = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, attention_fn=_attention, rngs=rngs)
        self.norm2 = nnx.LayerNorm(WIDTH, epsilon=1e-5, rngs=rngs)
        self.linear1 = nnx.Linear(WIDTH, INNER, rngs=rngs)
        self.linear2 = nnx.Linear(INNER, WIDTH, rngs=rngs)

    def __call__(self, x):
        """Return an array of the same shape."""
        x = x + self.self_attn(self.norm1(x))
        return x + self.linear2(jax.nn.gelu(self.linear1(self.norm2(x)), approximate=False))


class JaxEncoder(nnx.Module):
    """Encoder layers and a linear layer."""

    def __init__(self) -> None:
        self.layers = nnx.List([JaxEncoderLayer() for _ in range(LAYERS)])
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=nnx.Rngs(0))

    def __call__(self, x):
        """Return scores [B, T, classes]."""
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _encoder_names(model: nn.Module) -> dict:
    found = {"head.weight": {"to": "head.kernel", "transpose": True}}
    for number in range(LAYERS):
        ours, theirs = f"encoder.layers.{number}", f"layers.{number}"
        projections = [f"{theirs}.self_attn.{name}" for name in ("query", "key", "value")]
        found |= {
            f"{ours}.self_attn.in_proj_weight": {
                "to": [f"{name}.kernel" for name in projections],
                "transpose": True,
                "split": 1,
                "reshape": [WIDTH, HEADS, HEAD],
            },
            f"{ours}.self_attn.in_proj_bias": {"to": [f"{n}.bias" for n in projections], "reshape": [HEADS, HEAD]},
            f"{ours}.self_attn.out_proj.weight": {
                "to": f"{theirs}.self_attn.out.kernel",
                "transpose": True,
                "reshape": [HEADS, HEAD, WIDTH],
            },
            f"{ours}.self_attn.out_proj.bias": f"{theirs}.self_attn.out.bias",
        }
        for name in ("linear1", "linear2"):
            found[f"{ours}.{name}.weight"] = {"to": f"{theirs}.{name}.kernel", "transpose": True}
            found[f"{ours}.{name}.bias"] = f"{theirs}.{name}.bias"
        for name in ("norm1", "norm2"):
            found[f"{ours}.{name}.weight"] = f"{theirs}.{name}.scale"
            found[f"{ours}.{name}.bias"] = f"{theirs}.{name}.bias"
    return found


def _inputs(rng: np.random.Generator, length: int = 6) -> list:
    return [rng.standard_normal((2, length, WIDTH))]


ENCODER = Case(
    "torch.nn encoder, Flax modules",
    TorchEncoder,
    JaxEncoder,
    _inputs,
    _encoder_names,
    jax_paths={"encoder.layers": "layers"},
)


class TorchRnn(nn.Module):
    """Two torch.nn.LSTM and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.second = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        """Return scores [B, T, classes]."""
        x, _ = self.first(x)
        x, _ = self.second(x)
        return self.head(x)


class JaxRnn(nnx.Module):
    """Two nnx.RNN of Flax's LSTM cell, and a linear layer."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first = nnx.RNN(nnx.OptimizedLSTMCell(WIDTH, WIDTH, rngs=rngs))
        self.second = nnx.RNN(nnx.OptimizedLSTMCell(WIDTH, WIDTH, rngs=rngs))
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, x):
        """Return scores [B, T, classes]."""
        x = self.first(x, initial_carry=_zeros(x))
        x = self.second(x, initial_carry=_zeros(x))
        return self.head(x)


def _zeros(x):
    return jnp.zeros_like(x[:, 0]), jnp.zeros_like(x[:, 0])


def _rnn_names(model: nn.Module) -> dict:
    found = flax_names(model)
    for name in ("first", "second"):
        found[f"{name}.weight_ih_l0"] = {"to": f"{name}.cell.dense_i.kernel", "transpose": True}
        found[f"{name}.weight_hh_l0"] = {"to": f"{name}.cell.dense_h.kernel", "transpose": True}
        found[f"{name}.bias_hh_l0"] = f"{name}.cell.dense_h.bias"
    return found


RNN = Case(
    "torch.nn.LSTM, nnx.RNN",
    TorchRnn,
    JaxRnn,
    _inputs,
    _rnn_names,
    fixed=("first.bias_ih_l0", "second.bias_ih_l0"),
    ignore=("*.bias_ih_l0",),
)


class PostNorm(JaxEncoderLayer):
    def __call__(self, x):
        x = self.norm1(x + self.self_attn(x))
        return self.norm2(x + self.linear2(jax.nn.gelu(self.linear1(x), approximate=False)))


class TanhGelu(JaxEncoderLayer):
    def __call__(self, x):
        x = x + self.self_attn(self.norm1(x))
        return x + self.linear2(jax.nn.gelu(self.linear1(self.norm2(x))))


class CausalAttention(nnx.MultiHeadAttention):
    def __call__(self, x):
        return super().__call__(x, mask=nnx.make_causal_mask(x[..., 0]))


class DetachedInput(nn.LSTM):
    def forward(self, x, hx=None):
        return super().forward(x.detach(), hx)


class SwappedGates(nnx.OptimizedLSTMCell):
    """An LSTM cell with input and forget gate swapped: it reads the order forget, input, cell, output."""

    def __call__(self, carry, inputs):
        c, h = carry
        f, i, g, o = jnp.split(self.dense_i(inputs) + self.dense_h(h), 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (c, h), h


ENCODER_BUGS = [
    Bug("norm after the residual", "jax", "encoder.layers.1", PostNorm),
    Bug("GELU with tanh", "jax", "encoder.layers.0", TanhGelu),
    Bug("Flax's default epsilon", "jax", "encoder.layers.1.norm2", {"epsilon": 1e-6}),
    Bug("causal instead of full attention", "jax", "encoder.layers.0.self_attn", CausalAttention),
    Bug("one head fewer", "torch", "encoder.layers.1.self_attn", {"num_heads": 2, "head_dim": 6}),
    Bug("ReLU in one layer", "torch", "encoder.layers.0", {"activation": torch.relu, "activation_relu_or_gelu": 1}),
]
RNN_BUGS = [
    Bug("tokens in reverse", "jax", "second", {"reverse": True, "keep_order": True}),
    Bug("input and forget gate swapped", "jax", "first", SwappedGates, jax_module="first.cell"),
    Bug("detached input", "torch", "second", DetachedInput, True),
    Bug("output layer in bfloat16", "jax", "head", {"dtype": jnp.bfloat16}),
]
