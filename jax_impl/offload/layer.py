"""One layer's forward, replay and backward, with nothing kept between them that follows from parameters alone."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from diptych.plans.recompute import RecomputeBlock
from jax_impl.recompute import places_read, run_from_saved, run_saving, varying_leaves, with_leaves

Layer = list[Any]
"""What gradients are asked for: a layer's parameters, or in a parameter's place its taps, whose gradients are what its
own is made of."""

Run = Callable[[Layer, Array], Array]
"""A layer: of its parameters and its input."""


class Kept(NamedTuple):
    """What a layer leaves to its replay or backward."""

    x: Array | None
    """Its input, where it is run again and its block begins."""
    values: list[Array]
    """Named values where it is to be run again, else leaves of its pull-back."""


class LayerRule:
    """How a layer is taken through forward and backward.

    Args:
        block: what is recomputed.
        first: whether the layer's input is kept, as the first one's of its block.
        last: whether its replay is part of its backward, as the last one's of its block.
        known: what is found out about the layer's program; shared by layers that are alike.
        named: whether named values alone are kept, also where nothing is recomputed.
    """

    def __init__(
        self, block: RecomputeBlock, first: bool, last: bool, known: dict[str, Any], named: bool = False
    ) -> None:
        self._recomputed, self._dropped = named or block.kind != "none", block.dropped
        self._first, self._last, self._known = first, last, known

    def runs_again(self, kind: str) -> bool:
        """Whether the layer's forward is run again in a use of this kind."""
        return kind == "R" or (self._recomputed and self._last)

    def forward(self, run: Run, layer: Layer, x: Array) -> tuple[Array, Kept]:
        """The layer's output, and what is kept."""
        if not self._recomputed:
            y, pull_back = jax.vjp(run, layer, x)
            return y, Kept(None, self._leaves(run, layer, x, [], pull_back))
        y, named = run_saving(run, self._dropped, layer, x)

        def again(layer: Layer, x: Array, named: list[Array], grad: Array) -> tuple:
            y, pull_back = run_from_saved(run, self._dropped, named, layer, x)
            return pull_back(grad), None if self._last else y

        if "read" not in self._known:
            read = places_read(again, layer, x, named, y)
            self._known["read"] = read[len(jax.tree.leaves(layer)) + 1 : -1]
            self._known["named"] = [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in named]
        values = [value for value, is_read in zip(named, self._known["read"], strict=True) if is_read]
        return y, Kept(x if self._first else None, values)

    def replay(self, run: Run, layer: Layer, kept: Kept) -> tuple[Array, Kept]:
        """The layer's output again, and what backward needs of it besides parameters."""
        assert kept.x is not None, "a replay begins from the layer's input"
        named = self._named(kept)
        y, pull_back = run_from_saved(run, self._dropped, named, layer, kept.x)
        return y, Kept(None, self._leaves(run, layer, kept.x, named, pull_back))

    def backward(self, run: Run, layer: Layer, kept: Kept, grad: Array) -> tuple[Layer, Array]:
        """Gradients of the layer's parameters and of its input, given its output's."""
        if self.runs_again("B"):
            assert kept.x is not None, "a replay begins from the layer's input"
            return run_from_saved(run, self._dropped, self._named(kept), layer, kept.x)[1](grad)
        # Zeros: what is made of them is not read, since every leaf that varies is replaced.
        named = [_zeros(like, grad) for like in self._known.get("named", [])]
        _, pull_back = self._pull_back(run, layer, jnp.zeros_like(grad), named)
        return with_leaves(pull_back, self._known["leaves"], kept.values)(grad)

    def _named(self, kept: Kept) -> list[Array]:
        """All named values; in the place of those that nobody reads, zeros."""
        left = iter(kept.values)
        return [
            next(left) if is_read else _zeros(like, kept.x)
            for is_read, like in zip(self._known["read"], self._known["named"], strict=True)
        ]

    def _pull_back(self, run: Run, layer: Layer, x: Array, named: list[Array]) -> tuple[Array, Callable]:
        if self._recomputed:
            return run_from_saved(run, self._dropped, named, layer, x)
        return jax.vjp(run, layer, x)

    def _leaves(self, run: Run, layer: Layer, x: Array, named: list[Array], pull_back: Callable) -> list[Array]:
        """A pull-back's leaves but those that follow from the layer's parameters alone."""

        def leaves_of(layer: Layer, x: Array, named: list[Array]) -> list[Any]:
            return jax.tree.leaves(self._pull_back(run, layer, x, named)[1])

        if "leaves" not in self._known:
            varies = jax.tree.map(lambda _: False, layer), True, [True] * len(named)
            self._known["leaves"] = varying_leaves(leaves_of, (layer, x, named), varies)
        found = jax.tree.leaves(pull_back)
        return [found[leaf.places[0]] for leaf in self._known["leaves"]]


def _zeros(like: jax.ShapeDtypeStruct, beside: Array | None) -> Array:
    """Zeros of a shape, that differ by device where their neighbour does."""
    assert beside is not None
    return jnp.zeros_like(beside, shape=like.shape, dtype=like.dtype)
