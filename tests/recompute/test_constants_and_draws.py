"""What a call reads besides its arguments, through operations without gradient, and where it draws from."""

import array
import collections
import enum
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from reference_torch.recompute import CheckpointWithoutOutput, RecomputeMismatchError, RecomputeUsageError


class Rebound(nn.Module):
    """Statistics in a new tensor each time."""

    def __init__(self):
        super().__init__()
        self.mean = torch.zeros(8)

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return torch.tanh(x - self.mean)


class Counted(nn.Module):
    """Something else each time, according to a number that no operation with gradient is given."""

    def __init__(self, read):
        super().__init__()
        self.read, self.calls = read, 0

    def forward(self, x):
        self.calls += 1
        return torch.tanh(x) * self.read(self.calls)


class Sliced(Counted):
    def forward(self, x):
        self.calls += 1
        return torch.tanh(x)[:, self.calls : self.calls + 4].repeat(1, 2)


class Cached(nn.Module):
    """Constants made in the first call, statistics that no output depends on."""

    def __init__(self):
        super().__init__()
        self.cache, self.seen = {}, torch.zeros(8)

    def forward(self, x):
        self.seen = self.seen + x.detach().sum(0)
        if not self.cache:
            self.cache = {"cos": torch.cos(torch.arange(8.0)), "mask": torch.ones(8) > 0}
        return torch.tanh(x) * (self.cache["cos"] * 2.0) * self.cache["mask"].float()


def results(call, recompute: bool):
    torch.manual_seed(0)
    np.random.seed(0)
    x, linear = torch.randn(4, 8, requires_grad=True), nn.Linear(8, 8)
    checkpoint = CheckpointWithoutOutput()
    inner = checkpoint.checkpoint(call, x) if recompute else call(x)
    y = linear(inner)
    if recompute:
        checkpoint.discard_output_and_register_recompute(y)
    np.random.rand()  # somebody else draws before backward
    y.square().sum().backward()
    draws = np.random.rand(), torch.rand(()).item()
    return [x.grad, linear.weight.grad], draws


def check(make_call):
    expected, draws = results(make_call(), recompute=False)
    found, draws_after = results(make_call(), recompute=True)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert draws_after == draws


TABLE = torch.arange(100.0)
LARGE = [torch.full((4, 100), float(number)) for number in range(4)]

OWN = np.random.default_rng(0)
ARRAY = np.zeros(100, "f")
BORROWED = torch.from_numpy(ARRAY)


def written_by_numpy(number):
    ARRAY[:] = number
    return BORROWED.sum()


CHANGES = {
    "a rebound tensor": (Rebound, "another tensor of the closure than in forward.* by way of mul"),
    "a place in a table": (lambda: Counted(lambda n: TABLE[n]), r"__getitem__\(1\) in forward and is __getitem__\(2\)"),
    "a place in a place": (lambda: Counted(lambda n: TABLE[n : n + 9][0] + 1), r"slice\(2, 11, None\)"),
    "a value to fill with": (lambda: Counted(lambda n: torch.full((8,), float(n))), "full"),
    "a value written in place": (lambda: Counted(lambda n: torch.zeros(8).fill_(n)), r"fill_\(2\)"),
    "a list": (lambda: Counted(lambda n: torch.tensor([float(n)] * 8)), "tensor"),
    "a number of NumPy": (lambda: Counted(np.float32), "mul"),
    "the next of large tensors": (lambda: Counted(lambda n: (LARGE[n] + 1).sum()), "by way of"),
    "draws of a generator of NumPy's own": (
        lambda: Counted(lambda n: torch.from_numpy(OWN.random((4, 100), "f")).sum()),
        "another",
    ),
    "an array of NumPy": (lambda: Counted(lambda n: torch.tensor(np.full(100, n, "f")).sum()), "tensor"),
    "nested lists": (lambda: Counted(lambda n: torch.tensor([[float(n)] * 8])), "tensor"),
    "a write through NumPy": (lambda: Counted(lambda n: written_by_numpy(n)), "NumPy has changed"),
    "an index of several": (lambda: Sliced(None), r"slice\(1, 5, None\).*slice\(2, 6, None\)"),
}


