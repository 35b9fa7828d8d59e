"""Models cut by split_model: equal to the single-device model, or refused where Python passes what no tensor shows."""

import copy
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from reference_torch.offload import offload_modules
from reference_torch.pipeline import split_model
from reference_torch.recompute import recompute_modules


class Model(nn.Module):
    """Blocks with what a subclass does around them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.scale = nn.Parameter(torch.randn(4))
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.double()

    def run(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


class Skips(Model):
    """Tensors of early parts read late, a parameter read late, and a module called in two parts."""

    def forward(self, x):
        first = self.head(x) * self.scale
        y = self.run(first)
        return self.head(y) * self.scale + first + x


class Noise(Model):
    """Positions, which every stage makes for itself, and random numbers, which the first draws for all."""

    def forward(self, x):
        noise = torch.rand(4, dtype=torch.float64) * torch.arange(4)
        return self.run(x + noise) + noise


class Heads(Model):
    """A container registered before the blocks and read after them."""

    def forward(self, x):
        x = self.run(x)
        for head in self.heads:
            x = head(x)
        return x


class Scratch(Model):
    """A tensor of zeros into which an early part writes."""

    def forward(self, x):
        scratch = torch.zeros(len(x), 4, dtype=torch.float64)
        y = torch.tanh(self.blocks[0](x))
        scratch[:, :2] = y[:, :2]
        return self.blocks[2](self.blocks[1](y)) + scratch


class Listed(Model):
    """The parameters of all submodules, read at the end."""

    def forward(self, x):
        self.run(x)
        return x + sum(p.pow(2).mean() for p in self.parameters())


class Elements(Model):
    """Enclosing code that decides by the elements of an argument."""

    def forward(self, x):
        return self.run(x) if (x > 0).any() else x


def gradients_of(model: nn.Module, output: Tensor) -> Any:
    """Return the gradient of each parameter, or None."""
    return [*torch.autograd.grad(output.sum(), [*model.parameters()], allow_unused=True)]


def through(stages: Any, x: Tensor) -> Any:
    value: Any = (x,)
    for stage in stages:
        value = stage(*value) if isinstance(value, tuple) else stage(value)
    return value


class Lists(Model):
    """Lists of submodules that one stage calls, and the next runs through as well."""

    def forward(self, x):
        for head in self.heads:
            x = head(x)
        return self.run(x)


@pytest.mark.parametrize("kind", [Skips, Noise, Heads, Lists, Listed])
def test_the_stages_compute_what_the_model_does(kind):
    model, x = kind(), torch.randn(3, 4, dtype=torch.float64)
    torch.manual_seed(7)
    expected = model(x)
    wanted = gradients_of(model, expected)
    stages = split_model(model, ["blocks.1", "blocks.2"], (x,))
    torch.manual_seed(7)
    found = through(stages, x)
    assert torch.equal(found, expected)
    gradients = gradients_of(model, found)
    for gradient, want in zip(gradients, wanted, strict=True):
        assert gradient is want is None or torch.equal(gradient, want)
    names = {name for stage in stages for name in stage.state_dict()}
    assert names == model.state_dict().keys()


REFUSED = {
    "a sequence looks empty": (
        Skips,
        False,
        "expected submodule 'head' in stage 1, which calls it, .* give split_model example_args",
    ),
    "a write into zeros": (Scratch, True, r"not to write activations into a tensor that it makes .*x\.new_zeros"),
    "all parameters": (Listed, False, "got none|takes another path, by|give split_model example_args"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_stages_cannot_see_is_refused(name):
    kind, with_example, says = REFUSED[name]
    x = torch.randn(3, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match=says):
        through(split_model(kind(), ["blocks.1"], (x,) if with_example else None), x)


def test_decisions_by_elements_are_explained():
    x = torch.randn(3, 4, dtype=torch.float64)
    with pytest.raises(RuntimeError) as error:
        split_model(Elements(), ["blocks.1"], (x,))
    assert "depends on elements, cut the model by hand" in error.value.__notes__[0]


class Counts(Model):
    """Code around the cuts that changes a buffer, in place or by another tensor, and reads it in one stage or two."""

    def __init__(self, replaces: bool = False, read_late: bool = False) -> None:
        super().__init__()
        self.replaces, self.read_late = replaces, read_late
        self.register_buffer("steps", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        if self.replaces:
            self.steps = self.steps + 1
        else:
            self.steps += 1
        y = self.run(x * self.steps)
        return y * self.steps if self.read_late else y


@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("with_example", [False, True])
def test_a_buffer_that_the_code_around_the_cuts_changes_belongs_to_one_stage(replaces, with_example):
    x = torch.randn(3, 4, dtype=torch.float64)
    model, plain = Counts(replaces), Counts(replaces)
    stages = split_model(model, ["blocks.1", "blocks.2"], (x,) if with_example else None)
    for _ in range(3):
        assert torch.equal(through(stages, x), plain(x))
    assert torch.equal(stages[0].state_dict()["steps"], plain.state_dict()["steps"])
    assert all("steps" not in stage.state_dict() for stage in stages[1:])


def test_a_changed_buffer_that_two_stages_use_is_refused():
    with pytest.raises(ValueError, match=r"buffer 'steps', which stage 0 changes .* got it used in stage 1; move it"):
        split_model(Counts(read_late=True), ["blocks.1"], (torch.randn(3, 4, dtype=torch.float64),))


def test_stages_that_ran_are_copied_and_compute_the_same():
    model, x = Skips(), torch.randn(3, 4, dtype=torch.float64)
    stages = split_model(model, ["blocks.1"], (x,))
    expected = through(stages, x)
    copied = copy.deepcopy(stages)
    assert torch.equal(through(copied, x), expected)
    assert {p.data_ptr() for stage in copied for p in stage.parameters()}.isdisjoint(
        p.data_ptr() for p in model.parameters()
    )


class Products(TorchDispatchMode):
    """A mode that counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.addmm.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("early_stop", [False, True])
