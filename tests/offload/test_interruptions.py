"""Interruptions of a forward (Ctrl-C, an exit), and what layers leave behind when they return what they own."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from reference_torch.offload import offload_modules
from reference_torch.recompute import before_replay, recompute_modules
from tests.offload.support import assert_equal_state


class Interruption(BaseException):
    """An exception for which PyTorch runs no hook."""


def interrupt(*_: object) -> None:
    raise Interruption


def model(depth: int = 3) -> nn.Sequential:
    """Some layers; each call returns equal weights."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.Tanh()) for _ in range(depth)))


def in_forward(each: nn.Sequential):
    return each[1][1].register_forward_hook(interrupt)


def in_a_pre_hook(each: nn.Sequential):
    return each[1].register_forward_pre_hook(interrupt)


def in_a_hook(each: nn.Sequential):
    return each[1].register_forward_hook(interrupt)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("where", [in_forward, in_a_pre_hook, in_a_hook])
def test_an_interrupted_forward_leaves_no_hooks(where, recompute):
    """Also inside the hooks of others, which take away the topmost ones at their end."""
    plain, ours = model(), model()
    if recompute:
        recompute_modules(ours, {"": ["0.0", "1.0", "2.0"]})
    manager = offload_modules(ours, ["*"], num_prefetch_layers=0, activations=True, activation_min_bytes=0)
    handle = where(ours)
    x = torch.ones(2, 4)
    for _ in range(2):
        with pytest.raises(Interruption), saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor):
            ours(x)
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        assert before_replay.get() is None
    handle.remove()
    for each in (plain, ours):
        each(x).square().sum().backward()
    for first, second in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(first.grad, second.grad)
    manager.close()
    assert_equal_state(ours, plain)
    assert all("_call_impl" not in vars(part) for part in ours.modules())


def test_copies_of_a_layer_run_themselves():
    """What catches interruptions belongs to one module."""
    ours = model()
    manager = offload_modules(ours, ["*"])
    copies = [copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))]
    for layer in ours:
        layer.requires_grad_(False)
        layer[1].weight.zero_()
    assert all("_call_impl" not in vars(part) for each in copies for part in each.modules())
    assert all(torch.equal(each(torch.ones(1, 4)), model()(torch.ones(1, 4))) for each in copies)
    manager.close()


def test_closing_in_a_forward_leaves_no_hooks():
    ours = model()
    manager = offload_modules(ours, ["*"])
    ours[1][1].register_forward_hook(lambda *_: manager.close())
    ours(torch.ones(1, 4)).sum().backward()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert before_replay.get() is None
    plain = model()
    plain(torch.ones(1, 4)).sum().backward()
    for first, second in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(first.grad, second.grad)


class Position(nn.Module):
    """A layer that returns its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.ones(4))

    def forward(self):
        return self.place


class Placed(nn.Module):
    """A linear layer of an input with a position."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.position, self.linear = Position(), nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x + self.position())


def test_a_layer_that_returns_its_parameter_keeps_no_calls():
    plain, ours = Placed(), Placed()
    manager = offload_modules(ours, ["position", "linear"], num_prefetch_layers=0, gradients=True)
    for _ in range(3):
        for each in (plain, ours):
            each(torch.ones(2, 4)).sum().backward()
    boundary = vars(ours.position.place).get("_offload_hook")
    assert boundary is None or not boundary.producers
    for first, second in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(first.grad, second.grad)
    manager.close()


def test_a_copy_by_attributes_runs_itself():
    """As the replicas of DataParallel and the stages of split_model."""
    ours = model()
    manager = offload_modules(ours, ["*"])
    replica = object.__new__(nn.Sequential)
    replica.__dict__ = {**vars(ours[0]), "_modules": dict(vars(ours[0])["_modules"])}
    replica._modules["1"] = nn.Identity()
    x = torch.randn(2, 4)
    assert torch.equal(replica(x), torch.tanh(nn.functional.layer_norm(x, (4,))))
    manager.close()
