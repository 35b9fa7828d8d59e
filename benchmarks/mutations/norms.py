"""Normalisation layers written by hand, between linear layers."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from torch import nn

from benchmarks.mutations.cases import Bug, Case, flax_names

WIDTH, GROUPS, CLASSES, EPSILON = 8, 2, 6, 1e-5
KINDS = ("layer", "rms", "group", "batch", "running", "instance")


class TorchNorm(nn.Module):
    """Normalisation over some axes, with gain and bias."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def axes(self, x):
        return (-1,)

    def variance(self, x, axes):
        return x.var(axes, correction=0, keepdim=True)

    def normalised(self, x, axes):
        return (x - x.mean(axes, keepdim=True)) * torch.rsqrt(self.variance(x, axes) + EPSILON)

    def forward(self, x):
        """Return an array of the same shape [B, T, D]."""
        return self.normalised(x, self.axes(x)) * self.gain + self.shift


class JaxNorm(nnx.Module):
    """Normalisation over some axes, with gain and bias."""

    def __init__(self) -> None:
        self.gain = nnx.Param(jnp.ones(WIDTH))
        self.shift = nnx.Param(jnp.zeros(WIDTH))

    def axes(self, x):
        return (-1,)

    def variance(self, x, axes):
        return jnp.var(x, axes, keepdims=True)

    def normalised(self, x, axes):
        return (x - x.mean(axes, keepdims=True)) * jax.lax.rsqrt(self.variance(x, axes) + EPSILON)

    def __call__(self, x):
        """Return an array of the same shape [B, T, D]."""
        return self.normalised(x, self.axes(x)) * self.gain[...] + self.shift[...]


class TorchRms(TorchNorm):
    """Division by the root of the mean square."""

    def normalised(self, x, axes):
        return x * torch.rsqrt(x.square().mean(axes, keepdim=True) + EPSILON)


class JaxRms(JaxNorm):
    """Division by the root of the mean square."""

    def normalised(self, x, axes):
        return x * jax.lax.rsqrt(jnp.square(x).mean(axes, keepdims=True) + EPSILON)


class TorchGroup(TorchNorm):
    """Normalisation over the tokens and the channels of a group."""

    def forward(self, x):
        """Return an array of the same shape [B, T, D]."""
        grouped = self.normalised(x.unflatten(-1, (GROUPS, -1)), (1, 3))
        return grouped.flatten(-2) * self.gain + self.shift


class JaxGroup(JaxNorm):
    """Normalisation over the tokens and the channels of a group."""

    def __call__(self, x):
        """Return an array of the same shape [B, T, D]."""
        grouped = self.normalised(x.reshape(*x.shape[:2], GROUPS, -1), (1, 3))
        return grouped.reshape(x.shape) * self.gain[...] + self.shift[...]


class TorchBatch(TorchNorm):
    """Normalisation over batch and tokens."""

    def axes(self, x):
        return (0, 1)


class JaxBatch(JaxNorm):
    """Normalisation over batch and tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.stale_mean = nnx.BatchStat(jnp.zeros(WIDTH))
        self.stale_var = nnx.BatchStat(jnp.ones(WIDTH))

    def axes(self, x):
        return (0, 1)


class TorchRunning(TorchNorm):
    """Normalisation by stored statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("var", torch.ones(WIDTH))

    def normalised(self, x, axes):
        return (x - self.mean) * torch.rsqrt(self.var + EPSILON)


