"""The cache of incremental decoding: keys and values of attention, latents of mla, states of the delta rule.

A model with a cache reads its input as the tokens after the cached ones, and adds them to the cache. A function under
jax.jit has to return the cache. Mirrors ``reference_torch/cache.py``.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.core import Tracer
from jaxtyping import Float, Integer

from diptych.plans.config import TransformerConfig
from diptych.plans.model.delta_rule import accumulation_dtype
from jax_impl.ops import masked_attention


class AttentionState(NamedTuple):
    """Keys and values of softmax attention; entries beyond the tokens read are undefined."""

    k: Float[Array, "b l g d"]
    """[B, seq_length, G, d]"""
    v: Float[Array, "b l g d"]


class LatentState(NamedTuple):
    """The latents of an mla layer; entries beyond the tokens read are undefined."""

    latent: Float[Array, "b l r"]
    """[B, seq_length, kv_lora_rank], after the norm."""
    shared_key: Float[Array, "b l d"]
    """[B, seq_length, qk_pos_emb_head_dim]"""


class DeltaRuleState(NamedTuple):
    """The state of a gdn or kda layer, of constant size."""

    tail: Float[Array, "b w c"]
    """The last inputs of the short convolution. [B, W - 1, C]"""
    state: Float[Array, "b h k v"]
    """[B, HV, K, V], at least float32."""


@jax.tree_util.register_dataclass
@dataclass
class DecodingCache:
    """The states of all layers after the tokens read."""

    batch: int = field(metadata={"static": True})
    """Number of sequences."""
    length: Any
    """Number of tokens read of each sequence: an integer, or a scalar array under jax.jit."""
    layers: dict[int, AttentionState | LatentState | DeltaRuleState]
    """State of each layer, by global number."""


def empty_cache(config: TransformerConfig, batch: int) -> DecodingCache:
    """Return the cache of a model that has read no tokens.

    Args:
        config: configuration of the model.
        batch: number B of sequences.
    """
    heads, value_heads, key, value = config.linear_heads
    layers: dict[int, AttentionState | LatentState | DeltaRuleState] = {}
    for number in range(config.num_layers):
        if config.layer(number).mixer == "mla":
            widths = config.kv_lora_rank or 0, config.qk_pos_emb_head_dim or 0
            rows = batch, config.seq_length
            layers[number] = LatentState(*(jnp.zeros((*rows, w), config.compute_dtype) for w in widths))
            continue
        if config.layer(number).mixer == "attention":
            shape = batch, config.seq_length, config.query_groups, config.head_dim
            layers[number] = AttentionState(*(jnp.zeros(shape, config.compute_dtype) for _ in "kv"))
            continue
        tail = batch, config.linear_conv_kernel_dim - 1, 2 * heads * key + value_heads * value
        state = batch, value_heads, key, value
        layers[number] = DeltaRuleState(
            jnp.zeros(tail, config.compute_dtype), jnp.zeros(state, accumulation_dtype(config.compute_dtype))
        )
    return DecodingCache(batch, 0, layers)


def cached_attention(
    q: Float[Array, "b t h d"],
    k: Float[Array, "b t g d"],
    v: Float[Array, "b t g e"],
    past: AttentionState,
    read: int | Integer[Array, ""],
) -> tuple[Float[Array, "b t h e"], AttentionState]:
    """Run ops.causal_attention of the next tokens over themselves and all cached tokens.

    Args:
        q: queries of the next tokens. [B, T, H, d]
        k: keys of the next tokens. [B, T, G, d]
        v: values of the next tokens. [B, T, G, e]
        past: keys and values of the cached tokens.
        read: number of cached tokens.

    Returns:
        The output [B, T, H, e], and past with the next tokens.
    """
    past = AttentionState(*extended(past, (k, v), read))
    allowed = jnp.arange(past.k.shape[1]) <= read + jnp.arange(q.shape[1])[:, None]
    return masked_attention(q, past.k, past.v, allowed), past


def extended(
    past: AttentionState | LatentState, new: tuple[Array, Array], read: int | Integer[Array, ""]
) -> tuple[Array, Array]:
    """Return the buffers of past with the arrays of the next tokens [B, T, ...] written at position read."""
    first, second = (
        lax.dynamic_update_slice_in_dim(buffer, array, read, axis=1) for buffer, array in zip(past, new, strict=True)
    )
    return first, second


def prepend_tail(x: Float[Array, "b t c"], past: DeltaRuleState) -> tuple[Float[Array, "b s c"], Array]:
    """Prepend the cached inputs of a short convolution to its inputs at the next tokens.

    Args:
        x: inputs at the next tokens. [B, T, C]
        past: state of the layer.

    Returns:
        The inputs of the convolution [B, W - 1 + T, C], whose last T outputs are those of the next tokens, and the new
        tail [B, W - 1, C].
    """
    joined = jnp.concatenate([past.tail, x], axis=1)
    return joined, joined[:, joined.shape[1] - past.tail.shape[1] :]


def cached_length(cache: DecodingCache | None) -> int | None:
    """Return the number of tokens read, 0 if jax.jit traces the number, or None if there is no cache."""
    if cache is None:
        return None
    return 0 if isinstance(cache.length, Tracer) else int(cache.length)
