"""Division of sequences over context-parallel ranks: the sequences in each rank's part, and their validation.

Sequences follow each other without gaps and are cut into one equal part per rank, at any token. Only the first and the
last sequence of a part may continue on other ranks. Over its last sequence, a rank applies an affine map to the state
it receives, S -> M S + S_local. Maps compose, so states can be gathered, passed from rank to rank, or scanned in a
logarithmic number of rounds.

A rank's sequences are computed with array operations of numpy or jax.numpy, because in a program that all ranks run,
rank and offsets are unknown at compile time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from diptych.plans.context.exchange import check_exchange


class LocalSequences(NamedTuple):
    """The sequences in one rank's part. An empty sequence at a boundary of parts belongs to no rank."""

    cu_seqlens: Any
    """Start offsets of the sequences within the part, padded with the part's end. [N + 1] int32"""
    first_sequence: Any
    """Global number of the part's first sequence."""
    num_sequences: Any
    """Number of sequences in the part."""
    pre_num_ranks: Any
    """Number of previous ranks that hold tokens of the part's first sequence."""
    post_num_ranks: Any
    """Number of following ranks that hold tokens of the part's last sequence."""
    pre_num_tokens: Any
    """Number of tokens of the part's first sequence before the part."""


@dataclass(frozen=True)
class FLACPContext:
    """A rank's part of the sequences and its exchange options, built by ``context_parallel.build_cp_context``.

    Counts are Python integers in PyTorch, and arrays of shape [] in JAX, where all ranks run one program.
    """

    group: Any
    """The context-parallel ranks: a process group (PyTorch) or the name of a mesh axis (JAX)."""
    cu_seqlens: Any
    """Start offsets of the rank's sequences. [n + 1] int32; in JAX [N + 1], padded with the part's end"""
    cu_seqlens_cpu: Any
    """The same offsets as a numpy array; None in JAX, where one program serves all ranks."""
    is_first_rank: Any
    """True if the rank's first sequence starts on that rank."""
    is_last_rank: Any
    """True if the rank's last sequence ends on that rank."""
    pre_num_ranks: Any
    """Number of previous ranks that hold tokens of the rank's first sequence."""
    post_num_ranks: Any
    """Number of following ranks that hold tokens of the rank's last sequence."""
    num_sequences: Any
    """Number of sequences in the part."""
    first_sequence: Any
    """Global number of the part's first sequence."""
    rank: Any
    """Context-parallel rank."""
    size: int
    """Number of context-parallel ranks."""
    part_length: int | None
    """Tokens per rank; None if the offsets are traced."""
    pre_num_tokens: Any
    """Number of tokens of the part's first sequence before the part."""
    conv1d_kernel_size: int | None = None
    """Taps of the short convolution."""
    pre_num_conv_tokens: Any = None
    """Number of tokens before the part that the convolution reads; None without a convolution."""
    cp_exchange: str = "all_gather"
    cp_wire_dtype: str | None = None
    cp_truncate_ranks: int | None = None
    cp_transition_rank: int | None = None
    overlap: bool = True
    """PyTorch: overlap the exchange of states with the computation of outputs, and the exchange of their gradients with
    recomputation in backward; False: run one after the other."""
    by_groups: bool = False
    """JAX: replace permutations by gathers within the group. Needed if some devices of the mesh do not take this branch
    of the program, because on XLA's CPU runtime a permutation waits for every device of the mesh."""
    timeout: float = 600.0
    """PyTorch: seconds that a rank waits for a message. Training sets it to pipeline_timeout."""
    cp_attention_layout: str = "contiguous"
    layer: int | None = None
    """PyTorch, pipelined: number of the layer that receives and sends; None: a call outside of a model."""
    messages: Any = None
    """PyTorch, pipelined: a MicrobatchMessages of reference_torch.context_parallel.wavefront."""
    all_cu_seqlens: Any = None
    """Start offsets of all sequences, and the total length. [N + 1] int32"""

    def of_layer(self, number: int) -> "FLACPContext":
        """Return the context for one layer of a model."""
        return self if self.messages is None else replace(self, layer=number)

    @property
    def goes_through(self) -> Any:
        """True if the part is inside one sequence, so that the state sent to the next rank depends on the received one.

        Otherwise the sent state does not depend on the received one. The received state, which may not be finite, is
        then omitted rather than multiplied by 0.
        """
        return (self.num_sequences == 1) & (self.pre_num_ranks > 0) & (self.post_num_ranks > 0)

    def reach(self, reverse: bool = False) -> Any:
        """Return the number of previous ranks whose tokens the part's initial state depends on.

        Args:
            reverse: count instead the following ranks on which the gradient of the part's final state depends.
        """
        return self.post_num_ranks if reverse else self.pre_num_ranks

    @property
    def is_approximate(self) -> bool:
        """True with an approximate state exchange."""
        return self.cp_truncate_ranks is not None or self.cp_transition_rank is not None


