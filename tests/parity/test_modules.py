"""Modules of a user in both frameworks: names of parameters, their transforms, and gradients."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen, nnx
from torch import nn

from parity import compare_modules, suggest_names
from parity.suggestions import propose_names
from parity.testing import DIFFICULT, assert_equivalent, drawn_sizes, normal, shapes
from tests.parity.pairs import JaxModel, TorchModel, stacked_model

TOKENS = np.random.default_rng(0).integers(0, 11, (2, 7))
EXACT = {"dtypes": ["float64"]}


def models(width=16, layers=3):
    torch.manual_seed(0)
    return TorchModel(width, layers), JaxModel(width, layers, nnx.Rngs(0))


def test_modules_without_a_mapping_in_five_lines():
    first, second = models()
    before = [p.clone() for p in first.parameters()]
    report = compare_modules(first, second, [TOKENS])
    report.check()
    assert len(report.rows) == 3 * (1 + len(before))
    assert all(torch.equal(a, b) for a, b in zip(before, first.parameters(), strict=True))
    assert {row.kind for row in report.rows} == {"output", "parameter gradient"}


def test_a_suggestion_prints_and_becomes_toml():
    import tomllib

    found = suggest_names(*models())
    assert not found.ambiguous
    assert found["blocks.1.up.weight"] == {"to": "blocks.1.up.kernel", "transpose": True}
    assert tomllib.loads(found.to_toml()) == dict(found)
    assert re.search(r"out\.weight +out\.kernel +transpose True", str(found))


def test_layers_stacked_for_a_scan():
    first, _ = models()
    found = suggest_names(first, stacked_model())
    assert found["blocks.*.up.weight"] == {"to": "blocks.up.kernel", "transpose": True, "stack": 0}
    compare_modules(first, stacked_model(), [TOKENS], **EXACT).check()


class TorchSquare(nn.Module):
    """Square matrices whose layout no shape tells."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.mix = nn.Parameter(torch.randn(6, 6))

    def forward(self, x):
        return torch.tanh(x @ self.weight.T) @ self.mix


def jax_square(p, x):
    return jnp.tanh(x @ p["weight"]) @ p["mix"]


def test_values_decide_where_shapes_do_not():
    torch.manual_seed(1)
    pair = TorchSquare(), (jax_square, {"weight": jnp.ones((6, 6)), "mix": jnp.ones((6, 6))})
    assert set(suggest_names(*pair).ambiguous) == {"weight", "mix"}
    x = normal((3, 6))
    found = suggest_names(*pair, [x])
    assert dict(found) == {"weight": {"to": "weight", "transpose": True}, "mix": "mix"}
    compare_modules(*pair, [x]).check()


