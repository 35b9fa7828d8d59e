"""Activations leave and come back as planned, and gradients are those of activations that stayed."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from diptych.plans.offload import Use, pass_uses, step_uses
from reference_torch.offload import OffloadError, TensorOffloadManager
from reference_torch.offload.link import Link
from reference_torch.recompute import CheckpointWithoutOutput, measure_memory, name_value
from tests.offload.jobs import activation_events
from tests.offload.support import (
    ACTIVATIONS,
    CONFIG,
    LAYERS,
    MODES,
    Net,
    assert_equal_state,
    batch,
    build,
    check_a_step,
    train,
)

MOVED = {"activations": True, "activation_min_bytes": 1}


@pytest.mark.parametrize("parameters", [True, False])
@pytest.mark.parametrize("n", [0, 1, 2, LAYERS])
def test_activations_leave_and_come_back_as_planned(n, parameters, managers):
    plain, ours = build(), build()
    manager = managers(ours, n, parameters=parameters, **MOVED)
    for a, b in zip(train(ours, 3, manager), train(plain, 3), strict=True):
        assert torch.equal(a, b)
    assert_equal_state(ours, plain)
    assert [event for event in manager.trace if "a" in event] == activation_events(step_uses(range(LAYERS)) * 3, n)
    if n >= LAYERS:
        assert manager._residency.activations.pool.allocated == 0


def test_activations_are_moved_once_and_parameters_never(managers):
    """Views leave with their base; what is small stays; the pool is full after one step."""

    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16, 16))

        def forward(self, x):
            wide = torch.tanh(x)
            left, right = wide[:, :8], wide[:, 8:]
            return (left * right).exp().repeat(1, 2) @ self.weight + (wide * wide) + wide[:2, :2].square().sum().sin()

    x = torch.randn(64, 16)
    layers = nn.ModuleList(Views() for _ in range(3))
    manager = managers(layers, 0, parameters=False, activations=True, activation_min_bytes=64)
    allocated = []
    for _ in range(3):
        out = x
        for layer in layers:
            out = layer(out)
        out.sum().backward()
        allocated.append(manager._residency.activations.pool.allocated)
    whole, half = x.nbytes, x.nbytes // 2
    # Of the layers that leave, all but the last: what the weight is multiplied by, and where the input wants a
    # gradient, tanh's result and exp's.
    assert manager.stats["bytes_out"] == manager.stats["bytes_in"] == 3 * (whole + (whole + whole + half))
    assert allocated[1:] == allocated[:1] * 2


def test_values_of_some_names_leave(managers):
    """Of layer 0 one value by name, of layer 1 all, of layer 2 a name that it does not save; the last layer stays."""

    class Named(nn.Module):
        def forward(self, x):
            wide = name_value(torch.tanh(x), "fc1")
            inner = name_value(wide * wide, "activation")
            return name_value(inner[:, :8].exp() * inner[:, 8:], "mlp_output").repeat(1, 2).square()

    layers = nn.ModuleList(Named() for _ in range(4))
    moved = {"activation_layers": [0, 1, 2, 3], "activation_values": {0: {"activation"}, 2: {"h_pre"}}}
    manager = managers(layers, 0, parameters=False, activations=True, activation_min_bytes=1, **moved)
    results = []
    for model in (layers, [Named() for _ in range(4)]):
        x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
        out = x
        for layer in model:
            out = layer(out)
        out.sum().backward()
        results.append(x.grad)
    assert torch.equal(*results)
    # activation of layer 0; of layer 1 tanh's result, the product, exp's result and the input of the square
    whole = x.nbytes
    assert manager.stats["bytes_out"] == manager.stats["bytes_in"] == whole + (3 * whole + whole // 2)
    assert [event for event in manager.trace if "a" in event] == ["-a0.0", "-a1.0", "+a1.0", "+a0.0"]


def test_a_value_that_two_layers_save_by_name_leaves_once_for_both(managers):
    """While the second layer runs, the copy for the first is on its way."""

    class Gate(nn.Module):
        def forward(self, x, shared):
            return torch.sin(x) * name_value(shared, "fc1")

    layers = nn.ModuleList(Gate() for _ in range(4))
    names = {"activation_values": {key: ["fc1"] for key in range(4)}}
    manager = managers(layers, 0, parameters=False, activations=True, activation_min_bytes=1, **names)
    x = torch.randn(64, 16, requires_grad=True)
    shared = x.exp()
    out = x
    for layer in layers:
        out = layer(out, shared)
    out.sum().backward()
    assert [event for event in manager.trace if "a" in event][:3] == ["-a0.0", "-a1.0", "-a2.0"]
    assert manager.stats["bytes_out"] == manager.stats["bytes_in"] == 2 * x.nbytes  # layer 2 saves it anew


def test_names_of_values_that_layers_cannot_have_are_refused():
    for values, error, message in (
        ({0: {"fc_1"}}, ValueError, "activation_values: expected names that name_value accepts, .*, got 'fc_1' for"),
        ({0: "fc1"}, TypeError, "activation_values: expected names such as .* for layer 0, got 'fc1'"),
    ):
        with pytest.raises(error, match=message):
            TensorOffloadManager(activations=True, activation_values=values)


def test_vmap_around_a_layer_with_named_values(managers):
    """Its tensors have no memory to name, so they stay."""

    class Named(nn.Module):
        def forward(self, x):
            return name_value(torch.tanh(x), "fc1").square()

    layer = Named()
    manager = managers(nn.ModuleList([layer]), 0, activations=True, activation_values={0: {"fc1"}})
    x = torch.randn(3, 4, requires_grad=True)
    torch.vmap(layer)(x).sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(torch.tanh(x).square().sum(), x)[0])
    assert manager.stats["bytes_out"] == 0


def test_activations_really_leave(managers):
    """Counted by PyTorch's allocator: what is held after forward is two groups and the boundaries."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            y = x @ self.weight
            for _ in range(4):
                y = torch.tanh(y)
            return y + x

    x = torch.randn(2**14, 4)
    layers = nn.ModuleList(Wide() for _ in range(8))

    def forward() -> torch.Tensor:
        out = x
        for layer in layers:
            out = layer(out)
        return out.sum()

    saved = measure_memory(forward, lambda loss: loss.backward()).saved
    managers(layers, 0, parameters=False, activations=True, activation_min_bytes=1024)
    forward().backward()  # fills the pool
    left = measure_memory(forward, lambda loss: loss.backward()).saved
    assert saved >= 7 * 5 * x.nbytes
    assert left <= 2 * 5 * x.nbytes + x.nbytes