def check_sequences(
    cu_seqlens: Any,
    dtype: str,
    size: int,
    conv1d_kernel_size: int | None = None,
    **exchange: Any,
) -> None:
    """Reject sequences that cannot be divided over ranks.

    Args:
        cu_seqlens: start offsets of all sequences, and the total length, as a numpy array; None: traced, not checked.
        dtype: numpy name of the offsets' type.
        size: number of context-parallel ranks.
        conv1d_kernel_size: taps of the short convolution; None: no convolution.
        exchange: see diptych.plans.context.exchange.check_exchange.

    Raises:
        ValueError: an argument is invalid; the message names it.
    """
    if dtype != "int32":
        raise ValueError(f"cu_seqlens: expected int32, got {dtype}")
    kernel = conv1d_kernel_size
    if kernel is not None and (not isinstance(kernel, int) or isinstance(kernel, bool) or kernel < 1):
        raise ValueError(f"conv1d_kernel_size: expected an integer of at least 1, or None, got {kernel!r}")
    check_exchange(**exchange)
    if cu_seqlens is None:
        return
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2:
        raise ValueError(f"cu_seqlens: expected shape [N + 1] of at least [2], got {list(cu_seqlens.shape)}")
    if cu_seqlens[0] != 0:
        raise ValueError(f"cu_seqlens: expected to begin at 0, got {cu_seqlens[0]}")
    if (np.diff(cu_seqlens) < 0).any():
        place = int((np.diff(cu_seqlens) < 0).argmax())
        actual = f"{cu_seqlens[place]} before {cu_seqlens[place + 1]} at {place}"
        raise ValueError(f"cu_seqlens: expected offsets that never decrease, got {actual}")
    if cu_seqlens[-1] < size or cu_seqlens[-1] % size:
        raise ValueError(
            f"cu_seqlens: expected to end at a multiple of the number of ranks, {size}, got {cu_seqlens[-1]}; fill the "
            "last sequence up"
        )


def check_kinds(cu_seqlens: Any, cu_seqlens_cpu: Any, kinds: type | tuple[type, ...], word: str) -> None:
    """Reject offsets that are not arrays, or a copy of another type or shape.

    Args:
        cu_seqlens: offsets given by the caller.
        cu_seqlens_cpu: copy given by the caller; None: no copy.
        kinds: array types of the framework.
        word: name of these types in error messages.

    Raises:
        ValueError: an argument is invalid; the message names it.
    """
    for name, x in (("cu_seqlens", cu_seqlens), ("cu_seqlens_cpu", cu_seqlens_cpu)):
        if not isinstance(x, kinds) and (name == "cu_seqlens" or x is not None):
            raise ValueError(f"{name}: expected {word}, got {type(x).__name__}")
    if cu_seqlens_cpu is not None:
        wanted, actual = ((x.dtype, tuple(x.shape)) for x in (cu_seqlens, cu_seqlens_cpu))
        if wanted != actual:
            raise ValueError(f"cu_seqlens_cpu: expected {wanted[0]} of shape {wanted[1]}, as cu_seqlens, got {actual}")


def check_part(context: Any, shape: tuple[int, ...], cu_seqlens: np.ndarray | None = None, name: str = "q") -> None:
    """Reject an array that does not have the tokens of this rank's part.

    Args:
        context: context of the call.
        shape: shape of an array with tokens on axis 1; other numbers of axes are checked elsewhere.
        cu_seqlens: offsets given to the call; None: not given or traced.
        name: name of the array in error messages.

    Raises:
        ValueError: an argument is invalid; the message names it.
    """
    if not isinstance(context, FLACPContext):
        raise ValueError(f"cp_context: expected what build_cp_context returns, or None, got {type(context).__name__}")
    part = context.part_length
    if part is not None and len(shape) > 1 and shape[1] != part:
        raise ValueError(
            f"{name}: expected T = {part}, this rank's part of {part * context.size} tokens over {context.size} ranks, "
            f"got {shape[1]}"
        )
    own = context.cu_seqlens_cpu
    if cu_seqlens is None or own is None:
        return
    if cu_seqlens.dtype != own.dtype or not np.array_equal(cu_seqlens, own):
        actual = f"{cu_seqlens.tolist()} of {cu_seqlens.dtype}"
        raise ValueError(f"cu_seqlens: expected None or cp_context.cu_seqlens, {own.tolist()}, got {actual}")


def implementation_for(impl: str, context: FLACPContext | None) -> str:
    """Return the implementation for a context; an approximate state exchange needs the reference.

    Raises:
        ValueError: impl is "triton" with an approximate state exchange.
    """
    if context is None or not context.is_approximate:
        return impl
    if impl == "triton":
        raise ValueError(
            "impl: expected 'auto' or 'reference' with a cp_context that approximates states, got 'triton'"
        )
    return "reference"


