"""What a chunk needs no state for: its tokens' decayed products, and the corrections they make to each other, solved.

With G the sum of g from the chunk's first token, for i >= j:

    A_qk[i, j] = sum_c q_i k_j exp(G_i - G_j),    A_kk likewise of k, for i > j
    (I + diag(beta) A_kk) [w | u] = diag(beta) [exp(G) k | v]

A chunk's errors are then u - w S for the state S it begins with (scan.py). Every exponent here is a sum of decays
between two tokens, never a difference of two sums: none is positive, so nothing overflows, none loses digits to an
earlier strong decay, and no token's output depends on a later one, finite or not (lower_product).

Reference: arXiv 2412.06464, section 3.3; arXiv 2510.26692, section 3. There sub-chunks of 16 are anchored at their
first token; here blocks double in size, and a block's queries meet the block before's keys at the border between them.
The system is solved by substitution: powers of A_kk, as in a Neumann series, overflow for equal keys.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from diptych.plans.model.delta_rule import SUBCHUNK_SIZE
from diptych_kernels.mesh_axes import varying_alike


class ChunkTerms(NamedTuple):
    """n chunks of R sequence-heads: what the scan over states takes."""

    w: Float[Array, "n r c k"]
    """What errors lose per state."""
    u: Float[Array, "n r c v"]
    """Errors where the state is zero."""
    q_decayed: Float[Array, "n r c k"]
    """Queries of the chunk's first state."""
    k_decayed: Float[Array, "n r c k"]
    """Keys as the chunk's last state remembers them."""
    a_qk: Float[Array, "n r c c"]
    """What an output takes of errors up to its own."""
    decay: Float[Array, "n r g"]
    """Of the state over the whole chunk; by channel, or one for all."""


def chunk_terms(
    q: Float[Array, "n r c k"],
    k: Float[Array, "n r c k"],
    v: Float[Array, "n r c v"],
    g: Float[Array, "n r c g"],
    beta: Float[Array, "n r c 1"],
) -> ChunkTerms:
    """All that can be computed of every chunk at once.

    Args:
        q: scaled queries. [n, R, C, K]
        k: keys. [n, R, C, K]
        v: values. [n, R, C, V]
        g: log decay by channel, or one for all. [n, R, C, K or 1]
        beta: [n, R, C, 1]
    """
    a_qk, a_kk = (_products_by_channel if g.shape[-1] > 1 else _products_by_head)(q, k, g)
    from_start, to_end = jnp.exp(jnp.cumsum(g, -2)), jnp.exp(_sums_after(g))
    inverse = _inverse(beta * a_kk)
    right = jnp.concatenate([beta * from_start * k, beta * v], -1)
    w, u = jnp.split(lower_product(inverse, right), [k.shape[-1]], -1)
    return ChunkTerms(w, u, q * from_start, k * to_end, a_qk, from_start[..., -1, :])


def lower_product(lower: Float[Array, "*b c c"], x: Float[Array, "*b c v"]) -> Float[Array, "*b c v"]:
    """Return ``lower @ x``, of which no row depends on later rows of x.

    A product takes 0 times what is not finite for NaN. Here a number of x that is not finite makes NaN of its column in
    its own row and the later ones alone.

    Args:
        lower: lower triangular.
        x: of any numbers.
    """
    finite, place = jnp.isfinite(x), jnp.arange(x.shape[-2])[:, None]
    first = jnp.where(finite, len(place), place).min(-2, keepdims=True)
    return jnp.where(place < first, lower @ jnp.where(finite, x, 0), jnp.nan)


