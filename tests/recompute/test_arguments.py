"""What a checkpoint is called with, without gradients too, and what it gives (R4 to R6)."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference_torch.recompute import (
    CheckpointWithoutOutput,
    MHCBlockRecomputeManager,
    MindSpeedCheckpointWithoutOutput,
    RecomputeUsageError,
    lazy_restore,
)
from reference_torch.recompute.region import slot_of
from tests.recompute.support import assert_equal, gradients, is_empty, normal, reader

# R4


def nested(first, pair, *rest, options, scale=1.0, nothing=None):
    a, (b, flags) = pair
    assert nothing is None
    assert flags == [True, "as is"]
    mixed = F.gelu(first @ a) * scale + b.sin() * options["shift"]["by"]
    return {"mixed": (mixed, None), "rest": [r.tanh() for r in rest], "count": len(rest), "label": options["label"]}


def test_r04_arguments_and_results_of_any_structure(trace):
    leaves = [normal(i, 3, 3) for i in range(6)]

    def call(run):
        a, b, c, d, e, f = leaves
        options = {"shift": {"by": f}, "label": "x"}
        return run(nested, a, (b, [c, [True, "as is"]]), d, e, options=options, scale=2.5)

    def losses(result):
        return [reader(result["mixed"][0]), *(reader(r) for r in result["rest"])]

    expected_result = call(lambda fn, *args, **kwargs: fn(*args, **kwargs))
    expected = gradients(losses(expected_result), leaves)
    checkpoint = CheckpointWithoutOutput()
    with lazy_restore():
        result = call(checkpoint.checkpoint)
        assert (result["count"], result["label"], result["mixed"][1]) == (2, "x", None)
        assert isinstance(result["mixed"], tuple)
        assert isinstance(result["rest"], list)
        tensors = [result["mixed"][0], *result["rest"]]
        assert all(a is b for a, b in zip(checkpoint.outputs, tensors, strict=True))
        read = losses(result)
        checkpoint.discard_output()
    assert all(is_empty(t) for t in tensors)
    assert_equal(gradients(read, leaves), expected)
    assert trace.replayed == ["nested"]
    assert torch.equal(tensors[0], expected_result["mixed"][0])


def test_r04_integer_tensors_and_tensors_without_gradient_go_in_and_come_out():
    table, places, weight = normal(0, 6, 4), torch.tensor([3, 1, 1]), normal(1, 3, 4, grad=False)

    def look_up(table, places, weight):
        rows = table[places]
        return rows.tanh() * weight, rows.argmax(-1), weight * 2

    expected = gradients(reader(look_up(table, places, weight)[0]), [table])
    checkpoint = CheckpointWithoutOutput()
    y, best, twice = checkpoint.checkpoint(look_up, table, places, weight)
    loss = reader(y)
    checkpoint.discard_output_and_register_recompute(loss)
    assert torch.equal(best, table[places].argmax(-1))
    assert torch.equal(twice, weight * 2)
    assert len(checkpoint.retained) == 2
    assert_equal(gradients(loss, [table]), expected)


def test_r04_mindspeed_form_takes_its_second_argument():
    x = normal(0, 4, 4)
    expected = gradients(reader(F.gelu(x)), [x])
    checkpoint = MindSpeedCheckpointWithoutOutput()
    y = checkpoint.checkpoint(F.gelu, False, x)
    loss = reader(y)
    checkpoint.discard_output_and_register_recompute(loss)
    assert is_empty(y)
    assert_equal(gradients(loss, [x]), expected)
    with pytest.raises(NotImplementedError, match="distribute_saved_activations: expected False"):
        MindSpeedCheckpointWithoutOutput().checkpoint(F.gelu, True, x)


# R5


@pytest.mark.parametrize("disabled", [torch.no_grad, torch.inference_mode, lambda: torch.set_grad_enabled(False)])
def test_r05_with_gradients_disabled_it_is_a_plain_call(disabled, trace):
    x, calls = normal(0, 3, 4), []
    checkpoint = CheckpointWithoutOutput()
    with disabled():
        y = checkpoint.checkpoint(lambda x: calls.append(1) or F.gelu(x), x)
        z = reader(y)
        checkpoint.discard_output_and_register_recompute(z)
        checkpoint.discard_output()
        checkpoint.recompute()
        assert torch.equal(y, F.gelu(x))
        assert slot_of(y) is None
        assert type(y) is Tensor
    torch.set_grad_enabled(True)
    assert checkpoint.called
    assert calls == [1]
    assert trace.regions == []
    with pytest.raises(RecomputeUsageError, match="one call per CheckpointWithoutOutput"):
        checkpoint.checkpoint(F.gelu, x)


@pytest.mark.parametrize("method", [False, True])
def test_r05_module_in_eval_mode_is_a_plain_call_even_with_gradients(method, trace):
    layer = nn.Sequential(nn.Linear(4, 4), nn.GELU()).double()
    x, calls = normal(0, 3, 4), []
    layer[0].register_forward_hook(lambda *_: calls.append("ran"))
    for training in (False, True):
        layer.train(training)
        calls.clear()
        expected = gradients(reader(layer(x)), [x, *layer.parameters()])
        checkpoint = CheckpointWithoutOutput()
        y = checkpoint.checkpoint(layer.forward if method else layer, x)
        loss = reader(y)
        checkpoint.discard_output_and_register_recompute(loss)
        assert is_empty(y) is training
        assert_equal(gradients(loss, [x, *layer.parameters()]), expected)
        assert calls == ["ran"] * (3 if training else 2)
    assert len(trace.regions) == len(trace.replayed) == 1


def test_r05_scope_and_manager_do_nothing_without_gradients(trace):
    x = normal(0, 3, 4)
    with torch.no_grad(), lazy_restore(), MHCBlockRecomputeManager() as manager:
        y = manager.checkpoint(F.gelu, x)
        manager.discard_consumed()
        z = manager.checkpoint(torch.tanh, y)
        manager.discard_all_outputs_and_register_unified_recompute(z)
    assert torch.equal(z, F.gelu(x).tanh())
    assert trace.regions == []


# R6


@pytest.mark.parametrize("scoped", [True, False])
def test_r06_parameters_get_gradients_where_no_input_needs_one(scoped, trace):
    layer = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4)).double()
    x, scale = normal(0, 3, 4, grad=False), normal(1, 4)
    parameters = [*layer.parameters(), scale]

    def call(x):
        return layer(x).tanh() * scale

    expected = gradients(reader(call(x)), parameters)
    checkpoint = CheckpointWithoutOutput("call")
    with lazy_restore() if scoped else contextlib.nullcontext():
        y = checkpoint.checkpoint(call, x)
        assert y.requires_grad
        loss = reader(y)
        checkpoint.discard_output_and_register_recompute(loss)
    assert is_empty(y)
    assert_equal(gradients(loss, parameters), expected)
    assert trace.replayed == ["call"]
    assert all(p.grad is None for p in parameters), "autograd.grad writes no .grad"


def test_r06_a_call_without_any_tensor_argument():
    weight = normal(0, 4, 4)
    expected = gradients(reader(weight.tanh()), [weight])
    checkpoint = CheckpointWithoutOutput()
    y = checkpoint.checkpoint(lambda: weight.tanh())
    loss = reader(y)
    checkpoint.discard_output_and_register_recompute(loss)
    assert is_empty(y)
    assert_equal(gradients(loss, [weight]), expected)


def test_r06_requires_grad_of_inputs_is_the_same_in_the_replay():
    seen = []

    def look(a, b):
        seen.append((a.requires_grad, b.requires_grad, torch.is_grad_enabled()))
        return a.tanh() * b.sin()

    a, b = normal(0, 3, 3), normal(1, 3, 3, grad=False)
    checkpoint = CheckpointWithoutOutput()
    loss = reader(checkpoint.checkpoint(look, a, b))
    checkpoint.discard_output_and_register_recompute(loss)
    gradients(loss, [a])
    assert seen == [(True, False, True)] * 2
