"""Correct pairs that compute in a narrower dtype inside, or round before a decision, and names that belong together."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen, nnx
from torch import nn

from parity import compare_functions, compare_modules, suggest_names
from parity.rounding import DIFFERENT
from parity.testing import normal

EXACT = {"dtypes": ["float64"]}


def test_indices_of_rounded_scores():
    inputs = {"x": normal((512, 16)), "w": normal((16, 8), 1)}

    def torch_router(x, w):
        gate, index = (x @ w).softmax(-1).topk(2, -1)
        return {"gate": gate, "index": index}

    def jax_router(x, w, shift=0):
        gate, index = jax.lax.top_k(jax.nn.softmax(x @ w, -1), 2)
        return {"gate": gate, "index": index.at[:3].add(shift)}

    compare_functions(torch_router, jax_router, inputs).check()
    wrong = compare_functions(torch_router, lambda x, w: jax_router(x, w, 1), inputs)
    assert ("index", "float64") in {(row.name, row.dtype) for row in wrong.different}


def test_a_threshold_of_rounded_values():
    def in_halves(x):
        return x.reshape(-1, 2, 32).sum(1).sum(-1) > 0

    compare_functions(lambda x: x.sum(-1) > 0, in_halves, [normal((999, 64))]).check()
    wrong = compare_functions(lambda x: x.sum(-1) > 0, lambda x: in_halves(x - 0.01), [normal((999, 64))])
    assert {row.dtype for row in wrong.different} == {"float64", "float32", "bfloat16"}


NARROW = {"float16": (torch.float16, jnp.float16), "bfloat16": (torch.bfloat16, jnp.bfloat16)}


@pytest.mark.parametrize("dtype", NARROW)
def test_products_in_a_narrow_dtype_inside_both(dtype):
    ours, theirs = NARROW[dtype]

    def torch_product(x, w):
        return (x.to(ours) @ w.to(ours)).to(x.dtype)

    def jax_product(x, w):
        return (x.astype(theirs) @ w.astype(theirs)).astype(x.dtype)

    inputs = [normal((4, 64)), normal((64, 3), 1)]
    report = compare_functions(torch_product, jax_product, inputs)
    report.check()
    assert f"Both compute in a narrower dtype inside (PyTorch: {dtype} at test_false_alarms.py:" in report.notes[0]
    one = compare_functions(torch_product, lambda x, w: x @ w, inputs, **EXACT)
    assert not one.is_equal
    assert f"PyTorch computes in a narrower dtype inside ({dtype}" in one.notes[0]


def test_complex64_inside_both():
    c = np.exp(1j * np.arange(4)).astype(np.complex64)

    def torch_turn(x):
        z = torch.complex(x, x).to(torch.complex64) * torch.from_numpy(c)
        return torch.view_as_real(z).to(x.dtype)

    def jax_turn(x):
        z = jax.lax.complex(x, x).astype(jnp.complex64) * c
        return jnp.stack([z.real, z.imag], -1).astype(x.dtype)

    report = compare_functions(torch_turn, jax_turn, [normal((5, 4))], dtypes=["float64", "float32"])
    report.check()
    assert "PyTorch: float32" in report.notes[0]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(8, 16, bias=False) for _ in range(3))
        self.to_out = nn.Linear(16, 8, bias=False)

    def forward(self, x):
        q, k, v = self.to_q(x), self.to_k(x), self.to_v(x)
        return self.to_out((q @ k.mT / 4).softmax(-1) @ v)


def jax_attention(p, x):
    q, k, v = x @ p["wq"], x @ p["wk"], x @ p["wv"]
    return (jax.nn.softmax(q @ k.swapaxes(-1, -2) / 4, -1) @ v) @ p["wo"]


def test_names_of_roles_in_attention():
    shapes = {"wq": (8, 16), "wk": (8, 16), "wv": (8, 16), "wo": (16, 8)}
    pair = Attention(), (jax_attention, {name: jnp.ones(shape) for name, shape in shapes.items()})
    found = suggest_names(*pair)
    assert {source: rule["to"] for source, rule in found.items()} == {
        "to_q.weight": "wq",
        "to_k.weight": "wk",
        "to_v.weight": "wv",
        "to_out.weight": "wo",
    }
    assert not found.ambiguous
    compare_modules(*pair, [normal((2, 5, 8))], **EXACT).check()


class Three(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.gate = (nn.Linear(6, 5, bias=False) for _ in range(3))

    def forward(self, x):
        return self.up(x) + self.down(x) * self.gate(x).tanh()


def test_what_only_the_place_decides_is_ambiguous():
    tree = {name: jnp.ones((6, 5)) for name in ("first", "second", "third")}
    pair = Three(), (lambda p, x: x @ p["third"] + x @ p["second"] * jnp.tanh(x @ p["first"]), tree)
    assert set(suggest_names(*pair).ambiguous) == {"up.weight", "down.weight", "gate.weight"}


class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]))

    def forward(self, x):
        return self.linear(x - self.mean)


class JaxNormalised(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(3, 4, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.linear(x - jnp.array([0.485, 0.456, 0.406]))


def test_a_buffer_that_float32_has_rounded_is_named():
    report = compare_modules(Normalised(), JaxNormalised(), [normal((4, 3))], ignore=["mean"])
    assert {row.dtype for row in report.different} == {"float64"}
    assert "without a counterpart: mean of PyTorch. A constant in float64 on the other side" in report.notes[-1]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_linen_layers_with_an_explicit_dtype(dtype):
    layer = linen.Dense(3, dtype=dtype, param_dtype=dtype)
    variables = layer.init(jax.random.key(0), jnp.ones((4, 8)))
    torch.manual_seed(0)
    compare_modules(nn.Linear(8, 3), (layer, variables), [normal((4, 8))]).check()
    narrow = linen.Dense(3, dtype=jnp.bfloat16)
    report = compare_modules(nn.Linear(8, 3), (narrow, variables), [normal((4, 8))], **EXACT)
    assert report.is_equal == (dtype == jnp.bfloat16)  # what the parameters are is no decision of the layer


@pytest.mark.filterwarnings("ignore")  # torch.jit.script is deprecated
def test_scripted_modules():
    pair = torch.jit.script(nn.Linear(8, 3)), nnx.Linear(8, 3, rngs=nnx.Rngs(0))
    compare_modules(*pair, [normal((4, 8))]).check()


def test_verdicts_on_shares_of_integers():
    from parity.rounding import judge

    first = np.arange(100)
    second = first + (first < 4)
    assert judge(first, second, 1.0, "bfloat16").verdict == DIFFERENT
    assert judge(first, second, 2.0, "bfloat16").verdict != DIFFERENT
