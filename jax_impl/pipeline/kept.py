"""What a stage keeps from its forward to its backward, and how backward goes on from there.

With keep="inputs" a stage keeps its input alone, and backward runs the stage again. With keep="residuals" it keeps what
jax.vjp would, as the recompute settings leave it, and nothing is run again but what they say.

The residuals lie in slots. A pull-back of JAX's is a tree whose leaves are arrays: those computed from parameters alone
(a weight, its cast to bfloat16) are there anyway and not kept; the others are laid end to end, in one vector a type, as
long as the longest of any stage, so that stages of unlike build share a buffer. Backward traces the stage a second time
to have a pull-back of the same tree, and puts the kept leaves in; what led only to the leaves it replaces is dead, and
compiled away.

Where the schedule splits the backward, I takes all gradients but those of linear maps' weights. In their place it
keeps each map's input and the gradient of its output (ops._LinearTaps), and W multiplies the two: together as much
work as B, each matrix product once.
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
from jax_impl.offload import is_on_host, lone_pass, without_offload
from jax_impl.ops import _LinearTaps
from jax_impl.pipeline.stages import Batch, Program, StagedParameters
from jax_impl.recompute import VaryingLeaf, recompute_policy, varying_leaves, with_leaves


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
    """By the program's names; where backwards are split, without the weights that W is for."""
    input_gradient: Array
    """0 in the first stage."""
    loss: Array | None
    """Of the last stage, where forward left it to backward."""
    weights: "Packed"
    """Kept for W."""


Packed = dict[str, Array]
"""By type: arrays laid end to end."""


class Keeper:
    """Runs forwards and backwards of stages, for one tracing of the executor.

    Args:
        programs: of all stages.
        task, x: any stage's, for their shapes.
        keep: see diptych.plans.schedule.lockstep.
        split: whether backwards are split in I and W.
    """

    def __init__(self, programs: Sequence[Program], task: Task, x: Array, keep: Keep, split: bool) -> None:
        self._keep = keep
        self._taps = {program: _tap_shapes(program, task, x) if split else {} for program in programs}
        self._residuals = {
            program: self._find_residuals(program, task, x) if keep == "residuals" else [] for program in programs
        }
        self.kept = _longest([[leaf.like for leaf in leaves] for leaves in self._residuals.values()])
        """Shapes of what a forward keeps."""
        self.weights = _longest([jax.tree.leaves(taps) for taps in self._taps.values()])
        """Shapes of what I keeps for W."""

    @property
    def skips_last_forward(self) -> bool:
        """Whether the last stage's forward has nothing to do: nobody waits for its output, and backward runs it."""
        return self._keep == "inputs"

    def forward(self, program: Program, task: Task, x: Array) -> tuple[Array, Packed]:
        """Output (or loss) of a stage, and what is kept."""
        if self._keep == "inputs":
            return program(program.take(task.params, task.vp_stage), x, task.batch, task.first_layer), {}
        y, pull_back = self._pull_back(program, task, x)
        leaves = jax.tree.leaves(pull_back)
        return y, _pack([leaves[leaf.places[0]] for leaf in self._residuals[program]], self.kept)

    def backward(self, program: Program, task: Task, x: Array, kept: Packed, gradient: Array) -> Backward:
        """Gradients, given that of the output: B, or I.

        Args:
            x: the stage's input; read with keep="inputs".
            kept: by forward.
        """
        y, pull_back = self._pull_back(program, task, x)
        if self._keep == "residuals":
            residuals = self._residuals[program]
            pull_back = with_leaves(pull_back, residuals, _unpack(kept, [leaf.like for leaf in residuals]))
        gradients, dx, taps = pull_back(gradient)
        loss = y if program.last and self.skips_last_forward else None
        return Backward(gradients, dx, loss, _pack(jax.tree.leaves(taps), self.weights))

    def weight_gradients(self, program: Program, weights: Packed) -> dict[str, Array]:
        """W: gradients of the weights that I left out."""
        likes, structure = jax.tree.flatten(self._taps[program])
        taps = jax.tree.unflatten(structure, _unpack(weights, likes))
        return {name: jnp.einsum("bto,bti->oi", grad, x) for name, (x, grad) in taps.items()}

    def _pull_back(self, program: Program, task: Task, x: Array) -> tuple[Array, Callable[[Array], tuple]]:
        """A stage's output, and what takes the output's gradient to those of parameters, input and taps.

        Layers' parameters that lie on the host have stand-ins on the device, whose gradients are theirs.
        """
        parameters = program.take(task.params, task.vp_stage)
        taps = jax.tree.map(lambda like: _zeros(like, x), self._taps[program])
        away = {name: value for name, value in parameters.items() if is_on_host(value)}
        wanted = {
            name: _zeros(value, x) if name in away else value for name, value in parameters.items() if name not in taps
        }

        def run(wanted: dict[str, Array], x: Array, taps: dict[str, tuple[Array, Array]]) -> Array:
            given = parameters | wanted | away
            here = {name: given[name] for name in taps if name not in away}
            with _LinearTaps(here, taps), self._offloaded(program, wanted | taps):
                return program(given, x, task.batch, task.first_layer)

        if self._keep == "residuals" and not program.recomputes:
            # Without a policy JAX keeps whatever any derivative reads, for XLA to fuse most of it away; in a slot it
            # would all be stored. Between named values there is no matrix product, so those alone are kept.
            policy = recompute_policy(program.config, RecomputeBlock("none", ()))
            run = jax.checkpoint(run, policy=policy)  # pyright: ignore[reportPrivateImportUsage]
        return jax.vjp(run, wanted, x, taps)

    def _offloaded(self, program: Program, gradients: Mapping[str, Any]) -> contextlib.AbstractContextManager:
        """While active, a stage's layers are fetched as the plan of one of its actions says.

        Args:
            program: of the stage.
            gradients: of every layer's parameters: a stand-in, or taps.
        """
        if not program.config.enable_tensor_offload:
            return contextlib.nullcontext()
        by_layer: dict[int, list[Any]] = {number: [] for number in program.numbers}
        for name in program.names:
            number = program.layer_of(name)
            if number is not None:
                by_layer[number].append(gradients[name])
        again = self._keep == "inputs"
        told = lone_pass(program.config, program.blocks, turns=again)
        return told._replace(gradients=by_layer, activations={}, named=not again).active()

    def _find_residuals(self, program: Program, task: Task, x: Array) -> list[VaryingLeaf]:
        """Leaves of a pull-back that are made of what a microbatch brings."""

        def leaves(task: Task, x: Array) -> list[Any]:
            return jax.tree.leaves(self._pull_back(program, task, x)[1])

        brought = jax.tree.map(lambda _: False, task)
        brought = brought._replace(batch=brought.batch._replace(tokens=True, targets=True))  # and x
        return varying_leaves(leaves, (task, x), (brought, True))


