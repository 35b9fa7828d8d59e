"""CheckpointWithoutOutput, requirement by requirement (R1 to R14): gradients bit for bit, trace, bytes."""

import contextlib
import copy
import gc
import itertools
import pickle
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from reference_torch.recompute import (
    CheckpointWithoutOutput,
    DiscardedActivationError,
    MHCBlockRecomputeManager,
    MindSpeedCheckpointWithoutOutput,
    RecomputeError,
    RecomputeMismatchError,
    RecomputeUsageError,
    internals,
    lazy_restore,
)
from reference_torch.recompute import checkpoint as checkpoint_module
from reference_torch.recompute import slots as slots_module
from reference_torch.recompute.region import Region
from reference_torch.recompute.slots import in_replay, slot_of

ROOT = Path(__file__).parent.parent
SLACK = 16384
"""Bytes a measurement may be off by: generator states and empty tensors, not activations."""


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float64, grad: bool = True) -> Tensor:
    """A leaf of normal numbers that leaves the global generator alone."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype).requires_grad_(grad)


def gradients(outputs, inputs, seed: int = 100, **options) -> tuple[Tensor, ...]:
    """Of a tensor or several, under normal cotangents."""
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    cotangents = [normal(seed + i, *o.shape, dtype=o.dtype, grad=False) for i, o in enumerate(outputs)]
    return torch.autograd.grad(outputs, inputs, cotangents, **options)


def assert_equal(actual, expected) -> None:
    """Bit for bit, finite, and not zero all over."""
    for a, b in zip(actual, expected, strict=True):
        assert type(a) is Tensor
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
        assert a.numel() == 0 or (a.isfinite().all() and a.any())


def is_empty(tensor: Tensor) -> bool:
    """Whether a tensor's memory was given back."""
    slot = slot_of(tensor)
    return slot is not None and not slot.is_full


def reader(y: Tensor) -> Tensor:
    """Needs the values of y in backward, by way of y itself, of views, and of an alias with other strides."""
    return (y * y.sin()).flatten().cumsum(0) + (y.transpose(0, -1) ** 2).flatten() * y.reshape(-1)


class Trace:
    """Regions made, and the names of those replayed, in order."""

    def __init__(self) -> None:
        self.regions: list[weakref.ref[Region]] = []
        self.replayed: list[str] = []

    @property
    def alive(self) -> list[str]:
        """Names of the regions somebody still holds."""
        return [region.name for region in (reference() for reference in self.regions) if region is not None]


@contextlib.contextmanager
def traced() -> Iterator[Trace]:
    trace = Trace()

    class Traced(Region):
        def __init__(self, *args) -> None:
            super().__init__(*args)
            trace.regions.append(weakref.ref(self))

        def replay(self) -> None:
            trace.replayed.append(self.name)
            super().replay()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_module, "Region", Traced)
        yield trace


@pytest.fixture
def trace():
    with traced() as trace:
        yield trace


@contextlib.contextmanager
def reference_counting_only() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """No slot, hook, autocast, replay state or changed grad mode outlives a test."""
    before = set(slots_module._slots)
    yield
    if not set(slots_module._slots) <= before:  # an exception's traceback, or the queue of the backward it ended
        torch.autograd.grad(normal(0, 2).exp().prod(), normal(0, 2), allow_unused=True)
        gc.collect()
    assert set(slots_module._slots) <= before
    assert internals.outer_saved_tensor_hooks() is None
    assert not in_replay()
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


def without_exchange(patch: pytest.MonkeyPatch) -> None:
    """As on PyTorch 2.11, where memory is copied back."""
    patch.setattr(internals, "HAS_SWAP", False)
    patch.setattr(internals, "HAS_READ_MESSAGE", False)


@pytest.fixture(params=["exchange", "copy"])
def refill(request, monkeypatch) -> str:
    """Both ways of giving a storage its memory back."""
    if request.param == "copy":
        without_exchange(monkeypatch)
    elif not internals.HAS_SWAP:
        pytest.skip("this PyTorch cannot exchange the memory of storages")
    return request.param


class Memory:
    """Live bytes by the allocator's own events, from the start of the measurement."""

    def __init__(self) -> None:
        self._events: list[tuple[int, int]] = []
        self._marks: dict[str, int] = {}

    def live(self, mark: str) -> int:
        return sum(size for time, size in self._events if time <= self._marks[mark])

    def peak(self, first: str, last: str) -> int:
        """Most bytes live between two marks."""
        totals = itertools.accumulate(size for _, size in self._events)
        within = [
            total
            for (time, _), total in zip(self._events, totals, strict=True)
            if self._marks[first] <= time <= self._marks[last]
        ]
        return max([self.live(first), *within])


def measure(body: Callable[[Callable[[str], None]], object]) -> Memory:
    """Run ``body(mark)`` twice, the second time measured: the first makes what is made once a process."""
    body(lambda name: None)
    memory = Memory()

    def mark(name: str) -> None:
        with torch.profiler.record_function(f"mark {name}"):
            pass

    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        held = body(mark)
    del held
    assert profile.profiler is not None
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            memory._events.append((event.start_ns(), event.nbytes()))
        elif event.name().startswith("mark "):
            memory._marks[event.name().removeprefix("mark ")] = event.end_ns()
    memory._events.sort(key=lambda event: event[0])
    return memory


