"""Rounding of operations that changes of the inputs do not show."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from parity import compare_functions
from parity.operation_rounding import OperationRounding
from parity.rounding import EPSILON


def torch_shifted(x, shift):
    """A shift before a norm: its gradient is a sum of terms that nearly cancel, whatever the inputs are."""
    y = torch.tanh(x + shift) * 1e-2 + x + shift
    y = y - y.mean(0)
    return y / (y.square().mean(0) + 1e-5).sqrt()


def jax_shifted(x, shift):
    y = jnp.tanh(x + shift) * 1e-2 + x + shift
    y = y - jnp.mean(y, 0)
    return y * jax.lax.rsqrt(jnp.square(y).mean(0) + 1e-5)


def test_terms_that_cancel_are_no_alarm():
    for seed in range(4):
        rng = np.random.default_rng(seed)
        inputs = [rng.standard_normal((50, 3)), rng.standard_normal(3)]
        compare_functions(torch_shifted, jax_shifted, inputs, seed=seed).check()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loss_of_digits_in_one_dtype_only_is_a_difference(dtype):
    def lossy(x):
        return x.astype(jnp.bfloat16).astype(x.dtype) if x.dtype == jnp.float32 else jnp.round(64.0 * x) / 64.0

    def narrow(x, shift):
        return jax_shifted(lossy(x) if x.dtype == jnp.dtype(dtype) else x, shift)

    rng = np.random.default_rng(0)
    report = compare_functions(torch_shifted, narrow, [rng.standard_normal((50, 3)), rng.standard_normal(3)])
    assert {row.dtype for row in report.different} == {dtype}


def test_operations_are_rounded_forward_and_backward():
    layer = nn.Linear(64, 64).double()
    x = torch.randn(32, 64, dtype=torch.float64, requires_grad=True)

    def run():
        output = torch.tanh(layer(x)).view(-1)[5:]
        return [output.detach(), *torch.autograd.grad(output, [x, layer.weight], torch.ones_like(output))]

    exact = run()
    with OperationRounding(EPSILON["float32"], 0):
        rounded = run()
    for one, other in zip(exact, rounded, strict=True):
        ulps = (one - other).norm() / one.norm() / EPSILON["float32"]
        assert 0.1 < ulps < 3.0
    with OperationRounding(EPSILON["float32"], 1):
        assert not torch.equal(run()[0], rounded[0])
    with OperationRounding(EPSILON["float32"], 2):
        moved = torch.cat([x.detach(), x.detach()]).view(-1)[3:]
    assert torch.equal(moved, torch.cat([x.detach(), x.detach()]).view(-1)[3:])
