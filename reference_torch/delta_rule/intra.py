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
before are decayed to the border between the two. The system is solved by substitution, because the powers of A_kk in a
Neumann series overflow for equal keys.
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
    """The inputs of the scan over states: n chunks of R = B * HV rows."""

    w: Float[Tensor, "n r c k"]
    """Factor of the initial state in the errors: errors = u - w S."""
    u: Float[Tensor, "n r c v"]
    """Errors for an initial state of 0."""
    q_from_start: Float[Tensor, "n r c k"]
    """Queries, decayed from the start of the chunk."""
    k_to_end: Float[Tensor, "n r c k"]
    """Keys, decayed to the end of the chunk."""
    a_qk: Float[Tensor, "n r c c"]
    """Weights of the errors in the outputs, lower triangular."""
    decay: Float[Tensor, "n r g"]
    """Decay of the state over the whole chunk, per channel or per head."""


def chunk_terms(
    q: Float[Tensor, "n r c k"],
    k: Float[Tensor, "n r c k"],
    v: Float[Tensor, "n r c v"],
    g: Float[Tensor, "n r c g"],
    beta: Float[Tensor, "n r c 1"],
) -> ChunkTerms:
    """Return the terms of all chunks.

    Args:
        q: scaled queries. [n, R, C, K]
        k: keys. [n, R, C, K]
        v: values. [n, R, C, V]
        g: log decay, per channel or per head. [n, R, C, K or 1]
        beta: write strength. [n, R, C, 1]
    """
    if g.shape[-1] == 1:
        return ChunkTerms(*_TermsByHead.apply(q, k, v, g, beta))
    return _terms_by_channel(q, k, v, g, beta)


