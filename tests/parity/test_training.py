"""Training in both frameworks: the first step and quantity that differ, of seeded bugs and of none."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import torch.nn.functional as F
from flax import nnx
from torch import nn

from parity import DifferenceError, compare_training
from tests.parity.pairs import JaxModel, TorchModel

RNG = np.random.default_rng(0)
BATCHES = [([RNG.integers(0, 11, (2, 7))], RNG.integers(0, 11, (2, 7))) for _ in range(3)]
LINEAR = [([RNG.standard_normal((8, 4))], RNG.standard_normal((8, 3))) for _ in range(3)]
RATE = 0.02


def torch_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def jax_loss(logits, targets):
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def jax_mse(y, target):
    return ((y - target) ** 2).mean()


LOSSES = {"losses": (F.mse_loss, jax_mse)}


def linear():
    torch.manual_seed(0)
    return nn.Linear(4, 3), nnx.Linear(4, 3, rngs=nnx.Rngs(0))


def adamw(parameters):
    return torch.optim.AdamW(parameters, RATE, weight_decay=0.1)


ADAMW = (adamw, optax.adamw(RATE, weight_decay=0.1))


def test_a_model_trains_alike():
    torch.manual_seed(0)
    pair = TorchModel(8, 1), JaxModel(8, 1, nnx.Rngs(0))
    before = [p.clone() for p in pair[0].parameters()]
    report = compare_training(*pair, BATCHES[:2], losses=(torch_loss, jax_loss), optimizers=ADAMW)
    report.check()
    assert report.first_step is None
    kinds = {row.kind for row in report.rows}
    assert kinds == {
        f"step {n}, {quantity}" for n in (0, 1) for quantity in ("loss", "gradient", "optimizer state", "parameter")
    }
    states = {row.name for row in report.rows if row.kind == "step 0, optimizer state"}
    assert {"mu of blocks.0.up.kernel", "nu of emb.embedding"} <= states
    assert "equal: all" in str(report)
    assert all(torch.equal(a, b) for a, b in zip(before, pair[0].parameters(), strict=True))


def scheduled(parameters):
    optimizer = torch.optim.SGD(parameters, RATE, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


EQUAL = {
    "momentum and schedule": (
        scheduled,
        optax.sgd(optax.exponential_decay(RATE, 2, 0.5, staircase=True), momentum=0.9),
    ),
    "rmsprop": (lambda p: torch.optim.RMSprop(p, RATE), optax.rmsprop(RATE, decay=0.99, eps_in_sqrt=False)),
}


@pytest.mark.parametrize("name", EQUAL)
def test_optimizers_that_are_equal(name):
    compare_training(*linear(), LINEAR, **LOSSES, optimizers=EQUAL[name]).check()


def clipped(parameters):
    optimizer = torch.optim.SGD(parameters, RATE)

    def clip(*_):
        torch.nn.utils.clip_grad_norm_(parameters, 0.1)

    optimizer.register_step_pre_hook(clip)
    return optimizer


def test_an_optimizer_that_clips_in_place():
    """PyTorch divides by the norm plus 1e-6, optax by the norm: only what follows the gradients differs."""
    optimizers = clipped, optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(RATE))
    report = compare_training(*linear(), LINEAR[:1], **LOSSES, optimizers=optimizers)
    assert report.different[0].kind == "step 0, parameter"


def test_a_schedule_in_float32_is_rounding_and_is_named():
    report = compare_training(*linear(), LINEAR, **LOSSES, optimizers=EQUAL["momentum and schedule"])
    assert report.notes[0].startswith("JAX's optimizer computes in float32")
    assert 1e-12 < max(row.difference.norm for row in report.rows) < 1e-7


@jax.custom_vjp
def scaled(x):
    return x


scaled.defvjp(lambda x: (x, None), lambda _, g: (g * (1 + 1e-9),))


BUGS = {
    "loss": ((F.mse_loss, lambda y, t: jax_mse(y, t) * (1 + 1e-9)), ADAMW, "step 0, loss 'output'"),
    "gradient of the loss": ((F.mse_loss, lambda y, t: jax_mse(scaled(y), t)), ADAMW, "step 0, gradient 'bias'"),
    "decay": (LOSSES["losses"], (adamw, optax.adamw(RATE, weight_decay=0.1001)), "step 0, parameter 'bias'"),
    "second moment": (
        LOSSES["losses"],
        (adamw, optax.adamw(RATE, weight_decay=0.1, b2=0.998)),
        "step 0, optimizer state 'nu of bias'",
    ),
    "epsilon": (
        LOSSES["losses"],
        (lambda p: torch.optim.RMSprop(p, RATE), optax.rmsprop(RATE, decay=0.99)),
        "step 0, parameter 'bias'",
    ),
    "schedule": (
        LOSSES["losses"],
        (scheduled, optax.sgd(optax.exponential_decay(RATE, 1, 0.5, staircase=True), momentum=0.9)),
        "step 1, parameter 'bias'",
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_the_first_step_and_quantity_that_differ_are_named(name):
    losses, optimizers, first = BUGS[name]
    report = compare_training(*linear(), LINEAR, losses=losses, optimizers=optimizers)
    found = report.different[0]
    # Weights and biases differ together; their order is that of the parameters.
    assert f"{found.kind} {found.name!r}".replace("kernel", "bias") == first
    assert report.first_step == int(first.split()[1].rstrip(","))
    with pytest.raises(DifferenceError, match=found.kind):
        report.check()
    assert f"DIFFERENT from {found.kind}" in str(report)


def test_states_of_one_side_are_named():
    report = compare_training(*linear(), LINEAR[:1], **LOSSES, optimizers=(adamw, optax.sgd(RATE, momentum=0.9)))
    assert report.notes == (
        "Optimizer states of PyTorch alone, not compared: mu, nu.",
        "Optimizer states of JAX alone, not compared: trace.",
    )


def test_several_outputs_and_frozen_parameters():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 3)
            self.inner.bias.requires_grad_(False)

        def forward(self, x):
            return {"mean": self.inner(x), "square": self.inner(x) ** 2}

    parameters = {"weight": jnp.ones((4, 3)), "bias": jnp.ones(3)}

    def two(p, x):
        y = x @ p["weight"] + p["bias"]
        return {"mean": y, "square": y**2}

    names = {"inner.weight": {"to": "weight", "transpose": True}, "inner.bias": "bias"}
    report = compare_training(
        Two(),
        (two, parameters),
        LINEAR,
        names=names,
        losses=(
            lambda y, t: F.mse_loss(y["mean"], t) + y["square"].mean(),
            lambda y, t: jax_mse(y["mean"], t) + y["square"].mean(),
        ),
        optimizers=ADAMW,
    )
    report.check()
    assert {row.name for row in report.rows if row.kind.endswith("gradient")} == {"weight"}


REFUSED = {
    "no batch": ([], LOSSES["losses"], "batches: expected at least one"),
    "no targets": ([np.ones((8, 4))], LOSSES["losses"], r"batches: expected tuples \(inputs, targets\), got ndarray"),
    "other inputs": ([LINEAR[0], ({"x": np.ones((8, 4))}, None)], LOSSES["losses"], "expected the inputs 0 in every"),
    "no scalar": (LINEAR, (lambda y, t: y - t, jax_mse), r"PyTorch's loss to return a scalar, got shape \(8, 3\)"),
    "no array": (LINEAR, (F.mse_loss, lambda y, t: None), "JAX's loss to return a scalar, got NoneType"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_by_name(name):
    batches, losses, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        compare_training(*linear(), batches, losses=losses, optimizers=ADAMW)
