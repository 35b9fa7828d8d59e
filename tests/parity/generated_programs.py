"""Random programs in two algebraically equal forms, one in each framework, for tests of derived tolerances.

A program is a list of steps on matrices of one shape. A step computes a new matrix from earlier ones, in one of two
forms that round differently: sums in another order, products grouped otherwise, a subtracted maximum or none.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

SIZE = 12
SCALE = SIZE**-0.5
"""Factor of sums that keeps values near 1."""
TORCH: dict[str, Callable] = {
    "exp": torch.exp,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "sqrt": torch.sqrt,
    "sum": lambda x, axis: torch.sum(x, axis, keepdim=True),
    "max": lambda x, axis: torch.amax(x.detach(), axis, keepdim=True),
    "cumsum": torch.cumsum,
    "where": torch.where,
    "flip": lambda x, axis: torch.flip(x, (axis,)),
    "softmax": torch.softmax,
    "log": torch.log,
    "triangle": torch.tril,
    "ones": lambda x: torch.ones_like(x),
}
JAX: dict[str, Callable] = {
    "exp": jnp.exp,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "sqrt": jnp.sqrt,
    "sum": lambda x, axis: jnp.sum(x, axis, keepdims=True),
    "max": lambda x, axis: jnp.max(jax.lax.stop_gradient(x), axis, keepdims=True),
    "cumsum": jnp.cumsum,
    "where": jnp.where,
    "flip": jnp.flip,
    "softmax": jax.nn.softmax,
    "log": jnp.log,
    "triangle": jnp.tril,
    "ones": lambda x: jnp.ones_like(x),
}


def _halves(f: dict, a: Any, b: Any) -> Any:
    return (a[:, : SIZE // 2] @ b[: SIZE // 2] + a[:, SIZE // 2 :] @ b[SIZE // 2 :]) * SCALE


FORMS: dict[str, tuple[int, Callable, Callable]] = {
    "add": (3, lambda f, a, b, c: (a + b) + c, lambda f, a, b, c: a + (b + c)),
    "multiply": (3, lambda f, a, b, c: (a * b) * f["tanh"](c), lambda f, a, b, c: a * (b * f["tanh"](c))),
    "divide": (2, lambda f, a, b: a / (1.0 + b * b), lambda f, a, b: a * (1.0 / (1.0 + b * b))),
    "matmul": (2, lambda f, a, b: a @ b * SCALE, _halves),
    "three matmuls": (3, lambda f, a, b, c: (a @ b) @ c * SCALE**2, lambda f, a, b, c: a @ (b @ c) * SCALE**2),
    "softmax": (
        1,
        lambda f, a: SIZE * f["softmax"](a, -1),
        lambda f, a: SIZE * f["exp"](a) / f["sum"](f["exp"](a), -1),
    ),
    "logsumexp": (
        1,
        lambda f, a: a - f["log"](f["sum"](f["exp"](a), -1)),
        lambda f, a: a - f["max"](a, -1) - f["log"](f["sum"](f["exp"](a - f["max"](a, -1)), -1)),
    ),
    "normalise": (
        1,
        lambda f, a: _centred(f, a) / f["sqrt"](f["sum"](_centred(f, a) ** 2, -1) / SIZE + 0.1),
        lambda f, a: _centred(f, a) * (f["sum"](a * a, -1) / SIZE - (f["sum"](a, -1) / SIZE) ** 2 + 0.1) ** -0.5,
    ),
    "silu": (1, lambda f, a: a * f["sigmoid"](a), lambda f, a: a / (1.0 + f["exp"](-a))),
    "tanh": (1, lambda f, a: f["tanh"](a), lambda f, a: 2.0 * f["sigmoid"](2.0 * a) - 1.0),
    "sum of squares": (
        1,
        lambda f, a: a / (1.0 + f["sum"](a * a, 0)),
        lambda f, a: a / (f["sum"](f["flip"](a, 0) ** 2, 0) + 1.0),
    ),
    "cumulative": (1, lambda f, a: f["cumsum"](a, 0) * SCALE, lambda f, a: f["triangle"](f["ones"](a)) @ a * SCALE),
    "masked": (2, lambda f, a, b: f["where"](b > 0.0, a, b), lambda f, a, b: f["where"](b > 0.0, a - b, 0.0 * b) + b),
    "transpose": (2, lambda f, a, b: (a @ b.T).T * SCALE, lambda f, a, b: b @ a.T * SCALE),
}


def _centred(f: dict, a: Any) -> Any:
    return a - f["sum"](a, -1) / SIZE


@dataclass(frozen=True)
class Step:
    operation: str
    operands: tuple[int, ...]
    form: int
    """The form in JAX; PyTorch has the other one."""


@dataclass(frozen=True)
class Program:
    seed: int
    steps: tuple[Step, ...]

    def inputs(self) -> list[np.ndarray]:
        rng = np.random.default_rng([self.seed, 1])
        return [rng.standard_normal((SIZE, SIZE)) for _ in range(2)]

    def run(self, functions: dict, form: int, inputs: Any, wrong: int | None = None, error: Any = None) -> tuple:
        """Return the values that no later step reads."""
        values = list(inputs)
        for number, step in enumerate(self.steps):
            kind = FORMS[step.operation][1 + (step.form ^ form)]
            made = kind(functions, *(values[place] for place in step.operands))
            made = made * (0.1 + (made * made).mean()) ** -0.5  # keeps values near 1
            values.append(made * error if number == wrong else made)
        read = {place for step in self.steps for place in step.operands}
        return tuple(value for place, value in enumerate(values) if place not in read)

    def torch(self) -> Callable:
        return lambda *inputs: self.run(TORCH, 1, inputs)

    def jax(self, wrong: int | None = None, ulps: float = 100.0) -> Callable:
        """Return the program in JAX; the result of step ``wrong`` has a relative error of so many ulps."""
        signs = np.random.default_rng([self.seed, 2]).choice((-1.0, 1.0), (SIZE, SIZE))
        return lambda *inputs: self.run(JAX, 0, inputs, wrong, 1.0 + ulps * 2.0**-52 * signs)


def draw(seed: int) -> Program:
    rng = np.random.default_rng([seed, 0])
    steps: list[Step] = []
    count = int(rng.integers(1, 7))
    for number in range(count):
        operation = str(rng.choice(list(FORMS)))
        places = rng.integers(number + 2, size=FORMS[operation][0])
        if number:
            places[0] = number + 1  # every step is read by the next, so that no result is lost
        steps.append(Step(operation, tuple(int(p) for p in places), int(rng.integers(2))))
    return Program(seed, tuple(steps))
