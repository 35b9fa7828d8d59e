"""Losses of optax and their counterparts in torch.nn.functional."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn.functional as F

from benchmarks.pair_cases import DIFFERENT, EQUAL, SHAPES, pair
from parity import Report, compare_functions
from parity.testing import normal

LOGITS = normal((6, 5))
LABELS = np.array([0, 1, 4, 2, 2, 3])
OTHERS = normal((6, 5), seed=1)
NO_BFLOAT16 = ("float64", "float32")
"""PyTorch has no CTC loss in bfloat16 on CPU."""
PROBABILITIES = np.exp(OTHERS) / np.exp(OTHERS).sum(-1, keepdims=True)


@pair(
    "cross_entropy",
    "optax.softmax_cross_entropy_with_integer_labels",
    "mean in torch, one value each in optax",
    ("defaults", SHAPES),
    ("F.cross_entropy(reduction='none')", EQUAL, {"reduction": "none"}),
)
def cross_entropy(dtypes: Any, **settings: Any) -> Report:
    """Compare the cross entropy."""
    return compare_functions(
        lambda x, y: F.cross_entropy(x, y, **settings),
        optax.softmax_cross_entropy_with_integer_labels,
        [LOGITS, LABELS],
        dtypes=dtypes,
    )


@pair(
    "cross_entropy(label_smoothing=0.1)",
    "optax.smooth_labels",
    "",
    ("softmax_cross_entropy(logits, smooth_labels(one_hot, 0.1)).mean()", EQUAL),
)
def label_smoothing(dtypes: Any) -> Report:
    """Compare label smoothing."""

    def jax_side(x: jax.Array, y: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy(x, optax.smooth_labels(jax.nn.one_hot(y, 5, dtype=x.dtype), 0.1)).mean()

    return compare_functions(
        lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1), jax_side, [LOGITS, LABELS], dtypes=dtypes
    )


@pair(
    "cross_entropy(weight=w)",
    "optax, weighted mean",
    "torch divides by the sum of weights",
    ("mean of weighted losses", DIFFERENT),
    ("sum divided by the sum of weights", EQUAL, {"is_divided": True}),
)
def class_weights(dtypes: Any, is_divided: bool = False) -> Report:
    """Compare weights of classes."""

    def jax_side(x: jax.Array, y: jax.Array, w: jax.Array) -> jax.Array:
        losses = optax.softmax_cross_entropy_with_integer_labels(x, y) * w[y]
        return losses.sum() / w[y].sum() if is_divided else losses.mean()

    inputs = {"x": LOGITS, "y": LABELS, "w": np.linspace(0.5, 2.0, 5)}
    torch_side = lambda x, y, w: F.cross_entropy(x, y, weight=w.detach())  # noqa: E731
    theirs = lambda x, y, w: jax_side(x, y, jax.lax.stop_gradient(w))  # noqa: E731
    return compare_functions(torch_side, theirs, inputs, dtypes=dtypes)


@pair(
    "binary_cross_entropy_with_logits",
    "optax.sigmoid_binary_cross_entropy",
    "mean in torch",
    ("defaults", SHAPES),
    ("optax's mean", EQUAL, {"reduce": jnp.mean}),
)
def binary_cross_entropy(dtypes: Any, reduce: Callable = lambda x: x) -> Report:
    """Compare the cross entropy of independent classes."""
    return compare_functions(
        F.binary_cross_entropy_with_logits,
        lambda x, y: reduce(optax.sigmoid_binary_cross_entropy(x, y)),
        [3.0 * LOGITS, PROBABILITIES],
        dtypes=dtypes,
    )


@pair(
    "mse_loss",
    "optax.l2_loss",
    "optax has a factor 1/2",
    ("optax's mean", DIFFERENT, {"loss": optax.l2_loss}),
    ("optax.squared_error(x, y).mean()", EQUAL, {"loss": optax.squared_error}),
)
def squared_error(dtypes: Any, loss: Callable) -> Report:
    """Compare squared errors."""
    return compare_functions(F.mse_loss, lambda x, y: loss(x, y).mean(), [LOGITS, OTHERS], dtypes=dtypes)


@pair("huber_loss(delta=0.5)", "optax.huber_loss", "", ("optax's mean", EQUAL))
def huber(dtypes: Any) -> Report:
    """Compare the Huber loss."""
    return compare_functions(
        lambda x, y: F.huber_loss(x, y, delta=0.5),
        lambda x, y: optax.huber_loss(x, y, delta=0.5).mean(),
        [LOGITS, OTHERS],
        dtypes=dtypes,
    )


@pair(
    "smooth_l1_loss(beta=0.5)",
    "optax.huber_loss(delta=0.5)",
    "torch divides by beta",
    ("optax's mean", DIFFERENT),
    ("optax's mean / 0.5", EQUAL, {"beta": 0.5}),
)
def smooth_l1(dtypes: Any, beta: float = 1.0) -> Report:
    """Compare the smooth L1 loss with the Huber loss."""
    return compare_functions(
        lambda x, y: F.smooth_l1_loss(x, y, beta=0.5),
        lambda x, y: optax.huber_loss(x, y, delta=0.5).mean() / beta,
        [LOGITS, OTHERS],
        dtypes=dtypes,
    )


@pair(
    "kl_div",
    "optax.losses.kl_divergence",
    "torch's mean is over elements",
    ("optax's mean", DIFFERENT),
    ("F.kl_div(reduction='batchmean')", EQUAL, {"reduction": "batchmean"}),
)
def kl_divergence(dtypes: Any, **settings: Any) -> Report:
    """Compare the Kullback-Leibler divergence."""
    with torch.no_grad():
        logs = F.log_softmax(torch.tensor(LOGITS), -1).numpy()

    def torch_side(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if not settings:  # PyTorch warns that the default is not the mathematical definition.
            return F.kl_div(x, y, reduction="none").mean()
        return F.kl_div(x, y, **settings)

    return compare_functions(
        torch_side, lambda x, y: optax.losses.kl_divergence(x, y).mean(), [logs, PROBABILITIES], dtypes=dtypes
    )


@pair(
    "cosine_similarity",
    "optax.losses.cosine_similarity",
    "a zero vector: 0 in torch, nan in optax",
    ("defaults", EQUAL, {"is_zero": False}),
    ("one vector is 0", DIFFERENT, {"is_zero": True}),
    ("one vector is 0, optax's epsilon=1e-8", DIFFERENT, {"is_zero": True, "epsilon": 1e-8}, ("float64",)),
    ("one vector is 0, optax's epsilon=1e-16", EQUAL, {"is_zero": True, "epsilon": 1e-16}, ("float64",)),
)
def cosine_similarity(dtypes: Any, is_zero: bool, **settings: Any) -> Report:
    """Compare the cosine similarity."""
    x = LOGITS.copy()
    if is_zero:
        x[0] = 0.0
    return compare_functions(
        lambda x, y: F.cosine_similarity(x, y, -1),
        lambda x, y: optax.losses.cosine_similarity(x, y, **settings),
        [x, OTHERS],
        dtypes=dtypes,
    )


@pair(
    "triplet_margin_loss",
    "optax.losses.triplet_margin_loss",
    "eps added to the difference, to the sum of squares",
    ("optax's mean", DIFFERENT),
    ("eps=0 in both", EQUAL, {"eps": 0.0}),
)
def triplet_margin(dtypes: Any, eps: float = 1e-6) -> Report:
    """Compare the triplet margin loss."""
    return compare_functions(
        lambda a, p, n: F.triplet_margin_loss(a, p, n, margin=5.0, eps=eps),
        lambda a, p, n: optax.losses.triplet_margin_loss(a, p, n, margin=5.0, eps=eps).mean(),
        [LOGITS, OTHERS, normal((6, 5), seed=2)],
        dtypes=dtypes,
    )


@pair(
    "ctc_loss",
    "optax.ctc_loss",
    "torch's mean divides by target lengths; impossible targets: inf, 1e5",
    ("optax's mean", DIFFERENT, {}, NO_BFLOAT16),
    ("F.ctc_loss(reduction='none')", EQUAL, {"reduction": "none"}, NO_BFLOAT16),
    ("the same, one target longer than its input", DIFFERENT, {"reduction": "none", "length": 2}, NO_BFLOAT16),
    (
        "the same, zero_infinity=True and jnp.where(loss < 1e4, loss, 0)",
        EQUAL,
        {"reduction": "none", "length": 2, "zero_infinity": True},
        NO_BFLOAT16,
    ),
)
def ctc(dtypes: Any, reduction: str = "mean", length: int = 9, zero_infinity: bool = False) -> Report:
    """Compare connectionist temporal classification; labels repeat, and lengths differ."""
    inputs = {
        "logits": normal((3, 9, 5)),
        "labels": np.array([[1, 1, 2, 4], [3, 2, 1, 0], [4, 3, 0, 0]]),
        "lengths": np.array([length, 8, 7]),
        "label_lengths": np.array([4, 3, 2]),
    }

    def torch_side(
        logits: torch.Tensor, labels: torch.Tensor, lengths: torch.Tensor, label_lengths: torch.Tensor
    ) -> Any:
        logs = F.log_softmax(logits, -1).transpose(0, 1)
        return F.ctc_loss(logs, labels, lengths, label_lengths, reduction=reduction, zero_infinity=zero_infinity)

    def jax_side(logits: jax.Array, labels: jax.Array, lengths: jax.Array, label_lengths: jax.Array) -> jax.Array:
        paddings = (jnp.arange(9) >= lengths[:, None]).astype(logits.dtype)
        label_paddings = (jnp.arange(4) >= label_lengths[:, None]).astype(logits.dtype)
        losses = optax.ctc_loss(logits, paddings, labels, label_paddings)
        losses = jnp.where(losses < 1e4, losses, 0.0) if zero_infinity else losses
        return losses if reduction == "none" else losses.mean()

    return compare_functions(torch_side, jax_side, inputs, dtypes=dtypes)
