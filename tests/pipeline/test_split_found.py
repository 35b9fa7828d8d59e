"""Split models whose faults were found by use: what Python passes around a cut, beside tensors."""

import copy
import cProfile
import pstats
import random
import threading
from collections.abc import Sequence
from functools import lru_cache
from random import random as draw
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from beartype import beartype
from jaxtyping import Float, jaxtyped
from numpy.random import beta
from torch import Tensor, nn

from reference_torch.pipeline import split_model
from reference_torch.pipeline.global_values import reached_by

WIDTH = 4


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


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, WIDTH, dtype=torch.float64, generator=generator) for _ in range(3)]


def through(stages: Sequence[Any], x: Tensor) -> Any:
    """Return the output of the last stage, which receives copies of what the others send."""
    value: Any = (x,)
    for stage in stages:
        value = stage(*value)
        if isinstance(value, tuple):
            value = [tensor.clone() for tensor in value[0]], value[1]
    return value


def check_equal(model: nn.Module, cuts: Sequence[str], with_example: bool) -> None:
    """Check the outputs and gradients of three calls."""
    plain = copy.deepcopy(model)
    stages = split_model(model, cuts, (inputs()[0],) if with_example else None)
    for x in inputs():
        found, wanted = through(stages, x), plain(x)
        assert torch.allclose(found, wanted, rtol=1e-13, atol=1e-13)
        found.sum().backward()
        wanted.sum().backward()
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (parameter.grad is None) == (other.grad is None), name
        assert other.grad is None or torch.allclose(parameter.grad, other.grad, rtol=1e-12, atol=1e-13), name


class Router(nn.Module):
    """A linear layer that leaves a tensor, a count and a statistic in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.last: Any = torch.zeros(())
        self.calls, self.stats = 0, {"calls": 0}

    def forward(self, x):
        self.calls += 1
        self.stats["calls"] += 1
        self.last = self.linear(x)
        return self.last


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = Router()

    def forward(self, x):
        return self.router(x)


class InnerAttribute(Model):
    def make(self) -> None:
        self.a = Block()

    def forward(self, x):
        return self.c(self.b(self.a(x))) + self.a.router.last


class InnerCount(InnerAttribute):
    def forward(self, x):
        return self.c(self.b(self.a(x))) * self.a.router.calls


class InnerStatistic(InnerAttribute):
    def forward(self, x):
        return self.c(self.b(self.a(x))) * self.a.router.stats["calls"]


class InnerOfOneStage(InnerAttribute):
    """All of them, read in the stage that sets them."""

    def forward(self, x):
        y = self.a(x) + self.a.router.last
        return self.c(self.b(y * self.a.router.calls * self.a.router.stats["calls"]))


class Writes(nn.Module):
    """A linear layer that leaves plain values in its arguments."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.linear, self.counts, self.calls = nn.Linear(WIDTH, WIDTH), counts, 0

    def forward(self, x, state):
        self.calls += self.counts
        state["scale"] = 2.0 + self.calls
        state["list"].append(3.0)
        state["new"] = {"shift": 4.0}
        del state["old"]
        return self.linear(x)


class Arguments(Model):
    """A dict that a submodule changes, with the same numbers in each call."""

    counts = False

    def make(self) -> None:
        self.a = Writes(self.counts)

    def forward(self, x):
        state: Any = {"scale": 1.0, "old": 5.0, "list": []}
        h = self.b(self.a(x, state))
        return self.c(h) * state["scale"] * state["list"][0] + state["new"]["shift"] + len(state)


class Counted(Arguments):
    counts = True


class Annealed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.factor, self.temperature = nn.Linear(WIDTH, WIDTH), 0.5, 1.0

    def forward(self, x):
        self.temperature *= self.factor
        return self.linear(x), self.temperature, [WIDTH]


class Temperature(Model):
    def make(self) -> None:
        self.a = Annealed()

    def forward(self, x):
        y, temperature, more = self.a(x)
        more.append(1)
        return self.c(self.b(y)) * temperature * len(more)


