"""Offload where it is easily wrong: writes that nobody counts, bits beside the bytes, two managers, closing midway."""

import contextlib

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from diptych.plans.offload import Use, plan_offload
from reference_torch.offload import OffloadError, TensorOffloadManager
from reference_torch.offload.storage import OffloadedStorage
from tests.offload.support import LAYERS, WIDTH, Layer, Net, assert_equal_state, batch, build, train

ALL = {"parameters": False, "activations": True, "activation_min_bytes": 1}


class Conjugated(nn.Module):
    """Keeps tensors whose conjugate or negative bit is set."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        real, imaginary = self.linear(x).chunk(2, dim=-1)
        value = torch.complex(real, imaginary)
        turned = value * torch.complex(imaginary.sin(), real.cos()).conj()
        return x + 0.1 * torch.cat([turned.real * real, value.conj().imag * real.sin()], -1)


class OfLayers(Net):
    """The net with layers of another kind."""

    kind: type[nn.Module] = Layer

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__(layers)
        self.layers = nn.ModuleList(self.kind() for _ in range(layers))


class ConjugatedNet(OfLayers):
    kind = Conjugated


@pytest.mark.parametrize("n", [0, 9])
def test_conjugate_and_negative_bits_are_no_bytes_and_still_kept(managers, n):
    plain, ours = build(kind=ConjugatedNet), build(kind=ConjugatedNet)
    manager = managers(ours, n, **ALL)
    expected = train(plain, 1)
    for a, b in zip(train(ours, 1, manager), expected, strict=True):
        assert torch.equal(a, b)


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return x + self.norm(self.linear(x))


class NormalisedNet(OfLayers):
    kind = Normalised


@pytest.mark.parametrize("n", [0, 1])
def test_o7_statistics_of_a_batch_norm_are_written_back(managers, n):
    """Their version counters do not move."""
    plain, ours = build(kind=NormalisedNet), build(kind=NormalisedNet)
    manager = managers(ours, n)
    train(plain, 4)
    train(ours, 4, manager)
    assert_equal_state(ours, plain)
    assert ours.state_dict()["layers.2.norm.running_mean"].abs().sum() > 0
    ours.eval(), plain.eval()
    with torch.no_grad():
        assert torch.equal(ours(batch(9)), plain(batch(9)))
    written = manager.stats["bytes_out"]
    with torch.no_grad():
        ours(batch(9))
    assert manager.stats["bytes_out"] == written, "evaluation writes nothing"


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {}])
@pytest.mark.parametrize("n", [0, 1])
def test_o6_optimizers_that_run_in_backward_lose_no_update(managers, n, options):
    models = build(), build()
    managers(models[1], n)
    for model in models:
        for parameter in model.parameters():
            own = torch.optim.AdamW([parameter], lr=1e-2, **options)
            parameter.register_post_accumulate_grad_hook(lambda _, own=own: (own.step(), own.zero_grad(), None)[-1])
        for step in range(3):
            model(batch(step)).square().mean().backward()
    assert_equal_state(models[1], models[0])


@pytest.mark.parametrize("away", [False, True])
def test_a_layer_of_another_manager_is_refused(managers, away):
    model = build()
    first = managers(model, 0, away=away)
    second = TensorOffloadManager()
    with pytest.raises(ValueError, match=r"module: expected one of no other manager, got Layer, .* layer 2 of another"):
        second.register_layer(0, model.layers[2])
    first.close()
    plain = build()
    third = managers(model, 0)
    train(plain, 2)
    train(model, 2, third)
    assert_equal_state(model, plain)


@pytest.mark.parametrize("n", [0, 9])
@pytest.mark.parametrize("more", [{}, ALL])
def test_o8_close_between_forward_and_backward(managers, n, more):
    plain, ours = build(), build()
    manager = managers(ours, n, **more)
    plain(batch()).square().mean().backward()
    loss = ours(batch()).square().mean()
    manager.close()
    loss.backward()
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_o8_close_that_fails_can_be_repeated(managers, monkeypatch):
    plain, model = build(), build()
    manager = managers(model, 0)
    release, failed = OffloadedStorage.release, []

    def release_or_not(memory):
        if not failed:
            failed.append(memory)
            raise RuntimeError("out of memory")
        release(memory)

    monkeypatch.setattr(OffloadedStorage, "release", release_or_not)
    with pytest.raises(OffloadError, match=r"close: expected room for all layers, got: out of memory; close\(\) again"):
        manager.close()
    assert_equal_state(model, plain)
    manager.close()
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    assert all(p.untyped_storage().nbytes() > 0 for p in model.parameters())
    assert_equal_state(model, plain)


def test_another_memory_is_never_saved_silently(managers):
    model = build()
    managers(model, 0)
    weight = model.layers[1].wide.weight
    weight.data = torch.full_like(weight, 5.0)
    with pytest.raises(OffloadError, match=r"wide.weight of layer 1: expected to stay in its storage, got another"):
        model.state_dict()


@pytest.mark.parametrize("n", [0, 9])
def test_parameters_are_not_replaced_while_they_move(managers, n):
    """assign=True would leave the manager with the old ones, and host copies as the model's own."""
    model, plain = build(), build()
    manager = managers(model, n)
    with pytest.raises(OffloadError, match=r"load_state_dict: expected assign=False while layer 0 is registered"):
        model.load_state_dict(model.state_dict(), assign=True)
    assert_equal_state(model, plain)
    manager.close()
    model.load_state_dict(plain.state_dict(), assign=True)