def run_process(source: str) -> str:
    """What a process prints that runs this source; a crash of it fails the test."""
    done = subprocess.run([sys.executable, "-c", source], timeout=120, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"exit status {done.returncode}: {done.stderr[-2000:]}"
    return done.stdout


def branch(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.softmax(-1), (x @ x.t()).tanh()


def aliases(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = x.sigmoid()
    return y, y.view(-1), y.t()[1:]


CALLS: dict[str, Callable] = {
    "gelu": F.gelu,
    "tanh": torch.tanh,
    "softmax": lambda x: x.softmax(-1),
    "sigmoid of a view": lambda x: x.t().sigmoid(),
    "view of a result": lambda x: x.tanh().view(-1)[3:],
    "transposed": lambda x: (x @ x.t()).tanh().t(),
    "chain": lambda x: F.gelu(x @ x.t()).softmax(-1) * x.sum(),
    "dropout": lambda x: F.dropout(F.gelu(x), 0.3),
    "two outputs": branch,
    "outputs in one storage": aliases,
    "list": lambda x: [x.exp(), x.cos()],
    "saved output kept twice": lambda x: (lambda y: (y, y * y))(x.tanh()),
}


def listed(output) -> list[Tensor]:
    return [output] if isinstance(output, Tensor) else list(output)


def plain_gradients(call: Callable, x: Tensor, seed: int = 7) -> tuple[Tensor, ...]:
    torch.manual_seed(seed)
    return gradients([reader(y) for y in listed(call(x))], [x])


# R1


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
    assert checkpoint.kept == []
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


# R2


@pytest.mark.parametrize("scoped", [True, False])
def test_r02_dropout_masks_are_replayed_and_the_generator_is_put_back(scoped):
    masks = []

    def noisy(x):
        y = F.dropout(x, 0.5)
        masks.append(y != 0)
        return F.gelu(y) * torch.rand(5, 7, dtype=x.dtype)

    x = normal(0, 5, 7)
    torch.manual_seed(3)
    expected = gradients(reader(noisy(x)), [x])
    following = torch.rand(4)

    torch.manual_seed(3)
    checkpoint = CheckpointWithoutOutput()
    with lazy_restore() if scoped else contextlib.nullcontext():
        loss = reader(checkpoint.checkpoint(noisy, x))
        checkpoint.discard_output_and_register_recompute(loss)
    assert torch.equal(torch.rand(4), following), "the forward draws as the plain call does"
    torch.rand(11)
    state = torch.get_rng_state()
    assert_equal(gradients(loss, [x]), expected)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(masks) == 3
    assert torch.equal(masks[1], masks[0])
    assert torch.equal(masks[2], masks[1])
    assert masks[0].any()
    assert not masks[0].all()


def test_r02_generator_is_put_back_when_the_replay_raises():
    calls = []

    def breaks(x):
        calls.append(1)
        y = F.dropout(x, 0.5)
        if len(calls) > 1:
            raise ArithmeticError("broken replay")
        return y

    x = normal(0, 3, 4)
    checkpoint = CheckpointWithoutOutput()
    loss = reader(checkpoint.checkpoint(breaks, x))
    checkpoint.discard_output_and_register_recompute(loss)
    torch.rand(2)
    state = torch.get_rng_state()
    with pytest.raises(ArithmeticError, match="broken replay"):
        gradients(loss, [x])
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("raises", [False, True])
def test_r02_registered_generators_are_replayed_and_put_back(raises):
    generator, calls = torch.Generator(), []

    def noisy(x):
        calls.append(1)
        noise = torch.rand(x.shape, dtype=x.dtype, generator=generator)
        if raises and len(calls) > 2:
            raise ArithmeticError("broken replay")
        return x.tanh() * noise

    x = normal(0, 4, 4)
    generator.manual_seed(9)
    expected = gradients(reader(noisy(x)), [x])
    generator.manual_seed(9)
    checkpoint = CheckpointWithoutOutput(generators=[generator])
    loss = reader(checkpoint.checkpoint(noisy, x))
    checkpoint.discard_output_and_register_recompute(loss)
    torch.rand(3, generator=generator)
    state, default = generator.get_state(), torch.get_rng_state()
    if raises:
        with pytest.raises(ArithmeticError, match="broken replay"):
            gradients(loss, [x])
    else:
        assert_equal(gradients(loss, [x]), expected)
    assert torch.equal(generator.get_state(), state)
    assert torch.equal(torch.get_rng_state(), default)


@pytest.mark.gpu
@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_r02_cuda_generators_are_replayed_and_put_back(device):
    x = normal(0, 64, 64, dtype=torch.float32).detach().to(device).requires_grad_()

    def noisy(x):
        return F.dropout(F.gelu(x), 0.5) * torch.rand(64, 64).to(x.device)

    def seed():
        torch.manual_seed(5)

    seed()
    expected = torch.autograd.grad(reader(noisy(x)), x, normal(1, 4096, dtype=torch.float32, grad=False).to(device))
    seed()
    checkpoint = CheckpointWithoutOutput()
    loss = reader(checkpoint.checkpoint(noisy, x))
    checkpoint.discard_output_and_register_recompute(loss)
    torch.rand(5, device=device)
    states = torch.cuda.get_rng_state(device), torch.get_rng_state()
    actual = torch.autograd.grad(loss, x, normal(1, 4096, dtype=torch.float32, grad=False).to(device))
    assert_equal(actual, expected)
    assert torch.equal(torch.cuda.get_rng_state(device), states[0])
    assert torch.equal(torch.get_rng_state(), states[1])


# R3


def autocast_state() -> tuple:
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_r03_autocast_of_the_forward_is_restored_for_the_replay(dtype, cache):
    states = []

    def project(x, weight):
        states.append(autocast_state())
        return F.gelu(F.linear(x, weight)) @ weight

    def run(recompute):
        x, weight = normal(0, 4, 8, dtype=torch.float32), normal(1, 8, 8, dtype=torch.float32)
        checkpoint = CheckpointWithoutOutput()
        with torch.autocast("cpu", dtype, cache_enabled=cache):
            y = checkpoint.checkpoint(project, x, weight) if recompute else project(x, weight)
            loss = F.linear(y, weight).float() * y.float().sin()
            if recompute:
                checkpoint.discard_output_and_register_recompute(loss)
        assert y.dtype == dtype
        outside = autocast_state()
        result = gradients(loss, [x, weight])
        assert autocast_state() == outside
        return result

    assert_equal(run(True), run(False))
    assert states == [(True, dtype, cache)] * 3


@pytest.mark.parametrize("cache", [True, False])
def test_r03_forward_without_autocast_replays_without_it_in_a_backward_under_autocast(cache):
    states = []

    def project(x, weight):
        states.append(autocast_state())
        return F.gelu(F.linear(x, weight))

    def run(recompute):
        x, weight = normal(0, 4, 8, dtype=torch.float32), normal(1, 8, 8, dtype=torch.float32)
        checkpoint = CheckpointWithoutOutput()
        y = checkpoint.checkpoint(project, x, weight) if recompute else project(x, weight)
        loss = reader(y)
        if recompute:
            checkpoint.discard_output_and_register_recompute(loss)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
            inside = autocast_state()
            result = gradients(loss, [x, weight])
            assert autocast_state() == inside
        return result

    assert_equal(run(True), run(False))
    assert states[0] == states[1] == states[2]
    assert not states[0][0]


def test_r03_autocast_is_put_back_when_the_replay_raises():
    calls = []

    def breaks(x):
        calls.append(1)
        if len(calls) > 1:
            raise ArithmeticError("broken replay")
        return x.tanh()

    x = normal(0, 3, 4)
    checkpoint = CheckpointWithoutOutput()
    with torch.autocast("cpu", torch.bfloat16):
        loss = reader(checkpoint.checkpoint(breaks, x))
        checkpoint.discard_output_and_register_recompute(loss)
    outside = autocast_state()
    with pytest.raises(ArithmeticError, match="broken replay"):
        gradients(loss, [x])
    assert autocast_state() == outside


def test_r03_a_cast_cached_before_the_call_is_made_again_in_the_replay():
    def run(recompute):
        x, weight = normal(0, 4, 8, dtype=torch.float32), normal(1, 8, 8, dtype=torch.float32)
        checkpoint = CheckpointWithoutOutput()

        def project(h):
            return F.linear(h, weight).tanh()

        with torch.autocast("cpu", torch.bfloat16):
            h = F.linear(x, weight)
            y = checkpoint.checkpoint(project, h) if recompute else project(h)
            loss = F.linear(y, weight).float()
            if recompute:
                checkpoint.discard_output_and_register_recompute(loss)
            return gradients(loss, [x, weight])

    assert_equal(run(True), run(False))


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
    assert len(checkpoint.kept) == 2
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


# R7

OLDER = {name: normal(50 + i, 4, 4) for i, name in enumerate(("parameter", "buffer", "older"))}
STASH: list[Tensor] = []


class HandsBack(torch.autograd.Function):
    """Gives an alias of its second input, with a new graph node."""

    @staticmethod
    def forward(ctx, x, other):
        return other.detach()

    @staticmethod
    def backward(ctx, grad):
        return grad * 2, grad * 3


def stashing(x: Tensor) -> Tensor:
    y = x.tanh()
    STASH.append(y.detach())
    return y


ALIASING: dict[str, Callable] = {
    "input": lambda x: x,
    "view of the input": lambda x: x.view(-1, 2),
    "transposed input": lambda x: x.t(),
    "row of the input": lambda x: x[1],
    "expanded input": lambda x: x[None].expand(3, 4, 4),
    "chunks of the input": lambda x: x.chunk(2),
    "rows of the input": lambda x: x.unbind(),
    "strided view of the input": lambda x: x.as_strided((2, 2), (4, 1)),
    "detached input": lambda x: x.detach(),
    "contiguous": lambda x: x.contiguous(),
    "same type": lambda x: x.to(torch.float64),
    "identity": nn.Identity(),
    "flatten": nn.Flatten(),
    "dropout of nothing": lambda x: F.dropout(x, 0.5, training=False),
    "parameter": lambda x: OLDER["parameter"],
    "view of a parameter": lambda x: OLDER["parameter"].t(),
    "buffer": lambda x: OLDER["buffer"].detach(),
    "older tensor": lambda x: OLDER["older"].view(2, 8),
    "function that hands its input back": lambda x: HandsBack.apply(x, x),
    "function that hands an older tensor back": lambda x: HandsBack.apply(x, OLDER["older"]),
    "stashed elsewhere": stashing,
}


@pytest.mark.parametrize("name", ALIASING)
def test_r07_output_aliasing_an_older_tensor_is_kept(name):
    call, x = ALIASING[name], normal(0, 4, 4)
    try:
        expected_outputs = listed(call(x))
        needs = [y.requires_grad for y in expected_outputs]
        read = [reader(y) for y in expected_outputs if y.requires_grad]
        inputs = [x, *OLDER.values()]
        expected = gradients(read, inputs, allow_unused=True) if any(needs) else ()
        before = [t.detach().clone() for t in inputs]

        checkpoint = CheckpointWithoutOutput("mine")
        with lazy_restore():
            outputs = listed(checkpoint.checkpoint(call, x))
            read = [reader(y) for y in outputs if y.requires_grad]
            checkpoint.discard_output()
        assert len({y.untyped_storage()._cdata for y in outputs}) == len(checkpoint.kept) == 1
        assert checkpoint.kept[0].startswith("output 0 of 'mine': ")
        assert all(type(y) in (Tensor, nn.Parameter) and not is_empty(y) for y in outputs)
        assert_equal([y.detach() for y in outputs], [y.detach() for y in expected_outputs])
        actual = gradients(read, inputs, allow_unused=True) if any(needs) else ()
        assert [a is None for a in actual] == [b is None for b in expected]
        assert_equal([a for a in actual if a is not None], [b for b in expected if b is not None])
        assert_equal([t.detach() for t in inputs], before)
    finally:
        STASH.clear()


def test_r07_only_the_aliasing_outputs_are_kept():
    def mixed(x, weight):
        return x, F.gelu(x), weight.view(-1), x.tanh().t(), x.detach() * 2

    def call(run):
        x, weight = normal(0, 4, 4), normal(1, 4, 4)
        outputs = run(mixed, x * 1, weight)
        return x, weight, outputs

    x, weight, outputs = call(lambda fn, *args: fn(*args))
    expected = gradients([reader(y) for y in outputs[:4]], [x, weight])
    checkpoint = CheckpointWithoutOutput()
    with lazy_restore():
        x, weight, outputs = call(checkpoint.checkpoint)
        read = [reader(y) for y in outputs[:4]]
        checkpoint.discard_output()
    assert [is_empty(y) for y in outputs] == [False, True, False, True, False]
    assert len(checkpoint.kept) == 3
    assert_equal(gradients(read, [x, weight]), expected)


def test_r07_an_outer_tensor_of_a_closure_is_kept():
    """An intermediate of the caller's, with a graph of its own, that the call gets by closure."""
    x = normal(0, 4, 4)
    older = x.exp()
    expected = gradients(reader((older * 1).t()) + reader(older), [x], retain_graph=True)
    checkpoint = CheckpointWithoutOutput()
    y = checkpoint.checkpoint(lambda: older)
    loss = reader((older * 1).t()) + reader(y)
    checkpoint.discard_output_and_register_recompute(loss)
    assert checkpoint.kept
    assert not is_empty(older)
    assert_equal(gradients(loss, [x]), expected)


def test_r07_a_call_that_changes_its_input_in_place_is_refused():
    x = normal(0, 3, 4)
    for change in (lambda h: h.mul_(2).sin(), lambda h: F.relu(h, inplace=True), lambda h: h[0].zero_() + h):
        checkpoint = CheckpointWithoutOutput("changes")
        with pytest.raises(RecomputeUsageError, match="'changes': expected a call that leaves its inputs as they are"):
            checkpoint.checkpoint(change, x * 1)
        assert not checkpoint.called


@pytest.mark.parametrize("scoped", [True, False])
def test_r07_an_input_changed_before_the_replay_is_refused(scoped):
    x = normal(0, 3, 4)
    h = x * 1
    checkpoint = CheckpointWithoutOutput("late")
    with lazy_restore() if scoped else contextlib.nullcontext():
        loss = reader(checkpoint.checkpoint(F.gelu, h))
        checkpoint.discard_output_and_register_recompute(loss)
    with torch.no_grad():
        h.add_(1)
    with pytest.raises(RecomputeUsageError, match=r"'late'.*got one modified in place|one modified in place"):
        gradients(loss, [x])


@pytest.mark.parametrize("through", [lambda y: y, lambda y: y.detach(), lambda y: y[1:]])
def test_r07_an_output_changed_before_its_discard_is_refused(through):
    x = normal(0, 3, 4)
    checkpoint = CheckpointWithoutOutput("early")
    y, other = checkpoint.checkpoint(lambda x: (x * 2, x.sin()), x)
    with torch.no_grad():
        through(y).mul_(2)
    with pytest.raises(RecomputeUsageError, match="output 0 of 'early': expected it as the call returned it"):
        checkpoint.discard_output()
    assert type(y) is Tensor
    checkpoint = CheckpointWithoutOutput("early")
    y, other = checkpoint.checkpoint(lambda x: (x * 2, x.sin()), x)
    loss = reader(y)
    with torch.no_grad():
        through(other).mul_(2)
    with pytest.raises(RecomputeUsageError, match="output 1 of 'early'"):
        checkpoint.discard_output_and_register_recompute(loss)


@pytest.mark.parametrize("scoped", [True, False])
def test_r07_an_output_changed_after_its_restore_is_an_error_as_in_the_plain_graph(scoped):
    x = normal(0, 3, 4)
    checkpoint = CheckpointWithoutOutput()
    with lazy_restore() if scoped else contextlib.nullcontext():
        y = checkpoint.checkpoint(F.gelu, x)
        loss = reader(y)
        checkpoint.discard_output_and_register_recompute(loss)
    gradients(loss, [x], retain_graph=True)
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(RuntimeError, match=r"modified (in place|by an inplace operation)"):
        gradients(loss, [x])


# R8


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


# R9


def prepared(scoped: bool, call: Callable = F.gelu, weight: Tensor | None = None):
    """(leaves, loss, output, checkpoint) of a call with its output discarded."""
    x = normal(0, 4, 4)
    checkpoint = CheckpointWithoutOutput("call")
    with lazy_restore() if scoped else contextlib.nullcontext():
        args = (x * 1,) if weight is None else (x * 1, weight)
        y = checkpoint.checkpoint(call, *args)
        loss = reader(y)
        checkpoint.discard_output_and_register_recompute(loss)
    assert is_empty(y)
    return x, loss, y, checkpoint


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


# R12


def test_r12_hooks_outside_move_the_inputs_and_see_nothing_else(trace):
    packed = []

    def offload(tensor):
        packed.append(tensor.untyped_storage()._cdata)
        return tensor.detach().numpy().copy(), tensor.requires_grad

    def back(kept):
        return torch.from_numpy(kept[0])

    def internals_of(x, weight):
        return F.gelu((x @ weight).sin().exp()).tanh()

    x, weight = normal(0, 4, 4), normal(1, 4, 4)
    expected = gradients(reader(internals_of(x * 1, weight * 1)), [x, weight])
    checkpoint = CheckpointWithoutOutput("call")
    h, w = x * 1, weight * 1
    with saved_tensors_hooks(offload, back):
        y = checkpoint.checkpoint(internals_of, h, w)
    assert packed == [h.untyped_storage()._cdata, w.untyped_storage()._cdata]
    storages = [StorageWeakRef(t.untyped_storage()) for t in (h, w)]
    del h, w
    assert all(storage.expired() for storage in storages), "an input that was moved is held by nobody"
    loss = reader(y)
    checkpoint.discard_output_and_register_recompute(loss)
    assert is_empty(y)
    assert_equal(gradients(loss, [x, weight]), expected)
    assert trace.replayed == ["call"]


def test_r12_hooks_outside_the_scope_see_everything_but_discarded_outputs():
    log = []

    def pack(tensor):
        log.append(tensor.untyped_storage()._cdata)
        return tensor.detach().clone()

    x, other = normal(0, 4, 4), normal(1, 4, 4)
    expected = gradients(reader(F.gelu(x * 1)) * (other * 1).flatten(), [x, other])
    checkpoint = CheckpointWithoutOutput()
    with saved_tensors_hooks(pack, lambda t: t), lazy_restore():
        h, o = x * 1, other * 1
        y = checkpoint.checkpoint(F.gelu, h)
        loss = reader(y) * o.flatten()
        checkpoint.discard_output()
    assert h.untyped_storage()._cdata in log
    assert o.untyped_storage()._cdata in log
    address = slot_of(y).address
    assert address not in log
    assert is_empty(y)
    assert_equal(gradients(loss, [x, other]), expected)


@pytest.mark.parametrize("where", ["outside", "inside"])
def test_r12_save_on_cpu(where):
    x = normal(0, 4, 4)
    expected = gradients(reader(F.gelu(x * 1)), [x])
    checkpoint = CheckpointWithoutOutput()
    save, scope = torch.autograd.graph.save_on_cpu(), lazy_restore()
    with save if where == "outside" else scope, scope if where == "outside" else save:
        y = checkpoint.checkpoint(F.gelu, x * 1)
        loss = reader(y)
        checkpoint.discard_output()
    assert is_empty(y) is (where == "outside")  # inside, the tensor itself is kept: on the CPU it need not move
    assert_equal(gradients(loss, [x]), expected)


# R13

SHAPES: dict[str, Callable] = {
    "several": lambda x: (x.tanh(), x.exp(), x.softmax(0)),
    "aliasing each other": aliases,
    "chunks of one result": lambda x: (x @ x).tanh().chunk(2),
    "rows of one result": lambda x: x.tanh().unbind(),
    "same tensor twice": lambda x: (lambda y: (y, y))(x.tanh()),
    "transposed": lambda x: (x @ x).tanh().t(),
    "every second": lambda x: x.sigmoid()[::2, ::2],
    "expanded": lambda x: x.tanh().sum(0, keepdim=True).tanh().expand(4, 4),
    "scalar": lambda x: (x.tanh() * x).sum().tanh(),
    "empty": lambda x: x[:0].tanh(),
    "empty and not": lambda x: (x[:0].tanh(), x.tanh(), x[:, :0] * 2),
    "complex": lambda x: torch.complex(x, x.sin()).exp().abs() + torch.fft.fft(x).real.tanh(),
    "half": lambda x: x.to(torch.bfloat16).tanh(),
}


@pytest.mark.parametrize("scoped", [True, False])
@pytest.mark.parametrize("name", SHAPES)
def test_r13_outputs_of_every_kind(name, scoped, refill, trace):
    call, x = SHAPES[name], normal(0, 4, 4)

    def losses(outputs):
        return [(y * y.sin()).flatten() for y in outputs] + [y.reshape(-1).exp() * y.flatten() for y in outputs]

    expected = gradients(losses(listed(call(x))), [x])
    checkpoint = CheckpointWithoutOutput()
    with lazy_restore() if scoped else contextlib.nullcontext():
        outputs = listed(checkpoint.checkpoint(call, x))
        read = losses(outputs)
        checkpoint.discard_output_and_register_recompute(torch.cat(read))
    assert [is_empty(y) for y in outputs] == [y.numel() > 0 for y in outputs]
    layout = [(y.shape, y.stride(), y.storage_offset()) for y in outputs]
    (actual,) = gradients(read, [x])
    assert torch.equal(actual, expected[0])
    if any(y.numel() for y in outputs):
        assert_equal([actual], expected)
    assert len(trace.replayed) == 1
    assert [(y.shape, y.stride(), y.storage_offset()) for y in outputs] == layout
    assert_equal([y.detach() for y in outputs], [y.detach() for y in listed(call(x))])


def test_r13_complex_and_several_consumers():
    x = normal(0, 4, 4)

    def call(x):
        return torch.fft.fft(x.tanh()).exp()

    def losses(y):
        return [torch.view_as_real(y * y.conj()), y.abs().sin(), (y @ y).real]

    expected = gradients(losses(call(x)), [x])
    checkpoint = CheckpointWithoutOutput()
    with lazy_restore():
        y = checkpoint.checkpoint(call, x)
        read = losses(y)
        checkpoint.discard_output()
    assert is_empty(y)
    assert_equal(gradients(read, [x]), expected)


class Tagged(torch.Tensor):
    """A subclass of somebody's."""


def test_r13_subclass_outputs_are_kept():
    x = normal(0, 4, 4)

    def call(x):
        return x.tanh().as_subclass(Tagged), x.sin()

    expected = gradients([o.as_subclass(Tensor) * o.as_subclass(Tensor) for o in call(x)], [x])
    checkpoint = CheckpointWithoutOutput("tags")
    with lazy_restore():
        tagged, y = checkpoint.checkpoint(call, x)
        read = [o.as_subclass(Tensor) * o.as_subclass(Tensor) for o in (tagged, y)]
        checkpoint.discard_output()
    assert checkpoint.kept == ["output 0 of 'tags': a tensor subclass"]
    assert type(tagged) is Tagged
    assert is_empty(y)
    assert torch.equal(tagged.as_subclass(Tensor), x.tanh())
    assert_equal(gradients(read, [x]), expected)


DTENSOR = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from reference_torch.recompute import CheckpointWithoutOutput, lazy_restore
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
torch.manual_seed(0)
x, c = torch.randn(4, 4), torch.randn(4, 4)
results = []
for recompute in (False, True):
    leaf = distribute_tensor(x, mesh, [Replicate()]).requires_grad_()
    checkpoint = CheckpointWithoutOutput("sharded")
    with lazy_restore():
        y = checkpoint.checkpoint(torch.tanh, leaf) if recompute else leaf.tanh()
        loss = y * y
        if recompute:
            checkpoint.discard_output()
            assert isinstance(y, DTensor) and torch.equal(y.to_local(), x.tanh())
            assert checkpoint.kept == ["output 0 of 'sharded': a tensor subclass"], checkpoint.kept
    results.append(torch.autograd.grad(loss, leaf, distribute_tensor(c, mesh, [Replicate()]))[0].to_local())
assert torch.equal(*results)
dist.destroy_process_group()
print("kept")
"""


@pytest.mark.multiprocess
@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_r13_dtensor_outputs_are_kept():
    assert run_process(DTENSOR) == "kept\n"


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap, torch.func.vjp, torch.func.jvp])
def test_r13_func_transforms_are_refused_by_name(transform):
    def call(x):
        return CheckpointWithoutOutput().checkpoint(torch.tanh, x).sum()

    x = normal(0, 3, grad=False)
    apply = {
        torch.func.vjp: lambda: torch.func.vjp(call, x),
        torch.func.jvp: lambda: torch.func.jvp(call, (x,), (x,)),
    }.get(transform, lambda: transform(call)(x))
    with pytest.raises(NotImplementedError, match=r"torch\.func transform"):
        apply()


# R14

cuda = pytest.mark.gpu


def slow_gelu(log: list) -> Callable[[Tensor], Tensor]:
    def call(x):
        log.append(torch.cuda.current_stream())
        torch.cuda._sleep(20_000_000)
        return F.gelu(x)

    return call


@pytest.mark.gpu
@cuda
@pytest.mark.parametrize("scoped", [True, False])
def test_r14_replay_runs_on_the_stream_of_the_forward(scoped):
    x = normal(0, 256, 256, dtype=torch.float32).detach().cuda().requires_grad_()
    cotangent = normal(1, 256 * 256, dtype=torch.float32, grad=False).cuda()
    expected = torch.autograd.grad(reader(F.gelu(x)), x, cotangent)
    side, log = torch.cuda.Stream(), []
    side.wait_stream(torch.cuda.current_stream())
    checkpoint = CheckpointWithoutOutput()
    with lazy_restore() if scoped else contextlib.nullcontext():
        with torch.cuda.stream(side):
            y = checkpoint.checkpoint(slow_gelu(log), x)
        torch.cuda.current_stream().wait_stream(side)
        loss = reader(y)
        checkpoint.discard_output_and_register_recompute(loss)
    actual = torch.autograd.grad(loss, x, cotangent)
    torch.cuda.synchronize()
    assert log == [side, side]
    assert_equal(actual, expected)


@pytest.mark.gpu
@cuda
def test_r14_readers_on_another_stream_wait_for_the_replay():
    x = normal(0, 256, 256, dtype=torch.float32).detach().cuda().requires_grad_()
    cotangent = normal(1, 256 * 256, dtype=torch.float32, grad=False).cuda()
    expected = torch.autograd.grad(reader(F.gelu(x)), x, cotangent)
    log, first, second = [], torch.cuda.Stream(), torch.cuda.Stream()
    for stream in (first, second):
        stream.wait_stream(torch.cuda.current_stream())
    checkpoint = CheckpointWithoutOutput()
    with lazy_restore():
        with torch.cuda.stream(first):
            y = checkpoint.checkpoint(slow_gelu(log), x)
        second.wait_stream(first)
        with torch.cuda.stream(second):
            loss = reader(y)
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
@cuda
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
    assert torch.cuda.max_memory_allocated() - before < 1.5 * size
    assert_equal(torch.autograd.grad(loss, x), torch.autograd.grad((x.tanh() * x.tanh()).mean(), x))


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
        assert checkpoint.kept == []
        result = gradients(loss, [x, *parameters])
        mark("backward")
        return result

    assert_equal(run(True), run(False))
    assert trace.replayed == ["foreign"]
    kept = {}
    for recompute in (False, True):
        memory = measure(lambda mark, recompute=recompute: run(recompute, mark))
        kept[recompute] = memory.live("forward") - memory.live("start")
    attention = 8 * 4 * 64 * 64 * 4
    assert kept[False] > 3 * attention
    assert kept[True] < 0.15 * kept[False]


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


# Any graph

SIZE = 3
OPERATIONS: dict[str, Callable] = {
    "tanh": lambda a, b, w: a.tanh(),
    "gelu": lambda a, b, w: F.gelu(a),
    "sigmoid": lambda a, b, w: a.t().sigmoid(),
    "softmax": lambda a, b, w: a.softmax(-1),
    "multiply": lambda a, b, w: a * b,
    "matmul": lambda a, b, w: a @ b,
    "linear": lambda a, b, w: F.gelu(F.linear(a, w)),
    "dropout": lambda a, b, w: F.dropout(a, 0.5) + b.sin(),
    "view": lambda a, b, w: a.reshape(-1).flip(0).view(SIZE, SIZE),
    "transpose": lambda a, b, w: a.t(),
    "transposed result": lambda a, b, w: (a @ w).tanh().t(),
    "two": lambda a, b, w: (a.tanh(), (a * b).t()),
    "aliases": lambda a, b, w: (lambda y: (y, y.t()))((a * w).tanh()),
    "input and result": lambda a, b, w: (a, a.exp().clamp(max=3.0) * b),
    "chunks": lambda a, b, w: tuple(torch.cat([a.tanh(), b * a]).chunk(2)),
}
MODES = ("plain", "checkpoint", "managed")
step = st.tuples(
    st.sampled_from(sorted(OPERATIONS)),
    st.integers(0, 40),
    st.integers(0, 40),
    st.sampled_from(MODES),
    st.booleans(),
    st.booleans(),
)
"""Operation; which earlier values it reads; how; whether a loss reads its result; whether consumed values go now."""


def run_program(steps, order, scoped: bool, recompute: bool, seed: int, drawn: Counter | None = None):
    """Gradients of every loss of a random graph, one backward each, in the order given."""
    drawn = Counter() if drawn is None else drawn
    torch.manual_seed(seed)
    x, w = normal(seed, SIZE, SIZE), normal(seed + 1, SIZE, SIZE)
    values, losses, checkpoints = [x * 1], [], []
    reads = [[values_read % (i + 1) for values_read in (s[1], s[2])] for i, s in enumerate(steps)]
    manager = MHCBlockRecomputeManager()
    with manager if recompute and scoped else contextlib.nullcontext():
        results: list[list[Tensor]] = [values]
        for i, (name, _, _, mode, has_loss, discard_now) in enumerate(steps):
            a, b = (results[j][-1] for j in reads[i])
            if not recompute or mode == "plain":
                result = OPERATIONS[name](a, b, w)
            elif mode == "managed" and scoped:
                result = manager.checkpoint(OPERATIONS[name], a, b, w)
            else:
                checkpoints.append(CheckpointWithoutOutput(name))
                result = checkpoints[-1].checkpoint(OPERATIONS[name], a, b, w)
            results.append(listed(result))
            if has_loss or i == len(steps) - 1:
                losses.append(sum(reader(y) for y in results[-1]))
            if recompute and scoped and discard_now:
                needed = {j for later in reads[i + 1 :] for j in later if j <= i + 1}
                manager.discard_consumed(*(results[j][-1] for j in needed))
                for checkpoint in checkpoints:
                    addresses = {results[j][-1].untyped_storage()._cdata for j in needed}
                    if not any(o.untyped_storage()._cdata in addresses for o in checkpoint.outputs):
                        checkpoint.discard_output()
                drawn["emptied before the end"] += any(is_empty(y) for group in results for y in group)
        total = torch.stack(losses).sin()
        if recompute and scoped:
            manager.discard_all_outputs_and_register_unified_recompute(total)
        for checkpoint in checkpoints:
            checkpoint.discard_output_and_register_recompute(total)
            drawn["kept"] += bool(checkpoint.kept)
    if recompute:
        empty = [{y.untyped_storage()._cdata for y in group if is_empty(y)} for group in results]
        drawn["read by a later one"] += any(empty[j] and empty[i + 1] for i, js in enumerate(reads) for j in js)
        drawn["several empty"] += sum(map(bool, empty)) >= 3
        drawn["dropout replayed"] += any(s[0] == "dropout" and s[3] != "plain" for s in steps)
        drawn["empty views"] += any(is_empty(y) and not y.is_contiguous() for group in results for y in group)
    del values, results, manager, checkpoints
    targets = [losses[i % len(losses)] for i in order] + [total]
    drawn["losses of their own"] += recompute and len({id(t) for t in targets}) > 2
    drawn["one loss twice"] += recompute and len({id(t) for t in targets}) < len(targets)
    return [
        gradients(target, [x, w], seed=i, retain_graph=i < len(targets) - 1, allow_unused=True, materialize_grads=True)
        for i, target in enumerate(targets)
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("exchange", [True, False])
def test_any_graph_has_the_gradients_of_the_plain_graph(exchange, monkeypatch):
    drawn: Counter = Counter()
    if not exchange:
        without_exchange(monkeypatch)
    elif not internals.HAS_SWAP:
        pytest.skip("this PyTorch cannot exchange the memory of storages")

    @given(
        st.lists(step, min_size=1, max_size=9),
        st.lists(st.integers(0, 8), max_size=4),
        st.booleans(),
        st.integers(0, 2**16),
    )
    @settings(max_examples=5 * settings.default.max_examples)
    def check(steps, order, scoped, seed):
        with traced() as trace, reference_counting_only():
            actual = run_program(steps, order, scoped, True, seed, drawn)
            expected = run_program(steps, order, scoped, False, seed)
            for ours, plain in zip(actual, expected, strict=True):
                for a, b in zip(ours, plain, strict=True):
                    assert b.isfinite().all()
                    assert torch.equal(a, b)
            drawn["replayed twice"] += len(trace.replayed) > len(set(trace.replayed))
            drawn["scoped" if scoped else "hooked"] += bool(trace.replayed)
            drawn["checked"] += bool(expected[-1][0].any())
            assert trace.alive == []

    check()
    if settings.default.max_examples >= 25:
        hard = ("emptied before the end", "kept", "read by a later one", "several empty", "dropout replayed")
        hard += (
            "empty views",
            "losses of their own",
            "one loss twice",
            "replayed twice",
            "scoped",
            "hooked",
            "checked",
        )
        assert all(drawn[case] >= 5 for case in hard), drawn