class Constant(Temperature):
    """A number and a list that a submodule returns, which stay the same."""

    def make(self) -> None:
        super().make()
        self.a.factor = 1.0


class OwnTensors(Model):
    """Tensors that the code around the cuts makes with functions that no mode of torch sees, and changes."""

    def forward(self, x):
        scale = torch.Tensor(WIDTH).fill_(2.0)
        shift = torch.from_numpy(np.ones(WIDTH))
        shift += 1
        return self.c(self.b(self.a(x) * scale) + shift) * shift


class Parametrized(Model):
    """A weight of another stage that a module without parameters computes."""

    def make(self) -> None:
        nn.utils.parametrizations.weight_norm(self.a)

    def forward(self, x):
        return self.c(self.b(self.a(x))) @ self.a.weight


class Grown(Model):
    """A list, a dict and a set that grow with each call."""

    def make(self) -> None:
        self.seen: list[int] = []
        self.nested = {"set": set[int](), "more": (list[int](),)}

    def forward(self, x):
        self.seen.append(1)
        y = self.b(self.a(x) * len(self.seen))
        self.nested["set"].add(len(self.seen))
        self.nested["more"][0].append(1)
        return self.c(y) * len(self.seen) * len(self.nested["set"]) * len(self.nested["more"][0])


class Waiting(threading.Thread):
    """A thread that draws nothing, as that of a progress bar."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.event = threading.Event()

    def run(self) -> None:
        self.event.wait()


@pytest.fixture
def thread():
    waiting = Waiting()
    waiting.start()
    yield
    waiting.event.set()
    waiting.join()


class DrawnByName(Model):
    def forward(self, x):
        return self.c(self.b(self.a(x) * draw()) * draw())


class DrawnByNameFromNumPy(Model):
    def forward(self, x):
        return self.c(self.b(self.a(x) * float(beta(1.0, 2.0))))


class Sources(Model):
    def make(self) -> None:
        self.sources = {"depth": [random.Random(0)]}

    def forward(self, x):
        source = self.sources["depth"][0]
        return self.c(self.b(self.a(x)) * source.random()) * source.random()


source = np.random.default_rng(0)


def noise() -> float:
    return float(source.random())


class GlobalSource(Model):
    def forward(self, x):
        return self.c(self.b(self.a(x)) * noise()) * noise()


class GlobalInSubmodule(Model):
    """A global generator in a submodule, which the trace leaves where it was."""

    def make(self) -> None:
        self.b = Noisy()

    def forward(self, x):
        return self.c(self.b(self.a(x)))


class Noisy(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x):
        return super().forward(x) * noise()


def test_a_trace_leaves_global_sources_where_they_were():
    before = source.bit_generator.state
    split_model(GlobalInSubmodule(), ["b", "c"], (inputs()[0],))
    assert source.bit_generator.state == before


DATA = [[index] for index in range(100_000)]


class GlobalData(Model):
    def forward(self, x):
        return self.c(self.b(self.a(x))) * DATA[1][0]


def test_a_global_data_set_is_not_searched_whole():
    """Nor are the global values of a checker of types, which may hold the arguments of all that runs."""
    assert len([*reached_by(GlobalData().modules())]) < 5_000
    assert not [value for value in reached_by([Typed()]) if type(value).__module__.startswith("jaxtyping")]
    check_equal(GlobalData(), ["b"], True)


class Typed(Model):
    @jaxtyped(typechecker=beartype)
    def forward(self, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        return self.c(self.b(self.a(x)))


def test_draws_of_type_checkers_and_other_threads_are_not_refused(thread):
    """Here beartype draws in annotated functions of the code around the cut."""
    check_equal(Checked(), ["b"], True)


@beartype
def test_a_running_profiler_goes_on():
    """cProfile's does not come back by sys.setprofile, which takes functions."""
    profiler = cProfile.Profile()
    profiler.enable()
    split_model(Typed(), ["b", "c"], (inputs()[0],))
    copy.copy([])
    profiler.disable()
    names = {name for _, _, name in pstats.Stats(profiler).stats}  # pyright: ignore[reportAttributeAccessIssue]
    assert "copy" in names