def check_taps(context: FLACPContext, taps: int) -> None:
    """Reject a convolution whose number of taps differs from the context's.

    Raises:
        ValueError: the numbers differ.
    """
    if context.conv1d_kernel_size not in (None, taps):
        raise ValueError(
            f"weight: expected {context.conv1d_kernel_size} taps, the context's conv1d_kernel_size, got {taps}"
        )


def check_context(context: FLACPContext | None, unfit: Mapping[str, Any], positions: Any) -> None:
    """Reject arguments of a model that are not supported with context parallelism.

    Args:
        context: context of the call; None: no context parallelism, nothing is rejected.
        unfit: arguments that must be None with a context, by name.
        positions: positions of the tokens within their sequences; None: not given.

    Raises:
        ValueError: an argument is invalid; the message names it.
    """
    if context is None:
        return
    for name, value in unfit.items():
        if value is not None:
            raise ValueError(f"{name}: expected None with a cp_context, which says where sequences begin, got one")
    if positions is None:
        raise ValueError("positions: expected those of the part's tokens with a cp_context, got None")


def check_shared(sequences: int, length: int, size: int) -> None:
    """Reject a microbatch whose tokens do not divide over the context-parallel ranks.

    Args:
        sequences: sequences of the microbatch.
        length: tokens per sequence.
        size: number of context-parallel ranks.

    Raises:
        ValueError: the tokens do not divide; the message names the setting.
    """
    if sequences * length % size:
        raise ValueError(
            f"context_parallel_size: expected a divisor of a microbatch's {sequences} x {length} tokens, got {size}; "
            "change seq_length or micro_batch_size"
        )


class ConcatenatedBatch(NamedTuple):
    """Concatenated sequences of a batch; rank r of R takes the tokens r L / R .. (r + 1) L / R."""

    tokens: Any
    """Token ids. [..., 1, L]"""
    targets: Any
    """Target ids. [..., 1, L]"""
    samples: Any
    """Number of each token's sequence. [..., 1, L]"""
    positions: Any
    """Position of each token within its sequence, equal for all leading axes. [L]"""
    cu_seqlens: Any
    """Start offsets of the sequences or documents, and the total length. [..., N + 1] int32"""


def concatenate_sequences(
    tokens: Any, targets: Any, samples: Any, document_starts: Any = None, xp: Any = np
) -> ConcatenatedBatch:
    """Concatenate the sequences of each batch.

    Args:
        tokens: token ids. [..., B, T]
        targets: target ids. [..., B, T]
        samples: numbers of the sequences. [..., B]
        document_starts: see diptych.plans.model.documents; None: each sequence is one document. [..., B, N]
        xp: array module, numpy or jax.numpy.
    """
    *lead, batch, length = tokens.shape
    starts = xp.zeros((*lead, batch, 1), xp.int32) if document_starts is None else document_starts
    starts = (starts + xp.arange(0, batch * length, length, dtype=xp.int32)[:, None]).reshape(*lead, -1)
    end = xp.full((*lead, 1), batch * length, xp.int32)
    return ConcatenatedBatch(
        tokens=tokens.reshape(*lead, 1, -1),
        targets=targets.reshape(*lead, 1, -1),
        samples=xp.repeat(samples, length, axis=-1)[..., None, :],
        positions=xp.tile(xp.arange(length, dtype=xp.int32), batch),
        cu_seqlens=xp.concatenate([starts, end], axis=-1).astype(xp.int32),
    )


def local_sequences(cu_seqlens: Any, rank: Any, part_length: int, xp: Any = np) -> LocalSequences:
    """Return the sequences in one rank's part.

    Args:
        cu_seqlens: start offsets of all sequences, and the total length. [N + 1] int32
        rank: context-parallel rank.
        part_length: tokens per part.
        xp: array module, numpy or jax.numpy.
    """
    begin = rank * part_length
    end = begin + part_length
    first = xp.searchsorted(cu_seqlens[1:], begin, side="right")
    last = xp.searchsorted(cu_seqlens[:-1], end, side="left") - 1
    own = xp.minimum(first + xp.arange(len(cu_seqlens)), last + 1)
    starts = xp.clip(cu_seqlens[own], begin, end) - begin
    return LocalSequences(
        cu_seqlens=starts.astype(xp.int32),
        first_sequence=first,
        num_sequences=last - first + 1,
        pre_num_ranks=rank - cu_seqlens[first] // part_length,
        post_num_ranks=(cu_seqlens[last + 1] - 1) // part_length - rank,
        pre_num_tokens=begin - xp.minimum(cu_seqlens[first], begin),
    )


def halo_sizes(part_length: int, conv1d_kernel_size: int) -> list[int]:
    """Return the number of tokens that a part's convolution reads from each previous rank, the nearest first.

    Args:
        part_length: tokens per part.
        conv1d_kernel_size: taps W; the convolution reads W - 1 tokens before the part.
    """
    wanted = conv1d_kernel_size - 1
    return [min(part_length, wanted - begin) for begin in range(0, wanted, part_length)]