def _tap_shapes(program: Program, task: Task, x: Array) -> dict[str, tuple]:
    """By name of a linear map's weight: shapes of the map's input and output."""

    def run(task: Task, x: Array) -> Array:
        nonlocal taps
        parameters = jax.device_put(program.take(task.params, task.vp_stage), jax.memory.Space.Device)
        taps = _LinearTaps({name: value for name, value in parameters.items() if not program.looks_up(name)})
        with taps, without_offload():
            return program(parameters, x, task.batch, task.first_layer)

    taps = _LinearTaps({})
    jax.eval_shape(run, task, x)
    return taps.shapes


def _zeros(like: Any, beside: Array) -> Array:
    """On the device, of a shape and type; differing by rank where their neighbour does."""
    return jnp.zeros_like(beside, shape=like.shape, dtype=like.dtype)


def _longest(programs: Sequence[Sequence[jax.ShapeDtypeStruct]]) -> dict[str, jax.ShapeDtypeStruct]:
    """Vectors, one a type, that hold the arrays of any program."""
    lengths: dict[str, int] = {}
    for likes in programs:
        for dtype in {str(like.dtype) for like in likes}:
            length = sum(math.prod(like.shape) for like in likes if like.dtype == dtype)
            lengths[dtype] = max(lengths.get(dtype, 0), length)
    return {dtype: jax.ShapeDtypeStruct((length,), dtype) for dtype, length in lengths.items()}


def _pack(arrays: Sequence[Array], vectors: Mapping[str, jax.ShapeDtypeStruct]) -> Packed:
    """Lay arrays end to end, by type, and fill up with zeros."""
    packed = {}
    for dtype, vector in vectors.items():
        parts = [array.reshape(-1) for array in arrays if array.dtype == dtype]
        used = sum(part.size for part in parts)
        packed[dtype] = jnp.concatenate([*parts, jnp.zeros(vector.size - used, dtype)])
    return packed


def _unpack(packed: Packed, likes: Sequence[jax.ShapeDtypeStruct]) -> list[Array]:
    """The inverse of _pack."""
    starts = dict.fromkeys(packed, 0)
    arrays = []
    for like in likes:
        dtype, size = str(like.dtype), math.prod(like.shape)
        arrays.append(packed[dtype][starts[dtype] : starts[dtype] + size].reshape(like.shape))
        starts[dtype] += size
    return arrays
