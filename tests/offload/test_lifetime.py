"""Managers and models come and go: dropped managers, saved modules, inference mode, compiled models, many steps."""

import copy
import copyreg
import gc
import io
import os
import pickle
import subprocess
import sys
import threading
import weakref

import jaxtyping
import pytest
import torch
from torch import nn

from reference_torch.offload import TensorOffloadManager
from reference_torch.offload.link import Link
from reference_torch.offload.storage import OffloadedStorage
from tests.fuzz.harness import check_nothing_grows
from tests.offload.support import WIDTH, assert_equal_state, batch, build, train

EVERYTHING = {"activations": True, "activation_min_bytes": 1}


def offloaded(model: nn.Module, n: int = 1, **more) -> TensorOffloadManager:
    """A manager that nobody else closes."""
    manager = TensorOffloadManager(num_prefetch_layers=n, **more)
    for number, layer in enumerate(model.layers):
        manager.register_layer(number, layer)
    manager.offload_all_layers()
    return manager


def hooks_of(model: nn.Module) -> int:
    """Entries of all hook dictionaries of a model's modules and parameters."""
    of_modules = [value for part in model.modules() for name, value in vars(part).items() if "_hooks" in name]
    of_parameters = [parameter._backward_hooks or () for parameter in model.parameters()]
    return sum(map(len, [*of_modules, *of_parameters]))


# Dropped.


