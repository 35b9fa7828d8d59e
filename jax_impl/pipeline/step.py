"""The step of a pipeline in JAX (pmap or shard_map), and the staging and joining of its parameters."""

import math
import os
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec

from diptych.plans.config import TransformerConfig
from diptych.plans.context.exchange import PIPELINED
from diptych.plans.context.sequences import check_shared, concatenate_sequences
from diptych.plans.mesh import replica_settings, unsharded
from diptych.plans.model.documents import check_document_starts
from diptych.plans.model.implementation import callback_threads, uses_kernels
from diptych.plans.model.parameters import parameter_specs
from diptych.plans.offload import MoveCounter
from diptych.plans.schedule.actions import Action
from diptych.plans.schedule.lockstep import SAVES, SLOTS, LockstepTable, Saves, compile_lockstep
from diptych.plans.schedule.named import any_num_microbatches, schedule_for
from jax_impl.distributed_optimizer import OptimizerShards
from jax_impl.pipeline.executor import run_lockstep
from jax_impl.pipeline.stages import Batch, divide_model, names_of
from jax_impl.pipeline.transforms import (
    TRANSFORMS,
    by_pmap,
    by_shard_map,
    check_axes,
    check_options,
    unsharded_array,
)
from jax_impl.pipeline.wavefront import run_wavefront
from jax_impl.staged_parameters import (
    CONTEXT_AXIS,
    DATA_AXIS,
    PIPELINE_AXIS,
    TENSOR_AXIS,
    StagedParameters,
    shardings_of,
)


def make_pipeline_step(
    model: nnx.Module,
    config: TransformerConfig,
    mesh: Mesh | None = None,
    transform: str = "shard_map",
    *,
    saves: str = "residuals",
    slots: str = "canonical",
    training: bool = True,
    forward_only: bool = False,
) -> "PipelineStep":
    """Make a training or validation step of a pipeline.

    Args:
        model: the whole model, for its class and the structure of its parameters. Its class creates a stage when called
            as ``model_class(config, pre_process, post_process, vp_stage=, pp_rank=)``.
        config: number of ranks, virtual stages, layers by stage, schedule and recompute settings.
        mesh: mesh with an axis "pp" of the size of the pipeline. With shard_map it may have an axis "dp", which divides
            the samples of every microbatch, an axis "cp" of size context_parallel_size, and one "tp" of size
            tensor_model_parallel_size. None: the first devices.
        transform: "pmap" or "shard_map", which place the program on the devices. Both run the same function; only
            shard_map supports parameters on the host.
        saves: values that a stage saves for backward: its "inputs" (backward replays the stage), or the "residuals"
            that the recompute settings leave. Residuals take less time even with full recompute, because only the
            blocks are replayed.
        slots: "canonical": one action for each slot, in the order of the schedule, with the schedule's number of
            microbatches in flight. "fused": a forward and a backward in one slot, which takes less time but has up to
            2 p - 1 microbatches in flight instead of p; with saves="inputs" they need hardly more memory.
        training: if True, use dropout.
        forward_only: if True, return losses without gradients.

    Raises:
        ValueError: the mesh, the devices or an option is not supported, or JAX has too few threads to interpret kernels
            on this number of devices; the message names the remedy.
    """
    _check_options(model, config, transform, saves, slots)
    mesh = _mesh(config, mesh, transform)
    _check_threads(config, mesh)
    return PipelineStep(model, config, mesh, transform, cast("Saves", saves), slots == "fused", training, forward_only)


