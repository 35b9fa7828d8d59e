"""What a rank knows of sequences that ranks share, from the offsets of all; states of its first sequence."""

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

KNOWN = ("group", "cu_seqlens_cpu", "size", "part_length", "conv1d_kernel_size", *OPTIONS)
KNOWN += ("overlap", "by_groups", "timeout", "layer", "handing")
"""What a program is made for, of a context; all else differs by rank, and is arrays in it like any other."""

jax.tree_util.register_dataclass(
    FLACPContext, [field.name for field in fields(FLACPContext) if field.name not in KNOWN], list(KNOWN)
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
    """What each rank holds of sequences split over the devices along a mesh axis; inside jax.shard_map.

    Args:
        cu_seqlens: where all sequences begin, and the end of the last; the same on every rank. [N + 1] int32
        group: name of the mesh axis.
        conv1d_kernel_size: taps of a short convolution that will run on the part.
        cu_seqlens_cpu: the same, not traced; without it traced offsets are not looked at.
        cp_exchange: how states travel, one of diptych.plans.context.exchange.CP_EXCHANGES.
        cp_wire_dtype: in which type; None: their own. One of diptych.plans.context.exchange.WIRE_DTYPES.
        cp_truncate_ranks: ranks ahead that a state reaches, with ring; None: all. See approximation.
        cp_transition_rank: rank of what a map is sent as, beside a diagonal, with all_gather; None: the map. The same.
        cp_attention_layout: layout of attention's queries, one of diptych.plans.context.zigzag.ATTENTION_LAYOUTS.

    Raises:
        ValueError: naming the argument, what was expected, what came. Nothing is sent.
    """
    check_kinds(cu_seqlens, cu_seqlens_cpu, (Array, np.ndarray), "an array")
    known = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
    values = None if isinstance(known, Tracer) else np.asarray(known)
    try:
        size, rank = lax.axis_size(group), lax.axis_index(group)
    except (NameError, TypeError):
        raise ValueError(f"group: expected an axis of the shard_map or pmap around, got {group!r}") from None
    given = cp_exchange, cp_wire_dtype, cp_truncate_ranks, cp_transition_rank, cp_attention_layout
    exchange: dict[str, Any] = dict(zip(OPTIONS, given, strict=True))
    check_sequences(values, known.dtype.name, size, conv1d_kernel_size, **exchange)
    offsets = jnp.asarray(known)
    part: Any = offsets[-1] // size if values is None else int(values[-1]) // size
    local = local_sequences(offsets, rank, part, jnp)
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
        all_cu_seqlens=offsets,
    )


def compress_h0(h0: Float[Array, "n h k v"] | None, context: FLACPContext) -> Float[Array, "m h k v"] | None:
    """Of the states a rank's sequences begin with the first, the only one that can come from another rank. [1, ...]"""
    return h0 if h0 is None else h0[:1]


def expand_h0(h0: Float[Array, "m h k v"] | None, context: FLACPContext) -> Float[Array, "n h k v"] | None:
    """The inverse of compress_h0, the other sequences beginning with 0. [n, ...]"""
    if h0 is None:
        return h0
    return jnp.zeros((len(context.cu_seqlens) - 1, *h0.shape[1:]), h0.dtype).at[:1].set(h0)
