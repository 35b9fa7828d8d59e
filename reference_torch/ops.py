"""Pure functions on tensors: what layers are made of.

Twin of ``jax_impl/ops.py``: same names, same order, same signatures. Nothing here owns parameters or
state; randomness comes in as a counter (:class:`DropoutState`).
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from plans.config import TransformerConfig
from plans.implementation import uses_kernels
from plans.parameters import ParameterSpec, initial_value, rotary_frequencies
from plans.philox import KEY_STEPS, MULTIPLIERS, ROUNDS, TILE_ROWS, dropout_threshold
from reference_torch.autograd import differentiable_once
from reference_torch.recompute import name_value

MASK_32 = 0xFFFFFFFF


def parameter(config: TransformerConfig, name: str, spec: ParameterSpec) -> torch.nn.Parameter:
    """A parameter with the initial value plans/parameters.py gives it.

    Args:
        config: gives seed and type.
        name: canonical name, e.g. ``decoder.layers.0.mlp.linear_fc1.weight``.
        spec: shape and distribution.
    """
    value = torch.from_numpy(initial_value(config.seed, name, spec))
    return torch.nn.Parameter(value.to(getattr(torch, config.params_dtype)))


def philox_4x32(key: tuple[int, int], counter: tuple) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random words per counter, bit-equal to plans.philox.

    Args:
        key: two words < 2**32.
        counter: four words < 2**32, each a number or an int64 tensor (broadcast together).

    Returns:
        Four tensors of words, int64 (torch has no full unsigned arithmetic; products wrap modulo
        2**64, which leaves the bits right).

    Reference: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    c0, c1, c2, c3 = (torch.as_tensor(word, dtype=torch.int64) for word in counter)
    k0, k1 = key
    for _ in range(ROUNDS):
        product0, product2 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1 = ((product2 >> 32) & MASK_32) ^ c1 ^ k0, product2 & MASK_32
        c2, c3 = ((product0 >> 32) & MASK_32) ^ c3 ^ k1, product0 & MASK_32
        k0, k1 = (k0 + KEY_STEPS[0]) & MASK_32, (k1 + KEY_STEPS[1]) & MASK_32
    return c0, c1, c2, c3


class DropoutState(NamedTuple):
    """What a dropout mask is a function of, besides its site."""

    seed: int
    step: int
    row_low: Int[Tensor, "b t"]
    row_high: Int[Tensor, "b t"]


def dropout_state(
    seed: int, step: int, samples: Int[Tensor, "*b"], positions: Int[Tensor, " t"], seq_length: int
) -> DropoutState:
    """Number the rows of a batch: row = sample * seq_length + position, as two 32-bit words.

    Args:
        seed: < 2**32.
        step: training step, < 2**32.
        samples: numbers of the sequences within the global batch, of rows or of every token. [B] or [B, T] int64
        positions: positions of the tokens within their sequence. [T] int64
        seq_length: of the whole model, so that rows of different sequences never meet.
    """
    row = (samples if samples.dim() == 2 else samples[:, None]).long() * seq_length + positions.long()
    return DropoutState(seed, step, row & MASK_32, (row >> 32) & MASK_32)


def dropout(x: Float[Tensor, "b t *rest"], rate: float, state: DropoutState, site: int) -> Tensor:
    """Zero elements with probability ``rate`` and scale the others by 1 / (1 - rate).

    The mask is a function of (seed, site, step, row, column) alone: it is the same in JAX and in the
    kernels, and under any layout of the batch.

    Args:
        x: any floating tensor; the axes after the second are numbered as one. [B, T, ...]
        rate: in [0, 1).
        state: rows of the batch.
        site: number of the place in the model, see plans.philox.
    """
    return x if rate == 0.0 else _Dropout.apply(x, rate, state, site)


class _Dropout(torch.autograd.Function):
    """Keeps no mask: it is made again in backward."""

    @staticmethod
    def forward(ctx, x, rate, state, site):
        ctx.arguments = rate, state, site
        return torch.where(_dropout_mask(x.shape, rate, state, site), x * (1.0 / (1.0 - rate)), 0.0)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Dropout.apply(grad, *ctx.arguments), None, None, None


def _dropout_mask(shape: torch.Size, rate: float, state: DropoutState, site: int) -> Tensor:
    """True where an element is kept, by tiles of rows."""
    width = math.prod(shape[2:])
    low, high = state.row_low.reshape(-1, 1), state.row_high.reshape(-1, 1)
    quads = torch.arange((width + 3) // 4, device=low.device)
    keep = torch.empty(len(low), 4 * len(quads), dtype=torch.bool, device=low.device)
    threshold = dropout_threshold(rate)
    for start in range(0, len(low), TILE_ROWS):
        rows = slice(start, start + TILE_ROWS)
        words = philox_4x32((state.seed, site), (quads, low[rows], high[rows], state.step))
        tile = keep[rows].view(-1, len(quads), 4)
        for lane, word in enumerate(words):
            torch.ge(word, threshold, out=tile[..., lane])
    return keep[:, :width].reshape(shape)


def at_least_float32(x: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """x itself, or in float32 if it is narrower: see plans.config.KEPT_IN_FLOAT32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def add_bias(x: Float[Tensor, "*b o"], bias: Float[Tensor, " o"] | None) -> Float[Tensor, "*b o"]:
    """``x + bias`` in the type of x; x itself where there is no bias."""
    return x if bias is None else x + bias.to(x.dtype)


