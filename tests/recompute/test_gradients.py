"""A checkpoint without output computes the gradients of the plain call, bit for bit, and keeps no more (R1)."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from reference_torch.recompute import CheckpointWithoutOutput, internals, lazy_restore
from tests.recompute.support import (
    CALLS,
    SLACK,
    assert_equal,
    gradients,
    is_empty,
    listed,
    measure,
    normal,
    plain_gradients,
    reader,
)


@pytest.mark.parametrize("scoped", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_r01_gradients_are_those_of_the_plain_call(name, scoped, refill, trace):
    call, x = CALLS[name], normal(0, 5, 5)
    expected = plain_gradients(call, x)
    torch.manual_seed(7)
    checkpoint = CheckpointWithoutOutput(name)
    with lazy_restore() if scoped else contextlib.nullcontext():
        outputs = listed(checkpoint.checkpoint(call, x))
        read = [reader(y) for y in outputs]
        if scoped:
            checkpoint.discard_output()
        else:
            checkpoint.discard_output_and_register_recompute(torch.cat(read).sin())
    assert checkpoint.retained == []
    assert all(is_empty(y) for y in outputs)
    torch.rand(3)
    assert_equal(gradients(read, [x]), expected)
    assert trace.replayed == [name]
    assert not any(is_empty(y) for y in outputs)


def test_r01_every_view_and_alias_sees_the_restored_data(refill):
    x = normal(0, 4, 6)
    checkpoint = CheckpointWithoutOutput()
    y = checkpoint.checkpoint(F.gelu, x)
    views = [y.view(-1), y.t(), y[1:, ::2], y.reshape(2, 12), y.detach(), y.detach().t()[2], y.unfold(0, 2, 1)]
    values, addresses = [v.detach().clone() for v in views], {v.untyped_storage()._cdata for v in views}
    versions = [v._version for v in views]
    loss = reader(y)
    checkpoint.discard_output()  # in spite of the views
    loss.register_hook(checkpoint.recompute)
    if refill == "exchange" and not internals.HAS_READ_MESSAGE:
        assert all(v.isnan().all() for v in views)
    elif refill == "copy":
        assert all(v.untyped_storage().nbytes() == 0 for v in views)
    gradients(loss, [x])
    assert {v.untyped_storage()._cdata for v in [y, *views]} == addresses
    assert len(addresses) == 1
    assert [v._version for v in views] == versions
    assert_equal([v.detach() for v in views], values)
    assert torch.equal(y, F.gelu(x))
    assert type(y) is Tensor


def test_r01_refill_takes_over_the_memory_of_the_replay(refill):
    pointers = []

    def remembered(x):
        y = x.tanh()
        pointers.append((y.data_ptr(), StorageWeakRef(y.untyped_storage())))
        return y

    x = normal(0, 64, 64)
    checkpoint = CheckpointWithoutOutput()
    y = checkpoint.checkpoint(remembered, x)
    loss = reader(y)
    checkpoint.discard_output_and_register_recompute(loss)
    gradients(loss, [x])
    replayed, storage = pointers[1]
    assert storage.expired()
    if refill == "exchange":
        assert y.data_ptr() == replayed
    else:
        assert y.untyped_storage().nbytes() == y.nbytes


@pytest.mark.parametrize(
    "name", ["gelu", "tanh", "softmax", "view of a result", "two outputs", "outputs in one storage"]
)
def test_r01_one_buffer_during_and_after_the_restore(name, refill):
    """A region that saves its own output must not keep a second copy of it."""
    call = CALLS[name] if name != "two outputs" else lambda x: (x.softmax(-1), x.tanh())
    size = 256 * 256 * 4

    def body(mark):
        x = normal(0, 256, 256, dtype=torch.float32)
        checkpoint = CheckpointWithoutOutput()
        mark("start")
        outputs = listed(checkpoint.checkpoint(call, x))
        mark("forward")
        loss = sum((y * y).mean() for y in outputs)
        graph = [loss, outputs]
        mark("read")
        checkpoint.discard_output_and_register_recompute(loss)
        mark("discarded")
        checkpoint.recompute()
        mark("restored")
        gradients(loss, [x])
        return graph

    memory = measure(body)
    expected = 2 * size if name == "two outputs" else size
    freed = memory.live("read") - memory.live("discarded")
    assert memory.live("forward") - memory.live("start") == pytest.approx(expected, abs=SLACK)
    assert freed == pytest.approx(expected, abs=SLACK)
    assert memory.live("restored") - memory.live("discarded") == pytest.approx(expected, abs=SLACK)
    if refill == "exchange":
        assert memory.peak("discarded", "restored") - memory.live("discarded") <= expected + SLACK


def test_r01_a_replay_keeps_nothing_that_nobody_waits_for():
    """The graph of the second output is gone; what it would have kept must not come back."""
    size = 256 * 256 * 4

    def body(mark):
        x = normal(0, 256, 256, dtype=torch.float32)
        checkpoint = CheckpointWithoutOutput()
        y, _ = checkpoint.checkpoint(lambda x: (x.tanh(), F.gelu(x.sin().exp().cos())), x)
        del _
        loss = (y * y).mean(0)
        checkpoint.discard_output_and_register_recompute(loss)
        mark("discarded")
        checkpoint.recompute()
        mark("restored")
        gradients(loss, [x])
        return loss

    memory = measure(body)
    assert memory.live("restored") - memory.live("discarded") == pytest.approx(size, abs=SLACK)


def test_r01_internals_and_output_are_gone_after_forward():
    size = 256 * 256 * 4

    def body(mark):
        x = normal(0, 256, 256, dtype=torch.float32)
        checkpoint = CheckpointWithoutOutput()
        with lazy_restore():
            mark("start")
            y = checkpoint.checkpoint(lambda x: F.gelu(x.sin().exp().tanh()), x)
            loss = (y * y).mean()
            checkpoint.discard_output()
        mark("end")
        return loss, y, x

    memory = measure(body)
    assert memory.live("end") - memory.live("start") <= SLACK
    assert memory.peak("start", "end") - memory.live("start") >= 2 * size
