"""Reading a discarded output: restored inside the scope, refused by name outside, never a crash (R8)."""

import contextlib
import copy
import itertools
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from reference_torch.recompute import (
    CheckpointWithoutOutput,
    DiscardedActivationError,
    RecomputeError,
    RecomputeUsageError,
    internals,
    lazy_restore,
)
from tests.recompute.support import HandsBack, assert_equal, gradients, is_empty, normal, reader, run_process

READS: dict[str, Callable[[Tensor], object]] = {
    "add": lambda y: y + 1,
    "radd": lambda y: 1 + y,
    "method": lambda y: y.sum(),
    "function": lambda y: torch.add(torch.ones(3, 4), y),
    "functional": lambda y: F.gelu(y),
    "list": lambda y: torch.cat([torch.ones(3, 4), y]),
    "keyword": lambda y: torch.mul(input=y, other=2),
    "index": lambda y: y[0],
    "write": lambda y: y.detach().zero_(),
    "in place": lambda y: torch.no_grad()(y.add_)(1),
    "assignment": lambda y: y.__setitem__(0, 1.0),
    "out": lambda y: torch.sin(torch.ones(3, 4), out=y),
    "data": lambda y: y.data,
    "view": lambda y: y.view(-1),
    "numpy": lambda y: y.detach().numpy(),
    "list of numbers": lambda y: y.tolist(),
    "number": lambda y: float(y.max()),
    "pointer": lambda y: y.data_ptr(),
    "clone": lambda y: y.clone(),
    "copy": lambda y: copy.deepcopy(y.detach()),
    "pickle": lambda y: pickle.dumps(y),
    "comparison": lambda y: y == y,
    "iteration": lambda y: list(y),
    "module": lambda y: nn.Linear(4, 4).double()(y),
    "reader of backward": lambda y: HandsBack.apply(y, y),
}


@pytest.mark.parametrize("scoped", [True, False])
@pytest.mark.parametrize("name", READS)
def test_r08_reading_a_discarded_output_in_python_names_the_checkpoint(name, scoped, refill):
    x = normal(0, 3, 4)
    expected = gradients(reader(F.gelu(x)), [x])
    checkpoint = CheckpointWithoutOutput("my gelu")
    with lazy_restore() if scoped else contextlib.nullcontext():
        y = checkpoint.checkpoint(F.gelu, x)
        loss = reader(y)
        checkpoint.discard_output_and_register_recompute(loss)
        with pytest.raises(DiscardedActivationError, match="my gelu"):
            READS[name](y)
    with pytest.raises(DiscardedActivationError, match="my gelu"):
        READS[name](y)
    assert_equal(gradients(loss, [x]), expected)
    assert torch.equal(y, F.gelu(x)), "what failed has changed nothing"


def test_r08_what_reads_no_elements_may_be_asked_of_a_discarded_output():
    x = normal(0, 3, 4)
    checkpoint = CheckpointWithoutOutput("mine")
    y = checkpoint.checkpoint(lambda x: x.tanh().t(), x)
    loss = reader(y)
    checkpoint.discard_output_and_register_recompute(loss)
    assert isinstance(y, Tensor)
    assert (y.shape, y.dtype, y.device, y.ndim) == (torch.Size([4, 3]), torch.float64, torch.device("cpu"), 2)
    assert (y.size(), y.stride(), y.numel(), y.dim()) == (torch.Size([4, 3]), (1, 4), 12, 2)
    assert y.requires_grad
    assert y.grad_fn is not None
    assert not y.is_leaf
    assert repr(y) == "DiscardedTensor('mine', shape=(4, 3))"
    gradients(loss, [x])
    assert type(y) is Tensor
    assert "_region_name" not in vars(y)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_r08_inside_the_scope_readers_come_in_any_order(order, refill, trace):
    x = normal(0, 4, 4)

    def first(x):
        return F.gelu(x)

    def second(y):
        return y.softmax(-1)

    def graph(run_first, run_second):
        y = run_first(first, x)
        z = run_second(second, y)
        return [reader(y), (y * z).t().exp(), reader(z)]

    plain = graph(lambda fn, *a: fn(*a), lambda fn, *a: fn(*a))
    a, b = CheckpointWithoutOutput("first"), CheckpointWithoutOutput("second")
    with lazy_restore():
        losses = graph(a.checkpoint, b.checkpoint)
        a.discard_output()
        b.discard_output()
    outputs = [*a.outputs, *b.outputs]
    assert [is_empty(y) for y in outputs] == [] or all(is_empty(y) for y in outputs)
    for i in order:
        assert_equal(gradients(losses[i], [x], retain_graph=True), gradients(plain[i], [x], retain_graph=True))
    assert set(trace.replayed) == {"first", "second"}
    assert trace.replayed[0] == "first"


def test_r08_inside_the_scope_hooks_of_an_inner_scope_that_keep_the_tensor_itself():
    """As an offload hook does with a tensor too small to be worth moving."""
    x = normal(0, 3, 4)
    expected = gradients(reader(F.gelu(x)), [x])
    checkpoint = CheckpointWithoutOutput()
    with lazy_restore():
        y = checkpoint.checkpoint(F.gelu, x)
        with saved_tensors_hooks(lambda t: t, lambda t: t):
            loss = reader(y)
        checkpoint.discard_output()
    with contextlib.suppress(RecomputeError):  # a named error would do
        assert_equal(gradients(loss, [x]), expected)


