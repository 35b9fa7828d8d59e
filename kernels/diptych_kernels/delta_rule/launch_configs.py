"""Launch configurations of the delta rule's kernels, in the form of kernels/diptych_kernels/launch_configs.py.

``lead`` is (number of tokens,). The columns of a Block are the channels of keys or values in a tile. Its rows are not
used: a tile has the tokens of a chunk, so that tuning does not change the order of sums over a chunk.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from diptych_kernels.launch_configs import Block, Launch, launch_of, power_of_two, wide

TILE = 16
"""Tokens per tile, the smallest size of products on tensor cores."""

SCAN_PROGRAMS = 264
"""Programs of a scan that keep a large GPU busy: two on each of 132 multiprocessors."""

MIN_PARTS = 4
"""Minimum number of parts of a sequence for which a scan in parts is faster."""

MIN_CHUNKS_PER_PART = 8
"""Minimum number of chunks in a part."""

CANDIDATES: dict[str, tuple[Block, ...]] = {
    "decay_queries_and_keys": (Block(1, 64, 8), Block(1, 32, 4), Block(1, 64, 4)),
    "terms_by_channel": (Block(1, 16, 4), Block(1, 32, 4)),
    "terms_by_head": (Block(1, 64, 4, 3), Block(1, 64, 4, 2), Block(1, 128, 4)),
    "invert": (Block(1, 1, 4), Block(1, 1, 2), Block(1, 1, 1)),
    "scan_forward": (
        Block(1, 32, 4, 2),
        Block(1, 64, 4, 2),
        Block(1, 128, 4, 2),
        Block(1, 128, 8, 2),
        Block(1, 64, 4, 3),
        Block(1, 16, 4, 2),
    ),
    "scan_backward": (
        Block(1, 32, 8, 2),
        Block(1, 32, 4, 2),
        Block(1, 64, 4),
        Block(1, 64, 4, 2),
        Block(1, 128, 4, 2),
        Block(1, 128, 8, 2),
    ),
    "compose": (Block(1, 16, 8), Block(1, 16, 4), Block(1, 32, 4)),
    "state_gradients": (Block(1, 64, 8, 2), Block(1, 64, 4, 2), Block(1, 128, 8)),
    "product_gradients": (Block(1, 64, 4, 2), Block(1, 128, 4), Block(1, 64, 4, 3)),
    "channel_gradients": (Block(1, 16, 4), Block(1, 32, 4), Block(1, 32, 8), Block(1, 64, 8), Block(1, 16, 2)),
    "gate_gradients": (Block(1, 32, 4), Block(1, 32, 2), Block(1, 64, 4)),
    "head_gradients": (Block(1, 32, 4), Block(1, 64, 4), Block(1, 128, 8)),
    "sum_heads": (Block(1, 64, 4), Block(1, 128, 4)),
}
"""Candidate blocks by kernel, from measurements and machine code for an H100; the first is the default, which spills
nothing on sm_80 and sm_90."""


class Call(NamedTuple):
    """Sizes, types and factor of a call.

    Args:
        per_channel: True for one decay per channel of the keys, False for one per head.
        scale: factor of the queries.
        tokens: number of tokens of all sequences. T
        chunks: number of chunks. NC
        sequences: number of sequences. N
        heads: number of heads of q and k. H
        value_heads: number of heads of v, g, beta and states. HV
        key_dim: channels of the keys. K
        value_dim: channels of the values. V
        chunk_size: tokens of a chunk; 16, 32 or 64. C
        dtype: type of q, k and v.
        gate_dtype: type of g.
        beta_dtype: type of beta.
    """

    per_channel: bool
    scale: float
    tokens: int
    chunks: int
    sequences: int
    heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    chunk_size: int
    dtype: str
    gate_dtype: str
    beta_dtype: str

    @property
    def wide(self) -> str:
        """The type of states and sums."""
        return wide(self.dtype)

    @property
    def key_shape(self) -> tuple[int, int, int]:
        """The shape [T, HV, K]."""
        return self.tokens, self.value_heads, self.key_dim

    @property
    def value_shape(self) -> tuple[int, int, int]:
        """The shape [T, HV, V]."""
        return self.tokens, self.value_heads, self.value_dim

    @property
    def states(self) -> tuple[int, int, int, int]:
        """The shape [N, HV, K, V] of the states of sequences."""
        return self.sequences, self.value_heads, self.key_dim, self.value_dim

    @property
    def chunk_states(self) -> tuple[int, int, int, int]:
        """The shape [NC, HV, K, V] of the states of chunks."""
        return self.chunks, *self.states[1:]

    @property
    def matrix_shape(self) -> tuple[int, int, int, int]:
        """The shape [NC, HV, C, C] of the matrices of chunks."""
        return self.chunks, self.value_heads, self.chunk_size, self.chunk_size


def even_table(shape: tuple[int, ...], tokens: int, chunk_size: int) -> np.ndarray:
    """Return a table of equal chunks [n, 2] or sequences [n, 3] that covers all tokens, for measurements.

    The columns are those of diptych.plans.model.delta_rule.ChunkTables.
    """
    count, width = shape
    each = chunk_size if width == 2 else -(-tokens // (count * chunk_size)) * chunk_size
    first = np.minimum(np.arange(count) * each, tokens)
    columns = [first, np.minimum(first + each, tokens), first // chunk_size]
    return np.stack(columns[:width], -1).astype(np.int32)


def _launch(
    module: str, builder: Callable, block: Block, call: Call, grid: tuple[int, ...], outputs: list, **more
) -> Launch:
    """Return a launch with the constants that all kernels have.

    float32, float64 and heads of more than 128 channels leave no shared memory for a second pipeline stage.
    """
    module = f"delta_rule.{module}"
    if call.dtype in ("float32", "float64") or max(call.key_dim, call.value_dim) > 128:
        block = block._replace(num_stages=1)
    constants = dict(HV=call.value_heads, C=call.chunk_size) | more
    return launch_of(module, builder, block, grid, (), outputs, **constants)


def _precision(call: Call) -> str:
    """Return the precision of products; a float32 product is three tf32 products."""
    return {"float64": "ieee", "float32": "tf32x3"}.get(call.dtype, "tf32")


def _columns(block: Block, call: Call, width: int) -> int:
    """Return the columns of a tile; fewer for wider types."""
    columns = block.columns // {"float64": 4, "float32": 2}.get(call.dtype, 1)
    return min(max(columns, 16), power_of_two(width, 16))


def _programs(call: Call) -> int:
    """Return the number of programs with one per chunk and value head."""
    return call.chunks * call.value_heads


def _decayed_outputs(call: Call) -> list:
    """Return the outputs q_from_start, k_from_start, k_to_end and decay, or those of their gradients."""
    return [*[(call.key_shape, call.dtype)] * 3, ((call.chunks, call.value_heads, call.key_dim), call.wide)]


def decay_queries_and_keys(block: Block, lead: tuple[int, ...], call: Call) -> Launch:
    """Configure the launch q, k, g, chunks -> q_from_start, k_from_start, k_to_end, decay."""
    columns = _columns(block, call, call.key_dim)
    grid = (_programs(call), math.ceil(call.key_dim / columns))
    constants = dict(H=call.heads, K=call.key_dim, SCALE=call.scale, BK=columns)
    return _launch("products", decay_queries_and_keys, block, call, grid, _decayed_outputs(call), **constants)


def _terms(builder: Callable, block: Block, call: Call, outputs: list) -> Launch:
    """Return a launch with one program per chunk and head, whose last outputs are A_qk and A_kk."""
    constants = dict(
        H=call.heads,
        K=call.key_dim,
        SCALE=call.scale,
        PRECISION=_precision(call),
        BK=_columns(block, call, call.key_dim),
    )
    outputs = [*outputs, (call.matrix_shape, call.dtype), (call.matrix_shape, call.wide)]
    return _launch("products", builder, block, call, (_programs(call),), outputs, **constants)


def terms_by_channel(block: Block, lead: tuple[int, ...], call: Call) -> Launch:
    """Configure the launch q, k, g, chunks -> q_from_start, k_from_start, k_to_end, decay, A_qk, A_kk."""
    return _terms(terms_by_channel, block, call, _decayed_outputs(call))


def terms_by_head(block: Block, lead: tuple[int, ...], call: Call) -> Launch:
    """Configure the launch q, k, g, chunks -> decays, A_qk, A_kk."""
    decays = ((call.chunks, call.value_heads, 2, call.chunk_size), call.wide)
    return _terms(terms_by_head, block, call, [decays])


def invert(block: Block, lead: tuple[int, ...], call: Call) -> Launch:
    """Configure the launch A_kk, beta, chunks -> inverse, beta_chunks."""
    outputs = [(call.matrix_shape, call.dtype), (call.matrix_shape[:3], call.wide)]
    return _launch("products", invert, block, call, (_programs(call),), outputs, PRECISION="ieee")


def _scan(builder: Callable, block: Block, call: Call, width: int, outputs: list, **flags: int | bool) -> Launch:
    """Return a launch with one program per sequence, value head and slice of the state's ``width`` columns."""
    columns = _columns(block, call, width)
    slices = math.ceil(width / columns)
    constants = dict(
        PER_CHANNEL=call.per_channel,
        **flags,
        H=call.heads,
        K=call.key_dim,
        V=call.value_dim,
        SCALE=call.scale,
        PRECISION=_precision(call),
        KP=power_of_two(call.key_dim, 16),
        BV=columns,
        SLICES=slices,
    )
    grid = (call.sequences * call.value_heads * slices,)
    launch = _launch("scan", builder, block, call, grid, outputs, **constants)
    return replace(launch, tuned_for=min(power_of_two(call.sequences * call.value_heads), SCAN_PROGRAMS))


