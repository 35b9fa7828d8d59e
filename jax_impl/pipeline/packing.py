"""Arrays of any shapes as one vector for each dtype, so that different stages share buffers and messages."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

Packed = dict[str, Array]
"""Concatenated arrays, by dtype."""


def longest_vectors(groups: Iterable[Sequence[jax.ShapeDtypeStruct]]) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shape of one vector for each dtype that can hold the arrays of any group."""
    lengths: dict[str, int] = {}
    for group in groups:
        likes = [*map(_like_of_numbers, group)]
        for dtype in {str(like.dtype) for like in likes}:
            length = sum(math.prod(like.shape) for like in likes if like.dtype == dtype)
            lengths[dtype] = max(lengths.get(dtype, 0), length)
    return {dtype: jax.ShapeDtypeStruct((length,), dtype) for dtype, length in lengths.items()}


def pack(arrays: Sequence[Array], vectors: Mapping[str, jax.ShapeDtypeStruct]) -> Packed:
    """Concatenate arrays by dtype, typed random keys by the dtype of their data, and pad with zeros."""
    arrays = [jax.random.key_data(array) if is_key(array) else array for array in arrays]
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
        numbers = _like_of_numbers(like)
        dtype = str(numbers.dtype)
        size = math.prod(numbers.shape)
        array = packed[dtype][starts[dtype] : starts[dtype] + size].reshape(numbers.shape)
        arrays.append(jax.random.wrap_key_data(array, impl=_implementation(like)) if is_key(like) else array)
        starts[dtype] += size
    return arrays


def is_key(x: Any) -> bool:
    """Return True for a typed random key, or the shape of one."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _like_of_numbers(like: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.eval_shape(jax.random.key_data, like) if is_key(like) else like


def _implementation(like: jax.ShapeDtypeStruct) -> Any:
    """Return the random generator of typed keys, from their shape and dtype."""
    found: list[Any] = []
    jax.eval_shape(lambda keys: found.append(jax.random.key_impl(keys)), like)
    return found[0]