def _terms_by_channel(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> ChunkTerms:
    """Return the terms for one decay per channel; arguments as for chunk_terms."""
    a_qk, a_kk = _products_by_channel(q, k, g)
    from_start = g.cumsum(-2).exp()
    to_end = _reverse_cumsum_exclusive(g).exp()
    inverse = _Inverse.apply(beta * a_kk)
    right = torch.cat([beta * from_start * k, beta * v], -1)
    w, u = lower_product(inverse, right).split([k.shape[-1], v.shape[-1]], -1)
    return ChunkTerms(w, u, q * from_start, k * to_end, a_qk, from_start[..., -1, :])


def lower_product(lower: Float[Tensor, "*b c c"], x: Float[Tensor, "*b c v"]) -> Float[Tensor, "*b c v"]:
    """Return ``lower @ x`` such that no row depends on later rows of x, even if they are not finite.

    In an ordinary product, 0 times NaN or infinity is NaN. Here an element of x that is not finite gives NaN only in
    its column, in its own row and the later ones.

    Args:
        lower: lower triangular matrix. [..., C, C]
        x: right factor; elements may be NaN or infinite. [..., C, V]
    """
    product = lower @ x
    # On a CPU a test is cheaper than the masked product: if the sum is finite, all elements are.
    if x.device.type == "cpu" and type(product) is Tensor and not is_transformed(product):
        with torch.no_grad():
            if product.numel() == 0 or math.isfinite(product.sum().item()):
                return product
    finite = x.isfinite()
    rows = torch.arange(x.shape[-2], device=x.device)[:, None]
    first = torch.where(finite, len(rows), rows).amin(-2, keepdim=True)
    return torch.where(rows < first, lower @ torch.where(finite, x, 0), torch.nan)


class _Inverse(torch.autograd.Function):
    """(I + a)^-1 of a strictly lower triangular a, by substitution; forward and backward use one solution."""

    @staticmethod
    def forward(ctx, a):
        inverse = _inverse(a)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    @differentiable_once
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        (inverse,) = ctx.saved_tensors
        return -(inverse.mT @ grad @ inverse.mT).tril(-1)


def _inverse(a: Float[Tensor, "*b c c"]) -> Float[Tensor, "*b c c"]:
    """Return (I + a)^-1 of a strictly lower triangular a."""
    identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    return torch.linalg.solve_triangular(a, identity, upper=False, unitriangular=True)


def _reverse_cumsum_exclusive(g: Float[Tensor, "*b c k"]) -> Float[Tensor, "*b c k"]:
    """Return the exclusive reverse cumulative sum over tokens: for each token, the sum over the later ones."""
    return F.pad(g[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2)


class _TermsByHead(torch.autograd.Function):
    """The terms for one decay per head.

    Every exponent is linear in g and every product contains its own decay, so the gradient of an exponent is that of
    the product times the product: backward computes no exponential. With d_right = inverse^T [dw | du], the gradient of
    beta A_kk is -d_right [w | u]^T below the diagonal.
    """

    @staticmethod
    def forward(ctx, q, k, v, g, beta):
        q = q.contiguous()  # or every product would copy queries and keys with strided heads
        k = k.contiguous()
        size = g.shape[-2]
        strictly = torch.ones(size, size, dtype=torch.bool, device=g.device).tril(-1)
        decay = torch.where(strictly, g, 0).cumsum(-2).exp_().tril_()  # row i, column j: over tokens j + 1 to i
        a_qk = (q @ k.mT).mul_(decay).tril_()
        a_kk = (k @ k.mT).mul_(decay).tril_(-1)
        from_start = g.cumsum(-2).exp()
        to_end = _reverse_cumsum_exclusive(g).exp()
        inverse = _inverse(beta * a_kk)
        solution = lower_product(inverse, torch.cat([beta * from_start * k, beta * v], -1))
        ctx.save_for_backward(q, k, v, beta, decay, a_qk, a_kk, from_start, to_end, inverse, solution)
        w, u = solution.split([k.shape[-1], v.shape[-1]], -1)
        return w, u, q * from_start, k * to_end, a_qk, from_start[..., -1, :]

    @staticmethod
    @differentiable_once
    def backward(ctx, dw, du, dq_from_start, dk_to_end, da_qk, d_last):  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, beta, decay, a_qk, a_kk, from_start, to_end, inverse, solution = ctx.saved_tensors
        d_right = inverse.mT @ torch.cat([dw, du], -1)
        dk_right, dv_right = d_right.split([k.shape[-1], v.shape[-1]], -1)
        da = (d_right @ solution.mT).tril_(-1).neg_()
        by_beta = da * a_kk
        d_exponents = (da_qk * a_qk).addcmul_(beta, by_beta)
        da_qk = da_qk * decay
        da.mul_(beta).mul_(decay)
        dq = (da_qk @ k).addcmul_(dq_from_start, from_start)
        dk = (da_qk.mT @ q).add_((da + da.mT) @ k)
        dk.addcmul_(dk_to_end, to_end).addcmul_(dk_right, beta * from_start)
        from_right = from_start * (dk_right * k).sum(-1, keepdim=True)
        d_from_start = beta * from_right + from_start * (dq_from_start * q).sum(-1, keepdim=True)
        d_from_start[..., -1, :] += d_last * from_start[..., -1, :]
        d_to_end = to_end * (dk_to_end * k).sum(-1, keepdim=True)
        # A decay between j and i contains the log decays of tokens j + 1 to i.
        between = d_exponents.cumsum(-1).tril_(-1).sum(-2)[..., :-1, None]
        dg = d_from_start.flip(-2).cumsum(-2).flip(-2)
        dg[..., 1:, :] += between + d_to_end.cumsum(-2)[..., :-1, :]
        d_beta = from_right + (dv_right * v).sum(-1, keepdim=True) + by_beta.sum(-1, keepdim=True)
        return dq, dk, dv_right * beta, dg, d_beta


def _products_by_channel(q: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Return A_qk and A_kk for one decay per channel: first of small blocks, then of blocks that double in size."""
    size = min(SUBCHUNK_SIZE, q.shape[-2])
    products = torch.stack(_products_in_blocks(*(x.unflatten(-2, (-1, size)) for x in (q, k, g))), -4)
    queries = torch.stack([q, k], -3)
    while size < q.shape[-2]:
        early, late = g.unflatten(-2, (-1, 2, size)).unbind(-3)
        keys, _ = k.unflatten(-2, (-1, 2, size)).unbind(-3)
        _, rows = queries.unflatten(-2, (-1, 2, size)).unbind(-3)
        keys = keys * _reverse_cumsum_exclusive(early).exp()
        rows = rows * late.cumsum(-2).exp().unsqueeze(-4)
        # [[first, 0], [below, second]], with the tokens of below decayed since and to the border of the two blocks
        first, second = products.unflatten(-3, (-1, 2)).unbind(-3)
        below = torch.cat([rows @ keys.mT.unsqueeze(-4), second], -1)
        products = torch.cat([F.pad(first, (0, size)), below], -2)
        size *= 2
    a_qk, a_kk = products.squeeze(-3).unbind(-3)
    return a_qk, a_kk


def _products_in_blocks(q: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Return A_qk and A_kk of blocks [..., blocks, s, K], computed column by column from the last."""
    size = q.shape[-2]
    sums = torch.zeros_like(g[..., -1:, :])
    qk_columns = [(q[..., -1:, :] * k[..., -1:, :]).sum(-1)]
    kk_columns = [torch.zeros_like(g[..., -1:, 0])]
    for column in reversed(range(size - 1)):
        sums = F.pad(sums + g[..., column + 1 : column + 2, :], (0, 0, 1, 0))
        decayed = sums.exp() * k[..., column : column + 1, :]
        qk_columns.append((q[..., column:, :] * decayed).sum(-1))
        kk_columns.append((k[..., column + 1 :, :] * decayed[..., 1:, :]).sum(-1))
    a_qk, a_kk = (
        torch.stack([F.pad(column, (size - column.shape[-1], 0)) for column in reversed(columns)], -1)
        for columns in (qk_columns, kk_columns)
    )
    return a_qk, a_kk
