"""An exception inside a block or a model leaves nothing behind, and the next step is right (R28)."""

import weakref

import pytest
import torch
import torch.nn.functional as F

from reference_torch.recompute import (
    CheckpointWithoutOutput,
    MHCBlockRecomputeManager,
    RecomputeUsageError,
    internals,
    lazy_restore,
)
from reference_torch.transformer import GPTModel
from tests.recompute.model_support import COMBINED, CONFIG, TOKENS, block, call, expected_gradients, jiggled
from tests.recompute.support import assert_equal, gradients, is_empty, normal, reader, reference_counting_only


def test_r28_an_exception_inside_a_block_releases_the_manager(trace):
    x = normal(0, 4, 4)
    with reference_counting_only():
        manager, watched = MHCBlockRecomputeManager(), []

        def step(manager):
            with manager:
                y = manager.checkpoint(torch.tanh, x)
                z = manager.checkpoint(F.gelu, y)
                watched.extend([weakref.ref(y), weakref.ref(z)])
                manager.discard_consumed(z)
                raise ArithmeticError("in the middle")

        with pytest.raises(ArithmeticError, match="in the middle"):
            step(manager)
        assert manager.checkpoints == []
        assert manager._pending == []
        assert manager._scope is None
        with pytest.raises(RecomputeUsageError, match="got a used one"):
            manager.checkpoint(F.gelu, x)
    with MHCBlockRecomputeManager() as manager:
        values = block(x * 1, manager.checkpoint)
        loss = reader(values[-1])
        manager.discard_all_outputs_and_register_unified_recompute(loss)
    assert_equal(gradients(loss, [x]), gradients(reader(block(x * 1, call)[-1]), [x]))


def test_r28_nothing_is_left_of_a_step_that_raised(trace):
    x, watched = normal(0, 4, 4), []

    def step():
        with MHCBlockRecomputeManager() as manager:
            y = manager.checkpoint(torch.tanh, x)
            watched.extend([weakref.ref(y), weakref.ref(manager)])
            manager.checkpoint(lambda y: y / 0 if y.any() else no_such_name, y)  # noqa: F821
            manager.discard_consumed()
            raise ArithmeticError("in the middle")

    with reference_counting_only():
        try:
            step()
        except ArithmeticError:
            pass
        else:
            raise AssertionError("the step did not raise")
        assert trace.alive == []
        assert [reference() for reference in watched] == [None, None]


@pytest.mark.parametrize("where", ["self_attention", "mlp", "pre_mlp_layernorm", "input_layernorm"])
@pytest.mark.parametrize("name", ["mhc, layernorm, activation", "all, one block", "norm and MLP"])
def test_r28_the_step_after_an_exception_in_the_model_is_right(name, where, trace):
    model = jiggled(GPTModel(COMBINED[name]))

    def fail(*_):
        raise ArithmeticError("in the middle")

    state = torch.get_rng_state()
    with reference_counting_only():
        handle = getattr(model.decoder.layers["2"], where).register_forward_pre_hook(fail)
        try:
            model(TOKENS)
        except ArithmeticError:
            pass
        else:
            raise AssertionError("the model did not raise")
        handle.remove()
        assert trace.alive == []
        assert torch.equal(torch.get_rng_state(), state)
        logits = model(TOKENS)
        result = [logits.detach(), *gradients(logits, list(model.parameters()))]
        del logits
        assert trace.alive == []
    assert_equal(result, expected_gradients(CONFIG))


def test_r28_no_frames_alive_after_backward(trace):
    for config in COMBINED.values():
        model = jiggled(GPTModel(config))
        with reference_counting_only():
            logits = model(TOKENS)
            gradients(logits, list(model.parameters()))
            assert trace.alive == [], "freed as backward passes, while the loss is still held"


def test_r28_an_exception_in_a_replay_of_the_block(trace):
    x, fails = normal(0, 4, 4), []

    def second(x):
        if fails:
            raise ArithmeticError("broken replay")
        return x.tanh()

    with MHCBlockRecomputeManager() as manager:
        values = block(x * 1, manager.checkpoint, [F.gelu, second, F.gelu])
        loss = reader(values[-1])
        manager.discard_all_outputs_and_register_unified_recompute(loss)
    fails.append(True)
    with pytest.raises(ArithmeticError, match="broken replay"):
        gradients(loss, [x], retain_graph=True)
    assert is_empty(values[-1])
    fails.clear()
    expected = gradients(reader(block(x * 1, call, [F.gelu, second, F.gelu])[-1]), [x])
    assert_equal(gradients(loss, [x]), expected)


def test_contexts_are_not_entered_twice():
    manager, scope = MHCBlockRecomputeManager(), lazy_restore()
    for context, message in ((manager, "manager: expected a context"), (scope, "lazy_restore: expected a context")):
        with context, pytest.raises(RecomputeUsageError, match=message):
            context.__enter__()
    assert internals.outer_saved_tensor_hooks() is None
    assert not lazy_restore.is_active()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_r08_a_parameter_autograd_does_not_save_is_checked_in_a_module(name, autocast):
    layer, x = torch.nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    checkpoint = CheckpointWithoutOutput()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = checkpoint.checkpoint(layer, x).tanh()
        checkpoint.discard_output_and_register_recompute(loss)
    with torch.no_grad():
        getattr(layer, name).add_(1)
    with pytest.raises(RecomputeUsageError, match="expected its parameters unchanged until its replay"):
        torch.autograd.grad(loss, x, torch.randn_like(loss))
