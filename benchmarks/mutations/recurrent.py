"""An LSTM written by hand, whose cells are called once for each token."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from torch import nn

from benchmarks.mutations.cases import Bug, Case, flax_names

WIDTH, LAYERS, CLASSES, LENGTH = 8, 2, 7, 5


class TorchCell(nn.Module):
    """One step of an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.of_input = nn.Linear(WIDTH, 4 * WIDTH)
        self.of_state = nn.Linear(WIDTH, 4 * WIDTH, bias=False)

    def gates(self, x, h):
        return (self.of_input(x) + self.of_state(h)).chunk(4, -1)

    def forward(self, x, h, c):
        """Return the next output and cell state."""
        i, f, g, o = self.gates(x, h)
        c = torch.sigmoid(f + 1.0) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c


class JaxCell(nnx.Module):
    """One step of an LSTM."""

    def __init__(self) -> None:
        self.of_input = nnx.Linear(WIDTH, 4 * WIDTH, rngs=nnx.Rngs(0))
        self.of_state = nnx.Linear(WIDTH, 4 * WIDTH, use_bias=False, rngs=nnx.Rngs(0))

    def gates(self, x, h):
        return jnp.split(self.of_input(x) + self.of_state(h), 4, -1)

    def __call__(self, x, h, c):
        """Return the next output and cell state."""
        i, f, g, o = self.gates(x, h)
        c = jax.nn.sigmoid(f + 1.0) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return jax.nn.sigmoid(o) * jnp.tanh(c), c


class TorchLayer(nn.Module):
    """A cell over all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = TorchCell()

    def forward(self, x):
        """Return outputs [B, T, D]."""
        h = c = torch.zeros_like(x[:, 0])
        outputs = []
        for token in x.unbind(1):
            h, c = self.cell(token, h, c)
            outputs.append(h)
        return torch.stack(outputs, 1)


class JaxLayer(nnx.Module):
    """A cell over all tokens."""

    def __init__(self) -> None:
        self.cell = JaxCell()

    def __call__(self, x):
        """Return outputs [B, T, D]."""
        h = c = jnp.zeros_like(x[:, 0])
        outputs = []
        for place in range(x.shape[1]):
            h, c = self.cell(x[:, place], h, c)
            outputs.append(h)
        return jnp.stack(outputs, 1)


class TorchLstm(nn.Module):
    """An embedding, layers of cells, a norm and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.ModuleList(TorchLayer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens):
        """Return scores [B, T, classes]."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(x))


class JaxLstm(nnx.Module):
    """An embedding, layers of cells, a norm and a linear layer."""

    def __init__(self) -> None:
        self.embed = nnx.Embed(CLASSES, WIDTH, rngs=nnx.Rngs(0))
        self.layers = nnx.List([JaxLayer() for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, epsilon=1e-5, rngs=nnx.Rngs(0))
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=nnx.Rngs(0))

    def __call__(self, tokens):
        """Return scores [B, T, classes]."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(x))


def _inputs(rng: np.random.Generator) -> list:
    return [rng.integers(0, CLASSES, (3, LENGTH))]


LSTM = Case("LSTM", TorchLstm, JaxLstm, _inputs, flax_names)


class SwappedGates(JaxCell):
    def gates(self, x, h):
        i, f, g, o = super().gates(x, h)
        return f, i, g, o


class MissingForgetBias(TorchCell):
    def gates(self, x, h):
        i, f, g, o = super().gates(x, h)
        return i, f - 1.0, g, o


class TruncatedCell(JaxCell):
    """A cell that passes no gradient to the previous step."""

    def __call__(self, x, h, c):
        return super().__call__(x, jax.lax.stop_gradient(h), jax.lax.stop_gradient(c))


class TruncatedLayer(TorchLayer):
    """A layer that passes no gradient of the cell state to the previous step."""

    def forward(self, x):
        h = c = torch.zeros_like(x[:, 0])
        outputs = []
        for token in x.unbind(1):
            h, c = self.cell(token, h, c.detach())
            outputs.append(h)
        return torch.stack(outputs, 1)


class StateOfStepBefore(JaxLayer):
    def __call__(self, x):
        h = c = jnp.zeros_like(x[:, 0])
        outputs = []
        for place in range(x.shape[1]):
            outputs.append(h)
            h, c = self.cell(x[:, place], h, c)
        return jnp.stack(outputs, 1)


class HardSigmoid(JaxCell):
    def __call__(self, x, h, c):
        i, f, g, o = self.gates(x, h)
        c = jax.nn.sigmoid(f + 1.0) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return jax.nn.hard_sigmoid(o) * jnp.tanh(c), c


LSTM_BUGS = [
    Bug("input and forget gate swapped", "jax", "layers.1.cell", SwappedGates),
    Bug("missing forget bias", "torch", "layers.0.cell", MissingForgetBias),
    Bug("gradient through time stopped", "jax", "layers.1.cell", TruncatedCell, True),
    Bug("detached cell state", "torch", "layers.0", TruncatedLayer, True),
    Bug("outputs off by one step", "jax", "layers.1", StateOfStepBefore),
    Bug("hard sigmoid of the output gate", "jax", "layers.0.cell", HardSigmoid),
]