def test_activations_of_several_microbatches(managers):
    """In flight together, backwards in another order, announced or not."""
    uses = [use for m in range(3) for use in pass_uses(range(LAYERS), False, microbatch=m)]
    for place in (1, 2, 0):
        uses += pass_uses(range(LAYERS), True, forward=False, microbatch=place)
    results = []
    for announced in (None, True, False):
        model = build()
        if announced is not None:
            manager = managers(model, 1, **MOVED)
            if announced:
                manager.expect(uses)
        losses = [model(batch(step)).square().mean() for step in range(3)]
        for place in (1, 2, 0):
            losses[place].backward()
        if announced:
            step = [Use("S", n) for n in range(LAYERS)]
            assert [event for event in manager.trace if "a" in event] == activation_events(uses, 1, step)
        results.append([p.grad for p in model.parameters()])
    for plain, *others in zip(*results, strict=True):
        assert all(torch.equal(plain, other) for other in others)


def test_activations_of_a_graph_that_is_kept(managers):
    """Run through twice, in part, and differentiated again."""
    results = []
    for model in (build(), build()):
        if results:
            managers(model, 0, **MOVED)
        x = batch().requires_grad_()
        out = model(x).square().sum()
        found = [*torch.autograd.grad(out, [x], retain_graph=True)]
        out.backward(retain_graph=True)
        out.backward()
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        gradient.square().sum().backward()
        results.append([*found, x.grad, *(p.grad for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("when", ["in forward", "while it leaves"])
def test_an_activation_written_after_it_was_kept_is_named(when, managers, monkeypatch):
    class Writing(nn.Module):
        def forward(self, x):
            self.hidden = torch.exp(x)
            out = self.hidden * 1.0
            if when == "in forward":
                self.hidden.mul_(2.0)
            return out

    layers = nn.ModuleList([Writing(), nn.Linear(4, 4)])
    managers(layers, 0, parameters=False, **MOVED)
    monkeypatch.setattr(Link, "delay", lambda self, nbytes: 0.02 if when == "while it leaves" else 0.0)
    x = torch.randn(3, 4, requires_grad=True)

    def run() -> None:
        out = layers[0](x)
        if when == "while it leaves":
            layers[0].hidden.mul_(2.0)
        layers[1](out).sum().backward()

    with pytest.raises(OffloadError, match=r"backward: expected values saved for backward unchanged, got one modified"):
        run()


@pytest.mark.parametrize("while_it_leaves", [False, True])
def test_a_value_written_in_place_without_a_backward_is_no_error(managers, monkeypatch, while_it_leaves):
    """As in the plain model, only a backward that reads the value fails; other values of the layer are moved."""
    layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))
    managers(layers, 0, parameters=False, **MOVED)
    monkeypatch.setattr(Link, "delay", lambda self, nbytes: 0.02 if while_it_leaves else 0.0)
    x = torch.ones(2, 4)
    for layer in layers:
        x = layer(x)
        x += 1
    with pytest.raises(OffloadError, match=r"backward: expected values saved for backward unchanged, got one modified"):
        x.sum().backward()


def test_what_a_checkpoint_drops_stays_dropped(managers):
    """Neither PyTorch's nor ours is defeated by offload inside it."""

    class Checkpointed(Net):
        def forward(self, x):
            x = checkpoint(self.layers[0], self.first(x), use_reentrant=False)
            region = CheckpointWithoutOutput()
            x = region.checkpoint(self.layers[1], x)
            x = self.layers[2](x)
            region.discard_output_and_register_recompute(x)
            return self.head(self.layers[4](self.layers[3](x)))

    plain, ours = build(kind=Checkpointed), build(kind=Checkpointed)
    manager = managers(ours, 0, **MOVED)
    train(ours, 3, manager)
    train(plain, 3)
    assert_equal_state(ours, plain)
    assert not {"-a0.0", "-a1.0"} & set(manager.trace)
    assert "-a2.0" in manager.trace


def test_hooks_of_a_caller_get_the_activations(managers):
    ours, packed = build(), []
    manager = managers(ours, 0, **MOVED)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        out = ours(batch())
    out.sum().backward()
    assert packed
    assert not [event for event in manager.trace if "a" in event]


@pytest.mark.thorough
@pytest.mark.parametrize("mode", [m if m == "mhc" else pytest.param(m, marks=pytest.mark.slow) for m in MODES])
def test_activations_and_parameters_in_training(mode):
    check_a_step(replace(CONFIG, **MODES[mode], **ACTIVATIONS))
