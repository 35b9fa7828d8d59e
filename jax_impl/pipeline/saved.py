"""Values that a stage saves for backward, and the backward from these values.

With keep="inputs", a stage saves only its input, and backward replays the stage. With keep="residuals", it saves the
residuals of jax.vjp that the recompute settings leave, and replays only what these settings require.

The residuals are stored in slots. A pull-back of JAX is a tree whose leaves are arrays. Leaves computed from parameters
alone (a weight, its cast to bfloat16) are available anyway and are not saved. The others are concatenated into one
vector for each dtype, as long as the longest of all stages, so that different stages share a buffer. Backward traces
the stage again to get a pull-back with the same tree and replaces its leaves by the saved ones. XLA removes operations
that lead only to replaced leaves.

If the schedule splits the backward, I computes all gradients except those of the weights of linear maps. Instead it
saves the input of each map and the gradient of its output (ops._LinearTaps), and W multiplies them. I and W together
compute the same matrix products as B.
"""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from diptych.plans.recompute import RecomputeBlock
from diptych.plans.schedule.lockstep import Keep
from jax_impl.offload import is_on_host, single_pass, without_offload
from jax_impl.ops import _LinearTaps
from jax_impl.pipeline.stages import Batch, Program, StagedParameters
from jax_impl.recompute import VaryingLeaf, recompute_policy, varying_leaves, with_leaves


class Task(NamedTuple):
    """A stage and a microbatch."""

    params: StagedParameters
    """Parameters of the rank."""
    batch: Batch
    """The microbatch."""
    vp_stage: Array
    first_layer: Array


class Backward(NamedTuple):
    """The results of a backward."""

    gradients: Mapping[str, Array]
    """Gradients by parameter name; in a split backward, without the weights whose gradients W computes."""
    input_gradient: Array
    """Gradient of the input; 0 in the first stage."""
    loss: Array | None
    """Loss of the last stage, if its forward did not compute it."""
    weight_operands: "Packed"
    """Operands of the weight gradients, saved for W."""


Packed = dict[str, Array]
"""Concatenated arrays, by dtype."""


class StageAutodiff:
    """The forwards and backwards of stages, for one trace of the executor.

    Args:
        programs: programs of all stages.
        task: task of any stage, for its shapes.
        x: input of any stage, for its shape.
        keep: see diptych.plans.schedule.lockstep.
        split: True if backwards are split into I and W.
    """

    def __init__(self, programs: Sequence[Program], task: Task, x: Array, keep: Keep, split: bool) -> None:
        self._keep = keep
        self._taps = {program: _tap_shapes(program, task, x) if split else {} for program in programs}
        self._residual_leaves = {
            program: self._find_residuals(program, task, x) if keep == "residuals" else [] for program in programs
        }
        self.residual_shapes = _longest_vectors(
            [[leaf.like for leaf in leaves] for leaves in self._residual_leaves.values()]
        )
        """Shapes of the packed values that a forward saves for backward."""
        self.weight_operand_shapes = _longest_vectors([jax.tree.leaves(taps) for taps in self._taps.values()])
        """Shapes of the packed operands that I saves for W."""

    @property
    def skips_last_forward(self) -> bool:
        """True if the last stage needs no forward, because its backward runs it and no other rank waits for it."""
        return self._keep == "inputs"

    def forward(self, program: Program, task: Task, x: Array) -> tuple[Array, Packed]:
        """Return the output (or the loss) of a stage and the values saved for backward."""
        if self._keep == "inputs":
            return program(program.select_parameters(task.params, task.vp_stage), x, task.batch, task.first_layer), {}
        y, pull_back = self._pull_back(program, task, x)
        leaves = jax.tree.leaves(pull_back)
        return y, _pack([leaves[leaf.indices[0]] for leaf in self._residual_leaves[program]], self.residual_shapes)

    def backward(self, program: Program, task: Task, x: Array, residuals: Packed, gradient: Array) -> Backward:
        """Run a full backward (B), or the part for inputs (I) if backwards are split.

        Args:
            program: program of the stage.
            task: the stage and the microbatch.
            x: input of the stage; read with keep="inputs".
            residuals: values that forward saved.
            gradient: gradient of the output.
        """
        y, pull_back = self._pull_back(program, task, x)
        if self._keep == "residuals":
            leaves = self._residual_leaves[program]
            pull_back = with_leaves(pull_back, leaves, _unpack(residuals, [leaf.like for leaf in leaves]))
        gradients, dx, taps = pull_back(gradient)
        loss = y if program.last and self.skips_last_forward else None
        return Backward(gradients, dx, loss, _pack(jax.tree.leaves(taps), self.weight_operand_shapes))

    def weight_gradients(self, program: Program, operands: Packed) -> dict[str, Array]:
        """Run W: return the gradients of the weights that I left out, from the operands that it saved."""
        likes, structure = jax.tree.flatten(self._taps[program])
        taps = jax.tree.unflatten(structure, _unpack(operands, likes))
        return {name: jnp.einsum("no,ni->oi", _rows(grad), _rows(x)) for name, (x, grad) in taps.items()}

    def _pull_back(self, program: Program, task: Task, x: Array) -> tuple[Array, Callable[[Array], tuple]]:
        """Return the output of a stage, and the pull-back to gradients of parameters, input and taps.

        Parameters on the host are represented by zeros on the device, whose gradients are those of the parameters.
        """
        parameters = program.select_parameters(task.params, task.vp_stage)
        taps = jax.tree.map(lambda like: _zeros(like, x), self._taps[program])
        on_host = {name: value for name, value in parameters.items() if is_on_host(value)}
        differentiated = {
            name: _zeros(value, x) if name in on_host else value
            for name, value in parameters.items()
            if name not in taps
        }

        def run(differentiated: dict[str, Array], x: Array, taps: dict[str, tuple[Array, Array]]) -> Array:
            all_parameters = parameters | differentiated | on_host
            on_device = {name: all_parameters[name] for name in taps if name not in on_host}
            with _LinearTaps(on_device, taps), self._offloaded(program, differentiated | taps):
                return program(all_parameters, x, task.batch, task.first_layer)

        if self._keep == "residuals" and not program.recomputes:
            # Without a policy JAX saves everything that a derivative reads, and XLA fuses most of it away; in a slot
            # everything would be stored. No matrix product lies between named values, so saving these is enough.
            policy = recompute_policy(program.config, RecomputeBlock("none", ()))
            run = jax.checkpoint(run, policy=policy)  # pyright: ignore[reportPrivateImportUsage]
        return jax.vjp(run, differentiated, x, taps)

    def _offloaded(self, program: Program, gradients: Mapping[str, Any]) -> contextlib.AbstractContextManager:
        """Return a context in which the layers of a stage are fetched by the plan of one action.

        Args:
            program: program of the stage.
            gradients: for every parameter of a layer, zeros that receive its gradient, or its taps.
        """
        if not program.config.enable_tensor_offload:
            return contextlib.nullcontext()
        by_layer: dict[int, list[Any]] = {number: [] for number in program.numbers}
        for name in program.names:
            number = program.layer_of(name)
            if number is not None:
                by_layer[number].append(gradients[name])
        replays = self._keep == "inputs"
        context = single_pass(program.config, program.blocks, includes_backward=replays)
        return context._replace(gradients=by_layer, activations={}, named=not replays).active()

    def _find_residuals(self, program: Program, task: Task, x: Array) -> list[VaryingLeaf]:
        """Return the leaves of a pull-back that depend on the microbatch."""

        def leaves(task: Task, x: Array) -> list[Any]:
            return jax.tree.leaves(self._pull_back(program, task, x)[1])

        varies = jax.tree.map(lambda _: False, task)
        varies = varies._replace(batch=varies.batch._replace(tokens=True, targets=True))
        return varying_leaves(leaves, (task, x), (varies, True))


