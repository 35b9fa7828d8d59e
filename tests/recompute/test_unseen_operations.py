"""Tensors that a call computes where a TorchFunctionMode does not see it: in another thread, in NumPy, in C++."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from reference_torch.recompute import CheckpointWithoutOutput
from reference_torch.recompute.guards import RecomputeMismatchError


def in_thread(x):
    with ThreadPoolExecutor(1) as worker:
        return worker.submit(torch.no_grad()(torch.exp), x).result()


def in_numpy(x):
    return torch.from_numpy(np.exp(x.detach().numpy()))


class Exponential(torch.autograd.Function):
    """A function that another library computes."""

    @staticmethod
    def forward(ctx, x, run):
        y = run(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, d_y):  # pyright: ignore[reportIncompatibleMethodOverride]
        (y,) = ctx.saved_tensors
        return d_y * y, None


@pytest.mark.parametrize("run", [in_thread, in_numpy])
@pytest.mark.parametrize("held", [False, True])
def test_what_a_function_computes_elsewhere_is_the_calls_own(run, held):
    x = torch.linspace(-1.0, 1.0, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.full((6,), 3.0, dtype=torch.float64, requires_grad=True)
    alive = []

    def call(x):
        y = Exponential.apply(x, run)
        alive.extend([y] * held)
        return (y * weight).sin()

    expected = torch.autograd.grad(call(x).square().sum(), (x, weight))
    checkpoint = CheckpointWithoutOutput()
    z = checkpoint.checkpoint(call, x)
    loss = z.square().sum()
    checkpoint.discard_output_and_register_recompute(loss)
    for found, gradient in zip(torch.autograd.grad(loss, (x, weight)), expected, strict=True):
        assert torch.equal(found, gradient)


def test_a_tensor_from_outside_that_the_call_changes_stays_one_from_outside():
    x = torch.linspace(-1.0, 1.0, 6, dtype=torch.float64, requires_grad=True)
    outside = x * 2.0

    def call(x):
        outside.mul_(2.0)
        return (x + outside).sin()

    checkpoint = CheckpointWithoutOutput()
    z = checkpoint.checkpoint(call, x)
    loss = z.square().sum()
    checkpoint.discard_output_and_register_recompute(loss)
    with pytest.raises(RecomputeMismatchError, match=r"from outside the call, read by .*, was changed in place since"):
        loss.backward()


def test_a_constant_that_the_call_takes_from_numpy_is_its_own():
    def call(x):
        return (x * torch.from_numpy(np.arange(6.0))).sin()

    x = torch.linspace(-1.0, 1.0, 6, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(call(x).square().sum(), x)
    checkpoint = CheckpointWithoutOutput()
    loss = checkpoint.checkpoint(call, x).square().sum()
    checkpoint.discard_output_and_register_recompute(loss)
    assert torch.equal(torch.autograd.grad(loss, x)[0], expected[0])