def test_r08_inside_the_scope_a_custom_function_that_saves_the_output():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            result = y * y
            ctx.save_for_backward(y, result)
            return result

        @staticmethod
        def backward(ctx, grad):
            y, result = ctx.saved_tensors
            return grad * 2 * y + result

    x = normal(0, 3, 4)
    expected = gradients(Square.apply(F.gelu(x)), [x])
    checkpoint = CheckpointWithoutOutput()
    with lazy_restore():
        y = checkpoint.checkpoint(F.gelu, x)
        loss = Square.apply(y)
        checkpoint.discard_output()
    assert is_empty(y)
    assert_equal(gradients(loss, [x]), expected)


@pytest.mark.parametrize("scoped", [True, False])
def test_r08_a_parameter_changed_in_place_before_the_replay_is_an_error_as_in_the_plain_graph(scoped):
    layer, x = nn.Linear(4, 4).double(), normal(0, 3, 4)
    checkpoint = CheckpointWithoutOutput()
    with lazy_restore() if scoped else contextlib.nullcontext():
        y = checkpoint.checkpoint(lambda x: layer(x).tanh(), x)
        loss = reader(y)
        checkpoint.discard_output_and_register_recompute(loss)
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match=r"modified (in place|by an inplace operation)"):
        gradients(loss, [x])


@pytest.mark.parametrize("scoped", [True, False])
def test_r08_versions_are_checked_where_pytorch_leaves_it_to_the_hooks(scoped):
    """A reader's other operand changed in place: an error as in the plain graph, not a wrong gradient."""
    x, other = normal(0, 3, 4), normal(1, 3, 4, grad=False)
    checkpoint = CheckpointWithoutOutput()
    with lazy_restore() if scoped else contextlib.nullcontext():
        y = checkpoint.checkpoint(F.gelu, x)
        loss = y.sin() * other
        checkpoint.discard_output_and_register_recompute(loss)
    other.add_(1)
    with pytest.raises(RuntimeError, match=r"modified (in place|by an inplace operation)"):
        gradients(loss, [x])


def test_r08_an_alias_written_while_the_output_is_empty_is_an_error(refill):
    if refill == "copy":
        pytest.skip("a write to a storage without bytes is undefined on PyTorch 2.11")
    x = normal(0, 3, 4)
    checkpoint = CheckpointWithoutOutput()
    with lazy_restore():
        y = checkpoint.checkpoint(F.gelu, x)
        alias = y.detach()
        loss = reader(y)
        checkpoint.discard_output()
    alias.mul_(2)
    with pytest.raises(RecomputeUsageError, match="modified in place"):
        gradients(loss, [x])


OUTSIDE = """
import gc
import torch
from reference_torch.recompute import CheckpointWithoutOutput
torch.manual_seed(0)
for size in (1, 7, 100, 1 << 20):
    x = torch.randn(size, requires_grad=True)
    checkpoint = CheckpointWithoutOutput()
    y = checkpoint.checkpoint(torch.nn.functional.gelu, x)
    beside, view = (y * y).tanh(), y.view(-1)
    (y * y.sin()).exp().register_hook(checkpoint.recompute)
    checkpoint.discard_output()
    others = [torch.ones(size) for _ in range(8)]
    assert view.isnan().all()
    (wrong,) = torch.autograd.grad(beside, x, torch.randn(size))
    assert wrong.isnan().all(), "somebody else's memory was read"
    assert all((o == 1).all() for o in others)
    del x, y, view, beside, checkpoint, others
    gc.collect()
print("alive")
"""


@pytest.mark.multiprocess
@pytest.mark.skipif(not internals.HAS_SWAP, reason="undefined on PyTorch 2.11, as documented")
def test_r08_outside_the_scope_a_read_in_cpp_gives_nan_and_no_crash():
    assert run_process(OUTSIDE) == "alive\n"


INSIDE = """
import random
import torch
from reference_torch.recompute import CheckpointWithoutOutput, lazy_restore, internals
if COPY:
    internals.HAS_SWAP = internals.HAS_READ_MESSAGE = False
torch.manual_seed(0)
random.seed(0)
for size in (1, 5, 64, 300):
    x = torch.randn(size, size, requires_grad=True)
    checkpoints = [CheckpointWithoutOutput() for _ in range(5)]
    with lazy_restore():
        values, losses = [x], []
        for checkpoint in checkpoints:
            values.append(checkpoint.checkpoint(lambda y: (y @ x).softmax(-1).t(), values[-1]))
            losses += [(values[-1] * values[-2]).reshape(-1), values[-1][:, 0].exp() * values[-1].t()]
        for checkpoint in checkpoints:
            checkpoint.discard_output()
    del values, checkpoint, checkpoints
    random.shuffle(losses)
    while losses:
        loss = losses.pop()
        (grad,) = torch.autograd.grad(loss, x, torch.randn_like(loss), retain_graph=bool(losses))
        assert grad.isfinite().all()
print("alive")
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize("copy_back", [False, True])
def test_r08_inside_the_scope_never_a_crash(copy_back):
    assert run_process(f"COPY = {copy_back}\n{INSIDE}") == "alive\n"
