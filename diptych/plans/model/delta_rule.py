"""The gated delta rule before a tensor exists: what arguments must be, and how sequences are cut into chunks.

Both backends ask here, so both refuse the same calls with the same words and cut at the same tokens.
"""

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np

CHUNK_SIZE = 64
"""Tokens whose mutual corrections are solved for at once."""

SUBCHUNK_SIZE = 8
"""Tokens among which a decay per channel is multiplied out pair by pair; between larger blocks it is a product."""

SEGMENT_SIZE = 512
"""Places for tokens, in chunks that sequences may leave partly empty, that backward computes again together; only the
state a segment begins with is kept."""

L2_NORM_EPSILON = 1e-6

SAVED = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "states")
"""What the chunked forms keep for backward: their arguments, as they were given, and the states at the beginning of all
segments but the first."""

Shape = tuple[int, ...]
P = ParamSpec("P")
R = TypeVar("R")


def chunk_flops(size: int, key: int, value: int) -> int:
    """Multiplications and additions in the products of one chunk of one head, forward.

    Products of queries and keys with keys, the triangular system, its inverse with values, what a state gives to
    errors and outputs and takes from the chunk, and outputs within the chunk.
    """
    return 4 * size * size * key + size**3 // 3 + 4 * size * size * value + 6 * size * key * value


class UnknownArgumentError(TypeError, ValueError):
    """A keyword no parameter has."""


def refuse_unknown_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """The function, which names what it would have taken where it is called with another keyword."""
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
    """What a call computes, beside its arrays.

    Args:
        per_channel: a decay for every channel of the keys (KDA), not for every head (GDN).
        scale: of the queries; None for K ** -0.5.
        chunk_size: tokens; a power of two.
        use_qk_l2norm_in_kernel: q and k are divided by their norms first.
        use_gate_in_kernel: g goes through the gate of KDA first.
        safe_gate: the caller's word that decays are bounded below, for kernels that need it.
        lower_bound: of the gate; in [-5, 0).
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
        """What queries of so many channels are multiplied by."""
        return key**-0.5 if self.scale is None else self.scale

    def for_length(self, length: int) -> "DeltaRuleOptions":
        """The same with chunks no longer than so many tokens need: a chunk's time and memory grow with its square."""
        return replace(self, chunk_size=min(self.chunk_size, 1 << (length - 1).bit_length()))


def check_lower_bound(lower_bound: float) -> None:
    """The bound of a bounded gate: below it 16 tokens of a chunk could span more than a float32 can."""
    if not isinstance(lower_bound, Real) or not -5 <= lower_bound < 0:
        raise ValueError(f"lower_bound: expected a number in [-5, 0), got {lower_bound!r}")


class ArrayInfo(NamedTuple):
    """Of an argument: its shape and its type by numpy's name; ``values`` where they are known and matter."""

    shape: Shape
    dtype: str
    values: np.ndarray | None = None


def compute_dtype(dtype: str) -> str:
    """States, sums of decays and chunks are of this type: float64 for float64, float32 for all else."""
    return "float64" if dtype == "float64" else "float32"


def check_arguments(options: DeltaRuleOptions, arrays: Mapping[str, ArrayInfo | None]) -> None:
    """Refuse arrays that do not belong together.

    Args:
        options: of the call.
        arrays: by the name of the argument; None for one that was not given. Values are read of ``cu_seqlens`` alone,
            and where it has none (traced by JAX), its shape and type are checked only.

    Raises:
        ValueError: names the argument, what was expected, what came.
    """
    for name in ("q", "k", "v", "g", "beta"):
        if arrays[name] is None:
            raise ValueError(f"{name}: expected an array, got None")
    given = {name: array for name, array in arrays.items() if array is not None}
    q, v = given["q"], given["v"]
    for name, info, letters in (("q", q, "[B, T, H, K]"), ("v", v, "[B, T, HV, V]")):
        if len(info.shape) != 4 or 0 in info.shape:
            raise ValueError(f"{name}: expected shape {letters} without empty axes, got {list(info.shape)}")
    (batch, length, heads, key), value_heads = q.shape, v.shape[2]
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
    """The number of sequences."""
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
            came = f"{values[place]} before {values[place + 1]} at {place}"
            raise ValueError(f"cu_seqlens: expected offsets that never decrease, got {came}")
        if values[-1] != length:
            raise ValueError(f"cu_seqlens: expected to end at T = {length}, got {values[-1]}")
    return cu_seqlens.shape[0] - 1


def _check_dtypes(given: Mapping[str, ArrayInfo]) -> None:
    wanted = given["q"].dtype
    if wanted not in ("float16", "bfloat16", "float32", "float64"):
        raise ValueError(f"q: expected float16, bfloat16, float32 or float64, got {wanted}")
    for name in ("k", "v"):
        if given[name].dtype != wanted:
            raise ValueError(f"{name}: expected {wanted}, as q is, got {given[name].dtype}")
    state = compute_dtype(wanted)
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
    if options.use_gate_in_kernel and "A_log" not in given:
        raise ValueError("A_log: expected an array [HV] with use_gate_in_kernel, got None")
    for name in ("A_log", "dt_bias"):
        if not options.use_gate_in_kernel and name in given:
            raise ValueError(
                f"{name}: expected None without use_gate_in_kernel, got an array; it belongs to the gate: "
                "pass use_gate_in_kernel=True, or g as kda_gate returns it"
            )


