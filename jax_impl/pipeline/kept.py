"""What a stage keeps from its forward to its backward, and how backward goes on from there.

InputsKeeper keeps nothing but the stage's input, and runs the stage again. ResidualsKeeper keeps what jax.vjp would,
which is what the recompute settings leave: nothing is run again but what they say.

The residuals lie in slots. A pull-back of JAX's is a tree whose leaves are arrays: those computed from parameters
alone (a weight, its cast to bfloat16) are there anyway and not kept; the others are laid end to end in one vector a
type, as long as the longest of any stage, so that stages of unlike build share a buffer. Backward traces the stage a
second time to have a pull-back of the same tree, and puts the kept leaves in; what only led to the leaves it replaces
is dead, and compiled away.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import Literal

from jax_impl.pipeline.stages import Batch, Program, StagedParameters
from jax_impl.recompute import recompute_policy
from plans.recompute import RecomputeBlock


class Task(NamedTuple):
    """One stage at one microbatch."""

    params: StagedParameters
    """The rank's."""
    batch: Batch
    """The microbatch's."""
    vp_stage: Array
    first_layer: Array


class Backward(NamedTuple):
    """What a backward gives."""

    gradients: Mapping[str, Array]
    """By the program's names; with a split backward, without the weights of linear maps."""
    input_gradient: Array
    """0 in the first stage."""
    loss: Array | None
    """Where this computed it."""
    weights: Any
    """Kept for the gradients of weights; () without a split."""


class Keeper(Protocol):
    """Runs forwards and backwards of stages, and says what lies between them."""

    runs_last_forward: bool
    """Whether the last stage's forward does anything; else it is left to its backward."""

    def shapes(self, programs: tuple[Program, ...], task: Task, x: Array) -> tuple[Any, Any]:
        """Shapes and types of what a forward keeps, and of what I keeps for W; the same for every program."""
        ...

    def forward(self, program: Program, task: Task, x: Array) -> tuple[Array, Any]:
        """Output (or loss), and what is kept."""
        ...

    def backward(self, program: Program, task: Task, x: Array, kept: Any, gradient: Array) -> Backward:
        """Gradients, given that of the output."""
        ...


class InputsKeeper:
    """Keeps the stage's input; backward runs the stage again."""

    runs_last_forward = False  # nobody waits for its output, and backward computes it anyway

    def shapes(self, programs: tuple[Program, ...], task: Task, x: Array) -> tuple[Any, Any]:
        """Nothing: the input lies in its own buffer."""
        return (), ()

    def forward(self, program: Program, task: Task, x: Array) -> tuple[Array, Any]:
        """The stage itself."""
        return _function(program, task)(program.take(task.params, task.vp_stage), x), ()

    def backward(self, program: Program, task: Task, x: Array, kept: Any, gradient: Array) -> Backward:
        """Forward and backward of the stage."""
        y, pull_back = jax.vjp(_function(program, task), program.take(task.params, task.vp_stage), x)
        gradients, dx = pull_back(gradient)
        return Backward(gradients, dx, y if program.last else None, ())