class PipelineStep:
    """A pass of all microbatches through the pipeline, called as ``step(staged, tokens, targets, ...)``."""

    def __init__(
        self,
        model: nnx.Module,
        config: TransformerConfig,
        mesh: Mesh,
        transform: str,
        saves: Saves,
        fused: bool,
        training: bool,
        forward_only: bool,
    ) -> None:
        self.config = config
        self.mesh = mesh
        self.transform = transform
        self.saves: Saves = saves
        self.moved = MoveCounter()
        """Activations of one forward that are offloaded to the host; known once a step has been traced."""
        self._fused = fused
        self._forward_only = forward_only
        params = nnx.split(model, nnx.Param)[1]
        self.names = names_of(params)
        self._structure = jax.tree.structure(params)
        min_microbatches = any_num_microbatches(config)
        schedule = schedule_for(config, min_microbatches)  # for the ranks of stages, which do not depend on m
        factor = math.prod(mesh.shape.get(axis, 1) for axis in (DATA_AXIS, CONTEXT_AXIS))
        self.stages = divide_model(type(model), config, schedule, training, factor)
        self.table(min_microbatches)  # raises an error if the schedule does not support these slots
        self.shards = OptimizerShards(mesh)
        """Shards of a distributed optimizer: of the gradients, with use_distributed_optimizer."""
        self.shards_gradients = config.use_distributed_optimizer and self.shards.ranks > 1 and not forward_only
        self._run = self._by_transform()

    def __call__(
        self,
        params: StagedParameters,
        tokens: Any,
        targets: Any,
        step: int | Array = 0,
        samples: Any = None,
        document_starts: Any = None,
    ) -> Any:
        """Return the mean loss of the microbatches and its gradients.

        Args:
            params: staged parameters, from stage_parameters.
            tokens: token ids. Each number m of microbatches is compiled separately. [m, b, T] integer
            targets: next token ids. [m, b, T] integer
            step: training step, for dropout.
            samples: numbers of the sequences within the global batch; None: 0 .. m*b - 1. [m, b] integer
            document_starts: see diptych.plans.model.documents; None: each sequence is one document. [m, b, N] int32

        Returns:
            Loss in nats per token and gradients staged as params; if forward only, the losses of the microbatches [m].
            With use_distributed_optimizer, each of the devices with the same parameters has a shard of the gradients.

        Raises:
            ValueError: the shapes do not match each other, the mesh or the schedule.
        """
        losses, gradients = self._run(params, self._batch(tokens, targets, step, samples, document_starts))
        return losses if self._forward_only else (jnp.mean(losses), gradients)

    def lower(self, params: StagedParameters, *batch: Any) -> jax.stages.Lowered:
        """Return the lowered program of a call, for inspection."""
        return cast("Any", self._run).lower(params, self._batch(*batch))

    def stage_parameters(self, params: nnx.State) -> StagedParameters:
        """Distribute the parameters (or moments) of the single-device model over the ranks."""
        values = dict(zip(self.names, jax.tree.leaves(params), strict=True))
        staged = self.stages.stack({name: np.asarray(value) for name, value in values.items()})
        return jax.tree.map(jax.device_put, staged, self.shardings(staged))

    def join_parameters(self, staged: StagedParameters) -> nnx.State:
        """Return staged parameters or gradients as a tree of the single-device model, on the default device."""
        values = self.stages.unstack(jax.tree.map(unsharded_array, staged))
        return jax.tree.unflatten(self._structure, [jnp.asarray(values[name]) for name in self.names])

    def shardings(self, staged: StagedParameters) -> StagedParameters:
        """Return the sharding of every leaf of a staged tree."""
        return shardings_of(staged, self.mesh)

    def shapes(self, staged: StagedParameters) -> StagedParameters:
        """Return the shape and dtype of every leaf in the model of a rank, as jax.ShapeDtypeStruct."""
        stack_axes = 1 if self.config.enable_tensor_offload else 3
        end_axes = 1 if self.config.tensor_model_parallel_size > 1 else 0
        shapes = [
            jax.tree.map(lambda x, n=n: jax.ShapeDtypeStruct(x.shape[n:], x.dtype), staged)
            for n in (stack_axes, end_axes)
        ]
        return StagedParameters(shapes[0].layers, shapes[1].replicated)

    def counted_once(self, gradients: StagedParameters, shapes: StagedParameters | None = None) -> StagedParameters:
        """Return gradients with zeros where another rank has the same entry, for sums over all ranks.

        Args:
            gradients: staged gradients, or their shards.
            shapes: shapes of the staged gradients, if gradients are shards.
        """
        if self.config.tensor_model_parallel_size == 1:
            return gradients
        counts = self.stages.shares_counted(gradients if shapes is None else shapes)
        if shapes is not None:
            counts = self.shards.shard(jax.tree.map(lambda n, g: jnp.broadcast_to(n, g.shape), counts, shapes))
        return jax.tree.map(lambda g, count: g * count.astype(g.dtype), gradients, counts)

    def table(self, num_microbatches: int) -> LockstepTable:
        """Return the compiled table for a number of microbatches."""
        schedule = schedule_for(self.config, num_microbatches, self._forward_only)
        return compile_lockstep(schedule, self._fused, self.saves)

    def trace(self, num_microbatches: int) -> tuple[tuple[Action, ...], ...]:
        """Return the actions of every rank, in the order of the table.

        If microbatches are pipelined over context ranks, this is the order of the first context rank in PyTorch, while
        JAX runs all forwards before all backwards.
        """
        return self.table(num_microbatches).actions()

    def _local(self, params: StagedParameters, batch: Batch) -> tuple[Array, StagedParameters]:
        """Run the pipeline on one device: the lock-step slots, or the wavefront over context ranks."""
        table = self.table(len(batch.tokens))
        self.moved = MoveCounter()
        axes = tuple(self.mesh.axis_names)
        if CONTEXT_AXIS in axes and self.config.cp_exchange == PIPELINED:
            losses, gradients = run_wavefront(self.stages, self.saves, axes, params, batch, self._forward_only)
        else:
            losses, gradients = run_lockstep(self.stages, table, self.saves, axes, params, batch, self.moved)[:2]
        if TENSOR_AXIS in axes:
            losses = lax.pmean(losses, TENSOR_AXIS)  # all tensor-parallel ranks have the same losses
        gradients = self.stages.sum_over_tensor_parallel(gradients)
        if self.shards_gradients:
            return losses, self.shards.mean_of_shards(gradients)
        return losses, lax.pmean(gradients, self.shards.axes) if self.shards.axes else gradients

    def _by_transform(self) -> Any:
        """Return the function that runs a step on all devices."""
        if self.transform == "pmap":
            return by_pmap(self._local, self.mesh)
        divided = self.shards.specs if self.shards_gradients else None
        return by_shard_map(self._local, self.mesh, _batch_specs(self.mesh), gradient_specs=divided)

    def _batch(
        self, tokens: Any, targets: Any, step: int | Array = 0, samples: Any = None, document_starts: Any = None
    ) -> Batch:
        """Check the shapes of the arguments and return them as a batch."""
        shape = np.shape(tokens)
        if len(shape) != 3 or 0 in shape:
            raise ValueError(
                f"tokens: expected [microbatches, sequences, tokens], none of them 0, got shape {shape}; reshape the "
                "batch to (m, b, T)"
            )
        if np.shape(targets) != shape:
            raise ValueError(
                f"targets: expected the shape of tokens, {shape}, got {np.shape(targets)}; divide both alike"
            )
        if samples is None:
            samples = np.arange(shape[0] * shape[1], dtype=np.int32).reshape(shape[:2])
        if np.shape(samples) != shape[:2]:
            raise ValueError(
                f"samples: expected one number per sequence, shape {shape[:2]}, got {np.shape(samples)}; None numbers "
                "the sequences in order"
            )
        parts = self.mesh.shape.get(DATA_AXIS, 1)
        if shape[1] % parts:
            raise ValueError(
                f"tokens: expected a number of sequences that mesh axis {DATA_AXIS!r} of size {parts} divides, got "
                f"{shape[1]} per microbatch; change either"
            )
        if document_starts is not None:
            document_starts = np.asarray(document_starts)
            starts_of_all = document_starts.reshape(-1, document_starts.shape[-1])
            check_document_starts(
                starts_of_all.shape, starts_of_all.dtype.name, starts_of_all, shape[0] * shape[1], shape[2]
            )
        batch = Batch(tokens, targets, samples, jnp.asarray(step, jnp.uint32), document_starts)
        return self._concatenated(batch, parts) if CONTEXT_AXIS in self.mesh.axis_names else batch

    def _concatenated(self, batch: Batch, parts: int) -> Batch:
        """Return the batch [m, replicas, L] with the sequences of every microbatch and replica concatenated."""
        m, b, length = batch.tokens.shape
        check_shared(b // parts, length, self.mesh.shape[CONTEXT_AXIS])
        inputs = batch.tokens, batch.targets, batch.samples, batch.document_starts
        divided = jax.tree.map(lambda x: x.reshape(m, parts, b // parts, *x.shape[2:]), inputs)
        concatenated = concatenate_sequences(*divided, xp=np if isinstance(batch.tokens, np.ndarray) else jnp)
        tokens, targets, samples = (x[:, :, 0] for x in concatenated[:3])
        return Batch(tokens, targets, samples, batch.step, None, concatenated.positions, concatenated.cu_seqlens)


def _batch_specs(mesh: Mesh) -> Batch:
    """Return the PartitionSpec of each array of the batch."""
    replicated = PartitionSpec()
    data, context = (axis if axis in mesh.axis_names else None for axis in (DATA_AXIS, CONTEXT_AXIS))
    samples = PartitionSpec(None, data)
    tokens = PartitionSpec(None, data, context)
    by_name: dict[str, Any] = {
        "tokens": tokens,
        "targets": tokens,
        "samples": samples if context is None else tokens,
        "step": replicated,
        "document_starts": samples,
        "positions": PartitionSpec(context),
        "cu_seqlens": samples,
    }
    return Batch(**by_name)


def _mesh(config: TransformerConfig, mesh: Mesh | None, transform: str) -> Mesh:
    """Check a mesh, or create one over the first devices."""
    p = config.pipeline_model_parallel_size
    cp = config.context_parallel_size
    tp = config.tensor_model_parallel_size
    n = config.model_parallel_size
    if mesh is None:
        devices = jax.devices()
        if len(devices) < n:
            raise ValueError(
                f"{replica_settings(config)}: expected at most the {len(devices)} devices JAX has, got {n}; on a "
                f"CPU call jax.config.update('jax_num_cpu_devices', {n}) before JAX is used"
            )
        sizes = {CONTEXT_AXIS: cp, PIPELINE_AXIS: p, TENSOR_AXIS: tp}
        axes = [axis for axis, size in sizes.items() if size > 1 or axis == PIPELINE_AXIS]
        mesh = Mesh(np.array(devices[:n]).reshape([sizes[axis] for axis in axes]), axes)
    allowed_axes = {PIPELINE_AXIS, DATA_AXIS, CONTEXT_AXIS, TENSOR_AXIS}
    if mesh.shape.get(PIPELINE_AXIS) != p or not {*mesh.axis_names} <= allowed_axes:
        raise ValueError(
            f"mesh: expected an axis {PIPELINE_AXIS!r} of size pipeline_model_parallel_size={p}, and besides at most "
            f"axes {DATA_AXIS!r}, {CONTEXT_AXIS!r} and {TENSOR_AXIS!r}, got {dict(mesh.shape)}"
        )
    for axis, name, size in (
        (CONTEXT_AXIS, "context_parallel_size", cp),
        (TENSOR_AXIS, "tensor_model_parallel_size", tp),
    ):
        if mesh.shape.get(axis, 1) != size:
            raise ValueError(
                f"mesh: expected an axis {axis!r} of size {name}={size}, got {dict(mesh.shape)}; change the mesh or "
                f"{name}"
            )
    check_axes(transform, mesh)
    return mesh


def _check_threads(config: TransformerConfig, mesh: Mesh) -> None:
    """Check that a program has enough threads for its callbacks, which otherwise deadlock."""
    if mesh.size == 1 or mesh.devices.flat[0].platform != "cpu" or not uses_kernels(config.impl, on_cuda=False):
        return
    needed = callback_threads(mesh.size)
    actual = int(os.environ.get("NPROC") or os.cpu_count() or 1)
    if actual < needed:
        raise ValueError(
            f"impl: expected at least {needed} threads to interpret kernels on {mesh.size} devices, got {actual}; set "
            f"the environment variable NPROC={needed} before JAX is used, or use impl='reference'"
        )


def _check_options(model: nnx.Module, config: TransformerConfig, transform: str, saves: str, slots: str) -> None:
    """Raise a ValueError if an option is unknown or not supported, or the model is not the single-device model."""
    check_options(transform=(transform, TRANSFORMS), slots=(slots, SLOTS), saves=(saves, SAVES))
    if config.enable_tensor_offload and transform == "pmap":
        raise ValueError(
            "transform: expected 'shard_map' with enable_tensor_offload, got 'pmap', which does not support arrays in "
            "host memory; pass transform='shard_map'"
        )
    if config.enable_activation_offload and saves == "inputs":
        raise ValueError(
            "saves: expected 'residuals' with enable_activation_offload, got 'inputs', which saves no activations; "
            "set only one of them"
        )
    state = nnx.split(model, nnx.Param)[1]
    actual = dict(zip(names_of(state), map(jnp.shape, jax.tree.leaves(state)), strict=True))
    expected = {name: spec.shape for name, spec in parameter_specs(unsharded(config)).items()}
    if actual != expected:
        name = min(dict(actual.items() ^ expected.items()))
        raise ValueError(
            "model: expected the single-device model of config, made from diptych.plans.mesh.unsharded(config), "
            f"with {name!r} of shape {expected.get(name)}, got {actual.get(name)}; pass GPTModel(unsharded(config))"
        )
