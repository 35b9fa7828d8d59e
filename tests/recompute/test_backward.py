"""Every form of backward over a checkpoint: parts of the graph, twice, of second order, with hooks (R9)."""

import pytest
import torch
import torch.nn.functional as F

from reference_torch.recompute import CheckpointWithoutOutput, lazy_restore
from tests.recompute.support import assert_equal, gradients, is_empty, normal, prepared, reader


def scaled(x, weight):
    return F.gelu(x @ weight).tanh()


@pytest.mark.parametrize("scoped", [True, False])
def test_r09_backward_with_inputs_writes_those_alone(scoped):
    weight = normal(1, 4, 4)
    x = normal(0, 4, 4)
    cotangent = normal(5, 16, grad=False)
    expected = torch.autograd.grad(reader(scaled(x * 1, weight)), [x, weight], cotangent)
    for wanted in (0, 1):
        weight.grad = None
        x, loss, _, _ = prepared(scoped, scaled, weight)
        torch.autograd.backward(loss, cotangent, inputs=[(x, weight)[wanted]])
        found = [x.grad, weight.grad]
        assert_equal([found[wanted]], [expected[wanted]])
        assert found[1 - wanted] is None
    weight.grad = None
    x, loss, _, _ = prepared(scoped, scaled, weight)
    loss.backward(cotangent)
    assert_equal([x.grad, weight.grad], expected)


@pytest.mark.parametrize("scoped", [True, False])
def test_r09_retained_graph_replays_internals_again_and_keeps_outputs(scoped, refill, trace):
    weight = normal(1, 4, 4)
    x, loss, y, _ = prepared(scoped, scaled, weight)
    x2 = normal(0, 4, 4)
    plain, pointers = reader(scaled(x2 * 1, weight)), set()
    for repeat in range(1, 4):
        actual = gradients(loss, [x, weight], seed=repeat, retain_graph=True)
        assert_equal(actual, gradients(plain, [x2, weight], seed=repeat, retain_graph=True))
        assert not is_empty(y)
        assert trace.replayed == ["call"] * repeat
        pointers.add(y.data_ptr())
        assert len(pointers) == 1
    assert_equal(gradients(loss, [x, weight], seed=9), gradients(plain, [x2, weight], seed=9))
    with pytest.raises(RuntimeError, match=r"second time|already been freed"):
        gradients(loss, [x])


@pytest.mark.parametrize("scoped", [True, False])
@pytest.mark.parametrize("call", [F.gelu, torch.tanh, lambda x: x.softmax(-1) * x, lambda x: (x @ x).exp()])
def test_r09_create_graph(call, scoped):
    def second(x, loss):
        (first,) = gradients(loss, [x], create_graph=True)
        return [first.detach(), *gradients(first * first, [x], seed=8)]

    x, loss, _, _ = prepared(scoped, call)
    x2 = normal(0, 4, 4)
    assert_equal(second(x, loss), second(x2, reader(call(x2 * 1))))


@pytest.mark.parametrize("scoped", [True, False])
def test_r09_post_accumulate_hooks_fire_once(scoped):
    weight, fired = normal(1, 4, 4), []
    weight.register_post_accumulate_grad_hook(lambda p: fired.append("weight"))
    _, loss, _, _ = prepared(scoped, scaled, weight)
    loss.register_hook(lambda g: fired.append("loss"))
    loss.backward(normal(5, 16, grad=False))
    assert fired == ["loss", "weight"]


def test_r09_a_second_firing_of_the_hook_does_nothing(trace):
    x, loss, y, checkpoint = prepared(False)
    checkpoint.recompute(torch.ones(()))
    assert not is_empty(y)
    pointer = y.data_ptr()
    for _ in range(3):
        checkpoint.recompute()
    assert trace.replayed == ["call"]
    assert_equal(gradients(loss, [x]), gradients(reader(F.gelu(x * 1)), [x]))
    assert (y.data_ptr(), trace.replayed) == (pointer, ["call"])


def test_r09_hooks_on_the_output_see_its_gradient():
    def run(recompute):
        x, seen = normal(0, 4, 4), []
        checkpoint = CheckpointWithoutOutput()
        with lazy_restore():
            y = checkpoint.checkpoint(F.gelu, x) if recompute else F.gelu(x)
            y.register_hook(lambda g: seen.append(g.clone()))
            y.retain_grad()
            loss = reader(y)
            if recompute:
                checkpoint.discard_output()
        loss.backward(normal(3, 16, grad=False))
        return [*seen, y.grad, x.grad]

    assert_equal(run(True), run(False))
