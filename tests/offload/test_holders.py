"""A memory that somebody else uses stays on the device, and the statistics name it."""

import pytest
import torch
from torch import nn

from diptych.plans.offload import describe_statistics, total_statistics
from tests.offload.support import LAYERS, assert_equal_state, batch, build, train

IN_USE = "its storage is used by others"

ALIASES = {
    "detached": lambda p: p.detach(),
    "data": lambda p: p.data,
    "view": lambda p: p.view(-1),
    "slice": lambda p: p.detach()[1:],
    "numpy": lambda p: p.detach().numpy(),
    "storage": lambda p: torch.empty(0, dtype=p.dtype).set_(p.untyped_storage(), 0, p.shape, p.stride()),
}


@pytest.mark.parametrize("alias", ALIASES)
@pytest.mark.parametrize("n", [0, 1])
def test_an_alias_stays_good(managers, alias, n):
    """Made before an eviction or after it, read and written later."""
    plain, ours = build(), build()
    manager = managers(ours, n)
    held = []
    for model in (plain, ours):
        held.append([ALIASES[alias](layer.wide.weight) for layer in model.layers[1:3]])
    for model, aliases in zip((plain, ours), held, strict=True):
        train(model, 2, manager if model is ours else None)
        for one in aliases:
            with torch.no_grad():
                one *= 0.5
        train(model, 2, manager if model is ours else None)
    for a, b in zip(*held, strict=True):
        assert (torch.as_tensor(a) == torch.as_tensor(b)).all()
    assert_equal_state(ours, plain)


def test_what_is_held_is_named_and_leaves_when_it_is_let_go(managers):
    model = build()
    manager = managers(model, 0)
    assert manager.stats["retained"] == {}
    weight = model.layers[1].wide.weight
    alias = weight.detach()
    before = manager.device_bytes
    manager.offload_all_layers()
    assert manager.stats["retained"] == {"wide.weight of layer 1": IN_USE}
    assert manager.device_bytes == alias.nbytes < before
    assert manager.stats["peak_bytes"] == alias.nbytes
    assert f"stays on the device: wide.weight of layer 1 ({IN_USE})" in describe_statistics(manager.stats)
    alias.zero_()
    del alias
    manager.require(1)
    manager.offload_all_layers()
    assert manager.stats["retained"] == {}
    assert manager.device_bytes == 0
    assert not weight.any()


def test_what_was_kept_from_the_beginning_is_named(managers):
    layer = nn.Linear(2, 2)
    held = layer.bias.detach()
    manager = managers([layer], 0)
    assert manager.stats["retained"] == {"bias of layer 0": IN_USE}
    assert total_statistics([manager.stats, manager.stats])["retained"] == {"bias of layer 0": IN_USE}
    assert held.untyped_storage().nbytes()


def test_aliases_never_reach_the_guard_of_empty_memories(managers):
    """Where an empty storage points at one buffer of NaN, a write through an alias would be seen by all others."""
    model = build()
    aliases = [p.detach() for p in model.parameters()]
    manager = managers(model, 0)
    more = [p.detach() for layer in model.layers for p in layer.parameters()]
    manager.offload_all_layers()
    for alias in [*aliases, *more]:
        assert alias.isfinite().all()
        alias.zero_()
    manager.offload_all_layers()
    other = build()
    managers(other, 0)
    assert_equal_state(other, build())


@pytest.mark.parametrize("n", [0, 1])
def test_graphs_made_outside_of_a_layer_find_its_weights(managers, n):
    """A penalty on all weights, whose backward comes when layers have left."""
    gradients = []
    for model in (build(), build()):
        if gradients:
            manager = managers(model, n)
        penalty = sum((p**2).sum() for p in model.parameters())
        with torch.no_grad():
            model(batch())
        if gradients:
            assert len(manager.stats["retained"]) >= (LAYERS - n - 1) * 6
        penalty.backward()
        gradients.append([p.grad for p in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("n", [0, 1])
def test_frozen_weights_of_graphs_made_outside(managers, n):
    """Such a graph holds no node of theirs, only the tensors."""
    gradients = []
    for model in (build(), build()):
        model.requires_grad_(False)
        if gradients:
            managers(model, n)
        x = torch.ones(3 * 8, 8, dtype=torch.float64, requires_grad=True)
        y = sum((x * layer.wide.weight).sin().sum() for layer in model.layers)
        with torch.no_grad():
            model(batch())
        y.backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_a_backward_from_before_registration_finds_its_weights(managers):
    gradients = []
    for model in (build(), build()):
        loss = model(batch()).square().mean()
        if gradients:
            managers(model, 0)
        loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


def test_a_function_that_keeps_an_alias_itself(managers):
    """Where no hook on saved tensors sees it."""

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.alias = weight.detach()
            return x * weight.sum()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * ctx.alias.sum(), None

    class Scaling(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.full((3,), 0.5))

        def forward(self, x):
            return Scale.apply(x, self.weight)

    gradients = []
    for offload in (False, True):
        layers = [Scaling() for _ in range(3)]
        if offload:
            managers(layers, 0)
        x = torch.ones(2, requires_grad=True)
        layers[2](layers[1](layers[0](x))).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)
