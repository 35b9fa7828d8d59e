"""Optimizers and schedules of optax and their counterparts in torch.optim."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from flax import nnx
from torch import nn

from benchmarks.pair_cases import DIFFERENT, EQUAL, pair
from parity import Report, compare_functions, compare_training
from parity.testing import normal

RATE = 0.01
STEPS = 8
PARAMETERS = {"w": normal((4, 3)), "b": normal((3,), seed=1)}
GRADIENTS = {"w": normal((STEPS, 4, 3), seed=2), "b": normal((STEPS, 3), seed=3)}
WIDE = ("float64", "float32")
"""Dtypes in which parameters are updated."""


def torch_steps(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Callable:
    """Return a function of parameters and gradients that returns the parameters after each step."""

    def run(parameters: dict[str, torch.Tensor], gradients: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        variables = {name: nn.Parameter(value.detach().clone()) for name, value in parameters.items()}
        optimizer = make([*variables.values()])
        after = []
        for step in range(len(gradients["w"])):
            for name, variable in variables.items():
                variable.grad = gradients[name][step].detach().clone()
            optimizer.step()
            after.append({name: value.detach().clone() for name, value in variables.items()})
        return after

    return run


def jax_steps(optimizer: optax.GradientTransformation) -> Callable:
    """Return the function of torch_steps for an optimizer of optax."""

    def run(parameters: dict[str, jax.Array], gradients: dict[str, jax.Array]) -> list[dict[str, jax.Array]]:
        state = optimizer.init(parameters)
        after = []
        for step in range(len(gradients["w"])):
            now = {name: value[step] for name, value in gradients.items()}
            updates, state = optimizer.update(now, state, parameters)
            parameters = optax.apply_updates(parameters, updates)
            after.append(parameters)
        return after

    return run


def compare_steps(make: Callable, optimizer: optax.GradientTransformation, dtypes: Any, scale: float = 1.0) -> Report:
    """Compare the parameters after each step.

    Args:
        make: receives parameters and returns an optimizer of PyTorch.
        optimizer: its counterpart.
        dtypes: as in compare_functions.
        scale: factor on the gradients.
    """
    gradients = {name: scale * value for name, value in GRADIENTS.items()}
    inputs = {"parameters": PARAMETERS, "gradients": gradients}
    return compare_functions(torch_steps(make), jax_steps(optimizer), inputs, dtypes=dtypes, gradients=False)


def steps(torch_class: Any, jax_function: Callable, **fixed: Any) -> Callable[..., Report]:
    """Return the comparison of two optimizers.

    Args:
        torch_class: class in torch.optim.
        jax_function: function of optax.
        fixed: keyword arguments of the class in all cases.
    """

    def compare(dtypes: Any, ours: Any = None, theirs: Any = None, rate: float = RATE, scale: float = 1.0) -> Report:
        return compare_steps(
            lambda parameters: torch_class(parameters, lr=rate, **fixed, **(ours or {})),
            jax_function(rate, **(theirs or {})),
            dtypes,
            scale,
        )

    return compare


def amsgrad_like_torch(rate: float) -> optax.GradientTransformation:
    """Return AMSGrad that takes the largest second moment before bias correction."""
    return optax.chain(
        optax.scale_by_amsgrad(eps=0.0, bias_correction_nu=False),
        optax.scale_by_schedule(lambda count: jnp.sqrt(-jnp.expm1((count + 1.0) * np.log(0.999)))),
        optax.scale_by_learning_rate(rate),
    )


def rprop_from_state(rate: float) -> optax.GradientTransformation:
    """Return Rprop that applies the update which optax stores for the next step."""
    inner = optax.rprop(rate)

    def update(gradients: Any, state: Any, parameters: Any = None) -> Any:
        state = inner.update(gradients, state, parameters)[1]
        (stored,) = [part.prev_updates for part in state if hasattr(part, "prev_updates")]
        return jax.tree.map(jnp.negative, stored), state

    return optax.GradientTransformation(inner.init, update)


OPTIM = torch.optim
pair("optim.SGD(momentum=0.9)", "optax.sgd", "", ("momentum=0.9", EQUAL, {"theirs": {"momentum": 0.9}}, WIDE))(
    steps(OPTIM.SGD, optax.sgd, momentum=0.9)
)
pair(
    "optim.SGD(momentum=0.9, nesterov=True)",
    "optax.sgd",
    "",
    ("momentum=0.9, nesterov=True", EQUAL, {"theirs": {"momentum": 0.9, "nesterov": True}}, WIDE),
)(steps(OPTIM.SGD, optax.sgd, momentum=0.9, nesterov=True))
pair(
    "optim.Adam", "optax.adam", "", ("defaults", EQUAL, {}, WIDE), ("gradients of 1e-8", EQUAL, {"scale": 1e-8}, WIDE)
)(steps(OPTIM.Adam, optax.adam))
pair(
    "optim.Adam(amsgrad=True)",
    "optax.amsgrad",
    "largest second moment before or after bias correction",
    ("defaults", DIFFERENT, {}, WIDE),
    (
        "eps=0, optax's maximum before bias correction",
        EQUAL,
        {"ours": {"eps": 0.0}, "theirs": {"is_like_torch": True}},
        WIDE,
    ),
)(
    steps(
        OPTIM.Adam,
        lambda rate, is_like_torch=False: amsgrad_like_torch(rate) if is_like_torch else optax.amsgrad(rate),
        amsgrad=True,
    )
)
pair(
    "optim.Adam(weight_decay=0.1)",
    "optax.adamw",
    "L2 term in the gradient, decoupled decay",
    ("weight_decay=0.1", DIFFERENT, {"theirs": {"weight_decay": 0.1}}, WIDE),
    ("optax.chain(add_decayed_weights(0.1), adam)", EQUAL, {"theirs": {"is_l2": True}}, WIDE),
)(
    steps(
        OPTIM.Adam,
        lambda rate, is_l2=False, **settings: (
            optax.chain(optax.add_decayed_weights(0.1), optax.adam(rate)) if is_l2 else optax.adamw(rate, **settings)
        ),
        weight_decay=0.1,
    )
)
pair(
    "optim.AdamW",
    "optax.adamw",
    "weight decay 0.01 in torch, 0.0001 in optax",
    ("defaults", DIFFERENT, {}, WIDE),
    ("optax.adamw(weight_decay=0.01)", EQUAL, {"theirs": {"weight_decay": 0.01}}, WIDE),
)(steps(OPTIM.AdamW, optax.adamw))
pair(
    "optim.NAdam",
    "optax.nadam",
    "momentum grows with the steps in torch",
    ("defaults", DIFFERENT, {}, WIDE),
    ("torch.optim.NAdam(momentum_decay=1e6)", EQUAL, {"ours": {"momentum_decay": 1e6}}, WIDE),
)(steps(OPTIM.NAdam, optax.nadam))
pair(
    "optim.RAdam",
    "optax.radam",
    "eps before bias correction in torch; optax's scalars in float32",
    ("defaults", DIFFERENT, {}, ("float64",)),
    ("eps=0 in both", EQUAL, {"ours": {"eps": 0.0}, "theirs": {"eps": 0.0}}, ("float64",)),
    ("the same in float32", DIFFERENT, {"ours": {"eps": 0.0}, "theirs": {"eps": 0.0}}, ("float32",)),
    (
        "the same in float32, b2=0.9 in both",
        EQUAL,
        {"ours": {"eps": 0.0, "betas": (0.9, 0.9)}, "theirs": {"eps": 0.0, "b2": 0.9}},
        ("float32",),
    ),
)(steps(OPTIM.RAdam, optax.radam))
pair("optim.Adamax", "optax.adamax", "", ("defaults", EQUAL, {}, WIDE))(steps(OPTIM.Adamax, optax.adamax))
pair(
    "optim.Adagrad",
    "optax.adagrad",
    "initial accumulator 0.1; eps inside the root",
    ("defaults", DIFFERENT, {}, WIDE),
    (
        "optax.adagrad(initial_accumulator_value=0, eps=1e-10)",
        DIFFERENT,
        {"theirs": {"initial_accumulator_value": 0.0, "eps": 1e-10}},
        ("float64",),
    ),
    (
        "the same, eps=0 in both",
        EQUAL,
        {"ours": {"eps": 0.0}, "theirs": {"initial_accumulator_value": 0.0, "eps": 0.0}},
        WIDE,
    ),
)(steps(OPTIM.Adagrad, optax.adagrad))
pair(
    "optim.RMSprop",
    "optax.rmsprop",
    "decay 0.99, 0.9; eps inside the root",
    ("defaults", DIFFERENT, {}, WIDE),
    ("optax.rmsprop(decay=0.99)", DIFFERENT, {"theirs": {"decay": 0.99}}, WIDE),
    (
        "optax.rmsprop(decay=0.99, eps_in_sqrt=False)",
        EQUAL,
        {"theirs": {"decay": 0.99, "eps_in_sqrt": False}},
        WIDE,
    ),
)(steps(OPTIM.RMSprop, optax.rmsprop))
pair(
    "optim.RMSprop(centered=True, momentum=0.9)",
    "optax.rmsprop(centered=True)",
    "decay; eps inside the root",
    ("momentum=0.9", DIFFERENT, {"theirs": {"momentum": 0.9}}, WIDE),
    (
        "momentum=0.9, decay=0.99, eps_in_sqrt=False",
        EQUAL,
        {"theirs": {"momentum": 0.9, "decay": 0.99, "eps_in_sqrt": False}},
        WIDE,
    ),
)(
    steps(
        OPTIM.RMSprop,
        lambda rate, **settings: optax.rmsprop(rate, centered=True, **settings),
        centered=True,
        momentum=0.9,
    )
)
pair("optim.Adadelta", "optax.adadelta", "", ("learning rate 1", EQUAL, {"rate": 1.0}, WIDE))(
    steps(OPTIM.Adadelta, optax.adadelta)
)
pair(
    "optim.Rprop",
    "optax.rprop",
    "optax's updates come one step late",
    ("defaults", DIFFERENT, {}, WIDE),
    ("the update in optax's new state", EQUAL, {"theirs": {"is_from_state": True}}, WIDE),
)(
    steps(
        OPTIM.Rprop,
        lambda rate, is_from_state=False: rprop_from_state(rate) if is_from_state else optax.rprop(rate),
    )
)


def adafactor(rate: float, is_bounded: bool = False, **settings: Any) -> optax.GradientTransformation:
    """Return Adafactor of optax.

    Args:
        rate: the learning rate.
        is_bounded: True: it is at most the inverse square root of the step, as in PyTorch.
        settings: further arguments of optax.
    """
    bounded = lambda count: jnp.minimum(rate, 1.0 / jnp.sqrt(count + 1.0))  # noqa: E731
    return optax.adafactor(bounded if is_bounded else rate, **settings)


pair(
    "optim.Adafactor",
    "optax.adafactor",
    "factored from 128 in optax; rate not bounded; eps",
    ("learning rate 0.5", DIFFERENT, {"rate": 0.5}, ("float32",)),
    (
        "optax.adafactor(min_dim_size_to_factor=1, eps=0)",
        DIFFERENT,
        {"rate": 0.5, "theirs": {"min_dim_size_to_factor": 1, "eps": 0.0}},
        ("float32",),
    ),
    (
        "the same, rate at most 1 / sqrt(step)",
        EQUAL,
        {"rate": 0.5, "theirs": {"min_dim_size_to_factor": 1, "eps": 0.0, "is_bounded": True}},
        ("float32",),
    ),
)(steps(OPTIM.Adafactor, adafactor))


def train(make: Callable, optimizer: optax.GradientTransformation) -> Report:
    """Compare training runs of a linear layer: loss, gradients, optimizer states and parameters of four steps."""
    batches = [([normal((6, 4), seed=step)], normal((6, 3), seed=10 + step)) for step in range(4)]
    return compare_training(
        nn.Linear(4, 3),
        nnx.Linear(4, 3, rngs=nnx.Rngs(0)),
        batches,
        losses=(nn.functional.mse_loss, lambda y, target: optax.squared_error(y, target).mean()),
        optimizers=(make, optimizer),
    )


@pair(
    "training with optim.AdamW",
    "optax.adamw",
    "weight decay",
    ("defaults", DIFFERENT, {}, ("float64",)),
    ("optax.adamw(weight_decay=0.01)", EQUAL, {"weight_decay": 0.01}, ("float64",)),
)
def training_adamw(dtypes: Any, **settings: Any) -> Report:
    """Compare training with AdamW."""
    return train(lambda parameters: torch.optim.AdamW(parameters, RATE), optax.adamw(RATE, **settings))


@pair(
    "training with optim.SGD(momentum=0.9, weight_decay=0.1)",
    "optax.chain(add_decayed_weights(0.1), sgd)",
    "",
    ("momentum=0.9", EQUAL, {}, ("float64",)),
)
def training_sgd(dtypes: Any) -> Report:
    """Compare training with momentum and an L2 term."""
    return train(
        lambda parameters: torch.optim.SGD(parameters, RATE, momentum=0.9, weight_decay=0.1),
        optax.chain(optax.add_decayed_weights(0.1), optax.sgd(RATE, momentum=0.9)),
    )


@pair(
    "nn.utils.clip_grad_norm_",
    "optax.clip_by_global_norm",
    "torch adds 1e-6 to the norm",
    ("norm above the limit", DIFFERENT),
    ("norm below the limit", EQUAL, {"limit": 1e3}),
    ("gradients times (norm + 1e-6) / norm in torch", EQUAL, {"is_corrected": True}),
)
def clip_norm(dtypes: Any, limit: float = 1.0, is_corrected: bool = False) -> Report:
    """Compare clipping by the global norm of the gradients."""

    def torch_side(w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        variables = [nn.Parameter(torch.zeros_like(x)) for x in (w, b)]
        for variable, gradient in zip(variables, (w, b), strict=True):
            variable.grad = gradient.detach().clone()
        norm = nn.utils.clip_grad_norm_(variables, limit)
        factor = (norm + 1e-6) / norm if is_corrected else 1.0
        return tuple(x.grad * factor for x in variables if x.grad is not None)

    def jax_side(w: jax.Array, b: jax.Array) -> tuple[jax.Array, ...]:
        return optax.clip_by_global_norm(limit).update((w, b), optax.EmptyState())[0]

    inputs = [normal((4, 3), seed=2), normal((3,), seed=3)]
    return compare_functions(torch_side, jax_side, inputs, dtypes=dtypes, gradients=False)


def rates(make: Callable[[torch.optim.Optimizer], Any], schedule: Callable, count: int, dtypes: Any) -> Report:
    """Compare the learning rates of two schedules, as multiples of an input.

    Args:
        make: receives an optimizer whose rate is 1 and returns a scheduler of PyTorch.
        schedule: its counterpart.
        count: number of steps.
        dtypes: as in compare_functions.
    """

    def torch_side(peak: torch.Tensor) -> torch.Tensor:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        scheduler = make(optimizer)
        found = []
        for _ in range(count):
            found.append(scheduler.get_last_lr()[0])
            optimizer.step()
            scheduler.step()
        return peak * torch.tensor(found, dtype=peak.dtype)

    def jax_side(peak: jax.Array) -> jax.Array:
        return peak * jnp.stack([schedule(step) for step in range(count)]).astype(peak.dtype)

    return compare_functions(torch_side, jax_side, [np.ones(1)], dtypes=dtypes)


@pair(
    "CosineAnnealingLR(T_max=10)",
    "optax.cosine_decay_schedule(1, 10)",
    "torch rises again after T_max",
    ("11 steps", EQUAL, {"count": 11}, ("float64",)),
    ("15 steps", DIFFERENT, {"count": 15}, ("float64",)),
    ("15 steps, torch's count at most 10", EQUAL, {"count": 15, "is_bounded": True}, ("float64",)),
)
def cosine_schedule(dtypes: Any, count: int, is_bounded: bool = False) -> Report:
    """Compare cosine schedules."""

    def make(optimizer: torch.optim.Optimizer) -> Any:
        if not is_bounded:
            return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: (1 + np.cos(np.pi * min(t, 10) / 10)) / 2)

    return rates(make, optax.cosine_decay_schedule(1.0, 10), count, dtypes)


@pair(
    "OneCycleLR(total_steps=20)",
    "optax.cosine_onecycle_schedule(20, 1)",
    "phases end one step earlier in torch",
    ("defaults", DIFFERENT, {}, ("float64",)),
    ("transition_steps=19, pct_start=5/19", EQUAL, {"steps": 19, "pct_start": 5 / 19}, ("float64",)),
)
def one_cycle(dtypes: Any, steps: int = 20, **settings: Any) -> Report:
    """Compare schedules of one cycle."""
    return rates(
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=20),
        optax.cosine_onecycle_schedule(steps, 1.0, **settings),
        20,
        dtypes,
    )


@pair(
    "StepLR(step_size=3, gamma=0.5)",
    "optax.exponential_decay(1, 3, 0.5)",
    "optax decays at every step",
    ("defaults", DIFFERENT, {}, ("float64",)),
    ("staircase=True", EQUAL, {"staircase": True}, ("float64",)),
)
def step_schedule(dtypes: Any, **settings: Any) -> Report:
    """Compare schedules with steps."""
    return rates(
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5),
        optax.exponential_decay(1.0, 3, 0.5, **settings),
        9,
        dtypes,
    )


@pair(
    "PolynomialLR(total_iters=5, power=2)",
    "optax.polynomial_schedule(1, 0, 2, 5)",
    "",
    ("defaults", EQUAL, {}, ("float64",)),
)
def polynomial_schedule(dtypes: Any) -> Report:
    """Compare polynomial schedules."""
    return rates(
        lambda optimizer: torch.optim.lr_scheduler.PolynomialLR(optimizer, 5, 2.0),
        optax.polynomial_schedule(1.0, 0.0, 2, 5),
        8,
        dtypes,
    )
