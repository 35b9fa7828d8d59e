"""Mixers of softmax attention: grouped queries with rotary positions, and multi-head latent attention.

Mirrors ``reference_torch/self_attention.py``.

Reference: DeepSeek-AI, arXiv 2405.04434, section 2.1, for latent attention; Kimi Team, arXiv 2510.26692, for its form
without positions.
"""

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from diptych.plans.config import TransformerConfig
from diptych.plans.context.sequences import FLACPContext
from diptych.plans.model.parameters import attention_specs, latent_attention_specs
from jax_impl.cache import AttentionState, LatentState, cached_attention, extended
from jax_impl.context_parallel import cp_attention
from jax_impl.documents import combine_masks
from jax_impl.forward_context import ForwardContext
from jax_impl.modules import Linear, RMSNorm
from jax_impl.ops import add_bias, causal_attention, fused_attention, masked_attention, rotary_embedding
from jax_impl.recompute import name_value


def attend_tokens(
    config: TransformerConfig,
    layer_number: int | Array,
    q: Float[Array, "b t h d"],
    k: Float[Array, "b t g d"],
    v: Float[Array, "b t g e"],
    context: ForwardContext,
) -> Float[Array, "b t h e"]:
    """Return the attention of all tokens, of their documents, or of this rank's part of them, without a cache.

    Args:
        config: configuration of the model.
        layer_number: global index of the layer, from 0, by which PyTorch's ranks tell messages apart.
        q: queries. [B, T, H, d]
        k: keys. [B, T, G, d]
        v: values. [B, T, G, e]
        context: context of the forward pass.
    """
    del layer_number
    if isinstance(context.sequences, FLACPContext):
        q = name_value(q, "q")
        k = name_value(k, "k")
        v = name_value(v, "v")
        return name_value(cp_attention(q, k, v, context.sequences, config.use_flash_attn), "core_attn")
    attend = fused_attention if config.use_flash_attn else causal_attention
    mask = combine_masks(context.attention_mask, context.sequences)
    return name_value(attend(q, k, v, mask), "core_attn")


