"""A replay runs under the random numbers and the autocast of its forward, and puts back what it found (R2, R3)."""

import contextlib
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from reference_torch.recompute import CheckpointWithoutOutput, lazy_restore, state
from reference_torch.recompute.state import NumpyState, PythonState
from tests.recompute.support import assert_equal, exact_reader, gradients, normal, reader

# R2


@pytest.mark.parametrize("scoped", [True, False])
def test_r02_dropout_masks_are_replayed_and_the_generator_is_put_back(scoped):
    masks = []

    def noisy(x):
        y = F.dropout(x, 0.5)
        masks.append(y != 0)
        return F.gelu(y) * torch.rand(5, 7, dtype=x.dtype)

    x = normal(0, 5, 7)
    torch.manual_seed(3)
    expected = gradients(reader(noisy(x)), [x])
    following = torch.rand(4)

    torch.manual_seed(3)
    checkpoint = CheckpointWithoutOutput()
    with lazy_restore() if scoped else contextlib.nullcontext():
        loss = reader(checkpoint.checkpoint(noisy, x))
        checkpoint.discard_output_and_register_recompute(loss)
    assert torch.equal(torch.rand(4), following), "the forward draws as the plain call does"
    torch.rand(11)
    state = torch.get_rng_state()
    assert_equal(gradients(loss, [x]), expected)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(masks) == 3
    assert torch.equal(masks[1], masks[0])
    assert torch.equal(masks[2], masks[1])
    assert masks[0].any()
    assert not masks[0].all()


def test_r02_generator_is_put_back_when_the_replay_raises():
    calls = []

    def breaks(x):
        calls.append(1)
        y = F.dropout(x, 0.5)
        if len(calls) > 1:
            raise ArithmeticError("broken replay")
        return y

    x = normal(0, 3, 4)
    checkpoint = CheckpointWithoutOutput()
    loss = reader(checkpoint.checkpoint(breaks, x))
    checkpoint.discard_output_and_register_recompute(loss)
    torch.rand(2)
    state = torch.get_rng_state()
    with pytest.raises(ArithmeticError, match="broken replay"):
        gradients(loss, [x])
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("raises", [False, True])
def test_r02_registered_generators_are_replayed_and_put_back(raises):
    generator, calls = torch.Generator(), []

    def noisy(x):
        calls.append(1)
        noise = torch.rand(x.shape, dtype=x.dtype, generator=generator)
        if raises and len(calls) > 2:
            raise ArithmeticError("broken replay")
        return x.tanh() * noise

    x = normal(0, 4, 4)
    generator.manual_seed(9)
    expected = gradients(reader(noisy(x)), [x])
    generator.manual_seed(9)
    checkpoint = CheckpointWithoutOutput(generators=[generator])
    loss = reader(checkpoint.checkpoint(noisy, x))
    checkpoint.discard_output_and_register_recompute(loss)
    torch.rand(3, generator=generator)
    state, default = generator.get_state(), torch.get_rng_state()
    if raises:
        with pytest.raises(ArithmeticError, match="broken replay"):
            gradients(loss, [x])
    else:
        assert_equal(gradients(loss, [x]), expected)
    assert torch.equal(generator.get_state(), state)
    assert torch.equal(torch.get_rng_state(), default)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_r02_cuda_generators_are_replayed_and_put_back(device):
    x = normal(0, 64, 64, dtype=torch.float32).detach().to(device).requires_grad_()

    def noisy(x):
        return F.dropout(F.gelu(x), 0.5) * torch.rand(64, 64).to(x.device)

    def seed():
        torch.manual_seed(5)

    seed()
    expected = torch.autograd.grad(
        exact_reader(noisy(x)), x, normal(1, 4096, dtype=torch.float32, grad=False).to(device)
    )
    seed()
    checkpoint = CheckpointWithoutOutput()
    loss = exact_reader(checkpoint.checkpoint(noisy, x))
    checkpoint.discard_output_and_register_recompute(loss)
    torch.rand(5, device=device)
    states = torch.cuda.get_rng_state(device), torch.get_rng_state()
    actual = torch.autograd.grad(loss, x, normal(1, 4096, dtype=torch.float32, grad=False).to(device))
    assert_equal(actual, expected)
    assert torch.equal(torch.cuda.get_rng_state(device), states[0])
    assert torch.equal(torch.get_rng_state(), states[1])


# R3


def autocast_state() -> tuple:
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_r03_autocast_of_the_forward_is_restored_for_the_replay(dtype, cache):
    states = []

    def project(x, weight):
        states.append(autocast_state())
        return F.gelu(F.linear(x, weight)) @ weight

    def run(recompute):
        x, weight = normal(0, 4, 8, dtype=torch.float32), normal(1, 8, 8, dtype=torch.float32)
        checkpoint = CheckpointWithoutOutput()
        with torch.autocast("cpu", dtype, cache_enabled=cache):
            y = checkpoint.checkpoint(project, x, weight) if recompute else project(x, weight)
            loss = F.linear(y, weight).float() * y.float().sin()
            if recompute:
                checkpoint.discard_output_and_register_recompute(loss)
        assert y.dtype == dtype
        outside = autocast_state()
        result = gradients(loss, [x, weight])
        assert autocast_state() == outside
        return result

    assert_equal(run(True), run(False))
    assert states == [(True, dtype, cache)] * 3


