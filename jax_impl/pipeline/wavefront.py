"""A step of context ranks over which microbatches are pipelined; it replaces the loop over lock-step slots."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from diptych.plans.recompute import RecomputeBlock
from diptych.plans.schedule.lockstep import Saves
from diptych_kernels.mesh_axes import vary
from jax_impl.context_parallel import over_microbatches
from jax_impl.pipeline.programs import Task
from jax_impl.pipeline.stages import Batch, Stages
from jax_impl.recompute import recompute_policy
from jax_impl.staged_parameters import CONTEXT_AXIS, DATA_AXIS, PIPELINE_AXIS, StagedParameters


def run_wavefront(
    stages: Stages, saves: Saves, axes: tuple[str, ...], params: StagedParameters, batch: Batch, forward_only: bool
) -> tuple[Array, StagedParameters]:
    """Return the losses of the microbatches and the gradients of their mean.

    See run_lockstep for the arguments. With forward_only, the gradients have no leaves. With saves "inputs", a slot
    saves the messages between ranks and is replayed in backward. With "residuals", it saves the values that the
    recompute settings leave.
    """
    # The sum over microbatches has the type of the parameters, so those with master weights are widened before.
    params = jax.tree.map(lambda p: p.astype(stages.gradient_dtype(p)), params)
    params, batch = vary((params, batch), axes)
    (program,) = stages.programs
    nothing = jnp.zeros((), jnp.int32)

    def losses_of(params: StagedParameters) -> Array:
        def run(number: Array) -> Array:
            task = Task(params, batch.microbatch(number), nothing, nothing)
            return program.run(program.select(task), nothing, task)[0]

        return over_microbatches(run, len(batch.tokens), CONTEXT_AXIS, axes, _checkpoint(stages, saves))

    def mean_of(params: StagedParameters) -> tuple[Array, Array]:
        losses = losses_of(params)
        return losses.mean(), losses

    if forward_only:
        losses = losses_of(params)
        gradients = StagedParameters((), {})
    else:
        gradients, losses = jax.grad(mean_of, has_aux=True)(params)
    losses, replicated = lax.psum((losses, gradients.replicated), PIPELINE_AXIS)
    replica_axes = tuple(axis for axis in (DATA_AXIS, CONTEXT_AXIS) if axis in axes)
    return lax.pmean(losses, replica_axes), gradients._replace(replicated=replicated)


def _checkpoint(stages: Stages, saves: Saves) -> Any:
    """Return the jax.checkpoint of a slot, or None."""
    (program,) = stages.programs
    checkpoint = partial(jax.checkpoint, prevent_cse=False)  # pyright: ignore[reportPrivateImportUsage]
    if saves == "inputs":
        return checkpoint
    if program.recomputes:
        return None
    return partial(checkpoint, policy=recompute_policy(program.config, RecomputeBlock("none", ())))
