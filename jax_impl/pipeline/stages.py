"""A model cut into stages: which parameters each holds, and what it computes.

One program runs on every rank, so parameters have to be alike on every rank. Layers of one kind (equal settings, so
equal shapes) are stacked over ranks, virtual stages and their place in the stage, [p, v, layers, ...], where ``layers``
is the most that any stage has; a stage with fewer leaves the end of the stack unread, and its gradient 0. Embedding,
final norm and head are whole on every rank, and read where they belong.

Stages of equal build share a program (class Program): the model's own module for such a stage, whose layers are told
their numbers when it runs. A dropout mask is a function of the layer's number in the whole model, hence the same in any
stage.

With offload a layer's parameters move by themselves, so they are arrays of their own: in the place of a stack lists of
lists, by virtual stage and place in the stage, of [p, ...]. Every stage then has a program of its own, which knows its
virtual stage: what a program moves it has to name when it is compiled.
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax import Array

from diptych.plans.config import TransformerConfig
from diptych.plans.context.exchange import exchange_options
from diptych.plans.model.implementation import uses_kernels
from diptych.plans.model.layers import LayerConfig
from diptych.plans.recompute import RecomputeBlock, recompute_blocks
from diptych.plans.schedule.actions import Schedule
from diptych.plans.schedule.partition import layers_by_stage
from jax_impl.context_parallel import build_cp_context
from jax_impl.offload import without_offload

CONTEXT_AXIS = "cp"
"""Mesh axis over the parts of sequences that ranks share."""

LAYERS = "decoder.layers."
"""Beginning of the canonical name of every layer's parameter; the layer's number follows."""

EMBEDDING = "embedding.weight"
"""Canonical name of the input embedding, and of a tied head."""


class StagedParameters(NamedTuple):
    """Parameters (or gradients, or moments) as the pipeline holds them."""

    layers: tuple[dict[str, Any], ...]
    """By kind of layer: name within the layer to [p, v, layers, ...], or with offload to v lists of layers [p, ...]."""
    ends: dict[str, Any]
    """Canonical name to the parameter, of embedding, final norm and head."""


class Batch(NamedTuple):
    """What a step reads."""

    tokens: Array
    """[m, b, T]"""
    targets: Array
    """[m, b, T]"""
    samples: Array
    """Numbers of the sequences within the global batch. [m, b]"""
    step: Array
    """Of training, for dropout."""
    document_starts: Array | None = None
    """See diptych.plans.model.documents; None: each sequence is one. [m, b, N]"""
    positions: Array | None = None
    """Where ranks share sequences, which then lie end to end (diptych.plans.context.sequences.EndToEnd; tokens,
    targets and samples are [m, 1, L / R]): of tokens within their sequence. [L / R]"""
    cu_seqlens: Array | None = None
    """There: offsets of what is kept apart. [m, 1, N + 1]"""

    def microbatch(self, number: Array) -> "Batch":
        """One of them: [b, T], [b], [b, N]."""
        own = self._replace(step=None, positions=None)
        return jax.tree.map(lambda array: array[number], own)._replace(step=self.step, positions=self.positions)


class LayerPlace(NamedTuple):
    """Where the parameters of one layer lie."""

    kind: int
    position: int
    """Among the stage's layers of the kind."""