class FirstCall(nn.Module):
    """Something else in the first call than later."""

    def __init__(self, first, later):
        super().__init__()
        self.first, self.later, self.calls = first, later, 0
        self.buffer = torch.full((8,), 2.0)

    def forward(self, x):
        self.calls += 1
        return torch.tanh(x) * (self.first if self.calls == 1 else self.later)(self, x)


class Stateful(nn.Module):
    """A recurrent state that the call makes the first time."""

    def __init__(self):
        super().__init__()
        self.state = None

    def forward(self, x):
        state = torch.zeros(4, 8) if self.state is None else self.state
        y = torch.tanh(x + state)
        self.state = y.detach()
        return y.sin()


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 3


Pair = collections.namedtuple("Pair", "a b")
PAIR = Pair(torch.ones(8), torch.ones(8))
BEGIN, END, ROWS = torch.tensor(1), torch.tensor(5), torch.randn(99, 8)


def moved(number):
    BEGIN.add_(number)
    END.add_(number)
    return ROWS[BEGIN:END].sum(0)


def second_of_pair(number):
    PAIR.b.add_(number)
    return torch.stack(PAIR).sum(0)


CHANGES |= {
    "zeros, then ones": (lambda: FirstCall(lambda m, x: torch.zeros(8), lambda m, x: torch.ones(8)), "zeros.*is ones"),
    "ones, then a buffer": (
        lambda: FirstCall(lambda m, x: torch.ones(8), lambda m, x: m.buffer),
        "from outside the call",
    ),
    "largest, then smallest": (
        lambda: FirstCall(lambda m, x: x.detach().amax(), lambda m, x: x.detach().amin()),
        "amax.*amin",
    ),
    "noise after the first call": (
        lambda: FirstCall(lambda m, x: torch.zeros_like(x), lambda m, x: torch.randn_like(x)),
        "zeros_like.*randn_like",
    ),
    "a recurrent state": (Stateful, "from outside the call"),
    "a byte of NumPy": (lambda: Counted(np.uint8), "mul"),
    "an enumeration": (lambda: Counted(lambda n: Level.LOW if n == 1 else Level.HIGH), "mul"),
    "a queue": (lambda: Counted(lambda n: torch.tensor(collections.deque([float(n)] * 8))), "tensor"),
    "an array": (lambda: Counted(lambda n: torch.tensor(array.array("f", [n] * 8))), "tensor"),
    "tensors in a named tuple": (lambda: Counted(second_of_pair), "changed in place"),
    "tensors in a slice": (lambda: Counted(moved), "changed in place"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_that_reaches_the_graph_through_operations_without_gradient_is_named(name):
    make_call, words = CHANGES[name]
    with pytest.raises(RecomputeMismatchError, match=words):
        results(make_call(), recompute=True)


@pytest.mark.parametrize(
    "constant",
    [
        lambda: torch.FloatTensor([1, 2, 3, 4, 5, 6, 7, 8]),
        lambda: torch.FloatTensor([1, 2, 3, 4, 5, 6, 7, 8]) + 1,
        lambda: torch.ones(9)[torch.LongTensor([8, 7, 6, 5, 4, 3, 2, 1])],
        lambda: torch.tensor([[1.0, float("nan")]] * 4).nan_to_num().flatten(),
    ],
)
def test_a_constant_that_the_call_makes_is_its_own(constant):
    check(lambda: lambda x: torch.tanh(x) * constant())


def test_what_the_first_call_caches_is_read_by_the_replay():
    check(Cached)


def workspace():
    buffer = torch.empty(4, 8)

    def call(x):
        buffer.copy_(x.detach()).clamp_(min=0)
        return torch.tanh(x) * buffer

    return call


def ensemble():
    weights = nn.Parameter(torch.linspace(-1.0, 1.0, 192).view(3, 8, 8))
    return lambda x: torch.vmap(lambda weight: x @ weight)(weights).tanh().sum(0)


def quantised():
    weight = torch.quantize_per_tensor(torch.linspace(-1.0, 1.0, 64).view(8, 8), 0.1, 0, torch.qint8)
    return lambda x: (x @ weight.dequantize()).tanh()


@pytest.mark.filterwarnings("ignore:.*quantiz.*")
@pytest.mark.parametrize(
    "make_call",
    [workspace, ensemble, quantised, lambda: nn.LazyLinear(8)],
)
def test_what_changes_no_result_is_not_refused(make_call):
    check(make_call)


def drawn_by_own_generator():
    generator = torch.Generator().manual_seed(3)

    def call(x):
        torch.rand(3, generator=generator)
        return torch.tanh(x) * (torch.rand(x.shape, generator=generator) > 0.5)

    return call


@pytest.mark.parametrize(
    "make_call",
    [
        drawn_by_own_generator,
        lambda: lambda x: torch.tanh(x) * torch.from_numpy(np.random.rand(4, 8).astype("float32")),
        lambda: lambda x: torch.tanh(x) * torch.tensor(np.random.standard_normal(8), dtype=torch.float32),
    ],
)
def test_draws_are_replayed_wherever_they_come_from(make_call):
    check(make_call)


STOCHASTIC_DEPTH = """
import random

import torch

from reference_torch.recompute import CheckpointWithoutOutput


def gradients(recompute):
    random.seed(0)
    x, checkpoints = torch.linspace(-1.0, 1.0, 8).requires_grad_(), []
    h = x
    for _ in range(8):
        checkpoint = CheckpointWithoutOutput()
        call = lambda h: h.sin() if random.random() < 0.5 else h.tanh() * random.gauss(0.0, 1.0)
        inner = checkpoint.checkpoint(call, h) if recompute else call(h)
        h = inner * inner
        if recompute:
            checkpoint.discard_output_and_register_recompute(h)
    (gradient,) = torch.autograd.grad(h.sum(), x)
    return [*gradient.tolist(), random.random()]


assert gradients(True) == gradients(False)
"""


def test_stochastic_depth_drawn_by_python_is_replayed():
    # A process of its own: checks of annotations, here, draw from Python's generator as well.
    subprocess.run([sys.executable, "-c", STOCHASTIC_DEPTH], check=True)


def test_sparse_operands_are_kept_like_others():
    sparse = torch.eye(4).to_sparse()
    check(lambda: lambda x: torch.sparse.mm(sparse, x).tanh())


@pytest.mark.parametrize("detached", [False, True])
def test_a_call_that_takes_gradients_itself_is_refused_by_name(detached):
    inner = nn.Linear(8, 8)

    def call(x):
        y = x.detach().requires_grad_() if detached else x
        (gradient,) = torch.autograd.grad(inner(y).tanh().sum(), y, create_graph=not detached)
        return x * gradient

    with pytest.raises(RecomputeUsageError, match=r"call.*leaves gradients to backward.*torch\.autograd\.grad"):
        results(call, recompute=True)


def test_a_call_with_a_func_transform_is_refused_by_name():
    linear = nn.Linear(8, 8)

    def call(x):
        return x.tanh() * torch.func.grad(lambda y: linear(y).tanh().sum())(x)

    with pytest.raises(RecomputeUsageError, match=r"call.*without torch\.func transforms"):
        results(call, recompute=True)


class Arriving(torch.distributed.Work):
    """A collective whose thread writes the result either before the function returns or later, in wait()."""

    def __init__(self, write, is_late):
        super().__init__()
        self.write = write
        if not is_late:
            self.wait()

    def wait(self, timeout=None):
        write, self.write = self.write, lambda: None
        with torch._C.DisableTorchFunction():  # a thread has no modes
            write()
        return True


def gather(parts, part, is_late, async_op=True):
    if torch.overrides.has_torch_function((part,)):
        return torch.overrides.handle_torch_function(gather, (part,), parts, part, is_late, async_op=async_op)
    return Arriving(lambda: [out.copy_(part) for out in parts], next(is_late))


class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, is_late):
        part = torch.empty_like(x)
        gather([part], x, is_late).wait()
        return part

    @staticmethod
    def backward(ctx, grad):
        return grad, None


@pytest.mark.parametrize("is_late", [[False, True], [True, False]], ids=["late in forward", "late in replay"])
def test_a_collective_may_finish_before_or_after_its_function_returns(is_late):
    torch.manual_seed(0)
    is_late = iter(is_late)
    x = torch.randn(3, 4, requires_grad=True)
    saved = CheckpointWithoutOutput()
    hidden = saved.checkpoint(lambda x: Gathered.apply(x, is_late).exp() * x, x)
    loss = hidden.square().sum()
    saved.discard_output_and_register_recompute(loss)
    loss.backward()
    expected = x.detach().clone().requires_grad_()
    (expected.exp() * expected).square().sum().backward()
    assert torch.allclose(x.grad, expected.grad, rtol=1e-5)
