"""Code around the cuts of split_model that does what no torch function shows: as one model, or refused."""

import random
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from reference_torch.pipeline import PipelineExecutor, split_model

WIDTH = 3


class Model(nn.Module):
    """Three linear layers; subclasses say what happens between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.make()
        self.double()

    def make(self) -> None:
        """Make further attributes."""


class _Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * -0.5


halved: Any = _Halved.apply


class OwnFunction(Model):
    """An autograd function before the cut, whose result two stages read, and one of a received tensor."""

    def forward(self, x):
        h = halved(self.a(x))
        y = self.b(h)
        return self.c(halved(h) + y)


class Reentrant(Model):
    """Reentrant checkpoints of the enclosing code and of submodules, one of which begins a stage."""

    def make(self) -> None:
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        h = checkpoint(lambda v: self.a(v).tanh() * self.scale, x.requires_grad_(), use_reentrant=True)
        h = checkpoint(self.b, h, use_reentrant=True)
        return self.c(h) * self.scale


class WithoutGradients(Model):
    """A cut inside of no_grad."""

    def forward(self, x):
        first = self.a(x)
        with torch.no_grad():
            h = self.b(first)
        return self.c(h + first)


class Generators(Model):
    """A generator of the model, from which one stage draws for both."""

    def make(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x):
        noise = torch.randn(WIDTH, generator=self.generator, dtype=x.dtype)
        return self.c(self.b(self.a(x) + noise)) * noise


class Depth(nn.Module):
    """A residual block that is scaled at random by Python and NumPy."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.linear(x) * random.random() * np.random.beta(2.0, 3.0)


class RandomSubmodule(Model):
    """Random numbers of Python in a submodule."""

    def make(self) -> None:
        self.b = Depth()

    def forward(self, x):
        return self.c(self.b(self.a(x)))


@dataclass(frozen=True)
class Output:
    y: Tensor
    more: Any = None


class Returned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return Output(self.linear(x), SimpleNamespace(mean=x.mean()))


class Objects(Model):
    """Objects that a submodule returns to the code around the cut, and that the model returns."""

    def make(self) -> None:
        self.a = Returned()

    def forward(self, x):
        first = self.a(x)
        return Output(self.c(self.b(first.y)), [first, first.more.mean])


class ParameterLists(Model):
    """Parameters in containers, one of them read in two stages."""

    def make(self) -> None:
        self.gains = nn.ParameterList([nn.Parameter(torch.randn(WIDTH)) for _ in range(2)])
        self.shifts = nn.ParameterDict({"last": nn.Parameter(torch.randn(WIDTH))})

    def forward(self, x):
        h = self.b(self.a(x) * self.gains[0])
        return self.c(h * self.gains[0]) * self.gains[1] + self.shifts["last"]


class TiedByFunction(Model):
    """The weight of a submodule of the first stage, and of one that is not called, read by the last."""

    def make(self) -> None:
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        h = self.c(self.b(self.a(self.inner(x))))
        return functional.linear(h, self.inner[0].weight) + self.unused.weight.sum()


class Rows(Model):
    """Rows of a tensor of an earlier stage, one by one."""

    def forward(self, x):
        h = self.a(x)
        y = self.b(h)
        first, *_ = h
        return self.c(y) + sum(row for row in h) + first


