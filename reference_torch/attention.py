"""Softmax attention over tokens: causal and explicit, causal and fused, or with any mask."""

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
    v: Float[Tensor, "b t g e"],
    attention_mask: Bool[Tensor, "b t t"] | None = None,
) -> Float[Tensor, "b t h e"]:
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
    batch, length, heads, width = q.shape
    groups = k.shape[2]
    share = heads // groups
    rows = share * length  # the query heads of one group are stacked along the rows
    q = q.reshape(batch, length, groups, share, width).permute(0, 2, 3, 1, 4).reshape(batch * groups, rows, width)
    k = k.permute(0, 2, 3, 1).reshape(batch * groups, width, length)
    v = v.transpose(1, 2).reshape(batch * groups, length, v.shape[3])
    q = name_value(q, "q")
    k = name_value(k, "k")
    v = name_value(v, "v")
    allowed = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    if attention_mask is not None:
        allowed = (allowed & attention_mask)[:, None]
    low = torch.finfo(q.dtype).min / 2  # half, because the sum with a score must be finite in float16
    bias = torch.zeros_like(allowed, dtype=q.dtype).masked_fill_(~allowed, low)
    bias = bias.unsqueeze(-3).expand(*bias.shape[:-2], share, length, length)
    if attention_mask is not None:
        bias = bias.expand(-1, groups, -1, -1, -1)
    bias = bias.reshape(1 if attention_mask is None else batch * groups, rows, length)
    scores = torch.baddbmm(bias, q, k, alpha=width**-0.5)
    weights = at_least_float32(scores).softmax(-1).to(v.dtype)
    if attention_mask is not None:
        weights = weights * allowed.any(-1).repeat(1, groups, share).view(batch * groups, rows, 1)
    weights = name_value(weights, "attention_weights")
    mixed = torch.bmm(weights, v).view(batch, groups, share, length, v.shape[2])
    mixed = mixed.permute(0, 3, 1, 2, 4).reshape(batch, length, heads * v.shape[2])  # contiguous for the next product
    return mixed.view(batch, length, heads, v.shape[2])


def _check_attention(q: Any, k: Any, v: Any, mask: Any) -> None:
    """Check the arguments of an attention function; see diptych.plans.model.operations.check_attention."""
    operands = operand("q", q), operand("k", k), operand("v", v), given_operand("attention_mask", mask)
    operations.check_attention(*operands, name="attention_mask")


def fused_attention(
    q: Float[Tensor, "b t h d"],
    k: Float[Tensor, "b t g d"],
    v: Float[Tensor, "b t g e"],
    attention_mask: Bool[Tensor, "b t t"] | None = None,
) -> Float[Tensor, "b t h e"]:
    """Compute causal_attention without saving the T x T weights, which are recomputed in backward.

    PyTorch's fused kernels compute it; with a mask, those kernels that accept one.

    Arguments and result are those of causal_attention.

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
    v: Float[Tensor, "b s g e"],
    allowed: Bool[Tensor, "t s"],
    fused: bool = False,
) -> Float[Tensor, "b t h e"]:
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
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, allowed[None, None], enable_gqa=q.shape[1] != k.shape[1])
        return attended.transpose(1, 2).contiguous()
    groups, width = k.shape[2:]
    scores = torch.einsum("btgrd,bsgd->bgrts", q.unflatten(2, (groups, -1)), k) * width**-0.5
    weights = at_least_float32(scores.masked_fill(~allowed, torch.finfo(q.dtype).min)).softmax(-1).to(v.dtype)
    return torch.einsum("bgrts,bsgd->btgrd", weights, v).flatten(2, 3)