class JaxRunning(JaxNorm):
    """Normalisation by stored statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nnx.BatchStat(jnp.zeros(WIDTH))
        self.var = nnx.BatchStat(jnp.ones(WIDTH))

    def normalised(self, x, axes):
        return (x - self.mean[...]) * jax.lax.rsqrt(self.var[...] + EPSILON)


class TorchInstance(TorchNorm):
    """Normalisation over the tokens of each sequence."""

    def axes(self, x):
        return (1,)


class JaxInstance(JaxNorm):
    """Normalisation over the tokens of each sequence."""

    def axes(self, x):
        return (1,)


TORCH_NORMS = dict(zip(KINDS, (TorchNorm, TorchRms, TorchGroup, TorchBatch, TorchRunning, TorchInstance), strict=True))
JAX_NORMS = dict(zip(KINDS, (JaxNorm, JaxRms, JaxGroup, JaxBatch, JaxRunning, JaxInstance), strict=True))


class TorchNorms(nn.Module):
    """A linear layer, tanh and a norm of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.ModuleDict({kind: nn.Linear(WIDTH, WIDTH) for kind in KINDS})
        self.norms = nn.ModuleDict({kind: TORCH_NORMS[kind]() for kind in KINDS})
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        """Return scores [B, T, classes]."""
        for kind in KINDS:
            x = self.norms[kind](torch.tanh(self.maps[kind](x)))
        return self.head(x)


class JaxNorms(nnx.Module):
    """A linear layer, tanh and a norm of each kind."""

    def __init__(self) -> None:
        self.maps = nnx.Dict({kind: nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)) for kind in KINDS})
        self.norms = nnx.Dict({kind: JAX_NORMS[kind]() for kind in KINDS})
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=nnx.Rngs(0))

    def __call__(self, x):
        """Return scores [B, T, classes]."""
        for kind in KINDS:
            x = self.norms[kind](jnp.tanh(self.maps[kind](x)))
        return self.head(x)


def _inputs(rng: np.random.Generator) -> list:
    return [rng.standard_normal((3, 5, WIDTH))]


NORMS = Case("normalisation layers", TorchNorms, JaxNorms, _inputs, flax_names, ignore=("norms.batch.stale_*",))


class UnbiasedVariance(TorchNorm):
    def variance(self, x, axes):
        return x.var(axes, correction=1, keepdim=True)


class SumOfSquares(JaxRms):
    def normalised(self, x, axes):
        return x * jax.lax.rsqrt(jnp.square(x).sum(axes, keepdims=True) + EPSILON)


class StridedGroups(JaxGroup):
    def __call__(self, x):
        order = np.arange(WIDTH).reshape(GROUPS, -1).T.flatten()
        grouped = self.normalised(x[..., order].reshape(*x.shape[:2], GROUPS, -1), (1, 3))
        return grouped.reshape(x.shape)[..., np.argsort(order)] * self.gain[...] + self.shift[...]


class StaleStatistics(JaxBatch):
    def normalised(self, x, axes):
        return (x - self.stale_mean[...]) * jax.lax.rsqrt(self.stale_var[...] + EPSILON)


class StoppedStatistics(JaxBatch):
    def variance(self, x, axes):
        return jax.lax.stop_gradient(super().variance(x, axes))


class EpsilonOutside(TorchRunning):
    def normalised(self, x, axes):
        return (x - self.mean) / (self.var.sqrt() + EPSILON)


class WrongAxes(TorchInstance):
    def axes(self, x):
        return (0,)


class GainPlusOne(JaxNorm):
    def __call__(self, x):
        return self.normalised(x, self.axes(x)) * (1.0 + self.gain[...]) + self.shift[...]


class DetachedMean(TorchInstance):
    def normalised(self, x, axes):
        return (x - x.mean(axes, keepdim=True).detach()) * torch.rsqrt(self.variance(x, axes) + EPSILON)


NORM_BUGS = [
    Bug("unbiased variance", "torch", "norms.layer", UnbiasedVariance),
    Bug("sum instead of mean of squares", "jax", "norms.rms", SumOfSquares),
    Bug("channels of groups strided", "jax", "norms.group", StridedGroups),
    Bug("stale statistics", "jax", "norms.batch", StaleStatistics),
    Bug("stop-gradient on the variance", "jax", "norms.batch", StoppedStatistics, True),
    Bug("epsilon outside of the root", "torch", "norms.running", EpsilonOutside),
    Bug("statistics over the batch", "torch", "norms.instance", WrongAxes),
    Bug("gain counted from one", "jax", "norms.layer", GainPlusOne),
    Bug("detached mean", "torch", "norms.instance", DetachedMean, True),
]