class ChunkTables(NamedTuple):
    """The same cut for kernels, which find tokens by number."""

    chunks: Any
    """Of every chunk the first token and the one after its last; 0 and 0 of one that is none. [chunks, 2] int32"""
    sequences: Any
    """Of every sequence the first token, the one after its last, and its first chunk. [N, 3] int32"""

    @property
    def known(self) -> bool:
        """Whether their numbers are."""
        return isinstance(self.sequences, np.ndarray)

    def cut(self, parts: int, chunk_size: int) -> np.ndarray:
        """Sequences cut into so many parts of whole chunks, of which the last may be short or empty. [N * parts, 3]"""
        start, stop, chunk = (x[:, None] for x in self.sequences.T)
        each = -((start - stop) // (chunk_size * parts))
        number = np.arange(parts) * each
        first, last = (np.minimum(start + x * chunk_size, stop) for x in (number, number + each))
        return np.stack([first, last, chunk + number], -1).reshape(-1, 3).astype(np.int32)


def chunk_tables(cu_seqlens: Any, chunk_size: int, chunks: int | None = None, xp: Any = np) -> ChunkTables:
    """Cut packed sequences into chunks of which each but the last of a sequence is whole.

    Args:
        cu_seqlens: where sequences begin, and at last the end. [N + 1] int32
        chunk_size: tokens of a chunk.
        chunks: as many as there are to be, if it must be known before the offsets are; see ``most_chunks``.
        xp: the module to compute with, numpy or jax.numpy.
    """
    starts, stops = cu_seqlens[:-1], cu_seqlens[1:]
    ends = xp.cumsum(-((starts - stops) // chunk_size))
    number = xp.arange(int(ends[-1]) if chunks is None else chunks)
    sequence = xp.minimum(xp.searchsorted(ends, number, side="right"), len(starts) - 1)
    before = ends + (starts - stops) // chunk_size
    first = starts[sequence] + (number - before[sequence]) * chunk_size
    bounds = xp.stack([first, xp.minimum(first + chunk_size, stops[sequence])], -1)
    bounds = xp.where((number < ends[-1])[:, None], bounds, 0)
    return ChunkTables(bounds.astype("int32"), xp.stack([starts, stops, before], -1).astype("int32"))


class Chunking(NamedTuple):
    """Where the tokens of packed sequences lie once each sequence begins a chunk of its own.

    A slot is a place for one token; chunk c has slots c * chunk_size and following. Slots that no token fills follow a
    sequence's last or, where the number of chunks was only bounded, everything; they change no state.
    """

    sequence: Any
    """Whose chunk it is. [chunks]"""
    token: Any
    """The token in a slot; any, where there is none. [chunks * chunk_size]"""
    filled: Any
    """Whether there is one. [chunks * chunk_size]"""
    slot: Any
    """The slot a token lies in. [T]"""


def most_chunks(length: int, sequences: int, chunk_size: int) -> int:
    """Chunks that sequences of ``length`` tokens together can need; each but the filled has at least one token."""
    return (length + min(sequences, length) * (chunk_size - 1)) // chunk_size


def cut_into_chunks(cu_seqlens: Any, length: int, chunk_size: int, chunks: int | None = None, xp: Any = np) -> Chunking:
    """Cut packed sequences into chunks.

    Args:
        cu_seqlens: where sequences begin, and at last the end. [N + 1] int32
        length: tokens of all.
        chunk_size: tokens of a chunk.
        chunks: as many as there are to be, if it must be known before the offsets are; see ``most_chunks``.
        xp: the module to compute with, numpy or jax.numpy.
    """
    counts = -((cu_seqlens[:-1] - cu_seqlens[1:]) // chunk_size)
    stops = xp.cumsum(counts)
    starts = stops - counts
    number = xp.arange(int(stops[-1]) if chunks is None else chunks)
    sequence = xp.minimum(xp.searchsorted(stops, number, side="right"), len(counts) - 1)
    is_chunk = number < stops[-1]
    within = number - starts[sequence]
    token = (cu_seqlens[sequence] + within * chunk_size)[:, None] + xp.arange(chunk_size)
    filled = (token < cu_seqlens[sequence + 1][:, None]) & is_chunk[:, None]
    tokens = xp.arange(length)
    owner = xp.searchsorted(cu_seqlens, tokens, side="right") - 1
    return Chunking(
        sequence=sequence,
        token=xp.where(filled, token, 0).reshape(-1),
        filled=filled.reshape(-1),
        slot=starts[owner] * chunk_size + tokens - cu_seqlens[owner],
    )
