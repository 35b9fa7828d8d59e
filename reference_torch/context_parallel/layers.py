"""Short convolution and softmax attention over sequences that are split over ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from diptych.plans.context.sequences import FLACPContext, check_part, check_taps, halo_sizes
from reference_torch.autograd import differentiable_once, refuse_transformed
from reference_torch.context_parallel.exchange import context_for, receive_part, send_part, wait_for_part
from reference_torch.context_parallel.wavefront import is_pipelined, receive_from_previous, send_to_next
from reference_torch.context_parallel.zigzag import zigzag_attention
from reference_torch.groups import sum_over, wait_for
from reference_torch.ops import masked_attention, short_convolution


def cp_short_convolution(
    x: Float[Tensor, "b t c"], weight: Float[Tensor, "c w"], context: FLACPContext
) -> Float[Tensor, "b t c"]:
    """Run ops.short_convolution on this rank's part; earlier ranks send the tokens before the part.

    Args:
        x: inputs of the part. [1, T, C]
        weight: coefficients of each channel; the last is that of the token itself. [C, W]
        context: context of the rank.

    Returns:
        Outputs of the part in the type of x. [1, T, C]

    Raises:
        ValueError: x or weight does not fit the context; nothing is sent.
        NotImplementedError: torch.func transforms an argument.
    """
    refuse_transformed("cp_short_convolution", "use torch.autograd", x, weight)
    check_part(context, x.shape, name="x")
    check_taps(context, weight.shape[1])
    context = context_for(context, x)
    num_earlier = weight.shape[1] - 1
    _, starts = _sequences(context, x.device)
    before = torch.arange(x.shape[1], device=x.device) + context.rank * x.shape[1] - starts
    if not num_earlier:
        joined = x
    elif is_pipelined(context):
        joined = _prepend_tokens(x, num_earlier, context)
    else:
        joined = torch.cat([_Halo.apply(x, context, weight.shape[1]), x], dim=1)
    return short_convolution(joined, weight, F.pad(before, (num_earlier, 0)))[:, num_earlier:]


def cp_attention(
    q: Float[Tensor, "b t h d"],
    k: Float[Tensor, "b t g d"],
    v: Float[Tensor, "b t g e"],
    context: FLACPContext,
    fused: bool = False,
) -> Float[Tensor, "b t h e"]:
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
        NotImplementedError: torch.func transforms an argument.
    """
    refuse_transformed("cp_attention", "use torch.autograd", q, k, v)
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_part(context, x.shape, name=name)
    context = context_for(context, q)
    first = 0
    if is_pipelined(context):
        k, v, first = _prepend_keys_and_values(k, v, context)
    else:
        k, v = (_GatherParts.apply(x, context) for x in (k, v))
    if context.cp_attention_layout == "zigzag":
        return zigzag_attention(q, k, v, context, fused)
    positions, starts = _sequences(context, q.device)
    keys = torch.arange(k.shape[1], device=q.device) + first
    return masked_attention(q, k, v, (keys >= starts[:, None]) & (keys <= positions[:, None]), fused)


