"""What a model remembers of a text it is going on with: keys and values of attention, states of the delta rule.

A model given a cache reads the tokens it is given as the next ones, and leaves the cache as after them; under jax.jit
the function has to return it. Twin of ``reference_torch/cache.py``.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.core import Tracer
from jaxtyping import Float, Integer

from diptych.plans.config import TransformerConfig
from diptych.plans.model.delta_rule import compute_dtype
from jax_impl.ops import masked_attention


class AttentionState(NamedTuple):
    """Keys and values of softmax attention; beyond the tokens read, anything."""

    k: Float[Array, "b l g d"]
    """[B, seq_length, G, d]"""
    v: Float[Array, "b l g d"]


class DeltaRuleState(NamedTuple):
    """What a gdn or kda layer needs of the past, whatever its length."""

    tail: Float[Array, "b w c"]
    """What the short convolution still reads: its last inputs. [B, W - 1, C]"""
    state: Float[Array, "b h k v"]
    """[B, HV, K, V], at least float32."""


@jax.tree_util.register_dataclass
@dataclass
class DecodingCache:
    """What all layers remember."""

    batch: int = field(metadata={"static": True})
    """Texts."""
    length: Any
    """Tokens read, of each: an integer, or the array [] that jax.jit makes of one."""
    layers: dict[int, AttentionState | DeltaRuleState]
    """By global number of the layer."""


def empty_cache(config: TransformerConfig, batch: int) -> DecodingCache:
    """The cache of a model that has read nothing.

    Args:
        config: the model's.
        batch: number B of texts.
    """
    heads, value_heads, key, value = config.linear_heads
    layers: dict[int, AttentionState | DeltaRuleState] = {}
    for number in range(config.num_layers):
        if config.layer(number).mixer == "attention":
            shape = batch, config.seq_length, config.query_groups, config.head_dim
            layers[number] = AttentionState(*(jnp.zeros(shape, config.compute_dtype) for _ in "kv"))
            continue
        tail = batch, config.linear_conv_kernel_dim - 1, 2 * heads * key + value_heads * value
        state = batch, value_heads, key, value
        layers[number] = DeltaRuleState(
            jnp.zeros(tail, config.compute_dtype), jnp.zeros(state, compute_dtype(config.compute_dtype))
        )
    return DecodingCache(batch, 0, layers)


def remembered_attention(
    q: Float[Array, "b t h d"],
    k: Float[Array, "b t g d"],
    v: Float[Array, "b t g d"],
    past: AttentionState,
    read: int | Integer[Array, ""],
) -> tuple[Float[Array, "b t h d"], AttentionState]:
    """ops.causal_attention of the next tokens to all before them, and what is remembered then.

    Args:
        q, k, v: of the next tokens. [B, T, H, d], [B, T, G, d]
        past: of the tokens before.
        read: number of tokens before.
    """
    past = AttentionState(
        *(lax.dynamic_update_slice_in_dim(all_, new, read, axis=1) for all_, new in zip(past, (k, v), strict=True))
    )
    allowed = jnp.arange(past.k.shape[1]) <= read + jnp.arange(q.shape[1])[:, None]
    return masked_attention(q, past.k, past.v, allowed), past


def with_tail(x: Float[Array, "b t c"], past: DeltaRuleState) -> tuple[Float[Array, "b s c"], Array]:
    """What a short convolution reads to make its outputs of the next tokens, last of all, and what it will still read.

    Args:
        x: its inputs at the next tokens. [B, T, C]

    Returns:
        [B, W - 1 + T, C] and the new tail, [B, W - 1, C].
    """
    joined = jnp.concatenate([past.tail, x], axis=1)
    return joined, joined[:, joined.shape[1] - past.tail.shape[1] :]


def known_length(cache: DecodingCache | None) -> int | None:
    """Tokens read, or 0 where jax.jit traces the number; None: there is no cache."""
    if cache is None:
        return None
    return 0 if isinstance(cache.length, Tracer) else int(cache.length)
