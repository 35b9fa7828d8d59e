"""Load-balanced softmax attention: queries are sent to the ranks that compute them, and outputs are sent back.

All ranks run one program: each computes 2R + 1 blocks of half a part's queries by half a part's keys, which a table
lists by rank. The softmax is computed online, with a running maximum m and sum l of each query. Backward recomputes the
scores of each block from q, k, v, the outputs and m + log l, which are saved.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from diptych.plans.context.sequences import FLACPContext
from diptych.plans.context.zigzag import block_pairs, half_begin, half_lengths, half_moves
from diptych_kernels.mesh_axes import match_varying_axes
from jax_impl.context_parallel.exchange import permute, static_context
from jax_impl.ops import at_least_float32


def zigzag_attention(
    q: Float[Array, "b t h d"],
    k: Float[Array, "b s g d"],
    v: Float[Array, "b s g e"],
    context: FLACPContext,
    fused: bool = False,
) -> Float[Array, "b t h e"]:
    """Return the causal attention of this rank's queries; see diptych.plans.context.zigzag for the ranks that compute.

    All ranks have to call this function.

    Args:
        q: queries of the part. [1, T, H, d]
        k: keys of all ranks. [1, R T, G, d]
        v: values of all ranks. [1, R T, G, e]
        context: context of the rank.
        fused: without effect, because scores are never saved.

    Returns:
        Outputs of the part. [1, T, H, e]
    """
    length = q.shape[1]
    first, second = half_lengths(q.shape[1])
    groups, width = k.shape[2:]
    padding = [(0, 0), (0, first - second), (0, 0), (0, 0)]  # to halves of equal length
    moved = [_move(half, context, index, back=False) for index, half in enumerate((q[:, :first], q[:, first:]))]
    halves = jnp.concatenate([moved[0], jnp.pad(moved[1], padding)]).reshape(2, first, groups, -1, width)
    keys, values = (jnp.pad(x, padding)[0] for x in (k, v))
    blocks = jnp.asarray([block_pairs(rank, context.size) for rank in range(context.size)], jnp.int32)[context.rank]
    attend: Any = _attended
    o = attend(length, *match_varying_axes((halves, keys, values, blocks, context.all_cu_seqlens)))
    o = o.reshape(2, 1, first, q.shape[2], v.shape[3])
    return jnp.concatenate([_move(o[0], context, 0, back=True), _move(o[1, :, :second], context, 1, back=True)], axis=1)


def _move(half: Array, context: FLACPContext, index: int, back: bool) -> Array:
    """Move the first (index 0) or second (1) halves of all parts to the ranks that compute them, or back."""
    return permute(half, static_context(context)._replace(wire_dtype=None), half_moves(context.size, index, back))


class _Block(NamedTuple):
    """Queries of half a part, and keys and values of half a part."""

    q: Float[Array, "c g r d"]
    k: Float[Array, "c g d"]
    v: Float[Array, "c g d"]
    allowed: Array
    """True where a query may attend to a key. [C, C]"""

    def scores(self) -> Array:
        """Return the scores [C, G, r, C] in at least float32."""
        return at_least_float32(jnp.einsum("tgrd,sgd->tgrs", self.q, self.k) * self.q.shape[-1] ** -0.5)


def _block(pair: Array, length: int, halves: Array, keys: Array, values: Array, cu_seqlens: Array) -> _Block:
    """Return the block of a pair of half-parts: the number of the queries' half, and that of the keys' half."""
    query, key = pair
    begin = half_begin(key, length)
    size = halves.shape[1]
    queries = (half_begin(query, length) + jnp.arange(size))[:, None]
    key_positions = begin + jnp.arange(size)
    first = cu_seqlens[jnp.searchsorted(cu_seqlens, queries, side="right") - 1]
    k, v = (lax.dynamic_slice_in_dim(x, begin, size) for x in (keys, values))
    inside = key_positions < half_begin(key + 1, length)  # excludes the padding of a shorter half
    return _Block(halves[query % 2], k, v, (key_positions >= first) & (key_positions <= queries) & inside)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attended(length: int, halves: Array, keys: Array, values: Array, blocks: Array, cu_seqlens: Array) -> Array:
    """Return the attention of the queries of two half-parts.

    Args:
        length: tokens of a part.
        halves: queries. [2, C, G, r, d]
        keys: keys of all ranks, padded so that the last half has length C. [R T + 0 or 1, G, d]
        values: values of all ranks, padded like keys. [R T + 0 or 1, G, d]
        blocks: pairs of half-parts (queries, keys) that this rank computes. [2R + 1, 2]
        cu_seqlens: offsets of all sequences, and the end. [N + 1]
    """
    return _attended_forward(length, halves, keys, values, blocks, cu_seqlens)[0]


def _attended_forward(
    length: int, halves: Array, keys: Array, values: Array, blocks: Array, cu_seqlens: Array
) -> tuple[Array, tuple[Array, ...]]:
    """Compute the attention block by block with an online softmax; see _attended."""
    wide = jnp.promote_types(halves.dtype, jnp.float32)

    def add(carry: tuple[Array, ...], pair: Array) -> tuple[tuple[Array, ...], None]:
        block = _block(pair, length, halves, keys, values, cu_seqlens)
        half = pair[0] % 2
        o, top, total = (x[half] for x in carry)
        allowed = block.allowed[:, None, None]
        scores = jnp.where(allowed, block.scores(), jnp.finfo(wide).min)
        new_top = jnp.maximum(top, scores.max(-1))
        weights = jnp.where(allowed, jnp.exp(scores - new_top[..., None]), 0)
        scale = jnp.exp(top - new_top)
        added = jnp.einsum("tgrs,sgd->tgrd", weights.astype(values.dtype), block.v, preferred_element_type=wide)
        updated = o * scale[..., None] + added, new_top, total * scale + weights.sum(-1)
        return tuple(x.at[half].set(y) for x, y in zip(carry, updated, strict=True)), None

    rows = halves.shape[:-1]
    start = jnp.zeros((*rows, values.shape[-1]), wide), jnp.full(rows, jnp.finfo(wide).min, wide), jnp.zeros(rows, wide)
    (o, top, total), _ = lax.scan(add, tuple(match_varying_axes((*start, blocks, halves))[:3]), blocks)
    total = jnp.where(total > 0, total, 1)  # the sum is 0 for queries that are padding
    o = (o / total[..., None]).astype(values.dtype)
    return o, (halves, keys, values, blocks, cu_seqlens, o, top + jnp.log(total))


def _attended_backward(length: int, saved: tuple[Array, ...], d_o: Array) -> tuple[Array | None, ...]:
    """Recompute the weights of each block from m + log l, and add its gradients (arXiv 2205.14135, algorithm 4)."""
    halves, keys, values, blocks, cu_seqlens, o, logsumexp = saved
    inputs = halves, keys, values
    wide = logsumexp.dtype
    width = halves.shape[-1]
    out_dot_gradient = (o.astype(wide) * d_o.astype(wide)).sum(-1)

    def add(carry: tuple[Array, ...], pair: Array) -> tuple[tuple[Array, ...], None]:
        d_halves, d_keys, d_values = carry
        block = _block(pair, length, halves, keys, values, cu_seqlens)
        half = pair[0] % 2
        begin = half_begin(pair[1], length)
        d_out = d_o[half]
        weights = jnp.where(block.allowed[:, None, None], jnp.exp(block.scores() - logsumexp[half][..., None]), 0)
        d_weights = at_least_float32(jnp.einsum("tgrd,sgd->tgrs", d_out, block.v))
        d_scores = (weights * (d_weights - out_dot_gradient[half][..., None]) * width**-0.5).astype(d_out.dtype)
        product = partial(jnp.einsum, preferred_element_type=wide)
        d_halves = d_halves.at[half].add(product("tgrs,sgd->tgrd", d_scores, block.k))
        d_k = product("tgrs,tgrd->sgd", d_scores, block.q)
        d_v = product("tgrs,tgrd->sgd", weights.astype(d_out.dtype), d_out)
        return (d_halves, _added(d_keys, d_k, begin), _added(d_values, d_v, begin)), None

    start = match_varying_axes((*(jnp.zeros(x.shape, wide) for x in inputs), blocks, *inputs, d_o))[:3]
    gradients, _ = lax.scan(add, tuple(start), blocks)
    return *(d.astype(x.dtype) for d, x in zip(gradients, inputs, strict=True)), None, None


def _added(array: Array, block: Array, begin: Array) -> Array:
    """Add a block to an array at position begin."""
    before = lax.dynamic_slice_in_dim(array, begin, len(block))
    return lax.dynamic_update_slice_in_dim(array, before + block, begin, 0)


_attended.defvjp(_attended_forward, _attended_backward)
