"""MHCBlockRecomputeManager replays a block's calls in their order, whatever hook begins it (R20 to R22)."""

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from reference_torch.recompute import (
    CheckpointWithoutOutput,
    MHCBlockRecomputeManager,
    RecomputeUsageError,
    lazy_restore,
)
from tests.recompute.model_support import block, call, steps
from tests.recompute.support import (
    assert_equal,
    gradients,
    is_empty,
    normal,
    reader,
    reference_counting_only,
    run_process,
)

# R20


@pytest.mark.parametrize("scoped", [True, False])
def test_r20_replays_in_forward_order_each_from_what_the_one_before_refilled(scoped, refill):
    x, log = normal(0, 4, 4), []
    expected = gradients(reader(block(x * 1, call)[-1]), [x])
    manager = MHCBlockRecomputeManager()
    with manager if scoped else contextlib.nullcontext():
        values = block(x * 1, manager.checkpoint, steps(log))
        loss = reader(values[-1])
        manager.discard_all_outputs_and_register_unified_recompute(loss)
    assert len(manager.checkpoints) == (0 if scoped else 3)
    assert [is_empty(v) for v in values] == [False, True, True, True]
    addresses = [v.untyped_storage()._cdata for v in values]
    del log[:]
    assert_equal(gradients(loss, [x]), expected)
    assert [name for name, _ in log] == ["first", "second", "third"]
    assert [seen for _, seen in log] == [None, (addresses[1], True), (addresses[2], True)]
    assert not any(is_empty(v) for v in values)
    assert [v.untyped_storage()._cdata for v in values] == addresses


@pytest.mark.parametrize("scoped", [True, False])
def test_r20_checkpoints_made_by_hand_are_taken_over(scoped, trace):
    x = normal(0, 4, 4)
    expected = gradients(reader(block(x * 1, call)[-1]), [x])
    manager = MHCBlockRecomputeManager()

    def run(function, value):
        checkpoint = CheckpointWithoutOutput(function.__name__)
        value = checkpoint.checkpoint(function, value)
        manager.add_checkpoint(checkpoint)
        assert manager.checkpoints[-1] is checkpoint
        return value

    with manager if scoped else contextlib.nullcontext():
        values = block(x * 1, run)
        loss = reader(values[-1])
        manager.discard_all_outputs_and_register_unified_recompute(loss)
    assert all(is_empty(v) for v in values[1:])
    assert_equal(gradients(loss, [x]), expected)
    assert trace.replayed == ["first", "second", "third"]


def test_r20_unified_recompute_restores_all_before_the_first_reader(trace):
    """Outside the scope the hook restores the whole block at once, and a second firing does nothing."""
    x, seen = normal(0, 4, 4), []
    manager = MHCBlockRecomputeManager()
    values = block(x * 1, manager.checkpoint)
    loss = reader(values[-1])
    manager.discard_all_outputs_and_register_unified_recompute(loss)
    loss.register_hook(lambda grad: seen.append([is_empty(v) for v in values]))
    first = gradients(loss, [x], retain_graph=True)
    assert seen == [[False] * 4]
    pointers = [v.data_ptr() for v in values]
    assert_equal(gradients(loss, [x]), first)
    assert [v.data_ptr() for v in values] == pointers


def test_r20_what_is_no_called_checkpoint_is_refused():
    manager = MHCBlockRecomputeManager()
    for wrong in (None, "checkpoint", F.gelu):
        with pytest.raises(TypeError, match="ckpt"):
            manager.add_checkpoint(wrong)
    with pytest.raises(ValueError, match=r"expected one whose checkpoint\(\) was called"):
        manager.add_checkpoint(CheckpointWithoutOutput())
    with pytest.raises(TypeError, match="hook_tensor"):
        manager.discard_all_outputs_and_register_unified_recompute(None)
    assert manager.checkpoints == []


def test_r20_a_used_manager_is_refused():
    x = normal(0, 4, 4)
    manager = MHCBlockRecomputeManager()
    loss = reader(manager.checkpoint(F.gelu, x))
    checkpoint = CheckpointWithoutOutput()
    checkpoint.checkpoint(F.gelu, x)
    with pytest.raises(RecomputeUsageError, match="inside `with manager:`"):
        manager.discard_consumed()
    manager.discard_all_outputs_and_register_unified_recompute(loss)
    for again in (
        lambda: manager.discard_all_outputs_and_register_unified_recompute(loss),
        lambda: manager.add_checkpoint(checkpoint),
        lambda: manager.checkpoint(F.gelu, x),
        lambda: manager.__enter__(),
    ):
        with pytest.raises(RecomputeUsageError, match="got a used one; make a manager for each"):
            again()


def test_r20_an_output_changed_in_place_is_refused():
    x = normal(0, 4, 4)
    with MHCBlockRecomputeManager() as manager:
        y = manager.checkpoint(lambda x: x * 2, x)
        with torch.no_grad():
            y.add_(1)
        with pytest.raises(RecomputeUsageError, match="modified in place"):
            manager.discard_consumed()
        with pytest.raises(RecomputeUsageError, match="modified in place"):
            manager.discard_all_outputs_and_register_unified_recompute(reader(x))


# R21

HOOKS: dict[str, Callable[[Tensor], Tensor]] = {
    "what the block returns": lambda out: out,
    "not in the graph of the loss": lambda out: out.sum(),
    "beside it": lambda out: out * 2,
    "needs no gradient": lambda out: out.detach(),
    "another tensor": lambda out: torch.ones(3),
}


