"""Forward, replay and backward of one layer, which save no values computed from parameters alone."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from diptych.plans.model.values import LAYER_INPUT
from diptych.plans.recompute import RecomputeBlock
from jax_impl.recompute import VaryingLeaf, arguments_read, run_from_saved, run_saving, varying_leaves, with_leaves

Differentiated = list[Any]
"""The arrays whose gradients are computed: each parameter of a layer, or its taps, whose gradients are the factors of
the parameter's gradient."""

Run = Callable[[Differentiated, Array], Array]
"""A function that runs a layer on its parameters and its input."""


class Saved(NamedTuple):
    """The values that a layer saves for its replay or backward."""

    x: Array | None
    """Input of the layer, if it is replayed and is the first of its block."""
    values: list[Array]
    """Named values if the layer is replayed, else leaves of its pull-back."""


@dataclass
class LayerAnalysis:
    """What the trace of a layer has shown about its program; None: not traced yet."""

    named: list[jax.ShapeDtypeStruct] | None = None
    """Shapes and types of the values that a recomputed layer saves by name."""
    is_read: list[bool] | None = None
    """For each of these, True if the replay or backward reads it."""
    names_read: list[str | None] | None = None
    """Names of those that are read."""
    leaves: list[VaryingLeaf] | None = None
    """Leaves of the layer's pull-back that do not depend on its parameters alone."""


@dataclass(frozen=True, eq=False)
class LayerRule:
    """The forward and backward rule of a layer.

    Args:
        block: recompute block of the layer.
        dropped: names of the values that are not saved.
        saves_input: True if the input of the layer is saved, as for the first layer of a block that is replayed whole.
        replays_in_backward: True if a replay of the layer is part of its backward, as for the last one of such a block.
        analysis: analysis of the layer's program, shared by layers with equal programs.
        saves_named_only: True if only named values are saved, even if nothing is recomputed.
    """

    block: RecomputeBlock
    dropped: frozenset[str]
    saves_input: bool
    replays_in_backward: bool
    analysis: LayerAnalysis
    saves_named_only: bool = False

    @property
    def _has_named_values(self) -> bool:
        """True if the saved values are named values, not leaves of the pull-back."""
        return self.saves_named_only or self.block.kind != "none"

    @property
    def names(self) -> list[str | None]:
        """Names of ``Saved.values`` of the last traced forward."""
        if self._has_named_values:
            assert self.analysis.names_read is not None, "forward has run"
            return self.analysis.names_read
        assert self.analysis.leaves is not None, "forward has run"
        return [leaf.name for leaf in self.analysis.leaves]

    def is_replayed(self, kind: str) -> bool:
        """Return True if a use of this kind replays the layer's forward."""
        return kind == "R" or (self._has_named_values and self.replays_in_backward)

    def forward(self, run: Run, layer: Differentiated, x: Array) -> tuple[Array, Saved]:
        """Return the output of the layer and the values saved for backward."""
        if not self._has_named_values:
            y, pull_back = jax.vjp(run, layer, x)
            return y, Saved(None, self._leaves(run, layer, x, [], pull_back))
        y, named, names = run_saving(run, self.dropped, layer, x)

        def replay(layer: Differentiated, x: Array, named: list[Array], grad: Array) -> tuple:
            y, pull_back = run_from_saved(run, self.dropped, named, layer, x)
            return pull_back(grad), None if self.replays_in_backward else y

        analysis = self.analysis
        if analysis.is_read is None:
            analysis.is_read = arguments_read(replay, layer, x, named, y)[len(jax.tree.leaves(layer)) + 1 : -1]
            analysis.named = [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in named]
            analysis.names_read = [name for name, is_read in zip(names, analysis.is_read, strict=True) if is_read]
        values = [value for value, is_read in zip(named, analysis.is_read, strict=True) if is_read]
        return y, Saved(x if self.saves_input else None, values)

    def replay(self, run: Run, layer: Differentiated, saved: Saved) -> tuple[Array, Saved]:
        """Replay the layer and return its output and the values that backward needs besides parameters."""
        assert saved.x is not None, "a replay begins from the layer's input"
        named = self._named(saved)
        y, pull_back = run_from_saved(run, self.dropped, named, layer, saved.x)
        return y, Saved(None, self._leaves(run, layer, saved.x, named, pull_back))

    def backward(self, run: Run, layer: Differentiated, saved: Saved, grad: Array) -> tuple[Differentiated, Array]:
        """Return the gradients of the layer's parameters and of its input, from the gradient of its output."""
        if self.is_replayed("B"):
            assert saved.x is not None, "a replay begins from the layer's input"
            return run_from_saved(run, self.dropped, self._named(saved), layer, saved.x)[1](grad)
        # Zeros are sufficient, because every leaf that depends on them is replaced.
        assert self.analysis.leaves is not None, "forward or replay has run"
        named = [_zeros(like, grad) for like in self.analysis.named or ()]
        _, pull_back = self._pull_back(run, layer, jnp.zeros_like(grad), named)
        return with_leaves(pull_back, self.analysis.leaves, saved.values)(grad)

    def _named(self, saved: Saved) -> list[Array]:
        """Return all named values, with zeros for those that are not read."""
        assert self.analysis.is_read is not None, "forward has run"
        assert self.analysis.named is not None, "forward has run"
        remaining = iter(saved.values)
        return [
            next(remaining) if is_read else _zeros(like, saved.x)
            for is_read, like in zip(self.analysis.is_read, self.analysis.named, strict=True)
        ]

    def _pull_back(self, run: Run, layer: Differentiated, x: Array, named: list[Array]) -> tuple[Array, Callable]:
        """Return the output of a layer and its pull-back, from named values if it saves these."""
        if self._has_named_values:
            return run_from_saved(run, self.dropped, named, layer, x)
        return jax.vjp(run, layer, x)

    def _leaves(
        self, run: Run, layer: Differentiated, x: Array, named: list[Array], pull_back: Callable
    ) -> list[Array]:
        """Return the leaves of a pull-back except those that depend only on the layer's parameters."""

        def leaves_of(layer: Differentiated, x: Array, named: list[Array]) -> list[Any]:
            return jax.tree.leaves(self._pull_back(run, layer, x, named)[1])

        if self.analysis.leaves is None:
            varies = jax.tree.map(lambda _: False, layer), True, [True] * len(named)
            names = {len(jax.tree.leaves(layer)): LAYER_INPUT}
            self.analysis.leaves = varying_leaves(leaves_of, (layer, x, named), varies, names)
        leaves = jax.tree.leaves(pull_back)
        return [leaves[leaf.indices[0]] for leaf in self.analysis.leaves]


def _zeros(like: jax.ShapeDtypeStruct, varies_like: Array | None) -> Array:
    """Return zeros with the shape and dtype of ``like`` and the varying axes of ``varies_like``."""
    assert varies_like is not None, "a replay, which begins from the layer's input, reads all named values"
    return jnp.zeros_like(varies_like, shape=like.shape, dtype=like.dtype)
