"""The cache of incremental decoding: keys and values of attention, latents of mla, states of the delta rule.

A model with a cache reads its input as the tokens after the cached ones, and adds them to the cache. Mirrors
``jax_impl/cache.py``.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from diptych.plans.config import TransformerConfig
from diptych.plans.model.delta_rule import accumulation_dtype
from reference_torch.ops import masked_attention


class AttentionState(NamedTuple):
    """Keys and values of softmax attention; entries beyond the tokens read are undefined."""

    k: Float[Tensor, "b l g d"]
    """[B, seq_length, G, d]"""
    v: Float[Tensor, "b l g d"]


class LatentState(NamedTuple):
    """The latents of an mla layer; entries beyond the tokens read are undefined."""

    latent: Float[Tensor, "b l r"]
    """[B, seq_length, kv_lora_rank], after the norm."""
    shared_key: Float[Tensor, "b l d"]
    """[B, seq_length, qk_pos_emb_head_dim]"""


class DeltaRuleState(NamedTuple):
    """The state of a gdn or kda layer, of constant size."""

    tail: Float[Tensor, "b w c"]
    """The last inputs of the short convolution. [B, W - 1, C]"""
    state: Float[Tensor, "b h k v"]
    """[B, HV, K, V], at least float32."""


@dataclass
class DecodingCache:
    """The states of all layers after the tokens read."""

    batch: int
    """Number of sequences."""
    length: int
    """Number of tokens read of each sequence."""
    layers: dict[int, AttentionState | LatentState | DeltaRuleState]
    """State of each layer, by global number."""


def empty_cache(config: TransformerConfig, batch: int, device: torch.device | str = "cpu") -> DecodingCache:
    """Return the cache of a model that has read no tokens.

    Args:
        config: configuration of the model.
        batch: number B of sequences.
        device: device of the model.
    """
    dtype = getattr(torch, config.compute_dtype)
    heads, value_heads, key, value = config.linear_heads
    layers: dict[int, AttentionState | LatentState | DeltaRuleState] = {}
    for number in range(config.num_layers):
        if config.layer(number).mixer == "mla":
            widths = config.kv_lora_rank or 0, config.qk_pos_emb_head_dim or 0
            rows = batch, config.seq_length
            layers[number] = LatentState(*(torch.zeros(*rows, w, dtype=dtype, device=device) for w in widths))
            continue
        if config.layer(number).mixer == "attention":
            shape = batch, config.seq_length, config.query_groups, config.head_dim
            layers[number] = AttentionState(*(torch.zeros(shape, dtype=dtype, device=device) for _ in "kv"))
            continue
        tail = batch, config.linear_conv_kernel_dim - 1, 2 * heads * key + value_heads * value
        state = batch, value_heads, key, value
        wide = getattr(torch, accumulation_dtype(config.compute_dtype))
        layers[number] = DeltaRuleState(
            torch.zeros(tail, dtype=dtype, device=device), torch.zeros(state, dtype=wide, device=device)
        )
    return DecodingCache(batch, 0, layers)


def cached_attention(
    q: Float[Tensor, "b t h d"],
    k: Float[Tensor, "b t g d"],
    v: Float[Tensor, "b t g e"],
    past: AttentionState,
    read: int,
) -> tuple[Float[Tensor, "b t h e"], AttentionState]:
    """Run ops.causal_attention of the next tokens over themselves and all cached tokens.

    Args:
        q: queries of the next tokens. [B, T, H, d]
        k: keys of the next tokens. [B, T, G, d]
        v: values of the next tokens. [B, T, G, e]
        past: keys and values of the cached tokens; changed in place.
        read: number of cached tokens.

    Returns:
        The output [B, T, H, e], and past with the next tokens.
    """
    k, v = extended(past, (k, v), read)
    end = k.shape[1]
    allowed = torch.arange(end, device=q.device) <= torch.arange(read, end, device=q.device)[:, None]
    return masked_attention(q, k, v, allowed), past


def extended(past: AttentionState | LatentState, new: tuple[Tensor, Tensor], read: int) -> tuple[Tensor, Tensor]:
    """Write arrays of the next tokens [B, T, ...] into the buffers of past, and return those of all tokens so far."""
    end = read + new[0].shape[1]
    for buffer, array in zip(past, new, strict=True):
        buffer[:, read:end] = array
    first, second = past
    return first[:, :end], second[:, :end]


def prepend_tail(x: Float[Tensor, "b t c"], past: DeltaRuleState) -> tuple[Float[Tensor, "b s c"], Tensor]:
    """Prepend the cached inputs of a short convolution to its inputs at the next tokens.

    Args:
        x: inputs at the next tokens. [B, T, C]
        past: state of the layer.

    Returns:
        The inputs of the convolution [B, W - 1 + T, C], whose last T outputs are those of the next tokens, and the new
        tail [B, W - 1, C].
    """
    joined = torch.cat([past.tail, x], dim=1)
    return joined, joined[:, joined.shape[1] - past.tail.shape[1] :]


def cached_length(cache: DecodingCache | None) -> int | None:
    """Return the number of tokens read, or None if there is no cache."""
    return None if cache is None else cache.length
