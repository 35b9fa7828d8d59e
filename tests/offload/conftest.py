"""What tests of JAX's offload have in common."""

import pytest

from jax_impl import ops


@pytest.fixture
def quick(monkeypatch):
    """Random numbers of fewer rounds: here it is the order that counts."""
    monkeypatch.setattr(ops, "ROUNDS", 3)