@dataclass(frozen=True, eq=False)
class Program:
    """What stages of equal build compute."""

    first: bool
    last: bool
    layers: tuple[LayerPlace, ...]
    numbers: tuple[int, ...]
    """Of the layers in the stage the program was made from."""
    config: TransformerConfig
    training: bool
    blocks: tuple[RecomputeBlock, ...]
    """What is recomputed, of layers in the stage the program was made from."""
    numbered: bool
    """Layers keep the numbers they were made with; else they are told."""
    vp_stage: int | None
    """Where parameters are not stacked: the only one that runs it."""
    graph: nnx.GraphDef = field(repr=False)
    structure: Any = field(repr=False)
    names: tuple[str, ...] = field(repr=False)
    """Of the parameters, in the structure's order."""

    def __call__(
        self,
        parameters: Mapping[str, Array],
        x: Array,
        batch: Batch,
        first_layer: Array,
    ) -> Array:
        """Run a stage on one microbatch.

        Args:
            parameters: by name, see names.
            x: what the stage before gave; not read in the first stage. [b, T, S*D]
            batch: one microbatch, see Batch.microbatch.
            first_layer: number of the stage's first layer.

        Returns:
            Hidden states, streams side by side [b, T, S*D], or in the last stage the mean loss in nats per token.
        """
        offloads = self.config.enable_tensor_offload
        with contextlib.nullcontext() if offloads else without_offload():  # activations wait in slots of the executor's
            return self._run(parameters, x, batch, first_layer)

    def _run(self, parameters: Mapping[str, Array], x: Array, batch: Batch, first_layer: Array) -> Array:
        model = nnx.merge(self.graph, jax.tree.unflatten(self.structure, [parameters[name] for name in self.names]))
        if not self.numbered:
            for offset, number in enumerate(self.numbers):
                model.decoder.layers[str(number)].layer_number = first_layer + offset
        if not self.first and self.config.enable_hyper_connections:
            x = x.reshape(*x.shape[:2], self.config.num_residual_streams, -1)
        inputs, targets = batch.tokens if self.first else x, batch.targets if self.last else None
        told: dict[str, Any] = {"document_starts": batch.document_starts}
        if batch.cu_seqlens is not None:
            kernel, travel = self.config.linear_conv_kernel_dim, exchange_options(self.config)
            context = build_cp_context(batch.cu_seqlens[0], CONTEXT_AXIS, kernel, **travel)
            branches = self.config.pipeline_model_parallel_size > 1
            told = {"positions": batch.positions, "cp_context": replace(context, by_groups=branches)}
        y = model(inputs, targets, step=batch.step, samples=batch.samples, **told, training=self.training)
        return y if self.last else y.reshape(*y.shape[:2], -1)

    def take(self, params: StagedParameters, vp_stage: Array) -> dict[str, Array]:
        """A stage's parameters by name, out of a rank's: layers [v, layers, ...]."""
        found = {}
        for name in self.names:
            place, rest = self._place(name)
            if place is None:
                found[name] = params.ends[name]
            elif self.vp_stage is None:
                found[name] = params.layers[place.kind][rest][vp_stage, place.position]
            else:
                found[name] = params.layers[place.kind][rest][self.vp_stage][place.position]
        return found

    def add(self, params: StagedParameters, vp_stage: Array, gradients: Mapping[str, Array]) -> StagedParameters:
        """A rank's sums with a stage's gradients added, in the sums' type."""
        layers, ends = jax.tree.map(lambda x: x, (list(params.layers), params.ends))
        for name, gradient in gradients.items():
            place, rest = self._place(name)
            if place is None:
                ends[name] += gradient.astype(ends[name].dtype)
            elif self.vp_stage is None:
                stack = layers[place.kind][rest]
                layers[place.kind][rest] = stack.at[vp_stage, place.position].add(gradient.astype(stack.dtype))
            else:
                own = layers[place.kind][rest][self.vp_stage]
                own[place.position] += gradient.astype(own[place.position].dtype)
        return StagedParameters(tuple(layers), ends)

    def looks_up(self, name: str) -> bool:
        """Whether a parameter is the table of the input embedding, which is read by no linear map."""
        return self.first and name == EMBEDDING

    @property
    def recomputes(self) -> bool:
        """Whether blocks of layers are recomputed."""
        return any(block.kind != "none" for block in self.blocks)

    def layer_of(self, name: str) -> int | None:
        """The layer whose parameter a name is, by its number in the stage the program was made from."""
        return split_name(name)[0] if name.startswith(LAYERS) else None

    def _place(self, name: str) -> tuple[LayerPlace | None, str]:
        if not name.startswith(LAYERS):
            return None, name
        number, rest = split_name(name)
        return self.layers[self.numbers.index(number)], rest


