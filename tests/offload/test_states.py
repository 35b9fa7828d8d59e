"""Test offload in every state of a run: no_grad, exceptions, saving, closing, reading; its interface (O8 to O10)."""

import copy
import gc
import pickle
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn

from diptych.plans.config import TrainConfig
from diptych.plans.offload import Use, plan_offload, step_uses
from reference_torch.offload import (
    OffloadError,
    TensorOffloadManager,
    get_offload_manager,
    host_value,
    initialize_offload_manager,
)
from reference_torch.offload.link import Link
from reference_torch.offload.storage import OffloadedParameter
from reference_torch.train import Trainer
from tests.backends import tiny_corpus
from tests.offload.support import (
    CONFIG,
    LAYERS,
    WIDTH,
    Layer,
    assert_as_planned,
    assert_equal_state,
    batch,
    build,
    train,
)


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
    variables = ours.state_dict(keep_vars=True)
    assert all(variables[name] is parameter for name, parameter in ours.named_parameters())

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
    with pytest.raises(OffloadError, match=r"manager: expected an open one, got a closed one"):
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
    with pytest.raises(OffloadError, match=r"wide.weight of layer 1: expected to stay in its storage, .* close\(\)"):
        manager.offload_layer(1)


def test_o9_without_a_gpu_the_device_is_a_second_place_in_memory(managers):
    model = build()
    manager = managers(model, 0)
    assert manager.prefetch_stream is None
    memory = manager._residency.layers[0].storages[0]
    assert memory.device_bytes == 0
    manager.require(0)
    assert memory.device_bytes == memory.nbytes
    assert memory.device_storage.data_ptr() != memory.host.data_ptr()


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
    assert f"{len(plan.misses)} of {len(plan.moves)} uses of a layer began before its copy was requested" in text
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


def test_a_checkpoint_is_read_while_copies_are_on_their_way(tmp_path, monkeypatch):
    """After a step, a layer is on its way to the device and another to the host; both take the new numbers."""
    model = replace(CONFIG, num_layers=4)
    settings = TrainConfig(global_batch_size=2, micro_batch_size=2, train_iters=4)
    plain, moved = (
        Trainer(replace(model, enable_tensor_offload=offloads), settings, tiny_corpus(), device="cpu")
        for offloads in (False, True)
    )
    plain.train_step(0)
    plain.save(tmp_path)
    monkeypatch.setattr(Link, "delay", lambda _, nbytes: 0.002)
    moved.train_step(1)
    assert moved.resume(tmp_path) == 1
    ours, theirs = moved.train_step(1), plain.train_step(1)
    assert (ours.loss, ours.grad_norm) == (theirs.loss, theirs.grad_norm)
    for ours, theirs in zip(moved.stages[0].parameters(), plain.stages[0].parameters(), strict=True):
        assert torch.equal(ours.detach(), theirs.detach())
