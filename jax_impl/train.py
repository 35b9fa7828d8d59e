"""Training: AdamW steps over deterministic batches.

diptych/plans decides batches, initial values, learning rate, decay, clipping and schedule for both backends. This file
executes these decisions in JAX, as one compiled program per step: on one device, or with one device for each data-,
context-, pipeline- and tensor-parallel rank. The command is the same for several devices:

    diptych train --backend jax --pipeline-model-parallel-size 4 ...
"""

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from diptych.plans.amax_history import is_history
from diptych.plans.checkpoint import (
    MODEL,
    Checkpoint,
    check_model,
    check_settings,
    check_settings_on_all_ranks,
    initial_weights,
    read_on_all_ranks,
    run_settings,
    split_arrays,
    write_checkpoint,
)
from diptych.plans.config import TrainConfig, TransformerConfig
from diptych.plans.mesh import unsharded
from diptych.plans.model.data import Batch, Corpus
from diptych.plans.optimizer_shards import has_master_weights, stored_dtype
from diptych.plans.training import (
    CLIP_EPSILON,
    StepResult,
    check_batch,
    check_finite,
    check_finite_validation,
    check_trainable,
    has_weight_decay,
    learning_rate,
    microbatches,
)
from jax_impl.distributed_optimizer import (
    OptimizerShards,
    exact_parameters,
    new_master_weights,
    only_master_weights,
    own_shards,
    unshard,
    with_master_weights,
)
from jax_impl.groups import gather_texts, on_first_rank
from jax_impl.history_updates import history_flags, with_advanced, without_histories
from jax_impl.offload import Layers, OffloadedStep
from jax_impl.pipeline import OffloadedPipeline, PipelineStep, make_pipeline_step
from jax_impl.pipeline.stages import names_of
from jax_impl.saving import export_arrays, export_parameters, import_arrays, import_parameters
from jax_impl.transformer import GPTModel

Parameters = Any
"""Parameters, gradients or moments: of the single-device model (nnx.State), or placed on the ranks of the pipeline
(StagedParameters)."""


class _OptimizerState(NamedTuple):
    """The state of AdamW, and of a distributed optimizer with master weights."""

    adam: optax.OptState
    master_weights: Parameters | None = None
    """Shards of the parameters that are rounded, and of others no elements; None: no parameter is rounded."""


