"""Compare a function of your own in PyTorch and in JAX: rotary position embedding, 10 seconds on 2 CPU cores.

python examples/compare_your_function.py
"""

import jax.numpy as jnp
import numpy as np
import torch

from parity import compare_functions


def torch_rope(x, positions, theta):
    """Rotate the pairs (x[i], x[i + d/2])."""
    first, second = x.chunk(2, -1)
    angle = positions[:, None] * theta ** (-torch.arange(x.shape[-1] // 2) * 2 / x.shape[-1])
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)


def jax_rope(x, positions, theta):
    """Rotate the pairs (x[2i], x[2i + 1]): the other layout in use, a common mistake when weights are converted."""
    first, second = x[..., ::2], x[..., 1::2]
    angle = positions[:, None] * theta ** (-jnp.arange(x.shape[-1] // 2) * 2 / x.shape[-1])
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.stack([first * cos - second * sin, second * cos + first * sin], -1).reshape(x.shape)


if __name__ == "__main__":
    inputs = {"x": np.random.default_rng(0).standard_normal((2, 16, 8)), "positions": np.arange(16)}
    print(compare_functions(torch_rope, jax_rope, inputs, static={"theta": 10_000.0}))
