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
    """Return softmax(q k^T / sqrt(d)) v over earlier tokens that the mask allows, if any."""
    allowed = jnp.tri(q.shape[1], dtype=bool)
    if attention_mask is None:
        return _attend(q, k, v, allowed, named)
    return _attend(q, k, v, allowed & attention_mask, named, has_empty_rows=True)


def _attend(
    q: Array,
    k: Array,
    v: Array,
    allowed: Array,
    named: Callable[[Array, str], Array] = lambda x, name: x,
    has_empty_rows: bool = False,
) -> Array:
    """Return softmax(q k^T / sqrt(d)) v over the allowed keys.

    The queries of a group are the rows of one matrix, head after head, and the products are batches of plain matrices:
    XLA's CPU backend takes up to twice as long for products with the heads of a group as a further dimension.

    Args:
        q: queries. [B, T, H, d]
        k: keys. [B, S, G, d]
        v: values. [B, S, G, e]
        allowed: True where query t may attend to key s. [T, S], or [B, T, S]
        named: names a value for the recompute settings.
        has_empty_rows: a query may have no allowed key; its output is 0.
    """
    batch, length, heads, width = q.shape
    groups, value = v.shape[2:]
    share = heads // groups
    rows = q.reshape(batch, length, groups, share, width).transpose(0, 2, 3, 1, 4)
    q = named(rows.reshape(batch, groups, share * length, width), "q")
    k = named(k.transpose(0, 2, 1, 3), "k")
    v = named(v.transpose(0, 2, 1, 3), "v")
    allowed = jnp.tile(allowed, (share, 1))
    allowed = allowed if allowed.ndim == 2 else allowed[:, None]
    scores = jnp.einsum("bgtd,bgsd->bgts", q, k) * width**-0.5
    scores = jnp.where(allowed, scores, jnp.finfo(q.dtype).min)
    weights = jax.nn.softmax(at_least_float32(scores), axis=-1).astype(v.dtype)
    if has_empty_rows:
        weights = weights * allowed.any(-1, keepdims=True)
    mixed = jnp.einsum("bgts,bgse->bgte", named(weights, "attention_weights"), v)
    return (
        mixed.reshape(batch, groups, share, length, value).transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, value)
    )


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

    Raises:
        ValueError: an argument has a wrong shape or type.
    """
    operands = operand("q", q), operand("k", k), operand("v", v), operand("allowed", allowed)
    operations.check_attention(*operands, name="allowed", keys=True)
    if fused:
        return jax.checkpoint(masked_attention)(q, k, v, allowed)
    return _attend(q, k, v, allowed)
