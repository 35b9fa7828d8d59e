"""Validation of the arguments of the gated delta rule, and division of sequences into chunks.

Both backends use these functions, so both reject the same calls and form the same chunks.
"""

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from numbers import Real
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np

CHUNK_SIZE = 64
"""Default number of tokens per chunk, for which one triangular system is solved."""

SUBCHUNK_SIZE = 8
"""Tokens per block within which per-channel decays are computed for each pair of tokens, not as matrix products."""

SEGMENT_SIZE = 512
"""Token slots (including padding) that backward replays together; only a segment's initial state is saved."""

L2_NORM_EPSILON = 1e-6

SAVED_BY_REFERENCE = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "states")
"""Values that the chunked forms of both backends save for backward: the arguments as given, and the initial states of
all segments but the first. Kernels also save the C x C matrices of every chunk."""

Shape = tuple[int, ...]
P = ParamSpec("P")
R = TypeVar("R")


def chunk_flops(size: int, key: int, value: int) -> int:
    """Return the forward FLOPs (multiplications and additions) of one chunk of one head.

    They cover the products of queries and keys with keys, the triangular system, its inverse times the values, the
    reads and the update of the state, and the outputs within the chunk.
    """
    return 4 * size * size * key + size**3 // 3 + 4 * size * size * value + 6 * size * key * value


class UnknownArgumentError(TypeError, ValueError):
    """An error for an unknown keyword argument."""


