"""What a model remembers of a text it is going on with: keys and values of attention, states of the delta rule.

A model given a cache reads the tokens it is given as the next ones, and leaves the cache as after them. Twin of
``jax_impl/cache.py``.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from diptych.plans.config import TransformerConfig
from diptych.plans.model.delta_rule import compute_dtype
from reference_torch.ops import masked_attention


class AttentionState(NamedTuple):
    """Keys and values of softmax attention; beyond the tokens read, anything."""

    k: Float[Tensor, "b l g d"]
    """[B, seq_length, G, d]"""
    v: Float[Tensor, "b l g d"]


class DeltaRuleState(NamedTuple):
    """What a gdn or kda layer needs of the past, whatever its length."""

    tail: Float[Tensor, "b w c"]
    """What the short convolution still reads: its last inputs. [B, W - 1, C]"""
    state: Float[Tensor, "b h k v"]
    """[B, HV, K, V], at least float32."""


@dataclass
class DecodingCache:
    """What all layers remember."""

    batch: int
    """Texts."""
    length: int
    """Tokens read, of each."""
    layers: dict[int, AttentionState | DeltaRuleState]
    """By global number of the layer."""


def empty_cache(config: TransformerConfig, batch: int, device: torch.device | str = "cpu") -> DecodingCache:
    """The cache of a model that has read nothing.

    Args:
        config: the model's.
        batch: number B of texts.
        device: where it computes.
    """
    dtype = getattr(torch, config.compute_dtype)
    heads, value_heads, key, value = config.linear_heads
    layers: dict[int, AttentionState | DeltaRuleState] = {}
    for number in range(config.num_layers):
        if config.layer(number).mixer == "attention":
            shape = batch, config.seq_length, config.query_groups, config.head_dim
            layers[number] = AttentionState(*(torch.zeros(shape, dtype=dtype, device=device) for _ in "kv"))
            continue
        tail = batch, config.linear_conv_kernel_dim - 1, 2 * heads * key + value_heads * value
        state = batch, value_heads, key, value
        wide = getattr(torch, compute_dtype(config.compute_dtype))
        layers[number] = DeltaRuleState(
            torch.zeros(tail, dtype=dtype, device=device), torch.zeros(state, dtype=wide, device=device)
        )
    return DecodingCache(batch, 0, layers)


def remembered_attention(
    q: Float[Tensor, "b t h d"],
    k: Float[Tensor, "b t g d"],
    v: Float[Tensor, "b t g d"],
    past: AttentionState,
    read: int,
) -> tuple[Float[Tensor, "b t h d"], AttentionState]:
    """ops.causal_attention of the next tokens to all before them, and what is remembered then.

    Args:
        q, k, v: of the next tokens. [B, T, H, d], [B, T, G, d]
        past: changed in place.
        read: number of tokens before.
    """
    length = q.shape[1]
    for all_, new in zip(past, (k, v), strict=True):
        all_[:, read : read + length] = new
    end = read + length
    allowed = torch.arange(end, device=q.device) <= torch.arange(read, end, device=q.device)[:, None]
    return masked_attention(q, past.k[:, :end], past.v[:, :end], allowed), past


def with_tail(x: Float[Tensor, "b t c"], past: DeltaRuleState) -> tuple[Float[Tensor, "b s c"], Tensor]:
    """What a short convolution reads to make its outputs of the next tokens, last of all, and what it will still read.

    Args:
        x: its inputs at the next tokens. [B, T, C]

    Returns:
        [B, W - 1 + T, C] and the new tail, [B, W - 1, C].
    """
    joined = torch.cat([past.tail, x], dim=1)
    return joined, joined[:, joined.shape[1] - past.tail.shape[1] :]


def known_length(cache: DecodingCache | None) -> int | None:
    """Tokens read; None: there is no cache."""
    return None if cache is None else cache.length
