"""The distributed optimizer in JAX: the devices with the same parameters each update a shard of them.

diptych/plans/optimizer_shards.py defines the shards and the parameters with master weights. In memory, a staged array
without its axis of ranks is flattened, padded and divided over the axes of replicas and context ranks. In PyTorch,
``reference_torch/distributed_optimizer.py`` has an optimizer of its own; here, the trainer applies optax to shards.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec

from diptych.plans.optimizer_shards import shard_size
from jax_impl.staged_parameters import (
    CONTEXT_AXIS,
    DATA_AXIS,
    StagedParameters,
    shardings_of,
    staged_specs,
    with_rank_axes,
)


class OptimizerShards:
    """The division of staged arrays into shards over the devices of a mesh.

    Args:
        mesh: mesh of a pipeline step.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.axes = tuple(axis for axis in (DATA_AXIS, CONTEXT_AXIS) if axis in mesh.axis_names)
        self.ranks = math.prod(mesh.shape[axis] for axis in self.axes)
        """Number of devices with the same parameters."""
        unsharded = staged_specs(mesh)
        self.specs = StagedParameters(*(PartitionSpec(*spec, self.axes) for spec in unsharded))
        """PartitionSpecs of the shards: [p * n, elements] of layers; [n, elements] or [elements] of replicated ones."""
        self._shard = jax.shard_map(
            self._own_shards, mesh=mesh, in_specs=(unsharded,), out_specs=self.specs, check_vma=False
        )

    def mean_of_shards(self, staged: StagedParameters) -> StagedParameters:
        """Return this device's shards of the means over the devices with the same parameters.

        Args:
            staged: arrays of one device, under shard_map, without axes of ranks.
        """

        def mean(x: Array) -> Array:
            return lax.psum_scatter(self._padded(x), self.axes, tiled=True) / self.ranks

        return jax.tree.map(mean, staged)

    def shard(self, staged: StagedParameters) -> StagedParameters:
        """Return the shards of staged arrays, of which every device has its own.

        Args:
            staged: any part of the parameters, or a tree of arrays of their shapes.
        """
        return self._shard(staged)

    def unshard(self, shards: StagedParameters, shapes: StagedParameters) -> StagedParameters:
        """Return staged arrays from their shards.

        Args:
            shards: from shard, or sums of mean_of_shards.
            shapes: arrays or jax.ShapeDtypeStruct with the shapes of the staged arrays.
        """

        def local(shards: StagedParameters) -> StagedParameters:
            own = with_rank_axes(shards, self._mesh, lambda x: x[0])
            return with_rank_axes(jax.tree.map(self._gathered, own, inner), self._mesh, lambda x: x[None])

        inner = with_rank_axes(shapes, self._mesh, lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype))
        specs = staged_specs(self._mesh)
        unshard = jax.shard_map(local, mesh=self._mesh, in_specs=(self.specs,), out_specs=specs, check_vma=False)
        return jax.jit(unshard)(shards)

    def shardings(self, shards: StagedParameters) -> StagedParameters:
        """Return the sharding of every leaf of a tree of shards."""
        return shardings_of(shards, self._mesh, self.specs)

    def _own_shards(self, staged: StagedParameters) -> StagedParameters:
        """Return this device's shards of its arrays, with an axis of ranks."""
        index = lax.axis_index(self.axes)

        def own(x: Array) -> Array:
            size = shard_size(x.size, self.ranks)
            return lax.dynamic_slice_in_dim(self._padded(x), index * size, size)

        own_arrays = with_rank_axes(staged, self._mesh, lambda x: x[0])
        return with_rank_axes(jax.tree.map(own, own_arrays), self._mesh, lambda x: x[None])

    def _padded(self, x: Array) -> Array:
        """Return a flat array with zeros at its end, which the ranks divide evenly."""
        return jnp.pad(x.ravel(), (0, self.ranks * shard_size(x.size, self.ranks) - x.size))

    def _gathered(self, shard: Array, shape: Any) -> Array:
        """Return the array of one device from the shards of all; XLA gathers no arrays without elements."""
        if not shard.size:
            return shard
        flat = lax.all_gather(shard, self.axes, tiled=True)
        return flat[: math.prod(shape.shape)].reshape(shape.shape)


def own_shards(params: Any, shards: OptimizerShards | None) -> Any:
    """Return the part of parameters that this device updates.

    Args:
        params: parameters, gradients or moments.
        shards: the division of parameters over the devices; None: every device updates all parameters.
    """
    return params if shards is None else shards.shard(params)


def unshard(own: Any, shapes: Any, shards: OptimizerShards | None) -> Any:
    """Invert own_shards.

    Args:
        own: result of own_shards.
        shapes: arrays or jax.ShapeDtypeStruct with the shapes of the parameters that own_shards received.
        shards: as in own_shards.
    """
    return own if shards is None else shards.unshard(own, shapes)


def new_master_weights(own: Any, exact: Any, stored: Any) -> Any:
    """Return the master weights of the parameters that are stored rounded, and arrays without elements for others.

    Args:
        own: own_shards of the exact parameters.
        exact: parameters before they are rounded.
        stored: parameters as they are stored.
    """

    def master(shard: Array, exact: Array, stored: Array) -> Array:
        return jnp.zeros((*shard.shape[:-1], 0), shard.dtype) if exact.dtype == stored.dtype else shard

    return jax.tree.map(master, own, exact, stored)


def with_master_weights(params: Any, masters: Any) -> Any:
    """Return parameters, or shards of them, with master weights in place of those that have some.

    Args:
        params: parameters as they are stored, or own_shards of them.
        masters: master weights of the same division, see new_master_weights; None: there are none.
    """
    return params if masters is None else jax.tree.map(lambda p, m: m if m.size else p, params, masters)


def only_master_weights(params: Any, masters: Any) -> Any:
    """Return new master weights.

    Args:
        params: own_shards of updated parameters.
        masters: master weights before the update; None: there are none.
    """
    return None if masters is None else jax.tree.map(lambda p, m: p if m.size else m, params, masters)


def exact_parameters(params: Any, masters: Any, shapes: Any, shards: OptimizerShards | None) -> Any:
    """Return parameters with the unsharded master weights in place of those that are rounded from them.

    Args:
        params: parameters as they are stored.
        masters: see new_master_weights; None: there are none.
        shapes: shapes of the parameters.
        shards: as in own_shards.
    """
    if masters is None:
        return params
    shapes = jax.tree.map(lambda p, m: p if m.size else m, shapes, masters)
    return with_master_weights(params, unshard(masters, shapes, shards))
