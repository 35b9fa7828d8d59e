"""The tick loop: one program that every rank runs, over the rows of the schedule's table.

A tick stores what arrived, runs one action, and sends its result on:

    inputs[slot], gradients[slot] = what arrived
    y, dx = switch(nothing, forward, backward, weights)     each for the program of the row's stage
    what arrives next = ppermute(y, to the next rank), ppermute(dx, to the rank before)

Where ranks send, they wait for each other. With a switch for each kind of action XLA sends y before it comes to the
backward, and a tick takes as long as its slowest forward and its slowest backward together; with one it takes as long
as its slowest rank. Fused ticks, in which most ranks run a forward and a backward, have one for each.

Ranks take different branches at the same tick, and a collective that only some of them reach hangs or is silently
wrong. So there is none inside a branch. That takes care with gradients: of a value that is equal on every rank JAX sums
the gradient over ranks where it is taken, inside the branch. Everything is therefore made to differ by rank first
(vary), the local loss is differentiated, and sums over ranks are taken once, after the last tick.

Ranks that share sequences do exchange inside a branch, where their layers are: they are at the same place of the
pipeline, so that all of them take it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from diptych.plans.schedule.lockstep import Keep, LockstepTable
from diptych_kernels.mesh_axes import vary
from jax_impl.offload import Moved, is_on_host
from jax_impl.pipeline.kept import Keeper, Packed, Task
from jax_impl.pipeline.stages import CONTEXT_AXIS, Batch, Program, StagedParameters, Stages

PIPELINE_AXIS, DATA_AXIS = "pp", "dp"
"""Mesh axes: over stages; over parts of every microbatch."""


class _State(NamedTuple):
    """What one tick hands the next."""

    inputs: Array
    """[slots + 1, b, T, S*D]; like every buffer, with a scratch slot at the end."""
    gradients: Array
    kept: Any
    weights: Any
    arrived_inputs: tuple[Array, ...]
    """By shift. [b, T, S*D]"""
    arrived_gradients: tuple[Array, ...]
    sums: StagedParameters
    """Gradients of parameters so far."""
    losses: Array
    """[m]"""


def run_ticks(
    stages: Stages,
    ticks: LockstepTable,
    keep: Keep,
    axes: tuple[str, ...],
    params: StagedParameters,
    batch: Batch,
    moved: Moved,
) -> tuple[Array, StagedParameters]:
    """Losses of the microbatches and the gradients of their mean, on one rank among all that run this alike.

    Args:
        stages: how the model is cut.
        ticks: the schedule.
        keep: as ticks were compiled with.
        axes: of the mesh this runs under.
        params: the rank's, layers [v, layers, ...].
        batch: all microbatches, the same on every rank.
        moved: told what of a forward's waits on the host for its backward.

    Returns:
        Losses [m], the same on every rank. Gradients as params, those of the ends the same on every rank; without
        leaves where the schedule is forward only.
    """
    params, batch = vary((params, batch), axes)
    run = _Run(stages, ticks, keep, axes, params, batch, moved)
    rank = lax.axis_index(PIPELINE_AXIS)
    rows = jax.tree.map(lambda column: jnp.asarray(column)[rank], ticks.rows)
    state = lax.scan(run.tick, run.start(), rows)[0]
    # Only the last stage has losses; first and last stage both add to a tied embedding.
    losses, ends = lax.psum((state.losses, state.sums.ends), PIPELINE_AXIS)
    result = losses, state.sums._replace(ends=ends)
    alike = tuple(axis for axis in (DATA_AXIS, CONTEXT_AXIS) if axis in axes)
    return lax.pmean(result, alike) if alike else result


class _Done(NamedTuple):
    """What a tick's work gives; within a branch None stands for zeros."""

    losses: Array
    """Of all ticks so far. [m]"""
    sums: StagedParameters
    """Of all ticks so far."""
    output: Any = None
    """[b, T, S*D]"""
    input_gradient: Any = None
    """[b, T, S*D]"""
    kept: Any = None
    """Packed, by a forward for its backward."""
    weights: Any = None
    """Packed, by I for W."""


