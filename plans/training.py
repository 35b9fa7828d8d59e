"""Decisions of the optimisation both backends carry out: learning rate, decay, clipping, refusal."""

import math
from typing import NamedTuple

from plans.config import TrainConfig, TransformerConfig
from plans.partition import num_stages

CLIP_EPSILON = 1e-6
"""Clipping multiplies gradients by min(1, clip_grad / (norm + CLIP_EPSILON)), as torch.nn.utils does."""


class StepResult(NamedTuple):
    """What one optimizer step reports."""

    step: int
    loss: float
    """Mean over the batch before the update, nats per token."""
    grad_norm: float
    """Global 2-norm of the gradients before clipping."""
    learning_rate: float
    tokens: int
    """Tokens learnt from."""
    seconds: float
    """Wall time, batch and update included."""


class NonFiniteLossError(FloatingPointError):
    """Training met a loss or gradient norm that is not a number, or infinite."""


def check_finite_validation(loss: float, steps_taken: int) -> None:
    """Refuse a validation loss that is not finite.

    Raises:
        NonFiniteLossError: naming the step.
    """
    if not math.isfinite(loss):
        raise NonFiniteLossError(
            f"validation after step {steps_taken - 1}: expected a finite loss, got {loss}; lower lr or raise "
            "lr_warmup_iters"
        )


def check_finite(result: StepResult) -> None:
    """Refuse to go on from a broken step.

    Raises:
        NonFiniteLossError: naming the step.
    """
    if not (math.isfinite(result.loss) and math.isfinite(result.grad_norm)):
        raise NonFiniteLossError(
            f"step {result.step}: expected a finite loss and gradient norm, got loss {result.loss} and norm "
            f"{result.grad_norm} at learning rate {result.learning_rate:.3g}; lower lr, raise "
            "lr_warmup_iters or train in float64 to find the cause"
        )


def check_trainable(config: TransformerConfig) -> None:
    """Refuse what a single process cannot train.

    Raises:
        NotImplementedError: the model is cut into pipeline stages.
    """
    if num_stages(config) > 1:
        raise NotImplementedError(
            f"pipeline_model_parallel_size: expected 1, got {config.pipeline_model_parallel_size}; stages can be "
            "built one by one (GPTModel), but training through a pipeline does not exist yet"
        )


def learning_rate(train: TrainConfig, step: int) -> float:
    """Learning rate of a step: linear warm-up, then a cosine from lr to min_lr.

    Args:
        train: the schedule's settings.
        step: from 0. Step 0 already learns: the warm-up reaches lr at step lr_warmup_iters - 1, and
            min_lr is reached at the last step.
    """
    if step < train.lr_warmup_iters:
        return train.lr * (step + 1) / train.lr_warmup_iters
    span = train.train_iters - 1 - train.lr_warmup_iters
    progress = min(1.0, (step - train.lr_warmup_iters) / span) if span > 0 else 1.0
    return train.min_lr + 0.5 * (train.lr - train.min_lr) * (1.0 + math.cos(math.pi * progress))


def has_weight_decay(shape: tuple[int, ...]) -> bool:
    """Matrices decay; gains, biases and scalars do not."""
    return len(shape) >= 2
