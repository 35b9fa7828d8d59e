"""Launch configurations of the delta rule's kernels; see kernels/diptych_kernels/launch_configs.py.

The columns of a Block are the channels of keys or values in a tile. Its rows are not used: a tile has the tokens of a
chunk, so that tuning does not change the order of sums over a chunk.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from diptych_kernels.launch_configs import Block, Launch, launch_of, power_of_two, wide

TILE = 16
"""Tokens per tile, as in products.py."""

BUSY = 264
"""Programs of a scan that keep a large GPU busy: two on each of 132 multiprocessors."""

LEAST_PARTS = 4
LEAST_CHUNKS = 8
"""Minimum number of parts of a sequence, and of chunks in a part, for which a scan in parts is faster."""

CANDIDATES: dict[str, tuple[Block, ...]] = {
    "decayed": (Block(1, 32, 4), Block(1, 32, 8), Block(1, 64, 8)),
    "products_by_channel": (Block(1, 64, 4), Block(1, 32, 2), Block(1, 64, 2)),
    "products_by_head": (Block(1, 64, 4, 2), Block(1, 128, 4), Block(1, 32, 4, 2)),
    "solve": (Block(1, 1, 1), Block(1, 1, 2), Block(1, 1, 4)),
    "scan_forward": (Block(1, 32, 4, 2), Block(1, 16, 4, 2), Block(1, 32, 8, 2), Block(1, 64, 8, 2)),
    "scan_backward": (Block(1, 32, 4, 2), Block(1, 32, 8, 2), Block(1, 16, 4, 2), Block(1, 64, 8, 2)),
    "compose": (Block(1, 16, 8), Block(1, 32, 8), Block(1, 16, 4)),
    "state_gradients": (Block(1, 64, 8, 2), Block(1, 64, 4, 2), Block(1, 32, 4, 2)),
    "product_gradients": (Block(1, 64, 4, 2), Block(1, 32, 4, 2), Block(1, 64, 8, 2)),
    "channel_gradients": (Block(1, 32, 4), Block(1, 64, 4), Block(1, 64, 8)),
    "gate_gradients": (Block(1, 32, 4), Block(1, 64, 4), Block(1, 64, 8)),
    "head_gradients": (Block(1, 32, 4), Block(1, 64, 8), Block(1, 32, 8)),
    "sum_heads": (Block(1, 32, 4), Block(1, 64, 4)),
}
"""Candidate blocks by kernel; the first is the default without measurements."""


class Call(NamedTuple):
    """Sizes of a call.

    Args:
        per_channel: True for one decay per channel of the keys, False for one per head.
        scale: factor of the queries.
        tokens: number of tokens of all sequences. T
        chunks: number of chunks. NC
        sequences: number of sequences. N
        heads: number of heads of q and k. H
        value_heads: number of heads of v, g, beta and states. HV
        key: channels of the keys. K
        value: channels of the values. V
        chunk_size: tokens of a chunk; 16, 32 or 64. C
        dtype: type of q, k and v.
        gate: type of g.
        beta: type of beta.
    """

    per_channel: bool
    scale: float
    tokens: int
    chunks: int
    sequences: int
    heads: int
    value_heads: int
    key: int
    value: int
    chunk_size: int
    dtype: str
    gate: str
    beta: str

    @property
    def wide(self) -> str:
        """Return the type of states and sums."""
        return wide(self.dtype)

    @property
    def by_channel(self) -> tuple[int, int, int]:
        """Return the shape [T, HV, K]."""
        return self.tokens, self.value_heads, self.key

    @property
    def by_value(self) -> tuple[int, int, int]:
        """Return the shape [T, HV, V]."""
        return self.tokens, self.value_heads, self.value

    @property
    def states(self) -> tuple[int, int, int, int]:
        """Return the shape [N, HV, K, V] of the states of sequences."""
        return self.sequences, self.value_heads, self.key, self.value

    @property
    def chunk_states(self) -> tuple[int, int, int, int]:
        """Return the shape [NC, HV, K, V] of the states of chunks."""
        return self.chunks, *self.states[1:]

    @property
    def pairs(self) -> tuple[int, int, int, int]:
        """Return the shape [NC, HV, C, C] of the matrices of chunks."""
        return self.chunks, self.value_heads, self.chunk_size, self.chunk_size


def even_table(shape: tuple[int, ...], tokens: int, chunk_size: int) -> np.ndarray:
    """Return an even table of chunks [n, 2] or sequences [n, 3]; see diptych.plans.model.delta_rule.ChunkTables."""
    count, width = shape
    each = chunk_size if width == 2 else -(-tokens // (count * chunk_size)) * chunk_size
    first = np.minimum(np.arange(count) * each, tokens)
    columns = [first, np.minimum(first + each, tokens), first // chunk_size]
    return np.stack(columns[:width], -1).astype(np.int32)


def _launch(
    module: str, builder: Callable, block: Block, of: Call, grid: tuple[int, ...], outputs: list, **more
) -> Launch:
    """Return a launch with the constants of all kernels; wide types or heads leave no memory for a second stage."""
    module = f"delta_rule.{module}"
    if of.dtype in ("float32", "float64") or max(of.key, of.value) > 128:
        block = block._replace(num_stages=1)
    constants = dict(HV=of.value_heads, C=of.chunk_size) | more
    return launch_of(module, builder, block, grid, (), outputs, **constants)


def _precision(of: Call) -> str:
    """Return the precision of products; a float32 product is three tf32 products."""
    return {"float64": "ieee", "float32": "tf32x3"}.get(of.dtype, "tf32")


def _columns(block: Block, of: Call, width: int) -> int:
    """Return the columns of a tile; fewer for wider types."""
    columns = block.columns // {"float64": 4, "float32": 2}.get(of.dtype, 1)
    return min(max(columns, 16), power_of_two(width, 16))


def _programs(of: Call) -> int:
    return of.chunks * of.value_heads


def decayed(block: Block, lead: tuple[int, ...], of: Call) -> Launch:
    """Configure the launch q, k, g, chunks -> q_in, k_in, k_out, decay. lead: the number of tokens."""
    columns = _columns(block, of, of.key)
    outputs = [*[(of.by_channel, of.dtype)] * 3, ((of.chunks, of.value_heads, of.key), of.wide)]
    grid = (_programs(of), math.ceil(of.key / columns))
    return _launch("products", decayed, block, of, grid, outputs, H=of.heads, K=of.key, SCALE=of.scale, BK=columns)


def _products(builder: Callable, block: Block, of: Call, grid: tuple[int, ...]) -> Launch:
    constants = dict(H=of.heads, K=of.key, SCALE=of.scale, PRECISION=_precision(of), BK=_columns(block, of, of.key))
    return _launch("products", builder, block, of, grid, [(of.pairs, of.dtype), (of.pairs, of.wide)], **constants)


def products_by_channel(block: Block, lead: tuple[int, ...], of: Call) -> Launch:
    """Configure the launch q, k, g, chunks -> A_qk, A_kk."""
    tiles = of.chunk_size // TILE
    return _products(products_by_channel, block, of, (_programs(of), tiles * (tiles + 1) // 2))


def products_by_head(block: Block, lead: tuple[int, ...], of: Call) -> Launch:
    """Configure the launch q, k, g, chunks -> A_qk, A_kk."""
    return _products(products_by_head, block, of, (_programs(of),))


def solve(block: Block, lead: tuple[int, ...], of: Call) -> Launch:
    """Configure the launch A_kk, beta, chunks -> inverse."""
    return _launch("products", solve, block, of, (_programs(of),), [(of.pairs, of.dtype)], PRECISION="ieee")


def _scan(builder: Callable, block: Block, of: Call, width: int, outputs: list, **flags: int | bool) -> Launch:
    columns = _columns(block, of, width)
    slices = math.ceil(width / columns)
    constants = dict(
        PER_CHANNEL=of.per_channel,
        **flags,
        H=of.heads,
        K=of.key,
        V=of.value,
        SCALE=of.scale,
        PRECISION=_precision(of),
        KP=power_of_two(of.key, 16),
        BV=columns,
        SLICES=slices,
    )
    grid = (of.sequences * of.value_heads * slices,)
    return _launch("scan", builder, block, of, grid, outputs, **constants)


def scan_forward(
    block: Block,
    lead: tuple[int, ...],
    of: Call,
    output: bool = False,
    keep: bool = False,
    maps: bool = False,
    from_zero: bool = False,
) -> Launch:
    """Configure the launch; outputs that the flags exclude have shape [0].

    q_in, k_in, k_out, v, decay, beta, A_qk, inverse, initial, sequences -> o, starts, errors, final.
    """
    width = of.value + (of.key if maps else 0)
    outputs = [
        (of.by_value if output else (0,), of.dtype),
        (of.chunk_states if keep else (0,), of.dtype),
        (of.by_value if keep else (0,), of.dtype),
        ((*of.states[:3], width), of.wide),
    ]
    flags = dict(FROM_ZERO=from_zero, OUTPUT=output, KEEP=keep, W=width)
    return _scan(scan_forward, block, of, width, outputs, **flags)


def scan_backward(block: Block, lead: tuple[int, ...], of: Call, keep: bool = False, from_zero: bool = False) -> Launch:
    """Configure the launch; outputs that the flags exclude have shape [0].

    q_in, k_in, k_out, decay, beta, A_qk, inverse, do, dfinal, sequences -> dx, dends, dinitial.
    """
    outputs = [
        (of.by_value if keep else (0,), of.dtype),
        (of.chunk_states if keep else (0,), of.dtype),
        (of.states, of.wide),
    ]
    return _scan(scan_backward, block, of, of.value, outputs, FROM_ZERO=from_zero, KEEP=keep)


def compose(block: Block, lead: tuple[int, ...], of: Call, parts: int, back: bool) -> Launch:
    """Configure the launch H, maps, initial -> states between parts. of.sequences counts complete sequences."""
    columns = min(block.columns, power_of_two(of.value, 16))
    slices = math.ceil(of.value / columns)
    constants = dict(
        HV=of.value_heads,
        K=of.key,
        V=of.value,
        HW=of.value if back else of.value + of.key,
        BACK=back,
        PRECISION={"float64": "ieee", "float32": "tf32x3"}[of.wide],
        KP=power_of_two(of.key, 16),
        BK=min(32, power_of_two(of.key, 16)),
        BV=columns,
        SLICES=slices,
    )
    grid, outputs = (of.sequences * of.value_heads * slices,), [((of.sequences * parts, *of.states[1:]), of.wide)]
    return launch_of("delta_rule.scan", compose, block, grid, (parts,), outputs, **constants)


def parts_of(chunks: int, sequences: int, value_heads: int, value: int) -> int:
    """Return the number of parts per sequence that gives a scan enough programs; 1 if heads alone give enough.

    Parts are scanned twice, the first time with more columns, so that few parts would be slower than none.
    """
    programs = sequences * value_heads * math.ceil(value / CANDIDATES["scan_forward"][0].columns)
    parts = min(BUSY // max(programs, 1), chunks // max(sequences, 1) // LEAST_CHUNKS)
    return parts if parts >= LEAST_PARTS else 1


def state_gradients(block: Block, lead: tuple[int, ...], of: Call) -> Launch:
    """Configure the launch starts, dends, errors, dx, do, chunks -> r_in, r_seen, r_out, ddecay."""
    columns, values = _columns(block, of, of.key), _columns(block, of, of.value)
    outputs = [*[(of.by_channel, of.dtype)] * 3, ((of.chunks, of.value_heads, of.key), of.wide)]
    grid = (_programs(of), math.ceil(of.key / columns))
    constants = dict(K=of.key, V=of.value, PRECISION=_precision(of), BK=columns, BV=values)
    return _launch("gradients", state_gradients, block, of, grid, outputs, **constants)


def product_gradients(block: Block, lead: tuple[int, ...], of: Call) -> Launch:
    """Configure the launch v, beta, errors, dx, do, A_kk, chunks -> dA_qk, dA_kk, dv, dbeta without r_seen."""
    outputs = [*[(of.pairs, of.dtype)] * 2, (of.by_value, of.dtype), (of.by_value[:2], of.wide)]
    constants = dict(V=of.value, PRECISION=_precision(of), BV=_columns(block, of, of.value))
    return _launch("gradients", product_gradients, block, of, (_programs(of),), outputs, **constants)


def channel_gradients(block: Block, lead: tuple[int, ...], of: Call) -> Launch:
    """Configure the launch for a decay per channel.

    q, k, g, beta, dA_qk, dA_kk, r_in, r_seen, r_out, dbeta, chunks -> dq, dk, before, after, dbeta by slices.
    """
    columns = _columns(block, of, of.key)
    slices = math.ceil(of.key / columns)
    outputs = [
        *[(of.by_channel, of.dtype)] * 2,
        *[(of.by_channel, of.wide)] * 2,
        ((*of.by_channel[:2], slices), of.wide),
    ]
    grid = (_programs(of), of.chunk_size // TILE, slices)
    constants = dict(H=of.heads, K=of.key, SCALE=of.scale, PRECISION=_precision(of), BK=columns, SLICES=slices)
    return _launch("channel_gradients", channel_gradients, block, of, grid, outputs, **constants)


def gate_gradients(block: Block, lead: tuple[int, ...], of: Call, slices: int) -> Launch:
    """Configure the launch g, before, after, decay, ddecay, dbeta by slices, chunks -> dg, dbeta."""
    columns = _columns(block, of, of.key)
    grid = (_programs(of), math.ceil(of.key / columns))
    outputs = [(of.by_channel, of.gate), (of.by_channel[:2], of.beta)]
    constants = dict(K=of.key, BK=columns, SLICES=slices, SP=power_of_two(slices))
    return _launch("channel_gradients", gate_gradients, block, of, grid, outputs, **constants)


def head_gradients(block: Block, lead: tuple[int, ...], of: Call) -> Launch:
    """Configure the launch for a decay per head.

    q, k, g, beta, A_qk, A_kk, dA_qk, dA_kk, r_in, r_seen, r_out, ddecay, dbeta, chunks -> dq, dk, dg, dbeta.
    """
    outputs = [*[(of.by_channel, of.dtype)] * 2, (of.by_channel[:2], of.gate), (of.by_channel[:2], of.beta)]
    columns = _columns(block, of, of.key)
    constants = dict(H=of.heads, K=of.key, SCALE=of.scale, PRECISION=_precision(of), BK=columns)
    return _launch("gradients", head_gradients, block, of, (_programs(of),), outputs, **constants)


def sum_heads(block: Block, lead: tuple[int, ...], of: Call) -> Launch:
    """Configure the launch x, chunks -> sums over the value heads that share a key head."""
    columns = _columns(block, of, of.key)
    grid = (of.chunks * of.heads, math.ceil(of.key / columns))
    outputs = [((of.tokens, of.heads, of.key), of.dtype)]
    return _launch("gradients", sum_heads, block, of, grid, outputs, H=of.heads, K=of.key, BK=columns)
