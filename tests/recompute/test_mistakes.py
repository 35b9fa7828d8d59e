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
    RecomputeError,
    RecomputeMismatchError,
    RecomputeUsageError,
    internals,
    lazy_restore,
)
from reference_torch.recompute.region import in_replay
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


class Doubled(torch.autograd.Function):
    """Twice its input, in memory of its size or of twice as much: no operation that a replay could compare."""

    @staticmethod
    def forward(ctx, x, wide):
        return torch.cat([x * 2, x])[:4] if wide else x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2, None


DIFFERENT: dict[str, tuple[Callable, Callable, str]] = {
    "more saved values": (
        lambda x: x.tanh(),
        lambda x: x.tanh().tanh(),
        "expected value 1 saved .* to be nothing",
    ),
    "fewer saved values": (
        lambda x: x.tanh().tanh(),
        lambda x: x.tanh(),
        "expected 2 values saved for backward, got 1",
    ),
    "no saved values": (lambda x: x.tanh(), lambda x: x * 2, "expected 1 values saved for backward, got 0"),
    "saved shape": (lambda x: x.exp() * 2, lambda x: x[:2].exp().repeat(2, 1) * 2, r"\(4, 4\).*got \(2, 4\)"),
    "saved dtype": (lambda x: x.exp() * 2, lambda x: x.float().exp().double() * 2, "float64.*got .*float32"),
    "output shape": (lambda x: x * 2, lambda x: x[:2] * 2, "expected outputs"),
    "output dtype": (lambda x: x * 2, lambda x: (x * 2).float(), "expected outputs"),
    "output strides": (lambda x: x * 2, lambda x: (x * 2).t().contiguous().t(), "expected outputs"),
    "output offset": (lambda x: (x * 2)[:2], lambda x: (x * 2)[2:], "expected outputs"),
    "output count": (lambda x: (x * 2, x * 3), lambda x: (x * 2,), "expected outputs"),
    "one output more": (lambda x: (x * 2,), lambda x: (x * 2, x * 3), "expected outputs"),
    "no tensor": (lambda x: (x * 2, x * 3), lambda x: (x * 2, None), "expected outputs"),
    "output bytes": (lambda x: Doubled.apply(x, False), lambda x: Doubled.apply(x, True), "hold 128 .*, got 256"),
    "number": (
        lambda x: x.exp() * 2,
        lambda x: x.exp() * 3,
        r"operation 1 was mul\(2\) in forward and is mul\(3\)",
    ),
    "function": (lambda x: x * 2, lambda x: x + 2, r"operation 0 was mul\(2\) in forward and is add\(2\)"),
    "flag": (lambda x: F.dropout(x, 0.5, True), lambda x: F.dropout(x, 0.5, False), r"dropout.*train\(\) and eval\(\)"),
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


class Fickle(torch.autograd.Function):
    """Computes a new tensor the first time, and hands its input back later."""

    calls = 0

    @staticmethod
    def forward(ctx, x):
        Fickle.calls += 1
        return x * 2 if Fickle.calls == 1 else x.detach()

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_r11_a_replay_that_hands_its_input_back_leaves_the_input_its_memory(refill):
    Fickle.calls = 0
    x = normal(0, 4, 4)
    h = x * 1
    value = h.detach().clone()
    checkpoint = CheckpointWithoutOutput()
    y = checkpoint.checkpoint(Fickle.apply, h)
    loss = reader(y)
    checkpoint.discard_output_and_register_recompute(loss)
    checkpoint.recompute()
    assert torch.equal(h.detach(), value)
    assert h.data_ptr() != y.data_ptr()
    loss.detach_()


def refused(function: Callable, change: Callable, message: str) -> None:
    """Change something between the forward of a checkpointed call and its replay."""
    x = normal(0, 4, 4)
    with lazy_restore():
        checkpoint = CheckpointWithoutOutput("late")
        loss = reader(checkpoint.checkpoint(function, x * 1))
        checkpoint.discard_output_and_register_recompute(loss)
    with torch.no_grad():
        change()
    with pytest.raises(RecomputeError, match=f"'late'.*({message})"):
        gradients(loss, [x])


def test_r11_a_number_of_the_closure_that_changes_is_refused():
    scale = 2.0

    def change():
        nonlocal scale
        scale = 3.0

    refused(lambda x: x.tanh() * scale, change, r"operation 1 was mul\(2.0\) in forward and is mul\(3.0\)")


@pytest.mark.parametrize("needs_gradient", [True, False])
def test_r11_a_tensor_of_the_closure_that_changes_is_refused(needs_gradient):
    weight = normal(1, 4, 4, grad=needs_gradient)
    changed = r"a tensor of shape \(4, 4\) from outside the call, read by sin, was changed in place since"
    refused(lambda x: x + weight.sin(), lambda: weight.mul_(2), "unchanged|" * needs_gradient + changed)


def test_r11_a_tensor_that_takes_the_place_of_another_is_refused():
    shifts = [normal(1, 4, 4, grad=False)]

    def change():
        shifts[0] = shifts[0] + 1

    refused(lambda x: x + shifts[0], change, "operation 0, add.*reads another tensor of the closure")


def test_r11_a_counter_that_the_call_reads_and_changes_is_refused():
    count = torch.zeros(())

    def counted(x):
        count.add_(1)
        return x * count

    refused(counted, lambda: None, "from outside the call, read by mul, was changed in place")


def test_r11_a_cache_that_the_first_call_fills_is_not_refused():
    cache = {}

    def rotated(x):
        if "cos" not in cache:
            cache["cos"] = torch.arange(4.0, dtype=x.dtype).cos()
        return (x * cache["cos"]).tanh()

    x = normal(0, 4, 4)
    expected = gradients(reader((x * torch.arange(4.0, dtype=x.dtype).cos()).tanh()), [x])
    checkpoint = CheckpointWithoutOutput()
    loss = reader(checkpoint.checkpoint(rotated, x))
    checkpoint.discard_output_and_register_recompute(loss)
    assert_equal(gradients(loss, [x]), expected)


@pytest.mark.parametrize("make", [lambda: torch.nn.Dropout(0.5), lambda: torch.nn.BatchNorm1d(4)])
def test_r11_a_switch_of_train_and_eval_before_the_replay_is_refused(make):
    module = make().double()
    refused(lambda x: module(x), module.eval, r"was a module switched between train\(\) and eval\(\)")


def test_r11_a_value_changed_after_an_operation_inside_has_saved_it_is_refused_as_by_pytorch():
    def changes(x):
        inner = x.exp()
        product = inner * inner
        inner.add_(1)
        return product

    x = normal(0, 4, 4)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(changes(x), [x])
    checkpoint = CheckpointWithoutOutput("changes")
    loss = reader(checkpoint.checkpoint(changes, x))
    checkpoint.discard_output_and_register_recompute(loss)
    with pytest.raises(RecomputeUsageError, match="'changes': expected values saved for backward unchanged"):
        gradients(loss, [x])
