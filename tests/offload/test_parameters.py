"""Parameters leave and return as planned, and training is that without offload, bit by bit (O1 to O7)."""

import numpy as np
import pytest
import torch
from torch import nn

from diptych.plans.offload import Use, plan_offload, step_uses
from reference_torch.offload import TensorOffloadManager
from reference_torch.offload.link import Link
from reference_torch.offload.storage import OffloadedParameter
from reference_torch.rank_pool import RankPool
from tests.offload.jobs import events
from tests.offload.support import LAYERS, WIDTH, Layer, Net, assert_as_planned, assert_equal_state, batch, build, train


def test_o1_a_layer_leaves_backward_only_after_all_its_gradients(managers):
    """The seed evicts when the gradient of the output arrives: then nothing of the layer has been computed."""
    model = build()
    manager = managers(model, 0)
    seen = {n: [] for n in range(LAYERS)}
    for number, layer in enumerate(model.layers):
        for name, parameter in layer.named_parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda p, n=number, name=name: seen[n].append(
                    (name, f"-{n}" in manager.trace[manager.trace.index("F4") :])
                )
            )
    model(batch()).sum().backward()
    for number, layer in enumerate(model.layers):
        assert {name for name, _ in seen[number]} == dict(layer.named_parameters()).keys()
        assert not any(evicted for _, evicted in seen[number]), number
    assert manager.trace[-3:] == ["+0", "B0", "-0"] or manager.trace[-2:] == ["+0", "B0"]


def test_o1_the_gradient_of_the_input_may_come_first(managers):
    """As that of a leaf does, which the engine serves at once: the weights' gradients are still under way."""
    layers = build(2).layers
    manager, seen = managers(layers, 0), []
    for name, parameter in layers[1].named_parameters():
        parameter.register_hook(lambda gradient, name=name: seen.append((name, manager.trace[-1])))
    x = torch.randn(3, WIDTH, dtype=torch.float64, requires_grad=True)
    layers[1](x).sum().backward()
    assert x.grad is not None
    assert manager.trace[-1] == "-1"
    assert {name for name, _ in seen} == dict(layers[1].named_parameters()).keys()
    assert not [name for name, last in seen if last == "-1"], "left before its last gradient"


def test_o1_without_a_gradient_of_the_input_and_for_frozen_layers(managers):
    plain, ours = build(), build()
    for model in (plain, ours):
        model.first.requires_grad_(False)  # the first layer's input wants no gradient
        model.layers[2].requires_grad_(False)
        model.layers[3].norm.requires_grad_(False)
    manager = managers(ours, 1)
    for model in (plain, ours):
        model(batch()).square().mean().backward()
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        assert a.grad is None or torch.equal(a.grad, b.grad)
    assert_as_planned(manager, step_uses(range(LAYERS))[: 2 * LAYERS], [Use("S", n) for n in range(LAYERS)])


def test_o1_unfrozen_later(managers):
    plain, ours = build(), build()
    manager = managers(ours, 0)
    for model in (plain, ours):
        model.layers[1].requires_grad_(False)
        model(batch()).sum().backward()
        model.layers[1].requires_grad_(True)
        model(batch(1)).sum().backward()
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    assert len(manager.resident_layers) <= 1


def test_o2_parameters_stay_the_same_objects(managers):
    model = build()
    model.layers[0].alias = model.layers[0].wide.weight
    before = {name: id(p) for name, p in model.named_parameters()}
    storages = {name: p.untyped_storage()._cdata for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    manager, fired = managers(model, 0), []
    model.layers[0].wide.weight.register_post_accumulate_grad_hook(
        lambda p: fired.append(p is model.layers[0].wide.weight)
    )
    for step in range(3):
        optimizer.zero_grad()
        model(batch(step)).sum().backward()
        manager.step(optimizer)
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert {name: p.untyped_storage()._cdata for name, p in model.named_parameters()} == storages
    assert {id(p) for p in optimizer.state} == set(before.values())
    assert fired == [True] * 3
    assert model.layers[0].alias is model.layers[0].wide.weight
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())


@pytest.mark.multiprocess
def test_o3_bytes_are_really_freed():
    """Pages of a process that does nothing else, which no counter of ours can make up."""
    size = 64 * 2**20
    with RankPool(1) as pool:
        (counts,) = pool.run("tests.offload.jobs:pages_freed_and_taken", size)
    freed, taken = counts
    assert 0.9 * 3 * size < freed < 1.1 * 3 * size
    assert 0.9 * size < taken < 1.1 * size


@pytest.mark.thorough
@pytest.mark.parametrize("n", [0, 1, 2, LAYERS, 99])
def test_o3_ten_steps_are_those_without_offload_bit_by_bit(n, managers):
    plain, ours = build(), build()
    manager = managers(ours, n)
    for a, b in zip(train(ours, 10, manager), train(plain, 10), strict=True):
        assert torch.equal(a, b)
    assert_equal_state(ours, plain)


@pytest.mark.parametrize("n", [0, 1, 2, LAYERS - 1, LAYERS, 99])
def test_o4_moves_are_the_plans(n, managers):
    """Forward, backward and step, in order; and never more than n + 1 layers."""
    model = build()
    manager = managers(model, n)
    train(model, 3, manager)
    assert_as_planned(manager, step_uses(range(LAYERS)) * 3)
    assert manager.stats["peak_layers"] == min(n + 1, LAYERS)


