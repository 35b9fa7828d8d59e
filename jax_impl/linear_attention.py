"""Mixers with a state of constant size: Gated DeltaNet and Kimi delta attention, in place of softmax attention.

A mixer projects tokens to queries, keys and values, applies a short causal convolution and then the gated delta rule.
It normalises the output of each head and multiplies it by a gate. Mirrors ``reference_torch/linear_attention.py``.

Reference: Yang, Kautz and Hatamizadeh, arXiv 2412.06464, section 3.4; Kimi Team, arXiv 2510.26692, section 4. Here q, k
and v come from one projection and one convolution, and the linear layers have biases if the model has biases.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from diptych.plans.config import TransformerConfig
from diptych.plans.context.sequences import FLACPContext
from diptych.plans.model.parameters import ParameterSpec, delta_rule_specs
from jax_impl.cache import DecodingCache, DeltaRuleState, prepend_tail
from jax_impl.context_parallel import cp_short_convolution
from jax_impl.delta_rule import (
    chunk_gated_delta_rule,
    chunk_kda,
    gdn_gate,
    recurrent_gated_delta_rule,
    recurrent_kda,
)
from jax_impl.documents import PackedDocuments
from jax_impl.forward_context import ForwardContext
from jax_impl.modules import Linear, RMSNorm
from jax_impl.ops import add_bias, at_least_float32, parameter, short_convolution
from jax_impl.recompute import name_value


class ShortConvolution(nnx.Module):
    """A causal depthwise convolution, followed by SiLU.

    Args:
        config: configuration of the model.
        name: canonical name of the module.
        specs: shape of the weight.
    """

    def __init__(self, config: TransformerConfig, name: str, specs: dict[str, ParameterSpec]) -> None:
        self.weight = parameter(config, f"{name}.weight", specs["weight"])

    def __call__(
        self, x: Float[Array, "b t c"], sequences: PackedDocuments | FLACPContext | None = None
    ) -> Float[Array, "b t c"]:
        """Run ops.short_convolution, or context_parallel.cp_short_convolution if sequences are split over ranks."""
        if isinstance(sequences, FLACPContext):
            return cp_short_convolution(x, self.weight[...], sequences)
        before = jnp.arange(x.shape[1]) if sequences is None else sequences.before
        return short_convolution(x, self.weight[...], before)


class DecayGate(nnx.Module):
    """The parameters of the gate that computes log decays; see delta_rule.gdn_gate and kda_gate.

    Args:
        config: configuration of the model.
        name: canonical name of the module.
        specs: shapes of A_log and dt_bias.
    """

    def __init__(self, config: TransformerConfig, name: str, specs: dict[str, ParameterSpec]) -> None:
        self.A_log = parameter(config, f"{name}.A_log", specs["A_log"])
        self.dt_bias = parameter(config, f"{name}.dt_bias", specs["dt_bias"])


class _DeltaRuleMixer(nnx.Module):
    """The common part of both mixers; subclasses define the rule, and the projections of decays and output gate."""

    def __init__(self, config: TransformerConfig, layer_number: int, name: str) -> None:
        self.config = config
        self.layer_number = layer_number
        specs = delta_rule_specs(config, config.layer(layer_number).mixer)
        self.linear_qkv = Linear(config, f"{name}.linear_qkv", specs["linear_qkv"])
        self.conv1d = ShortConvolution(config, f"{name}.conv1d", specs["conv1d"])
        self.linear_beta = Linear(config, f"{name}.linear_beta", specs["linear_beta"])
        self._make_projections(name, specs)
        self.decay_gate = DecayGate(config, f"{name}.decay_gate", specs["decay_gate"])
        self.out_norm = RMSNorm(config, f"{name}.out_norm", specs["out_norm"], config.linear_norm_epsilon)
        self.linear_proj = Linear(config, f"{name}.linear_proj", specs["linear_proj"])

    def __call__(
        self,
        hidden_states: Float[Array, "b t d"],
        context: ForwardContext,
    ) -> tuple[Float[Array, "b t d"], Array | None]:
        """Return the mixed output [B, T, D] and the bias of the output projection, not yet added.

        Args:
            hidden_states: normed input of the sublayer. [B, T, D]
            context: context of the forward pass.

        Raises:
            ValueError: the context has an attention_mask.
        """
        if context.attention_mask is not None:
            raise ValueError(
                "attention_mask: expected None in a model with gdn or kda layers, whose state has seen all tokens, got "
                f"one of shape {list(context.attention_mask.shape)}; give document_starts to separate documents"
            )
        packed = self.linear_qkv.pack(hidden_states)
        projected = _apply(self.linear_qkv, hidden_states, packed)
        beta = jax.nn.sigmoid(at_least_float32(_apply(self.linear_beta, hidden_states, packed)))
        if self.config.linear_allow_neg_eigval:
            beta = 2 * beta
        decays = self._decays(hidden_states, packed)
        if context.cache is not None:
            attended = self._decode(projected, decays, beta, context.cache)
        else:
            qkv = name_value(self.conv1d(projected, context.sequences), "short_conv")
            attended = self._over_sequences(*self._heads(qkv), decays, beta, context.sequences)
        gate = _by_head(self._output_gate(hidden_states, packed), self.config.linear_heads[1])
        normed = self.out_norm(name_value(attended, "core_attn")) * gate
        return self.linear_proj(normed.reshape(*normed.shape[:2], -1))

    def _heads(self, qkv: Array) -> tuple[Array, Array, Array]:
        """Split the joint projection [B, T, C] into the heads of q, k and v, [B, T, heads, channels] each."""
        heads, value_heads, key, _ = self.config.linear_heads
        q, k, v = jnp.split(qkv, (heads * key, 2 * heads * key), axis=-1)
        return _by_head(q, heads), _by_head(k, heads), _by_head(v, value_heads)

    def _over_sequences(
        self, q: Array, k: Array, v: Array, g: Array, beta: Array, sequences: PackedDocuments | FLACPContext | None
    ) -> Array:
        """Run the rule over whole sequences, over their documents, or over this rank's part of split sequences."""
        if sequences is None:
            return self._rule(q, k, v, g, beta)[0]
        if isinstance(sequences, FLACPContext):
            return self._rule(q, k, v, g, beta, cp_context=sequences)[0]
        concatenated = (x.reshape(1, -1, *x.shape[2:]) for x in (q, k, v, g, beta))
        return self._rule(*concatenated, cu_seqlens=sequences.cu_seqlens)[0].reshape(v.shape)

    def _decode(self, projected: Array, decays: Array, beta: Array, cache: DecodingCache) -> Array:
        """Run the rule over the next tokens of the cached sequences, and update the cache."""
        past = cache.layers[self.layer_number]
        assert isinstance(past, DeltaRuleState), "the cache was made for another layer pattern"
        joined, tail = prepend_tail(projected, past)
        qkv = self.conv1d(joined)[:, -projected.shape[1] :]
        arrays = (*self._heads(qkv), decays, beta)
        by_token = projected.shape[1] == 1
        attended, state = self._rule(*arrays, by_token=by_token, initial_state=past.state, output_final_state=True)
        assert state is not None, "output_final_state=True returns a state"
        cache.layers[self.layer_number] = DeltaRuleState(tail, state)
        return attended

    def _make_projections(self, name: str, specs: dict[str, dict[str, ParameterSpec]]) -> None:
        """Create the projections of the decays and of the output gate."""
        raise NotImplementedError

    def _decays(self, hidden_states: Array, packed: Array | None) -> Array:
        """Project hidden states to the argument g of the rule."""
        raise NotImplementedError

    def _rule(self, *arrays: Array, by_token: bool = False, **options: Any) -> tuple[Array, Array | None]:
        """Apply the rule to q, k, v, g and beta, by token or in chunks; return outputs and final state."""
        raise NotImplementedError

    def _output_gate(self, hidden_states: Array, packed: Array | None) -> Array:
        """Return the gate, which multiplies the output."""
        raise NotImplementedError


