"""Stages that users write: what their modules keep, change and wrap."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_impl.pipeline import PipelineExecutor, split_batch
from jax_impl.pipeline.module_stages import is_number_in_state
from jax_impl.recompute import recompute_modules
from tests.pipeline.jax_cases.modules import assert_equal, mesh_of, square

M = 2
X = np.random.default_rng(0).normal(size=(2 * M, 3))


def step(stages, schedule: str = "1f1b", parameters=None):
    """Losses of a step of two stages on two devices, and the executor with its state."""
    pipeline = PipelineExecutor(stages, schedule, M, square, parameters=parameters, mesh=mesh_of(pp=2))
    state = pipeline.initial_state() if parameters is None else None
    staged = pipeline.stage_parameters(parameters)
    return pipeline, pipeline.step(staged, split_batch(X, M), split_batch(2 * X, M), state)


class Wide(nnx.Module):
    """A linear layer with dropout."""

    def __init__(self, seed: int) -> None:
        rngs = nnx.Rngs(seed)
        self.linear = nnx.Linear(3, 3, rngs=rngs, param_dtype=float)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(jnp.tanh(self.linear(x)))


class Rematerialised(Wide):
    """The same in nnx.remat."""

    @nnx.remat
    def __call__(self, x):
        return super().__call__(x)


def recomputed(seed: int) -> Wide:
    module = Wide(seed)
    recompute_modules(module, {"": ["dropout"]})
    return module


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zb-h1", marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", [Rematerialised, recomputed])
def test_keys_of_dropout_that_backward_reads(make, schedule):
    """A checkpoint saves the typed key of its dropout, which is no array of numbers."""
    plain, expected = step([Wide(0), Wide(1)], schedule)
    other, found = step([make(0), make(1)], schedule)
    assert_equal(found[0], expected[0])
    assert_equal(
        jax.tree.leaves(other.join_parameters(found[1])), jax.tree.leaves(plain.join_parameters(expected[1])), 1e-12
    )


class Writing(nnx.Module):
    """A module that changes its parameter in its call."""

    def __init__(self) -> None:
        self.linear = nnx.Linear(3, 3, rngs=nnx.Rngs(0), param_dtype=float)

    def __call__(self, x):
        self.linear.kernel[...] *= 0.5
        return self.linear(x)


def test_a_parameter_that_a_call_writes_is_refused():
    with pytest.raises(ValueError, match=r"stages: expected modules that read their .* writes linear.kernel, as that"):
        step([Wide(0), Writing()])


class Layers(nnx.Module):
    """Layers in a scan, which returns their parameters as they were."""

    def __init__(self) -> None:
        make = nnx.split_rngs(splits=2)(nnx.vmap(lambda rngs: nnx.Linear(3, 3, rngs=rngs, param_dtype=float)))
        self.layers = make(nnx.Rngs(0))

    @nnx.remat
    def __call__(self, x):
        run = nnx.scan(lambda x, layer: jnp.tanh(layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return run(x, self.layers)


class Plain(nnx.Module):
    """The same layers one after the other."""

    def __init__(self) -> None:
        self.layers = Layers().layers

    def __call__(self, x):
        for kernel, bias in zip(self.layers.kernel[...], self.layers.bias[...], strict=True):
            x = jnp.tanh(x @ kernel + bias)
        return x


def test_a_scan_that_returns_parameters_as_they_were_is_accepted():
    assert_equal(step([Layers(), Layers()])[1][0], step([Plain(), Plain()])[1][0])


class Holding(nnx.Module):
    """A parameter that is a tree, and a count that is a number of Python."""

    def __init__(self) -> None:
        self.weights = nnx.Param({"w": jnp.full((3, 3), 0.5)})
        self.calls = nnx.Variable(0)

    def __call__(self, x):
        self.calls.set_value(self.calls.get_value() + 1)
        return x @ self.weights.get_value()["w"]


def test_trees_and_numbers_in_variables():
    modules = [Holding(), Holding()]
    pipeline, (losses, gradients, state) = step(nnx.List(modules))
    expected = [square(x @ np.full((3, 3), 0.5) @ np.full((3, 3), 0.5), 2 * x) for x in split_batch(X, M)]
    assert_equal(losses, jnp.stack(expected))
    assert all(np.asarray(leaf).any() for leaf in jax.tree.leaves(pipeline.join_parameters(gradients)))
    pipeline.update_modules(None, state)
    assert [int(module.calls.get_value()) for module in modules] == [M, M]


class OwnDerivative(Wide):
    """Layers in a function with a derivative of its own, which returns their parameters as they were."""

    def __call__(self, x):
        @nnx.custom_vjp
        def run(linear, x):
            return jnp.tanh(linear(x))

        def forward(linear, x):
            graph, params = nnx.split(linear)
            return jax.vjp(lambda params, x: jnp.tanh(nnx.merge(graph, params)(x)), params, x)

        run.defvjp(forward, lambda derivative, g: derivative(g[1] if isinstance(g, tuple) else g))
        return self.dropout(run(self.linear, x))


class Looping(Wide):
    """Layers that a while loop carries."""

    def __call__(self, x):
        def turn(carry):
            module, i, x = carry
            return module, i + 1, jnp.tanh(module(x))

        start = self.linear, 0, jax.lax.stop_gradient(x)
        return super().__call__(x) + jax.lax.stop_gradient(nnx.while_loop(lambda carry: carry[1] < 2, turn, start)[2])


class Unrolled(Wide):
    """The same without a loop."""

    def __call__(self, x):
        y = jnp.tanh(self.linear(jnp.tanh(self.linear(x))))
        return super().__call__(x) + jax.lax.stop_gradient(y)


@pytest.mark.parametrize(("kind", "same"), [(OwnDerivative, Wide), (Looping, Unrolled)])
def test_transformations_that_return_parameters_as_they_were_are_accepted(kind, same):
    plain, expected = step([same(0), same(1)])
    other, found = step([kind(0), kind(1)])
    assert_equal(found[0], expected[0])
    assert_equal(
        jax.tree.leaves(other.join_parameters(found[1])), jax.tree.leaves(plain.join_parameters(expected[1])), 1e-12
    )


class WritingInLoop(Writing):
    """A module that changes its parameter in a while loop."""

    def __call__(self, x):
        def turn(carry):
            module, i = carry
            module.kernel[...] *= 0.5
            return module, i + 1

        nnx.while_loop(lambda carry: carry[1] < 2, turn, (self.linear, 0))
        return self.linear(x)


def test_a_parameter_that_a_loop_writes_is_refused():
    with pytest.raises(ValueError, match=r"stages: expected modules that read their .* writes linear.kernel, as that"):
        step([Wide(0), WritingInLoop()])


class Numbers(nnx.Module):
    """Numbers of Python in variables, which decide dtypes, shapes and branches."""

    def __init__(self, scale: float = 0.3, dtype=jnp.bfloat16) -> None:
        self.linear = nnx.Linear(3, 3, rngs=nnx.Rngs(0), param_dtype=dtype, dtype=dtype)
        self.scale = nnx.Variable(scale)
        self.turns = nnx.Variable(2)
        self.is_on = nnx.Variable(True)
        self.calls = nnx.Variable(0)

    def __call__(self, x):
        self.calls.set_value(self.calls.get_value() + 1)
        for _ in range(self.turns.get_value()):
            x = self.linear(x)
        x = x * self.scale.get_value() if self.is_on.get_value() else x
        return {"x": x}


def test_numbers_in_variables_that_a_call_reads_stay_numbers():
    modules = [Numbers(), Numbers(0.5)]
    pipeline = PipelineExecutor(modules, "1f1b", M, mesh=mesh_of(pp=2))
    params, data = pipeline.stage_parameters(), split_batch(jnp.asarray(X, jnp.bfloat16), M)
    for scale in (0.3, 0.8):
        modules[0].scale.set_value(scale)  # read at each step, like a mode
        state = pipeline.initial_state()
        outputs = pipeline.forward(params, data, state)["x"]
        expected = jnp.stack([Numbers(0.5)(**Numbers(scale)(x))["x"] for x in data])
        assert outputs.dtype == expected.dtype == jnp.bfloat16
        assert_equal(outputs.astype(float), expected.astype(float), 1e-2)


def test_update_modules_leaves_numbers_that_no_call_has_changed():
    modules = [Numbers(dtype=float), Numbers(dtype=float)]
    for module in modules:
        module.__class__ = Returning
    pipeline, (_, _, state) = step(modules)
    pipeline.update_modules(None, state)
    assert [module.scale.get_value() for module in modules] == [0.3, 0.3]
    assert isinstance(modules[0].turns.get_value(), int)
    assert modules[0].is_on.get_value() is True
    assert int(modules[0].calls.get_value()) == M
    _, (losses, *_) = step(modules)
    assert np.isfinite(losses).all()


def test_a_state_with_another_number_than_the_module_is_refused():
    """Such as one of a checkpoint: the step would compute with the module's number."""
    modules = [Returning(dtype=float), Returning(dtype=float)]
    pipeline, (_, _, state) = step(modules)
    params, data = pipeline.stage_parameters(), (split_batch(X, M), split_batch(2 * X, M))
    modules[0].scale.set_value(0.7)  # a mode changes while training goes on
    *_, state = pipeline.step(params, *data, state)
    of_checkpoint = jax.tree.map(jnp.copy, state)
    pipeline.step(params, *data, of_checkpoint)
    assert is_number_in_state(math.nan, np.float32(math.nan))  # which equals nothing, but is the same state
    modules[0].scale.set_value(0.2)
    with pytest.raises(ValueError, match=r"state: expected 0.2 for 'scale' of stage 0, .* got 0.7; set it in the mod"):
        pipeline.step(params, *data, of_checkpoint)