def _sequences(context: FLACPContext, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the global position of each token of the part, and that of the first token of its sequence. [T] each."""
    cu_seqlens = context.cu_seqlens.to(device)
    assert context.part_length is not None, "PyTorch contexts know the length of the part"
    tokens = torch.arange(context.part_length, device=device)
    own = torch.searchsorted(cu_seqlens[1:].contiguous(), tokens, right=True)
    starts = cu_seqlens[own] - torch.where(own == 0, context.pre_num_tokens, 0)
    return tokens + context.rank * len(tokens), starts + context.rank * len(tokens)


def _prepend_tokens(x: Tensor, num_earlier: int, context: FLACPContext) -> Tensor:
    """Prepend the tokens before x, pipelined; they are zeros if the first sequence begins on this rank."""
    kind = "tokens of a convolution"
    before = x.new_zeros(x.shape[0], num_earlier, *x.shape[2:])
    if not context.is_first_rank:
        before = receive_from_previous(kind, before, x, context)
    joined = torch.cat([before, x], dim=1)
    if context.is_last_rank:
        return joined
    (joined,) = send_to_next(kind, joined[:, -num_earlier:], context, joined)
    return joined


def _prepend_keys_and_values(k: Tensor, v: Tensor, context: FLACPContext) -> tuple[Tensor, Tensor, int]:
    """Return keys and values from the beginning of the first sequence, pipelined, and their first global position."""
    kind = "keys and values"
    before = context.pre_num_tokens
    joined = torch.cat([k, v], dim=-1)
    if not context.is_first_rank:
        earlier = joined.new_empty(joined.shape[0], before, *joined.shape[2:])
        joined = torch.cat([receive_from_previous(kind, earlier, joined, context), joined], dim=1)
    if not context.is_last_rank:
        begin = before + int(context.cu_seqlens_cpu[-2]) if context.num_sequences > 1 else 0
        (joined,) = send_to_next(kind, joined[:, begin:], context, joined)
    k_, v_ = joined.split((k.shape[3], v.shape[3]), dim=-1)
    return k_, v_, context.rank * k.shape[1] - before


class _Halo(torch.autograd.Function):
    """The tokens before the part that a convolution reads, or zeros; backward returns their gradients."""

    @staticmethod
    def forward(ctx, x, context, kernel_size):
        ctx.context = context
        ctx.shape = x.shape
        ctx.sizes = halo_sizes(x.shape[1], kernel_size)
        received = [x.new_zeros(x.shape[0], size, *x.shape[2:]) for size in ctx.sizes]
        sent = [x[:, x.shape[1] - size :].contiguous() for size in ctx.sizes]
        _exchange_with_neighbours(sent, received, context, reverse=False)
        return torch.cat(received[::-1], dim=1)

    @staticmethod
    @differentiable_once
    def backward(ctx, d_halo):  # pyright: ignore[reportIncompatibleMethodOverride]
        parts = d_halo.split(ctx.sizes[::-1], dim=1)[::-1]
        received = [torch.zeros_like(part) for part in parts]
        _exchange_with_neighbours([part.contiguous() for part in parts], received, ctx.context, reverse=True)
        d_x = d_halo.new_zeros(ctx.shape)
        for part in received:
            d_x[:, d_x.shape[1] - part.shape[1] :] += part
        return d_x, None, None


def _exchange_with_neighbours(sent: list[Tensor], received: list[Tensor], context: FLACPContext, reverse: bool) -> None:
    """Send one part to each of the next ranks, and receive one part from each of the previous ranks."""
    position = context.size - 1 - context.rank if reverse else context.rank
    works = []
    for distance, (sent_part, received_part) in enumerate(zip(sent, received, strict=True), 1):
        if position + distance < context.size:
            works.append(send_part(sent_part, position + distance, context, reverse))
        if position >= distance:
            works.append(receive_part(received_part, position - distance, context, reverse))
    for work in works:
        wait_for_part(work, context)


class _GatherParts(torch.autograd.Function):
    """The concatenated parts of all ranks; the gradient of a part is the sum over all ranks."""

    @staticmethod
    def forward(ctx, x, context):
        ctx.context = context
        if context.size == 1:
            return x.view_as(x)
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(context.size)]
        work = dist.all_gather(parts, x.contiguous(), group=context.group, async_op=True)
        wait_for(work, "the keys and values of all ranks", context.timeout)
        return torch.cat(parts, dim=1)

    @staticmethod
    @differentiable_once
    def backward(ctx, d_all):  # pyright: ignore[reportIncompatibleMethodOverride]
        context = ctx.context
        name = "the gradients of keys and values"
        d_all = sum_over(d_all.contiguous(), context.group, name, context.timeout)
        return d_all.chunk(context.size, dim=1)[context.rank], None
