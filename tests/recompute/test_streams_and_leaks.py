"""Streams, a module somebody else wrote, and what is freed by reference counting alone (R14)."""

import contextlib
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from reference_torch.recompute import CheckpointWithoutOutput, internals, lazy_restore
from reference_torch.recompute.guard_memory import guard_address, reset_guard_memory
from reference_torch.recompute.region import in_replay, slot_of
from tests.recompute.support import (
    assert_equal,
    branch,
    exact_reader,
    gradients,
    measure,
    normal,
    reader,
    reference_counting_only,
)

# R14


def slow_gelu(log: list) -> Callable[[Tensor], Tensor]:
    def call(x):
        log.append(torch.cuda.current_stream())
        torch.cuda._sleep(20_000_000)
        return F.gelu(x)

    return call


@pytest.mark.gpu
@pytest.mark.parametrize("scoped", [True, False])
def test_r14_replay_runs_on_the_stream_of_the_forward(scoped):
    x = normal(0, 256, 256, dtype=torch.float32).detach().cuda().requires_grad_()
    cotangent = normal(1, 256 * 256, dtype=torch.float32, grad=False).cuda()
    expected = torch.autograd.grad(exact_reader(F.gelu(x)), x, cotangent)
    side, log = torch.cuda.Stream(), []
    side.wait_stream(torch.cuda.current_stream())
    checkpoint = CheckpointWithoutOutput()
    with lazy_restore() if scoped else contextlib.nullcontext():
        with torch.cuda.stream(side):
            y = checkpoint.checkpoint(slow_gelu(log), x)
        torch.cuda.current_stream().wait_stream(side)
        loss = exact_reader(y)
        checkpoint.discard_output_and_register_recompute(loss)
    actual = torch.autograd.grad(loss, x, cotangent)
    torch.cuda.synchronize()
    assert log == [side, side]
    assert_equal(actual, expected)


@pytest.mark.gpu
def test_r14_readers_on_another_stream_wait_for_the_replay():
    x = normal(0, 256, 256, dtype=torch.float32).detach().cuda().requires_grad_()
    cotangent = normal(1, 256 * 256, dtype=torch.float32, grad=False).cuda()
    expected = torch.autograd.grad(exact_reader(F.gelu(x)), x, cotangent)
    log, first, second = [], torch.cuda.Stream(), torch.cuda.Stream()
    for stream in (first, second):
        stream.wait_stream(torch.cuda.current_stream())
    checkpoint = CheckpointWithoutOutput()
    with lazy_restore():
        with torch.cuda.stream(first):
            y = checkpoint.checkpoint(slow_gelu(log), x)
        second.wait_stream(first)
        with torch.cuda.stream(second):
            loss = exact_reader(y)
        torch.cuda.synchronize()
        checkpoint.discard_output()
    torch.full((256, 256), 7.0, device="cuda")  # uses again what was freed
    with torch.cuda.stream(second):
        actual = torch.autograd.grad(loss, x, cotangent)
    torch.cuda.synchronize()
    assert log[1] == first
    assert_equal(actual, expected)
    assert slot_of(y).event is not None


@pytest.mark.gpu
def test_r14_memory_is_given_back_on_cuda():
    x = normal(0, 1024, 1024, dtype=torch.float32).detach().cuda().requires_grad_()
    size = x.nbytes
    before = torch.cuda.memory_allocated()
    checkpoint = CheckpointWithoutOutput()
    with lazy_restore():
        y = checkpoint.checkpoint(torch.tanh, x)
        loss = (y * y).mean()
        checkpoint.discard_output()
    assert torch.cuda.memory_allocated() - before < size // 2
    torch.cuda.reset_peak_memory_stats()
    checkpoint.recompute()
    copies = 1 if internals.HAS_SWAP else 2  # PyTorch 2.11 copies the replayed output
    assert torch.cuda.max_memory_allocated() - before < (copies + 0.5) * size
    assert_equal(torch.autograd.grad(loss, x), torch.autograd.grad((x.tanh() * x.tanh()).mean(), x))


# Threads


