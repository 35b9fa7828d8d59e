"""The context of a rank: its part of the sequences that are split over ranks."""

from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jaxtyping import Float

from diptych.plans.context.exchange import OPTIONS
from diptych.plans.context.sequences import FLACPContext, check_kinds, check_sequences, local_sequences

STATIC_FIELDS = ("group", "cu_seqlens_cpu", "size", "part_length", "conv1d_kernel_size", *OPTIONS)
STATIC_FIELDS += ("overlap", "by_groups", "timeout", "layer", "messages")
"""Static fields of a context; the other fields are arrays, whose values differ between ranks."""

jax.tree_util.register_dataclass(
    FLACPContext, [field.name for field in fields(FLACPContext) if field.name not in STATIC_FIELDS], list(STATIC_FIELDS)
)


def build_cp_context(
    cu_seqlens: Array | np.ndarray,
    group: str,
    conv1d_kernel_size: int | None = None,
    cu_seqlens_cpu: np.ndarray | None = None,
    *,
    cp_exchange: str = "all_gather",
    cp_wire_dtype: str | None = None,
    cp_truncate_ranks: int | None = None,
    cp_transition_rank: int | None = None,
    cp_attention_layout: str = "contiguous",
) -> FLACPContext:
    """Return the context of this rank for sequences that are split along a mesh axis, inside jax.shard_map.

    Args:
        cu_seqlens: offsets of all sequences, and the end; the same on every rank. [N + 1] int32
        group: name of the mesh axis.
        conv1d_kernel_size: number of coefficients per channel of a short convolution that runs on the part.
        cu_seqlens_cpu: the same offsets, not traced; None: traced offsets are not checked.
        cp_exchange: algorithm of the state exchange, one of diptych.plans.context.exchange.CP_EXCHANGES.
        cp_wire_dtype: type of states in messages, one of diptych.plans.context.exchange.WIRE_DTYPES; None: their own.
        cp_truncate_ranks: with ring, number of ranks that a state reaches (plans/context/approximation.py); None: all.
        cp_transition_rank: with all_gather, rank of the approximation of M that is sent; None: M itself.
        cp_attention_layout: ranks that compute attention, one of diptych.plans.context.zigzag.ATTENTION_LAYOUTS.

    Raises:
        ValueError: an argument has a wrong type or value; nothing is sent.
    """
    check_kinds(cu_seqlens, cu_seqlens_cpu, (Array, np.ndarray), "an array")
    known = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
    values = None if isinstance(known, Tracer) else np.asarray(known)
    size, rank = _size_and_rank(group)
    option_values = cp_exchange, cp_wire_dtype, cp_truncate_ranks, cp_transition_rank, cp_attention_layout
    exchange: dict[str, Any] = dict(zip(OPTIONS, option_values, strict=True))
    check_sequences(values, known.dtype.name, size, conv1d_kernel_size, **exchange)
    all_cu_seqlens = jnp.asarray(known)
    part: Any = all_cu_seqlens[-1] // size if values is None else int(values[-1]) // size
    local = local_sequences(all_cu_seqlens, rank, part, jnp)
    return FLACPContext(
        group=group,
        cu_seqlens=local.cu_seqlens,
        cu_seqlens_cpu=None,
        is_first_rank=local.pre_num_ranks == 0,
        is_last_rank=local.post_num_ranks == 0,
        pre_num_ranks=local.pre_num_ranks,
        post_num_ranks=local.post_num_ranks,
        num_sequences=local.num_sequences,
        first_sequence=local.first_sequence,
        rank=rank,
        size=size,
        part_length=None if values is None else part,
        pre_num_tokens=local.pre_num_tokens,
        conv1d_kernel_size=conv1d_kernel_size,
        pre_num_conv_tokens=conv1d_kernel_size and jnp.minimum(conv1d_kernel_size - 1, local.pre_num_tokens),
        **exchange,
        all_cu_seqlens=all_cu_seqlens,
    )


def _size_and_rank(group: str) -> tuple[int, Array]:
    """Return the size of a mesh axis and the index of this rank.

    Raises:
        ValueError: no shard_map or pmap around this call has such an axis.
    """
    try:
        return lax.axis_size(group), lax.axis_index(group)
    except (NameError, TypeError):
        raise ValueError(
            f"group: expected an axis of the shard_map or pmap around, got {group!r}; call build_cp_context in it"
        ) from None


def compress_h0(h0: Float[Array, "n h k v"] | None, context: FLACPContext) -> Float[Array, "m h k v"] | None:
    """Return the initial state of a rank's first sequence, the only one that can come from another rank.

    Args:
        h0: initial states of the rank's sequences. [n, HV, K, V]
        context: context of the rank.

    Returns:
        [1, HV, K, V]
    """
    return h0 if h0 is None else h0[:1]


def expand_h0(h0: Float[Array, "m h k v"] | None, context: FLACPContext) -> Float[Array, "n h k v"] | None:
    """Return initial states of a rank's sequences from that of the first; the others are 0.

    Args:
        h0: initial state of the first sequence. [1, HV, K, V]
        context: context of the rank.

    Returns:
        [n, HV, K, V]
    """
    if h0 is None:
        return h0
    return jnp.zeros((len(context.cu_seqlens) - 1, *h0.shape[1:]), h0.dtype).at[:1].set(h0)
