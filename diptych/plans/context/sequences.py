"""Context parallelism before a tensor exists: what a rank holds of sequences split over ranks, and how states travel.

Sequences lie end to end and are cut into as many equal parts as there are ranks, wherever that cuts them. A part begins
in the middle of a sequence, or not, and ends in one, or not; what lies between is whole. Over the last sequence of its
part a rank turns the state it is given into the next rank's by an affine map, S -> M S + H, and maps compose; so states
reach all ranks at once, along a chain, or in a logarithm of rounds.

The rank's view of the sequences is made of array operations alone, with numpy or with jax.numpy: in a program that all
ranks run, the rank and the offsets are not known before it runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from diptych.plans.context.exchange import check_exchange


class LocalSequences(NamedTuple):
    """What one rank holds. An empty sequence between two parts, or before or after all, is on no rank."""

    cu_seqlens: Any
    """Where its sequences begin within its part, and the part's end; as long as the offsets of all, filled up with the
    end. [N + 1] int32"""
    first_sequence: Any
    """Number of its first sequence among all."""
    num_sequences: Any
    pre_num_ranks: Any
    """Ranks before that hold a part of its first sequence."""
    post_num_ranks: Any
    """Ranks after that hold a part of its last sequence."""
    pre_num_tokens: Any
    """Tokens of its first sequence that lie before its part."""


@dataclass(frozen=True)
class FLACPContext:
    """What an operation on one rank's part has to know; made by ``context_parallel.build_cp_context``.

    In PyTorch all but the group and tensors are numbers; in JAX, where one program serves all ranks, arrays [].
    """

    group: Any
    """The ranks: a process group, or the name of a mesh axis."""
    cu_seqlens: Any
    """Of the rank's own tokens. [n + 1] int32; in JAX as long as the offsets of all, filled up with the end"""
    cu_seqlens_cpu: Any
    """The same as numpy's array; None where it is traced."""
    is_first_rank: Any
    """The first sequence begins here."""
    is_last_rank: Any
    """The last sequence ends here."""
    pre_num_ranks: Any
    """Ranks before that hold a part of the first sequence."""
    post_num_ranks: Any
    """Ranks after that hold a part of the last sequence."""
    num_sequences: Any
    first_sequence: Any
    """Number of the first among all."""
    rank: Any
    size: int
    part_length: int | None
    """Tokens of every rank; None where the offsets are traced."""
    pre_num_tokens: Any
    """Tokens of the first sequence that lie before the part."""
    conv1d_kernel_size: int | None = None
    pre_num_conv_tokens: Any = None
    """Tokens before the part that a convolution still reads; None without a kernel."""
    cp_exchange: str = "all_gather"
    cp_wire_dtype: str | None = None
    cp_truncate_ranks: int | None = None
    cp_transition_rank: int | None = None
    overlap: bool = True
    """PyTorch: states travel while outputs are computed, and their gradients while backward computes again what it did
    not keep; off: one waits for the other."""
    by_groups: bool = False
    """JAX, where not all devices of the mesh take this branch of the program: what goes from rank to rank is gathered
    by all of the group, since a permutation waits for every device of the mesh on XLA's CPU runtime."""
    timeout: float = 600.0
    """PyTorch: seconds a rank waits for what another sends. Training sets it to pipeline_timeout."""
    cp_attention_layout: str = "contiguous"
    layer: int | None = None
    """PyTorch, pipelined: the layer that takes and hands on; None: a call by hand."""
    handing: Any = None
    """There: this microbatch on its way; a Handing of reference_torch.context_parallel.wavefront."""
    all_cu_seqlens: Any = None
    """Where all sequences begin, and the end of all. [N + 1] int32"""

    def of_layer(self, number: int) -> "FLACPContext":
        """The same for one layer of a model."""
        return self if self.handing is None else replace(self, layer=number)

    @property
    def goes_through(self) -> Any:
        """The part lies within one sequence, which begins before it and ends after it: its map passes a state through.

        Elsewhere a part passes on a state of its own, whatever it began with. What it began with is then left out, not
        multiplied by 0: it may not be finite.
        """
        return (self.num_sequences == 1) & (self.pre_num_ranks > 0) & (self.post_num_ranks > 0)

    def reach(self, reverse: bool = False) -> Any:
        """Return how many ranks before the part hold tokens that its first state depends on.

        Args:
            reverse: ranks after it, whose gradients that of its last state depends on.
        """
        return self.post_num_ranks if reverse else self.pre_num_ranks

    @property
    def is_approximate(self) -> bool:
        """Whether states come otherwise than they were."""
        return self.cp_truncate_ranks is not None or self.cp_transition_rank is not None