def first_of(values: list[Any]) -> Any:
    return values[0]


class Checked(Model):
    def forward(self, x):
        return self.c(self.b(first_of([self.a(x), x])) + first_of([x, x, x]))


class ChangedView(Model):
    """A received tensor, changed in place by a stage that makes the views of it itself."""

    def forward(self, x):
        h = self.a(x)
        keep = h.detach() > 0
        y = self.b(h)
        rows = keep[:, :2]
        keep &= x < 0.5
        return self.c(y * keep) * rows.sum() + h


class AliasedChange(Model):
    """A received tensor, changed in place, and a view of it that an earlier stage has made."""

    def forward(self, x):
        keep = x > 0
        first = keep[:, :2]
        h = self.b(self.a(x))
        keep &= x < 0.5
        return self.c(h) * keep + first.sum()


class EarlyHook(Model):
    """A hook on the gradient of a tensor that two stages read."""

    def forward(self, x):
        h = self.a(x)
        h.register_hook(lambda gradient: 2 * gradient)
        return self.c(self.b(h)) + h


class LateHook(Model):
    def forward(self, x):
        h = self.a(x)
        y = self.c(self.b(h))
        h.register_hook(lambda gradient: 2 * gradient)
        return y


class ParameterHook(Model):
    def forward(self, x):
        self.a.weight.register_post_accumulate_grad_hook(lambda parameter: None)
        return self.c(self.b(self.a(x)))


@lru_cache
def mask_of(width: int) -> Tensor:
    return torch.full((width, width), -1.0, dtype=torch.float64).triu(1)


masks: dict[int, Tensor] = {}


class Masked(nn.Linear):
    """A linear layer and two masks that global caches hold."""

    def forward(self, x):
        if WIDTH not in masks:
            masks[WIDTH] = torch.ones(WIDTH, WIDTH, dtype=x.dtype).tril(1)
        return super().forward(x) @ mask_of(WIDTH) @ masks[WIDTH]


class GlobalMasks(Model):
    def make(self) -> None:
        self.a, self.b = Masked(WIDTH, WIDTH), Masked(WIDTH, WIDTH)

    def forward(self, x):
        return self.c(self.b(self.a(x)))


def test_global_caches_hold_no_tensors_of_the_trace(unchecked_shapes):
    masks.clear()
    mask_of.cache_clear()
    split_model(GlobalMasks(), ["b", "c"], (inputs()[0],))
    assert not masks
    assert type(mask_of(WIDTH)) is Tensor
    masks.clear()
    mask_of.cache_clear()
    check_equal(GlobalMasks(), ["b", "c"], False)


class Chosen(nn.Linear):
    def forward(self, x):
        return super().forward(x) if x.max() > 0 else x


class Selected(nn.Linear):
    def forward(self, x):
        return super().forward(x[x[:, 0] > 0])


class ChosenByElements(Model):
    def make(self) -> None:
        self.a = Chosen(WIDTH, WIDTH)

    def forward(self, x):
        return self.c(self.b(self.a(x)))


class SelectedByElements(ChosenByElements):
    def make(self) -> None:
        self.a = Selected(WIDTH, WIDTH)


EQUAL = {
    "received tensor, changed in place": ChangedView,
    "hook in the stage of its tensor": EarlyHook,
    "tensors of its own": OwnTensors,
    "containers that grow": Grown,
    "attribute of the same stage": InnerOfOneStage,
    "numbers in an argument": Arguments,
    "constant result": Constant,
}


@pytest.mark.parametrize("name", EQUAL)
@pytest.mark.parametrize("with_example", [False, True])
def test_stages_compute_what_the_model_does(unchecked_shapes, name, with_example):
    check_equal(EQUAL[name](), ["b", "c"], with_example)


