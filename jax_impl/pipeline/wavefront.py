"""A step of ranks that share sequences, over which microbatches follow one another; in the place of the tick loop."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from diptych.plans.recompute import RecomputeBlock
from diptych.plans.schedule.lockstep import Keep
from diptych_kernels.mesh_axes import vary
from jax_impl.context_parallel import over_microbatches
from jax_impl.pipeline.executor import DATA_AXIS, PIPELINE_AXIS
from jax_impl.pipeline.stages import CONTEXT_AXIS, Batch, StagedParameters, Stages
from jax_impl.recompute import recompute_policy


def run_wavefront(
    stages: Stages, keep: Keep, axes: tuple[str, ...], params: StagedParameters, batch: Batch, forward_only: bool
) -> tuple[Array, StagedParameters]:
    """Losses of the microbatches and the gradients of their mean; arguments and result as run_ticks'.

    With keep "inputs" a tick keeps what ranks hand on, and is run again in backward; with "residuals" what the
    recompute settings leave.
    """
    params, batch = vary((params, batch), axes)
    (program,) = stages.programs
    nothing = jnp.zeros((), jnp.int32)

    def losses_of(params: StagedParameters) -> Array:
        def run(number: Array) -> Array:
            parameters = program.take(params, nothing)
            return program(parameters, nothing, batch.microbatch(number), nothing)

        return over_microbatches(run, len(batch.tokens), CONTEXT_AXIS, axes, _checkpoint(stages, keep))

    def mean_of(params: StagedParameters) -> tuple[Array, Array]:
        losses = losses_of(params)
        return losses.mean(), losses

    if forward_only:
        losses, gradients = losses_of(params), StagedParameters((), {})
    else:
        gradients, losses = jax.grad(mean_of, has_aux=True)(params)
    losses, ends = lax.psum((losses, gradients.ends), PIPELINE_AXIS)
    alike = tuple(axis for axis in (DATA_AXIS, CONTEXT_AXIS) if axis in axes)
    return lax.pmean((losses, gradients._replace(ends=ends)), alike)


def _checkpoint(stages: Stages, keep: Keep) -> Any:
    """What jax.checkpoint is given of a tick."""
    (program,) = stages.programs
    again = partial(jax.checkpoint, prevent_cse=False)  # pyright: ignore[reportPrivateImportUsage]
    if keep == "inputs":
        return again
    if program.recomputes:
        return None
    return partial(again, policy=recompute_policy(program.config, RecomputeBlock("none", ())))