class KeptByData(nn.Module):
    """Keeps two aliases of a memory, whose versions are counted apart."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.linear, self.writes = nn.Linear(WIDTH, WIDTH), writes

    def forward(self, x):
        first = torch.tanh(self.linear(x)).clone()
        first.mul_(2.0)
        alias = first.data
        y = first.sin() + self.linear(x) * alias
        if self.writes:
            alias.add_(1.0)
        return x + y


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("n", [0, 9])
def test_aliases_count_their_own_versions(managers, n, writes):
    """What autograd allows is allowed, and what it refuses is refused."""
    torch.manual_seed(0)
    layers = [KeptByData(writes).double() for _ in range(3)]
    managers(layers, n, **ALL)
    x = torch.randn(3, WIDTH, dtype=torch.float64)

    def run(x):
        for layer in layers:
            x = layer(x)
        x.sum().backward()

    expected = pytest.raises(OffloadError, match=r"expected values saved for backward unchanged")
    with expected if writes else contextlib.nullcontext():
        run(x)


def test_a_write_back_that_fails_before_a_fetch_is_made_again(managers, monkeypatch):
    model = build()
    manager = managers(model, 0)
    with torch.no_grad():
        model.layers[0].wide.weight.add_(1.0)
    manager.set_link_delay(lambda nbytes: -1.0)  # time.sleep refuses it
    manager.offload_layer(0)
    manager.prefetch_layer(0)
    manager.set_link_delay(None)
    manager.offload_all_layers()
    assert torch.equal(model.layers[0].wide.weight, build().layers[0].wide.weight + 1.0)


def test_memories_on_the_host_go_when_it_closes(managers):
    model = build()
    manager = managers(model, 0, **ALL)
    train(model, 1, manager)
    pool = manager._residency.activations.pool
    assert any(pool._free.values())
    manager.close()
    assert not any(pool._free.values())


@pytest.mark.parametrize("frozen", [False, True])
def test_torch_checkpoints_replay_begins_before_its_layer_does(managers, frozen):
    """Of several layers in one checkpoint the last is read first, if frozen its weight; the replay comes before it."""
    from torch.utils.checkpoint import checkpoint

    class Blocks(Net):
        def __init__(self, layers: int) -> None:
            super().__init__(layers)
            for layer in self.layers:
                layer.narrow.weight.requires_grad_(not frozen)

        def forward(self, x):
            x = self.first(x)
            for k in range(0, LAYERS - 1, 2):
                x = checkpoint(lambda x, k=k: self.layers[k + 1](self.layers[k](x)), x, use_reentrant=False)
            return self.head(self.layers[LAYERS - 1](x))

    plain, ours = build(kind=Blocks), build(kind=Blocks)
    manager = managers(ours, 0)
    uses = [Use("F", k) for k in range(LAYERS)] + [Use("B", 4)]
    for last in (3, 1):
        uses += [Use("R", last - 1), Use("B", last), Use("B", last - 1)]
    manager.expect(uses)
    plain(batch()).square().mean().backward()
    ours(batch()).square().mean().backward()
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad) if b.requires_grad else a.grad is None
    plan = plan_offload(uses, manager.storages(), 0, then=[Use("S", 0)])
    used = [event for event in manager.trace if event[0] in "FRBS"]
    assert used == [str(use) for use in uses]
    assert manager.stats["peak_bytes"] == plan.peak_bytes


class Answer:
    """What no hook looks into."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Answering(Layer):
    def forward(self, x):
        return Answer(super().forward(x.value))


class AnsweringNet(OfLayers):
    kind = Answering

    def forward(self, x):
        x = Answer(self.first(x))
        for layer in self.layers:
            x = layer(x)
        return self.head(x.value)


@pytest.mark.parametrize("n", [0, 1])
def test_a_backward_that_no_hook_announces_finds_its_weights(managers, n):
    plain, ours = build(kind=AnsweringNet), build(kind=AnsweringNet)
    manager = managers(ours, n)
    for a, b in zip(train(ours, 2, manager), train(plain, 2), strict=True):
        assert torch.equal(a, b)
    assert_equal_state(ours, plain)


