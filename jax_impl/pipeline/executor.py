"""The loop over lock-step slots: one program that every rank runs over the rows of the schedule's table.

A slot stores the received messages, runs one action, and sends its result:

    inputs[i], gradients[j] = messages of the previous slot
    y, dx = switch(no action, forward, backward, weights)   each for the program of the row's stage
    next messages = ppermute(y, to the next rank), ppermute(dx, to the previous rank)

Ranks wait for each other when they send. With a separate switch for each kind of action, XLA would send y before the
backward, and a slot would take the time of its slowest forward plus its slowest backward. With one switch it takes the
time of its slowest rank. Fused slots, in which most ranks run a forward and a backward, have one switch for each.

Pipeline ranks take different branches in the same slot. A collective that only some ranks reach hangs or gives wrong
results, so branches contain no collectives over the pipeline axis. Context- and tensor-parallel ranks of one stage take
the same branch, and may communicate in it. The rule matters for gradients: if a value is equal on all ranks, JAX sums
its gradient over ranks inside the branch. All values are therefore first marked as different on each rank (vary), the
local loss is differentiated, and sums over ranks are taken once, after the last slot.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from diptych.plans.offload import MoveCounter
from diptych.plans.schedule.lockstep import LockstepTable, Saves
from diptych_kernels.mesh_axes import vary
from jax_impl.offload.residency import array_to_device, array_to_host, is_on_host
from jax_impl.pipeline.packing import Packed
from jax_impl.pipeline.programs import StageProgram, StagePrograms, Task
from jax_impl.pipeline.saved import HOST_PREFIX, StageAutodiff, differentiable
from jax_impl.staged_parameters import CONTEXT_AXIS, DATA_AXIS, PIPELINE_AXIS, StagedParameters


class _State(NamedTuple):
    """The carry of the loop over slots.

    The last entry of every buffer is not read: slots without an action write to it. A shift is a distance in ranks
    between sender and receiver.
    """

    inputs: Any
    """Buffers of received inputs of stages, with leaves [entries + 1, ...]; [entries + 1, b, T, S*D] in our model."""
    gradients: Any
    """Buffers of received gradients of the outputs of stages; None for arrays without gradient."""
    residuals: Any
    """Buffers of the values that forwards save for backward."""
    weight_operands: Any
    """Buffers of the values that I saves for W."""
    received_inputs: tuple[Any, ...]
    """Inputs received after the previous slot, by shift."""
    received_gradients: tuple[Any, ...]
    """Gradients received after the previous slot, by shift."""
    sums: StagedParameters
    """Sums of the gradients of parameters."""
    collected: Any
    """Losses of microbatches [m], or what the last stage returned, with leaves [m, ...]."""
    stage_state: Any
    """Values of the rank that forwards change."""


class LockstepResult(NamedTuple):
    """The results of a step on one rank."""

    collected: Any
    """Losses of the microbatches [m], or what the last stage returned, with leaves [m, ...]; equal on every rank."""
    gradients: StagedParameters
    """Gradients of this replica and context rank, staged as the parameters, the replicated ones equal on every
    pipeline rank; without leaves if the schedule is forward only."""
    stage_state: Any
    """Values of the rank that forwards change."""


def run_lockstep(
    stages: StagePrograms,
    table: LockstepTable,
    saves: Saves,
    axes: tuple[str, ...],
    params: StagedParameters,
    batch: Any,
    moved: MoveCounter,
    stage_state: Any = (),
) -> LockstepResult:
    """Return the losses of the microbatches and the gradients of this rank; all ranks run this function.

    The caller takes the mean of the gradients over replicas and context ranks.

    Args:
        stages: the stages of the model.
        table: the compiled schedule.
        saves: the option with which the table was compiled.
        axes: axes of the mesh under which this function runs.
        params: parameters of the rank, with the leading axis of layers removed.
        batch: all microbatches, equal on every rank.
        moved: counter of the activations of one forward that are offloaded to the host.
        stage_state: values of the rank that forwards change; if there are any, saves must be "residuals" or the
            schedule forward only.
    """
    params, batch, stage_state = vary((params, batch, stage_state), axes)
    execution = _Execution(stages, table, saves, axes, params, batch, moved, stage_state)
    rank = lax.axis_index(PIPELINE_AXIS)
    rows = jax.tree.map(lambda column: jnp.asarray(column)[rank], table.rows)
    state = lax.scan(execution.run_slot, execution.start(), rows)[0]
    # Only the last stage has losses; first and last stage both add to a tied embedding.
    collected, replicated = jax.tree.map(_total, (state.collected, state.sums.replicated))
    result = LockstepResult(collected, state.sums._replace(replicated=replicated), state.stage_state)
    replica_axes = tuple(axis for axis in (DATA_AXIS, CONTEXT_AXIS) if axis in axes)
    if replica_axes and stages.collects_losses:
        result = result._replace(collected=lax.pmean(collected, replica_axes))
    return result


def _total(x: Array) -> Array:
    """Return the sum over the pipeline in the type of its terms; lax.psum of booleans returns integers."""
    return lax.psum(x, PIPELINE_AXIS).astype(x.dtype)


class _SlotResult(NamedTuple):
    """The results of the actions of one slot; inside a branch, None represents zeros."""

    collected: Any
    """Losses or outputs of all slots so far, with leaves [m, ...]."""
    sums: StagedParameters
    """Sums of the gradients of all slots so far."""
    stage_state: Any
    """Values of the rank that forwards change."""
    output: Any = None
    """Message of a stage."""
    input_gradient: Any = None
    """Gradient of the message to a stage."""
    residuals: Any = None
    """Packed values that a forward saves for its backward."""
    weight_operands: Any = None
    """Packed values that I saves for W."""


@dataclass(eq=False)
class _Execution:
    """The execution of the table on one rank.

    Arguments are those of run_lockstep, with parameters and batch marked as different on each rank.
    """

    stages: StagePrograms
    table: LockstepTable
    saves: Saves
    axes: tuple[str, ...]
    params: StagedParameters
    batch: Any
    moved: MoveCounter
    stage_state: Any

    def __post_init__(self) -> None:
        self._forward_only = self.table.schedule.forward_only
        self._splits = self.table.schedule.splits_backward
        kinds = {action.kind for actions in self.table.schedule.actions for action in actions}
        self._mixes_backwards = kinds.issuperset("BI")
        """True if the table has split and full backwards; a full backward runs I and W in one slot."""
        self._message = vary(self.stages.message(self.batch), self.axes)
        self._gradient = differentiable(self._message)
        task = self._task(jnp.int32(0), jnp.int32(0), self.stage_state)
        saves = "inputs" if self._forward_only else self.saves
        self._autodiff = StageAutodiff(self.stages.programs, task, self._message, saves, self._splits)
        self._likes = {
            "output": _likes(self._message),
            "input_gradient": _likes(self._gradient),
            "residuals": self._autodiff.residual_shapes,
            "weight_operands": self._autodiff.weight_operand_shapes,
        }

    def start(self) -> _State:
        """Return the initial state: buffers and sums of zeros."""
        sizes = self.table.buffer_sizes
        shifts = len(self.table.shifts)
        nothing = StagedParameters((), {})

        def buffer(length: int, like: Any) -> Any:
            return jax.tree.map(lambda x: jnp.zeros((length, *x.shape), x.dtype), like)

        state = _State(
            inputs=buffer(sizes.inputs + 1, self._message),
            gradients=buffer(sizes.gradients + 1, self._gradient),
            residuals=buffer(sizes.residuals + 1, self._autodiff.residual_shapes),
            weight_operands=buffer(sizes.weight_operands + 1, self._autodiff.weight_operand_shapes),
            received_inputs=(self._message,) * shifts,
            received_gradients=(self._gradient,) * shifts,
            sums=nothing if self._forward_only else jax.tree.map(self._sum, self.params),
            collected=buffer(self.table.schedule.num_microbatches, self.stages.collected(self.batch)),
            stage_state=self.stage_state,
        )
        state = vary(state, self.axes)
        return state._replace(
            residuals={name: self._place_buffer(name, buffer) for name, buffer in state.residuals.items()}
        )

    def _sum(self, parameter: Array) -> Array:
        """Return the empty sum of a parameter's gradients."""
        return jnp.zeros(parameter.shape, self.stages.gradient_dtype(parameter))

    def run_slot(self, state: _State, row: Any) -> tuple[_State, None]:
        """Run one row of the table.

        Args:
            state: state after the previous slot.
            row: diptych.plans.schedule.lockstep.Rows, with arrays.
        """
        inputs = state.inputs
        gradients = state.gradients
        for shift, (x, gradient) in enumerate(zip(state.received_inputs, state.received_gradients, strict=True)):
            inputs = _store(inputs, row.input_arrivals[shift], x)
            gradients = _store(gradients, row.gradient_arrivals[shift], gradient)
        state = state._replace(inputs=inputs, gradients=gradients)
        result = _SlotResult(state.collected, state.sums, state.stage_state)
        state, result = (self._run_fused_slot if self.table.fused else self._run_canonical_slot)(state, row, result)
        state = state._replace(
            weight_operands=_store(state.weight_operands, row.backward_weight_operands, result.weight_operands),
            collected=result.collected,
            sums=result.sums,
            stage_state=result.stage_state,
            received_inputs=self._send(result.output, 1),
        )
        if not self._forward_only:
            state = state._replace(received_gradients=self._send(result.input_gradient, -1))
        return state, None

    def _run_canonical_slot(self, state: _State, row: Any, result: _SlotResult) -> tuple[_State, _SlotResult]:
        """Run a canonical slot under one switch, so that no rank sends, and waits, before its action has ended."""
        has_forward = row.forward_stage >= 0
        has_backward = row.backward_stage >= 0
        has_weight_grad = row.weights_stage >= 0

        def backward(result: _SlotResult) -> _SlotResult:
            result = self._backward(state, row, result)
            if not self._mixes_backwards:
                return result
            return self._switch(
                has_weight_grad, [_no_action, partial(self._weight_gradients, row, result.weight_operands)], result
            )

        def weights(result: _SlotResult) -> _SlotResult:
            return self._weight_gradients(row, _read_entry(state.weight_operands, row.weights_operands), result)

        branches: list[Callable[[_SlotResult], _SlotResult]] = [_no_action, partial(self._forward, state, row)]
        if not self._forward_only:
            branches.append(backward)
        if self._splits:
            branches.append(weights)
        choice = jnp.where(has_forward, 1, jnp.where(has_backward, 2, jnp.where(has_weight_grad, 3, 0)))
        result = self._switch(choice, branches, result)
        residuals = self._store_residuals(state.residuals, row.forward_residuals, result.residuals)
        return state._replace(residuals=residuals), result

    def _run_fused_slot(self, state: _State, row: Any, result: _SlotResult) -> tuple[_State, _SlotResult]:
        """Run a fused slot: a forward, then a backward that may read values saved by it; either may be absent."""
        result = self._switch(row.forward_stage >= 0, [_no_action, partial(self._forward, state, row)], result)
        residuals = self._store_residuals(state.residuals, row.forward_residuals, result.residuals)
        state = state._replace(residuals=residuals)
        return state, self._switch(row.backward_stage >= 0, [_no_action, partial(self._backward, state, row)], result)

    def _forward(self, state: _State, row: Any, result: _SlotResult) -> _SlotResult:
        """Run F of the row, and return the results with its output or loss and its residuals."""
        x = _read_entry(state.inputs, row.forward_input)

        def run(program: StageProgram, result: _SlotResult) -> _SlotResult:
            if program.last and not self._forward_only and self._autodiff.skips_last_forward:
                return result
            task = self._task(row.forward_stage, row.forward_microbatch, result.stage_state)
            forward = self._autodiff.forward(program, task, x)
            result = result._replace(residuals=forward.residuals, stage_state=forward.state)
            if program.last:
                return result._replace(collected=_collect(result.collected, row.forward_microbatch, forward.output))
            return result._replace(output=forward.output)

        return self._run_program_of(row.forward_stage, run, result)

    def _backward(self, state: _State, row: Any, result: _SlotResult) -> _SlotResult:
        """Run B or I of the row, and return the results with its gradients."""
        task = self._task(row.backward_stage, row.backward_microbatch, result.stage_state)
        x = _read_entry(state.inputs, row.backward_input)
        gradient = _read_entry(state.gradients, row.backward_gradient)
        scale = self.stages.loss_weight
        scale = 1 / self.table.schedule.num_microbatches if scale is None else scale
        loss_gradient = vary(jnp.full_like(self.stages.collected(self.batch), scale), self.axes)

        def run(program: StageProgram, result: _SlotResult) -> _SlotResult:
            residuals = jax.tree.map(array_to_device, _read_entry(state.residuals, row.backward_residuals))
            output_gradient = loss_gradient if program.last else gradient
            backward = self._autodiff.backward(program, task, x, residuals, output_gradient)
            collected = result.collected
            if backward.loss is not None:
                collected = _collect(collected, row.backward_microbatch, backward.loss)
            sums = program.add(result.sums, task, backward.gradients)
            return result._replace(
                input_gradient=backward.input_gradient,
                weight_operands=backward.weight_operands,
                collected=collected,
                sums=sums,
            )

        return self._run_program_of(row.backward_stage, run, result)

    def _weight_gradients(self, row: Any, operands: Packed, result: _SlotResult) -> _SlotResult:
        """Run W of the row, and return the results with its gradients added to the sums."""
        task = self._task(row.weights_stage, row.weights_microbatch, result.stage_state)

        def run(program: StageProgram, result: _SlotResult) -> _SlotResult:
            gradients = self._autodiff.weight_gradients(program, task, operands)
            return result._replace(sums=program.add(result.sums, task, gradients))

        return self._run_program_of(row.weights_stage, run, result)

    def _place_buffer(self, name: str, buffer: Array) -> Array:
        """Return a buffer, placed on the host and counted in ``moved`` if its values are offloaded."""
        if not name.startswith(HOST_PREFIX):
            return buffer
        self.moved.note(buffer[0].size * buffer.dtype.itemsize)
        return array_to_host(buffer)

    def _store_residuals(self, buffers: dict[str, Array], entry: Array, values: dict[str, Array]) -> dict[str, Array]:
        """Store the saved values of a forward and return the buffers; slots without a forward move nothing."""
        if not any(map(is_on_host, buffers.values())):
            return _store(buffers, entry, values)

        def store() -> dict[str, Array]:
            moved = {name: array_to_host(x) if is_on_host(buffers[name]) else x for name, x in values.items()}
            return _store(buffers, entry, moved)

        return lax.cond(entry < self.table.buffer_sizes.residuals, store, lambda: buffers)

    def _task(self, stage: Array, microbatch: Array, stage_state: Any) -> Task:
        """Return the arguments of a stage for a microbatch."""
        vp_stages = jnp.asarray([vp_stage for _, vp_stage in self.stages.placement], jnp.int32)
        first_layers = jnp.asarray(self.stages.first_layers, jnp.int32)
        batch = self.batch.microbatch(microbatch)
        task = Task(self.params, batch, vp_stages[stage], first_layers[stage], stage, stage_state)
        return vary(task, self.axes)

    def _run_program_of(
        self, stage: Array, run: Callable[[StageProgram, _SlotResult], _SlotResult], result: _SlotResult
    ) -> _SlotResult:
        """Run the program of a stage and return the updated results."""
        choice = jnp.asarray(self.stages.program_of)[stage]
        return self._switch(choice, [partial(run, program) for program in self.stages.programs], result)

    def _switch(
        self, choice: Array, branches: Sequence[Callable[[_SlotResult], _SlotResult]], result: _SlotResult
    ) -> _SlotResult:
        """Run one branch and fill its missing outputs with zeros, which are created inside the branch."""

        def run(branch: Callable[[_SlotResult], _SlotResult], result: _SlotResult) -> _SlotResult:
            result = branch(result)
            zeros = {name: _zeros(like) for name, like in self._likes.items() if getattr(result, name) is None}
            return vary(result._replace(**zeros), self.axes)

        return lax.switch(jnp.int32(choice), [partial(run, branch) for branch in branches], result)

    def _send(self, x: Any, direction: int) -> tuple[Any, ...]:
        """Send a value to the rank ``shift`` places ahead (1) or behind (-1), for each shift; all ranks take part."""
        p = self.table.schedule.pp_size
        return tuple(
            lax.ppermute(x, PIPELINE_AXIS, [(rank, (rank + direction * shift) % p) for rank in range(p)])
            if shift
            else x
            for shift in self.table.shifts
        )


def _no_action(result: _SlotResult) -> _SlotResult:
    """Return the results unchanged."""
    return result


def _likes(tree: Any) -> Any:
    """Return the shapes and dtypes of the arrays of a pytree."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _zeros(likes: Any) -> Any:
    """Return zeros with the shapes and types of the leaves of a pytree."""
    return jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), likes)


def _read_entry(buffers: Any, entry: Array) -> Any:
    """Return the values in an entry of the buffers."""
    return jax.tree.map(lambda buffer: buffer[entry], buffers)


def _store(buffers: Any, entry: Array, values: Any) -> Any:
    """Return the buffers with values stored in an entry."""
    return jax.tree.map(lambda buffer, value: buffer.at[entry].set(value), buffers, values)


def _collect(collected: Any, microbatch: Array, values: Any) -> Any:
    """Return what was collected, with the loss or the output of a microbatch."""
    return _store(collected, jnp.maximum(microbatch, 0), values)
