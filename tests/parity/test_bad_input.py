"""Input that is refused by name, with a remedy, and models that other tools cannot run."""

import collections
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flax import linen, nnx
from torch import nn

from parity import compare_functions, compare_modules, compare_training, locate
from parity.testing import assert_equivalent, normal

X = normal((4, 8))
EXACT = {"dtypes": ["float64"]}


def linear():
    return nn.Linear(8, 3), nnx.Linear(8, 3, rngs=nnx.Rngs(0))


class Counter:
    def __init__(self):
        self.count = 0

    def __call__(self, x):
        self.count += 1
        return x * self.count


REFUSED = {
    "numpy from torch": (
        lambda x: x.detach().numpy(),
        jnp.tanh,
        {},
        "output 'output': expected a tensor, got numpy.ndar",
    ),
    "sparse": (
        lambda x: x.to_sparse(),
        jnp.tanh,
        {},
        "expected a dense tensor, got the layout torch.sparse_coo; return",
    ),
    "text": (torch.tanh, jnp.tanh, {"inputs": [np.array(["a"])]}, "input '0': expected an array of numbers"),
    "objects": (torch.tanh, jnp.tanh, {"inputs": [np.array([None])]}, "input '0': expected an array of numbers"),
    "masked": (
        torch.tanh,
        jnp.tanh,
        {"inputs": [np.ma.array(X, mask=X > 0)]},
        "input '0': expected a plain array, got",
    ),
    "seed": (torch.tanh, jnp.tanh, {"seed": -1}, "seed: expected an integer of at least 0, got -1"),
    "dtype": (torch.tanh, jnp.tanh, {"dtypes": [np.float16]}, "dtypes: expected some of float64, .*, got float16"),
    "class": (nn.GELU, jax.nn.gelu, {}, "PyTorch side: expected a function or an nn.Module .* got the class GELU"),
    "class in JAX": (torch.tanh, nnx.Linear, {}, "expected a function or an instance of Linear, got the class"),
    "name": ("tanh", jnp.tanh, {}, "PyTorch side: expected a function or an nn.Module that is created, got 'tanh'"),
    "static": (torch.tanh, jnp.tanh, {"static": ["x"]}, "static: expected a mapping of keyword arguments, got list"),
    "frozen": (lambda x: x, Counter(), {}, "JAX: expected equal programs each time the function is traced"),
    "condition": (torch.tanh, lambda x: x if x.sum() > 0 else -x, {}, "that jax.jit can trace, got: .*use jnp.where"),
    "mask": (torch.tanh, lambda x: x[x > 0], {}, "expected a function that jax.jit can trace"),
    "forbidden gradient": (
        lambda x, w: F.cross_entropy(x, torch.tensor([0, 1, 2, 3]), weight=w),
        lambda x, w: x.sum(),
        {"inputs": [X, np.abs(X[0])]},
        "PyTorch: expected operations that are differentiable in all floating inputs",
    ),
    "no kernel": (
        torch.fft.rfft,
        jnp.fft.rfft,
        {"dtypes": ["bfloat16"]},
        "PyTorch: expected operations that exist in bf",
    ),
    "parameters alone": (
        torch.tanh,
        (linen.Dense(3), {"kernel": jnp.ones((8, 3))}),
        {},
        "expected .linen module, variables. with variables as module.init returns them",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_functions_and_inputs(name):
    first, second, call, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        compare_functions(first, second, **{"inputs": [X], **call})


def test_an_error_inside_a_function_stays_what_it_is():
    def wrong(x):
        return x * torch.sqrt(2.0)  # pyright: ignore[reportArgumentType]

    with pytest.raises(TypeError, match="argument 'input'") as caught:
        compare_functions(wrong, jnp.tanh, [X])
    assert "raised by the PyTorch function wrong" in caught.value.__notes__


def test_arguments_by_name_have_another_remedy_than_by_position():
    with pytest.raises(ValueError, match="pass as many inputs as the function has arguments"):
        compare_functions(torch.tanh, lambda x, y: x, [X])


@pytest.mark.parametrize("dtypes", [np.float64, [np.float32], [torch.float32], "float64", [jnp.bfloat16], ["float64"]])
def test_dtypes_of_every_library(dtypes):
    compare_functions(torch.tanh, jnp.tanh, [X], dtypes=dtypes).check()


def test_integers_in_another_byte_order():
    compare_functions(lambda i: i + 1, lambda i: i + 1, [np.arange(3, dtype=">i4")]).check()


def test_modules_and_settings():
    with pytest.raises(ValueError, match="names: expected a mapping of PyTorch's names to those of JAX, got list"):
        compare_modules(*linear(), [X], names=["weight"])
    without = nn.Linear(8, 3), nnx.Linear(8, 3, use_bias=False, rngs=nnx.Rngs(0))
    names = {"weight": {"to": "kernel", "transpose": True}}
    assert not compare_modules(*without, [X], names=names, ignore="bias", **EXACT).is_equal
    with pytest.raises(ValueError, match="modules: expected a submodule of PyTorch, got 'nosuch', which is none; sim"):
        locate(*linear(), [X], modules={"nosuch": "neither"})
    with pytest.raises(ValueError, match="memory_limit: expected a number of bytes of at least 0, got -1"):
        locate(*linear(), [X], memory_limit=-1)


def test_batches_from_a_generator():
    batches = (([normal((4, 8), n)], normal((4, 3), n)) for n in range(2))
    losses = F.mse_loss, lambda y, target: ((y - target) ** 2).mean()
    import optax

    optimizers = (lambda p: torch.optim.SGD(p, 0.1)), optax.sgd(0.1)
    compare_training(*linear(), batches, losses=losses, optimizers=optimizers).check()
    with pytest.raises(ValueError, match="batches: expected a sequence"):
        compare_training(*linear(), 3, losses=losses, optimizers=optimizers)  # pyright: ignore[reportArgumentType]


class WithArray(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(8, 3, rngs=nnx.Rngs(0))
        self.position = jnp.arange(8.0)

    def __call__(self, x):
        return self.linear(x + self.position)


class WithoutBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 3)

    def forward(self, x):
        return self.linear(x + torch.arange(8, dtype=x.dtype))


def test_plain_arrays_of_nnx_modules_need_no_counterpart():
    compare_modules(WithoutBuffer(), WithArray(), [X]).check()
    assert locate(WithoutBuffer(), WithArray(), [X]).is_equal


class Frozen(nnx.Module):
    def __init__(self):
        self.weight = nnx.Variable(jnp.ones((3, 8)))
        self.bias = nnx.Param(jnp.ones(3))

    def __call__(self, x):
        return x @ self.weight[...].T + self.bias[...]


def test_a_parameter_that_one_side_does_not_train():
    report = compare_modules(nn.Linear(8, 3), Frozen(), [X], **EXACT)
    report.check()
    assert "Only PyTorch trains weight: its gradient is not compared." in report.notes[0]


class ModelOutput(collections.OrderedDict):
    def __getattr__(self, key):
        try:
            return self[key]
        except KeyError:
            raise AttributeError(key) from None


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        hidden = self.linear(x)
        return ModelOutput(last=hidden, pooled=hidden.tanh())


class TorchOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = Encoder(), nn.Linear(8, 3)

    def forward(self, x):
        found = self.encoder(x)
        return self.head(found.pooled + found.last)


class JaxEncoder(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

    def __call__(self, x):
        hidden = self.linear(x)
        return ModelOutput(last=hidden, pooled=jnp.tanh(hidden))


class JaxOutputs(nnx.Module):
    def __init__(self, factor):
        self.encoder, self.head = JaxEncoder(), nnx.Linear(8, 3, rngs=nnx.Rngs(0))
        self.factor = factor

    def __call__(self, x):
        found = self.encoder(x)
        return self.head(found.pooled * self.factor + found.last)


def test_outputs_with_attributes_are_located():
    assert locate(TorchOutputs(), JaxOutputs(1.0), [X]).is_equal
    found = locate(TorchOutputs(), JaxOutputs(0.9), [X])
    assert (found.point.path, found.between) == ("", ("encoder", "head"))
    assert "output 'output'" in found.summary


def test_gradients_inside_forward():
    def force(x):
        return torch.autograd.grad(x.pow(4).sum(), x, create_graph=True)[0]

    compare_functions(force, jax.grad(lambda x: (x**4).sum()), [X]).check()


def torch_double(x):
    return 2.0 * x


def jax_triple(x):
    return 3.0 * x


@pytest.mark.parametrize("size", [2, 100])
def test_the_lines_that_reproduce_a_failure_run(size):
    with pytest.raises(AssertionError) as caught:
        assert_equivalent(torch_double, jax_triple, {"x": normal((size,))})
    lines = str(caught.value).partition("To reproduce:\n")[2].splitlines()
    program = "\n".join(line.removeprefix("    ") for line in lines)
    scope: dict = {}
    exec(program, scope)
    assert not scope["report"].is_equal


def test_lines_about_a_lambda_say_where_it_is():
    with pytest.raises(AssertionError, match=r"# jax_side is .*<lambda> of .*test_bad_input.py:\d+, which no import"):
        assert_equivalent(torch.tanh, lambda x: jnp.sin(x), [X])


def test_the_command_names_an_error_of_the_user(tmp_path):
    side = tmp_path / "sides.py"
    side.write_text("def torch_side():\n    return {}['missing']\n\n\ndef jax_side():\n    return None\n")
    command = [sys.executable, "-m", "parity.cli", "locate", f"{side}:torch_side", f"{side}:jax_side"]
    done = subprocess.run([*command, "--output-dir", str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 2, done.stderr
    assert "got KeyError at sides.py:2: 'missing'" in done.stderr
    assert "Traceback" not in done.stderr
