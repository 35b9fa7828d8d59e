"""Differences of two correct programs by layer, cause, gradient and training step, for notebook 07."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import torch

import jax_impl.hyper_connections
import jax_impl.mlp
import jax_impl.self_attention
import reference_torch.train
from diptych.plans.config import DataConfig, TrainConfig, TransformerConfig
from diptych.plans.model.data import load_corpus
from diptych.plans.training import has_weight_decay, learning_rate
from jax_impl.train import Trainer as JaxTrainer
from parity.compare import relative_difference
from parity.divergence import (
    OperationError,
    Trajectory,
    compare_operation,
    computing_in,
    drift,
    flat,
    initial_parameters,
    layer_values,
    one_ulp,
    operation_errors,
    operation_pair,
    run_torch,
    state_of,
    trajectory,
)
from parity.rounding import EPSILON
from reference_torch.train import Trainer as TorchTrainer

DTYPES = ("float64", "float32", "bfloat16")
MODEL = TransformerConfig(
    hidden_size=32,
    num_layers=2,
    num_attention_heads=4,
    seq_length=32,
    enable_hyper_connections=True,
    sinkhorn_iterations=5,
)
TRAIN = TrainConfig(train_iters=60, global_batch_size=4, lr=3e-3, lr_warmup_iters=10)
CORPUS = load_corpus(DataConfig())
NUDGED = "decoder.layers.0.mlp.linear_fc1.weight"
"""The weight of which one element is changed by one ulp."""

Curves = dict[str, list[float]]
"""Values of a figure, by label."""
Trainers = Mapping[str, Any]
"""Trainers of one backend, by dtype."""


def new_trainers() -> tuple[Trainers, Trainers]:
    """Return trainers of PyTorch and of JAX, by dtype."""
    ours = {dtype: TorchTrainer(computing_in(MODEL, dtype), TRAIN, CORPUS, device="cpu") for dtype in DTYPES}
    return ours, {dtype: JaxTrainer(computing_in(MODEL, dtype), TRAIN, CORPUS) for dtype in DTYPES}


def ulps(a: np.ndarray, b: np.ndarray, dtype: str) -> float:
    """Return the relative difference in ulps of a dtype."""
    return relative_difference(a, b) / EPSILON[dtype]


def layer_errors(num_layers: int) -> dict[str, Curves]:
    """Return the errors after the embedding, after every layer and of the logits, in ulps, by dtype and label.

    The reference is PyTorch in float64.
    """
    deep = replace(MODEL, num_layers=num_layers)
    tokens = CORPUS.batch(0, 4, MODEL.seq_length).tokens
    parameters = initial_parameters(deep)
    values = {
        (backend, dtype): layer_values(backend, computing_in(deep, dtype), parameters, tokens)
        for dtype in DTYPES
        for backend in ("torch", "jax")
    }
    exact = values["torch", "float64"]
    errors = {}
    for dtype in DTYPES:
        ours = values["torch", dtype]
        theirs = values["jax", dtype]
        pairs = {"PyTorch from float64": (ours, exact), "JAX from float64": (theirs, exact)}
        pairs["between backends"] = (ours, theirs)
        errors[dtype] = {
            label: [ulps(a, b, dtype) for a, b in zip(*both, strict=True)] for label, both in pairs.items()
        }
    return errors


def sorted_operation_errors(trainer: TorchTrainer, step: int) -> list[OperationError]:
    """Return the errors of the operations of a step of training, the largest between the backends last."""
    trajectory(trainer, initial_parameters(MODEL), CORPUS, step)
    errors = operation_errors(trainer, CORPUS.batch(step, TRAIN.global_batch_size, MODEL.seq_length))
    return sorted(errors, key=lambda error: error.between)


def _in_float64(x: Any, weight: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return (x.double() @ weight.double().T).to(x.dtype)
    return (x.astype(jnp.float64) @ weight.astype(jnp.float64).T).astype(x.dtype)


def product_errors(lengths: Sequence[int], generator: np.random.Generator) -> Curves:
    """Return the errors of matrix products in float32 for numbers of terms of a sum, in ulps, by label."""
    product = operation_pair("ops.linear")
    curves: Curves = {}
    for terms in lengths:
        x, weight = (generator.standard_normal(shape, "float32") for shape in ((4, 32, terms), (96, terms)))
        order = generator.permutation(terms)
        error, (found,) = compare_operation("product", product, x, weight)
        (reordered,) = run_torch(product[0], x[..., order], weight[:, order])
        exact, _ = compare_operation("in float64", (_in_float64, _in_float64), x, weight)
        row = {
            "PyTorch from float64": error.torch,
            "JAX from float64": error.jax,
            "between backends": error.between,
            "reference: PyTorch, terms reordered": ulps(found, reordered, "float32"),
            "oracle: both summed in float64": exact.between,
        }
        for label, value in row.items():
            curves.setdefault(label, []).append(value)
    return curves


def _silu_rounded_once(x: jax.Array, impl: str = "auto") -> jax.Array:
    gate, value = jnp.split(x, 2, axis=-1)
    return jax.nn.silu(gate.astype(jnp.float32)).astype(x.dtype) * value


def _sum_rounded_once(
    residual: jax.Array, h_res: None, x: jax.Array, bias: Any, h_post: jax.Array, *dropout: Any
) -> jax.Array:
    product = h_post.astype(x.dtype)[..., None].astype(jnp.float32) * x[..., None, :].astype(jnp.float32)
    return (residual.astype(jnp.float32) + product).astype(x.dtype)  # h_res is None: mixed already


def _scores_rounded_once(q: jax.Array, k: jax.Array, v: jax.Array, attention_mask: Any = None) -> jax.Array:
    scores = jnp.einsum("bthd,bshd->bhts", q.astype(jnp.float32), k.astype(jnp.float32)) * q.shape[-1] ** -0.5
    scores = jnp.where(jnp.tri(q.shape[1], dtype=bool), scores.astype(q.dtype), jnp.finfo(q.dtype).min)
    weights = jax.nn.softmax(scores.astype(jnp.float32), axis=-1).astype(v.dtype)
    return jnp.einsum("bhts,bshd->bthd", weights, v)


CHANGES: dict[str, Any] = {
    "as it is": None,
    "+ XLA rounds between operations": {"xla_allow_excess_precision": False},
    "+ SiLU rounded once": (jax_impl.mlp, "swiglu", _silu_rounded_once),
    "+ mHC write rounded once": (jax_impl.hyper_connections, "write_streams", _sum_rounded_once),
    "+ scores rounded once": (jax_impl.self_attention, "causal_attention", _scores_rounded_once),
}
"""Changes of JAX, each added to those before it: options of XLA, or a function that is replaced."""


def rounding_errors(parameters: Mapping[str, np.ndarray]) -> tuple[Curves, list[float]]:
    """Return the differences of the backends in bfloat16 after each of CHANGES.

    Args:
        parameters: parameters of MODEL.

    Returns:
        Differences in ulps after every layer and of the logits, by label, and the share of logits that are unequal.
    """
    config = computing_in(MODEL, "bfloat16")
    tokens = CORPUS.batch(0, 4, MODEL.seq_length).tokens
    ours = layer_values("torch", config, parameters, tokens)
    curves: Curves = {"after layer 1": [], "after layer 2": [], "logits": []}
    shares = []
    options = None
    with ExitStack() as changes:
        for change in CHANGES.values():
            if isinstance(change, tuple):
                changes.enter_context(mock.patch.object(*change))
            options = change if isinstance(change, dict) else options
            theirs = layer_values("jax", config, parameters, tokens, options)
            for curve, a, b in zip(curves.values(), ours[1:], theirs[1:], strict=True):
                curve.append(ulps(a, b, "bfloat16"))
            shares.append(float(np.mean(ours[-1] != theirs[-1])))
    return curves, shares


def unequal_attention(width: int, generator: np.random.Generator) -> float:
    """Return the share of unequal elements of attention in bfloat16, for a width of a head."""
    q, k, v = (generator.standard_normal((2, 16, 2, width)).astype(jnp.bfloat16) for _ in range(3))
    return compare_operation("attention", operation_pair("ops.causal_attention"), q, k, v)[0].unequal


def update(gradient: np.ndarray, epsilon: float = TRAIN.adam_eps) -> np.ndarray:
    """Return the first update of AdamW, in learning rates and without decay."""
    return gradient / (np.abs(gradient) + epsilon)


def first_gradients(torch_trainers: Trainers, jax_trainers: Trainers) -> tuple[dict[str, np.ndarray], float]:
    """Return the clipped gradients of the first step, from the first moments after it.

    Returns:
        All gradients concatenated, by "<backend>, <dtype>", and the relative difference of the formula from what
        PyTorch's AdamW did in float64.
    """
    start = initial_parameters(MODEL)

    def gradient(trainer: Any) -> np.ndarray:
        trajectory(trainer, start, CORPUS, 1)
        return flat(state_of(trainer)["first_moment."]) / (1 - TRAIN.adam_beta1)

    trainers = {f"PyTorch, {dtype}": trainer for dtype, trainer in torch_trainers.items()}
    trainers |= {f"JAX, {dtype}": trainer for dtype, trainer in jax_trainers.items()}
    with ThreadPoolExecutor(2) as threads:  # XLA compiles the training steps of JAX side by side
        gradients = dict(zip(trainers, threads.map(gradient, trainers.values()), strict=True))
    moved = flat(start) - flat(torch_trainers["float64"].parameters())
    decay = TRAIN.weight_decay * flat({name: value * has_weight_decay(value.shape) for name, value in start.items()})
    expected = learning_rate(TRAIN, 0) * (update(gradients["PyTorch, float64"]) + decay)
    return gradients, relative_difference(moved, expected)


def update_errors(gradient: np.ndarray, exact: np.ndarray, edges: np.ndarray) -> list[float]:
    """Return the root mean square error of updates by size of the exact gradient; edges are those of the sizes."""
    size = np.digitize(np.abs(exact), edges)
    error = (update(gradient) - update(exact)) ** 2
    return [float(np.sqrt(error[size == i].mean())) for i in range(1, len(edges))]


def largest_shares(ours: np.ndarray, theirs: np.ndarray, count: int) -> dict[str, float]:
    """Return the parameters with the largest shares of the squared difference of two updates, by name."""
    start = initial_parameters(MODEL)
    owner = np.concatenate([np.full(start[name].size, name) for name in sorted(start)])
    apart = (update(ours) - update(theirs)) ** 2
    shares = {name: float(apart[owner == name].sum() / apart.sum()) for name in start}
    return {name: shares[name] for name in sorted(shares, key=lambda name: -shares[name])[:count]}


def train(trainers: Trainers, steps: int, seed: int = 0, nudge: bool = False) -> dict[str, Trajectory]:
    """Train from the initial parameters in each dtype.

    Args:
        trainers: trainers of one backend.
        steps: number of steps.
        seed: seed of the initial parameters and of the order of the data.
        nudge: change one element of NUDGED by one ulp first.
    """
    start = initial_parameters(MODEL, seed)
    corpus = replace(CORPUS, seed=seed)
    found = {}
    for dtype, trainer in trainers.items():
        parameters = one_ulp(start, trainer.config, NUDGED) if nudge else start
        found[dtype] = trajectory(trainer, parameters, corpus, steps)
    return found


def train_pairs(
    torch_trainers: Trainers, jax_trainers: Trainers, steps: int, seed: int = 0
) -> dict[str, tuple[Trajectory, Trajectory]]:
    """Train PyTorch, JAX, and JAX with one element changed by one ulp; PyTorch runs beside JAX.

    Returns:
        The two runs of each pair, by "between backends, <dtype>" and "JAX, one ulp, <dtype>".
    """
    with ThreadPoolExecutor(1) as other_thread:
        waiting = other_thread.submit(train, torch_trainers, steps, seed)
        plain, nudged = (train(jax_trainers, steps, seed, nudge) for nudge in (False, True))
        ours = waiting.result()
    pairs = {f"between backends, {dtype}": (ours[dtype], plain[dtype]) for dtype in DTYPES}
    return pairs | {f"JAX, one ulp, {dtype}": (plain[dtype], nudged[dtype]) for dtype in DTYPES}


def train_with_other_order(trainer: JaxTrainer, steps: int) -> tuple[Trajectory, Trajectory]:
    """Train JAX from the initial parameters with two orders of the data."""
    start = initial_parameters(MODEL)
    first, second = (trajectory(trainer, start, replace(CORPUS, seed=seed), steps) for seed in (CORPUS.seed, 1))
    return first, second


def train_with_decay_of_all(steps: int) -> dict[str, Trajectory]:
    """Train PyTorch with decay of gains, biases and alphas too: the failing variant."""
    with mock.patch.object(reference_torch.train, "has_weight_decay", return_value=True):
        return train(new_trainers()[0], steps)


def loss_difference(ours: Trajectory, theirs: Trajectory) -> np.ndarray:
    """Return the largest difference of losses so far after every step, nats per token."""
    return np.maximum.accumulate(np.abs(ours.losses - theirs.losses))


def at_steps(values: Mapping[str, np.ndarray], steps: Sequence[int]) -> Curves:
    """Return the values after some steps, by label."""
    return {label: [float(array[step - 1]) for step in steps] for label, array in values.items()}


def seed_drifts(torch_trainers: Trainers, jax_trainers: Trainers, seeds: Sequence[int], steps: int) -> Curves:
    """Return the drift of all parameters after some steps for each seed, by label of train_pairs."""
    curves: Curves = {}
    for seed in seeds:
        for label, pair in train_pairs(torch_trainers, jax_trainers, steps, seed).items():
            curves.setdefault(label, []).append(float(drift(*pair)[-1]))
    return curves