def check_sequences(
    cu_seqlens: Any,
    dtype: str,
    size: int,
    conv1d_kernel_size: int | None = None,
    **exchange: Any,
) -> None:
    """Refuse sequences that cannot be split over ranks.

    Args:
        cu_seqlens: offsets of all sequences, as numpy's array; None where JAX traces them: they are not looked at.
        dtype: theirs, by numpy's name.
        size: number of ranks.
        conv1d_kernel_size: taps of the short convolution.
        exchange: see diptych.plans.context.exchange.check_exchange.

    Raises:
        ValueError: naming the argument, what was expected, what came.
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
        came = f"{cu_seqlens[place]} before {cu_seqlens[place + 1]} at {place}"
        raise ValueError(f"cu_seqlens: expected offsets that never decrease, got {came}")
    if cu_seqlens[-1] < size or cu_seqlens[-1] % size:
        raise ValueError(
            f"cu_seqlens: expected to end at a multiple of the number of ranks, {size}, got {cu_seqlens[-1]}; fill the "
            "last sequence up"
        )


def check_kinds(cu_seqlens: Any, cu_seqlens_cpu: Any, kinds: type | tuple[type, ...], word: str) -> None:
    """Refuse offsets that are no arrays, or a copy that cannot be one.

    Args:
        cu_seqlens: as given.
        cu_seqlens_cpu: as given; None: no copy.
        kinds: a framework's arrays.
        word: for them.
    """
    for name, x in (("cu_seqlens", cu_seqlens), ("cu_seqlens_cpu", cu_seqlens_cpu)):
        if not isinstance(x, kinds) and (name == "cu_seqlens" or x is not None):
            raise ValueError(f"{name}: expected {word}, got {type(x).__name__}")
    if cu_seqlens_cpu is not None:
        wanted, came = ((x.dtype, tuple(x.shape)) for x in (cu_seqlens, cu_seqlens_cpu))
        if wanted != came:
            raise ValueError(f"cu_seqlens_cpu: expected what cu_seqlens is, {wanted[0]} of {wanted[1]}, got {came}")


def check_part(context: Any, shape: tuple[int, ...], cu_seqlens: np.ndarray | None = None, name: str = "q") -> None:
    """Refuse arrays that are not this rank's part.

    Args:
        context: of the call.
        shape: of an array with tokens on its second axis; another number of axes is the array's own fault.
        cu_seqlens: as given to the call, where it is known.
        name: of the array.

    Raises:
        ValueError: naming the argument, what was expected, what came.
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
        came = f"{cu_seqlens.tolist()} of {cu_seqlens.dtype}"
        raise ValueError(f"cu_seqlens: expected None or cp_context.cu_seqlens, {own.tolist()}, got {came}")


def implementation_for(impl: str, context: FLACPContext | None) -> str:
    """Who computes; kernels pass exact states on.

    Raises:
        ValueError: kernels are asked for with a context that approximates.
    """
    if context is None or not context.is_approximate:
        return impl
    if impl == "triton":
        raise ValueError(
            "impl: expected 'auto' or 'reference' with a cp_context that approximates states, got 'triton'"
        )
    return "reference"


def check_taps(context: FLACPContext, taps: int) -> None:
    """Refuse a convolution that the context was not made for."""
    if context.conv1d_kernel_size not in (None, taps):
        raise ValueError(
            f"weight: expected {context.conv1d_kernel_size} taps, the context's conv1d_kernel_size, got {taps}"
        )


