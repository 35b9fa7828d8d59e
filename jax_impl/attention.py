"""Softmax attention over tokens: causal and explicit, causal and fused, or with any mask."""

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
    v: Float[Array, "b t g e"],
    attention_mask: Bool[Array, "b t t"] | None = None,
) -> Float[Array, "b t h e"]:
    """Return softmax(q k^T / sqrt(d)) v, where each token attends to itself and the tokens before it.

    Products are computed in the type of q, and the softmax in at least float32.

    Args:
        q: queries. [B, T, H, d]
        k: keys of G groups; query head h uses group h // (H / G). [B, T, G, d]
        v: values of G groups. [B, T, G, e]
        attention_mask: True where row t may attend to column s, in addition to s <= t. The output of a row that may
            attend to no column is 0. [B, T, T]

    Returns:
        [B, T, H, e]

    Raises:
        ValueError: an argument has a wrong shape or type.
    """
    _check_attention(q, k, v, attention_mask)
    return _attention(q, k, v, attention_mask, named=name_value)


def _check_attention(q: Any, k: Any, v: Any, mask: Any) -> None:
    """Check the arguments of an attention function; see diptych.plans.model.operations.check_attention."""
    operands = operand("q", q), operand("k", k), operand("v", v), given_operand("attention_mask", mask)
    operations.check_attention(*operands, name="attention_mask")


def fused_attention(
    q: Float[Array, "b t h d"],
    k: Float[Array, "b t g d"],
    v: Float[Array, "b t g e"],
    attention_mask: Bool[Array, "b t t"] | None = None,
) -> Float[Array, "b t h e"]:
    """Compute causal_attention without saving the T x T weights, which are recomputed in backward.

    Arguments and result are those of causal_attention.

    Reference: Dao et al., arXiv 2205.14135. jax.nn.dot_product_attention has fused kernels, but computes the softmax in
    float32 for every type. jax.checkpoint saves the same memory.
    """
    _check_attention(q, k, v, attention_mask)
    q = name_value(q, "q")
    k = name_value(k, "k")
    v = name_value(v, "v")
    return jax.checkpoint(partial(_attention, named=lambda x, name: x))(q, k, v, attention_mask)


def _attention(
    q: Array, k: Array, v: Array, attention_mask: Array | None, named: Callable[[Array, str], Array]
) -> Array:
    """Return softmax(q k^T / sqrt(d)) v over the allowed keys."""
    batch, length, heads, width = q.shape
    groups = k.shape[2]
    q = named(q.reshape(batch, length, groups, heads // groups, width), "q")
    k = named(k, "k")
    v = named(v, "v")
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
    return mixed.reshape(batch, length, heads, v.shape[3])


def masked_attention(
    q: Float[Array, "b t h d"],
    k: Float[Array, "b s g d"],
    v: Float[Array, "b s g e"],
    allowed: Bool[Array, "t s"],
    fused: bool = False,
) -> Float[Array, "b t h e"]:
    """Return softmax(q k^T / sqrt(d)) v over the allowed keys; queries and keys may belong to different tokens.

    Args:
        q: queries. [B, T, H, d]
        k: keys of G groups; query head h uses group h // (H / G). [B, S, G, d]
        v: values of G groups. [B, S, G, e]
        allowed: True where query t may attend to key s; at least one key per query. [T, S]
        fused: do not save the T x S weights, see fused_attention.

    Returns:
        [B, T, H, e]
    """
    operands = operand("q", q), operand("k", k), operand("v", v), operand("allowed", allowed)
    operations.check_attention(*operands, name="allowed", keys=True)
    if fused:
        return jax.checkpoint(masked_attention)(q, k, v, allowed)
    groups, width = k.shape[2:]
    grouped = q.reshape(*q.shape[:2], groups, -1, width)
    scores = jnp.einsum("btgrd,bsgd->bgrts", grouped, k) * width**-0.5
    scores = jnp.where(allowed, scores, jnp.finfo(q.dtype).min)
    weights = jax.nn.softmax(at_least_float32(scores), axis=-1).astype(v.dtype)
    return jnp.einsum("bgrts,bsgd->btgrd", weights, v).reshape(*q.shape[:3], v.shape[3])