@jax.custom_vjp
def _inverse(a: Float[Array, "n r c c"]) -> Float[Array, "n r c c"]:
    """(I + a)^-1 of strictly lower triangular a, by substitution; one solution serves forward and backward.

    Block by block, of two that become one: [[A, 0], [B, D]]^-1 = [[A^-1, 0], [-D^-1 B A^-1, D^-1]]. On a CPU
    jax.lax.linalg.triangular_solve can wait for ever in a program with much beside it (jaxlib 0.10.2, two threads).
    """
    found, size = varying_alike((jnp.ones((*a.shape[:-1], 1, 1), a.dtype), a))[0], 1
    while size < a.shape[-1]:
        pairs = a.reshape(*a.shape[:-2], a.shape[-1] // (2 * size), 2, size, -1, 2, size)
        below = jnp.moveaxis(jnp.diagonal(pairs[..., 1, :, :, 0, :], axis1=-4, axis2=-2), -1, -3)
        first, second = _halves(found)
        found = _joined(first, -lower_product(second, below @ first), second)
        size *= 2
    return found.squeeze(-3)


def _inverse_forward(a: Array) -> tuple[Array, Array]:
    inverse = _inverse(a)
    return inverse, inverse


def _inverse_backward(inverse: Array, grad: Array) -> tuple[Array]:
    return (-jnp.tril(inverse.mT @ grad @ inverse.mT, -1),)


_inverse.defvjp(_inverse_forward, _inverse_backward)


def _sums_after(g: Float[Array, "*b c k"]) -> Float[Array, "*b c k"]:
    """Of every token: the sum of the later ones."""
    later = jnp.concatenate([g[..., 1:, :], jnp.zeros_like(g[..., :1, :])], -2)
    return jax.lax.cumsum(later, later.ndim - 2, reverse=True)


def _products_by_head(q: Array, k: Array, g: Array) -> tuple[Array, Array]:
    """A_qk and A_kk where a token has one decay."""
    size = q.shape[-2]
    lower = jnp.tril(jnp.ones((size, size), bool))
    strictly = jnp.tril(lower, -1)
    sums = jnp.cumsum(jnp.where(strictly, g, 0), -2)  # row i, column j: of g from j + 1 to i
    decay = jnp.exp(jnp.where(lower, sums, -jnp.inf))
    return jnp.where(lower, (q @ k.mT) * decay, 0), jnp.where(strictly, (k @ k.mT) * decay, 0)


def _products_by_channel(q: Array, k: Array, g: Array) -> tuple[Array, Array]:
    """A_qk and A_kk where every channel has its own decay: first of blocks, then of two blocks that become one."""
    size = min(SUBCHUNK_SIZE, q.shape[-2])
    found = jnp.stack(_products_in_blocks(*(_blocks(x, size) for x in (q, k, g))), -4)
    queries = jnp.stack([q, k], -3)
    while size < q.shape[-2]:
        early, late = _halves(_blocks(g, size))
        keys, rows = _halves(_blocks(k, size))[0], _halves(_blocks(queries, size))[1]
        keys, rows = keys * jnp.exp(_sums_after(early)), rows * jnp.exp(jnp.cumsum(late, -2))[..., None, :, :, :]
        first, second = _halves(found)
        found = _joined(first, rows @ keys.mT[..., None, :, :, :], second)
        size *= 2
    found = found.squeeze(-3)
    return found[..., 0, :, :], found[..., 1, :, :]


def _blocks(x: Array, size: int) -> Array:
    """[..., C, K] as [..., C / size, size, K]."""
    return x.reshape(*x.shape[:-2], -1, size, x.shape[-1])


def _halves(x: Array) -> tuple[Array, Array]:
    """Of blocks [..., n, i, j] the even ones and the odd ones."""
    return x[..., ::2, :, :], x[..., 1::2, :, :]


def _joined(first: Array, below: Array, second: Array) -> Array:
    """[[first, 0], [below, second]]."""
    above = jnp.concatenate([first, jnp.zeros_like(first)], -1)
    return jnp.concatenate([above, jnp.concatenate([below, second], -1)], -2)


def _products_in_blocks(q: Array, k: Array, g: Array) -> tuple[Array, Array]:
    """A_qk and A_kk of blocks [..., blocks, s, K] by columns, from the last."""
    size = q.shape[-2]
    sums = jnp.zeros_like(g[..., -1:, :])
    of_q, of_k = [(q[..., -1:, :] * k[..., -1:, :]).sum(-1)], [jnp.zeros_like(g[..., -1:, 0])]
    for column in reversed(range(size - 1)):
        sums = sums + g[..., column + 1 : column + 2, :]
        sums = jnp.concatenate([jnp.zeros_like(sums[..., :1, :]), sums], -2)
        decayed = jnp.exp(sums) * k[..., column : column + 1, :]
        of_q.append((q[..., column:, :] * decayed).sum(-1))
        of_k.append((k[..., column:, :] * decayed).sum(-1).at[..., 0].set(0))
    a_qk, a_kk = (jnp.stack([_at_end(column, size) for column in reversed(columns)], -1) for columns in (of_q, of_k))
    return a_qk, a_kk


def _at_end(column: Array, size: int) -> Array:
    """The rows of a column, after as many zeros as make it size long."""
    return jnp.concatenate([jnp.zeros((*column.shape[:-1], size - column.shape[-1]), column.dtype), column], -1)