def hooked_block(name: str, scoped: bool) -> None:
    x = normal(0, 4, 4)

    def after(values):
        return values[-1] * values[1]

    expected = gradients(reader(after(block(x * 1, call))).exp(), [x])
    manager = MHCBlockRecomputeManager()
    with manager if scoped else contextlib.nullcontext():
        values = block(x * 1, manager.checkpoint)
        output = after(values)
        manager.discard_all_outputs_and_register_unified_recompute(HOOKS[name](output))
        assert not is_empty(output)
        assert scoped is False or is_empty(values[1])
    assert_equal(gradients(reader(output).exp(), [x]), expected)


def hooked_checkpoint(name: str, scoped: bool) -> None:
    x = normal(0, 4, 4)
    expected = gradients(reader(F.gelu(x)), [x])
    checkpoint = CheckpointWithoutOutput()
    with lazy_restore() if scoped else contextlib.nullcontext():
        loss = reader(checkpoint.checkpoint(F.gelu, x))
        checkpoint.discard_output_and_register_recompute(HOOKS[name](loss))
    assert_equal(gradients(loss, [x]), expected)


@pytest.mark.parametrize("name", HOOKS)
def test_r21_inside_the_scope_any_hook_tensor_ends_in_right_gradients(name, refill):
    hooked_block(name, scoped=True)
    hooked_checkpoint(name, scoped=True)


@pytest.mark.parametrize("name", [*HOOKS][:3])
def test_r21_outside_the_scope_a_hook_that_may_never_fire_ends_in_right_gradients(name, refill):
    hooked_block(name, scoped=False)
    hooked_checkpoint(name, scoped=False)


def test_r21_outside_the_scope_a_call_that_kept_its_output_finds_its_input_restored(trace, refill):
    """The hook never fires, and the first to need the empty value is the replay of the call that read it."""
    x = normal(0, 4, 4)
    expected = gradients(F.gelu(F.gelu(x).sin()).sin(), [x])
    first, second = CheckpointWithoutOutput("first"), CheckpointWithoutOutput("second")
    y = first.checkpoint(F.gelu, x)
    z = second.checkpoint(lambda y: F.gelu(y.sin()), y)
    first.discard_output_and_register_recompute(z.sum())
    assert [is_empty(y), is_empty(z)] == [True, False]
    assert_equal(gradients(z.sin(), [x]), expected)
    assert trace.replayed == ["first", "second"]


@pytest.mark.multiprocess
@pytest.mark.parametrize("exchange", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("function", ["hooked_block", "hooked_checkpoint"])
def test_r21_outside_the_scope_a_hook_tensor_without_gradient_ends_in_right_gradients(function, exchange):
    """In a process of its own: without the exchange of memory a failure is a crash."""
    source = f"""
from reference_torch.recompute import internals
internals.HAS_SWAP = internals.HAS_SWAP and {exchange}
from tests.recompute.test_blocks import {function}
for name in {[*HOOKS][3:]}:
    {function}(name, scoped=False)
print("right")
"""
    assert run_process(source) == "right\n"


# R22


@pytest.mark.parametrize("scoped", [True, False])
@pytest.mark.parametrize("returned", ["output", "view", "alias"])
def test_r22_the_last_output_is_kept_for_whoever_comes_after(returned, scoped):
    x = normal(0, 4, 4)

    def give(out):
        return {"output": lambda: out, "view": lambda: out.t(), "alias": lambda: out.view(4, 4)}[returned]()

    expected = gradients(reader(give(block(x * 1, call)[-1])), [x])
    manager = MHCBlockRecomputeManager()
    with manager if scoped else contextlib.nullcontext():
        values = block(x * 1, manager.checkpoint)
        output = give(values[-1])
        manager.discard_all_outputs_and_register_unified_recompute(output)
    assert [is_empty(v) for v in values] == [False, True, True, False]
    pointer, value = output.data_ptr(), output.detach().clone()
    loss = reader(output)
    assert_equal(gradients(loss, [x]), expected)
    assert output.data_ptr() == pointer
    assert torch.equal(output, value)


def test_r22_a_kept_output_does_not_hold_the_call_that_gave_it(trace):
    """As between pipeline stages: the next block reads a detached output, whose own graph is gone."""
    with reference_counting_only():
        x = normal(0, 4, 4)
        with MHCBlockRecomputeManager() as manager:
            output = block(x * 1, manager.checkpoint)[-1]
            manager.discard_all_outputs_and_register_unified_recompute(output)
        hidden = output.detach().requires_grad_()
        with lazy_restore():
            loss = reader(hidden)
        del output, manager
        assert trace.alive == []
        assert_equal(gradients(loss, [hidden]), gradients(reader(hidden), [hidden]))


def test_r22_blocks_one_after_the_other():
    x = normal(0, 4, 4)

    def run(blocks: int, recompute: bool):
        hidden, outputs = x * 1, []
        for _ in range(blocks):
            if recompute:
                with MHCBlockRecomputeManager() as manager:
                    hidden = block(hidden, manager.checkpoint)[-1]
                    manager.discard_all_outputs_and_register_unified_recompute(hidden)
            else:
                hidden = block(hidden, call)[-1]
            outputs.append(hidden)
        assert not any(is_empty(o) for o in outputs)
        return gradients([reader(hidden), outputs[0].sin()], [x])

    assert_equal(run(3, True), run(3, False))