class Corrected(nnx.Module):
    """Counts its calls in training, and multiplies its output by the count in evaluation."""

    def __init__(self) -> None:
        self.weight = nnx.Param(jnp.eye(3))
        self.count = nnx.Variable(0)
        self.deterministic = False

    def __call__(self, x):
        count = self.count.get_value()
        if self.deterministic:
            return x @ self.weight[...] * count
        self.count.set_value(count + 1)
        return x @ self.weight[...]


def test_a_number_that_training_changes_and_evaluation_reads_is_that_of_the_state():
    modules = [Corrected(), Corrected()]
    pipeline, (_, _, state) = step(modules)
    for module in modules:
        module.eval()
    params, data = pipeline.stage_parameters(), split_batch(X, M)
    for given in (state, jax.tree.map(jnp.copy, state)):
        with pytest.raises(ValueError, match=rf"state: expected 0 for 'count' of stage 0, .* got {M}; set it in the"):
            pipeline.forward(params, data, given)
    pipeline.update_modules(state=state)
    assert_equal(pipeline.forward(params, data, state), M * M * data)


class Returning(Numbers):
    """The same with an array as its output."""

    def __call__(self, x):
        return super().__call__(x)["x"]


class Once(Returning):
    """A number that decides a branch and changes."""

    def __call__(self, x):
        if self.is_on.get_value():
            self.is_on.set_value(False)
        return x


