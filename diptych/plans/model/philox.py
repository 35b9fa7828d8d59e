"""Counter-based random numbers: Philox-4x32-10, the numpy reference.

A counter-based generator has no state: equal keys and counters give equal 32-bit words on every device and in any
order. Dropout masks therefore do not depend on how a batch is cut into microbatches, pipeline stages or sequence
shards, and the replay of a recomputed region draws the mask of its forward.

Reference: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. Tests verify that the backends'
versions (``ops.philox_4x32``) are bitwise equal to this one, and this one to the paper's vectors.
"""

import math

import numpy as np

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10

TILE_ROWS = 128
"""Rows of a dropout mask that PyTorch computes at once, so that the generator's 64-bit words stay in cache."""

SAMPLE_SITE = 0xFFFFFFFE
"""Second key word of sampled text."""

DATA_SITE = 0xFFFFFFFF
"""Second key word of the data order; dropout sites count up from 0 and never reach it."""


def philox_4x32(key: tuple[int, int], counter: tuple) -> np.ndarray:
    """Return four random words per counter.

    Args:
        key: two words < 2**32.
        counter: four integer arrays (broadcast together) of words < 2**32.

    Returns:
        [4, ...] uint32.
    """
    low = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    c0, c1, c2, c3 = np.broadcast_arrays(*(np.asarray(c, np.uint64) for c in counter))
    k0, k1 = key
    for _ in range(ROUNDS):
        product0 = c0 * np.uint64(MULTIPLIERS[0])
        product2 = c2 * np.uint64(MULTIPLIERS[1])
        c0 = (product2 >> half) ^ c1 ^ np.uint64(k0)
        c1 = product2 & low
        c2 = (product0 >> half) ^ c3 ^ np.uint64(k1)
        c3 = product0 & low
        k0 = (k0 + KEY_STEPS[0]) & 0xFFFFFFFF
        k1 = (k1 + KEY_STEPS[1]) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3]).astype(np.uint32)


def dropout_threshold(rate: float) -> int:
    """Return the threshold floor(rate * 2**32); elements with a smaller random word are dropped."""
    return math.floor(rate * 2**32)


def attention_site(layer_number: int) -> int:
    """Return the dropout site (second key word) of a layer's attention sublayer; layers count from 0."""
    return 2 * layer_number


def mlp_site(layer_number: int) -> int:
    """Return the dropout site of a layer's MLP sublayer."""
    return 2 * layer_number + 1


def dropout_keep(key: tuple[int, int], rows: np.ndarray, width: int, step: int, rate: float) -> np.ndarray:
    """Return the dropout mask that every backend and kernel reproduces.

    Args:
        key: (seed, site).
        rows: [...] integer row numbers, sample * seq_length + position, < 2**64.
        width: columns of a row.
        step: training step, < 2**32.
        rate: probability of dropping.

    Returns:
        [..., width] bool, True for elements that are not dropped.
    """
    rows = np.asarray(rows, np.uint64)[..., None]
    column = np.arange((width + 3) // 4)
    words = philox_4x32(key, (column, rows & np.uint64(0xFFFFFFFF), rows >> np.uint64(32), step))
    lanes = np.moveaxis(words, 0, -1)  # [..., width / 4, 4]
    flat = lanes.reshape(*lanes.shape[:-2], -1)[..., :width]
    return flat >= np.uint64(dropout_threshold(rate))