def scan_forward(
    block: Block,
    lead: tuple[int, ...],
    call: Call,
    output: bool = False,
    save: bool = False,
    maps: bool = False,
    from_zero: bool = False,
) -> Launch:
    """Configure the launch; outputs that the flags exclude have shape [0].

    q_from_start, k_from_start, k_to_end, v, decay, beta_chunks, A_qk, inverse, initial, sequences ->
    o, chunk_states, errors, final.

    Args:
        block: tuned parameters.
        lead: (number of tokens,).
        call: sizes of the call.
        output: write o.
        save: write the states before chunks and the errors, which backward reads.
        maps: write [S_local | M] instead of the final states; see scan.scan_forward.
        from_zero: start from states of 0 instead of ``initial``.
    """
    width = call.value_dim + (call.key_dim if maps else 0)
    outputs = [
        (call.value_shape if output else (0,), call.dtype),
        (call.chunk_states if save else (0,), call.dtype),
        (call.value_shape if save else (0,), call.dtype),
        ((*call.states[:3], width), call.wide),
    ]
    flags = dict(FROM_ZERO=from_zero, OUTPUT=output, SAVE=save, W=width)
    return _scan(scan_forward, block, call, width, outputs, **flags)


def scan_backward(
    block: Block, lead: tuple[int, ...], call: Call, save: bool = False, from_zero: bool = False
) -> Launch:
    """Configure the launch; outputs that the flags exclude have shape [0]. from_zero starts from 0 instead of dfinal.

    q_from_start, k_from_start, k_to_end, decay, beta_chunks, A_qk, inverse, do, dfinal, sequences ->
    dx, dends, dinitial.
    """
    outputs = [
        (call.value_shape if save else (0,), call.dtype),
        (call.chunk_states if save else (0,), call.dtype),
        (call.states, call.wide),
    ]
    return _scan(scan_backward, block, call, call.value_dim, outputs, FROM_ZERO=from_zero, SAVE=save)