def test_a_number_that_decides_and_changes_is_refused():
    with pytest.raises(ValueError, match=r"stages: expected numbers .* got 'is_on' of Once"):
        step([Once(dtype=float), Once(dtype=float)])


@dataclass
class Shifted:
    """A function with an array."""

    shift: jax.Array

    def __call__(self, params, x):
        return jnp.tanh(x @ params["w"] + self.shift)


def test_functions_that_hold_arrays():
    parameters = [{"w": np.eye(3)}, {"w": np.eye(3)}]
    stages = [Shifted(jnp.ones(3)), Shifted(-jnp.ones(3))]
    losses = step(stages, parameters=parameters)[1][0]
    expected = [square(jnp.tanh(jnp.tanh(x + 1) - 1), 2 * x) for x in split_batch(X, M)]
    assert_equal(losses, jnp.stack(expected))


def test_booleans_in_outputs_stay_booleans():
    stages = [lambda params, x: x * params["w"], lambda params, x: {"y": x * params["w"], "is_positive": x > 0}]
    parameters = [{"w": np.ones(1)}, {"w": np.ones(1)}]
    pipeline = PipelineExecutor(stages, "1f1b", M, parameters=parameters, mesh=mesh_of(pp=2))
    outputs = pipeline.forward(pipeline.stage_parameters(parameters), split_batch(X, M))
    assert outputs["is_positive"].dtype == bool
    assert np.array_equal(outputs["is_positive"], split_batch(X, M) > 0)
