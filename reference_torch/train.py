"""Training: AdamW steps over deterministic batches.

diptych/plans decides batches, initial values, learning rate, decay, clipping and schedule for both backends. This file
executes these decisions in PyTorch: on one process, or with one process for each pipeline rank, context-parallel rank
and replica. The command for several processes takes the arguments of ``diptych train``:

    torchrun --nproc-per-node 4 -m parity.cli train --pipeline-model-parallel-size 4 ...
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from diptych.plans.amax_history import is_history
from diptych.plans.checkpoint import (
    FIRST_MOMENT,
    MODEL,
    SECOND_MOMENT,
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
from diptych.plans.model.parameters import check_values, initial_value, parameter_specs
from diptych.plans.offload import rank_uses
from diptych.plans.optimizer_shards import has_master_weights, stored_dtype
from diptych.plans.tensor_parallel import join_all, rank_config, rank_part
from diptych.plans.training import (
    StepResult,
    check_batch,
    check_finite,
    check_finite_validation,
    check_trainable,
    has_weight_decay,
    learning_rate,
    microbatches,
)
from reference_torch.distributed_optimizer import DistributedAdamW, norms_of_shards
from reference_torch.fp8 import SharingRanks
from reference_torch.groups import (
    ProcessGroups,
    axis_size,
    gather,
    gather_parts,
    gather_texts,
    make_groups,
    on_first_rank,
    sum_over,
)
from reference_torch.history_adamw import HistoryAdamW
from reference_torch.modules import set_gradient_factor, set_sharing_ranks
from reference_torch.p2p import P2PCommunicator
from reference_torch.pipeline import get_forward_backward_func, get_model
from reference_torch.saving import export_arrays, export_parameters, import_arrays, import_parameters
from reference_torch.stage import Microbatch, PipelineStage, forward_step, model_provider, offload_layers
from reference_torch.tensor_parallel import TensorParallel, counted_once

_PREFIXES = ("", MODEL, FIRST_MOMENT, SECOND_MOMENT)
"""Prefixes of canonical names, in a model and in a checkpoint."""


class Trainer:
    """A model, its optimizer and its data; with a mesh, the part of this process.

    Args:
        config: configuration of the model.
        train_config: configuration of the optimisation.
        corpus: training and validation data.
        device: device that computes; None: the GPU if PyTorch sees one, else the CPU.
        mesh: all processes, see reference_torch.groups.make_mesh; None: this process alone.

    Raises:
        ValueError: the corpus is too short for the model, or has bytes without a token; the batch does not fit schedule
            and replicas; processes have different corpora or settings; device is a GPU and PyTorch sees none.
    """

    def __init__(
        self,
        config: TransformerConfig,
        train_config: TrainConfig,
        corpus: Corpus,
        device: torch.device | str | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        corpus.check(config.seq_length, config.vocab_size)
        self.config = config
        self.train_config = train_config
        self.corpus = corpus
        self.steps_taken = 0
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(
                f"device: expected one this PyTorch ({torch.__version__}) can use, got {str(device)!r}, and it sees no "
                "GPU; make install TORCH=cuda on a machine that has one, or leave device out"
            )
        check_mesh(config, mesh)
        self._groups = make_groups(config, mesh)
        check_settings_on_all_ranks(self._settings(), self._gather_texts)
        check_trainable(config, train_config, self._groups.dp_size)
        self._messages = None if self._groups.pp is None else P2PCommunicator(self._groups.pp, config, self.device)
        tp = self._groups.tp
        self._tensor_parallel = TensorParallel(tp, config.sequence_parallel, config.pipeline_timeout)
        self._specs = parameter_specs(unsharded(config))
        part = rank_config(config)
        built = get_model(lambda **ends: model_provider(part, **ends).to(self.device), config, self._groups.pp_rank)
        self.stages: list[PipelineStage] = built if isinstance(built, list) else [built]
        if tp is not None:
            self._import_initial_values()
        for stage in self.stages:
            set_gradient_factor(stage, self._gradient_factor)
            sharing = tuple(group for group in (tp, self._groups.cp) if group is not None)
            set_sharing_ranks(stage, SharingRanks(sharing, config.pipeline_timeout))
        self.model = self.stages[0]
        self._optimizer = self._make_optimizer([parameter for stage in self.stages for parameter in stage.parameters()])
        self.offload = offload_layers(self.stages, config)

    def _make_optimizer(self, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Return AdamW, or DistributedAdamW if several ranks divide its state or parameters have master weights."""
        train = self.train_config
        histories = [p for p in parameters if is_history(p.shape)]
        others = [p for p in parameters if not is_history(p.shape)]
        groups: list[dict[str, Any]] = [
            {"params": [p for p in others if has_weight_decay(p.shape)], "weight_decay": train.weight_decay},
            {"params": [p for p in others if not has_weight_decay(p.shape)], "weight_decay": 0.0},
        ]
        if histories:
            groups.append({"params": histories, "history_len": self.config.fp8_amax_history_len})
        settings: dict[str, Any] = {
            "lr": train.lr,
            "betas": (train.adam_beta1, train.adam_beta2),
            "eps": train.adam_eps,
        }
        if self._is_distributed or has_master_weights(self.config):
            sharing = self._groups.with_same_stages
            optimizer = DistributedAdamW(groups, sharing, self.config.pipeline_timeout, **settings)
            narrow = getattr(torch, self.config.compute_dtype)
            rounded = [p for p, dtype in self._stored_dtypes() if dtype != self.config.params_dtype]
            optimizer.keep_master_weights(narrow, rounded)
            return optimizer
        return HistoryAdamW(groups, **settings, fused=True)

    def _stored_dtypes(self) -> list[tuple[torch.nn.Parameter, str]]:
        """Return the parameters of this rank, also those of both copies of a tied embedding, and their types."""
        named = [each for stage in self.stages for each in stage.named_parameters()]
        return [(parameter, stored_dtype(self.config, name, parameter.shape)) for name, parameter in named]

    @property
    def _gradient_factor(self) -> int:
        """Factor by which the gradients of backward exceed the gradients of the step's mean loss."""
        if self.config.calculate_per_token_loss:
            return self.train_config.global_batch_size * self.config.seq_length
        return self._groups.dp_size * self._groups.cp_size

    @property
    def _is_distributed(self) -> bool:
        """True if ranks divide the state of the optimizer."""
        return self.config.use_distributed_optimizer and self._groups.with_same_stages is not None

    @property
    def offload_statistics(self) -> dict[str, Any] | None:
        """Statistics of offload on this process; None without offload."""
        return self.offload.stats if self.offload.enabled else None

    @property
    def is_main_process(self) -> bool:
        """True on the process that writes files and prints output."""
        return self._groups == ProcessGroups() or dist.get_rank() == 0

    def any_process(self, flag: bool) -> bool:
        """Return True if the flag is set on any process; every process has to call this.

        Args:
            flag: flag of this process.
        """
        count = torch.tensor(float(flag), device=self.device)
        what = "a flag of every process"
        count = sum_over(count, self._groups.tp, what, self.config.pipeline_timeout)
        return self._sum_over_all(count, what).item() > 0.0

    def train_step(self, step: int) -> StepResult:
        """Take one optimizer step on the batch of a step.

        Args:
            step: number of the step, from 0.

        Raises:
            NonFiniteLossError: the loss or the gradients are not finite; nothing is updated.
            PipelineError: another process did not take part in time.
        """
        start = time.perf_counter()
        train = self.train_config
        self._optimizer.zero_grad(set_to_none=True)  # a previous step may have raised an error before its update
        loss = self._accumulate_gradients(step)
        norm = self._clip_gradients()
        rate = learning_rate(train, step)
        tokens = train.global_batch_size * self.config.seq_length
        result = StepResult(step, loss.item(), norm.item(), rate, tokens, 0.0)
        check_finite(result)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self.offload.step(self._optimizer, is_per_parameter=True)
        self.steps_taken = step + 1
        return result._replace(seconds=time.perf_counter() - start)

    def loss_and_gradients(self, batch: Batch, step: int = 0) -> tuple[float, dict[str, np.ndarray]]:
        """Return the loss of a batch and its gradient for every parameter, by canonical name, and update nothing.

        A batch of global_batch_size sequences runs in the microbatches of train_step, any other batch as a whole. FP8
        histories have no entry in the result. Every process has to call this.

        Args:
            batch: any number of sequences on one process; global_batch_size sequences on several.
            step: training step, for dropout.

        Raises:
            ValueError: several processes share the batch, and its size is not global_batch_size.
        """
        self._optimizer.zero_grad(set_to_none=True)
        if self._groups == ProcessGroups() and len(batch.tokens) != self.train_config.global_batch_size:
            self._expect_uses(1)
            set_gradient_factor(self.model, 1)
            try:
                loss = forward_step(iter([Microbatch(batch, step, 0, True)]), self.model)[0]
                loss.backward()
            finally:
                set_gradient_factor(self.model, self._gradient_factor)
        else:
            check_batch(batch, self.train_config)
            loss = self._run(self._microbatches(lambda size, first: batch.part(first, size), step))
        gradients = {}
        for name, parameter in self._named_parameters().items():
            if is_history(parameter.shape):
                continue
            assert parameter.grad is not None, f"no gradient has reached {name}"
            gradient = parameter.grad
            if self._is_distributed:  # each rank has the sums of its shard, and 0 elsewhere
                group = self._groups.with_same_stages
                gradient = sum_over(gradient, group, "the gradients of a batch", self.config.pipeline_timeout)
            gradients[name] = gradient.cpu().numpy().copy()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.item(), self._gather(gradients)

    def validation_loss(self) -> float:
        """Return the mean loss over ``eval_iters`` batches of the validation split, in nats per token, without dropout.

        Raises:
            NonFiniteLossError: the loss is not finite.
        """
        train = self.train_config
        losses = []
        with torch.no_grad():
            for index in range(train.eval_iters):
                batch = self.corpus.validation_batch(index, train.global_batch_size, self.config.seq_length)
                parts = self._microbatches(lambda size, first, batch=batch: batch.part(first, size), training=False)
                losses.append(self._run(parts, forward_only=True).item())
        loss = float(np.mean(losses))
        check_finite_validation(loss, self.steps_taken)
        return loss

    def parameters(self) -> dict[str, np.ndarray]:
        """Return a copy of every parameter, by canonical name; every process has to call this."""
        return self._gather(export_parameters(self.stages, self._optimizer))

    def set_parameters(self, values: Mapping[str, np.ndarray]) -> None:
        """Overwrite every parameter, and keep the state of the optimizer.

        Args:
            values: new values, by canonical name.

        Raises:
            ValueError: names or shapes differ from those of the model.
        """
        check_values(values, self._specs)
        import_parameters(self.stages, self._own(values), self._optimizer)

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
        arrays = self._gather(export_arrays(self.stages, self._optimizer))
        checkpoint = Checkpoint(self.steps_taken, arrays, self._settings())
        return on_first_rank(lambda: write_checkpoint(folder, checkpoint, keep), self._groups)

    def load_weights(self, path: Path) -> None:
        """Overwrite the initial parameters with the weights of a checkpoint, in the dtype of this run.

        Args:
            path: a checkpoint file, or a folder whose newest checkpoint is read.

        Raises:
            CheckpointError: the checkpoint is damaged or has another model; or processes found different checkpoints.
        """
        checkpoint = read_on_all_ranks(path, partial(check_model, model=self.config), self._gather_texts)
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
        checkpoint = read_on_all_ranks(path, partial(check_settings, settings=self._settings()), self._gather_texts)
        import_arrays(self.stages, self._optimizer, self._own(checkpoint.arrays), checkpoint.step)
        self.steps_taken = checkpoint.step
        return checkpoint.step

    def _gather_texts(self, text: str) -> list[str]:
        """Return the texts of all processes, in the order of their ranks."""
        return gather_texts(text, self._groups)

    def _settings(self) -> dict[str, Any]:
        """Return the settings that a checkpoint records and that all processes must share."""
        return run_settings(self.config, self.train_config, self.corpus)

    def _accumulate_gradients(self, step: int) -> Tensor:
        """Add up the gradients of the mean loss over the microbatches of a step; return that loss."""
        length = self.config.seq_length
        return self._run(self._microbatches(lambda size, first: self.corpus.batch(step, size, length, first), step))

    def _microbatches(
        self, take: Callable[[int, int], Batch], step: int = 0, training: bool = True
    ) -> Callable[[], Iterator[Microbatch]]:
        """Return a function that iterates over this replica's microbatches; ``take(size, first)`` returns one."""
        size, count = microbatches(self.train_config, self._groups.dp_size)
        begin = self._groups.dp_rank * size * count

        def iterate() -> Iterator[Microbatch]:
            for first in range(begin, begin + size * count, size):
                yield Microbatch(take(size, first), step, first, training, self._groups.cp, self._tensor_parallel)

        return iterate

    def _run(self, parts: Callable[[], Iterator[Microbatch]], forward_only: bool = False) -> Tensor:
        """Run the schedule, and return the mean loss on every process."""
        size, count = microbatches(self.train_config, self._groups.dp_size)
        several = len(self.stages) > 1
        self._expect_uses(count, forward_only)
        reports = get_forward_backward_func(self.config)(
            forward_step_func=forward_step,
            data_iterator=[parts() for _ in self.stages] if several else parts(),
            model=self.stages if several else self.model,
            num_microbatches=count,
            seq_length=self.config.seq_length,
            micro_batch_size=size,
            config=self.config,
            forward_only=forward_only,
            p2p_communicator=self._messages,
            pg_collection=self._groups,
        )
        loss = torch.zeros((), device=self.device, dtype=getattr(torch, self.config.params_dtype))
        for report in reports:
            loss += report * (1 / count)
        return self._sum_over_all(loss, "the loss") / (self._groups.dp_size * self._groups.cp_size)

    def _expect_uses(self, num_microbatches: int, forward_only: bool = False) -> None:
        """Give offload the order in which layers are used until the next optimizer step."""
        self.offload.expect(rank_uses(self.config, num_microbatches, self._groups.pp_rank, forward_only))

    def _sum_over_all(self, value: Tensor, what: str) -> Tensor:
        """Return the sum of a value over all processes but those that share layers; ``what`` names it in errors."""
        for group in (self._groups.pp, self._groups.with_same_stages):
            value = sum_over(value, group, what, self.config.pipeline_timeout)
        return value

    def _own(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return this rank's parts of arrays; names are canonical, with or without a checkpoint prefix."""
        ranks = self._tensor_parallel
        own = {prefix + name: self._specs[name].split for name in self._named_parameters() for prefix in _PREFIXES}
        return {
            name: rank_part(array, own[name], ranks.size, ranks.rank) for name, array in arrays.items() if name in own
        }

    def _gather(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the unsharded arrays of all parameters, of which every rank has some; names as in _own."""
        splits = {prefix + name: spec.split for name, spec in self._specs.items() for prefix in _PREFIXES}
        return gather(join_all(gather_parts(arrays, self._groups.tp), splits), self._groups.pp)

    def _import_initial_values(self) -> None:
        """Overwrite the parameters with this rank's parts of the initial values of the whole model."""
        with torch.no_grad():
            for stage in self.stages:  # two of which may have a copy of a tied embedding
                for name, parameter in stage.named_parameters():
                    unsharded_array = initial_value(self.config.seed, name, self._specs[name])
                    parameter.copy_(torch.from_numpy(self._own({name: unsharded_array})[name]))

    def _named_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters of this rank, by canonical name."""
        return {name: parameter for stage in self.stages for name, parameter in stage.named_parameters()}

    def _clip_gradients(self) -> Tensor:
        """Clip the gradients in place by the formula of diptych.plans.training; return their norm before clipping."""
        named = self._named_parameters()
        # A tied embedding has a copy on the last stage. The norm counts the gradient once, on the first rank.
        copies = set() if self._groups.embedding is None or self._groups.pp_rank == 0 else {"embedding.weight"}
        gradients = {name: p.grad for name, p in named.items() if name not in copies and p.grad is not None}
        gradients = {name: gradient for name, gradient in gradients.items() if not is_history(gradient.shape)}
        splits = {name: self._specs[name].split for name in gradients}
        counted = counted_once(gradients, splits, self._tensor_parallel)
        norm = self._norm_of_shards(counted)
        for group in (self._groups.tp, self._groups.pp):
            if group is not None:
                norm = sum_over(norm**2, group, "the norm of the gradients", self.config.pipeline_timeout) ** 0.5
        if self.train_config.clip_grad > 0.0:
            all_parameters = [parameter for stage in self.stages for parameter in stage.parameters()]
            torch.nn.utils.clip_grads_with_norm_(all_parameters, self.train_config.clip_grad, norm)
        return norm

    def _norm_of_shards(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the norm of this rank's gradients, which ranks with the same stages have too, or shards of them."""
        group = self._groups.with_same_stages
        count = 1 if group is None else group.size()
        own = dist.get_rank(group) if self._is_distributed else None
        norms = norms_of_shards(gradients, count, own)
        norms = norms.to(self.device, getattr(torch, self.config.params_dtype))
        if self._is_distributed:
            alone = norms.new_zeros(count)
            alone[own] = norms[0]
            norms = sum_over(alone, group, "the norm of the gradients", self.config.pipeline_timeout)
        return norms[0] if count == 1 else torch.linalg.vector_norm(norms)


def check_mesh(config: TransformerConfig, mesh: DeviceMesh | None) -> None:
    """Raise an error if the mesh does not fit the model.

    Args:
        config: configuration of the model.
        mesh: all processes; None: this process alone.

    Raises:
        ValueError: mesh and configuration have different numbers of pipeline, context- or tensor-parallel ranks.
    """
    for axis, name in (
        ("pp", "pipeline_model_parallel_size"),
        ("cp", "context_parallel_size"),
        ("tp", "tensor_model_parallel_size"),
    ):
        size = axis_size(mesh, axis)
        expected_size = getattr(config, name)
        if size != expected_size:
            raise ValueError(
                f"mesh: expected {expected_size} processes on axis {axis}, as many as {name}, got {size}; make it by "
                "reference_torch.groups.make_mesh in processes started by torchrun"
            )


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