class GatedDeltaNet(_DeltaRuleMixer):
    """Gated DeltaNet: one decay per head, and a SiLU gate on the output.

    Args:
        config: configuration of the model.
        layer_number: global index of the layer, from 0 (Megatron-core's layer_number counts from 1).
        name: canonical name of the module.
    """

    def _make_projections(self, name: str, specs: dict[str, dict[str, ParameterSpec]]) -> None:
        """Create the projections of the decays and of the output gate."""
        self.linear_decay = Linear(self.config, f"{name}.linear_decay", specs["linear_decay"])
        self.linear_gate = Linear(self.config, f"{name}.linear_gate", specs["linear_gate"])

    def _decays(self, hidden_states: Array, packed: Array | None) -> Array:
        """Return the log decays of gdn_gate, [B, T, HV]."""
        return gdn_gate(
            _apply(self.linear_decay, hidden_states, packed), self.decay_gate.A_log[...], self.decay_gate.dt_bias[...]
        )

    def _rule(self, *arrays: Array, by_token: bool = False, **options: Any) -> tuple[Array, Array | None]:
        """Apply the gated delta rule of GDN; see _DeltaRuleMixer."""
        options["use_qk_l2norm_in_kernel"] = True
        if by_token:
            return recurrent_gated_delta_rule(*arrays, **options)
        return chunk_gated_delta_rule(*arrays, impl=self.config.impl, **options)

    def _output_gate(self, hidden_states: Array, packed: Array | None) -> Array:
        """Return the SiLU gate, [B, T, HV * V]."""
        return jax.nn.silu(_apply(self.linear_gate, hidden_states, packed))