def check_context(context: FLACPContext | None, unfit: Mapping[str, Any], positions: Any) -> None:
    """Refuse what a model cannot do over ranks.

    Args:
        context: None: the model has whole sequences, and nothing is refused.
        unfit: arguments that do not go with a context.
        positions: of the tokens within their sequence; None: they were not given.

    Raises:
        ValueError: naming the argument.
    """
    if context is None:
        return
    for name, value in unfit.items():
        if value is not None:
            raise ValueError(f"{name}: expected None with a cp_context, which says where sequences begin, got one")
    if positions is None:
        raise ValueError("positions: expected those of the part's tokens with a cp_context, got None")


def check_shared(sequences: int, length: int, size: int) -> None:
    """Refuse a microbatch that ranks cannot share.

    Args:
        sequences: of the microbatch.
        length: tokens of each.
        size: number of ranks.

    Raises:
        ValueError: naming the setting.
    """
    if sequences * length % size:
        raise ValueError(
            f"context_parallel_size: expected a divisor of a microbatch's {sequences} x {length} tokens, got {size}; "
            "change seq_length or micro_batch_size"
        )


class EndToEnd(NamedTuple):
    """Sequences laid end to end, of which every rank takes its part: tokens r L / R .. (r + 1) L / R."""

    tokens: Any
    """[..., 1, L]"""
    targets: Any
    """[..., 1, L]"""
    samples: Any
    """Number of each token's sequence. [..., 1, L]"""
    positions: Any
    """Of each token within its sequence, the same whatever the leading axes. [L]"""
    cu_seqlens: Any
    """Where what is kept apart begins, and the end of all. [..., N + 1] int32"""


def end_to_end(tokens: Any, targets: Any, samples: Any, document_starts: Any = None, xp: Any = np) -> EndToEnd:
    """Lay the sequences of a batch, or of each of several, end to end.

    Args:
        tokens, targets: [..., B, T]
        samples: numbers of the sequences. [..., B]
        document_starts: see diptych.plans.model.documents; None: each sequence is one. [..., B, N]
        xp: the module to compute with, numpy or jax.numpy.
    """
    *lead, batch, length = tokens.shape
    starts = xp.zeros((*lead, batch, 1), xp.int32) if document_starts is None else document_starts
    starts = (starts + xp.arange(0, batch * length, length, dtype=xp.int32)[:, None]).reshape(*lead, -1)
    end = xp.full((*lead, 1), batch * length, xp.int32)
    return EndToEnd(
        tokens=tokens.reshape(*lead, 1, -1),
        targets=targets.reshape(*lead, 1, -1),
        samples=xp.repeat(samples, length, axis=-1)[..., None, :],
        positions=xp.tile(xp.arange(length, dtype=xp.int32), batch),
        cu_seqlens=xp.concatenate([starts, end], axis=-1).astype(xp.int32),
    )


def local_sequences(cu_seqlens: Any, rank: Any, part_length: int, xp: Any = np) -> LocalSequences:
    """What one rank holds of sequences that lie end to end.

    Args:
        cu_seqlens: where sequences begin, and the end of all. [N + 1] int32
        rank: whose part.
        part_length: tokens of a part.
        xp: the module to compute with, numpy or jax.numpy.
    """
    begin = rank * part_length
    end = begin + part_length
    first = xp.searchsorted(cu_seqlens[1:], begin, side="right")
    last = xp.searchsorted(cu_seqlens[:-1], end, side="left") - 1
    own = xp.minimum(first + xp.arange(len(cu_seqlens)), last + 1)
    offsets = xp.clip(cu_seqlens[own], begin, end) - begin
    return LocalSequences(
        cu_seqlens=offsets.astype(xp.int32),
        first_sequence=first,
        num_sequences=last - first + 1,
        pre_num_ranks=rank - cu_seqlens[first] // part_length,
        post_num_ranks=(cu_seqlens[last + 1] - 1) // part_length - rank,
        pre_num_tokens=begin - xp.minimum(cu_seqlens[first], begin),
    )


def halo_sizes(part_length: int, conv1d_kernel_size: int) -> list[int]:
    """Of the tokens before a part that a convolution reads: how many lie on the rank before, on the one before it, ...

    Args:
        part_length: tokens of a part.
        conv1d_kernel_size: taps W; W - 1 tokens are read.
    """
    wanted = conv1d_kernel_size - 1
    return [min(part_length, wanted - begin) for begin in range(0, wanted, part_length)]