class SelfAttention(nnx.Module):
    """Causal softmax attention with rotary positions, grouped queries and, if configured, normed heads and a gate.

    Args:
        config: configuration of the model.
        layer_number: global index of the layer, from 0 (Megatron-core's layer_number counts from 1).
        name: canonical name of the module.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, name: str) -> None:
        self.config = config
        self.layer_number = layer_number
        specs = attention_specs(config)
        self.linear_qkv = Linear(config, f"{name}.linear_qkv", specs["linear_qkv"])
        self.q_layernorm, self.k_layernorm = (
            RMSNorm(config, f"{name}.{norm}", specs[norm]) if norm in specs else None
            for norm in ("q_layernorm", "k_layernorm")
        )
        self.linear_gate = (
            Linear(config, f"{name}.linear_gate", specs["linear_gate"]) if "linear_gate" in specs else None
        )
        self.linear_proj = Linear(config, f"{name}.linear_proj", specs["linear_proj"])

    def __call__(
        self,
        hidden_states: Float[Array, "b t d"],
        context: ForwardContext,
    ) -> tuple[Float[Array, "b t d"], Array | None]:
        """Return the output of attention [B, T, D] and the bias of the output projection, not yet added.

        Args:
            hidden_states: normed input of the sublayer. [B, T, D]
            context: context of the forward pass.
        """
        batch, length, _ = hidden_states.shape
        heads = self.config.num_attention_heads
        groups = self.config.query_groups
        packed = self.linear_qkv.pack(hidden_states)
        qkv = self.linear_qkv.with_bias(hidden_states, packed)
        qkv = qkv.reshape(batch, length, heads + 2 * groups, self.config.head_dim)
        q, k, v = jnp.split(qkv, (heads, heads + groups), axis=2)
        q = self._positioned(q, self.q_layernorm, context)
        k = self._positioned(k, self.k_layernorm, context)
        if context.cache is None:
            attended = attend_tokens(self.config, self.layer_number, q, k, v, context)
        else:
            past = context.cache.layers[self.layer_number]
            assert isinstance(past, AttentionState), "the cache was made for another layer pattern"
            attended, context.cache.layers[self.layer_number] = cached_attention(q, k, v, past, context.cache.length)
        attended = attended.reshape(batch, length, -1)
        if self.linear_gate is not None:
            attended = attended * nnx.sigmoid(add_bias(*self.linear_gate(hidden_states, packed)))
        return self.linear_proj(attended)

    def _positioned(self, x: Array, norm: RMSNorm | None, context: ForwardContext) -> Array:
        """Apply the norm, if there is one, and the rotary embedding to queries or keys [B, T, H, d]."""
        if norm is not None:
            joint = self.config.qk_layernorm_scope == "projection"
            x = norm(x.reshape(*x.shape[:2], -1), context.tensor_parallel).reshape(x.shape) if joint else norm(x)
        return rotary_embedding(x, context.positions, self.config.rotary_base, self.config.rotary_dim)


class LatentAttention(nnx.Module):
    """Multi-head latent attention without positions.

    Keys and values of all heads are projected from one latent per token, and a part of the keys is the same for all
    heads. A cache holds the latent and the shared part only.

    Args:
        config: configuration of the model.
        layer_number: global index of the layer, from 0 (Megatron-core's layer_number counts from 1).
        name: canonical name of the module.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, name: str) -> None:
        self.config = config
        self.layer_number = layer_number
        specs = latent_attention_specs(config)
        self.linear_q_proj = Linear(config, f"{name}.linear_q_proj", specs["linear_q_proj"])
        self.linear_kv_down_proj = Linear(config, f"{name}.linear_kv_down_proj", specs["linear_kv_down_proj"])
        self.kv_layernorm = RMSNorm(config, f"{name}.kv_layernorm", specs["kv_layernorm"], config.mla_norm_epsilon)
        self.linear_kv_up_proj = Linear(config, f"{name}.linear_kv_up_proj", specs["linear_kv_up_proj"])
        self.linear_proj = Linear(config, f"{name}.linear_proj", specs["linear_proj"])

    def __call__(
        self,
        hidden_states: Float[Array, "b t d"],
        context: ForwardContext,
    ) -> tuple[Float[Array, "b t d"], Array | None]:
        """Return the output of attention [B, T, D] and the bias of the output projection, not yet added.

        Args:
            hidden_states: normed input of the sublayer. [B, T, D]
            context: context of the forward pass.
        """
        batch, length, _ = hidden_states.shape
        packed = self.linear_q_proj.pack(hidden_states)
        q = add_bias(*self.linear_q_proj(hidden_states, packed)).reshape(
            batch, length, self.config.num_attention_heads, -1
        )
        down = name_value(add_bias(*self.linear_kv_down_proj(hidden_states, packed)), "kv_latent")
        latent, shared_key = jnp.split(down, (self.config.kv_lora_rank or 0,), axis=-1)
        latent = self.kv_layernorm(latent)
        if context.cache is None:
            k, v = self._keys_and_values(latent, shared_key)
            attended = attend_tokens(self.config, self.layer_number, q, k, v, context)
        else:
            past = context.cache.layers[self.layer_number]
            read = context.cache.length
            assert isinstance(past, LatentState), "the cache was made for another layer pattern"
            state = LatentState(*extended(past, (latent, shared_key), read))
            k, v = self._keys_and_values(*state)
            allowed = jnp.arange(k.shape[1]) <= read + jnp.arange(length)[:, None]
            attended = masked_attention(q, k, v, allowed)
            context.cache.layers[self.layer_number] = state
        return self.linear_proj(attended.reshape(batch, length, -1))

    def _keys_and_values(self, latent: Array, shared_key: Array) -> tuple[Array, Array]:
        """Return keys and values of all heads [B, T, H, ...] from latents [B, T, r] and shared parts [B, T, d]."""
        heads, _, _, value = self.config.attention_heads("mla")
        up = add_bias(*self.linear_kv_up_proj(latent)).reshape(*latent.shape[:2], heads, -1)
        own, v = jnp.split(up, (up.shape[-1] - value,), axis=-1)
        shared = jnp.broadcast_to(shared_key[:, :, None], (*own.shape[:3], shared_key.shape[-1]))
        return jnp.concatenate([own, shared], axis=-1), v
