"""Tensor offload in PyTorch: every row of the design, against the same run without offload, bit by bit."""

import copy
import gc
import json
import os
import pickle
import re
import subprocess
import sys
import time
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from parity.cli import main
from parity.compare import relative_difference
from parity.driver import read_metrics
from parity.tolerances import PARAMETERS
from plans.config import TrainConfig, TransformerConfig
from plans.offload import Use, layer_storages, pass_uses, plan_offload, step_uses, total_statistics
from plans.partition import undivided
from reference_torch.offload import (
    OffloadError,
    TensorOffloadManager,
    get_offload_manager,
    host_value,
    initialize_offload_manager,
)
from reference_torch.offload.link import Link
from reference_torch.offload.memory import OffloadedParameter
from reference_torch.rank_pool import RankPool
from reference_torch.recompute import CheckpointWithoutOutput, lazy_restore, measure_memory
from tests.backends import TORCH_DAILY
from tests.offload_jobs import activation_events, events, train_a_step

LAYERS, WIDTH = 5, 8


class Layer(nn.Module):
    """A residual layer that keeps views of its weights for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x, scale=1.0):
        return x + scale * self.narrow(torch.tanh(self.wide(self.norm(x))))


class Net(nn.Module):
    """Layers between an embedding and a head that stay."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build(layers: int = LAYERS, kind=Net) -> Net:
    torch.manual_seed(0)
    return kind(layers).double()


def batch(step: int = 0) -> torch.Tensor:
    return torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def assert_as_planned(manager: TensorOffloadManager, uses, then=None, peak: bool = True) -> None:
    plan = plan_offload(uses, manager.storages(), manager.num_prefetch_layers, then=then)
    assert manager.trace == events(plan)
    stats = manager.stats
    assert (stats["bytes_in"], stats["bytes_out"]) == (plan.bytes_in, plan.bytes_out)
    assert stats["misses"] == len(plan.late)
    if peak:
        assert stats["peak_bytes"] == plan.peak_bytes