@pytest.mark.parametrize("cache", [True, False])
def test_r03_forward_without_autocast_replays_without_it_in_a_backward_under_autocast(cache):
    states = []

    def project(x, weight):
        states.append(autocast_state())
        return F.gelu(F.linear(x, weight))

    def run(recompute):
        x, weight = normal(0, 4, 8, dtype=torch.float32), normal(1, 8, 8, dtype=torch.float32)
        checkpoint = CheckpointWithoutOutput()
        y = checkpoint.checkpoint(project, x, weight) if recompute else project(x, weight)
        loss = reader(y)
        if recompute:
            checkpoint.discard_output_and_register_recompute(loss)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
            inside = autocast_state()
            result = gradients(loss, [x, weight])
            assert autocast_state() == inside
        return result

    assert_equal(run(True), run(False))
    assert states[0] == states[1] == states[2]
    assert not states[0][0]


def test_r03_autocast_is_put_back_when_the_replay_raises():
    calls = []

    def breaks(x):
        calls.append(1)
        if len(calls) > 1:
            raise ArithmeticError("broken replay")
        return x.tanh()

    x = normal(0, 3, 4)
    checkpoint = CheckpointWithoutOutput()
    with torch.autocast("cpu", torch.bfloat16):
        loss = reader(checkpoint.checkpoint(breaks, x))
        checkpoint.discard_output_and_register_recompute(loss)
    outside = autocast_state()
    with pytest.raises(ArithmeticError, match="broken replay"):
        gradients(loss, [x])
    assert autocast_state() == outside


def test_r03_a_cast_cached_before_the_call_is_made_again_in_the_replay():
    def run(recompute):
        x, weight = normal(0, 4, 8, dtype=torch.float32), normal(1, 8, 8, dtype=torch.float32)
        checkpoint = CheckpointWithoutOutput()

        def project(h):
            return F.linear(h, weight).tanh()

        with torch.autocast("cpu", torch.bfloat16):
            h = F.linear(x, weight)
            y = checkpoint.checkpoint(project, h) if recompute else project(h)
            loss = F.linear(y, weight).float()
            if recompute:
                checkpoint.discard_output_and_register_recompute(loss)
            return gradients(loss, [x, weight])

    assert_equal(run(True), run(False))


@pytest.mark.parametrize("layout", ["known", "unknown"])
@pytest.mark.parametrize("normals", [0, 1])
def test_every_kind_of_draw_from_numpys_generator_is_noticed(normals, layout, monkeypatch):
    if layout == "unknown":
        monkeypatch.setattr(state, "_GAUSS_OFFSET", None)
    assert (state._numpy_gauss() == b"") == (layout == "unknown")
    for draw in (
        np.random.rand,
        lambda: np.random.rand(312),  # two words each: the position is the same afterwards
        np.random.standard_normal,  # the second of a pair, if one is drawn before, changes no memory
        lambda: np.random.seed(1),
    ):
        np.random.seed(0)
        np.random.standard_normal(normals)
        snapshot = NumpyState()
        assert snapshot.is_current()
        expected = np.random.standard_normal(5)
        np.random.set_state(snapshot.state)
        assert snapshot.is_current()
        draw()
        assert not snapshot.is_current()
        np.random.set_state(snapshot.state)
        assert snapshot.is_current()
        assert (np.random.standard_normal(5) == expected).all()


@pytest.mark.parametrize("layout", ["known", "unknown"])
@pytest.mark.parametrize("normals", [0, 1])
def test_every_kind_of_draw_from_pythons_generator_is_noticed(normals, layout, monkeypatch):
    if layout == "unknown":
        monkeypatch.setattr(state, "_PYTHON_OFFSET", None)
    assert (state._python_memory() == b"") == (layout == "unknown")
    for draw in (
        random.random,
        lambda: random.gauss(0.0, 1.0),  # the second of a pair, if one is drawn before, changes no word
        lambda: [random.getrandbits(32) for _ in range(624)],  # the position is the same afterwards
        lambda: random.seed(1),
    ):
        random.seed(0)
        for _ in range(normals):
            random.gauss(0.0, 1.0)
        snapshot = PythonState()
        assert snapshot.state == random.getstate()
        assert snapshot.is_current()
        draw()
        assert not snapshot.is_current()
        random.setstate(snapshot.state)
        assert snapshot.is_current()
        assert snapshot.state == random.getstate()
