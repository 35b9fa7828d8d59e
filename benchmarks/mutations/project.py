"""Layers of this project: hyper-connections with attention, and the delta rule."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from flax import nnx
from torch import nn

import jax_impl.forward_context
import jax_impl.hyper_connections
import jax_impl.linear_attention
import jax_impl.mlp
import jax_impl.modules
import jax_impl.self_attention
import jax_impl.transformer
import reference_torch.forward_context
import reference_torch.hyper_connections
import reference_torch.linear_attention
import reference_torch.mlp
import reference_torch.modules
import reference_torch.transformer
from benchmarks.mutations.cases import Bug, Case, flax_names
from diptych.plans.config import TransformerConfig
from reference_torch.recompute import SAVE_ALL

CLASSES = 11
HYPER = TransformerConfig(
    hidden_size=16,
    num_layers=2,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=24,
    seq_length=8,
    enable_hyper_connections=True,
    mhc_init_gating_factor=1.0,
    init_method_std=0.25,
)
DELTA = TransformerConfig(
    hidden_size=16,
    num_layers=2,
    num_attention_heads=2,
    ffn_hidden_size=24,
    seq_length=8,
    layer_pattern="kda,gdn",
    activation="gelu",
    init_method_std=0.25,
)


class TorchLayers(nn.Module):
    """Layers of the transformer, a norm and a linear layer."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        numbers = range(config.num_layers)
        self.layers = nn.ModuleList(reference_torch.transformer.TransformerLayer(config, n) for n in numbers)
        self.norm = reference_torch.modules.RMSNorm(config, "norm")
        self.head = nn.Linear(config.hidden_size, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores [B, T, classes] of inputs [B, T, D]."""
        connections = reference_torch.hyper_connections.HyperConnectionModule
        streams = self.config.num_residual_streams
        context = reference_torch.forward_context.ForwardContext(torch.arange(x.shape[1]))
        if self.config.enable_hyper_connections:
            x = connections.input_expand(x, streams)
        for layer in self.layers:
            x = layer(x, context)
        if self.config.enable_hyper_connections:
            x = connections.output_contract(x, streams)
        return self.head(self.norm(x))


class JaxLayers(nnx.Module):
    """Layers of the transformer, a norm and a linear layer."""

    def __init__(self, config: TransformerConfig) -> None:
        self.config = config
        numbers = range(config.num_layers)
        self.layers = nnx.List([jax_impl.transformer.TransformerLayer(config, n) for n in numbers])
        self.norm = jax_impl.modules.RMSNorm(config, "norm")
        self.head = nnx.Linear(config.hidden_size, CLASSES, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return scores [B, T, classes] of inputs [B, T, D]."""
        connections = jax_impl.hyper_connections.HyperConnectionModule
        streams = self.config.num_residual_streams
        context = jax_impl.forward_context.ForwardContext(jnp.arange(x.shape[1]))
        if self.config.enable_hyper_connections:
            x = connections.input_expand(x, streams)
        for layer in self.layers:
            x = layer(x, context)
        if self.config.enable_hyper_connections:
            x = connections.output_contract(x, streams)
        return self.head(self.norm(x))


def _inputs(rng: np.random.Generator) -> list:
    return [rng.standard_normal((2, 8, 16))]


HYPER_CONNECTIONS = Case(
    "hyper-connections", partial(TorchLayers, HYPER), partial(JaxLayers, HYPER), _inputs, flax_names
)
DELTA_RULE = Case("delta rule", partial(TorchLayers, DELTA), partial(JaxLayers, DELTA), _inputs, flax_names)


class TransposedMix(jax_impl.hyper_connections.HyperConnectionModule):
    def apply_h_res(self, h_res, residual):
        return super().apply_h_res(jnp.swapaxes(h_res, -1, -2), residual)


class HalvedWrite(reference_torch.hyper_connections.HyperConnectionModule):
    def compute_mappings(self, x):
        h_pre, h_post, h_res = super().compute_mappings(x)
        return h_pre, h_post / 2, h_res


class FewIterations(jax_impl.hyper_connections.HyperConnectionModule):
    def compute_mappings(self, x):
        arrays = self.phi[...], self.alpha[...], self.bias[...]
        options = dict(iterations=3, rms_epsilon=self.config.layernorm_epsilon, impl="reference")
        return jax_impl.hyper_connections.compute_mappings(x, *arrays, **options)


class StoppedMix(jax_impl.hyper_connections.HyperConnectionModule):
    def apply_h_res(self, h_res, residual):
        return super().apply_h_res(jax.lax.stop_gradient(h_res), residual)


class EpsilonOutside(reference_torch.modules.RMSNorm):
    def forward(self, x):
        return x / (x.square().mean(-1, keepdim=True).sqrt() + self.epsilon) * self.weight


class SwappedHalves(jax_impl.mlp.MLP):
    def __call__(self, hidden_states, tp_size=1):
        inner, _ = self.linear_fc1(hidden_states)
        left, right = jnp.split(inner, 2, axis=-1)
        return self.linear_fc2(left * jax.nn.silu(right) if self.activate is jax_impl.ops.swiglu else inner)[0]


class Interleaved(jax_impl.self_attention.SelfAttention):
    """Attention whose rotary embedding rotates pairs of neighbouring channels."""

    def __call__(self, hidden_states, context):
        width = self.config.head_dim
        order = np.r_[0:width:2, 1:width:2]
        qkv = self.linear_qkv(hidden_states)[0].reshape(*hidden_states.shape[:2], -1, width)
        heads, groups = self.config.num_attention_heads, self.config.query_groups
        q, k, v = jnp.split(qkv, (heads, heads + groups), axis=2)
        turn = partial(
            jax_impl.self_attention.rotary_embedding, positions=context.positions, base=self.config.rotary_base
        )
        attended = jax_impl.self_attention.causal_attention(turn(q[..., order]), turn(k[..., order]), v)
        return self.linear_proj(attended.reshape(*hidden_states.shape[:2], -1))


class DetachedResidual(reference_torch.transformer.TransformerLayer):
    def _write(self, connection, output, h_post, mixed, state, site):
        return super()._write(connection, output, h_post, mixed.detach() if site % 2 else mixed, state, site)


class DoubledBeta(jax_impl.linear_attention.KimiDeltaAttention):
    def _rule(self, q, k, v, g, beta, **options):
        return super()._rule(q, k, v, g, 2 * beta, **options)


class SigmoidGate(reference_torch.linear_attention.GatedDeltaNet):
    def _output_gate(self, hidden_states, packed):
        return torch.sigmoid(F.linear(hidden_states, self.linear_gate.weight))


class LateConvolution(jax_impl.linear_attention.ShortConvolution):
    """A convolution that is one token late: it reads the tokens before each token, but not the token itself."""

    def __call__(self, x, sequences=None):
        return super().__call__(jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1], sequences)