def test_a_stage_may_run_for_the_first_time_in_a_checkpoint(early_stop):
    """The trace with fake tensors saves nothing there."""
    model, x = Lists(), torch.randn(3, 4, dtype=torch.float64)
    wanted = gradients_of(model, model(x))
    first, second = split_model(model, ["blocks.1"])
    with Products() as products, set_checkpoint_early_stop(early_stop):
        sent = first(x)
        found = checkpoint(second, *sent, use_reentrant=False)
    assert products.count == 5, "one of each linear layer, and none with fake tensors"
    gradients = gradients_of(model, found)
    for gradient, want in zip(gradients, wanted, strict=True):
        assert gradient is want is None or torch.equal(gradient, want)


class Block(nn.Module):
    """A residual block of a norm and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x):
        return x + self.linear(torch.tanh(self.norm(x)))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.double()

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("blocks", ["blocks.*", ""])
@pytest.mark.parametrize("cut", ["blocks.1", "blocks.1.linear"])
def test_recompute_stays_when_the_model_is_split(blocks, cut):
    """Also in a block in which a stage begins, and in the model as one block."""
    x = torch.randn(3, 4, dtype=torch.float64)
    model = Blocks()
    wanted = gradients_of(model, model(x))
    recompute_modules(model, {blocks: ["blocks.*.norm" if blocks == "" else "norm"]})
    stages = split_model(model, [cut], (x,))
    found = through(stages, x)
    assert sum("Recomputed" in type(m.__dict__.get("forward")).__name__ for s in stages for m in s.modules()) >= 3
    for gradient, want in zip(gradients_of(model, found), wanted, strict=True):
        assert torch.equal(gradient, want)


def test_a_forward_of_the_instance_is_that_of_the_stages():
    model, x = Blocks(), torch.randn(3, 4, dtype=torch.float64)

    def forward(self, x):
        for block in self.blocks:
            x = block(x) * 2
        return x

    model.forward = MethodType(forward, model)
    assert torch.equal(through(split_model(model, ["blocks.1"], (x,)), x), model(x))


def test_techniques_name_a_submodule_in_which_a_cut_lies():
    x = torch.randn(3, 4, dtype=torch.float64)
    first, _ = split_model(Blocks(), ["blocks.1.linear"], (x,))
    says = r"whole in one stage, got .*'blocks\.1', in which .*; name submodules of it"
    with pytest.raises(ValueError, match=says):
        offload_modules(first, ["blocks.1"])
    recompute_modules(first, {"": ["blocks.1"]})
    with pytest.raises(ValueError, match=says):
        first(x)


@pytest.mark.parametrize(
    ("cuts", "says"),
    [
        ([], "expected a list of names of submodules"),
        ("blocks.1", "expected a list of names of submodules"),
        (["blocks.9"], r"expected names of submodules, such as heads, .* got 'blocks.9'"),
        (["blocks.1", "blocks.1"], "expected different submodules"),
        (["blocks.2", "blocks.1"], "expected submodules in order, got 'blocks.2' before 'blocks.1'"),
    ],
)
def test_wrong_cuts_are_named(cuts, says):
    with pytest.raises(ValueError, match=says):
        split_model(Skips(), cuts)


def test_a_submodule_under_two_names_is_refused():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.last = nn.LayerNorm(8), nn.Linear(8, 8)
            self.again = self.norm

        def forward(self, x):
            return self.last(self.again(self.norm(x)))

    with pytest.raises(ValueError, match="got 'norm' and 'again' for the same one"):
        split_model(Twice(), ["last"])
