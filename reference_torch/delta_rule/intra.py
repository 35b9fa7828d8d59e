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

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from diptych.plans.model.delta_rule import SUBCHUNK_SIZE
from reference_torch.autograd import differentiable_once, is_transformed


class ChunkTerms(NamedTuple):
    """n chunks of R sequence-heads: what the scan over states takes."""

    w: Float[Tensor, "n r c k"]
    """What errors lose per state."""
    u: Float[Tensor, "n r c v"]
    """Errors where the state is zero."""
    q_decayed: Float[Tensor, "n r c k"]
    """Queries of the chunk's first state."""
    k_decayed: Float[Tensor, "n r c k"]
    """Keys as the chunk's last state remembers them."""
    a_qk: Float[Tensor, "n r c c"]
    """What an output takes of errors up to its own."""
    decay: Float[Tensor, "n r g"]
    """Of the state over the whole chunk; by channel, or one for all."""


def chunk_terms(
    q: Float[Tensor, "n r c k"],
    k: Float[Tensor, "n r c k"],
    v: Float[Tensor, "n r c v"],
    g: Float[Tensor, "n r c g"],
    beta: Float[Tensor, "n r c 1"],
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
    from_start, to_end = g.cumsum(-2).exp(), _sums_after(g).exp()
    inverse = _Inverse.apply(beta * a_kk)
    right = torch.cat([beta * from_start * k, beta * v], -1)
    w, u = lower_product(inverse, right).split([k.shape[-1], v.shape[-1]], -1)
    return ChunkTerms(w, u, q * from_start, k * to_end, a_qk, from_start[..., -1, :])


def lower_product(lower: Float[Tensor, "*b c c"], x: Float[Tensor, "*b c v"]) -> Float[Tensor, "*b c v"]:
    """Return ``lower @ x``, of which no row depends on later rows of x.

    A product takes 0 times what is not finite for NaN. Here a number of x that is not finite makes NaN of its column in
    its own row and the later ones alone.

    Args:
        lower: lower triangular.
        x: of any numbers.
    """
    product = lower @ x
    # On a CPU a look costs less than going without one: a sum is finite if all it is of is.
    if x.device.type == "cpu" and type(product) is Tensor and not is_transformed(product):
        with torch.no_grad():
            if product.numel() == 0 or math.isfinite(product.sum().item()):
                return product
    finite, place = x.isfinite(), torch.arange(x.shape[-2], device=x.device)[:, None]
    first = torch.where(finite, len(place), place).amin(-2, keepdim=True)
    return torch.where(place < first, lower @ torch.where(finite, x, 0), torch.nan)


class _Inverse(torch.autograd.Function):
    """(I + a)^-1 of strictly lower triangular a, by substitution; one solution serves forward and backward."""

    @staticmethod
    def forward(ctx, a):
        identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
        inverse = torch.linalg.solve_triangular(a, identity, upper=False, unitriangular=True)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    @differentiable_once
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        (inverse,) = ctx.saved_tensors
        return -(inverse.mT @ grad @ inverse.mT).tril(-1)


def _sums_after(g: Float[Tensor, "*b c k"]) -> Float[Tensor, "*b c k"]:
    """Of every token: the sum of the later ones."""
    return F.pad(g[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2)


def _products_by_head(q: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """A_qk and A_kk where a token has one decay."""
    size = q.shape[-2]
    lower = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    strictly = lower.tril(-1)
    sums = torch.where(strictly, g, 0).cumsum(-2)  # row i, column j: of g from j + 1 to i
    decay = torch.where(lower, sums, -torch.inf).exp()
    return torch.where(lower, (q @ k.mT) * decay, 0), torch.where(strictly, (k @ k.mT) * decay, 0)


def _products_by_channel(q: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """A_qk and A_kk where every channel has its own decay: first of blocks, then of two blocks that become one."""
    size = min(SUBCHUNK_SIZE, q.shape[-2])
    found = torch.stack(_products_in_blocks(*(x.unflatten(-2, (-1, size)) for x in (q, k, g))), -4)
    queries = torch.stack([q, k], -3)
    while size < q.shape[-2]:
        (early, late), (keys, _), (_, rows) = (x.unflatten(-2, (-1, 2, size)).unbind(-3) for x in (g, k, queries))
        keys, rows = keys * _sums_after(early).exp(), rows * late.cumsum(-2).exp().unsqueeze(-4)
        first, second = found.unflatten(-3, (-1, 2)).unbind(-3)
        below = torch.cat([rows @ keys.mT.unsqueeze(-4), second], -1)
        found = torch.cat([F.pad(first, (0, size)), below], -2)
        size *= 2
    a_qk, a_kk = found.squeeze(-3).unbind(-3)
    return a_qk, a_kk


def _products_in_blocks(q: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """A_qk and A_kk of blocks [..., blocks, s, K] by columns, from the last."""
    size = q.shape[-2]
    sums = torch.zeros_like(g[..., -1:, :])
    of_q, of_k = [(q[..., -1:, :] * k[..., -1:, :]).sum(-1)], [torch.zeros_like(g[..., -1:, 0])]
    for column in reversed(range(size - 1)):
        sums = F.pad(sums + g[..., column + 1 : column + 2, :], (0, 0, 1, 0))
        decayed = sums.exp() * k[..., column : column + 1, :]
        of_q.append((q[..., column:, :] * decayed).sum(-1))
        of_k.append((k[..., column + 1 :, :] * decayed[..., 1:, :]).sum(-1))
    a_qk, a_kk = (
        torch.stack([F.pad(column, (size - column.shape[-1], 0)) for column in reversed(columns)], -1)
        for columns in (of_q, of_k)
    )
    return a_qk, a_kk