def assert_equal_state(ours: nn.Module, theirs: nn.Module) -> None:
    expected = theirs.state_dict()
    found = ours.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def train(model: nn.Module, steps: int, manager: TensorOffloadManager | None = None, **options) -> list[torch.Tensor]:
    """Gradients of the last step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        if manager is None:
            optimizer.step()
        else:
            manager.step(optimizer)
    return gradients


# Parameters, row by row.


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
    with RankPool(1, preload=("torch.distributed", "tests.offload_jobs")) as pool:
        (told,) = pool.run("tests.offload_jobs:pages_freed_and_taken", size)
    freed, taken = told
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
    hosts = {id(m): m.host._cdata for m in manager._memories.values()}
    monkeypatch.setattr(Link, "host_copy", None)
    train(model, 3, manager)
    assert {id(m): m.host._cdata for m in manager._memories.values()} == hosts


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
    assert len(manager._memories) == LAYERS * 6 - 2


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
    assert [name.split(":")[0] for name in manager._layers[0].kept] == ["c", "a", "e", "f"]
    assert manager.stats["bytes_out"] == 0
    assert isinstance(layer.d, OffloadedParameter)
    assert not isinstance(layer.a, OffloadedParameter)
    assert torch.equal(layer.f[2:], held)


def test_o8_no_grad_and_eval_leave_it_clean(managers):
    plain, ours = build(), build()
    manager = managers(ours, 1)
    for model in (plain, ours):
        model.eval()
    with torch.no_grad():
        for step in range(2):
            assert torch.equal(ours(batch(step)), plain(batch(step)))
    assert_as_planned(manager, [Use("F", n) for n in range(LAYERS)] * 2)
    assert len(manager.resident_layers) <= 2
    train(ours, 2, manager)
    train(plain, 2)
    assert_equal_state(ours, plain)


@pytest.mark.parametrize("where", ["forward", "backward", "before the layer"])
def test_o8_exceptions_leave_it_clean(where, managers):
    plain, ours = build(), build()
    manager = managers(ours, 1)

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            if where == "forward":
                raise RuntimeError("broken")
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise RuntimeError("broken")

    def broken(module, args):
        if where == "before the layer":
            raise RuntimeError("broken")
        return Broken.apply(*args)

    handle = ours.layers[2].norm.register_forward_pre_hook(broken)
    if where == "before the layer":
        handle.remove()
        handle = ours.layers[2].register_forward_pre_hook(broken)
    with pytest.raises(RuntimeError, match="broken"):
        ours(batch()).sum().backward()
    handle.remove()
    for model in (ours, plain):
        model.zero_grad()
    train(ours, 2, manager)
    train(plain, 2)
    assert_equal_state(ours, plain)
    assert len(manager.resident_layers) <= 2
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_o8_a_backward_that_never_comes(managers):
    plain, ours = build(), build()
    manager = managers(ours, 1)
    for model in (plain, ours):
        model(batch()).sum()
        with torch.no_grad():
            model(batch(1))
    train(ours, 2, manager)
    train(plain, 2)
    assert_equal_state(ours, plain)
    assert manager.stats["peak_layers"] == 2


def test_o8_a_part_of_the_graph(managers):
    """autograd.grad, inputs=, a retained graph, and a loss in the middle."""
    results = []
    for model in (build(), build()):
        if results:
            managers(model, 0)
        x = batch().requires_grad_()
        hidden = model.layers[1](model.layers[0](model.first(x)))
        out = model.layers[3](model.layers[2](hidden))
        weight = model.layers[2].wide.weight
        found = [*torch.autograd.grad(out.square().sum(), [x, weight], retain_graph=True)]
        hidden.tanh().sum().backward(retain_graph=True)
        out.sum().backward(inputs=[model.layers[0].narrow.weight], retain_graph=True)
        out.sum().backward()
        results.append([*found, x.grad, *(p.grad for p in model.layers[:4].parameters())])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_o8_double_backward(managers):
    results = []
    for model in (build(2), build(2)):
        if results:
            managers(model, 0)
        x = batch().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        gradient.square().sum().backward()
        results.append([x.grad, *(p.grad for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def test_o8_state_dict_while_away(managers, tmp_path):
    plain, ours = build(), build()
    manager = managers(ours, 0)
    train(ours, 2, manager)
    train(plain, 2)
    moved, here = manager.stats["copies_in"], manager.resident_layers
    torch.save(ours.state_dict(), tmp_path / "state.pt")
    assert manager.stats["copies_in"] == moved, "reading the state moves nothing"
    assert manager.resident_layers == here
    state = torch.load(tmp_path / "state.pt")
    for name, value in plain.state_dict().items():
        assert torch.equal(state[name], value), name
    kept = ours.state_dict(keep_vars=True)
    assert all(kept[name] is parameter for name, parameter in ours.named_parameters())

    fresh = build()
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.zero_()
    other = managers(fresh, 1)
    fresh.load_state_dict(state)
    assert len(other.resident_layers) <= 2
    assert_equal_state(fresh, plain)
    assert torch.equal(fresh(batch()), plain(batch()))


def test_o8_gradient_clipping_and_zero_grad_move_nothing(managers):
    model = build()
    manager = managers(model, 0)
    model(batch()).sum().backward()
    moved = manager.stats["copies_in"]
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    model.zero_grad()
    assert [p.shape for p in model.parameters()]
    assert sum(p.numel() for p in model.parameters()) > 0
    assert manager.stats["copies_in"] == moved


def test_o8_close_restores_everything(managers):
    plain, ours = build(), build()
    manager = managers(ours, 0)
    train(ours, 2, manager)
    train(plain, 2)
    manager.close()
    manager.close()
    assert_equal_state(ours, plain)
    assert all(type(p) is nn.Parameter and p.untyped_storage().nbytes() for p in ours.parameters())
    for layer in ours.layers:
        assert not layer._forward_pre_hooks
        assert not layer._forward_hooks
    for a, b in zip(train(ours, 2), train(plain, 2), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(OffloadError, match=r"manager: expected an open one, got one that close\(\) has ended"):
        manager.register_layer(7, nn.Linear(1, 1))
    with pytest.raises(OffloadError, match=r"manager: expected an open one"):
        manager.offload_layer(0)


def test_o8_nothing_is_kept_alive(managers):
    model = build()
    manager = managers(model, 1)
    gc.disable()
    try:
        x = model.first(batch())
        seen = weakref.ref(x)
        out = model.layers[1](model.layers[0](x))
        node = weakref.ref(out)
        out.sum().backward()
        del x, out
        assert seen() is None
        assert node() is None
    finally:
        gc.enable()
    assert manager.resident_layers


def test_o8_registration_in_any_order(managers):
    plain, ours = build(), build()
    manager = managers([], 1)
    for number in (3, 0, 4, 2, 1):
        manager.register_layer(number, ours.layers[number])
    manager.offload_all_layers()
    manager.trace = []
    train(ours, 2, manager)
    train(plain, 2)
    assert_equal_state(ours, plain)
    assert_as_planned(manager, step_uses(range(LAYERS)) * 2)


def test_o8_parameters_are_read_as_if_they_were_there(managers):
    """Whoever reads one that is away gets it; copies and pickles are of plain parameters."""
    plain, ours = build(), build()
    manager = managers(ours, 0)
    weight, expected = ours.layers[1].wide.weight, plain.layers[1].wide.weight
    assert isinstance(weight, OffloadedParameter)
    assert repr(weight) == f"OffloadedParameter(shape={tuple(weight.shape)})"
    assert torch.equal(weight * 2.0, expected * 2.0)
    assert type(weight) is nn.Parameter
    manager.offload_all_layers()
    assert torch.equal(host_value(weight), expected)
    assert isinstance(weight, OffloadedParameter)
    for duplicate in (copy.deepcopy, copy.copy, lambda p: pickle.loads(pickle.dumps(p))):
        copied = duplicate(weight)
        assert type(copied) is nn.Parameter
        assert torch.equal(copied, expected)
        manager.offload_all_layers()
    with torch.no_grad():
        ours.layers[2].wide.weight.mul_(3.0)
        ours.layers[3].wide.weight.data.mul_(3.0)
    manager.offload_all_layers()
    for number in (2, 3):
        assert torch.equal(ours.layers[number].wide.weight, 3.0 * plain.layers[number].wide.weight)
        ours.layers[number].wide.weight.data.copy_(plain.layers[number].wide.weight)
    model = copy.deepcopy(ours)
    manager.offload_all_layers()
    for a, b in zip(train(model, 2), train(plain, 2), strict=True):
        assert torch.equal(a, b)
    assert manager.resident_layers == ()


def test_o8_memory_taken_away_is_named(managers):
    model = build()
    manager = managers(model, 0)
    manager.require(1)
    model.layers[1].wide.weight.data = torch.zeros(3 * WIDTH, WIDTH, dtype=torch.float64)
    with pytest.raises(OffloadError, match=r"wide.weight of layer 1: expected to stay in its memory, .* close\(\) the"):
        manager.offload_layer(1)


def test_o9_without_a_gpu_the_device_is_a_second_place_in_memory(managers):
    model = build()
    manager = managers(model, 0)
    assert manager.prefetch_stream is None
    memory = manager._layers[0].memories[0]
    assert memory.device_bytes == 0
    manager.require(0)
    assert memory.device_bytes == memory.nbytes
    assert memory.home.data_ptr() != memory.host.data_ptr()


def test_o10_constructor_attributes_and_door(capsys):
    default = TensorOffloadManager()
    assert (default.enabled, default.pin_memory, default.num_prefetch_layers) == (True, True, 1)
    first = initialize_offload_manager(enabled=True, pin_memory=False, num_prefetch_layers=0)
    assert get_offload_manager() is first
    model = build()
    for number, layer in enumerate(model.layers):
        first.register_layer(number, layer)
    assert first.layer_params == {n: list(layer.parameters()) for n, layer in enumerate(model.layers)}
    assert first.layer_param_devices == {n: ["cpu"] * 6 for n in range(LAYERS)}
    first.offload_all_layers()
    train(model, 2, first)
    first.print_stats()
    text = capsys.readouterr().out
    plan = plan_offload(step_uses(range(LAYERS)) * 2, first.storages(), 0)
    assert f"{plan.bytes_in / 2**20:.1f}" in text
    assert f"{len(plan.late)} of {len(plan.steps)} uses of a layer came before it was asked for" in text
    assert "at most 1 layers" in text
    second = initialize_offload_manager(num_prefetch_layers=2)
    assert get_offload_manager() is second
    assert all(type(p) is nn.Parameter for p in model.parameters()), "the first has been closed"
    second.close()


def test_o10_disabled_does_nothing(managers):
    plain, ours = build(), build()
    manager = TensorOffloadManager(enabled=False)
    for number, layer in enumerate(ours.layers):
        manager.register_layer(number, layer)
    manager.offload_all_layers()
    train(ours, 2, manager)
    train(plain, 2)
    assert_equal_state(ours, plain)
    assert manager.stats["copies_in"] == 0
    assert manager.layer_params == {}


class Calling(Layer):
    """A layer that calls the manager itself, as the seed's does."""

    def forward(self, x):
        manager = get_offload_manager()
        number = int(self.number)
        manager.on_forward_pre_hook(number)
        out = super().forward(x)
        manager.on_forward_post_hook(number)
        if out.requires_grad:
            out.register_hook(lambda grad: None)
        return out


