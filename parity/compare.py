"""Comparison of the same model trained in both backends, step by step."""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

import jax_impl.train
import jax_impl.transformer
import reference_torch.transformer
from diptych.plans.checkpoint import initial_weights
from diptych.plans.config import TrainConfig, TransformerConfig
from diptych.plans.config.precision import in_dtype
from diptych.plans.mesh import unsharded
from diptych.plans.model.data import Batch, Corpus
from diptych.plans.training import StepResult
from jax_impl.groups import make_mesh
from parity.location import Location, locate
from parity.measured_memory import MeasuredMemory, measure_torch
from parity.ranks import torch_trainer
from parity.tolerances import GRADIENT, GRADIENT_FLOOR, LOSS


class StepPair(NamedTuple):
    """One optimizer step in both backends."""

    torch: StepResult
    jax: StepResult

    @property
    def difference(self) -> float:
        """Loss in PyTorch minus loss in JAX, nats per token."""
        return self.torch.loss - self.jax.loss


class GradientDifference(NamedTuple):
    """The difference of the backends' gradients of one parameter, at equal parameters."""

    parameter: str
    step: int
    """Step whose batch was used; its parameters are those before the step."""
    exact: float
    """Norm-wise relative difference, computed in float64."""
    relative: float
    """Norm-wise relative difference, computed in the run's dtype."""
    norm: float
    """2-norm of the gradient, the larger of both backends'."""
    whole_norm: float
    """2-norm of all parameters' gradients together, the larger of both backends'."""

    def judged(self, dtype: str) -> float:
        """Return ``relative``, measured against the dtype's floor of the whole gradient's norm if that is larger."""
        floor = GRADIENT_FLOOR[dtype] * self.whole_norm
        return self.relative * min(1.0, self.norm / floor) if floor > 0.0 else self.relative


@dataclass
class Comparison:
    """All measurements of a comparison, with its tolerances."""

    dtype: str
    """Dtype in which the model computes."""
    loss_tolerance: float
    gradient_tolerance: float
    steps: list[StepPair] = field(default_factory=list)
    gradients: list[GradientDifference] = field(default_factory=list)
    memory: MeasuredMemory | None = None
    """Memory of one forward and backward pass in PyTorch."""
    validation: dict[str, float] = field(default_factory=dict)
    """Validation loss by backend, nats per token."""
    replicas: int = 1
    """Number of replicas of each backend."""
    offload: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Statistics of offload during training, by backend; empty without offload. See
    diptych.plans.offload.describe_statistics."""
    first_difference: str | None = None
    """If a tolerance is exceeded: the first submodule in which the models differ without dropout; see parity.locate."""

    @property
    def worst_step(self) -> StepPair:
        """The step with the largest difference of losses."""
        return max(self.steps, key=lambda pair: abs(pair.difference))

    @property
    def failures(self) -> list[str]:
        """The differences above a tolerance, one line each; empty if all agree.

        Gradients must agree in float64, each relative to its own norm. In the run's dtype they must agree relative to
        the larger of their own norm and ``GRADIENT_FLOOR`` of the whole gradient's norm.
        """
        lines = []
        if not abs(self.worst_step.difference) <= self.loss_tolerance:
            pair = self.worst_step
            lines.append(
                f"loss at step {pair.torch.step}: expected a difference of at most {self.loss_tolerance:.1e}, "
                f"got {abs(pair.difference):.1e} (torch {pair.torch.loss:.8f}, jax {pair.jax.loss:.8f})"
            )
        for gradient in self.gradients:
            for dtype, difference, tolerance in (
                ("float64", gradient.exact, GRADIENT["float64"]),
                (self.dtype, gradient.judged(self.dtype), self.gradient_tolerance),
            ):
                if not difference <= tolerance:
                    lines.append(
                        f"gradient of {gradient.parameter} at step {gradient.step} in {dtype}: expected a "
                        f"relative difference of at most {tolerance:.1e}, got {difference:.1e}"
                    )
        return lines


def relative_difference(a: np.ndarray, b: np.ndarray) -> float:
    """Return ||a - b|| / max(||a||, ||b||) in float64; 0 for two zeros, infinity if either is not finite.

    Raises:
        ValueError: the shapes differ.
    """
    if a.shape != b.shape:
        raise ValueError(f"b: expected the shape of a, {a.shape}, got {b.shape}")
    a = a.astype(np.float64)
    b = b.astype(np.float64)
    scale = np.maximum(np.linalg.norm(a), np.linalg.norm(b))
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
    parameters: Mapping[str, np.ndarray] | None = None,
    replicas: int = 1,
    on_step: Callable[[StepPair], None] = lambda pair: None,
) -> Comparison:
    """Train both backends from equal parameters and compare the loss of every step, and gradients before and after.

    Both backends run a step at the same time and share the cores, so step times do not measure either backend.

    Args:
        config: the model.
        train_config: training settings.
        corpus: training data.
        loss_tolerance: largest accepted difference of losses; None: that of parity.tolerances for the model's dtype.
        gradient_tolerance: largest accepted relative difference of gradients; None: that of parity.tolerances for the
            model's dtype.
        parameters: parameters to begin with, by canonical name; None: initial ones.
        replicas: number of replicas. Each backend has ``replicas * config.model_parallel_size`` ranks: processes in
            PyTorch, devices in JAX.
        on_step: called after each step.

    Raises:
        NonFiniteLossError: a loss is not finite in either backend; the message names the step.
        ValueError: there are fewer JAX devices than ranks.
    """
    theirs = jax_trainer(config, train_config, corpus, replicas)
    result = Comparison(
        config.product_dtype,
        LOSS[config.product_dtype] if loss_tolerance is None else loss_tolerance,
        GRADIENT[config.product_dtype] if gradient_tolerance is None else gradient_tolerance,
    )
    result.replicas = replicas
    run = config, train_config, corpus, replicas
    with torch_trainer(*run) as ours, ThreadPoolExecutor(max_workers=1) as other_thread:
        if parameters is not None:
            ours.set_parameters(parameters)
            theirs.set_parameters(parameters)
        gradients = compare_gradients(ours.parameters(), 0, *run)
        for step in range(train_config.train_iters):
            their_step = other_thread.submit(theirs.train_step, step)
            pair = StepPair(ours.train_step(step), their_step.result())
            result.steps.append(pair)
            on_step(pair)
        moved = {"torch": ours.offload_statistics, "jax": theirs.offload_statistics}
        result.offload = {backend: stats for backend, stats in moved.items() if stats is not None}
        result.validation = {"torch": ours.validation_loss(), "jax": theirs.validation_loss()}
        parameters = ours.parameters()
    gradients += compare_gradients(parameters, train_config.train_iters, *run)
    result.memory = measure_torch(unsharded(config), corpus.batch(0, train_config.microbatch, config.seq_length))
    result.gradients = sorted(gradients, key=lambda g: g.relative, reverse=True)
    if result.failures:
        result.first_difference = locate_difference(config, corpus.batch(0, 1, config.seq_length)).summary
    return result


def locate_difference(config: TransformerConfig, batch: Batch) -> Location:
    """Return the first submodule in which the backends' single-device models differ in float64, without dropout."""
    exact = in_dtype(unsharded(config), "float64")
    with jax.enable_x64(True):
        ours = reference_torch.transformer.GPTModel(exact)
        theirs = jax_impl.transformer.GPTModel(exact)
        names = {name: name for name, _ in ours.named_parameters()}
        return locate(ours, theirs, [batch.tokens], names=names)


