"""Optimization decisions shared by both backends: learning rate, weight decay, clipping and validation."""

import math
from typing import NamedTuple

from diptych.plans.amax_history import is_history
from diptych.plans.config import TrainConfig, TransformerConfig
from diptych.plans.context.sequences import check_shared
from diptych.plans.model.data import Batch
from diptych.plans.schedule.named import schedule_for

CLIP_EPSILON = 1e-6
"""Clipping multiplies gradients by min(1, clip_grad / (norm + CLIP_EPSILON)), as torch.nn.utils does."""


class StepResult(NamedTuple):
    """Metrics of one optimizer step."""

    step: int
    """Number of the step, from 0."""
    loss: float
    """Mean loss of the batch before the update, nats per token."""
    grad_norm: float
    """Global 2-norm of the gradients before clipping."""
    learning_rate: float
    """Learning rate of the step."""
    tokens: int
    """Number of training tokens."""
    seconds: float
    """Wall time in seconds, including batch and update."""


class NonFiniteLossError(FloatingPointError):
    """An error for a loss or gradient norm that is NaN or infinite."""


def check_finite_validation(loss: float, steps_taken: int) -> None:
    """Reject a validation loss that is not finite.

    Raises:
        NonFiniteLossError: the loss is not finite; the message names the step.
    """
    if not math.isfinite(loss):
        raise NonFiniteLossError(
            f"validation after step {steps_taken - 1}: expected a finite loss, got {loss}; lower lr or raise "
            "lr_warmup_iters"
        )


def check_finite(result: StepResult) -> None:
    """Reject a step whose loss or gradient norm is not finite.

    Raises:
        NonFiniteLossError: a value is not finite; the message names the step.
    """
    if not (math.isfinite(result.loss) and math.isfinite(result.grad_norm)):
        raise NonFiniteLossError(
            f"step {result.step}: expected a finite loss and gradient norm, got loss {result.loss} and norm "
            f"{result.grad_norm} at learning rate {result.learning_rate:.3g}; lower lr, raise "
            "lr_warmup_iters or train in float64 to find the cause"
        )


def microbatches(train: TrainConfig, dp_size: int = 1) -> tuple[int, int]:
    """Return the sequences per microbatch, and the microbatches per step and replica.

    Raises:
        ValueError: the global batch does not divide into replicas and microbatches.
    """
    if train.global_batch_size % dp_size:
        raise ValueError(
            f"global_batch_size: expected a multiple of the {dp_size} replicas, got {train.global_batch_size}"
        )
    share = train.global_batch_size // dp_size
    size = train.micro_batch_size or share
    if share % size:
        raise ValueError(
            f"micro_batch_size: expected a divisor of the {share} sequences each of {dp_size} replicas learns from, "
            f"got {train.micro_batch_size}"
        )
    return size, share // size


def check_batch(batch: Batch, train: TrainConfig) -> None:
    """Reject a batch that does not have global_batch_size sequences.

    Raises:
        ValueError: the number of sequences differs.
    """
    if len(batch.tokens) != train.global_batch_size:
        raise ValueError(
            f"batch: expected global_batch_size={train.global_batch_size} sequences, got {len(batch.tokens)}; ask the "
            "corpus for a batch of that size"
        )


def check_trainable(config: TransformerConfig, train: TrainConfig, dp_size: int = 1) -> None:
    """Reject a batch that the pipeline schedule or context parallelism does not support.

    Raises:
        ValueError: see microbatches, check_microbatch and diptych.plans.schedule.named.build_schedule.
    """
    size, count = microbatches(train, dp_size)
    check_microbatch(config, size)
    schedule_for(config, count)


def check_microbatch(config: TransformerConfig, size: int) -> None:
    """Reject a microbatch whose tokens the context and tensor-parallel ranks do not divide.

    Args:
        config: configuration of the model.
        size: sequences of a microbatch.

    Raises:
        ValueError: see diptych.plans.context.sequences.check_shared; or, with sequence_parallel, a context rank's
            tokens are no multiple of the tensor-parallel ranks.
    """
    cp_size = config.context_parallel_size
    check_shared(size, config.seq_length, cp_size)
    tp_size = config.tensor_model_parallel_size
    if config.sequence_parallel and cp_size > 1 and size * config.seq_length // cp_size % tp_size:
        raise ValueError(
            f"micro_batch_size: expected with sequence_parallel a multiple of tensor_model_parallel_size={tp_size} "
            f"tokens on each of {cp_size} context ranks, got {size} sequences of {config.seq_length}"
        )


def learning_rate(train: TrainConfig, step: int) -> float:
    """Return the learning rate of a step: linear warm-up, then a cosine from lr to min_lr.

    Args:
        train: settings of the optimization.
        step: step number, from 0. The rate is positive at step 0, lr at step lr_warmup_iters - 1, and min_lr at the
            last step.
    """
    if step < train.lr_warmup_iters:
        return train.lr * (step + 1) / train.lr_warmup_iters
    span = train.train_iters - 1 - train.lr_warmup_iters
    progress = min(1.0, (step - train.lr_warmup_iters) / span) if span > 0 else 1.0
    return train.min_lr + 0.5 * (train.lr - train.min_lr) * (1.0 + math.cos(math.pi * progress))


def has_weight_decay(shape: tuple[int, ...]) -> bool:
    """Return True for the shape of a matrix; gains, biases, scalars and histories of FP8 have no weight decay."""
    return len(shape) >= 2 and not is_history(shape)