class _Run:
    """A rank's course through the table. Arguments as run_ticks', parameters and batch made to vary."""

    def __init__(
        self,
        stages: Stages,
        ticks: LockstepTable,
        keep: Keep,
        axes: tuple[str, ...],
        params: StagedParameters,
        batch: Batch,
        moved: Moved,
    ) -> None:
        self._stages, self._ticks, self._axes, self._params, self._batch = stages, ticks, axes, params, batch
        self._moved = moved
        self._forward_only, self._splits = ticks.schedule.forward_only, ticks.schedule.splits_backward
        kinds = {action.kind for actions in ticks.schedule.actions for action in actions}
        self._also_whole = kinds.issuperset("BI")
        """Some backwards are split and some are not: those have their W in the same tick."""
        config = stages.config
        hidden = (*batch.tokens.shape[1:], config.residual_streams * config.hidden_size)
        self._payload = vary(jnp.zeros(hidden, config.compute_dtype), axes)
        task = self._task(jnp.int32(0), jnp.int32(0))
        keep = "inputs" if self._forward_only else keep
        self._keeper = Keeper(stages.programs, task, self._payload, keep, self._splits)
        hidden_like = jax.ShapeDtypeStruct(self._payload.shape, self._payload.dtype)
        self._likes = dict.fromkeys(("output", "input_gradient"), hidden_like)
        self._likes |= {"kept": self._keeper.kept, "weights": self._keeper.weights}

    def start(self) -> _State:
        """Empty buffers and sums."""
        slots, arrived = self._ticks.buffer_sizes, (self._payload,) * len(self._ticks.shifts)
        nothing = StagedParameters((), {})

        def buffer(length: int, like: Any) -> Any:
            return jax.tree.map(lambda x: jnp.zeros((length + 1, *x.shape), x.dtype), like)

        state = _State(
            inputs=buffer(slots.inputs, self._payload),
            gradients=buffer(slots.gradients, self._payload),
            kept=buffer(slots.kept, self._keeper.kept),
            weights=buffer(slots.weights, self._keeper.weights),
            arrived_inputs=arrived,
            arrived_gradients=arrived,
            sums=nothing if self._forward_only else jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), self._params),
            losses=jnp.zeros(len(self._batch.tokens), self._stages.config.params_dtype),
        )
        state = vary(state, self._axes)
        return state._replace(kept={dtype: self._away(buffer) for dtype, buffer in state.kept.items()})

    def tick(self, state: _State, row: Any) -> tuple[_State, None]:
        """One row of the table: diptych.plans.schedule.lockstep.Rows, of arrays."""
        inputs, gradients = state.inputs, state.gradients
        for shift, (x, gradient) in enumerate(zip(state.arrived_inputs, state.arrived_gradients, strict=True)):
            inputs = inputs.at[row.input_arrivals[shift]].set(x)
            gradients = gradients.at[row.gradient_arrivals[shift]].set(gradient)
        state = state._replace(inputs=inputs, gradients=gradients)
        done = _Done(state.losses, state.sums)
        state, done = (self._two_actions if self._ticks.fused else self._one_action)(state, row, done)
        state = state._replace(
            weights=_store(state.weights, row.backward_weights, done.weights),
            losses=done.losses,
            sums=done.sums,
            arrived_inputs=self._send(done.output, 1),
        )
        if not self._forward_only:
            state = state._replace(arrived_gradients=self._send(done.input_gradient, -1))
        return state, None

    def _one_action(self, state: _State, row: Any, done: _Done) -> tuple[_State, _Done]:
        """Of a canonical tick: under one switch, so that no rank sends, and so waits, before it has done its own."""
        forwards, backwards, has_weight_grad = (
            stage >= 0 for stage in (row.forward_stage, row.backward_stage, row.weights_stage)
        )

        def backward(done: _Done) -> _Done:
            done = self._backward(state, row, done)
            if not self._also_whole:
                return done
            return self._switch(has_weight_grad, [_nothing, partial(self._weight_gradients, row, done.weights)], done)

        def weights(done: _Done) -> _Done:
            return self._weight_gradients(row, _slot(state.weights, row.weights_kept), done)

        branches: list[Callable[[_Done], _Done]] = [_nothing, partial(self._forward, state, row)]
        if not self._forward_only:
            branches.append(backward)
        if self._splits:
            branches.append(weights)
        choice = jnp.where(forwards, 1, jnp.where(backwards, 2, jnp.where(has_weight_grad, 3, 0)))
        done = self._switch(choice, branches, done)
        return state._replace(kept=self._keep(state.kept, row.forward_kept, done.kept)), done

    def _two_actions(self, state: _State, row: Any, done: _Done) -> tuple[_State, _Done]:
        """Of a fused tick: a forward, and a backward that may read what it kept; either may be nothing."""
        done = self._switch(row.forward_stage >= 0, [_nothing, partial(self._forward, state, row)], done)
        state = state._replace(kept=self._keep(state.kept, row.forward_kept, done.kept))
        return state, self._switch(row.backward_stage >= 0, [_nothing, partial(self._backward, state, row)], done)

    def _forward(self, state: _State, row: Any, done: _Done) -> _Done:
        task, x = self._task(row.forward_stage, row.forward_microbatch), state.inputs[row.forward_input]

        def run(program: Program, done: _Done) -> _Done:
            if program.last and not self._forward_only and self._keeper.skips_last_forward:
                return done
            y, kept = self._keeper.forward(program, task, x)
            if program.last:
                return done._replace(losses=_add_loss(done.losses, row.forward_microbatch, y), kept=kept)
            return done._replace(output=y, kept=kept)

        return self._of_program(row.forward_stage, run, done)

    def _backward(self, state: _State, row: Any, done: _Done) -> _Done:
        task = self._task(row.backward_stage, row.backward_microbatch)
        x, gradient = state.inputs[row.backward_input], state.gradients[row.backward_gradient]
        share = vary(jnp.full_like(done.losses[0], 1 / len(done.losses)), self._axes)

        def run(program: Program, done: _Done) -> _Done:
            kept = jax.tree.map(_on_device, _slot(state.kept, row.backward_kept))
            result = self._keeper.backward(program, task, x, kept, share if program.last else gradient)
            losses = done.losses
            if result.loss is not None:
                losses = _add_loss(losses, row.backward_microbatch, result.loss)
            sums = program.add(done.sums, task.vp_stage, result.gradients)
            return done._replace(input_gradient=result.input_gradient, weights=result.weights, losses=losses, sums=sums)

        return self._of_program(row.backward_stage, run, done)

    def _weight_gradients(self, row: Any, weights: Packed, done: _Done) -> _Done:
        task = self._task(row.weights_stage, row.weights_microbatch)

        def run(program: Program, done: _Done) -> _Done:
            gradients = self._keeper.weight_gradients(program, weights)
            return done._replace(sums=program.add(done.sums, task.vp_stage, gradients))

        return self._of_program(row.weights_stage, run, done)

    def _away(self, buffer: Array) -> Array:
        """A buffer where what is kept in it waits: on the host with activation offload, if a slot is large enough."""
        config, slot_bytes = self._stages.config, buffer[0].size * buffer.dtype.itemsize
        if not config.enable_activation_offload or slot_bytes < config.activation_offload_min_bytes:
            return buffer
        self._moved.note(slot_bytes)
        return jax.device_put(buffer, jax.memory.Space.Host)

    def _keep(self, buffers: dict[str, Array], slot: Array, values: dict[str, Array]) -> dict[str, Array]:
        """Buffers with a forward's values stored; ticks without a forward move nothing."""
        if not any(map(is_on_host, buffers.values())):
            return _store(buffers, slot, values)

        def store() -> dict[str, Array]:
            host = jax.memory.Space.Host
            moved = {name: jax.device_put(x, host) if is_on_host(buffers[name]) else x for name, x in values.items()}
            return _store(buffers, slot, moved)

        return lax.cond(slot < self._ticks.buffer_sizes.kept, store, lambda: buffers)

    def _task(self, stage: Array, microbatch: Array) -> Task:
        vp_stages = jnp.asarray([vp_stage for _, vp_stage in self._stages.places], jnp.int32)
        first_layers = jnp.asarray(self._stages.first_layers, jnp.int32)
        return Task(self._params, self._batch.microbatch(microbatch), vp_stages[stage], first_layers[stage])

    def _of_program(self, stage: Array, run: Callable[[Program, _Done], _Done], done: _Done) -> _Done:
        """What the program of a stage makes of what is done."""
        choice = jnp.asarray(self._stages.program_of)[stage]
        return self._switch(choice, [partial(run, program) for program in self._stages.programs], done)

    def _switch(self, choice: Array, branches: Sequence[Callable[[_Done], _Done]], done: _Done) -> _Done:
        """What one of the branches makes of what is done, zeros written out: made in it, and not handed through it."""

        def run(branch: Callable[[_Done], _Done], done: _Done) -> _Done:
            done = branch(done)
            zeros = {name: _zeros(like) for name, like in self._likes.items() if getattr(done, name) is None}
            return vary(done._replace(**zeros), self._axes)

        return lax.switch(jnp.int32(choice), [partial(run, branch) for branch in branches], done)

    def _send(self, x: Array, direction: int) -> tuple[Array, ...]:
        """To the rank so far ahead (1) or behind (-1), for each shift; by every rank, at every tick."""
        p = self._ticks.schedule.pp_size
        return tuple(
            lax.ppermute(x, PIPELINE_AXIS, [(rank, (rank + direction * shift) % p) for rank in range(p)])
            if shift
            else x
            for shift in self._ticks.shifts
        )


def _nothing(done: _Done) -> _Done:
    return done


def _on_device(x: Array) -> Array:
    return jax.device_put(x, jax.memory.Space.Device) if is_on_host(x) else x


def _zeros(likes: Any) -> Any:
    return jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), likes)


def _slot(buffers: Any, slot: Array) -> Any:
    return jax.tree.map(lambda buffer: buffer[slot], buffers)


def _store(buffers: Any, slot: Array, values: Any) -> Any:
    return jax.tree.map(lambda buffer, value: buffer.at[slot].set(value), buffers, values)


def _add_loss(losses: Array, microbatch: Array, loss: Array) -> Array:
    return losses.at[jnp.maximum(microbatch, 0)].add(loss)