def compare_gradients(
    parameters: Mapping[str, np.ndarray],
    step: int,
    config: TransformerConfig,
    train_config: TrainConfig,
    corpus: Corpus,
    replicas: int = 1,
) -> list[GradientDifference]:
    """Return the gradient differences on one step's batch at equal parameters, in float64 and the run's dtype."""
    batch = corpus.batch(step, train_config.global_batch_size, config.seq_length)
    relative, *gradients = _differences(parameters, batch, step, config, train_config, corpus, replicas)
    exact_config = in_dtype(config, "float64")
    with jax.enable_x64(True):
        exact, *_ = _differences(parameters, batch, step, exact_config, train_config, corpus, replicas)
    norms, whole_norm = gradient_norms(*gradients)
    return [GradientDifference(name, step, exact[name], relative[name], norms[name], whole_norm) for name in norms]


def gradient_norms(ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> tuple[dict[str, float], float]:
    """Return the 2-norms of each gradient and of all gradients together; each is the larger of both backends'."""

    def norm(gradient: np.ndarray) -> float:
        return float(np.linalg.norm(gradient.astype(np.float64)))

    norms = {name: max(norm(ours[name]), norm(theirs[name])) for name in ours}
    return norms, float(np.linalg.norm(list(norms.values())))


def _differences(
    parameters: Mapping[str, np.ndarray],
    batch: Batch,
    step: int,
    config: TransformerConfig,
    train_config: TrainConfig,
    corpus: Corpus,
    replicas: int,
) -> tuple[dict[str, float], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the relative difference of each parameter's gradient in the run's dtype, and both gradients."""
    gradients = []
    for make in (torch_trainer, lambda *run: nullcontext(jax_trainer(*run))):
        with make(config, train_config, corpus, replicas) as trainer:
            trainer.set_parameters(initial_weights(parameters, config))
            gradients.append(trainer.loss_and_gradients(batch, step)[1])
    ours, theirs = gradients
    if ours.keys() != theirs.keys():
        raise AssertionError(f"parameters differ: {sorted(ours.keys() ^ theirs.keys())}")
    return {name: relative_difference(ours[name], theirs[name]) for name in ours}, ours, theirs


def jax_trainer(
    config: TransformerConfig, train_config: TrainConfig, corpus: Corpus, replicas: int = 1
) -> jax_impl.train.Trainer:
    """Return JAX's trainer on the first devices, one for each rank.

    Args:
        config: configuration of the model.
        train_config: configuration of the optimisation.
        corpus: training and validation data.
        replicas: number of replicas.

    Raises:
        ValueError: there are fewer devices than ranks.
    """
    if replicas == 1:
        return jax_impl.train.Trainer(config, train_config, corpus)
    ranks = replicas * config.model_parallel_size
    devices = jax.devices()
    if len(devices) < ranks:
        raise ValueError(
            f"replicas: expected at most {len(devices)} ranks, one for each device of JAX, got {ranks} ({replicas} "
            f"replicas of {config.model_parallel_size}); on a CPU, set jax_num_cpu_devices before JAX is used"
        )
    return jax_impl.train.Trainer(config, train_config, corpus, make_mesh(config, devices[:ranks]))


def tokens_per_second(results: Iterable[StepResult]) -> float:
    """Return the median of tokens per second over steps."""
    return float(np.median([result.tokens / result.seconds for result in results]))
