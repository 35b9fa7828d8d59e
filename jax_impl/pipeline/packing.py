"""Arrays of any shapes as one vector for each dtype, so that different stages share buffers and messages."""

import math
from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import Array

Packed = dict[str, Array]
"""Concatenated arrays, by dtype."""


def longest_vectors(groups: Iterable[Sequence[jax.ShapeDtypeStruct]]) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shape of one vector for each dtype that can hold the arrays of any group."""
    lengths: dict[str, int] = {}
    for likes in groups:
        for dtype in {str(like.dtype) for like in likes}:
            length = sum(math.prod(like.shape) for like in likes if like.dtype == dtype)
            lengths[dtype] = max(lengths.get(dtype, 0), length)
    return {dtype: jax.ShapeDtypeStruct((length,), dtype) for dtype, length in lengths.items()}


def pack(arrays: Sequence[Array], vectors: Mapping[str, jax.ShapeDtypeStruct]) -> Packed:
    """Concatenate arrays by dtype and pad with zeros."""
    packed = {}
    for dtype, vector in vectors.items():
        parts = [array.reshape(-1) for array in arrays if array.dtype == dtype]
        used = sum(part.size for part in parts)
        packed[dtype] = jnp.concatenate([*parts, jnp.zeros(vector.size - used, dtype)])
    return packed


def unpack(packed: Mapping[str, Array], likes: Sequence[jax.ShapeDtypeStruct]) -> list[Array]:
    """Return the arrays that pack concatenated."""
    starts = dict.fromkeys(packed, 0)
    arrays = []
    for like in likes:
        dtype = str(like.dtype)
        size = math.prod(like.shape)
        arrays.append(packed[dtype][starts[dtype] : starts[dtype] + size].reshape(like.shape))
        starts[dtype] += size
    return arrays
