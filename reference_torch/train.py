"""Training: AdamW steps over deterministic batches.

What is decided (batches, initial values, learning rate, decay, clipping) stands in plans/ and is
the same for both backends; here it is carried out in PyTorch.
"""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plans.checkpoint import Checkpoint, check_settings, read_checkpoint, run_settings, write_checkpoint
from plans.config import TrainConfig, TransformerConfig
from plans.data import Batch, Corpus
from plans.training import (
    StepResult,
    check_finite,
    check_finite_validation,
    check_trainable,
    has_weight_decay,
    learning_rate,
)
from reference_torch.saving import export_arrays, export_parameters, import_arrays, import_parameters
from reference_torch.transformer import GPTModel


class Trainer:
    """A model, its optimizer and its data.

    Args:
        config: the model's.
        train_config: the optimisation's.
        corpus: what to learn.
        device: where to compute; None: the GPU where PyTorch sees one, else the CPU.

    Raises:
        ValueError: the corpus is too short for the model, or has bytes it has no token for; a GPU is asked for where
            PyTorch sees none.
        NotImplementedError: the model is cut into pipeline stages.
    """

    def __init__(
        self,
        config: TransformerConfig,
        train_config: TrainConfig,
        corpus: Corpus,
        device: torch.device | str | None = None,
    ) -> None:
        check_trainable(config)
        corpus.check(config.seq_length, config.vocab_size)
        self.config, self.train_config, self.corpus = config, train_config, corpus
        self.steps_taken = 0
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(
                f"device: expected one this PyTorch ({torch.__version__}) can use, got {str(device)!r}, and it sees no "
                "GPU; make install TORCH=cuda on a machine that has one, or leave device out"
            )
        self.model = GPTModel(config).to(self.device)
        parameters = list(self.model.parameters())
        self._optimizer = torch.optim.AdamW(
            [
                {
                    "params": [p for p in parameters if has_weight_decay(p.shape)],
                    "weight_decay": train_config.weight_decay,
                },
                {"params": [p for p in parameters if not has_weight_decay(p.shape)], "weight_decay": 0.0},
            ],
            lr=train_config.lr,
            betas=(train_config.adam_beta1, train_config.adam_beta2),
            eps=train_config.adam_eps,
            fused=True,
        )

    def train_step(self, step: int) -> StepResult:
        """Learn from the batch of one step.

        Raises:
            NonFiniteLossError: the loss or the gradients are not finite; names the step. Nothing is updated.
        """
        start = time.perf_counter()
        train = self.train_config
        self._optimizer.zero_grad(set_to_none=True)  # also of a step that was refused
        loss = self._accumulate_gradients(step)
        norm = self._clip_gradients()
        rate = learning_rate(train, step)
        tokens = train.global_batch_size * self.config.seq_length
        result = StepResult(step, loss.item(), norm.item(), rate, tokens, 0.0)
        check_finite(result)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self.steps_taken = step + 1
        return result._replace(seconds=time.perf_counter() - start)

    def loss_and_gradients(self, batch: Batch, step: int = 0) -> tuple[float, dict[str, np.ndarray]]:
        """Loss of a batch and its gradient for every parameter, by canonical name; nothing is updated."""
        loss = self._loss(batch, step)
        names, parameters = zip(*self.model.named_parameters(), strict=True)
        gradients = torch.autograd.grad(loss, parameters)
        return loss.item(), {name: g.cpu().numpy() for name, g in zip(names, gradients, strict=True)}

    def validation_loss(self) -> float:
        """Mean loss over ``eval_iters`` batches of the validation split, without dropout.

        Raises:
            NonFiniteLossError: it is not finite.
        """
        train, losses = self.train_config, []
        with torch.no_grad():
            for index in range(train.eval_iters):
                batch = self.corpus.validation_batch(index, train.global_batch_size, self.config.seq_length)
                losses.append(self._loss(batch, training=False).item())
        loss = float(np.mean(losses))
        check_finite_validation(loss, self.steps_taken)
        return loss

    def parameters(self) -> dict[str, np.ndarray]:
        """A copy of every parameter, by canonical name."""
        return export_parameters(self.model)

    def set_parameters(self, values: Mapping[str, np.ndarray]) -> None:
        """Overwrite every parameter; the optimizer's state stays.

        Raises:
            ValueError: names or shapes are not exactly the model's.
        """
        import_parameters(self.model, values)

    def save(self, folder: Path, keep: int = 2) -> Path:
        """Write a checkpoint of the run as it is between two steps; all but the newest ``keep`` are removed.

        Returns:
            Its path.

        Raises:
            CheckpointError: see plans.checkpoint.write_checkpoint.
        """
        arrays = export_arrays(self.model, self._optimizer)
        return write_checkpoint(folder, Checkpoint(self.steps_taken, arrays, self._settings()), keep)

    def resume(self, path: Path) -> int:
        """Go on from a checkpoint of either backend.

        Args:
            path: a checkpoint file, or a folder whose newest is taken.

        Returns:
            The next step.

        Raises:
            CheckpointError: it is damaged, or of a run with other settings, which are named.
        """
        checkpoint = read_checkpoint(path)
        check_settings(checkpoint, self._settings())
        import_arrays(self.model, self._optimizer, checkpoint.arrays, checkpoint.step)
        self.steps_taken = checkpoint.step
        return checkpoint.step

    def _settings(self) -> dict[str, Any]:
        return run_settings(self.config, self.train_config, self.corpus)

    def _accumulate_gradients(self, step: int) -> Tensor:
        """Add up the gradients of the step's mean loss over its microbatches; returns that loss."""
        size, total = self.train_config.microbatch, self.train_config.global_batch_size
        loss = torch.zeros((), device=self.device, dtype=getattr(torch, self.config.params_dtype))
        for first in range(0, total, size):
            batch = self.corpus.batch(step, size, self.config.seq_length, first)
            share = self._loss(batch, step, first=first) * (size / total)
            share.backward()
            loss += share.detach()
        return loss

    def _loss(self, batch: Batch, step: int = 0, training: bool = True, first: int = 0) -> Tensor:
        tokens = torch.from_numpy(batch.tokens).to(self.device)
        targets = torch.from_numpy(batch.targets).to(self.device)
        samples = torch.arange(first, first + len(tokens), device=self.device)
        return self.model(tokens, targets, step=step, samples=samples, training=training)

    def _clip_gradients(self) -> Tensor:
        """Scale the gradients in place by plans.training's formula; returns their norm before."""
        parameters = list(self.model.parameters())
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if self.train_config.clip_grad > 0.0:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.train_config.clip_grad, norm)
        return norm


def next_logits(model: GPTModel, tokens: np.ndarray) -> np.ndarray:
    """Logits of the token after a text, without dropout.

    Args:
        tokens: at least one; the last seq_length of them are read. [T] integer

    Returns:
        [V]
    """
    window = torch.from_numpy(tokens[-model.config.seq_length :].astype(np.int64))
    with torch.no_grad():
        return model(window[None].to(next(model.parameters()).device), training=False)[0, -1].cpu().numpy()


def train(config: TransformerConfig, train_config: TrainConfig, corpus: Corpus) -> Iterator[StepResult]:
    """Train a new model, step by step.

    Yields:
        The result of each step as it ends.

    Raises:
        NonFiniteLossError: see Trainer.train_step.
    """
    trainer = Trainer(config, train_config, corpus)
    for step in range(train_config.train_iters):
        yield trainer.train_step(step)
