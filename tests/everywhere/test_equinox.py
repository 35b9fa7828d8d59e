"""The techniques and the comparison on modules of equinox: pytrees that also hold functions and numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from torch import nn

from jax_impl.offload import offload_modules
from jax_impl.pipeline import PipelineExecutor, split_batch
from jax_impl.recompute import recompute_modules
from parity import compare_modules
from tests.recompute.test_recompute_modules_jax import saved_bytes

eqx = pytest.importorskip("equinox")
pytestmark = pytest.mark.slow

WIDTH = 8
MICROBATCHES = 4


class Block(eqx.Module):
    """A transformer block of one sequence."""

    norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, key: jax.Array) -> None:
        first, second = jax.random.split(key)
        self.norm = eqx.nn.LayerNorm(WIDTH, dtype=jnp.float64)
        self.attention = eqx.nn.MultiheadAttention(2, WIDTH, key=first, dtype=jnp.float64)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, jax.nn.gelu, key=second, dtype=jnp.float64)

    def __call__(self, x):
        h = checkpoint_name(jax.vmap(self.norm)(x), "norm")
        x = x + self.attention(h, h, h)
        return x + jax.vmap(self.mlp)(x)


def blocks(count: int) -> list[Block]:
    return [Block(key) for key in jax.random.split(jax.random.key(0), count)]


def batch(size: int = 3) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((size, 5, WIDTH))


def loss(block: Block, x):
    return jnp.sin(jax.vmap(block)(x)).sum()


def assert_close(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13), found, expected)


@pytest.mark.parametrize("jit", [lambda f: f, eqx.filter_jit], ids=["eager", "filter_jit"])
def test_recompute_of_named_values(jit):
    (block,) = blocks(1)
    other = recompute_modules(loss, ["norm"])
    found, expected = (jit(eqx.filter_value_and_grad(f))(block, batch()) for f in (other, loss))
    assert_close(found, expected)
    arrays, rest = eqx.partition(block, eqx.is_array)
    saved = [saved_bytes(lambda arrays, f=f: f(eqx.combine(arrays, rest), batch()), arrays) for f in (other, loss)]
    values = batch().size * 8  # bytes of one value of the width
    assert saved[0] <= saved[1] - values


def test_pipelines_of_partitioned_modules():
    arrays, rest = eqx.partition(blocks(4), eqx.is_array)
    stages = [lambda own, x, rest=each: jax.vmap(eqx.combine(own, rest))(x) for each in rest]
    x, target = (split_batch(values, MICROBATCHES) for values in (batch(8), 2 * batch(8)))
    mesh = Mesh(jax.devices()[:1], ("pp",))
    settings = {"loss_fn": lambda y, t: jnp.mean((y - t) ** 2), "mesh": mesh}
    pipeline = PipelineExecutor(stages, "interleaved", MICROBATCHES, parameters=arrays, **settings)
    losses, gradients = pipeline.step(pipeline.stage_parameters(arrays), x, target)

    def unsharded(arrays):
        y = batch(8)
        for block in eqx.combine(arrays, rest):
            y = jax.vmap(block)(y)
        return jnp.mean((y - 2 * batch(8)) ** 2)

    assert_close((losses.mean(), pipeline.join_parameters(gradients)), jax.value_and_grad(unsharded)(arrays))
    with pytest.raises(ValueError, match=r"floating-point arrays, got float for 'attention\.dropout\.p' of stage 0"):
        PipelineExecutor(stages, "interleaved", MICROBATCHES, parameters=blocks(4), **settings)


def test_offload_takes_nnx_modules_alone():
    with pytest.raises(TypeError, match=r"model: expected an nnx\.Module, got Block"):
        offload_modules(blocks(1)[0], ["mlp"])


def test_layers_equal_those_of_pytorch():
    torch.manual_seed(0)
    theirs = nn.Sequential(nn.Linear(WIDTH, 6), nn.GELU(approximate="tanh"), nn.Linear(6, 3)).double()
    ours = eqx.nn.MLP(WIDTH, 3, 6, 1, jax.nn.gelu, key=jax.random.key(0), dtype=jnp.float64)
    names = {"0.*": "layers.0.*", "2.*": "layers.1.*"}
    compare_modules(theirs, ours, [batch()[0, 0]], names=names).check()
    wrong = eqx.nn.MLP(WIDTH, 3, 6, 1, jax.nn.relu, key=jax.random.key(0), dtype=jnp.float64)
    with pytest.raises(AssertionError):
        compare_modules(theirs, wrong, [batch()[0, 0]], names=names).check()