def _tap_shapes(program: Program, task: Task, x: Array) -> dict[str, tuple]:
    """Return the shapes of the input and output of every linear map, by the name of its weight."""

    def run(task: Task, x: Array) -> Array:
        nonlocal taps
        parameters = jax.device_put(program.select_parameters(task.params, task.vp_stage), jax.memory.Space.Device)
        taps = _LinearTaps({name: value for name, value in parameters.items() if not program.is_embedding(name)})
        with taps, without_offload():
            return program(parameters, x, task.batch, task.first_layer)

    taps = _LinearTaps({})
    jax.eval_shape(run, task, x)
    return taps.shapes


def _rows(x: Array) -> Array:
    """Return an array with all axes but the last one joined."""
    return x.reshape(-1, x.shape[-1])


def _zeros(like: Any, varies_like: Array) -> Array:
    """Return zeros on the device with the shape and dtype of ``like`` and the varying axes of ``varies_like``."""
    return jnp.zeros_like(varies_like, shape=like.shape, dtype=like.dtype)


def _longest_vectors(programs: Sequence[Sequence[jax.ShapeDtypeStruct]]) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shape of one vector for each dtype that can hold the arrays of any program."""
    lengths: dict[str, int] = {}
    for likes in programs:
        for dtype in {str(like.dtype) for like in likes}:
            length = sum(math.prod(like.shape) for like in likes if like.dtype == dtype)
            lengths[dtype] = max(lengths.get(dtype, 0), length)
    return {dtype: jax.ShapeDtypeStruct((length,), dtype) for dtype, length in lengths.items()}


def _pack(arrays: Sequence[Array], vectors: Mapping[str, jax.ShapeDtypeStruct]) -> Packed:
    """Concatenate arrays by dtype and pad with zeros."""
    packed = {}
    for dtype, vector in vectors.items():
        parts = [array.reshape(-1) for array in arrays if array.dtype == dtype]
        used = sum(part.size for part in parts)
        packed[dtype] = jnp.concatenate([*parts, jnp.zeros(vector.size - used, dtype)])
    return packed


def _unpack(packed: Packed, likes: Sequence[jax.ShapeDtypeStruct]) -> list[Array]:
    """Return the arrays that _pack concatenated."""
    starts = dict.fromkeys(packed, 0)
    arrays = []
    for like in likes:
        dtype = str(like.dtype)
        size = math.prod(like.shape)
        arrays.append(packed[dtype][starts[dtype] : starts[dtype] + size].reshape(like.shape))
        starts[dtype] += size
    return arrays
