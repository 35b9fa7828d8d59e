"""Mixers of softmax attention: grouped queries with rotary positions, and multi-head latent attention.

Mirrors ``jax_impl/self_attention.py``.

Reference: DeepSeek-AI, arXiv 2405.04434, section 2.1, for latent attention; Kimi Team, arXiv 2510.26692, for its form
without positions.
"""

from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from diptych.plans.config import TransformerConfig
from diptych.plans.context.sequences import FLACPContext
from diptych.plans.model.parameters import attention_specs, latent_attention_specs
from reference_torch.cache import AttentionState, LatentState, cached_attention, extended
from reference_torch.context_parallel import cp_attention
from reference_torch.documents import combine_masks
from reference_torch.forward_context import ForwardContext
from reference_torch.modules import Linear, RMSNorm
from reference_torch.ops import (
    add_bias,
    causal_attention,
    fused_attention,
    masked_attention,
    rotary_embedding,
)
from reference_torch.recompute import name_value


def attend_tokens(
    config: TransformerConfig,
    layer_number: int,
    q: Float[Tensor, "b t h d"],
    k: Float[Tensor, "b t g d"],
    v: Float[Tensor, "b t g e"],
    context: ForwardContext,
) -> Float[Tensor, "b t h e"]:
    """Return the attention of all tokens, of their documents, or of this rank's part of them, without a cache.

    Args:
        config: configuration of the model.
        layer_number: global index of the layer, from 0 (Megatron-core's layer_number counts from 1).
        q: queries. [B, T, H, d]
        k: keys. [B, T, G, d]
        v: values. [B, T, G, e]
        context: context of the forward pass.
    """
    attend = fused_attention if config.use_flash_attn else causal_attention
    # Views would save the joint projection of q, k and v for backward.
    q, k, v = (name_value(x.contiguous(), name) for x, name in ((q, "q"), (k, "k"), (v, "v")))
    if isinstance(context.sequences, FLACPContext):
        cp_context = context.sequences.of_layer(layer_number)
        attend = partial(cp_attention, context=cp_context, fused=config.use_flash_attn)
        attended = context.recompute("core_attn", attend, q, k, v)
    else:
        mask = combine_masks(context.attention_mask, context.sequences)
        attended = context.recompute("core_attn", attend, q, k, v, mask)
    return name_value(attended, "core_attn")


class SelfAttention(nn.Module):
    """Causal softmax attention with rotary positions, grouped queries and, if configured, normed heads and a gate.

    Args:
        config: configuration of the model.
        layer_number: global index of the layer, from 0 (Megatron-core's layer_number counts from 1).
        name: canonical name of the module.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, name: str) -> None:
        super().__init__()
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

    def forward(
        self,
        hidden_states: Float[Tensor, "b t d"],
        context: ForwardContext,
    ) -> tuple[Float[Tensor, "b t d"], Tensor | None]:
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
        qkv = qkv.view(batch, length, heads + 2 * groups, self.config.head_dim)
        q, k, v = qkv.split((heads, groups, groups), dim=2)
        q = self._positioned(q, self.q_layernorm, context)
        k = self._positioned(k, self.k_layernorm, context)
        if context.cache is None:
            attended = attend_tokens(self.config, self.layer_number, q, k, v, context)
        else:
            past = context.cache.layers[self.layer_number]
            assert isinstance(past, AttentionState), "the cache was made for another layer pattern"
            attended, context.cache.layers[self.layer_number] = cached_attention(q, k, v, past, context.cache.length)
        return self.linear_proj(self._gated(attended.flatten(2), hidden_states, packed))

    def _gated(self, attended: Tensor, hidden_states: Tensor, packed: Tensor | None) -> Tensor:
        """Multiply the output of attention [B, T, H d] by its gate, if there is one."""
        if self.linear_gate is None:
            return attended
        return attended * torch.sigmoid(add_bias(*self.linear_gate(hidden_states, packed)))

    def _positioned(self, x: Tensor, norm: RMSNorm | None, context: ForwardContext) -> Tensor:
        """Apply the norm, if there is one, and the rotary embedding to queries or keys [B, T, H, d]."""
        if norm is not None:
            joint = self.config.qk_layernorm_scope == "projection"
            x = norm(x.reshape(*x.shape[:2], -1), context.tensor_parallel).view(x.shape) if joint else norm(x)
        return rotary_embedding(x, context.positions, self.config.rotary_base, self.config.rotary_dim)


class LatentAttention(nn.Module):
    """Multi-head latent attention without positions.

    Keys and values of all heads are projected from one latent per token, and a part of the keys is the same for all
    heads. A cache holds the latent and the shared part only.

    Args:
        config: configuration of the model.
        layer_number: global index of the layer, from 0 (Megatron-core's layer_number counts from 1).
        name: canonical name of the module.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, name: str) -> None:
        super().__init__()
        self.config = config
        self.layer_number = layer_number
        specs = latent_attention_specs(config)
        self.linear_q_proj = Linear(config, f"{name}.linear_q_proj", specs["linear_q_proj"])
        self.linear_kv_down_proj = Linear(config, f"{name}.linear_kv_down_proj", specs["linear_kv_down_proj"])
        self.kv_layernorm = RMSNorm(config, f"{name}.kv_layernorm", specs["kv_layernorm"], config.mla_norm_epsilon)
        self.linear_kv_up_proj = Linear(config, f"{name}.linear_kv_up_proj", specs["linear_kv_up_proj"])
        self.linear_proj = Linear(config, f"{name}.linear_proj", specs["linear_proj"])

    def forward(
        self,
        hidden_states: Float[Tensor, "b t d"],
        context: ForwardContext,
    ) -> tuple[Float[Tensor, "b t d"], Tensor | None]:
        """Return the output of attention [B, T, D] and the bias of the output projection, not yet added.

        Args:
            hidden_states: normed input of the sublayer. [B, T, D]
            context: context of the forward pass.
        """
        heads = self.config.num_attention_heads
        packed = self.linear_q_proj.pack(hidden_states)
        q = add_bias(*self.linear_q_proj(hidden_states, packed)).unflatten(-1, (heads, -1))
        down = name_value(add_bias(*self.linear_kv_down_proj(hidden_states, packed)), "kv_latent")
        latent, shared_key = down.split((self.config.kv_lora_rank or 0, self.config.qk_pos_emb_head_dim or 0), dim=-1)
        latent = self.kv_layernorm(latent)
        if context.cache is None:
            k, v = self._keys_and_values(latent, shared_key)
            attended = attend_tokens(self.config, self.layer_number, q, k, v, context)
        else:
            past = context.cache.layers[self.layer_number]
            read = context.cache.length
            assert isinstance(past, LatentState), "the cache was made for another layer pattern"
            k, v = self._keys_and_values(*extended(past, (latent, shared_key), read))
            tokens = torch.arange(k.shape[1], device=k.device)
            attended = masked_attention(q, k, v, tokens <= tokens[read:, None])
        return self.linear_proj(attended.flatten(2))

    def _keys_and_values(self, latent: Tensor, shared_key: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of all heads [B, T, H, ...] from latents [B, T, r] and shared parts [B, T, d]."""
        heads, _, _, value = self.config.attention_heads("mla")
        up = add_bias(*self.linear_kv_up_proj(latent)).unflatten(-1, (heads, -1))
        own, v = up.split((up.shape[-1] - value, value), dim=-1)
        return torch.cat([own, shared_key[:, :, None].expand(*own.shape[:3], -1)], dim=-1), v
