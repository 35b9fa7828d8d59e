"""Models cut by split_model: equal to the undivided model, or refused where Python passes what no tensor shows."""

import pytest
import torch
from torch import nn

from reference_torch.pipeline import split_model


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
    """A list of what blocks have returned, read at the end."""

    def forward(self, x):
        self.run(x)
        return x + sum(p.pow(2).mean() for p in self.parameters())


class Elements(Model):
    """Enclosing code that decides by the elements of an argument."""

    def forward(self, x):
        return self.run(x) if (x > 0).any() else x


def through(stages, x):
    value = (x,)
    for stage in stages:
        value = stage(*value) if isinstance(value, tuple) else stage(value)
    return value


@pytest.mark.parametrize("kind", [Skips, Noise])
def test_the_stages_compute_what_the_model_does(kind):
    model, x = kind(), torch.randn(3, 4, dtype=torch.float64)
    torch.manual_seed(7)
    expected = model(x)
    wanted = torch.autograd.grad(expected.sum(), model.parameters(), allow_unused=True)
    stages = split_model(model, ["blocks.1", "blocks.2"], (x,))
    torch.manual_seed(7)
    found = through(stages, x)
    assert torch.equal(found, expected)
    gradients = torch.autograd.grad(found.sum(), model.parameters(), allow_unused=True)
    for gradient, want in zip(gradients, wanted, strict=True):
        assert (gradient is None and want is None) or torch.equal(gradient, want)
    names = {name for stage in stages for name in stage.state_dict()}
    assert names == model.state_dict().keys()


REFUSED = {
    "a container looks empty": (Heads, True, "as call .* of the model's forward, in stage .*, got none"),
    "a sequence looks empty": (
        Skips,
        False,
        "expected submodule 'head' in stage 1, which calls it, .* give split_model example_args",
    ),
    "a write into zeros": (Scratch, True, r"not to write activations into a tensor that it makes .*x\.new_zeros"),
    "all parameters": (Listed, True, "got none|takes another path, by"),
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