@pytest.mark.parametrize("more", [{}, EVERYTHING])
def test_a_dropped_manager_closes(more):
    plain, model = build(), build()
    hooks, threads = hooks_of(model), threading.active_count()
    manager = offloaded(model, **more)
    train(model, 2, manager)
    train(plain, 2)
    storages = [weakref.ref(storage) for storage in manager._residency.storages.values()]
    seen = weakref.ref(manager)
    gc.disable()
    try:
        del manager
        assert seen() is None, "nothing but its owner holds it"
    finally:
        gc.enable()
    assert threading.active_count() == threads
    assert hooks_of(model) == hooks
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    assert_equal_state(model, plain)
    assert not any(storage() for storage in storages)
    for a, b in zip(train(model, 2), train(plain, 2), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("more", [{}, EVERYTHING])
def test_a_manager_dropped_between_forward_and_backward(more):
    gradients = []
    for model in (build(), build()):
        manager = offloaded(model, 0, **more) if gradients else None
        loss = model(batch()).square().mean()
        del manager
        loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


def test_a_manager_in_a_cycle_with_its_layers_is_collected():
    model = build()
    model.layers[0].manager = offloaded(model)
    model(batch()).sum().backward()
    seen, weight, threads = weakref.ref(model.layers[0].manager), model.layers[1].wide.weight, threading.active_count()
    expected = build().layers[1].wide.weight
    del model
    gc.collect()
    assert seen() is None
    assert threading.active_count() == threads - 1
    assert torch.equal(weight, expected)


def test_a_manager_collected_on_its_links_thread():
    """The collector runs on whatever thread allocates, and that one cannot wait for its own copies."""
    model = build()
    manager = offloaded(model, 0)
    manager.knot = manager
    seen = weakref.ref(manager)
    link, release = manager._residency.link, threading.Event()
    gc.collect()
    gc.disable()
    try:
        del manager

        link._queue.put([_Told(), _Collecting(release), None, 0.0])
        assert release.wait(20), "the thread of the link waits for itself"
    finally:
        gc.enable()
    for thread in threading.enumerate():
        if thread.name == "offload close":
            thread.join(20)
    assert seen() is None
    assert_equal_state(model, build())


class _Told:
    def finish(self, error) -> None:
        pass


class _Collecting:
    """A target in whose copy garbage is collected."""

    def __init__(self, done: threading.Event) -> None:
        self._done = done

    def copy_(self, source) -> None:
        gc.collect()
        self._done.set()


def test_a_dropped_manager_without_room_gives_what_is_read(monkeypatch):
    model = build()
    manager = offloaded(model, 0)
    monkeypatch.setattr(OffloadedStorage, "release", _no_room)
    del manager
    gc.collect()
    monkeypatch.undo()
    assert_equal_state(model, build())
    assert torch.equal(model(batch()), build()(batch()))


def _no_room(memory: OffloadedStorage) -> None:
    raise RuntimeError("out of memory")


def test_thirty_managers_leave_nothing():
    """On models of their own, and on one."""
    shared = build()
    hooks = hooks_of(shared)
    classes = set(copyreg.dispatch_table)

    def use(number: int) -> None:
        model = build() if number % 2 else shared
        manager = offloaded(model, number % 3, **(EVERYTHING if number % 5 == 0 else {}))
        model(batch()).square().mean().backward()
        if number % 4 == 0:
            with torch.inference_mode():
                model(batch())
        del manager

    for number in range(4):
        use(number)
    check_nothing_grows(lambda: [use(number) for number in range(30)])
    assert hooks_of(shared) == hooks
    assert set(copyreg.dispatch_table) <= classes


@pytest.fixture
def unchecked_shapes():
    """Leave out the checks of annotations, which take four fifths of a small step."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("more", [pytest.param({}, marks=pytest.mark.slow), EVERYTHING])
def test_three_hundred_steps_leave_nothing(managers, more):
    model = build()
    manager = managers(model, 1, **more)
    manager.trace = None
    x = batch().requires_grad_()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        manager.step(optimizer)
        if number % 10 == 0:
            with torch.no_grad():
                model(x)
            model.state_dict()

    for number in range(20):
        step(number)
    hooks = hooks_of(model)
    objects = len(gc.get_objects())
    check_nothing_grows(lambda: [step(number) for number in range(300)])
    assert hooks_of(model) == hooks
    assert len(gc.get_objects()) < objects + 300
    assert len(x._backward_hooks or ()) == 0, "layers' inputs come from a layer that stays"


def test_leaves_that_are_inputs_lose_their_hook_when_it_closes():
    model = build()
    prompt = nn.Parameter(torch.randn(2, WIDTH, dtype=torch.float64))
    first = offloaded(model)
    for _ in range(3):
        model.layers[0](prompt).sum().backward()
    assert len(prompt._backward_hooks) == 1
    torch.save(prompt, io.BytesIO())
    first.close()
    assert not prompt._backward_hooks
    assert not vars(prompt)
    second = offloaded(model)
    model.layers[1](prompt).sum().backward()
    assert second.resident_layers


@pytest.mark.multiprocess
@pytest.mark.parametrize("ending", ["", "os.fork() or os._exit(0 if run() == there else 3); assert os.wait()[1] == 0"])
def test_a_process_ends_and_forks_with_layers_away(ending):
    code = f"""
import atexit, os, torch
from tests.offload.test_lifetime import batch, build, offloaded
model = build()
run = lambda: float(model(batch()).sum())
there = run()
manager = offloaded(model, 0)
assert run() == there
atexit.register(lambda: print("at exit", run() == there, flush=True))
{ending}
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": ".", "OMP_NUM_THREADS": "1"},  # OpenMP's threads do not outlive a fork
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "at exit True\n"
    assert not done.stderr


# Saved and copied.


@pytest.mark.parametrize("n", [0, 9])
def test_a_registered_module_is_saved_as_any_other(managers, n):
    """Without hooks of offload, and with those of others."""
    plain, ours = build(), build()
    for model in (plain, ours):
        model.layers[1].register_forward_hook(_double)
    manager = managers(ours, n)
    train(ours, 2, manager)
    train(plain, 2)
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    copies = [torch.load(file, weights_only=False), pickle.loads(pickle.dumps(ours)), copy.deepcopy(ours)]
    for model in copies:
        assert hooks_of(model) == hooks_of(plain) == 1
        assert_equal_state(model, plain)
        assert {type(p) for p in model.parameters()} == {nn.Parameter}
        assert torch.equal(model(batch()), plain(batch()))
    assert b"reference_torch" not in file.getvalue()
    train(ours, 2, manager)
    train(plain, 2)
    assert_equal_state(ours, plain)


def _double(module, args, output):
    return 2 * output


class Pickled(nn.Linear):
    """Has its own way of being pickled, which stays."""

    def __getstate__(self):
        return {**self.__dict__, "times": self.__dict__.get("times", 0) + 1}


def _reduce_their_way(module):
    return _made, (module.weight.detach().clone(),)


def _made(weight):
    made = Other(3, 3)
    made.weight.data.copy_(weight)
    return made


class Other(nn.Linear):
    pass


def test_other_ways_of_pickling_stay(managers):
    layers = [Pickled(3, 3), Other(3, 3)]
    copyreg.pickle(Other, _reduce_their_way)
    try:
        manager = managers(layers, 0)
        first, second = pickle.loads(pickle.dumps(layers))
        assert first.times == 1
        assert torch.equal(first.weight, layers[0].weight)
        assert hooks_of(first) == 0
        assert torch.equal(second.weight, layers[1].weight)
        manager.close()
        assert copyreg.dispatch_table[Other] is _reduce_their_way
        assert Pickled not in copyreg.dispatch_table
    finally:
        del copyreg.dispatch_table[Other]


# Inference mode.


@pytest.mark.parametrize("n", [0, 1, 9])
@pytest.mark.parametrize("more", [{}, EVERYTHING])
def test_inference_mode_between_steps(managers, n, more):
    plain, ours = build(), build()
    manager = managers(ours, n, **more)
    for step in range(3):
        train(plain, 1)
        train(ours, 1, manager)
        with torch.inference_mode():
            assert torch.equal(ours(batch(step)), plain(batch(step)))
            state = ours.state_dict()
        assert not any(value.is_inference() for value in state.values())
    assert_equal_state(ours, plain)


def test_registering_and_closing_in_inference_mode():
    plain, ours = build(), build()
    with torch.inference_mode():
        manager = offloaded(ours, 0)
        assert torch.equal(ours(batch()), plain(batch()))
    train(ours, 2, manager)
    train(plain, 2)
    with torch.inference_mode():
        manager.close()
    train(ours, 1)
    train(plain, 1)
    assert_equal_state(ours, plain)


def test_tensors_of_inference_mode_stay(managers):
    """Nobody counts what is written to them."""
    with torch.inference_mode():
        layer = nn.Linear(3, 3)
    manager = managers([layer], 0)
    reason = "a tensor of inference mode, whose changes are not counted"
    assert manager.stats["retained"] == {"weight of layer 0": reason, "bias of layer 0": reason}


COMPILED = {
    "the model": lambda model: torch.compile(model, backend="aot_eager"),
    "a function": lambda model: torch.compile(lambda x: 2.0 * model(x), backend="aot_eager"),
    "a layer": lambda model: model.layers[1].compile(backend="aot_eager") or model,
}


@pytest.mark.parametrize("n", [0, 1])
@pytest.mark.parametrize("what", COMPILED)
@pytest.mark.parametrize("more", [pytest.param({}, marks=pytest.mark.slow), EVERYTHING])
@pytest.mark.filterwarnings("ignore")
def test_compiled_models_break_the_graph_at_offloaded_layers(managers, what, n, more):
    torch._dynamo.reset()
    results = []
    for offload in (False, True):
        model = build(3)
        manager = managers(model, n, **more) if offload else None
        run = COMPILED[what](model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(3):
            if manager is not None:  # compiling looks at every parameter
                manager.offload_all_layers()
            optimizer.zero_grad()
            loss = run(batch(step)).square().mean()
            loss.backward()
            optimizer.step() if manager is None else manager.step(optimizer)
            losses.append(loss.detach())
            with torch.no_grad():
                losses.append(run(batch(step)).sum())
        if manager is not None:
            assert manager.stats["peak_layers"] <= n + 1
        results.append([*losses, *(p.grad for p in model.parameters()), *(p.detach() for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_copies_of_a_link_whose_thread_has_ended_are_made_at_once():
    link = Link(torch.device("cpu"))
    link._queue.put(None)
    link._thread.join()
    target, source = (torch.full((4,), value, dtype=torch.uint8).untyped_storage() for value in (0, 7))
    link.copy(target, source).wait()
    assert target.tolist() == [7] * 4
