"""The first submodule in which two models differ: bugs are put into one submodule, and have to be found there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen, nnx
from torch import nn

from parity import DifferenceError, locate
from tests.parity.pairs import JaxBlock, JaxModel, TorchModel, stacked_model

TOKENS = np.random.default_rng(0).integers(0, 11, (2, 7))
WIDTH = 8


def models(block=None):
    torch.manual_seed(0)
    model = JaxModel(WIDTH, 3, nnx.Rngs(0))
    if block is not None:
        model.blocks[1] = block(WIDTH, nnx.Rngs(1))
    return TorchModel(WIDTH, 3), model


class Epsilon(JaxBlock):
    def __init__(self, width, rngs):
        super().__init__(width, rngs)
        self.norm.epsilon = 1e-3


class Activation(JaxBlock):
    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x)), approximate=False))


class Scale(JaxBlock):
    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x)))) * (1 + 1e-12)


class Stopped(JaxBlock):
    def __call__(self, x):
        return jax.lax.stop_gradient(x) + self.down(nnx.gelu(self.up(self.norm(x))))


class StoppedInput(JaxBlock):
    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(jax.lax.stop_gradient(x)))))


class NoGradientOfNorm(nnx.LayerNorm):
    def __call__(self, x):
        return jax.lax.stop_gradient(super().__call__(x))


class StoppedNorm(JaxBlock):
    def __init__(self, width, rngs):
        super().__init__(width, rngs)
        self.norm = NoGradientOfNorm(width, epsilon=1e-5, rngs=rngs)


class Narrow(JaxBlock):
    def __init__(self, width, rngs):
        super().__init__(width, rngs)
        self.up = nnx.Linear(width, 4 * width, dtype=jnp.bfloat16, rngs=rngs)


BUGS = {
    "epsilon": (Epsilon, "blocks.1.norm", "forward", None),
    "activation": (Activation, "blocks.1", "forward", ("blocks.1.up", "blocks.1.down")),
    "scale of the branch": (Scale, "blocks.1", "forward", ("blocks.1.down", "the outputs")),
    "gradient of the residual": (Stopped, "blocks.1", "backward", ("blocks.1.norm", "the inputs")),
    "gradient of the branch's input": (StoppedInput, "blocks.1", "backward", ("blocks.1.norm", "the inputs")),
    "gradient of the norm": (StoppedNorm, "blocks.1.norm", "backward", None),
    "a layer in bfloat16": (Narrow, "blocks.1.up", "forward", None),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_found_where_it_is(name):
    block, path, direction, between = BUGS[name]
    found = locate(*models(block), [TOKENS])
    assert (found.point.path, found.direction, found.between) == (path, direction, between)
    assert not found.local.is_equal
    assert str(found).splitlines()[-1].startswith(f"first difference: {path} ({direction})")
    with pytest.raises(DifferenceError, match=f"first difference: {path}"):
        found.check()


def test_equal_models_are_equal():
    found = locate(*models(), [TOKENS])
    found.check()
    assert found.is_equal
    assert {entry.point.path for entry in found.points} >= {"", "emb", "out", "blocks.2.down"}
    assert not any(entry.forward_differs or entry.backward_differs for entry in found.points)
    assert "equal: no difference beyond rounding in 22 results and at 15 points" in str(found)


class LinenBlock(linen.Module):
    width: int
    epsilon: float = 1e-5

    @linen.compact
    def __call__(self, x):
        hidden = linen.Dense(4 * self.width, name="up")(linen.LayerNorm(epsilon=self.epsilon, name="norm")(x))
        return x + linen.Dense(self.width, name="down")(linen.gelu(hidden))


class LinenModel(linen.Module):
    width: int
    wrong: int = -1

    @linen.compact
    def __call__(self, tokens):
        x = linen.Embed(11, self.width, name="emb")(tokens)
        for number in range(3):
            x = LinenBlock(self.width, 1e-4 if number == self.wrong else 1e-5, name=f"blocks_{number}")(x)
        return linen.Dense(11, name="out")(x)


@pytest.mark.parametrize("wrong", [-1, 2])
def test_linen_models(wrong):
    torch.manual_seed(0)
    model = LinenModel(WIDTH, wrong)
    found = locate(TorchModel(WIDTH, 3), (model, model.init(jax.random.key(0), TOKENS)), [TOKENS])
    assert (found.point and found.point.path) == (None if wrong < 0 else "blocks.2.norm")


class TorchTwice(nn.Module):
    """A layer that is called twice."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(torch.tanh(self.layer(x)))


class JaxTwice(nnx.Module):
    def __init__(self, factor=1.0):
        self.layer, self.factor = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), factor

    def __call__(self, x):
        return self.layer(jnp.tanh(self.layer(x)) * self.factor)


def test_a_submodule_called_twice():
    x = np.random.default_rng(1).standard_normal((3, 4))
    assert locate(TorchTwice(), JaxTwice(), [x]).is_equal
    found = locate(TorchTwice(), JaxTwice(1.01), [x])
    assert found.point.path == ""
    assert found.between == ("layer", "layer (call 2)")


def test_what_cannot_be_recorded_is_refused_by_name():
    first, _ = models()
    with pytest.raises(ValueError, match=r"expected an nnx.Module or .* compare them with compare_functions"):
        locate(first, stacked_model(WIDTH), [TOKENS])
    with pytest.raises(ValueError, match=r"expected a module that is not compiled, got one; pass module\._orig_mod"):
        locate(torch.compile(first, backend="eager"), JaxModel(WIDTH, 3, nnx.Rngs(0)), [TOKENS])


def test_a_recording_leaves_both_models_as_they_were():
    first, second = models()
    call, hooks = JaxBlock.__call__, [len(m._forward_hooks) for m in first.modules()]
    locate(first, second, [TOKENS])
    assert JaxBlock.__call__ is call
    assert [len(m._forward_hooks) for m in first.modules()] == hooks
