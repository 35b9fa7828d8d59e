"""A mixture of experts: a router that chooses two of four, and a shared expert with a gate."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from flax import nnx
from torch import nn

from benchmarks.mutations.cases import Bug, Case, flax_names

WIDTH, INNER, EXPERTS, CHOSEN, LAYERS, CLASSES = 8, 12, 4, 2, 2, 9


class TorchRouter(nn.Module):
    """Weights of the experts for each token, 0 for those that are not chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(WIDTH, EXPERTS, bias=False)

    def forward(self, x):
        """Return weights [B, T, E]."""
        weights = self.score(x).softmax(-1)
        top, places = weights.topk(CHOSEN, -1)
        top = top / top.sum(-1, keepdim=True)
        return torch.zeros_like(weights).scatter(-1, places, top)


class JaxRouter(nnx.Module):
    """Weights of the experts for each token, 0 for those that are not chosen."""

    def __init__(self) -> None:
        self.score = nnx.Linear(WIDTH, EXPERTS, use_bias=False, rngs=nnx.Rngs(0))

    def chosen(self, weights):
        top, places = jax.lax.top_k(weights, CHOSEN)
        return top / top.sum(-1, keepdims=True), places

    def __call__(self, x):
        """Return weights [B, T, E]."""
        top, places = self.chosen(jax.nn.softmax(self.score(x)))
        return (jax.nn.one_hot(places, EXPERTS, dtype=x.dtype) * top[..., None]).sum(-2)


class TorchExpert(nn.Module):
    """A gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, INNER)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x):
        """Return an array of the same shape."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class JaxExpert(nnx.Module):
    """A gated MLP."""

    def __init__(self) -> None:
        self.gate = nnx.Linear(WIDTH, INNER, rngs=nnx.Rngs(0))
        self.up = nnx.Linear(WIDTH, INNER, rngs=nnx.Rngs(0))
        self.down = nnx.Linear(INNER, WIDTH, rngs=nnx.Rngs(0))

    def __call__(self, x):
        """Return an array of the same shape."""
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class TorchMoe(nn.Module):
    """The weighted sum of the experts, and the shared expert."""

    def __init__(self) -> None:
        super().__init__()
        self.router = TorchRouter()
        self.experts = nn.ModuleList(TorchExpert() for _ in range(EXPERTS))
        self.shared = TorchExpert()
        self.shared_gate = nn.Linear(WIDTH, 1)

    def combined(self, outputs, weights):
        return torch.einsum("ebtd,bte->btd", outputs, weights)

    def forward(self, x):
        """Return an array of the same shape."""
        outputs = torch.stack([expert(x) for expert in self.experts])
        return self.combined(outputs, self.router(x)) + torch.sigmoid(self.shared_gate(x)) * self.shared(x)


class JaxMoe(nnx.Module):
    """The weighted sum of the experts, and the shared expert."""

    def __init__(self) -> None:
        self.router = JaxRouter()
        self.experts = nnx.List([JaxExpert() for _ in range(EXPERTS)])
        self.shared = JaxExpert()
        self.shared_gate = nnx.Linear(WIDTH, 1, rngs=nnx.Rngs(0))

    def combined(self, outputs, weights):
        return jnp.einsum("ebtd,bte->btd", outputs, weights)

    def __call__(self, x):
        """Return an array of the same shape."""
        outputs = jnp.stack([expert(x) for expert in self.experts])
        return self.combined(outputs, self.router(x)) + jax.nn.sigmoid(self.shared_gate(x)) * self.shared(x)


class TorchBlock(nn.Module):
    """Experts with a norm and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.moe = TorchMoe()

    def forward(self, x):
        """Return an array of the same shape."""
        return x + self.moe(self.norm(x))


class JaxBlock(nnx.Module):
    """Experts with a norm and a residual."""

    def __init__(self) -> None:
        self.norm = nnx.LayerNorm(WIDTH, epsilon=1e-5, rngs=nnx.Rngs(0))
        self.moe = JaxMoe()

    def __call__(self, x):
        """Return an array of the same shape."""
        return x + self.moe(self.norm(x))


class TorchModel(nn.Module):
    """Blocks and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TorchBlock() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        """Return scores [B, T, classes]."""
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class JaxModel(nnx.Module):
    """Blocks and a linear layer."""

    def __init__(self) -> None:
        self.blocks = nnx.List([JaxBlock() for _ in range(LAYERS)])
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=nnx.Rngs(0))

    def __call__(self, x):
        """Return scores [B, T, classes]."""
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _inputs(rng: np.random.Generator) -> list:
    return [rng.standard_normal((2, 6, WIDTH))]


MOE = Case("mixture of experts", TorchModel, JaxModel, _inputs, flax_names)


class NotNormalised(JaxRouter):
    def chosen(self, weights):
        return jax.lax.top_k(weights, CHOSEN)


class NormalisedWithEpsilon(TorchRouter):
    def forward(self, x):
        weights = self.score(x).softmax(-1)
        top, places = weights.topk(CHOSEN, -1)
        top = top / (top.sum(-1, keepdim=True) + 1e-3)
        return torch.zeros_like(weights).scatter(-1, places, top)


class SigmoidRouter(JaxRouter):
    def __call__(self, x):
        top, places = self.chosen(jax.nn.sigmoid(self.score(x)))
        return (jax.nn.one_hot(places, EXPERTS, dtype=x.dtype) * top[..., None]).sum(-2)


class StoppedRouter(JaxRouter):
    def __call__(self, x):
        return jax.lax.stop_gradient(super().__call__(x))


class SwappedProjections(TorchExpert):
    def forward(self, x):
        return self.down(self.gate(x) * F.silu(self.up(x)))


class GeluExpert(JaxExpert):
    def __call__(self, x):
        return self.down(jax.nn.gelu(self.gate(x)) * self.up(x))


class SwappedExperts(JaxMoe):
    def combined(self, outputs, weights):
        return super().combined(outputs, weights[..., np.array([0, 2, 1, 3])])


class MeanOfExperts(TorchMoe):
    def combined(self, outputs, weights):
        return super().combined(outputs, weights) / CHOSEN


class NoSharedGate(JaxMoe):
    def __call__(self, x):
        outputs = jnp.stack([expert(x) for expert in self.experts])
        return self.combined(outputs, self.router(x)) + self.shared(x)


MOE_BUGS = [
    Bug("weights of the chosen not normalised", "jax", "blocks.1.moe.router", NotNormalised),
    Bug("epsilon in the normalisation", "torch", "blocks.0.moe.router", NormalisedWithEpsilon),
    Bug("sigmoid instead of softmax", "jax", "blocks.0.moe.router", SigmoidRouter),
    Bug("stop-gradient on the router", "jax", "blocks.1.moe.router", StoppedRouter, True),
    Bug("gate and up projection swapped", "torch", "blocks.1.moe.experts.2", SwappedProjections),
    Bug("GELU instead of SiLU in one expert", "jax", "blocks.0.moe.experts.3", GeluExpert),
    Bug("weights of two experts swapped", "jax", "blocks.1.moe", SwappedExperts),
    Bug("mean instead of sum of experts", "torch", "blocks.0.moe", MeanOfExperts),
    Bug("shared expert without gate", "jax", "blocks.1.moe", NoSharedGate),
]