class Fused(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.out = nn.Linear(4, 6)

    def forward(self, x):
        return self.out(self.q(x) * self.k(x) + self.v(x))


def jax_fused(p, x):
    q, k, v = jnp.split(x @ p["qkv"], 3, -1)
    hidden = q * k + v
    return jnp.concatenate([hidden @ p["left"].reshape(4, 3), hidden @ p["right"].reshape(4, 3)], -1) + p["bias"]


def fused(left=(2, 2, 3)):
    shapes = {"qkv": (4, 12), "left": left, "right": (2, 2, 3), "bias": (6,)}
    return Fused(), (jax_fused, {name: jnp.zeros(shape) for name, shape in shapes.items()})


FUSED = {
    "{q,k,v}.weight": {"to": "qkv", "join": 0, "transpose": True},
    "out.weight": {"to": ["left", "right"], "transpose": True, "split": 1, "reshape": [2, 2, 3]},
    "out.bias": "bias",
}


def test_join_split_and_reshape():
    torch.manual_seed(2)
    report = compare_modules(*fused(), [normal((5, 4))], names=FUSED)
    report.check()
    assert {row.name for row in report.rows} == {"output", "0", "qkv", "left", "right", "bias"}


REFUSED = {
    "unknown": ({**FUSED, "ou.bias": "bias"}, "got 'ou.bias', which is none; similar names: out.bias"),
    "unknown in JAX": ({**FUSED, "out.bias": "bia"}, "expected a parameter of the JAX module, got 'bia', which is no"),
    "transposed": ({**FUSED, "{q,k,v}.weight": {"to": "qkv", "join": 0}}, "got 12x4 from .*; add 'transpose': True"),
    "missing": ({"out.bias": "bias"}, "got none for q.weight, k.weight, v.weight, out.weight of PyTorch; add them"),
    "twice": ({**FUSED, "q.weight": "qkv"}, r"expected the shapes 4x12 of qkv in JAX, got 4x4"),
    "key": ({**FUSED, "out.bias": {"name": "bias"}}, r"expected the keys to, join, transpose, .*, with 'to', got name"),
    "axes": ({**FUSED, "out.bias": {"to": "bias", "transpose": [1, 0]}}, "the transforms do not fit the shapes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_names_are_refused_with_a_remedy(name):
    names, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        compare_modules(*fused(), [normal((5, 4))], names=names)


def test_a_layout_that_is_wrong_in_values_only():
    torch.manual_seed(3)
    pair = TorchSquare(), (jax_square, {"weight": jnp.ones((6, 6)), "mix": jnp.ones((6, 6))})
    report = compare_modules(*pair, [normal((3, 6))], names={"weight": "weight", "mix": "mix"})
    assert {row.dtype for row in report.different} == {"float64", "float32", "bfloat16"}


def test_buffers_are_copied_and_statistics_compared():
    first, second = nn.BatchNorm1d(5).eval(), nnx.BatchNorm(5, use_running_average=True, epsilon=1e-5, rngs=nnx.Rngs(0))
    first.running_mean.normal_()
    first.running_var.uniform_(0.5, 2.0)
    names = {"weight": "scale", "running_mean": "mean", "running_var": "var"}
    compare_modules(first, second, [normal((8, 5))], names=names).check()
    stale = nnx.BatchNorm(5, use_running_average=True, epsilon=1e-5, rngs=nnx.Rngs(0))
    report = compare_modules(
        first, stale, [normal((8, 5))], names={"weight": "scale"}, ignore=["running_*", "mean", "var"]
    )
    assert not report.is_equal


def test_dropout_is_reported():
    with pytest.raises(ValueError, match=r"PyTorch: expected equal results of two runs .* turn off dropout"):
        compare_modules(
            nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)),
            nnx.Linear(4, 4, rngs=nnx.Rngs(0)),
            [normal((2, 4))],
            names={"0.weight": {"to": "kernel", "transpose": True}, "0.bias": "bias"},
        )


def test_a_square_layer_needs_no_mapping_even_if_a_bug_hides_the_right_one():
    second = nnx.Linear(6, 6, use_bias=False, rngs=nnx.Rngs(0))
    report = compare_modules(nn.Linear(6, 6, bias=False), (lambda m, x: m(x) * 1.5, second), [normal((2, 6))])
    assert not report.is_equal


def test_a_layer_in_bfloat16_inside_a_float32_model_is_found():
    first = nn.Linear(6, 6)
    second = nnx.Linear(6, 6, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    report = compare_modules(first, second, [normal((2, 6))], dtypes=["float32"])
    assert not report.is_equal
    exact = compare_modules(first, second, [normal((2, 6))], **EXACT)
    assert "JAX computes in a narrower dtype inside (bfloat16" in exact.notes[0]


def test_linen_convolution_with_channels_last():
    torch.manual_seed(4)
    layer = linen.Conv(5, (3, 3), padding="SAME")
    variables = layer.init(jax.random.key(0), jnp.ones((1, 8, 8, 2)))

    class ChannelsLast(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(2, 5, 3, padding=1)

        def forward(self, x):
            return self.conv(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)

    compare_modules(ChannelsLast(), (layer, variables), [normal((2, 8, 8, 2))]).check()


def test_an_assertion_prints_its_reproduction():
    with pytest.raises(AssertionError, match=r"(?s)To reproduce:.*inputs = \[np.array\(\[0.0, 1.0\], 'float64'\)\]"):
        assert_equivalent(torch.tanh, jnp.sin, [np.array([0.0, 1.0])])
    assert assert_equivalent(torch.sin, jnp.sin, [np.array([0.0, 1.0])]).is_equal


def test_shapes_draw_the_difficult_sizes():
    from hypothesis import given, settings

    @settings(max_examples=60, database=None, derandomize=True)
    @given(shapes(2, block=8, largest=20, empty=True))
    def run(shape):
        assert_equivalent(torch.exp, jnp.exp, [normal(shape)])

    run()
    assert all(drawn_sizes()[kind] for kind in DIFFICULT.split(", "))


class Layers(nn.Module):
    """A square matrix beside others, all with names and orientation that both frameworks share."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6, bias=False), nn.Linear(6, 6, bias=False), nn.Linear(6, 3, bias=False)

    def forward(self, x):
        return self.c(torch.tanh(self.b(self.a(x))))


def jax_layers(p, x):
    return jnp.tanh(x @ p["a"]["weight"].T @ p["b"]["weight"].T) @ p["c"]["weight"].T * 1.01  # a bug


def test_a_square_matrix_is_oriented_as_the_others_where_a_bug_hides_its_orientation():
    shapes = {name: jnp.zeros(layer.weight.shape) for name, layer in Layers().named_children()}
    pair = Layers(), (jax_layers, {name: {"weight": zeros} for name, zeros in shapes.items()})
    assert suggest_names(*pair).ambiguous
    found = suggest_names(*pair, [normal((5, 4))])
    assert dict(found) == {name: name for name in ("a.weight", "b.weight", "c.weight")}
    assert not found.ambiguous
    assert not compare_modules(*pair, [normal((5, 4))], **EXACT).is_equal


def test_numbers_in_another_order_are_another_name():
    shapes = {f"blocks.{n}.norm{m}.weight": (4,) for n in (1, 2) for m in (1, 2)}
    found = propose_names(shapes, shapes)
    assert dict(found) == {name: name for name in shapes}
    assert not found.ambiguous
