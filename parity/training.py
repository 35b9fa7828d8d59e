"""Comparison of training in both frameworks, step by step: losses, gradients, optimizer states and parameters.

Both sides start from equal parameters and take the same batches in float64. A difference grows from step to step, so
the report names the first quantity that differs. Rounding grows too. Therefore the tolerance is measured on whole
training runs, whose parameters and inputs are changed by one ulp before every step; see parity.rounding.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from rich.table import Table
from torch import nn

from parity.call_errors import check_seed
from parity.functions import Pair, Report, Row
from parity.implementations import OUTPUT, Values, make_inputs
from parity.inspection import Narrowing, longest_reduction, narrowest_in_jaxpr
from parity.modules import pair_of_modules
from parity.pytrees import Leaves, is_floating, map_arrays, to_numpy, widened
from parity.rounding import DIFFERENT, DRAWS, UNITS, distance, judge, perturbed

QUANTITIES = ("loss", "gradient", "optimizer state", "parameter")
"""Quantities that are compared in every step, in the order in which a step computes them."""
OPTAX_STATES = {
    "exp_avg": "mu",
    "exp_avg_sq": "nu",
    "max_exp_avg_sq": "nu_max",
    "square_avg": "nu",
    "momentum_buffer": "trace",
    "sum": "sum_of_squares",
}
"""Names of optimizer states in torch.optim, and the names of optax for the same state."""

TorchOptimizer = Callable[[list[nn.Parameter]], Any]
"""Returns a torch.optim.Optimizer, or an optimizer and its learning rate scheduler, for parameters."""


class Step(NamedTuple):
    """The results of one training step: arrays by name for each of QUANTITIES."""

    loss: Leaves
    gradient: Leaves
    state: Leaves
    parameter: Leaves
    """Parameters after the step."""


@dataclass(frozen=True)
class TrainingReport(Report):
    """The comparison of two training runs; rows are in the order in which they are computed."""

    steps: tuple[tuple[Row, ...], ...] = ()
    """The rows of each step."""
    named: ClassVar[str] = "the first:"

    @property
    def different(self) -> list[Row]:
        """The rows whose difference is more than rounding, in the order in which they are computed."""
        return [row for row in self.rows if row.difference.verdict == DIFFERENT]

    @property
    def first_step(self) -> int | None:
        """The first step with a difference that is more than rounding, counted from 0; None if there is none."""
        wrong = (n for n, rows in enumerate(self.steps) if any(row.difference.verdict == DIFFERENT for row in rows))
        return next(wrong, None)

    def __rich__(self) -> Table:
        table = Table(title=self.title or None, box=None, pad_edge=False)
        for column in ("step", *QUANTITIES, "verdict"):
            table.add_column(column, no_wrap=True, justify="left" if column == "verdict" else "right")
        for number, rows in enumerate(self.steps):
            worst = [max((r.difference.norm for r in rows if r.kind.endswith(q)), default=None) for q in QUANTITIES]
            cells = ["-" if value is None else f"{value:.1e}" for value in worst]
            wrong = next((row for row in rows if row.difference.verdict == DIFFERENT), None)
            verdict = "equal up to rounding" if wrong is None else f"DIFFERENT from {wrong.kind} {wrong.name!r} on"
            table.add_row(str(number), *cells, verdict)
        return table


def compare_training(
    torch_module: nn.Module,
    jax_module: Any,
    batches: Iterable[tuple[Any, Any]],
    *,
    losses: tuple[Callable, Callable],
    optimizers: tuple[TorchOptimizer, optax.GradientTransformation],
    names: Mapping[str, Any] | None = None,
    ignore: Iterable[str] = (),
    static: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> TrainingReport:
    """Train two modules from equal parameters in float64, and find the first step and quantity that differ.

    Neither module is changed. Buffers keep their values, for example the running statistics of a batch normalisation.

    Args:
        torch_module: as in compare_modules.
        jax_module: as in compare_modules.
        batches: inputs and targets of each step, (inputs, targets). Inputs are as in compare_functions, targets are
            NumPy arrays in any containers.
        losses: loss functions of PyTorch and of JAX. Each receives the module's output and the targets, and returns a
            scalar. Several outputs are passed as a dictionary by name.
        optimizers: a function of a list of parameters that returns a torch.optim.Optimizer, or an optimizer and its
            scheduler; and an optax transformation.
        names: as in compare_modules.
        ignore: as in compare_modules.
        static: as in compare_modules.
        seed: seed of perturbations.

    Returns:
        A report with one row for each loss, gradient, optimizer state and parameter of each step. Optimizer states are
        compared if they have the shape of their parameter and both frameworks have them (OPTAX_STATES).

    Raises:
        ValueError: as in compare_modules, there is no batch, the inputs of batches differ in name, or a loss is no
            scalar.

    Example:
        >>> import numpy as np, optax, torch
        >>> from flax import nnx
        >>> rng = np.random.default_rng(0)
        >>> batches = [([rng.standard_normal((8, 4))], rng.standard_normal((8, 3))) for _ in range(3)]
        >>> report = compare_training(
        ...     torch.nn.Linear(4, 3),
        ...     nnx.Linear(4, 3, rngs=nnx.Rngs(0)),
        ...     batches,
        ...     losses=(torch.nn.functional.mse_loss, lambda y, target: ((y - target) ** 2).mean()),
        ...     optimizers=(lambda p: torch.optim.AdamW(p, 1e-3), optax.adamw(1e-3, weight_decay=0.01)),
        ... )
        >>> report.check()
    """
    batches = _checked(batches)
    check_seed(seed)
    pair = pair_of_modules(torch_module, jax_module, batches[0][0], names, ignore, static)
    training = _Training(pair, losses, optimizers, [_Batch.of(batch, pair, static) for batch in batches])
    return training.compare(seed)


def _checked(batches: Any) -> list[tuple[Any, Any]]:
    """Return the batches as a list of pairs."""
    try:
        batches = list(batches)
    except TypeError:
        got = type(batches).__name__
        raise ValueError(f"batches: expected a sequence of (inputs, targets), got {got}") from None
    if not batches:
        raise ValueError("batches: expected at least one (inputs, targets), got none")
    if not isinstance(batches[0], tuple) or len(batches[0]) != 2:
        raise ValueError(f"batches: expected tuples (inputs, targets), got {type(batches[0]).__name__}")
    return batches


class _Batch(NamedTuple):
    inputs: Leaves
    targets: Any

    @classmethod
    def of(cls, batch: tuple[Any, Any], pair: Pair, static: Mapping[str, Any] | None) -> "_Batch":
        """Return a batch with floating arrays in float64.

        Raises:
            ValueError: it is no pair, or its inputs have other names than those of the first batch.
        """
        if not isinstance(batch, tuple) or len(batch) != 2:
            raise ValueError(f"batches: expected tuples (inputs, targets), got {type(batch).__name__}")
        arrays = make_inputs(batch[0], static).arrays
        if arrays.keys() != pair.call.arrays.keys():
            expected = ", ".join(pair.call.arrays)
            got = ", ".join(arrays)
            raise ValueError(f"batches: expected the inputs {expected} in every batch, got {got}")
        inputs = {name: widened(array) for name, array in arrays.items()}
        return cls(inputs, map_arrays(batch[1], lambda _, array: widened(to_numpy(array)), "targets"))


@dataclass
class _Training:
    """Two modules with linked parameters, and their losses, optimizers and batches."""

    pair: Pair
    losses: tuple[Callable, Callable]
    optimizers: tuple[TorchOptimizer, optax.GradientTransformation]
    batches: list[_Batch]

    def compare(self, seed: int) -> TrainingReport:
        """Train both sides, once as they are and DRAWS times perturbed, and judge every quantity."""
        both = self.pair.values(self.pair.torch.parameters, self.batches[0].inputs)
        length = longest_reduction(self.pair.jax.program(both[1]))
        narrow = self._narrowing()
        unit = "float64" if narrow is None else narrow.dtype
        ours, theirs = self._train(None)
        perturbations = [self._train(_Perturbation(seed, draw, unit)) for draw in range(DRAWS)]
        steps = []
        for number, (first, second) in enumerate(zip(ours, theirs, strict=True)):
            rows = []
            for quantity, left, right in zip(QUANTITIES, first, second, strict=True):
                for name in [name for name in left if name in right]:
                    moved = [
                        distance(run[number][QUANTITIES.index(quantity)][name], base[name])
                        for runs in perturbations
                        for run, base in zip(runs, (left, right), strict=True)
                    ]
                    found = judge(left[name], right[name], max(moved), unit, length)
                    rows.append(Row(f"step {number}, {quantity}", name, left[name].shape, "float64", found, 0.0, 0.0))
            steps.append(tuple(rows))
        notes = [*self.pair.notes]
        if narrow is not None:
            notes.append(f"JAX's optimizer computes in {narrow}, so that all steps are judged in ulps of {unit}.")
        notes += [*_unpaired_states(ours[0].state, theirs[0].state)]
        return TrainingReport(tuple(row for rows in steps for row in rows), tuple(notes), steps=tuple(steps))

    @cached_property
    def _jax_loss(self) -> Callable:
        """A compiled function of floating outputs, other outputs and targets that returns the loss and its gradient."""

        def loss_of(floating: Mapping[str, Any], others: Mapping[str, Any], targets: Any) -> Any:
            outputs = {**floating, **others}
            loss = self.losses[1](outputs.get(OUTPUT, outputs), targets)
            _check_scalar(loss, self.pair.jax.label)
            return loss

        return jax.jit(jax.value_and_grad(loss_of))

    def _narrowing(self) -> Narrowing | None:
        """Return where JAX's optimizer computes in a narrower dtype, as optax's schedules do."""
        with jax.enable_x64(True):
            values = {name: jnp.asarray(array) for name, array in self.pair.jax.parameters.items()}
            state = self.optimizers[1].init(values)
            return narrowest_in_jaxpr(jax.make_jaxpr(self.optimizers[1].update)(values, state, values))

    def _train(self, perturbation: "_Perturbation | None") -> tuple[list[Step], list[Step]]:
        """Return the steps of both sides, with JAX's names.

        Args:
            perturbation: change of inputs and parameters before every step; None: no change.
        """
        translate = self.pair.translate
        assert translate is not None, "modules have linked parameters"
        trained = translate({name: self.pair.torch.parameters[name] for name in self.pair.torch.trainable})
        ours = _TorchTraining(self.pair, self.losses[0], self.optimizers[0])
        theirs = _JaxTraining(self.pair, self._jax_loss, self.optimizers[1], frozenset(trained))
        found: tuple[list[Step], list[Step]] = ([], [])
        for number, batch in enumerate(self.batches):
            inputs = batch.inputs
            if perturbation is not None:
                inputs = perturbation.apply(inputs, number)
                for side in (ours, theirs):
                    side.set(perturbation.apply(side.arrays(), number))
            step = ours.step(_Batch(inputs, batch.targets))
            states = {
                f"{kind} of {name}": array
                for kind, arrays in _by_kind(step.state).items()
                for name, array in translate(arrays).items()
            }
            found[0].append(Step(step.loss, translate(step.gradient), states, translate(step.parameter)))
            found[1].append(theirs.step(_Batch(inputs, batch.targets)))
        return found


class _Perturbation(NamedTuple):
    """A random change of one ulp before every step; see parity.rounding."""

    seed: int
    draw: int
    unit: str
    """Dtype whose ulps are meant."""

    def apply(self, arrays: Leaves, step: int) -> Leaves:
        """Return changed arrays."""
        return perturbed(arrays, UNITS[self.unit], np.random.default_rng([self.seed, self.draw, step]))


class _TorchTraining:
    """Training in PyTorch from the module's parameters, which are not changed."""

    def __init__(self, pair: Pair, loss: Callable, make_optimizer: TorchOptimizer) -> None:
        self._side = pair.torch
        self._loss = loss
        values = pair.torch.parameters
        self._fixed = {name: array for name, array in values.items() if name not in pair.torch.trainable}
        self._parameters = {n: nn.Parameter(torch.tensor(values[n])) for n in values if n in pair.torch.trainable}
        made = make_optimizer(list(self._parameters.values()))
        self._optimizer, self._scheduler = made if isinstance(made, tuple) else (made, None)

    def arrays(self) -> Leaves:
        """Return copies of the parameters."""
        return {name: to_numpy(parameter).copy() for name, parameter in self._parameters.items()}

    def set(self, arrays: Leaves) -> None:
        """Set the parameters."""
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(torch.from_numpy(arrays[name]))

    def step(self, batch: _Batch) -> Step:
        """Take one step; results have PyTorch's names."""
        values = Values(batch.inputs, self._fixed | self.arrays())
        outputs = self._side.run(values, "float64", None).outputs
        leaves = {n: torch.from_numpy(x).requires_grad_(is_floating(x)) for n, x in outputs.items()}
        targets = map_arrays(batch.targets, lambda _, array: torch.from_numpy(array), "targets")
        loss = self._loss(leaves.get(OUTPUT, leaves), targets)
        _check_scalar(loss, self._side.label)
        floating = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
        given = torch.autograd.grad(loss, list(floating.values()), allow_unused=True)
        cotangents = {
            name: to_numpy(torch.zeros_like(leaf) if grad is None else grad)
            for (name, leaf), grad in zip(floating.items(), given, strict=True)
        }
        gradients = self._side.run(values, "float64", cotangents).parameter_gradients
        for name, parameter in self._parameters.items():
            parameter.grad = torch.tensor(gradients[name])  # a copy, because optimizers may clip it in place
        self._optimizer.step()
        if self._scheduler is not None:
            self._scheduler.step()
        states = {
            f"{OPTAX_STATES.get(kind, kind)} of {name}": to_numpy(value).copy()
            for name, parameter in self._parameters.items()
            for kind, value in self._optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.is_floating_point()
        }
        return Step({OUTPUT: to_numpy(loss)}, gradients, states, self.arrays())