class Trainer:
    """A model, its optimizer and its data.

    Args:
        config: configuration of the model.
        train_config: configuration of the optimisation.
        corpus: training and validation data.
        mesh: devices with an axis "pp" of the pipeline's size, axes "cp" and "tp" if their sizes are larger than 1, and
            optionally an axis "dp" of replicas; None: the first available devices.

    Raises:
        ValueError: the corpus is too short for the model, or has bytes without a token; the batch does not fit schedule
            and replicas; processes have different corpora or settings; there are fewer devices than ranks.
    """

    def __init__(
        self, config: TransformerConfig, train_config: TrainConfig, corpus: Corpus, mesh: Mesh | None = None
    ) -> None:
        corpus.check(config.seq_length, config.vocab_size)
        self.config = config
        self.train_config = train_config
        self.corpus = corpus
        self.steps_taken = 0
        self._replicas = 1 if mesh is None else mesh.shape.get("dp", 1)
        check_trainable(config, train_config, self._replicas)
        check_settings_on_all_ranks(self._settings(), gather_texts)
        unsharded_model = GPTModel(unsharded(config) if config.model_parallel_size > 1 else config)
        self._graph, params = nnx.split(unsharded_model, nnx.Param)
        count = microbatches(train_config, self._replicas)[1]
        self._pipeline: PipelineStep | None = None
        self._forwards: PipelineStep | None = None
        if config.model_parallel_size > 1 or mesh is not None:
            shared = config.context_parallel_size * config.tensor_model_parallel_size
            one_axis = (mesh is None or len(mesh.axis_names) == 1) and shared == 1
            transform = "pmap" if one_axis and not config.enable_tensor_offload else "shard_map"
            self._pipeline = make_pipeline_step(unsharded_model, config, mesh, transform)
            self._forwards = make_pipeline_step(
                unsharded_model, config, mesh, transform, training=False, forward_only=True
            )
        self._optimizer = optax.scale_by_adam(train_config.adam_beta1, train_config.adam_beta2, train_config.adam_eps)
        self._params: Parameters = self._staged(params)
        """Parameters as a step reads them; see _exact."""
        self._shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), self._params)
        self._optimizer_state = self._initial_state()
        exact = self._params
        self._params = self._as_stored(exact)
        self.offload = (
            OffloadedStep(config, params, count)
            if self._pipeline is None
            else OffloadedPipeline(self._pipeline, self._params, count)
        )
        self._place(exact)
        self._update = jax.jit(self._update_step, donate_argnums=(0, 1))
        self._apply = jax.jit(self._apply_gradients, donate_argnums=(0, 1))
        self._value_and_grad = jax.jit(self._loss_and_gradients)
        self._evaluate = jax.jit(partial(self._loss, training=False))

    @property
    def model(self) -> GPTModel:
        """The single-device model with its present parameters."""
        return nnx.merge(self._graph, self._joined(self._exact()))

    @property
    def offload_statistics(self) -> dict[str, Any] | None:
        """Statistics of offload on this process; None without offload."""
        return self.offload.stats if self.offload.enabled else None

    @property
    def is_main_process(self) -> bool:
        """True on the process that writes files and prints output."""
        return jax.process_index() == 0

    def any_process(self, flag: bool) -> bool:
        """Return True if the flag is set on any process; every process has to call this.

        Args:
            flag: flag of this process.
        """
        if jax.process_count() == 1:
            return flag
        from jax.experimental import multihost_utils

        return bool(multihost_utils.process_allgather(np.array(flag)).any())

    def train_step(self, step: int) -> StepResult:
        """Take one optimizer step on the batch of a step.

        Args:
            step: number of the step, from 0.

        Raises:
            NonFiniteLossError: the loss or the gradients are not finite; nothing is updated.
        """
        start = time.perf_counter()
        train = self.train_config
        batch = self.corpus.batch(step, train.global_batch_size, self.config.seq_length)
        rate = learning_rate(train, step)
        if self._pipeline is None:
            self._params, self._optimizer_state, loss, norm = self._update(
                self._params, self._optimizer_state, batch, np.uint32(step), rate
            )
        else:
            loss, gradients = self._pipeline(self._params, *self._parts(batch, step))
            self._params, self._optimizer_state, norm = self._apply(
                self._params, self._optimizer_state, loss, gradients, rate
            )
        tokens = train.global_batch_size * self.config.seq_length
        result = StepResult(step, loss.item(), norm.item(), rate, tokens, time.perf_counter() - start)
        self.offload.steps_run += 1
        check_finite(result)
        self.steps_taken = step + 1
        return result

    def loss_and_gradients(self, batch: Batch, step: int = 0) -> tuple[float, dict[str, np.ndarray]]:
        """Return the loss of a batch and its gradient for every parameter, by canonical name, and update nothing.

        A batch of global_batch_size sequences runs in the microbatches of train_step, any other one as a whole.

        Args:
            batch: any number of sequences on one device; global_batch_size sequences on several.
            step: training step, for dropout.

        Raises:
            ValueError: the batch is empty, or several devices share it and its size is not global_batch_size.
        """
        if self._pipeline is None:
            total = len(batch.tokens)
            if not total:
                raise ValueError("batch: expected at least one sequence, got none")
            size = self.train_config.microbatch if total == self.train_config.global_batch_size else total
            microbatch_results = [
                self._value_and_grad(
                    self._params, batch.part(first, size), np.uint32(step), first=np.int32(first), share=size / total
                )
                for first in range(0, total, size)
            ]
            loss, gradients = jax.tree.map(lambda *each: sum(each), *microbatch_results)
        else:
            check_batch(batch, self.train_config)
            loss, gradients = self._pipeline(self._params, *self._parts(batch, step))
            gradients = self._unsharded(gradients)
        named = export_parameters(self._joined(gradients))
        return loss.item(), {name: gradient for name, gradient in named.items() if not is_history(gradient.shape)}

    def validation_loss(self) -> float:
        """Return the mean loss over ``eval_iters`` batches of the validation split, without dropout.

        Raises:
            NonFiniteLossError: the loss is not finite.
        """
        train = self.train_config
        losses = []
        for index in range(train.eval_iters):
            batch = self.corpus.validation_batch(index, train.global_batch_size, self.config.seq_length)
            if self._forwards is None:
                size = train.microbatch
                parts = [batch.part(first, size) for first in range(0, train.global_batch_size, size)]
                losses.append(np.mean([self._evaluate(self._params, part).item() for part in parts]))
                self.offload.forwards_run += len(parts)
            else:
                losses.append(np.mean(self._forwards(self._params, *self._parts(batch))))
                self.offload.forwards_run += 1
        loss = float(np.mean(losses))
        check_finite_validation(loss, self.steps_taken)
        return loss

    def parameters(self) -> dict[str, np.ndarray]:
        """Return a copy of every parameter, by canonical name."""
        return export_parameters(self._joined(self._exact()))

    def set_parameters(self, values: Mapping[str, np.ndarray]) -> None:
        """Overwrite every parameter, and keep the state of the optimizer.

        Args:
            values: new values, by canonical name.

        Raises:
            ValueError: names or shapes differ from those of the model.
        """
        self._place(self._staged(import_parameters(self._joined(self._exact()), values)))

    def save(self, folder: Path, keep: int = 2) -> Path:
        """Write a checkpoint of the run between two steps, and remove all but the newest ``keep`` checkpoints.

        Args:
            folder: folder of the checkpoints.
            keep: number of checkpoints to keep.

        Returns:
            The path of the checkpoint.

        Raises:
            CheckpointError: see diptych.plans.checkpoint.write_checkpoint.
        """
        arrays = export_arrays(self._joined(self._exact()), self._moments(lambda m: self._joined(self._unsharded(m))))
        checkpoint = Checkpoint(self.steps_taken, arrays, self._settings())
        return Path(on_first_rank(lambda: str(write_checkpoint(folder, checkpoint, keep))))

    def load_weights(self, path: Path) -> None:
        """Overwrite the initial parameters with the weights of a checkpoint, in the dtype of this run.

        Args:
            path: a checkpoint file, or a folder whose newest checkpoint is read.

        Raises:
            CheckpointError: the checkpoint is damaged or has another model; or processes found different checkpoints.
        """
        checkpoint = read_on_all_ranks(path, partial(check_model, model=self.config), gather_texts)
        self.set_parameters(initial_weights(split_arrays(checkpoint.arrays, MODEL), self.config))

    def resume(self, path: Path) -> int:
        """Continue from a checkpoint of either backend with any number of pipeline stages.

        Args:
            path: a checkpoint file, or a folder whose newest checkpoint is read.

        Returns:
            The next step.

        Raises:
            CheckpointError: the checkpoint is damaged or has other settings, which the message names; or processes
                found different checkpoints.
        """
        checkpoint = read_on_all_ranks(path, partial(check_settings, settings=self._settings()), gather_texts)
        params, self._optimizer_state = import_arrays(
            self._joined(self._exact()),
            self._moments(lambda m: self._joined(self._unsharded(m))),
            checkpoint.arrays,
            checkpoint.step,
        )
        self._optimizer_state = self._counted(self._moments(lambda m: self._own_shards(self._staged(m))))
        self._place(self._staged(params))
        self.steps_taken = checkpoint.step
        return checkpoint.step

    def _settings(self) -> dict[str, Any]:
        """Return the settings that a checkpoint records and that all processes must share."""
        return run_settings(self.config, self.train_config, self.corpus)

    def _accumulate_gradients(self, params: nnx.State, batch: Batch, step: Array) -> tuple[Array, nnx.State, Layers]:
        """Return the mean loss over microbatches, its gradients, and the offloaded layers that are on the device."""
        size = self.train_config.microbatch
        total = self.train_config.global_batch_size
        offload = self.offload
        assert isinstance(offload, OffloadedStep), "pipelines accumulate in their own step"
        resident = offload.begin(params)
        if size == total:
            (loss, gradients), resident = offload.value_and_grad(self._loss, params, resident, batch, step)
            return loss, self._widened(gradients), resident

        def add_microbatch(carry: tuple, microbatch: tuple) -> tuple[tuple, None]:
            sums, resident = carry
            first, part = microbatch
            share_of_loss = partial(self._loss, first=first, share=size / total)
            shares, resident = offload.value_and_grad(share_of_loss, params, resident, part, step)
            return (jax.tree.map(jnp.add, sums, shares), resident), None

        zero = jnp.zeros((), self.config.params_dtype), self._widened(jax.tree.map(jnp.zeros_like, params))
        parts = jax.tree.map(lambda x: x.reshape(total // size, size, -1), batch)
        (shares, resident), _ = jax.lax.scan(add_microbatch, (zero, resident), (jnp.arange(0, total, size), parts))
        return *shares, resident

    def _widened(self, gradients: Any) -> Any:
        """Return gradients in the type in which they are summed, also those of rounded parameters."""
        return jax.tree.map(lambda g: g.astype(jnp.promote_types(g.dtype, self.config.params_dtype)), gradients)

    def _loss_and_gradients(self, *args: Any, **kwargs: Any) -> tuple[Array, nnx.State]:
        """Return the loss of a microbatch and its gradients; arguments as those of _loss."""
        loss, gradients = jax.value_and_grad(self._loss)(*args, **kwargs)
        return loss, self._widened(gradients)

    def _loss(
        self,
        params: nnx.State,
        batch: Batch,
        step: int | Array = 0,
        training: bool = True,
        first: int | Array = 0,
        share: float | Array = 1.0,
    ) -> Array:
        """Return the mean loss of a microbatch times its share of the global batch.

        ``first`` is the number of its first sequence within the global batch. The loss is scaled before the backward,
        as in pipelines and in PyTorch, because FP8 rounds gradients.
        """
        model = nnx.merge(self._graph, params)
        tokens, targets, starts = jax.tree.map(jnp.asarray, batch)
        samples = first + jnp.arange(len(tokens))
        loss = model(tokens, targets, step=step, samples=samples, document_starts=starts, training=training)
        return loss * share

    def _update_step(
        self, params: nnx.State, optimizer_state: _OptimizerState, batch: Batch, step: Array, rate: Array
    ) -> tuple[nnx.State, _OptimizerState, Array, Array]:
        """Return new parameters, new optimizer state, the loss, and the norm of the gradients before clipping."""
        loss, gradients, resident = self._accumulate_gradients(params, batch, step)
        params, optimizer_state, norm = self._apply_gradients(params, optimizer_state, loss, gradients, rate, resident)
        return params, optimizer_state, loss, norm

    def _apply_gradients(
        self,
        params: Parameters,
        optimizer_state: _OptimizerState,
        loss: Array,
        gradients: Parameters,
        rate: Array,
        resident: Layers | None = None,
    ) -> tuple[Parameters, _OptimizerState, Array]:
        """Clip the gradients and update the parameters, unless loss or norm is not finite.

        Returns:
            New parameters, new optimizer state, and the norm of the gradients before clipping.
        """
        counted = self._counted_once(without_histories(gradients, self._histories(self._shapes)))
        norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(counted)))
        if self.train_config.clip_grad > 0.0:
            scale = jnp.minimum(1.0, self.train_config.clip_grad / (norm + CLIP_EPSILON))
            gradients = jax.tree.map(lambda g: g * scale, gradients)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        select = partial(jax.tree.map, partial(jnp.where, finite))  # a step that is not finite changes nothing

        def change(params: Any, state: _OptimizerState, gradients: Any) -> tuple[Any, _OptimizerState]:
            own = with_master_weights(self._own_shards(params), state.master_weights)
            histories = self._histories(params)
            updates, adam = self._optimizer.update(without_histories(gradients, histories), state.adam)
            decayed = jax.tree.map(
                lambda u, p, decays: u + self.train_config.weight_decay * p if decays else u,
                updates,
                own,
                self._decays(params),
            )
            new = jax.tree.map(lambda p, u: p - rate.astype(p.dtype) * u, own, decayed)
            new = with_advanced(new, own, gradients, histories, self.config.fp8_amax_history_len)
            new = select(new, own)
            masters = only_master_weights(new, state.master_weights)
            new = jax.tree.map(lambda new, p: new.astype(p.dtype), new, params)
            return unshard(new, params, self._shards), _OptimizerState(select(adam, state.adam), masters)

        return *self.offload.update(change, params, optimizer_state, gradients, resident or {}), norm

    def _counted_once(self, gradients: Parameters) -> Parameters:
        """Return gradients in which every entry counts once in a norm over all devices.

        If several devices have the same gradients, their shards are returned. Squares are then added in the same order
        with and without a distributed optimizer, so clipping does not differ by rounding.
        """
        step = self._pipeline
        if step is None:
            return gradients
        if step.shards_gradients:
            return step.counted_once(gradients, self._shapes)
        counted = step.counted_once(gradients)
        return step.shards.shard(counted) if step.shards.ranks > 1 else counted

    @property
    def _shards(self) -> OptimizerShards | None:
        """The division of the optimizer's state over devices; None: every device has all of it."""
        step = self._pipeline
        return step.shards if step is not None and step.shards_gradients else None

    def _own_shards(self, params: Parameters) -> Parameters:
        """Return the part of the given parameters that this device updates: all of them, or its shards."""
        return own_shards(params, self._shards)

    def _unsharded(self, own: Parameters) -> Parameters:
        """Invert _own_shards for arrays with the shapes of all parameters."""
        return unshard(own, self._shapes, self._shards)

    def _initial_state(self) -> _OptimizerState:
        """Return the state of the optimizer before the first step, on the devices of the parameters."""
        step = self._pipeline
        if step is None:
            return _OptimizerState(self._optimizer.init(self._params))
        self._optimizer_state = _OptimizerState(self._optimizer.init(jax.jit(self._own_shards)(self._params)))
        return self._counted(self._moments(lambda m: jax.device_put(m, self._own_shardings(m))))

    def _as_stored(self, exact: Parameters) -> Parameters:
        """Return staged parameters as a step reads them."""
        if not has_master_weights(self.config):
            return exact
        if self._pipeline is not None:
            return self._pipeline.stages.as_stored(exact)
        leaves, structure = jax.tree.flatten(exact)
        named = zip(names_of(exact), leaves, strict=True)
        return structure.unflatten(x.astype(stored_dtype(self.config, name, x.shape)) for name, x in named)

    def _place(self, exact: Parameters) -> None:
        """Overwrite the parameters, given staged, and their master weights."""
        stored = self._as_stored(exact)
        self._params = self.offload.place(stored)
        if not has_master_weights(self.config):
            return

        masters = new_master_weights(jax.jit(self._own_shards)(exact), exact, stored)
        if self._pipeline is not None:
            masters = jax.device_put(masters, self._own_shardings(masters))
        self._optimizer_state = self._optimizer_state._replace(master_weights=masters)

    def _own_shardings(self, own: Parameters) -> Parameters:
        """Return the sharding of every leaf of what the devices of a pipeline update."""
        step = self._pipeline
        assert step is not None, "arrays of one device have no sharding"
        return step.shards.shardings(own) if step.shards_gradients else step.shardings(own)

    def _exact(self) -> Parameters:
        """Return the staged parameters, those that are rounded from their master weights."""
        masters = self._optimizer_state.master_weights
        return exact_parameters(self._params, masters, self._shapes, self._shards)

    def _decays(self, params: Parameters) -> Parameters:
        """Return True for every parameter with weight decay, which its shape in the single-device model decides."""
        return jax.tree.map(lambda p: has_weight_decay(p.shape), self._model_shapes(params))

    def _histories(self, params: Parameters) -> Parameters:
        """Return True for every history of FP8, which its shape in the single-device model decides."""
        return history_flags(self._model_shapes(params))

    def _model_shapes(self, params: Parameters) -> Parameters:
        """Return arrays, or their shapes, with the shapes of parameters in the single-device model."""
        return params if self._pipeline is None else self._pipeline.shapes(params)

    def _staged(self, params: nnx.State) -> Parameters:
        """Convert parameters, gradients or moments of the single-device model to the layout in memory."""
        return params if self._pipeline is None else self._pipeline.stage_parameters(params)

    def _joined(self, params: Parameters) -> nnx.State:
        """Invert _staged."""
        return params if self._pipeline is None else self._pipeline.join_parameters(params)

    def _moments(self, change: Callable[[Any], Any]) -> _OptimizerState:
        """Return the state of the optimizer with ``change`` applied to both moments."""
        state = self._optimizer_state
        first, second = (change(optax.tree_utils.tree_get(state.adam, name)) for name in ("mu", "nu"))
        return state._replace(adam=optax.tree_utils.tree_set(state.adam, mu=first, nu=second))

    def _counted(self, state: _OptimizerState) -> _OptimizerState:
        """Place the step count of an optimizer state on the devices of the parameters."""
        if self._pipeline is None:
            return state
        count = np.asarray(optax.tree_utils.tree_get(state.adam, "count"))
        everywhere = NamedSharding(self._pipeline.mesh, PartitionSpec())
        return state._replace(adam=optax.tree_utils.tree_set(state.adam, count=jax.device_put(count, everywhere)))

    def _parts(self, batch: Batch, step: int = 0) -> tuple[Any, ...]:
        """Return the arguments of PipelineStep: arrays by microbatch, with all replicas concatenated."""
        count = microbatches(self.train_config, self._replicas)[1]
        samples = np.arange(self.train_config.global_batch_size, dtype=np.int32)
        tokens, targets, starts = jax.tree.map(lambda x: x.reshape(count, -1, x.shape[-1]), batch)
        return tokens, targets, step, samples.reshape(count, -1), starts


def train(config: TransformerConfig, train_config: TrainConfig, corpus: Corpus) -> Iterator[StepResult]:
    """Train a new model, step by step.

    Args:
        config: configuration of the model.
        train_config: configuration of the optimisation.
        corpus: training and validation data.

    Yields:
        The result of each step.

    Raises:
        NonFiniteLossError: see Trainer.train_step.
    """
    trainer = Trainer(config, train_config, corpus)
    for step in range(train_config.train_iters):
        yield trainer.train_step(step)
