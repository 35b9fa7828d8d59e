"""The part of a chunk that does not depend on the state: decayed products of its tokens, and the WY representation.

With q scaled, and G the cumulative sum of g from the first token of the chunk:

    A_qk[i, j] = sum over c of q_ic k_jc exp(G_ic - G_jc)   for i >= j, else 0
    A_kk[i, j] = sum over c of k_ic k_jc exp(G_ic - G_jc)   for i > j, else 0
    (I + diag(beta) A_kk) [w | u] = diag(beta) [exp(G) k | v]

w and u are the WY representation of the chunk, computed by the UT transform (I + diag(beta) A_kk)^-1 diag(beta) (Yang
et al. 2024, arXiv 2406.06484). The beta-weighted prediction errors of a chunk with initial state S are u - w S
(scan.py).

Every exponent is computed as a sum of log decays between two tokens, not as a difference of two sums. So no exponent is
positive and nothing overflows, and an earlier strong decay costs no digits. No output depends on a later token, even if
that token is not finite (lower_product); in the kernels, such a token makes its whole chunk not finite.

Reference: arXiv 2412.06464, section 3.3; arXiv 2510.26692, section 3. The papers anchor sub-chunks of 16 at their first
token, as the kernels do (products.py). Here blocks double in size: the queries of a block and the keys of the block
before are decayed to the border between the two. The inverse is computed by recursive 2 x 2 block inversion, because
the powers of A_kk in a Neumann series overflow for equal keys.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from diptych.plans.model.delta_rule import SUBCHUNK_SIZE
from diptych_kernels.mesh_axes import match_varying_axes


class ChunkTerms(NamedTuple):
    """The inputs of the scan over states: n chunks of R = B * HV rows."""

    w: Float[Array, "n r c k"]
    """Factor of the initial state in the errors: errors = u - w S."""
    u: Float[Array, "n r c v"]
    """Errors for an initial state of 0."""
    q_from_start: Float[Array, "n r c k"]
    """Queries, decayed from the start of the chunk."""
    k_to_end: Float[Array, "n r c k"]
    """Keys, decayed to the end of the chunk."""
    a_qk: Float[Array, "n r c c"]
    """Weights of the errors in the outputs, lower triangular."""
    decay: Float[Array, "n r g"]
    """Decay of the state over the whole chunk, per channel or per head."""


def chunk_terms(
    q: Float[Array, "n r c k"],
    k: Float[Array, "n r c k"],
    v: Float[Array, "n r c v"],
    g: Float[Array, "n r c g"],
    beta: Float[Array, "n r c 1"],
) -> ChunkTerms:
    """Return the terms of all chunks.

    Args:
        q: scaled queries. [n, R, C, K]
        k: keys. [n, R, C, K]
        v: values. [n, R, C, V]
        g: log decay, per channel or per head. [n, R, C, K or 1]
        beta: write strength. [n, R, C, 1]
    """
    a_qk, a_kk = (_products_by_channel if g.shape[-1] > 1 else _products_by_head)(q, k, g)
    from_start = jnp.exp(jnp.cumsum(g, -2))
    to_end = jnp.exp(_reverse_cumsum_exclusive(g))
    inverse = _inverse(beta * a_kk)
    right = jnp.concatenate([beta * from_start * k, beta * v], -1)
    w, u = jnp.split(lower_product(inverse, right), [k.shape[-1]], -1)
    return ChunkTerms(w, u, q * from_start, k * to_end, a_qk, from_start[..., -1, :])


def lower_product(lower: Float[Array, "*b c c"], x: Float[Array, "*b c v"]) -> Float[Array, "*b c v"]:
    """Return ``lower @ x`` such that no row depends on later rows of x, even if they are not finite.

    In an ordinary product, 0 times NaN or infinity is NaN. Here an element of x that is not finite gives NaN only in
    its column, in its own row and the later ones.

    Args:
        lower: lower triangular matrix. [..., C, C]
        x: right factor; elements may be NaN or infinite. [..., C, V]
    """
    finite = jnp.isfinite(x)
    rows = jnp.arange(x.shape[-2])[:, None]
    first = jnp.where(finite, len(rows), rows).min(-2, keepdims=True)
    return jnp.where(rows < first, lower @ jnp.where(finite, x, 0), jnp.nan)


@jax.custom_vjp
def _inverse(a: Float[Array, "n r c c"]) -> Float[Array, "n r c c"]:
    """Return (I + a)^-1 of a strictly lower triangular a, by merging diagonal blocks of doubling size.

    Backward reuses the inverse. Two blocks at a time are merged:

        [[A, 0], [B, D]]^-1 = [[A^-1, 0], [-D^-1 B A^-1, D^-1]]

    On a CPU, jax.lax.linalg.triangular_solve can deadlock in a large program (jaxlib 0.10.2, two threads).
    """
    inverse = match_varying_axes((jnp.ones((*a.shape[:-1], 1, 1), a.dtype), a))[0]
    size = 1
    while size < a.shape[-1]:
        pairs = a.reshape(*a.shape[:-2], a.shape[-1] // (2 * size), 2, size, -1, 2, size)
        # the lower left block of every pair of diagonal blocks, [..., pairs, size, size]
        below = jnp.moveaxis(jnp.diagonal(pairs[..., 1, :, :, 0, :], axis1=-4, axis2=-2), -1, -3)
        first, second = _halves(inverse)
        inverse = _joined(first, -lower_product(second, below @ first), second)
        size *= 2
    return inverse.squeeze(-3)


def _inverse_forward(a: Array) -> tuple[Array, Array]:
    """Compute the inverse, and save it."""
    inverse = _inverse(a)
    return inverse, inverse


def _inverse_backward(inverse: Array, grad: Array) -> tuple[Array]:
    """Return the gradient of a: the strictly lower triangle of -inverse^T grad inverse^T."""
    return (-jnp.tril(inverse.mT @ grad @ inverse.mT, -1),)


_inverse.defvjp(_inverse_forward, _inverse_backward)


def _reverse_cumsum_exclusive(g: Float[Array, "*b c k"]) -> Float[Array, "*b c k"]:
    """Return the exclusive reverse cumulative sum over tokens: for each token, the sum over the later ones."""
    later = jnp.concatenate([g[..., 1:, :], jnp.zeros_like(g[..., :1, :])], -2)
    return jax.lax.cumsum(later, later.ndim - 2, reverse=True)


def _products_by_head(q: Array, k: Array, g: Array) -> tuple[Array, Array]:
    """Return A_qk and A_kk for one decay per head."""
    size = q.shape[-2]
    lower = jnp.tril(jnp.ones((size, size), bool))
    strictly = jnp.tril(lower, -1)
    sums = jnp.cumsum(jnp.where(strictly, g, 0), -2)  # row i, column j: sum of g from j + 1 to i
    decay = jnp.exp(jnp.where(lower, sums, -jnp.inf))
    return jnp.where(lower, (q @ k.mT) * decay, 0), jnp.where(strictly, (k @ k.mT) * decay, 0)


def _products_by_channel(q: Array, k: Array, g: Array) -> tuple[Array, Array]:
    """Return A_qk and A_kk for one decay per channel: first of small blocks, then of blocks that double in size."""
    size = min(SUBCHUNK_SIZE, q.shape[-2])
    products = jnp.stack(_products_in_blocks(*(_blocks(x, size) for x in (q, k, g))), -4)
    queries = jnp.stack([q, k], -3)
    while size < q.shape[-2]:
        early, late = _halves(_blocks(g, size))
        keys = _halves(_blocks(k, size))[0]
        rows = _halves(_blocks(queries, size))[1]
        keys = keys * jnp.exp(_reverse_cumsum_exclusive(early))
        rows = rows * jnp.exp(jnp.cumsum(late, -2))[..., None, :, :, :]
        # [[first, 0], [below, second]], with the tokens of below decayed since and to the border of the two blocks
        first, second = _halves(products)
        products = _joined(first, rows @ keys.mT[..., None, :, :, :], second)
        size *= 2
    products = products.squeeze(-3)
    return products[..., 0, :, :], products[..., 1, :, :]


def _blocks(x: Array, size: int) -> Array:
    """Reshape [..., C, K] to [..., C / size, size, K]."""
    return x.reshape(*x.shape[:-2], -1, size, x.shape[-1])


def _halves(x: Array) -> tuple[Array, Array]:
    """Return the even and the odd blocks of [..., n, i, j]."""
    return x[..., ::2, :, :], x[..., 1::2, :, :]


def _joined(first: Array, below: Array, second: Array) -> Array:
    """Return the block matrix [[first, 0], [below, second]]."""
    above = jnp.concatenate([first, jnp.zeros_like(first)], -1)
    return jnp.concatenate([above, jnp.concatenate([below, second], -1)], -2)


def _products_in_blocks(q: Array, k: Array, g: Array) -> tuple[Array, Array]:
    """Return A_qk and A_kk of blocks [..., blocks, s, K], computed column by column from the last."""
    size = q.shape[-2]
    sums = jnp.zeros_like(g[..., -1:, :])
    qk_columns = [(q[..., -1:, :] * k[..., -1:, :]).sum(-1)]
    kk_columns = [jnp.zeros_like(g[..., -1:, 0])]
    for column in reversed(range(size - 1)):
        sums = sums + g[..., column + 1 : column + 2, :]
        sums = jnp.concatenate([jnp.zeros_like(sums[..., :1, :]), sums], -2)
        decayed = jnp.exp(sums) * k[..., column : column + 1, :]
        qk_columns.append((q[..., column:, :] * decayed).sum(-1))
        kk_columns.append((k[..., column:, :] * decayed).sum(-1).at[..., 0].set(0))
    a_qk, a_kk = (
        jnp.stack([_at_end(column, size) for column in reversed(columns)], -1) for columns in (qk_columns, kk_columns)
    )
    return a_qk, a_kk


def _at_end(column: Array, size: int) -> Array:
    """Return a column padded with zeros before its rows to length size."""
    return jnp.concatenate([jnp.zeros((*column.shape[:-1], size - column.shape[-1]), column.dtype), column], -1)
