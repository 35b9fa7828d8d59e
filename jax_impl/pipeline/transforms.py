"""The two transforms that run one function on every device of a mesh: jax.pmap and jax.shard_map."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from jax_impl.staged_parameters import PIPELINE_AXIS, StagedParameters, staged_specs, with_rank_axes

TRANSFORMS = ("pmap", "shard_map")


def check_options(**options: tuple[str, Sequence[str]]) -> None:
    """Raise a ValueError if an option is unknown; ``options`` are values and choices by name."""
    for name, (value, choices) in options.items():
        if value not in choices:
            raise ValueError(f"{name}: expected one of {choices}, got {value!r}")


def check_axes(transform: str, mesh: Mesh) -> None:
    """Raise a ValueError if a transform does not support the axes of a mesh."""
    if transform == "pmap" and mesh.axis_names != (PIPELINE_AXIS,):
        raise ValueError(
            f"transform: expected 'shard_map' with a mesh {dict(mesh.shape)}, got 'pmap', which supports axis "
            f"{PIPELINE_AXIS!r} alone; pass transform='shard_map'"
        )


def by_pmap(local: Callable, mesh: Mesh) -> Any:
    """Return a function that runs ``local`` on every device by jax.pmap.

    Args:
        local: function of the parameters of a rank and the batch, which returns what the last stage collected, equal on
            all ranks, and gradients.
        mesh: mesh with the axis of the pipeline alone.
    """
    by_rank = StagedParameters(layers=0, replicated=None)
    devices = list(mesh.devices.flat)
    run = jax.pmap(local, PIPELINE_AXIS, in_axes=(by_rank, None), out_axes=(None, by_rank), devices=devices)
    if jax.process_count() == 1:
        return run
    from jax.experimental.multihost_utils import host_local_array_to_global_array as to_global

    def run_and_gather(params: StagedParameters, batch: Any) -> tuple[Any, StagedParameters]:
        """Return global arrays, because pmap returns only the gradients of the process's own ranks."""
        collected, (layers, replicated) = run(params, batch)
        layers = to_global(layers, mesh, PartitionSpec(PIPELINE_AXIS))
        collected, replicated = to_global((collected, replicated), mesh, PartitionSpec())
        return collected, StagedParameters(layers, replicated)

    return run_and_gather


def by_shard_map(
    local: Callable,
    mesh: Mesh,
    batch_specs: Any,
    collected_specs: PartitionSpec | None = None,
    gradient_specs: StagedParameters | None = None,
) -> Any:
    """Return a function that runs ``local`` on every device by jax.shard_map, which can also divide the data.

    Args:
        local: see by_pmap.
        mesh: mesh with the axis of the pipeline and others that divide the data.
        batch_specs: PartitionSpecs of the batch.
        collected_specs: PartitionSpec of the values that the last stage collected; None: it is equal on every device.
        gradient_specs: PartitionSpecs of the gradients; None: they are staged as the parameters.
    """
    collected_specs = PartitionSpec() if collected_specs is None else collected_specs
    params: Any = staged_specs(mesh)

    def squeezed(params: StagedParameters, batch: Any) -> tuple[Any, StagedParameters]:
        collected, gradients = local(with_rank_axes(params, mesh, lambda x: x[0]), batch)
        return collected, with_rank_axes(gradients, mesh, lambda x: x[None])

    specs: Any = {"in_specs": (params, batch_specs), "out_specs": (collected_specs, gradient_specs or params)}
    return jax.jit(jax.shard_map(squeezed, mesh=mesh, **specs))


def unsharded_array(value: Any) -> np.ndarray:
    """Return the unsharded array on the host, even if other processes hold parts of it.

    Raises:
        TypeError: a transformation of JAX traces the array.
    """
    if isinstance(value, jax.core.Tracer):  # pyright: ignore[reportAttributeAccessIssue]
        raise TypeError(
            "staged: expected arrays outside of jax.jit, jax.grad and jax.vmap, because joining and staging move them "
            f"over the host, got a traced {value.aval}; work on staged parameters there, and join them afterwards"
        )
    if isinstance(value, Array) and not value.is_fully_addressable and not value.is_fully_replicated:
        from jax.experimental import multihost_utils

        return multihost_utils.process_allgather(value, tiled=True)
    return np.asarray(value)