def test_o4_order_is_the_one_recorded(managers):
    """Layers that run in another order than they are numbered: learnt in the first pass."""

    class Mixed(Net):
        def forward(self, x):
            x = self.first(x)
            for number in (3, 0, 4, 1, 2):
                x = self.layers[number](x)
            return self.head(x)

    plain, ours = build(kind=Mixed), build(kind=Mixed)
    manager = managers(ours, 1)
    train(ours, 1, manager)
    manager.trace, before = [], manager.stats
    train(ours, 2, manager)
    train(plain, 1)
    train(plain, 2)
    assert_equal_state(ours, plain)
    plan = plan_offload(step_uses((3, 0, 4, 1, 2)) * 2, manager.storages(), 1, resident=(3,))
    assert manager.trace == events(plan)
    assert manager.stats["misses"] == before["misses"]


def test_o4_negative_is_refused():
    for wrong in (-1, True):
        with pytest.raises(ValueError, match=rf"num_prefetch_layers: expected an integer >= 0, got {wrong!r}"):
            TensorOffloadManager(num_prefetch_layers=wrong)


def test_o5_no_memory_is_reused_before_its_last_reader(managers, monkeypatch):
    """Under a link that is late at random, in forward, backward and step."""
    plain, ours = build(), build()
    random = np.random.default_rng(0)
    monkeypatch.setattr(Link, "delay", lambda self, nbytes: float(random.choice([0.0, 0.0, 0.004])))
    manager = managers(ours, 1)
    train(ours, 3, manager)
    train(plain, 3)
    assert_equal_state(ours, plain)


def test_o5_host_memory_is_allocated_once(managers, monkeypatch):
    model = build()
    manager = managers(model, 1)
    hosts = {id(m): m.host._cdata for m in manager._residency.storages.values()}
    monkeypatch.setattr(Link, "host_copy", None)
    train(model, 3, manager)
    assert {id(m): m.host._cdata for m in manager._residency.storages.values()} == hosts


def test_o6_the_next_fetch_brings_what_the_optimizer_wrote(managers, monkeypatch):
    """Also where the write-back is still under way when the layer is needed again."""
    plain, ours = build(2), build(2)
    monkeypatch.setattr(Link, "delay", lambda self, nbytes: 0.003)
    manager = managers(ours, 0)
    train(ours, 4, manager)
    train(plain, 4)
    assert_equal_state(ours, plain)


@pytest.mark.parametrize(
    "optimizer", [torch.optim.SGD, torch.optim.Adagrad, lambda p, lr: torch.optim.AdamW(p, lr, fused=True)]
)
def test_o6_any_optimizer_that_treats_each_parameter_by_itself(optimizer, managers):
    """And its own step(), which has every layer there at once."""
    plain, ours, third = build(), build(), build()
    manager, other = managers(ours, 1), managers(third, 1)
    optimizers = [optimizer(model.parameters(), lr=1e-2) for model in (plain, ours, third)]
    for step in range(3):
        for model in (plain, ours, third):
            model.zero_grad()
            model(batch(step)).square().mean().backward()
        optimizers[0].step()
        manager.step(optimizers[1])
        optimizers[2].step()
    assert_equal_state(ours, plain)
    assert_equal_state(third, plain)
    assert other.stats["peak_layers"] == LAYERS
    assert manager.stats["peak_layers"] == 2


def test_o7_shared_memory_moves_once(managers):
    class Tied(Net):
        def __init__(self, layers):
            super().__init__(layers)
            self.layers[3].wide.weight = self.layers[0].wide.weight
            self.layers[4].wide.weight = self.layers[0].wide.weight

    plain, ours = build(kind=Tied), build(kind=Tied)
    manager = managers(ours, 1)
    train(ours, 3, manager)
    train(plain, 3)
    assert_equal_state(ours, plain)
    plan = plan_offload(step_uses(range(LAYERS)) * 3, manager.storages(), 1)
    assert manager.stats["bytes_in"] == plan.bytes_in
    assert manager.stats["peak_bytes"] == plan.peak_bytes
    assert len(manager._residency.storages) == LAYERS * 6 - 2


def test_o7_tied_to_what_stays(managers):
    class Tied(Net):
        def __init__(self, layers):
            super().__init__(layers)
            self.head.weight = nn.Parameter(torch.randn(3 * WIDTH, WIDTH))
            self.layers[1].wide.weight = self.head.weight
            self.head.bias = None

    plain, ours = build(kind=Tied), build(kind=Tied)
    train(ours, 3, managers(ours, 0))
    train(plain, 3)
    assert_equal_state(ours, plain)


def test_o7_buffers_are_written_back(managers):
    class Counting(Layer):
        def forward(self, x):
            self.calls += 1
            return super().forward(x)

    model = build()
    for layer in model.layers:
        layer.__class__ = Counting
        layer.register_buffer("calls", torch.zeros(()))
    manager = managers(model, 0)
    train(model, 3, manager)
    assert [float(layer.calls) for layer in model.layers] == [3.0] * LAYERS


def test_o7_partial_views_and_subclasses_stay(managers):
    class Subclass(nn.Parameter):
        pass

    layer = nn.Module()
    flat = torch.randn(20)
    layer.a, layer.b = nn.Parameter(flat[:8]), nn.Parameter(flat[8:])
    layer.c, layer.d = Subclass(torch.randn(3)), nn.Parameter(torch.randn(5))
    layer.e, layer.f = nn.Parameter(torch.empty(0)), nn.Parameter(torch.randn(6))
    held = layer.f.data[2:]
    manager = managers([layer], 0)
    assert [name.split(":")[0] for name in manager._residency.layers[0].retained] == ["c", "a", "e", "f"]
    assert manager.stats["bytes_out"] == 0
    assert isinstance(layer.d, OffloadedParameter)
    assert not isinstance(layer.a, OffloadedParameter)
    assert torch.equal(layer.f[2:], held)