class OldWeightNorm(Model):
    """A weight that is computed before each call, and is no parameter."""

    def make(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            torch.nn.utils.weight_norm(self.a)

    def forward(self, x):
        return self.c(self.b(self.a(x)))


class ReadInOneStage(Model):
    """Attributes that a submodule sets and the same stage reads."""

    def make(self) -> None:
        self.c = Auxiliary()
        self.a = Counting()

    def forward(self, x):
        earlier = self.a.last
        y = self.b(self.a(x) * self.a.calls * self.a.last * earlier)
        return self.c(y) + self.c.loss


class Auxiliary(nn.Module):
    """A linear layer that leaves a loss in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.loss = torch.zeros(())

    def forward(self, x):
        y = self.linear(x)
        self.loss = y.pow(2).mean()
        return y


def loss_of(output: Any, _: Any = None) -> Tensor:
    if isinstance(output, Output):
        parts = [output.y, output.more[0].y, output.more[0].more.mean, output.more[1]]
        return sum(part.pow(2).sum() for part in parts)  # pyright: ignore[reportReturnType]
    return output.pow(2).sum()


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, WIDTH, dtype=torch.float64, generator=generator) for _ in range(2)]


def run(stages: Sequence[nn.Module]) -> list[Tensor]:
    return PipelineExecutor(stages, "gpipe", 2, loss_of).step(batches())


def seed() -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)


EQUAL = {
    "autograd function": (OwnFunction, False),
    "reentrant checkpoint": (Reentrant, True),
    "cut inside of no_grad": (WithoutGradients, False),
    "generator": (Generators, False),
    "random submodule": (RandomSubmodule, False),
    "objects": (Objects, False),
    "parameter list": (ParameterLists, True),
    "tied by a function": (TiedByFunction, True),
    "rows": (Rows, False),
    "old weight norm": (OldWeightNorm, False),
    "attribute of the same stage": (ReadInOneStage, False),
}
"""Models, and whether they need example arguments."""


@pytest.mark.parametrize("name", EQUAL)
@pytest.mark.parametrize("with_example", [False, True])
def test_losses_and_gradients_are_those_of_the_model(unchecked_shapes, name, with_example):
    kind, needs_example = EQUAL[name]
    model, plain = kind(), kind()
    seed()
    losses = [loss_of(plain(x)) for x in batches()]
    for loss in losses:
        (loss / 2).backward()
    stages = split_model(model, ["b", "c"], (batches()[0],) if with_example or needs_example else None)
    seed()
    found = run(stages)
    assert [loss.item() for loss in found] == pytest.approx([loss.item() for loss in losses], rel=1e-13)
    for (key, wanted), parameter in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert (parameter.grad is None) == (wanted.grad is None), key
        assert wanted.grad is None or torch.allclose(parameter.grad, wanted.grad, rtol=1e-12, atol=1e-13), key


def test_a_parameter_belongs_to_the_stages_that_read_it():
    stages = split_model(ParameterLists(), ["b", "c"], (batches()[0],))
    names = [{name for name in stage.state_dict() if name[0] in "gs"} for stage in stages]
    assert names == [{"gains.0"}, {"gains.0"}, {"gains.1", "shifts.last"}]


class Losses(Model):
    def make(self) -> None:
        self.a, self.b = Auxiliary(), Auxiliary()

    def forward(self, x):
        return self.c(self.b(self.a(x))) + self.a.loss + self.b.loss


class Counting(nn.Linear):
    """A linear layer that counts its calls, and holds its last mean."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.calls, self.last = 0, torch.ones(())

    def forward(self, x):
        self.calls += 1
        y = super().forward(x)
        self.last = y.mean().detach()
        return y


class Calls(Model):
    """A count of another stage."""

    def make(self) -> None:
        self.a = Counting()

    def forward(self, x):
        return self.c(self.b(self.a(x)) * self.a.calls)


class State(Calls):
    """What a submodule of the last stage has set in the previous call."""

    def make(self) -> None:
        self.c = Counting()

    def forward(self, x):
        return self.c(self.b(self.a(x) * self.c.last))


class TwoDraws(Generators):
    def forward(self, x):
        h = self.b(self.a(x) + torch.rand(WIDTH, generator=self.generator))
        return self.c(h) * torch.rand(WIDTH, generator=self.generator)


class Mixed(Model):
    def forward(self, x):
        return self.c(self.b(self.a(x) * random.uniform(0.5, 1.0)))


class MixedByNumPy(Model):
    def forward(self, x):
        return self.c(self.b(self.a(x) * float(np.random.beta(1.0, 2.0))))


class OwnSource(Model):
    def make(self) -> None:
        self.source = np.random.default_rng(0)

    def forward(self, x):
        return self.c(self.b(self.a(x) * self.source.random()))


class PlainCounter(Model):
    def make(self) -> None:
        self.steps = torch.zeros(WIDTH, dtype=torch.float64)

    def forward(self, x):
        self.steps[0] += 1
        return self.c(self.b(self.a(x) + self.steps))


class InPlaceDraw(Model):
    def forward(self, x):
        noise = torch.empty(WIDTH)
        noise.normal_()
        return self.c(self.b(self.a(x) + noise) + noise)


class Norms(Model):
    def make(self) -> None:
        self.a = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return self.c(self.b(self.a(x))) + self.a.running_mean


class MiddleOfCheckpoint(Model):
    def forward(self, x):
        return self.c(checkpoint(lambda v: self.b(self.a(v)), x.requires_grad_(), use_reentrant=True))


class Mapped(Model):
    def forward(self, x):
        return self.c(torch.vmap(torch.sin)(self.b(self.a(x))))


class MappedSubmodule(Model):
    def forward(self, x):
        return self.c(torch.vmap(self.b)(self.a(x)))


class Differentiated(Model):
    def forward(self, x):
        return self.c(torch.func.grad(lambda h: h.sin().sum())(self.b(self.a(x))))


TRANSFORMED = r"apply torch\.vmap .* to no .* got a tensor \[2, 3\] that one has made; apply it in a submodule"


class Refused(NamedTuple):
    model: type[Model]
    says: str
    cuts: tuple[str, ...] = ("b", "c")


REFUSED = {
    "attribute of a submodule": Refused(Losses, r"got attribute 'a\.loss', which a submodule sets in stage 0; return"),
    "count of a submodule": Refused(
        Calls, r"in stage 1 .* got attribute 'a\.calls', which a submodule sets in another"
    ),
    "state of a submodule": Refused(State, r"in stage 0 .* got attribute 'c\.last', which a submodule sets in another"),
    "generator in two stages": Refused(TwoDraws, r"draws in the stages 0 and 2, .*; draw all before the first cut"),
    "random of Python": Refused(Mixed, "a draw from Python's random or from NumPy .* draw in a submodule"),
    "random of NumPy": Refused(MixedByNumPy, "a draw from Python's random or from NumPy .* draw in a submodule"),
    "random of the model": Refused(OwnSource, "a draw from Python's random or from NumPy .* draw in a submodule"),
    "plain tensor": Refused(PlainCounter, r"got '\w+' on attribute 'steps', which every stage would change; assign"),
    "draw in place": Refused(InPlaceDraw, r"got 'normal_' on a tensor \[3\]; use torch.rand"),
    "changed buffer": Refused(Norms, r"buffer 'a\.running_mean', which .* in the stages \[0, 2\]; return a copy"),
    "vmap of an activation": Refused(Mapped, TRANSFORMED),
    "vmap of a submodule": Refused(MappedSubmodule, TRANSFORMED),
    "gradient of an activation": Refused(
        Differentiated, r"to no .* got torch\.func\.grad or one .*; apply it in a submodule"
    ),
    "middle of a checkpoint": Refused(MiddleOfCheckpoint, "got 'b', called in the middle of .* use_reentrant=False"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("with_example", [False, True])
def test_what_stages_cannot_repeat_is_refused_by_name(name, with_example):
    case = REFUSED[name]
    with pytest.raises(ValueError, match=case.says):
        run(split_model(case.model(), case.cuts, (batches()[0],) if with_example else None))


class Unhashable(type):
    """A metaclass whose classes cannot be in sets."""

    def __eq__(cls, other: object) -> bool:
        return cls is other


TABLES = [torch.zeros(2), nn.Parameter(torch.zeros(2))]


class GlobalTable(Model):
    """Changes a tensor that only a list of the module holds."""

    kind = 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.a(x))
        TABLES[self.kind].data.add_(1.0)
        return self.c(y)


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("some_class_has_no_hash", [False, True])
def test_a_tensor_that_existed_before_is_found_wherever_it_is(kind, some_class_has_no_hash):
    unhashable = Unhashable("Unhashable", (), {})() if some_class_has_no_hash else None
    model = GlobalTable()
    model.kind = kind
    with pytest.raises(ValueError, match=r"got 'add_' on a tensor \[2\] that existed before, which every stage would"):
        run(split_model(model, ["b", "c"], (batches()[0],)))
    del unhashable


def test_the_trace_draws_nothing(unchecked_shapes):
    model = RandomSubmodule()
    seed()
    expected = random.random(), np.random.random(), torch.rand(())
    seed()
    split_model(model, ["c"], (batches()[0],))
    assert (random.random(), np.random.random(), torch.rand(())) == expected


def test_every_trace_starts_from_the_same_attributes():
    """In train mode and in eval mode."""
    plain, x = ReadInOneStage(), batches()[0]
    first, second = split_model(ReadInOneStage(), ["b"], (x,))
    for mode in (True, False):
        for part in (plain, first, second):
            part.train(mode)
        assert torch.equal(second(*first(x)), plain(x))


def test_a_model_that_ran_is_split():
    """Its submodules then have attributes with a graph."""
    model = ReadInOneStage()
    model(batches()[0])
    assert len(run(split_model(model, ["b"]))) == 2


class _Foreign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, others: list[Tensor]) -> Tensor:
        return others[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0].new_zeros(WIDTH, WIDTH), None


class Foreign(Model):
    """A stage whose function returns a received tensor that is no argument of it."""

    def forward(self, x):
        return _Foreign.apply(self.a.weight, [x])


def test_a_received_tensor_that_becomes_a_result_is_refused():
    with pytest.raises(ValueError, match=r"\[2, 3\], to stay a leaf, got the result of _ForeignBackward; let"):
        run([nn.Linear(WIDTH, WIDTH).double(), Foreign()])
