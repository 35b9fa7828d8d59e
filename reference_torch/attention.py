"""Softmax attention over tokens: explicit, fused, and with any mask."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from diptych.plans.model import operations
from reference_torch.operands import at_least_float32, given_operand, operand
from reference_torch.recompute import name_value


def causal_attention(
    q: Float[Tensor, "b t h d"],
    k: Float[Tensor, "b t g d"],
    v: Float[Tensor, "b t g d"],
    attention_mask: Bool[Tensor, "b t t"] | None = None,
) -> Float[Tensor, "b t h d"]:
    """softmax(q k^T / sqrt(d)) v over the tokens up to each token's own; explicit, products in q's type.

    Args:
        q: queries. [B, T, H, d]
        k, v: keys and values of G groups; query head h uses group h // (H / G). [B, T, G, d]
        attention_mask: True where row t may attend to column s, besides s <= t. A row that may attend
            to nothing gives 0. [B, T, T]
    """
    _check_attention(q, k, v, attention_mask)
    batch, length, heads, width = q.shape
    groups = k.shape[2]
    rows = heads // groups * length  # the query heads of one group, one under the other
    q = q.reshape(batch, length, groups, -1, width).permute(0, 2, 3, 1, 4).reshape(-1, rows, width)
    k = k.permute(0, 2, 3, 1).reshape(-1, width, length)
    v = v.transpose(1, 2).reshape(-1, length, width)
    q, k, v = name_value(q, "q"), name_value(k, "k"), name_value(v, "v")
    allowed = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    if attention_mask is not None:
        allowed = (allowed & attention_mask)[:, None]
    low = torch.finfo(q.dtype).min
    bias = torch.zeros_like(allowed, dtype=q.dtype).masked_fill_(~allowed, low)
    bias = bias.unsqueeze(-3).expand(*bias.shape[:-2], heads // groups, length, length)
    if attention_mask is not None:
        bias = bias.expand(-1, groups, -1, -1, -1)
    scores = torch.baddbmm(bias.reshape(-1, rows, length), q, k, alpha=width**-0.5)
    weights = at_least_float32(scores).softmax(-1).to(v.dtype)
    if attention_mask is not None:
        weights = weights * allowed.any(-1).repeat(1, groups, heads // groups).view(-1, rows, 1)
    weights = name_value(weights, "attention_weights")
    mixed = torch.bmm(weights, v).view(batch, groups, -1, length, width)
    return mixed.permute(0, 3, 1, 2, 4).reshape(batch, length, -1).view(batch, length, heads, width)


def _check_attention(q: Any, k: Any, v: Any, mask: Any) -> None:
    given = operand("q", q), operand("k", k), operand("v", v), given_operand("attention_mask", mask)
    operations.check_attention(*given, name="attention_mask")


def fused_attention(
    q: Float[Tensor, "b t h d"],
    k: Float[Tensor, "b t g d"],
    v: Float[Tensor, "b t g d"],
    attention_mask: Bool[Tensor, "b t t"] | None = None,
) -> Float[Tensor, "b t h d"]:
    """causal_attention by PyTorch's fused kernels: the T x T weights are computed again in backward, never kept.

    Args: as causal_attention's. With a mask, kernels that take one are used.

    Reference: Dao et al., arXiv 2205.14135.
    """
    _check_attention(q, k, v, attention_mask)
    length = q.shape[1]
    allowed = None
    if attention_mask is not None:
        allowed = (attention_mask & torch.ones(length, length, dtype=torch.bool, device=q.device).tril())[:, None]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    gqa = q.shape[1] != k.shape[1]
    attended = F.scaled_dot_product_attention(q, k, v, allowed, is_causal=allowed is None, enable_gqa=gqa)
    if allowed is not None:
        attended = attended.masked_fill(~allowed.any(-1)[..., None], 0.0)
    return attended.transpose(1, 2).contiguous()


def masked_attention(
    q: Float[Tensor, "b t h d"],
    k: Float[Tensor, "b s g d"],
    v: Float[Tensor, "b s g d"],
    allowed: Bool[Tensor, "t s"],
    fused: bool = False,
) -> Float[Tensor, "b t h d"]:
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
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, allowed[None, None], enable_gqa=q.shape[1] != k.shape[1])
        return attended.transpose(1, 2).contiguous()
    groups, width = k.shape[2:]
    scores = torch.einsum("btgrd,bsgd->bgrts", q.unflatten(2, (groups, -1)), k) * width**-0.5
    weights = at_least_float32(scores.masked_fill(~allowed, torch.finfo(q.dtype).min)).softmax(-1).to(v.dtype)
    return torch.einsum("bgrts,bsgd->btgrd", weights, v).flatten(2, 3)