def refuse_unknown_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Return a wrapper of the function that raises an UnknownArgumentError for an unknown keyword."""
    known = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known:
                expected = ", ".join(known)
                raise UnknownArgumentError(f"{name}: expected a keyword out of {expected}, got {name!r}")
        return function(*args, **kwargs)

    return checked


@dataclass(frozen=True)
class DeltaRuleOptions:
    """Options of a call of the delta rule.

    Args:
        per_channel: True for one decay per key channel (KDA), False for one per head (GDN).
        scale: factor of the queries; None: K ** -0.5.
        chunk_size: tokens per chunk, a power of two.
        use_qk_l2norm_in_kernel: normalize q and k.
        use_gate_in_kernel: apply the gate of KDA to g.
        safe_gate: requires lower_bound in a gate, and has no other effect; accepted as in flash-linear-attention.
        lower_bound: lower bound of the gate, in [-5, 0).
    """

    per_channel: bool
    scale: float | None = None
    chunk_size: int = CHUNK_SIZE
    use_qk_l2norm_in_kernel: bool = False
    use_gate_in_kernel: bool = False
    safe_gate: bool = False
    lower_bound: float | None = None

    def __post_init__(self) -> None:
        if self.scale is not None and not (isinstance(self.scale, Real) and math.isfinite(self.scale)):
            raise ValueError(f"scale: expected a finite number, got {self.scale!r}")
        size = self.chunk_size
        if not isinstance(size, int) or isinstance(size, bool) or size < 1 or size & (size - 1):
            raise ValueError(f"chunk_size: expected a power of two, got {size!r}")
        if self.lower_bound is not None:
            check_lower_bound(self.lower_bound)
        if not self.use_gate_in_kernel and self.lower_bound is not None:
            raise ValueError(
                f"lower_bound: expected None without use_gate_in_kernel, got {self.lower_bound}; "
                "it belongs to the gate: pass use_gate_in_kernel=True"
            )
        if self.use_gate_in_kernel and self.safe_gate and self.lower_bound is None:
            raise ValueError("lower_bound: expected a number in [-5, 0) with safe_gate, got None")

    def scale_of(self, key: int) -> float:
        """Return the factor of the queries for a key head of width ``key``."""
        return key**-0.5 if self.scale is None else self.scale

    def for_length(self, length: int) -> "DeltaRuleOptions":
        """Return the options with chunks limited to ``length`` tokens; cost grows with the square of the chunk size."""
        return replace(self, chunk_size=min(self.chunk_size, 1 << (length - 1).bit_length()))


def check_lower_bound(lower_bound: float) -> None:
    """Reject a bound outside [-5, 0), where the decays of 16 tokens could exceed the range of float32.

    Raises:
        ValueError: the bound is outside.
    """
    if not isinstance(lower_bound, Real) or not -5 <= lower_bound < 0:
        raise ValueError(f"lower_bound: expected a number in [-5, 0), got {lower_bound!r}")


class ArrayInfo(NamedTuple):
    """Shape, numpy type name and, if known and needed, values of an argument."""

    shape: Shape
    dtype: str
    values: np.ndarray | None = None


def accumulation_dtype(dtype: str) -> str:
    """Return the type of states, cumulative decays and chunks: float64 for float64, else float32."""
    return "float64" if dtype == "float64" else "float32"


def check_arguments(options: DeltaRuleOptions, arrays: Mapping[str, ArrayInfo | None]) -> None:
    """Reject arrays with inconsistent shapes or types.

    Args:
        options: options of the call.
        arrays: arrays by argument name; None: not given. Only the values of ``cu_seqlens`` are read; if JAX traces
            them, only shape and type are checked.

    Raises:
        ValueError: an argument is invalid; the message names it.
    """
    for name in ("q", "k", "v", "g", "beta"):
        if arrays[name] is None:
            raise ValueError(f"{name}: expected an array, got None")
    given = {name: array for name, array in arrays.items() if array is not None}
    q = given["q"]
    v = given["v"]
    for name, info, letters in (("q", q, "[B, T, H, K]"), ("v", v, "[B, T, HV, V]")):
        if len(info.shape) != 4 or 0 in info.shape:
            raise ValueError(f"{name}: expected shape {letters} without empty axes, got {list(info.shape)}")
    batch, length, heads, key = q.shape
    value_heads = v.shape[2]
    if value_heads % heads:
        raise ValueError(f"v: expected a multiple of q's {heads} heads, got {value_heads}")
    decay = (batch, length, value_heads, key) if options.per_channel else (batch, length, value_heads)
    sequences = batch
    if "cu_seqlens" in given:
        sequences = _check_cu_seqlens(given["cu_seqlens"], batch, length)
    expected = {
        "k": ("[B, T, H, K]", q.shape),
        "v": ("[B, T, HV, V]", (batch, length, *v.shape[2:])),
        "g": ("[B, T, HV, K]" if options.per_channel else "[B, T, HV]", decay),
        "beta": ("[B, T, HV]", (batch, length, value_heads)),
        "initial_state": ("[N, HV, K, V]", (sequences, value_heads, key, v.shape[3])),
        "A_log": ("[HV]", (value_heads,)),
        "dt_bias": ("[HV * K]", (value_heads * key,)),
    }
    for name, (letters, shape) in expected.items():
        if name in given and given[name].shape != shape:
            raise ValueError(f"{name}: expected shape {letters} = {list(shape)}, got {list(given[name].shape)}")
    _check_dtypes(given)
    _check_gate(options, given)


def _check_cu_seqlens(cu_seqlens: ArrayInfo, batch: int, length: int) -> int:
    """Check the offsets and return the number of sequences."""
    if batch != 1:
        raise ValueError(f"cu_seqlens: expected B = 1, with the sequences one after the other, got B = {batch}")
    if cu_seqlens.dtype != "int32":
        raise ValueError(f"cu_seqlens: expected int32, got {cu_seqlens.dtype}")
    if len(cu_seqlens.shape) != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens: expected shape [N + 1] of at least [2], got {list(cu_seqlens.shape)}")
    values = cu_seqlens.values
    if values is not None:
        if values[0] != 0:
            raise ValueError(f"cu_seqlens: expected to begin at 0, got {values[0]}")
        steps = np.diff(values)
        if (steps < 0).any():
            place = int(np.argmax(steps < 0))
            actual = f"{values[place]} before {values[place + 1]} at {place}"
            raise ValueError(f"cu_seqlens: expected offsets that never decrease, got {actual}")
        if values[-1] != length:
            raise ValueError(f"cu_seqlens: expected to end at T = {length}, got {values[-1]}")
    return cu_seqlens.shape[0] - 1


def _check_dtypes(given: Mapping[str, ArrayInfo]) -> None:
    """Reject inconsistent types of the arguments."""
    wanted = given["q"].dtype
    if wanted not in ("float16", "bfloat16", "float32", "float64"):
        raise ValueError(f"q: expected float16, bfloat16, float32 or float64, got {wanted}")
    for name in ("k", "v"):
        if given[name].dtype != wanted:
            raise ValueError(f"{name}: expected {wanted}, the type of q, got {given[name].dtype}")
    state = accumulation_dtype(wanted)
    for name, allowed in {
        "g": (wanted, state),
        "beta": (wanted, state),
        "A_log": (wanted, state),
        "dt_bias": (wanted, state),
        "initial_state": (state,),
    }.items():
        if name in given and given[name].dtype not in allowed:
            raise ValueError(
                f"{name}: expected {' or '.join(dict.fromkeys(allowed))} with {wanted} q, got {given[name].dtype}"
            )


def _check_gate(options: DeltaRuleOptions, given: Mapping[str, ArrayInfo]) -> None:
    """Reject gate parameters that do not match use_gate_in_kernel."""
    if options.use_gate_in_kernel and "A_log" not in given:
        raise ValueError("A_log: expected an array [HV] with use_gate_in_kernel, got None")
    for name in ("A_log", "dt_bias"):
        if not options.use_gate_in_kernel and name in given:
            raise ValueError(
                f"{name}: expected None without use_gate_in_kernel, got an array; it belongs to the gate: "
                "pass use_gate_in_kernel=True, or g as kda_gate returns it"
            )


class ChunkTables(NamedTuple):
    """Tables of chunks and sequences, by which kernels find their tokens."""

    chunks: Any
    """Half-open token range of every chunk; (0, 0) for unused chunks. [chunks, 2] int32"""
    sequences: Any
    """Half-open token range and first chunk of every sequence. [N, 3] int32"""

    @property
    def known(self) -> bool:
        """True if the values are known, False if JAX traces them."""
        return isinstance(self.sequences, np.ndarray)

    def cut(self, parts: int, chunk_size: int) -> np.ndarray:
        """Cut every sequence into parts of whole chunks, the last possibly empty; return their table [N * parts, 3]."""
        start, stop, chunk = (x[:, None] for x in self.sequences.T)
        each = -((start - stop) // (chunk_size * parts))
        number = np.arange(parts) * each
        first, last = (np.minimum(start + x * chunk_size, stop) for x in (number, number + each))
        return np.stack([first, last, chunk + number], -1).reshape(-1, 3).astype(np.int32)


def chunk_tables(cu_seqlens: Any, chunk_size: int, chunks: int | None = None, xp: Any = np) -> ChunkTables:
    """Return the tables of packed sequences; only the last chunk of a sequence may be shorter.

    Args:
        cu_seqlens: start offsets of the sequences, and the total length. [N + 1] int32
        chunk_size: tokens per chunk.
        chunks: number of chunks in the result, at least the actual number (see ``most_chunks``), if the offsets are
            traced; None: the actual number.
        xp: array module, numpy or jax.numpy.
    """
    if xp is np and chunks is None:
        return _known_tables(tuple(cu_seqlens.tolist()), chunk_size)
    return _tables(cu_seqlens, chunk_size, chunks, xp)


@lru_cache(maxsize=64)
def _known_tables(cu_seqlens: tuple[int, ...], chunk_size: int) -> ChunkTables:
    """Return the tables of offsets that are known; every layer of a model asks for the same."""
    tables = _tables(np.array(cu_seqlens), chunk_size, None, np)
    for table in tables:
        table.flags.writeable = False
    return tables


def _tables(cu_seqlens: Any, chunk_size: int, chunks: int | None, xp: Any) -> ChunkTables:
    """Return the tables of chunk_tables."""
    starts = cu_seqlens[:-1]
    stops = cu_seqlens[1:]
    sequence, first_chunks, first, is_chunk = _chunks(cu_seqlens, chunk_size, chunks, xp)
    bounds = xp.stack([first, xp.minimum(first + chunk_size, stops[sequence])], -1)
    bounds = xp.where(is_chunk[:, None], bounds, 0)
    return ChunkTables(bounds.astype("int32"), xp.stack([starts, stops, first_chunks], -1).astype("int32"))


def _chunks(cu_seqlens: Any, chunk_size: int, chunks: int | None, xp: Any) -> tuple[Any, Any, Any, Any]:
    """Return each chunk's sequence, each sequence's first chunk, each chunk's first token, and which chunks exist."""
    counts = -((cu_seqlens[:-1] - cu_seqlens[1:]) // chunk_size)
    ends = xp.cumsum(counts)
    chunk = xp.arange(int(ends[-1]) if chunks is None else chunks)
    sequence = xp.minimum(xp.searchsorted(ends, chunk, side="right"), len(counts) - 1)
    first_chunks = ends - counts
    first_tokens = cu_seqlens[sequence] + (chunk - first_chunks[sequence]) * chunk_size
    return sequence, first_chunks, first_tokens, chunk < ends[-1]


class Chunking(NamedTuple):
    """Layout of packed sequences in chunks, with every sequence starting a new chunk.

    A slot holds one token; chunk c starts at slot c * chunk_size. Empty slots follow the last token of a sequence and,
    if only an upper bound of the number of chunks is known, the last chunk. They change no state.
    """

    sequence_ids: Any
    """Index of each chunk's sequence. [chunks]"""
    token_of_slot: Any
    """Token in each slot; arbitrary in an empty slot. [chunks * chunk_size]"""
    is_filled: Any
    """True for slots with a token. [chunks * chunk_size]"""
    slot_of_token: Any
    """Slot of each token. [T]"""


def most_chunks(length: int, sequences: int, chunk_size: int) -> int:
    """Return the maximum number of chunks of non-empty sequences with ``length`` tokens in total."""
    return (length + min(sequences, length) * (chunk_size - 1)) // chunk_size


def cut_into_chunks(cu_seqlens: Any, length: int, chunk_size: int, chunks: int | None = None, xp: Any = np) -> Chunking:
    """Cut packed sequences into chunks.

    Args:
        cu_seqlens: start offsets of the sequences, and the total length. [N + 1] int32
        length: total number T of tokens.
        chunk_size: tokens per chunk.
        chunks: number of chunks in the result, at least the actual number (see ``most_chunks``), if the offsets are
            traced; None: the actual number.
        xp: array module, numpy or jax.numpy.
    """
    sequence, first_chunks, first_tokens, is_chunk = _chunks(cu_seqlens, chunk_size, chunks, xp)
    token = first_tokens[:, None] + xp.arange(chunk_size)
    filled = (token < cu_seqlens[sequence + 1][:, None]) & is_chunk[:, None]
    tokens = xp.arange(length)
    sequence_of_token = xp.searchsorted(cu_seqlens, tokens, side="right") - 1
    first_slots = first_chunks[sequence_of_token] * chunk_size
    return Chunking(
        sequence_ids=sequence,
        token_of_slot=xp.where(filled, token, 0).reshape(-1),
        is_filled=filled.reshape(-1),
        slot_of_token=first_slots + tokens - cu_seqlens[sequence_of_token],
    )
