"""Differences that large, tiny, masked, integer, complex or jumping values, or changed state, could hide."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flax import linen, nnx
from torch import nn

from parity import DifferenceError, compare_functions, compare_modules, locate
from parity.rounding import DIFFERENT, ROUNDING, UNJUDGED, judge
from parity.testing import assert_equivalent, normal

EXACT = {"dtypes": ["float64"]}
TRIANGLE = torch.ones(5, 5, dtype=torch.bool).tril()


def torch_scores(constant):
    def scores(x):
        s = x @ x.mT
        return s.masked_fill(~TRIANGLE, torch.finfo(s.dtype).min if constant is None else constant)

    return scores


def jax_scores(constant, error=1.0):
    def scores(x):
        s = x @ x.swapaxes(-1, -2) + error
        return jnp.where(TRIANGLE.numpy(), s, jnp.finfo(s.dtype).min if constant is None else constant)

    return scores


@pytest.mark.parametrize("constant", [None, -1e30, -1e9])
def test_a_mask_does_not_hide_the_other_elements(constant):
    x = normal((2, 5, 8))
    report = compare_functions(torch_scores(constant), jax_scores(constant, 1e-9), [x])
    assert [(row.kind, row.dtype) for row in report.different] == [("output", "float64")]
    assert {row.dtype for row in compare_functions(torch_scores(constant), jax_scores(constant), [x]).different} == {
        "float64",
        "float32",
        "bfloat16",
    }
    compare_functions(torch_scores(constant), jax_scores(constant, 0.0), [x]).check()


@pytest.mark.parametrize("size", [1e-300, 1e-200, 1e200, 1e300])
def test_the_size_of_a_result_does_not_matter(size):
    x = normal((6,))
    report = compare_functions(lambda x: x * size, lambda x: x * size * (1.0 + 1e-6), [x], **EXACT)
    assert len(report.different) == 2
    compare_functions(lambda x: x * size, lambda x: size * x, [x], **EXACT).check()


def test_equal_means_bitwise_equal():
    one = np.array([1.0, 5e-324])
    assert judge(one, one * [1.0, 0.0], 0.0, "float64").verdict == ROUNDING
    assert judge(one, np.array([1.0, 1e-300]), 0.0, "float64").verdict == ROUNDING
    assert judge(one[1:], one[1:] + 1e-300, 0.0, "float64").verdict == DIFFERENT
    assert judge(one, one + 1.0, np.inf, "float64").verdict == DIFFERENT
    assert judge(one, one + 1.0, np.nan, "float64").verdict == DIFFERENT


def test_integers_are_compared_exactly():
    large = 2**60
    report = compare_functions(lambda i: i + large, lambda i: i + large + 1, [np.arange(4)], **EXACT)
    assert report.different
    assert f"PyTorch {large}, JAX {large + 1}" in str(report)
    unsigned = np.array([2**63 + 1], np.uint64)
    assert judge(unsigned, unsigned - np.uint64(1), 0.0, "float64").verdict == DIFFERENT
    assert judge(unsigned, np.array([-(2**63) + 1]), 0.0, "float64").verdict == DIFFERENT


TABLE, PLACES = normal((16, 4)), np.arange(8.0)


def jax_table(shift, offset):
    return lambda t, p: t[p.astype(int) + shift] + offset


@pytest.mark.parametrize(("shift", "offset"), [(1, 0.0), (0, 0.005)])
def test_elements_at_ties_do_not_hide_the_others(shift, offset):
    report = compare_functions(lambda t, p: t[p.long()], jax_table(shift, offset), [TABLE, PLACES], **EXACT)
    assert "output" in {row.kind for row in report.different}
    assert report.different[0].difference.place[0] == 0  # 0 is the only place that one ulp does not change
    compare_functions(lambda t, p: t[p.long()], jax_table(0, 0.0), [TABLE, PLACES], **EXACT).check()


@jax.custom_vjp
def wrong_gradient(x):
    return x


wrong_gradient.defvjp(lambda x: (x, None), lambda _, g: (g * 1.005,))


def jax_pool(function):
    def pool(x):
        window = (1, 1, 2, 2)
        return jax.lax.reduce_window(function(x), -jnp.inf, jax.lax.max, window, window, "VALID") * x.mean()

    return pool


def test_a_gradient_at_ties_of_a_pooled_image():
    image = np.random.default_rng(0).integers(0, 8, (2, 3, 16, 16)) / 8.8
    report = compare_functions(lambda x: F.max_pool2d(x, 2) * x.mean(), jax_pool(wrong_gradient), [image], **EXACT)
    assert [row.kind for row in report.different] == ["input gradient"]
    compare_functions(lambda x: F.max_pool2d(x, 2) * x.mean(), jax_pool(lambda x: x), [image]).check()


def test_what_cannot_be_judged_is_not_equal():
    pair = lambda x: torch.max(x, -1).values, lambda x: jnp.max(x, -1)
    report = compare_functions(*pair, [np.ones((2, 3))], **EXACT)
    assert [row.difference.verdict for row in report.unjudged] == [UNJUDGED]
    assert not report.is_equal
    assert not report.different
    assert str(report).splitlines()[-1].startswith("NOT JUDGED: 1 of 2 comparisons")
    for check in (report.check, lambda: assert_equivalent(*pair, [np.ones((2, 3))])):
        with pytest.raises(DifferenceError, match=r"not judged: input gradient '0'.*choose other inputs"):
            check()


def test_an_ill_conditioned_result_is_not_judged():
    inputs = [normal((9,)), np.full(9, 1e13), np.full(9, 1e13)]
    report = compare_functions(lambda x, c, d: x + (c - d), lambda x, c, d: x + (c - d) + 0.002, inputs, **EXACT)
    assert [row.kind for row in report.unjudged] == ["output"]
    assert not report.is_equal
    compare_functions(lambda x, c, d: x + (c - d), lambda x, c, d: (c - d) + x, inputs, **EXACT).check()


def test_a_zero_up_to_rounding_is_equal_with_a_note():
    report = compare_functions(lambda x: x.softmax(-1).sum(-1), lambda x: jax.nn.softmax(x).sum(-1), [normal((4, 9))])
    report.check()
    assert "Not judged: input gradient '0'. Both sides are 0 up to rounding." in report.notes


class TorchState(nn.Module):
    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm1d(8)

    def forward(self, x):
        return self.bn(x)


class JaxState(nnx.Module):
    def __init__(self, momentum):
        self.bn = nnx.BatchNorm(8, momentum=momentum, epsilon=1e-5, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.bn(x)


class LinenState(linen.Module):
    momentum: float

    @linen.compact
    def __call__(self, x):
        return linen.BatchNorm(use_running_average=False, momentum=self.momentum, epsilon=1e-5, name="bn")(x)


def linen_state(momentum):
    module = LinenState(momentum)
    return module, module.init(jax.random.key(0), jnp.ones((3, 8)))


@pytest.mark.parametrize("side", [JaxState, linen_state], ids=["nnx", "linen"])
def test_running_statistics_are_compared(side):
    x = normal((16, 8))
    report = compare_modules(TorchState(), side(0.1), [x], **EXACT)
    assert {row.kind for row in report.different} == {"updated state"}
    found = locate(TorchState(), side(0.1), [x])
    assert (found.point.path, found.direction) == ("bn", "forward")
    right = compare_modules(TorchState(), side(0.9), [x], dtypes=["float64", "float32"])
    right.check()
    assert any(
        "of PyTorch is unbiased, that of flax is not: compared after the factor 15 / 16" in n for n in right.notes
    )
    assert len([row for row in right.rows if row.kind == "updated state"]) == 4
    assert locate(TorchState(), side(0.9), [x]).is_equal


class Scaled(nnx.Module):
    """A batch norm whose running variance is too small by a factor, as if it were that of another number of samples."""

    def __init__(self, factor):
        self.bn = nnx.BatchNorm(8, momentum=0.9, epsilon=1e-5, rngs=nnx.Rngs(0))
        self.factor = factor

    def __call__(self, x):
        before = self.bn.var[...]
        y = self.bn(x)
        self.bn.var[...] = 0.9 * before + (self.bn.var[...] - 0.9 * before) / self.factor
        return y


def test_another_factor_of_the_running_variance_is_different():
    x = normal((16, 8))
    assert compare_modules(TorchState(), Scaled(1.0), [x], **EXACT).is_equal
    # 16 / 15 * 33 / 32 = 11 / 10: PyTorch's is 1.1 times that of JAX
    report = compare_modules(TorchState(), Scaled(33 / 32), [x], **EXACT)
    assert [row.name for row in report.different] == ["bn.var"]


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 3)
        self.register_buffer("total", torch.zeros(8))

    def forward(self, x):
        self.total += x.sum(0)
        return self.linear(x)


def test_a_changed_buffer_without_counterpart_is_noted():
    pair = Counted(), nnx.Linear(8, 3, rngs=nnx.Rngs(0))
    names = {"linear.weight": {"to": "kernel", "transpose": True}, "linear.bias": "bias"}
    report = compare_modules(*pair, [normal((4, 8))], names=names, ignore=["total"], **EXACT)
    assert report.is_equal
    pair = nn.BatchNorm1d(8), nnx.BatchNorm(8, epsilon=1e-5, rngs=nnx.Rngs(0))
    functions = compare_functions(*pair, [normal((4, 8))], **EXACT)
    assert "Forward of PyTorch changes running_mean, running_var, which is not compared" in " ".join(functions.notes)


ANGLES = torch.polar(torch.ones(4), torch.arange(4.0))


class TorchComplex(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.phase = nn.Parameter(ANGLES.clone())
        self.register_buffer("z", ANGLES, persistent=False)

    def forward(self, x):
        y = self.linear(x) * self.z * self.phase
        return y.real + y.imag


class JaxComplex(nnx.Module):
    def __init__(self, function):
        self.linear = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
        self.phase = nnx.Param(jnp.ones(4, jnp.complex64))
        self.z = nnx.Variable(jnp.ones(4, jnp.complex64))
        self.function = function

    def __call__(self, x):
        y = self.linear(x) * self.function(self.z[...]) * self.phase[...]
        return y.real + y.imag


def test_complex_buffers_and_parameters():
    report = compare_modules(TorchComplex(), JaxComplex(lambda z: z), [normal((3, 8))])
    report.check()
    assert "phase" in {row.name for row in report.rows if row.kind == "parameter gradient"}
    assert not compare_modules(TorchComplex(), JaxComplex(lambda z: z.real), [normal((3, 8))], **EXACT).is_equal
    without = lambda p, x: x @ p["w"], {"w": jnp.ones((8, 4))}
    with pytest.raises(ValueError, match="got none for phase, z of PyTorch"):
        compare_modules(TorchComplex(), without, [normal((3, 8))], names={}, ignore=["linear.*", "w"])


def test_nan_on_both_sides_is_noted():
    report = compare_functions(torch.log, jnp.log, [np.array([-1.0, 2.0, 3.0])], gradients=False, **EXACT)
    assert report.is_equal
    assert (
        "Of output 'output', run on values of float64, 1 of 3 elements are nan or infinite on both sides."
        in report.notes
    )
    everything = compare_functions(torch.log, jnp.log, [-np.ones(3)], gradients=False, **EXACT)
    assert "all 3 elements" in everything.notes[0]


def test_nan_on_one_side_is_named():
    report = compare_functions(torch.log, lambda x: jnp.log(jnp.abs(x)), [-np.ones(3)], gradients=False, **EXACT)
    assert "finite on one side only, or infinite with another sign; at [0]: PyTorch nan, JAX 0" in str(report)