def test_replays_of_two_threads_that_wait_for_each_other(unchecked_shapes):
    """As stages of a pipeline do that run in threads and communicate inside a checkpointed call."""
    meeting = threading.Barrier(2, timeout=20)

    def meets(x):
        if in_replay():
            meeting.wait()
        return x.tanh()

    def train(seed: int) -> None:
        x = normal(seed, 4, 4)
        with lazy_restore():
            checkpoint = CheckpointWithoutOutput()
            loss = reader(checkpoint.checkpoint(meets, x * 1))
            checkpoint.discard_output_and_register_recompute(loss)
        actual[seed] = gradients(loss, [x])

    actual: dict[int, tuple] = {}
    threads = [threading.Thread(target=train, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for seed in range(2):
        x = normal(seed, 4, 4)
        assert_equal(actual[seed], gradients(reader((x * 1).tanh()), [x]))


# Guard memory


def test_guard_memory_takes_no_pages_of_its_own():
    def resident_mebibytes() -> float:
        with open("/proc/self/smaps_rollup") as file:
            return next(int(line.split()[1]) / 1024 for line in file if line.startswith("Anonymous:"))

    cpu = torch.device("cpu")
    guard_address(1, cpu)
    before = resident_mebibytes()
    address = guard_address(1 << 29, cpu)
    storage = internals.storage_from_pointer(address, cpu, 1 << 29)
    values = torch.empty(0).set_(storage, 0, (1 << 27,), (1,))
    assert values[:: 1 << 12].isnan().all()
    assert resident_mebibytes() - before < 8
    values[7] = 0.0
    reset_guard_memory(cpu)
    assert values[7].isnan()


# Somebody else's module


class ForeignAttention(nn.Module):
    """As a library has it: options by keyword, a tuple and a dict given back, dropout inside."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.drop = nn.Dropout(0.25)

    def forward(self, hidden, mask=None, *, need_weights=False):
        parts = self.query_key_value(hidden).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind()
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if mask is not None:
            scores = scores.masked_fill(mask, -1e9)
        weights = self.drop(scores.softmax(-1))
        out = self.out((weights @ v).transpose(1, 2).flatten(2))
        return out, {"weights": weights if need_weights else None, "norm": out.norm(dim=-1), "heads": self.heads}


@pytest.mark.parametrize("need_weights", [False, True])
def test_a_foreign_module_is_wrapped_as_it_is(need_weights, trace):
    torch.manual_seed(0)
    module, last = ForeignAttention(32, 4), nn.Linear(32, 32)
    parameters = [*module.parameters(), *last.parameters()]
    x, mask = normal(0, 8, 64, 32, dtype=torch.float32), torch.ones(64, 64, dtype=torch.bool).triu(1)

    def run(recompute: bool, mark=lambda name: None):
        torch.manual_seed(6)
        checkpoint = CheckpointWithoutOutput("foreign")
        mark("start")
        with lazy_restore():
            call = checkpoint.checkpoint if recompute else lambda fn, *args, **kwargs: fn(*args, **kwargs)
            out, extra = call(module, x, mask, need_weights=need_weights)
            assert extra["heads"] == 4
            loss = last(out).tanh().sum((1, 2)) + extra["norm"].sin().sum(1)
            if need_weights:
                loss = loss + extra["weights"].square().sum((1, 2, 3))
            if recompute:
                checkpoint.discard_output()
        del out, extra
        mark("forward")
        assert checkpoint.retained == []
        result = gradients(loss, [x, *parameters])
        mark("backward")
        return result

    assert_equal(run(True), run(False))
    assert trace.replayed == ["foreign"]
    saved = {}
    for recompute in (False, True):
        memory = measure(lambda mark, recompute=recompute: run(recompute, mark))
        saved[recompute] = memory.live("forward") - memory.live("start")
    attention = 8 * 4 * 64 * 64 * 4
    assert saved[False] > 3 * attention
    assert saved[True] < 0.15 * saved[False]


# Leaks


@pytest.mark.parametrize("scoped", [True, False])
def test_everything_is_freed_by_reference_counting(scoped, refill, trace):
    with reference_counting_only():
        x = normal(0, 4, 4)
        checkpoints = [CheckpointWithoutOutput(str(i)) for i in range(3)]
        with lazy_restore() if scoped else contextlib.nullcontext():
            a = checkpoints[0].checkpoint(torch.tanh, x)
            b, c = checkpoints[1].checkpoint(branch, a)
            d = checkpoints[2].checkpoint(lambda b, c: b * c, b, c)
            loss = reader(d) + reader(a)
            for checkpoint in checkpoints:
                checkpoint.discard_output_and_register_recompute(loss)
        watched = [weakref.ref(t) for t in (a, b, c, d, loss)]
        storages = [StorageWeakRef(t.untyped_storage()) for t in (a, b, c, d)]
        gradients(loss, [x])
        assert sorted(trace.replayed) == ["0", "1", "2"]
        del a, b, c, d, checkpoint, checkpoints, loss
        assert trace.alive == []
        assert [reference() for reference in watched] == [None] * 5
        assert all(storage.expired() for storage in storages)


@pytest.mark.parametrize("scoped", [True, False])
def test_a_forward_without_backward_is_freed_by_reference_counting(scoped, trace):
    with reference_counting_only():
        x = normal(0, 4, 4)
        checkpoint = CheckpointWithoutOutput()
        with lazy_restore() if scoped else contextlib.nullcontext():
            y = checkpoint.checkpoint(torch.tanh, x)
            loss = reader(y)
            checkpoint.discard_output_and_register_recompute(loss)
        storage = StorageWeakRef(slot_of(y).region.node.saved_tensors[0].untyped_storage())
        assert not storage.expired()
        del y, loss, checkpoint
        assert trace.alive == []
