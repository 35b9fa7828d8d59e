"""Parameters as a pipeline step stores them on the devices of a mesh: stacked by rank, or replicated."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

PIPELINE_AXIS = "pp"
"""Mesh axis over stages."""
DATA_AXIS = "dp"
"""Mesh axis over parts of every microbatch."""
CONTEXT_AXIS = "cp"
"""Mesh axis over the parts of sequences that ranks share."""
TENSOR_AXIS = "tp"
"""Mesh axis over the parts of layers that ranks share."""


class StagedParameters(NamedTuple):
    """Parameters, gradients or moments, staged for the pipeline."""

    layers: Any
    """Those of the stages, divided by rank, with leaves [p, ...], or [p * n, ...] over n tensor-parallel ranks."""
    replicated: Any
    """Those that several stages may read, equal on every rank; over n tensor-parallel ranks their parts, [n, ...]."""


def staged_specs(mesh: Mesh) -> StagedParameters:
    """Return which axes of a mesh divide the first axis of staged parameters."""
    if TENSOR_AXIS in mesh.axis_names:
        return StagedParameters(PartitionSpec((PIPELINE_AXIS, TENSOR_AXIS)), PartitionSpec(TENSOR_AXIS))
    return StagedParameters(PartitionSpec(PIPELINE_AXIS), PartitionSpec())


def shardings_of(staged: StagedParameters, mesh: Mesh, specs: StagedParameters | None = None) -> StagedParameters:
    """Return the sharding of every leaf of a staged tree; ``specs`` are those of staged_specs by default."""
    layers, replicated = (NamedSharding(mesh, spec) for spec in specs or staged_specs(mesh))
    return StagedParameters(
        jax.tree.map(lambda _: layers, staged.layers), jax.tree.map(lambda _: replicated, staged.replicated)
    )


def with_rank_axes(staged: StagedParameters, mesh: Mesh, change: Callable[[Any], Any]) -> StagedParameters:
    """Change the leaves that have a first axis of ranks."""
    replicated = jax.tree.map(change, staged.replicated) if TENSOR_AXIS in mesh.axis_names else staged.replicated
    return StagedParameters(jax.tree.map(change, staged.layers), replicated)