def test_views_of_weights_are_no_activations(managers):
    layers, x = [nn.Linear(16, 16) for _ in range(3)], torch.randn(4, 16)
    manager = managers(layers, 0, **ALL)
    out = x
    for layer in layers:
        out = layer(out)
    out.sum().backward()
    assert manager.stats["bytes_out"] == 2 * x.nbytes, "the inputs of all layers but the last"


class Scaled(nn.Module):
    """Keeps a value for a backward that never comes, and writes it before it is kept for one that does."""

    def forward(self, x):
        value = x * 2.0
        size = value.square().sum()
        value.div_(size.item())
        return value.sin()


def test_a_value_written_within_a_forward_is_kept_anew(managers):
    gradients = []
    for offload in (False, True):
        layers, x = [Scaled() for _ in range(3)], torch.arange(1.0, 5.0, requires_grad=True)
        if offload:
            managers(layers, 0, **ALL)
        layers[2](layers[1](layers[0](x))).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_a_value_written_between_two_forwards_is_kept_anew(managers):
    """Though the first one's graph still holds it as it was, and has a copy of that on the host."""
    gradients = []
    for offload in (False, True):
        layers, x = [nn.GELU() for _ in range(3)], torch.arange(1.0, 5.0, requires_grad=True)
        if offload:
            managers(layers, 0, **ALL)
        first = layers[0](x)
        first.sum().backward(retain_graph=True)
        with torch.no_grad():
            x.mul_(0.5)
        layers[2](layers[1](x)).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # of PyTorch's jvp
@pytest.mark.parametrize(
    "derivative",
    [
        lambda model, x: torch.func.grad(lambda inner: model(inner).sum())(x),
        lambda model, x: torch.func.jvp(model, (x,), (x,)),
        lambda model, x: torch.func.jacrev(model)(x),
    ],
)
def test_derivatives_of_torch_func_are_refused_by_name_and_leave_it_clean(derivative, managers):
    plain, ours = build(), build()
    manager = managers(ours, 1)
    with pytest.raises(OffloadError, match=r"expected plain autograd or vmap .*torch\.func"):
        derivative(ours, batch()[0])
    for a, b in zip(train(ours, 1, manager), train(plain, 1), strict=True):
        assert torch.equal(a, b)


class LargestStep(torch.optim.SGD):
    """Divides every gradient by the norm over all parameters, as some optimizers do."""

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        nn.utils.clip_grad_norm_(parameters, 1e-3)
        return super().step(closure)


def with_a_hook(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.1)

    def clip(own, args, kwargs):
        nn.utils.clip_grad_norm_([p for group in own.param_groups for p in group["params"]], 1e-3)

    optimizer.register_step_pre_hook(clip)
    return optimizer


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda parameters: LargestStep(parameters, lr=0.1), "LargestStep, which may not do so"),
        (with_a_hook, "SGD with step hooks"),
        (torch.optim.LBFGS, "LBFGS"),
    ],
)
def test_optimizers_that_may_combine_parameters_are_refused_by_name(make, words, managers):
    model = build()
    manager = managers(model, 1)
    optimizer = make(model.parameters())
    with pytest.raises(OffloadError, match=words):
        manager.step(optimizer)
    if words != "LBFGS":
        manager.step(optimizer, is_per_parameter=True)


def test_step_hooks_of_all_optimizers_are_refused_too(managers):
    model = build()
    manager = managers(model, 1)
    hook = register_optimizer_step_post_hook(lambda *_: None)
    try:
        with pytest.raises(OffloadError, match="SGD with step hooks"):
            manager.step(torch.optim.SGD(model.parameters(), lr=0.1))
    finally:
        hook.remove()
    manager.step(torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_failed_copy_to_the_host_leaves_the_other_layers_moving(managers):
    """The second layer's device memory is released although the first layer's copy failed."""
    model = build()
    manager = managers(model, LAYERS)
    residency = manager._residency
    manager.require(0), manager.require(1)
    for number in (0, 1):
        residency.layers[number].note_change()
        residency.evict(number)
    storages = residency.layers[0].storages
    copied = storages[0]._outgoing
    copied._done.wait()
    copied.error = RuntimeError("lost")
    with pytest.raises(OffloadError, match="lost"):
        residency.finish_eviction()
    assert all(storage.device_bytes == 0 for storage in [*storages[1:], *residency.layers[1].storages])
    assert storages[0].is_on_device


def test_layers_that_do_not_move_have_no_uses_in_the_statistics(managers):
    model = build()
    manager = managers(model, 1, **ALL)
    train(model, 2, manager)
    stats = manager.stats
    assert (stats["hits"], stats["misses"], stats["peak_layers"], stats["peak_bytes"]) == (0, 0, 0, 0)
    assert stats["bytes_out"] > 0
