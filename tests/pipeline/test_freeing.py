"""Outputs that were sent are freed, and backward goes on from them."""

import weakref

import pytest
import torch

from reference_torch.pipeline import backward_step, custom_backward, deallocate_output_tensor, own_memory


def test_freed_outputs_give_their_bytes_back_and_keep_their_node():
    x = torch.randn(100, 100, requires_grad=True)
    out = x * 2.0
    node, storage = out.grad_fn, weakref.ref(out.untyped_storage())
    deallocate_output_tensor(out, True)
    assert out.grad_fn is node
    assert out.untyped_storage().nbytes() == out.element_size()
    assert storage() is None
    custom_backward(out, torch.full((100, 100), 3.0))
    assert (x.grad == 6.0).all()


def test_freeing_is_off_by_default_and_takes_what_it_is_given():
    outs = [torch.ones(5, requires_grad=True) * i for i in range(3)]
    for thing in (outs[0], outs, {"a": outs[1]}, None):
        deallocate_output_tensor(thing)
    assert [len(out) for out in outs] == [5, 5, 5]
    deallocate_output_tensor(outs[:1], True)
    deallocate_output_tensor({"a": outs[1], "b": 3}, True)
    assert deallocate_output_tensor(None, True) is None
    assert [len(out) for out in outs] == [1, 1, 5]


def test_views_are_not_freed_but_copied():
    whole = torch.ones(4, 6, requires_grad=True) * 2.0
    with pytest.raises(ValueError, match=r"out: expected tensors that own .* a view of shape \[24\] of .* \[4, 6\]"):
        deallocate_output_tensor(whole.view(24), True)
    for out in (whole.view(24), whole[1:]):
        copy = own_memory(out)
        assert copy.untyped_storage().data_ptr() != out.untyped_storage().data_ptr()
        assert copy.grad_fn is not None
        assert torch.equal(copy, out)
    assert own_memory(whole) is whole
    assert own_memory([whole])[0] is whole
    assert all(copy is not whole for copy in own_memory([whole, whole]))


@pytest.mark.parametrize(
    "function", [torch.exp, torch.sigmoid, torch.tanh, lambda y: y.softmax(-1), lambda y: y.max(-1, keepdim=True)[0]]
)
def test_backward_from_a_freed_output_is_ordinary_backward(function):
    """Also where the operation that made it keeps it for its backward."""
    start = torch.randn(4, 6, dtype=torch.float64)
    x, y = (start.clone().requires_grad_() for _ in range(2))
    cotangent = torch.randn_like(function(start))
    out = function(x * 3.0)
    deallocate_output_tensor(out, True)
    assert backward_step(x, out, cotangent) is x.grad
    function(y * 3.0).backward(cotangent)
    assert torch.equal(x.grad, y.grad)


def test_backward_through_lists():
    x = [torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)]
    outs = [x[0] * 2.0 + x[1] * 5.0, x[1] * 3.0, torch.ones(4)]
    gradients = backward_step(x, outs, [torch.full((3,), 1.0), torch.full((3,), 10.0), torch.ones(4)])
    assert [g.tolist() for g in gradients] == [[2.0] * 3, [35.0] * 3, [0.0] * 2]
    assert backward_step(None, x[0].sum(), None) is None
    handed_on = torch.ones(3, requires_grad=True)
    assert backward_step([handed_on], handed_on, torch.full((3,), 4.0))[0].tolist() == [4.0] * 3
    with pytest.raises(ValueError, match="grad_output: expected 2 gradients, one per output, got 1"):
        custom_backward([x[0] * 2, x[1] * 2], [torch.ones(3)])
    with pytest.raises(ValueError, match=r"grad_output: expected a gradient for an output of shape \[3\], got None"):
        custom_backward(x[0] * 2, None)
