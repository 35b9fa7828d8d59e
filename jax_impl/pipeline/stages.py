"""The stages of a model: their parameters and their programs.

One program runs on every rank, so the parameters must have equal shapes on every rank. Layers of one kind (equal
settings, so equal shapes) are stacked over ranks, virtual stages and their position in the stage, [p, v, layers, ...],
where ``layers`` is the maximum over stages. A stage with fewer layers does not read the end of the stack, whose
gradient is 0. Embedding, final norm and head are replicated on every rank and read where they belong.

Stages with equal structure share a program (ModelStageProgram): the module of the model for such a stage, whose layers
receive their numbers when it runs. A dropout mask depends on the number of its layer in the whole model, so it does not
depend on the stage.

The fields of StagedParameters are therefore

    layers       by kind of layer: name within the layer to [p, v, layers, ...]
    replicated   parameters of embedding, final norm and head, by canonical name

Over n tensor-parallel ranks, p in this shape is p * n, with the n parts of a pipeline rank next to each other, and
replicated parameters have a first axis of n parts.

With offload, layers move separately, so they are separate arrays: instead of a stack, there are lists by virtual stage
and position in the stage of arrays [p, ...]. Every stage then has its own program with a fixed virtual stage, because a
program must name the arrays that it moves when it is compiled.
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from diptych.plans.config import TransformerConfig
from diptych.plans.context.exchange import exchange_options
from diptych.plans.mesh import unsharded
from diptych.plans.model.implementation import uses_kernels
from diptych.plans.model.layers import LayerConfig, is_offloaded
from diptych.plans.model.parameters import ParameterSpec, Split, parameter_specs
from diptych.plans.optimizer_shards import stored_dtype
from diptych.plans.recompute import RecomputeBlock, recompute_blocks
from diptych.plans.schedule.actions import Schedule
from diptych.plans.schedule.partition import layers_by_stage
from diptych.plans.tensor_parallel import join_parts, rank_config, rank_part, share_counted
from jax_impl.context_parallel import build_cp_context
from jax_impl.fp8 import SharingRanks
from jax_impl.linear_products import LinearTap, LinearTaps
from jax_impl.modules import set_gradient_factor, set_sharing_ranks
from jax_impl.offload import single_pass, without_offload
from jax_impl.pipeline.programs import StageProgram, Task
from jax_impl.recompute import recompute_policy
from jax_impl.staged_parameters import CONTEXT_AXIS, TENSOR_AXIS, StagedParameters
from jax_impl.tensor_parallel import TensorParallel, sum_repeated

LAYERS = "decoder.layers."
"""The prefix of the canonical name of every layer's parameter; the number of the layer follows."""

EMBEDDING = "embedding.weight"
"""Canonical name of the input embedding, and of a tied head."""


class Batch(NamedTuple):
    """The inputs of a step.

    With context parallelism, the sequences are concatenated (diptych.plans.context.sequences.ConcatenatedBatch), and
    tokens, targets and samples are [m, 1, L / R].
    """

    tokens: Array
    """Token ids. [m, b, T]"""
    targets: Array
    """Next token ids. [m, b, T]"""
    samples: Array
    """Numbers of the sequences within the global batch. [m, b]"""
    step: Array
    """Training step, for dropout."""
    document_starts: Array | None = None
    """See diptych.plans.model.documents; None: each sequence is one document. [m, b, N]"""
    positions: Array | None = None
    """Positions of tokens within their sequence, with context parallelism. [L / R]"""
    cu_seqlens: Array | None = None
    """Offsets of the documents, with context parallelism. [m, 1, N + 1]"""

    def microbatch(self, number: Array) -> "Batch":
        """Return one microbatch, with arrays [b, T], [b] and [b, N]."""
        own = self._replace(step=None, positions=None)
        return jax.tree.map(lambda array: array[number], own)._replace(step=self.step, positions=self.positions)

    def varying(self) -> "Batch":
        """Return True for tokens and targets; backward computes again what depends on other arrays alone (masks)."""
        return jax.tree.map(lambda _: False, self)._replace(tokens=True, targets=True)


class StackIndex(NamedTuple):
    """The index of a layer's parameters in the stacks."""

    kind: int
    position: int
    """Index among the stage's layers of this kind."""


