"""Wrong use, exceptions, and replays that do something else are refused and leave nothing behind (R10, R11)."""

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from reference_torch.recompute import (
    CheckpointWithoutOutput,
    DiscardedActivationError,
    MHCBlockRecomputeManager,
    RecomputeMismatchError,
    RecomputeUsageError,
    internals,
    lazy_restore,
)
from reference_torch.recompute.slots import in_replay
from tests.recompute.support import (
    assert_equal,
    gradients,
    is_empty,
    listed,
    normal,
    prepared,
    reader,
    reference_counting_only,
)

# R10


def test_r10_a_second_call_of_one_object_is_refused():
    x = normal(0, 3, 4)
    checkpoint = CheckpointWithoutOutput()
    checkpoint.checkpoint(F.gelu, x)
    with pytest.raises(RecomputeUsageError, match="expected one call per CheckpointWithoutOutput, got a second"):
        checkpoint.checkpoint(F.gelu, x)
    checkpoint.discard_output()
    checkpoint.recompute()
    with pytest.raises(RecomputeUsageError, match="got a second"):
        checkpoint.checkpoint(F.gelu, x)


def test_r10_hook_tensor_must_be_a_tensor():
    checkpoint = CheckpointWithoutOutput()
    checkpoint.checkpoint(F.gelu, normal(0, 3, 4))
    for wrong in (None, 1.0, [normal(0, 2)]):
        with pytest.raises(TypeError, match="hook_tensor"):
            checkpoint.discard_output_and_register_recompute(wrong)


def test_r10_an_exception_in_forward_leaves_nothing_behind(trace):
    calls = []

    def breaks(x):
        calls.append(x)
        torch.rand(3)
        with torch.autocast("cpu", torch.bfloat16):
            x.tanh().sin()
            raise ArithmeticError("broken forward")

    x = normal(0, 3, 4)
    torch.manual_seed(4)
    torch.rand(3)
    expected = torch.rand(2)
    torch.manual_seed(4)
    checkpoint, manager = CheckpointWithoutOutput(), MHCBlockRecomputeManager()
    with reference_counting_only():
        with pytest.raises(ArithmeticError, match="broken forward"):
            checkpoint.checkpoint(breaks, x)
        assert torch.equal(torch.rand(2), expected), "as after the plain call"
        assert internals.outer_saved_tensor_hooks() is None
        assert not in_replay()
        assert not checkpoint.called
        assert checkpoint.outputs == ()
        with pytest.raises(ArithmeticError, match="broken forward"):
            manager.checkpoint(breaks, x)
        assert manager.checkpoints == []
        with pytest.raises(ValueError, match="expected one whose checkpoint"):
            manager.add_checkpoint(checkpoint)
        del calls[:]
        assert trace.alive == []


@pytest.mark.parametrize("scoped", [True, False])
def test_r10_after_an_exception_in_the_replay_the_next_try_is_right(scoped, refill):
    attempts = []

    def breaks(x):
        attempts.append((torch.is_grad_enabled(), in_replay()))
        y = F.dropout(x, 0.4).tanh()
        if len(attempts) == 2:
            raise ArithmeticError("broken replay")
        return y

    torch.manual_seed(1)
    x2 = normal(0, 4, 4)
    expected = gradients(reader(F.dropout(x2 * 1, 0.4).tanh()), [x2])
    torch.manual_seed(1)
    x, loss, y, _ = prepared(scoped, breaks)
    hooks, state = internals.outer_saved_tensor_hooks(), torch.get_rng_state()
    with pytest.raises(ArithmeticError, match="broken replay"):
        gradients(loss, [x], retain_graph=True)
    assert internals.outer_saved_tensor_hooks() == hooks
    assert torch.equal(torch.get_rng_state(), state)
    assert not in_replay()
    assert is_empty(y)
    with pytest.raises(DiscardedActivationError, match="call"):
        y.sum()
    assert_equal(gradients(loss, [x]), expected)
    assert attempts == [(True, False), (True, True), (True, True)]


# R11

DIFFERENT: dict[str, tuple[Callable, Callable, str]] = {
    "more saved values": (
        lambda x: x.tanh(),
        lambda x: x.tanh().tanh(),
        "expected value 1 kept .* to be nothing",
    ),
    "fewer saved values": (lambda x: x.tanh().tanh(), lambda x: x.tanh(), "expected 2 values kept for backward, got 1"),
    "no saved values": (lambda x: x.tanh(), lambda x: x * 2, "expected 1 values kept for backward, got 0"),
    "saved shape": (lambda x: x.exp() * 2, lambda x: x[:2].exp().repeat(2, 1) * 2, r"\(4, 4\).*got \(2, 4\)"),
    "saved dtype": (lambda x: x.exp() * 2, lambda x: x.float().exp().double() * 2, "float64.*got .*float32"),
    "output shape": (lambda x: x * 2, lambda x: x[:2] * 2, "expected outputs"),
    "output dtype": (lambda x: x * 2, lambda x: (x * 2).float(), "expected outputs"),
    "output strides": (lambda x: x * 2, lambda x: (x * 2).t().contiguous().t(), "expected outputs"),
    "output offset": (lambda x: (x * 2)[:2], lambda x: (x * 2)[2:], "expected outputs"),
    "output count": (lambda x: (x * 2, x * 3), lambda x: (x * 2,), "expected outputs"),
    "one output more": (lambda x: (x * 2,), lambda x: (x * 2, x * 3), "expected outputs"),
    "no tensor": (lambda x: (x * 2, x * 3), lambda x: (x * 2, None), "expected outputs"),
    "output bytes": (lambda x: x * 2, lambda x: torch.cat([x * 2, x])[:4], "hold 128 bytes as in forward, got 256"),
}


@pytest.mark.parametrize("scoped", [True, False])
@pytest.mark.parametrize("name", DIFFERENT)
def test_r11_a_replay_that_does_something_else_is_refused(name, scoped, refill):
    first, later, message = DIFFERENT[name]
    calls = []

    def fickle(x):
        calls.append(1)
        return (first if len(calls) == 1 else later)(x)

    x = normal(0, 4, 4)
    checkpoint = CheckpointWithoutOutput("fickle")
    with lazy_restore() if scoped else contextlib.nullcontext():
        loss = reader(listed(checkpoint.checkpoint(fickle, x * 1))[0])
        checkpoint.discard_output_and_register_recompute(loss)
    with pytest.raises(RecomputeMismatchError, match=f"replay of 'fickle'.*{message}"):
        gradients(loss, [x])


def test_r11_a_replay_that_hands_its_input_back_leaves_the_input_its_memory(refill):
    calls = []

    def fickle(x):
        calls.append(1)
        return x * 2 if len(calls) == 1 else x.view_as(x)

    x = normal(0, 4, 4)
    h = x * 1
    value = h.detach().clone()
    checkpoint = CheckpointWithoutOutput()
    y = checkpoint.checkpoint(fickle, h)
    loss = reader(y)
    checkpoint.discard_output_and_register_recompute(loss)
    checkpoint.recompute()
    assert torch.equal(h.detach(), value)
    assert h.data_ptr() != y.data_ptr()
    loss.detach_()


def test_r11_closure_variables_are_looked_up_again():
    """Documented: the replay sees what the variable names then."""
    x, scale = normal(0, 4, 4), 2.0
    checkpoint = CheckpointWithoutOutput()
    y = checkpoint.checkpoint(lambda x: x.tanh() * scale, x)
    checkpoint.discard_output()
    scale = 3.0
    checkpoint.recompute()
    assert torch.equal(y, x.tanh() * 3.0)
