"""The loop over lock-step slots: one program that every rank runs over the rows of the schedule's table.

A slot stores the received messages, runs one action, and sends its result:

    inputs[place], gradients[place] = messages of the last slot
    y, dx = switch(nothing, forward, backward, weights)     each for the program of the row's stage
    next messages = ppermute(y, to the next rank), ppermute(dx, to the previous rank)

Ranks wait for each other when they send. With a separate switch for each kind of action, XLA would send y before the
backward, and a slot would take the time of its slowest forward plus its slowest backward. With one switch it takes the
time of its slowest rank. Fused slots, in which most ranks run a forward and a backward, have one switch for each.

Ranks take different branches in the same slot. A collective that only some ranks reach hangs or gives wrong results,
so branches contain no collectives. This matters for gradients: if a value is equal on all ranks, JAX sums its gradient
over ranks inside the branch. All values are therefore first marked as different on each rank (vary), the local loss is
differentiated, and sums over ranks are taken once after the last slot.

Context ranks exchange messages inside a branch. All of them are at the same place of the pipeline and take the same
branch.
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
from jax_impl.pipeline.saved import Packed, StageAutodiff, Task
from jax_impl.pipeline.stages import CONTEXT_AXIS, Batch, Program, StagedParameters, Stages

PIPELINE_AXIS = "pp"
"""Mesh axis over stages."""
DATA_AXIS = "dp"
"""Mesh axis over parts of every microbatch."""


class _State(NamedTuple):
    """The state that one slot passes to the next."""

    inputs: Array
    """Inputs of stages; like every buffer, it ends with a scratch slot. [slots + 1, b, T, S*D]"""
    gradients: Array
    kept: Any
    weights: Any
    arrived_inputs: tuple[Array, ...]
    """Received inputs, by shift. [b, T, S*D]"""
    arrived_gradients: tuple[Array, ...]
    sums: StagedParameters
    """Sums of the gradients of parameters."""
    losses: Array
    """Losses of microbatches. [m]"""


def run_lockstep(
    stages: Stages,
    table: LockstepTable,
    keep: Keep,
    axes: tuple[str, ...],
    params: StagedParameters,
    batch: Batch,
    moved: Moved,
) -> tuple[Array, StagedParameters]:
    """Return the losses of the microbatches and the gradients of their mean; all ranks run this function.

    Args:
        stages: the stages of the model.
        table: the compiled schedule.
        keep: the option with which the table was compiled.
        axes: axes of the mesh under which this function runs.
        params: parameters of the rank, with layers [v, layers, ...].
        batch: all microbatches, equal on every rank.
        moved: counter of the activations of one forward that are offloaded to the host.

    Returns:
        Losses [m], equal on every rank. Gradients staged as params, with those of the ends equal on every rank; without
        leaves if the schedule is forward only.
    """
    params, batch = vary((params, batch), axes)
    run = _Run(stages, table, keep, axes, params, batch, moved)
    rank = lax.axis_index(PIPELINE_AXIS)
    rows = jax.tree.map(lambda column: jnp.asarray(column)[rank], table.rows)
    state = lax.scan(run.run_slot, run.start(), rows)[0]
    # Only the last stage has losses; first and last stage both add to a tied embedding.
    losses, ends = lax.psum((state.losses, state.sums.ends), PIPELINE_AXIS)
    result = losses, state.sums._replace(ends=ends)
    replica_axes = tuple(axis for axis in (DATA_AXIS, CONTEXT_AXIS) if axis in axes)
    return lax.pmean(result, replica_axes) if replica_axes else result


class _Done(NamedTuple):
    """The results of a slot; inside a branch, None represents zeros."""

    losses: Array
    """Losses of all slots so far. [m]"""
    sums: StagedParameters
    """Sums of the gradients of all slots so far."""
    output: Any = None
    """Output of a stage. [b, T, S*D]"""
    input_gradient: Any = None
    """Gradient of the input of a stage. [b, T, S*D]"""
    kept: Any = None
    """Packed values that a forward saves for its backward."""
    weights: Any = None
    """Packed values that I saves for W."""


class _Run:
    """The execution of the table on one rank.

    Arguments are those of run_lockstep, with parameters and batch marked as different on each rank.
    """

    def __init__(
        self,
        stages: Stages,
        table: LockstepTable,
        keep: Keep,
        axes: tuple[str, ...],
        params: StagedParameters,
        batch: Batch,
        moved: Moved,
    ) -> None:
        self._stages = stages
        self._table = table
        self._axes = axes
        self._params = params
        self._batch = batch
        self._moved = moved
        self._forward_only = table.schedule.forward_only
        self._splits = table.schedule.splits_backward
        kinds = {action.kind for actions in table.schedule.actions for action in actions}
        self._also_full = kinds.issuperset("BI")
        """True if the table has split and full backwards; a full backward runs I and W in one slot."""
        config = stages.config
        hidden = (*batch.tokens.shape[1:], config.residual_streams * config.hidden_size)
        self._payload = vary(jnp.zeros(hidden, config.compute_dtype), axes)
        task = self._task(jnp.int32(0), jnp.int32(0))
        keep = "inputs" if self._forward_only else keep
        self._autodiff = StageAutodiff(stages.programs, task, self._payload, keep, self._splits)
        hidden_like = jax.ShapeDtypeStruct(self._payload.shape, self._payload.dtype)
        self._likes = dict.fromkeys(("output", "input_gradient"), hidden_like)
        self._likes |= {"kept": self._autodiff.kept, "weights": self._autodiff.weights}

    def start(self) -> _State:
        """Return the initial state: buffers and sums of zeros."""
        sizes = self._table.buffer_sizes
        arrived = (self._payload,) * len(self._table.shifts)
        nothing = StagedParameters((), {})

        def buffer(length: int, like: Any) -> Any:
            return jax.tree.map(lambda x: jnp.zeros((length + 1, *x.shape), x.dtype), like)

        state = _State(
            inputs=buffer(sizes.inputs, self._payload),
            gradients=buffer(sizes.gradients, self._payload),
            kept=buffer(sizes.kept, self._autodiff.kept),
            weights=buffer(sizes.weights, self._autodiff.weights),
            arrived_inputs=arrived,
            arrived_gradients=arrived,
            sums=nothing if self._forward_only else jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), self._params),
            losses=jnp.zeros(len(self._batch.tokens), self._stages.config.params_dtype),
        )
        state = vary(state, self._axes)
        return state._replace(kept={dtype: self._offloaded(buffer) for dtype, buffer in state.kept.items()})

    def run_slot(self, state: _State, row: Any) -> tuple[_State, None]:
        """Run one row of the table.

        Args:
            state: state after the previous slot.
            row: diptych.plans.schedule.lockstep.Rows, with arrays.
        """
        inputs = state.inputs
        gradients = state.gradients
        for shift, (x, gradient) in enumerate(zip(state.arrived_inputs, state.arrived_gradients, strict=True)):
            inputs = inputs.at[row.input_arrivals[shift]].set(x)
            gradients = gradients.at[row.gradient_arrivals[shift]].set(gradient)
        state = state._replace(inputs=inputs, gradients=gradients)
        done = _Done(state.losses, state.sums)
        state, done = (self._two_actions if self._table.fused else self._one_action)(state, row, done)
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
        """Run a canonical slot under one switch, so that no rank sends, and waits, before its action has ended."""
        forwards, backwards, has_weight_grad = (
            stage >= 0 for stage in (row.forward_stage, row.backward_stage, row.weights_stage)
        )

        def backward(done: _Done) -> _Done:
            done = self._backward(state, row, done)
            if not self._also_full:
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
        """Run a fused slot: a forward, then a backward that may read values saved by it; either may be absent."""
        done = self._switch(row.forward_stage >= 0, [_nothing, partial(self._forward, state, row)], done)
        state = state._replace(kept=self._keep(state.kept, row.forward_kept, done.kept))
        return state, self._switch(row.backward_stage >= 0, [_nothing, partial(self._backward, state, row)], done)

    def _forward(self, state: _State, row: Any, done: _Done) -> _Done:
        task = self._task(row.forward_stage, row.forward_microbatch)
        x = state.inputs[row.forward_input]

        def run(program: Program, done: _Done) -> _Done:
            if program.last and not self._forward_only and self._autodiff.skips_last_forward:
                return done
            y, kept = self._autodiff.forward(program, task, x)
            if program.last:
                return done._replace(losses=_add_loss(done.losses, row.forward_microbatch, y), kept=kept)
            return done._replace(output=y, kept=kept)

        return self._of_program(row.forward_stage, run, done)

    def _backward(self, state: _State, row: Any, done: _Done) -> _Done:
        task = self._task(row.backward_stage, row.backward_microbatch)
        x = state.inputs[row.backward_input]
        gradient = state.gradients[row.backward_gradient]
        share = vary(jnp.full_like(done.losses[0], 1 / len(done.losses)), self._axes)

        def run(program: Program, done: _Done) -> _Done:
            kept = jax.tree.map(_on_device, _slot(state.kept, row.backward_kept))
            result = self._autodiff.backward(program, task, x, kept, share if program.last else gradient)
            losses = done.losses
            if result.loss is not None:
                losses = _add_loss(losses, row.backward_microbatch, result.loss)
            sums = program.add(done.sums, task.vp_stage, result.gradients)
            return done._replace(input_gradient=result.input_gradient, weights=result.weights, losses=losses, sums=sums)

        return self._of_program(row.backward_stage, run, done)

    def _weight_gradients(self, row: Any, weights: Packed, done: _Done) -> _Done:
        task = self._task(row.weights_stage, row.weights_microbatch)

        def run(program: Program, done: _Done) -> _Done:
            gradients = self._autodiff.weight_gradients(program, weights)
            return done._replace(sums=program.add(done.sums, task.vp_stage, gradients))

        return self._of_program(row.weights_stage, run, done)

    def _offloaded(self, buffer: Array) -> Array:
        """Place a buffer on the host with activation offload if its slots are large enough, and return it."""
        config = self._stages.config
        slot_bytes = buffer[0].size * buffer.dtype.itemsize
        if not config.enable_activation_offload or slot_bytes < config.activation_offload_min_bytes:
            return buffer
        self._moved.note(slot_bytes)
        return jax.device_put(buffer, jax.memory.Space.Host)

    def _keep(self, buffers: dict[str, Array], slot: Array, values: dict[str, Array]) -> dict[str, Array]:
        """Store the saved values of a forward in the buffers and return them; slots without a forward move nothing."""
        if not any(map(is_on_host, buffers.values())):
            return _store(buffers, slot, values)

        def store() -> dict[str, Array]:
            host = jax.memory.Space.Host
            moved = {name: jax.device_put(x, host) if is_on_host(buffers[name]) else x for name, x in values.items()}
            return _store(buffers, slot, moved)

        return lax.cond(slot < self._table.buffer_sizes.kept, store, lambda: buffers)

    def _task(self, stage: Array, microbatch: Array) -> Task:
        vp_stages = jnp.asarray([vp_stage for _, vp_stage in self._stages.places], jnp.int32)
        first_layers = jnp.asarray(self._stages.first_layers, jnp.int32)
        return Task(self._params, self._batch.microbatch(microbatch), vp_stages[stage], first_layers[stage])

    def _of_program(self, stage: Array, run: Callable[[Program, _Done], _Done], done: _Done) -> _Done:
        """Run the program of a stage and return the updated results."""
        choice = jnp.asarray(self._stages.program_of)[stage]
        return self._switch(choice, [partial(run, program) for program in self._stages.programs], done)

    def _switch(self, choice: Array, branches: Sequence[Callable[[_Done], _Done]], done: _Done) -> _Done:
        """Run one branch and fill its missing outputs with zeros, which are created inside the branch."""

        def run(branch: Callable[[_Done], _Done], done: _Done) -> _Done:
            done = branch(done)
            zeros = {name: _zeros(like) for name, like in self._likes.items() if getattr(done, name) is None}
            return vary(done._replace(**zeros), self._axes)

        return lax.switch(jnp.int32(choice), [partial(run, branch) for branch in branches], done)

    def _send(self, x: Array, direction: int) -> tuple[Array, ...]:
        """Send a value to the rank ``shift`` places ahead (1) or behind (-1), for each shift; all ranks take part."""
        p = self._table.schedule.pp_size
        return tuple(
            lax.ppermute(x, PIPELINE_AXIS, [(rank, (rank + direction * shift) % p) for rank in range(p)])
            if shift
            else x
            for shift in self._table.shifts
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