def compose(block: Block, lead: tuple[int, ...], call: Call, parts: int, back: bool) -> Launch:
    """Configure the launch S_local, maps, initial -> states between parts.

    Args:
        block: tuned parameters.
        lead: (number of tokens,).
        call: sizes of the call; its sequences are complete sequences, not parts.
        parts: number of parts per sequence.
        back: compute the gradients of the states after parts, from the last part to the first.
    """
    columns = min(block.columns, power_of_two(call.value_dim, 16))
    slices = math.ceil(call.value_dim / columns)
    constants = dict(
        HV=call.value_heads,
        K=call.key_dim,
        V=call.value_dim,
        LOCAL_COLUMNS=call.value_dim if back else call.value_dim + call.key_dim,
        BACK=back,
        PRECISION={"float64": "ieee", "float32": "tf32x3"}[call.wide],
        KP=power_of_two(call.key_dim, 16),
        BK=min(32, power_of_two(call.key_dim, 16)),
        BV=columns,
        SLICES=slices,
    )
    grid = (call.sequences * call.value_heads * slices,)
    outputs = [((call.sequences * parts, *call.states[1:]), call.wide)]
    return launch_of("delta_rule.scan", compose, block, grid, (parts,), outputs, **constants)


def parts_of(chunks: int, sequences: int, value_heads: int, value: int) -> int:
    """Return the number of parts per sequence that gives a scan enough programs; 1 if it would be below MIN_PARTS.

    Parts are scanned twice, the first time with more columns, so that few parts would be slower than none.

    Args:
        chunks: number of chunks of all sequences.
        sequences: number of sequences.
        value_heads: number of heads of the states.
        value: channels of the values.
    """
    programs = sequences * value_heads * math.ceil(value / CANDIDATES["scan_forward"][0].columns)
    parts = min(SCAN_PROGRAMS // max(programs, 1), chunks // max(sequences, 1) // MIN_CHUNKS_PER_PART)
    return parts if parts >= MIN_PARTS else 1


def state_gradients(block: Block, lead: tuple[int, ...], call: Call) -> Launch:
    """Configure the launch whose outputs multiply states.

    chunk_states, dends, errors, dx, do, chunks -> dq_from_start, dx_state, dk_to_end, ddecay.
    """
    columns = _columns(block, call, call.key_dim)
    values = _columns(block, call, call.value_dim)
    grid = (_programs(call), math.ceil(call.key_dim / columns))
    constants = dict(K=call.key_dim, V=call.value_dim, PRECISION=_precision(call), BK=columns, BV=values)
    return _launch("gradients", state_gradients, block, call, grid, _decayed_outputs(call), **constants)


def product_gradients(block: Block, lead: tuple[int, ...], call: Call) -> Launch:
    """Configure the launch v, beta, errors, dx, do, A_kk, chunks -> dA_qk, dA_kk, dv, dbeta without dx_state."""
    outputs = [
        *[(call.matrix_shape, call.dtype)] * 2,
        (call.value_shape, call.dtype),
        (call.value_shape[:2], call.wide),
    ]
    constants = dict(V=call.value_dim, PRECISION=_precision(call), BV=_columns(block, call, call.value_dim))
    return _launch("gradients", product_gradients, block, call, (_programs(call),), outputs, **constants)


def channel_gradients(block: Block, lead: tuple[int, ...], call: Call) -> Launch:
    """Configure the launch for a decay per channel.

    q, k, g, beta, dA_qk, dA_kk, dq_from_start, dx_state, dk_to_end, dbeta, chunks -> dq, dk, rise, fall, dbeta_slices.
    """
    columns = _columns(block, call, call.key_dim)
    slices = math.ceil(call.key_dim / columns)
    outputs = [
        *[(call.key_shape, call.dtype)] * 2,
        *[(call.key_shape, call.wide)] * 2,
        ((*call.key_shape[:2], slices), call.wide),
    ]
    grid = (_programs(call), slices)
    constants = dict(
        H=call.heads, K=call.key_dim, SCALE=call.scale, PRECISION=_precision(call), BK=columns, SLICES=slices
    )
    return _launch("channel_gradients", channel_gradients, block, call, grid, outputs, **constants)


def gate_gradients(block: Block, lead: tuple[int, ...], call: Call, slices: int) -> Launch:
    """Configure the launch rise, fall, decay, ddecay, dbeta_slices, chunks -> dg, dbeta.

    ``slices`` is the number of slices of channels of channel_gradients.
    """
    columns = _columns(block, call, call.key_dim)
    grid = (_programs(call), math.ceil(call.key_dim / columns))
    outputs = [(call.key_shape, call.gate_dtype), (call.key_shape[:2], call.beta_dtype)]
    constants = dict(K=call.key_dim, BK=columns, SLICES=slices, SP=power_of_two(slices))
    return _launch("channel_gradients", gate_gradients, block, call, grid, outputs, **constants)


def head_gradients(block: Block, lead: tuple[int, ...], call: Call) -> Launch:
    """Configure the launch for a decay per head.

    q, k, g, beta, decays, A_qk, A_kk, dA_qk, dA_kk, dq_from_start, dx_state, dk_to_end, ddecay, dbeta, chunks ->
    dq, dk, dg, dbeta_out.
    """
    outputs = [
        *[(call.key_shape, call.dtype)] * 2,
        (call.key_shape[:2], call.gate_dtype),
        (call.key_shape[:2], call.beta_dtype),
    ]
    columns = _columns(block, call, call.key_dim)
    constants = dict(H=call.heads, K=call.key_dim, SCALE=call.scale, PRECISION=_precision(call), BK=columns)
    return _launch("gradients", head_gradients, block, call, (_programs(call),), outputs, **constants)


def sum_heads(block: Block, lead: tuple[int, ...], call: Call) -> Launch:
    """Configure the launch x, chunks -> sums over the value heads that share a key head."""
    columns = _columns(block, call, call.key_dim)
    grid = (call.chunks * call.heads, math.ceil(call.key_dim / columns))
    outputs = [((call.tokens, call.heads, call.key_dim), call.dtype)]
    return _launch("gradients", sum_heads, block, call, grid, outputs, H=call.heads, K=call.key_dim, BK=columns)