def test_o10_a_model_may_call_the_hooks_itself():
    plain, ours = build(), build()
    manager = initialize_offload_manager(num_prefetch_layers=1)
    for number, layer in enumerate(ours.layers):
        layer.__class__, layer.number = Calling, number
        manager.register_layer(number, layer)
    manager.offload_all_layers()
    train(ours, 2, manager)
    train(plain, 2)
    assert_equal_state(ours, plain)
    manager.close()


# With recompute, pipelines and several microbatches.

CONFIG = TransformerConfig(
    hidden_size=8,
    num_layers=5,
    num_attention_heads=2,
    seq_length=8,
    enable_hyper_connections=True,
    num_residual_streams=2,
    sinkhorn_iterations=3,
    hidden_dropout=0.1,
    params_dtype="float64",
)
TRAIN = TrainConfig(train_iters=4, global_batch_size=4, micro_batch_size=1, lr=3e-3, min_lr=3e-4, eval_iters=1)
MODES = {
    "none": {},
    "mhc": {"recompute_granularity": "selective", "recompute_modules": ("mhc", "layernorm")},
    "mhc and mlp, long blocks": {
        "recompute_granularity": "selective",
        "recompute_modules": ("mhc", "layernorm", "mlp"),
        "mhc_recompute_layer_num": 3,
    },
    "activation": {"recompute_activation_function": True},
    "core attention": {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "layernorm")},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    "first layers": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
    "full, without streams": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 2,
        "enable_hyper_connections": False,
    },
}