class ResidualsKeeper:
    """Keeps the residuals of jax.vjp, for one tracing of the executor."""

    runs_last_forward = True  # it is where the residuals come from

    def __init__(self) -> None:
        self._layouts: dict[Program, _Layout] = {}
        self._lengths: dict[str, int] = {}

    def shapes(self, programs: tuple[Program, ...], task: Task, x: Array) -> tuple[Any, Any]:
        """A vector a type, as long as the longest of any program."""
        self._layouts = {program: _layout(program, task, x) for program in programs}
        for layout in self._layouts.values():
            for dtype, leaves in layout.items():
                self._lengths[dtype] = max(self._lengths.get(dtype, 0), sum(math.prod(leaf.shape) for leaf in leaves))
        return {dtype: jax.ShapeDtypeStruct((length,), dtype) for dtype, length in self._lengths.items()}, ()

    def forward(self, program: Program, task: Task, x: Array) -> tuple[Array, Any]:
        """The stage, and its residuals."""
        y, pull_back = jax.vjp(_named(program, task), program.take(task.params, task.vp_stage), x)
        leaves, layout = jax.tree.leaves(pull_back), self._layouts[program]
        kept = {}
        for dtype, length in self._lengths.items():
            parts = [leaves[leaf.places[0]].reshape(-1) for leaf in layout.get(dtype, [])]
            used = sum(map(len, parts))
            kept[dtype] = jnp.concatenate([*parts, jnp.zeros(length - used, dtype)])
        return y, kept

    def backward(self, program: Program, task: Task, x: Array, kept: Any, gradient: Array) -> Backward:
        """The pull-back, with its leaves from the slot."""
        # What is traced here for other leaves than these comes from parameters; that x is not theirs does not show.
        pull_back = jax.vjp(_named(program, task), program.take(task.params, task.vp_stage), jnp.zeros_like(x))[1]
        leaves, structure = jax.tree.flatten(pull_back)
        for dtype, parts in self._layouts[program].items():
            ends = np.cumsum([math.prod(leaf.shape) for leaf in parts]).tolist()
            for leaf, start, end in zip(parts, [0, *ends], ends, strict=False):
                for place in leaf.places:
                    leaves[place] = kept[dtype][start:end].reshape(leaf.shape)
        gradients, dx = jax.tree.unflatten(structure, leaves)(gradient)
        return Backward(gradients, dx, None, ())


class _Leaf(NamedTuple):
    """A residual that is kept."""

    places: tuple[int, ...]
    """Of equal leaves in the pull-back."""
    shape: tuple[int, ...]


_Layout = dict[str, list[_Leaf]]
"""By type: the residuals of a program, in the order in which they are laid end to end."""


def _layout(program: Program, task: Task, x: Array) -> _Layout:
    """Which leaves of a pull-back have to be kept: those that a microbatch's values went into."""

    def residuals(task: Task, x: Array) -> list[Array]:
        pull_back = jax.vjp(_named(program, task), program.take(task.params, task.vp_stage), x)[1]
        return jax.tree.leaves(pull_back)

    traced = jax.make_jaxpr(residuals)(task, x).jaxpr
    fixed, read = (jax.tree.map(lambda _, v=value: v, task) for value in (False, True))
    batch = fixed.batch._replace(tokens=read.batch.tokens, targets=read.batch.targets)
    tainted = {
        variable
        for variable, varies in zip(traced.invars, jax.tree.leaves((fixed._replace(batch=batch), True)), strict=True)
        if varies
    }
    for equation in traced.eqns:
        if any(not isinstance(variable, Literal) and variable in tainted for variable in equation.invars):
            tainted.update(equation.outvars)
    places: dict[Any, list[int]] = {}
    for place, variable in enumerate(traced.outvars):
        if not isinstance(variable, Literal) and variable in tainted:
            places.setdefault(variable, []).append(place)
    layout: _Layout = {}
    for variable, equal in places.items():
        layout.setdefault(str(variable.aval.dtype), []).append(_Leaf(tuple(equal), variable.aval.shape))
    return layout


def _function(program: Program, task: Task) -> Callable[[Mapping[str, Array], Array], Array]:
    """The stage as a function of its parameters and its input."""
    return lambda parameters, x: program(parameters, x, task.batch, task.first_layer)


def _named(program: Program, task: Task) -> Callable[[Mapping[str, Array], Array], Array]:
    """The same, keeping named values alone where nothing is recomputed.

    Without a policy JAX keeps whatever the derivative of any operation reads, expecting XLA to fuse most of it away; in
    a slot it would all be stored. What lies between named values costs no matrix product. Where blocks are recomputed,
    their own policies stand.
    """
    function = _function(program, task)
    if program.recomputes:
        return function
    policy = recompute_policy(program.config, RecomputeBlock("none", ()))
    return jax.checkpoint(function, policy=policy)  # pyright: ignore[reportPrivateImportUsage]
