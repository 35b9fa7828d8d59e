"""Writes in a use that no version counter records: statistics of batch norms, and ``.data`` in hooks of backward."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference_torch.offload import offload_modules

WIDTH = 4


class Normed(nn.Module):
    """A layer with a norm that may train while the layer is evaluated."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return self.norm(self.linear(x)).tanh()


class Adapted(nn.Module):
    """A layer that always takes batch statistics, in buffers or in parameters that need no gradient."""

    def __init__(self, in_buffers: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        for name, value in (("mean", torch.zeros(WIDTH)), ("variance", torch.ones(WIDTH))):
            if in_buffers:
                self.register_buffer(name, value)
            else:
                self.register_parameter(name, nn.Parameter(value, requires_grad=False))

    def forward(self, x):
        return F.batch_norm(self.linear(x), self.mean, self.variance, training=True).tanh()


def batch(step: int = 0) -> Tensor:
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(step))


def models(make) -> tuple[nn.Sequential, nn.Sequential]:
    """Two equal models of three layers."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(make() for _ in range(3)))
    return plain, copy.deepcopy(plain)


def assert_equal_values(ours: nn.Module, plain: nn.Module) -> None:
    for (name, value), other in zip(plain.state_dict().items(), ours.state_dict().values(), strict=True):
        assert torch.equal(value, other), name


def only_norms_train(model: nn.Module) -> None:
    """As in adaptation at test time."""
    model.eval()
    for part in model.modules():
        part.train(isinstance(part, nn.BatchNorm1d))


KINDS = {
    "norm in evaluated layer": (Normed, only_norms_train),
    "buffers": (lambda: Adapted(True), nn.Module.eval),
    "frozen parameters": (lambda: Adapted(False), nn.Module.train),
    "frozen parameters, evaluated": (lambda: Adapted(False), nn.Module.eval),
}


@pytest.mark.parametrize("records", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_statistics_are_written_back_whatever_mode_the_layer_is_in(kind, records):
    make, prepare = KINDS[kind]
    plain, ours = models(make)
    manager = offload_modules(ours, ["*"], num_prefetch_layers=0)
    for model in (plain, ours):
        prepare(model)
        for step in range(3):
            with torch.set_grad_enabled(records):
                loss = model(batch(step)).square().sum()
            if records:
                loss.backward()
    manager.close()
    assert_equal_values(ours, plain)


def test_frozen_parameters_that_no_forward_writes_are_copied_once(managers):
    """The comparison with the copy on the host finds no difference."""
    _, ours = models(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)).requires_grad_(False))
    manager = offload_modules(ours, ["*"], num_prefetch_layers=0)
    before = manager.stats["bytes_out"]
    for step in range(3):
        ours(batch(step))
    assert manager.stats["bytes_out"] == before
    manager.close()


def clip(module: nn.Module, *_: object) -> None:
    """Limit the parameters of a module, past the version counters."""
    for parameter in module.parameters():
        parameter.data.clamp_(-0.1, 0.1)


def hook_whole_layers(model: nn.Module) -> None:
    for layer in model.children():
        layer.register_full_backward_hook(clip)


def hook_parts(model: nn.Module) -> None:
    for part in model.modules():
        if isinstance(part, nn.Linear):
            part.register_full_backward_hook(clip)


def hook_arrivals(model: nn.Module) -> None:
    for layer in model.children():
        layer.register_full_backward_pre_hook(clip)


def hook_parameters(model: nn.Module) -> None:
    for parameter in model.parameters():

        def halve(_: Tensor, parameter: nn.Parameter = parameter) -> None:
            parameter.data.mul_(0.5)

        parameter.register_hook(halve)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("hook", [hook_whole_layers, hook_parts, hook_arrivals, hook_parameters])
def test_writes_by_data_in_hooks_of_backward_are_kept(hook, gradients):
    plain, ours = models(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)))
    manager = offload_modules(ours, ["*"], num_prefetch_layers=0, gradients=gradients)
    for model in (plain, ours):
        hook(model)
        for step in range(2):
            model(batch(step)).square().sum().backward()
    manager.close()
    assert_equal_values(ours, plain)
    for first, second in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(first.grad, second.grad)


def test_layers_without_hooks_are_not_written_back_after_backward():
    """The hooks of offload itself write nothing."""
    _, ours = models(lambda: nn.Linear(WIDTH, WIDTH))
    manager = offload_modules(ours, ["*"], num_prefetch_layers=0)
    before = manager.stats["bytes_out"]
    for step in range(2):
        ours(batch(step)).sum().backward()
    assert manager.stats["bytes_out"] == before
    manager.close()


class Viewed(nn.Module):
    """A layer that views a buffer of any shape as running statistics."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("variance", torch.ones(shape))

    def forward(self, x):
        return F.batch_norm(x, self.mean.view(-1), self.variance.view(-1), training=True)


@pytest.mark.parametrize("shape", [(1, WIDTH), (80_000,)])
def test_statistics_of_any_shape_in_an_evaluated_layer(shape):
    plain, ours = models(lambda: Viewed(shape))
    manager = offload_modules(ours, ["0", "1", "2"], num_prefetch_layers=0)
    plain.eval()
    ours.eval()
    for step in range(2):
        x = torch.randn(6, shape[-1], generator=torch.Generator().manual_seed(step)) + 5
        assert torch.equal(plain(x), ours(x))
    assert_equal_values(ours, plain)
    manager.close()


@pytest.mark.parametrize("register", ["register_forward_pre_hook", "register_forward_hook"])
def test_data_written_by_hooks_of_forward_that_came_after_offload(register):
    plain, ours = models(lambda: nn.Linear(WIDTH, WIDTH))
    manager = offload_modules(ours, ["0", "1", "2"], num_prefetch_layers=0)

    def clamp(module, *_):
        module.weight.data.clamp_(-0.1, 0.1)

    for model in (plain, ours):
        for layer in model:
            getattr(layer, register)(clamp)
        for step in range(2):
            model(batch(step)).square().sum().backward()
    assert_equal_values(ours, plain)
    for parameter, other in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad)
    manager.close()


def test_export_is_refused():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    manager = offload_modules(model, ["0"])
    with pytest.raises(
        NotImplementedError, match=r"torch.export: .* got an offloaded layer; close the offload manager"
    ):
        torch.export.export(model, (batch(),), strict=False)
    manager.close()
    assert torch.equal(torch.export.export(model, (batch(),), strict=False).module()(batch()), model(batch()))