@pytest.mark.thorough
@pytest.mark.parametrize("n", [*(pytest.param(n, marks=pytest.mark.slow) for n in (0, 2, 9)), 1])
@pytest.mark.parametrize("mode", MODES)
def test_o11_training_with_recompute_and_microbatches(mode, n):
    """The trainer's whole step: numbers, moves, bytes."""
    check_a_step(replace(CONFIG, **MODES[mode], tensor_offload_num_prefetch_layers=n))


def check_a_step(config: TransformerConfig, pool: RankPool | None = None) -> None:
    """Numbers of the run without offload and of one process, bit by bit there; moves and bytes as planned."""
    expected, parameters = train_a_step(undivided(config), TRAIN)
    config, job = replace(config, enable_tensor_offload=True), "tests.offload_jobs:train_a_step"
    told = [train_a_step(config, TRAIN)] if pool is None else pool.run(job, config, TRAIN)
    for found, values in told:
        assert found["trace"] == found["plan"]
        assert found["bytes"] == found["planned bytes"]
        assert found.get("activations") == found.get("planned activations")
        for name in ("loss", "norm", "validation"):
            assert found[name] == pytest.approx(expected[name], rel=0 if pool is None else 1e-12, abs=0)
        for name, value in parameters.items():
            if pool is None:
                np.testing.assert_array_equal(values[name], value, err_msg=name)
            else:
                assert relative_difference(values[name], value) <= PARAMETERS["float64"], name


