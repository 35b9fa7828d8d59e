"""The distributed optimizer in JAX: staged arrays as shares of the devices that have the same parameters.

diptych/plans/optimizer_shares.py defines the shares. In memory, a staged array without its axis of ranks is flattened,
padded and divided over the axes of replicas and context ranks.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec

from diptych.plans.optimizer_shares import share_size
from jax_impl.pipeline.programs import CONTEXT_AXIS, DATA_AXIS, StagedParameters
from jax_impl.pipeline.transforms import shardings_of, staged_specs, with_rank_axes


class OptimizerShares:
    """The division of staged arrays into shares over the devices of a mesh.

    Args:
        mesh: mesh of a pipeline step.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.axes = tuple(axis for axis in (DATA_AXIS, CONTEXT_AXIS) if axis in mesh.axis_names)
        self.ranks = math.prod(mesh.shape[axis] for axis in self.axes)
        """Number of devices with the same parameters."""
        whole = staged_specs(mesh)
        self.specs = StagedParameters(*(PartitionSpec(*spec, self.axes) for spec in whole))
        """PartitionSpecs of the shares: [p * n, entries] of layers; [n, entries] or [entries] of replicated ones."""
        self._divide = jax.shard_map(
            self._own_shares, mesh=mesh, in_specs=(whole,), out_specs=self.specs, check_vma=False
        )

    def mean_of_shares(self, staged: StagedParameters) -> StagedParameters:
        """Return this device's shares of the means over the devices with the same parameters.

        Args:
            staged: arrays of one device, under shard_map, without axes of ranks.
        """

        def mean(x: Array) -> Array:
            return lax.psum_scatter(self._padded(x), self.axes, tiled=True) / self.ranks

        return jax.tree.map(mean, staged)

    def divide(self, staged: StagedParameters) -> StagedParameters:
        """Return the shares of staged arrays, of which every device has its own.

        Args:
            staged: any part of the parameters, or a tree of arrays of their shapes.
        """
        return self._divide(staged)

    def join(self, shares: StagedParameters, shapes: StagedParameters) -> StagedParameters:
        """Return staged arrays from their shares.

        Args:
            shares: from divide, or sums of mean_of_shares.
            shapes: arrays or jax.ShapeDtypeStruct with the shapes of the staged arrays.
        """

        def local(shares: StagedParameters) -> StagedParameters:
            own = with_rank_axes(shares, self._mesh, lambda x: x[0])
            return with_rank_axes(jax.tree.map(self._joined, own, inner), self._mesh, lambda x: x[None])

        inner = with_rank_axes(shapes, self._mesh, lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype))
        whole = staged_specs(self._mesh)
        join = jax.shard_map(local, mesh=self._mesh, in_specs=(self.specs,), out_specs=whole, check_vma=False)
        return jax.jit(join)(shares)

    def shardings(self, shares: StagedParameters) -> StagedParameters:
        """Return the sharding of every leaf of a tree of shares."""
        return shardings_of(shares, self._mesh, self.specs)

    def _own_shares(self, staged: StagedParameters) -> StagedParameters:
        """Return this device's shares of its arrays, with an axis of ranks."""
        index = lax.axis_index(self.axes)

        def own(x: Array) -> Array:
            size = share_size(x.size, self.ranks)
            return lax.dynamic_slice_in_dim(self._padded(x), index * size, size)

        own_arrays = with_rank_axes(staged, self._mesh, lambda x: x[0])
        return with_rank_axes(jax.tree.map(own, own_arrays), self._mesh, lambda x: x[None])

    def _padded(self, x: Array) -> Array:
        """Return a flat array with zeros at its end, which the ranks divide evenly."""
        return jnp.pad(x.ravel(), (0, self.ranks * share_size(x.size, self.ranks) - x.size))

    def _joined(self, share: Array, shape: Any) -> Array:
        """Return the whole array of one device from the shares of all; XLA gathers no arrays without elements."""
        if not share.size:
            return share
        whole = lax.all_gather(share, self.axes, tiled=True)
        return whole[: math.prod(shape.shape)].reshape(shape.shape)
