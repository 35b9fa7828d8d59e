"""Values that a stage saves for backward, and the backward from these values.

With saves="inputs", a stage saves only its input, and backward replays the stage. With saves="residuals", it saves the
residuals of jax.vjp that the recompute settings leave, and replays only what these settings require.

The residuals are stored in entries of buffers. A pull-back of JAX is a tree whose leaves are arrays. Leaves computed
without message, tokens, targets and state (a weight, its cast to bfloat16, a dropout mask) are computed again and are
not saved. The others are concatenated into one vector for each dtype. It is as long as the longest of all stages, so
that different stages share a buffer. Leaves of layers whose values move to the host have separate vectors. Backward
traces the stage again to get a pull-back with the same tree and replaces its leaves by the saved ones. XLA removes
operations that lead only to replaced leaves.

If the schedule splits the backward, I computes all gradients except those of the weights of linear layers. Instead it
saves the input of each layer and the gradient of its output, and W multiplies them. I and W together compute the same
matrix products as B. In this project's model, linear layers give both to linear_products.LinearTaps, also inside a
recomputed block: a tap is a pair of zero arrays with the shapes of a layer's input and output, whose "gradients" are
these two. In functions of a user, deferred_products.py finds the matrix products in the traced backward.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from diptych.plans.model.values import LAYER_INPUT
from diptych.plans.schedule.lockstep import Saves
from jax_impl.linear_products import LinearTap, LinearTaps
from jax_impl.offload import is_on_host
from jax_impl.pipeline.deferred_products import DeferredProducts
from jax_impl.pipeline.packing import Packed, longest_vectors, pack, unpack
from jax_impl.pipeline.programs import StageProgram, Task
from jax_impl.recompute import varying_leaves, with_leaves


class Forward(NamedTuple):
    """The results of a forward."""

    output: Any
    """The message for the next stage, or the loss."""
    residuals: Packed
    """Values saved for backward."""
    state: Any
    """The new state of the rank."""


class Backward(NamedTuple):
    """The results of a backward."""

    gradients: Mapping[str, Array]
    """Gradients by parameter name; in a split backward, without the weights whose gradients W computes."""
    input_gradient: Any
    """Gradient of the input; 0 in the first stage. None stands for arrays of the message without gradient."""
    loss: Array | None
    """Loss of the last stage, if its forward did not compute it."""
    weight_operands: Packed
    """Operands of the weight gradients, saved for W."""


HOST_PREFIX = "host "
"""Prefix of the names of packed values that are stored on the host."""


class _ByPlacement(NamedTuple):
    """A pair of values, for residuals that stay on the device and for residuals that are stored on the host."""

    device: Any
    host: Any


def _join_placements(vectors: _ByPlacement) -> dict[str, Any]:
    return vectors.device | {HOST_PREFIX + dtype: vector for dtype, vector in vectors.host.items()}


def _split_placements(vectors: Mapping[str, Any]) -> _ByPlacement:
    device = {name: vector for name, vector in vectors.items() if not name.startswith(HOST_PREFIX)}
    host = {name.removeprefix(HOST_PREFIX): vector for name, vector in vectors.items() if name.startswith(HOST_PREFIX)}
    return _ByPlacement(device, host)


class _Results(NamedTuple):
    """The results of a pull-back."""

    loss: Any
    """Output of the stage, if its forward did not compute it."""
    input_gradient: Any
    gradients: dict[str, Array]
    """Gradients by name, without the weights that have taps; W computes these from the gradients of the taps."""
    taps: Any
    """Gradients of the taps."""


class StageAutodiff:
    """The forwards and backwards of stages, for one trace of the executor.

    Args:
        programs: programs of all stages.
        task: task of any stage, for its shapes.
        x: message to any stage, for its shape.
        saves: see diptych.plans.schedule.lockstep.
        split: True if backwards are split into I and W.
    """

    def __init__(self, programs: Sequence[StageProgram], task: Task, x: Any, saves: Saves, split: bool) -> None:
        self._saves = saves
        self._taps = {program: program.tap_shapes(task, x) if split else {} for program in programs}
        self._residual_leaves = {
            program: self._find_residuals(program, task, x) if saves == "residuals" else _ByPlacement([], [])
            for program in programs
        }
        self._vectors = _ByPlacement(
            *(
                longest_vectors([leaf.like for leaf in leaves] for leaves in each)
                for each in zip(*self._residual_leaves.values(), strict=True)
            )
        )
        self.residual_shapes = _join_placements(self._vectors)
        """Shapes of the packed values that a forward saves for backward; names on the host begin with HOST_PREFIX."""
        self._products = {
            program: self._find_products(program, task, x) for program in programs if split and program.defers_products
        }
        operands = [jax.tree.leaves(taps) for taps in self._taps.values()]
        operands += [products.operands for products in self._products.values()]
        self.weight_operand_shapes = longest_vectors(operands)
        """Shapes of the packed operands that I saves for W."""

    @property
    def skips_last_forward(self) -> bool:
        """True if the last stage needs no forward, because its backward runs it and no other rank waits for it."""
        return self._saves == "inputs"

    def forward(self, program: StageProgram, task: Task, x: Any) -> Forward:
        """Return the output (or the loss) of a stage and the values saved for backward."""
        if self._saves == "inputs":
            y, state = program.run(program.select(task), x, task)
            return Forward(y, {}, state)
        y, state, pull_back = self._pull_back(program, task, x)
        leaves = jax.tree.leaves(pull_back)
        saved = _ByPlacement(
            *(
                pack([leaves[leaf.indices[0]] for leaf in each], vectors)
                for each, vectors in zip(self._residual_leaves[program], self._vectors, strict=True)
            )
        )
        return Forward(y, _join_placements(saved), state)

    def backward(self, program: StageProgram, task: Task, x: Any, residuals: Packed, gradient: Any) -> Backward:
        """Run a full backward (B), or the part for inputs (I) if backwards are split.

        Args:
            program: program of the stage.
            task: the stage and the microbatch.
            x: message to the stage; read with saves="inputs".
            residuals: values that forward saved.
            gradient: gradient of the output, as differentiable() of it.
        """
        if program in self._products:
            results, operands = self._products[program].run_first(task, x, residuals, gradient)
            (loss, input_gradient), gradients = results
        else:
            loss, input_gradient, gradients, taps = self._run_backward(program, task, x, residuals, gradient)
            operands = jax.tree.leaves(taps)
        loss = loss if program.last and self.skips_last_forward else None
        return Backward(gradients, input_gradient, loss, pack(operands, self.weight_operand_shapes))

    def weight_gradients(self, program: StageProgram, task: Task, operands: Packed) -> dict[str, Array]:
        """Run W: return the gradients of the weights that I left out, from the operands that it saved."""
        if program in self._products:
            products = self._products[program]
            return products.run_rest(task, unpack(operands, products.operands))
        likes, structure = jax.tree.flatten(self._taps[program])
        taps = jax.tree.unflatten(structure, unpack(operands, likes))
        return {name: tap.products.weight_gradient(tap.input, tap.output, tap.scales) for name, tap in taps.items()}

    def _run_backward(self, program: StageProgram, task: Task, x: Any, residuals: Packed, gradient: Any) -> _Results:
        """Run the pull-back of a stage on the gradient of its output."""
        y, _, pull_back = self._pull_back(program, task, x)
        if self._saves == "residuals":
            all_leaves = self._residual_leaves[program]
            for leaves, packed in zip(all_leaves, _split_placements(residuals), strict=True):
                pull_back = with_leaves(pull_back, leaves, unpack(packed, [leaf.like for leaf in leaves]))
        gradients, input_gradient, taps = pull_back(gradient)
        return _Results(y if self.skips_last_forward else None, input_gradient, gradients, taps)

    def _pull_back(self, program: StageProgram, task: Task, x: Any) -> tuple[Any, Any, Callable[[Any], tuple]]:
        """Return output and state of a stage, and the pull-back to gradients of parameters, input and taps.

        Parameters on the host are represented by zeros on the device, whose gradients are those of the parameters.
        """
        parameters = program.select(task)
        taps = jax.tree.map(lambda like: _zeros(like, x), self._taps[program])
        on_host = {name: value for name, value in parameters.items() if is_on_host(value)}
        differentiated = {
            name: _zeros(value, x) if name in on_host else value
            for name, value in parameters.items()
            if name not in taps
        }

        def run(differentiated: dict[str, Array], x_inexact: Any, taps: dict[str, LinearTap]) -> tuple[Any, Any]:
            all_parameters = parameters | differentiated | on_host
            on_device = {name: all_parameters[name] for name in taps if name not in on_host}
            replays = self._saves == "inputs"
            with LinearTaps(on_device, taps), program.fetching(differentiated | taps, replays):
                y, state = program.run(all_parameters, _joined(x_inexact, x), task)
            return differentiable(y), (_without(y, differentiable(y)), state)

        if self._saves == "residuals":
            run = program.saving(run)
        y, pull_back, (others, state) = jax.vjp(run, differentiated, differentiable(x), taps, has_aux=True)
        return _joined(y, others), state, pull_back

    def _find_residuals(self, program: StageProgram, task: Task, x: Any) -> "_ByPlacement":
        """Return the leaves of a pull-back that depend on the message, the tokens, the targets or the rank's state."""

        def leaves(task: Task, x: Any) -> list[Any]:
            return jax.tree.leaves(self._pull_back(program, task, x)[2])

        varies = jax.tree.map(lambda _: False, task)
        state = jax.tree.map(lambda _: True, task.state)
        varies = varies._replace(batch=task.batch.varying(), state=state)
        names = {len(jax.tree.leaves(task)): LAYER_INPUT}
        found = varying_leaves(leaves, (task, x), (varies, jax.tree.map(lambda _: True, x)), names)
        moving = [leaf for leaf in found if _offloads(program, leaf)]
        return _ByPlacement([leaf for leaf in found if leaf not in moving], moving)

    def _find_products(self, program: StageProgram, task: Task, x: Any) -> DeferredProducts:
        """Return the split of a stage's backward into I and W."""

        def backward(task: Task, x: Any, residuals: Packed, gradient: Any) -> tuple[Any, dict[str, Array]]:
            results = self._run_backward(program, task, x, residuals, gradient)
            return (results.loss, results.input_gradient), results.gradients

        residuals = {dtype: _zeros(like, x) for dtype, like in self.residual_shapes.items()}
        gradient = differentiable(x)
        if program.last:
            loss = jax.eval_shape(lambda: self._pull_back(program, task, x)[0])
            gradient = _zeros(loss, x)
        return DeferredProducts(backward, task, x, residuals, gradient)


def _offloads(program: StageProgram, leaf: Any) -> bool:
    """Return True if a saved leaf of a pull-back moves to the host."""
    return program.offloads(leaf.layer, leaf.name, leaf.like.size * leaf.like.dtype.itemsize)


def differentiable(tree: Any) -> Any:
    """Return a pytree with None for every array that has no gradient, such as integers."""
    return jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jnp.inexact) else None, tree)


def _without(tree: Any, part: Any) -> Any:
    """Return a pytree with None for every array that ``part`` has."""
    return jax.tree.map(lambda own, x: None if own is not None else x, part, tree, is_leaf=lambda x: x is None)


def _joined(part: Any, others: Any) -> Any:
    """Return a pytree with the arrays of ``part``, and with arrays of ``others`` where ``part`` has None."""
    return jax.tree.map(lambda own, x: x if own is None else own, part, others, is_leaf=lambda x: x is None)


def _zeros(like: Any, varies_like: Any) -> Array:
    """Return zeros on the device with the shape and dtype of ``like`` and the varying axes of ``varies_like``."""
    return jnp.zeros_like(jax.tree.leaves(varies_like)[0], shape=like.shape, dtype=like.dtype)