ACTIVATIONS = {"enable_activation_offload": True, "activation_offload_min_bytes": 256}
PIPELINES = {
    "1f1b": {"pipeline_model_parallel_layout": "Ettt|ttL"},
    "interleaved": {"virtual_pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et|tt|t|tL"},
    "zb-h1, full recompute": {"pipeline_schedule": "zb-h1", "pipeline_model_parallel_layout": "Ettt|ttL"}
    | MODES["full"],
    "1f1b, mhc recomputed": {"pipeline_model_parallel_layout": "Ettt|ttL"} | MODES["mhc"] | ACTIVATIONS,
}


@pytest.mark.multiprocess
def test_o11_pipelines():
    """Every rank moves what its part of the schedule says, with several microbatches in flight."""
    with RankPool(2, preload=("torch.distributed", "tests.offload_jobs")) as pool:
        for cut in PIPELINES.values():
            check_a_step(replace(CONFIG, **cut, pipeline_model_parallel_size=2), pool)


def test_o11_several_microbatches_in_flight(managers):
    """Forwards of three before the first backward, backwards in another order."""
    results = []
    for model in (build(), build()):
        if results:
            manager = managers(model, 1)
            uses = [Use("F", n) for n in range(LAYERS)] * 3 + [Use("B", n) for n in reversed(range(LAYERS))] * 3
            manager.expect(uses)
        losses = [model(batch(step)).square().mean() for step in range(3)]
        for place in (1, 2, 0):
            losses[place].backward()
        results.append([p.grad for p in model.parameters()])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    assert_as_planned(manager, uses, step_uses(range(LAYERS))[2 * LAYERS :])


@pytest.mark.parametrize("reentrant", [False, True])
def test_o11_checkpoints_of_pytorch(reentrant, managers):
    class Checkpointed(Net):
        def forward(self, x):
            x = self.first(x)
            x = checkpoint(lambda y: self.layers[1](self.layers[0](y)), x, use_reentrant=reentrant)
            x = checkpoint(self.layers[2], x, use_reentrant=reentrant)
            x = self.layers[4](self.layers[3](x))
            return self.head(x)

    plain, ours = build(kind=Checkpointed), build(kind=Checkpointed)
    manager = managers(ours, 0)
    train(ours, 3, manager)
    train(plain, 3)
    assert_equal_state(ours, plain)
    assert manager.stats["peak_layers"] <= 2


@pytest.mark.parametrize("lazy", [False, True])
def test_o11_regions_that_span_layers(lazy, managers):
    class Regions(Net):
        def forward(self, x):
            x = self.first(x)
            with lazy_restore() if lazy else torch.enable_grad():
                region = CheckpointWithoutOutput()
                inner = region.checkpoint(lambda y: self.layers[1](self.layers[0](y)), x)
                x = self.layers[3](self.layers[2](inner))
                region.discard_output_and_register_recompute(x)
                return self.head(self.layers[4](x))

    plain, ours = build(kind=Regions), build(kind=Regions)
    train(ours, 3, managers(ours, 0))
    train(plain, 3)
    assert_equal_state(ours, plain)


def test_o11_saved_tensor_hooks_outside_get_everything_else(managers):
    plain, ours = build(), build()
    managers(ours, 0)
    weights = {p.untyped_storage()._cdata for layer in ours.layers for p in layer.parameters()}
    packed = []
    for model in (plain, ours):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t.clone(), lambda t: t):
            out = model(batch())
        out.sum().backward()
    assert not {t.untyped_storage()._cdata for t in packed} & weights
    assert len(packed) > 4 * LAYERS
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


# Activations.

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
        assert manager._activations.pool.allocated == 0


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
        allocated.append(manager._activations.pool.allocated)
    whole, half = x.nbytes, x.nbytes // 2
    # Of the layers that leave, all but the last: what the weight is multiplied by, and where the input wants a
    # gradient, tanh's result and exp's.
    assert manager.stats["bytes_out"] == manager.stats["bytes_in"] == 3 * (whole + (whole + whole + half))
    assert allocated[1:] == allocated[:1] * 2


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

    kept = measure_memory(forward, lambda loss: loss.backward()).saved
    managers(layers, 0, parameters=False, activations=True, activation_min_bytes=1024)
    forward().backward()  # fills the pool
    left = measure_memory(forward, lambda loss: loss.backward()).saved
    assert kept >= 7 * 5 * x.nbytes
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
            self.kept = torch.exp(x)
            out = self.kept * 1.0
            if when == "in forward":
                self.kept.mul_(2.0)
            return out

    layers = nn.ModuleList([Writing(), nn.Linear(4, 4)])
    managers(layers, 0, parameters=False, **MOVED)
    monkeypatch.setattr(Link, "delay", lambda self, nbytes: 0.02 if when == "while it leaves" else 0.0)
    x = torch.randn(3, 4, requires_grad=True)

    def run() -> None:
        out = layers[0](x)
        if when == "while it leaves":
            layers[0].kept.mul_(2.0)
        layers[1](out).sum().backward()

    with pytest.raises(OffloadError, match=r"backward: expected values kept for backward unchanged, got one modified"):
        run()


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


