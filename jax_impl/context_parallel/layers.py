"""Short convolution and softmax attention over sequences that are split over ranks."""

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from diptych.plans.context.sequences import FLACPContext, check_part, check_taps, halo_sizes
from jax_impl.carry import relay
from jax_impl.context_parallel.exchange import permute, static_context
from jax_impl.context_parallel.wavefront import is_pipelined
from jax_impl.context_parallel.zigzag import zigzag_attention
from jax_impl.ops import masked_attention, short_convolution


def cp_short_convolution(
    x: Float[Array, "b t c"], weight: Float[Array, "c w"], context: FLACPContext
) -> Float[Array, "b t c"]:
    """Run ops.short_convolution on this rank's part; earlier ranks send the tokens before the part.

    Args:
        x: inputs of the part. [1, T, C]
        weight: coefficients of each channel; the last is that of the token itself. [C, W]
        context: context of the rank.

    Returns:
        Outputs of the part. [1, T, C]

    Raises:
        ValueError: x or weight does not fit the context; nothing is sent.
    """
    check_part(context, x.shape, name="x")
    check_taps(context, weight.shape[1])
    length = x.shape[1]
    num_earlier = weight.shape[1] - 1
    positions, starts = _sequences(context, length)
    if is_pipelined(context) and num_earlier:
        joined = _prepend_tokens(x, num_earlier)
    else:
        joined = jnp.concatenate([*_halo(x, weight.shape[1], context), x], axis=1)
    return short_convolution(joined, weight, jnp.pad(positions - starts, (num_earlier, 0)))[:, num_earlier:]


def cp_attention(
    q: Float[Array, "b t h d"],
    k: Float[Array, "b t g d"],
    v: Float[Array, "b t g e"],
    context: FLACPContext,
    fused: bool = False,
) -> Float[Array, "b t h e"]:
    """Run ops.causal_attention of this rank's queries over the keys and values of all ranks, within each sequence.

    Args:
        q: queries of the part. [1, T, H, d]
        k: keys of the part. [1, T, G, d]
        v: values of the part. [1, T, G, e]
        context: context of the rank.
        fused: see ops.masked_attention.

    Returns:
        Outputs of the part. [1, T, H, e]

    Raises:
        ValueError: an argument does not fit the context; nothing is sent.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_part(context, x.shape, name=name)
    if is_pipelined(context):
        k, v = _prepend_keys_and_values(k, v, context)
    else:
        k, v = (lax.all_gather(x, context.group, axis=1, tiled=True) for x in (k, v))
    if context.cp_attention_layout == "zigzag":
        return zigzag_attention(q, k, v, context, fused)
    positions, starts = _sequences(context, q.shape[1])
    keys = jnp.arange(k.shape[1])
    return masked_attention(q, k, v, (keys >= starts[:, None]) & (keys <= positions[:, None]), fused)


def _halo(x: Array, taps: int, context: FLACPContext) -> list[Array]:
    """Return the tokens before the part that a convolution reads, by sending rank, the farthest rank first."""
    halo = []
    static = static_context(context)._replace(wire_dtype=None)
    for distance, size in enumerate(halo_sizes(x.shape[1], taps), 1):
        pairs = [(rank, rank + distance) for rank in range(context.size - distance)]
        halo.insert(0, permute(x[:, x.shape[1] - size :], static, pairs))
    return halo


def _prepend_tokens(x: Array, num_earlier: int) -> Array:
    """Prepend the tokens before x, received from the previous rank; short_convolution masks other sequences."""

    def prepend(received: Array) -> tuple[Array, Array]:
        joined = jnp.concatenate([received, x], axis=1)
        return joined[:, -num_earlier:], joined

    return relay((x.shape[0], num_earlier, *x.shape[2:]), x.dtype, prepend)


def _prepend_keys_and_values(k: Array, v: Array, context: FLACPContext) -> tuple[Array, Array]:
    """Return keys and values at their global positions, received from earlier ranks; those of later ranks are 0."""
    both = jnp.concatenate([k, v], axis=-1)
    length = k.shape[1]

    def insert(received: Array) -> tuple[Array, Array]:
        joined = lax.dynamic_update_slice_in_dim(received, both, context.rank * length, axis=1)
        return joined, joined

    shape = (both.shape[0], length * context.size, *both.shape[2:])
    joined = relay(shape, both.dtype, insert)
    return joined[..., : k.shape[3]], joined[..., k.shape[3] :]


def _sequences(context: FLACPContext, length: int) -> tuple[Array, Array]:
    """Return the global position of each token of the part, and that of the first token of its sequence. [T] each."""
    tokens = jnp.arange(length)
    own = jnp.searchsorted(context.cu_seqlens[1:], tokens, side="right")
    starts = context.cu_seqlens[own] - jnp.where(own == 0, context.pre_num_tokens, 0)
    return tokens + context.rank * length, starts + context.rank * length
