"""Softmax attention over tokens: explicit, fused, and with any mask."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from diptych.plans.model import operations
from jax_impl.operands import at_least_float32, given_operand, operand
from jax_impl.recompute import name_value


def causal_attention(
    q: Float[Array, "b t h d"],
    k: Float[Array, "b t g d"],
    v: Float[Array, "b t g d"],
    attention_mask: Bool[Array, "b t t"] | None = None,
) -> Float[Array, "b t h d"]:
    """softmax(q k^T / sqrt(d)) v over the tokens up to each token's own; explicit, products in q's type.

    Args:
        q: queries. [B, T, H, d]
        k, v: keys and values of G groups; query head h uses group h // (H / G). [B, T, G, d]
        attention_mask: True where row t may attend to column s, besides s <= t. A row that may attend
            to nothing gives 0. [B, T, T]
    """
    _check_attention(q, k, v, attention_mask)
    return _attention(q, k, v, attention_mask, named=name_value)


def _check_attention(q: Any, k: Any, v: Any, mask: Any) -> None:
    given = operand("q", q), operand("k", k), operand("v", v), given_operand("attention_mask", mask)
    operations.check_attention(*given, name="attention_mask")


def fused_attention(
    q: Float[Array, "b t h d"],
    k: Float[Array, "b t g d"],
    v: Float[Array, "b t g d"],
    attention_mask: Bool[Array, "b t t"] | None = None,
) -> Float[Array, "b t h d"]:
    """causal_attention whose T x T weights are computed again in backward, never kept.

    Args: as causal_attention's.

    Reference: Dao et al., arXiv 2205.14135. jax.nn.dot_product_attention has such kernels, but takes its softmax in
    float32 whatever the type; here jax.checkpoint saves the same memory, and XLA fuses what it can.
    """
    _check_attention(q, k, v, attention_mask)
    q, k, v = name_value(q, "q"), name_value(k, "k"), name_value(v, "v")
    return jax.checkpoint(partial(_attention, named=lambda x, name: x))(q, k, v, attention_mask)


def _attention(
    q: Array, k: Array, v: Array, attention_mask: Array | None, named: Callable[[Array, str], Array]
) -> Array:
    batch, length, heads, width = q.shape
    groups = k.shape[2]
    q = named(q.reshape(batch, length, groups, heads // groups, width), "q")
    k, v = named(k, "k"), named(v, "v")
    allowed = jnp.tri(length, dtype=bool)
    if attention_mask is not None:
        allowed = (allowed & attention_mask)[:, None, None]
    scores = jnp.einsum("btgrd,bsgd->bgrts", q, k) * width**-0.5
    scores = jnp.where(allowed, scores, jnp.finfo(q.dtype).min)
    weights = jax.nn.softmax(at_least_float32(scores), axis=-1).astype(v.dtype)
    if attention_mask is not None:
        weights = weights * allowed.any(-1, keepdims=True)
    weights = named(weights, "attention_weights")
    mixed = jnp.einsum("bgrts,bsgd->btgrd", weights, v)
    return mixed.reshape(batch, length, heads, width)


def masked_attention(
    q: Float[Array, "b t h d"],
    k: Float[Array, "b s g d"],
    v: Float[Array, "b s g d"],
    allowed: Bool[Array, "t s"],
    fused: bool = False,
) -> Float[Array, "b t h d"]:
    """softmax(q k^T / sqrt(d)) v over the tokens each may look at, which may be others than the queries' own.

    Args:
        q: queries. [B, T, H, d]
        k, v: keys and values of G groups; query head h uses group h // (H / G). [B, S, G, d]
        allowed: True where query t may look at key s; each at one at least. [T, S]
        fused: the T x S weights are not kept, see fused_attention.
    """
    given = operand("q", q), operand("k", k), operand("v", v), operand("allowed", allowed)
    operations.check_attention(*given, name="allowed", keys=True)
    if fused:
        return jax.checkpoint(masked_attention)(q, k, v, allowed)
    groups, width = k.shape[2:]
    grouped = q.reshape(*q.shape[:2], groups, -1, width)
    scores = jnp.einsum("btgrd,bsgd->bgrts", grouped, k) * width**-0.5
    scores = jnp.where(allowed, scores, jnp.finfo(q.dtype).min)
    weights = jax.nn.softmax(at_least_float32(scores), axis=-1).astype(v.dtype)
    return jnp.einsum("bgrts,bsgd->btgrd", weights, v).reshape(q.shape)