# A slow link.


class Slow(nn.Module):
    """Takes its time, as a matrix product on a GPU would."""

    seconds = 0.1  # types are checked in tests, which takes 5 ms a layer

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH, dtype=torch.float64))

    def forward(self, x):
        time.sleep(self.seconds)
        return x @ self.weight


@pytest.mark.slow
def test_o12_hiding_is_shown(managers, monkeypatch):
    """Forwards and fetches of equal length: with prefetch the longer of the two counts, without their sum."""
    count, steps = 8, 3
    monkeypatch.setattr(Link, "delay", lambda self, nbytes: 0.09)
    seconds = {}
    for n in (0, 1):
        layers = nn.ModuleList(Slow() for _ in range(count))
        managers(layers, n)
        x = batch() @ torch.ones(4, WIDTH, dtype=torch.float64)
        taken = []
        for _ in range(steps):
            begin = time.perf_counter()
            with torch.no_grad():
                for layer in layers:
                    x = layer(x)
            taken.append(time.perf_counter() - begin)
        seconds[n] = min(taken[1:])
    longer = count * Slow.seconds
    assert seconds[1] <= 1.1 * longer
    assert seconds[0] > 1.1 * longer


# What is refused.


def test_registering_is_checked(managers, monkeypatch):
    model = build()
    manager = managers([], 1)
    manager.register_layer(0, model.layers[0])
    with pytest.raises(ValueError, match=r"layer_id: expected one not registered yet, got 0 a second time"):
        manager.register_layer(0, model.layers[1])
    with pytest.raises(ValueError, match=r"module: expected one not registered yet, got Layer, which is in layer 0"):
        manager.register_layer(1, model.layers[0])
    with pytest.raises(ValueError, match=r"module: expected one not registered yet, got Linear, which is in layer 0"):
        manager.register_layer(1, model.layers[0].wide)
    with pytest.raises(
        ValueError, match=r"layer 1: expected its parameters on cpu, as the other layers, got \['meta'\]"
    ):
        manager.register_layer(1, nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match=r"layer_id: expected a registered layer of \[0\], got 5"):
        manager.prefetch_layer(5)
    with pytest.raises(
        ValueError, match=r"layer 3: expected its parameters on one device, cpu or cuda, got \['meta'\]"
    ):
        TensorOffloadManager().register_layer(3, nn.Linear(2, 2, device="meta"))


def test_a_host_without_room_is_named_and_nothing_is_lost(managers, monkeypatch):
    plain, ours = build(), build()
    manager = managers([], 1)
    manager.register_layer(0, ours.layers[0])
    empty, left = torch.empty, 4

    def full(*arguments, **options):
        nonlocal left
        left -= 1
        if left < 0:
            raise RuntimeError("CUDA error: out of memory\nmore words")
        return empty(*arguments, **options)

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(
        OffloadError, match=r"offload: expected \d+ bytes of host memory, got: CUDA error: out of memory;"
    ):
        manager.register_layer(1, ours.layers[1])
    monkeypatch.undo()
    assert list(manager.layer_params) == [0]
    assert not ours.layers[1]._forward_pre_hooks
    manager.offload_all_layers()
    assert_equal_state(ours, plain)
    train(ours, 2, manager)
    train(plain, 2)
    assert_equal_state(ours, plain)
    manager.register_layer(1, ours.layers[1])
    train(ours, 2, manager)


