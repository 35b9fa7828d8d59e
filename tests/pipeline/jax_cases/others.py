"""Pipelines of modules that this project did not write, over two and four devices."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from jax_impl.pipeline import PipelineExecutor, split_batch
from tests.pipeline.jax_cases.support import devices
from tests.recompute.test_recompute_modules_jax import Attention

pytestmark = pytest.mark.slow

WIDTH = 8
M = 4
BATCH, TARGET = np.random.default_rng(1).standard_normal((2, 8, 5, WIDTH))
SCHEDULES = {2: ("1f1b", "interleaved", "zb-v"), 4: ("1f1b", "zb-h1")}
"""Schedules by the number of devices. There are four layers, so that two devices have two stages each or one of two."""


def loss(y: jax.Array, target: jax.Array) -> jax.Array:
    return jnp.mean(jnp.sin(y) * target)


class Pair(nnx.Module):
    """Two layers in one stage."""

    def __init__(self, first: nnx.Module, second: nnx.Module) -> None:
        self.first, self.second = first, second

    def __call__(self, x):
        return self.second(self.first(x))


def of_flax(stages: int) -> tuple[list, None, Callable[[], Any]]:
    """Layers of flax's own modules."""
    rngs = nnx.Rngs(0)
    layers: list[Any] = [Attention(WIDTH, rngs) for _ in range(4)]
    if stages == 2:
        layers = [Pair(*layers[:2]), Pair(*layers[2:])]
    graph, params, rest = nnx.split(layers, nnx.Param, ...)

    def unsharded() -> Any:
        def run(params):
            y = BATCH
            for layer in nnx.merge(graph, params, rest):
                y = layer(y)
            return loss(y, TARGET)

        return jax.value_and_grad(run)(params)

    return layers, None, unsharded


def of_equinox(stages: int) -> tuple[list, list, Callable[[], Any]]:
    """Layers of equinox, as functions of their arrays."""
    eqx = pytest.importorskip("equinox")
    from tests.everywhere.test_equinox import blocks

    layers = blocks(4)
    arrays, rest = eqx.partition([layers[i : i + 4 // stages] for i in range(0, 4, 4 // stages)], eqx.is_array)

    def stage(others):
        def run(own, x):
            for layer in eqx.combine(own, others):
                x = jax.vmap(layer)(x)
            return x

        return run

    functions = [stage(others) for others in rest]

    def unsharded() -> Any:
        def run(arrays):
            y = BATCH
            for function, own in zip(functions, arrays, strict=True):
                y = function(own, y)
            return loss(y, TARGET)

        return jax.value_and_grad(run)(arrays)

    return functions, arrays, unsharded


@pytest.mark.parametrize(
    ("pp", "schedule"), [(pp, schedule) for pp, schedules in SCHEDULES.items() for schedule in schedules]
)
@pytest.mark.parametrize("make", [of_flax, of_equinox])
def test_layers_of_others(make, pp, schedule):
    stages, parameters, unsharded = make(2 if (pp, schedule) == (2, "1f1b") else 4)
    given = {} if parameters is None else {"parameters": parameters}
    mesh = Mesh(devices(pp), ("pp",))
    pipeline = PipelineExecutor(stages, schedule, M, loss, mesh=mesh, **given)
    staged = pipeline.stage_parameters(*([] if parameters is None else [parameters]))
    losses, gradients = pipeline.step(staged, split_batch(BATCH, M), split_batch(TARGET, M))[:2]
    expected, expected_gradients = unsharded()
    np.testing.assert_allclose(losses.mean(), expected, rtol=1e-12)
    found = jax.tree.leaves(pipeline.join_parameters(gradients))
    for ours, theirs in zip(found, jax.tree.leaves(expected_gradients), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-11, atol=1e-13)