class _JaxTraining:
    """Training in JAX from the parameters of PyTorch's module."""

    def __init__(
        self, pair: Pair, loss: Callable, optimizer: optax.GradientTransformation, trained: frozenset[str]
    ) -> None:
        self._side = pair.jax
        self._loss_and_cotangents = loss
        self._update = jax.jit(optimizer.update)
        values = pair.values(pair.torch.parameters, {})[1].parameters
        self._fixed = {name: array for name, array in values.items() if name not in trained}
        with jax.enable_x64(True):
            self._parameters: dict[str, Any] = {n: jnp.asarray(x) for n, x in values.items() if n in trained}
            self._state = optimizer.init(self._parameters)

    def arrays(self) -> Leaves:
        """Return copies of the parameters."""
        return {name: np.asarray(array) for name, array in self._parameters.items()}

    def set(self, arrays: Leaves) -> None:
        """Set the parameters."""
        with jax.enable_x64(True):
            self._parameters = {name: jnp.asarray(array) for name, array in arrays.items()}

    def step(self, batch: _Batch) -> Step:
        """Take one step."""
        values = Values(batch.inputs, self._fixed | self.arrays())
        outputs = self._side.run(values, "float64", None).outputs
        with jax.enable_x64(True):
            floating = {name: jnp.asarray(x) for name, x in outputs.items() if is_floating(x)}
            others = {name: jnp.asarray(x) for name, x in outputs.items() if not is_floating(x)}
            targets = map_arrays(batch.targets, lambda _, array: jnp.asarray(array), "targets")
            loss, given = self._loss_and_cotangents(floating, others, targets)
            cotangents = {name: np.asarray(x) for name, x in given.items()}
        gradients = self._side.run(values, "float64", cotangents).parameter_gradients
        gradients = {name: gradients[name] for name in self._parameters}
        with jax.enable_x64(True):
            given = {name: jnp.asarray(array) for name, array in gradients.items()}
            updates, self._state = self._update(given, self._state, self._parameters)
            self._parameters = dict(optax.apply_updates(self._parameters, updates))  # pyright: ignore
        return Step({OUTPUT: np.asarray(loss)}, gradients, dict(self._states()), self.arrays())

    def _states(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the states that have the shape of their parameter, by "kind of parameter"."""
        for path, leaf in jax.tree_util.tree_leaves_with_path(self._state):
            name = str(getattr(path[-1], "key", ""))
            kinds = [entry.name for entry in path if isinstance(entry, jax.tree_util.GetAttrKey)]
            if name in self._parameters and kinds and leaf.shape == self._parameters[name].shape:
                yield f"{kinds[-1]} of {name}", np.asarray(leaf)


def _by_kind(states: Leaves) -> dict[str, Leaves]:
    """Return states by kind, then by the name of their parameter."""
    found: dict[str, Leaves] = {}
    for key, array in states.items():
        kind, _, name = key.partition(" of ")
        found.setdefault(kind, {})[name] = array
    return found


def _unpaired_states(ours: Leaves, theirs: Leaves) -> list[str]:
    """Return one sentence for each framework with kinds of states that the other has not."""
    kinds = [set(_by_kind(states)) for states in (ours, theirs)]
    return [
        f"Optimizer states of {label} alone, not compared: {', '.join(sorted(own - other))}."
        for label, own, other in (("PyTorch", *kinds), ("JAX", *kinds[::-1]))
        if own - other
    ]


def _check_scalar(loss: Any, label: str) -> None:
    """Raise a ValueError if a loss is no scalar."""
    shape = getattr(loss, "shape", None)
    if shape is None or tuple(shape) != ():
        got = f"shape {tuple(shape)}" if shape is not None else type(loss).__name__
        raise ValueError(f"losses: expected {label}'s loss to return a scalar, got {got}; reduce it with a mean or sum")