def test_a_copy_that_fails_is_named(managers, monkeypatch):
    model = build()
    manager = managers(model, 0)
    monkeypatch.setattr(Link, "delay", lambda self, nbytes: -1.0)
    with pytest.raises(OffloadError, match=r"copy: expected to move bytes between host and device, got sleep length"):
        manager.require(0)
    monkeypatch.undo()
    plain = build()
    assert torch.equal(model.layers[0].wide.weight, plain.layers[0].wide.weight)
    with torch.no_grad():
        for changed in (model, plain):
            changed.layers[0].wide.weight.add_(1.0)
    monkeypatch.setattr(Link, "delay", lambda self, nbytes: -1.0)
    manager.offload_layer(0)
    with pytest.raises(OffloadError, match=r"copy: expected to move bytes"):
        manager.offload_all_layers()
    monkeypatch.undo()
    train(model, 2, manager)
    train(plain, 2)
    assert_equal_state(model, plain)


@pytest.mark.thorough
def test_the_example_runs(tmp_path):
    done = subprocess.run(
        [sys.executable, "examples/tensor_offload/simple_test.py"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"PYTHONPATH": "."},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("equal, bit for bit\n")


@pytest.mark.multiprocess
@pytest.mark.parametrize("backend", TORCH_DAILY)
def test_the_command_ends_with_the_statistics(backend, tmp_path, capsys):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    command = (
        f"train --backend {backend} --hidden-size 16 --num-layers 3 --num-attention-heads 2 --seq-length 8 "
        "--train-iters 2 --eval-iters 1 --global-batch-size 2 --enable-tensor-offload --save"
    )
    assert main([*command.split(), str(tmp_path / "run"), "--data-path", str(corpus)]) == 0
    (line,) = (line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "offload" in line)
    plan = plan_offload(step_uses(range(3)), layer_storages(TransformerConfig(**MODEL)), 1)
    assert line["offload"]["peak_bytes"] == plan.peak_bytes
    assert line["offload"]["peak_layers"] == 2
    assert line["step"] == 2
    text = capsys.readouterr().out
    assert f"{line['offload']['copies_in']:,}" in text
    steps = [row for row in text.splitlines() if row.startswith("step ")]
    assert len(steps) == 2
    for row in steps:
        assert re.search(r"tok/s  offload \d+\.\d MiB in, \d+\.\d out a step$", row)
    assert "at most 2 layers" in text


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_comparison_shows_what_both_backends_moved(ranks, tmp_path):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    command = (
        "compare --hidden-size 16 --num-layers 4 --num-attention-heads 2 --seq-length 8 --train-iters 2 --eval-iters 1 "
        "--no-enable-hyper-connections "  # whose smallest gradients are sums that nearly cancel
        f"--global-batch-size 2 --micro-batch-size 1 --pipeline-model-parallel-size {ranks} --enable-tensor-offload "
        f"--enable-activation-offload --activation-offload-min-bytes 1 --data-path {corpus} --output-dir {tmp_path}"
    )
    diptych = Path(sys.executable).parent / "diptych"
    done = subprocess.run([diptych, *command.split()], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["failures"] == []
    assert report["offload"].keys() == {"torch", "jax"}
    for backend, stats in report["offload"].items():
        assert f"in {backend}:" in done.stdout
        assert stats["peak_layers"] == 2
        assert stats["bytes_in"] > 0
    assert report["offload"]["torch"]["peak_bytes"] == report["offload"]["jax"]["peak_bytes"]
    assert "equal within tolerance" in done.stdout


def test_statistics_of_ranks_add_up():
    ranks = [
        {"bytes_in": 3, "hits": 1, "misses_by_layer": {"0": 1}, "peak_bytes": 5, "seconds_waited": 0.5},
        {"bytes_in": 4, "hits": 2, "misses_by_layer": {"0": 1, "2": 3}, "peak_bytes": 4, "seconds_waited": 0.7},
    ]
    assert total_statistics(ranks) == {
        "bytes_in": 7,
        "hits": 3,
        "misses_by_layer": {"0": 2, "2": 3},
        "peak_bytes": 5,
        "seconds_waited": 0.7,
    }
    assert total_statistics(ranks[:1]) == ranks[0]


MODEL = {"hidden_size": 16, "num_layers": 3, "num_attention_heads": 2, "enable_hyper_connections": True}
