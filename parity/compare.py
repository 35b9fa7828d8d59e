"""Train the same model in both backends, in lockstep, and measure how far apart they are."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

import jax_impl.train
import reference_torch.train
from parity.tolerances import GRADIENT, LOSS
from plans.config import TrainConfig, TransformerConfig
from plans.data import Corpus
from plans.training import StepResult


class StepPair(NamedTuple):
    """One optimizer step in both backends."""

    torch: StepResult
    jax: StepResult

    @property
    def difference(self) -> float:
        """Loss in PyTorch minus loss in JAX, nats per token."""
        return self.torch.loss - self.jax.loss


class GradientDifference(NamedTuple):
    """How far apart the backends' gradients of one parameter are, at equal parameters."""

    parameter: str
    step: int
    """Step whose batch was used; its parameters are those before the step."""
    relative: float
    """Norm-wise relative difference."""
    norm: float
    """2-norm of the gradient in PyTorch."""


@dataclass
class Comparison:
    """Everything measured, and the verdict."""

    loss_tolerance: float
    gradient_tolerance: float
    steps: list[StepPair] = field(default_factory=list)
    gradients: list[GradientDifference] = field(default_factory=list)
    validation: dict[str, float] = field(default_factory=dict)
    """Validation loss by backend, nats per token."""

    @property
    def worst_step(self) -> StepPair:
        """The step whose losses differ most."""
        return max(self.steps, key=lambda pair: abs(pair.difference))

    @property
    def failures(self) -> list[str]:
        """What exceeds a tolerance, one line each, worst first; empty when all holds."""
        lines = []
        if abs(self.worst_step.difference) > self.loss_tolerance:
            pair = self.worst_step
            lines.append(
                f"loss at step {pair.torch.step}: expected a difference of at most {self.loss_tolerance:.1e}, "
                f"got {abs(pair.difference):.1e} (torch {pair.torch.loss:.8f}, jax {pair.jax.loss:.8f})"
            )
        for gradient in self.gradients:
            if gradient.relative > self.gradient_tolerance:
                lines.append(
                    f"gradient of {gradient.parameter} at step {gradient.step}: expected a relative difference "
                    f"of at most {self.gradient_tolerance:.1e}, got {gradient.relative:.1e}"
                )
        return lines


def relative_difference(a: np.ndarray, b: np.ndarray) -> float:
    """||a - b|| / max(||a||, ||b||), in float64; 0 for two zeros, infinite where either is not finite.

    Raises:
        ValueError: the shapes differ.
    """
    if a.shape != b.shape:
        raise ValueError(f"b: expected the shape of a, {a.shape}, got {b.shape}")
    a, b = a.astype(np.float64), b.astype(np.float64)
    scale = max(np.linalg.norm(a), np.linalg.norm(b))
    if not np.isfinite(scale):
        return float("inf")
    return float(np.linalg.norm(a - b) / scale) if scale > 0.0 else 0.0


def compare(
    config: TransformerConfig,
    train_config: TrainConfig,
    corpus: Corpus,
    *,
    loss_tolerance: float | None = None,
    gradient_tolerance: float | None = None,
    on_step: Callable[[StepPair], None] = lambda pair: None,
) -> Comparison:
    """Train both backends from one start and compare every step's loss, and gradients before and after.

    Args:
        config, train_config, corpus: the run, the same for both.
        loss_tolerance, gradient_tolerance: None: parity.tolerances' for the model's type.
        on_step: called after each step.

    Raises:
        NonFiniteLossError: a loss is not finite in either backend; names the step.
    """
    ours = reference_torch.train.Trainer(config, train_config, corpus)
    theirs = jax_impl.train.Trainer(config, train_config, corpus)
    result = Comparison(
        LOSS[config.params_dtype] if loss_tolerance is None else loss_tolerance,
        GRADIENT[config.params_dtype] if gradient_tolerance is None else gradient_tolerance,
    )
    gradients = compare_gradients(ours, theirs, step=0)
    for step in range(train_config.train_iters):
        pair = StepPair(ours.train_step(step), theirs.train_step(step))
        result.steps.append(pair)
        on_step(pair)
    result.validation = {"torch": ours.validation_loss(), "jax": theirs.validation_loss()}
    theirs.set_parameters(ours.parameters())
    gradients += compare_gradients(ours, theirs, step=train_config.train_iters)
    result.gradients = sorted(gradients, key=lambda g: g.relative, reverse=True)
    return result


def compare_gradients(
    ours: reference_torch.train.Trainer, theirs: jax_impl.train.Trainer, step: int
) -> list[GradientDifference]:
    """Differences of all gradients on one step's batch; both trainers must hold equal parameters."""
    batch = ours.corpus.batch(step, ours.train_config.global_batch_size, ours.config.seq_length)
    _, torch_gradients = ours.loss_and_gradients(batch, step)
    _, jax_gradients = theirs.loss_and_gradients(batch, step)
    if torch_gradients.keys() != jax_gradients.keys():
        raise AssertionError(f"parameters differ: {sorted(torch_gradients.keys() ^ jax_gradients.keys())}")
    return [
        GradientDifference(name, step, relative_difference(a, jax_gradients[name]), float(np.linalg.norm(a)))
        for name, a in torch_gradients.items()
    ]


def tokens_per_second(results: Iterable[StepResult]) -> float:
    """Median over the steps given."""
    return float(np.median([result.tokens / result.seconds for result in results]))