@dataclass(frozen=True, eq=False)
class ModelStageProgram(StageProgram):
    """The program of stages of the model with equal structure."""

    layers: tuple[StackIndex, ...]
    numbers: tuple[int, ...]
    """Numbers of the layers in the stage from which the program was made."""
    config: TransformerConfig
    """Configuration of the rank's part of the model."""
    tensor_parallel: TensorParallel
    training: bool
    blocks: tuple[RecomputeBlock, ...]
    """Recompute blocks of the stage from which the program was made."""
    numbered: bool
    """True if layers have fixed numbers; otherwise they receive their numbers when the program runs."""
    vp_stage: int | None
    """The virtual stage of the program, if parameters are not stacked."""
    graph: nnx.GraphDef = field(repr=False)
    structure: Any = field(repr=False)
    names: tuple[str, ...] = field(repr=False)
    """Names of the parameters, in the order of the structure."""

    def run(self, parameters: Mapping[str, Array], x: Array, task: Task) -> tuple[Array, Any]:
        """Run a stage on one microbatch.

        Args:
            parameters: parameters by name, see names.
            x: output of the previous stage; not read in the first stage. [b, T, S*D]
            task: the stage and one microbatch, see Batch.microbatch.

        Returns:
            Hidden states with streams concatenated [b, T, S*D], or in the last stage the mean loss in nats per token,
            and the state of the task, which layers do not change.
        """
        offloads = self.config.enable_tensor_offload
        with contextlib.nullcontext() if offloads else without_offload():  # the executor's buffers hold activations
            return self._output(parameters, x, task.batch, task.first_layer), task.state

    def _output(self, parameters: Mapping[str, Array], x: Array, batch: Batch, first_layer: Array) -> Array:
        """Return the output of the stage."""
        model = nnx.merge(self.graph, jax.tree.unflatten(self.structure, [parameters[name] for name in self.names]))
        if not self.numbered:
            for offset, number in enumerate(self.numbers):
                model.decoder.layers[str(number)].layer_number = first_layer + offset
        if not self.first and self.config.enable_hyper_connections and not self.config.moe_aux_loss_coeff:
            x = x.reshape(*x.shape[:2], self.config.num_residual_streams, -1)
        inputs = batch.tokens if self.first else x
        targets = batch.targets if self.last else None
        arguments: dict[str, Any] = {"document_starts": batch.document_starts}
        if batch.cu_seqlens is not None:
            kernel = self.config.linear_conv_kernel_dim
            context = build_cp_context(batch.cu_seqlens[0], CONTEXT_AXIS, kernel, **exchange_options(self.config))
            branches = self.config.pipeline_model_parallel_size > 1
            arguments = {"positions": batch.positions, "cp_context": replace(context, by_groups=branches)}
        arguments |= {"tensor_parallel": self.tensor_parallel, "training": self.training}
        y = model(inputs, targets, step=batch.step, samples=batch.samples, **arguments)
        return y if self.last else y.reshape(*y.shape[:2], -1)

    def select(self, task: Task) -> dict[str, Array]:
        """Return the parameters of a stage by name, from those of a rank with layers [v, layers, ...]."""
        params = task.params
        result = {}
        for name in self.names:
            index, suffix = self._stack_index(name)
            if index is None:
                result[name] = params.replicated[name]
            elif self.vp_stage is None:
                result[name] = params.layers[index.kind][suffix][task.vp_stage, index.position]
            else:
                result[name] = params.layers[index.kind][suffix][self.vp_stage][index.position]
        return result

    def add(self, sums: StagedParameters, task: Task, gradients: Mapping[str, Array]) -> StagedParameters:
        """Add the gradients of a stage to the sums of a rank, in the dtype of the sums, and return the sums."""
        layers, replicated = jax.tree.map(lambda x: x, (list(sums.layers), sums.replicated))  # copies of the containers
        for name, gradient in gradients.items():
            index, suffix = self._stack_index(name)
            if index is None:
                replicated[name] += gradient.astype(replicated[name].dtype)
            elif self.vp_stage is None:
                stack = layers[index.kind][suffix]
                layers[index.kind][suffix] = stack.at[task.vp_stage, index.position].add(gradient.astype(stack.dtype))
            else:
                own = layers[index.kind][suffix][self.vp_stage]
                own[index.position] += gradient.astype(own[index.position].dtype)
        return StagedParameters(tuple(layers), replicated)

    @property
    def defers_products(self) -> bool:
        """False, because linear layers give the operands of their weight gradients to LinearTaps."""
        return False

    def tap_shapes(self, task: Task, x: Array) -> dict[str, LinearTap]:
        """Return the shapes of the input and output of every linear layer, by the name of its weight."""

        def run(task: Task, x: Array) -> Array:
            nonlocal taps
            parameters = jax.device_put(self.select(task), jax.memory.Space.Device)
            # No linear layer reads the input embedding.
            weights = {name: value for name, value in parameters.items() if not (self.first and name == EMBEDDING)}
            taps = LinearTaps(weights)
            with taps, without_offload():
                return self.run(parameters, x, task)[0]

        taps = LinearTaps({})
        jax.eval_shape(run, task, x)
        return taps.shapes

    def offloads(self, layer: int | None, name: str | None, nbytes: int) -> bool:
        """Return True if a value that a layer saves for backward moves to the host.

        Args:
            layer: number of a layer, in the stage from which the program was made; None: embedding and head, whose
                values move if all values of all layers do.
            name: name of the value; None: it has none.
            nbytes: its bytes.
        """
        if nbytes < self.config.activation_offload_min_bytes:
            return False
        if layer is None or self.config.activation_offload_layers is None:
            return self.config.enable_activation_offload and self.config.activation_offload_layers is None
        return is_offloaded(name, self.config.layer(layer).offload)

    def saving(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``run``, in jax.checkpoint if its pull-back would save more than a buffer entry has to contain."""
        if self.recomputes:
            return run
        # Without a policy JAX saves everything that a derivative reads, and XLA fuses most of it away; in a slot
        # everything would be stored. No matrix product is between named values, so saving these is enough.
        policy = recompute_policy(self.config, RecomputeBlock("none", ()))
        return jax.checkpoint(run, policy=policy)  # pyright: ignore[reportPrivateImportUsage]

    def fetching(self, gradients: Mapping[str, Any], replays: bool) -> contextlib.AbstractContextManager:
        """Return a context in which the layers of a stage are fetched by the plan of one action.

        Args:
            gradients: for every parameter of a layer, zeros that receive its gradient, or its taps.
            replays: True if backward replays the stage.
        """
        if not self.config.enable_tensor_offload:
            return contextlib.nullcontext()
        by_layer: dict[int, list[Any]] = {number: [] for number in self.numbers}
        for name in self.names:
            number = self.layer_of(name)
            if number is not None:
                by_layer[number].append(gradients[name])
        context = single_pass(self.config, self.blocks, includes_backward=replays)
        return context._replace(gradient_taps=by_layer, activations={}, saves_named_only=not replays).active()

    @property
    def recomputes(self) -> bool:
        """True if blocks of layers are recomputed."""
        return any(block.kind != "none" for block in self.blocks)

    def layer_of(self, name: str) -> int | None:
        """Return the number of the layer that a name belongs to, in the stage from which the program was made."""
        return split_name(name)[0] if name.startswith(LAYERS) else None

    def _stack_index(self, name: str) -> tuple[StackIndex | None, str]:
        """Return the stack index and the name within the layer; None and the name for replicated parameters."""
        if not name.startswith(LAYERS):
            return None, name
        number, suffix = split_name(name)
        return self.layers[self.numbers.index(number)], suffix


@dataclass(frozen=True)
class Stages:
    """The stages of a configuration's model."""

    config: TransformerConfig
    """Configuration of the rank's part of the model."""
    tensor_parallel: TensorParallel
    specs: Mapping[str, ParameterSpec]
    """Shape of every parameter of the whole model and its division among tensor-parallel ranks, by canonical name."""
    kinds: tuple[LayerConfig, ...]
    placement: tuple[tuple[int, int], ...]
    """Rank and virtual stage of each stage."""
    programs: tuple[ModelStageProgram, ...]
    program_of: tuple[int, ...]
    """Index of the program of each stage."""
    first_layers: tuple[int, ...]
    """Global number of the first layer of each stage; for a stage without layers, where the next stage begins."""
    loss_weight: None = None
    """Gradients are those of the mean of the microbatches' losses."""
    collects_losses: bool = True

    def gradient_dtype(self, parameter: Array) -> DTypeLike:
        """Return the type in which gradients are summed, also those of rounded parameters."""
        return jnp.promote_types(parameter.dtype, self.config.params_dtype)

    def message(self, batch: Batch) -> Array:
        """Return a message of zeros between stages, [b, T, S*D]."""
        _, sequences, tokens = batch.tokens.shape
        tokens //= self.tensor_parallel.token_parts
        return jnp.zeros((sequences, tokens, self.config.stage_width), self.config.compute_dtype)

    def collected(self, batch: Batch) -> Array:
        """Return a zero with the type of the loss of a microbatch."""
        del batch
        return jnp.zeros((), self.config.params_dtype)

    def by_layer(self) -> dict[int, tuple[int, int, StackIndex]]:
        """Return rank, virtual stage and stack index of every layer."""
        result = {}
        for stage, (rank, vp_stage) in enumerate(self.placement):
            for offset, index in enumerate(self.programs[self.program_of[stage]].layers):
                result[self.first_layers[stage] + offset] = rank, vp_stage, index
        return result

    def stack(self, values: Mapping[str, Any], array: Callable = np.zeros) -> StagedParameters:
        """Stage parameters given by canonical name.

        Args:
            values: parameters by canonical name.
            array: creates a stack from shape and dtype; its content is the padding.
        """
        by_layer = self.by_layer()
        ranks, virtual = (1 + max(index[i] for index in self.placement) for i in (0, 1))
        lengths = [
            1 + max((index.position for *_, index in by_layer.values() if index.kind == kind), default=-1)
            for kind in range(len(self.kinds))
        ]
        size = self.tensor_parallel.size
        layers: list[dict[str, Any]] = [{} for _ in self.kinds]
        replicated = {}
        for name, value in values.items():
            parts = [rank_part(np.asarray(value), self.specs[name].split, size, part) for part in range(size)]
            if not name.startswith(LAYERS):
                replicated[name] = parts[0] if size == 1 else np.stack(parts)
                continue
            number, suffix = split_name(name)
            rank, vp_stage, (kind, position) = by_layer[number]
            if suffix not in layers[kind]:
                shape = (ranks * size, virtual, lengths[kind], *parts[0].shape)
                layers[kind][suffix] = array(shape, parts[0].dtype)
            for part, value in enumerate(parts):
                layers[kind][suffix][rank * size + part, vp_stage, position] = value
        if self.config.enable_tensor_offload:
            layers = jax.tree.map(lambda x: [[x[:, v, i] for i in range(x.shape[2])] for v in range(virtual)], layers)
        return StagedParameters(tuple(layers), replicated)

    def unstack(self, staged: StagedParameters) -> dict[str, Any]:
        """Return staged parameters by canonical name, without padding."""
        size = self.tensor_parallel.size
        result = dict(staged.replicated)
        if size > 1:
            result = {name: join_parts(parts, self.specs[name].split) for name, parts in staged.replicated.items()}
        for number, (rank, vp_stage, (kind, position)) in self.by_layer().items():
            for suffix, value in staged.layers[kind].items():
                stack = value[vp_stage][position] if isinstance(value, list) else value[:, vp_stage, position]
                name = f"{LAYERS}{number}.{suffix}"
                result[name] = join_parts(stack[rank * size : (rank + 1) * size], self.specs[name].split)
        return result

    def as_stored(self, staged: StagedParameters) -> StagedParameters:
        """Return staged parameters with those that have master weights rounded; see plans.optimizer_shards."""

        def rounded(name: str, x: Array) -> Array:
            return x.astype(stored_dtype(self.config, name, self.specs[name].shape))

        return self._by_name(rounded, staged)

    def sum_over_tensor_parallel(self, gradients: StagedParameters) -> StagedParameters:
        """Sum gradients of one rank, without an axis of ranks, of which every tensor-parallel rank has a part."""
        if self.tensor_parallel.size == 1:
            return gradients

        def total(name: str, x: Array) -> Array:
            split = self._split_of(name, x)
            return sum_repeated({name: x}, {name: split}, self.tensor_parallel)[name]

        return self._by_name(total, gradients)

    def shares_counted(self, staged: StagedParameters) -> StagedParameters:
        """Return factors for staged arrays, with which a sum over all ranks counts every entry of a parameter once."""
        size = self.tensor_parallel.size

        def factors(name: str, x: Array | jax.ShapeDtypeStruct) -> np.ndarray:
            split = self._split_of(name, x)
            counts = np.stack([share_counted(split, size, part) for part in range(size)])  # [n, entries or 1]
            counts = np.tile(counts, (x.shape[0] // size, 1))
            shape = [len(counts), *[1] * (x.ndim - 1)]
            if split is not None:
                shape[split.axis] = counts.shape[1]
            return counts.reshape(shape)

        return self._by_name(factors, staged)

    def _split_of(self, name: str, x: Array | jax.ShapeDtypeStruct) -> Split | None:
        """Return the division of a parameter, for an array that has further axes before those of the parameter."""
        spec = self.specs[name]
        split = spec.split
        return None if split is None else split._replace(axis=split.axis + x.ndim - len(spec.shape))

    def _by_name(self, change: Callable[[str, Array], Any], staged: StagedParameters) -> StagedParameters:
        """Change every array of a staged tree by name; a stack has the name of the parameter in one of its layers."""
        numbers = {index.kind: number for number, (*_, index) in self.by_layer().items()}
        layers = tuple(
            {
                suffix: jax.tree.map(partial(change, f"{LAYERS}{numbers[kind]}.{suffix}"), stack)
                for suffix, stack in stacks.items()
            }
            for kind, stacks in enumerate(staged.layers)
        )
        return StagedParameters(layers, {name: change(name, x) for name, x in staged.replicated.items()})


def divide_model(
    model_class: Callable[..., nnx.Module],
    config: TransformerConfig,
    schedule: Schedule,
    training: bool,
    gradient_factor: int = 1,
) -> Stages:
    """Divide a model into the stages of a configuration.

    Args:
        model_class: creates one stage: ``model_class(config, pre_process, post_process, vp_stage, pp_rank)``.
        config: configuration of the whole model.
        schedule: defines the rank of each stage.
        training: True if programs use dropout.
        gradient_factor: factor by which the gradients of backward exceed the gradients of a step's loss.
    """
    counts = layers_by_stage(config)
    size = config.tensor_model_parallel_size
    ranks = TensorParallel(TENSOR_AXIS, size, config.sequence_parallel) if size > 1 else TensorParallel()
    specs = parameter_specs(unsharded(config))
    sharing = _sharing_ranks(config)
    config = rank_config(config)
    kinds = tuple(dict.fromkeys(config.layer(number) for number in range(config.num_layers)))
    # Kernels take the layer number of a dropout mask as a constant, so every stage needs its own program.
    in_kernels = uses_kernels(config.impl, jax.default_backend() == "gpu")
    has_constant_numbers = training and config.hidden_dropout > 0.0 and in_kernels
    offloads = config.enable_tensor_offload
    programs: dict[Any, ModelStageProgram] = {}
    placement = []
    program_of = []
    first_layers = [sum(counts[:stage]) for stage in range(len(counts))]
    for stage, (first, count) in enumerate(zip(first_layers, counts, strict=True)):
        rank = schedule.rank_of(stage)
        vp_stage = sum(schedule.rank_of(before) == rank for before in range(stage))
        ends = stage == 0, stage == len(counts) - 1
        layers = tuple(config.layer(first + offset) for offset in range(count))
        blocks = recompute_blocks(config, vp_stage, rank)
        relative_blocks = tuple(b._replace(layers=tuple(number - first for number in b.layers)) for b in blocks)
        fixed = first if has_constant_numbers else None, stage if offloads else None
        key = (*ends, layers, relative_blocks, *fixed)
        if key not in programs:
            module = nnx.eval_shape(lambda e=ends, v=vp_stage, r=rank: model_class(config, *e, vp_stage=v, pp_rank=r))
            set_gradient_factor(module, gradient_factor)
            set_sharing_ranks(module, sharing)
            programs[key] = _program(
                module,
                ends,
                layers=tuple(StackIndex(kinds.index(kind), layers[:i].count(kind)) for i, kind in enumerate(layers)),
                numbers=tuple(range(first, first + count)),
                config=config,
                tensor_parallel=ranks,
                training=training,
                blocks=blocks,
                numbered=has_constant_numbers or offloads,
                vp_stage=vp_stage if offloads else None,
            )
        placement.append((rank, vp_stage))
        program_of.append([*programs].index(key))
    stages = tuple(placement), tuple(programs.values()), tuple(program_of), tuple(first_layers)
    return Stages(config, ranks, specs, kinds, *stages)


def _program(module: nnx.Module, ends: tuple[bool, bool], **fields: Any) -> ModelStageProgram:
    """Return the program of a stage from its module, whether it is the first and the last, and the other fields."""
    graph, state = nnx.split(module, nnx.Param)
    return ModelStageProgram(*ends, graph=graph, structure=jax.tree.structure(state), names=names_of(state), **fields)


def _sharing_ranks(config: TransformerConfig) -> SharingRanks:
    """Return the axes of ranks that have parts of the arrays of one microbatch."""
    sizes = {TENSOR_AXIS: config.tensor_model_parallel_size, CONTEXT_AXIS: config.context_parallel_size}
    return SharingRanks(tuple(axis for axis, size in sizes.items() if size > 1))


def names_of(state: nnx.State) -> tuple[str, ...]:
    """Return the canonical name of every leaf, in order."""
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]]
    return tuple(
        ".".join(str(entry.key) for entry in path if isinstance(entry, jax.tree_util.DictKey)) for path in paths
    )


def split_name(name: str) -> tuple[int, str]:
    """Return the layer number and the name within the layer from the canonical name of a parameter."""
    number, suffix = name.removeprefix(LAYERS).split(".", 1)
    return int(number), suffix
