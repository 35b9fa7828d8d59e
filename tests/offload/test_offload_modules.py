"""offload_modules in models that this project did not write, with what training loops use."""

import copy
import gc
import threading

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from reference_torch.offload import OffloadError, offload_modules
from reference_torch.offload.storage import OffloadedStorage
from reference_torch.rank_pool import RankPool
from reference_torch.recompute import recompute_modules
from tests.everywhere.torch_models import MODELS, NAMES, assert_same, build


def train(model: nn.Module, inputs: dict[str, torch.Tensor], manager=None) -> dict[str, torch.Tensor]:
    """Three steps with AdamW, clipping, a scaler and an average of the weights: everything at the end, by name."""
    torch.manual_seed(3)
    average = AveragedModel(copy.deepcopy(model), multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu")
    losses = []
    for number in range(3):
        result = model(**inputs)
        output = result if isinstance(result, torch.Tensor) else result.logits
        loss = output.square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if manager is not None and number == 1:
            manager.step(optimizer)
        else:
            scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        average.update_parameters(model)
        losses.append(loss.detach())
    found = {f"average {name}": t.clone() for name, t in average.state_dict().items()}
    found |= {name: t.clone() for name, t in model.state_dict().items()}
    for number, moments in optimizer.state_dict()["state"].items():
        found |= {f"{number} {name}": torch.as_tensor(t).clone() for name, t in moments.items()}
    return found | {"losses": torch.stack(losses)}


@pytest.mark.parametrize("activations", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_model_of_others_trains_as_without_offload(name, activations):
    example = MODELS[name]
    expected = train(build(name), example.inputs())
    other = build(name)
    manager = offload_modules(other, example.offloaded, activations=activations, activation_min_bytes=64)
    assert len(manager.resident_layers) <= 1
    assert_same(train(other, example.inputs(), manager), expected)
    assert manager.stats["copies_in"] > 3 * len(manager.layer_params) - 3
    manager.close()
    assert type(next(other.parameters())) is nn.Parameter


@pytest.mark.parametrize("name", ["Llama", "ResNet"])
def test_optimizer_state_and_gradients_move(name):
    """As above, with both on the host between steps; steps of the scaler and of the manager alternate."""
    expected = train(build(name), MODELS[name].inputs())
    other = build(name)
    manager = offload_modules(other, MODELS[name].offloaded, optimizer_state=True, gradients=True)
    assert_same(train(other, MODELS[name].inputs(), manager), expected)
    manager.close()


def test_a_scaler_skips_a_step_with_gradients_that_are_not_finite():
    """As without offload: scaler.step leaves weights and moments, and update halves the scale."""
    found = []
    for is_offloaded in (False, True):
        model = linear_layers()
        manager = offload_modules(model, ["0", "1", "2"], gradients=True) if is_offloaded else None
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        for factor in (1.0, 1e38, 1.0):
            loss = model(torch.ones(2, model[0].in_features)).square().mean() * factor
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scaler.get_scale() == 2.0**15
        assert int(optimizer.state_dict()["state"][0]["step"]) == 2
        found.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        if manager is not None:
            manager.close()
    assert_same(*found)


def linear_layers() -> nn.Sequential:
    """Three layers; each call returns equal weights."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))


def test_gradients_that_other_code_keeps_are_not_overwritten():
    """Those of two tasks, combined later, swapped, and put back for another backward."""

    def run(offload: bool) -> list[torch.Tensor]:
        model = linear_layers()
        manager = offload_modules(model, ["*"], gradients=True) if offload else None
        tasks = []
        for task in range(2):
            model.zero_grad()
            model(torch.full((1, 4), 1.0 + task)).square().sum().backward()
            tasks.append([p.grad for p in model.parameters()])
        for p, gradient in zip(model.parameters(), tasks[0], strict=True):
            p.grad = gradient
        first, last = model[0].weight, model[2].weight
        first.grad, last.grad = last.grad, first.grad
        for task in range(2):
            model(torch.full((1, 4), 3.0 + task)).square().sum().backward()
        found = [p.grad.clone() for p in model.parameters()]
        stored = model[1].weight.grad
        model.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        if manager is not None:
            manager.close()
        return [*found, stored.clone(), *(gradient.clone() for gradient in tasks[1])]

    assert all(torch.equal(ours, plain) for ours, plain in zip(run(True), run(False), strict=True))


@pytest.mark.parametrize("write", ["data", "numpy", "scaler"])
def test_writes_to_gradients_that_no_version_counts(write):
    """Between backward and the updates of two optimizers, which both see them."""

    def run(offload: bool) -> list[torch.Tensor]:
        model = linear_layers()
        optimizers = [torch.optim.SGD([p for p in model.parameters() if p.ndim == axes], 0.1) for axes in (2, 1)]
        manager = offload_modules(model, ["*"], gradients=True) if offload else None
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        loss = model(torch.ones(1, 4)).sum()
        (scaler.scale(loss) if write == "scaler" else loss).backward()
        for optimizer in optimizers if write == "scaler" else ():
            scaler.unscale_(optimizer)
        for p in model.parameters():
            if write == "data":
                p.grad.data.clamp_(-0.1, 0.1)
            elif write == "numpy":
                p.grad.numpy()[...] *= 0.5
        for optimizer in optimizers:
            optimizer.step() if manager is None else manager.step(optimizer)
        return [x.clone() for p in model.parameters() for x in (p.detach(), p.grad)]

    assert all(torch.equal(ours, plain) for ours, plain in zip(run(True), run(False), strict=True))


@pytest.mark.parametrize("reads", [False, True])
def test_gradients_may_get_other_memory(reads):
    """By ``.data =``, as some optimizers and clipping functions do, between backwards too."""

    def run(offload: bool) -> list[torch.Tensor]:
        model = linear_layers()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        manager = offload_modules(model, ["*"], gradients=True, num_prefetch_layers=0) if offload else None
        for _ in range(2):
            for step in range(2):
                model(torch.full((1, 4), 1.0 + step)).square().sum().backward()
                for p in model.parameters():
                    if reads:
                        p.grad.norm()
                    p.grad.data = p.grad * 0.5
            optimizer.step() if manager is None else manager.step(optimizer)
        found = [x.clone() for p in model.parameters() for x in (p.detach(), p.grad)]
        if manager is not None:
            manager.close()
        return found

    assert all(torch.equal(ours, plain) for ours, plain in zip(run(True), run(False), strict=True))


def test_gradients_that_are_dropped_need_no_garbage_collection():
    model = linear_layers()
    manager = offload_modules(model, ["*"], gradients=True)
    gc.collect()
    gc.disable()
    try:
        for _ in range(4):
            model(torch.ones(1, 4)).sum().backward()
            model.zero_grad()
        assert sum(type(each) is OffloadedStorage for each in gc.get_objects()) <= 2 * 6
    finally:
        gc.enable()
    manager.close()


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.Muon])
def test_optimizers_that_pytorch_exports_from_its_package(kind):
    def run(offload: bool) -> list[torch.Tensor]:
        model = linear_layers()
        optimizer = kind([p for p in model.parameters() if p.ndim == 2], 0.1)
        manager = offload_modules(model, ["*"], optimizer_state=True) if offload else None
        for _ in range(2):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step() if manager is None else manager.step(optimizer)
        return [p.detach().clone() for p in model.parameters()]

    assert all(torch.equal(ours, plain) for ours, plain in zip(run(True), run(False), strict=True))


def assert_same_state(ours: dict, theirs: dict) -> None:
    assert ours.keys() == theirs.keys()
    for number, state in theirs.items():
        assert all(torch.equal(ours[number][key], state[key]) for key in state)


def test_moments_are_on_the_host_between_steps():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(5)))
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(each.parameters(), 0.01, amsgrad=True) for each in (model, plain)]
    manager = offload_modules(model, ["0", "1", "2", "3"], optimizer_state=True)
    x = torch.randn(8, 64)

    def step() -> None:
        for each in (model, plain):
            each.zero_grad()
            each(x).square().mean().backward()
        manager.step(optimizers[0])
        optimizers[1].step()

    def resident() -> int:
        """Moments of offloaded weights with memory of their own; those on the host share the guard memory."""
        states = [state for p, state in optimizers[0].state.items() if p is not model[4].weight]
        with torch._C.DisableTorchFunctionSubclass():
            addresses = [t.data_ptr() for state in states for t in state.values() if t.numel() > 64]
        assert len(addresses) == 12
        return sum(addresses.count(address) == 1 for address in addresses)

    for _ in range(3):
        step()
        assert resident() == 0
    saved = copy.deepcopy(optimizers[0].state_dict())
    assert_same_state(saved["state"], optimizers[1].state_dict()["state"])
    step()
    assert resident() == 0
    for optimizer in optimizers:
        optimizer.load_state_dict(copy.deepcopy(saved))  # new tensors
    step()
    assert resident() == 0
    manager.close()
    assert resident() == 12
    assert_same_state(*(each.state_dict()["state"] for each in optimizers))
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def resident_gradients(layers: list[nn.Linear]) -> int:
    """Number of weights whose gradients have memory of their own; those on the host share the guard memory."""
    with torch._C.DisableTorchFunctionSubclass():
        addresses = [layer.weight.grad.data_ptr() for layer in layers]
    return sum(addresses.count(address) == 1 for address in addresses)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_on_the_host_between_backward_and_update(set_to_none):
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(each.parameters(), 0.01, momentum=0.9) for each in (model, plain)]
    manager = offload_modules(model, ["0", "1", "2", "3", "4"], gradients=True)
    layers = [*model][:5]
    seen = []
    model[0].weight.register_hook(lambda gradient: seen.append(resident_gradients(layers[2:])))

    def backward(scale: float) -> None:
        x = scale * torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
        for each in (model, plain):
            each(x).square().mean().backward()

    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)
        for scale in (1.0, 2.0, 3.0):  # added up
            backward(scale)
            assert resident_gradients(layers) <= 1  # that of the layer whose backward was last
        if step == 2:
            for each in (model, plain):
                nn.utils.clip_grad_norm_(each.parameters(), 0.01)
            assert resident_gradients(layers) == 5
        optimizers[0].step() if step == 3 else manager.step(optimizers[0])
        optimizers[1].step()
        assert resident_gradients(layers) == (5 if step == 3 else 0)
    assert max(seen) <= 1
    manager.close()
    assert resident_gradients(layers) == 5
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert type(ours.grad) is torch.Tensor
        assert torch.equal(ours.grad, theirs.grad)
        assert torch.equal(ours, theirs)


def test_a_gradient_that_others_hold_stays():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    manager = offload_modules(model, ["0", "1", "2"], gradients=True)
    plain = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    plain.load_state_dict(model.state_dict())
    views = []
    model[2].weight.register_post_accumulate_grad_hook(lambda parameter: views.append(parameter.grad.view(-1)))
    x = torch.randn(8, 64)
    for each in (model, plain):
        each(x).square().mean().backward()
    assert torch.equal(views[0], plain[2].weight.grad.view(-1))  # before a read of .grad, which would fetch it
    manager.close()


def test_gradients_of_unfrozen_parameters_and_of_penalties_outside_of_layers():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    model[1].requires_grad_(False)
    plain = copy.deepcopy(model)
    manager = offload_modules(model, ["0", "1", "2"], gradients=True)
    x = torch.randn(8, 64)
    for unfrozen in (False, True):
        for each in (model, plain):
            each[1].requires_grad_(unfrozen)
            each(x).square().mean().backward()
            each[0].weight.square().sum().backward()  # adds to a gradient on the host
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    manager.close()


def replicated_gradients() -> str:
    """Return the error of moved gradients inside of DistributedDataParallel."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    manager = offload_modules(model, ["0", "1"], gradients=True)
    try:
        nn.parallel.DistributedDataParallel(model)(torch.randn(2, 64)).sum().backward()
    except OffloadError as error:
        return str(error)
    finally:
        manager.close()
    return "no error"


@pytest.mark.multiprocess
def test_replicated_gradients_are_refused():
    with RankPool(2, 60.0) as pool:
        for message in pool.run("tests.offload.test_offload_modules:replicated_gradients"):
            assert message.startswith("gradients: expected a model without DistributedDataParallel")


def test_with_recompute():
    example = MODELS["Llama"]
    expected = train(build("Llama"), example.inputs())
    other = build("Llama")
    handle = recompute_modules(other, example.recomputed)
    manager = offload_modules(other, example.offloaded, activations=True, activation_min_bytes=64)
    found = train(other, example.inputs(), manager)
    assert_same(found, expected)
    manager.close()
    handle.remove()


class Averaging(nn.Module):
    """A module with a buffer that it changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x):
        self.average.lerp_(x.detach().mean(0), 0.1)
        return torch.tanh(x - self.average)


class Parts(nn.Module):
    """A list, which is never called itself, and a checkpoint of one of its submodules."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList([Averaging(), nn.Linear(4, 4), nn.LayerNorm(4), nn.Sequential(nn.Linear(4, 4))])

    def forward(self, x):
        x = self.parts[2](self.parts[1](self.parts[0](x)))
        return x + checkpoint(self.parts[3], x, use_reentrant=False)


@pytest.mark.parametrize("patterns", [["parts"], ["parts.*"]])
def test_with_recompute_of_what_is_called_alone_or_in_a_checkpoint(patterns):
    """Recompute reads buffers of parts that are on the host, and leaves to a checkpoint what runs in it."""
    results = []
    for has_techniques in (False, True):
        model, x = Parts(), torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
        manager = None
        if has_techniques:
            recompute_modules(model, {"": ["parts.0", "parts.2", "parts.3"]})
            manager = offload_modules(model, patterns, activations=True, activation_min_bytes=1)
        for _ in range(2):
            model(x).square().sum().backward()
        with torch.inference_mode():
            last = model(x)
        if manager is not None:
            manager.close()
        results.append([last, x.grad, *(p.grad for p in model.parameters()), *model.buffers()])
    assert all(torch.equal(first, second) for first, second in zip(*results, strict=True))


MISTAKES = [
    (["layer.*"], {}, ValueError, r"'layer\.\*', which matches none of model\.layers"),
    ([], {}, ValueError, "expected at least one pattern, got none"),
    ("model.layers.*", {}, TypeError, r"expected a list of patterns, got 'model\.layers\.\*'"),
    (
        ["model.layers.*", "model.layers.*.mlp"],
        {},
        ValueError,
        r"got model\.layers\.0 and model\.layers\.0\.mlp inside",
    ),
    (["model.layers.*"], {"num_prefetch_layers": -1}, ValueError, "num_prefetch_layers"),
    ({"model.layers.*": ["mlp"]}, {}, TypeError, "modules: expected a list of patterns, got {'model"),
]


@pytest.mark.parametrize(("modules", "settings", "kind", "message"), MISTAKES)
def test_mistakes_are_named(modules, settings, kind, message):
    with pytest.raises(kind, match=message):
        offload_modules(build("Llama"), modules, **settings)


class Waits(nn.Module):
    """It stops in its forward or its backward until another thread has tried to use the model."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.where = where
        self.reached, self.go_on = threading.Event(), threading.Event()

    def wait(self, _: object = None) -> None:
        self.reached.set()
        assert self.go_on.wait(30)

    def forward(self, x):
        if self.where == "forward":
            self.wait()
        y = x * self.weight
        if self.where == "backward":
            y.register_hook(self.wait)
        return y


OTHERS = {
    "forward": lambda model, x: model(x),
    "state_dict": lambda model, _: model.state_dict(),
    "parameter": lambda model, _: model[3].weight.sum(),
}


@pytest.mark.parametrize("use", OTHERS)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_second_thread_is_refused(where, use):
    model = nn.Sequential(nn.Linear(4, 4), Waits(where), nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.randn(2, 4)
    plain = [p.detach().clone() for p in model.parameters()]
    manager = offload_modules(model, ["*"], num_prefetch_layers=0)
    first = threading.Thread(target=lambda: model(x).sum().backward(), name="first")
    first.start()
    assert model[1].reached.wait(30)
    with pytest.raises(
        OffloadError, match=r"expected one thread at a time, got MainThread while first is in a forward"
    ):
        OTHERS[use](model, x)
    model[1].go_on.set()
    first.join()
    OTHERS[use](model, x)
    manager.close()
    for parameter, before in zip(model.parameters(), plain, strict=True):
        assert torch.equal(parameter, before)
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()


def test_threads_may_follow_one_another():
    """Also after an error in a backward, and after a thread that has ended within one."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    manager = offload_modules(model, ["*"], num_prefetch_layers=0)

    def fails() -> None:
        y = model(torch.randn(2, 4))
        y.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            y.sum().backward()

    for target in (fails, lambda: model(torch.randn(2, 4)).sum().backward()):
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
        model(torch.randn(2, 4)).sum().backward()
    fails()
    model(torch.randn(2, 4))
    done = []
    thread = threading.Thread(target=lambda: done.append(model(torch.randn(2, 4))))
    thread.start()
    thread.join()
    assert len(done) == 1
    manager.close()
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_function_is_no_model():
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, got function"):
        offload_modules(lambda x: x, ["blocks.*"])