@dataclass(frozen=True)
class Stages:
    """How a configuration cuts its model."""

    config: TransformerConfig
    kinds: tuple[LayerConfig, ...]
    places: tuple[tuple[int, int], ...]
    """By stage: its rank, and its virtual stage there."""
    programs: tuple[Program, ...]
    program_of: tuple[int, ...]
    """By stage."""
    first_layers: tuple[int, ...]
    """By stage: the number of its first layer, or where there is none, of the next stage's."""

    def by_layer(self) -> dict[int, tuple[int, int, LayerPlace]]:
        """Rank, virtual stage and place of every layer."""
        found = {}
        for stage, (rank, vp_stage) in enumerate(self.places):
            for offset, place in enumerate(self.programs[self.program_of[stage]].layers):
                found[self.first_layers[stage] + offset] = rank, vp_stage, place
        return found

    def stack(self, values: Mapping[str, Any], array: Callable = np.zeros) -> StagedParameters:
        """Parameters by canonical name, staged; what pads a stack is made by ``array(shape, dtype)``."""
        by_layer = self.by_layer()
        ranks, virtual = (1 + max(place[i] for place in self.places) for i in (0, 1))
        lengths = [
            1 + max((place.position for *_, place in by_layer.values() if place.kind == kind), default=-1)
            for kind in range(len(self.kinds))
        ]
        layers: list[dict[str, Any]] = [{} for _ in self.kinds]
        ends = {}
        for name, value in values.items():
            if not name.startswith(LAYERS):
                ends[name] = np.asarray(value)
                continue
            number, rest = split_name(name)
            rank, vp_stage, (kind, position) = by_layer[number]
            value = np.asarray(value)
            if rest not in layers[kind]:
                layers[kind][rest] = array((ranks, virtual, lengths[kind], *value.shape), value.dtype)
            layers[kind][rest][rank, vp_stage, position] = value
        if self.config.enable_tensor_offload:
            layers = jax.tree.map(lambda x: [[x[:, v, i] for i in range(x.shape[2])] for v in range(virtual)], layers)
        return StagedParameters(tuple(layers), ends)

    def unstack(self, staged: StagedParameters) -> dict[str, Any]:
        """The inverse of stack; padding is dropped."""
        found = dict(staged.ends)
        for number, (rank, vp_stage, (kind, position)) in self.by_layer().items():
            for rest, value in staged.layers[kind].items():
                own = value[vp_stage][position][rank] if isinstance(value, list) else value[rank, vp_stage, position]
                found[f"{LAYERS}{number}.{rest}"] = own
        return found


def cut(
    model_class: Callable[..., nnx.Module], config: TransformerConfig, schedule: Schedule, training: bool
) -> Stages:
    """Cut a model into the stages of a configuration.

    Args:
        model_class: makes one stage: ``model_class(config, pre_process, post_process, vp_stage, pp_rank)``.
        config: the whole model's.
        schedule: says on which rank a stage lies.
        training: whether programs drop out.
    """
    counts = layers_by_stage(config)
    kinds = tuple(dict.fromkeys(config.layer(number) for number in range(config.num_layers)))
    # Kernels take a mask's place in the model as a constant, so there every stage needs a program of its own.
    masked = training and config.hidden_dropout > 0.0 and uses_kernels(config.impl, jax.default_backend() == "gpu")
    offloads = config.enable_tensor_offload
    programs: dict[Any, Program] = {}
    places, program_of, first_layers = [], [], []
    for stage, count in enumerate(counts):
        rank = schedule.rank_of(stage)
        vp_stage = sum(schedule.rank_of(before) == rank for before in range(stage))
        first = sum(counts[:stage])
        ends = stage == 0, stage == len(counts) - 1
        layers = tuple(config.layer(first + offset) for offset in range(count))
        blocks = recompute_blocks(config, vp_stage, rank)
        moved = tuple(block._replace(layers=tuple(number - first for number in block.layers)) for block in blocks)
        build = (*ends, layers, moved, first if masked else None, stage if offloads else None)
        if build not in programs:
            module = nnx.eval_shape(lambda e=ends, v=vp_stage, r=rank: model_class(config, *e, vp_stage=v, pp_rank=r))
            graph, state = nnx.split(module, nnx.Param)
            place = tuple(LayerPlace(kinds.index(kind), layers[:i].count(kind)) for i, kind in enumerate(layers))
            numbers = tuple(range(first, first + count))
            structure, names = jax.tree.structure(state), names_of(state)
            told = masked or offloads, vp_stage if offloads else None
            programs[build] = Program(*ends, place, numbers, config, training, blocks, *told, graph, structure, names)
        places.append((rank, vp_stage))
        program_of.append([*programs].index(build))
        first_layers.append(first)
    return Stages(config, kinds, tuple(places), tuple(programs.values()), tuple(program_of), tuple(first_layers))


def names_of(state: nnx.State) -> tuple[str, ...]:
    """The canonical name of every leaf, in order."""
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]]
    return tuple(
        ".".join(str(entry.key) for entry in path if isinstance(entry, jax.tree_util.DictKey)) for path in paths
    )


def split_name(name: str) -> tuple[int, str]:
    """Number of the layer and name within it, of a layer's parameter."""
    number, rest = name.removeprefix(LAYERS).split(".", 1)
    return int(number), rest