def test_a_parametrized_weight_of_another_stage_is_computed(unchecked_shapes):
    check_equal(Parametrized(), ["b", "c"], True)


class Refused(NamedTuple):
    model: type[Model]
    says: str


DRAW = "a draw from Python's random or from NumPy .* draw in a submodule"
REFUSED = {
    "change of a tensor with a view": Refused(
        AliasedChange,
        r"function '__iand__' in stage 1 .* of which .* a view made earlier; .* or clone the view",
    ),
    "hook of another stage": Refused(LateHook, r"got 'register_hook' in stage 2; call it before the next cut"),
    "hook of a parameter": Refused(ParameterHook, r"hooks to parameters, got .* on 'a\.weight'; register the"),
    "choice by elements": Refused(
        ChosenByElements, r"expected submodule 'a' to have operations and .* torch\.where in"
    ),
    "elements that are selected": Refused(
        SelectedByElements, r"expected submodule 'a' to have operations and .* got aten"
    ),
    "random, imported by name": Refused(DrawnByName, DRAW),
    "NumPy, imported by name": Refused(DrawnByNameFromNumPy, DRAW),
    "sources in containers": Refused(Sources, DRAW),
    "global source": Refused(GlobalSource, DRAW),
    "inner attribute": Refused(InnerAttribute, r"in stage 2 .* attribute 'a\.router\.last', which .* return it from"),
    "inner count": Refused(InnerCount, r"in stage 2 .* attribute 'a\.router\.calls', which .* return it from"),
    "inner statistic": Refused(InnerStatistic, r"in stage 2 .* attribute 'a\.router\.stats', which .* return it from"),
    "count in an argument": Refused(
        Counted, r"plain values that submodule 'a' puts into an argument .* got 4\.0 instead of 3\.0; .* as a tensor"
    ),
    "changing result": Refused(
        Temperature, r"plain values that submodule 'a' returns .* got 0\.25 instead of 0\.5; .* as a tensor"
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("with_example", [False, True])
def test_what_stages_cannot_know_is_refused_by_name(unchecked_shapes, thread, name, with_example):
    """Also while another thread lives."""
    kind, says = REFUSED[name]
    with pytest.raises(ValueError, match=says):
        check_equal(kind(), ["b", "c"], with_example)


class Remembering(Model):
    """Its first stage reads and changes a state."""

    def make(self) -> None:
        self.state = torch.zeros(3, WIDTH, dtype=torch.float64)

    def forward(self, x):
        h = self.a(x) + self.state
        self.state = h.detach()
        return self.c(self.b(h))


class CalledBackwards(Model):
    """Calls its submodules against the order of their registration."""

    def forward(self, x):
        return self.a(self.b(self.c(x)))


def test_a_state_of_one_stage_before_a_cut_is_kept(unchecked_shapes):
    check_equal(Remembering(), ["b", "c"], with_example=True)


def test_cuts_may_be_against_the_order_of_registration_with_an_example(unchecked_shapes):
    check_equal(CalledBackwards(), ["b", "a"], with_example=True)
    with pytest.raises(ValueError, match="cuts: expected submodules in order, got 'b' before 'a'"):
        split_model(CalledBackwards(), ["b", "a"])


HOOKS = {
    "forward hook": lambda model: model.register_forward_hook(lambda module, given, output: output),
    "forward pre-hook": lambda model: model.register_forward_pre_hook(lambda module, given: None),
    "backward hook": lambda model: model.register_full_backward_hook(lambda module, given, output: None),
    "backward pre-hook": lambda model: model.register_full_backward_pre_hook(lambda module, output: None),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_on_the_whole_model_are_refused_by_name(kind):
    model = CalledBackwards()
    HOOKS[kind](model)
    with pytest.raises(ValueError, match=f"model: expected no hooks on the whole model, .* got a {kind}; register it"):
        split_model(model, ["b", "a"], (inputs()[0],))
