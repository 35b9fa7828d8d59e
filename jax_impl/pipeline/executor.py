"""The tick loop: one program that every rank runs, over the rows of the schedule's table.

A tick stores what arrived, runs a forward and a backward (either may be nothing), and sends both results on:

    inputs[slot], gradients[slot] = what arrived
    y     = switch(nothing, or the program of the row's stage)    forward
    dx    = switch(nothing, or the program of the row's stage)    backward; adds to the gradients of parameters
    what arrives next = ppermute(y, to the next rank), ppermute(dx, to the rank before)

Ranks take different branches at the same tick, and a collective that only some of them reach hangs or is silently
wrong. So there is none inside a branch. That takes care with gradients: of a value that is equal on every rank JAX sums
the gradient over ranks where it is taken, inside the branch. Everything is therefore made to differ by rank first
(_vary), the local loss is differentiated, and sums over ranks are taken once, after the last tick.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jax_impl.pipeline.kept import Keeper, Task
from jax_impl.pipeline.stages import Batch, Program, StagedParameters, Stages
from plans.ticks import Rows, Ticks

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


@dataclass(frozen=True)
class Executor:
    """What runs on every rank alike, each with its own rows of the table."""

    stages: Stages
    keeper: Keeper
    ticks: Ticks
    axes: tuple[str, ...]
    """Of the mesh."""

    def __call__(self, params: StagedParameters, batch: Batch) -> tuple[Array, StagedParameters]:
        """Losses of the microbatches, and the gradients of their mean.

        Args:
            params: the rank's, layers [v, layers, ...].
            batch: all microbatches, the same on every rank.

        Returns:
            Losses [m], the same on every rank. Gradients as params, those of the ends the same on every rank; without
            leaves where the schedule is forward only.
        """
        rank = lax.axis_index(PIPELINE_AXIS)
        params, batch = _vary((params, batch), self.axes)
        rows = jax.tree.map(lambda column: jnp.asarray(column)[rank], self.ticks.rows)
        state, _ = lax.scan(partial(self._tick, params, batch), self._start(params, batch), rows)
        # Only the last stage has losses; first and last both add to a tied embedding.
        losses, ends = lax.psum((state.losses, state.sums.ends), PIPELINE_AXIS)
        result = losses, state.sums._replace(ends=ends)
        return lax.pmean(result, DATA_AXIS) if DATA_AXIS in self.axes else result

    def _start(self, params: StagedParameters, batch: Batch) -> _State:
        config, slots = self.stages.config, self.ticks.slots
        hidden = (*batch.tokens.shape[1:], config.residual_streams * config.hidden_size)
        payload = jnp.zeros(hidden, config.compute_dtype)
        task = self._task(params, batch, jnp.int32(0), jnp.int32(0))
        arrived = (payload,) * len(self.ticks.shifts)
        kept, weights = self.keeper.shapes(self.stages.programs, task, _vary(payload, self.axes))
        sums = StagedParameters((), {}) if self._forward_only else jax.tree.map(jnp.zeros_like, params)

        def buffer(length: int, like: Any) -> Any:
            return jax.tree.map(lambda x: jnp.zeros((length + 1, *x.shape), x.dtype), like)

        state = _State(
            inputs=buffer(slots.inputs, payload),
            gradients=buffer(slots.gradients, payload),
            kept=buffer(slots.kept, kept),
            weights=buffer(slots.weights, weights),
            arrived_inputs=arrived,
            arrived_gradients=arrived,
            sums=sums,
            losses=jnp.zeros(len(batch.tokens), config.params_dtype),
        )
        return _vary(state, self.axes)

    def _tick(self, params: StagedParameters, batch: Batch, state: _State, row: Rows) -> tuple[_State, None]:
        inputs, gradients = state.inputs, state.gradients
        for shift, (x, gradient) in enumerate(zip(state.arrived_inputs, state.arrived_gradients, strict=True)):
            inputs = inputs.at[row.input_arrivals[shift]].set(x)
            gradients = gradients.at[row.gradient_arrivals[shift]].set(gradient)
        state = state._replace(inputs=inputs, gradients=gradients)
        y, state = self._forward(params, batch, state, row)
        state = state._replace(arrived_inputs=self._send(y, 1))
        if self._forward_only:
            return state, None
        dx, state = self._backward(params, batch, state, row)
        return state._replace(arrived_gradients=self._send(dx, -1)), None

    def _forward(self, params: StagedParameters, batch: Batch, state: _State, row: Rows) -> tuple[Array, _State]:
        task = self._task(params, batch, row.forward_stage, row.forward_microbatch)
        x = state.inputs[row.forward_input]
        nothing = jnp.zeros_like(x), jnp.zeros_like(state.losses[0]), _empty(state.kept)

        def run(program: Program) -> tuple:
            if program.last and not self._forward_only and not self.keeper.runs_last_forward:
                return nothing
            y, kept = self.keeper.forward(program, task, x)
            return (nothing[0], y, kept) if program.last else (y, nothing[1], kept)

        y, loss, kept = self._switch(row.forward_stage, run, nothing)
        kept = jax.tree.map(lambda buffer, value: buffer.at[row.forward_kept].set(value), state.kept, kept)
        return y, state._replace(kept=kept, losses=_add_loss(state.losses, row.forward_microbatch, loss))

    def _backward(self, params: StagedParameters, batch: Batch, state: _State, row: Rows) -> tuple[Array, _State]:
        task = self._task(params, batch, row.backward_stage, row.backward_microbatch)
        x, gradient = state.inputs[row.backward_input], state.gradients[row.backward_gradient]
        kept = jax.tree.map(lambda buffer: buffer[row.backward_kept], state.kept)
        share = _vary(jnp.full_like(state.losses[0], 1 / len(state.losses)), self.axes)
        nothing = jnp.zeros_like(x), jnp.zeros_like(share), _empty(state.weights), state.sums

        def run(program: Program) -> tuple:
            result = self.keeper.backward(program, task, x, kept, share if program.last else gradient)
            sums = program.add(state.sums, task.vp_stage, result.gradients)
            return result.input_gradient, nothing[1] if result.loss is None else result.loss, result.weights, sums

        dx, loss, weights, sums = self._switch(row.backward_stage, run, nothing)
        weights = jax.tree.map(lambda buffer, value: buffer.at[row.backward_weights].set(value), state.weights, weights)
        losses = _add_loss(state.losses, row.backward_microbatch, loss)
        return dx, state._replace(weights=weights, sums=sums, losses=losses)

    @property
    def _forward_only(self) -> bool:
        return self.ticks.schedule.forward_only

    def _task(self, params: StagedParameters, batch: Batch, stage: Array, microbatch: Array) -> Task:
        part = Batch(*(array[microbatch] for array in batch[:-1]), step=batch.step)
        vp_stages = jnp.asarray([vp_stage for _, vp_stage in self.stages.places])
        return Task(params, part, vp_stages[stage], jnp.asarray(self.stages.first_layers)[stage])

    def _switch(self, stage: Array, run: Callable[[Program], tuple], nothing: tuple) -> tuple:
        """What the program of a stage gives, or nothing for stage -1."""
        branches = [lambda: nothing, *(partial(run, program) for program in self.stages.programs)]
        choice = jnp.asarray([1 + program for program in self.stages.program_of])[stage]
        return lax.switch(jnp.where(stage < 0, 0, choice), [lambda b=b: _vary(b(), self.axes) for b in branches])

    def _send(self, x: Array, direction: int) -> tuple[Array, ...]:
        """To the rank so far ahead (1) or behind (-1), for each shift; on every rank, at every tick."""
        p = self.ticks.schedule.pp_size
        return tuple(
            lax.ppermute(x, PIPELINE_AXIS, [(rank, (rank + direction * shift) % p) for rank in range(p)])
            if shift
            else x
            for shift in self.ticks.shifts
        )


def _vary(tree: Any, axes: tuple[str, ...]) -> Any:
    """The same values, of a type that may differ along every axis of the mesh."""

    def vary(x: Array) -> Array:
        missing = tuple(axis for axis in axes if axis not in jax.typeof(x).manual_axis_type.varying)
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, tree)


def _empty(buffers: Any) -> Any:
    """Zeros of the shape of one slot."""
    return jax.tree.map(lambda buffer: jnp.zeros(buffer.shape[1:], buffer.dtype), buffers)


def _add_loss(losses: Array, microbatch: Array, loss: Array) -> Array:
    return losses.at[jnp.maximum(microbatch, 0)].add(loss)