class KimiDeltaAttention(_DeltaRuleMixer):
    """Kimi delta attention: one decay per channel, and a sigmoid gate on the output.

    Args:
        config: configuration of the model.
        layer_number: global index of the layer, from 0 (Megatron-core's layer_number counts from 1).
        name: canonical name of the module.
    """

    def _make_projections(self, name: str, specs: dict[str, dict[str, ParameterSpec]]) -> None:
        """Create the projections of the decays and of the output gate."""
        self.linear_decay_down = Linear(self.config, f"{name}.linear_decay_down", specs["linear_decay_down"])
        self.linear_decay_up = Linear(self.config, f"{name}.linear_decay_up", specs["linear_decay_up"])
        self.linear_gate_down = Linear(self.config, f"{name}.linear_gate_down", specs["linear_gate_down"])
        self.linear_gate_up = Linear(self.config, f"{name}.linear_gate_up", specs["linear_gate_up"])

    def _decays(self, hidden_states: Array, packed: Array | None) -> Array:
        """Return raw decays; the rule applies kda_gate to them."""
        decays = _apply(self.linear_decay_up, _apply(self.linear_decay_down, hidden_states, packed))
        return _by_head(decays, self.config.linear_heads[1])

    def _rule(self, *arrays: Array, by_token: bool = False, **options: Any) -> tuple[Array, Array | None]:
        """Apply Kimi delta attention; see _DeltaRuleMixer."""
        options |= dict(
            use_qk_l2norm_in_kernel=True,
            A_log=self.decay_gate.A_log[...],
            dt_bias=self.decay_gate.dt_bias[...],
            use_gate_in_kernel=True,
            lower_bound=self.config.kda_lower_bound,
        )
        return recurrent_kda(*arrays, **options) if by_token else chunk_kda(*arrays, impl=self.config.impl, **options)

    def _output_gate(self, hidden_states: Array, packed: Array | None) -> Array:
        """Return the sigmoid gate, [B, T, HV * V]."""
        return jax.nn.sigmoid(_apply(self.linear_gate_up, _apply(self.linear_gate_down, hidden_states, packed)))


def _apply(linear_layer: Linear, x: Array, packed: Array | None = None) -> Array:
    """Apply a linear layer and add its bias; see Linear for ``packed``."""
    return add_bias(*linear_layer(x, packed))


def _by_head(x: Array, heads: int) -> Array:
    """Reshape [B, T, heads * channels] to [B, T, heads, channels]."""
    return x.reshape(*x.shape[:-1], heads, -1)