class StoppedDecay(jax_impl.linear_attention.KimiDeltaAttention):
    def _decays(self, hidden_states, packed):
        return jax.lax.stop_gradient(super()._decays(hidden_states, packed))


class NarrowDecay(jax_impl.linear_attention.GatedDeltaNet):
    def _decays(self, hidden_states, packed):
        decays = super()._decays(hidden_states, packed)
        return decays.astype(jnp.bfloat16).astype(decays.dtype)


class OtherGelu(reference_torch.mlp.MLP):
    """An MLP with the other variant of GELU: exact for tanh, and tanh for exact."""

    def forward(self, hidden_states, recompute=SAVE_ALL, tp_size=1):
        inner = F.linear(hidden_states, self.linear_fc1.weight)
        other = F.gelu(inner, approximate="none" if _is_tanh(self, inner) else "tanh")
        return self.linear_fc2(other)[0]


def _is_tanh(mlp: reference_torch.mlp.MLP, inner: torch.Tensor) -> bool:
    right = reference_torch.mlp.gelu(inner, "reference")
    return bool((right - F.gelu(inner, approximate="tanh")).norm() < (right - F.gelu(inner)).norm())


# A mixing matrix has no effect in the first sublayer, where all streams are equal, nor in the last, before their mean.
HYPER_BUGS = [
    Bug("transposed mixing matrix", "jax", "layers.1.self_attention_hyper_connection", TransposedMix),
    Bug("missing factor 2 of h_post", "torch", "layers.0.mlp_hyper_connection", HalvedWrite),
    Bug("too few Sinkhorn iterations", "jax", "layers.1.self_attention_hyper_connection", FewIterations),
    Bug("stop-gradient on the mixing matrix", "jax", "layers.0.mlp_hyper_connection", StoppedMix, True),
    Bug("epsilon outside of the root", "torch", "layers.0.input_layernorm", EpsilonOutside),
    Bug("swapped halves of SwiGLU", "jax", "layers.1.mlp", SwappedHalves),
    Bug("rotary pairs interleaved", "jax", "layers.0.self_attention", Interleaved),
    Bug("detached residual", "torch", "layers.1", DetachedResidual, True),
]
DELTA_BUGS = [
    Bug("beta in (0, 2)", "jax", "layers.0.self_attention", DoubledBeta),
    Bug("sigmoid instead of SiLU gate", "torch", "layers.1.self_attention", SigmoidGate),
    Bug("convolution off by one token", "jax", "layers.1.self_attention.conv1d", LateConvolution),
    Bug("stop-gradient on the decays", "jax", "layers.0.self_attention", StoppedDecay, True),
    Bug("decays in bfloat16", "jax", "layers.1.self_attention", NarrowDecay),
    Bug("other approximation of GELU", "torch", "layers.0.mlp", OtherGelu),
    Bug("epsilon of the output norm", "torch", "layers.0.self_attention.out_norm", {"epsilon": 1e-6}),
]
