"""Arrays of unequal stages in one vector per rank and dtype, so that one program holds them on every rank."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

Vectors = dict[str, Any]
"""By dtype: a vector of a rank, or with a leading axis the vectors of all ranks."""


class PackedLayout:
    """The places of the arrays of all stages.

    Args:
        likes: shape and dtype of the arrays of each stage; None for arrays that are stored elsewhere.
        ranks: rank of each stage.
    """

    def __init__(self, likes: Sequence[Sequence[jax.ShapeDtypeStruct | None]], ranks: Sequence[int]) -> None:
        self.likes = [tuple(of_stage) for of_stage in likes]
        self.ranks = tuple(ranks)
        dtypes = sorted({str(like.dtype) for of_stage in likes for like in of_stage if like is not None})
        ends = {dtype: [0] * (1 + max(ranks)) for dtype in dtypes}
        self._begins: dict[str, list[int]] = {dtype: [] for dtype in dtypes}
        """Index of the first element of each stage in the vector of its rank."""
        self._starts: list[list[int | None]] = []
        """Index of the first element of each array in its stage's part of the vector."""
        for of_stage, rank in zip(likes, ranks, strict=True):
            sizes = dict.fromkeys(dtypes, 0)
            starts: list[int | None] = []
            for like in of_stage:
                starts.append(None if like is None else sizes[str(like.dtype)])
                if like is not None:
                    sizes[str(like.dtype)] += math.prod(like.shape)
            self._starts.append(starts)
            for dtype, size in sizes.items():
                self._begins[dtype].append(ends[dtype][rank])
                ends[dtype][rank] += size
        self.lengths = {dtype: max(of_ranks) for dtype, of_ranks in ends.items()}
        """Length of every rank's vector by dtype: the largest sum of sizes on one rank."""

    def key(self, stage: int) -> tuple:
        """Return a key that is equal for stages whose arrays have the same places within their parts."""
        return tuple((like.shape, str(like.dtype)) if like is not None else None for like in self.likes[stage])

    def stack(self, values: Sequence[Sequence[Any]]) -> Vectors:
        """Return the vectors [ranks, length] of arrays by stage, on the host; values are broadcast to their shapes."""
        result: Vectors = {}
        for dtype, length in self.lengths.items():
            places = list(self._places(dtype))
            kind = np.result_type(*{np.asarray(values[stage][i]).dtype for stage, i, _ in places})
            vectors = np.zeros((1 + max(self.ranks), length), kind)
            for stage, i, begin in places:
                like: Any = self.likes[stage][i]
                part = vectors[self.ranks[stage], begin : begin + math.prod(like.shape)]
                part[:] = np.broadcast_to(np.asarray(values[stage][i]), like.shape).reshape(-1)
            result[dtype] = vectors
        return result

    def unstack(self, vectors: Mapping[str, np.ndarray]) -> list[list[Any]]:
        """Return the arrays by stage, None for those stored elsewhere, from vectors [ranks, length]."""
        result: list[list[Any]] = [[None] * len(likes) for likes in self.likes]
        for dtype in self.lengths:
            for stage, i, begin in self._places(dtype):
                like: Any = self.likes[stage][i]
                part = vectors[dtype][self.ranks[stage], begin : begin + math.prod(like.shape)]
                result[stage][i] = part.reshape(like.shape)
        return result

    def select(self, vectors: Vectors, like_stage: int, stage: Array) -> list[Any]:
        """Return the arrays of a stage from the vectors of its rank.

        Args:
            vectors: vectors of the rank.
            like_stage: a stage whose arrays have the same places.
            stage: the stage; it may be traced.
        """
        result: list[Any] = []
        for like, start in zip(self.likes[like_stage], self._starts[like_stage], strict=True):
            if like is None or start is None:
                result.append(None)
                continue
            dtype = str(like.dtype)
            part = lax.dynamic_slice_in_dim(vectors[dtype], self._begin(dtype, stage) + start, math.prod(like.shape))
            result.append(part.reshape(like.shape))
        return result

    def update(
        self,
        vectors: Vectors,
        like_stage: int,
        stage: Array,
        values: Mapping[int, Array],
        combine: Callable[[Array, Array], Array],
    ) -> Vectors:
        """Return the vectors of a rank with ``combine(old, value)`` in the place of some arrays of a stage.

        Args:
            vectors: vectors of the rank.
            like_stage: a stage whose arrays have the same places.
            stage: the stage; it may be traced.
            values: values by the index of the array.
            combine: function of the old part of the vector and the value as a vector.
        """
        vectors = dict(vectors)
        for i, value in values.items():
            dtype = str(self.likes[like_stage][i].dtype)  # pyright: ignore[reportOptionalMemberAccess]
            begin = self._begin(dtype, stage) + (self._starts[like_stage][i] or 0)
            old = lax.dynamic_slice_in_dim(vectors[dtype], begin, value.size)
            new = combine(old, value.reshape(-1).astype(old.dtype))
            vectors[dtype] = lax.dynamic_update_slice_in_dim(vectors[dtype], new, begin, 0)
        return vectors

    def _begin(self, dtype: str, stage: Array) -> Array:
        return jnp.asarray(self._begins[dtype], jnp.int32)[stage]

    def _places(self, dtype: str) -> Any:
        """Yield stage, index and place in the vector of its rank for every array of a dtype."""
        for stage, likes in enumerate(self.likes):
            for i, like in enumerate(likes):
                if like is not None and str(like.dtype) == dtype:
                    yield stage, i, self._begins[dtype][stage] + (self._starts[stage][i] or 0)
