"""The context of a rank: its part of the sequences that are split over ranks."""

from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed import ProcessGroup

from diptych.plans.context.exchange import OPTIONS, PIPELINED
from diptych.plans.context.sequences import FLACPContext, check_kinds, check_sequences, local_sequences
from reference_torch.context_parallel.wavefront import MicrobatchMessages


def build_cp_context(
    cu_seqlens: Int[Tensor, " n"],
    group: ProcessGroup | None,
    conv1d_kernel_size: int | None = None,
    cu_seqlens_cpu: Int[Tensor, " n"] | None = None,
    *,
    cp_exchange: str = "all_gather",
    cp_wire_dtype: str | None = None,
    cp_truncate_ranks: int | None = None,
    cp_transition_rank: int | None = None,
    cp_attention_layout: str = "contiguous",
) -> FLACPContext:
    """Return the context of this rank for sequences that are split over the ranks of a group.

    Args:
        cu_seqlens: offsets of all sequences, and the end; the same on every rank. [N + 1] int32
        group: ranks, in the order of their parts; None: this process holds all tokens.
        conv1d_kernel_size: number of coefficients per channel of a short convolution that runs on the part.
        cu_seqlens_cpu: cu_seqlens on the host; without it the host waits for the device of cu_seqlens.
        cp_exchange: algorithm of the state exchange, one of diptych.plans.context.exchange.CP_EXCHANGES.
        cp_wire_dtype: type of states in messages, one of diptych.plans.context.exchange.WIRE_DTYPES; None: their own.
        cp_truncate_ranks: with ring, number of ranks that a state reaches (plans/context/approximation.py); None: all.
        cp_transition_rank: with all_gather, rank of the approximation of M that is sent; None: M itself.
        cp_attention_layout: ranks that compute attention, one of diptych.plans.context.zigzag.ATTENTION_LAYOUTS.

    Raises:
        ValueError: an argument has a wrong type or value; nothing is sent.
    """
    check_kinds(cu_seqlens, cu_seqlens_cpu, Tensor, "a tensor")
    if group is not None and not isinstance(group, ProcessGroup):
        raise ValueError(f"group: expected a process group of torch.distributed, or None, got {group!r}")
    known = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
    on_host = known.detach().cpu().numpy()
    size, rank = (1, 0) if group is None else (group.size(), dist.get_rank(group))
    option_values = cp_exchange, cp_wire_dtype, cp_truncate_ranks, cp_transition_rank, cp_attention_layout
    exchange: dict[str, Any] = dict(zip(OPTIONS, option_values, strict=True))
    check_sequences(on_host, str(known.dtype).removeprefix("torch."), size, conv1d_kernel_size, **exchange)
    part = int(on_host[-1]) // size
    local = local_sequences(on_host, rank, part)
    own = local.cu_seqlens[: int(local.num_sequences) + 1]
    return FLACPContext(
        group=group,
        cu_seqlens=torch.from_numpy(own).to(cu_seqlens.device, non_blocking=True),
        cu_seqlens_cpu=own,
        is_first_rank=int(local.pre_num_ranks) == 0,
        is_last_rank=int(local.post_num_ranks) == 0,
        pre_num_ranks=int(local.pre_num_ranks),
        post_num_ranks=int(local.post_num_ranks),
        num_sequences=int(local.num_sequences),
        first_sequence=int(local.first_sequence),
        rank=rank,
        size=size,
        part_length=part,
        pre_num_tokens=int(local.pre_num_tokens),
        conv1d_kernel_size=conv1d_kernel_size,
        pre_num_conv_tokens=conv1d_kernel_size and min(conv1d_kernel_size - 1, int(local.pre_num_tokens)),
        **exchange,
        messages=MicrobatchMessages(group) if cp_exchange == PIPELINED else None,
        all_cu_seqlens=cu_seqlens,
    )


def compress_h0(h0: Float[Tensor, "n h k v"] | None, context: FLACPContext) -> Float[Tensor, "m h k v"] | None:
    """Return the initial state of a rank's first sequence, the only one that can come from another rank.

    Args:
        h0: initial states of the rank's sequences. [n, HV, K, V]
        context: context of the rank.

    Returns:
        [1, HV, K, V]
    """
    return h0 if h0 is None or context.num_sequences == 1 else h0[:1].clone()


def expand_h0(h0: Float[Tensor, "m h k v"] | None, context: FLACPContext) -> Float[Tensor, "n h k v"] | None:
    """Return initial states of a rank's sequences from that of the first; the others are 0.

    Args:
        h0: initial state of the first sequence. [1, HV, K, V]
        context: context of the rank.

    Returns:
        [n, HV, K, V]
    """
    if h0 is None or context.num_sequences == 1:
        return h0
    return torch.cat([h0, h0.new_zeros(context.num_sequences - 1, *h0.shape[1:])])