def linear(
    x: Float[Tensor, "*b i"], weight: Float[Tensor, "o i"], bias: Float[Tensor, " o"] | None = None
) -> Float[Tensor, "*b o"]:
    """``x @ weight.T + bias``, in the type of x."""
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def rms_norm(x: Float[Tensor, "*b d"], weight: Float[Tensor, " d"], epsilon: float) -> Float[Tensor, "*b d"]:
    """``x / sqrt(mean(x**2) + epsilon) * weight`` over the last axis.

    Reference: Zhang and Sennrich, arXiv 1910.07467, eq. 4 (epsilon added under the root).
    """
    return F.rms_norm(at_least_float32(x), weight.shape, weight, epsilon).to(x.dtype)


def short_convolution(
    x: Float[Tensor, "b t c"], weight: Float[Tensor, "c w"], before: Int[Tensor, "*b t"]
) -> Float[Tensor, "b t c"]:
    """Convolve every channel over a token and those before it in its sequence, then SiLU.

    Args:
        x: [B, T, C]
        weight: a channel's taps, the last one the token's own. [C, W]
        before: how many tokens of its sequence come before each. [T] or [B, T]
    """
    return _ShortConvolution.apply(x, weight.to(x.dtype), before)


def _convolved(x: Tensor, weight: Tensor, before: Tensor) -> Tensor:
    mixed = x * weight[:, -1]
    for back in range(1, min(weight.shape[1], x.shape[1])):
        earlier = F.pad(x[:, :-back], (0, 0, back, 0))
        mixed = mixed + torch.where((before >= back)[..., None], earlier, 0) * weight[:, -1 - back]
    return F.silu(mixed)


class _ShortConvolution(torch.autograd.Function):
    """Keeps what it reads; the shifted copies are made again in backward."""

    @staticmethod
    def forward(ctx, x, weight, before):
        ctx.save_for_backward(x, weight, before)
        return _convolved(x, weight, before)

    @staticmethod
    @differentiable_once
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, before = ctx.saved_tensors
        leaves = x.detach().requires_grad_(), weight.detach().requires_grad_()
        with torch.enable_grad():
            mixed = _convolved(*leaves, before)
        return *torch.autograd.grad(mixed, leaves, grad), None


def rotary_embedding(
    x: Float[Tensor, "b t h d"], positions: Int[Tensor, " t"], base: float
) -> Float[Tensor, "b t h d"]:
    """Turn the pairs (x[i], x[i + d/2]) by the angle position * base**(-2i/d).

    Args:
        x: queries or keys; d even. [B, T, H, d]
        positions: of the tokens within their sequence. [T]
        base: of the wavelengths.

    Reference: Su et al., arXiv 2104.09864, eq. 15, with the pairs half a head apart (GPT-NeoX order).
    """
    half = x.shape[-1] // 2
    wide = torch.promote_types(x.dtype, torch.float32)
    frequencies = torch.from_numpy(rotary_frequencies(x.shape[-1], base)).to(x.device, wide)
    angle = positions.to(wide)[:, None, None] * frequencies
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


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
    batch, length, heads, width = q.shape
    groups = k.shape[2]
    if attention_mask is not None and attention_mask.shape != (batch, length, length):
        raise ValueError(f"attention_mask: expected shape {(batch, length, length)}, got {tuple(attention_mask.shape)}")
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
    if fused:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, allowed[None, None], enable_gqa=q.shape[1] != k.shape[1])
        return attended.transpose(1, 2).contiguous()
    groups, width = k.shape[2:]
    scores = torch.einsum("btgrd,bsgd->bgrts", q.unflatten(2, (groups, -1)), k) * width**-0.5
    weights = at_least_float32(scores.masked_fill(~allowed, torch.finfo(q.dtype).min)).softmax(-1).to(v.dtype)
    return torch.einsum("bgrts,bsgd->btgrd", weights, v).flatten(2, 3)


def kernel_door(impl: str, x: Tensor) -> Any | None:
    """The module that runs the shared kernels on what x is, or None where the operations here compute.

    Args:
        impl: see plans.implementation.

    Raises:
        ValueError: an unknown impl.
    """
    if not uses_kernels(impl, on_cuda=x.is_cuda):
        return None
    from kernels import torch_ops

    return torch_ops


def gelu(x: Float[Tensor, "*b f"], impl: str = "auto") -> Float[Tensor, "*b f"]:
    """``x * Phi(x)`` with the exact normal distribution function. Reference: arXiv 1606.08415."""
    if kernels := kernel_door(impl, x):
        return kernels.gelu(x)
    return F.gelu(x, approximate="none")


def swiglu(x: Float[Tensor, "*b f2"], impl: str = "auto") -> Float[Tensor, "*b f"]:
    """``silu(gate) * value`` where x holds gate and value side by side. Reference: arXiv 2002.05202, eq. 6."""
    if kernels := kernel_door(impl, x):
        return kernels.swiglu(x)
    gate, value = x.chunk(2, dim=-1)
    return F.silu(gate) * value


def cross_entropy(logits: Float[Tensor, "b t v"], targets: Int[Tensor, "b t"]) -> Float[Tensor, ""]:
    """Mean negative log-likelihood of the targets, in nats per token.

    Raises:
        ValueError: the shapes disagree.
        IndexError: a target is no token id.
    """
    if targets.shape != logits.shape[:-1]:
        raise ValueError(f"targets: expected shape {tuple(logits.shape[:-1])}, got {tuple(targets.shape)}")
    logits = at_least_float32(logits)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten().long(), ignore_index=torch.iinfo(torch.int64).min)
