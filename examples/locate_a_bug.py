"""Find the submodule in which two models differ: a GELU variant in one of twelve blocks, 20 seconds on 2 CPU cores.

python examples/locate_a_bug.py
"""

import numpy as np
import torch
import torch.nn.functional as F
from flax import nnx
from torch import nn

from parity import locate


class TorchBlock(nn.Module):
    """A feed-forward block with the tanh approximation of GELU."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        """Return x plus the feed-forward network of its norm."""
        return x + self.down(F.gelu(self.up(self.norm(x)), approximate="tanh"))


class JaxBlock(nnx.Module):
    """The same block in JAX; ``exact`` chooses exact GELU instead of the tanh approximation."""

    def __init__(self, width, rngs, exact=False):
        self.norm = nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)
        self.exact = exact

    def __call__(self, x):
        """Return x plus the feed-forward network of its norm."""
        return x + self.down(nnx.gelu(self.up(self.norm(x)), approximate=not self.exact))


class JaxModel(nnx.Module):
    """Blocks in a row, the eighth with a bug."""

    def __init__(self, width, depth, rngs):
        self.blocks = nnx.List([JaxBlock(width, rngs, exact=number == 7) for number in range(depth)])

    def __call__(self, x):
        """Return the output of the last block."""
        for block in self.blocks:
            x = block(x)
        return x


class TorchModel(nn.Module):
    """Blocks in a row."""

    def __init__(self, width, depth):
        super().__init__()
        self.blocks = nn.ModuleList(TorchBlock(width) for _ in range(depth))

    def forward(self, x):
        """Return the output of the last block."""
        for block in self.blocks:
            x = block(x)
        return x


def torch_side():
    """Return the PyTorch model and its inputs."""
    torch.manual_seed(0)
    return TorchModel(32, 12), [np.random.default_rng(0).standard_normal((4, 32))]


def jax_side():
    """Return the JAX model; locate copies the parameters of the PyTorch model into it."""
    return JaxModel(32, 12, nnx.Rngs(0))


if __name__ == "__main__":
    model, inputs = torch_side()
    print(locate(model, jax_side(), inputs))
