"""Fixtures of every test of recompute: what was replayed, both ways of refilling, and nothing left behind."""

import gc

import pytest
import torch

from reference_torch.recompute import internals
from reference_torch.recompute import region as slots_module
from reference_torch.recompute.region import in_replay
from tests.recompute.support import normal, traced, without_exchange


@pytest.fixture
def trace():
    with traced() as trace:
        yield trace


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """No slot, hook, autocast, replay state or changed grad mode outlives a test."""
    before = set(slots_module._slots)
    yield
    if not set(slots_module._slots) <= before:  # an exception's traceback, or the queue of the backward it ended
        torch.autograd.grad(normal(0, 2).exp().prod(), normal(0, 2), allow_unused=True)
        gc.collect()
    assert set(slots_module._slots) <= before
    assert internals.outer_saved_tensor_hooks() is None
    assert not in_replay()
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


@pytest.fixture(params=["exchange", "copy"])
def refill(request, monkeypatch) -> str:
    """Both ways of giving a storage its memory back."""
    if request.param == "copy":
        without_exchange(monkeypatch)
    elif not internals.HAS_SWAP:
        pytest.skip("this PyTorch cannot exchange the memory of storages")
    return request.param
