"""Checkpoints in functions given to torch.compile, and compiled functions inside a checkpoint: the graph breaks."""

import contextlib
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from reference_torch.recompute import CheckpointWithoutOutput, MHCBlockRecomputeManager, lazy_restore
from tests.recompute.support import assert_equal, gradients, normal

norm, linear = nn.LayerNorm(4).double(), nn.Linear(4, 4).double()


def one_checkpoint(x, recompute):
    h = x * 2
    if not recompute:
        return linear(F.gelu(norm(h)).tanh()) * 3
    checkpoint = CheckpointWithoutOutput()
    y = linear(checkpoint.checkpoint(lambda h: F.gelu(norm(h)).tanh(), h))
    checkpoint.discard_output_and_register_recompute(y)
    return y * 3


def scoped(x, recompute):
    h = x * 2
    with lazy_restore() if recompute else contextlib.nullcontext():
        checkpoint = CheckpointWithoutOutput()
        y = linear(checkpoint.checkpoint(torch.tanh, h) if recompute else h.tanh())
        if recompute:
            checkpoint.discard_output_and_register_recompute(y)
    return y * 3


def managed(x, recompute):
    if not recompute:
        return linear(F.gelu(norm(x * 2))) * 3
    with MHCBlockRecomputeManager() as manager:
        h = manager.checkpoint(norm, x * 2)
        h = manager.checkpoint(F.gelu, h)
        y = linear(h)
        manager.discard_all_outputs_and_register_unified_recompute(y)
    return y * 3


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of dynamo, about graph breaks
        yield
    torch._dynamo.reset()


@pytest.mark.thorough
@pytest.mark.parametrize(("body", "backward_inside"), [(one_checkpoint, True), (scoped, False), (managed, False)])
def test_a_checkpoint_in_a_compiled_function_breaks_the_graph(body, backward_inside):
    x = normal(0, 3, 4)
    parameters = [x, *norm.parameters(), *linear.parameters()]
    options = {"allow_unused": True, "materialize_grads": True}
    expected = gradients(body(x, False), parameters, **options)
    cotangent = normal(100, 3, 4, grad=False)

    def step(x):
        y = body(x, True)
        return torch.autograd.grad(y, parameters, cotangent, **options) if backward_inside else y

    result = torch.compile(step, backend="eager")(x)
    actual = result if backward_inside else gradients(result, parameters, **options)
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.thorough
@pytest.mark.parametrize("scope", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_compiled_function_in_a_checkpoint_is_replayed(scope):
    x = normal(0, 3, 4)

    def inner(h):
        return F.gelu(norm(h)) * 2

    expected = gradients(linear(inner(x * 2)), [x, *norm.parameters()])
    compiled = torch.compile(inner, backend="aot_eager")
    for _ in range(3):
        checkpoint = CheckpointWithoutOutput()
        with lazy_restore() if scope else contextlib.nullcontext():
            y = linear(checkpoint.checkpoint(compiled, x * 2))
            checkpoint.discard_output_and_register_recompute(y)
        assert_equal(gradients(y, [x, *norm.parameters()]), expected)
